"""What fits into a budget: how many arms, seeds and steps. Small pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpt.contrib.advise.arms import work

# Seeds, whether there is a shorter length too, and the steps per domain below which it is not made: what an
# arm is worth changes more from 50 steps to an epoch than from seed to seed (docs/advise.md).
DESIGNS = ((3, True, 500), (2, True, 500), (1, True, 20))
SEEDS = 3  # of the richest of them
LEAST = 10  # steps per domain below which nothing is learned
FEWEST = 3  # arms, of more that were asked for
SHORTER = 4  # the shorter length is this part of the other


@dataclass(frozen=True)
class Costs:
    """Seconds of a run: of a step of the reference, and of all that is there whatever its steps."""

    step: float
    fixed: float
    stages: int

    def run(self, steps: int, effort: float = 1.0) -> float:
        return self.fixed + self.stages * steps * self.step * effort


@dataclass(frozen=True)
class Round:
    """Runs that are made together: one of each arm, of a seed and so many steps per domain."""

    seed: int
    steps: int


@dataclass(frozen=True)
class Plan:
    """The runs, and the seconds that they take together as far as the pilot tells."""

    arms: tuple[str, ...]
    steps: int
    seeds: int
    short: bool  # whether the first seed is learned with a quarter of the steps too
    seconds: float

    @property
    def rounds(self) -> list[Round]:
        """In the order in which they are made: each can be left out with those behind it."""
        shorter = [Round(0, cut_steps(self.steps))] if self.short else []
        return [Round(0, self.steps), *shorter, *(Round(seed, self.steps) for seed in range(1, self.seeds))]


def cut_steps(steps: int) -> int:
    return max(1, steps // SHORTER)


def time_round(arms: Sequence[str], steps: int, costs: Costs, *, jobs: int) -> float:
    """Seconds of a round with so many runs at once."""
    return (len(arms) * costs.fixed + costs.stages * steps * costs.step * work(arms)) / jobs


def make_plan(
    arms: Sequence[str], costs: Costs, *, seconds: float, jobs: int, most: int, seeds: int = SEEDS
) -> Plan:
    """The first of DESIGNS, as far as it has at most so many seeds, in which each run learns the steps that
    it asks for, with as many of them as fit, at most `most`; where none does, one seed of one length, then of
    fewer arms. Raises ValueError where even these do not fit."""
    least = min(LEAST, most)
    designs = [(arms, count, short, min(steps, most)) for count, short, steps in DESIGNS if count <= seeds]
    fewer = range(len(arms), min(FEWEST, len(arms)) - 1, -1)
    designs += [(arms[:count], 1, False, least) for count in fewer]
    for chosen, count, short, wanted in designs:
        steps = min(most, fitting(chosen, count, short, costs, seconds=seconds, jobs=jobs))
        if steps >= wanted:
            lengths = [steps] * count + [cut_steps(steps)] * short
            takes = sum(time_round(chosen, each, costs, jobs=jobs) for each in lengths)
            return Plan(tuple(chosen), steps, count, short, takes)
    needed = time_round(arms[:FEWEST], least, costs, jobs=jobs)
    raise ValueError(
        f"{max(0, seconds):.0f} s are left of --hours, and {min(FEWEST, len(arms))} runs of {least} steps "
        f"take {needed:.0f} s; allowed: more --hours; what was read and made on the way is there"
    )


def fitting(arms: Sequence[str], seeds: int, short: bool, costs: Costs, *, seconds: float, jobs: int) -> int:
    """Steps per domain of each run; 0 or less where not even the starts fit."""
    lengths = seeds + short
    left = seconds * jobs - lengths * len(arms) * costs.fixed
    return int(left / (costs.stages * costs.step * work(arms) * (seeds + short / SHORTER)))
