"""NaN guard: checks loss and gradient norm before each optimizer step, in one reduction per step."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, distributed

from cpt.core.distributed import all_reduce_max, all_reduce_sum, fail_together, total_norm
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.processes import is_distributed

log = logging.getLogger(__name__)
POLICIES = ("stop", "skip", "rollback")
ADVICE = "a lower rate (optim.lr) or a clipped gradient (trainer.gradient_clip_val) may help"
OTHER_POLICIES = "; on_nonfinite=skip or rollback continues without such steps"
GRADIENT = "norm of the gradient"
MAX_FAILURES = 10  # skipped steps in a row, rollbacks of one domain
MAX_NAMES = 3  # of tensors, in a message


class RollbackError(Exception):
    """The domain restarts from its last checkpoint."""


class NanGuard(Callback):
    """On a non-finite loss or gradient, `stop` raises a ValueError that ends with `advice`, `skip` skips the
    step, and `rollback` returns to the last checkpoint and skips all steps up to this one (Chowdhery et al.,
    JMLR 2023, section 5.1). In float16 only the loss is checked, as the scaler handles gradients.

    The reduction of each step carries one integer of each process: what `read_signal` returns. Afterwards
    `common_signal` is the largest of them (cpt/trainer/preemption.py)."""

    def __init__(self, *, policy: str = "stop", advice: str = ADVICE) -> None:
        if policy not in POLICIES:
            raise InvalidOptionError("on_nonfinite", policy, allowed=", ".join(POLICIES))
        self.policy = policy
        self.advice = advice
        self.terms: dict[str, Tensor] = {}  # of the current step, summed over its micro-batches
        self.skipped_steps: set[int] = set()
        self.failed_step: int | None = None  # on which the stage was rolled back
        self.failures_in_a_row = 0
        self.rollbacks = 0
        self.read_signal: Callable[[], int] = no_signal
        self.common_signal = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.guard = self  # type: ignore[assignment]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.terms.clear()
        if self.failed_step is not None:
            self.skipped_steps.update(range(trainer.global_step, self.failed_step + 1))
            self.failed_step = None

    def add_losses(self, terms: Mapping[str, Tensor]) -> None:
        """Adds the loss terms, scalars, of a micro-batch."""
        for name, value in terms.items():
            self.terms[name] = self.terms.get(name, 0) + value.detach()

    def allows(self, trainer: Trainer, norm: Tensor) -> bool:
        """Whether the optimizer is to make the step; alike in all processes. `norm` is that of the gradients,
        a scalar.

        Raises ValueError or RollbackError if a number that is not finite ends the stage."""
        terms = self.terms
        self.terms = {}
        loss = cast(Tensor, sum(terms.values()))
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # the GradScaler of float16; else None

        # One reduction checks loss and gradient: the sum of two numbers is finite only if both are. With a
        # scaler a gradient that is not finite is not a failure: the scaler skips the step and lowers its
        # scale.
        checked_number = loss
        if scaler is None:
            checked_number = loss + norm
        is_finite, self.common_signal = check_in_all(checked_number, self.read_signal())

        if trainer.global_step in self.skipped_steps:  # since a rollback
            return False
        if not is_finite:
            self.reject_step(trainer, terms, norm)
            return False
        self.failures_in_a_row = 0
        if scaler is None:
            return True

        # A gradient that is not finite at a scale below 1 is so at any scale: a lower one does not help.
        is_norm_finite = math.isfinite(norm.item())
        if not is_norm_finite and scaler.get_scale() < 1:
            self.end(f"the {GRADIENT} is {norm.item()} at {describe_position(trainer)}, at every scale")
        return is_norm_finite

    def reject_step(self, trainer: Trainer, terms: Mapping[str, Tensor], norm: Tensor) -> None:
        """Has the current step skipped, or raises ValueError or RollbackError, as the policy says."""
        problem = describe_problem(trainer, terms, norm)
        if self.policy == "stop":
            self.end(problem)
        self.failures_in_a_row += 1
        if max(self.failures_in_a_row, self.rollbacks + 1) > MAX_FAILURES:
            self.end(f"{problem}, after {count_noun(MAX_FAILURES, 'earlier failure')}")

        step = trainer.global_step
        if self.policy == "rollback":
            self.roll_back(trainer, step, problem)
        warn_once(trainer, f"Skipping the step: {problem}")
        self.skipped_steps.add(step)

    def roll_back(self, trainer: Trainer, failed_step: int, problem: str) -> NoReturn:
        """Ends the stage by a RollbackError: it restarts from its last checkpoint, and the steps up to
        `failed_step` are skipped then."""
        warn_once(trainer, f"Rolling back to the last checkpoint: {problem}")
        self.failed_step = failed_step
        self.rollbacks += 1
        raise RollbackError(problem)

    def check_weights(self, trainer: Trainer, weights: Iterable[Tensor]) -> None:
        """Called before a checkpoint is written. If weights are not finite in any process, raises in all of
        them: RollbackError if the policy allows one more rollback, else ValueError."""
        is_non_finite_anywhere = bool(all_reduce_max(int(not all_finite(weights))))
        if not is_non_finite_anywhere:
            return

        problem = f"the weights are not finite after {describe_position(trainer)}"
        if self.policy == "rollback" and self.rollbacks < MAX_FAILURES:
            failed_step = trainer.global_step - 1  # the step made last
            self.roll_back(trainer, failed_step, problem)
        self.end(problem)

    def end(self, problem: str) -> NoReturn:
        """Ends the run by a ValueError, in all processes alike."""
        message = f"{problem}; {self.advice}"
        if self.policy == "stop" and self.advice == ADVICE:
            message += OTHER_POLICIES
        fail_together(message)

    def state_dict(self) -> dict[str, Any]:
        return {
            "left_out": sorted(self.skipped_steps),
            "in_a_row": self.failures_in_a_row,
            "rollbacks": self.rollbacks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_steps.update(state["left_out"])
        self.failures_in_a_row = state["in_a_row"]
        self.rollbacks = max(self.rollbacks, state["rollbacks"])  # a checkpoint is older than its rollback


def no_signal() -> int:
    return 0


def describe_position(trainer: Any) -> str:
    return f"step {trainer.global_step} of {trainer.datamodule.domain.name}"


def describe_problem(trainer: Trainer, terms: Mapping[str, Tensor], norm: Tensor) -> str:
    """Which losses, or the norm of the gradient, are not finite in some process. Every process has to call
    it."""
    numbers = {f"{term} loss": value for term, value in terms.items()}
    numbers[GRADIENT] = norm
    sums = torch.stack([value.float() for value in numbers.values()])
    all_reduce_sum(sums)  # not finite where one process has such a number

    faults = []
    for name, number in zip(numbers, sums.tolist(), strict=True):
        if not math.isfinite(number):
            faults.append(f"the {name} is {number}")
    return f"{' and '.join(faults)} at {describe_position(trainer)}"


def warn_once(trainer: Trainer, message: str) -> None:
    if trainer.is_global_zero:
        log.warning(message)


def check_in_all(value: Tensor, number: int) -> tuple[bool, int]:
    """Over all processes: whether a scalar is finite in each, and the largest of their numbers."""
    if not is_distributed():
        return math.isfinite(value.item()), number
    is_not_finite = ~value.isfinite()
    shared = torch.stack([is_not_finite.to(value.dtype), value.new_tensor(number)])
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    any_not_finite, largest = shared.tolist()
    return not any_not_finite, int(largest)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every entry of the floating-point tensors is finite."""
    floats = [tensor.detach() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return True
    return bool(total_norm(floats, norm_type=math.inf).isfinite())


def check_finite(state: Mapping[str, Tensor], row: str) -> None:
    """Raises ValueError if a stage's state is not finite in some process."""
    is_finite = all_finite(state.values())
    if not all_reduce_max(int(not is_finite)):
        return
    names: list[str] = []
    if not is_finite:
        names = [name for name, value in state.items() if not all_finite([value])]
    described = ", ".join(names[:MAX_NAMES]) or "what another process has"
    raise ValueError(f"{described} is not finite after {row}; {ADVICE}")
