"""Runs for a comparison: found, filtered, and measured."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from cpt.core.cache import PARTIAL
from cpt.core.config import NEUTRAL_VALUES, digest, drop_neutral_values, flatten
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import read_yaml
from cpt.evaluation import task_metrics
from cpt.evaluation.metrics import METRICS, UNITS, intransigence
from cpt.evaluation.scores import Scores, find_conditions
from cpt.evaluation.task_metrics import describe_task
from cpt.reporting.comparability import have_same_base, read_base_hash, select_result_settings
from cpt.reporting.formats import split_variant
from cpt.reporting.frames import escape_name, summarize_scores

SUBFOLDERS = {  # of a run folder; none holds another run
    "answers",
    "benchmarks",
    "chats",
    "checkpoints",
    "diagnostics",
    "divergence",
    "documents",
    "endtasks",
    "model",
    "monitor",
    "rebuilt",
    "stages",
    "wandb",
}
FILTERS = ("method", "mask", "replay", "variant", "model", "order", "seed", "name", "objective")
COSTS = ("tokens", "flops", "seconds_learn", "seconds", "memory", "trained", "stored", "stored_per_domain")
PROTOCOLS = {  # config group: values it decides
    "endtask": ("endtask/", "task/"),
    "answers": ("answers/",),
    "chats": ("chat/",),
    "divergence": ("divergence/",),
}
NO_PROTOCOL = ("root", "folder", "path", "cache", "eval_batch_size")  # options of a protocol that decide none
Pair = tuple[tuple[str, ...], int]  # order and seed


@dataclass(frozen=True)
class LeftOut:
    """Values that are not compared, as they were measured otherwise than in most runs."""

    name: str  # a config group, or a metric
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


@dataclass(kw_only=True, eq=False)
class MeasuredRun:
    """A run and the finite numbers it is compared by: `LC/nats`, `task/<task>`, `benchmark/<name>`, ..."""

    folder: Path
    scores: Scores
    values: Mapping[str, float] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()

    @property
    def pair(self) -> Pair:
        return tuple(self.scores.run["order"]), self.scores.run["seed"]

    @cached_property
    def conditions(self) -> dict[str, str]:
        """What a perplexity depends on except the model: see cpt.evaluation.conditions."""
        return find_conditions(self.scores)

    @property
    def comparability(self) -> tuple[str, ...]:
        """Equal for runs whose perplexities are over the same scored tokens, whatever the cap."""
        return tuple(value for name, value in self.conditions.items() if name != "cap")

    @cached_property
    def config(self) -> dict[str, Any]:
        """The leaves of config.yaml; empty without the file."""
        try:
            tree = read_yaml(self.folder / "config.yaml")
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return {}
        return dict(flatten(tree)) if isinstance(tree, dict) else {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The leaves of config.yaml that decide the result; empty without the file."""
        return select_result_settings(self.config, self.scores)

    def show_setting(self, key: str) -> str:
        """A setting of the run as it is shown. The settings lack those at the value that changes nothing."""
        return str(self.settings.get(key, NEUTRAL_VALUES.get(key, "absent")))

    @cached_property
    def base_hash(self) -> str:
        """A hash of the weights that the run began with; empty where its folder does not say."""
        return read_base_hash(self.folder)

    @property
    def base(self) -> str:
        """The base for people: `tiny_gpt2 0123abcd`."""
        name = str(self.scores.base.get("name") or self.scores.run["model"])
        return f"{name} {self.base_hash}".strip()

    def task_protocol(self, group: str) -> dict[str, Any]:
        """How the tasks of a config group are measured; empty without a config."""
        if group == "chats":  # a file of chats may have another name; what it holds counts
            return {"set": self.scores.chats.get("set")}
        protocol = {}
        for key, value in drop_neutral_values(self.config).items():
            is_of_training = key == "answers.batch_size"  # of an end task it would be that of fine-tuning
            if (
                key.startswith(f"{group}.")
                and not is_of_training
                and key.rpartition(".")[2] not in NO_PROTOCOL
            ):
                protocol[key] = value
        return protocol

    @property
    def order_name(self) -> str:
        """The order's name in the config (0, reverse, ...), else its domains with commas."""
        name = self.settings.get("order")
        if name is None or isinstance(name, list):
            return ",".join(self.scores.run["order"])
        return str(name)

    def filter_values(self, key: str) -> set[str]:
        """The values that a filter may give for this run."""
        if key == "order":
            return {self.order_name, ",".join(self.scores.run["order"])}
        values = {str(self.scores.run[key])}
        if key == "variant":
            values |= set(split_variant(self.scores.run))
        return values


