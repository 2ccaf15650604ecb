"""What learning a domain does to other text while it goes on: the losses on a few documents, every so many
steps, and when a stage is to end because of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from cpt.core.randomness import key, shuffle
from cpt.core.schema import Natural, NonNegative, Options, Steps, config, option
from cpt.data.sources.base import GENERAL
from cpt.evaluation.change import Losses, compare_losses


@config
class MonitorOptions(Options):
    """What is looked at while a domain is learned, on validation text, and what ends its stage."""

    every: Steps | None = option("steps between looks; null: none")
    tokens: Steps = option("of each text, at most: rows drawn by key, the same at every look")
    past: Natural = option("of the domains learned before, so many at most, drawn by key")
    general: bool = option("the general text too")
    stop: NonNegative | None = option(
        "nats per token: a stage ends when the loss of past or general text has risen by more, by all of its "
        "interval"
    )
    patience: Steps | None = option(
        "a stage ends after so many looks in a row without a lower loss on its own domain"
    )
    keep: Literal["last", "best"] = option(
        "the weights that a stage ends with: the last, or those of the lowest loss on its own domain"
    )

    def __post_init__(self) -> None:
        asked = {"stop": self.stop, "patience": self.patience, "keep": self.keep}
        given = [f"{name}={value}" for name, value in asked.items() if value not in (None, "last")]
        if given and self.every is None:
            raise ValueError(f"{given[0]} with every=null; allowed: every=STEPS, so that there are looks")
        if self.stop is not None and not self.past and not self.general:
            raise ValueError(
                f"stop={self.stop} with past=0, general=false; allowed: past=1 or more, or general=true"
            )

    @property
    def decides(self) -> bool:
        """Whether what is seen has a say in what is learned."""
        return self.stop is not None or self.patience is not None or self.keep == "best"

    def interval(self, steps: int, *, looks: int) -> int:
        """Steps between looks at a stage of so many; where that is not asked for, those of so many looks."""
        return int(self.every or -(-steps // looks))

    def choose(self, own: Sequence[str], past: Sequence[str], *, stage: str) -> list[str]:
        """The texts that are looked at while a stage is learned: its own, past ones, the general one."""
        order = shuffle(np.arange(min(self.past, len(past))), len(past), stream=key("monitor", stage))
        return [*own, *(past[at] for at in sorted(order)), *[GENERAL] * self.general]


@dataclass
class Watched:
    """What was seen of a stage: at each look its step, and by text the loss, nats per token, and the 95 %
    interval of its rise since the first look."""

    steps: list[int] = field(default_factory=list)
    nll: dict[str, list[float]] = field(default_factory=dict)
    rise: dict[str, list[list[float]]] = field(default_factory=dict)
    ended: str = ""  # why the stage ended before its last step
    kept: int | None = None  # of keep=best: the step whose weights it ended with

    def add(self, step: int, began: Losses, now: Losses) -> None:
        """Adds a look; `began` are the losses by document at the first one."""
        self.steps.append(step)
        for change in compare_losses(list(now), began, now):
            self.nll.setdefault(change.text, []).append(change.after)
            self.rise.setdefault(change.text, []).append([change.low, change.high])

    def rises(self) -> dict[str, float]:
        """By how much the loss of each text stands above that of the first look."""
        return {text: values[-1] - values[0] for text, values in self.nll.items()}

    def own_loss(self, own: Sequence[str]) -> list[float]:
        """Mean loss of the stage's own texts at each look."""
        return np.mean([self.nll[text] for text in own], axis=0).tolist()

    def is_best(self, own: Sequence[str]) -> bool:
        """Whether the last look has a lower loss on the stage's own texts than all before it."""
        *before, last = self.own_loss(own)
        return last < min(before, default=np.inf)

    def judge(self, options: MonitorOptions, *, own: Sequence[str]) -> str:
        """Why the stage is to end now, in words; nothing where it goes on."""
        if options.stop is not None:
            for text, bounds in self.rise.items():
                low, high = bounds[-1]
                if text not in own and low > options.stop:
                    return f"{text} has risen by {low:.3f} to {high:.3f} nats (monitor.stop={options.stop:g})"
        losses = self.own_loss(own)
        since = len(losses) - 1 - int(np.argmin(losses))
        if options.patience is not None and since >= options.patience:
            return f"{since} looks without a lower loss on its own text (monitor.patience={options.patience})"
        return ""

    def tell(self) -> dict[str, Any]:
        """The same as scores.json has it; what is no number is null there."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Watched:
        return cls(**data)
