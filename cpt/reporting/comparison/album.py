"""The pictures of a comparison, as blocks of its page."""

from __future__ import annotations

import re
from dataclasses import replace

from cpt.reporting.comparison import charts, panels
from cpt.reporting.comparison.compute import LEARNING, QUALITY, comparable
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import COSTS, MEASURES, Measure, format_spread
from cpt.reporting.comparison.overlap import measure_overlap
from cpt.reporting.drawing import description
from cpt.reporting.page import Block, few

TOLD = ("LC/perplexity", "CPT/nats", "FG/nats", "endtask/MF1", "answers/AP", "cost/flops")
PANELS = 8  # so many pictures side by side at most


def build_pictures(section: ComparedRuns) -> list[Block]:
    """Those for which there are numbers, but for the plane, which comes first on a page."""
    kinds = (
        _draw_quality,
        _draw_trade_off,
        _draw_curves,
        _draw_matrices,
        _draw_overlaps,
        _draw_posteriors,
    )
    return [block for block in (kind(section) for kind in kinds) if block.picture]


def draw_plane(section: ComparedRuns) -> Block:
    title = "Forgetting against learning"
    lines = ["CPT: perplexity on each domain just after it was learned. Down and left is better."]
    labels = {"x": "learning CPT (perplexity)", "y": "forgetting FG (nats)"}
    block = _draw_pareto(section, LEARNING, title=title, lines=lines, labels=labels)
    return replace(block, name="forgetting_learning")


def tell_marks(section: ComparedRuns) -> dict[str, str]:
    """What each group's marks stand for: its means with their intervals."""
    shown = [measure for measure in (*MEASURES, *COSTS) if measure.key in TOLD]
    return {group.name: _tell_group(group, shown) for group in section.groups}


def _tell_group(group: Group, measures: list[Measure]) -> str:
    told = [
        f"{measure.title} {format_spread(group.spread(measure.key), show=measure.show, bounds=True)}"
        for measure in measures
        if group.mean(measure.key) is not None
    ]
    return f"{group.name}, runs: {group.size}. {'; '.join(told)}"


def _draw_quality(section: ComparedRuns) -> Block:
    labels = {"x": "FLOPs of the whole run", "y": "average perplexity LC"}
    lines = ["Down and left is better. Runs without counted operations are left out."]
    block = _draw_pareto(section, QUALITY, title="Quality against compute", lines=lines, labels=labels)
    return replace(block, name="quality_compute")


def _draw_pareto(
    section: ComparedRuns,
    pair: tuple[str, str],
    *,
    title: str,
    lines: list[str],
    labels: dict[str, str],
) -> Block:
    """A point per group that has both numbers; nothing if there is none."""
    groups = _both(comparable(section, pair[1]), pair)
    points = {group.name: (group.of(pair[0]), group.of(pair[1])) for group in groups}
    how = {"places": section.places, "marks": tell_marks(section)}
    drawn = charts.pareto(points, logarithmic=True, **how, **labels) if points else b""
    if off := re.search(r"Off the axes, .*", description(drawn) if drawn else ""):
        lines = [*lines, off[0]]
    return Block(title=title, lines=lines, picture=drawn)


def _both(groups: list[Group], pair: tuple[str, str]) -> list[Group]:
    """Those of which a run has both numbers, the first above 0."""
    return [g for g in groups if any(x and y is not None for x, y in zip(*map(g.of, pair), strict=True))]


def _draw_trade_off(section: ComparedRuns) -> Block:
    groups = comparable(section, LEARNING[1])
    points = {group.name: (group.of("FG/nats"), group.of("LC/perplexity")) for group in groups}
    there = any(y is not None for _, values in points.values() for y in values)
    how = {"places": section.places, "marks": tell_marks(section)}
    drawn = charts.trade_off(points, **how) if there else b""
    return Block(title="Average perplexity against forgetting", picture=drawn, name="perplexity_forgetting")


def _draw_curves(section: ComparedRuns) -> Block:
    runs = {group.name: [run.scores for run in group.runs] for group in section.groups}
    lines = ["Mean perplexity over the domains learned so far: mean and range over the runs of a group."]
    picture = charts.curves(runs, places=section.places, marks=tell_marks(section))
    return Block(title="Over the stages", lines=lines, picture=picture, name="stages")


def _draw_matrices(section: ComparedRuns) -> Block:
    """The first run of each group; of many groups the baselines and the best."""
    chosen = _choose_groups(
        [group for group in section.groups if len(group.runs[0].scores.rows) > 1], section
    )
    runs = {group.name: group.runs[0].scores for group in chosen}
    told = [f"{g.name}: seed {g.runs[0].told('seed')}, order {g.runs[0].order}" for g in chosen]
    lines = ["Change in nats against the base; one run of each group.", few(told, between="; ")]
    title = "Matrices side by side"
    if not runs:
        return Block()
    drawn = panels.matrices(runs, marks=tell_marks(section))
    return Block(title=title, lines=lines, picture=drawn, name="matrices")


def _choose_groups(groups: list[Group], section: ComparedRuns) -> list[Group]:
    """At most PANELS groups: baselines first, then by LC."""
    compared = {group.name for group in section.baselines.values()}
    first = sorted(groups, key=lambda group: group.name not in compared)[:PANELS]
    return [group for group in groups if group in first]


def _draw_overlaps(section: ComparedRuns) -> Block:
    """What domains share of importances, masks or gates, in the first run of each group that keeps them."""
    found = {}
    for group in section.groups:
        run = group.runs[0]
        for quantity, matrix in measure_overlap(run.folder, run.scores.rows).items():
            found[f"{group.name}: {quantity}"] = matrix
    shown = dict(list(found.items())[:PANELS])
    more = [f"{len(found) - PANELS} more are not shown."] if len(found) > PANELS else []
    lines = ["Similarity between domains of what a method chose for each; one run of each group.", *more]
    title = "Overlap of importances, masks and gates"
    if not shown:
        return Block()
    drawn = panels.overlaps(shown, marks=tell_marks(section))
    return Block(title=title, lines=lines, picture=drawn, name="overlap")


def _draw_posteriors(section: ComparedRuns) -> Block:
    """The weights of parts, for groups of which some text is scored by several."""
    runs = {group.name: group.runs[0].scores for group in section.groups}
    mixed = {
        name: scores
        for name, scores in runs.items()
        if scores.parts and any(len(weights) > 1 for weights in scores.parts[-1].values())
    }
    shown = dict(list(mixed.items())[:PANELS])
    lines = ["Mean weight of each part in the last model's score of each text; one run of each group."]
    title = "Posteriors over parts"
    if not shown:
        return Block()
    drawn = panels.posteriors(shown, marks=tell_marks(section))
    return Block(title=title, lines=lines, picture=drawn, name="posteriors")
