"""Importances against loops, the authors' numbers, and what the released code got wrong."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from cpt.data.collate import place_labels
from cpt.gradient_masks import soft as module
from cpt.gradient_masks.soft import (
    Proxy,
    SoftMask,
    gate_gradients,
    measure_importance,
    normalize_scores,
    sample_means,
)
from cpt.models.forward import set_dropout
from cpt.models.objectives import Causal
from cpt.models.units import find_units, gate_units
from tests.conftest import GOLDEN, needs_golden
from tests.support import forward_passes
from tests.support.forward_passes import token_nll
from tests.support.method_fixtures import clone_tensors

KINDS = {"head": "heads", "intermediate": "neurons", "output": "outputs"}
domain_losses = partial(module.domain_losses, objective=Causal())


def roberta(*, rate: float = 0.0, **sizes: int) -> RobertaForMaskedLM:
    torch.manual_seed(0)
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 60,
        "max_position_embeddings": 40,
        "pad_token_id": 1,
        "initializer_range": 0.2,
        "hidden_dropout_prob": rate,
        "attention_probs_dropout_prob": rate,
    }
    return RobertaForMaskedLM(RobertaConfig(**(fields | sizes)))


def mask_over(model, *kinds: str, normalize: str = "rank", columns: Sequence[str] = ("heads",)) -> SoftMask:
    return SoftMask(model, kinds=kinds, apply_to="update", normalize=normalize, columns=columns)


def batch_of(samples: int, *, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids with three labels per sample; the last sample is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (samples, length), generator=generator)
    labels = torch.full_like(ids, -100)
    for row in range(samples):
        columns = torch.randperm(length - 4, generator=generator)[:3]
        labels[row, columns] = torch.randint(5, 60, (3,), generator=generator)
    attention_mask = torch.ones_like(ids)
    attention_mask[-1, -4:] = 0
    ids[-1, -4:] = 1
    return forward_passes.make_batch(ids, labels, attention_mask)


def assert_near(values, expected, *, rtol=1e-4, atol=1e-6) -> None:
    torch.testing.assert_close(values, torch.from_numpy(expected), rtol=rtol, atol=atol)


def shares_of_the_batch_mean(model, batch):
    """What each sample adds to the batch's mean loss, as the released code sums it."""
    nll = token_nll(model, batch)
    samples = len(batch["input_ids"])
    return torch.stack([nll[batch["rows"] == row].sum() for row in range(samples)]) / len(nll)


@needs_golden
@pytest.mark.parametrize("kind", KINDS)
def test_importances_and_gated_passes_are_those_of_the_authors_code(kind):
    model = RobertaForMaskedLM.from_pretrained(
        GOLDEN / "tiny_a",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    ).train()
    golden_importances = np.load(GOLDEN / "das_importance_mlm.npz")
    golden_stages = np.load(GOLDEN / "das_accumulate.npz")
    golden_passes = np.load(GOLDEN / "das_forward_masked.npz")
    golden_batches = np.load(GOLDEN / "batches.npz")
    groups = find_units(model, [KINDS[kind]])
    if kind == "intermediate":  # the released code gates neurons before their activation function
        pairs = zip(groups, model.roberta.encoder.layer, strict=True)
        groups = [replace(group, gate=layer.intermediate.dense, side="out") for group, layer in pairs]

    def golden_batch(name: str) -> dict[str, torch.Tensor]:
        fields = [
            golden_batches[f"{name}_{field}"] for field in ("inputs_ori_ids", "labels", "attention_mask")
        ]
        return forward_passes.make_batch(*(torch.from_numpy(field).long() for field in fields))

    for name in ("d0_b0", "d1_b1"):
        batch = golden_batch(name)
        theirs = golden_importances[f"raw_{name}_{kind}"]
        ours = gate_gradients(model, groups, batch, shares_of_the_batch_mean, passes=1).sum(0)
        scaled = ours.view(theirs.shape) / batch["attention_mask"].sum()
        assert_near(scaled, theirs, atol=1e-6 * float(np.abs(theirs).max()))
    raw = torch.from_numpy(golden_importances[f"raw_one_batch_{kind}"])
    normalized = torch.stack([normalize_scores(layer, "tanh_abs") for layer in raw])
    assert_near(normalized, golden_importances[f"norm_one_batch_{kind}"])

    soft = mask_over(model, KINDS[kind], normalize="tanh_abs")
    for number in range(3):
        layers = torch.from_numpy(golden_stages[f"in{number}_{kind}"])
        soft.update_max(torch.cat([normalize_scores(layer, "tanh_abs") for layer in layers]))
    assert_near(soft.importance, golden_stages[f"acc_{kind}"].flatten())

    group_names = [group.name for group in groups]
    gates = dict(zip(group_names, torch.from_numpy(golden_passes[f"impt_{kind}"]), strict=True))
    ids = torch.from_numpy(golden_batches["d1_b0_inputs_ori_ids"]).long()
    attention_mask = golden_batch("d1_b0")["attention_mask"]
    with torch.no_grad(), gate_units(groups, gates):
        hidden = model.roberta(input_ids=ids, attention_mask=attention_mask).last_hidden_state
    is_token = attention_mask.bool()
    assert_near(hidden[is_token], golden_passes[f"only_{kind}_h3"][is_token.numpy()], atol=1e-5)