class FoundRuns(NamedTuple):
    runs: list[MeasuredRun]
    damaged: list[str]  # a line for each folder or file that cannot be read
    started: list[Path]  # folders with config.yaml and no scores.json


def find_runs(folders: Sequence[Path]) -> FoundRuns:
    """The runs below the folders, each once."""
    damaged = [f"{folder}: no such folder" for folder in folders if not Path(folder).is_dir()]
    has_scores: dict[Path, tuple[Path, bool]] = {}  # by the resolved path of a run: its path, and this
    for top in folders:
        for path, subfolders, files in os.walk(top):
            is_run = "scores.json" in files or "config.yaml" in files
            # os.walk enters the subfolders that stay in this list.
            subfolders[:] = [name for name in subfolders if may_hold_runs(name, is_in_run=is_run)]
            if is_run:
                has_scores[Path(path).resolve()] = Path(path), "scores.json" in files

    runs = []
    started = []
    for folder, is_measured in sorted(has_scores.values()):
        if not is_measured:
            started.append(folder)
            continue
        try:
            runs.append(MeasuredRun(folder=folder, scores=Scores.load(folder / "scores.json")))
        except (OSError, ValueError) as error:
            damaged.append(str(error))
    return FoundRuns(runs, damaged, started)


def may_hold_runs(name: str, *, is_in_run: bool) -> bool:
    """Whether a folder is searched for runs."""
    if name.startswith(".") or name.endswith(PARTIAL):
        return False
    return not is_in_run or name not in SUBFOLDERS


def filter_runs(runs: Sequence[MeasuredRun], where: Sequence[str]) -> list[MeasuredRun]:
    """The runs that have one of the values of each `KEY=VALUE[,VALUE…]`; one with commas may be given whole.
    Raises ValueError for another form or key, and for a value that no run has."""
    for word in where:
        key, _, value = word.partition("=")
        if key not in FILTERS or not value:
            raise ValueError(
                f"--where {word} is invalid. Allowed: KEY=VALUE[,VALUE…] with one of {', '.join(FILTERS)}"
            )
    if not runs:
        return []

    selected = list(runs)
    for word in where:
        key, _, value = word.partition("=")
        known_values = set().union(*(run.filter_values(key) for run in runs))
        values = {value} if value in known_values else set(value.split(","))
        unknown = sorted(values - known_values)
        if unknown:
            raise InvalidOptionError(
                f"--where {key}", ",".join(unknown), allowed=", ".join(sorted(known_values))
            )
        selected = [run for run in selected if run.filter_values(key) & values]
    if not selected:
        raise ValueError(f"--where {' '.join(where)}: no run has all of these, each alone some have")
    return selected


def measure_runs(runs: Sequence[MeasuredRun]) -> list[MeasuredRun]:
    """Copies of the runs with their values. Intransigence compares a run with its reference, `one` in the
    same conditions."""
    references = [run for run in runs if is_reference(run)]
    measured = []
    for run in runs:
        reference = find_reference(run, references)
        measured.append(replace(run, values=measure_run(run, reference)))

    comparable = defaultdict(list)
    for run in measured:
        comparable[run.comparability].append(run)
    for comparable_runs in comparable.values():
        leave_out_tasks(comparable_runs)
        leave_out_means(comparable_runs)
    return measured


def is_reference(run: MeasuredRun) -> bool:
    """Whether a run trained every domain from the base, with nothing else."""
    facts = run.scores.run
    return (facts["method"], facts["mask"], facts["replay"]) == ("one", "none", "none")


