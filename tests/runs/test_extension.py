"""`extend=FOLDER`: runs that learn further domains come to the same bits as from the beginning, or are
refused."""

import logging
import os
import re
import shutil

import pytest

from cpt import verify
from cpt.core.naming import name_run
from cpt.train import is_done
from cpt.trainer.extension import check_extension, list_further_entries
from cpt.trainer.plan import make_plan
from cpt.trainer.run_dir import RunDir
from tests.runs.reading import assert_same_bits, die, same_state, scores_of, start_and_kill, state_of, times
from tests.support.campaign import run_few
from tests.support.hook_methods import overrides_for
from tests.support.kill_callback import KilledError

ONE, TWO, THREE = "order=[law]", "order=[law,food]", "order=[law,food,space]"
FEW = "trainer.steps=2"
SAME_SCORES = (
    "nll",
    "metrics",
    "modules",
    "tokens_read",
    "flops",
    "rates",
    "skipped_steps",
    "trained",
    "stored",
    "protected_movement",
    "optimized_metric",
    "moved",
    "monitor",
    "rows",
    "conditions",
    "loading",
)


def assert_same_runs(run, other_run) -> None:
    assert_same_bits(run, other_run)
    scores = scores_of(run)
    other_scores = scores_of(other_run)
    for name in SAME_SCORES:
        assert getattr(scores, name) == getattr(other_scores, name), name
    assert scores.run == other_scores.run and scores.run["finished"]
    assert scores.domains == other_scores.domains


@pytest.mark.parametrize("method", run_few(["demix", "ncl", "derpp", "branched", "ewc", "hat"], ["demix"]))
def test_two_domains_and_then_one_more_are_three_at_once(method, start, small, tmp_path):
    options = [*overrides_for(method), "save_all_stages=true"]
    start(small(TWO, *options), tmp_path / "two")
    before = times(tmp_path / "two")
    start(small(THREE, *options, f"extend={tmp_path / 'two'}"), tmp_path / "extended")
    start(small(THREE, *options), tmp_path / "whole")
    assert_same_runs(tmp_path / "extended", tmp_path / "whole")
    assert scores_of(tmp_path / "extended").grown == [2]
    assert times(tmp_path / "two") == before


def test_orders_that_the_config_has_in_addition_change_nothing(start, small, tmp_path):
    start(small("order=0", "domains.orders=[[law,food]]", FEW), tmp_path / "two")
    longer = ["domains.orders=[[law,food,space],[space,law,food]]", FEW]
    start(small("order=0", *longer, f"extend={tmp_path / 'two'}"), tmp_path / "three")
    assert scores_of(tmp_path / "three").rows == ["base", "law", "food", "space"]
    # The same run with further orders is finished; another order of the same number is another run.
    start(
        small("order=0", "domains.orders=[[law,food,space]]", FEW, f"extend={tmp_path / 'two'}"),
        tmp_path / "three",
    )
    with pytest.raises(ValueError, match="order"):
        start(small("order=1", *longer, f"extend={tmp_path / 'two'}"), tmp_path / "three")


