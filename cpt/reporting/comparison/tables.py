"""The tables of a comparison, as blocks of its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from cpt.evaluation.pairs import LEVEL, least_p, needed_pairs
from cpt.evaluation.statistics import BOOTSTRAPPED, LEAST
from cpt.reporting.answers import NAMES as MEASURE_NAMES
from cpt.reporting.comparison.answered import Line, on_answers
from cpt.reporting.comparison.differences import (
    CorrectedDifference,
    contrasts,
    list_present,
    measures_of_probes,
    on_examples,
    probed_tasks,
    rank_groups,
)
from cpt.reporting.comparison.groups import ComparedRuns, Group
from cpt.reporting.comparison.measures import (
    COMPARED,
    COSTS,
    MEASURES,
    NONE,
    Measure,
    format_spread,
    measure_task,
)
from cpt.reporting.comparison.notes import notes
from cpt.reporting.comparison.runs import Run
from cpt.reporting.frames import decimals, percent
from cpt.reporting.page import Block, few

INTERVAL = f"Student's t, or BCa bootstrap of {BOOTSTRAPPED} and more; none of fewer than {LEAST}"
SPREAD = (
    "Mean ± standard deviation over the runs of a group (seeds and orders), [95 % interval of the mean over "
    f"its runs: {INTERVAL}]; in nats where not said; (k): k of its runs have the number."
)
FLIPPED = (
    "p: two-sided sign-flip test over the pairs; of n pairs it is never below 2^(1-n), nor below 1/10001"
)
HOLM = "Holm: p corrected for the number of groups in its column (Holm 1979)"
BY_T = (
    f"p (t), Holm (t): the same of the paired t test, which assumes normal differences; from {LEAST} pairs on"
)
ON_ANSWERS = (
    "Group minus baseline, in percentage points of what each task is known by; tasks weigh alike. Only "
    "examples that both were asked, joined by their ids; answers are means over the orders and seeds that "
    "both have. Examples are redrawn within their task (interval) or swapped between the two (p); of one "
    "task and one pair of runs, right or wrong, p is McNemar's exact test. The interval and p are for other "
    "examples, not for other runs. Both, only group, only baseline: answers that are right there, of each "
    "pair of runs; of a graded measure: as good, better in the group, better in the baseline."
)
NAMES = ("group", "method", "model", "orders", "runs")


FLOPS = next(measure for measure in COSTS if measure.key == "cost/flops")
# What the main table shows at first; the rest by choice.
FIRST = ("LC/perplexity", "FG/nats", "CPT/nats", "answers/AP", "endtask/MF1", "cost/flops")


def names(group: Group) -> list[str]:
    """What the page filters by."""
    return [group.name, group.method, group.model, few(group.orders, between=", "), group.size]


def tabulate_main(section: ComparedRuns, *, domains: Sequence[str]) -> Block:
    """A row per group, with every measure that one of them has; `domains`: the only ones measured, if any."""
    measures, costs = list_present(section, MEASURES), list_present(section, [FLOPS])
    cells = [
        [*names(group), *cells_of(group, measures), *(_format_cost(group, section, each) for each in costs)]
        for group in section.groups
    ]
    head = [*NAMES, *(measure.title for measure in measures), *["FLOPs (x baseline)"] * len(costs)]
    told = [place for place, each in enumerate([*measures, *costs], start=len(NAMES)) if each.key in FIRST]
    only = [f"Metrics on {few(domains, between=', ')} only."] if domains else []
    block = Block(title=section.title, head=head, cells=cells, words=len(NAMES), chosen=[0, *told])
    return add_facets(replace(block, lines=[*only, SPREAD, *notes(section)]), section)


def add_facets(block: Block, section: ComparedRuns) -> Block:
    """With what the page filters its rows by; the first cell of a row is a group's name."""
    return replace(block, filtered=True, facets=section.facets(row[0] for row in block.cells))


def _format_cost(group: Group, section: ComparedRuns, measure: Measure) -> str:
    """The mean, and how many times the baseline's that is."""
    mean, times = group.mean(measure.key), ratio(group, section, measure.key)
    return NONE if mean is None else measure.show(mean) + f" ({times})" * (times != NONE)


def ratio(group: Group, section: ComparedRuns, key: str) -> str:
    """Mean over the baseline's mean; of the baseline itself 1."""
    own = group in section.baselines.values()
    other = group if own else section.baselines.get(group.name)
    mean, least = group.mean(key), other.mean(key) if other else None
    return NONE if mean is None or not least else f"{mean / least:.2f}"


