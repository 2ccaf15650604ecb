"""Runs for a comparison: found, filtered, measured, and grouped where their numbers are comparable."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas
import yaml
from pandas import DataFrame

from cpt.core.cache import PARTIAL
from cpt.core.config import digest, flatten
from cpt.data.sources.base import GENERAL
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import METRICS, UNITS, intransigence
from cpt.evaluation.scores import Scores, conditions
from cpt.evaluation.task_metrics import describe_task
from cpt.reporting.comparability import have_same_base, is_compared, read_base_hash, result_settings
from cpt.reporting.frames import escape_name, few, label, shorten, split_variant, summarize_scores

SUBFOLDERS = {  # of a run folder; none holds another run
    *("answers", "benchmarks", "checkpoints", "diagnostics", "documents", "endtasks", "model", "monitor"),
    *("rebuilt", "stages", "wandb"),
}
FILTERS = ("method", "mask", "replay", "variant", "model", "order", "seed", "name", "objective")
COSTS = ("tokens", "flops", "seconds_learn", "seconds", "memory", "trained", "stored", "stored_per_domain")
PROTOCOLS = {"endtask": ("endtask/", "task/"), "answers": ("answers/",)}  # config group: values it decides
NO_PROTOCOL = ("root", "folder", "path", "cache", "eval_batch_size")  # options of a protocol that decide none
NAMED_SETTINGS = 3  # in a group's name, if it differs in more
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast
Pair = tuple[tuple[str, ...], int]  # order and seed


@dataclass(kw_only=True, eq=False)
class MeasuredRun:
    """A run and the finite numbers it is compared by: `LC/nats`, `task/<task>`, `benchmark/<name>`, ..."""

    folder: Path
    scores: Scores
    values: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # what is not compared, as it was measured otherwise than in most runs

    @property
    def pair(self) -> Pair:
        return tuple(self.scores.run["order"]), self.scores.run["seed"]

    @cached_property
    def conditions(self) -> dict[str, str]:
        """What a perplexity depends on except the model: see cpt.evaluation.conditions."""
        return conditions(self.scores)

    @property
    def comparability(self) -> tuple[str, ...]:
        """Equal for runs whose perplexities are over the same scored tokens, whatever the cap."""
        return tuple(value for name, value in self.conditions.items() if name != "cap")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The leaves of config.yaml; empty without the file."""
        try:
            tree = yaml.load((self.folder / "config.yaml").read_text(encoding="utf-8"), Loader=Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        return dict(flatten(tree)) if isinstance(tree, dict) else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The leaves of config.yaml that decide the result; empty without the file."""
        return result_settings(self.config, self.scores)

    @cached_property
    def base_hash(self) -> str:
        """A hash of the weights that the run began with; empty where its folder does not say."""
        return read_base_hash(self.folder)

    @property
    def base(self) -> str:
        """The base for people: `tiny_gpt2 0123abcd`."""
        name = str(self.scores.base.get("name") or self.scores.run["model"])
        return f"{name} {self.base_hash}".strip()

    def protocol(self, group: str) -> dict[str, Any]:
        """How the tasks of a config group are measured; empty without a config."""
        own = {key: value for key, value in self.config.items() if key.startswith(f"{group}.")}
        own.pop("answers.batch_size", None)  # examples of a forward pass; of an end task it is training's
        return {key: value for key, value in own.items() if key.rpartition(".")[2] not in NO_PROTOCOL}

    @property
    def order(self) -> str:
        """The order's name in the config (0, reverse, ...), else its domains with commas."""
        given = self.settings.get("order")
        return ",".join(self.scores.run["order"]) if given is None or isinstance(given, list) else str(given)

    def names(self, key: str) -> set[str]:
        """The values that a filter may give for this run."""
        given = self.order if key == "order" else str(self.scores.run[key])
        more = {"order": [",".join(self.scores.run["order"])], "variant": split_variant(self.scores.run)}
        return {given, *more.get(key, [])}


class FoundRuns(NamedTuple):
    runs: list[MeasuredRun]
    damaged: list[str]  # a line for each folder or file that cannot be read
    begun: list[Path]  # folders with config.yaml and no scores.json


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """The runs below the folders, each once."""
    damaged = [f"{folder}: no such folder" for folder in folders if not Path(folder).is_dir()]
    holding: dict[Path, tuple[Path, bool]] = {}
    for top in folders:
        for path, inner, files in os.walk(top):
            is_run = "scores.json" in files or "config.yaml" in files
            inner[:] = [name for name in inner if name[0] != "." and not name.endswith(PARTIAL)]
            inner[:] = [name for name in inner if not (is_run and name in SUBFOLDERS)]
            if is_run:
                holding[Path(path).resolve()] = Path(path), "scores.json" in files
    runs, begun = [], [folder for folder, measured in sorted(holding.values()) if not measured]
    for folder in (folder for folder, measured in sorted(holding.values()) if measured):
        try:
            runs.append(MeasuredRun(folder=folder, scores=Scores.load(folder / "scores.json")))
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return FoundRuns(runs, damaged, begun)


def filter_runs(runs: Sequence[MeasuredRun], where: Sequence[str]) -> list[MeasuredRun]:
    """The runs that have one of the values of each `KEY=VALUE[,VALUE…]`; one with commas may be given whole.
    Raises ValueError for another form or key, and for a value that no run has."""
    pairs = [word.partition("=") for word in where]
    for word, (key, _, value) in zip(where, pairs, strict=True):
        if key not in FILTERS or not value:
            allowed = f"KEY=VALUE[,VALUE…] with one of {', '.join(FILTERS)}"
            raise ValueError(f"--where {word} is invalid. Allowed: {allowed}")
    chosen = list(runs)
    for key, _, value in pairs if runs else ():
        known = set().union(*(run.names(key) for run in runs))
        values = {value} if value in known else set(value.split(","))
        if absent := sorted(values - known):
            allowed = ", ".join(sorted(known))
            raise ValueError(f"--where {key}={','.join(absent)} is invalid. Allowed: {allowed}")
        chosen = [run for run in chosen if run.names(key) & values]
    if runs and not chosen:
        raise ValueError(f"--where {' '.join(where)}: no run has all of these, each alone some have")
    return chosen


def measure_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Copies of the runs with their values; intransigence is against `one` in the same conditions."""
    plain = {"method": "one", "mask": "none", "replay": "none"}
    references = [run for run in runs if plain.items() <= run.scores.run.items()]
    keys = [*(f"{name}/{unit}" for name in METRICS for unit in UNITS), "intransigence/nats"]
    keys += [f"endtask/{name}" for name in task_metrics.ENDTASK_MEANINGS]
    keys += [f"answers/{name}" for name in task_metrics.ANSWER_METRICS] + [f"cost/{cost}" for cost in COSTS]
    measured = []
    for run in runs:
        scores = run.scores
        numbers = summarize_scores(scores, ("metric", "task", "score", "benchmark", "cost"))
        alike = run.pair[0], scores.run["model"], run.comparability
        alone = [r for r in references if (r.pair[0], r.scores.run["model"], r.comparability) == alike]
        if alone and run not in references:
            apart = []  # another seed, and how many settings of the training differ
            for other in alone:
                own = [k for k in {*other.settings, *run.settings} if k.startswith(("trainer.", "optim."))]
                differing = sum(other.settings.get(key) != run.settings.get(key) for key in own)
                apart.append((other.pair[1] != run.pair[1], differing))
            both = scores.diagonal, alone[apart.index(min(apart))].scores.diagonal
            if shared := [name for name in both[0] if name in both[1]]:
                losses = np.array([[each[name] for name in shared] for each in both])
                numbers["intransigence/nats"] = float(intransigence(losses[0], one=losses[1]))
        shown = dict(zip(keys, keys, strict=True))  # by the key of a summary
        for task, metric in scores.endtasks.get("metric", {}).items():
            shown[f"endtask/{escape_name(task)}/{metric}"] = f"task/{task}"
        for task, given in scores.benchmarks.get("tasks", {}).items():
            shown[f"benchmark/{escape_name(task)}"] = f"benchmark/{describe_task(task, given)}"
        values = {name: numbers[key] for key, name in shown.items() if key in numbers}
        measured.append(replace(run, values=values))
    comparable = defaultdict(list)
    for run in measured:
        comparable[run.comparability].append(run)
    for each in comparable.values():
        leave_out_others(each)
    return measured


def leave_out_others(runs: Sequence[MeasuredRun]) -> None:
    """Takes out of comparable runs what was measured otherwise than in most: tasks by another protocol, and a
    mean over fewer cells of the matrix than in the others."""
    found: list[tuple[MeasuredRun, tuple[str, ...], str]] = []
    for group, prefixes in PROTOCOLS.items():
        measured = [run for run in runs if any(key.startswith(prefixes) for key in run.values)]
        having = [run for run in measured if run.protocol(group)]
        known = [digest(run.protocol(group)) for run in having]
        usual = max(known, key=known.count, default="")
        others = [run for run, own in zip(having, known, strict=True) if own != usual]
        found += [(run, prefixes, f"{group} (another protocol)") for run in others]
    for name in METRICS:
        having = [run for run in runs if f"{name}/nats" in run.values]
        counts = [run.scores.metrics[name].get("terms", [math.inf])[0] for run in having]
        most = max(counts, default=math.inf)
        fewer = [run for run, count in zip(having, counts, strict=True) if count < most]
        found += [(run, (f"{name}/",), f"{name} (fewer cells)") for run in fewer]
    for run, prefixes, what in found:
        run.values = {key: value for key, value in run.values.items() if not key.startswith(prefixes)}
        run.left_out += (what,)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunGroup:
    """Runs that differ in seed and order alone."""

    name: str
    plain: str  # method, mask and replay
    model: str
    orders: Sequence[str]  # names of its orders
    own: frozenset[str]  # the values that set it apart
    runs: Sequence[MeasuredRun]
    order: tuple[str, ...] | None  # where groups are distinguished by it
    method: str
    alone: bool  # whether its method trains every domain from the base
    needs_domain: bool  # whether the domain of a text is given at test time
    size: str  # `6 (3 seeds x 2 orders)`

    def of(self, key: str) -> list[float | None]:
        """A value by run."""
        return [run.values.get(key) for run in self.runs]

    def mean(self, key: str) -> float | None:
        known = [run.values[key] for run in self.runs if key in run.values]
        return fmean(known) if known else None


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
    places: Mapping[str, int]  # colour and marker by the name of a group, in all sections

    @property
    def runs(self) -> list[MeasuredRun]:
        return [run for group in self.groups for run in group.runs]

    @cached_property
    def frame(self) -> DataFrame:
        """A row per run and value: run (its place in `runs`), group, model, order, seed, key, value; of runs
        of a group with the same order and seed the mean."""
        rows = [
            (number, group.name, group.model, *run.pair, key, value)
            for number, (group, run) in enumerate((g, run) for g in self.groups for run in g.runs)
            for key, value in run.values.items()
        ]
        frame = DataFrame(rows, columns=["run", "group", "model", "order", "seed", "key", "value"])
        pair = ["group", "order", "seed", "key"]
        if frame.duplicated(pair).any():
            frame["value"] = frame.groupby(pair, sort=False)["value"].transform("mean")
        return frame.drop_duplicates(pair)


def build_sections(
    runs: Sequence[MeasuredRun], *, by_order: bool = False, baseline: str = "ncl"
) -> list[RunSection]:
    """A section per set of comparable runs, the largest first; `by_order`: a group per order."""
    sets = divide_runs(runs)
    grouped = [group_runs(members, by_order=by_order) for members in sets]
    names = dict.fromkeys(group.name for groups in grouped for group in groups)
    places = {name: place for place, name in enumerate(sorted(names, key=lambda name: name != baseline))}
    bases = name_bases(sets)
    conditions = [members[0].conditions | {"base": base} for members, base in zip(sets, bases, strict=True)]

    sections = []
    for number, groups in enumerate(grouped):
        own = conditions[number]
        similar = [
            other
            for other in conditions
            if (other["objective"], other["domains"]) == (own["objective"], own["domains"])
        ]
        differing = [f"{key} {own[key]}" for key in own if len({other[key] for other in similar}) > 1]
        domains = few(sorted(set(groups[0].runs[0].scores.domains) - {GENERAL}), between=", ")
        title = f"{own['objective']}: {domains}"
        if differing:
            title += f" ({', '.join(differing)})"

        other_bases: dict[str, list[str]] = {}
        runs_of_all_bases = list(sets[number])
        for place, members in enumerate(sets):
            if place != number and members[0].comparability == sets[number][0].comparability:
                other_bases[bases[place]] = [group.name for group in grouped[place]]
                runs_of_all_bases += members
        settings = differing_settings(runs_of_all_bases) if other_bases else []
        baselines = {group.name: find_baseline(group, groups, baseline) for group in groups}
        section = RunSection(
            title=title,
            conditions=own,
            groups=groups,
            other_bases=other_bases,
            base_settings=[key for key in settings if key.startswith("model.")],
            baseline=baseline,
            baselines={name: other for name, other in baselines.items() if other is not None},
            places=places,
        )
        sections.append(section)
    return sections


def divide_runs(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """The runs by the conditions of their perplexities and by their base, the largest set first."""
    by_conditions: dict[tuple[str, ...], list[list[MeasuredRun]]] = defaultdict(list)
    for run in runs:
        sets = by_conditions[run.comparability]
        for members in sets:
            hashes = members[0].base_hash, run.base_hash
            if have_same_base(members[0].scores, run.scores, hashes=hashes):
                members.append(run)
                break
        else:
            sets.append([run])
    return sorted(itertools.chain(*by_conditions.values()), key=lambda members: -len(members))


def name_bases(sets: Sequence[Sequence[MeasuredRun]]) -> list[str]:
    """The base of each set of runs. Sets that differ in the base alone have different ones."""
    descriptions = [(members[0].comparability, members[0].base) for members in sets]
    counts, seen, names = Counter(descriptions), Counter[Any](), []
    for description in descriptions:
        seen[description] += 1
        number = f" #{seen[description]}" if counts[description] > 1 else ""
        names.append(description[1] + number)
    return names


def group_runs(runs: Sequence[MeasuredRun], *, by_order: bool) -> list[RunGroup]:
    """The groups by their mean LC; runs of one label are distinguished by their settings."""
    shared = set.intersection(*(set(split_variant(run.scores.run)) for run in runs))
    orders, several_models = name_orders(runs), len({run.scores.run["model"] for run in runs}) > 1
    by_label: dict[Any, list[MeasuredRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (orders[run.pair[0]], run.pair[1], str(run.folder))):
        facts = run.scores.run | {"variant": "; ".join(sorted(split_variant(run.scores.run)))}
        order = run.pair[0] if by_order else None
        by_label[label(facts, shared=shared), facts["model"], order].append(run)

    groups = []
    for (name, model, order), alike in by_label.items():
        for settings, members in split_by_settings(alike).items():
            parts = [name, *(shorten(setting, width=40) for setting in settings[:NAMED_SETTINGS])]
            if len(settings) > NAMED_SETTINGS:
                parts.append("…")
            if several_models:
                parts.append(model)
            if order is not None:
                parts.append(f"order {orders[order]}")
            facts = members[0].scores.run
            group = RunGroup(
                name=", ".join(parts),
                plain=label(facts | {"variant": ""}),
                model=model,
                orders=sorted({orders[run.pair[0]] for run in members}),
                own=frozenset({*settings, *split_variant(facts)} - shared),
                runs=members,
                order=order,
                method=facts["method"],
                alone=members[0].scores.alone,
                needs_domain=any(run.scores.needs_domain for run in members),
                size=describe_size(members),
            )
            groups.append(group)

    means = {group: group.mean("LC/perplexity") for group in groups}
    groups.sort(key=lambda group: (math.inf if means[group] is None else means[group], group.name))
    counts, seen = Counter(group.name for group in groups), Counter[str]()
    for place, group in enumerate(groups):
        seen[group.name] += 1
        if counts[group.name] > 1:
            groups[place] = replace(group, name=f"{group.name} #{seen[group.name]}")
    return groups


def split_by_settings(runs: Sequence[MeasuredRun]) -> dict[tuple[str, ...], list[MeasuredRun]]:
    """Runs of one label by the settings in which they differ, as `key=value`."""
    keys = differing_settings(runs)
    groups: dict[tuple[str, ...], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        settings = tuple(f"{key}={run.settings.get(key, 'absent')}" for key in keys)
        if keys and not run.settings:
            settings = ("config unknown",)
        groups[settings].append(run)
    return groups


def describe_size(runs: Sequence[MeasuredRun]) -> str:
    """`6 (3 seeds x 2 orders)`."""
    num_orders, num_seeds = len({run.pair[0] for run in runs}), len({run.pair[1] for run in runs})
    seeds = f"{num_seeds} seed" if num_seeds == 1 else f"{num_seeds} seeds"
    orders = f"{num_orders} order" if num_orders == 1 else f"{num_orders} orders"
    is_full = len(runs) == num_seeds * num_orders
    return f"{len(runs)} ({seeds} x {orders})" if is_full else f"{len(runs)} ({seeds}, {orders})"


def differing_settings(runs: Sequence[MeasuredRun]) -> list[str]:
    """Settings that decide a result and in which runs differ, other than the seed and what follows it."""
    known_runs = [run for run in runs if run.settings]
    seeds = [str(run.scores.run["seed"]) for run in known_runs]
    keys = {key for run in known_runs for key in run.settings if is_compared(key)}
    differing = []
    for key in sorted(keys):
        values = [str(run.settings.get(key, "absent")) for run in known_runs]
        if len(set(values)) > 1 and values != seeds:
            differing.append(key)
    return differing


def name_orders(runs: Sequence[MeasuredRun]) -> dict[tuple[str, ...], str]:
    """Each order by its name, numbered where one name stands for several."""
    given = {run.pair[0]: run.order for run in sorted(runs, key=lambda run: -len(run.order))}
    given = {order: shorten(name, width=40) for order, name in given.items()}
    counts, seen, names = Counter(given.values()), Counter[str](), {}
    for order, name in sorted(given.items()):
        seen[name] += 1
        names[order] = name + f" #{seen[name]}" * (counts[name] > 1)
    return names


def find_baseline(group: RunGroup, groups: Sequence[RunGroup], baseline: str) -> RunGroup | None:
    """The group called `baseline` with the same model and an order in common: the one with exactly this name,
    else the one that shares most values. None if two share as many, and for a baseline itself."""
    named = [each for each in groups if baseline in (each.name, each.plain) and each.model == group.model]
    orders = {run.pair[0] for run in group.runs}
    alike = [each for each in named if orders & {run.pair[0] for run in each.runs}]
    if not alike or group in named:
        return None
    shared = {each.name: len(each.own & group.own) - len(each.own - group.own) for each in alike}
    best = [each for each in alike if each.name == baseline]
    best = best or [each for each in alike if shared[each.name] == max(shared.values())]
    return best[0] if len(best) == 1 else None


def find_stages(scores: Scores) -> dict[str, tuple[float, float]]:
    """Where each learned stage begins and ends, in tokens; all are equally long where these are unknown."""
    lengths = scores.tokens_read
    if not any(lengths):
        lengths = [0] + [1] * (len(scores.rows) - 1)
    ends = np.cumsum(lengths).tolist()
    return {row: tuple(ends[at - 1 : at + 1]) for at, row in enumerate(scores.rows) if row in scores.learned}


def read_training(path: Path, scores: Scores) -> dict[str, DataFrame]:
    """`train/TERM/STAGE` of metrics.csv: by stage a column per term over the tokens of the whole run. Of two
    lines with one step the later counts, a damaged line is left out. Where a step's tokens are unknown, the
    stage's are spread over its steps."""
    how = {"names": ["step", "name", "value"], "on_bad_lines": "skip", "dtype": str}
    try:
        lines = pandas.read_csv(path, encoding_errors="replace", **how)
    except (OSError, ValueError):
        return {}
    for column in ("step", "value"):
        lines[column] = pandas.to_numeric(lines[column], errors="coerce")
    lines[["term", "stage"]] = lines["name"].str.extract(r"(?s)^train/([^/]+)/(.+)$")
    lines = lines.dropna().drop_duplicates(["stage", "step", "term"], keep="last")
    table = lines.pivot(index=["stage", "step"], columns="term", values="value")
    found: dict[str, DataFrame] = {}
    for name, (begin, end) in find_stages(scores).items():
        if name in table.index:
            curves = table.loc[name].dropna(axis="columns", how="all")
            steps = curves.index.to_series()
            spread = (end - begin) * (steps + 1) / (steps.max() + 1)
            tokens = curves.pop("tokens").fillna(spread) if "tokens" in curves else spread
            found |= {name: curves.set_index(begin + tokens)} if len(curves.columns) else {}
    return found
