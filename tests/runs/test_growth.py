"""Runs that are to learn more, domains or steps: they come to the same bits as from the beginning,
or are refused."""

import logging
import shutil

import numpy as np
import pytest
import torch

from cpt.methods.base import ContinualMethod
from cpt.trainer import manifest
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT
from tests.runs.reading import assert_same_bits, die, killed, same_state, scores_of, state_of, times
from tests.support.campaign import run_few
from tests.support.killing import KilledError
from tests.support.making import DROPOUT
from tests.support.seams import chosen

pytestmark = pytest.mark.adopts
THREE, TWO = "order=[law,food,space]", "order=[law,food]"
CONSTANT = ["schedule=constant", "schedule.warmup=0"]
ONE = ["order=[law]", *CONSTANT, "keep_end=true"]
SAME = ("nll", "metrics", "parts", "seen", "flops", "rates", "leak", "spikes", "skipped", "trained", "stored")
SAME += ("objective", "moved", "monitor", "rows", "conditions", "loading", "domains")


def assert_same(one, other) -> None:
    """To the bit, all that a stage keeps and all numbers but seconds and memory."""
    assert_same_bits(one, other)
    ours, theirs = scores_of(one), scores_of(other)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert ours.run == theirs.run and ours.run["finished"]


@pytest.mark.parametrize("method", run_few(["demix", "ncl", "derpp", "branched", "ewc", "hat"], ["demix"]))
def test_two_and_then_one_more_are_three_at_once(method, start, small, tmp_path):
    options = [*chosen(method), "keep_stages=true"]
    start(small(TWO, *options), tmp_path / "grown")
    start(small(THREE, *options), tmp_path / "grown")
    start(small(THREE, *options, "grow=never"), tmp_path / "whole")
    assert_same(tmp_path / "grown", tmp_path / "whole")
    assert scores_of(tmp_path / "grown").grown == [2]
    assert "| domains were added after | food |" in (tmp_path / "grown" / "report.md").read_text()


def test_what_was_learned_is_not_learned_again_and_missing_cells_stay_missing(start, small, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    start(small(TWO, "trainer.steps=2"), tmp_path)
    before = scores_of(tmp_path)
    start(small(THREE, "trainer.steps=2"), tmp_path)
    after = scores_of(tmp_path)
    assert "1 cells of the matrix are missing, in the rows law" in caplog.text
    assert after.phases["learn"]["law"] == before.phases["learn"]["law"]
    assert np.isnan(after.matrix[1, 2]) and np.isnan(after.matrix).sum() == 1
    assert after.metrics["FWT_zs"]["terms"] == [2, 3]
    assert "order:\n- law\n- food\n- space" in (tmp_path / "config.yaml").read_text()


def test_a_new_folder_goes_on_with_a_copy_of_the_finished_run_beside_it(
    start, small, killing, tmp_path, caplog, capsys
):
    caplog.set_level(logging.INFO)
    start(small("order=[law]"), tmp_path / "one")
    killed(start, killing, small(TWO, "name=x"), tmp_path / "half", step=3, domain="food")
    start(small(TWO), tmp_path / "two")
    start(small(TWO, "seed=1"), tmp_path / "other")
    line = f"Not continuing from {tmp_path / 'two'}: trainer.steps: 6 -> 5"
    start(small(THREE, "trainer.steps=5", "plan=true"), tmp_path / "three")
    assert f"State: new ({line})" in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"^grow=require is invalid: {line}"):
        start(small(THREE, "trainer.steps=5", "grow=require"), tmp_path / "three")
    assert not (tmp_path / "three").exists()
    old = (tmp_path / "two" / "scores.json").read_bytes()
    (tmp_path / "three").mkdir()
    (tmp_path / "three.partial").mkdir()  # the copy of a start that came first
    with RunDir(tmp_path / "three").locked():
        with pytest.raises(ValueError, match="another process is at work in"):
            start(small(THREE), tmp_path / "three")
        assert (tmp_path / "three.partial").exists()
    start(small(THREE), tmp_path / "three")
    assert f"Continuing from a copy of {tmp_path / 'two'} (law food)" in caplog.text
    start(small(THREE), tmp_path / "elsewhere" / "three")
    assert same_state(state_of(tmp_path / "three"), state_of(tmp_path / "elsewhere" / "three"))
    assert scores_of(tmp_path / "three").grown == [1, 2]
    assert scores_of(tmp_path / "elsewhere" / "three").grown == []
    assert (tmp_path / "two" / "scores.json").read_bytes() == old
    start(small(THREE, "name=x"), tmp_path / "half")  # in its own folder it grows within a domain
    assert same_state(state_of(tmp_path / "half"), state_of(tmp_path / "three"))


