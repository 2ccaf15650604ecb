"""NaN guard: checks loss and gradient norm before each optimizer step.

With several processes one reduction per step covers the check and the signals that they received."""

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, distributed

from cpt.core.distributed import all_reduce_max, all_reduce_sum, total_norm
from cpt.core.preemption import children, notice
from cpt.core.processes import is_distributed

log = logging.getLogger(__name__)
POLICIES = ("stop", "skip", "rollback")
ADVICE = "a lower rate (optim.lr) or a clipped gradient (trainer.gradient_clip_val) may help"
GO_ON = "; on_nonfinite=skip or rollback continues without such steps"
GRADIENT = "norm of the gradient"
MOST = 10  # skipped steps in a row, rollbacks of one domain


class RollbackError(Exception):
    """The domain restarts from its last checkpoint."""


class NanGuard(Callback):
    """On a non-finite loss or gradient, `stop` raises a ValueError that ends with `advice`, `skip` skips the
    step, and `rollback` returns to the last checkpoint and skips all steps up to this one (Chowdhery et al.,
    JMLR 2023, section 5.1). In float16 only the loss is checked."""

    def __init__(self, *, policy: str = "stop", advice: str = ADVICE) -> None:
        if policy not in POLICIES:
            raise ValueError(f"on_nonfinite={policy} is invalid. Allowed: {', '.join(POLICIES)}")
        self.policy, self.advice = policy, advice
        self.terms: dict[str, Tensor] = {}
        self.left_out: set[int] = set()
        self.failed: int | None = None  # the step of a rollback
        self.in_a_row = self.rollbacks = 0
        self.heard = 0  # the signal known to all processes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.guard = self  # type: ignore[assignment]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.terms.clear()
        if self.failed is not None:
            self.left_out.update(range(trainer.global_step, self.failed + 1))
            self.failed = None

    def see(self, terms: Mapping[str, Tensor]) -> None:
        """Adds the loss terms, scalars, of a micro-batch."""
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0) + value.detach()

    def allows(self, trainer: Trainer, norm: Tensor) -> bool:
        """Whether to make the step, alike in all processes. ValueError or RollbackError ends the stage."""
        terms, self.terms = self.terms, {}
        value = cast(Tensor, sum(terms.values()))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        fine, self.heard = exchange(value if scaler else value + norm)
        step, name = trainer.global_step, trainer.datamodule.domain.name  # type: ignore[attr-defined]
        if step in self.left_out:
            return False
        if not fine:
            known = {f"{term} loss": value for term, value in terms.items()} | {GRADIENT: norm}
            values = torch.stack([value.float() for value in known.values()])
            all_reduce_sum(values)  # those that are not finite in some process
            numbers = zip(known, values.tolist(), strict=True)
            bad = [f"the {term} is {number}" for term, number in numbers if not math.isfinite(number)]
            problem = f"{' and '.join(bad)} at step {step} of {name}"
            if self.policy == "stop":
                self.end(problem)
            self.in_a_row += 1
            if max(self.in_a_row, self.rollbacks + 1) > MOST:
                self.end(f"{problem}, and so was {MOST} times before")
            if self.policy == "rollback":
                self.roll_back(trainer, step, problem)
            warn_once(trainer, f"Skipping the step: {problem}")
            self.left_out.add(step)
            return False
        self.in_a_row = 0
        if scaler is None:
            return True
        if scaler.get_scale() < 1:  # no scale gives the gradient room: it is not finite itself
            self.end(f"the {GRADIENT} is {norm.item()} at step {step} of {name}, at every scale")
        return math.isfinite(norm.item())

    def roll_back(self, trainer: Trainer, step: int, problem: str) -> None:
        warn_once(trainer, f"Rolling back to the last checkpoint: {problem}")
        self.failed, self.rollbacks = step, self.rollbacks + 1
        raise RollbackError(problem)

    def check_weights(self, trainer: Trainer, weights: Iterable[Tensor]) -> None:
        """Raises ValueError or RollbackError, in all processes, if weights are not finite in one."""
        if all_reduce_max(int(not all_finite(weights))):
            step, name = trainer.global_step, trainer.datamodule.domain.name  # type: ignore[attr-defined]
            problem = f"the weights are not finite after step {step} of {name}"
            if self.policy == "rollback" and self.rollbacks < MOST:
                self.roll_back(trainer, step - 1, problem)
            self.end(problem)

    def end(self, problem: str) -> None:
        """Raises ValueError, in all processes alike."""
        children(release=True)
        raise ValueError(
            f"{problem}; {self.advice}{GO_ON * ((self.policy, self.advice) == ('stop', ADVICE))}"
        )

    def leaving(self) -> int:
        """The signal on which all processes exit now, 0 for none."""
        return self.heard if is_distributed() else notice.number

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_out": sorted(self.left_out),
            "in_a_row": self.in_a_row,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left_out.update(state["left_out"])
        self.in_a_row, self.rollbacks = state["in_a_row"], max(self.rollbacks, state["rollbacks"])


def warn_once(trainer: Trainer, message: str) -> None:
    if trainer.is_global_zero:
        log.warning(message)


def exchange(value: Tensor) -> tuple[bool, int]:
    """Over all processes: whether a scalar is finite, and a signal."""
    if not is_distributed():
        return math.isfinite(value.item()), 0
    told = torch.stack([(~value.isfinite()).to(value.dtype), value.new_tensor(notice.number)])
    distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
    bad, number = told.tolist()
    return not bad, int(number)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry of the floating-point tensors is finite."""
    floats = [each.detach() for each in tensors if each.is_floating_point() and each.numel()]
    return bool(total_norm(floats, norm_type=math.inf).isfinite()) if floats else True


def check_finite(state: Mapping[str, Tensor], row: str) -> None:
    """Raises ValueError if a stage's state is not finite in some process."""
    fine = all_finite(state.values())
    if all_reduce_max(int(not fine)):
        bad = [name for name, value in state.items() if not (fine or all_finite([value]))]
        told = ", ".join(bad[:3]) or "what another process has"
        raise ValueError(f"{told} is not finite after {row}; {ADVICE}")
