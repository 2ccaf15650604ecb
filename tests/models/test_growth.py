"""A model that grows is the same function, and one that others can load."""

import copy

import pytest
import torch
from torch import Tensor, nn

from cpt.models import growth
from cpt.models.loading import build_model, is_tied, load_model, skeleton, train_tokenizer
from tests.models.test_units import build, inputs_of, logits, loss

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


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("name", "mode"), EXACT)
def test_the_function_stays(name, mode, tied):
    for dtype, apart in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = build(name, tie_word_embeddings=tied).to(dtype)
        before, size = outputs(model), model.num_parameters()
        torch.manual_seed(0)
        MODES[mode](model)
        assert model.num_parameters() > size
        assert before.std() > 0.1 and (outputs(model) - before).abs().max() < apart


@pytest.mark.parametrize(("name", "mode"), [case for case in EXACT if case[1] in ("heads", "all")])
def test_others_load_what_has_grown(name, mode, tmp_path):
    model = build(name)
    for _ in range(1 if mode == "heads" else 2):
        torch.manual_seed(0)
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
        torch.manual_seed(0)
        growth.grow_neurons(model, 48, noise=noise)
        torch.manual_seed(0)
        chosen = growth.draw_units(48, 48)  # what each of the new ones is a copy of, in the first block
        loss(model, inputs_of(model)).backward()
        up = model.model.layers[0].mlp.up_proj.weight
        assert torch.equal(up[48:], up[chosen])
        assert torch.allclose(up.grad[48:], up.grad[chosen]) != parted


@pytest.mark.parametrize("name", ["distilbert", "electra", "opt", "gemma2", "bart", "bloom"])
def test_every_other_family_grows_or_is_refused(name):
    for mode in MODES:
        model = build(name)
        before = outputs(model)
        try:
            MODES[mode](model)
        except ValueError as error:
            assert "can not be grown" in str(error) and (mode not in ("neurons", "layers") or name == "bloom")
            continue
        assert (outputs(model) - before).abs().max() < 1e-5 or mode in ("layers", "all")


# --- a tokenizer with more entries than the embedding has rows


ADDED = ["contract", "pasta", "section"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
CONFIGS = {
    "roberta": ("masked", {**SIZES, "max_position_embeddings": 64}),
    "deberta-v2": ("masked", SIZES),
    "gpt2": ("causal", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    "gpt_neox": ("causal", SIZES),  # its head is not tied
    "t5": ("span", T5),
    "t5 v1.1": ("span", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_head_stays_tied_or_untied(kind, tmp_path):
    """Rows are added to embedding and head, the same ones each time. transformers 5 says of every T5 that it
    is tied, and ties what it resizes."""
    objective, sizes = CONFIGS[kind]
    lines = ["the court finds that a party to this contract must pay", "fresh pasta with basil"]
    size = 400 if objective == "span" else 300
    words = train_tokenizer(iter(lines * 20), vocabulary=size, objective=objective)
    start = build_model({"model_type": kind.split()[0], **sizes}, words, objective, seed=0).eval()
    more, rows, tied = copy.deepcopy(words), len(words), is_tied(start)
    assert tied == (kind not in ("gpt_neox", "t5 v1.1")) and more.add_tokens(ADDED) == 3
    tables = start.get_input_embeddings(), start.get_output_embeddings()
    old = [each.weight.detach().clone() for each in tables]
    one, other = copy.deepcopy(start), copy.deepcopy(start)
    for number, each in enumerate((one, other)):
        torch.manual_seed(number)
        growth.fit_rows(each, more, checkpoint="x")
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and is_tied(one) == tied
    new = one.get_input_embeddings().weight, one.get_output_embeddings().weight
    assert all(torch.equal(table[:rows], before[:rows]) for table, before in zip(new, old, strict=True))
    assert {len(table) for table in new} == {rows + 3, growth.entries(more), one.config.vocab_size}
    inputs = {"input_ids": torch.tensor([more.convert_tokens_to_ids(ADDED)])}
    if objective == "span":
        inputs["decoder_input_ids"] = inputs["input_ids"]
        assert one.encoder.embed_tokens.weight is one.decoder.embed_tokens.weight is one.shared.weight
    one.save_pretrained(tmp_path)
    loaded, logits = load_model(tmp_path, objective).eval(), one(**inputs).logits
    assert is_tied(loaded) == tied and torch.equal(loaded(**inputs).logits, logits)
    assert logits.shape[-1] == rows + 3 and torch.isfinite(logits).all()
    assert {*skeleton(loaded).state_dict()} == {*loaded.state_dict()}
