"""Samples that share rows: each is as if it had a row of its own, bit for bit whatever stands beside it."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, Sharing
from cpt.models.block_attention import inputs_for, try_isolation
from cpt.models.objectives import Causal, CausalAnswers

PADDED = CausalAnswers(Causal(), pad=1)
SHARED = CausalAnswers(Causal(), pad=1, sharing=Sharing(even=1))
WIDE = CausalAnswers(Causal(), pad=1, sharing=Sharing(even=10_000))  # in few rows, of several samples' length
LENGTHS = np.array([9, 30, 12, 21, 1, 5, 18, 25, 7, 3])
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0}
NEW = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 64, "vocab_size": 300},
}
MODELS = {
    "gpt2": {**OLD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": NEW,
    "mistral": {**NEW, "sliding_window": 6},  # a window that is shorter than samples
    "gpt_neox": {**NEW, "hidden_dropout": 0.0},
}
KERNELS = ("sdpa", "eager")


def model_of(kind: str, kernel: str | None = None, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes or MODELS[kind]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    with torch.no_grad():  # weights so large that what a sample sees matters
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return model


def rows_of(lengths=LENGTHS, *, changed: int | None = None) -> Rows:
    """Samples whose last third is their answer, every fourth of raw text; all ids of one may be changed."""
    draw = np.random.default_rng(0)
    ids = draw.integers(5, 300, (len(lengths), lengths.max()))
    if changed is not None:
        ids[changed] = 5 + (ids[changed] + 7) % 290
    columns = np.arange(ids.shape[1])
    ids[columns >= lengths[:, None]] = 1
    answers = (columns < lengths[:, None]) & (
        columns >= lengths[:, None] - np.maximum(1, lengths[:, None] // 3)
    )
    answers[3::4] = False
    return Rows(ids, lengths, sample_keys(7, np.arange(len(lengths))), answers)


def batch_of(objective, **how):
    batch, _ = objective.batch(rows_of(**how))
    batch["weight"] = torch.tensor(1 / len(batch["positions"]))
    return objective.lay_out(batch)


@pytest.mark.parametrize("objective", [SHARED, WIDE])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", MODELS)
def test_no_bit_of_a_sample_depends_on_another(kind, kernel, objective):
    """Every logit and hidden state, whichever of the others is changed."""
    model, one = model_of(kind, kernel).eval(), batch_of(objective)
    with torch.no_grad():
        logits, hidden = objective.outputs(model, one)
        for changed in range(len(LENGTHS)):
            again, anew = objective.outputs(model, batch_of(objective, changed=changed))
            other = one["rows"] != changed
            assert torch.equal(logits[other], again[other])
            assert not torch.equal(logits[~other], again[~other]) or not (~other).any()
            present = one["attention_mask"].bool()
            present[changed] = False
            assert torch.equal(hidden[present], anew[present])


@pytest.mark.parametrize("sharing", [SHARED, WIDE])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_the_padded_batch(kind, kernel, sharing):
    model = model_of(kind, kernel)
    found = []
    for objective in (PADDED, sharing):
        batch = batch_of(objective)
        nll = objective.nll(model, batch)
        grads = torch.autograd.grad(nll.sum() * batch["weight"], list(model.parameters()))
        found.append((nll, torch.cat([each.flatten() for each in grads])))
    (nll, gradient), (shared_nll, shared_gradient) = found
    assert len(nll) == len(shared_nll) and float(gradient.norm()) > 0.1
    torch.testing.assert_close(shared_nll, nll, rtol=1e-5, atol=1e-6)
    assert float((gradient - shared_gradient).norm() / gradient.norm()) < 1e-6


MANY = {name: value for name, value in NEW.items() if name != "num_key_value_heads"}
WRONG = {
    "bloom": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300}, "takes no positions"),
    "mpt": ({"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 300}, "takes no positions"),
    "mamba": (NEW, "carries a state from token to token"),
    "recurrent_gemma": (NEW, "carries a state from token to token"),
    "opt": ({**MANY, "ffn_dim": 64, "word_embed_proj_dim": 32}, "mixes the samples of a row"),
    "lfm2": ({**NEW, "layer_types": ["conv", "full_attention"]}, "mixes the samples of a row"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_model_that_cannot_keep_them_apart_is_refused(kind):
    sizes, why = WRONG[kind]
    model = model_of(kind, **sizes)
    with pytest.raises(
        ValueError, match=f"packing=isolated does not go with a {kind}, which {why}; allowed: "
    ):
        try_isolation(model, documents=False)


def without_anew(*given, **how):
    """Positions that count on through a row."""
    inputs, places = inputs_for(*given, **how)
    if "position_ids" in inputs:
        inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1]).expand_as(
            inputs["position_ids"]
        )
    return inputs, places


def one_late(*given, **how):
    """Samples that begin a token late, so that the first is the last of the one before."""
    inputs, places = inputs_for(*given, **how)
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"].roll(1, dims=1)
    return inputs, places


def unmasked(*given, **how):
    """All of a row is seen, by positions that are right."""
    inputs, places = inputs_for(*given, **how)
    return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}, places


@pytest.mark.parametrize("broken", [without_anew, one_late, unmasked])
def test_the_trial_sees_what_is_broken(broken, monkeypatch):
    model = model_of("gpt2")
    monkeypatch.setattr("cpt.models.block_attention.inputs_for", broken)
    with pytest.raises(ValueError, match="mixes the samples of a row"):
        try_isolation(model, documents=False)
