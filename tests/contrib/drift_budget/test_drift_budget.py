"""A drift budget: what it makes of what was evaluated, and runs that are held to it."""

import json

import numpy as np
import pytest

from cpt.contrib.drift_budget.controller import BudgetRecord, find_drift
from cpt.contrib.drift_budget.options import DriftBudget
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import DROPOUT, equal_tensors, load_model_weights


def record_looks(*looks):
    """After looks at the general text: at each its rise and the upper end."""
    record = BudgetRecord({"general": 0.1})
    for step, look in enumerate(looks):
        record.add(step, {"general": look})
    return record


def losses(**means):
    """Of three documents with ten tokens each, nats and tokens."""
    return {text: np.array([10.0 * np.array(nll), [10.0] * 3]) for text, nll in means.items()}


def test_over_the_budget_it_goes_back_and_a_stage_without_any_ends():
    over_budget = [(0.05, 0.11), (0.05, float("nan"))] * 4  # the interval counts, not the mean
    record = record_looks((0, 0), *over_budget)
    assert record.kept == 0 and not record.ended and len(record.acts) == 8
    resumed_record = BudgetRecord({"general": 0.1})
    resumed_record.add(0, {"general": (0, 0)})
    assert resumed_record.add(5, {"general": (0.05, 0.098)}, alpha=0.25)
    assert resumed_record.ways == [1, 0.25]
    assert resumed_record.kept == 5
    record = record_looks((0.11, 0.12))  # spent before the first step
    assert record.kept is None and record.ended and len(record.acts) == 1


def test_the_run_page_has_the_drift_of_the_kept_step_and_how_often_the_weights_went_back():
    record = record_looks((0, 0), (0.05, 0.08), (0.05, 0.11))
    assert record.summarize([0, 1, 2]) == "general +0.080 of 0.100; kept step 1; gone back 1 time"
    record = record_looks((0.11, 0.12))
    assert record.summarize([0]) == "general +0.120 of 0.100; kept step None; gone back 0 times"


def test_the_scarcer_of_two_decides_and_each_stage_adds_its_share():
    record = BudgetRecord({"general": 0.1, "past": 0.2})
    assert record.add(0, {"general": (0, 0.08), "past": (0, 0.12)}) and record.spent == pytest.approx(0.8)
    assert not record.add(1, {"general": (0, 0.02), "past": (0, 0.21)})
    options = DriftBudget(general=0.06, past=0.3)
    assert options.allow(1, stages=3) == pytest.approx({"general": 0.02, "past": 0.1})
    assert options.allow(3, stages=3) == pytest.approx(options.bounds)


def test_drift_is_of_the_general_text_and_the_mean_of_past_ones_to_the_upper_end_over_documents():
    first_losses = losses(general=[4, 4, 4], one=[1, 1, 1], two=[2, 2, 2], mine=[9, 9, 9])
    current_losses = losses(general=[4.1, 4.1, 4.1], one=[1.5, 1.5, 1.5], two=[1.9, 1.9, 1.9], mine=[5, 5, 5])
    drift = find_drift(["general", "past"], first_losses, current_losses, stage_texts=["mine"])
    assert drift["general"] == pytest.approx((0.1, 0.1)) and drift["past"] == pytest.approx((0.2, 0.2))
    assert find_drift(["past"], first_losses, {"mine": current_losses["mine"]}, stage_texts=["mine"]) == {}
    current_losses = losses(general=[4, 4, 4.3])
    drift = find_drift(["general"], first_losses, current_losses, stage_texts=[])
    assert drift["general"] == pytest.approx((0.1, 0.3))


