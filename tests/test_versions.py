"""Run folders of earlier versions stay readable, and domains can be added to them.

`fixtures/VERSION/run` is a finished run of that version on `fixtures/VERSION/corpora`, without its report:

    python run.py domains=texts domains.root=tests/fixtures/0.1.0/corpora domains.document=line \\
        order=[law,food] logger=csv hydra.run.dir=tests/fixtures/0.1.0/run ...  # and tests/conftest.py: SMALL
"""

import shutil

import pytest

from cpt import load_run
from cpt.gate import main as check_release
from cpt.report import main as compare
from tests.conftest import ROOT, SMALL
from tests.support.processes import ran

pytestmark = pytest.mark.slow
VERSIONS = sorted((ROOT / "tests" / "fixtures").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def old(request, tmp_path):
    """A copy of the run of a version."""
    return shutil.copytree(request.param / "run", tmp_path / "old")


def test_an_old_run_is_read_compared_and_checked(old, tmp_path, capsys):
    run = load_run(old)
    assert run.matrix.shape == (3, 3) and run.scores.rows == ["base", "law", "food"]
    assert run.scores.metrics["LC"]["nats"] == pytest.approx(4.6909, abs=1e-4)
    assert compare([str(old), "--out", str(tmp_path / "page")]) == 0
    assert check_release([str(old), "--max-forgetting", "0.1"]) == 0
    assert "pass: every new text improved" in capsys.readouterr().out


def test_a_domain_is_added_to_an_old_run(old, tmp_path):
    corpora = f"domains.root={VERSIONS[-1] / 'corpora'}"
    options = ["domains=texts", corpora, "domains.document=line", "order=[law,food,space]", "grow=require"]
    options += [*SMALL, f"hydra.run.dir={tmp_path / 'new'}", "name=old"]
    ended = ran(ROOT / "run.py", *options, cwd=ROOT)
    assert ended.returncode == 0 and f"Continuing from a copy of {old}" in ended.stdout, ended.stderr
    assert load_run(tmp_path / "new").scores.rows == ["base", "law", "food", "space"]
