"""EWC against the numbers of the released code (ContinualLM)."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM

from cpt.data.replay import NO_REPLAY
from cpt.methods.base import MethodContext
from cpt.methods.ewc import EWC
from cpt.methods.options import EWCOptions
from cpt.models.objectives import Causal
from cpt.models.options import NOT_FROZEN
from tests.conftest import SHARED
from tests.support.making import clones
from tests.support.running import batch_of

GOLDEN = SHARED / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.exists(), reason="the released code's numbers are not here")


def tiny(name: str):
    """One of the golden models, with the attention that its numbers were made with."""
    return AutoModelForMaskedLM.from_pretrained(
        GOLDEN / f"tiny_{name}", dtype=torch.float32, attn_implementation="eager"
    )


def golden_batches(domain: int) -> list[dict[str, torch.Tensor]]:
    arrays, found = np.load(GOLDEN / "batches.npz"), []
    for number in range(3):
        fields = ("input_ids", "labels", "attention_mask")
        batch = batch_of(*(torch.from_numpy(arrays[f"d{domain}_b{number}_{name}"]).long() for name in fields))
        found.append(batch | {"weight": torch.tensor(1 / len(batch["positions"]))})
    return found


def numbers(prefix: str) -> dict[str, torch.Tensor]:
    arrays = np.load(GOLDEN / "ewc.npz")
    names = [name for name in arrays.files if name.startswith(f"{prefix}/")]
    return {name.removeprefix(f"{prefix}/"): torch.from_numpy(arrays[name]) for name in names}


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference, in units of its tensor's largest number. Below 1e-9 there is only rounding: the
    biases of keys have no gradient."""
    return max(
        ((found[n] - e).abs().max() / e.abs().max().clamp_min(1e-9)).item() for n, e in expected.items()
    )


@pytest.fixture
def released():
    """EWC as the released code has it, after its first domain, which leaves model a, and at model b."""
    strength = json.loads((GOLDEN / "ewc.json").read_text())["settings"]["lamb"]
    shared = {"objective": Causal(), "length": 32, "masks": [], "replay": NO_REPLAY, "seed": 0}
    shared |= {"freeze": NOT_FROZEN, "optimizer": None, "schedule": None}
    options = EWCOptions(strength=strength, estimator="batch", merge="mean", gamma=0.5)
    module = EWC(options, MethodContext(model=tiny("a"), **shared)).eval()
    module.after_domain(golden_batches(0))
    first = clones(module.fisher.named())
    module.model.load_state_dict(tiny("b").state_dict())
    return module, first


def test_the_fisher_of_the_released_code(released):
    module, first = released
    expected = numbers("fisher0")
    assert first.keys() == expected.keys()
    assert apart(first, expected) < 1e-4


def test_the_penalty_and_loss_of_the_released_code(released):
    module, _ = released
    arrays, terms = np.load(GOLDEN / "ewc.npz"), module.losses(golden_batches(1)[0])
    assert terms["ewc"].item() == pytest.approx(arrays["penalty"].item(), rel=1e-4)
    assert terms["lm"].item() == pytest.approx(arrays["loss_mlm"].item(), rel=1e-4)
    assert sum(terms.values()).item() == pytest.approx(arrays["loss_total"].item(), rel=1e-4)


def test_the_merged_fisher_of_the_released_code_without_its_penalty(released):
    module, _ = released
    module.after_domain(golden_batches(1))
    found = clones(module.fisher.named())
    expected, leaking = numbers("fisher01"), numbers("fisher01_released")
    assert found.keys() == expected.keys()
    assert apart(found, expected) < 1e-4
    assert all(apart({name: found[name]}, {name: value}) > 0.01 for name, value in leaking.items())
