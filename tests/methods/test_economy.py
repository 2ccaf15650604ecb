"""Less memory and less time, with what every method computes: activations computed again, blocks compiled."""

import pytest
import torch

from cpt.models import memory
from cpt.models.memory import checkpoint_activations, keep_activations
from tests.methods.test_contract import LEARNING, bits, told
from tests.support.campaign import run_few
from tests.support.making import DROPOUT, ORDER
from tests.support.seams import chosen

AGAIN = "trainer.gradient_checkpointing=true"


@pytest.mark.parametrize("method", run_few(LEARNING, ["das", "migu"]))
def test_activations_that_are_computed_again_give_the_same_bits(method, small, start, tmp_path):
    for name, options in {"kept": [], "again": [AGAIN]}.items():
        start(small(*chosen(method), ORDER, *DROPOUT, *options), tmp_path / name)
    assert bits(tmp_path / "kept") == bits(tmp_path / "again")
    kept, again = (told(tmp_path / name) for name in ("kept", "again"))
    assert again["flops"][-1] > kept["flops"][-1]  # they are indeed
    start(small(*chosen(method), ORDER, *DROPOUT, AGAIN), tmp_path / "kept")  # and a run may go on so
    assert told(tmp_path / "kept") == kept


def test_passes_may_keep_their_activations(build, monkeypatch):
    model = build("ncl", AGAIN).module.model
    recomputed = lambda: [part for part in model.modules() if getattr(part, memory.CHECKPOINTING, False)]  # noqa: E731
    parts = recomputed()
    with keep_activations(model):
        assert parts and not recomputed()
    assert recomputed() == parts
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match=r"gradient_checkpointing=true: .*allowed: false"):
        checkpoint_activations(model)


@pytest.mark.parametrize("method", run_few(LEARNING, ["migu"]))
def test_compiled_blocks_compute_what_blocks_do(method, small, start, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "COMPILE_OPTIONS", {"backend": "eager"})  # traced, and run as it was
    for name, options in {"plain": [], "compiled": ["trainer.compile=true"]}.items():
        torch._dynamo.reset()
        start(small(*chosen(method), ORDER, *DROPOUT, "trainer.steps=3", *options), tmp_path / name)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    plain, compiled = (torch.tensor(told(tmp_path / name)["nll"]) for name in ("plain", "compiled"))
    torch.testing.assert_close(plain, compiled, rtol=1e-5, atol=1e-5)
