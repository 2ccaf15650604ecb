"""Options of a drift budget (`budget.general`, `budget.past`), checked without torch."""

from collections.abc import Iterator
from typing import Any, ClassVar

from cpt.core.schema import Positive, config, option
from cpt.data.sources.base import GENERAL
from cpt.evaluation.monitor import MonitorOptions, ObserverConfig

RISE = "allowed rise of the loss, in nats per token, on"
PAST = "past"


@config
class DriftBudget(ObserverConfig):
    """What learning may cost other text by the end of a run, on validation text."""

    counts_domains: ClassVar[bool] = True
    evaluations: ClassVar[int] = 4

    general: Positive | None = option(f"{RISE} general text above the base model's; null: no limit")
    past: Positive | None = option(f"{RISE} past domains since each was trained; null: no limit")

    @property
    def weight_copies(self) -> int:
        """Both ends of the way are kept."""
        return 2 * bool(self.given)

    def allow(self, number: int, *, stages: int) -> dict[str, float]:
        """Nats that may be spent by the end of a stage (from 1); what one leaves, those after it have."""
        return {name: value * number / stages for name, value in self.given.items()}

    def conflicts(
        self, *, monitor: MonitorOptions, method: Any, name: str, branches: bool, sharded: bool
    ) -> Iterator[str]:
        wrong = {
            f"method={name}, which trains each domain from the base": method.alone,
            f"method={name}, which has no past": self.past is not None and method.requires_all_domains,
            "a schedule whose decay is a branch (wsd, infinite)": branches,
            "monitor.keep=best, whose weights may exceed it": monitor.keep == "best",
            "monitor.general=false": GENERAL in self.given and not monitor.general,
            "monitor.past=0": PAST in self.given and not monitor.past,
            "strategy=fsdp, as it needs whole weights": sharded,
        }
        given = ", ".join(f"budget.{each}={value}" for each, value in self.given.items())
        for why in (why for why, holds in wrong.items() if holds):
            allowed = "budget.general=null, budget.past=null"
            yield f"{given} is invalid: incompatible with {why}. Allowed: {allowed}"

    def open(self, run: Any, data: Any, domain: Any) -> Any:
        from cpt.contrib.drift_budget.controller import DriftController  # loads torch

        number = data.domains.index(domain)
        last = data.domains[number - 1].texts if self.past is not None and number else ()
        return DriftController(self, run, number + 1, stages=len(data), own=domain.texts, texts=last)
