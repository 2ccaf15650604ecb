"""What each group of runs took, and which groups no other beats at both of two things."""

from __future__ import annotations

from collections.abc import Sequence

from cpt.reporting.comparison.charts import pareto_front
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import COSTS, format_spread
from cpt.reporting.comparison.notes import is_ranked
from cpt.reporting.comparison.tables import add_facets, ratio
from cpt.reporting.page import Block, few

STORED = (
    "Means over the runs. FLOPs: counted, forward, backward and extra passes; learning: seconds of the "
    "stages, without scoring; x: over the baseline's; trained: parameters; stored: what the method keeps "
    "beside the model; per domain: how much that grows with each; domain known: whether it must be at test "
    "time."
)
LEARNING = ("CPT/perplexity", "FG/nats")
QUALITY = ("cost/flops", "LC/perplexity")
RELATIVE = ("cost/tokens", "cost/flops", "cost/seconds_learn")
Points = dict[str, tuple[float, float]]


def tabulate_compute(section: ComparedRuns) -> Block:
    """What each group took, over its baseline's, and whether it is on the Pareto fronts."""
    fronts = [pareto_front(points(section, *pair)) for pair in (LEARNING, QUALITY)]
    cells = [
        [
            group.name,
            *_format_costs(group, section),
            *("yes" if group.name in each else "no" for each in fronts),
        ]
        for group in section.groups
    ]
    head = ["group"]
    for measure in COSTS:
        head += [measure.title] + ["x baseline"] * (measure.key in RELATIVE)
    head += ["domain known", "front: FG, CPT", "front: LC, FLOPs"]
    return add_facets(
        Block(title="Compute", lines=[STORED, *on_front(fronts)], head=head, cells=cells), section
    )


def _format_costs(group: Group, section: ComparedRuns) -> list[str]:
    cells = []
    for measure in COSTS:
        cells += [format_spread(group.spread(measure.key), show=measure.show, bounds=False)]
        cells += [ratio(group, section, measure.key)] if measure.key in RELATIVE else []
    needed = sorted({run.scores.needs_domain for run in group.runs})
    return [*cells, " or ".join("yes" if each else "no" for each in needed)]


def points(section: ComparedRuns, x: str, y: str) -> Points:
    """Means of the groups that have both."""
    means = {group.name: (group.mean(x), group.mean(y)) for group in comparable(section, y)}
    return {name: point for name, point in means.items() if None not in point}


def comparable(section: ComparedRuns, y: str) -> list[Group]:
    """Without methods that learn each domain from the base: they have no model to be forgotten in."""
    return [group for group in section.groups if is_ranked(group, y)]


def on_front(fronts: Sequence[Sequence[str]]) -> list[str]:
    titles = ("forgetting (FG) and learning (CPT)", "LC and FLOPs")
    return [
        f"On the Pareto front of {title}: {few(each, between=', ')}."
        for title, each in zip(titles, fronts, strict=True)
        if each
    ]
