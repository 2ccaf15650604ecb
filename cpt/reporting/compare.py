"""Compare groups of runs: means, paired differences from a baseline, ranks, Pareto fronts, and what can be
concluded from them; as blocks of a page, and as CSV."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from cpt.core.files import replacing
from cpt.evaluation import predictions, statistics
from cpt.evaluation.scores import RUN_KEYS, describe_conditions
from cpt.evaluation.statistics import LEVEL
from cpt.evaluation.task_metrics import describe_task, head_of
from cpt.reporting import frames
from cpt.reporting.frames import Show, decimals, few, format_interval, format_known, percent, perplexity
from cpt.reporting.load_runs import RunGroup, RunSection, differing_settings, name_orders
from cpt.reporting.page import LEGENDS, Block

MAX_SETTINGS = 8  # differing settings that a note names
MAX_ITEMS = 3  # values of a setting, and groups of a value, that a note names
MAX_VALUE = 40  # characters of a value in a note
# Settings of the method itself: that these differ is what is compared.
OF_THE_METHOD = ("method.", "mask.", "replay.", "routing.")
ALONE = ("CPT/", "intransigence/", "endtask/", "task/", "cost/")  # what ranks methods with a model per domain
FORMULA = tuple("=+-@\t\r\n＝＋－＠")  # what a spreadsheet takes for a formula (OWASP, CSV injection)
INTERVAL = LEGENDS["interval"].format(least=statistics.LEAST)
SPREAD = LEGENDS["spread"].format(interval=INTERVAL)


class ComparedMeasure(NamedTuple):
    key: str  # of Run.values
    title: str
    show: Show = decimals
    higher: bool = False  # whether more is better
    relative: bool = False  # shown as the mean, and that over the baseline's


MEASURES = (
    ComparedMeasure("LC/perplexity", "final LC (perplexity)", perplexity),
    ComparedMeasure("LC/bits_per_byte", "final LC (bits per byte)"),
    ComparedMeasure("CPT/nats", "just learned CPT"),
    ComparedMeasure("FG/nats", "forgetting FG"),
    ComparedMeasure("BWT_zs/nats", "BWT_zs", higher=True),
    ComparedMeasure("FWT_zs/nats", "FWT_zs", higher=True),
    ComparedMeasure("general_drift/nats", "general drift"),
    ComparedMeasure("intransigence/nats", "intransigence"),
    *(ComparedMeasure(f"answers/{n}", f"{n} (%)", percent, higher=True) for n in ("AP", "LA", "BWT")),
    ComparedMeasure("answers/F", "F (%)", percent),
    ComparedMeasure("answers/FWT", "FWT (%)", percent, higher=True),
    *(ComparedMeasure(f"endtask/{n}", f"{n} (%)", percent, higher=True) for n in ("MF1", "Acc")),
    ComparedMeasure("endtask/forward", "forward MF1 (%)", percent, higher=True),
    ComparedMeasure("endtask/forget_rate", "forget rate (%)", percent),
)
FLOPS = ComparedMeasure("cost/flops", "FLOPs (x baseline)", lambda x: f"{x:.2e}" if x else "0", relative=True)
BEST = (  # the tiles, and how each is measured
    (ComparedMeasure("learned/nats", "learned most", frames.thousandths, higher=True), "base − just learned"),
    (ComparedMeasure("FG/nats", "forgot least", frames.thousandths), "final − just learned"),
    (ComparedMeasure("general_drift/nats", "general rose least", frames.thousandths), "final − base"),
)
WHOLE = "{:,.0f}".format
COST_MEASURES = (
    ComparedMeasure("cost/tokens", "tokens (x baseline)", WHOLE, relative=True),
    FLOPS,
    ComparedMeasure("cost/seconds_learn", "learning, s (x baseline)", WHOLE, relative=True),
    ComparedMeasure("cost/seconds", "all (s)", WHOLE),
    ComparedMeasure("cost/memory", "peak memory", frames.megabytes),
    ComparedMeasure("cost/trained", "trained", WHOLE),
    ComparedMeasure("cost/stored", "stored", frames.megabytes),
    ComparedMeasure("cost/stored_per_domain", "per domain", frames.megabytes),
)
COMPARED = tuple(each for each in MEASURES if each.key not in ("BWT_zs/nats", "endtask/forward"))
CHOSEN: tuple[str, ...] = ("LC/perplexity", "FG/nats", "CPT/nats", "answers/AP", "endtask/MF1")
CHOSEN += ("cost/flops", "cost/tokens", "cost/memory", "cost/stored")  # columns shown at first
BRIEF: tuple[str, ...] = ("LC/perplexity", "CPT/nats", "FG/nats", "general_drift/nats")
BRIEF += ("answers/AP", "answers/F", "endtask/MF1", "endtask/forget_rate")  # in the console and TeX
QUESTIONS = {  # how a finding begins, and its unit
    "FG/nats": ("Forgets least", " nats"),
    "CPT/nats": ("Learns most", " nats"),
    "LC/perplexity": ("Best average at the end", " perplexity"),
    "endtask/MF1": ("Best end tasks", ""),
    "answers/AP": ("Best answers", ""),
}


class Spread(NamedTuple):
    """A value over the runs of a group, None where there are too few; n of `runs` have it."""

    n: int
    runs: int
    mean: float
    sd: float | None  # of the sample
    low: float | None  # 95 % interval of the mean
    high: float | None


class PairedContrast(NamedTuple):
    """A difference from the baseline with its p-values, and these by Holm's procedure over the groups."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    p_t: float | None
    p_holm: float
    p_t_holm: float | None


