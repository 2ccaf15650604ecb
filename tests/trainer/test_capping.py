"""How many tokens of each text are scored where nothing is said, also in folders of earlier versions."""

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from cpt.evaluation.scores import Scores
from cpt.reporting.load_runs import MeasuredRun, build_sections, measure_runs
from cpt.trainer.manifest import resolve_eval_cap
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir

ONE, TWO = "order=[law]", "order=[law,food]"
ALL, PART = "eval.tokens=null", "eval.tokens=64"


def scores_of(folder: Path) -> Scores:
    return Scores.load(folder / "scores.json")


def compared(*folders: Path):
    runs = [MeasuredRun(folder=folder, scores=scores_of(folder)) for folder in folders]
    return build_sections(measure_runs(runs))


@pytest.fixture
def low(monkeypatch):
    """A default that the small texts are above."""
    monkeypatch.setattr("cpt.evaluation.options.CAP", 64)


@pytest.fixture
def early(start, small, tmp_path):
    """A finished folder as an earlier version left it: no bound, or not even the option."""
    start(small(ONE, ALL), tmp_path / "early")
    config = OmegaConf.load(tmp_path / "early" / "config.yaml")
    assert config.eval.pop("tokens") is None
    OmegaConf.save(config, tmp_path / "early" / "config.yaml")
    return tmp_path / "early"


def test_the_default_is_the_bound_that_it_says_and_is_told(low, start, small, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        start(small(ONE), tmp_path / "usual")
    start(small(ONE, PART), tmp_path / "part")
    usual, part = scores_of(tmp_path / "usual"), scores_of(tmp_path / "part")
    assert usual.nll == part.nll and usual.scored == part.scored and usual.conditions == part.conditions
    assert usual.conditions["cap"] == 64 and usual.config_digest == part.config_digest
    (line,) = [each.getMessage() for each in caplog.records if "a part is scored" in each.getMessage()]
    assert line.startswith("eval.tokens=64: of 2 of 2 texts a part is scored, the same rows")
    assert "eval.tokens=null scores all" in line
    assert "at most 64 tokens of each text scored" in (tmp_path / "usual" / "model" / "README.md").read_text()
    start(small(ONE, PART), tmp_path / "usual")  # the same run, said in another way
    start(small(ONE), tmp_path / "part")
    assert scores_of(tmp_path / "part").nll == part.nll and len(compared(*tmp_path.glob("*"))) == 1


def test_a_folder_that_says_its_bound_keeps_it(low, start, small, tmp_path):
    start(small(ONE, "eval.tokens=100"), tmp_path)
    plan = resolve_eval_cap(make_plan(small(ONE)), RunDir(tmp_path))
    assert plan.cap == 100 == plan.settings["eval"]["tokens"]
    assert plan.config_digest == scores_of(tmp_path).config_digest
    assert resolve_eval_cap(make_plan(small(ONE, ALL)), RunDir(tmp_path)).cap is None


def test_runs_that_score_other_rows_are_not_compared(low, early, start, small):
    start(small(ONE), early.parent / "part")
    start(small(ONE, "eval.tokens=1e6"), early.parent / "same")
    apart = compared(early, early.parent / "part", early.parent / "same")
    assert [len(section.runs) for section in apart] == [2, 1]
    assert len(apart[0].groups) == 1  # the same rows, however that was said
    assert [section.conditions["cap"] for section in apart] == ["none", "64"]
    assert "cap" not in scores_of(early.parent / "same").conditions  # it bounds none of the texts
    earlier = scores_of(early.parent / "part")
    del earlier.conditions["cap"]  # as one with eval.tokens=64 was written before
    runs = [MeasuredRun(folder=early, scores=each) for each in (earlier, scores_of(early.parent / "part"))]
    assert len(build_sections(measure_runs(runs))) == 1
