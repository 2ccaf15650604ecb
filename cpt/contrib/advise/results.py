"""What the arms learned and forgot (nats per token), with intervals over seeds and documents, and which arm
that recommends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cpt.evaluation.metrics import bootstrap, terms
from cpt.evaluation.scores import Scores, gather_documents, load_documents


class Point(NamedTuple):
    """Nats per token that were learned and forgotten."""

    learned: float
    forgotten: float


class Wish(NamedTuple):
    """What is wanted: the most learned with at most `bound` forgotten, or with bound=None the most of
    learned - `weight` x forgotten."""

    bound: float | None
    weight: float


def worth(point: Point, weight: float) -> float:
    return point.learned - weight * point.forgotten


def choose(points: Mapping[str, Point], highest: Mapping[str, float], wish: Wish) -> tuple[str, str]:
    """The arm to recommend, and why; `highest` is the upper end of the interval of what each forgets, nan
    where it has none. An arm whose whole interval holds the bound comes before one whose mean alone does."""
    if wish.bound is None:
        best = max(points, key=lambda arm: worth(points[arm], wish.weight))
        return best, f"the most of learned - {wish.weight:g} x forgotten"
    shown = [arm for arm in points if highest[arm] <= wish.bound]
    held = [arm for arm, point in points.items() if point.forgotten <= wish.bound]
    for kept, sure in ((shown, "by the whole of its interval"), (held, "by its mean, not by its interval")):
        if kept:
            best = max(kept, key=lambda arm: points[arm].learned)
            return best, f"the most learned of those that forget at most {wish.bound:g} nats, {sure}"
    least = min(points, key=lambda arm: points[arm].forgotten)
    return least, f"no arm forgets at most {wish.bound:g} nats; this one forgets least"


Array = np.ndarray
Key = tuple[str, int, int]  # arm, steps, seed
Bounds = tuple[float, float]
REPLICATES = 1000
QUANTITIES = ("learned", "forgotten", "FG", "drift")
LEADING = tuple(enumerate(QUANTITIES[:2]))  # those that arms are judged by


class ArmRun(NamedTuple):
    """The scores of a run, and per column nats [row, document] and scored tokens [document]."""

    scores: Scores
    sums: Sequence[Array]
    counts: Sequence[Array]


def read_arm_run(folder: Path) -> ArmRun:
    """A finished run. Raises OSError, ValueError for one that cannot be read."""
    scores = Scores.load(folder / "scores.json")
    rows = load_documents(folder, range(len(scores.rows)))
    return ArmRun(scores, *gather_documents(rows, scores))


def trade(nll: Array, scores: Scores) -> dict[str, Array]:
    """QUANTITIES of matrices [..., row, column] in nats, each [...].

    learned: `mean_j (L[0][j] - L[j][j])`; FG and drift as in cpt.evaluation.metrics; forgotten: the mean of
    the terms of both, the general text being one more text that was known before."""
    found = terms(nll, layout=scores)
    known = [found[name] for name in ("FG", "general_drift") if name in found]
    none = np.full(nll.shape[:-2], np.nan)
    return {
        "learned": (found["ZS"] - found["CPT"]).mean(-1),
        "forgotten": np.concatenate(known, -1).mean(-1) if known else none,
        "FG": found["FG"].mean(-1) if "FG" in found else none,
        "drift": found["general_drift"].mean(-1) if "general_drift" in found else none,
    }


@dataclass(frozen=True)
class Measured:
    """All runs together, by arm, steps and seed, on the same documents."""

    runs: Mapping[Key, ArmRun]

    @property
    def seeds(self) -> dict[int, list[int]]:
        """By steps, the seeds that all arms have."""
        arms = {arm for arm, _, _ in self.runs}
        found: dict[int, list[int]] = {}
        for steps in sorted({steps for _, steps, _ in self.runs}):
            each = [{seed for arm, at, seed in self.runs if (arm, at) == (own, steps)} for own in arms]
            if shared := set.intersection(*each):
                found[steps] = sorted(shared)
        return found

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for arm, _, _ in self.runs))

    def values(self, nll: Array, weights: Mapping[int, Array]) -> dict[tuple[str, int], dict[str, Array]]:
        """QUANTITIES of each arm and length, [...], of the matrices of all runs one below the other,
        [..., run x row, column]; `weights` says by steps how much each seed counts, [..., seed]."""
        scores = next(iter(self.runs.values())).scores
        parts = nll.reshape(*nll.shape[:-2], len(self.runs), len(scores.rows), nll.shape[-1])
        places, each = {key: place for place, key in enumerate(self.runs)}, trade(parts, scores)
        return {
            (arm, steps): {
                name: (values[..., [places[arm, steps, seed] for seed in seeds]] * weights[steps]).sum(-1)
                for name, values in each.items()
            }
            for steps, seeds in self.seeds.items()
            for arm in self.arms
        }

    def means(self) -> dict[tuple[str, int], dict[str, float]]:
        """QUANTITIES of each arm and length, means over the seeds."""
        nll = np.concatenate([run.scores.matrix for run in self.runs.values()])
        even = {steps: np.full(len(seeds), 1 / len(seeds)) for steps, seeds in self.seeds.items()}
        found = self.values(nll, even)
        return {key: {name: float(value) for name, value in each.items()} for key, each in found.items()}

    def bounds(
        self, *, chosen: str, steps: int, weight: float, at: float | None
    ) -> dict[str, dict[str, Bounds]]:
        """95 % intervals by arm: QUANTITIES after a number of steps, and `learned_at`, `forgotten_at` more
        tokens, `at` in steps, where there are two lengths; `worth`, by the latter where there are such, minus
        the chosen arm's. Documents and seeds are drawn together, alike for all arms: differences are
        paired."""
        at = at if len(self.seeds) > 1 else None
        runs, samples = [*self.runs.values()], []
        for column, count in enumerate(runs[0].counts):
            sums = np.concatenate([run.sums[column] for run in runs])
            samples.append([sums[:, count > 0], count[count > 0]])
        draw = np.random.default_rng(0)

        def compute(nll: Array) -> dict[str, dict[str, Array]]:
            weights = {}
            for steps_each, seeds in self.seeds.items():
                even = np.full(n := len(seeds), 1 / len(seeds))
                weights[steps_each] = draw.multinomial(n, even, size=len(nll)) / n
            found = self.values(nll, weights)
            points = {arm: judge(found, arm, steps=steps, at=at) for arm in self.arms}
            return {
                arm: {
                    **found[arm, steps],
                    "worth": worth(points[arm], weight) - worth(points[chosen], weight),
                    **({f"{name}_at": points[arm][place] for place, name in LEADING} if at else {}),
                }
                for arm in self.arms
            }

        found = bootstrap(samples, compute, replicates=REPLICATES)
        return {arm: {name: (low, high) for name, (low, high) in each.items()} for arm, each in found.items()}


def judge(found: Mapping[tuple[str, int], Mapping], arm: str, *, steps: int, at: float | None) -> Point:
    """What an arm learned and forgot after a number of steps, or `at` more: on the line of least squares over
    the logarithm of the lengths, of which there are two or more."""
    if not at:
        return Point(*(found[arm, steps][name] for _, name in LEADING))
    lengths = [each for own, each in found if own == arm]
    places = np.log(np.asarray(lengths, float))
    off = places - places.mean()
    weights = 1 / len(places) + (np.log(at) - places.mean()) * off / (off @ off)
    pairs = list(zip(weights, lengths, strict=True))
    return Point(*(sum(weight * found[arm, each][name] for weight, each in pairs) for _, name in LEADING))
