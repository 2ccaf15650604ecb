"""Gates: their values and compensated gradients against formulas, where they act, and what is protected."""

import pytest
import torch
from torch import nn

from cpt.adapters.gates import Gate, anneal, attach_gates, list_bottleneck_units, regulariser, soft_gates
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.models.units import find_units
from tests.models.test_units import build, inputs_of, logits


@pytest.mark.parametrize("s", [1 / 400, 1.0, 400.0])
def test_the_gradient_is_compensated_exactly(s):
    e = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    weight = torch.linspace(1, 3, 25, dtype=torch.float64)
    [gradient] = torch.autograd.grad((soft_gates(e, s, s_max=400) * weight).sum(), e)
    [plain] = torch.autograd.grad((torch.sigmoid(s * e) * weight).sum(), e)
    paper = plain * 400 * (torch.cosh(s * e) + 1) / (s * (torch.cosh(e) + 1))
    safe = (s * e).abs() < 20
    assert safe.any()
    torch.testing.assert_close(gradient[safe], paper[safe].detach(), rtol=1e-6, atol=0)
    slope = torch.sigmoid(e) * torch.sigmoid(-e)
    torch.testing.assert_close(gradient, (400 * slope * weight).detach(), rtol=1e-9, atol=0)


def test_the_regulariser_by_hand():
    assert [anneal(p, s_max=400) for p in (0, 0.5, 1)] == pytest.approx([0.0025, 200.00125, 400])
    gates = torch.tensor([1.0, 0.5, 0.25, 0.0])
    claimed = torch.tensor([1.0, 0.0, 0.0, 0.0])
    cases = (
        (gates, claimed, 0.25),
        (claimed, claimed, 0),
        (torch.ones(4), claimed, 1),
        (torch.ones(4),) * 2 + (0,),
    )
    for gate_values, claimed_units, expected in cases:
        assert regulariser(gate_values, claimed_units).item() == pytest.approx(expected)


def test_a_gate_is_soft_in_training_and_hard_elsewhere():
    gate = Gate(3, s_max=400)
    gate.e.data.copy_(torch.tensor([-1.0, 0.1, 1.0]))
    x = torch.arange(12.0).view(2, 6)
    hard = x * torch.tensor([0.0, 0, 1, 1, 1, 1])
    assert torch.equal(gate(x), hard)
    gate.s = 0.5
    expected = x * torch.sigmoid(torch.tensor([-0.5, 0.05, 0.5])).repeat_interleave(2)
    torch.testing.assert_close(gate(x), expected)
    assert torch.equal(gate.eval()(x), hard)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
@torch.no_grad()
def test_folded_weights_need_no_gates(kind):
    model = build(kind).float()
    plain = build(kind).float()
    inputs = inputs_of(model)
    ungated = logits(model, inputs)
    torch.manual_seed(0)
    gates = attach_gates(model, find_units(model, ("heads", "neurons", "outputs")), s_max=400)
    chosen = gates.hard(dict(model.named_parameters()))
    assert 0 < chosen.sum() < len(chosen)
    before = logits(model, inputs)
    names = set(plain.state_dict())
    gates.fold(chosen)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in names})
    assert torch.equal(logits(plain, inputs), before) and torch.equal(logits(model, inputs), before)
    assert not torch.equal(ungated, before)


def test_factors_between_two_groups_are_one_minus_the_minimum():
    down = nn.Linear(3, 2)
    up = nn.Linear(2, 3)
    claimed = ClaimedUnits(list_bottleneck_units("a", down, up), apply_to="update")
    assert list(claimed.factors()) == []
    claimed.update_max(torch.tensor([1.0, 0.25, 0.5, 0.0, 0.5]))
    claimed.update_max(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))
    factors = {id(p): factor.expand(p.shape).tolist() for p, factor in claimed.factors()}
    assert len(factors) == 4
    assert factors[id(down.weight)] == [[0, 0, 0], [0.75, 0.75, 0.75]] and factors[id(down.bias)] == [0, 0.75]
    assert factors[id(up.weight)] == [[0.5, 0.75], [1, 1], [0, 0.75]] and factors[id(up.bias)] == [0.5, 1, 0]
