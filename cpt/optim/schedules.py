"""Learning-rate schedules: factors of the peak rate, by where a run is. Those here start again with each
domain; cpt.optim.policies has those that do not."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import number


@dataclass(frozen=True)
class Progress:
    """Where a run is, all counted from 0: at step `step` of the `steps` of a domain, which is number `domain`
    of `domains`, and at step `total_step` of the `total_steps` of all domains, of which the first has
    `first`."""

    step: int
    steps: int
    domain: int
    domains: int
    total_step: int
    total_steps: int
    first: int

    @classmethod
    def alone(cls, step: int, *, steps: int) -> "Progress":
        """Where there is one domain only."""
        return cls(step, steps, domain=0, domains=1, total_step=step, total_steps=steps, first=steps)

    @property
    def joined(self) -> "Progress":
        """The same place where all domains are one."""
        return Progress.alone(self.total_step, steps=self.total_steps)


def half_cosine(place: float, *, low: float, high: float = 1.0) -> float:
    """From `high` at place 0 down to `low` at place 1, and no further."""
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, place)))


def warm_cosine(step: float, steps: float, *, rise: float, low: float, high: float = 1.0) -> float:
    """A linear rise to `high` in so many of the steps, then half a cosine down to `low`."""
    if step < rise:
        return high * (step + 1) / (rise + 1)
    return half_cosine((step - rise) / max(1.0, steps - rise), low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Schedule(Options):
    """A factor of the peak rate for each step."""

    warmup: float = option("share of the domain's steps in which the rate rises linearly", number("0 to 1"))

    @abstractmethod
    def __call__(self, progress: Progress) -> float:
        """The factor at a place of the run."""

    @property
    def branches(self) -> bool:
        """Whether a domain ends in a decay that is a branch: it is scored and exported, and the next domain
        goes on with the weights before it."""
        return False

    @property
    def needs_end(self) -> bool:
        """Whether rates depend on how many domains follow."""
        return False

    def branch_step(self, steps: int) -> int:
        """The first step of that decay, of so many of a domain; all of them where there is none."""
        return steps


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
        return warm_cosine(progress.step, progress.steps, rise=rise, low=self.final)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """Linear warm-up over a share of a domain's steps, then the peak rate."""

    def __call__(self, progress: Progress) -> float:
        return min(1.0, (progress.step + 1) / (self.warmup * progress.steps + 1))
