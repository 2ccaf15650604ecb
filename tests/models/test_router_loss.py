"""The losses of routers are those of transformers, of the batch's own text, and recorded once."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.data.collate import Sharing, select_inputs
from cpt.models.activation_checkpointing import checkpoint_activations
from cpt.models.objectives import Causal
from cpt.models.router_loss import (
    NO_ROUTER_LOSS,
    RouterWeights,
    check_router_loss,
    find_router_weights,
    make_router_loss,
)
from tests.support.mixtures import MIXTURES, SIZES, build_mixture, padded_batch


def record(model, batch, weights):
    """The terms of a batch whose pass is the first of three, and the loss of its targets, a scalar."""
    router_loss = make_router_loss(model, weights)
    with router_loss.recording(model):
        nll = Causal().nll(model, batch).mean()
        with torch.no_grad():
            Causal().nll(model, batch)
        Causal().nll(model, {**batch, "input_ids": batch["input_ids"].flip(0)})  # of replayed samples
    return router_loss.terms(1.0), nll


@pytest.mark.parametrize("model_type", MIXTURES)
def test_the_loss_is_that_of_transformers_without_padding(model_type):
    model = build_mixture(model_type)
    batch = padded_batch()
    terms, _ = record(model, batch, RouterWeights(0.5))
    expected = model(**select_inputs(batch), output_router_logits=True).aux_loss
    assert list(terms) == ["router_balance"]
    assert terms["router_balance"].item() == pytest.approx(0.5 * expected.item(), rel=1e-6)

    unmasked = model(batch["input_ids"], output_router_logits=True).aux_loss
    assert abs(unmasked - expected) > 1e-3


def test_samples_that_share_rows_have_the_same_loss():
    model = build_mixture("qwen3_moe").eval()
    batch = padded_batch()
    shared = Sharing(even=1).lay_out(batch)
    assert shared["layout"].numel() < batch["input_ids"].numel()
    unshared, _ = record(model, batch, RouterWeights(1, 1))
    shared_terms, _ = record(model, shared, RouterWeights(1, 1))
    for name, term in unshared.items():
        assert term.item() == pytest.approx(shared_terms[name].item(), rel=1e-5)


def test_the_z_loss_is_the_mean_over_tokens_and_routers():
    model = build_mixture("mixtral")
    batch = padded_batch()
    terms, _ = record(model, batch, RouterWeights(0, 0.1))
    logits = model(**select_inputs(batch), output_router_logits=True).router_logits
    is_token = batch["attention_mask"].flatten().bool()
    squares = torch.cat([layer[is_token].logsumexp(-1) ** 2 for layer in logits])
    assert list(terms) == ["router_z"]
    assert terms["router_z"].item() == pytest.approx(0.1 * squares.mean().item(), rel=1e-5)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_checkpointed_activations_give_the_same_gradients(model_type):
    gradients = []
    for checkpoints in (False, True):
        model = build_mixture(model_type)
        if checkpoints:
            checkpoint_activations(model.train())
        terms, nll = record(model, padded_batch(), RouterWeights(0.5, 0.1))
        (nll + sum(terms.values())).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("gate" in name or "router" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=0, atol=0, msg=name)


def test_nothing_is_recorded_outside():
    model = build_mixture("olmoe")
    router_loss = make_router_loss(model, RouterWeights(1))
    Causal().nll(model, padded_batch())
    assert router_loss.terms(1.0) == {}
    with router_loss.recording(model), torch.no_grad():
        Causal().nll(model, padded_batch())
    assert router_loss.terms(1.0) == {}


def test_auto_is_the_weight_of_the_config():
    config = build_mixture("mixtral", router_aux_loss_coef=0.02, router_z_loss_coef=0.001).config
    assert find_router_weights("auto", config) == RouterWeights(0.02, 0.001)
    assert find_router_weights(0.5, config) == RouterWeights(0.5, 0.001)
    assert find_router_weights(0, config) == NO_ROUTER_LOSS

    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    assert find_router_weights("auto", dense.config) == NO_ROUTER_LOSS
    check_router_loss(dense, "auto")
    with pytest.raises(
        ValueError, match=r"^model.router_aux_loss=0.1 is invalid: a llama .* Allowed: auto, 0$"
    ):
        check_router_loss(dense, 0.1)
