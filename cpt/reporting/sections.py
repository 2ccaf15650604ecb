"""Groups of runs that differ in seed and order alone, in sections of which the numbers are comparable."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from pandas import DataFrame

from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.reporting.comparability import have_same_base, is_compared
from cpt.reporting.formats import label_run, list_names, shorten, split_variant
from cpt.reporting.load_runs import MeasuredRun

BASELINE = "ncl"  # that other groups are compared with, where there is one of this name
MAX_NAMED_SETTINGS = 3  # in a group's name, if it differs in more
MAX_NAME = 40  # characters of a setting or of an order in a name


@dataclass(frozen=True, kw_only=True, eq=False)
class RunGroup:
    """Runs that differ in seed and order alone."""

    name: str
    label: str  # method, mask and replay
    model: str
    orders: Sequence[str]  # names of its orders
    distinctions: frozenset[str]  # the settings and values, `key=value`, that not all runs share
    runs: Sequence[MeasuredRun]
    order: tuple[str, ...] | None  # where each order is a group
    method: str
    trains_from_base: bool  # whether its method trains every domain from the base
    needs_domain: bool  # whether the domain of a text is given at test time
    size: str  # `6 (3 seeds x 2 orders)`

    def list_values(self, key: str) -> list[float | None]:
        """A value by pair of order and seed; None of a pair without one. Runs of one pair, as copies of a run
        are, have their mean."""
        values_by_pair: dict[tuple, list[float]] = {run.pair: [] for run in self.runs}
        for run in self.runs:
            if key in run.values:
                values_by_pair[run.pair].append(run.values[key])
        return [fmean(values) if values else None for values in values_by_pair.values()]

    def mean(self, key: str) -> float | None:
        """The mean of a value over the pairs of order and seed that have it."""
        values = [value for value in self.list_values(key) if value is not None]
        return fmean(values) if values else None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSection:
    """Groups measured under the same conditions, so that they can be compared; the best LC first."""

    title: str
    conditions: Mapping[str, str]  # as cpt.evaluation.conditions, and the base
    groups: Sequence[RunGroup]
    other_bases: Mapping[str, Sequence[str]]  # of sections that differ in the base alone: their groups
    base_settings: Sequence[str]  # the settings of the model in which this and those differ
    baseline: str  # as asked for
    baselines: Mapping[str, RunGroup]  # by the name of a group
    style_indices: Mapping[str, int]  # colour and marker by the name of a group, in all sections

    @property
    def runs(self) -> list[MeasuredRun]:
        runs: list[MeasuredRun] = []
        for group in self.groups:
            runs += group.runs
        return runs

    @cached_property
    def frame(self) -> DataFrame:
        """A row per run and value: run (its index in `runs`), group, model, order, seed, key, value. Runs of
        a group with the same order and seed have their mean."""
        rows = []
        number = 0
        for group in self.groups:
            for run in group.runs:
                for key, value in run.values.items():
                    rows.append((number, group.name, group.model, *run.pair, key, value))
                number += 1

        frame = DataFrame(rows, columns=["run", "group", "model", "order", "seed", "key", "value"])
        pair = ["group", "order", "seed", "key"]
        if frame.duplicated(pair).any():
            frame["value"] = frame.groupby(pair, sort=False)["value"].transform("mean")
        return frame.drop_duplicates(pair)


def check_baseline(baseline: str, sections: Sequence[RunSection], *, given: str) -> None:
    """Raises ValueError for a baseline that is the name of no group; `given` says it as typed."""
    names = set()
    for section in sections:
        for group in section.groups:
            names |= {group.name, group.label}
    if sections and baseline not in names:
        raise ValueError(f"{given} is invalid. Allowed: {', '.join(sorted(names))}")


def build_sections(
    runs: Sequence[MeasuredRun], *, by_order: bool = False, baseline: str = BASELINE
) -> list[RunSection]:
    """A section per set of comparable runs, the largest first; `by_order`: a group per order."""
    run_sets = divide_runs(runs)
    groups_of_sets = [group_runs(run_set, by_order=by_order) for run_set in run_sets]
    bases = name_bases(run_sets)
    conditions = []
    for run_set, base in zip(run_sets, bases, strict=True):
        conditions.append(run_set[0].conditions | {"base": base})

    group_names: dict[str, None] = {}  # an ordered set
    for groups in groups_of_sets:
        group_names |= dict.fromkeys(group.name for group in groups)
    baseline_first = sorted(group_names, key=lambda name: name != baseline)
    style_indices = {name: index for index, name in enumerate(baseline_first)}

    sections = []
    for number, groups in enumerate(groups_of_sets):
        other_bases: dict[str, list[str]] = {}
        runs_of_all_bases = list(run_sets[number])
        for other_number, other_runs in enumerate(run_sets):
            is_other_base = other_runs[0].comparability == run_sets[number][0].comparability
            if other_number != number and is_other_base:
                other_bases[bases[other_number]] = [group.name for group in groups_of_sets[other_number]]
                runs_of_all_bases += other_runs
        base_settings = []
        if other_bases:
            settings = find_differing_settings(runs_of_all_bases)
            base_settings = [setting for setting in settings if setting.startswith("model.")]

        baselines = {}
        for group in groups:
            group_baseline = find_baseline(group, groups, baseline)
            if group_baseline is not None:
                baselines[group.name] = group_baseline
        sections.append(
            RunSection(
                title=describe_section(conditions[number], conditions, groups),
                conditions=conditions[number],
                groups=groups,
                other_bases=other_bases,
                base_settings=base_settings,
                baseline=baseline,
                baselines=baselines,
                style_indices=style_indices,
            )
        )
    return sections


def describe_section(
    conditions: Mapping[str, str],
    all_conditions: Sequence[Mapping[str, str]],
    groups: Sequence[RunGroup],
) -> str:
    """`masked: food, law, space (max_seq_length 128)`: objective, domains, and the conditions in which it
    differs from other sections of the same objective and domains."""
    similar_sections = []
    for section in all_conditions:
        is_same_objective = section["objective"] == conditions["objective"]
        if is_same_objective and section["domains"] == conditions["domains"]:
            similar_sections.append(section)
    differing = []
    for name, value in conditions.items():
        if len({section[name] for section in similar_sections}) > 1:
            differing.append(f"{name} {value}")

    domains = sorted(set(groups[0].runs[0].scores.domains) - {GENERAL})
    title = f"{conditions['objective']}: {list_names(domains)}"
    if differing:
        title += f" ({', '.join(differing)})"
    return title


def divide_runs(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """The runs by the conditions of their perplexities and by their base, the largest set first."""
    sets_by_conditions: dict[tuple[str, ...], list[list[MeasuredRun]]] = defaultdict(list)
    for run in runs:
        run_sets = sets_by_conditions[run.comparability]
        for run_set in run_sets:
            hashes = run_set[0].base_hash, run.base_hash
            if have_same_base(run_set[0].scores, run.scores, hashes=hashes):
                run_set.append(run)
                break
        else:
            run_sets.append([run])
    return sorted(itertools.chain(*sets_by_conditions.values()), key=lambda run_set: -len(run_set))


def name_bases(run_sets: Sequence[Sequence[MeasuredRun]]) -> list[str]:
    """The base of each set of runs. Sets that differ in the base alone have different ones."""
    descriptions = [(run_set[0].comparability, run_set[0].base) for run_set in run_sets]
    counts = Counter(descriptions)
    num_named: Counter[tuple[tuple[str, ...], str]] = Counter()
    names = []
    for description in descriptions:
        _, name = description
        num_named[description] += 1
        if counts[description] > 1:
            name += f" #{num_named[description]}"
        names.append(name)
    return names


def group_runs(runs: Sequence[MeasuredRun], *, by_order: bool) -> list[RunGroup]:
    """The groups by their mean LC; runs of one label are distinguished by their settings."""
    shared_values = set.intersection(*(set(split_variant(run.scores.run)) for run in runs))
    order_names = name_orders(runs)
    has_several_models = len({run.scores.run["model"] for run in runs}) > 1

    runs_by_label: dict[tuple[str, str, tuple[str, ...] | None], list[MeasuredRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (order_names[run.pair[0]], run.pair[1], str(run.folder))):
        sorted_variant = "; ".join(sorted(split_variant(run.scores.run)))
        label = label_run(run.scores.run | {"variant": sorted_variant}, shared_values=shared_values)
        order = run.pair[0] if by_order else None
        runs_by_label[label, run.scores.run["model"], order].append(run)

    groups = []
    for (label, model, order), labelled_runs in runs_by_label.items():
        for settings, members in split_by_settings(labelled_runs).items():
            parts = [label]
            parts += [shorten(setting, width=MAX_NAME) for setting in settings[:MAX_NAMED_SETTINGS]]
            if len(settings) > MAX_NAMED_SETTINGS:
                parts.append("…")
            if has_several_models:
                parts.append(model)
            if order is not None:
                parts.append(f"order {order_names[order]}")
            name = ", ".join(parts)
            distinctions = frozenset({*settings, *split_variant(members[0].scores.run)} - shared_values)
            groups.append(make_group(members, name, distinctions, order, order_names))

    means = {group: group.mean("LC/perplexity") for group in groups}

    def rank(group: RunGroup) -> tuple[float, str]:
        mean = means[group]
        return math.inf if mean is None else mean, group.name

    return number_names(sorted(groups, key=rank))


def make_group(
    runs: Sequence[MeasuredRun],
    name: str,
    distinctions: frozenset[str],
    order: tuple[str, ...] | None,
    order_names: Mapping[tuple[str, ...], str],
) -> RunGroup:
    """A group of runs. Its facts, except orders and seeds, are those of its first run. `distinctions`: its
    settings, `key=value`, that not all runs of the section share. `order` is None unless each order is a
    group; `order_names` is by `run.pair[0]`, the order of a run."""
    facts = runs[0].scores.run
    return RunGroup(
        name=name,
        label=label_run(facts | {"variant": ""}),
        model=facts["model"],
        orders=sorted({order_names[run.pair[0]] for run in runs}),
        distinctions=distinctions,
        runs=runs,
        order=order,
        method=facts["method"],
        trains_from_base=runs[0].scores.trains_from_base,
        needs_domain=any(run.scores.needs_domain for run in runs),
        size=describe_size(runs),
    )


def number_names(groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The groups, with ` #1`, ` #2` at the end of a name that several have."""
    counts = Counter(group.name for group in groups)
    num_named: Counter[str] = Counter()
    numbered = []
    for group in groups:
        num_named[group.name] += 1
        if counts[group.name] > 1:
            numbered.append(replace(group, name=f"{group.name} #{num_named[group.name]}"))
        else:
            numbered.append(group)
    return numbered


