"""Weights of tokens in the loss: `loss=eaft`, `loss=rho1`, `loss=flow`, on every kind of model and method."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cpt.models import chunked_head
from cpt.models.forward import set_mode, token_nll
from cpt.models.options import EntropyWeightsOptions, SampleWeightsOptions
from cpt.models.token_weights import (
    EntropyWeights,
    SampleWeights,
    choose_highest,
    sample_losses,
    top_entropy,
)
from cpt.trainer.checkpoint import load_stage
from cpt.trainer.costs import CostMonitor
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import ORDER, load_model_weights

NEUTRAL = {  # options with which all tokens weigh 1, and options with which they do not
    "eaft": ("loss.alpha=0", "loss.alpha=1"),
    "rho1": ("loss.share=1", "loss.share=0.5"),
    "flow": ("loss.temperature=null", "loss.temperature=2"),
}
WITHOUT_DROPOUT = [f"model.config.{name}_pdrop=0" for name in ("resid", "embd", "attn")]


def gradients_of(module, batches):
    """The gradients of the sum of a module's losses on batches, as one vector."""
    module.zero_grad()
    for batch in batches:
        module.losses(batch)["lm"].backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.model.parameters()])


def test_entropies_are_those_of_the_released_code_over_the_logarithm_of_k():
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(0))
    expected = []
    for row in logits.double():
        likeliest = row.sort(descending=True).values[:20].softmax(0)
        expected.append(-(likeliest * likeliest.log()).sum() / math.log(20))
    torch.testing.assert_close(top_entropy(logits, k=20).double(), torch.stack(expected), rtol=1e-5, atol=0)
    uniform = top_entropy(torch.zeros(1, 5), k=20)  # of a vocabulary of 5
    torch.testing.assert_close(uniform, torch.ones(1))


def test_the_weight_of_a_sure_token_is_low_and_has_no_gradient():
    logits = torch.tensor([[4.0, 0.0, 0.0], [0.1, 0.0, 0.0]], requires_grad=True)
    batch = {"targets": torch.tensor([1, 1])}
    weights = EntropyWeights(EntropyWeightsOptions(alpha=2.0, top_k=3))
    weighted = weights.make_loss(batch, reference_nll=None)
    losses = weighted.loss(logits, slice(None))
    factors = top_entropy(logits.detach(), k=3) ** 2
    assert factors[0] < 0.1 < 0.9 < factors[1]
    torch.testing.assert_close(losses, factors * token_nll(logits, batch))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (plain,) = torch.autograd.grad(token_nll(logits, batch).sum(), logits)
    torch.testing.assert_close(gradient, factors[:, None] * plain)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.99])
def test_the_highest_of_each_group_are_chosen_and_the_first_of_equals(share):
    generator = torch.Generator().manual_seed(3)
    groups = torch.tensor([0] * 9 + [2] * 4 + [1])
    values = torch.randint(0, 4, (14,), generator=generator).float()
    chosen = choose_highest(values, groups, share=share)
    for group in range(3):
        tokens = (groups == group).nonzero().flatten().tolist()
        ranked = sorted(tokens, key=lambda token: -values[token])
        expected = set(ranked[: max(1, round(share * len(tokens)))])
        assert {token for token in tokens if chosen[token]} == expected


def test_a_sample_is_a_row_or_a_document_of_it():
    nll = torch.tensor([1.0, 3.0, 5.0, 8.0])
    batch = {"rows": torch.tensor([0, 0, 0, 1]), "positions": torch.tensor([0, 1, 3, 4])}
    losses, samples = sample_losses(nll, batch)
    assert losses[samples].tolist() == [3, 3, 3, 8]
    batch["segments"] = torch.tensor([[7, 7, -1, 9], [7, -1, -1, -1]])
    losses, samples = sample_losses(nll, batch)
    assert losses[samples].tolist() == [2, 2, 5, 8]


