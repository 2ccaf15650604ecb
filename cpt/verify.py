"""Read caches and run folders through: one line for each corrupted or missing file, with what to do about it.

Exit code 1 if there is one. No file is changed."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.files import find_damage, read_checked_json, read_checksums
from cpt.core.output import run_program
from cpt.core.tensors import check_state
from cpt.evaluation.predictions import load_results
from cpt.trainer.checkpoint import check_stage
from cpt.trainer.manifest import Manifest
from cpt.trainer.run_dir import RunDir

CACHED = re.compile(r"(corpora|packed|base|tokenizers|endtasks|similarity)/(.*-)?[0-9a-f]{16}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.verify", description=__doc__)
    allowed = "run folders, caches, or folders that hold them"
    what = f"{allowed} (default: outputs and $CPT_CACHE)"
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help=what)
    default = [
        Path(each) for each in ("outputs", os.environ.get("CPT_CACHE")) if each and os.path.isdir(each)
    ]
    given, found = parser.parse_args(arguments).folders or default, dict[Path, list[str]]()
    if absent := [str(path) for path in given if not path.is_dir()]:
        print(f"cpt: no folder {', '.join(absent)}; allowed: {allowed}")
        return 1
    for at, folders, files in (each for path in given for each in os.walk(path.resolve())):
        path, runs = Path(at), ("config.yaml" in files or "scores.json" in files)
        if runs or CACHED.fullmatch("/".join(path.parts[-2:])):
            found[path] = list(damage_in_run(path) if runs else error_of(check_folder, path))
            folders.clear()
    lines = [line for path in sorted(found) for line in found[path]]
    print(*lines, f"{len(found)} folders: {len(lines)} damaged", sep="\n")
    return 1 if lines else 0


def damage_in_run(folder: Path) -> Iterator[str]:
    """A line for each damaged file of a run folder; of a finished run for each missing one, too."""
    run = RunDir(folder)
    checks: dict[str, Callable[[Path], object]] = {
        "checkpoints/*.ckpt": partial(check_state, instead="delete it to learn that domain again"),
        "stages/*.pt": partial(check_stage, instead=run.restore_hint),
        "generated/kept/*.json": partial(read_checked_json, instead=run.restore_hint),
        "generated/*/facts.json": lambda path: check_folder(path.parent),
        "endtasks/*/*.parquet": partial(pq.read_table, page_checksum_verification=True),
        "answers/*/*.parquet": partial(pq.read_table, page_checksum_verification=True),
        "probes/*/*.json": load_results,
        "identity.json": lambda path: Manifest.load(run),
        "scores.json": lambda path: check_scores(run),
    }
    for pattern, check in checks.items():
        for path in sorted(folder.glob(pattern)):
            yield from error_of(check, path)


def error_of(check: Callable[[Path], object], path: Path) -> Iterator[str]:
    try:
        check(path)
    except (ValueError, OSError, pa.ArrowException) as error:
        line = " ".join(str(error).split())
        remedy = "" if re.search("; (bring|delete|restore) ", line) else "; the same command makes it again"
        yield f"{'' if str(path.parent) in line else f'{path}: '}{line}{remedy}"


def check_folder(folder: Path) -> None:
    """Raises ValueError for files that differ from the checksums in the folder."""
    if wrong := list(find_damage(folder, read_checksums(folder), full=True)):
        raise ValueError("; ".join(wrong))


def check_scores(run: RunDir) -> None:
    """Raises ValueError for damaged scores, documents and, of a finished run, model, report and stages."""
    scores = run.scores()
    run.check_documents(len(scores.rows))
    if scores.run["finished"]:
        if lost := run.lost(full=True):
            raise ValueError(f"{run.path}: {'; '.join(lost)}")
        keeps = run.config.exists() and run.stored("keep_stages")
        first = 1 if keeps else max(1, len(scores.rows) - 1)
        if gone := [path for path in map(run.stage, range(first, len(scores.rows))) if not path.exists()]:
            raise ValueError(f"{gone[0]} is missing: no run goes on from it; bring it back from a copy")


if __name__ == "__main__":
    run_program(main)
