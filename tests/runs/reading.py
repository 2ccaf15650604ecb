"""What tests of whole runs read in a run's folder, and how a run within this process is killed."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from jsonschema import Draft202012Validator
from torch import Tensor

from cpt.evaluation.scores import Scores
from cpt.trainer.checkpoint import load_stage
from tests.conftest import ROOT
from tests.support.kill_callback import KilledError, Killer

SCHEMA = Draft202012Validator(json.loads((ROOT / "cpt/evaluation/scores.schema.json").read_text()))


def command(corpora: Path, cache: Path, *options: str) -> list[str]:
    return ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]", *options]


def scores_of(folder: Path) -> Scores:
    return Scores.load(folder / "scores.json")


def read_scores(folder: Path) -> dict[str, Any]:
    """The scores as a reader without cpt sees them, valid by the published schema."""
    scores = json.loads((folder / "scores.json").read_text())
    SCHEMA.validate(scores)
    return scores


def state_of(folder: Path, stage: int = -1) -> dict[str, Tensor]:
    path = sorted((folder / "stages").glob("*.pt"))[stage]
    return load_stage(path)


def same_state(state: dict[str, Tensor], other_state: dict[str, Tensor]) -> bool:
    return [*state] == [*other_state] and all(
        torch.equal(tensor, other_state[name]) for name, tensor in state.items()
    )


def assert_same_bits(run: Path, other_run: Path) -> None:
    assert same_state(state_of(run), state_of(other_run))
    assert read_scores(run)["nll"] == read_scores(other_run)["nll"]


def answers_of(folder: Path) -> dict[str, list]:
    paths = sorted((folder / "answers").rglob("*.parquet"))
    return {str(path.relative_to(folder)): pq.read_table(path).to_pylist() for path in paths}


def times(folder: Path) -> dict[str, int]:
    """When each file was written, but for those that say that a process is at work."""
    volatile_names = (".lock", "progress.json")
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in volatile_names]
    return {str(path): path.stat().st_mtime_ns for path in paths}


def start_and_kill(
    start: Any, killing: Any, cfg: Any, folder: Path, *, step: int, domain: str | None = None
) -> None:
    killing(Killer(step=step, domain=domain))
    with pytest.raises(KilledError):
        start(cfg, folder)
    killing(None)


def die(*args: Any, **options: Any) -> None:
    raise KilledError
