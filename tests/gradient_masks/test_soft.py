"""Importances against loops, the authors' numbers, and what the released code got wrong."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from cpt.data.collate import labels_of
from cpt.gradient_masks import soft as module
from cpt.gradient_masks.soft import (
    Proxy,
    SoftMask,
    gate_gradients,
    measure_importance,
    normalize,
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
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"vocab_size": 60, "max_position_embeddings": 40, "pad_token_id": 1, "initializer_range": 0.2}
    rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
    return RobertaForMaskedLM(RobertaConfig(**{**shape, **sizes}, **rates))


def mask_over(model, *kinds: str, **given) -> SoftMask:
    return SoftMask(model, kinds=kinds, **({"apply_to": "update", "normalize": "rank"} | given))


def batch_of(samples: int, *, length: int = 12, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids with three labels per sample; the last sample is padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 60, (samples, length), generator=draw)
    labels, present = torch.full_like(ids, -100), torch.ones_like(ids)
    for row in range(samples):
        where = torch.randperm(length - 4, generator=draw)[:3]
        labels[row, where] = torch.randint(5, 60, (3,), generator=draw)
    present[-1, -4:] = 0
    ids[-1, -4:] = 1
    return forward_passes.make_batch(ids, labels, present)


def assert_near(found, expected, *, rtol=1e-4, atol=1e-6) -> None:
    torch.testing.assert_close(found, torch.from_numpy(expected), rtol=rtol, atol=atol)


@needs_golden
@pytest.mark.parametrize("kind", KINDS)
def test_importances_and_gated_passes_are_those_of_the_authors_code(kind):
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attn_implementation": "eager"}
    model = RobertaForMaskedLM.from_pretrained(GOLDEN / "tiny_a", **quiet).train()
    names = ("das_importance_mlm", "das_accumulate", "das_forward_masked", "batches")
    arrays, stages, passes, ids = (np.load(GOLDEN / f"{name}.npz") for name in names)
    groups = find_units(model, [KINDS[kind]])
    if kind == "intermediate":  # the released code gates neurons before their activation function
        pairs = zip(groups, model.roberta.encoder.layer, strict=True)
        groups = [replace(group, gate=layer.intermediate.dense, side="out") for group, layer in pairs]

    def golden_batch(name: str) -> dict[str, torch.Tensor]:
        fields = (ids[f"{name}_{field}"] for field in ("inputs_ori_ids", "labels", "attention_mask"))
        return forward_passes.make_batch(*(torch.from_numpy(field).long() for field in fields))

    def shares_of_the_batch_mean(model, batch):
        """What each sample adds to the batch's mean loss, as the released code sums it."""
        values, (samples, _) = token_nll(model, batch), batch["input_ids"].shape
        return torch.stack([values[batch["rows"] == row].sum() for row in range(samples)]) / len(values)

    for batch in ("d0_b0", "d1_b1"):
        given, theirs = golden_batch(batch), arrays[f"raw_{batch}_{kind}"]
        ours = gate_gradients(model, groups, given, shares_of_the_batch_mean, passes=1).sum(0)
        scaled = ours.view(theirs.shape) / given["attention_mask"].sum()
        assert_near(scaled, theirs, atol=1e-6 * float(np.abs(theirs).max()))
    raw = torch.from_numpy(arrays[f"raw_one_batch_{kind}"])
    assert_near(
        torch.stack([normalize(layer, "tanh_abs") for layer in raw]), arrays[f"norm_one_batch_{kind}"]
    )
    soft = mask_over(model, KINDS[kind], normalize="tanh_abs")
    for number in range(3):
        layers = torch.from_numpy(stages[f"in{number}_{kind}"])
        soft.update_max(torch.cat([normalize(layer, "tanh_abs") for layer in layers]))
    assert_near(soft.importance, stages[f"acc_{kind}"].flatten())
    gates = dict(zip([each.name for each in groups], torch.from_numpy(passes[f"impt_{kind}"]), strict=True))
    inputs = {"input_ids": torch.from_numpy(ids["d1_b0_inputs_ori_ids"]).long()}
    inputs["attention_mask"] = golden_batch("d1_b0")["attention_mask"]
    with torch.no_grad(), gate_units(groups, gates):
        hidden = model.roberta(**inputs).last_hidden_state
    present = inputs["attention_mask"].bool()
    assert_near(hidden[present], passes[f"only_{kind}_h3"][present.numpy()], atol=1e-5)


