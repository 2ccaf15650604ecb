"""When the trainer's state is kept within a domain."""

from types import SimpleNamespace

import pytest
import torch

from cpt.optim import nan_guard as guards
from cpt.optim.nan_guard import NanGuard
from cpt.trainer import checkpoint
from cpt.trainer.checkpoint import StepCheckpoint
from cpt.trainer.options import minutes_of


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """The steps after which a state is kept, of ten that take so many seconds each."""

    def make(every, *, seconds=0, ends=None):
        clock, guard, steps = [0.0], NanGuard(), []
        monkeypatch.setattr(checkpoint, "monotonic", lambda: clock[0])
        saving = StepCheckpoint(tmp_path / "state", every=every, guard=guard)
        trainer = SimpleNamespace(global_step=0, max_steps=10, should_stop=False)
        trainer.save_checkpoint = lambda path: steps.append(trainer.global_step)
        module = SimpleNamespace(parameters=lambda: [])
        saving.on_train_start(trainer, module)
        for step in range(1, 11):
            trainer.global_step, trainer.should_stop = step, step == ends
            clock[0] += seconds
            _, _, guard.asked = guards.exchange(torch.tensor(1.0), asks=guard.asks)
            saving.on_train_batch_end(trainer, module)
            if trainer.should_stop:
                break
        return steps

    return make


def test_every_so_many_steps_and_after_the_last(saved):
    assert saved(4) == [4, 8, 10]


def test_every_so_many_minutes_told_in_the_next_step(saved):
    assert saved("2min", seconds=50) == [4, 8, 10]
    assert saved("2min", seconds=1) == [10]


def test_the_last_step_of_a_stage_that_ends_early_is_kept(saved):
    assert saved(100, ends=3) == [3]


@pytest.mark.parametrize(("given", "minutes"), [("10min", 10), ("0.5min", 0.5), ("0min", None), (5, None)])
def test_minutes_are_written_with_their_unit(given, minutes):
    assert minutes_of(given) == minutes
