"""Runs that differ in their seed and order alone, as groups; and groups that can be compared, as sections."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pandas import DataFrame

from cpt.core.config import digest
from cpt.data.sources.base import GENERAL
from cpt.reporting.comparison.measures import Spread, spread_values
from cpt.reporting.comparison.runs import Pair, Run
from cpt.reporting.frames import label, shorten, split_variant
from cpt.reporting.marks import find_places
from cpt.reporting.page import few

# Where the text came from, and how much of it is scored: that it is the same is seen from digests and counts.
SOURCES = ("domains.", "eval.tokens")
TELLING = 3  # so many settings at most set a name apart; of more, these and a digest


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The runs of one choice: method, what is laid over it, the values given to it, model and, where asked,
    order."""

    name: str
    plain: str  # method, mask and replay
    model: str
    orders: Sequence[str]
    marks: frozenset[str]  # the values that set it apart
    runs: Sequence[Run]
    order: tuple[str, ...] | None = None  # where groups are told apart by it

    @property
    def method(self) -> str:
        return self.runs[0].told("method")

    @property
    def alone(self) -> bool:
        """Whether its method learns every domain from the base: see ContinualModule."""
        return self.runs[0].scores.alone

    @property
    def needs_domain(self) -> bool:
        """Whether the domain of a text is given at test time."""
        return any(run.scores.needs_domain for run in self.runs)

    @property
    def facets(self) -> dict[str, str]:
        order = {"order": self.orders[0]} if self.order is not None else {}
        return {"method": self.plain, "model": self.model} | order

    def of(self, key: str) -> list[float | None]:
        """A measurement by run, None where a run has none."""
        return [run.values.get(key) for run in self.runs]

    def spread(self, key: str) -> Spread:
        return self.spreads.get(key, Spread(n=0, runs=len(self.runs)))

    @cached_property
    def spreads(self) -> dict[str, Spread]:
        """Of every measurement that a run has."""
        return spread_values(DataFrame([run.values for run in self.runs]))

    def mean(self, key: str) -> float | None:
        return self.spread(key).mean

    def by_pair(self, key: str) -> dict[Pair, float]:
        """A measurement by order and seed; the mean of runs that have both alike."""
        pairs = defaultdict(list)
        for run in self.runs:
            if key in run.values:
                pairs[run.pair].append(run.values[key])
        return {pair: sum(numbers) / len(numbers) for pair, numbers in pairs.items()}

    @property
    def size(self) -> str:
        """`6 (3 seeds x 2 orders)`."""
        orders, seeds = ({run.pair[place] for run in self.runs} for place in (0, 1))
        full = len(self.runs) == len(orders) * len(seeds)
        between = " x " if full else ", "
        counts = [(len(seeds), "seed"), (len(orders), "order")]
        told = between.join(f"{count} {name}{'s' * (count > 1)}" for count, name in counts)
        return f"{len(self.runs)} ({told})"


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparedRuns:
    """Groups whose runs were measured alike, so that their numbers can be compared; the best LC first."""

    title: str
    conditions: Mapping[str, str]  # of each of its runs: see cpt.evaluation.conditions
    groups: Sequence[Group]
    baseline: str  # as asked for
    baselines: Mapping[str, Group]  # by the name of a group, the one that it is compared with
    places: Mapping[str, int]  # by the name of a group, its mark in all pictures of the comparison

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]

    @property
    def objective(self) -> str:
        return self.conditions["objective"]

    @property
    def domains(self) -> list[str]:
        return _list_domains(self.runs[0])

    def facets(self, names: Iterable[str]) -> list[dict[str, str]]:
        """What the page filters rows by, a row for each of these groups."""
        groups = {group.name: group for group in self.groups}
        return [groups[name].facets | {"domains": self.title} for name in names]


def shared_values(runs):
    return set.intersection(*(set(split_variant(run)) for run in runs))


def sections(runs: Sequence[Run], *, by_order: bool, baseline: str) -> list[ComparedRuns]:
    """A section per set of runs that were measured alike; the largest first."""
    alike = defaultdict(list)
    for run in runs:
        alike[run.alike].append(run)
    sets = sorted(alike.values(), key=lambda each: -len(each))
    firsts = [each[0] for each in sets]
    groups = [group_runs(each, by_order=by_order) for each in sets]
    places = find_places((group.name, group.plain) for each in groups for group in each)
    return [
        _build_section(each, title=_title(each[0].runs[0], firsts), baseline=baseline, places=places)
        for each in groups
    ]


def _build_section(
    groups: Sequence[Group], *, title: str, baseline: str, places: Mapping[str, int]
) -> ComparedRuns:
    chosen = {group.name: compared_with(group, groups, baseline=baseline) for group in groups}
    baselines = {name: other for name, other in chosen.items() if other is not None}
    return ComparedRuns(
        title=title,
        conditions=groups[0].runs[0].conditions,
        groups=groups,
        baseline=baseline,
        baselines=baselines,
        places=places,
    )


def _title(run: Run, all_runs: Sequence[Run]) -> str:
    """Objective and domains; and what sets the run apart from others with these, if there are some."""
    named = [other for other in all_runs if _name_conditions(other) == _name_conditions(run)]
    own = run.conditions
    differing = [key for key in own if any(other.conditions[key] != own[key] for other in named)]
    told = ", ".join(f"{key} {own[key]}" for key in differing)
    return _name_conditions(run) + f" ({told})" * bool(told)


