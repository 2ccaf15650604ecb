"""What learning did to other text while it went on: a picture over all steps, and the stages in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.budget import LINE
from cpt.evaluation.scores import Scores
from cpt.reporting.drawing import DASHES, FEW, SERIES, figure, literal, png
from cpt.reporting.page import Block

BUDGETED = (
    "Upper ends of the 95 % intervals at the step whose weights the stage ended with, of what may be spent "
    "by then: the general text since the base, past domains in the mean, each since it was learned. The "
    "bounds are the dotted lines in the picture above."
)
BOUND = "what a budget allows"
Stage = Mapping[str, Any]  # cpt.evaluation.monitor.Watched, as scores.json has it
EXPLAINED = (
    "Validation text, since the first look of each stage: the domain itself, those texts learned before it "
    "that were looked at, the general text with its 95 % interval (bootstrap over documents)."
)


def build_monitor_block(scores: Scores) -> Block:
    """Nothing of a run that looked at nothing."""
    if not scores.monitor:
        return Block()
    return Block(
        title="Other text while each domain is learned",
        lines=[EXPLAINED],
        picture=draw_rises(scores),
        name="monitor",
        head=["stage", "steps", "its own text, nats", "most risen of the past", GENERAL, "ended early"],
        cells=[[name, *describe_stage(name, stage)] for name, stage in scores.monitor.items()],
        words=1,
        folded=f"{len(scores.monitor)} stages",
    )


def build_budget_block(scores: Scores) -> Block:
    """What a budget allowed and what it did, stage by stage; nothing of a run that had none."""
    stages = {name: stage["budget"] for name, stage in scores.monitor.items() if stage.get("budget")}
    if not stages:
        return Block()
    bounds = list(dict.fromkeys(bound for each in stages.values() for bound in each["allowed"]))
    by_line = any(each.get("steer") == LINE for each in stages.values())  # runs of before do not say it
    last = "way kept at the last look" if by_line else "lowest rate"
    cells = [
        [name, *(describe_bound(scores.monitor[name], bound) for bound in bounds), *describe_acts(each)]
        for name, each in stages.items()
    ]
    return Block(
        title="Budget of drift",
        lines=[BUDGETED],
        head=["stage", *(f"{bound}, nats" for bound in bounds), "kept step", "gone back", last],
        cells=cells,
        words=1,
        folded=f"{len(stages)} stages",
    )


def describe_bound(stage: Stage, bound: str) -> str:
    """The upper end of a drift at the step that was kept, of what is allowed; where none was, at the last."""
    budget = stage["budget"]
    seen, kept = budget["drift"].get(bound), budget["kept"]
    if not seen:
        return "–"
    upper = seen[stage["steps"].index(kept) if kept in stage["steps"] else -1][1]
    return f"{'–' if upper is None else signed(upper)} of {budget['allowed'][bound]:.3f}"


def describe_acts(budget: Stage) -> Iterator[str]:
    """The step whose weights it ended with, how often it went back, and by line how much of its way the last
    look has left, else the lowest share of the rate."""
    yield "–" if budget["kept"] is None else str(budget["kept"])
    yield str(sum("back to" in act for act in budget["acts"]))
    by_line = budget.get("steer") == LINE
    yield f"{budget['ways'][-1]:.3g}" if by_line else f"x {min(budget['pace'], default=1.0):.3g}"


def describe_stage(name: str, stage: Stage) -> Iterator[str]:
    """Steps made, and by how much losses have changed at the last look."""
    rises = {text: values[-1] - values[0] for text, values in stage["nll"].items()}
    own, past = own_text(stage, name), past_texts(stage, name)
    yield str(stage["steps"][-1])
    yield signed(np.mean([rises[text] for text in own])) if own else "–"
    worst = max(past, key=rises.__getitem__, default=None)
    yield "–" if worst is None else f"{worst} {signed(rises[worst])}"
    yield with_interval(rises[GENERAL], stage["rise"][GENERAL][-1]) if GENERAL in rises else "–"
    yield stage["ended"] or "–"


def own_text(stage: Stage, name: str) -> list[str]:
    """The stage's own among its texts: the one of its name, or of several the first ones."""
    return [name] if name in stage["nll"] else [text for text in stage["nll"] if text != GENERAL]


