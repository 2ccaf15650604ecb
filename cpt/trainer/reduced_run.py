"""Writes the folder of a run without one of its domains, from the folder of a finished run, which stays as it
is. The folder is that of a run whose order never had the domain: the command of the run resumes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf

from cpt.core import files
from cpt.core.exceptions import DamagedFileError
from cpt.core.naming import quote_list
from cpt.evaluation.predictions import answers_file, file_name
from cpt.evaluation.scores import ACTIVITIES, COST_COLUMNS, Scores
from cpt.trainer.divergence_evaluator import FILE as DIVERGENCE_FILE
from cpt.trainer.extension import copy_entry, link_entry, link_file
from cpt.trainer.manifest import Manifest
from cpt.trainer.run_dir import MICRO_BATCH_FILE, RunDir

KeepCell = Callable[[int, str], bool]  # whether the cell of a row of the run and a text stays as it is
ENDTASKS, ANSWERS = "endtasks", "answers"  # folders of results, of tasks by the names of domains


@dataclass(frozen=True)
class Reduction:
    """What of a finished run is left."""

    domain: str  # that is gone
    order: Sequence[str]
    rows: Sequence[int]  # of the matrix, by their numbers in the finished run
    keeps_cell: KeepCell  # other cells are measured again, or missing

    def keeps_text(self, row: int, text: str) -> bool:
        """Whether what was measured on a text in a row stays."""
        return text != self.domain and self.keeps_cell(row, text)


def reduce_scores(scores: Scores, reduction: Reduction) -> Scores:
    """The scores of the rows that are left, unfinished: results that need the model are measured again."""
    reduced = deepcopy(scores)
    columns = [column for column, text in enumerate(scores.domains) if text != reduction.domain]
    reduced.domains = [scores.domains[column] for column in columns]
    for name in ("tokens", "bytes", "scored"):
        by_column = getattr(scores, name)
        setattr(reduced, name, [by_column[column] for column in columns])
    reduced.texts = {text: facts for text, facts in scores.texts.items() if text != reduction.domain}

    reduced.rows = [scores.rows[row] for row in reduction.rows]
    for name in COST_COLUMNS:
        by_row = getattr(scores, name)
        if by_row:  # else a file of a version without the column
            setattr(reduced, name, [by_row[row] for row in reduction.rows])
    reduced.nll = []
    reduced.modules = []
    for row in reduction.rows:
        losses = []
        for column in columns:
            is_kept = reduction.keeps_cell(row, scores.domains[column])
            losses.append(scores.nll[row][column] if is_kept else None)
        reduced.nll.append(losses)
        weights = scores.modules[row] if scores.modules else {}
        kept_texts = [text for text in weights if text in reduced.domains and reduction.keeps_cell(row, text)]
        reduced.modules.append({text: weights[text] for text in kept_texts})

    reduced.run = {**scores.run, "order": list(reduction.order), "finished": False}
    reduced.monitor = {}
    for stage, record in scores.monitor.items():
        if stage in reduced.rows:
            reduced.monitor[stage] = remove_monitored(record, reduction.domain)
    reduced.mixture = {stage: parts for stage, parts in scores.mixture.items() if stage in reduced.rows}
    reduced.unquantized = {text: nll for text, nll in scores.unquantized.items() if text in reduced.domains}
    # The stages that are left of those before each extension.
    reduced.grown = []
    for number in scores.grown:
        num_stages = sum(1 for row in reduction.rows if 0 < row <= number)
        if num_stages > 0 and number <= max(reduction.rows):
            reduced.grown.append(num_stages)
    for activity, seconds in scores.activity_seconds.items():
        if activity != "start":
            kept_seconds = {stage: value for stage, value in seconds.items() if stage in reduced.rows}
            reduced.activity_seconds[activity] = kept_seconds
    for results in fields(scores):
        if results.name in ACTIVITIES:  # what an evaluator has measured
            reduced.set_results(results.name, {})
    reduced.similarity = {}
    reduced.exported = {}
    reduced.measure()
    return reduced


def remove_monitored(record: Mapping[str, Any], domain: str) -> dict[str, Any]:
    """The evaluations during a stage without those of a domain's text."""
    reduced = dict(record)
    for name in ("nll", "rise", "divergence"):
        if name in record:
            reduced[name] = {text: values for text, values in record[name].items() if text != domain}
    return reduced


def write_reduced_run(folder: Path, run: RunDir, scores: Scores, reduction: Reduction) -> RunDir:
    """Writes the folder without stage files, and returns it. Raises ValueError for a damaged finished run."""
    reduced_run = RunDir(folder)
    folder.mkdir(exist_ok=True)
    for name in ("threads", MICRO_BATCH_FILE, ".hydra"):
        copy_entry(run.path / name, folder / name)
    write_order(reduced_run, load_stored_config(run), reduction.order)
    write_overrides(folder / ".hydra" / "overrides.yaml", reduction.order)

    manifest = Manifest.load(run)
    if manifest is None:
        raise DamagedFileError(run.manifest, reason="it is missing", remedy="restore it from a backup")
    manifest.order = list(reduction.order)
    manifest.texts.pop(reduction.domain, None)
    manifest.save(reduced_run)

    if reduction.rows:
        write_documents(reduced_run, run, reduction)
        link_results(reduced_run, run, scores, reduction)
        copy_kept_state(reduced_run, run, reduction)
        reduce_scores(scores, reduction).save(reduced_run.scores_file)
    return reduced_run


