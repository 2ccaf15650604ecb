"""The progress bar of a fit or an evaluation."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from cpt.core.heartbeat import progress_bar


class ProgressBar(Callback):
    """One bar for each phase, with its name and the time left; in a log file, a line every few seconds."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar = tqdm(disable=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar = progress_bar(
            self.label,
            total=trainer.max_steps,
            initial=trainer.global_step,
            hidden=not trainer.is_global_zero,
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_batches = int(sum(trainer.num_val_batches))
        self.bar = progress_bar(self.label, total=num_batches, hidden=not trainer.is_global_zero)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        for name, value in trainer.progress_bar_metrics.items():
            short_name = name.split("/")[1]
            self.bar.set_postfix({short_name: f"{value:.3f}"}, refresh=False)
        self.bar.update(trainer.global_step - self.bar.n)

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.bar.update()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_exception(self, *args: Any) -> None:
        self.bar.close()
