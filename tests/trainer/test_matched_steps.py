"""`trainer.match=ncl`: a run takes the counted operations of ncl, and is that of the steps that it logs."""

import json
import logging
import re

import pytest

from tests.runs.reading import assert_same_bits, killed, told_by

GIVEN = ["trainer.steps=40", "trainer.checkpoint_every=10", "eval.rows=last", "eval.max_tokens=64"]
METHODS = {
    "method=das": (18, 27),  # the range of its steps for 40 of ncl
    "method=kd": (25, 36),
    "method=ewc trainer.importance_samples=64": (20, 39),
    "method=ncl replay=past replay.mode=append": (30, 39),
    "method=lora": (41, 80),
    "method=joint": (40, 40),
}


def test_a_matched_run_takes_the_operations_of_ncl(start, small, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    start(small(*GIVEN), tmp_path / "ncl")
    ncl = sum(told_by(tmp_path / "ncl")["flops"])
    for number, (given, (least, most)) in enumerate(METHODS.items()):
        start(small(*GIVEN, *given.split(), "trainer.match=ncl"), tmp_path / str(number))
        steps = json.loads((tmp_path / str(number) / "matched.json").read_text())["steps"]
        assert f"operations of ncl: trainer.steps={steps}, " in caplog.text and least <= steps <= most
        flops = sum(told_by(tmp_path / str(number))["flops"])
        assert flops == pytest.approx(ncl, rel=0.5 / steps + 0.02), given  # rounded to a whole step
        caplog.clear()


def test_it_is_the_run_of_these_steps_also_if_it_was_killed(start, small, killing, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kd = [*GIVEN, "method=kd"]
    killed(start, killing, small(*kd, "trainer.match=ncl"), tmp_path / "matched", step=13, domain="food")
    steps = re.search(r"trainer.steps=(\d+)", "".join(caplog.messages))[1]
    caplog.clear()
    start(small(*kd, "trainer.match=ncl"), tmp_path / "matched")
    assert "Matching" not in caplog.text  # what it has stored
    start(small(*kd, f"trainer.steps={steps}"), tmp_path / "given")
    assert_same_bits(tmp_path / "matched", tmp_path / "given")
    with pytest.raises(ValueError, match="trainer.match"):
        start(small(*kd, f"trainer.steps={steps}", "trainer.match=ncl"), tmp_path / "given")
    (tmp_path / "matched" / "matched.json").write_text("{}")
    (tmp_path / "matched" / "scores.json").unlink()
    with pytest.raises(ValueError, match="matched.json is damaged; bring it back"):
        start(small(*kd, "trainer.match=ncl"), tmp_path / "matched")


def test_epochs_are_scaled_and_importances_alone_may_be_too_much(start, small, tmp_path):
    epochs = ["trainer.steps=null", "trainer.epochs=2", "trainer.match=ncl", *GIVEN[1:]]
    start(small("method=kd", *epochs), tmp_path / "epochs")
    assert 1.3 < json.loads((tmp_path / "epochs/matched.json").read_text())["epochs"] < 1.8
    few = ["method=das", *GIVEN, "trainer.steps=1", "trainer.match=ncl", "trainer.importance_samples=96"]
    with pytest.raises(ValueError, match=r"trainer.match=ncl is invalid: .* Allowed: null, more trainer"):
        start(small(*few), tmp_path / "few")