def load_stored_config(run: RunDir) -> DictConfig:
    """The stored config, whose texts are as they are written. Raises ValueError for a damaged one."""
    run.stored_config()
    config = OmegaConf.load(run.config)
    assert isinstance(config, DictConfig)
    return config


def write_order(reduced_run: RunDir, config: DictConfig, order: Sequence[str]) -> None:
    config.order = list(order)
    config.extend = None
    files.write_atomically(reduced_run.config, OmegaConf.to_yaml(config))


def write_overrides(path: Path, order: Sequence[str]) -> None:
    """Replaces the order in the overrides of a command, of which the model card tells how to repeat a run."""
    if not path.exists():
        return
    overrides = yaml.safe_load(path.read_text(encoding="utf-8")) or []
    files.write_atomically(path, yaml.safe_dump(replace_order(overrides, order)))


def replace_order(overrides: Sequence[str], order: Sequence[str]) -> list[str]:
    """Overrides with another order, and without those that name folders of the run.

    >>> replace_order(["method=ncl", "order=[a,b]", "extend=x"], ["a"])
    ['method=ncl', 'order=[a]']
    """
    names_of_run = ("order", "extend", "hydra.run.dir")
    other_overrides = [override for override in overrides if override.partition("=")[0] not in names_of_run]
    return [*other_overrides, f"order={quote_list(order)}"]


def write_documents(reduced_run: RunDir, run: RunDir, reduction: Reduction) -> None:
    """Writes the losses by document of the cells that stay."""
    for new_row, row in enumerate(reduction.rows):
        (losses,) = run.load_documents([row])
        kept_losses = {text: values for text, values in losses.items() if reduction.keeps_text(row, text)}
        reduced_run.save_documents(new_row, kept_losses)
        diagnostics = run.path / "diagnostics" / f"{row:03d}.npz"
        copy_entry(diagnostics, make_parent(reduced_run.path / "diagnostics" / f"{new_row:03d}.npz"))


def link_results(reduced_run: RunDir, run: RunDir, scores: Scores, reduction: Reduction) -> None:
    """Links what was measured after the stages that stay, by their new numbers, without results of the domain
    that is gone. They are those of the model that each row has scored: with modules per domain that of the
    last domain, or of a task's own."""
    for new_row, row in enumerate(reduction.rows):
        old_name = f"{row:03d}-{scores.rows[row]}"
        new_name = f"{new_row:03d}-{scores.rows[row]}"
        for kind in (ENDTASKS, ANSWERS, "chats", "benchmarks"):
            source = run.path / kind / old_name
            if not source.is_dir():
                continue
            for path in source.iterdir():
                if path.is_file() and not is_of_domain(path, kind, reduction.domain):
                    link_file(str(path), str(make_parent(reduced_run.path / kind / new_name / path.name)))

        # The file of a row has all texts.
        divergences = run.path / "divergence" / old_name / DIVERGENCE_FILE
        if divergences.is_file():
            with np.load(divergences) as archive:
                arrays = {text: archive[text] for text in archive if reduction.keeps_text(row, text)}
            reduced_run.save_arrays(reduced_run.path / "divergence" / new_name / DIVERGENCE_FILE, arrays)


def is_of_domain(path: Path, kind: str, domain: str) -> bool:
    """Whether a file of results is of the task of a domain, which has its name."""
    if kind == ENDTASKS:  # a file for each seed
        return path.stem.rpartition("-")[0] == domain
    return kind == ANSWERS and path.name == answers_file(path.parent, domain).name


def copy_kept_state(reduced_run: RunDir, run: RunDir, reduction: Reduction) -> None:
    """Copies what replay has stored of other domains before they were left, and the state of callbacks after
    the last stage that is left."""
    state = run.path / "callbacks" / f"{reduction.rows[-1]:03d}.pt"
    if state.is_file():
        copy_entry(state, make_parent(reduced_run.path / "callbacks" / f"{len(reduction.rows) - 1:03d}.pt"))
    for path in (run.path / "generated" / "kept").glob("*.json"):
        if path.stem != file_name(reduction.domain):
            copy_entry(path, make_parent(reduced_run.path / "generated" / "kept" / path.name))


def make_parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def copy_stage(reduced_run: RunDir, run: RunDir, number: int) -> None:
    """Links the file of a stage and its folders, which are replaced and never written into."""
    target = make_parent(reduced_run.stage_path(number))
    path = run.stage_path(number)
    for source in (
        path,
        *path.parent.glob(f"{path.stem}.*.shards"),
        *path.parent.glob(f"{path.stem}.*.linked"),
    ):
        if source.is_dir():
            link_entry(source, target.parent / source.name)
        else:
            copy_entry(source, target.parent / source.name)
