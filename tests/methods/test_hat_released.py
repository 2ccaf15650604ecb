"""HAT against the numbers of the released code (ContinualLM): gates, masks, regulariser and gradients of its
adapters, whose linear maps are two each, fc1 and fc2, both gated at their outputs.

Its gates at s_max are not binarised; here its values are put in as they are."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cpt.adapters.gates import anneal, hard, regulariser, soft
from cpt.gradient_masks.hat import ClaimedUnits
from cpt.models.units import Part, Units, shared_members
from tests.conftest import SHARED

GOLDEN = SHARED / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the released code's numbers are not here")
STEPS = {"t0": (0, 3), "t0_s0": (0, 0), "t1": (1, 3)}  # the domain and the step of 10


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in np.load(GOLDEN / "hat_adapter.npz").items()}


@pytest.fixture(scope="module")
def settings() -> dict:
    return json.loads((GOLDEN / "hat_adapter.json").read_text())["settings"]


def under(arrays: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(f"{prefix}/"): a for n, a in arrays.items() if n.startswith(f"{prefix}/")}


def e_name(unit: str) -> str:
    """Where the e of a gated map stands: beside it, with an e before its name."""
    place, _, name = unit.rpartition(".")
    return f"{place}.e{name}.weight"


def linears(arrays: dict[str, Tensor]) -> dict[str, nn.Linear]:
    """A map of the right shape for each of the released adapters'."""
    shapes = {name: arrays[f"adapter/{name}.weight"].shape for name in under(arrays, "task0_mask")}
    return {name: nn.Linear(columns, rows) for name, (rows, columns) in shapes.items()}


def units_of(maps: dict[str, nn.Linear]) -> list[Units]:
    """The gated maps: each owns its rows, and fc1 the columns of its fc2."""
    groups = []
    for name, own in maps.items():
        members = shared_members(own.out_features, own.out_features, 1)
        parts = [Part(own, "weight", 0, members), Part(own, "bias", 0, members)]
        if name.endswith("fc1"):
            parts.append(Part(maps[name[:-1] + "2"], "weight", 1, members))
        groups.append(Units(name, "outputs", own.out_features, own, "out", tuple(parts)))
    return groups


def back_masks(arrays: dict[str, Tensor], masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our factors by the released names."""
    maps = linears(arrays)
    taken = ClaimedUnits(units_of(maps), acts_on="update")
    taken.update_max(torch.cat([mask.flatten() for mask in masks.values()]))
    names = {p: f"{name}.{key}" for name, own in maps.items() for key, p in own.named_parameters()}
    return {names[parameter]: factor.expand(parameter.shape) for parameter, factor in taken.factors()}


@pytest.mark.parametrize("step", STEPS)
def test_s_and_gates(step, arrays, settings):
    domain, number = STEPS[step]
    s = anneal(number / settings["len_loader"], s_max=settings["smax"])
    assert s == pytest.approx(arrays[f"{step}_s"].item(), rel=1e-6)
    masks = under(arrays, f"{step}_mask")
    assert len(masks) == 12
    for name, mask in masks.items():
        e = arrays[f"adapter/{e_name(name)}"][domain]
        torch.testing.assert_close(soft(e, s, s_max=400), mask[0], rtol=1e-4, atol=1e-6)


def test_what_is_taken(arrays):
    """Theirs is sigmoid(400 e), ours the same rounded; what two domains took is the maximum."""
    first, second = under(arrays, "task0_mask"), under(arrays, "task1_mask_pre")
    for name, mask in first.items():
        e = arrays[f"adapter/{e_name(name)}"]
        assert torch.equal(hard(e[0]), mask[0].round())
        torch.testing.assert_close(soft(e[0], 400.0, s_max=400), mask[0], rtol=1e-4, atol=1e-6)
        later = soft(e[1], 400.0, s_max=400)
        torch.testing.assert_close(torch.maximum(mask[0], later), second[name][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masks", ["task0_mask", "task1_mask_pre"])
def test_back_masks(masks, arrays):
    expected = under(arrays, masks.replace("_pre", "") + "_back")
    found = back_masks(arrays, under(arrays, masks))
    assert found.keys() == expected.keys()
    for name, factor in expected.items():
        torch.testing.assert_close(found[name], factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("step", STEPS)
def test_the_regulariser(step, arrays, settings):
    gates = torch.cat([mask.flatten() for mask in under(arrays, f"{step}_mask").values()])
    before = under(arrays, "task0_mask") if step == "t1" else {}
    taken = torch.cat([m.flatten() for m in before.values()]) if before else torch.zeros_like(gates)
    expected = arrays[f"{step}_loss_reg"].item()
    assert settings["lamb"] * regulariser(gates, taken).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("step", STEPS)
def test_compensated_gradients(step, arrays, settings):
    """From the gradient of the gate, which theirs of e was made of, wherever that has not vanished."""
    domain, number = STEPS[step]
    s, compared = anneal(number / 10, s_max=400), 0
    changed = under(arrays, f"{step}_grad")
    for name, plain in under(arrays, f"{step}_grad_plain").items():
        if ".efc" not in name:
            continue
        e = arrays[f"adapter/{name}"][domain].double()
        slope = s * torch.sigmoid(s * e) * torch.sigmoid(-s * e)
        sure = ((s * e).abs() < 12) & (plain[domain].abs() > 1e-12)
        learned = e.clone().requires_grad_()
        soft(learned, s, s_max=400).backward(torch.where(sure, plain[domain] / slope, 0))
        expected = changed.get(name, plain)[domain].double()
        scale = expected.abs().max().item()
        torch.testing.assert_close(learned.grad[sure], expected[sure], rtol=1e-3, atol=1e-5 * scale)
        compared += int(sure.sum())
    assert compared > 20


def test_back_masked_gradients(arrays):
    factors = back_masks(arrays, under(arrays, "task0_mask"))
    plain, masked = under(arrays, "t1_grad_plain"), under(arrays, "t1_grad")
    for name, factor in factors.items():
        expected = masked.get(name, plain[name])
        scale = plain[name].abs().max().item()
        torch.testing.assert_close(plain[name] * factor, expected, rtol=1e-4, atol=1e-6 * scale)
    assert any(not torch.equal(masked.get(n, plain[n]), plain[n]) for n in factors)