@lru_cache(maxsize=64)
def spread_values(section: RunSection) -> dict[str, dict[str, Spread]]:
    """By group and key."""
    found: dict[str, dict[str, Spread]] = {group.name: {} for group in section.groups}
    runs = {group.name: len({run.pair for run in group.runs}) for group in section.groups}
    for group, rows in section.frame.groupby("group", sort=False):
        values = {key: each.to_numpy() for key, each in rows.groupby("key", sort=False)["value"]}
        for n in {len(each) for each in values.values()}:
            same = {key: each for key, each in values.items() if len(each) == n}
            spreads = measure_spreads(np.stack([*same.values()]), runs=runs[group])
            found[group] |= dict(zip(same, spreads, strict=True))
    return found


def measure_spreads(series: np.ndarray, *, runs: int) -> list[Spread]:
    """The spread of each series [series, value] of numbers that some of the `runs` have."""
    n, bounds = series.shape[1], statistics.intervals_of_means(series).tolist()
    found = []
    for values, edges in zip(series.tolist(), bounds, strict=True):
        low, high = edges if n >= statistics.LEAST else (None, None)
        found.append(Spread(n, runs, fmean(values), stdev(values) if n > 1 else None, low, high))
    return found


def format_spread(given: Spread | None, show: Show, *, bounds: bool = True) -> str:
    """`53.10 ± 0.30 [52.80, 53.40] (3)`; the last says how many runs have the number if not all have."""
    if given is None:
        return "–"
    deviation = "" if given.sd is None else f" ± {show(given.sd)}"
    interval = format_interval(given.low, given.high, show) if bounds else ""
    return show(given.mean) + deviation + interval + f" ({given.n})" * (given.n < given.runs)


def correct_holm(found: Mapping[str, statistics.Difference]) -> dict[str, PairedContrast]:
    """Holm's step-down procedure (Holm 1979) on both p-values: the k-th smallest of m times m - k + 1, never
    below the one before it, at most 1. A difference without a t test counts as one of p = 1."""
    holm = []
    for given in ([each.p for each in found.values()], [each.p_t for each in found.values()]):
        p = np.array([1.0 if each is None else each for each in given])
        order = np.argsort(p, kind="stable")
        raised = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
        holm.append(raised[np.argsort(order)].tolist())
    return {
        name: PairedContrast(*each, flipped, None if each.p_t is None else by_t)
        for (name, each), flipped, by_t in zip(found.items(), holm[0], holm[1], strict=True)
    }


@lru_cache(maxsize=1024)
def pair_values(section: RunSection, key: str) -> dict[str, dict[Any, float]]:
    """By group and (order, seed); the mean of runs that have both alike."""
    rows = section.frame[section.frame["key"] == key]
    found: dict[str, dict[Any, float]] = defaultdict(dict)
    for (group, *pair), value in rows.groupby(["group", "order", "seed"], sort=False)["value"].mean().items():
        found[group][tuple(pair)] = value
    return found