NOT_AFTER = {
    "method=joint": "method=joint needs all domains before the first is learned",
    "schedule=once": "schedule=Once has rates that depend on how many domains follow",
    " ".join(chosen("across")): "schedule=Across has rates that depend on how many domains follow",
    "optim.carry=all": "optim.carry=all lets the rate decay over all domains",
}


@pytest.mark.parametrize("given", run_few(NOT_AFTER, ["method=joint"]))
def test_what_needs_all_domains_beforehand_says_so(given, start, small, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = [*given.split(), "trainer.steps=2"]
    start(small(TWO, *options), tmp_path / "two")
    with pytest.raises(ValueError, match=f"nothing can follow: {NOT_AFTER[given]}"):
        start(small(THREE, *options), tmp_path / "two")
    start(small(THREE, *options), tmp_path / "three")
    assert f"Not continuing from {tmp_path / 'two'}: {NOT_AFTER[given]}" in caplog.text
    assert scores_of(tmp_path / "three").grown == []


def test_other_text_or_a_budget_begins_at_the_base(start, small, corpora, tmp_path):
    texts = shutil.copytree(corpora, tmp_path / "texts")
    steps, budget = ("trainer.steps=2", f"domains.root={texts}"), "budget.general=9"
    start(small("order=[law]", *steps), tmp_path / "one")
    with pytest.raises(ValueError, match=r"^budget\.general=9 is invalid: .*does not grow"):
        start(small(TWO, *steps, budget), tmp_path / "two")
    with (texts / "law" / "all.txt").open("a") as file:
        file.write("one more line of law\n")
    start(small(TWO, *steps), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == []


# A larger trainer.steps


def test_a_finished_run_goes_on_to_what_it_would_have_come_to(start, small, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    how = [*ONE, *DROPOUT, "method=ewc", "mask=migu", "replay=general", "optim.carry=moments"]
    how.append("trainer.accumulate_grad_batches=2")
    start(small(*how), tmp_path / "raised")
    early, probes = state_of(tmp_path / "raised"), tmp_path / "raised" / "probes"
    for row in ("000-base", "001-law"):
        (probes / row).mkdir(parents=True)
    before = times(tmp_path / "raised")
    with pytest.raises(ValueError, match="means other domains"):
        start(small(*how, "order=[food]", "trainer.steps=11"), tmp_path / "raised")
    with monkeypatch.context() as patched, pytest.raises(ValueError, match="several processes would open"):
        patched.setenv("SLURM_NTASKS", "2")
        start(small(*how, "trainer.steps=11"), tmp_path / "raised")
    assert times(tmp_path / "raised") == before
    start(small(*how, "trainer.steps=11", "variant=more"), tmp_path / "raised")
    assert scores_of(tmp_path / "raised").run["variant"] == "more"
    assert "trainer.steps: 6 -> 11: going on from step 6" in caplog.text
    assert [each.name for each in probes.iterdir()] == ["000-base"]  # the other was of fewer steps
    start(small(*how, "trainer.steps=13"), tmp_path / "raised")  # and once more
    start(small(*how, "trainer.steps=13", "grow=never"), tmp_path / "elsewhere" / "whole")
    assert_same(tmp_path / "raised", tmp_path / "elsewhere" / "whole")
    assert not same_state(state_of(tmp_path / "raised"), early)
    kept = [
        torch.load(tmp_path / name / "checkpoints" / "001-law.ckpt") for name in ("raised", "elsewhere/whole")
    ]
    assert all(kept[0][name] == kept[1][name] for name in ("loops", "epoch", "global_step", "lr_schedulers"))


def test_a_run_that_is_killed_while_its_steps_are_raised_goes_on_or_back(
    start, small, tmp_path, killing, monkeypatch
):
    raised, more = tmp_path / "raised", small(*ONE, "trainer.steps=11")
    start(small(*ONE), raised)
    before = scores_of(raised)
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.trainer.run_dir.RunDir.write_config", die)
        start(more, raised)
    start(small(*ONE), raised)
    after = scores_of(raised)
    assert after.nll == before.nll and after.metrics == before.metrics and after.seen == before.seen
    killed(start, killing, more, raised, step=9)
    start(more, raised)
    start(more, tmp_path / "elsewhere" / "whole")
    assert_same(raised, tmp_path / "elsewhere" / "whole")


def test_a_run_within_its_first_domain_goes_on_to_more(start, small, tmp_path, killing):
    """Also of several domains, and where the rate is that of a decay to come."""
    how = [TWO, "schedule=wsd", "schedule.warmup=0", "schedule.decay=0.4"]
    killed(start, killing, small(*how), tmp_path / "raised", step=3)
    start(small(*how, "trainer.steps=8"), tmp_path / "raised")
    start(small(*how, "trainer.steps=8"), tmp_path / "elsewhere" / "whole")
    assert_same(tmp_path / "raised", tmp_path / "elsewhere" / "whole")


def test_a_new_folder_goes_on_with_a_copy_of_the_run_with_fewer_steps(start, small, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO)
    start(small(*ONE), tmp_path / "six")
    before = times(tmp_path)
    start(small(*ONE, "trainer.steps=11", "plan=true"), tmp_path / "raised")
    said = capsys.readouterr().out
    assert f"continues {tmp_path / 'six'}" in said and times(tmp_path) == before
    (line,) = [each for each in map(str.split, said.splitlines()) if each[:2] == ["law", "11"]]
    assert line[2] == "5"  # those that are left
    start(small(*ONE, "trainer.steps=11"), tmp_path / "raised")
    assert "trainer.steps: 6 -> 11: going on from step 6" in caplog.text
    assert {name: time for name, time in times(tmp_path).items() if name in before} == before
    start(small(*ONE, "trainer.steps=11", "order=[food]"), tmp_path / "food")  # which none has learned
    assert scores_of(tmp_path / "food").rows == ["base", "food"] and caplog.text.count("from a copy") == 1


REFUSED = {
    "several": ([TWO, *CONSTANT], "law was learned with 6 steps, and what followed rests on it"),
    "not kept": (["order=[law]", *CONSTANT], r"was not kept \(keep_end=true keeps it\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_and_nothing_is_lost(case, start, small, tmp_path):
    how, why = REFUSED[case]
    start(small(*how), tmp_path)
    before = times(tmp_path)
    for given, said in {
        "trainer.steps=7": f"trainer.steps=6, and does not go on to 7: .*{why}; take 6",
        "trainer.steps=5": r"another config \(trainer.steps: 6 -> 5\)",
        "trainer.steps=7 optim.lr=0.5": r"optim.lr: .*; trainer.steps: 6 -> 7",
    }.items():
        with pytest.raises(ValueError, match=said):
            start(small(*how, *given.split()), tmp_path)
    assert times(tmp_path) == before


class Unsaid(ContinualMethod):
    """A method that may do anything."""


class Said(ContinualMethod):
    """A method whose steps are the same however many there are."""

    depends_on_total_steps = False


NEVER = {
    "schedule=linear": "schedule=Linear gives step 1 0.8333",
    "schedule=constant schedule.warmup=0.5": "schedule=Constant gives step 0 ",
    "schedule=wsd schedule.warmup=0": "schedule=WSD gives step 5 ",
    "schedule=wsd schedule.warmup=0 schedule.decay=0.1": "schedule=WSD gives step 6 0 of",  # the next one
    TWO: "of several domains the first keep their steps",
    "trainer.steps=null trainer.epochs=1": "trainer.steps=null",
    "method=joint": "method=joint divides its steps",
    "method=hat": "what method=hat does in a step depends on how many there are",
    f"method._target_={__name__}.Unsaid": "method=ncl does not say (depends_on_total_steps = False",
    f"method._target_={__name__}.Said": "",
    "monitor.every=2": "other text is evaluated after the last step",
    "callbacks=lr_monitor": "callbacks may depend",
    "trainer.strategy=fsdp": "strategy=fsdp keeps the trainer's state in shards",
}


@pytest.mark.parametrize("given", NEVER)
def test_where_no_more_steps_can_follow_that_is_told(given, small):
    plan = make_plan(small("order=[law]", *CONSTANT, "keep_end=true", *given.split()))
    why = manifest.why_end_is_final(plan)
    assert why.startswith(NEVER[given]) and bool(why) == (not given.endswith("Said"))


def test_methods_that_ask_how_many_steps_there_are_say_so():
    for path in (ROOT / "cpt" / "methods").glob("*.py"):
        text = path.read_text()
        asks = path.stem not in ("base", "wiring") and ("self.progress" in text or "max_steps" in text)
        assert asks == ("depends_on_total_steps = True" in text), path
