"""Losses and gradients that are no numbers: no step is made on them, and nothing that they spoil is kept."""

import pytest
import torch

from cpt.methods import ewc, reservoir
from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.optim.nan_guard import MAX_FAILURES, all_finite
from cpt.trainer.checkpoint import load_stage
from tests.conftest import ROOT, SMALL
from tests.methods.test_contract import read_scores
from tests.support.forked_scripts import start_script, wait_for_exit
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import ORDER, equal_tensors

STEP = 3
NAN = float("nan")


def state(folder, stage=2):
    return load_stage(folder / "stages" / f"{stage:03d}.pt")


@pytest.fixture
def spoiled(monkeypatch):
    """Makes a domain's loss at some steps, or the gradient alone, another number."""

    def spoil(value, *, steps=(STEP,), gradient=False):
        losses = ContinualMethod.losses
        met = []

        def bad(self, batch):
            terms = losses(self, batch)
            if self.trainer.global_step in steps and self.domain.name == "law":
                met.append(self.trainer.global_step)
                if gradient:
                    terms["lm"].register_hook(lambda grad: grad * value)
                else:
                    terms["lm"] = terms["lm"] + value * next(self.model.parameters()).sum()
            return terms

        monkeypatch.setattr(NCL, "losses", bad)
        return met

    return spoil


def test_a_transient_one_stops_the_run_and_costs_nothing(small, start, spoiled, tmp_path, monkeypatch):
    run = tmp_path / "run"
    uninterrupted = tmp_path / "whole"
    start(small(ORDER), uninterrupted)
    for gradient, term in ((False, "lm loss is inf"), (True, "norm of the gradient is (inf|nan)")):
        spoiled(float("inf"), gradient=gradient)
        with pytest.raises(ValueError, match=rf"{term}.* at step {STEP} of law"):
            start(small(ORDER), run)
        assert read_scores(run)["rows"] == ["base"]
        monkeypatch.undo()
    start(small(ORDER), run)
    assert (
        equal_tensors(state(run), state(uninterrupted))
        and read_scores(run)["nll"] == read_scores(uninterrupted)["nll"]
    )
    assert read_scores(run)["skipped"] == [0, 0, 0]


