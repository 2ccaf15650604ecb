"""The advice as data and as a page: what every arm traded, the recommended one, and what is not known."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpt.contrib.advise.candidates import MEANINGS, Model, Setting, overrides
from cpt.contrib.advise.results import Measured, Recommendation, Wish, choose, find_front, judge
from cpt.contrib.advise.runs import SweepPlan
from cpt.reporting.drawing import figure, literal, png, style
from cpt.reporting.page import Block

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


def say_command(choice: Recommendation, subject: Subject) -> str:
    """The run that is recommended, an epoch of all of the text, as one line for a shell."""
    given = [each for each in subject.given if subject.model.is_itself or not each.startswith("model.")]
    words = ["python", "run.py", *subject.texts, *subject.model.real, *overrides(choice.arm, subject.real)]
    return shlex.join([*words, *given, "trainer.steps=null", "trainer.epochs=1"])


def find_unknown(
    bounds: dict, choice: Recommendation, subject: Subject, plan: SweepPlan, *, seeds: int, many: bool
) -> list[str]:
    """A line for each thing that the runs cannot say."""
    lines = [subject.model.gap] * bool(subject.model.gap)
    worth = {arm: each["worth"] for arm, each in bounds.items() if arm != choice.arm}
    alike = [arm for arm, (low, high) in worth.items() if not (np.isfinite(low + high) and low * high > 0)]
    if alike:
        lines.append(f"not told apart from {choice.arm} by these runs: {', '.join(alike)}")
    if seeds == 1:
        lines.append("how much another seed changes: one seed was run, intervals are over documents alone")
    elif seeds < 5:
        told = f"how much seeds differ is known from {seeds} of them"
        lines.append(f"{told}: a bootstrap of so few is too narrow")
    if subject.epoch > ABOUT * plan.steps:
        times = f"an epoch of the text is {subject.epoch / plan.steps:.1f} times what was learned here"
        how = "one length was run, so nothing is said of it"
        if many:
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
    best = find_arm(advice, advice["recommended"]["arm"])
    return [
        Block(title=f"Recommended: {best['arm']}", lines=tell(advice), picture=draw(advice), name="plane"),
        Block(title="The command", code=advice["recommended"]["command"]),
        Block(
            title="What each arm traded",
            lines=[LEGEND],
            head=HEAD,
            words=3,
            chosen=(0, 1, 3, 4, 7),
            cells=[row_of(arm) for arm in advice["arms"]],
        ),
        Block(title="What is not known", lines=[f"· {line}" for line in advice["unknown"]]),
    ]


def tell(advice: Mapping[str, Any]) -> list[str]:
    """What is recommended, why, and at what trade."""
    best, at = find_arm(advice, advice["recommended"]["arm"]), advice["measured"]
    seeds = f"{len(at['seeds'])} seed{'s' * (len(at['seeds']) > 1)}"
    trade = f"learned {span(best, 'learned')}, forgotten {span(best, 'forgotten')} nats."
    lines = [
        f"{best['meaning']}: {advice['recommended']['why']}.",
        f"After {at['steps']} steps ({at['tokens']:,} tokens) a domain, {seeds}: {trade}",
    ]
    if "learned_at" in best["intervals"]:
        bounds = best["intervals"]
        lines.append(
            f"After {at.get('judged_steps', at['epoch_steps'])} steps a domain (an epoch has about "
            f"{at['epoch_steps']}), extrapolated: learned "
            f"{format_bounds(bounds['learned_at'])}, forgotten {format_bounds(bounds['forgotten_at'])} nats."
        )
    return lines


def find_arm(advice: Mapping[str, Any], name: str) -> Arm:
    return next(arm for arm in advice["arms"] if arm["arm"] == name)


def span(arm: Arm, name: str) -> str:
    return f"{arm[name]:.4f} {format_bounds(arm['intervals'][name])}"


def format_bounds(bounds: Sequence[float | None]) -> str:
    if None in bounds:
        return "[–]"  # of one document there is no interval
    return f"[{bounds[0]:.4f}, {bounds[1]:.4f}]"


def row_of(arm: Arm) -> list[str]:
    numbers = [span(arm, name) if arm[name] is not None else "–" for name in ("learned", "forgotten")]
    parts = [f"{arm[name]:.4f}" if arm[name] is not None else "–" for name in ("FG", "drift")]
    worth = arm["intervals"]["worth"]
    against = format_bounds(worth) if any(worth) else "–"
    return [arm["arm"], arm["meaning"], "yes" if arm["on_front"] else "", *numbers, *parts, against]


def draw(advice: Mapping[str, Any]) -> bytes:
    """The plane, its front, the lines over tokens, the bound and the recommended arm."""
    drawn = figure((8.0, 5.2))
    axes = drawn.subplots()
    for number, arm in enumerate(advice["arms"]):  # a point with its intervals, and the way to it
        there, look = (arm["learned"], arm["forgotten"]), style(number)
        own, bounds = {"color": look["color"]}, [arm["intervals"][name] for name in ("learned", "forgotten")]
        both = zip(there, bounds, strict=True)
        xerr, yerr = ([[max(0.0, at - low)], [max(0.0, high - at)]] for at, (low, high) in both)
        how = {"marker": look["marker"], "markersize": 6, "linewidth": 0.7}
        axes.errorbar(*there, xerr=xerr, yerr=yerr, **how, **own)
        path = sorted(arm["lengths"], key=lambda each: each["steps"])
        places = [[each[name] for each in path] for name in ("learned", "forgotten")]
        axes.plot(*places, linestyle=":", linewidth=1, **own)
        beside = {"textcoords": "offset points", "xytext": (6, 6), "fontsize": 8}
        axes.annotate(literal(arm["arm"], width=30), there, **beside, **own)
    front = sorted((arm for arm in advice["arms"] if arm["on_front"]), key=lambda arm: arm["learned"])
    places = [[arm[name] for arm in front] for name in ("learned", "forgotten")]
    axes.plot(*places, color="0.6", linewidth=1, zorder=0, label="front")
    best = find_arm(advice, advice["recommended"]["arm"])
    ring = {"marker": "o", "markersize": 17, "markerfacecolor": "none", "markeredgecolor": "black"}
    axes.plot(best["learned"], best["forgotten"], linestyle="none", label="recommended", **ring)
    if (bound := advice["wish"]["bound"]) is not None:
        axes.axhline(bound, color="0.3", linewidth=1, linestyle="--", label="accepted")
    axes.axhline(0, color="0.85", linewidth=0.8, zorder=0)
    if len(advice["measured"]["lengths"]) > 1:
        axes.plot([], [], color="0.5", linewidth=1, linestyle=":", label="over tokens")
    axes.set(xlabel="learned (nats; right is better)", ylabel="forgotten (nats; down is better)")
    axes.margins(0.12)
    axes.legend(fontsize=8, markerscale=0.5, loc="upper left")
    told = "; ".join(f"{arm['arm']}: {arm['learned']:.3f}, {arm['forgotten']:.3f}" for arm in advice["arms"])
    return png(drawn, told=f"Learned against forgotten, {best['arm']} recommended. {told}")
