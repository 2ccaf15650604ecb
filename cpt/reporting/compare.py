"""The tables of a comparison page: the numbers of `contrasts`, formatted, with a row for each group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from cpt.evaluation.statistics import MIN_PAIRS
from cpt.evaluation.task_metrics import describe_task
from cpt.reporting.contrasts import (
    PairedContrast,
    Spread,
    find_contrasts,
    find_spreads,
    rank_groups,
)
from cpt.reporting.example_contrasts import contrast_examples
from cpt.reporting.formats import (
    MISSING,
    Format,
    format_decimals,
    format_deviation,
    format_interval,
    format_or_dash,
    format_percent,
    list_names,
)
from cpt.reporting.measures import (
    BRIEF_KEYS,
    COST_MEASURES,
    FLOPS,
    MEASURES,
    TESTED_MEASURES,
    ComparedMeasure,
    select_measured,
)
from cpt.reporting.page import LEGENDS, Block
from cpt.reporting.sections import RunGroup, RunSection

INTERVAL_LEGEND = LEGENDS["interval"].format(least=MIN_PAIRS)
SPREAD_LEGEND = LEGENDS["spread"].format(interval=INTERVAL_LEGEND)
SHOWN_AT_FIRST = {  # columns of a table that the page does not hide
    "LC/perplexity",
    "FG/nats",
    "CPT/nats",
    "answers/AP",
    "endtask/MF1",
    "cost/flops",
    "cost/tokens",
    "cost/memory",
    "cost/stored",
}
# What a table may say of a group, by the title of the column.
GROUP_COLUMNS: dict[str, Callable[[RunGroup], str]] = {
    "method": lambda group: group.method,
    "model": lambda group: group.model,
    "orders": lambda group: list_names(group.orders),
    "runs": lambda group: group.size,
}


def format_spread(spread: Spread | None, format_value: Format, *, with_interval: bool = True) -> str:
    """`53.10 ± 0.30 [52.80, 53.40] (3)`; the last is the number of runs with a value, if not all have one."""
    if spread is None:
        return MISSING
    text = format_value(spread.mean)
    if not math.isnan(spread.sd):
        text += f" ± {format_deviation(spread.sd, spread.mean, format_value)}"
    if with_interval:
        text += format_interval(spread.low, spread.high, format_value)
    if spread.n < spread.num_runs:
        text += f" ({spread.n})"
    return text


def format_ratio(spread: Spread | None, baseline: Spread | None, format_value: Format) -> str:
    """`3.1e+12 (1.05)`: the mean, and its ratio to that of the baseline if there is one."""
    if spread is None:
        return MISSING
    text = format_value(spread.mean)
    if baseline is not None and baseline.mean != 0:
        text += f" ({spread.mean / baseline.mean:.2f})"
    return text


def format_difference(contrast: PairedContrast, format_value: Format) -> str:
    return format_value(contrast.mean) + format_interval(contrast.low, contrast.high, format_value)


def format_p(p_value: float) -> str:
    return format_or_dash(p_value, "{:.3g}".format)


def list_shown_columns(measures: Sequence[ComparedMeasure], *, first: int, width: int = 1) -> list[int]:
    """The columns that the page shows at first: the group's, and of each measure in SHOWN_AT_FIRST the first
    of its `width` columns. The columns of measures begin at `first`.

    Without such a measure the list is empty, for which the page shows all columns."""
    columns = []
    for position, measure in enumerate(measures):
        if measure.key in SHOWN_AT_FIRST:
            columns.append(first + width * position)
    return [0, *columns] if columns else []


def list_topics(measures: Sequence[ComparedMeasure], *, first: int, width: int = 1) -> list[str]:
    """The topic of each column, where each measure has `width` columns; empty for those before `first`."""
    topics = [""] * first
    for measure in measures:
        topics += [measure.topic] * width
    return topics


def make_table(
    section: RunSection,
    cells: Sequence[Sequence[str]],
    *,
    title: str,
    head: Sequence[str],
    num_word_columns: int,
    lines: Sequence[str],
    topics: Sequence[str] = (),
    shown_columns: Sequence[int] = (),
    group_column: int = 0,
) -> Block:
    """A table whose rows the page filters by the group in `group_column`; an empty block without rows."""
    if not cells:
        return Block()

    groups = {group.name: group for group in section.groups}
    facets = []
    for row in cells:
        group = groups[row[group_column]]
        facet = {"method": group.label, "model": group.model}
        if group.order is not None:
            facet["order"] = group.orders[0]
        facet["domains"] = section.title
        facets.append(facet)

    return Block(
        title=title,
        lines=lines,
        head=head,
        cells=cells,
        topics=topics,
        num_word_columns=num_word_columns,
        is_filtered=True,
        facets=facets,
        shown_columns=shown_columns,
    )


def tabulate_spreads(
    section: RunSection,
    measures: Iterable[ComparedMeasure],
    *,
    title: str,
    lines: Sequence[str],
    group_columns: Sequence[str] = (),
    with_interval: bool = True,
) -> Block:
    """A row for each group: columns of GROUP_COLUMNS, then the measures that some run has."""
    measured = select_measured(section, measures)
    if not measured and not group_columns:
        return Block()

    spreads_by_measure = {measure.key: find_spreads(section, measure.key) for measure in measured}
    cells = []
    for group in section.groups:
        row = [group.name]
        row += [GROUP_COLUMNS[column](group) for column in group_columns]
        for measure in measured:
            spreads = spreads_by_measure[measure.key]
            spread = spreads.get(group.name)
            if measure.is_relative:
                baseline = find_cost_baseline(section, group)
                baseline_spread = None if baseline is None else spreads.get(baseline.name)
                row.append(format_ratio(spread, baseline_spread, measure.format_value))
            else:
                row.append(format_spread(spread, measure.format_value, with_interval=with_interval))
        cells.append(row)

    num_word_columns = 1 + len(group_columns)
    return make_table(
        section,
        cells,
        title=title,
        head=["group", *group_columns, *(measure.title for measure in measured)],
        num_word_columns=num_word_columns,
        lines=lines,
        topics=list_topics(measured, first=num_word_columns),
        shown_columns=list_shown_columns(measured, first=num_word_columns),
    )


def find_cost_baseline(section: RunSection, group: RunGroup) -> RunGroup | None:
    """The group that costs are relative to. A baseline is its own, with a ratio of 1."""
    if group in section.baselines.values():
        return group
    return section.baselines.get(group.name)


def tabulate_main(section: RunSection) -> Block:
    """Every measure of every group."""
    return tabulate_spreads(
        section,
        [*MEASURES, FLOPS],
        title=f"All measures: {section.title}",
        lines=[f"{SPREAD_LEGEND} In nats if no unit is named."],
        group_columns=("method", "model", "orders", "runs"),
    )


def tabulate_brief(section: RunSection) -> Block:
    """The measures of a console, without intervals."""
    return tabulate_spreads(
        section,
        [measure for measure in MEASURES if measure.key in BRIEF_KEYS],
        title=section.title,
        lines=[f"{SPREAD_LEGEND} In nats if no unit is named."],
        group_columns=("runs",),
        with_interval=False,
    )


def tabulate_differences(
    section: RunSection,
    measures: Iterable[ComparedMeasure] = TESTED_MEASURES,
    *,
    title: str = "Differences",
) -> Block:
    """A row for each group that has a baseline: mean difference, interval, and p-values of both tests.

    The column `pairs` has the largest number of pairs in the row. A difference over fewer is followed by its
    own number."""
    measured = select_measured(section, measures)
    contrasts_by_measure = {measure.key: find_contrasts(section, measure.key) for measure in measured}

    cells = []
    has_fewer_pairs = False
    for group in section.groups:
        contrasts = [contrasts_by_measure[measure.key].get(group.name) for measure in measured]
        num_pairs = max((contrast.n for contrast in contrasts if contrast is not None), default=0)
        if num_pairs == 0:
            continue
        row = [group.name, section.baselines[group.name].name, str(num_pairs)]
        for measure, contrast in zip(measured, contrasts, strict=True):
            if contrast is None:
                row += [MISSING] * 5
                continue
            difference = format_difference(contrast, measure.format_value)
            if contrast.n < num_pairs:
                difference += f" ({contrast.n})"
                has_fewer_pairs = True
            row += [difference, format_p(contrast.p), format_p(contrast.p_holm)]
            row += [format_p(contrast.p_t), format_p(contrast.p_t_holm)]
        cells.append(row)

    lines = [LEGENDS["differences"].format(interval=INTERVAL_LEGEND)]
    if has_fewer_pairs:
        lines.append(LEGENDS["fewer_pairs"])
    lines.append(LEGENDS["tested"].format(least=MIN_PAIRS))

    head = ["group", "baseline", "pairs"]
    for measure in measured:
        head += [f"Δ {measure.title}", "p", "Holm", "p (t)", "Holm (t)"]
    return make_table(
        section,
        cells,
        title=f"{title} from {section.baseline}",
        head=head,
        num_word_columns=2,
        lines=lines,
        topics=list_topics(measured, first=3, width=5),
        shown_columns=list_shown_columns(measured, first=3, width=5),
    )


def tabulate_ranks(section: RunSection) -> Block:
    """A row for each group: its mean rank in every measure in which at least two groups are ranked."""
    texts: dict[tuple[str, str], str] = {}
    for row in rank_groups(section).itertuples():
        texts[row.key, row.group] = f"{row.mean_rank:.2f} ({row.num_pairs})"
    if not texts:
        return Block()

    ranked_keys = {key for key, _ in texts}
    measures = [measure for measure in TESTED_MEASURES if measure.key in ranked_keys]
    cells = []
    for group in section.groups:
        ranks = [texts.get((measure.key, group.name), MISSING) for measure in measures]
        cells.append([group.name, *ranks])

    return make_table(
        section,
        cells,
        title="Ranks",
        head=["group", *(measure.title for measure in measures)],
        num_word_columns=1,
        lines=[LEGENDS["ranks"]],
        topics=list_topics(measures, first=1),
        shown_columns=list_shown_columns(measures, first=1),
    )


def tabulate_examples(section: RunSection) -> Block:
    """A row for each task and group: its difference from the baseline over test examples."""
    cells = []
    for contrast in contrast_examples(section).table.itertuples():
        cells.append(
            [
                contrast.task or f"all {contrast.num_tasks} {contrast.kind}",
                contrast.group,
                contrast.baseline,
                contrast.measure or MISSING,
                f"{contrast.n:,}",
                format_difference(contrast, format_percent),
                format_p(contrast.p),
                format_p(contrast.p_holm),
                f"{contrast.both:,}",
                f"{contrast.only_group:,}",
                f"{contrast.only_baseline:,}",
            ]
        )

    word_columns = ["task", "group", "baseline", "measure"]
    number_columns = ["examples", "Δ (points)", "p", "Holm", "both", "only group", "only baseline"]
    return make_table(
        section,
        cells,
        title="Over test examples",
        head=[*word_columns, *number_columns],
        num_word_columns=len(word_columns),
        lines=[LEGENDS["examples"]],
        group_column=1,
    )


def list_end_task_measures(section: RunSection) -> list[ComparedMeasure]:
    """The end tasks of a section, each in its own metric."""
    metric_names: dict[str, str] = {}
    for run in section.runs:
        metric_names |= run.scores.endtasks.get("metric", {})
    return [
        ComparedMeasure(f"task/{task}", f"{task} ({name})", format_percent)
        for task, name in metric_names.items()
    ]


def list_benchmark_measures(section: RunSection) -> list[ComparedMeasure]:
    """The tasks of the lm-evaluation-harness in a section, with what a guess reaches."""
    measures = {}
    for run in section.runs:
        for name, task in run.scores.benchmarks.get("tasks", {}).items():
            description = describe_task(name, task)
            title = description
            if task["chance"] is not None:
                title += f", chance {format_decimals(task['chance'])}"
            if not task["higher"]:
                title += ", lower is better"
            key = f"benchmark/{description}"
            measures[key] = ComparedMeasure(key, title, higher_is_better=task["higher"])
    return list(measures.values())


def tabulate_all(section: RunSection) -> list[Block]:
    """All tables after the main one."""
    benchmarks = list_benchmark_measures(section)
    return [
        tabulate_differences(section),
        tabulate_ranks(section),
        tabulate_spreads(
            section,
            list_end_task_measures(section),
            title="End tasks",
            lines=[LEGENDS["tasks"].format(spread=SPREAD_LEGEND)],
        ),
        tabulate_spreads(
            section,
            benchmarks,
            title="Benchmarks",
            lines=[LEGENDS["harness"].format(spread=SPREAD_LEGEND)],
        ),
        tabulate_differences(section, benchmarks, title="Benchmarks: differences"),
        tabulate_examples(section),
        tabulate_spreads(
            section,
            COST_MEASURES,
            title="Compute",
            lines=[LEGENDS["costs"]],
            with_interval=False,
        ),
    ]
