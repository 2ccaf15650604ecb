"""Learning-rate schedules: factors of the peak rate by the position in the run. Linear, Cosine and Constant
restart with each domain; the others relate a domain to those before it."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Allowed, Options, PositiveShare, Probability, config, option

Peaks = Annotated[
    Annotated[tuple[Probability, ...], MinLen(1)] | None,
    Allowed("null, or a list of shares of the peak rate, each 0 to 1"),
]
ALPHA = 10  # how steep an inverse square root is: 1 / sqrt(1 + 10 x)


@dataclass(frozen=True)
class Progress:
    """The position of an optimizer step in a run. Steps and domains are counted from 0."""

    step: int  # within the domain
    steps: int  # of the domain
    domain: int  # its index in the order
    domains: int  # number of all domains
    total_step: int  # within the run
    total_steps: int  # of all domains
    first_domain_steps: int

    @classmethod
    def in_single_domain(cls, step: int, *, steps: int) -> "Progress":
        """A position in a run of one domain."""
        return cls(
            step,
            steps,
            domain=0,
            domains=1,
            total_step=step,
            total_steps=steps,
            first_domain_steps=steps,
        )

    @property
    def joined(self) -> "Progress":
        """The same position in a run in which all domains are one."""
        return Progress.in_single_domain(self.total_step, steps=self.total_steps)

    @property
    def steps_before(self) -> int:
        """The steps of earlier domains."""
        return self.total_step - self.step


def half_cosine(position: float, *, low: float, high: float = 1.0) -> float:
    """From `high` at position 0 down to `low` at position 1 and beyond."""
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, position)))


def warm_cosine(step: float, steps: float, *, warmup_steps: float, low: float, high: float = 1.0) -> float:
    """Linear warm-up to `high`, then half a cosine down to `low` at the end of all `steps`."""
    if step < warmup_steps:
        return high * (step + 1) / (warmup_steps + 1)
    position = (step - warmup_steps) / max(1.0, steps - warmup_steps)
    return half_cosine(position, low=low, high=high)


def compute_decay_position(step: int, steps: int, *, start: float) -> float:
    """Where a step is in a final decay, 0 at its `start` and 1 at the domain's end."""
    return min(1.0, (step - start) / (steps - start))


def inverse_square_root(position: float) -> float:
    """h(x) = 1 / sqrt(1 + ALPHA x) - 1: 0 at position 0, and negative from there on."""
    return 1 / math.sqrt(1 + ALPHA * position) - 1


@config
class Schedule(Options):
    """A factor of the peak rate for each step."""

    warmup_ratio: Probability = option("share of the domain's steps for linear warm-up")

    @property
    def needs_end(self) -> bool:
        """Whether rates depend on how many domains follow."""
        return False

    @property
    def branches(self) -> bool:
        """Whether a domain ends in a decay branch, before which the next domain starts."""
        return False

    @abstractmethod
    def __call__(self, progress: Progress) -> float:
        """The factor at a position of the run."""

    def branch_step(self, steps: int) -> int:
        """The first step of the decay branch in a domain of `steps`; `steps` for a schedule without one."""
        return steps


@config
class Linear(Schedule):
    """Linear warm-up over a share of a domain's steps, then linear decay to 0."""

    def __call__(self, progress: Progress) -> float:
        steps = progress.steps
        warmup_steps = self.warmup_ratio * steps
        if progress.step < warmup_steps:
            return (progress.step + 1) / (warmup_steps + 1)
        return max(0.0, (steps - progress.step) / max(1.0, steps - warmup_steps))


@config
class Cosine(Schedule):
    """Linear warm-up over a share of a domain's steps, then half a cosine from 1 down to `final`."""

    final: Probability = option("factor at the end")

    def __call__(self, progress: Progress) -> float:
        warmup_steps = self.warmup_ratio * progress.steps
        return warm_cosine(progress.step, progress.steps, warmup_steps=warmup_steps, low=self.final)


@config
class Constant(Schedule):
    """Linear warm-up over a share of a domain's steps, then the peak rate."""

    def __call__(self, progress: Progress) -> float:
        warmup_steps = self.warmup_ratio * progress.steps
        return min(1.0, (progress.step + 1) / (warmup_steps + 1))


