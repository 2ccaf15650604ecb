"""Runs that measure a part of the matrix and more of it later, or whose rows are in lines beside it."""

import numpy as np
import pytest

from cpt import report, status, verify
from cpt.data.packing import Packed
from cpt.data.sampler import EvalSubset
from cpt.evaluation.journal import journal_file
from cpt.evaluation.scores import load_documents
from cpt.methods.base import ContinualMethod
from cpt.trainer import score
from cpt.trainer.score import ScoreJournal, Scorer
from tests.runs.reading import die, killed, scores_of
from tests.support.campaign import run_few
from tests.support.killing import KilledError
from tests.support.making import made

ORDER = "order=[law,food,space]"
FEW = [ORDER, "eval.rows=last", "eval.columns=seen"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(place, start, small):
    """The scores of a run that measures all."""
    if not (place / "scores.json").exists():
        start(small(ORDER), place)
    return scores_of(place)


def test_a_policy_that_is_widened_fills_what_is_missing(whole, start, small, tmp_path, caplog):
    caplog.set_level("INFO")
    start(small(*FEW, "keep_stages=true"), tmp_path / "few")
    few = scores_of(tmp_path / "few")
    assert few.measured(1) == ["law", "general"] and few.measured(2) == ["food", "general"]
    assert few.measured(0) == few.measured(3) == whole.domains
    there = ~np.isnan(few.matrix)
    assert np.array_equal(few.matrix[there], whole.matrix[there]) and there.sum() == 12
    assert few.metrics["LC"] == whole.metrics["LC"] and few.metrics["FG"] == whole.metrics["FG"]
    assert few.metrics["FWT_zs"]["nats"] is None and few.metrics["FWT_zs"]["terms"] == [0, 3]
    assert "FWT_zs (0 of 3)" in (tmp_path / "few" / "report.md").read_text()
    start(small(ORDER, "eval.columns=seen"), tmp_path / "few")
    seen = scores_of(tmp_path / "few")
    assert seen.measured(2) == ["law", "food", "general"] and seen.measured(1) == few.measured(1)
    start(small(ORDER), tmp_path / "few")
    widened = scores_of(tmp_path / "few")
    assert widened.nll == whole.nll and widened.metrics == whole.metrics
    start(small(*FEW), tmp_path / "unkept")  # whose stages' weights are gone
    before = scores_of(tmp_path / "unkept").nll
    start(small(ORDER), tmp_path / "unkept")
    assert "4 cells of the matrix are missing" in caplog.text
    caplog.clear()
    start(small(ORDER), tmp_path / "unkept")
    assert "is finished already" in caplog.text and scores_of(tmp_path / "unkept").nll == before


def test_so_many_tokens_of_each_text_are_the_same_rows_for_every_stage(whole, start, small, tmp_path):
    rows = {n: made(small(ORDER, f"eval.tokens={n}")).data.scored_rows("law") for n in (64, 128, 10**6)}
    assert set(rows[64]) < set(rows[128]) < set(rows[10**6]) and list(rows[128]) == sorted(rows[128])
    assert list(rows[10**6]) == list(range(len(rows[10**6])))
    start(small(ORDER, "eval.tokens=64"), tmp_path)
    few = scores_of(tmp_path)
    assert all(part < full for part, full in zip(few.scored, whole.scored, strict=True))
    assert few.bytes == whole.bytes and few.tokens == whole.tokens and few.nll != whole.nll
    with pytest.raises(ValueError, match=r"eval\.tokens: 64 -> 128"):
        start(small(ORDER, "eval.tokens=128"), tmp_path)


# Of runs in parts, the cells that are computed after the base's four, of twelve.
IN_PARTS = {
    "method=adapter method.per_domain=true": 3,
    "method=adapter method.per_domain=true routing@method.routing=last": 9,
    "method=demix": 9,
    "method=demix routing@method.routing=posterior": 12,
    "method=hat": 12,
}


@pytest.mark.parametrize("kind", run_few(IN_PARTS, [*IN_PARTS][:2]))
def test_what_a_resting_part_scores_is_not_computed_again(kind, start, small, tmp_path, monkeypatch):
    measured, measure = [], Scorer.measure
    monkeypatch.setattr(
        Scorer, "measure", lambda self, row, texts: measured.extend(texts) or measure(self, row, texts)
    )
    given = [ORDER, "trainer.steps=2", *kind.split()]
    start(small(*given), tmp_path / "few")
    assert len(measured) == 4 + IN_PARTS[kind]
    monkeypatch.setattr(ContinualMethod, "constant_part", lambda self, domain: None)
    start(small(*given), tmp_path / "whole")
    few, every = scores_of(tmp_path / "few"), scores_of(tmp_path / "whole")
    assert few.nll == every.nll and few.metrics == every.metrics and few.parts == every.parts


def test_rows_of_much_the_same_length_are_scored_together(start, small, tmp_path, monkeypatch):
    """But where a prior moves on with the rows: it meets them in their order."""
    places, batch = [], EvalSubset.__getitem__

    def counted(self, number):
        found = batch(self, number)
        places.extend([found["input_ids"].numel()] * (self.purpose == "score"))
        return found

    monkeypatch.setattr(EvalSubset, "__getitem__", counted)
    given = ["order=[law]", "domains.packing=per_document", "model.length=256", "trainer.steps=1"]
    given.append("trainer.eval_batch_size=4")
    start(small(*given), tmp_path / "sorted")
    fewer, asked = sum(places), []
    monkeypatch.setattr(Packed, "by_length", lambda self, rows: asked.append(rows) or rows)
    start(small(*given), tmp_path / "plain")
    assert fewer < 0.95 * (sum(places) - fewer) and asked
    ordered, plain = scores_of(tmp_path / "sorted"), scores_of(tmp_path / "plain")
    assert ordered.matrix == pytest.approx(plain.matrix, rel=1e-6)
    both = (load_documents(tmp_path / name, range(2)) for name in ("sorted", "plain"))
    for one, other in zip(*both, strict=True):
        assert all(np.allclose(one[text], other[text], rtol=1e-5) for text in one)
    asked.clear()
    prior = ["method=demix", "routing@method.routing=posterior", "method.routing.prior=updating"]
    start(small(*given, *prior), tmp_path / "prior")
    assert not asked


def test_a_run_whose_rows_are_in_lines_is_read_and_goes_on(
    whole, start, small, killing, monkeypatch, tmp_path
):
    """As one of very many domains is between two times that its scores are written as a whole: killed while
    it learns, and while another start fills what is missing of its rows."""
    lines = journal_file(tmp_path / "scores.json")
    few, written = small(*FEW, "keep_stages=true"), tmp_path / "scores.json"
    monkeypatch.setattr(score, "SHARE", 1)
    killed(start, killing, few, tmp_path, step=3, domain="food")
    assert '"rows": ["base"]' in written.read_text() and lines.exists()
    there = scores_of(tmp_path)
    assert there.rows == ["base", "law"] and there.measured(1) == ["law", "general"]
    (look,) = status.read_statuses([tmp_path])
    assert look.learned == pytest.approx(1 / 3, abs=0.3) and verify.main([str(tmp_path)]) == 0
    assert report.main([str(tmp_path)]) == 2  # nothing is finished
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.reporting.run_page.write_report", die)
        start(few, tmp_path)
    assert '"rows": ["base", "law", "food", "space"]' in written.read_text() and not lines.exists()
    start(few, tmp_path)
    keep, kept = ScoreJournal.keep_row, []

    def dying(self, row):
        keep(self, row)
        kept.append(row)
        if len(kept) == 2:
            raise KilledError

    monkeypatch.setattr(ScoreJournal, "keep_row", dying)
    with pytest.raises(KilledError):
        start(small(ORDER), tmp_path)
    start(small(ORDER), tmp_path)
    assert kept == [1, 2]  # nothing was left to be measured
    assert scores_of(tmp_path).nll == whole.nll and scores_of(tmp_path).metrics == whole.metrics
