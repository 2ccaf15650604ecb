"""The progress of a fit or an evaluation: a bar in a terminal, and of a fit lines in a log."""

import logging
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from tqdm import tqdm

from cpt.core.heartbeat import DELAY, HEARTBEAT, is_terminal, make_progress_bar
from cpt.core.memory import read_peak_bytes
from cpt.core.messages import format_duration
from cpt.evaluation.monitor import CHAT_LOSSES
from cpt.trainer.costs import CostMonitor
from cpt.trainer.monitor import Monitor

log = logging.getLogger(__name__)
LINE_PERIOD_S = 10.0  # least seconds between two lines of a log, but for the last one of a fit


class ProgressBar(Callback):
    """One bar for each phase, with its name and the time left. During a fit it also has the loss, the rate,
    the speed, the memory, and the time left of the run; in a log, a line has them. They are read where the
    training curves have a point, and between two points once per LINE_PERIOD_S: else nothing waits for the
    device."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bar = tqdm(disable=True)  # until a phase starts
        self.next_line_time = 0.0
        self.rate: Any = None  # of the last step, a number or a tensor
        self.loss_step = 0  # whose loss is shown: the last point's, before the first one that of step 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bar = make_progress_bar(
            self.label,
            total=trainer.max_steps,
            initial=trainer.global_step,
            hidden=not trainer.is_global_zero,
            has_lines=False,
        )
        self.next_line_time = time.monotonic() + LINE_PERIOD_S
        if trainer.is_global_zero and not is_terminal():
            self.log_line(trainer, [])

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_batches = int(sum(trainer.num_val_batches))
        self.bar = make_progress_bar(
            self.label, total=num_batches, hidden=not trainer.is_global_zero, delay=DELAY
        )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.rate = optimizer.param_groups[0]["lr"]  # the scheduler changes it before the end of the batch

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        is_new_step = step > self.bar.n  # and not a further micro-batch
        self.bar.update(step - self.bar.n)
        if not is_new_step or not trainer.is_global_zero:
            return

        has_point = step % trainer.log_every_n_steps == 0
        if has_point or step == 1:
            self.loss_step = step
        is_due = time.monotonic() >= self.next_line_time
        if is_terminal():
            if has_point or is_due:
                self.next_line_time = time.monotonic() + LINE_PERIOD_S
                parts = describe_step(trainer, rate=self.rate, loss_step=self.loss_step)
                self.bar.set_postfix_str(" · ".join(parts), refresh=False)
            return
        is_last_point = has_point and step + trainer.log_every_n_steps > trainer.max_steps
        if is_last_point or is_due:
            self.log_line(trainer, describe_step(trainer, rate=self.rate, loss_step=self.loss_step))

    def log_line(self, trainer: Any, parts: list[str]) -> None:
        """Logs the step with the `parts` that `describe_step` has of it."""
        self.next_line_time = time.monotonic() + LINE_PERIOD_S
        position = f"step {trainer.global_step:,}/{trainer.max_steps:,}"
        log.info("%s", " · ".join([self.label, position, *parts]))

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.bar.update()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        self.bar.close()

    def on_exception(self, *args: Any) -> None:
        self.bar.close()


def describe_step(trainer: Any, *, rate: Any, loss_step: int) -> list[str]:
    """What a line says of the last step, each in a few words; what is not known yet is left out. The loss is
    from `loss_step`, which is named if it is an earlier step."""
    parts = []
    loss_suffix = ""
    if loss_step != trainer.global_step:
        loss_suffix = f" (step {loss_step:,})"
    for name, value in trainer.progress_bar_metrics.items():
        term = name.split("/")[1]  # of train/TERM
        label = "loss" if term == "lm" else term
        parts.append(f"{label} {value:.3f}{loss_suffix}")
    if rate is not None:
        parts.append(f"lr {format_rate(float(rate))}")

    cost_monitor = find_callback(trainer, CostMonitor)
    if cost_monitor is not None and cost_monitor.tokens_per_s:
        # Of this process: the others have as many tokens on average.
        parts.append(f"{cost_monitor.tokens_per_s * trainer.world_size:,.0f} tokens/s")
    parts.append(f"{read_peak_bytes(trainer.strategy.root_device) / 1e9:.1f} GB")

    monitor = find_callback(trainer, Monitor)
    if monitor is not None:
        parts += describe_rise(monitor)
    parts += describe_remaining()
    return parts


def find_callback(trainer: Any, kind: type) -> Any:
    """The callback of a kind; None if the trainer has none."""
    for callback in trainer.callbacks:
        if isinstance(callback, kind):
            return callback
    return None


def format_rate(rate: float) -> str:
    """A learning rate with two digits.

    >>> format_rate(0.0014), format_rate(0.5)
    ('1.4e-3', '5.0e-1')
    """
    mantissa, _, exponent = f"{rate:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def describe_rise(monitor: Monitor) -> list[str]:
    """The largest rise of a text other than the stage's, and the larger one of chats, in nats per token since
    the stage began, once there are two evaluations."""
    text_rises: dict[str, float] = {}
    chat_rises: dict[str, float] = {}
    for text, losses in monitor.record.nll.items():
        if text in monitor.stage_texts or len(losses) < 2:
            continue
        rises = chat_rises if text in CHAT_LOSSES else text_rises
        rises[text] = losses[-1] - losses[0]

    parts = []
    for rises in (text_rises, chat_rises):
        if rises:
            name, rise = max(rises.items(), key=lambda item: item[1])
            parts.append(f"{name} {rise:+.3f} nats")
    return parts


def describe_remaining() -> list[str]:
    """The time left of the stage and of the run, where the heartbeat knows them."""
    beat = HEARTBEAT.read()
    parts = []
    if beat.phase_eta_s is not None:
        parts.append(f"{format_duration(beat.phase_eta_s)} left of stage")
    if beat.run_eta_s is not None:
        parts.append(f"{format_duration(beat.run_eta_s)} of run")
    return [", ".join(parts)] if parts else []