def test_the_temperature_is_the_median_of_the_bases_losses_and_samples_weigh_by_it():
    weights = SampleWeights(SampleWeightsOptions(temperature="median")).to(torch.bfloat16)  # as in bf16-true
    rows = torch.tensor([0, 0, 1, 2, 3])
    batch = {"rows": rows, "targets": torch.zeros(5, dtype=torch.long)}
    base_losses = torch.tensor([1.0, 3.0, 1.0, 4.0, 8.0])
    weights.before_domain([batch], lambda batch: base_losses)
    assert weights.temperature == 3  # of 2, 1, 4, 8, as numpy has it
    assert weights.temperature == np.median([2, 1, 4, 8])
    assert "temperature" in weights.state_dict()
    logits = torch.zeros(4, 2)
    losses = weights.make_loss(batch, lambda batch: base_losses).loss(logits, slice(1, 5))
    expected = [math.log(2) * math.exp(-loss / 3) for loss in (2, 1, 4, 8)]
    assert losses.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("loss", NEUTRAL)
@pytest.mark.parametrize("method", run_few(["ncl", "kd", "derpp", "das", "lifelong_moe", "lora"], ["ncl"]))
def test_at_neutral_strength_it_is_the_plain_loss_bit_for_bit(method, loss, build):
    neutral, strong = NEUTRAL[loss]
    weights = []
    for options in ([], [f"loss={loss}", neutral], [f"loss={loss}", strong]):
        run = build(method, "trainer.steps=2", "trainer.importance_samples=8", *options)
        run.learn(0)
        weights.append(run.weights())
    plain, neutral_weights, strong_weights = weights
    assert all(torch.equal(weight, neutral_weights[name]) for name, weight in plain.items())
    assert any(not torch.equal(weight, strong_weights[name]) for name, weight in plain.items())


@pytest.mark.parametrize("on", run_few(["causal", "masked", "both"], ["causal"]))
@pytest.mark.parametrize("loss", NEUTRAL)
def test_chunks_and_micro_batches_have_the_gradient_of_the_whole_batch(loss, on, build, monkeypatch):
    options = [f"loss={loss}", NEUTRAL[loss][1]]
    if loss == "rho1":
        options.append("loss.ranked=sequence")
    if on == "causal":
        options += WITHOUT_DROPOUT
    run = build("ncl", "model.config.dropout_rate=0" if on == "both" else "seed=0", *options, on=on)
    module = run.module
    with torch.no_grad():  # else a token's loss is the reference's, and none is above another
        for parameter in module.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    expected = gradients_of(module, run.batches())
    parts = gradients_of(module, run.batches(2, accumulate=2)) / 2
    torch.testing.assert_close(parts, expected, rtol=1e-4, atol=1e-6)

    vocabulary = module.model.get_output_embeddings().weight.shape[0]
    monkeypatch.setattr(chunked_head, "MAX_LOGITS", 5 * vocabulary)
    torch.testing.assert_close(gradients_of(module, run.batches()), expected, rtol=1e-4, atol=1e-6)


def test_rho1_trains_on_the_tokens_whose_loss_is_furthest_above_the_bases(build):
    run = build("ncl", "loss=rho1", "loss.share=0.25", *WITHOUT_DROPOUT, on="causal")
    module = run.module
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    [batch] = run.batches()
    nll = module.objective.nll(module.model, batch)
    excess = (nll - module.reference_nll(batch)).tolist()
    number = round(0.25 * len(excess))
    chosen = sorted(range(len(excess)), key=lambda token: -excess[token])[:number]
    loss = module.losses(batch)["lm"]
    expected = nll[chosen].sum() / (0.25 * len(excess))
    torch.testing.assert_close(loss, expected)
    assert module.nll(batch, 0)[0].tolist() == nll.tolist()  # evaluation is not weighted


def test_the_reference_is_the_base_also_of_isolated_documents_and_adapters(build):
    options = ["loss=flow", "loss.temperature=1", "domains.packing=document_mask", *WITHOUT_DROPOUT]
    run = build("lora", *options, on="causal")
    [batch] = run.batches()
    assert "segments" in batch
    with torch.no_grad(), set_mode(run.module.model, training=False):
        base = run.module.objective.nll(run.module.model, batch)
    torch.testing.assert_close(run.module.reference_nll(batch), base)
    run.learn(0)
    torch.testing.assert_close(run.module.reference_nll(batch), base)
    assert not torch.allclose(run.module.objective.nll(run.module.model, batch), base)


