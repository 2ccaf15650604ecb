"""The trainer's state within a domain: one file that is always whole and finite."""

from pathlib import Path
from time import monotonic
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO

from cpt.adapters.domain_store import map_stored
from cpt.core.preemption import leave_all
from cpt.core.tensors import save_state
from cpt.optim.nan_guard import NanGuard
from cpt.trainer.options import minutes_of
from cpt.trainer.shards import fill_in


class WholeFile(TorchCheckpointIO):
    """Lightning's checkpoints, written where they belong: its own writer takes the way through the system's
    temporary folder, which may be too small, and copies from there in pieces."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The checkpoint; one in shards is brought together."""
        return fill_in(super().load_checkpoint(path, *args, **kwargs), Path(path), lambda name, shape: None)


class Checkpoint(Callback):
    """Saves the trainer's state every `every` optimizer steps, or, where that is minutes (`10min`), so long
    after the last time, when the clock of one of the processes says so; after the last step; and when a
    signal asks the run to leave, which it then does."""

    def __init__(self, path: Path, *, every: int | str, guard: NanGuard) -> None:
        self.minutes = minutes_of(every)
        if self.minutes is None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"trainer.checkpoint_every={every}; allowed: 1 or more steps, or like 10min")
        self.path, self.every, self.guard, self.step = path, every, guard, 0
        self.saved = monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        if self.guard.policy == "rollback" and self.step == 0:
            self.save(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step, leaving = trainer.global_step, self.guard.leaving()
        if step == self.step:  # within the parts of a step
            return
        self.step = step
        if leaving or self.is_due(step) or step == trainer.max_steps or trainer.should_stop:
            self.save(trainer, pl_module)
        if leaving:
            name = trainer.datamodule.domain.name
            leave_all(leaving, f"after step {step} of {trainer.max_steps} of {name}")

    def is_due(self, step: int) -> bool:
        """Whether it is time, alike in all processes: by the clock they hear of it in the next step."""
        if self.minutes is None:
            return step % int(self.every) == 0
        due, self.guard.asks = self.guard.asked, monotonic() - self.saved >= 60 * self.minutes
        return due

    def save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.guard.check_weights(trainer, pl_module.parameters())
        trainer.save_checkpoint(self.path)
        self.saved, self.guard.asks, self.guard.asked = monotonic(), False, False


class Resting(Callback):
    """Parts that a checkpoint has brought back lie in the file of the stage before again, where they are
    too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        map_stored(pl_module, self.path)
