"""Snapshots, quadratic penalties, swapped and frozen weights, and how far they moved."""

import copy
import json
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.models.options import Freeze
from cpt.models.weights import Snapshot, frozen_parameters, measure_movement, quadratic_penalty, swap_weights
from tests.models.test_units import FAMILIES, build
from tests.support.making import ORDER

SHAPES = [(3, 4), (5,), (2, 3, 2)]


def drawn() -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


class Holder(nn.Module):
    """A model of parameters by number."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        for number, each in enumerate(parameters):
            self.register_parameter(str(number), nn.Parameter(each.detach()))


def by_name(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): each for number, each in enumerate(tensors)}


def slow(parameters, anchors, weights) -> float:
    """1/2 sum_i w_i (p_i - a_i)^2, number by number."""
    total = 0.0
    for p, a, w in zip(parameters, anchors, weights, strict=True):
        for x, y, z in zip(p.flatten().tolist(), a.flatten().tolist(), w.flatten().tolist(), strict=True):
            total += 0.5 * z * (x - y) ** 2
    return total


def test_the_pull_is_the_weighted_sum_of_squares():
    model, anchors, weights = Holder(drawn()), drawn(), [w.abs() for w in drawn()]
    value = quadratic_penalty(model, by_name(anchors), by_name(weights))
    assert value.item() == pytest.approx(slow(model.parameters(), anchors, weights), rel=1e-5)
    (7 * value).backward()
    for p, a, w in zip(model.parameters(), anchors, weights, strict=True):
        torch.testing.assert_close(p.grad, 7 * w * (p - a).detach())


def test_what_is_not_trained_is_not_pulled():
    model, anchors, weights = Holder(drawn()), drawn(), [w.abs() for w in drawn()]
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    rest = [parameters[0], parameters[2]], [anchors[0], anchors[2]], [weights[0], weights[2]]
    assert quadratic_penalty(model, by_name(anchors), by_name(weights)).item() == pytest.approx(
        slow(*rest), rel=1e-5
    )


def test_a_snapshot_takes_what_has_grown_and_its_state_goes_around():
    model = nn.Sequential(nn.Linear(2, 2))
    young, old = Snapshot(model, persistent=True), Snapshot(model, persistent=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.append(nn.Linear(2, 2))
    grown = {name: p.detach().clone() for name, p in model.named_parameters()}
    young.take(model, share=0.5)
    other = Snapshot(nn.Sequential(nn.Linear(2, 2)), persistent=True)
    other.load_state_dict(young.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    old.restore(model)
    assert old.named().keys() == before.keys()
    assert all(p.any() == (name in before) for name, p in model.named_parameters())
    other.restore(model)
    assert all(torch.equal(p, grown[name]) for name, p in model.named_parameters())


def test_a_snapshot_moves_by_shares_and_back():
    model = nn.Linear(2, 2)
    snapshot = Snapshot(model, persistent=True)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    snapshot.take(model, share=0.25)
    for stored, old in zip(snapshot.buffers(), before, strict=True):
        torch.testing.assert_close(stored, old + 0.25)
    snapshot.restore(model, share=0.5)
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old + 0.625)
    snapshot.take(model)
    for p, stored in zip(model.parameters(), snapshot.buffers(), strict=True):
        assert torch.equal(p, stored)


class Tied(nn.Module):
    """Two maps that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


X = torch.randn(3, 4)


@pytest.mark.parametrize("names", [["inner.weight"], ["outer.bias"], ["inner.weight", "inner.bias"], []])
def test_it_is_a_functional_call_and_leaves_no_trace(names):
    model = Tied()
    own, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    weights = {name: torch.randn_like(model.get_parameter(name)) for name in names}
    with swap_weights(model, weights):
        found = model(X)
    assert torch.equal(found, functional_call(model, weights, (X,)))
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_gradients_go_to_the_weights_that_are_given():
    model, weight = Tied(), torch.randn(4, 4, requires_grad=True)
    with swap_weights(model, {"inner.weight": weight}):
        loss = model(X).sum()
    loss.backward()
    assert weight.grad.any() and model.inner.weight.grad is None and model.inner.bias.grad.any()


