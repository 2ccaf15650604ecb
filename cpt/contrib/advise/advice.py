"""What the arms learned and forgot (nats per token), with intervals over seeds and documents, and the advice
as data and as a page: what every arm traded, the recommended one, and what is not known."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cpt.contrib.advise.runs import Model, Setting, SweepPlan, list_arms
from cpt.evaluation.metrics import bootstrap, terms
from cpt.evaluation.scores import Scores, gather_documents, load_documents
from cpt.reporting.compare import pareto_front
from cpt.reporting.figures import draw_plane
from cpt.reporting.page import Block


class Point(NamedTuple):
    """Nats per token that were learned and forgotten."""

    learned: float
    forgotten: float


class Wish(NamedTuple):
    """What is wanted: the most learned with at most `bound` forgotten, or with bound=None the most of
    learned - `weight` x forgotten."""

    bound: float | None
    weight: float


def find_front(points: Mapping[str, Point]) -> list[str]:
    """Arms that no other one beats in both, or in one and equals in the other; most learned first."""
    return pareto_front({arm: (-point.learned, point.forgotten) for arm, point in points.items()})


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


VERSION = 1
ABOUT = 1.05  # times the steps measured are no more than measured
FAR = 15  # times the steps measured a line was seen to have the best arms in their order (docs/advise.md)


@dataclass(frozen=True)
class Subject:
    """What the advice is about: overrides of texts and options, the model, its setting as it will be
    learned with, and the steps and tokens of an epoch of a domain, about."""

    texts: tuple[str, ...]
    given: tuple[str, ...]
    model: Model
    real: Setting
    epoch: float
    tokens_per_step: float
    left_out: int  # domains that were not tried


def make_advice(
    measured: Measured, subject: Subject, plan: SweepPlan, wish: Wish, *, lost: Sequence[str]
) -> dict[str, Any]:
    """The whole of advice.json; `lost` are lines of what was planned and not measured."""
    means = measured.means()
    # The command trains an epoch: arms are judged by what two lengths say of that.
    beyond = subject.epoch > ABOUT * plan.steps and len(measured.seeds) > 1
    at = min(subject.epoch, FAR * plan.steps) if beyond else None
    points = {arm: judge(means, arm, steps=plan.steps, at=None) for arm in measured.arms}
    judged = {arm: judge(means, arm, steps=plan.steps, at=at) for arm in measured.arms}
    options = {"steps": plan.steps, "weight": wish.weight if wish.bound is None else 0.0, "at": at}
    first = measured.bounds(chosen=measured.arms[0], **options)
    forgotten = "forgotten_at" if at else "forgotten"
    best, why = choose(judged, {arm: first[arm][forgotten][1] for arm in points}, wish)
    why += f", extrapolated to {at:.0f} steps a domain" if at else ""
    bounds, known = measured.bounds(chosen=best, **options), list_arms(subject.real)
    front = find_front(points)
    arms = [
        {
            "arm": arm,
            "meaning": known[arm][0],
            "overrides": known[arm][1],
            "on_front": arm in front,
            **means[arm, plan.steps],
            "intervals": {name: list(each) for name, each in bounds[arm].items()},
            "lengths": [{"steps": steps, **means[arm, steps]} for own, steps in means if own == arm],
        }
        for arm in sorted(points, key=lambda arm: -points[arm].learned)
    ]
    seeds, unknown = measured.seeds[plan.steps], find_unknown(bounds, best, subject, plan, measured)
    return {
        "version": VERSION,
        "wish": {"bound": wish.bound, "weight": wish.weight if wish.bound is None else None},
        "measured": {
            **{"steps": plan.steps, "tokens": round(plan.steps * subject.tokens_per_step)},
            **({"judged_steps": round(at)} if at else {}),
            **{"seeds": seeds, "lengths": list(measured.seeds), "epoch_steps": round(subject.epoch)},
        },
        "recommended": {"arm": best, "why": why, "command": say_command(best, subject)},
        "arms": arms,
        "unknown": [*unknown, *lost],
    }


def say_command(arm: str, subject: Subject) -> str:
    """The run that is recommended, an epoch of all of the text, as one line for a shell."""
    given = [each for each in subject.given if subject.model.is_itself or not each.startswith("model.")]
    words = ["python", "run.py", *subject.texts, *subject.model.real, *given]  # of two values the last counts
    return shlex.join([*words, *list_arms(subject.real)[arm][1], "trainer.steps=null", "trainer.epochs=1"])


def find_unknown(bounds: dict, best: str, subject: Subject, plan: SweepPlan, found: Measured) -> list[str]:
    """A line for each thing that the runs cannot say."""
    lines, seeds = [subject.model.gap] * bool(subject.model.gap), len(found.seeds[plan.steps])
    worth = {arm: each["worth"] for arm, each in bounds.items() if arm != best}
    alike = [arm for arm, (low, high) in worth.items() if not (np.isfinite(low + high) and low * high > 0)]
    if alike:
        lines.append(f"not distinguished from {best} by these runs: {', '.join(alike)}")
    if seeds == 1:
        lines.append("how much another seed changes: one seed was run, intervals are over documents alone")
    elif seeds < 5:
        told = f"how much seeds differ is known from {seeds} of them"
        lines.append(f"{told}: a bootstrap of so few is too narrow")
    if subject.epoch > ABOUT * plan.steps:
        times = f"an epoch of the text is {subject.epoch / plan.steps:.1f} times what was learned here"
        how = "one length was run, so nothing is said of it"
        if len(found.seeds) > 1:
            how = "the figures for it are a line through two lengths over the logarithm of the tokens"
            how += ", extrapolated"
        lines.append(f"{times}; {how}")
    if subject.left_out:
        lines.append(f"{subject.left_out} more domains, which were not tried: more of them forget more")
    lines.append("settings between the arms, other orders of the domains, end tasks")
    return lines


HEAD = ["arm", "what it is", "front", "learned", "forgotten", "of it: FG", "drift", "worth against it"]
LEGEND = (
    "Nats per token, with 95 % intervals over documents and seeds, drawn alike for all arms. Learned: how "
    "much lower the loss on a domain is just after it was learned than the base's. Forgotten: how much the "
    "loss has grown at the end on what was known before, a mean over the earlier domains (FG) and the "
    "general text (drift). The last column: the arm's worth by what was wished, minus that of the "
    "recommended one; where an epoch is extrapolated, after that."
)
Arm = Mapping[str, Any]


def make_blocks(advice: Mapping[str, Any]) -> list[Block]:
    best, cells = find_arm(advice, advice["recommended"]["arm"]), []
    for arm in advice["arms"]:
        numbers = [span(arm, name) if arm[name] is not None else "–" for name in ("learned", "forgotten")]
        numbers += [f"{arm[name]:.4f}" if arm[name] is not None else "–" for name in ("FG", "drift")]
        against = format_bounds(arm["intervals"]["worth"]) if any(arm["intervals"]["worth"]) else "–"
        cells.append([arm["arm"], arm["meaning"], "yes" if arm["on_front"] else "", *numbers, against])
    table = {"head": HEAD, "cells": cells, "words": 3}
    return [
        Block(title=f"Recommended: {best['arm']}", lines=tell(advice), picture=draw(advice), name="plane"),
        Block(title="The command", code=advice["recommended"]["command"]),
        Block(title="What each arm traded", lines=[LEGEND], chosen=(0, 1, 3, 4, 7), **table),
        Block(title="What is not known", lines=[f"· {line}" for line in advice["unknown"]]),
    ]


def tell(advice: Mapping[str, Any]) -> list[str]:
    """What is recommended, why, and at what trade."""
    best, at = find_arm(advice, advice["recommended"]["arm"]), advice["measured"]
    seeds = f"{len(at['seeds'])} seed{'s' * (len(at['seeds']) > 1)}"
    trade = f"learned {span(best, 'learned')}, forgotten {span(best, 'forgotten')} nats."
    lines = [f"{best['meaning']}: {advice['recommended']['why']}."]
    lines.append(f"After {at['steps']} steps ({at['tokens']:,} tokens) a domain, {seeds}: {trade}")
    if "learned_at" in best["intervals"]:
        bounds = best["intervals"]
        learned, forgotten = (format_bounds(bounds[f"{name}_at"]) for name in ("learned", "forgotten"))
        whole, steps = f"an epoch has about {at['epoch_steps']}", at.get("judged_steps", at["epoch_steps"])
        trade = f"learned {learned}, forgotten {forgotten} nats."
        lines.append(f"After {steps} steps a domain ({whole}), extrapolated: {trade}")
    return lines


def find_arm(advice: Mapping[str, Any], name: str) -> Arm:
    return next(arm for arm in advice["arms"] if arm["arm"] == name)


def span(arm: Arm, name: str) -> str:
    return f"{arm[name]:.4f} {format_bounds(arm['intervals'][name])}"


def format_bounds(bounds: Sequence[float | None]) -> str:
    if None in bounds:
        return "[–]"  # of one document there is no interval
    return f"[{bounds[0]:.4f}, {bounds[1]:.4f}]"


def draw(advice: Mapping[str, Any]) -> bytes:
    """The plane of what each arm learned and forgot, its front, and the lines over tokens."""
    best, points, lines = advice["recommended"]["arm"], {}, []
    for arm in advice["arms"]:
        path = [each for each in arm["lengths"] if each["steps"] != advice["measured"]["steps"]]
        steps = {f"{arm['arm']}, {each['steps']} steps": each for each in path}
        lines.append([f"{arm['arm']} (recommended)" if arm["arm"] == best else arm["arm"], *steps])
        for name, each in zip(lines[-1], (arm, *steps.values()), strict=True):
            points[name] = [None if each["learned"] is None else -each["learned"]], [each["forgotten"]]
    labels = {"x": "not learned: minus what was learned (nats)", "y": "forgotten (nats)"}
    return draw_plane(points, lines=lines, **labels)
