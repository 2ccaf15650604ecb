"""The gradients of the chosen rows alone: the same masks and gradients as those of all rows, scaled."""

import logging
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
IDS = torch.randint(4, 60, (3, 9), generator=torch.Generator().manual_seed(0))
BACKENDS = ("hooks", "backward")


def model(family):
    torch.manual_seed(0)
    if family == "gpt2":  # Conv1D, and Q, K, V in one map
        still = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=20, **still)
        )
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=60))
    if family == "roberta":
        still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return RobertaForMaskedLM(RobertaConfig(**SIZES, vocab_size=60, max_position_embeddings=20, **still))
    return T5ForConditionalGeneration(
        T5Config(
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            vocab_size=60,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def watching(made, backend, **values):
    return migu.watching(made, backend=backend, **values)


def gradients(family, backend, *, change=lambda made: None, dtype=None, passes=1, **values):
    """The raw gradients by name, their factors, and those scaled."""
    made = model(family).train()
    change(made)
    mask = watching(made, backend, **values)
    with recording([mask]), torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        loss = sum(made(input_ids=IDS + turn, labels=IDS).loss for turn in range(passes))
    loss.backward()
    raw = {name: each.grad.clone() for name, each in made.named_parameters() if each.grad is not None}
    factors = {id(weight): factor for weight, factor in mask.factors()}
    scaled = {
        name: each.grad * factors.get(id(each), 1)
        for name, each in made.named_parameters()
        if each.grad is not None
    }
    kept = {name: factors[id(each)] for name, each in made.named_parameters() if id(each) in factors}
    return raw, kept, scaled


def assert_alike(one, other, *, within=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=within, atol=within, msg=name)


@pytest.mark.parametrize("family", ["gpt2", "llama", "roberta", "t5"])
def test_masks_and_gradients_are_those_of_the_hooks(family):
    (_, masks, expected), (raw, found, scaled) = (gradients(family, each) for each in BACKENDS)
    assert masks.keys() == found.keys()
    assert all(torch.equal(masks[name], found[name]) for name in masks)
    assert_alike(expected, scaled)
    # What was not chosen was not computed: 0 before the mask has come.
    for name, factor in found.items():
        assert not raw[name][(factor == 0).expand_as(raw[name])].any(), name
        assert raw[name].any(), name


def test_what_other_weights_get_keeps_its_bits():
    (_, masks, expected), (_, _, scaled) = (gradients("roberta", each) for each in BACKENDS)
    others = [name for name in expected if name not in masks]
    assert len(others) > 10
    assert all(torch.equal(expected[name], scaled[name]) for name in others)


def test_several_passes_of_one_loss_are_counted_together():
    (_, masks, expected), (_, found, scaled) = (gradients("gpt2", each, passes=3) for each in BACKENDS)
    assert all(torch.equal(masks[name], found[name]) for name in masks)
    assert_alike(expected, scaled)


def test_in_mixed_precision_they_are_the_same_but_for_rounding():
    found = (gradients("roberta", each, dtype=torch.bfloat16) for each in BACKENDS)
    (_, masks, expected), (_, same, scaled) = found
    assert all(torch.equal(masks[name], same[name]) for name in masks)
    assert scaled["roberta.encoder.layer.0.output.dense.weight"].dtype == torch.float32
    assert_alike(expected, scaled, within=0.02)


def test_activations_may_be_computed_again():
    def economical(made):
        checkpoint_activations(made)

    (_, masks, expected) = gradients("roberta", "hooks")
    raw, found, scaled = gradients("roberta", "backward", change=economical)
    assert all(torch.equal(masks[name], found[name]) for name in masks)
    assert_alike(expected, scaled)
    assert (raw["roberta.encoder.layer.0.output.dense.weight"] == 0).any()


def test_frozen_weights_stay_without_a_gradient():
    def freeze(made):
        made.roberta.encoder.layer[0].requires_grad_(False)

    raw, _, _ = gradients("roberta", "backward", change=freeze)
    assert not any(".layer.0." in name for name in raw)
    assert any(".layer.1." in name for name in raw)


def test_passes_that_are_not_of_the_loss_are_as_ever():
    made = model("gpt2")
    mask = watching(made, "backward")
    made(input_ids=IDS, labels=IDS).loss.backward()  # outside of recording: a Fisher, a reference
    assert all(
        (each.grad != 0).any(0).all() for name, each in made.named_parameters() if "c_fc.weight" in name
    )
    with recording([mask]), torch.no_grad():
        made(input_ids=IDS)
    assert not mask.limiting


def test_with_parts_to_come_all_rows_are_computed():
    made = model("gpt2")
    mask = watching(made, "backward")
    with recording([mask], alone=False):
        made(input_ids=IDS, labels=IDS).loss.backward()
    assert made.transformer.h[0].mlp.c_fc.weight.grad.any(0).all()


def test_a_map_that_fails_has_its_weight_back():
    made = model("roberta")
    mask = watching(made, "backward")
    dense = made.roberta.encoder.layer[0].intermediate.dense
    weight = dense.weight
    mask.limiting = True
    with pytest.raises(RuntimeError):
        dense(torch.zeros(1, 7))
    assert dense.weight is weight
    assert deepcopy(made).roberta.encoder.layer[0].intermediate.dense.weight.requires_grad


def test_a_copy_of_the_model_that_is_trained_beside_it_has_all_its_gradients():
    made = model("gpt2")
    mask = watching(made, "backward")
    copy = deepcopy(made)
    with recording([mask]):
        loss = made(input_ids=IDS, labels=IDS).loss + copy(input_ids=IDS, labels=IDS).loss
    loss.backward()
    own, other = (each.transformer.h[0].mlp.c_fc.weight.grad for each in (made, copy))
    assert other.any(0).all()
    assert not own.any(0).all()


@pytest.mark.parametrize("importance", ["output", "fisher"])
def test_a_run_ends_with_the_same_weights(importance, small, start, tmp_path):
    asked = ["mask=migu", f"mask.migu.importance={importance}"]
    asked += ["mask.migu.threshold=0.5", "order=[law]", "optim=sgd"]
    ends = [
        making.learned(start, small(*asked, f"mask.migu.backend={each}"), tmp_path / each)
        for each in BACKENDS
    ]
    making.assert_close(*ends, rtol=1e-6, atol=1e-6)


def test_a_run_of_low_rank_pairs_ends_with_the_same_weights(small, start, tmp_path):
    asked = ["method=lora", "mask=migu", "mask.migu.threshold=0.5", "order=[law]", "optim=sgd", "optim.lr=1"]
    ends = [
        making.learned(start, small(*asked, f"mask.migu.backend={each}"), tmp_path / each)
        for each in BACKENDS
    ]
    making.assert_close(*ends, rtol=1e-5, atol=1e-7)
    free = making.learned(start, small(*asked, "mask.migu.threshold=0"), tmp_path / "free")
    pairs = [name for name in free if "lora_B" in name]
    assert pairs and not any(torch.allclose(free[name], ends[0][name], atol=1e-6) for name in pairs)


def test_parts_of_a_step_are_told(small, start, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="cpt"):
        cfg = small(
            "mask=migu", "mask.migu.backend=backward", "order=[law]", "trainer.accumulate_grad_batches=2"
        )
        start(cfg, tmp_path)
    assert "No effect of the mask's backend=backward" in caplog.text


def test_compiled_blocks_are_refused(small, tmp_path):
    cfg = small("method=migu", "method.mask.backend=backward", "trainer.compile=true")
    with pytest.raises(ValueError, match="trainer.compile=true does not go with backend=backward"):
        prepare(make_plan(cfg), RunDir(tmp_path))