def find_reference(run: MeasuredRun, references: Sequence[MeasuredRun]) -> MeasuredRun | None:
    """The reference that intransigence is measured against, over the same order, base and texts: one of the
    same seed if there is one, and with most settings of the training alike. None for a reference itself."""
    if run in references:
        return None

    comparable = []
    for reference in references:
        is_same_order = reference.pair[0] == run.pair[0]
        is_same_model = reference.scores.run["model"] == run.scores.run["model"]
        is_comparable = is_same_order and is_same_model and reference.comparability == run.comparability
        hashes = reference.base_hash, run.base_hash
        if is_comparable and have_same_base(reference.scores, run.scores, hashes=hashes):
            comparable.append(reference)

    def rank_reference(reference: MeasuredRun) -> tuple[bool, int]:
        """Whether the seed differs, then how many settings of the training do."""
        num_differing = 0
        for key in {*reference.settings, *run.settings}:
            is_of_training = key.startswith(("trainer.", "optim."))
            if is_of_training and reference.settings.get(key) != run.settings.get(key):
                num_differing += 1
        return reference.pair[1] != run.pair[1], num_differing

    return min(comparable, key=rank_reference, default=None)


def measure_run(run: MeasuredRun, reference: MeasuredRun | None) -> dict[str, float]:
    """The finite numbers that a run is compared by."""
    scores = run.scores
    numbers = summarize_scores(scores, ("metric", "task", "score", "chat", "divergence", "benchmark", "cost"))
    if reference is not None:
        losses = scores.diagonal
        reference_losses = reference.scores.diagonal
        shared = [domain for domain in losses if domain in reference_losses]
        if shared:
            learned = np.array([losses[domain] for domain in shared])
            reference_learned = np.array([reference_losses[domain] for domain in shared])
            numbers["intransigence/nats"] = float(intransigence(learned, reference=reference_learned))

    names = list_value_names(scores)
    return {name: numbers[key] for key, name in names.items() if key in numbers}


def list_value_names(scores: Scores) -> dict[str, str]:
    """The names of the values that runs are compared by, by their key in a summary of the scores."""
    keys = []
    for metric in METRICS:
        keys += [f"{metric}/{unit}" for unit in UNITS]
    keys.append("intransigence/nats")
    keys += [f"endtask/{name}" for name in task_metrics.ENDTASK_MEANINGS]
    keys += [f"answers/{name}" for name in task_metrics.ANSWER_METRICS]
    keys += ["divergence/just_trained", "divergence/general"]
    keys += ["chat/rise", "chat/base_answer_rise", "chat/broken"]
    keys += [f"cost/{name}" for name in COSTS]

    names = {key: key for key in keys}
    for task, metric in scores.endtasks.get("metric", {}).items():
        names[f"endtask/{escape_name(task)}/{metric}"] = f"task/{task}"
    for name, task in scores.benchmarks.get("tasks", {}).items():
        names[f"benchmark/{escape_name(name)}"] = f"benchmark/{describe_task(name, task)}"
    return names


def leave_out_tasks(runs: Sequence[MeasuredRun]) -> None:
    """Takes out of comparable runs the tasks that were measured by another protocol than in most."""
    for group, prefixes in PROTOCOLS.items():
        protocols: dict[MeasuredRun, str] = {}  # as hashes
        for run in runs:
            is_measured = any(key.startswith(prefixes) for key in run.values)
            if is_measured and run.task_protocol(group):
                protocols[run] = digest(run.task_protocol(group))
        hashes = list(protocols.values())
        most_frequent = max(hashes, key=hashes.count, default="")
        for run, protocol in protocols.items():
            if protocol != most_frequent:
                remove_values(run, prefixes, LeftOut(group, "another protocol"))


def leave_out_means(runs: Sequence[MeasuredRun]) -> None:
    """Removes a metric from those of comparable runs in which it is a mean over fewer cells of the matrix
    than in another run."""
    for metric in METRICS:
        num_cells: dict[MeasuredRun, float] = {}
        for run in runs:
            if f"{metric}/nats" in run.values:
                num_cells[run] = count_measured_cells(run.scores, metric)
        max_cells = max(num_cells.values(), default=0)
        for run in num_cells:
            if num_cells[run] < max_cells:
                remove_values(run, (f"{metric}/",), LeftOut(metric, "fewer cells"))


def count_measured_cells(scores: Scores, metric: str) -> float:
    """Over how many terms a metric is a mean; infinity for all of them, as scores lack it then."""
    terms = scores.metrics[metric].get("terms")
    if terms is None:
        return math.inf
    num_measured, _num_terms = terms
    return num_measured


def remove_values(run: MeasuredRun, prefixes: tuple[str, ...], left_out: LeftOut) -> None:
    """Takes values out of a run, by how their keys begin."""
    run.values = {key: value for key, value in run.values.items() if not key.startswith(prefixes)}
    run.left_out += (left_out,)
