"""Looks at other text while a domain is learned."""

import numpy as np
import pytest

from cpt.evaluation.monitor import MonitorOptions, MonitorRecord
from tests.runs.reading import assert_same_bits, killed, same_state, state_of, told_by
from tests.support.making import DROPOUT, weights

THREE = ["order=[law,food,space]", "trainer.steps=6"]
OFF = {"every": None, "max_tokens": 2000, "past": 4, "general": True, "stop": None, "patience": None}
EVERY = ["monitor.every=2", "monitor.max_tokens=200"]


def options(**given):
    return MonitorOptions(**OFF | {"keep": "last"} | given)


def seen(values, *, documents=3):
    """What was watched of a stage whose texts had these losses: of so many documents each."""
    watched, counts = MonitorRecord(), [9.0, 11.0, 10.0][:documents]
    looks = [
        {text: np.array([[loss[at] * count for count in counts], counts]) for text, loss in values.items()}
        for at in range(len(next(iter(values.values()))))
    ]
    for step, look in enumerate(looks):
        watched.add(step, looks[0], look)
    return watched


def test_a_stage_ends_when_a_text_has_risen_for_certain():
    watched = seen({"mine": [3.0, 2.0], "past": [2.0, 2.3], "general": [4.0, 4.05]})
    assert watched.why_stop(options(every=1, stop=0.2), own=("mine",)).startswith("past has risen by 0.300")
    assert not watched.why_stop(options(every=1, stop=0.31), own=("mine",))
    own = seen({"mine": [3.0, 4.0], "past": [2.0, 2.0]})  # which may rise
    assert not own.why_stop(options(every=1, stop=0.2), own=("mine",))
    doubted, counts = MonitorRecord(), [10.0, 10.0, 10.0]
    began = {text: np.array([[20.0, 20.0, 20.0], counts]) for text in ("mine", "past")}
    risen = np.array([[30.0, 20.0, 20.0], counts])  # of one document in three
    doubted.add(1, began, began | {"past": risen})
    low, high = doubted.rise["past"][-1]
    assert low < 0 and high > 1 and (low + high) / 2 == pytest.approx(1 / 3)
    assert not doubted.why_stop(options(every=1, stop=0.1), own=["mine"])
    single = seen({"mine": [2.0, 2.0], "past": [2.0, 9.0]}, documents=1)  # of which there is no interval
    assert not single.why_stop(options(every=1, stop=0.1), own=["mine"])


@pytest.mark.parametrize(
    ("losses", "ends"), [([3, 2, 2.1, 2.2], True), ([3, 2, 2.1, 1.9], False), ([np.nan] * 4, False)]
)
def test_patience_counts_looks_since_the_lowest_loss(losses, ends):
    watched = seen({"mine": losses, "past": [9.0, 7.0, 5.0, 3.0]})  # which has no say in it
    assert bool(watched.why_stop(options(every=1, patience=2), own=("mine",))) == ends


def test_looking_changes_no_bit(small, start, tmp_path):
    for name, how in (("plain", []), ("watched", EVERY)):
        start(small("method=demix", *THREE, *DROPOUT, *how), tmp_path / name)
    assert_same_bits(tmp_path / "watched", tmp_path / "plain")
    one, other = told_by(tmp_path / "plain"), told_by(tmp_path / "watched")
    assert all(one[name] == other[name] for name in ("flops", "seen", "config_hash"))
    assert one["monitor"] == {} and list(other["monitor"]) == ["law", "food", "space"]
    last = other["monitor"]["space"]
    assert last["steps"] == [0, 2, 4, 6] and list(last["nll"]) == ["space", "law", "food", "general"]
    assert last["nll"]["space"][-1] < last["nll"]["space"][0]
    assert last["rise"]["law"][0] == pytest.approx([0, 0]) and not last["ended"]


def test_what_is_looked_at_is_validation_text(small, start, tmp_path):
    """All of it, with the loss that the matrix has for the same text."""
    how = ["monitor.every=3", "monitor.max_tokens=1000000", "domains.score_on=valid"]
    start(small("method=ncl", "order=[law,food]", *DROPOUT, *how), tmp_path)
    found = told_by(tmp_path)
    column = found["domains"].index("general")
    for row, stage in enumerate(["law", "food"], start=1):
        looks = found["monitor"][stage]["nll"]["general"]
        assert looks[-1] == pytest.approx(found["nll"][row][column], rel=1e-5)
        assert looks[0] == pytest.approx(found["nll"][row - 1][column], rel=1e-5)


def test_patience_with_the_best_weights(small, start, tmp_path):
    how = ["order=[law]", "optim.lr=0.05", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
    ending = ["monitor.every=1", "monitor.patience=3", "monitor.keep=best", "trainer.steps=30"]
    start(small(*how, *ending), tmp_path / "best")
    watched = told_by(tmp_path / "best")["monitor"]["law"]
    assert watched["ended"] and watched["kept"] == watched["steps"][int(np.argmin(watched["nll"]["law"]))]
    assert watched["steps"][-1] == watched["kept"] + 3
    start(small(*how, f"trainer.steps={watched['kept']}"), tmp_path / "short")
    assert same_state(weights(tmp_path / "best"), weights(tmp_path / "short"))


def test_a_stage_that_ended_early_is_the_same_after_any_kill(small, start, killing, tmp_path):
    given = ["method=ewc", "order=[law,food]", "trainer.steps=12", "trainer.checkpoint_every=3", *DROPOUT]
    given += ["monitor.every=2", "monitor.patience=1", "monitor.keep=best", "monitor.stop=0.01"]
    given += ["optim.lr=0.1"]
    start(small(*given), tmp_path / "whole")
    whole = told_by(tmp_path / "whole")
    last = whole["monitor"]["food"]["steps"][-1]
    assert last < 12 and whole["monitor"]["food"]["ended"] and whole["run"]["finished"]
    for step in (1, last):
        killed(start, killing, small(*given), tmp_path / "killed", step=step, domain="food")
    start(small(*given), tmp_path / "killed")
    found = told_by(tmp_path / "killed")
    assert all(whole[name] == found[name] for name in ("nll", "monitor", "seen", "flops", "rates", "metrics"))
    assert same_state(state_of(tmp_path / "whole"), state_of(tmp_path / "killed"))
