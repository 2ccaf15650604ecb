"""Results in notebooks: `from cpt import load_run, load_runs`; runs of earlier versions.

`fixtures/VERSION/run` is a finished run of that version on `fixtures/VERSION/corpora`, without its report:

    python run.py domains=texts domains.root=tests/fixtures/0.1.0/corpora domains.document=line \\
        order=[law,food] logger=csv hydra.run.dir=tests/fixtures/0.1.0/run ...  # and tests/conftest.py: SMALL
"""

import re
import shutil

import numpy as np
import pytest

from cpt import load_run, load_runs, load_tables
from cpt.evaluation.scores import Scores
from cpt.gate import main as check_release
from cpt.report import main as compare
from tests.conftest import ROOT, SMALL
from tests.support.example_runs import save_scores
from tests.support.forked_scripts import run_script


def run_documented_code(page: str, folder: str) -> dict:
    """The names that the Python block of a page defines when it reads the runs of `folder`."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    (code,) = [block for block in blocks if "from cpt import" in block]
    namespace = {}
    exec(re.sub(r'"outputs/[^"]*"', repr(folder), code), namespace)
    return namespace


def test_a_run_and_a_sweep_are_data_frames_by_the_documented_lines_too(tmp_path):
    for seed in (0, 1):
        for shift, method in enumerate(("ncl", "ewc")):
            save_scores(
                tmp_path / f"{method}-{seed}", method=method, seed=seed, shift=0.1 * shift + 0.01 * seed
            )
    run = load_run(tmp_path / "ewc-1")
    assert list(run.matrix.index) == run.scores.rows and list(run.matrix.columns) == run.scores.domains
    np.testing.assert_array_equal(run.matrix.to_numpy(), run.scores.matrix)

    frame = load_runs(tmp_path)
    values = (
        frame.query("metric == 'LC' and unit == 'nats'").groupby("method")["value"].agg(["mean", "count"])
    )
    assert values["count"].tolist() == [2, 2] and values["mean"]["ewc"] > values["mean"]["ncl"]
    assert set(frame["folder"]) == {str(folder) for folder in tmp_path.iterdir()} and load_runs().empty

    run_documented_code("compare.md", str(tmp_path))
    namespace = run_documented_code("reading-results.md", str(tmp_path / "ewc-1"))
    assert {"metric", "unit", "value", "low", "high"} <= {*namespace["run"].frame.columns}


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="scores.json"):
        load_run(tmp_path / "none")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "scores.json").write_text("{")
    with pytest.raises(ValueError, match="scores.json"):
        load_runs(tmp_path)


def test_folders_without_a_run_and_a_baseline_that_is_no_group_are_named(tmp_path):
    for load in (load_runs, load_tables):
        with pytest.raises(ValueError, match=f"{tmp_path}: no run with scores.json below. Allowed: "):
            load(tmp_path)
    save_scores(tmp_path / "run", method="ewc", seed=0)
    assert load_tables(tmp_path)["main"]["baseline"].isna().all()
    with pytest.raises(ValueError, match="^baseline=ewcc is invalid. Allowed: ewc"):
        load_tables(tmp_path, baseline="ewcc")
    with pytest.raises(ValueError, match="^no folder: no finished run below"):
        load_tables()

    scores = Scores.load(tmp_path / "run" / "scores.json")
    scores.run["finished"] = False
    scores.save(tmp_path / "run" / "scores.json")
    assert not load_runs(tmp_path).empty
    with pytest.raises(ValueError, match="no finished run below"):
        load_tables(tmp_path)


VERSIONS = sorted((ROOT / "tests" / "fixtures").iterdir())


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def old(request, tmp_path):
    return shutil.copytree(request.param / "run", tmp_path / "old")


@pytest.mark.slow
def test_an_old_run_is_read_compared_and_checked(old, tmp_path, capsys):
    run = load_run(old)
    assert run.matrix.shape == (3, 3) and run.scores.rows == ["base", "law", "food"]
    assert run.scores.metrics["LC"]["nats"] == pytest.approx(4.6909, abs=1e-4)
    assert compare([str(old), "--out", str(tmp_path / "page")]) == 0
    assert check_release([str(old), "--max-forgetting", "0.1"]) == 0
    assert "pass: every new text improved" in capsys.readouterr().out


@pytest.mark.slow
def test_a_domain_is_added_to_an_old_run(old, tmp_path):
    corpora = f"domains.root={VERSIONS[-1] / 'corpora'}"
    options = ["domains=texts", corpora, "domains.document=line", "order=[law,food,space]", f"extend={old}"]
    options += [*SMALL, f"hydra.run.dir={tmp_path / 'new'}", "name=old"]
    process = run_script(ROOT / "run.py", *options, cwd=ROOT)
    if "the base model changed: model.safetensors" in process.stderr:
        pytest.skip("a base that is trained on this CPU has other bits than that of the fixture")
    assert process.returncode == 0, process.stderr
    assert f"Adding space after law, food, from a copy of {old}" in process.stdout
    assert load_run(tmp_path / "new").scores.rows == ["base", "law", "food", "space"]