def cells_of(group: Group, measures: Sequence[Measure], *, bounds: bool = True) -> list[str]:
    return [
        format_spread(group.spread(measure.key), show=measure.show, bounds=bounds) for measure in measures
    ]


def tabulate_console(section: ComparedRuns) -> Block:
    """The main table without intervals and rarer measures, for a console."""
    shown = ("LC (perplexity)", "CPT", "FG", "general drift", "AP (%)", "F (%)", "MF1 (%)", "forget rate (%)")
    measures = [measure for measure in list_present(section, MEASURES) if measure.title in shown]
    cells = [
        [group.name, str(len(group.runs)), *cells_of(group, measures, bounds=False)]
        for group in section.groups
    ]
    return Block(head=["group", "n", *(measure.title for measure in measures)], cells=cells)


def tabulate_differences(section: ComparedRuns) -> Block:
    """A row per group that has a baseline: mean difference, interval, p-values and Holm's."""
    title = f"Differences from {section.baseline}"
    return _tabulate_differences(section, list_present(section, COMPARED), title=title)


def tabulate_probe_differences(section: ComparedRuns) -> Block:
    """The same of the tasks of the harness."""
    measures = [each for each in measures_of_probes(section) if contrasts(section, each)]
    title = f"Probes: differences from {section.baseline}"
    return _tabulate_differences(section, measures, title=title) if measures else Block()


def _tabulate_differences(section: ComparedRuns, measures: Sequence[Measure], *, title: str) -> Block:
    columns = {measure: contrasts(section, measure) for measure in measures}
    head, cells = ["group", "baseline", "pairs"], []
    for measure in measures:
        head += [f"Δ {measure.title}", "p", "Holm", "p (t)", "Holm (t)"]
    for group in section.groups:
        if group.name in section.baselines:
            own = [(columns[measure].get(group.name), measure) for measure in measures]
            pairs = max((each.difference.n for each, _ in own if each), default=0)
            row = [
                cell
                for each, measure in own
                for cell in (*format_difference(each, measure), *format_t_test(each))
            ]
            cells.append([group.name, section.baselines[group.name].name, str(pairs), *row])
    if not cells:
        return Block()
    least = [each.difference.n for column in columns.values() for each in column.values()]
    smallest = f" (here {least_p(max(least)):.3g})" if least else ""
    count = max(map(len, columns.values()), default=0)
    lines = [
        f"Group minus baseline, over the pairs (order, seed) that both have; [95 % interval: {INTERVAL}].",
        f"{FLIPPED}{smallest}. {HOLM}{describe_need(count)}.",
        f"{BY_T}.",
    ]
    return add_facets(Block(title=title, lines=lines, head=head, cells=cells, words=2), section)


def describe_need(comparisons: int) -> str:
    """How many pairs Holm's correction needs; nothing where no number of pairs suffices."""
    needed = needed_pairs(comparisons) if comparisons else None
    return f"; for {comparisons} groups, Holm ≤ {LEVEL} needs {needed} pairs or more" * bool(needed)


def format_difference(given: CorrectedDifference | None, measure: Measure) -> list[str]:
    """Difference with interval, p-value, corrected p-value."""
    if given is None:
        return [NONE] * 3
    mean, low, high, p, *_ = given.difference
    interval = f" [{measure.show(low)}, {measure.show(high)}]" if math.isfinite(low) else ""
    return [measure.show(mean) + interval, f"{p:.3g}", f"{given.holm:.3g}"]


def format_t_test(given: CorrectedDifference | None) -> list[str]:
    """The paired t test's p-value, and the corrected one."""
    if given is None or given.difference.p_t is None:
        return [NONE] * 2
    return [f"{given.difference.p_t:.3g}", f"{given.holm_t:.3g}"]


def tabulate_ranks(section: ComparedRuns) -> Block:
    """Mean ranks, where there is more than one group to rank."""
    table = {key: found for key, found in rank_groups(section).items() if len(found) > 1}
    titles = [measure.title for measure in MEASURES if measure.key in table]
    cells = [
        [
            group.name,
            *(f"{table[key][group.name]:.2f}" if group.name in table[key] else NONE for key in table),
        ]
        for group in section.groups
    ]
    line = "Mean rank (1: best) over the orders and seeds that all groups with the measure have."
    block = Block(title="Ranks", lines=[line], head=["group", *titles], cells=cells)
    return add_facets(block, section) if table else Block()


