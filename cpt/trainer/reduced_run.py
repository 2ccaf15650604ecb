"""Writes the folder of a run without one of its domains, from the folder of a finished run, which stays as it
is. The folder is that of a run whose order never had the domain: the command of the run resumes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from cpt.core import files
from cpt.core.exceptions import DamagedFileError
from cpt.core.naming import quote_list
from cpt.evaluation.scores import ACTIVITIES, COST_COLUMNS, Scores
from cpt.trainer.extension import copy_entry, link_entry
from cpt.trainer.manifest import Manifest
from cpt.trainer.run_dir import MICRO_BATCH_FILE, RunDir

KeepCell = Callable[[int, str], bool]  # whether the cell of a row of the run and a text stays as it is


@dataclass(frozen=True)
class Reduction:
    """What of a finished run is left."""

    domain: str  # that is gone
    order: Sequence[str]
    rows: Sequence[int]  # of the matrix, by their numbers in the finished run
    keeps_cell: KeepCell  # other cells are measured again, or missing


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
    reduced.monitor = {stage: record for stage, record in scores.monitor.items() if stage in reduced.rows}
    reduced.grown = [number for number in scores.grown if number < len(reduced.rows)]
    for results in fields(scores):
        if results.name in ACTIVITIES:  # what an evaluator has measured
            reduced.set_results(results.name, {})
    reduced.similarity = {}
    reduced.exported = {}
    reduced.measure()
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
        kept_losses = {}
        for text, values in losses.items():
            if text != reduction.domain and reduction.keeps_cell(row, text):
                kept_losses[text] = values
        reduced_run.save_documents(new_row, kept_losses)
        diagnostics = run.path / "diagnostics" / f"{row:03d}.npz"
        copy_entry(diagnostics, make_parent(reduced_run.path / "diagnostics" / f"{new_row:03d}.npz"))


def make_parent(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
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
