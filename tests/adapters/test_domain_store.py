"""A part per domain: kept, run, put back, saved, and never touched by what learns."""

from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpt.adapters.domain_store import BASE, DomainParams, Router
from cpt.adapters.options import Routing

NAMES = ("0.weight", "2.weight", "2.bias")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def part(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: model.get_parameter(name).detach().clone() for name in NAMES}


def moved(model: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Gives all of a model's parameters other values; its part then."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_()
    return part(model)


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_is_kept_is_given_back_bit_for_bit_and_putting_changes_nothing_else(model):
    bank, base, parts = DomainParams(model, NAMES), part(model), {}
    assert not bank.state_dict()
    for domain in (3, *range(3), 11):
        parts[domain] = moved(model, domain)
        bank.keep(model, domain)
    assert bank.domains == sorted(parts)
    own = {name.replace(".", "/"): model.get_parameter(name).shape for name in NAMES}
    assert {name: value.shape for name, value in bank.state_dict().items()} == {
        f"{domain}:{name}": shape for domain in parts for name, shape in own.items()
    }
    moved(model, 20)
    rest, same = model.get_parameter("0.bias").detach().clone(), list(model.parameters())
    for domain, expected in (parts | {BASE: base}).items():
        assert equal(bank.weights(domain), expected)
        bank.put(model, domain)
        assert equal(part(model), expected) and torch.equal(model.get_parameter("0.bias"), rest)
    assert all(one is other for one, other in zip(model.parameters(), same, strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("before", [[], [0, 1, 2, 7], [5, 6]], ids=str)
def test_a_bank_becomes_what_the_state_holds(before, model):
    bank, parts = nn.ModuleDict({"bank": DomainParams(model, NAMES)}), {}
    for domain in (0, 1, 11):
        parts[domain] = moved(model, domain)
        bank["bank"].keep(model, domain)
    state = bank.state_dict()
    other = nn.ModuleDict({"bank": DomainParams(model, NAMES), "other": nn.Linear(1, 1)})
    for domain in before:
        moved(model, 100 + domain)
        other["bank"].keep(model, domain)
    other.load_state_dict(state | {f"other.{name}": v for name, v in nn.Linear(1, 1).state_dict().items()})
    assert other["bank"].domains == [0, 1, 11]
    assert all(equal(other["bank"].weights(domain), parts[domain]) for domain in parts)
    for value in state.values():
        value.zero_()
    assert equal(other["bank"].weights(0), parts[0])


def test_another_text_starts_from_the_uniform_prior():
    nats = cycle([1.0, 3.0])  # of the parts in turn
    objective = SimpleNamespace(nll=lambda model, batch: torch.tensor([next(nats)]))
    how = {"learned": "posterior", "unlearned": "posterior", "prior": "updating", "decay": 1.0}
    routing = Routing(**how, cached=1, top_k=None, base=False)
    store = SimpleNamespace(domains=[0, 1], weights=lambda part: {})
    router, batch = Router(store, routing, objective), {"positions": torch.zeros(1), "rows": torch.zeros(1)}
    first, second, other = (router.nll(nn.Linear(1, 1), batch, text) for text in (0, 0, 1))
    assert second < first - 0.1 and torch.equal(other, first)