@pytest.mark.parametrize("kinds", [["neurons", "tokens"], ["heads", "outputs"]])
def test_one_backward_pass_gives_every_samples_gradient(kinds):
    model = roberta().double().eval()
    batch = batch_of(4)
    groups = find_units(model, kinds)
    ours = gate_gradients(model, groups, batch, domain_losses, passes=1)
    for row in range(4):
        gates = {}
        for group in groups:
            gates[group.name] = torch.ones(group.count, dtype=torch.float64, requires_grad=True)
        sample = forward_passes.select_rows(batch, [row])
        with gate_units(groups, gates):
            logits = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[0], place_labels(sample)[0], ignore_index=-100)
        expected = torch.cat(torch.autograd.grad(loss, list(gates.values())))
        torch.testing.assert_close(ours[row].double(), expected, rtol=1e-4, atol=1e-8)
    assert ours.abs().max() > 1e-4
    labels = place_labels(batch)
    labels[1] = -100  # a sample without scored positions counts as zero
    unscored = forward_passes.make_batch(batch["input_ids"], labels)
    assert sample_means(torch.arange(1.0, 10.0), unscored).tolist() == [2.0, 0.0, 5.0, 8.0]


def test_importance_is_a_mean_of_absolute_values(monkeypatch):
    model = roberta().eval()
    groups = find_units(model, ["heads", "neurons"])
    batches = [batch_of(4), batch_of(3, seed=1)]
    scores = measure_importance(model, groups, batches, domain_losses)

    def flipped_losses(model, batch):
        losses = domain_losses(model, batch)
        return losses * torch.tensor([-1.0, 1.0, 1.0, -1.0])[: len(losses)]

    idle = batch_of(3, seed=2) | {"idle": torch.ones(1)}
    for other_batches in (batches[::-1] * 2, [*batches, idle]):
        torch.testing.assert_close(measure_importance(model, groups, other_batches, domain_losses), scores)
    torch.testing.assert_close(measure_importance(model, groups, batches, flipped_losses), scores)
    gradients = [gate_gradients(model, groups, batch, domain_losses, passes=1) for batch in batches]
    sums = [batch_gradients.abs().sum(0) for batch_gradients in gradients]
    torch.testing.assert_close(sum(sums) / 7, scores)
    assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.setattr(module, "all_reduce_sum", lambda *tensors: [tensor.mul_(2) for tensor in tensors])
    torch.testing.assert_close(measure_importance(model, groups, batches, domain_losses), scores)


@pytest.mark.parametrize("compared", ["logits", "hidden"])
def test_the_proxy_compares_two_dropout_passes_of_uncorrupted_text(compared, monkeypatch):
    model = roberta(rate=0.2)
    batch = batch_of(4)
    seen_ids = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen_ids.append(kwargs["input_ids"].clone()), with_kwargs=True
    )

    class Text(Causal):
        def restore(self, batch):
            return {**batch, "input_ids": (batch["input_ids"] - 1).clamp_min(4)}

    proxy = Proxy(model, Text(), compared=compared, rate=None)
    soft = mask_over(model, "heads", "neurons")
    assert not Proxy(model, Text(), compared=None, rate=None).measure(soft, [batch]).any()
    monkeypatch.setattr(module, "normalize_scores", lambda scores, normalization: scores)
    torch.manual_seed(3)
    scores = proxy.measure(soft, [batch])
    assert torch.equal(seen_ids[0], (batch["input_ids"] - 1).clamp_min(4).repeat(2, 1))
    assert scores.min() >= 0 and scores.max() > 1e-5

    if compared == "logits":
        torch.manual_seed(3)
        with torch.no_grad(), set_dropout(model, None):
            losses = proxy.losses(model, batch)
            torch.manual_seed(3)
            attention_mask = batch["attention_mask"].repeat(2, 1)
            logits = model(input_ids=seen_ids[0], attention_mask=attention_mask).logits
        first, second = logits.log_softmax(-1).flatten(0, -2).chunk(2)
        kl = torch.nn.functional.kl_div(second, first, log_target=True, reduction="none").sum(1)
        torch.testing.assert_close(losses, sample_means(kl[batch["positions"]], batch))

    # The derivative by the gate of one unit, from differences.
    group = soft.groups[0]
    step = 1e-2
    expected = torch.zeros(4)
    for row in range(4):
        values = []
        for sign in (1, -1):
            gate = torch.ones(8, group.count)
            gate[[row, row + 4], 0] += sign * step
            torch.manual_seed(3)
            with torch.no_grad(), set_dropout(model, None), gate_units(soft.groups, {group.name: gate}):
                values.append(proxy.losses(model, batch)[row])
        expected[row] = (values[0] - values[1]) / (2 * step)
    assert scores[0].item() == pytest.approx(expected.abs().mean().item(), rel=0.05)


