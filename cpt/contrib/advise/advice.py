"""The advice as data: what every arm traded, which one is recommended, and what is not known."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpt.contrib.advise.arms import MEANINGS, Setting, overrides
from cpt.contrib.advise.budget import Plan
from cpt.contrib.advise.choice import Choice, Wish, choose, find_front
from cpt.contrib.advise.measuring import Measured, judge
from cpt.contrib.advise.subject import Model

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
    measured: Measured, subject: Subject, plan: Plan, wish: Wish, *, lost: Sequence[str]
) -> dict[str, Any]:
    """The whole of advice.json; `lost` are lines of what was planned and not measured."""
    means = measured.means()
    # The command learns an epoch: arms are judged by that, as far as two lengths say what it brings.
    beyond = subject.epoch > ABOUT * plan.steps and len(measured.seeds) > 1
    at = min(subject.epoch, FAR * plan.steps) if beyond else None
    points = {arm: judge(means, arm, steps=plan.steps, at=None) for arm in measured.arms}
    judged = {arm: judge(means, arm, steps=plan.steps, at=at) for arm in measured.arms}
    options = {"steps": plan.steps, "weight": wish.weight if wish.bound is None else 0.0, "at": at}
    first = measured.bounds(chosen=measured.arms[0], **options)
    forgotten = "forgotten_at" if at else "forgotten"
    choice = choose(judged, {arm: first[arm][forgotten][1] for arm in points}, wish)
    if at:
        choice = choice._replace(why=f"{choice.why}, extrapolated to {at:.0f} steps a domain")
    bounds = measured.bounds(chosen=choice.arm, **options)
    front = find_front(points)
    arms = [
        {
            "arm": arm,
            "meaning": MEANINGS[arm],
            "overrides": overrides(arm, subject.real),
            "on_front": arm in front,
            **means[arm, plan.steps],
            "intervals": {name: list(each) for name, each in bounds[arm].items()},
            "lengths": [{"steps": steps, **means[arm, steps]} for own, steps in means if own == arm],
        }
        for arm in sorted(points, key=lambda arm: -points[arm].learned)
    ]
    seeds = measured.seeds[plan.steps]
    return {
        "version": VERSION,
        "wish": {"bound": wish.bound, "weight": wish.weight if wish.bound is None else None},
        "measured": {
            **{"steps": plan.steps, "tokens": round(plan.steps * subject.tokens_per_step)},
            **({"judged_steps": round(at)} if at else {}),
            **{"seeds": seeds, "lengths": list(measured.seeds), "epoch_steps": round(subject.epoch)},
        },
        "recommended": {"arm": choice.arm, "why": choice.why, "command": say_command(choice, subject)},
        "arms": arms,
        "unknown": [
            *find_unknown(bounds, choice, subject, plan, seeds=len(seeds), many=len(measured.seeds) > 1),
            *lost,
        ],
    }


def say_command(choice: Choice, subject: Subject) -> str:
    """The run that is recommended, an epoch of all of the text, as one line for a shell."""
    given = [each for each in subject.given if subject.model.is_itself or not each.startswith("model.")]
    words = ["python", "run.py", *subject.texts, *subject.model.real, *overrides(choice.arm, subject.real)]
    return shlex.join([*words, *given, "trainer.steps=null", "trainer.epochs=1"])


def find_unknown(
    bounds: dict, choice: Choice, subject: Subject, plan: Plan, *, seeds: int, many: bool
) -> list[str]:
    """A line for each thing that the runs cannot say."""
    lines = [subject.model.gap] * bool(subject.model.gap)
    alike = [arm for arm, each in bounds.items() if arm != choice.arm and reaches_zero(each["worth"])]
    if alike:
        lines.append(f"not told apart from {choice.arm} by these runs: {', '.join(alike)}")
    if seeds == 1:
        lines.append("how much another seed changes: one seed was run, intervals are over documents alone")
    elif seeds < 5:
        lines.append(
            f"how much seeds differ is known from {seeds} of them: a bootstrap of so few is too narrow"
        )
    if subject.epoch > ABOUT * plan.steps:
        times = f"an epoch of the text is {subject.epoch / plan.steps:.1f} times what was learned here"
        how = (
            "the figures for it are a line through two lengths over the logarithm of the tokens, extrapolated"
        )
        lines.append(f"{times}; {how if many else 'one length was run, so nothing is said of it'}")
    if subject.left_out:
        lines.append(f"{subject.left_out} more domains, which were not tried: more of them forget more")
    lines.append("settings between the arms, other orders of the domains, end tasks")
    return lines


def reaches_zero(interval: tuple[float, float]) -> bool:
    return not (np.isfinite(interval).all() and (interval[0] > 0 or interval[1] < 0))
