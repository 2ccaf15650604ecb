"""Checkpoints within a stage, from which a killed or preempted run resumes at an optimizer step."""

from pathlib import Path
from typing import Any

from lightning import LightningModule
from lightning.pytorch.callbacks import Callback

from cpt.optim.nan_guard import NanGuard
from cpt.trainer.checkpoint import map_stored


class StepCheckpoint(Callback):
    """Saves the trainer's state every `interval` optimizer steps and after the last one.

    Weights that are not finite are not saved: the guard ends the stage or rolls it back. A checkpoint brings
    the modules of earlier domains into memory; those that stay on disk are mapped again from the file of the
    stage before, `stage_path`."""

    def __init__(self, path: Path, *, interval: int, guard: NanGuard, stage_path: Path | None = None) -> None:
        self.path = path
        self.interval = interval
        self.guard = guard
        self.stage_path = stage_path
        self.step = 0  # the last optimizer step that was seen
        self.saved_step: int | None = None

    def on_load_checkpoint(
        self, trainer: Any, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Raises ValueError for a checkpoint without what a callback of this version of cpt stores."""
        for callback in trainer.callbacks:
            stored_state = checkpoint["callbacks"].get(callback.state_key, {})
            if callback.state_key == "Monitor" and not stored_state:
                raise ValueError(
                    f"{self.path} is of a stage that began without monitor.every; restore monitor.every, or "
                    "delete it to train the stage again"
                )

            missing_keys: set[str] = set()
            if type(callback).__module__.startswith("cpt."):
                missing_keys = set(callback.state_dict()) - set(stored_state)
            if missing_keys:
                raise ValueError(
                    f"{self.path} is of another version of cpt ({type(callback).__name__} lacks "
                    f"{min(missing_keys)}); delete it to train again from what came before"
                )

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        if self.stage_path is not None:
            map_stored(pl_module, self.stage_path)
        if self.guard.policy == "rollback" and self.step == 0:  # there is something to return to
            self.save(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self.step:  # a micro-batch within a step
            return
        self.step = step
        if step % self.interval == 0 or step == trainer.max_steps or trainer.should_stop:
            self.save(trainer, pl_module)

    def save_once(self, trainer: Any, pl_module: LightningModule) -> None:
        """Saves the state after the current step, unless that has been done."""
        if self.saved_step != trainer.global_step:
            self.save(trainer, pl_module)

    def save(self, trainer: Any, pl_module: LightningModule) -> None:
        """Writes the file. Every process has to call it. Raises ValueError or RollbackError where weights are
        not finite."""
        self.guard.check_weights(trainer, pl_module.parameters())
        trainer.save_checkpoint(self.path)
        self.saved_step = trainer.global_step
