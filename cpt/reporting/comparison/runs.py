"""The runs of a comparison: found below folders, filtered, and what each of them has measured."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from cpt.core.config import executes, flatten
from cpt.data.sources.base import GENERAL
from cpt.evaluation.answers.results import NAMES as ANSWERS
from cpt.evaluation.conditions import conditions, is_unknown
from cpt.evaluation.endtasks.metrics import MEANINGS
from cpt.evaluation.metrics import METRICS, UNITS, intransigence
from cpt.evaluation.probes.results import describe_task
from cpt.evaluation.scores import Scores
from cpt.reporting import frames as labels
from cpt.reporting.comparison.measures import COSTS
from cpt.reporting.comparison.restricted import restrict_scores
from cpt.reporting.frames import escape_name, summarize_scores

# What a run folder holds beside its scores.
WITHIN = (
    "answers",
    "checkpoints",
    "diagnostics",
    "documents",
    "endtasks",
    "model",
    "probes",
    "rebuilt",
    "stages",
    "wandb",
)
FILTERS = ("method", "mask", "replay", "variant", "model", "order", "seed", "name", "objective")
KEYS = [*(f"{name}/{unit}" for name in METRICS for unit in UNITS), "intransigence/nats"]
KEYS += [f"endtask/{name}" for name in MEANINGS] + [f"answers/{name}" for name in ANSWERS]
COST_KEYS = [measure.key for measure in COSTS]
Pair = tuple[tuple[str, ...], int]  # order and seed: two runs of one pair learned the same text alike
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast


@dataclass(kw_only=True, eq=False)
class Run:
    """A run, its folder, and its measurements by the key of a Measure, finite ones only."""

    folder: Path
    scores: Scores
    domains: frozenset[str] = frozenset()  # the metrics are of these texts alone; empty: of all
    values: dict[str, float] = field(default_factory=dict)
    assumed: Mapping[str, str] = field(default_factory=dict)  # of its conditions, what others say

    def but(self, **changes: Any) -> Run:
        """The run with these fields; its config is not read again."""
        made = replace(self, **changes)
        vars(made).update({name: vars(self)[name] for name in ("_config", "settings") if name in vars(self)})
        return made

    @property
    def pair(self) -> Pair:
        return tuple(self.scores.run["order"]), self.scores.run["seed"]

    @cached_property
    def conditions(self) -> dict[str, str]:
        """What its perplexities depend on beside the model: see cpt.evaluation.conditions."""
        return conditions(self.scores, self.settings) | self.assumed

    @cached_property
    def counted(self) -> tuple:
        """Objective, texts, and how many tokens, scored tokens and bytes each has."""
        scores, own = self.scores, self.conditions
        counts = zip(scores.domains, scores.tokens, scores.scored, scores.bytes, strict=True)
        return own["objective"], own["texts"], *sorted(counts)

    @property
    def alike(self) -> tuple[str, ...]:
        """Runs of which this is equal can be compared: the same tokens were scored, whatever bounded them."""
        return tuple(value for name, value in self.conditions.items() if name != "cap")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The leaves of its config.yaml without those of how it was carried out; empty if there is none."""
        return {key: value for key, value in self._config.items() if not executes(key)}

    @cached_property
    def order(self) -> str:
        """What its order was called: 0, reverse, …; else its domains with commas."""
        given = self._config.get("order")
        return ",".join(self.scores.run["order"]) if given is None or isinstance(given, list) else str(given)

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            text = (self.folder / "config.yaml").read_text(encoding="utf-8")
            tree = yaml.load(text, Loader=Loader)
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        return dict(flatten(tree)) if isinstance(tree, dict) else {}

    def told(self, key: str) -> str:
        """What the run is, by a filter's key."""
        return self.order if key == "order" else str(self.scores.run[key])

    def called(self, key: str) -> set[str]:
        """All that a filter may call it: an order also by its domains, a variant by each of its values."""
        others = {
            "order": [",".join(self.scores.run["order"])],
            "variant": labels.split_variant(self.scores.run),
        }
        return {self.told(key), *others.get(key, [])}


def find_runs(folders: Sequence[Path]) -> tuple[dict[Path, Scores], list[str]]:
    """The runs below the folders by their own folder, and a line for each that cannot be read."""
    runs, damaged = {}, [f"{folder}: no such folder" for folder in folders if not Path(folder).is_dir()]
    for folder in _find_holding("scores.json", folders):
        try:
            runs[folder] = Scores.load(folder / "scores.json")
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return runs, damaged


def find_begun(folders: Sequence[Path]) -> list[Path]:
    """Run folders in which nothing has been measured yet: a config.yaml without scores.json."""
    return [each for each in _find_holding("config.yaml", folders) if not (each / "scores.json").exists()]


def _find_holding(name: str, folders: Sequence[Path]) -> list[Path]:
    """Folders that hold a file of this name; one that is reached in two ways counts once."""
    paths = {path.resolve(): path for folder in folders for path in _walk(Path(folder), name)}
    return sorted(paths.values())


def _walk(top: Path, name: str) -> Iterator[Path]:
    """Within a run folder the large sub-folders are left out, hidden ones everywhere."""
    for folder, inner, files in os.walk(top):
        left_out = WITHIN if "scores.json" in files or "config.yaml" in files else ()
        inner[:] = [each for each in inner if each not in left_out and not each.startswith(".")]
        if name in files:
            yield Path(folder)


