"""What a stage reads of each part of a mixture, and the loss on it; see cpt.data.mixture."""

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.core.processes import is_first_process
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod
from cpt.models.part_losses import PartLosses

log = logging.getLogger(__name__)


class MixtureMonitor(Callback):
    """Counts rows, tokens and scored tokens of the parts, and logs the mean loss of each part since the last
    logged step, `train/lm_PART/STAGE`.

    A resumed stage continues the counts of its checkpoint, which are those of all processes. A checkpoint has
    only the first process's sums of losses."""

    def __init__(self, part_names: Sequence[str]) -> None:
        self.part_names = part_names
        self.counts = torch.zeros((3, len(part_names)), dtype=torch.int64)  # rows, tokens, scored tokens
        self.losses = PartLosses()
        self.point_step = 0  # the last logged step
        self.has_reported_none = False  # whether the log has a line about missing losses

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        cast(ContinualMethod, pl_module).part_losses = self.losses

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counts = self.counts.to(trainer.strategy.root_device)
        self.point_step = trainer.global_step
        if trainer.global_step == 0:  # an attempt may have been rolled back
            self.counts.zero_()
            self.losses.take()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        is_last_micro_batch = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if not is_last_micro_batch:
            return
        self.counts += batch["part_counts"]  # of the whole step, in each of its micro-batches alike
        step = trainer.global_step
        if step != self.point_step and step % trainer.log_every_n_steps == 0:
            self.point_step = step
            self.log_losses(trainer, cast(ContinualMethod, pl_module))

    def log_losses(self, trainer: Trainer, module: ContinualMethod) -> None:
        """Logs the losses; once in a run a line instead, where the method has none. Every process has to call
        it."""
        sums = self.losses.take()
        if sums is None:
            if module.domain.index == 0 and not self.has_reported_none and is_first_process():
                log.info(
                    "Not logging the loss of each part of the mixture: %s does not call self.lm_loss(batch)",
                    type(module).__name__,
                )
            self.has_reported_none = True
            return
        total_sums = cast(Tensor, trainer.strategy.reduce(sums, reduce_op="sum"))
        for name, nats, tokens in zip(self.part_names, *total_sums.tolist(), strict=True):
            if tokens > 0:
                module.log(f"train/lm_{name}/{module.domain.name}", nats / tokens)

    def state_dict(self) -> dict[str, Any]:
        sums = self.losses.sums
        return {"counts": self.counts.tolist(), "losses": None if sums is None else sums.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = torch.tensor(state["counts"], dtype=torch.int64)
        sums = state["losses"]
        self.losses.sums = None if sums is None else torch.tensor(sums, dtype=torch.float64)
