"""The gradients of the chosen rows alone: the same masks and gradients as those of all rows, scaled."""

from copy import deepcopy

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cpt.gradient_masks.base import recording
from cpt.models.memory import checkpoint_activations
from cpt.trainer.plan import make_plan
from cpt.trainer.preflight import prepare
from cpt.trainer.run_dir import RunDir
from tests.support import making, migu

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
STILL = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
FAMILIES = {  # gpt2: Conv1D, and Q, K, V in one map
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, **STILL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=60)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**SIZES, **QUIET, vocab_size=60)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5, vocab_size=60, dropout_rate=0.0)),
}
IDS = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))
BACKENDS = ("hooks", "backward")


def model(family):
    torch.manual_seed(0)
    return FAMILIES[family]()


def gradients(family, backend, *, change=lambda made: None, dtype=None, passes=1):
    """The raw gradients, their factors, and those scaled, by name."""
    made = model(family).train()
    change(made)
    mask = migu.watching(made, backend=backend)
    with recording([mask]), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = sum(made(input_ids=IDS + turn, labels=IDS).loss for turn in range(passes))
    loss.backward()
    named = {name: each for name, each in made.named_parameters() if each.grad is not None}
    raw, factors = {name: each.grad.clone() for name, each in named.items()}, dict(mask.factors())
    kept = {name: factors[each] for name, each in named.items() if each in factors}
    return raw, kept, {name: each * kept.get(name, 1) for name, each in raw.items()}


@pytest.mark.parametrize(
    ("family", "given"),
    [
        *((family, {}) for family in FAMILIES),
        ("gpt2", {"passes": 3}),  # of one loss, which are counted together
        ("roberta", {"dtype": torch.bfloat16}),
        ("roberta", {"change": checkpoint_activations}),
        ("roberta", {"change": lambda made: made.roberta.encoder.layer[0].requires_grad_(False)}),
    ],
)
def test_masks_and_gradients_are_those_of_the_hooks(family, given):
    """What was not chosen was not computed: 0 before the mask has come; what other weights get keeps its
    bits; frozen ones stay without a gradient."""
    (_, masks, expected), (raw, found, scaled) = (gradients(family, each, **given) for each in BACKENDS)
    near = 0.02 if "dtype" in given else 1e-6
    assert masks.keys() == found.keys() and expected.keys() == scaled.keys() and masks
    assert all(torch.equal(masks[name], found[name]) for name in masks)
    for name, value in expected.items():
        torch.testing.assert_close(value, scaled[name], rtol=near, atol=near, msg=name)
        assert name in masks or torch.equal(value, scaled[name]) or family != "roberta" or near > 0.01
        assert value.dtype == torch.float32
    for name, factor in found.items():
        assert raw[name].any() and not raw[name][(factor == 0).expand_as(raw[name])].any(), name


def test_passes_that_are_not_of_the_loss_are_as_ever():
    """A Fisher, a reference, parts to come, or a copy of the model that is trained beside it."""
    made = model("gpt2")
    mask, copy = migu.watching(made, backend="backward"), deepcopy(made)
    whole = lambda made: made.transformer.h[0].mlp.c_fc.weight.grad.any(0).all()  # noqa: E731
    made(input_ids=IDS, labels=IDS).loss.backward()
    assert whole(made)
    with recording([mask]), torch.no_grad():
        made(input_ids=IDS)
    assert not mask.limiting
    made.zero_grad()
    with recording([mask], alone=False):
        made(input_ids=IDS, labels=IDS).loss.backward()
    assert whole(made)
    made.zero_grad()
    with recording([mask]):
        loss = made(input_ids=IDS, labels=IDS).loss + copy(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert whole(copy) and not whole(made)


def test_a_map_that_fails_has_its_weight_back():
    made = model("roberta")
    mask, dense = migu.watching(made, backend="backward"), made.roberta.encoder.layer[0].intermediate.dense
    weight, mask.limiting = dense.weight, True
    with pytest.raises(RuntimeError):
        dense(torch.zeros(1, 7))
    assert dense.weight is weight
    assert deepcopy(made).roberta.encoder.layer[0].intermediate.dense.weight.requires_grad


LORA = ["method=lora", "mask.migu.threshold=0.5", "optim.lr=1"]
FISHER = ["mask.migu.importance=fisher", "mask.migu.threshold=0.5"]


@pytest.mark.parametrize("asked", [[], pytest.param(FISHER, marks=pytest.mark.campaign), LORA])
def test_a_run_ends_with_the_same_weights(asked, small, start, tmp_path):
    given = ["mask=migu", *asked, "order=[law]", "optim=sgd"]
    runs = {each: [*given, f"mask.migu.backend={each}"] for each in BACKENDS}
    runs["free"] = [*given, "mask.migu.threshold=0"]
    ends = {name: making.learned(start, small(*each), tmp_path / name) for name, each in runs.items()}
    making.assert_close(ends["hooks"], ends["backward"], rtol=1e-5, atol=1e-6)
    assert not making.same(ends["hooks"], ends["free"])


def test_parts_of_a_step_are_told(small, start, tmp_path, caplog):
    """And compiled blocks are refused."""
    caplog.set_level("INFO", logger="cpt")
    given = ["mask=migu", "mask.migu.backend=backward", "order=[law]"]
    start(small(*given, "trainer.accumulate_grad_batches=2"), tmp_path)
    assert "No effect of the mask's backend=backward" in caplog.text
    with pytest.raises(ValueError, match="trainer.compile=true does not go with backend=backward"):
        prepare(make_plan(small(*given, "trainer.compile=true")), RunDir(tmp_path))