@config
class Rewarm(Cosine):
    """Cosine in each domain, to a peak of its own (Gupta et al. 2023, arXiv 2308.04014; Ibrahim et al., TMLR
    2024, arXiv 2403.08763)."""

    peaks: Peaks = option("factor at the peak of each domain, the last one for all further domains; null: 1")

    def __call__(self, progress: Progress) -> float:
        peak = 1.0
        if self.peaks:
            peak = self.peaks[min(progress.domain, len(self.peaks) - 1)]
        return peak * super().__call__(progress)


@config
class Once(Cosine):
    """One warm-up (a share of all steps) and one half cosine over all domains."""

    @property
    def needs_end(self) -> bool:
        return True

    def __call__(self, progress: Progress) -> float:
        return super().__call__(progress.joined)


@config
class Decayed(Cosine):
    """Cosine in the first domain; then constant at `final`."""

    final: PositiveShare = option("factor from the end of the first domain on")

    def __call__(self, progress: Progress) -> float:
        if progress.domain > 0:
            return self.final
        return super().__call__(progress)


@config
class Infinite(Schedule):
    """Warm-up, a cool-down to a constant for all later domains, and an optional decay to `final` at the end
    (Ibrahim et al., TMLR 2024, section 4.2). Without the decay, domains can be added.

    Cool-down, x from 0 to 1: constant + (1 - constant) f(x), f = (1 + cos(pi x)) / 2 or
    1 - h(x) / h(1) with h(x) = 1 / sqrt(1 + 10 x) - 1. Decay: constant * (final / constant)^x."""

    cooldown: Probability = option("share of the first domain's steps in which the rate cools down")
    constant: PositiveShare = option("factor of all later domains")
    form: Literal["cosine", "inverse_square_root"] = option("shape of the cool-down")
    anneal: Probability = option("final share of a domain's steps in which the rate decays")
    annealed: Literal["last", "each"] = option("domains that end with a decay; each: as decay branches")
    final: PositiveShare = option("factor at the end of the decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_ratio + self.cooldown + self.anneal > 1:
            raise ValueError(
                f"warmup_ratio={self.warmup_ratio:g} with cooldown={self.cooldown:g}, anneal={self.anneal:g} "
                "is invalid: more than a domain. Allowed: 1 in all"
            )

    @property
    def needs_end(self) -> bool:
        return self.annealed == "last" and self.anneal > 0

    @property
    def branches(self) -> bool:
        return self.annealed == "each" and self.anneal > 0

    def branch_step(self, steps: int) -> int:
        # The first step after `decay_start`, which need not be whole.
        return min(steps, math.floor(steps * (1 - self.anneal)) + 1)

    def __call__(self, progress: Progress) -> float:
        is_last_domain = progress.domain == progress.domains - 1
        has_decay = self.annealed == "each" or is_last_domain
        decay_start = progress.steps * (1 - self.anneal)  # a step of the domain
        if has_decay and progress.step > decay_start:
            position = compute_decay_position(progress.step, progress.steps, start=decay_start)
            return self.constant * (self.final / self.constant) ** position

        # One warm-up and one cool-down in a run, both in its first domain.
        warmup_steps = self.warmup_ratio * progress.first_domain_steps
        cooldown_steps = self.cooldown * progress.first_domain_steps
        if progress.total_step < warmup_steps:
            return (progress.total_step + 1) / (warmup_steps + 1)
        if progress.total_step < warmup_steps + cooldown_steps:
            return self.cool_down((progress.total_step - warmup_steps) / cooldown_steps)
        return self.constant

    def cool_down(self, position: float) -> float:
        """The factor at a position of the cool-down: 1 at position 0, `constant` at position 1."""
        if self.form == "cosine":
            return half_cosine(position, low=self.constant)
        remaining_share = 1 - inverse_square_root(position) / inverse_square_root(1)
        return self.constant + (1 - self.constant) * remaining_share


@config
class WSD(Schedule):
    """Warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv 2404.06395; 1 - sqrt: Hägele et al., NeurIPS
    2024). With `branched` a domain's decay is a branch, and the next domain starts before it, at the peak."""

    decay: Probability = option("final share of a domain's steps in which the rate decays")
    form: Literal["root", "linear"] = option("shape of the decay for x from 0 to 1: 1 - sqrt(x) or 1 - x")
    final: Probability = option("factor at the end of a domain")
    branched: bool = option("start the next domain from the weights before the decay")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_ratio + self.decay > 1:
            raise ValueError(
                f"warmup_ratio={self.warmup_ratio:g} with decay={self.decay:g} is invalid: "
                "more than a domain. Allowed: 1 in all"
            )

    @property
    def branches(self) -> bool:
        return self.branched and self.decay > 0

    def branch_step(self, steps: int) -> int:
        return min(steps, math.floor(steps * (1 - self.decay)) + 1)

    def __call__(self, progress: Progress) -> float:
        warmup_steps = self.warmup_ratio * progress.steps
        decay_start = progress.steps * (1 - self.decay)
        # Weights from before a decay have been trained at the peak rate last.
        has_warmup = progress.domain == 0 or not self.branched
        if has_warmup and progress.step < warmup_steps:
            return (progress.step + 1) / (warmup_steps + 1)
        if progress.step <= decay_start:
            return 1.0

        position = compute_decay_position(progress.step, progress.steps, start=decay_start)
        decayed_share = math.sqrt(position) if self.form == "root" else position
        return self.final + (1 - self.final) * (1 - decayed_share)


@config
class ReciprocalRoot(Schedule):
    """(1 - final) sqrt(w / s) + final after w steps of warm-up, and a last linear decay to `final` (TiC-LM,
    Li et al., ACL 2025, arXiv 2504.02107). s counts within a domain, or on across all of them."""

    cooldown: Probability = option("final share of a domain's steps in which the rate falls to final")
    final: Probability = option("factor at the end of a domain")
    across: bool = option("continue the schedule across domains, with one warm-up")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.warmup_ratio:
            raise InvalidOptionError(
                "warmup_ratio",
                0,
                reason="the rate falls by sqrt(warmup / steps)",
                allowed="above 0, at most 1",
            )

    def __call__(self, progress: Progress) -> float:
        cooldown_start = progress.steps * (1 - self.cooldown)
        if progress.step <= cooldown_start:
            return self.reciprocal_root(progress.step, progress)
        # From where the curve is at the start of the decay, so that the rate has no jump there.
        start_factor = self.reciprocal_root(cooldown_start, progress)
        position = compute_decay_position(progress.step, progress.steps, start=cooldown_start)
        return self.final + (start_factor - self.final) * (1 - position)

    def reciprocal_root(self, step: float, progress: Progress) -> float:
        """The factor at a step of the domain without the last decay: linear warm-up, then sqrt(w / s)."""
        if self.across:
            steps_before = progress.steps_before
            warmup_steps = self.warmup_ratio * progress.first_domain_steps
        else:
            steps_before = 0
            warmup_steps = self.warmup_ratio * progress.steps

        # At least one step, so that the first factor is 1 at most; steps are counted from 1.
        warmup_steps = max(1.0, warmup_steps)
        count = step + 1 + steps_before
        if count < warmup_steps:
            return count / warmup_steps
        return (1 - self.final) * math.sqrt(warmup_steps / count) + self.final


@config
class Autoregressive(Schedule):
    """Half a cosine in each domain, from a falling peak (TiC-LM, Li et al., ACL 2025): a domain of n steps
    after b starts at the height of one cosine over all b + n steps at b / (b + n)."""

    final: Probability = option("factor at the end of a domain")

    def __call__(self, progress: Progress) -> float:
        warmup_steps = self.warmup_ratio * progress.steps
        steps_before = progress.steps_before
        peak = half_cosine(steps_before / (steps_before + progress.steps), low=self.final)
        return warm_cosine(
            progress.step, progress.steps, warmup_steps=warmup_steps, low=self.final, high=peak
        )