@lru_cache(maxsize=1024)
def contrast_groups(section: RunSection, key: str) -> dict[str, PairedContrast]:
    """By group, its mean difference from its baseline over the orders and seeds that both have."""
    pairs = pair_values(section, key)
    named = {name: other.name for name, other in section.baselines.items()}
    pair = statistics.compare_pairs
    found = {name: pair(pairs.get(name, {}), pairs.get(other, {})) for name, other in named.items()}
    return correct_holm({name: each for name, each in found.items() if each.n})


def is_ranked(group: RunGroup, key: str) -> bool:
    """Whether a group is ranked by a measure: with a model per domain, not by those of one final model."""
    return not group.alone or key.startswith(ALONE)


def rank_groups(section: RunSection) -> dict[str, dict[str, tuple[float, int]]]:
    """By measure the mean rank (1: best) of each group within its model over the pairs that all have, and
    their number; groups with a single pair are left out where another has more."""
    ranks: dict[str, dict[str, tuple[float, int]]] = {}
    for measure in list_present(section, COMPARED):
        pairs, ranks[measure.key] = pair_values(section, measure.key), {}
        alike: dict[tuple, dict[str, dict[Any, float]]] = defaultdict(dict)
        for group in section.groups:
            if group.name in pairs and is_ranked(group, measure.key):
                alike[group.model, group.order][group.name] = pairs[group.name]
        for values in alike.values():
            needed = min(2, max(map(len, values.values())))
            table = DataFrame({name: each for name, each in values.items() if len(each) >= needed}).dropna()
            if len(table.columns) > 1 and len(table) >= needed:
                found = table.rank(axis=1, ascending=not measure.higher).mean()
                ranks[measure.key] |= {name: (rank, len(table)) for name, rank in found.items()}
    return ranks