def _name_conditions(run: Run) -> str:
    return f"{run.conditions['objective']}: {few(_list_domains(run), between=', ')}"


def _list_domains(run: Run) -> list[str]:
    return sorted(set(run.scores.domains) - {GENERAL})


def group_runs(runs: Sequence[Run], *, by_order: bool) -> list[Group]:
    """The groups of comparable runs by their mean LC; those without one last."""
    shared, names = shared_values(run.scores.run for run in runs), order_names(runs)
    models = {run.told("model") for run in runs}
    split = defaultdict(list)
    for run in runs:
        order = run.pair[0] if by_order else None
        split[label(run.scores.run, shared=shared), run.told("model"), order].append(run)
    groups = []
    for (name, model, order), alike in split.items():
        extra = [model] * (len(models) > 1) + [f"order {names[order]}" for order in [order] if order]
        for settings, each in split_by_settings(alike).items():
            own = frozenset({*settings, *split_variant(each[0].scores.run)} - shared)
            title = ", ".join([name, *settings, *extra])
            group = _build_group(each, name=title, model=model, marks=own, orders=names)
            groups.append(replace(group, order=order))
    return _unique(sorted(groups, key=_place))


def _build_group(
    runs: Sequence[Run],
    *,
    name: str,
    model: str,
    marks: frozenset[str],
    orders: Mapping[tuple[str, ...], str],
) -> Group:
    plain = label(runs[0].scores.run | {"variant": ""})
    named = list(dict.fromkeys(orders[run.pair[0]] for run in runs))
    runs = sorted(runs, key=lambda run: (orders[run.pair[0]], run.pair[1], str(run.folder)))
    return Group(name=name, plain=plain, model=model, orders=sorted(named), marks=marks, runs=runs)


def _place(group: Group) -> tuple[float, str]:
    lc = group.mean("LC/perplexity")
    return (float("inf") if lc is None else lc), group.name


def _unique(groups: Sequence[Group]) -> list[Group]:
    """Names that stand for one group each: equal ones are numbered."""
    counts, seen, named = Counter(group.name for group in groups), Counter(), []
    for group in groups:
        seen[group.name] += 1
        many = counts[group.name] > 1
        named.append(replace(group, name=f"{group.name} #{seen[group.name]}") if many else group)
    return named


def split_by_settings(runs: Sequence[Run]) -> dict[tuple[str, ...], list[Run]]:
    """Runs of one label by the settings (`key=value`) in which their config files differ, though their labels
    do not; runs without a config file stand by themselves only if others have told differences."""
    keys = differing(runs)
    split = defaultdict(list)
    for run in runs:
        own = [f"{key}={run.settings.get(key, 'absent')}" for key in keys]
        split[tuple(own if run.settings else ["config unknown"] * bool(keys))].append(run)
    return (
        {_shorten_settings(settings): each for settings, each in split.items()}
        if len(split) <= 1
        else _name_splits(split)
    )


def _name_splits(split: Mapping[tuple[str, ...], list[Run]]) -> dict[tuple[str, ...], list[Run]]:
    """The same under short names, of which two that are equal are told apart by a digest."""
    counts, told = Counter(map(_shorten_settings, split)), {}
    for settings, runs in split.items():
        mark = [f"config {digest(settings)}"] * (counts[_shorten_settings(settings)] > 1)
        told[*_shorten_settings(settings), *mark] = runs
    return told


def _shorten_settings(settings: Sequence[str]) -> tuple[str, ...]:
    return (*(shorten(each, width=40) for each in settings[:TELLING]), *["…"] * (len(settings) > TELLING))


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys of config.yaml, of those that decide a result, in which runs differ: not where the text lies, nor
    the order, nor the seed and what follows it."""
    there = [run for run in runs if run.settings]
    keys = {key for run in there for key in run.settings if not key.startswith((*SOURCES, "order"))}
    told = {key: [str(run.settings.get(key, "absent")) for run in there] for key in keys}
    seeds = [run.told("seed") for run in there]
    return sorted(
        key for key, split_variant in told.items() if len(set(split_variant)) > 1 and split_variant != seeds
    )


def order_names(runs: Sequence[Run]) -> dict[tuple[str, ...], str]:
    """What each order is called: as it was given, numbered where one name stands for several."""
    given = {run.pair[0]: run.order for run in sorted(runs, key=lambda run: len(run.order), reverse=True)}
    counts, seen, names = Counter(given.values()), Counter(), {}
    for order, name in sorted(given.items()):
        seen[name] += 1
        number = f" #{seen[name]}" * (counts[name] > 1)
        names[order] = shorten(name, width=40) + number
    return names


def compared_with(group: Group, groups: Collection[Group], *, baseline: str) -> Group | None:
    """The baseline of a group: of the groups of this name, with the same model and orders in common, the one
    that shares most of its values; None if there is none, if two share as many, or if it is the group itself.
    """
    named = [each for each in groups if baseline in (each.name, each.plain) and each.model == group.model]
    pairs = {run.pair[0] for run in group.runs}
    alike = [each for each in named if pairs & {run.pair[0] for run in each.runs}]
    if not alike or group in named:
        return None
    exact = [each for each in alike if each.name == baseline]
    shared = {each.name: len(each.marks & group.marks) - len(each.marks - group.marks) for each in alike}
    best = exact or [each for each in alike if shared[each.name] == max(shared.values())]
    return best[0] if len(best) == 1 else None
