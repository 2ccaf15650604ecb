"""Losses that jump: one far above what the steps before it had is told once per stage, and counted."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW = 100  # steps whose losses are remembered
ENOUGH = 20  # of them, before one is judged
TIMES = 1.5  # the median, which a spike exceeds at least so far
DEVIATIONS = 10.0  # median absolute deviations above the median, likewise


class Spikes:
    """The spikes of one stage. `noted` is empty or: how many, the first one's step, its loss, and the running
    median then, of the loss that is minimised, as this process has it. It changes nothing that is learned."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=WINDOW)
        self.noted: list[float] = []

    def see(self, step: int, loss: float) -> str:
        """Takes a finite loss; of the first spike what is to be said, else nothing."""
        median = statistics.median(self.recent) if len(self.recent) >= ENOUGH else None
        spread = statistics.median(abs(each - median) for each in self.recent) if median is not None else 0.0
        self.recent.append(loss)
        if median is None or loss <= max(TIMES * median, median + DEVIATIONS * spread):
            return ""
        if self.noted:
            self.noted[0] += 1
            return ""
        self.noted = [1, step, loss, median]
        return f"the loss is {loss:.4g} at step {step}, far above its running median of {median:.4g}"

    def state(self) -> dict[str, Any]:
        """What a killed run needs to tell the same."""
        return {"recent": [*self.recent], "noted": self.noted}

    def load(self, state: Mapping[str, Any]) -> None:
        self.recent = deque(state["recent"], maxlen=WINDOW)
        self.noted = list(state["noted"])