TWO = ["order=[law,food]", "trainer.steps=12", "monitor.every=2", "monitor.max_tokens=400"]
STEEP = ["optim.lr=0.03", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def rises(scores):
    """Of the last row: of the general text since the base, of past domains in the mean since their own."""
    nll = np.array(scores["nll"])
    columns = scores["domains"]
    rows = scores["rows"]
    past = [nll[-1, columns.index(name)] - nll[rows.index(name), columns.index(name)] for name in rows[1:-1]]
    general = columns.index("general")
    return nll[-1, general] - nll[0, general], np.mean(past)


def test_it_is_held_where_it_would_not_have_been(small, start, tmp_path):
    common_options = [*TWO, *STEEP, "domains.score_on=valid", "logger=csv", "trainer.log_every_n_steps=1"]
    start(small(*common_options, "monitor.every=null"), tmp_path / "free")
    free = scores_of(tmp_path / "free")
    column = free["domains"].index("general")
    assert free["nll"][1][column] - free["nll"][0][column] > 0.4 and rises(free)[1] > 0.3
    budget_options = ["monitor.every=3", "monitor.max_tokens=1000000", "budget=drift"]
    budget_options += ["budget.general=0.8", "budget.past=0.3"]
    start(small(*common_options, *budget_options), tmp_path)
    scores = scores_of(tmp_path)
    general, past = rises(scores)
    assert general <= 0.8 and past <= 0.3 and "Budget of drift" in (tmp_path / "report.md").read_text()
    for number, (stage, monitored) in enumerate(scores["monitor"].items(), start=1):
        budget = monitored["budget"]
        kept_look = monitored["steps"].index(monitored["budget"]["kept"])
        assert budget["allowed"]["general"] == pytest.approx(0.4 * number)
        assert budget["drift"]["general"][kept_look][1] <= 0.4 * number
        drift = scores["nll"][scores["rows"].index(stage)][column] - scores["nll"][0][column]
        assert drift == pytest.approx(budget["drift"]["general"][kept_look][0], abs=1e-4)  # weights went back
    assert "past" not in scores["monitor"]["law"]["budget"]["drift"]
    assert past == pytest.approx(budget["drift"]["past"][kept_look][0], abs=1e-4)
    assert any("back to" in act for act in budget["acts"])


def test_a_budget_that_is_never_touched_changes_no_bit_and_is_part_of_what_a_run_is(small, start, tmp_path):
    options = ["order=[law]", "trainer.steps=8", *DROPOUT, "monitor.past=0"]
    start(small(*options), tmp_path / "free")
    start(small(*options, "budget=drift", "budget.general=9"), tmp_path / "held")
    assert scores_of(tmp_path / "held")["monitor"]["law"]["steps"] == [0, 2, 4, 6, 8]
    assert equal_tensors(load_model_weights(tmp_path / "free"), load_model_weights(tmp_path / "held"))
    with pytest.raises(ValueError, match="budget.general"):
        start(small(*options, "budget=drift", "budget.general=8"), tmp_path / "held")


def test_killed_it_ends_with_the_same_bits(small, start, killing, tmp_path):
    options = ["method=ewc", *TWO, *STEEP, *DROPOUT, "budget=drift"]
    options += ["budget.general=0.05", "budget.past=0.2"]
    options += ["trainer.checkpoint_every_n_steps=3", "trainer.steps=8"]
    start(small(*options), tmp_path / "whole")
    undisturbed = scores_of(tmp_path / "whole")
    last = undisturbed["monitor"]["food"]["steps"][-1]
    for step in sorted({min(5, last), last}):
        killing(Killer(step=step, domain="food"))
        with pytest.raises(KilledError):
            start(small(*options), tmp_path / "killed")
    killing(None)
    start(small(*options), tmp_path / "killed")
    killed = scores_of(tmp_path / "killed")
    assert all(undisturbed[name] == killed[name] for name in ("nll", "monitor", "seen", "rates", "metrics"))
    assert equal_tensors(load_model_weights(tmp_path / "whole"), load_model_weights(tmp_path / "killed"))
    assert any(undisturbed["monitor"][stage]["budget"]["acts"] for stage in ("law", "food"))
