"""By how much losses on other text may rise while domains are learned, and what is done so that they do not
rise by more: a function of what has been seen so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from cpt.core.schema import Options, Positive, config, option
from cpt.data.sources.base import GENERAL
from cpt.evaluation.change import REPLICATES, Losses
from cpt.evaluation.metrics import bootstrap

LINE = "line"
LOOKS = {LINE: 4, "rate": 20, "end": 20}  # by what steers, at a stage where no interval is given
PAST = "past"
TRIALS, LEFT, ENOUGH = 8, 0.02, 0.05  # looks along a line; of what is unspent, what they aim to leave
FREE = 0.5  # of what is allowed, the share that is spent before the rate falls
LEAST = 1 / 32  # of the rate: below it a stage ends


Found = Mapping[str, tuple[float, float]]  # by what is bounded its rise and the upper end of its interval


@config
class BudgetOptions(Options):
    """What learning may cost other text by the end of a run, on validation text."""

    general: Positive | None = option(
        "nats per token by which the loss of the general text may rise above the base's"
    )
    past: Positive | None = option(
        "nats per token by which the losses of past domains may rise, in the mean, each since it was learned"
    )
    steer: Literal["line", "rate", "end"] = option(
        "what holds it: going back on the line to where the stage began, a lower rate, or the end of the "
        "stage at its last look within"
    )

    def __post_init__(self) -> None:
        if self.steer != LINE and not self.given:
            raise ValueError(
                f"steer={self.steer} with general=null, past=null; allowed: general=NATS or past=NATS"
            )

    @property
    def looks(self) -> int:
        """At a stage, where no interval is given."""
        return LOOKS[self.steer]

    @property
    def given(self) -> dict[str, float]:
        """What is bounded, and by what."""
        told = {GENERAL: self.general, PAST: self.past}
        return {name: value for name, value in told.items() if value is not None}

    @property
    def copies(self) -> int:
        """Of the weights, that are kept to go back to: by line both its ends."""
        return (1 + (self.steer == LINE)) * bool(self.given)

    def allow(self, number: int, *, stages: int) -> dict[str, float]:
        """What may be spent by the end of a stage, counted from 1: alike by each stage, and what one leaves
        those after it have."""
        return {name: value * number / stages for name, value in self.given.items()}


@dataclass
class Steered:
    """What a budget has seen and done in a stage; the looks are those of the monitor."""

    allowed: dict[str, float]  # nats by the end of the stage
    steer: str = "rate"  # what holds it; a run of before does not say it
    # at each look the rise and the upper end of its 95 % interval, by line of the weights that are kept
    drift: dict[str, list[list[float]]] = field(default_factory=dict)
    pace: list[float] = field(default_factory=list)  # of the schedule's rate, from each look on
    # at each look, of the way since the stage began what is kept
    ways: list[float] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    kept: int | None = None  # the last step within the budget
    spent: float = 0.0  # at that step, of what is allowed
    brake: float = 1.0  # halved whenever weights go back
    ended: str = ""

    def share(self, found: Found) -> float:
        """Of what is allowed, what is spent: of the scarcer, by its upper end."""
        shares = [upper / self.allowed[name] for name, (_, upper) in found.items()]
        return float(np.max([*shares, *[0.0] * (not shares)]))

    def see(self, step: int, found: Found, *, way: float = 1.0) -> bool:
        """Takes a look in; whether the model is within the budget. Where it is not, its weights belong back
        to the step that is kept. By line it has gone back before, to that share of its way."""
        for name, bounds in found.items():
            self.drift.setdefault(name, []).append([*bounds])
        spent = self.share(found)
        within = spent <= 1  # what is no number is not
        self.ways.append(way)
        if within:
            self.kept, self.spent = step, spent
        else:
            self.back_off()
        self.pace.append(self.choose_pace())
        if not within or way < 1 or self.pace[-1] != ([1.0, *self.pace])[-2]:
            self.acts.append(self.say(step, found, within=within))
        return within

    def back_off(self) -> None:
        """What follows from a look over the budget."""
        if self.kept is None:
            self.ended = "its budget is spent before its first step"
        if self.kept is None or self.steer == LINE:
            return
        self.brake /= 2
        if self.steer == "end":
            self.ended = "its budget is spent"
        elif self.brake < LEAST:
            self.ended = f"its budget is spent at less than {LEAST:g} of its rate"

    def choose_pace(self) -> float:
        """The share of the schedule's rate that the next steps are made with."""
        if self.ended:
            return 0.0
        return self.brake * min(1.0, (1 - self.spent) / (1 - FREE)) if self.steer == "rate" else 1.0

    def say(self, step: int, found: Found, *, within: bool) -> str:
        """What was done at a look, and why, in a line."""
        told = ", ".join(
            f"{name} {value:+.4f}, at most {upper:+.4f} of {self.allowed[name]:.4f}"
            for name, (value, upper) in found.items()
        )
        if within and self.ways[-1] < 1:
            return f"step {step}: {told}: back to {self.ways[-1]:.3g} of the way since the stage began"
        done = self.ended or f"rate x {self.pace[-1]:.3g}"
        back = "" if within or self.kept is None else f"back to step {self.kept}; "
        return f"step {step}: {told}: {back}{done}"

    def tell(self) -> dict[str, Any]:
        """The same as scores.json has it."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Steered:
        return cls(**data)


def find_way(share_at: Callable[[float], float], *, least: float, most: float) -> float:
    """The share of a way at which the model is within the budget and has spent nearly all of it: by false
    position, where each trial cuts off a tenth at least. At the beginning of the way a share of the budget
    is spent of `least`, at most 1, at its end of `most`, above 1 or no number."""
    low, high, unspent = 0.0, 1.0, 1 - least
    for _ in range(TRIALS):
        if least >= 1 - ENOUGH * unspent:
            break
        aim = (1 - LEFT * unspent - least) / (most - least) if np.isfinite(most) else 0.5
        way = low + (high - low) * min(max(aim, 0.1), 0.9)
        if (share := share_at(way)) <= 1:
            low, least = way, share
        else:
            high, most = way, share
    return low


def find_drift(names: Sequence[str], began: Losses, now: Losses, *, own: Sequence[str]) -> Found:
    """Of what is bounded, by how much it has risen since it `began`, nats per token, and the upper end of the
    95 % interval over documents; the rise itself where there is none, as of a single document. Nothing of
    what is not there: a first stage has no past."""
    past = [text for text in now if text in began and text not in (*own, GENERAL)]
    texts = {GENERAL: [GENERAL] * (GENERAL in began and GENERAL in now), PAST: past}
    return {name: find_rise(texts[name], began, now) for name in names if texts[name]}


def find_rise(texts: Sequence[str], began: Losses, now: Losses) -> tuple[float, float]:
    """The mean rise of some texts, each counting as much as any other, and its upper end."""
    samples = []
    for text in texts:
        (before, counts), (after, _) = (np.asarray(each[text], float) for each in (began, now))
        there = counts > 0
        samples.append([np.stack([before, after])[:, there], counts[there]])
    whole = np.stack([sums.sum(1) / counts.sum() for sums, counts in samples], -1)
    value = float(mean_rise(whole)["rise"]["nats"])
    if any(counts.size < 2 for _, counts in samples):
        return value, value
    _, upper = bootstrap(samples, mean_rise, replicates=REPLICATES)["rise"]["nats"]
    return value, upper


def mean_rise(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """The mean over columns of by how much the loss has grown, of means [draw, row, column] of two rows."""
    return {"rise": {"nats": (means[..., 1, :] - means[..., 0, :]).mean(-1)}}