def test_a_step_that_is_left_out_changes_nothing(small, start, spoiled, tmp_path, monkeypatch):
    states = []
    updates = []
    optimizer_step = ContinualMethod.optimizer_step

    def record_state(self, epoch, batch_idx, optimizer, closure):
        optimizer_step(self, epoch, batch_idx, optimizer, closure)
        if self.domain.name not in ("law", "food"):  # of the base, which the test that runs first trains
            return
        tensors = list(self.model.parameters())
        for parameter_state in self.trainer.optimizers[0].state.values():
            tensors += parameter_state.values()
        states.append([tensor.detach().clone() for tensor in tensors])

    monkeypatch.setattr(ContinualMethod, "optimizer_step", record_state)
    monkeypatch.setattr(NCL, "after_update", lambda self: updates.append(self.domain.name))
    spoiled_steps = spoiled(NAN)
    options = ["on_nonfinite=skip", "optim.weight_decay=0.5", "trainer.accumulate_grad_batches=2"]
    start(small(ORDER, *options), tmp_path)

    before, at, after = states[STEP - 1 : STEP + 2]
    assert all(torch.equal(*pair) for pair in zip(before, at, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(at, after, strict=True))
    updated_domains = [name for name in updates if name in ("law", "food")]
    assert spoiled_steps == [STEP] * 2 and updated_domains == ["law"] * 5 + ["food"] * 6
    assert read_scores(tmp_path)["skipped"] == [0, 1, 0]
    assert "1 of law" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("step", [1, STEP])
def test_rolling_back_leaves_out_all_steps_since_the_checkpoint(step, small, start, spoiled, tmp_path):
    met = spoiled(NAN, steps=(step,))
    start(small(ORDER, "on_nonfinite=rollback"), tmp_path / "rolled back")  # to after 0, 2, 4 steps
    assert met == [step, step] and read_scores(tmp_path / "rolled back")["skipped"] == [0, 2, 0]
    spoiled(NAN, steps=(step - 1, step))
    start(small(ORDER, "on_nonfinite=skip"), tmp_path / "skipped")
    assert equal_tensors(state(tmp_path / "rolled back"), state(tmp_path / "skipped"))


def test_only_steps_in_a_row_and_rollbacks_are_too_many(small, start, spoiled, tmp_path):
    for policy, interval in (("skip", 1), ("rollback", 2)):
        spoiled(NAN, steps=range(0, 1000, interval))
        with pytest.raises(ValueError, match=f", after {MAX_FAILURES} earlier failures;"):
            start(small(ORDER, f"on_nonfinite={policy}", "trainer.steps=60"), tmp_path / policy)
    spoiled(NAN, steps=range(0, 2 * MAX_FAILURES + 4, 2))
    start(small("order=[law]", "on_nonfinite=skip", "trainer.steps=26"), tmp_path / "some")
    assert read_scores(tmp_path / "some")["skipped"] == [0, MAX_FAILURES + 2]


def test_a_killed_run_knows_what_it_left_out(small, start, spoiled, killing, tmp_path):
    options = [ORDER, "on_nonfinite=skip"]
    spoiled(NAN, steps=(STEP,))
    killing(Killer(step=5, domain="law"))
    with pytest.raises(KilledError):
        start(small(*options), tmp_path / "one")
    killing(None)
    start(small(*options), tmp_path / "one")
    assert read_scores(tmp_path / "one")["skipped"] == [0, 1, 0]

    options.append("trainer.steps=60")
    spoiled(NAN, steps=range(2, 100))
    killing(Killer(step=10, domain="law"))
    with pytest.raises(KilledError):
        start(small(*options), tmp_path / "all")
    killing(None)
    with pytest.raises(
        ValueError, match=rf"at step {2 + MAX_FAILURES} of law, after {MAX_FAILURES} earlier failures;"
    ):
        start(small(*options), tmp_path / "all")


def test_ruined_weights_replace_no_checkpoint(small, start, tmp_path, monkeypatch):
    def ruin(self):
        if self.trainer.global_step == 5:
            next(self.model.parameters()).data.fill_(float("inf"))

    with monkeypatch.context() as patched:
        patched.setattr(NCL, "after_update", ruin)
        with pytest.raises(ValueError, match=r"the weights are not finite after step \d of law"):
            start(small(ORDER), tmp_path / "run")
    assert not list(tmp_path.glob("run/stages/*"))
    for folder in ("run", "whole"):
        start(small(ORDER), tmp_path / folder)
    assert equal_tensors(state(tmp_path / "run"), state(tmp_path / "whole"))


def test_what_a_method_measures_and_a_memory_keeps_must_be_numbers(small, start, tmp_path, monkeypatch):
    def add_once(self, batch, outputs):
        add(self, batch, outputs * NAN if self.rebalance_and_count() == 24 else outputs)

    add = reservoir.Reservoir.add
    monkeypatch.setattr(reservoir.Reservoir, "add", add_once)
    start(small(ORDER, "method=derpp"), tmp_path / "derpp")
    stored_outputs = [value for name, value in state(tmp_path / "derpp").items() if "outputs" in name]
    assert stored_outputs and all(value.isfinite().all() for value in stored_outputs)

    def estimate_nan(model, *args, **options):
        return {name: torch.full_like(parameter, NAN) for name, parameter in model.named_parameters()}

    monkeypatch.setattr(ewc, "estimate_fisher", estimate_nan)
    with pytest.raises(ValueError, match=r"fisher.* is not finite after law"):
        start(small(ORDER, "method=ewc"), tmp_path)
    assert not list(tmp_path.glob("stages/*"))


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from cpt.methods.ncl import NCL

losses = NCL.losses
ruined_domains = set()
def is_here(self, domain):
    return self.global_rank == 1 and self.trainer.global_step == 3 and self.domain.name == domain

def add_infinity(self, *arguments):  # the gradient stays finite
    terms = losses(self, *arguments)
    if is_here(self, "law"):
        terms["lm"] = terms["lm"] + float("inf")
    return terms

def ruin(self):
    if is_here(self, "food") and "food" not in ruined_domains:
        ruined_domains.add("food")
        next(self.model.parameters()).data.fill_(float("inf"))

NCL.losses, NCL.after_update = add_infinity, ruin
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


def test_all_processes_hear_of_one(corpora, cache, tmp_path):
    script = tmp_path / "script.py"
    folder = tmp_path / "run"
    log = tmp_path / "log"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    locations = [f"domains.root={corpora}", f"cache_dir={cache}", f"hydra.run.dir={folder}"]
    options = ["domains=texts", *locations, ORDER, *SMALL, "strategy=ddp", "trainer.accelerator=cpu"]
    process = start_script(script, *options, "on_nonfinite=rollback", cwd=tmp_path, log=log, twin=True)
    code = wait_for_exit(process, seconds=60)
    log_text = log.read_text()
    assert code == 0, log_text
    assert read_scores(folder)["skipped"] == [0, 2, 2], log_text  # of the two since the checkpoint
    assert all_finite(state(folder).values()) and "weights are not finite after step 4 of food" in log_text
