"""Learning-rate policies: factors of the peak rate, by where a run is. These start again with each domain."""

import math
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Linear:
    """Linear warm-up over a share of a domain's steps, then linear decay to 0."""

    warmup: float

    def __call__(self, progress: Progress) -> float:
        rise, steps = self.warmup * progress.steps, progress.steps
        if progress.step < rise:
            return (progress.step + 1) / (rise + 1)
        return max(0.0, (steps - progress.step) / max(1.0, steps - rise))


@dataclass(frozen=True)
class Cosine:
    """Linear warm-up over a share of a domain's steps, then half a cosine from 1 down to `final`."""

    warmup: float
    final: float

    def __call__(self, progress: Progress) -> float:
        rise = self.warmup * progress.steps
        if progress.step < rise:
            return (progress.step + 1) / (rise + 1)
        decayed = min(1.0, (progress.step - rise) / max(1.0, progress.steps - rise))
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * decayed))


@dataclass(frozen=True)
class Constant:
    """Linear warm-up over a share of a domain's steps, then the peak rate."""

    warmup: float

    def __call__(self, progress: Progress) -> float:
        return min(1.0, (progress.step + 1) / (self.warmup * progress.steps + 1))
