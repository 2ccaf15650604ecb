"""Less memory and less time, with what every method computes: activations computed again, blocks compiled."""

import json
from pathlib import Path

import pytest
import torch

from cpt.models import memory
from cpt.models.memory import checkpoint_activations, keep_activations
from tests.methods.test_contract import LEARNING, bits
from tests.support.campaign import run_few
from tests.support.making import DROPOUT, ORDER, made
from tests.support.seams import chosen

AGAIN = "trainer.gradient_checkpointing=true"
FEW = ["das", "migu"]


def scores(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


@pytest.mark.parametrize("method", run_few(LEARNING, FEW))
def test_activations_that_are_computed_again_give_the_same_bits(method, small, start, tmp_path):
    for name, options in {"kept": [], "again": [AGAIN]}.items():
        start(small(*chosen(method), ORDER, *DROPOUT, *options), tmp_path / name)
    assert bits(tmp_path / "kept") == bits(tmp_path / "again")
    kept, again = (scores(tmp_path / name)["flops"] for name in ("kept", "again"))
    assert again[-1] > kept[-1]  # they are indeed


def test_a_run_may_go_on_with_its_activations_computed_again(small, start, tmp_path):
    start(small(ORDER), tmp_path)
    before = scores(tmp_path)
    start(small(ORDER, AGAIN), tmp_path)
    assert scores(tmp_path) == before


def test_a_model_that_cannot_compute_again_says_so(small):
    model = made(small(ORDER)).module.model
    type(model).supports_gradient_checkpointing, kept = False, type(model).supports_gradient_checkpointing
    try:
        with pytest.raises(
            ValueError, match="trainer.gradient_checkpointing=true: .* cannot .*; allowed: false"
        ):
            checkpoint_activations(model)
    finally:
        type(model).supports_gradient_checkpointing = kept


def test_passes_may_keep_their_activations(small):
    model = made(small(ORDER, AGAIN)).module.model
    parts = [part for part in model.modules() if getattr(part, memory.CHECKPOINTING, False)]
    assert parts
    with keep_activations(model):
        assert not any(getattr(part, memory.CHECKPOINTING, False) for part in model.modules())
    assert [part for part in model.modules() if getattr(part, memory.CHECKPOINTING, False)] == parts


@pytest.mark.parametrize("method", run_few(LEARNING, ["migu"]))
def test_compiled_blocks_compute_what_blocks_do(method, small, start, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "COMPILE_OPTIONS", {"backend": "eager"})  # traced, and run as it was
    for name, options in {"plain": [], "compiled": ["trainer.compile=true"]}.items():
        torch._dynamo.reset()
        start(small(*chosen(method), ORDER, *DROPOUT, *options), tmp_path / name)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    plain, compiled = (torch.tensor(scores(tmp_path / name)["nll"]) for name in ("plain", "compiled"))
    torch.testing.assert_close(plain, compiled, rtol=1e-5, atol=1e-5)
