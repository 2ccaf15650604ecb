"""Tables of a comparison whose cells are coloured by their difference from the baseline: blue is better, red
is worse. Groups by measure, by domain, and by the order and seed of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cpt.core.messages import count_noun
from cpt.reporting.compare import format_p, format_spread, list_topics, make_table
from cpt.reporting.contrasts import (
    find_contrasts,
    find_group_values,
    find_spreads,
    group_by_sequence,
    is_ranked,
)
from cpt.reporting.formats import (
    MAX_LISTED,
    MISSING,
    Format,
    format_or_dash,
    format_perplexity,
    list_names,
)
from cpt.reporting.load_runs import Pair
from cpt.reporting.measures import (
    BRIEF_KEYS,
    FLOPS,
    MEASURES,
    TESTED_MEASURES,
    ComparedMeasure,
    select_measured,
)
from cpt.reporting.page import LEGENDS, MAX_SHADE, Block
from cpt.reporting.sections import RunGroup, RunSection, name_orders

FINAL = ComparedMeasure("LC/perplexity", "final LC (perplexity)", format_perplexity)
RATIO_KEYS = ("LC/perplexity", "LC/bits_per_byte", "cost/flops")  # coloured by the ratio to the baseline
# Differences of the strongest colour where none is larger: a logarithm of a ratio; nats, or a share.
FULL_COLOUR_RATIO = math.log(1.1)
FULL_COLOUR_DIFFERENCE = 0.1
MAX_PAIRS = 24  # columns of runs; more do not fit on a page

ValuesByColumn = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class HeatColumn:
    """A column of a coloured table."""

    key: str
    title: str
    format_value: Format
    topic: str = ""
    higher_is_better: bool = False
    is_ratio: bool = False  # coloured by the logarithm, as perplexities are

    @property
    def full_difference(self) -> float:
        """The difference that has the strongest colour, if none is larger."""
        return FULL_COLOUR_RATIO if self.is_ratio else FULL_COLOUR_DIFFERENCE


def tabulate_headline(section: RunSection) -> Block:
    """A row for each group, the best at the end first: its final perplexity, the difference from the baseline
    with its p-value, and what was learned and forgotten. Groups that learned no sequence come last."""
    measures = [measure for measure in MEASURES if measure.key in BRIEF_KEYS and measure.key != FINAL.key]
    measures = select_measured(section, measures)
    finals = find_spreads(section, FINAL.key)
    contrasts = find_contrasts(section, FINAL.key)

    in_sequence: list[RunGroup] = []
    for groups in group_by_sequence(section).values():
        in_sequence += groups
    without_sequence = [group for group in section.groups if group not in in_sequence]
    lines = [LEGENDS["headline"].format(baseline=section.baseline)]
    if in_sequence and without_sequence:
        names = list_names([f"`{group.name}`" for group in without_sequence])
        lines.append(f"Last, as they did not learn a sequence: {names}.")

    spreads_by_measure = {measure.key: find_spreads(section, measure.key) for measure in measures}
    cells = []
    for group in sorted(section.groups, key=lambda group: group in without_sequence):
        contrast = contrasts.get(group.name)
        difference = MISSING
        p_value = MISSING
        if contrast is not None:
            difference = format_perplexity(contrast.mean).replace("-", "−")
            p_value = format_p(contrast.p_holm)
        row = [group.name, str(len(group.runs))]
        row += [format_spread(finals.get(group.name), format_perplexity), difference, p_value]
        for measure in measures:
            spread = spreads_by_measure[measure.key].get(group.name)
            row.append(format_spread(spread, measure.format_value, with_interval=False))
        cells.append(row)

    head = ["group", "runs", FINAL.title, f"Δ to {section.baseline}", "p (Holm)"]
    head += [measure.title for measure in measures]
    return make_table(
        section,
        cells,
        title="Best at the end",
        head=head,
        num_word_columns=1,
        topics=list_topics([FINAL, FINAL, FINAL, *measures], first=2),
        shown_columns=range(len(head)),  # a table with a choice of columns is set small on small screens
        lines=lines,
    )


def build_heat_tables(section: RunSection) -> list[Block]:
    """The coloured tables; empty for a single group, which has nothing to be compared with."""
    if len(section.groups) < 2:
        return []
    return [tabulate_measures(section), tabulate_domains(section), tabulate_pairs(section)]


def tabulate_measures(section: RunSection) -> Block:
    """The mean of each measure."""
    columns = []
    values: dict[str, dict[str, float]] = {group.name: {} for group in section.groups}
    for measure in select_measured(section, [*TESTED_MEASURES, FLOPS]):
        columns.append(
            HeatColumn(
                key=measure.key,
                title=measure.title.removesuffix(" (x baseline)"),
                format_value=measure.format_value,
                topic=measure.topic,
                higher_is_better=measure.higher_is_better,
                is_ratio=measure.key in RATIO_KEYS,
            )
        )
        for group, spread in find_spreads(section, measure.key).items():
            values[group][measure.key] = spread.mean
    return make_heat_table(
        section,
        values,
        columns,
        title="Methods and measures",
        lines=[LEGENDS["heat"].format(baseline=section.baseline)],
        is_comparable=is_ranked,
    )


def tabulate_domains(section: RunSection) -> Block:
    """The final perplexity on each test text, a mean over the runs. If there are many texts, those on which
    the groups differ most are shown."""
    values = {group.name: average_final_perplexities(group) for group in section.groups}
    texts: dict[str, None] = {}  # an ordered set
    for by_text in values.values():
        texts |= dict.fromkeys(by_text)

    shown_texts = list(texts)
    lines = [LEGENDS["heat_domains"]]
    if len(texts) > MAX_LISTED:
        ranges = {text: measure_range(values, text) for text in texts}
        widest = sorted(texts, key=lambda text: -ranges[text])[:MAX_LISTED]
        shown_texts = [text for text in texts if text in widest]
        text_count = count_noun(len(texts), "text")
        lines.append(f"{MAX_LISTED} of {text_count}: those on which the groups differ most.")
    columns = []
    for text in shown_texts:
        columns.append(HeatColumn(key=text, title=text, format_value=format_perplexity, is_ratio=True))
    return make_heat_table(
        section, values, columns, title="Methods and domains", lines=lines, is_comparable=has_final_model
    )


def average_final_perplexities(group: RunGroup) -> dict[str, float]:
    """The mean final perplexity on each test text, over the runs in which it is finite."""
    by_text: dict[str, list[float]] = {}
    for run in group.runs:
        for text, loss in zip(run.scores.domains, run.scores.matrix[-1].tolist(), strict=True):
            with np.errstate(over="ignore"):
                perplexity = float(np.exp(loss))
            if math.isfinite(perplexity):
                by_text.setdefault(text, []).append(perplexity)
    return {text: float(np.mean(perplexities)) for text, perplexities in by_text.items()}


def measure_range(values: Mapping[str, ValuesByColumn], key: str) -> float:
    """The logarithm of the largest value of a column over its smallest; 0 of fewer than two values."""
    column = [by_key[key] for by_key in values.values() if key in by_key]
    return math.log(max(column) / min(column)) if len(column) > 1 else 0.0


def has_final_model(group: RunGroup, key: str) -> bool:
    """Whether a group has one model of all domains."""
    return not group.trains_from_base


def tabulate_pairs(section: RunSection) -> Block:
    """The final perplexity of each run, by its order and seed; of many, the first MAX_PAIRS."""
    values_by_group = find_group_values(section, FINAL.key)
    order_names = name_orders(section.runs)
    measured_pairs: set[Pair] = set()
    for value_by_pair in values_by_group.values():
        measured_pairs |= value_by_pair.keys()
    pairs = sorted(measured_pairs, key=lambda pair: (order_names[pair[0]], pair[1]))
    if len(pairs) < 2:
        return Block()

    lines = [LEGENDS["heat_pairs"]]
    if len(pairs) > MAX_PAIRS:
        lines.append(f"The first {MAX_PAIRS} of {count_noun(len(pairs), 'pair')} of order and seed.")
    columns = []
    titles = {}
    for order, seed in pairs[:MAX_PAIRS]:
        title = f"seed {seed}"
        if len(order_names) > 1:
            title = f"order {order_names[order]}, seed {seed}"
        titles[order, seed] = title
        columns.append(HeatColumn(key=title, title=title, format_value=format_perplexity, is_ratio=True))

    values = {}
    for group in section.groups:
        value_by_pair = values_by_group.get(group.name, {})
        values[group.name] = {titles[pair]: value for pair, value in value_by_pair.items() if pair in titles}
    return make_heat_table(
        section, values, columns, title="Methods and seeds", lines=lines, is_comparable=has_final_model
    )


def make_heat_table(
    section: RunSection,
    values: Mapping[str, ValuesByColumn],
    columns: Sequence[HeatColumn],
    *,
    title: str,
    lines: Sequence[str],
    is_comparable: Callable[[RunGroup, str], bool],
) -> Block:
    """A table of values by group and column. A cell is coloured by its difference from the baseline: fully by
    the column's `full_difference`, or by the largest difference if that is larger; of ratios, the largest of
    all columns. Groups that are not comparable have no colour."""
    cells = []
    shades = []
    for group in section.groups:
        group_values = values[group.name]
        texts = [group.name]
        for column in columns:
            texts.append(format_or_dash(group_values.get(column.key), column.format_value))
        cells.append(texts)
        shades.append([0] * len(columns))

    advantages = np.zeros((len(section.groups), len(columns)))
    for row, group in enumerate(section.groups):
        for index, column in enumerate(columns):
            if is_comparable(group, column.key):
                advantages[row, index] = find_advantage(section, group, values, column)

    largest_by_column = np.abs(advantages).max(axis=0)
    if all(column.is_ratio for column in columns):  # of one measure
        largest_by_column[:] = largest_by_column.max(initial=0.0)
    for index, column in enumerate(columns):
        scale = max(column.full_difference, largest_by_column[index])
        for row in range(len(section.groups)):
            shades[row][index] = choose_shade(advantages[row, index] / scale)

    block = make_table(
        section,
        cells,
        title=title,
        head=["group", *(column.title for column in columns)],
        num_word_columns=1,
        topics=["", *(column.topic for column in columns)],
        lines=lines,
    )
    return replace(block, shades=shades)


def find_advantage(
    section: RunSection, group: RunGroup, values: Mapping[str, ValuesByColumn], column: HeatColumn
) -> float:
    """How much better a group is than its baseline in a column, as a difference or the log of a ratio: above
    0 is better. 0 unless both have a value."""
    baseline = section.baselines.get(group.name)
    if baseline is None:
        return 0.0
    value = values[group.name].get(column.key)
    reference = values[baseline.name].get(column.key)
    if value is None or reference is None:
        return 0.0
    if column.is_ratio and min(value, reference) <= 0:  # a method that trains nothing
        return 0.0
    difference = math.log(value / reference) if column.is_ratio else value - reference
    return difference if column.higher_is_better else -difference


def choose_shade(share: float) -> int:
    """The shade of a share from -1 (worst) to 1 (best), from -MAX_SHADE to MAX_SHADE; 0, no colour, for less
    than half a step."""
    return round(share * MAX_SHADE)