def split_by_settings(runs: Sequence[MeasuredRun]) -> dict[tuple[str, ...], list[MeasuredRun]]:
    """Runs of one label by the settings in which they differ, as `key=value`."""
    keys = find_differing_settings(runs)
    groups: dict[tuple[str, ...], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        settings = tuple(f"{key}={run.show_setting(key)}" for key in keys)
        if keys and not run.settings:
            settings = ("config unknown",)
        groups[settings].append(run)
    return groups


def describe_size(runs: Sequence[MeasuredRun]) -> str:
    """`6 (3 seeds x 2 orders)`."""
    num_orders = len({run.pair[0] for run in runs})
    num_seeds = len({run.pair[1] for run in runs})
    separator = " x " if len(runs) == num_seeds * num_orders else ", "
    return f"{len(runs)} ({count_noun(num_seeds, 'seed')}{separator}{count_noun(num_orders, 'order')})"


def find_differing_settings(runs: Sequence[MeasuredRun]) -> list[str]:
    """The settings that decide a result and differ between runs, except the seed and what follows from it."""
    runs_with_config = [run for run in runs if run.settings]
    seeds = [str(run.scores.run["seed"]) for run in runs_with_config]
    keys: set[str] = set()
    for run in runs_with_config:
        keys |= {key for key in run.settings if is_compared(key)}

    differing = []
    for key in sorted(keys):
        values = [run.show_setting(key) for run in runs_with_config]
        if len(set(values)) > 1 and values != seeds:
            differing.append(key)
    return differing


def name_orders(runs: Sequence[MeasuredRun]) -> dict[tuple[str, ...], str]:
    """Each order by its name, numbered where one name stands for several."""
    short_names = {}
    for run in sorted(runs, key=lambda run: -len(run.order_name)):  # of several names the shortest counts
        order, _ = run.pair
        short_names[order] = shorten(run.order_name, width=MAX_NAME)

    counts = Counter(short_names.values())
    num_named: Counter[str] = Counter()
    names = {}
    for order, name in sorted(short_names.items()):
        num_named[name] += 1
        names[order] = f"{name} #{num_named[name]}" if counts[name] > 1 else name
    return names


def find_baseline(group: RunGroup, groups: Collection[RunGroup], baseline: str) -> RunGroup | None:
    """The group called `baseline` with the same model and an order in common: the one with exactly this name,
    else the one that shares most values. None if two share as many, and for a baseline itself."""
    candidates = [candidate for candidate in groups if baseline in (candidate.name, candidate.label)]
    candidates = [candidate for candidate in candidates if candidate.model == group.model]
    if group in candidates:
        return None
    orders = {run.pair[0] for run in group.runs}
    comparable = []
    for candidate in candidates:
        if any(run.pair[0] in orders for run in candidate.runs):
            comparable.append(candidate)
    if not comparable:
        return None

    best = [candidate for candidate in comparable if candidate.name == baseline]
    if not best:
        num_shared = {}
        for candidate in comparable:
            shared = candidate.distinctions & group.distinctions
            num_shared[candidate.name] = len(shared) - len(candidate.distinctions - group.distinctions)
        max_shared = max(num_shared.values())
        best = [candidate for candidate in comparable if num_shared[candidate.name] == max_shared]
    return best[0] if len(best) == 1 else None
