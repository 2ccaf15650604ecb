"""Runs that are to learn more domains: they come to the same bits as from the beginning, or are refused."""

import logging
import os

import pytest

from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, die, killed, same_state, scores_of, state_of
from tests.support.campaign import run_few
from tests.support.hook_methods import overrides_for
from tests.support.kill_callback import KilledError

pytestmark = pytest.mark.adopts
THREE, TWO = "order=[law,food,space]", "order=[law,food]"
SAME = ("nll", "metrics", "modules", "seen", "flops", "rates", "skipped", "trained", "stored")
SAME += ("protected_movement", "optimized_metric", "moved", "monitor", "rows", "conditions", "loading")


def assert_same(one, other) -> None:
    assert_same_bits(one, other)
    ours, theirs = scores_of(one), scores_of(other)
    assert {name: getattr(ours, name) for name in SAME} == {name: getattr(theirs, name) for name in SAME}
    assert ours.run == theirs.run and ours.run["finished"] and ours.domains == theirs.domains


@pytest.mark.parametrize("method", run_few(["demix", "ncl", "derpp", "branched", "ewc", "hat"], ["demix"]))
def test_two_and_then_one_more_are_three_at_once(method, start, small, tmp_path):
    options = [*overrides_for(method), "save_all_stages=true"]
    start(small(TWO, *options), tmp_path / "grown")
    start(small(THREE, *options), tmp_path / "grown")
    start(small(THREE, *options, "grow=never"), tmp_path / "whole")
    assert_same(tmp_path / "grown", tmp_path / "whole")
    assert scores_of(tmp_path / "grown").grown == [2]


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
        with pytest.raises(ValueError, match="another process is using"):
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


def test_the_config_of_a_grown_run_is_that_of_all_its_domains(start, small, tmp_path):
    few = ["order=0", "trainer.steps=2"]
    start(small("domains.only=[law]", *few), tmp_path / "one")
    for place in ("two", "one"):  # in a new folder, and in its own
        start(small("domains.only=[law,space]", *few, "grow=require"), tmp_path / place)
        assert RunDir(tmp_path / place).stored_config()["domains.only"] == ["law", "space"]


def test_a_killed_copy_a_damaged_run_or_one_without_its_last_stage_is_no_sibling(
    start, small, tmp_path, monkeypatch
):
    few, replaced = "trainer.steps=2", os.replace
    start(small("order=[law]", few), tmp_path / "one")

    def last_fails(old, new):
        if str(new) == str(tmp_path / "two"):
            raise KilledError
        replaced(old, new)

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.trainer.manifest.os.replace", last_fails)
        start(small(TWO, few), tmp_path / "two")
    assert (tmp_path / "two.partial" / "identity.json").exists()
    start(small(TWO, few), tmp_path / "two")
    assert scores_of(tmp_path / "two").grown == [1]
    for last in tmp_path.glob("*/stages/*.pt"):
        last.unlink()
    with pytest.raises(ValueError, match="^grow=require .*: the file of its last stage was removed"):
        start(small(THREE, few, "grow=require"), tmp_path / "three")
    (tmp_path / "one" / "identity.json").write_text('{"order": 5, "texts": {}}')
    (tmp_path / "two" / "config.yaml").write_text("- a")
    start(small(THREE, few), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == []


def test_a_copy_that_learned_nothing_new_is_unfinished_and_one_of_another_base_no_sibling(
    start, small, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    few = "trainer.steps=2"
    start(small("order=[law]", few), tmp_path / "one")
    start(small("order=[law]", few, "seed=3"), tmp_path / "base")
    start(small(TWO, few, f"init_from={tmp_path / 'base'}"), tmp_path / "after")
    assert scores_of(tmp_path / "after").base["learned"] == ["law"]
    with pytest.raises(ValueError, match="made with another config.*init_from"):
        start(small(TWO, few), tmp_path / "after")
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.data.corpora.Corpora.read", die)
        start(small(THREE, few), tmp_path / "three")
    assert f"Continuing from a copy of {tmp_path / 'one'}" in caplog.text
    assert not scores_of(tmp_path / "three").run["finished"]
    start(small(THREE, few), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == [1] and scores_of(tmp_path / "three").run["finished"]


@pytest.mark.parametrize(
    "given", run_few(["method=joint", "optim.state_across_domains=all"], ["method=joint"])
)
def test_what_needs_all_domains_beforehand_says_so(given, start, small, tmp_path):
    start(small(TWO, given, "trainer.steps=2"), tmp_path / "two")
    with pytest.raises(ValueError, match=f"nothing can follow: {given}"):
        start(small(THREE, given, "trainer.steps=2"), tmp_path / "two")
