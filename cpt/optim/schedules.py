"""Learning-rate policies: factors of the peak rate, by where a run is. These start again with each domain."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import number


@dataclass(frozen=True)
class Progress:
    """Where a run is, all counted from 0: at step `step` of the `steps` of a domain, which is number `domain`
    of `domains`, and at step `total_step` of the `total_steps` of all domains."""

    step: int
    steps: int
    domain: int
    domains: int
    total_step: int
    total_steps: int

    @classmethod
    def alone(cls, step: int, *, steps: int) -> "Progress":
        """Where there is one domain only."""
        return cls(step, steps, domain=0, domains=1, total_step=step, total_steps=steps)


@dataclass(frozen=True, kw_only=True)
class Schedule(Options):
    """A factor of the peak rate for each step."""

    warmup: float = option("share of the domain's steps in which the rate rises linearly", number("0 to 1"))

    @abstractmethod
    def __call__(self, progress: Progress) -> float:
        """The factor at a place of the run."""


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """Linear warm-up over a share of a domain's steps, then linear decay to 0."""

    def __call__(self, progress: Progress) -> float:
        rise, steps = self.warmup * progress.steps, progress.steps
        if progress.step < rise:
            return (progress.step + 1) / (rise + 1)
        return max(0.0, (steps - progress.step) / max(1.0, steps - rise))


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Linear warm-up over a share of a domain's steps, then half a cosine from 1 down to `final`."""

    final: float = option("the factor at the end", number("0 to 1"))

    def __call__(self, progress: Progress) -> float:
        rise = self.warmup * progress.steps
        if progress.step < rise:
            return (progress.step + 1) / (rise + 1)
        decayed = min(1.0, (progress.step - rise) / max(1.0, progress.steps - rise))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * decayed))


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Linear warm-up over a share of a domain's steps, then the peak rate."""

    def __call__(self, progress: Progress) -> float:
        return min(1.0, (progress.step + 1) / (self.warmup * progress.steps + 1))
