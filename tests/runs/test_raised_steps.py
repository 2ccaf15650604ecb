"""A larger trainer.steps: gone on with to the same bits as from the beginning, or refused."""

import logging
import os
from pathlib import Path

import pytest
import torch

from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.trainer import extend
from cpt.trainer.plan import make_plan
from tests.conftest import ROOT
from tests.support.killing import KilledError, Killer
from tests.support.making import DROPOUT
from tests.support.making import weights as weights_of

CONSTANT = ["schedule=constant", "schedule.warmup=0"]
ONE = ["order=[law]", *CONSTANT, "keep_end=true"]
SAME = ("nll", "metrics", "parts", "seen", "flops", "rates", "leak", "spikes", "skipped", "trained", "stored")
SAME += ("config_digest", "objective", "moved", "monitor", "rows", "conditions", "loading")


def scores_of(folder: Path) -> Scores:
    return Scores.load(folder / "scores.json")


def assert_same(one: Path, other: Path) -> None:
    """To the bit, all that a stage keeps and all numbers but seconds and memory."""
    states = [torch.load(folder / "stages" / "001.pt", weights_only=True) for folder in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    kept = [torch.load(folder / "checkpoints" / "001-law.ckpt") for folder in (one, other)]
    assert all(kept[0][name] == kept[1][name] for name in ("loops", "epoch", "global_step", "lr_schedulers"))
    ours, theirs = scores_of(one), scores_of(other)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert ours.run == theirs.run and ours.run["finished"]


WAYS = {
    "plain": [*DROPOUT, "trainer.accumulate_grad_batches=2"],
    "replay": ["method=ewc", "mask=migu", "replay=general", "optim.carry=moments"],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_finished_run_goes_on_to_what_it_would_have_come_to(way, start, small, tmp_path, caplog):
    how = [*ONE, *WAYS[way]]
    start(small(*how), tmp_path / "raised")
    early, probes = weights_of(tmp_path / "raised"), tmp_path / "raised" / "probes"
    for row in ("000-base", "001-law"):
        (probes / row).mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        start(small(*how, "trainer.steps=11", "variant=more"), tmp_path / "raised")
    assert scores_of(tmp_path / "raised").run["variant"] == "more"
    assert "trainer.steps: 6 -> 11: going on from step 6" in caplog.text
    assert [each.name for each in probes.iterdir()] == ["000-base"]  # the other was of fewer steps
    start(small(*how, "trainer.steps=13"), tmp_path / "raised")  # and once more
    start(small(*how, "trainer.steps=13"), tmp_path / "whole")
    assert_same(tmp_path / "raised", tmp_path / "whole")
    assert any(not torch.equal(each, early[name]) for name, each in weights_of(tmp_path / "raised").items())


@pytest.mark.parametrize("moment", ["config", "step"])
def test_a_run_that_is_killed_while_its_steps_are_raised_goes_on(
    moment, start, small, tmp_path, killing, monkeypatch
):
    start(small(*ONE), tmp_path / "raised")
    with monkeypatch.context() as patched:
        if moment == "step":
            killing(Killer(step=9))
        else:
            patched.setattr("cpt.trainer.run_dir.RunDir.write_config", die)
        with pytest.raises(KilledError):
            start(small(*ONE, "trainer.steps=11"), tmp_path / "raised")
    killing(None)
    start(small(*ONE, "trainer.steps=11"), tmp_path / "raised")
    start(small(*ONE, "trainer.steps=11"), tmp_path / "whole")
    assert_same(tmp_path / "raised", tmp_path / "whole")


def die(*args) -> None:
    raise KilledError


def test_the_steps_that_a_run_had_are_taken_back_after_a_kill(start, small, tmp_path, monkeypatch):
    start(small(*ONE), tmp_path / "raised")
    before = scores_of(tmp_path / "raised")
    with monkeypatch.context() as patched:
        patched.setattr("cpt.trainer.run_dir.RunDir.write_config", die)
        with pytest.raises(KilledError):
            start(small(*ONE, "trainer.steps=11"), tmp_path / "raised")
    start(small(*ONE), tmp_path / "raised")
    after = scores_of(tmp_path / "raised")
    assert after.nll == before.nll and after.metrics == before.metrics and after.seen == before.seen


def test_a_run_within_its_first_domain_goes_on_to_more(start, small, tmp_path, killing):
    """Also of several domains, and where the rate is that of a decay to come."""
    how = ["order=[law,food]", "schedule=wsd", "schedule.warmup=0", "schedule.decay=0.4"]
    killing(Killer(step=3))
    with pytest.raises(KilledError):
        start(small(*how), tmp_path / "raised")
    killing(None)
    start(small(*how, "trainer.steps=8"), tmp_path / "raised")
    start(small(*how, "trainer.steps=8"), tmp_path / "whole")
    one, other = (scores_of(tmp_path / name) for name in ("raised", "whole"))
    assert one.nll == other.nll and one.rates == other.rates and one.rows == ["base", "law", "food"]


@pytest.mark.adopts
def test_a_new_folder_goes_on_with_a_copy_of_the_run_beside_it(start, small, tmp_path, caplog, capsys):
    start(small(*ONE), tmp_path / "six")
    start(small(*ONE, "trainer.steps=8"), tmp_path / "eight")
    before = files(tmp_path)
    start(small(*ONE, "trainer.steps=11", "plan=true"), tmp_path / "raised")
    assert f"continues {tmp_path / 'eight'}" in capsys.readouterr().out and files(tmp_path) == before
    with caplog.at_level(logging.INFO):
        start(small(*ONE, "trainer.steps=11"), tmp_path / "raised")
    assert f"Continuing from a copy of {tmp_path / 'eight'}, which has made fewer steps" in caplog.text
    assert "trainer.steps: 8 -> 11: going on from step 8" in caplog.text
    assert {name: time for name, time in files(tmp_path).items() if name in before} == before
    start(small(*ONE, "trainer.steps=11", "order=[food]"), tmp_path / "food")  # which none has learned
    assert scores_of(tmp_path / "food").rows == ["base", "food"] and caplog.text.count("from a copy") == 1
    start(small(*ONE, "trainer.steps=11"), tmp_path / "elsewhere" / "whole")
    assert_same(tmp_path / "raised", tmp_path / "elsewhere" / "whole")


def test_contents_that_are_others_are_told_before_anything_is_taken_back(start, small, tmp_path, corpora):
    start(small(*ONE), tmp_path)
    before = files(tmp_path)
    with pytest.raises(ValueError, match="means other domains"):
        start(small(*ONE, "order=[food]", "trainer.steps=11"), tmp_path)
    assert files(tmp_path) == before and scores_of(tmp_path).run["finished"]


REFUSED = {
    "several": (
        ["order=[law,food]", *CONSTANT],
        "law was learned with 6 steps, and what followed rests on it",
    ),
    "not kept": (["order=[law]", *CONSTANT], r"was not kept \(keep_end=true keeps it\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_and_nothing_is_lost(case, start, small, tmp_path):
    how, why = REFUSED[case]
    start(small(*how), tmp_path)
    before = files(tmp_path)
    with pytest.raises(
        ValueError, match=f"made with trainer.steps=6, and does not go on to 7: .*{why}; take 6"
    ):
        start(small(*how, "trainer.steps=7"), tmp_path)
    with pytest.raises(ValueError, match=r"another config \(trainer.steps: 6 -> 5\)"):
        start(small(*how, "trainer.steps=5"), tmp_path)
    with pytest.raises(ValueError, match=r"optim.lr: .*; trainer.steps: 6 -> 7"):
        start(small(*how, "trainer.steps=7", "optim.lr=0.5"), tmp_path)
    assert files(tmp_path) == before


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


NEVER = {
    "schedule=linear": "schedule=Linear gives step 1 0.8333",
    "schedule=constant schedule.warmup=0.5": "schedule=Constant gives step 0 ",
    "schedule=wsd schedule.warmup=0": "schedule=WSD gives step 5 ",
    "schedule=wsd schedule.warmup=0 schedule.decay=0.1": "schedule=WSD gives step 6 0 of",  # the next one
    "order=[law,food]": "of several domains the first keep their steps",
    "trainer.steps=null trainer.epochs=1": "trainer.steps=null: how much is learned is said by",
    "method=joint": "method=joint divides its steps",
    "method=hat": "what method=hat does in a step depends on how many there are",
    "method=recadam": "what method=recadam does in a step",
    "method=lifelong_moe": "what method=lifelong_moe does in a step",
    "monitor.every=2": "other text is evaluated after the last step",
    "callbacks=lr_monitor": "callbacks may depend",
    "trainer.strategy=fsdp": "strategy=fsdp keeps the trainer's state in shards",
}


@pytest.mark.parametrize("given", NEVER)
def test_where_no_more_steps_can_follow_that_is_told(given, small):
    plan = make_plan(small("order=[law]", *CONSTANT, "keep_end=true", *given.split()))
    assert extend.why_end_is_final(plan).startswith(NEVER[given])


def test_a_method_of_ones_own_says_whether_it_counts_steps(small):
    plan = make_plan(small("order=[law]", *CONSTANT, f"method._target_={__name__}.Unsaid"))
    assert "does not say (depends_on_total_steps = False in its class)" in extend.why_end_is_final(plan)
    plan = make_plan(small("order=[law]", *CONSTANT, f"method._target_={__name__}.Said"))
    assert extend.why_end_is_final(plan) == ""


def test_methods_that_ask_how_many_steps_there_are_say_so():
    for path in (ROOT / "cpt" / "methods").glob("*.py"):
        text = path.read_text()
        asks = path.stem != "base" and ("self.progress" in text or "max_steps" in text)
        assert asks == ("depends_on_total_steps = True" in text), path


def test_several_processes_do_not_open_a_run_at_once(start, small, tmp_path, monkeypatch):
    start(small(*ONE), tmp_path)
    monkeypatch.setitem(os.environ, "SLURM_NTASKS", "2")
    with pytest.raises(ValueError, match="several processes would open it again at once"):
        start(small(*ONE, "trainer.steps=7"), tmp_path)


def test_a_plan_of_more_steps_foretells_those_that_are_left(start, small, tmp_path, capsys):
    start(small(*ONE), tmp_path)
    before = files(tmp_path)
    start(small(*ONE, "trainer.steps=11", "plan=true"), tmp_path)
    lines = [each.split() for each in capsys.readouterr().out.splitlines()]
    (line,) = [each for each in lines if each[:2] == ["law", "11"]]
    assert line[2] == "5" and files(tmp_path) == before


class Unsaid(ContinualMethod):
    """A method that may do anything."""


class Said(ContinualMethod):
    """A method whose steps are the same however many there are."""

    depends_on_total_steps = False
