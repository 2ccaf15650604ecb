"""Runs that are to learn more, domains or steps: they come to the same bits as from the beginning,
or are refused."""

import logging

import pytest

from cpt.methods.base import ContinualMethod
from cpt.trainer import manifest
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, die, killed, same_state, scores_of, state_of, times
from tests.support.campaign import run_few
from tests.support.killing import KilledError
from tests.support.making import DROPOUT
from tests.support.seams import chosen

pytestmark = pytest.mark.adopts
THREE, TWO = "order=[law,food,space]", "order=[law,food]"
CONSTANT = ["lr_scheduler=constant", "lr_scheduler.warmup_ratio=0"]
ONE = ["order=[law]", *CONSTANT, "save_trainer_state=true"]
SAME = ("nll", "metrics", "modules", "seen", "flops", "rates", "spikes", "skipped", "trained", "stored")
SAME += (
    "protected_movement",
    "optimized_metric",
    "moved",
    "monitor",
    "rows",
    "conditions",
    "loading",
    "domains",
)


def assert_same(one, other) -> None:
    """To the bit, all that a stage keeps and all numbers but seconds and memory."""
    assert_same_bits(one, other)
    ours, theirs = scores_of(one), scores_of(other)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert ours.run == theirs.run and ours.run["finished"]


@pytest.mark.parametrize("method", run_few(["demix", "ncl", "derpp", "branched", "ewc", "hat"], ["demix"]))
def test_two_and_then_one_more_are_three_at_once(method, start, small, tmp_path):
    options = [*chosen(method), "save_all_stages=true"]
    start(small(TWO, *options), tmp_path / "grown")
    start(small(THREE, *options), tmp_path / "grown")
    start(small(THREE, *options, "grow=never"), tmp_path / "whole")
    assert_same(tmp_path / "grown", tmp_path / "whole")
    assert scores_of(tmp_path / "grown").grown == [2]
    assert "| domains were added after | food |" in (tmp_path / "grown" / "report.md").read_text()