def tasks_of(run: Run) -> Mapping[str, Mapping[str, Any]]:
    """The tasks that a run was asked, of its domains alone if the comparison names some."""
    tasks = run.scores.answers.get("tasks", {})
    return {task: told for task, told in tasks.items() if not run.domains or task in run.domains}


def parse_filters(words: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE[,VALUE…]` by key; ValueError for another form or key."""
    pairs = [word.partition("=") for word in words]
    for word, (key, _, value) in zip(words, pairs, strict=True):
        if key not in FILTERS or not value:
            raise ValueError(f"--where {word}; allowed: KEY=VALUE[,VALUE…] with one of {', '.join(FILTERS)}")
    return {key: value for key, _, value in pairs}


def filter_runs(runs: Sequence[Run], *, where: Mapping[str, str]) -> list[Run]:
    """The runs of which each key has one of the values; ValueError for a value that no run has."""
    sought = {key: _choices(runs, key, value) for key, value in where.items()}
    chosen = [run for run in runs if all(run.called(key) & values for key, values in sought.items())]
    if not chosen:
        filters = " ".join(f"{key}={value}" for key, value in where.items())
        raise ValueError(f"--where {filters}: no run has all of these, each alone some have")
    return chosen


def _choices(runs: Sequence[Run], key: str, value: str) -> set[str]:
    """The values asked for; one with commas in it (an order, a variant) may be given as it is."""
    there = set().union(*(run.called(key) for run in runs))
    values = {value} if value in there else set(value.split(","))
    if absent := sorted(values - there):
        raise ValueError(f"--where {key}={','.join(absent)}; there is: {', '.join(sorted(there))}")
    return values


def check_domains(names: Iterable[str], *, runs: Sequence[Run]) -> frozenset[str]:
    """Names of domains; ValueError for one that no run has."""
    there = {name for run in runs for name in run.scores.domains} - {GENERAL}
    if absent := [name for name in names if name not in there]:
        raise ValueError(f"--domains {','.join(absent)}; there is: {', '.join(sorted(there))}")
    return frozenset(names)


def measure_runs(runs: Sequence[Run], *, domains: Collection[str]) -> list[Run]:
    """The runs with their measurements, on these domains alone if any are named; without runs that have none
    of them."""
    runs = complete_conditions(runs)
    ones = [run for run in runs if _is_reference(run)]
    sought = [(run, frozenset(domains) & set(run.scores.domains)) for run in runs]
    return [
        run.but(domains=names, values=_measure_run(run, names, ones=ones))
        for run, names in sought
        if names or not domains
    ]


def complete_conditions(runs: Sequence[Run]) -> list[Run]:
    """The runs, with what one does not say of its conditions taken from those that do: where their texts have
    as many tokens, scored tokens and bytes, and all of these say the same."""
    said = defaultdict(set)
    for run in runs:
        for name, value in run.conditions.items():
            said[run.counted, name].update([] if is_unknown(value) else [value])
    return [
        run.but(assumed={name: next(iter(said[run.counted, name])) for name in _list_open(run, said)})
        for run in runs
    ]


def _list_open(run: Run, said: Mapping[tuple, Collection[str]]) -> list[str]:
    """What the run does not say, and others with one voice."""
    unknown = [name for name, value in run.conditions.items() if is_unknown(value)]
    return [name for name in unknown if len(said[run.counted, name]) == 1]


def _measure_run(run: Run, names: frozenset[str], *, ones: Sequence[Run]) -> dict[str, float]:
    """What the run is compared by, of these domains alone if any are named."""
    scores = restrict_scores(run.scores, names) if names else run.scores
    numbers = summarize_scores(scores, ("metric", "task", "score", "probe", "cost"))
    against_one = _compare_with_one(run, names, ones=ones)
    if against_one is not None and math.isfinite(against_one):
        numbers["intransigence/nats"] = against_one
    for task, metric in scores.endtasks.get("metric", {}).items():
        numbers[f"task/{task}"] = numbers.get(f"endtask/{escape_name(task)}/{metric}", math.nan)
    probes = {name: describe_task(name, task) for name, task in scores.probes.get("tasks", {}).items()}
    for name, told in probes.items():
        numbers[f"probe/{told}"] = numbers.get(f"probe/{escape_name(name)}", math.nan)
    tasks = [f"task/{task}" for task in scores.endtasks.get("tasks", ())]
    tasks += [f"probe/{told}" for told in probes.values()]
    return {
        key: numbers[key] for key in (*KEYS, *tasks, *COST_KEYS) if math.isfinite(numbers.get(key, math.nan))
    }


def _is_reference(run: Run) -> bool:
    """Whether it is a plain run of `one`, which learns each domain alone."""
    plain = {"method": "one", "mask": "none", "replay": "none"}
    return all(run.scores.run[key] == value for key, value in plain.items())


def _compare_with_one(run: Run, names: frozenset[str], *, ones: Sequence[Run]) -> float | None:
    """Intransigence in nats, against `one` with this model and order, and this seed if there is one."""
    same = [one for one in ones if one.pair[0] == run.pair[0] and one.told("model") == run.told("model")]
    same = [one for one in same if one.alike == run.alike]
    mine = run.scores.diagonal
    if not same or _is_reference(run) or not mine:
        return None
    other = min(same, key=lambda one: one.pair[1] != run.pair[1]).scores.diagonal
    shared = [name for name in mine if name in other and (not names or name in names)]
    ours, alone = [mine[name] for name in shared], [other[name] for name in shared]
    return float(intransigence(ours, one=alone)) if shared else None