def past_texts(stage: Stage, name: str) -> list[str]:
    return [text for text in stage["nll"] if text not in (*own_text(stage, name), GENERAL)]


def draw_rises(scores: Scores) -> bytes:
    """The rises since each stage's first look over all steps, the stages one after another."""
    drawn = figure((11, 4.2))
    axes = drawn.add_subplot()
    begin, ticks = 0, []
    for name, stage in scores.monitor.items():
        steps = begin + np.array(stage["steps"])
        lines = {text: np.array(values) - values[0] for text, values in stage["nll"].items()}
        for text in past_texts(stage, name):
            axes.plot(steps, lines[text], color=SERIES[1], linewidth=0.9, alpha=0.7)
        for text in own_text(stage, name):
            axes.plot(steps, lines[text], color=SERIES[0], linewidth=1.4, linestyle=DASHES[1])
        if GENERAL in lines:
            low, high = np.array(stage["rise"][GENERAL], float).T
            axes.plot(steps, lines[GENERAL], color="black", linewidth=1.6)
            axes.fill_between(steps, low, high, color="black", alpha=0.15, linewidth=0)
        for bound, height in bounds_of(stage).items():
            colour = "black" if bound == GENERAL else SERIES[1]
            axes.plot(
                steps[[0, -1]], [height, height], color=colour, linewidth=1.2, linestyle=":", label=BOUND
            )
        axes.axvline(steps[-1], color="0.7", linewidth=0.8, linestyle="-" if not stage["ended"] else ":")
        ticks.append((steps[0] + steps[-1]) / 2)
        begin = int(steps[-1])
    axes.axhline(0, color="0.6", linewidth=0.8)
    few = len(ticks) <= FEW
    shown = range(0, len(ticks), 1 if few else -(-len(ticks) // 30))
    names = list(scores.monitor)
    axes.set_xticks([ticks[at] for at in shown], [literal(names[at], width=18) for at in shown],
                    rotation=30, ha="right", fontsize=9 if few else 7)  # fmt: skip
    axes.set(ylabel="change in nats per token\nsince the stage's first look", xlabel="steps of the stage")
    legend(axes)
    return png(drawn, told=tell_rises(scores))


def bounds_of(stage: Stage) -> dict[str, float]:
    """By how much what is bounded might rise in a stage, since its first look."""
    budget = stage.get("budget") or {"drift": {}}
    began = {bound: seen[0][0] for bound, seen in budget["drift"].items() if seen[0][0] is not None}
    return {bound: budget["allowed"][bound] - value for bound, value in began.items()}


def legend(axes: Any) -> None:
    """What the lines are, whichever of them there are."""
    from matplotlib.lines import Line2D

    kinds = {"the domain itself": (SERIES[0], DASHES[1]), "past domains": (SERIES[1], DASHES[0])}
    kinds["general text"] = ("black", DASHES[0])
    marks = [Line2D([], [], color=colour, linestyle=dashes) for colour, dashes in kinds.values()]
    if any(line.get_label() == BOUND for line in axes.lines):
        kinds[BOUND] = ("black", ":")
        marks.append(Line2D([], [], color="black", linestyle=":"))
    axes.legend(marks, list(kinds), loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def tell_rises(scores: Scores) -> str:
    """The general text stage by stage in words; of many stages the first."""
    told = [
        f"{name} {signed(stage['nll'][GENERAL][-1] - stage['nll'][GENERAL][0])}"
        for name, stage in scores.monitor.items()
        if GENERAL in stage["nll"]
    ]
    more = f"; and {len(told) - FEW} more" if len(told) > FEW else ""
    listed = "; ".join(told[:FEW])
    return f"Change of the general text's loss while each domain was learned, nats: {listed}{more}."


def signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def with_interval(value: float, bounds: Sequence[float | None]) -> str:
    """A value with its interval; dashes where there is none, as of a single document."""
    low, high = (signed(each) if each is not None and np.isfinite(each) else "–" for each in bounds)
    return f"{signed(value)} [{low}, {high}]"
