"""Runs that measure a part of the matrix, and more of it later."""

import logging

import numpy as np
import pytest

from cpt import verify
from cpt.data.packing import Packed
from cpt.data.sampler import EvalSubset
from cpt.evaluation.scores import Scores, load_documents
from cpt.methods.base import ContinualMethod
from cpt.trainer.score import Scorer
from tests.support.making import made

ORDER = "order=[law,food,space]"
FEW = ["eval.rows=last", "eval.columns=seen"]


def scores_of(folder) -> Scores:
    return Scores.load(folder / "scores.json")


def test_a_policy_that_is_widened_fills_what_is_missing(start, small, tmp_path):
    start(small(ORDER), tmp_path / "whole")
    start(small(ORDER, *FEW, "keep_stages=true"), tmp_path / "few")
    whole, few = scores_of(tmp_path / "whole"), scores_of(tmp_path / "few")
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
    assert not any("terms" in metric for metric in widened.metrics.values())
    assert verify.main([str(tmp_path / "few")]) == 0


def test_what_cannot_be_filled_is_told_and_asked_for_once(start, small, tmp_path, caplog):
    start(small(ORDER, *FEW), tmp_path)
    before = scores_of(tmp_path).nll
    with caplog.at_level(logging.INFO):
        start(small(ORDER), tmp_path)
        assert "4 cells of the matrix are missing, in the rows law, food" in caplog.text
        caplog.clear()
        start(small(ORDER), tmp_path)
    assert "is finished already" in caplog.text
    assert scores_of(tmp_path).nll == before


def test_so_many_tokens_of_each_text_are_the_same_rows_for_every_stage(start, small, tmp_path):
    start(small(ORDER), tmp_path / "whole")
    start(small(ORDER, "eval.tokens=64"), tmp_path / "few")
    whole, few = scores_of(tmp_path / "whole"), scores_of(tmp_path / "few")
    assert all(part < full for part, full in zip(few.scored, whole.scored, strict=True))
    assert few.bytes == whole.bytes and few.tokens == whole.tokens
    assert few.nll != whole.nll
    with pytest.raises(ValueError, match=r"eval\.tokens: 64 -> 128"):
        start(small(ORDER, "eval.tokens=128"), tmp_path / "few")


def test_more_tokens_contain_fewer(small):
    rows = {
        tokens: made(small(ORDER, f"eval.tokens={tokens}")).data.scored_rows("law")
        for tokens in (64, 128, 10**6)
    }
    assert set(rows[64]) < set(rows[128]) < set(rows[10**6])
    assert list(rows[10**6]) == list(range(len(rows[10**6])))
    assert list(rows[128]) == sorted(rows[128])


IN_PARTS = {
    "adapter": ["method=adapter", "method.per_domain=true"],
    "demix": ["method=demix"],
    "lora": ["method=lora", "method.per_domain=true"],
    "last": ["method=adapter", "method.per_domain=true", "routing@method.routing=last"],
    "posterior": ["method=demix", "routing@method.routing=posterior"],
    "hat": ["method=hat"],
    "cpt_plugin": ["method=cpt_plugin"],
}
# Cells after the base's four; of others each domain once, when it was learned.
COMPUTED = {"demix": 9, "last": 9, "posterior": 12, "hat": 12, "cpt_plugin": 12}


@pytest.mark.parametrize("kind", IN_PARTS)
def test_what_a_resting_part_scores_is_not_computed_again(kind, start, small, tmp_path, monkeypatch):
    measured, measure = [], Scorer.measure
    monkeypatch.setattr(
        Scorer, "measure", lambda self, row, texts: measured.extend(texts) or measure(self, row, texts)
    )
    given = [ORDER, "trainer.steps=2", *IN_PARTS[kind]]
    start(small(*given), tmp_path / "few")
    computed = len(measured) - 4
    monkeypatch.setattr(ContinualMethod, "constant_part", lambda self, domain: None)
    start(small(*given), tmp_path / "whole")
    assert len(measured) - computed - 4 == 16
    assert computed == COMPUTED.get(kind, 3)
    few, whole = scores_of(tmp_path / "few"), scores_of(tmp_path / "whole")
    assert few.nll == whole.nll and few.metrics == whole.metrics and few.parts == whole.parts


def test_rows_of_much_the_same_length_are_scored_together(start, small, tmp_path, monkeypatch):
    places, batch = [], EvalSubset.__getitem__

    def counted(self, number):
        found = batch(self, number)
        if self.purpose == "score":
            places.append(found["input_ids"].numel())
        return found

    monkeypatch.setattr(EvalSubset, "__getitem__", counted)
    given = [ORDER, "domains.packing=per_document", "model.length=256", "trainer.steps=2"]
    given.append("trainer.eval_batch_size=4")
    start(small(*given), tmp_path / "sorted")
    fewer = sum(places)
    monkeypatch.setattr(Packed, "by_length", lambda self, rows: rows)
    start(small(*given), tmp_path / "plain")
    assert fewer < 0.95 * (sum(places) - fewer)
    ordered, plain = scores_of(tmp_path / "sorted"), scores_of(tmp_path / "plain")
    assert ordered.matrix == pytest.approx(plain.matrix, rel=1e-6)
    for one, other in zip(
        *(load_documents(tmp_path / name, range(4)) for name in ("sorted", "plain")), strict=True
    ):
        assert all(np.allclose(one[text], other[text], rtol=1e-5) for text in one)


def test_a_prior_that_moves_meets_the_rows_in_their_order(small, start, tmp_path, monkeypatch):
    given = ["method=demix", "routing@method.routing=posterior", "method.routing.prior=updating"]
    asked = []
    monkeypatch.setattr(Packed, "by_length", lambda self, rows: asked.append(len(rows)) or rows)
    start(small(ORDER, "domains.packing=per_document", "trainer.steps=1", *given), tmp_path)
    assert not asked