def test_a_new_folder_goes_on_with_a_copy_of_the_finished_run_beside_it(
    start, small, killing, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    start(small("order=[law]"), tmp_path / "one")
    killed(start, killing, small(TWO, "name=x"), tmp_path / "half", step=3, domain="food")
    start(small(TWO), tmp_path / "two")
    start(small(TWO, "seed=1"), tmp_path / "other")
    with pytest.raises(ValueError, match="^grow=require .*two'?: trainer.steps: 6 -> 5"):
        start(small(THREE, "trainer.steps=5", "grow=require"), tmp_path / "three")
    assert not (tmp_path / "three").exists()
    old = (tmp_path / "two" / "scores.json").read_bytes()
    for place in ("three", "three.partial"):
        (tmp_path / place).mkdir()
    with RunDir(tmp_path / "three").locked():
        with pytest.raises(ValueError, match="another process is at work in"):
            start(small(THREE), tmp_path / "three")
        assert (tmp_path / "three.partial").exists()  # the copy of a start that came first
    start(small(THREE), tmp_path / "three")
    assert f"Continuing from a copy of {tmp_path / 'two'}" in caplog.text
    start(small(THREE), tmp_path / "elsewhere" / "three")
    start(small(THREE, "name=x"), tmp_path / "half")  # in its own folder it grows within a domain
    for other in ("half", "elsewhere/three"):
        assert same_state(state_of(tmp_path / other), state_of(tmp_path / "three"))
    assert scores_of(tmp_path / "three").grown == [1, 2]
    assert (tmp_path / "two" / "scores.json").read_bytes() == old


NOT_AFTER = {
    "method=joint": "method=joint needs all domains before the first is learned",
    "optim.state_across_domains=all": "optim.state_across_domains=all lets the rate decay over all domains",
}


@pytest.mark.parametrize("given", run_few(NOT_AFTER, ["method=joint"]))
def test_what_needs_all_domains_beforehand_says_so(given, start, small, tmp_path):
    options = [*given.split(), "trainer.steps=2"]
    start(small(TWO, *options), tmp_path / "two")
    with pytest.raises(ValueError, match=f"nothing can follow: {NOT_AFTER[given]}"):
        start(small(THREE, *options), tmp_path / "two")
    start(small(THREE, *options), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == []


# A larger trainer.steps


def test_a_finished_run_goes_on_to_what_it_would_have_come_to(start, small, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    how = [*ONE, *DROPOUT, "method=ewc", "mask=migu", "replay=general", "optim.state_across_domains=moments"]
    how.append("trainer.accumulate_grad_batches=2")
    start(small(*how), tmp_path / "raised")
    early = state_of(tmp_path / "raised")
    before = times(tmp_path / "raised")
    with pytest.raises(ValueError, match="means other domains"):
        start(small(*how, "order=[food]", "trainer.steps=11"), tmp_path / "raised")
    assert times(tmp_path / "raised") == before
    start(small(*how, "trainer.steps=11", "variant=more"), tmp_path / "raised")
    assert scores_of(tmp_path / "raised").run["variant"] == "more"
    assert "Resuming at step 6: trainer.steps 6 -> 11" in caplog.text
    start(small(*how, "trainer.steps=13"), tmp_path / "raised")  # and once more
    start(small(*how, "trainer.steps=13", "grow=never"), tmp_path / "elsewhere" / "whole")
    assert_same(tmp_path / "raised", tmp_path / "elsewhere" / "whole")
    assert not same_state(state_of(tmp_path / "raised"), early)


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
    how = [TWO, "lr_scheduler=wsd", "lr_scheduler.warmup_ratio=0", "lr_scheduler.decay=0.4"]
    killed(start, killing, small(*how), tmp_path / "raised", step=3)
    start(small(*how, "trainer.steps=8"), tmp_path / "raised")
    start(small(*how, "trainer.steps=8"), tmp_path / "elsewhere" / "whole")
    assert_same(tmp_path / "raised", tmp_path / "elsewhere" / "whole")


REFUSED = {
    "several": ([TWO, *CONSTANT], "law was learned with 6 steps, and later stages started from it"),
    "not kept": (["order=[law]", *CONSTANT], r"was not kept \(save_trainer_state=true keeps it\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_exact_is_refused_and_nothing_is_lost(case, start, small, tmp_path):
    how, why = REFUSED[case]
    start(small(*how), tmp_path)
    before = times(tmp_path)
    for given, said in {
        "trainer.steps=7": f"trainer.steps=6, and cannot continue to 7: .*{why}; take 6",
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
    "lr_scheduler=linear": "lr_scheduler=Linear gives step 1 0.8333",
    "lr_scheduler=constant lr_scheduler.warmup_ratio=0.5": "lr_scheduler=Constant gives step 0 ",
    "lr_scheduler=wsd lr_scheduler.warmup_ratio=0 lr_scheduler.decay=0.1": "lr_scheduler=WSD gives step 6 0",
    TWO: "of several domains the first keep their steps",
    "method=joint": "method=joint divides its steps",
    "method=hat": "what method=hat does in a step depends on how many there are",
    f"method._target_={__name__}.Unsaid": "method=ncl does not say (depends_on_total_steps = False",
    f"method._target_={__name__}.Said": "",
    "monitor.every=2": "other text is evaluated after the last step",
    "trainer.strategy=fsdp": "strategy=fsdp keeps the trainer's state in shards",
}


@pytest.mark.parametrize("given", NEVER)
def test_where_no_more_steps_can_follow_that_is_told(given, small):
    plan = make_plan(small("order=[law]", *CONSTANT, "save_trainer_state=true", *given.split()))
    why = manifest.why_end_is_final(plan)
    assert why.startswith(NEVER[given]) and bool(why) == (not given.endswith("Said"))
