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
from cpt.core.output import run_program
from cpt.core.tensors import check_state
from cpt.evaluation.predictions import load_results
from cpt.evaluation.scores import Scores
from cpt.trainer.checkpoint import check_stage
from cpt.trainer.manifest import Manifest
from cpt.trainer.run_dir import RunDir


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.verify", description=__doc__)
    what = "run folders, caches, or folders that hold them (default: outputs and $CPT_CACHE)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)
    default = [Path("outputs"), Path(os.environ.get("CPT_CACHE") or "outputs")]
    given, found = parser.parse_args(arguments).folders, dict[Path, list[str]]()
    if absent := [str(path) for path in given if not path.is_dir()]:
        print(f"cpt: {', '.join(absent)} is invalid: no such folder. Allowed: {what}", file=sys.stderr)
        return 2
    for at, folders, files in (each for path in given or default for each in os.walk(path.resolve())):
        path, is_run = Path(at), not {"config.yaml", "scores.json"}.isdisjoint(files)
        if is_run or CACHED.fullmatch("/".join(path.parts[-2:])):
            found[path] = list(damage_in_run(path) if is_run else error_of(check_folder, path))
            folders.clear()
    if not found:
        places = ", ".join(map(str, given or default))
        print(f"cpt: {places} is invalid: no run and no cache below it. Allowed: {what}", file=sys.stderr)
        return 2
    lines = [line for path in sorted(found) for line in found[path]]
    print(*lines, f"{len(found)} folders: {len(lines)} damaged", sep="\n")
    return 1 if lines else 0


def damage_in_run(folder: Path) -> Iterator[str]:
    """A line for each damaged file of a run folder; of a finished run for each missing one, too."""
    run = RunDir(folder)

    def check_scores(path: Path) -> None:
        scores, keeps = Scores.load(path), run.config.exists() and run.stored_config().get("save_all_stages")
        last = len(scores.rows) - 1
        run.check_documents(last + 1)
        if scores.run["finished"]:
            kept = run.stage_path(last).parent.is_dir()  # else removed by cpt.clean
            stages = map(run.stage_path, range(1 if keeps else max(1, last), last + 1) if kept else ())
            gone = [f"{path} is missing; restore it from a backup" for path in stages if not path.exists()]
            if lost := [*gone, *run.find_damaged_outputs(full=True)]:
                raise ValueError(f"{folder}: {'; '.join(lost)}")

    read_table = partial(pq.read_table, page_checksum_verification=True)
    checks: dict[str, Callable[[Path], object]] = {
        "checkpoints/*.ckpt": partial(check_state, instead="delete it to train that domain again"),
        "stages/*.pt": partial(check_stage, instead=run.restore_hint),
        "callbacks/*.pt": partial(check_state, instead=run.restore_hint),
        "config.yaml": lambda path: run.stored_config(),
        "diagnostics/*.npz": partial(check_archive, instead=run.restore_hint),
        "monitor/*.npz": partial(check_archive, instead=run.restore_hint),
        "generated/kept/*.json": partial(read_checked_json, instead=run.restore_hint),
        "generated/*/facts.json": lambda path: check_folder(path.parent),
        "endtasks/*/*.parquet": read_table,
        "answers/*/*.parquet": read_table,
        "benchmarks/*/*.json": load_results,
        "identity.json": lambda path: Manifest.load(run),
        "scores.json": check_scores,
    }
    for pattern, check in checks.items():
        for path in sorted(folder.glob(pattern)):
            yield from error_of(check, path)


def check_folder(folder: Path) -> None:
    if wrong := list(find_damage(folder, read_checksums(folder), full=True)):
        raise ValueError("; ".join(wrong))


def error_of(check: Callable[[Path], object], path: Path) -> Iterator[str]:
    try:
        check(path)
    except (ValueError, OSError, pa.ArrowException) as error:
        line = " ".join(str(error).split())
        has_remedy = isinstance(error, PermissionError) or re.search("; (delete|restore|read|update) ", line)
        remedy = "" if has_remedy else "; the same command rebuilds it"
        yield f"{'' if str(path.parent) in line else f'{path}: '}{line}{remedy}"


if __name__ == "__main__":
    run_program(main)