def test_a_reference_takes_a_forward_pass_more_and_entropies_none(build):
    operations = {}
    for options in ("loss=none", "loss=eaft", "loss=rho1"):
        monitor = CostMonitor()
        build("ncl", "trainer.steps=1", options, on="causal").learn(0, monitor)
        operations[options] = monitor.flops["step"]
    assert operations["loss=eaft"] == operations["loss=none"]
    assert 1.3 < operations["loss=rho1"] / operations["loss=none"] < 1.4


@pytest.mark.parametrize("loss", run_few(NEUTRAL, ["flow"]))
def test_killed_and_started_again_it_ends_with_the_same_bits_and_files_have_no_reference(
    loss, small_gpt2, start, killing, tmp_path
):
    cfg = small_gpt2("method=ncl", ORDER, f"loss={loss}", "trainer.steps=4")
    start(cfg, tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(cfg, tmp_path / "killed")
    killing(None)
    start(cfg, tmp_path / "killed")
    expected = load_model_weights(tmp_path / "whole")
    weights = load_model_weights(tmp_path / "killed")
    assert all(torch.equal(weight, weights[name]) for name, weight in expected.items())

    state = load_stage(next((tmp_path / "killed" / "stages").glob("*.pt")))
    outside = [name for name in state if not name.startswith("model.")]
    assert outside == (["token_weights.temperature"] if loss == "flow" else [])
    scores = json.loads((tmp_path / "killed" / "scores.json").read_text())
    assert scores["run"]["finished"]


def test_a_folder_is_the_reference_and_another_vocabulary_is_refused(small_gpt2, start, tmp_path):
    one_step = ["trainer.steps=1", "order=[law]"]
    start(small_gpt2("method=ncl", *one_step), tmp_path / "first")
    folder = tmp_path / "first" / "model"
    with_reference = small_gpt2("method=ncl", *one_step, "loss=rho1", f"loss.reference={folder}")
    start(with_reference, tmp_path / "second")
    assert json.loads((tmp_path / "second" / "scores.json").read_text())["run"]["finished"]

    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors of loss\.reference=.* changed"):
        start(with_reference, tmp_path / "second")
    with_other_tokens = small_gpt2(
        "method=ncl", *one_step, "loss=rho1", f"loss.reference={folder}", "model.vocab_size=310"
    )
    with pytest.raises(ValueError, match=r"loss\.reference=.* is invalid: its tokenizer has other tokens"):
        start(with_other_tokens, tmp_path / "third")


@pytest.mark.parametrize("fault", ["a tensor is missing", "no weights"])
def test_a_reference_whose_weights_are_not_all_there_is_refused(fault, small_gpt2, start, tmp_path):
    one_step = ["method=ncl", "trainer.steps=1", "order=[law]"]
    start(small_gpt2(*one_step), tmp_path / "first")
    folder = tmp_path / "first" / "model"
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    reason = "it has no weights"
    if fault == "a tensor is missing":
        del weights["transformer.h.1.mlp.c_fc.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        reason = r"lacks 1 tensor of those in config\.json: transformer\.h\.1\.mlp\.c_fc\.weight"
    with pytest.raises(ValueError, match=rf"loss\.reference=.* is invalid: .*{reason}.* Allowed: null"):
        start(small_gpt2(*one_step, "loss=rho1", f"loss.reference={folder}"), tmp_path / "second")


def test_a_method_that_leaves_the_weights_out_is_refused(small, start, tmp_path):
    cfg = small("method=ncl", "method._target_=tests.support.hook_methods.Companions", "loss=eaft")
    with pytest.raises(ValueError, match=r"loss=EntropyWeights is invalid with Companions: .*lm_loss"):
        start(cfg, tmp_path)