def test_the_source_is_needed_at_the_first_start_alone(start, small, killing, tmp_path, caplog, capsys):
    """A killed extended run resumes within its new domain, is known as done, and is extended itself."""
    caplog.set_level(logging.INFO)
    start(small(ONE), tmp_path / "one")
    two = small(TWO, f"extend={tmp_path / 'one'}")
    start_and_kill(start, killing, two, tmp_path / "two", step=3, domain="food")
    assert f"Adding food after law, from a copy of {tmp_path / 'one'}" in caplog.text
    assert not scores_of(tmp_path / "two").run["finished"] and not is_done(two, tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    start(two, tmp_path / "two")
    assert is_done(two, tmp_path / "two") and is_done(small(TWO), tmp_path / "two")
    assert verify.main([str(tmp_path / "two")]) == 0

    start(small(THREE, f"extend={tmp_path / 'two'}"), tmp_path / "three")
    assert scores_of(tmp_path / "three").grown == [1, 2]
    start(small(THREE), tmp_path / "whole")
    assert same_state(state_of(tmp_path / "three"), state_of(tmp_path / "whole"))


def test_a_kill_while_it_is_copied_leaves_no_half_of_a_run(start, small, tmp_path, monkeypatch):
    start(small(ONE, FEW), tmp_path / "one")
    two = small(TWO, FEW, f"extend={tmp_path / 'one'}")
    replaced = os.replace

    def last_fails(old, new):
        if str(new) == str(tmp_path / "two"):
            raise KilledError
        replaced(old, new)

    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.trainer.extension.os.replace", last_fails)
        start(two, tmp_path / "two")
    assert (tmp_path / "two.partial" / "identity.json").exists()
    start(two, tmp_path / "two")
    assert scores_of(tmp_path / "two").grown == [1] and not (tmp_path / "two.partial").exists()


def test_a_copy_that_learned_nothing_new_is_unfinished(start, small, tmp_path, monkeypatch):
    start(small(ONE, FEW), tmp_path / "one")
    two = small(TWO, FEW, f"extend={tmp_path / 'one'}")
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr("cpt.data.corpora.Corpora.read", die)
        start(two, tmp_path / "two")
    scores = scores_of(tmp_path / "two")
    assert not scores.run["finished"] and scores.run["order"] == ["law"]
    start(two, tmp_path / "two")
    assert scores_of(tmp_path / "two").grown == [1] and scores_of(tmp_path / "two").run["finished"]


def test_two_starts_at_once_do_not_mix_their_copies(start, small, tmp_path):
    start(small(ONE, FEW), tmp_path / "one")
    for name in ("two", "two.partial"):
        (tmp_path / name).mkdir()
    with RunDir(tmp_path / "two").locked():
        with pytest.raises(ValueError, match="another process is using"):
            start(small(TWO, FEW, f"extend={tmp_path / 'one'}"), tmp_path / "two")
        assert (tmp_path / "two.partial").exists()  # the copy of the start that came first


def test_the_config_of_an_extended_run_is_that_of_all_its_domains(start, small, tmp_path):
    start(small("domains.only=[law]", "order=0", FEW), tmp_path / "one")
    options = ["domains.only=[law,space]", "order=0", FEW]
    start(small(*options, f"extend={tmp_path / 'one'}"), tmp_path / "two")
    assert RunDir(tmp_path / "two").stored_config()["domains.only"] == ["law", "space"]
    run_pattern = re.escape(str(tmp_path / "one"))
    extended_pattern = re.escape(f"{tmp_path / 'one'}-space")
    line = f"^{run_pattern} has learned law .new: space. and stays as it is. "
    with pytest.raises(
        ValueError, match=f"{line}Allowed: extend={run_pattern} hydra.run.dir={extended_pattern} learns"
    ):
        start(small(*options), tmp_path / "one")


def test_options_of_further_domains_may_be_added_and_those_of_learned_ones_stay(start, small, tmp_path):
    finished_run = RunDir(tmp_path / "one")
    start(small(ONE, FEW), finished_run.path)
    check_extension(make_plan(small(TWO, FEW, "domains.columns.food=text")), finished_run)
    with pytest.raises(ValueError, match="another config .domains.columns.law: .absent. -> text.. Allowed"):
        check_extension(make_plan(small(TWO, FEW, "domains.columns={food: text, law: text}")), finished_run)


def test_each_source_says_which_options_are_of_one_domain(composed):
    def list_entries(*options, learned):
        return list_further_entries(make_plan(composed(*options)), learned)

    packages = ["domains.packages.torch=[torch]", "order=[sympy,torch]"]
    assert list_entries(*packages, learned=["sympy", "networkx", "pandas"]) == ["domains.packages.torch"]
    catalogue = "domains.catalogue={news: {path: a/news}, law: {path: a/law}, web: {path: a/web}}"
    hub = ["domains=hub", catalogue, "domains.general=web", "order=[news,law]"]
    assert list_entries(*hub, learned=["news"]) == ["domains.catalogue.law"]

    tasks = ["domains=tasks", "model=tiny_gpt2", "+domains.template.tasks={pandas: numpy, sympy: numpy}"]
    entries = list_entries(*tasks, learned=["package", "sympy"])
    assert "domains.template.tasks.pandas" in entries and "domains.template.tasks.sympy" not in entries
    assert "domains.template.instructions.networkx" in entries
    assert "domains.template.instructions.numpy" not in entries  # which sympy has, too


def test_a_source_that_cannot_be_extended_is_refused_with_one_line(start, small, killing, tmp_path):
    """No run, an unfinished one, other options, another order, itself, other contents, no last stage."""
    two = tmp_path / "two"
    new = tmp_path / "new"
    start(small(TWO, FEW), two)
    start_and_kill(start, killing, small(TWO), tmp_path / "half", step=3, domain="food")

    def refused(*options, source=two, order=THREE, folder=new) -> str:
        with pytest.raises(ValueError) as error:
            start(small(order, FEW, f"extend={source}", *options), folder)
        assert not new.exists() and "\n" not in str(error.value)
        return str(error.value).removeprefix(f"extend={source} is invalid: ")

    assert refused(source=tmp_path / "none").startswith("no run. Allowed: null, or the folder of a finished")
    assert refused(source=tmp_path).endswith(f"; below this folder: {two}")
    assert refused(source=tmp_path / "half").startswith("its run is not finished. Allowed: a finished run")
    assert refused("trainer.steps=5").startswith("it was made with another config (trainer.steps: 2 -> 5)")
    for order, domains in (
        ("[law,food]", "law food"),
        ("[law]", "law"),
        ("[food,law,space]", "food law space"),
    ):
        line = (
            f"it has learned law food, after which order={order} ({domains}) adds nothing. Allowed: an order"
        )
        assert refused(order=f"order={order}").startswith(line)
    assert refused(folder=two).startswith("it is the folder of this run. Allowed: another hydra.run.dir")
    half = tmp_path / "half"
    assert refused(order=TWO, folder=half).startswith(
        f"{half} was started without it. Allowed: null to resume"
    )
    assert refused("method=joint").startswith("nothing can follow: method=joint needs all domains before")
    (tmp_path / "two" / "stages" / "002.pt").unlink()
    assert refused().startswith("the file of its last stage was removed. Allowed: a run that has it")
    (two / "identity.json").write_text('{"order": 5, "texts": {}}')
    assert refused().startswith(f"{two / 'identity.json'} is damaged")


def test_a_run_from_another_base_is_not_extended(start, small, tmp_path):
    start(small(ONE, FEW), tmp_path / "one")
    start(small(ONE, FEW, "seed=3"), tmp_path / "base")
    start(small(TWO, FEW, f"init_from={tmp_path / 'base'}"), tmp_path / "after")
    assert scores_of(tmp_path / "after").base["learned"] == ["law"]
    with pytest.raises(ValueError, match="made with another config.*init_from"):
        start(small(TWO, FEW), tmp_path / "after")
    with pytest.raises(ValueError, match="^extend=.*made with another config.*init_from"):
        options = [f"init_from={tmp_path / 'base'}", f"extend={tmp_path / 'one'}"]
        start(small(TWO, FEW, *options), tmp_path / "two")


def test_in_a_sweep_each_job_extends_the_run_of_its_seed(composed):
    cfg = composed("extend=outputs/2026-10/ncl_seed-${seed}", "seed=3")
    assert make_plan(cfg).run.extend == "outputs/2026-10/ncl_seed-3"
    sweep = ["extend=outputs/2026-10/ncl_seed-${seed}", "seed=3"]
    assert name_run(sweep, "ncl", 0, 3) == name_run(["seed=3"], "ncl", 0, 3)


@pytest.mark.parametrize(
    "option", run_few(["method=joint", "optim.state_across_domains=all"], ["method=joint"])
)
def test_what_needs_all_domains_beforehand_says_so(option, start, small, tmp_path):
    start(small(TWO, option, FEW), tmp_path / "two")
    with pytest.raises(ValueError, match=f"nothing can follow: {option}"):
        start(small(THREE, option, FEW), tmp_path / "two")
