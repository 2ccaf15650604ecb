"""Snapshots, quadratic penalties, swapped and frozen weights, and how far they moved."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from cpt.models.options import Freeze
from cpt.models.weights import Snapshot, frozen_parameters, measure_movement, quadratic_penalty, swap_weights
from tests.models.test_units import FAMILIES, build
from tests.support.making import ORDER


def values_of(model):
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def test_the_pull_is_the_weighted_sum_of_squares_of_what_is_trained():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    anchors, weights = ({n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in range(2))
    weights = {name: each.abs() for name, each in weights.items()}
    model[1].bias.requires_grad_(False)
    total = 0.0
    for name in set(anchors) - {"1.bias"}:
        numbers = (each.flatten().tolist() for each in (values_of(model)[name], anchors[name], weights[name]))
        total += sum(0.5 * w * (p - a) ** 2 for p, a, w in zip(*numbers, strict=True))
    value = quadratic_penalty(model, anchors, weights)
    assert value.item() == pytest.approx(total, rel=1e-5)
    (7 * value).backward()
    for name in set(anchors) - {"1.bias"}:
        p = model.get_parameter(name)
        torch.testing.assert_close(p.grad, 7 * weights[name] * (p - anchors[name]).detach())


def test_a_snapshot_moves_by_shares_and_takes_what_has_grown_and_its_state_goes_around():
    model = nn.Linear(2, 2)
    snapshot, before = Snapshot(model, persistent=True), values_of(model)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(1)
    snapshot.take(model, share=0.25)
    for name, stored in snapshot.named().items():
        torch.testing.assert_close(stored, before[name] + 0.25)
    snapshot.restore(model, share=0.5)
    for name, each in values_of(model).items():
        torch.testing.assert_close(each, before[name] + 0.625)
    model = nn.Sequential(model)
    young, old, before = Snapshot(model, persistent=True), Snapshot(model, persistent=True), values_of(model)
    model.append(nn.Linear(2, 2))
    grown = values_of(model)
    young.take(model, share=0.5)
    other = Snapshot(nn.Sequential(nn.Linear(2, 2)), persistent=True)
    other.load_state_dict(young.state_dict())
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    old.restore(model)
    assert old.named().keys() == before.keys()
    assert all(p.any() == (name in before) for name, p in model.named_parameters())
    other.restore(model)
    assert all(torch.equal(p, grown[name]) for name, p in model.named_parameters())


class Tied(nn.Module):
    """Two maps that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


@pytest.mark.parametrize("names", [["inner.weight"], ["inner.weight", "inner.bias"], []])
def test_swapped_weights_are_a_functional_call_leave_no_trace_and_get_the_gradients(names):
    model, x = Tied(), torch.randn(3, 4)
    own, state = list(model.parameters()), deepcopy(model.state_dict())
    weights = {name: torch.randn_like(model.get_parameter(name)).requires_grad_() for name in names}
    with swap_weights(model, weights):
        found = model(x)
    assert torch.equal(found, functional_call(model, weights, (x,)))
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    found.sum().backward()
    assert all(each.grad.any() for each in weights.values())
    assert all((each.grad is None) == (name in names) for name, each in model.named_parameters())


def frozen(model, **given):
    chosen = frozen_parameters(model, Freeze(**{"embeddings": False, "layers": 0, **given}))
    return {name for name, each in model.named_parameters() if any(each is one for one in chosen)}


def test_what_is_frozen_is_embeddings_or_all_but_what_names_or_expressions_mean():
    model, t5 = build("gpt2"), build("t5")
    every = {name for name, _ in model.named_parameters()}
    assert frozen(model, embeddings=True) == {"transformer.wte.weight", "transformer.wpe.weight"}
    last = {name for name in every if ".h.1." in name}
    assert every - frozen(model, only="attention") == {name for name in every if ".attn." in name}
    assert every - frozen(model, only=r"\.h\.1\.") == last
    norms = every - frozen(model, only="norms")
    assert every - frozen(model, only=["norms", r"\.h\.1\."]) == last | norms and not norms <= last
    parts = {f"{part}.{each}.weight" for part in ("SelfAttention", "EncDecAttention") for each in "qkvo"}
    kept = {name for name, _ in t5.named_parameters()} - frozen(t5, only="attention")
    assert {".".join(name.split(".")[-3:]) for name in kept} == parts


@pytest.mark.parametrize("method", ["das", "derpp"])
def test_frozen_weights_keep_their_bits_through_a_run(method, small, start, tmp_path):
    options = ["freeze.embeddings=true", "freeze.layers=1", "optim.weight_decay=0.3", "trainer.steps=4"]
    start(small(ORDER, f"method={method}", "keep_stages=true", *options), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    first, last = (torch.load(tmp_path / "stages" / f"00{n}.pt", weights_only=True) for n in (1, 2))
    kept = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert "model.model.embeddings.tok_embeddings.weight" in kept
    assert "model.model.layers.0.attn.Wqkv.weight" in kept
    assert "model.model.layers.1.attn.Wqkv.weight" not in kept


KINDS = {"attention", "other maps of blocks", "norms and biases"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_is_measured_alone(name, tied, tmp_path):
    model, table = build(name, tie_word_embeddings=tied).float(), f"{FAMILIES[name].table}.weight"
    model.save_pretrained(tmp_path / "same")
    same = measure_movement(model, tmp_path / "same")
    assert set(same) - {"head and the rest"} == KINDS | {"embeddings", "all"}
    assert (tied or "head and the rest" in same) and {*map(tuple, same.values())} == {(0, 0)}
    old, whole = values_of(model)[table], sum(each.square().sum() for each in values_of(model).values())
    with torch.no_grad():
        model.get_parameter(table).mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    with torch.no_grad():
        model.get_parameter(table).copy_(old)
    moved = measure_movement(model, tmp_path / "other")
    assert {kind for kind, (distance, _) in moved.items() if distance} == {"embeddings", "all"}
    distance, share = moved["all"]
    assert distance == pytest.approx(0.5 * float((old.square().sum() / whole).sqrt()), rel=1e-5)
    assert share == pytest.approx(old.count_nonzero() / sum(each.numel() for each in model.parameters()))


def test_what_has_no_counterpart_is_in_no_sum(tmp_path):
    build("gpt2", vocab_size=10).float().save_pretrained(tmp_path)
    assert set(measure_movement(build("gpt2").float(), tmp_path)) == KINDS
