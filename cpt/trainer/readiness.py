"""What a plan is made ready with before any text is read: it is checked, what it leaves open is settled, and
what needs no text is made."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from cpt.core.memory import keep_free
from cpt.core.processes import is_first_process
from cpt.trainer import callbacks as custom
from cpt.trainer.options import TrainerOptions
from cpt.trainer.plan import Plan
from cpt.trainer.precision import resolve_precision
from cpt.trainer.preflight import check_model, check_optimizer, naming_cause
from cpt.trainer.run_folder import RunFolder
from cpt.trainer.trainer import make_trainer, quiet

if TYPE_CHECKING:
    from cpt.evaluation.lm_eval import Harness

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """What a plan that can be run has been made ready with: the plan as it will be run, its loggers and
    callbacks, how many `processes` work on this machine, the device of this one, and the tasks of its
    probe."""

    plan: Plan
    loggers: list[Logger]
    callbacks: dict[str, Callback]
    processes: int
    device: torch.device
    harness: Harness | None


def prepare(plan: Plan, place: RunFolder) -> Ready:
    """Makes the process ready, and what needs no text. Raises ValueError for a plan that cannot be run."""
    quiet()
    keep_free()
    check_optimizer("optim", {"_target_": plan.optim.target, **plan.optim.arguments})
    check_model(plan)
    loggers = custom.make_loggers(plan.logger.others, place.path)
    logged = bool(loggers) or plan.logger.csv or plan.logger.wandb
    callbacks = custom.make_callbacks(plan.callbacks, logged=logged)
    device = find_device(plan.trainer)
    plan = resolve_precision(plan, place, device)
    check_shared_out(plan)
    tried = try_trainer(plan.trainer, loggers, callbacks)
    return Ready(plan, loggers, callbacks, tried.num_devices, device, make_harness(plan))


def check_shared_out(plan: Plan) -> None:
    """A method that needs 32 bits has them where weights are shared out: what is whole can be widened for a
    while, what is in shares not."""
    options = plan.trainer
    if options.strategy == "fsdp" and options.precision == "bf16-true" and plan.method.load().needs_32_bits:
        raise ValueError(
            f"trainer.precision=bf16-true does not go with method={plan.names['method']} and strategy=fsdp; "
            "allowed: 32-true, bf16-mixed"
        )


def make_harness(plan: Plan) -> Harness | None:
    """The tasks of the probe, read by the process that measures them; None where there is none."""
    if plan.probe is None or not is_first_process():
        return None
    log.info("reading the tasks of the probe")
    from cpt.evaluation.lm_eval import Harness  # 8 seconds, and a package that may not be there

    return Harness(plan.probe, precision=plan.trainer.precision)


def try_trainer(
    options: TrainerOptions, loggers: Sequence[Logger], callbacks: Mapping[str, Callback]
) -> Trainer:
    """A trainer with these options on this machine. Raises ValueError where lightning.Trainer takes them
    not."""
    names = ("accelerator", "devices", "strategy", "precision")
    place = " ".join(f"trainer.{name}={getattr(options, name)}" for name in names)
    with naming_cause(place):
        return make_trainer(
            options.lightning, label="", loggers=loggers, callbacks=list(callbacks.values()), steps=1
        )


def find_device(options: TrainerOptions) -> torch.device:
    """The device of this process."""
    settled = "32-true" if options.precision == "auto" else options.precision
    return try_trainer(replace(options, precision=settled), [], {}).strategy.root_device
