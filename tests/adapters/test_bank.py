"""A part per domain: kept, run, put back, saved, and never touched by what learns."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from cpt.adapters.domain_store import BASE, DomainParams

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


def test_what_is_kept_is_given_back_bit_for_bit(model):
    bank, base = DomainParams(model, NAMES), part(model)
    parts = []
    for domain in range(12):
        parts.append(moved(model, domain))
        bank.keep(model, domain)
    assert bank.domains == list(range(12))
    assert all(equal(bank.weights(domain), parts[domain]) for domain in range(12))
    assert equal(bank.weights(BASE), base)


def test_a_part_is_a_copy(model):
    """What learns after it was kept, in place as an optimizer does, changes no part."""
    bank = DomainParams(model, NAMES)
    base, first = part(model), moved(model, 1)
    bank.keep(model, 0)
    moved(model, 2)
    assert equal(bank.weights(0), first)
    assert equal(bank.weights(BASE), base)
    bank.put(model, 0)
    moved(model, 3)
    assert equal(bank.weights(0), first)


def test_a_copy_of_one_tensor_is_a_copy(model):
    bank = DomainParams(model, ["2.bias"])
    before = model.get_parameter("2.bias").detach().clone()
    bank.keep(model, 0)
    moved(model, 1)
    assert torch.equal(bank.weights(0)["2.bias"], before)
    assert torch.equal(bank.weights(BASE)["2.bias"], before)


def test_a_part_that_is_kept_again_replaces_the_old_one(model):
    bank = DomainParams(model, NAMES)
    bank.keep(model, 0)
    later = moved(model, 1)
    bank.keep(model, 0)
    assert bank.domains == [0] and equal(bank.weights(0), later)


def test_putting_changes_the_part_and_nothing_else(model):
    bank, base = DomainParams(model, NAMES), part(model)
    first = moved(model, 1)
    bank.keep(model, 0)
    moved(model, 2)
    rest, same = model.get_parameter("0.bias").detach().clone(), list(model.parameters())
    for domain, expected in ((0, first), (BASE, base)):
        bank.put(model, domain)
        assert equal(part(model), expected)
        assert torch.equal(model.get_parameter("0.bias"), rest)
    assert all(one is other for one, other in zip(model.parameters(), same, strict=True))
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


def test_running_a_part_is_putting_it(model):
    bank, x = DomainParams(model, NAMES), torch.randn(5, 3)
    moved(model, 1)
    bank.keep(model, 0)
    moved(model, 2)
    run = functional_call(model, bank.weights(0), (x,))
    bank.put(model, 0)
    assert torch.equal(run, model(x))


def test_parts_can_not_be_trained(model):
    bank = DomainParams(model, NAMES)
    bank.keep(model, 0)
    assert not list(bank.parameters())
    assert not any(value.requires_grad for domain in (0, BASE) for value in bank.weights(domain).values())


def test_another_base_than_the_model(model):
    given = moved(copy.deepcopy(model), 1)
    bank = DomainParams(model, NAMES, base=given)
    assert equal(bank.weights(BASE), given)
    given["2.bias"].zero_()
    assert bank.weights(BASE)["2.bias"].abs().min() > 0


def test_the_state_has_the_names_without_the_base(model):
    bank = DomainParams(model, NAMES)
    assert not bank.state_dict()
    for domain in (3, 0):
        moved(model, domain)
        bank.keep(model, domain)
    assert bank.domains == [0, 3]
    own = {name.replace(".", "/"): model.get_parameter(name).shape for name in NAMES}
    assert {name: value.shape for name, value in bank.state_dict().items()} == {
        f"{domain}:{name}": shape for domain in (3, 0) for name, shape in own.items()
    }


def test_parts_that_grow_have_what_there_was(model):
    bank = DomainParams(model, NAMES[:1])
    bank.keep(model, 0)
    bank.extend(model, NAMES)
    bank.keep(model, 1)
    other = DomainParams(model, NAMES[:1])
    other.load_state_dict(bank.state_dict())
    for each in (bank, other):
        assert [tuple(each.weights(domain)) for domain in (BASE, 0, 1)] == [NAMES[:1], NAMES[:1], NAMES]


@pytest.mark.parametrize("before", [[], [0], [0, 1, 2, 7], [5, 6]], ids=str)
def test_a_bank_becomes_what_the_state_holds(before, model):
    """With more domains than it has, with fewer, and with others."""
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


def test_two_banks_do_not_take_each_others_parts(model):
    banks = nn.ModuleDict({"bank": DomainParams(model, NAMES), "outer_bank": DomainParams(model, NAMES)})
    banks["bank"].keep(model, 0)
    banks["outer_bank"].keep(model, 4)
    fresh = nn.ModuleDict({"bank": DomainParams(model, NAMES), "outer_bank": DomainParams(model, NAMES)})
    fresh.load_state_dict(banks.state_dict())
    assert fresh["bank"].domains == [0] and fresh["outer_bank"].domains == [4]


def test_parts_go_where_the_model_goes(model):
    bank = DomainParams(model, NAMES)
    bank.keep(model, 0)
    bank.to("meta")
    assert all(value.is_meta for domain in (0, BASE) for value in bank.weights(domain).values())


@pytest.mark.filterwarnings("ignore:for 0.* copying from a non-meta parameter")
def test_what_is_loaded_is_put_on_the_banks_device(model):
    bank = DomainParams(model, NAMES)
    bank.keep(model, 0)
    other = DomainParams(model, NAMES).to("meta")
    other.load_state_dict(bank.state_dict())
    assert all(value.is_meta for value in other.weights(0).values())


def test_the_type_of_the_model_is_kept(model):
    bank = DomainParams(model.bfloat16(), NAMES)
    bank.keep(model, 0)
    assert {value.dtype for domain in (0, BASE) for value in bank.weights(domain).values()} == {
        torch.bfloat16
    }


def test_a_copy_of_the_bank_is_its_own(model):
    bank = DomainParams(model, NAMES)
    first = part(model)
    bank.keep(model, 0)
    other = copy.deepcopy(bank)
    for value in other.weights(0).values():
        value.zero_()
    assert equal(bank.weights(0), first)


def test_parts_are_isolated_from_adamw_with_weight_decay(model):
    bank = DomainParams(model, NAMES)
    first = part(model)
    bank.keep(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    bank.keep(model, 1)
    assert equal(bank.weights(0), first) and equal(bank.weights(BASE), first)
    assert not equal(bank.weights(1), first)


def test_parts_take_the_type_of_the_module():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    bank = DomainParams(model, ["0.weight", "1.bias"])
    bank.keep(model, 0)
    state = bank.state_dict()
    model.bfloat16()
    other = DomainParams(model, ["0.weight", "1.bias"])
    other.load_state_dict(state)
    assert {value.dtype for value in other.weights(0).values()} == {torch.bfloat16}
    assert torch.equal(other.weights(0)["0.weight"], model[0].weight)


def test_parts_of_mixed_types_keep_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    bank = DomainParams(model, ["0.weight", "1.weight"])
    bank.keep(model, 0)
    assert [value.dtype for value in bank.weights(0).values()] == [torch.float32, torch.bfloat16]


def test_a_part_of_another_size_is_refused():
    small, large = nn.Linear(2, 2), nn.Linear(2, 3)
    bank = DomainParams(small, ["weight"])
    bank.keep(small, 0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        DomainParams(large, ["weight"]).load_state_dict(bank.state_dict())
