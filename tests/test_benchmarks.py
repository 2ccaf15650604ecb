"""The benchmarks can at least begin: what they import of cpt is there."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"


@pytest.mark.slow
def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert "methods" in names
    code = f"import sys; sys.path[:0] = [{str(FOLDER)!r}, {str(ROOT)!r}]; import {', '.join(names)}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