def names(model: torch.nn.Module, freeze: Freeze) -> set[str]:
    chosen = {id(parameter) for parameter in frozen_parameters(model, freeze)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=20, n_positions=8))


def test_embeddings_take_tokens_and_positions():
    assert names(gpt2(), Freeze(embeddings=True, layers=0)) == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 20}
    return T5ForConditionalGeneration(T5Config(**sizes))


def trained(model: torch.nn.Module, only: object) -> set[str]:
    return {name for name, _ in model.named_parameters()} - names(
        model, Freeze(embeddings=False, layers=0, only=only)
    )


def test_only_attention_is_its_maps():
    assert trained(gpt2(), "attention") == {name for name, _ in gpt2().named_parameters() if ".attn." in name}
    expected = {
        f"{part}.{letter}.weight" for part in ("SelfAttention", "EncDecAttention") for letter in "qkvo"
    }
    assert {".".join(name.split(".")[-3:]) for name in trained(t5(), "attention")} == expected


def test_only_what_a_regular_expression_or_a_list_means():
    last = trained(gpt2(), r"\.h\.2\.")
    assert last == {name for name, _ in gpt2().named_parameters() if ".h.2." in name}
    assert trained(gpt2(), ["norms", r"\.h\.2\."]) == last | trained(gpt2(), "norms")


@pytest.mark.parametrize("method", ["ncl", "das", "ewc", "derpp"])
def test_frozen_weights_keep_their_bits_through_a_run(method, small, start, tmp_path):
    frozen = ["freeze.embeddings=true", "freeze.layers=1", "optim.weight_decay=0.3"]
    start(small(ORDER, f"method={method}", "keep_stages=true", *frozen), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    first, last = (torch.load(tmp_path / "stages" / f"00{n}.pt", weights_only=True) for n in (1, 2))
    kept = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert "model.model.embeddings.tok_embeddings.weight" in kept
    assert "model.model.layers.0.attn.Wqkv.weight" in kept
    assert "model.model.layers.1.attn.Wqkv.weight" not in kept


KINDS = {"attention", "other maps of blocks", "norms and biases"}


def saved(model, folder, change=lambda model: None, **how):
    """The folder of a copy that a change was made to."""
    other = deepcopy(model)
    with torch.no_grad():
        change(other)
    other.save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_is_measured_alone(name, tied, tmp_path):
    model = build(name, tie_word_embeddings=tied).float()
    same = measure_movement(model, saved(model, tmp_path / "same"))
    assert set(same) - {"head and the rest"} == KINDS | {"embeddings", "all"}
    assert tied or "head and the rest" in same
    assert {*map(tuple, same.values())} == {(0, 0)}
    table = FAMILIES[name].table
    folder = saved(model, tmp_path / "other", lambda other: other.get_parameter(f"{table}.weight").mul_(1.5))
    moved = measure_movement(model, folder)
    assert {kind for kind, (distance, _) in moved.items() if distance} == {"embeddings", "all"}
    distance, share = moved["all"]
    old = model.get_parameter(f"{table}.weight").detach()
    whole = sum(each.detach().square().sum() for each in model.parameters())
    assert distance == pytest.approx(0.5 * float((old.square().sum() / whole).sqrt()), rel=1e-5)
    assert share == pytest.approx(old.count_nonzero() / sum(each.numel() for each in model.parameters()))


def test_what_has_no_counterpart_is_in_no_sum(tmp_path):
    model, narrow = build("gpt2").float(), build("gpt2", vocab_size=10).float()
    moved = measure_movement(model, saved(narrow, tmp_path))
    assert set(moved) == KINDS
