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


def command(corpora: Path, cache: Path, *given: str) -> list[str]:
    return ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]", *given]


def scores_of(folder: Path) -> Scores:
    return Scores.load(folder / "scores.json")


def told_by(folder: Path) -> dict[str, Any]:
    """The scores as a reader without cpt sees them, valid by the published schema."""
    told = json.loads((folder / "scores.json").read_text())
    SCHEMA.validate(told)
    return told


def state_of(folder: Path, stage: int = -1) -> dict[str, Tensor]:
    path = sorted((folder / "stages").glob("*.pt"))[stage]
    return load_stage(path)


def same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return [*one] == [*other] and all(torch.equal(each, other[name]) for name, each in one.items())


def assert_same_bits(one: Path, other: Path) -> None:
    assert same_state(state_of(one), state_of(other))
    assert told_by(one)["nll"] == told_by(other)["nll"]


def answers_of(folder: Path) -> dict[str, list]:
    found = sorted((folder / "answers").rglob("*.parquet"))
    return {str(path.relative_to(folder)): pq.read_table(path).to_pylist() for path in found}


def times(folder: Path) -> dict[str, int]:
    """When each file was written, but for those that say that a process is at work."""
    own = (".lock", "progress.json")
    found = [each for each in folder.rglob("*") if each.is_file() and each.name not in own]
    return {str(each): each.stat().st_mtime_ns for each in found}


def killed(start: Any, killing: Any, cfg: Any, folder: Path, *, step: int, domain: str | None = None) -> None:
    killing(Killer(step=step, domain=domain))
    with pytest.raises(KilledError):
        start(cfg, folder)
    killing(None)


def die(*args: Any, **how: Any) -> None:
    raise KilledError
