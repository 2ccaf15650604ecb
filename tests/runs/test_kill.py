"""Runs in processes of their own that are killed with SIGKILL, and started again with the same command."""

import json
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT, SMALL
from tests.support.processes import ended, started

pytestmark = pytest.mark.slow


def command(corpora: Path, cache: Path, *overrides: str) -> list[str]:
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    return [*places, *SMALL, "trainer.steps=40", *overrides]


def killed_when(seen, *, command: list[str], folder: Path) -> None:
    """Starts a run and kills it as soon as `seen()`."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log")
    deadline = time.monotonic() + 120
    while not seen() and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert process.is_alive(), (folder / "log").read_text()
    process.kill()
    process.join()


def finished(command: list[str], folder: Path) -> tuple[list, dict]:
    """Runs to the end; the matrix and the weights."""
    process = started(ROOT / "run.py", *command, cwd=folder, log=folder / "log")
    assert ended(process, seconds=120) == 0, (folder / "log").read_text()[-2000:]
    (run,) = (folder / "outputs" / "default").iterdir()
    scores = json.loads((run / "scores.json").read_text())
    return [scores["nll"], scores["metrics"]], load_file(run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(corpora, cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return finished(command(corpora, cache), folder)


@pytest.mark.parametrize(
    "moment",
    [
        "*/base/*.partial/base.ckpt",
        "outputs/default/*/checkpoints/001-law.ckpt",
        "outputs/default/*/stages/001.pt",
        "outputs/default/*/documents/001.npz",
        "outputs/default/*/checkpoints/002-food.ckpt",
        "outputs/default/*/model",
    ],
    ids=["in the base", "in a domain", "after a stage", "committing", "in the last domain", "exporting"],
)
def test_sigkill_changes_no_bit(moment, whole, corpora, cache, tmp_path):
    own = tmp_path / "cache" if "base" in moment else cache
    start = command(corpora, own, "model.base.steps=400") if "base" in moment else command(corpora, own)
    killed_when(lambda: any(tmp_path.glob(moment)), command=start, folder=tmp_path)
    scores, weights = finished(start, tmp_path)
    expected = finished(start, other(tmp_path)) if "base" in moment else whole
    assert scores == expected[0]
    assert all((weights[name] == value).all() for name, value in expected[1].items())


def other(folder: Path) -> Path:
    """Another place, with a cache of its own, for the same command."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "cache").rename(folder / "first cache")
    return elsewhere