def pareto_front(means: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names than which no other is lower in one and no higher in the other, by ascending x."""
    front, lowest = [], (math.inf, math.inf)
    for name in sorted(means, key=lambda name: means[name]):
        if means[name][1] < lowest[1] or means[name] == lowest:
            front.append(name)
            lowest = means[name]
    return front


Marked = dict[tuple[Any, int], DataFrame]  # the examples of a task by run and end-task seed


def mark_tasks(section: RunSection, failed: list[str]) -> Iterator[tuple[tuple[str, str, str], Marked]]:
    """By kind, task and measure how good each example is of each run; the answers of one task after another.
    Missing files are left out; `failed` gets a line for each that cannot be read."""
    compared = [group for group in section.groups if group.name in section.baselines]
    compared += section.baselines.values()
    tuned: dict[str, Marked] = defaultdict(dict)
    asked: dict[tuple[str, str], list[Any]] = defaultdict(list)  # runs by task and its headline measure
    for run in dict.fromkeys(run for group in compared for run in group.runs):
        apart = {each.partition(" ")[0] for each in run.left_out}  # endtask, answers: by another protocol
        try:
            endtasks = {} if "endtask" in apart else run.scores.endtasks
            for (task, seed), right in predictions.correct(run.folder, run.scores.rows, endtasks).items():
                size = len(right)  # joined by place, and only as many examples
                tuned[task][run, seed] = predictions.mark_examples(list(range(size)), [size] * size, right)
        except ValueError as error:
            failed.append(str(error))
        for task, given in ({} if "answers" in apart else run.scores.answers.get("tasks", {})).items():
            asked[task, head_of(given)].append(run)
    yield from ((("end tasks", task, "accuracy"), marked) for task, marked in tuned.items())
    for (task, measure), given in asked.items():
        marked = {}
        for run in given:
            row = predictions.rows_asked(run.scores.answers["tasks"][task])[-1]
            try:
                file = predictions.answers_in(run.folder, run.scores.rows, row, task)
                with suppress(FileNotFoundError):
                    marked[run, 0] = predictions.mark_answers(file, measure)
            except ValueError as error:
                failed.append(str(error))
        yield ("answers", task, measure), marked


@lru_cache(maxsize=16)
def contrast_examples(section: RunSection) -> tuple[list[dict[str, Any]], list[str]]:
    """Each group minus its baseline over the examples that both were given, of end tasks and of tasks with
    answers: a record for all tasks together (`task` is empty) and for each task. Then a line for each file
    that cannot be read."""
    failed: list[str] = []
    parts: dict[tuple[str, str, str], dict[str, list]] = defaultdict(dict)
    named = [group for group in section.groups if group.name in section.baselines]
    wanted = [(group, section.baselines[group.name]) for group in named]
    for (kind, task, measure), marked in mark_tasks(section, failed):
        for group, baseline in wanted:
            ours, theirs = (
                {(run.pair, seed): each for (run, seed), each in reversed(marked.items()) if run in own.runs}
                for own in (group, baseline)
            )
            both = [each[key] for key in ours if key in theirs for each in (ours, theirs)]
            try:
                joined = predictions.join_examples(both, what=f"{group.name}, {task}") if both else []
            except ValueError as error:
                failed.append(str(error))
                continue
            values = np.array([each["value"] for each in joined]).astype(float)
            if values.size:
                one, other = values[::2], values[1::2]
                counts = np.array([(one * other).sum(), (one > other).sum(), (one < other).sum()])
                if not set(np.unique(values)) <= {0, 1}:  # a graded measure
                    counts[0] = (one == other).sum()
                part = ((one - other).mean(0), len(one), counts.astype(int))
                for key in ((kind, "", ""), (kind, task, measure)):
                    parts[key].setdefault(group.name, []).append(part)

    records = []
    for (kind, task, measure), own in sorted(parts.items(), key=lambda each: each[0][1] != ""):
        compare = statistics.compare_differences
        found = {name: compare(each[0] for each in given) for name, given in own.items()}
        for name, ((difference, pairs, counts), *others) in own.items():
            if not others and pairs == 1 and set(np.unique(difference)) <= {-1, 0, 1}:
                found[name] = found[name]._replace(p=statistics.mcnemar(*counts[1:].tolist()))
        for name, contrast in correct_holm(found).items():
            counts = np.sum([each[2] for each in own[name]], axis=0).tolist()
            record = {"kind": kind, "task": task, "measure": measure, "tasks": len(own[name]), "group": name}
            record |= {"baseline": section.baselines[name].name} | contrast._asdict()
            records.append(record | dict(zip(("both", "only_group", "only_baseline"), counts, strict=True)))
    return records, failed


def list_present(section: RunSection, measures: Iterable[ComparedMeasure]) -> list[ComparedMeasure]:
    """The measures that some run has."""
    keys = set(section.frame["key"])
    return [measure for measure in measures if measure.key in keys]


def build_table(section: RunSection, cells: Sequence[Sequence[str]], *, of: int = 0, **block: Any) -> Block:
    """A table whose rows the page filters by the group in column `of`; nothing without rows."""
    groups = {group.name: group for group in section.groups}
    facets = []
    for group in (groups[row[of]] for row in cells):
        order = {"order": group.orders[0]} if group.order is not None else {}
        facets.append({"method": group.plain, "model": group.model, **order, "domains": section.title})
    return Block(cells=cells, filtered=True, facets=facets, **block) if cells else Block()


def choose_columns(measures: Sequence[ComparedMeasure], *, first: int, each: int = 1) -> list[int]:
    """The group and CHOSEN measures, which have `each` columns, the first at `first`; all without any."""
    shown = [first + each * at for at, measure in enumerate(measures) if measure.key in CHOSEN]
    return [0, *shown] if shown else []


def tabulate_spreads(
    section: RunSection,
    measures: Iterable[ComparedMeasure],
    *,
    bounds: bool = True,
    names: Sequence[str] = (),
    **block: Any,
) -> Block:
    """A row per group; `names`, properties of it, before the measures that some run has."""
    spreads, measures, cells = spread_values(section), list_present(section, measures), []
    for group in section.groups:
        told = [getattr(group, name) for name in names]
        row = [group.name, *(each if isinstance(each, str) else few(each, between=", ") for each in told)]
        baseline = group if group in section.baselines.values() else section.baselines.get(group.name)
        for measure in measures:
            own = spreads[group.name].get(measure.key)
            row.append(format_spread(own, measure.show, bounds=bounds))
            if measure.relative and own:
                other = spreads[baseline.name].get(measure.key) if baseline else None
                ratio = f" ({own.mean / other.mean:.2f})" if other and other.mean else ""
                row[-1] = measure.show(own.mean) + ratio
        cells.append(row)
    columns = [*(name.replace("size", "runs") for name in names), *(m.title for m in measures)]
    chosen = choose_columns(measures, first=len(names) + 1)
    block |= {"head": ["group", *columns], "words": len(names) + 1, "chosen": chosen}
    return build_table(section, cells if measures or names else [], **block)


def tabulate_main(section: RunSection, *, brief: bool = False) -> Block:
    """Every measure; `brief`: without intervals and rarer measures."""
    about: dict[str, Any] = {"title": section.title, "lines": [f"{SPREAD} In nats if no unit is named."]}
    if brief:
        measures = [measure for measure in MEASURES if measure.key in BRIEF]
        return tabulate_spreads(section, measures, names=["size"], bounds=False, **about)
    names = ("method", "model", "orders", "size")
    return tabulate_spreads(section, [*MEASURES, FLOPS], names=names, **about)


def list_conditions(section: RunSection) -> Block:
    """What a reader must know before comparing the groups of a section."""
    groups, runs, objective = section.groups, section.runs, section.conditions["objective"]
    lines = [f"Perplexity of all these runs: {describe_conditions(section.conditions)}."]
    if section.other_bases:
        lines.append(describe_bases(section))
    if objective != "causal":
        lines.append(LEGENDS["code"].format(objective=objective))
    if any(len(group.runs) > 1 for group in groups):
        lines.append(LEGENDS["base"])

    orders = name_orders(runs)
    if len(orders) > 1:
        lines += [f"order {name}: {few(order)}" for order, name in orders.items() if name != ",".join(order)]
    alone = sorted({f"`{group.method}`" for group in groups if group.alone})
    if alone:
        lines.append(LEGENDS["alone"].format(methods=" and ".join(alone)))
    needing_domain = [group.name for group in groups if group.needs_domain]
    if needing_domain:
        lines.append(f"Given the domain of a text at test time: {few(needing_domain, between=', ')}.")
    keys = [key for key in differing_settings(runs) if not key.startswith(OF_THE_METHOD)]
    if keys:
        lines.append(describe_settings(section, keys))

    costs = {each.name: [each.mean("cost/tokens") or 0, each.mean("cost/flops") or 0] for each in groups}
    fairness = frames.describe_fairness(costs)
    if fairness:
        lines.append(fairness)
    for reason in dict.fromkeys(reason for run in runs for reason in run.left_out):
        names = [group.name for group in groups if any(reason in run.left_out for run in group.runs)]
        lines.append(f"Not compared: {reason} of {few(names, between=', ')}.")
    versions = {name: {run.scores.versions.get(name) for run in runs} for name in ("cpt", "torch")}
    differing = [name for name, known in versions.items() if len(known - {None}) > 1]
    if differing:
        lines.append(f"Made with several versions of {', '.join(differing)}.")
    if not section.baselines and len(groups) > 1:
        lines.append(f"No differences: no single group {section.baseline} with the same model and orders.")
    return Block(title="Conditions", lines=lines)


def describe_bases(section: RunSection) -> str:
    """The base of a section, and those of sections that differ from it in the base alone, with their groups
    and the settings of the model that differ."""
    others = [f"{base} ({few(groups, between=', ')})" for base, groups in section.other_bases.items()]
    settings = ""
    if section.base_settings:
        shown = list(section.base_settings[:MAX_SETTINGS])
        num_hidden = len(section.base_settings) - len(shown)
        more = f" and {num_hidden} more" if num_hidden else ""
        settings = f" They differ in {', '.join(shown)}{more}."
    return (
        f"The bases differ: these runs begin with {section.conditions['base']}, runs of other sections over "
        f"the same texts with {'; '.join(others)}.{settings} A difference between these sections is not one "
        "of methods."
    )


def describe_settings(section: RunSection, keys: Sequence[str]) -> str:
    """The settings in which the runs of a section differ, each with its values and the groups that have
    them."""
    parts = []
    for key in keys[:MAX_SETTINGS]:
        groups_by_value: dict[str, dict[str, None]] = defaultdict(dict)
        for group in section.groups:
            for run in group.runs:
                groups_by_value[str(run.settings.get(key, "absent"))][group.name] = None
        values = [
            f"{frames.shorten(value, width=MAX_VALUE)} ({abbreviate(list(names))})"
            for value, names in groups_by_value.items()
        ]
        parts.append(f"{key}: {abbreviate(values)}")
    num_hidden = len(keys) - len(parts)
    more = f"; and {num_hidden} more" if num_hidden else ""
    return f"The runs differ beyond their methods, in {'; '.join(parts)}{more}."


def abbreviate(items: Sequence[str]) -> str:
    """The first items, and how many more there are."""
    shown = ", ".join(items[:MAX_ITEMS])
    return shown if len(items) <= MAX_ITEMS else f"{shown}, … {len(items) - MAX_ITEMS} more"


def tabulate_differences(
    section: RunSection, measures: Iterable[ComparedMeasure] = COMPARED, *, title: str = "Differences"
) -> Block:
    """A row per group that has a baseline: mean difference, interval, p-values and Holm's. A difference over
    fewer pairs than the row's largest number of them is followed by its own."""
    measures, cells, has_fewer_pairs = list_present(section, measures), [], False
    columns = [contrast_groups(section, measure.key) for measure in measures]
    for group in section.groups:
        contrasts = [column.get(group.name) for column in columns]
        num_pairs = max((contrast.n for contrast in contrasts if contrast), default=0)
        if num_pairs == 0:
            continue
        row = [group.name, section.baselines[group.name].name, str(num_pairs)]
        for contrast, measure in zip(contrasts, measures, strict=True):
            difference, *tests = format_contrast(contrast, measure.show, ("p", "p_holm", "p_t", "p_t_holm"))
            if contrast and contrast.n < num_pairs:
                difference += f" ({contrast.n})"
                has_fewer_pairs = True
            row += [difference, *tests]
        cells.append(row)

    lines = [LEGENDS["differences"].format(interval=INTERVAL)]
    if has_fewer_pairs:
        lines.append(LEGENDS["fewer_pairs"])
    lines.append(LEGENDS["tested"].format(least=statistics.LEAST))
    tests_of_each = [(f"Δ {measure.title}", "p", "Holm", "p (t)", "Holm (t)") for measure in measures]
    head = ["group", "baseline", "pairs", *itertools.chain(*tests_of_each)]
    title, chosen = f"{title} from {section.baseline}", choose_columns(measures, first=3, each=5)
    return build_table(section, cells, title=title, head=head, words=2, lines=lines, chosen=chosen)


def format_contrast(contrast: PairedContrast | None, show: Show, tests: Sequence[str]) -> list[str]:
    """Difference with its interval, and p-values."""
    if contrast is None:
        return ["–"] * (1 + len(tests))
    difference = show(contrast.mean) + format_interval(contrast.low, contrast.high, show)
    return [difference, *(format_known(getattr(contrast, name), "{:.3g}".format) for name in tests)]


def tabulate_ranks(section: RunSection) -> Block:
    ranks = {key: own for key, own in rank_groups(section).items() if len(own) > 1}
    cells = []
    for group in section.groups:
        found = [own.get(group.name) for own in ranks.values()]
        cells.append([group.name, *("–" if each is None else "{:.2f} ({})".format(*each) for each in found)])
    ranked = [measure for measure in COMPARED if measure.key in ranks]
    head, chosen = ["group", *(measure.title for measure in ranked)], choose_columns(ranked, first=1)
    about: dict[str, Any] = {"title": "Ranks", "lines": [LEGENDS["ranks"]], "head": head, "chosen": chosen}
    return build_table(section, cells if ranks else [], **about)


def tabulate_examples(section: RunSection) -> Block:
    cells = []
    for each in contrast_examples(section)[0]:
        contrast = PairedContrast(*(each[name] for name in PairedContrast._fields))
        task = each["task"] or f"all {each['tasks']} {each['kind']}"
        row = [task, each["group"], each["baseline"], each["measure"] or "–", f"{each['n']:,}"]
        counts = [f"{each[name]:,}" for name in ("both", "only_group", "only_baseline")]
        cells.append([*row, *format_contrast(contrast, percent, ("p", "p_holm")), *counts])
    head = ["task", "group", "baseline", "measure", "examples", "Δ (points)", "p", "Holm"]
    head += ["both", "only group", "only baseline"]
    about = {"title": "Over test examples", "lines": [LEGENDS["examples"]]}
    return build_table(section, cells, of=1, head=head, words=4, **about)


def tabulate_all(section: RunSection) -> list[Block]:
    """All tables after the main one: differences, ranks, end tasks, benchmarks, examples, compute."""
    benchmarks = {}
    measured = [run.scores.benchmarks.get("tasks", {}) for run in section.runs]
    for name, task in (each for tasks in measured for each in tasks.items()):
        told = describe_task(name, task)
        chance = "" if task["chance"] is None else f", chance {decimals(task['chance'])}"
        title = f"{told}{chance}{', lower is better' * (not task['higher'])}"
        benchmarks[told] = ComparedMeasure(f"benchmark/{told}", title, higher=task["higher"])
    harness = [LEGENDS["harness"].format(spread=SPREAD)]
    metrics = {task: x for run in section.runs for task, x in run.scores.endtasks.get("metric", {}).items()}
    tasks = [ComparedMeasure(f"task/{task}", f"{task} ({name})", percent) for task, name in metrics.items()]
    about = [LEGENDS["tasks"].format(spread=SPREAD)]
    return [
        tabulate_differences(section),
        tabulate_ranks(section),
        tabulate_spreads(section, tasks, title="End tasks", lines=about),
        tabulate_spreads(section, benchmarks.values(), title="Benchmarks", lines=harness),
        tabulate_differences(section, benchmarks.values(), title="Benchmarks: differences"),
        tabulate_examples(section),
        tabulate_spreads(section, COST_MEASURES, bounds=False, title="Compute", lines=[LEGENDS["costs"]]),
    ]


def group_alike(section: RunSection) -> dict[tuple, list[RunGroup]]:
    """The groups that learned a sequence, by model and by order where groups are distinguished by it."""
    alike = defaultdict(list)
    for group in section.groups:
        if not group.alone and group.mean("FG/nats") is not None:
            alike[group.model, group.order].append(group)
    return alike


def find_best(
    section: RunSection, groups: Sequence[RunGroup], measure: ComparedMeasure
) -> tuple[RunGroup, dict[str, PairedContrast]] | None:
    """The group with the best mean over the pairs that all have, if each of its runs has the number, and its
    differences from the others; None if none has it. Without common pairs the means are over all of each."""
    pairs = pair_values(section, measure.key)
    means = {group: list(pairs[group.name].values()) for group in groups if group.name in pairs}
    if not means:
        return None
    if common := set.intersection(*(set(pairs[group.name]) for group in means)):
        means = {group: [pairs[group.name][pair] for pair in sorted(common)] for group in means}
    whole = [group for group in means if len(pairs[group.name]) == len({run.pair for run in group.runs})]
    best = min(whole or means, key=lambda group: fmean(means[group]) * (-1 if measure.higher else 1))
    compare = statistics.compare_pairs
    against = {each.name: compare(pairs[best.name], pairs[each.name]) for each in means if each != best}
    return best, correct_holm({name: each for name, each in against.items() if each.n})


def is_ahead(lead: PairedContrast, measure: ComparedMeasure) -> bool:
    """Whether a difference from another group shows that a group is better."""
    return lead.p_holm < LEVEL and (lead.mean > 0) == measure.higher


def build_tiles(section: RunSection) -> Block:
    """By each of BEST the best group; the interval of a single run is over its documents."""
    cells, alike = [], group_alike(section)
    for ((model, _), groups), (measure, meaning) in itertools.product(alike.items(), BEST):
        if not (found := find_best(section, groups, measure)):
            continue
        best, others = found
        spread = spread_values(section)[best.name][measure.key]
        low, high = spread.low, spread.high
        if len(best.runs) == 1:
            metric = best.runs[0].scores.metrics[measure.key.partition("/")[0]]
            low, high = metric.get("interval", {}).get("nats", (None, None))
            meaning += "; interval over documents" * (low is not None)
        interval = format_interval(low, high, measure.show).strip() or "no interval"
        apart = sum(is_ahead(each, measure) for each in others.values())
        word = f"distinguished from {apart} of {len(others)} others" if others else ""
        told = f"{meaning}; runs: {spread.n}" + f"; {model}" * (len(alike) > 1)
        title, value = f"{measure.title}: {best.name}", f"{measure.show(spread.mean)} nats"
        cells.append([title, value, interval, word, told])
    head = ["best", "mean", "95 % interval", "test", "meaning"]
    return Block(head=head, cells=cells, words=5, tiles=True, name="tiles")


def build_findings(section: RunSection) -> Block:
    """A line by each of QUESTIONS: the best group, its lead, and what is not distinguished from it."""
    alike, lines = {key: own for key, own in group_alike(section).items() if len(own) > 1}, []
    for (model, order), groups in alike.items():
        whose = f" ({model}{f', order {groups[0].orders[0]}' * bool(order)})" * (len(alike) > 1)
        for measure in (measure for measure in list_present(section, MEASURES) if measure.key in QUESTIONS):
            if not (found := find_best(section, groups, measure)):
                continue
            (best, others), (begin, unit), show = found, QUESTIONS[measure.key], measure.show
            spread = spread_values(section)[best.name][measure.key]
            bounds = format_interval(spread.low, spread.high, show)
            title = measure.title.removesuffix(f" ({unit.strip()})")
            line = f"{begin}{whose}: `{best.name}`, {title} {show(spread.mean)}{bounds}{unit}"
            line += f", runs: {spread.n}"
            if lead := contrast_groups(section, measure.key).get(best.name):
                by_t = "" if lead.p_t is None else f", paired t {lead.p_t:.2g}, Holm {lead.p_t_holm:.2g}"
                line += f"; {show(lead.mean)}{format_interval(lead.low, lead.high, show)} against "
                line += f"{section.baselines[best.name].name}, p {lead.p:.2g}, Holm {lead.p_holm:.2g}{by_t} "
                line += f"({lead.n} pair{'s' * (lead.n > 1)})"
            same = [name for name, each in others.items() if each.p_holm >= LEVEL]
            ahead = sum(is_ahead(each, measure) for each in others.values())
            verdict = f"Distinguished from {ahead} of {len(others)} others (Holm p < {LEVEL:.2g})"
            if behind := len(others) - len(same) - ahead:
                verdict += f", and worse than {behind} over the pairs that they share"
            pairs = max((each.n for each in others.values()), default=0)
            needed = math.ceil(1 + math.log2(max(1, len(others)) / LEVEL))  # whose least p is 2^(1 - pairs)
            if same and pairs < needed:
                verdict += f": Holm over {len(others)} needs {needed} pairs, there are {pairs}"
            elif same:
                verdict += f", not from {few(same, between=', ')}"
            lines.append(f"{line}. {verdict}.")
    how = LEGENDS["findings"].format(interval=INTERVAL)
    return Block(title="Findings", lines=[*lines, how] if lines else [])


def export_csv(sections: Sequence[RunSection], path: Path) -> None:
    """A row per run with every number of its report; `compared/…` are those of the comparison."""
    lines = []
    for number, section in enumerate(sections, start=1):
        for group, run in ((each, run) for each in section.groups for run in each.runs):
            line: dict[str, Any] = {"folder": Path(os.path.relpath(run.folder, path.parent)).as_posix()}
            line |= {key: run.scores.run[key] for key in RUN_KEYS if key not in ("order", "finished")}
            line |= {"order": " ".join(run.scores.run["order"]), "section": number, "group": group.name}
            line |= {name: each for name, each in run.conditions.items() if name != "domains"}
            line |= {f"compared/{key}": value for key, value in run.values.items()}
            numbers = frames.summarize_scores(run.scores)
            lines.append(line | {f"{k}/value" if k in RUN_KEYS else k: x for k, x in numbers.items()})

    def defuse(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value

    table = DataFrame(lines, dtype=object).map(defuse).rename(columns=defuse)
    with replacing(path) as partial:
        table.to_csv(partial, index=False, lineterminator="\n", encoding="utf-8")
