"""Reads caches and run folders through: `python -m cpt.verify [FOLDER…]`, by default outputs and its cache.

A line for each thing that is damaged, with what can be done; exit code 1 if there is one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf
from tqdm import tqdm

from cpt.core.files import find_damage, read_checksums
from cpt.core.tensors import check_state
from cpt.data.generated import load_kept
from cpt.evaluation.probes.results import load_results
from cpt.training.identity import Identity
from cpt.training.run_folder import RunFolder
from cpt.training.stages import check_stage

SHARED = re.compile(
    r"(corpora|packed|base|tokenizers|endtasks|similarity)/(.*-)?[0-9a-f]{16}"
)  # what a cache holds
AGAIN = "the same command makes it again"


def main(arguments: Sequence[str]) -> int:
    folders = list(map(Path, arguments)) or default()
    if absent := [str(path) for path in folders if not path.is_dir()]:
        print(f"cpt: no folder {', '.join(absent)}; allowed: run folders, caches, and folders that hold them")
        return 1
    runs, shared = find_runs_and_artifacts(folders)
    work = [(damage_in_cache, each) for each in shared] + [(damage_in_run, each) for each in runs]
    lines = [line for look, each in tqdm(work, disable=None, leave=False) for line in look(each)]
    print("\n".join([*lines, f"{len(shared)} folders of caches, {len(runs)} runs: {len(lines)} damaged"]))
    return 1 if lines else 0


def default() -> list[Path]:
    outputs, cache = Path("outputs"), os.environ.get("CPT_CACHE")
    return [outputs] * (outputs.is_dir() or not cache) + [Path(cache)] * bool(cache)


def find_runs_and_artifacts(given: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Run folders, and the folders of caches, at or below the given ones, each once."""
    runs, shared = set(), set()
    for path in given:
        for at, folders, files in os.walk(path.resolve()):
            is_run = "config.yaml" in files or "scores.json" in files
            if is_run or SHARED.fullmatch("/".join(Path(at).parts[-2:])):
                (runs if is_run else shared).add(Path(at))
                folders.clear()
    return sorted(runs), sorted(shared)


def damage_in_cache(folder: Path) -> Iterator[str]:
    """What is wrong with a folder that runs share."""
    try:
        wrong = "; ".join(find_damage(folder, read_checksums(folder), full=True))
    except ValueError as error:
        wrong = str(error)
    if wrong:
        yield f"{folder}: {wrong}; {AGAIN}"


def damage_in_run(folder: Path) -> Iterator[str]:
    """What is wrong with a run folder."""
    place, instead = RunFolder(folder), f"bring it back from a copy, or delete {folder} to learn again"
    for path in sorted(folder.glob("checkpoints/*.ckpt")):
        yield from error_of(check_state, path, instead="delete it to learn that domain again")
    for path in sorted(folder.glob("stages/*.pt")):
        yield from error_of(check_stage, path, instead=instead)
    for path in sorted(
        each for kind in ("endtasks", "answers") for each in folder.glob(f"{kind}/*/*.parquet")
    ):
        yield from error_of(read_through, path)
    for path in sorted(folder.glob("generated/*/facts.json")):
        yield from damage_in_cache(path.parent)
    for path in sorted(folder.glob("generated/kept/*.json")):
        yield from error_of(load_kept, path, instead=instead)
    for path in sorted(folder.glob("probes/*/*.json")):
        yield from (f"{line}; {AGAIN}" for line in error_of(load_results, path))
    yield from error_of(Identity.load, place)
    yield from error_of(measure_file, place)


def measure_file(place: RunFolder) -> None:
    """Raises ValueError for damaged scores, documents and, of a finished run, model and report."""
    scores = place.scores()
    if scores is not None:
        place.check_documents([scores.measured(row) for row in range(len(scores.rows))])
    if scores is None or not scores.run["finished"]:
        return
    if lost := place.lost(full=True):
        raise ValueError(f"{place.path}: {'; '.join(lost)}; {AGAIN}")
    if missing := find_missing(place, stages=len(scores.rows) - 1):
        raise ValueError(f"{missing[-1]} is missing: no run goes on from it; bring it back from a copy")


def find_missing(place: RunFolder, *, stages: int) -> list[Path]:
    """What a finished run of so many stages has not kept: the last one, with `keep_stages` any of them."""
    file = place.path / "config.yaml"
    keeps = file.exists() and OmegaConf.load(file).get("keep_stages", False)
    first = 1 if keeps else max(1, stages)
    return [path for path in map(place.stage, range(first, stages + 1)) if not path.exists()]


def read_through(path: Path) -> None:
    """Raises ValueError for predictions or answers that are damaged."""
    try:
        pq.read_table(path, page_checksum_verification=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; {AGAIN}") from error


def error_of(look: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[str]:
    """What a check says, if it finds something."""
    try:
        look(*arguments, **options)
    except ValueError as error:
        yield str(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
