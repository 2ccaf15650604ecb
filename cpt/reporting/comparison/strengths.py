"""What more of a method's strength costs: learned against forgotten, a curve over one setting (`--curve`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt.core.rules import is_number, show
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.runs import Run
from cpt.reporting.drawing import figure, literal, png, style
from cpt.reporting.marks import find_places
from cpt.reporting.page import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curves = Mapping[str, Sequence[tuple[Any, Group]]]  # by name the groups with a value each, ascending
LEARNED = "ZS/nats", "CPT/nats"
MEASURED = "FG/nats", "LC/nats"
SHOWN = 12  # names that a message lists
HEAD = ["runs", "learned (nats)", "forgotten FG (nats)", "LC (nats)"]
LINES = [
    "Learned: how much lower the loss on a domain is just after it was learned than the base's (ZS - CPT). "
    "Up is more forgotten, right more learned: what is too strong ends at the left, what is too weak at ncl.",
]


def check_curve(key: str, runs: Sequence[Run]) -> None:
    """Raises ValueError for a setting in which no two runs differ."""
    values: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        for name, value in run.settings.items():
            values[name].add(str(value))
    differing = sorted(name for name, given in values.items() if len(given) > 1)
    if runs and key not in differing:
        listed = ", ".join(differing[:SHOWN]) + ", …" * (len(differing) > SHOWN)
        raise ValueError(f"--curve {key}; allowed: a setting in which runs differ: {listed or 'none'}")


def show_strengths(section: ComparedRuns, key: str) -> Block:
    """The picture of all curves over a setting, and their values; nothing where it has but one."""
    curves, alone = find_curves(section.groups, key)
    if not curves:
        return Block()
    rows = [(name, show(value), group) for name, points in curves.items() for value, group in points]
    rows += [(group.name, "–", group) for group in alone]
    return Block(
        title=f"Learned against forgotten over {key}",
        lines=LINES,
        picture=draw_strengths(curves, alone, key),
        name="strengths",
        head=["method", key, *HEAD],
        cells=[[name, value, *tell_group(group)] for name, value, group in rows],
    )


def tell_group(group: Group) -> list[str]:
    measured = [learned(group), *map(group.mean, MEASURED)]
    return [str(len(group.runs)), *("–" if value is None else f"{value:.4f}" for value in measured)]


def find_curves(groups: Sequence[Group], key: str) -> tuple[Curves, list[Group]]:
    """Groups that differ in a setting alone, by what they have in common; and those that do not have it."""
    found: dict[str, list[tuple[Any, Group]]] = defaultdict(list)
    alone = []
    for group in groups:
        value = group.runs[0].settings.get(key)
        if value is None:
            alone.append(group)
        else:
            others = sorted(mark for mark in group.marks if not mark.startswith(f"{key}="))
            found[" ".join([group.plain, *others])].append((value, group))
    curves = {name: sorted(points, key=place) for name, points in found.items() if len(points) > 1}
    return curves, alone


def place(point: tuple[Any, Group]) -> tuple[bool, float, str]:
    """Numbers first, by their size."""
    value = point[0]
    return (False, float(value), "") if is_number(value) else (True, 0.0, str(value))


def learned(group: Group) -> float | None:
    """The mean over runs of how much lower the losses on domains are just after they were learned."""
    pairs = [(run.values.get(LEARNED[0]), run.values.get(LEARNED[1])) for run in group.runs]
    known = [base - own for base, own in pairs if base is not None and own is not None]
    return float(np.mean(known)) if known else None


def spot(group: Group) -> tuple[float, float] | None:
    """Where a group stands: learned and forgotten, nats."""
    x, y = learned(group), group.mean(MEASURED[0])
    return None if x is None or y is None else (x, y)


def draw_strengths(curves: Curves, alone: Sequence[Group], key: str) -> bytes:
    """A line for each curve from its weakest to its strongest point, whose values stand beside them; a mark
    for what does not have the setting."""
    drawn = figure((8.0, 5.0))
    axes = drawn.subplots()
    looks = find_places((name, points[0][1].plain) for name, points in curves.items())
    for name, points in curves.items():
        draw_curve(axes, points, label=literal(name, width=30), look=style(looks[name]))
    for group in alone:
        if (there := spot(group)) is not None:
            axes.plot(*there, marker="*", markersize=12, color="0.3", linestyle="none")
            mark(axes, literal(group.name, width=30), there, color="0.3")
    axes.axhline(0, color="0.7", linewidth=0.8)
    axes.set(xlabel="learned (nats, ZS - CPT; right is better)", ylabel="forgotten FG (nats; down is better)")
    axes.margins(0.1)
    axes.legend(fontsize=8, title=literal(key, width=40), title_fontsize=8)
    values = {name: ", ".join(show(value) for value, _ in points) for name, points in curves.items()}
    told = "; ".join(f"{name}: {each}" for name, each in values.items())
    return png(drawn, told=f"Learned against forgotten, a line over {key}: {told}")


def draw_curve(
    axes: Axes, points: Sequence[tuple[Any, Group]], *, label: str, look: Mapping[str, str]
) -> None:
    spots = [(there, show(value)) for value, group in points if (there := spot(group)) is not None]
    line = {"color": look["color"], "linestyle": look["linestyle"], "marker": look["marker"], "markersize": 4}
    axes.plot([there[0] for there, _ in spots], [there[1] for there, _ in spots], label=label, **line)
    for there, value in spots:
        mark(axes, value, there, color=look["color"])


def mark(axes: Axes, text: str, there: tuple[float, float], *, color: str) -> None:
    axes.annotate(text, there, textcoords="offset points", xytext=(5, 4), fontsize=7, color=color)
