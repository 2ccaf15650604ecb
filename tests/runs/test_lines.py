"""Runs of which rows are in lines beside `scores.json`, as those of very many domains are."""

import pytest

from cpt import report, status, verify
from cpt.evaluation.journal import journal_file
from cpt.evaluation.scores import Scores
from cpt.trainer import score
from cpt.trainer.score import ScoreJournal
from tests.support.killing import KilledError, Killer

ORDER = "order=[law,food,space]"
FEW = ["eval.rows=last", "eval.columns=seen"]


def scores_of(folder) -> Scores:
    return Scores.load(folder / "scores.json")


def die(*given):
    raise KilledError


def test_a_run_whose_rows_are_in_lines_is_read_and_goes_on(start, small, killing, monkeypatch, tmp_path):
    """As one of very many domains is between two times that its scores are written as a whole: killed while
    it learns, and while another start fills what is missing of its rows."""
    start(small(ORDER), tmp_path / "whole")
    few = tmp_path / "few"
    monkeypatch.setattr(score, "SHARE", 1)
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small(ORDER, *FEW, "keep_stages=true"), few)
    killing(None)
    assert (
        '"rows": ["base"]' in (few / "scores.json").read_text() and journal_file(few / "scores.json").exists()
    )
    there = scores_of(few)
    assert there.rows == ["base", "law"] and there.measured(1) == ["law", "general"]
    (look,) = status.read_statuses([few])
    assert look.learned == pytest.approx(1 / 3, abs=0.3) and verify.main([str(few)]) == 0
    assert report.main([str(few)]) == 2  # nothing is finished
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.reporting.run_page.write_report", die)
        start(small(ORDER, *FEW, "keep_stages=true"), few)
    assert '"rows": ["base", "law", "food", "space"]' in (few / "scores.json").read_text()
    assert not journal_file(few / "scores.json").exists()  # a run that is to be finished has none
    start(small(ORDER, *FEW, "keep_stages=true"), few)
    keep, kept = ScoreJournal.keep_row, []

    def dying(self, row):
        keep(self, row)
        kept.append(row)
        if len(kept) == 2:
            raise KilledError

    monkeypatch.setattr(ScoreJournal, "keep_row", dying)
    with pytest.raises(KilledError):
        start(small(ORDER), few)
    start(small(ORDER), few)
    assert kept == [1, 2]  # nothing was left to be measured
    assert scores_of(few).nll == scores_of(tmp_path / "whole").nll
    assert scores_of(few).metrics == scores_of(tmp_path / "whole").metrics
