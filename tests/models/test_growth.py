"""A model that grows is the same function, and one that others can load."""

import pytest
import torch
from torch import Tensor, nn

from cpt.models import growth
from tests.models.test_units import FAMILIES, build, inputs_of, logits, loss

pytestmark = pytest.mark.slow

NOISE = 0.5
MODES = {
    "neurons": lambda model: growth.grow_neurons(model, 20, noise=NOISE),
    "many neurons": lambda model: growth.grow_neurons(model, 120, noise=NOISE),
    "heads": lambda model: growth.grow_heads(model, 4 // shared_by(model), noise=NOISE),
    "layers": lambda model: growth.grow_layers(model, 2),
    "hidden": lambda model: growth.grow_hidden(model, 2, noise=NOISE),
    "all": lambda model: [MODES[mode](model) for mode in ("hidden", "neurons", "layers")],
}
POST_NORM = ("bert", "roberta")
OWN_SIZE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "t5", "t5-gated")  # of heads
NAMES = [*POST_NORM, "modernbert", "gpt2", "gpt_neox", *OWN_SIZE]
EXACT = [
    (name, mode)
    for name in NAMES
    for mode in MODES
    if (mode != "heads" or name in OWN_SIZE) and (mode not in ("layers", "all") or name not in POST_NORM)
]


def shared_by(model: nn.Module) -> int:
    """Query heads of a key/value head."""
    return model.config.num_attention_heads // (
        getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    )


@torch.no_grad()
def outputs(model: nn.Module) -> Tensor:
    return logits(model, inputs_of(model)).double()


def drawn(seed: int = 0) -> None:
    torch.manual_seed(seed)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "mode"), EXACT)
def test_the_function_stays(name, mode, tied):
    for dtype, apart in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(name, tie_word_embeddings=tied).to(dtype)
        before, size = outputs(model), model.num_parameters()
        drawn()
        MODES[mode](model)
        assert model.num_parameters() > size
        assert before.std() > 0.1 and (outputs(model) - before).abs().max() < apart


@pytest.mark.parametrize("mode", ["heads", "hidden", "layers", "neurons"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "modernbert", "phi3", "t5-gated"])
def test_others_load_what_has_grown(name, mode, tmp_path):
    if (name, mode) not in EXACT and mode == "heads":
        pytest.skip("its heads have no size of their own")
    model = build(name)
    for _ in range(1 if mode == "heads" else 2):
        drawn()
        MODES[mode](model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert {n: p.shape for n, p in loaded.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert (outputs(loaded) - outputs(model)).abs().max() < 1e-6


def test_copies_get_gradients_of_their_own():
    """With equal shares they would learn the same for ever."""
    for noise, parted in ((0.0, False), (NOISE, True)):
        model = build("llama")
        drawn()
        growth.grow_neurons(model, 48, noise=noise)
        drawn()
        chosen = growth.draw_units(48, 48)  # what each of the new ones is a copy of, in the first block
        loss(model, inputs_of(model)).backward()
        up = model.model.layers[0].mlp.up_proj.weight
        assert torch.equal(up[48:], up[chosen])
        assert torch.allclose(up.grad[48:], up.grad[chosen]) != parted


def test_every_family_grows_or_is_refused():
    for name in FAMILIES:
        for mode in MODES:
            model = build(name)
            before = outputs(model)
            try:
                MODES[mode](model)
            except ValueError as error:
                assert "can not be grown" in str(error)
                assert mode not in ("neurons", "layers") or name == "bloom"
                continue
            exact = (outputs(model) - before).abs().max() < 1e-5
            assert exact or mode in ("layers", "all")
