"""The option of a divergence budget (`budget.kl`), checked without torch."""

from typing import Any, ClassVar

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Positive, config, option
from cpt.evaluation.monitor import MonitorOptions, ObserverConfig


@config
class DivergenceBudget(ObserverConfig):
    """How far a stage may take the model from the base, by what it predicts on validation text of the stage's
    own domain. It needs no text of earlier domains, nor the general text."""

    evaluations: ClassVar[int] = 8
    weight_copies: ClassVar[int] = 1  # those of the last evaluation within the budget
    needs_divergence: ClassVar[bool] = True

    kl: Positive = option(
        "end a stage before KL(base || model) on its own text exceeds this, in nats per scored token, "
        "by the upper end of the 95 % interval"
    )

    def check_conflicts(
        self,
        *,
        monitor: MonitorOptions,
        method: Any,
        method_name: str,
        has_branches: bool,
        is_sharded: bool,
    ) -> None:
        if has_branches:
            raise self.conflict("a schedule whose decay is a branch (wsd, infinite)")
        if monitor.keep == "best":
            raise self.conflict("monitor.keep=best, whose weights may exceed it")
        if is_sharded:
            raise self.conflict("strategy=fsdp, as it needs whole weights")

    def conflict(self, conflicting_option: str) -> InvalidOptionError:
        """The error on an option that does not go with the budget."""
        return InvalidOptionError(
            "budget.kl", self.kl, reason=f"incompatible with {conflicting_option}", allowed="budget=none"
        )

    def open(self, run: Any, data: Any, domain: Any) -> Any:
        from cpt.contrib.divergence_budget.controller import DivergenceController  # with numpy and torch

        return DivergenceController(self)
