"""Learning-rate policies within a domain: factors of the peak rate at step `step` of `steps`."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import number


@dataclass(frozen=True, kw_only=True)
class Schedule(Options):
    """A factor of the peak rate for each step."""

    warmup: float = option("share of the domain's steps in which the rate rises linearly", number("0 to 1"))

    @abstractmethod
    def __call__(self, step: int, *, steps: int) -> float:
        """The factor at a step, counted from 0, of so many."""


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Linear warm-up, then linear decay to 0."""

    def __call__(self, step: int, *, steps: int) -> float:
        rise = self.warmup * steps
        return (step + 1) / (rise + 1) if step < rise else max(0.0, (steps - step) / max(1.0, steps - rise))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Linear warm-up, then half a cosine from 1 down to `final`."""

    final: float = option("the factor at the end", number("0 to 1"))

    def __call__(self, step: int, *, steps: int) -> float:
        rise = self.warmup * steps
        if step < rise:
            return (step + 1) / (rise + 1)
        done = min(1.0, (step - rise) / max(1.0, steps - rise))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Linear warm-up, then the peak rate."""

    def __call__(self, step: int, *, steps: int) -> float:
        return min(1.0, (step + 1) / (self.warmup * steps + 1))
