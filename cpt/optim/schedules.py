"""Learning-rate policies within a domain: factors of the peak rate at step `step` of `steps`."""

import math


def linear(step: int, *, steps: int, warmup: float) -> float:
    """Linear warm-up over a share of the steps, then linear decay to 0."""
    rise = warmup * steps
    return (step + 1) / (rise + 1) if step < rise else max(0.0, (steps - step) / max(1.0, steps - rise))


def cosine(step: int, *, steps: int, warmup: float, final: float) -> float:
    """Linear warm-up, then half a cosine from 1 down to `final`."""
    rise = warmup * steps
    if step < rise:
        return (step + 1) / (rise + 1)
    return final + (1 - final) * 0.5 * (
        1 + math.cos(math.pi * min(1.0, (step - rise) / max(1.0, steps - rise)))
    )


def constant(step: int, *, steps: int, warmup: float) -> float:
    """Linear warm-up, then the peak rate."""
    return min(1.0, (step + 1) / (warmup * steps + 1))
