"""Domains that are added to a run that has ended."""

import logging
import shutil

import numpy as np
import pytest
import torch

from cpt.evaluation.scores import Scores
from cpt.trainer.run_dir import RunDir
from tests.methods.test_contract import METHODS
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer
from tests.support.seams import chosen

pytestmark = pytest.mark.adopts
THREE, TWO = "order=[law,food,space]", "order=[law,food]"
NOT_GROWING = {"none", "joint", "across"}  # nothing learned, all domains at once, rates over all of them
GROWING = run_few(
    [name for name in METHODS if name not in NOT_GROWING], ["ncl", "derpp", "demix", "branched"]
)


def scores_of(folder) -> Scores:
    return Scores.load(folder / "scores.json")


def bits(folder) -> dict[str, torch.Tensor]:
    return torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)


def assert_same(grown, whole) -> None:
    one, other = bits(grown), bits(whole)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("method", GROWING)
def test_two_and_then_one_more_are_three_at_once(method, start, small, tmp_path):
    options = [*chosen(method), "keep_stages=true"]
    start(small(TWO, *options), tmp_path / "grown")
    start(small(THREE, *options), tmp_path / "grown")
    start(small(THREE, *options), tmp_path / "whole")
    assert_same(tmp_path / "grown", tmp_path / "whole")
    grown, whole = scores_of(tmp_path / "grown"), scores_of(tmp_path / "whole")
    assert grown.nll == whole.nll and grown.metrics == whole.metrics and grown.domains == whole.domains
    assert grown.rows == whole.rows and grown.grown == [2] and grown.run["finished"]
    assert grown.parts == whole.parts and grown.rates == whole.rates and grown.seen == whole.seen
    report = (tmp_path / "grown" / "report.md").read_text()
    assert "| domains were added after | food |" in report


def test_what_was_learned_is_not_learned_again_and_missing_cells_stay_missing(start, small, tmp_path, caplog):
    start(small(TWO), tmp_path)
    before = scores_of(tmp_path)
    with caplog.at_level(logging.INFO):
        start(small(THREE), tmp_path)
    after = scores_of(tmp_path)
    assert "space are added to law, food" in caplog.text
    assert "1 cells of the matrix are missing, in the rows law" in caplog.text
    assert after.phases["learn"]["law"] == before.phases["learn"]["law"]
    assert np.isnan(after.matrix[1, 2]) and np.isnan(after.matrix).sum() == 1
    assert after.metrics["FWT_zs"]["terms"] == [2, 3]
    assert "order:\n- law\n- food\n- space" in (tmp_path / "config.yaml").read_text()


def test_a_new_folder_goes_on_with_a_copy_of_the_run_beside_it(start, small, tmp_path, caplog):
    start(small("order=[law]"), tmp_path / "one")
    start(small(TWO), tmp_path / "two")
    start(small(TWO, "seed=1"), tmp_path / "other")
    old = (tmp_path / "two" / "scores.json").read_bytes()
    with caplog.at_level(logging.INFO):
        start(small(THREE), tmp_path / "three")
    assert f"Continuing from a copy of {tmp_path / 'two'} (law food)" in caplog.text
    start(small(THREE), tmp_path / "elsewhere" / "three")
    assert_same(tmp_path / "three", tmp_path / "elsewhere" / "three")
    assert scores_of(tmp_path / "three").grown == [1, 2]
    assert scores_of(tmp_path / "elsewhere" / "three").grown == []
    assert (tmp_path / "two" / "scores.json").read_bytes() == old
    start(small(TWO), tmp_path / "two")  # whole as it was


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["method=joint"], "method=joint needs all domains before the first is learned"),
        (["schedule=once"], "schedule=Once has rates that depend on how many domains follow"),
        (chosen("across"), "schedule=Across has rates that depend on how many domains follow"),
        (["optim.carry=all"], "optim.carry=all lets the rate decay over all domains"),
    ],
)
def test_what_needs_all_domains_beforehand_says_so(options, why, start, small, tmp_path, caplog):
    start(small(TWO, *options), tmp_path / "two")
    with pytest.raises(ValueError, match=f"nothing can follow: {why}; allowed: "):
        start(small(THREE, *options), tmp_path / "two")
    with caplog.at_level(logging.INFO):
        start(small(THREE, *options), tmp_path / "three")
    assert f"Not continuing from {tmp_path / 'two'}: {why}" in caplog.text
    assert scores_of(tmp_path / "three").grown == []


def test_a_sibling_that_is_not_continued_is_named_with_what_differs(
    start, small, corpora, tmp_path, caplog, capsys
):
    texts = tmp_path / "texts"
    shutil.copytree(corpora, texts)
    root = f"domains.root={texts}"
    start(small(TWO, root), tmp_path / "two")
    line = f"Not continuing from {tmp_path / 'two'}: trainer.steps: 6 -> 5"
    start(small(THREE, root, "trainer.steps=5", "plan=true"), tmp_path / "three")
    assert f"State: new ({line})" in capsys.readouterr().out
    needed = small(THREE, root, "trainer.steps=5", "grow=require")
    with pytest.raises(ValueError, match=f"^grow=require is invalid: {line}. Allowed: auto"):
        start(needed, tmp_path / "three")
    with pytest.raises(ValueError, match="no finished run of method=ewc in .* of the order law food"):
        start(small(TWO, "method=ewc", "grow=require"), tmp_path / "first")
    assert not (tmp_path / "three").exists() and not (tmp_path / "first").exists()
    with (texts / "law" / "all.txt").open("a") as file:
        file.write("one more line of law\n")
    with caplog.at_level(logging.INFO):
        start(small(THREE, root), tmp_path / "three")
    assert f"Not continuing from {tmp_path / 'two'}: the text of law changed: " in caplog.text
    assert scores_of(tmp_path / "three").grown == []


def test_a_run_with_a_budget_does_not_grow_and_grow_never_starts_from_the_base(start, small, tmp_path):
    budget, steps = "budget.general=9", "trainer.steps=2"
    why = r"^budget\.general=9 is invalid: .*one has learned law, and a run with a budget does not grow"
    for of_the_first in ([], [budget]):
        start(small("order=[law]", steps, *of_the_first), tmp_path / str(len(of_the_first)) / "one")
        with pytest.raises(ValueError, match=why):
            start(small(TWO, steps, budget), tmp_path / str(len(of_the_first)) / "two")
    start(small(TWO, steps, budget, "grow=never"), tmp_path / "1" / "two")
    assert scores_of(tmp_path / "1" / "two").grown == []


def test_a_run_that_is_not_finished_grows_in_its_own_folder_alone(start, small, killing, tmp_path):
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small(TWO), tmp_path / "two")
    killing(None)
    start(small(THREE), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == []
    start(small(THREE), tmp_path / "two")
    assert_same(tmp_path / "two", tmp_path / "three")


def test_two_starts_of_one_new_folder_do_not_copy_into_it_together(start, small, tmp_path):
    start(small("order=[law]"), tmp_path / "one")
    (tmp_path / "two").mkdir()
    (tmp_path / "two.partial").mkdir()  # the copy of the one that came first
    with RunDir(tmp_path / "two").locked():
        with pytest.raises(ValueError, match="another process is at work in"):
            start(small(TWO), tmp_path / "two")
        assert (tmp_path / "two.partial").exists()
    start(small(TWO), tmp_path / "two")
    assert scores_of(tmp_path / "two").grown == [1]
