"""The learning rate that a stage was learned with, as the optimizer had it."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cpt.data.batch import Batch


class Rates(Callback):
    """Notes the rate of a stage's first step, the highest, and that of the last; what was noted before a kill
    comes back with the trainer's state."""

    def __init__(self) -> None:
        self.noted: list[float] = []  # first, highest, last

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        first, highest, _ = self.noted or [rate] * 3
        self.noted = [first, max(highest, rate), rate]

    def state_dict(self) -> dict[str, Any]:
        return {"noted": self.noted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noted = list(state["noted"])
