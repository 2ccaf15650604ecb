"""Options of a drift budget (`budget.general`, `budget.past`), checked without torch."""

from collections.abc import Sequence
from typing import Any, ClassVar

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Positive, config, option
from cpt.data.sources.base import GENERAL
from cpt.evaluation.monitor import MonitorOptions, ObserverConfig

RISE = "allowed rise of the loss, in nats per token, on"
PAST = "past"


@config
class DriftBudget(ObserverConfig):
    """What learning may cost other text by the end of a run, on validation text. Raises ValueError without a
    bound."""

    counts_domains: ClassVar[bool] = True
    evaluations: ClassVar[int] = 4
    weight_copies: ClassVar[int] = 2  # the weights at both ends of the way since the stage began

    general: Positive | None = option(f"{RISE} general text above the base model's; null: no limit")
    past: Positive | None = option(f"{RISE} past domains since each was trained; null: no limit")

    def __post_init__(self) -> None:
        if not self.bounds:
            raise InvalidOptionError(
                "general",
                None,
                reason="past=null as well: nothing is bounded",
                allowed="a number above 0, for general, past or both",
            )

    @property
    def bounds(self) -> dict[str, float]:
        """The allowed rise by the end of the run, in nats per token, of what is bounded."""
        bounds = {GENERAL: self.general, PAST: self.past}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def allow(self, number: int, *, stages: int) -> dict[str, float]:
        """Nats that may be spent by the end of a stage (from 1); what one leaves, those after it have."""
        return {name: bound * number / stages for name, bound in self.bounds.items()}

    def check_conflicts(
        self,
        *,
        monitor: MonitorOptions,
        method: Any,
        method_name: str,
        has_branches: bool,
        is_sharded: bool,
    ) -> None:
        if method.trains_from_base:
            raise self.conflict(f"method={method_name}, which trains each domain from the base")
        if self.past is not None and method.requires_all_domains:
            raise self.conflict(f"method={method_name}, which has no past")
        if has_branches:
            raise self.conflict("a schedule whose decay is a branch (wsd, infinite)")
        if monitor.keep == "best":
            raise self.conflict("monitor.keep=best, whose weights may exceed it")
        if self.general is not None and not monitor.general:
            raise self.conflict("monitor.general=false")
        if self.past is not None and not monitor.past:
            raise self.conflict("monitor.past=0")
        if is_sharded:
            raise self.conflict("strategy=fsdp, as it needs whole weights")

    def conflict(self, conflicting_option: str) -> ValueError:
        """The error on an option that does not go with a budget."""
        bounds = ", ".join(f"budget.{name}={bound}" for name, bound in self.bounds.items())
        return ValueError(
            f"{bounds} is invalid: incompatible with {conflicting_option}. Allowed: budget=none"
        )

    def open(self, run: Any, data: Any, domain: Any) -> Any:
        from cpt.contrib.drift_budget.controller import DriftController  # loads torch

        index = data.domains.index(domain)
        past_texts: Sequence[str] = ()
        if self.past is not None and index > 0:  # their drift is counted from this stage's first evaluation
            past_texts = data.domains[index - 1].texts
        return DriftController(
            self, run, index + 1, stages=len(data), stage_texts=domain.texts, texts=past_texts
        )
