"""Runs that measure a part of the matrix and more of it later."""

import numpy as np
import pytest

from cpt.trainer.loop import ContinualTrainer
from tests.runs.reading import scores_of
from tests.support.killing import KilledError
from tests.support.making import made

ORDER = "order=[law,food,space]"
FEW = [ORDER, "eval.rows=last", "eval.columns=seen"]


@pytest.fixture
def whole(start, small, tmp_path):
    start(small(ORDER), tmp_path / "whole")
    return scores_of(tmp_path / "whole")


def test_a_policy_that_is_widened_fills_what_is_missing_also_after_a_kill(
    whole, start, small, tmp_path, monkeypatch
):
    start(small(*FEW, "save_all_stages=true"), tmp_path / "few")
    few = scores_of(tmp_path / "few")
    assert few.measured(1) == ["law", "general"] and few.measured(2) == ["food", "general"]
    assert few.measured(0) == few.measured(3) == whole.domains
    there = ~np.isnan(few.matrix)
    assert np.array_equal(few.matrix[there], whole.matrix[there]) and there.sum() == 12
    assert few.metrics["LC"] == whole.metrics["LC"] and few.metrics["FWT_zs"]["nats"] is None
    save, saved = ContinualTrainer.save_scores, []

    def dying(self):
        save(self)
        saved.append(len(saved))
        if len(saved) == 1:
            raise KilledError

    monkeypatch.setattr(ContinualTrainer, "save_scores", dying)
    with pytest.raises(KilledError):
        start(small(ORDER), tmp_path / "few")
    start(small(ORDER), tmp_path / "few")
    assert len(saved) == 2  # the first start filled one row, the second the other
    widened = scores_of(tmp_path / "few")
    assert widened.nll == whole.nll and widened.metrics == whole.metrics
    start(small(*FEW), tmp_path / "unkept")  # whose stages' weights are gone
    before = scores_of(tmp_path / "unkept").nll
    start(small(ORDER), tmp_path / "unkept")
    assert scores_of(tmp_path / "unkept").nll == before


def test_so_many_tokens_of_each_text_are_the_same_rows_for_every_stage(whole, start, small, tmp_path):
    rows = {n: made(small(ORDER, f"eval.max_tokens={n}")).data.scored_rows("law") for n in (64, 128, 10**6)}
    assert set(rows[64]) < set(rows[128]) < set(rows[10**6]) and list(rows[128]) == sorted(rows[128])
    start(small(ORDER, "eval.max_tokens=64"), tmp_path / "few")
    few = scores_of(tmp_path / "few")
    assert all(part < full for part, full in zip(few.scored, whole.scored, strict=True))
    assert few.bytes == whole.bytes and few.tokens == whole.tokens and few.nll != whole.nll