def tabulate_tasks(section: ComparedRuns) -> Block:
    """The last score of each end task, in its own metric."""
    found = {name: run.scores.endtasks["metric"][name] for run in section.runs for name in _name_tasks(run)}
    measures = [measure_task(name) for name in found]
    having = [group for group in section.groups if any(group.mean(each.key) is not None for each in measures)]
    if not having:
        return Block()
    head = ["group", *(f"{name} ({metric})" for name, metric in found.items())]
    cells = [[group.name, *cells_of(group, measures)] for group in having]
    line = "In %, each in the last row in which it was measured, a mean over its seeds; ± and [] over runs."
    return add_facets(Block(title="End tasks", lines=[line], head=head, cells=cells), section)


def tabulate_probes(section: ComparedRuns) -> Block:
    """The last value of each task of the harness; a task with other shots, limit or version is another."""
    tasks, measures = probed_tasks(section), measures_of_probes(section)
    having = [group for group in section.groups if any(group.mean(each.key) is not None for each in measures)]
    if not having:
        return Block()
    chance = [
        f"{told} {decimals(task['chance'])}" for told, task in tasks.items() if task["chance"] is not None
    ]
    lower = [told for told, task in tasks.items() if not task["higher"]]
    lines = ["In the harness's own units, after the last stage that was measured; ± and [] over runs."]
    lines += [f"Chance: {few(chance, between=', ')}."] * bool(chance)
    lines += [f"Lower is better: {few(lower, between=', ')}."] * bool(lower)
    cells = [[group.name, *cells_of(group, measures)] for group in having]
    head = ["group", *(measure.title for measure in measures)]
    return add_facets(Block(title="Probes", lines=lines, head=head, cells=cells), section)


def _name_tasks(run: Run) -> list[str]:
    return [key.removeprefix("task/") for key in run.values if key.startswith("task/")]


def tabulate_examples(section: ComparedRuns) -> tuple[Block, list[str]]:
    """Differences in accuracy by paired bootstrap over test examples, and what could not be read."""
    found, failed = on_examples(section)
    show = Measure(key="", title="", show=percent)
    cells = [
        [name, section.baselines[name].name, f"{each.difference.n:,}", *format_difference(each, show)]
        for name, each in found.items()
    ]
    lines = [
        "Group minus baseline, in percentage points; tasks weigh alike. Test examples are redrawn within "
        "their task, paired; predictions are means over the orders, seeds and end-task seeds that both have. "
        "The interval and p are for other examples, not for other runs.",
    ]
    head = ["group", "baseline", "examples", "Δ accuracy (points)", "p", "Holm"]
    block = Block(title="End tasks, over test examples", lines=lines, head=head, cells=cells, words=2)
    return (add_facets(block, section) if cells else Block()), failed


def tabulate_answers(section: ComparedRuns) -> tuple[list[Block], list[str]]:
    """Differences in what the tasks are known by, paired by example, over all tasks and of each; and what
    could not be read."""
    found = on_answers(section)
    whole = [
        [name, section.baselines[name].name, str(len(line.measures)), *format_line(line)]
        for name, line in found.whole.items()
    ]
    each = [
        [task, name, section.baselines[name].name, MEASURE_NAMES[line.measures[0]], *format_line(line)]
        for task, lines in found.by_task.items()
        for name, line in lines.items()
    ]
    tail = ("examples", "Δ (points)", "p", "Holm", "both", "only group", "only baseline")
    first = Block(
        title="Answers, over examples",
        lines=[*([ON_ANSWERS] if whole else []), *found.notes],
        head=("group", "baseline", "tasks", *tail),
        cells=whole,
        words=2,
    )
    rest = Block(
        title="Answers to each task, over examples",
        head=("task", "group", "baseline", "measure", *tail),
        cells=each,
        words=4,
        folded=f"{len(found.by_task)} tasks, {len(whole)} groups and their baselines",
    )
    if not whole:
        return [first], list(found.failed)
    rest = replace(rest, filtered=True, facets=section.facets(row[1] for row in each))
    return [add_facets(first, section), rest], list(found.failed)


def format_line(line: Line) -> list[str]:
    """Examples, difference with interval and p-values, and in how many answers the two agree or differ."""
    counts = [f"{count:,}" for count in (line.both, line.group, line.baseline)]
    difference = format_difference(line.difference, Measure(key="", title="", show=percent))
    return [f"{line.difference.difference.n:,}", *difference, *counts]