@pytest.mark.parametrize("kinds", [["neurons", "tokens"], ["heads", "outputs"]])
def test_one_backward_pass_gives_every_samples_gradient(kinds):
    model, batch = roberta().double().eval(), batch_of(4)
    groups = find_units(model, kinds)
    ours = gate_gradients(model, groups, batch, domain_losses, passes=1)
    for row in range(4):
        ones = {each.name: torch.ones(each.count, dtype=torch.float64, requires_grad=True) for each in groups}
        alone = forward_passes.select_rows(batch, [row])
        with gate_units(groups, ones):
            logits = model(input_ids=alone["input_ids"], attention_mask=alone["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[0], labels_of(alone)[0], ignore_index=-100)
        expected = torch.cat(torch.autograd.grad(loss, list(ones.values())))
        torch.testing.assert_close(ours[row].double(), expected, rtol=1e-4, atol=1e-8)
    assert ours.abs().max() > 1e-4
    labels = labels_of(batch)
    labels[1] = -100  # a sample without scored positions counts as zero
    unscored = forward_passes.make_batch(batch["input_ids"], labels)
    assert sample_means(torch.arange(1.0, 10.0), unscored).tolist() == [2.0, 0.0, 5.0, 8.0]


def test_importance_is_a_mean_of_absolute_values(monkeypatch):
    model = roberta().eval()
    groups, batches = find_units(model, ["heads", "neurons"]), [batch_of(4), batch_of(3, seed=1)]
    scores = measure_importance(model, groups, batches, domain_losses)

    def flipped(model, batch):
        losses = domain_losses(model, batch)
        return losses * torch.tensor([-1.0, 1.0, 1.0, -1.0])[: len(losses)]

    idle = batch_of(3, seed=2) | {"idle": torch.ones(1)}
    for given in (batches[::-1] * 2, [*batches, idle]):
        torch.testing.assert_close(measure_importance(model, groups, given, domain_losses), scores)
    torch.testing.assert_close(measure_importance(model, groups, batches, flipped), scores)
    by_batch = [gate_gradients(model, groups, each, domain_losses, passes=1).abs().sum(0) for each in batches]
    torch.testing.assert_close(sum(by_batch) / 7, scores)
    assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.setattr(module, "all_reduce_sum", lambda *tensors: [each.mul_(2) for each in tensors])
    torch.testing.assert_close(measure_importance(model, groups, batches, domain_losses), scores)


@pytest.mark.parametrize("compared", ["logits", "hidden"])
def test_the_proxy_compares_two_dropout_passes_of_uncorrupted_text(compared, monkeypatch):
    model, batch, seen, raw = roberta(rate=0.2), batch_of(4), [], []
    model.register_forward_pre_hook(lambda m, a, k: seen.append(k["input_ids"].clone()), with_kwargs=True)

    class Text(Causal):
        def restore(self, batch):
            return {**batch, "input_ids": (batch["input_ids"] - 1).clamp_min(4)}

    proxy, soft = Proxy(model, Text(), compared=compared, rate=None), mask_over(model, "heads", "neurons")
    assert not Proxy(model, Text(), compared=None, rate=None).measure(soft, [batch]).any()
    monkeypatch.setattr(module, "normalize", lambda scores, how: raw.append(scores) or scores)
    torch.manual_seed(3)
    scores = proxy.measure(soft, [batch])
    assert torch.equal(seen[0], (batch["input_ids"] - 1).clamp_min(4).repeat(2, 1))
    assert scores.min() >= 0 and scores.max() > 1e-5
    if compared == "logits":
        torch.manual_seed(3)
        with torch.no_grad(), set_dropout(model, None):
            found = proxy.losses(model, batch)
            torch.manual_seed(3)
            twice = {"attention_mask": batch["attention_mask"].repeat(2, 1)}
            first, second = model(input_ids=seen[0], **twice).logits.log_softmax(-1).flatten(0, -2).chunk(2)
        kl = torch.nn.functional.kl_div(second, first, log_target=True, reduction="none").sum(1)
        torch.testing.assert_close(found, sample_means(kl[batch["positions"]], batch))
    group, step, expected = soft.groups[0], 1e-2, torch.zeros(4)
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
    scores, sd = torch.tensor([1.0, 2.0, 3.0, 6.0]), math.sqrt((4 + 1 + 0 + 9) / 3)
    z = [math.tanh((value - 3) / sd) for value in scores.tolist()]
    by_hand = {"tanh_abs": [abs(value) for value in z], "tanh_relu": [max(0.0, value) for value in z]}
    by_hand |= {"minmax": [0.0, 0.2, 0.4, 1.0], "rank": [0.0, 1 / 3, 2 / 3, 1.0]}
    for how, values in by_hand.items():
        assert normalize(scores, how).tolist() == pytest.approx(values)
        torch.testing.assert_close(normalize(scores * 1e-6, how), torch.tensor(values), rtol=1e-4, atol=1e-5)
        assert not normalize(torch.full((5,), 0.3), how).any() and not normalize(torch.ones(1), how).any()


def test_importances_are_normalised_within_a_layer_and_kind(monkeypatch):
    model = roberta()
    soft = mask_over(model, "heads", "neurons")
    sizes = [group.count for group in soft.groups]
    assert len(sizes) >= 4  # heads and neurons of two layers
    scores = [10.0**place * torch.rand(size) for place, size in enumerate(sizes)]
    monkeypatch.setattr(module, "measure_importance", lambda *arguments, **options: torch.cat(scores))
    expected = torch.cat([normalize(own, soft.normalize) for own in scores])
    measured = soft.measure(model, [], domain_losses)
    torch.testing.assert_close(measured, expected)
    for own in measured.split(sizes):
        assert own.max() > 0.5  # no group is small beside another


@pytest.mark.parametrize("columns", [["heads", "neurons"], []])
def test_factors_follow_the_importances(columns):
    model, found = roberta(), {}
    soft = mask_over(model, "heads", "neurons", "outputs", columns=columns)
    one, other = torch.rand(2, len(soft.importance))
    for scores in (one, other, one):
        soft.update_max(scores)
    assert torch.equal(soft.importance, torch.maximum(one, other))  # it only rises
    heads, neurons, outputs = (1 - soft.gates()[group.name] for group in soft.groups[:3])
    for parameter, factor in soft.factors():
        found[parameter] = found.get(parameter, 1) * factor.expand_as(parameter)
    layer, rows = model.roberta.encoder.layer[0], heads.repeat_interleave(8)[:, None].expand(32, 32)
    up, down, inner = layer.intermediate.dense, layer.output.dense, layer.attention.self
    read = neurons if columns else torch.ones(48)
    expected = {up.weight: neurons[:, None].expand(48, 32), up.bias: neurons}
    expected |= {down.weight: outputs[:, None] * read, down.bias: outputs}  # by both
    for each in (inner.query, inner.key, inner.value):
        expected |= {each.weight: rows, each.bias: rows[:, 0]}
    expected |= {layer.attention.output.dense.weight: rows.T} if columns else {}
    assert expected.keys() == found.keys() & {*layer.parameters()}
    for parameter, factor in expected.items():
        torch.testing.assert_close(found[parameter], factor)
    state = clone_tensors(soft.state_dict())
    soft.set_importance(torch.zeros(len(soft.importance)))
    assert all((factor == 1).all() for _, factor in soft.factors())
    soft.load_state_dict(state)
    soft.activate(0)
    assert not all((factor == 1).all() for _, factor in soft.factors())