def test_normalisations_by_hand():
    scores = torch.tensor([1.0, 2.0, 3.0, 6.0])
    deviation = math.sqrt((4 + 1 + 0 + 9) / 3)
    tanh = [math.tanh((score - 3) / deviation) for score in scores.tolist()]
    by_hand = {
        "tanh_abs": [abs(value) for value in tanh],
        "tanh_relu": [max(0.0, value) for value in tanh],
        "minmax": [0.0, 0.2, 0.4, 1.0],
        "rank": [0.0, 1 / 3, 2 / 3, 1.0],
    }
    for normalization, values in by_hand.items():
        assert normalize_scores(scores, normalization).tolist() == pytest.approx(values)
        of_small_scores = normalize_scores(scores * 1e-6, normalization)
        torch.testing.assert_close(of_small_scores, torch.tensor(values), rtol=1e-4, atol=1e-5)
        assert not normalize_scores(torch.full((5,), 0.3), normalization).any()
        assert not normalize_scores(torch.ones(1), normalization).any()


def test_importances_are_normalised_within_a_layer_and_kind(monkeypatch):
    model = roberta()
    soft = mask_over(model, "heads", "neurons")
    sizes = [group.count for group in soft.groups]
    assert len(sizes) >= 4  # heads and neurons of two layers
    scores = [10.0**number * torch.rand(size) for number, size in enumerate(sizes)]
    monkeypatch.setattr(module, "measure_importance", lambda *arguments, **options: torch.cat(scores))
    expected = torch.cat([normalize_scores(group_scores, soft.normalize) for group_scores in scores])
    measured = soft.measure(model, [], domain_losses)
    torch.testing.assert_close(measured, expected)
    for group_scores in measured.split(sizes):
        assert group_scores.max() > 0.5  # no group is small beside another


@pytest.mark.parametrize("columns", [["heads", "neurons"], []])
def test_factors_follow_the_importances(columns):
    model = roberta()
    soft = mask_over(model, "heads", "neurons", "outputs", columns=columns)
    first, second = torch.rand(2, len(soft.importance))
    for scores in (first, second, first):
        soft.update_max(scores)
    assert torch.equal(soft.importance, torch.maximum(first, second))  # it only rises

    factors = {}
    for parameter, factor in soft.factors():
        factors[parameter] = factors.get(parameter, 1) * factor.expand_as(parameter)
    layer = model.roberta.encoder.layer[0]
    up = layer.intermediate.dense
    down = layer.output.dense
    attention = layer.attention.self
    heads, neurons, outputs = [1 - soft.gates()[group.name] for group in soft.groups[:3]]
    head_rows = heads.repeat_interleave(8)[:, None].expand(32, 32)
    neuron_columns = neurons if columns else torch.ones(48)
    expected = {
        up.weight: neurons[:, None].expand(48, 32),
        up.bias: neurons,
        down.weight: outputs[:, None] * neuron_columns,  # by both
        down.bias: outputs,
    }
    for projection in (attention.query, attention.key, attention.value):
        expected[projection.weight] = head_rows
        expected[projection.bias] = head_rows[:, 0]
    if columns:
        expected[layer.attention.output.dense.weight] = head_rows.T
    assert expected.keys() == factors.keys() & {*layer.parameters()}
    for parameter, factor in expected.items():
        torch.testing.assert_close(factors[parameter], factor)

    state = clone_tensors(soft.state_dict())
    soft.set_importance(torch.zeros(len(soft.importance)))
    assert all((factor == 1).all() for _, factor in soft.factors())
    soft.load_state_dict(state)
    soft.activate(0)
    assert not all((factor == 1).all() for _, factor in soft.factors())
