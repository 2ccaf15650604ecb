"""Read caches and run folders through: one line for each corrupted or missing file, with what to do about it.

Exit code 1 if there is one, 2 if there is nothing to check. No file is changed."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.cache import CACHED
from cpt.core.files import check_archive, find_damage, read_checked_json, read_checksums
from cpt.core.messages import count_noun
from cpt.core.output import run_program
from cpt.core.tensors import check_state
from cpt.evaluation.chat_files import load_answers, load_losses
from cpt.evaluation.derived_rows import DOCUMENTS_FILE, ROW_FILE, DerivedRow, load_derived_documents
from cpt.evaluation.predictions import load_results
from cpt.evaluation.scores import Scores
from cpt.evaluation.withdrawals import WITHDRAWN_FILE, load_withdrawals
from cpt.trainer.checkpoint import check_stage
from cpt.trainer.manifest import Manifest
from cpt.trainer.run_dir import RunDir


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.verify", description=__doc__)
    allowed = "run folders, caches, or folders that hold them (default: outputs and $CPT_CACHE)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=allowed)
    folders = parser.parse_args(arguments).folders
    absent = [str(path) for path in folders if not path.is_dir()]
    if absent:
        print(f"cpt: {', '.join(absent)} is invalid: no such folder. Allowed: {allowed}", file=sys.stderr)
        return 2

    folders = folders or [Path("outputs"), Path(os.environ.get("CPT_CACHE") or "outputs")]
    damage = find_all_damage(folders)
    if not damage:
        names = ", ".join(map(str, folders))
        print(f"cpt: {names} is invalid: no run and no cache below it. Allowed: {allowed}", file=sys.stderr)
        return 2

    for path in sorted(damage):
        for line in damage[path]:
            print(line)
    num_damaged = sum(len(lines) > 0 for lines in damage.values())
    print(f"{count_noun(len(damage), 'folder')}: {num_damaged} damaged")
    return 1 if num_damaged else 0


def find_all_damage(folders: Sequence[Path]) -> dict[Path, list[str]]:
    """A line for each damaged file of the runs and caches at or below folders, by run or cache."""
    damage: dict[Path, list[str]] = {}
    for folder in folders:
        for root, subfolders, files in os.walk(folder.resolve()):
            path = Path(root)
            if not {"config.yaml", "scores.json"}.isdisjoint(files):
                damage[path] = list(find_damage_in_run(path))
            elif CACHED.fullmatch("/".join(path.parts[-2:])):
                damage[path] = list(check_file(check_folder, path))
            else:
                continue
            subfolders.clear()  # they have been checked with the folder
    return damage


def find_damage_in_run(folder: Path) -> Iterator[str]:
    """A line for each damaged file of a run folder, and for each missing one of a finished run."""
    run = RunDir(folder)
    read_table = partial(pq.read_table, page_checksum_verification=True)
    checks: dict[str, Callable[[Path], object]] = {
        "checkpoints/*.ckpt": partial(check_state, remedy="delete it to train that domain again"),
        "stages/*.pt": partial(check_stage, remedy=run.restore_hint),
        "callbacks/*.pt": partial(check_state, remedy=run.restore_hint),
        "config.yaml": lambda path: run.stored_config(),
        "diagnostics/*.npz": partial(check_archive, remedy=run.restore_hint),
        "monitor/*.npz": partial(check_archive, remedy=run.restore_hint),
        "generated/kept/*.json": partial(read_checked_json, remedy=run.restore_hint),
        "generated/*/facts.json": lambda path: check_folder(path.parent),
        "endtasks/*/*.parquet": read_table,
        "answers/*/*.parquet": read_table,
        "chats/*/*losses.json": load_losses,
        "chats/*/answers.json": load_answers,
        "divergence/*/*.npz": partial(check_archive, remedy="the same command measures it again"),
        "benchmarks/*/*.json": load_results,
        f"*/{ROW_FILE}": DerivedRow.load,
        f"*/{DOCUMENTS_FILE}": lambda path: load_derived_documents(path.parent),
        WITHDRAWN_FILE: lambda path: load_withdrawals(path.parent),
        "identity.json": lambda path: Manifest.load(run),
        "scores.json": lambda path: check_scores(path, run),
    }
    for pattern, check in checks.items():
        for path in sorted(folder.glob(pattern)):
            yield from check_file(check, path)


def check_scores(path: Path, run: RunDir) -> None:
    """Raises ValueError for damaged scores, and for what a finished run has lost."""
    scores = Scores.load(path)
    saves_all_stages = run.config.exists() and run.stored_config().get("save_all_stages")
    last = len(scores.rows) - 1
    run.check_documents(last + 1)
    if not scores.run["finished"]:
        return

    missing = []
    has_stages = run.stage_path(last).parent.is_dir()  # else removed by cpt.clean
    if has_stages:
        # Only the last stage is needed, unless all are kept; the base, of number 0, has no file.
        first = 1 if saves_all_stages else max(1, last)
        stages = [run.stage_path(number) for number in range(first, last + 1)]
        missing = [f"{stage} is missing; restore it from a backup" for stage in stages if not stage.exists()]
    damage = [*missing, *run.find_damaged_outputs(full=True)]
    if damage:
        raise ValueError(f"{run.path}: {'; '.join(damage)}")


def check_folder(folder: Path) -> None:
    """Raises ValueError where files of a folder differ from its checksums."""
    damage = list(find_damage(folder, read_checksums(folder), full=True))
    if damage:
        raise ValueError("; ".join(damage))


def check_file(check: Callable[[Path], object], path: Path) -> Iterator[str]:
    """The line for a file or folder in which a check finds damage: where, what, and what to do; else none."""
    try:
        check(path)
    except (ValueError, OSError, pa.ArrowException) as error:
        line = " ".join(str(error).split())
        names_path = str(path.parent) in line

        # An error says what to do where the same command does not help.
        has_remedy = re.search("; (delete|restore|read|update|make|the same command) ", line) is not None
        if not has_remedy and not isinstance(error, PermissionError):
            line += "; the same command rebuilds it"
        yield line if names_path else f"{path}: {line}"


if __name__ == "__main__":
    run_program(main)
