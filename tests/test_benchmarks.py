"""The benchmarks can at least begin: what they import of cpt is there; that of a GPU runs on a CPU."""

import json
import runpy
import sys

import pytest

from tests.conftest import ROOT
from tests.support.forked_scripts import run_script

FOLDER = ROOT / "benchmarks"
pytestmark = [pytest.mark.slow, pytest.mark.campaign]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_benchmark_can_be_imported(path, monkeypatch):
    """With its own folder on the path, as Python starts a script; those that are no scripts are imported."""
    folder = FOLDER if path.parent.name == "common" else path.parent
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert runpy.run_path(str(path), run_name=path.stem)


@pytest.mark.parametrize(
    "part",
    [
        "packing, GPT-2 124M",
        "GPT-2 124M, 1024",
        "Qwen3 0.6B, 2048",
        "Llama 3.1 8B, LoRA, 2048",
        "RoBERTa-base, 128",
        "methods, RoBERTa-base, 128",
    ],
)
def test_the_one_of_a_gpu_runs_on_a_processor(part, tmp_path):
    sizes = ["--dry", "--steps=1", "--repeats=2", "--together=3", "--methods=ewc", "--threads=1"]
    paths = ["--parts", part, "--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out.json")]
    process = run_script(FOLDER / "gpu.py", *sizes, *paths, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    result = json.loads((tmp_path / "out.json").read_text())["parts"][part]
    assert not result.get("failed"), result
    assert result["chunks" if "chunks" in result else "subjects"]
