"""Losses and gradients that are no numbers: no step is made on them, and nothing that they spoil is kept."""

import json
import re
from pathlib import Path

import pytest
import torch

from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.optim.nan_guard import MOST, all_finite, check_finite
from tests.conftest import ROOT, SMALL
from tests.support.processes import ended, started

ORDER = "order=[law,food]"
STEP = 3


def scores(folder):
    return json.loads((folder / "scores.json").read_text())


def state(folder, stage=2):
    return torch.load(folder / "stages" / f"{stage:03d}.pt", weights_only=True)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def spoiled(monkeypatch):
    """Makes a domain's loss at some steps, or the gradient alone, another number."""

    def spoil(value, *, steps=(STEP,), domain="law", gradient=False):
        losses, met = ContinualMethod.losses, []

        def bad(self, batch):
            terms = losses(self, batch)
            if self.trainer.global_step in steps and self.domain.name == domain:
                met.append(self.trainer.global_step)
                weight = next(self.model.parameters())
                if gradient:
                    terms["lm"].register_hook(lambda grad: grad * value)
                else:
                    terms["lm"] = terms["lm"] + value * weight.sum()
            return terms

        monkeypatch.setattr(NCL, "losses", bad)
        return met

    return spoil


@pytest.fixture(scope="module")
def folders():
    return {}


@pytest.fixture
def whole(folders, small, start, tmp_path_factory):
    if not folders:
        folders["whole"] = tmp_path_factory.mktemp("whole")
        start(small(ORDER), folders["whole"])
    return folders["whole"]


@pytest.mark.parametrize("step", [0, STEP, 5], ids=["first", "within", "last"])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_a_transient_one_stops_the_run_and_costs_nothing(
    step, gradient, whole, small, start, spoiled, tmp_path, monkeypatch
):
    with monkeypatch.context():
        spoiled(float("inf"), steps=(step,), gradient=gradient)
        term = "norm of the gradient is (inf|nan)" if gradient else "lm loss is (inf|nan)"
        with pytest.raises(
            ValueError, match=rf"the .*{term}.* at step {step} of law; a lower rate \(optim.lr\)"
        ):
            start(small(ORDER), tmp_path)
        assert scores(tmp_path)["rows"] == ["base"]
        monkeypatch.undo()
    start(small(ORDER), tmp_path)
    assert same(state(tmp_path), state(whole))
    assert scores(tmp_path)["nll"] == scores(whole)["nll"]
    assert scores(tmp_path)["skipped"] == [0, 0, 0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_is_left_out_and_counted(accumulate, small, start, spoiled, tmp_path):
    met = spoiled(float("nan"))
    start(small(ORDER, "on_nonfinite=skip", f"trainer.accumulate_grad_batches={accumulate}"), tmp_path)
    assert met == [STEP] * accumulate
    assert scores(tmp_path)["skipped"] == [0, 1, 0]
    assert "1 of law" in (tmp_path / "report.md").read_text()
    assert all(value.isfinite().all() for value in state(tmp_path).values())


def test_a_step_that_is_left_out_changes_nothing(small, start, spoiled, tmp_path, monkeypatch):
    """Neither weights nor moments nor decay: the model of a step later is that of a step before."""
    seen = {}
    allows = ContinualMethod.optimizer_step

    def noted(self, epoch, batch_idx, optimizer, closure):
        step, name = self.trainer.global_step, self.domain.name
        allows(self, epoch, batch_idx, optimizer, closure)
        weights = [parameter.detach().clone() for parameter in self.model.parameters()]
        moments = [
            value.clone()
            for each in self.trainer.optimizers[0].state.values()
            for value in each.values()
            if isinstance(value, torch.Tensor)
        ]
        seen[name, step] = weights + moments

    monkeypatch.setattr(ContinualMethod, "optimizer_step", noted)
    spoiled(float("nan"))
    start(small(ORDER, "on_nonfinite=skip", "optim.weight_decay=0.5"), tmp_path)
    before, at, after = (seen["law", step] for step in (STEP - 1, STEP, STEP + 1))
    assert all(torch.equal(one, other) for one, other in zip(before, at, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(at, after, strict=True))


def test_rolling_back_leaves_out_all_steps_since_the_checkpoint(small, start, spoiled, tmp_path):
    met = spoiled(float("nan"), steps=(STEP,))
    start(small(ORDER, "on_nonfinite=rollback"), tmp_path / "rolled back")  # checkpoints after 2, 4, 6 steps
    assert met == [STEP, STEP]
    assert scores(tmp_path / "rolled back")["skipped"] == [0, 2, 0]
    spoiled(float("nan"), steps=(2, STEP))
    start(small(ORDER, "on_nonfinite=skip"), tmp_path / "skipped")
    assert same(state(tmp_path / "rolled back"), state(tmp_path / "skipped"))


def test_what_goes_on_for_ever_is_ended(small, start, spoiled, tmp_path):
    spoiled(float("nan"), steps=range(1000))
    for policy in ("skip", "rollback"):
        with pytest.raises(ValueError, match=f"and so was {MOST} times before"):
            start(small(ORDER, f"on_nonfinite={policy}", "trainer.steps=20"), tmp_path / policy)


def test_only_steps_in_a_row_and_rollbacks_are_too_many(small, start, spoiled, tmp_path):
    spoiled(float("nan"), steps=range(0, 2 * MOST + 4, 2))
    start(small(ORDER, "on_nonfinite=skip", "trainer.steps=26"), tmp_path / "skip")
    assert scores(tmp_path / "skip")["skipped"] == [0, MOST + 2, 0]
    spoiled(float("nan"), steps=range(0, 1000, 2))
    with pytest.raises(ValueError, match=f"and so was {MOST} times before"):
        start(small(ORDER, "on_nonfinite=rollback", "trainer.steps=60"), tmp_path / "rollback")


def test_nothing_is_done_after_a_step_that_is_left_out(small, start, spoiled, tmp_path, monkeypatch):
    updates = []
    monkeypatch.setattr(NCL, "after_update", lambda self: updates.append(self.trainer.global_step))
    spoiled(float("nan"))
    start(small("order=[law]", "on_nonfinite=skip"), tmp_path)
    assert len(updates) == 5


def test_a_killed_run_knows_what_it_left_out(small, start, spoiled, tmp_path, monkeypatch):
    class KilledError(BaseException):
        pass

    def killed(self):
        if self.trainer.global_step == 5 and self.domain.name == "law":
            raise KilledError

    spoiled(float("nan"), steps=(STEP,))
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(ContinualMethod, "after_update", killed)
        start(small(ORDER, "on_nonfinite=skip"), tmp_path)
    start(small(ORDER, "on_nonfinite=skip"), tmp_path)
    assert scores(tmp_path)["skipped"] == [0, 1, 0]


def test_ruined_weights_replace_no_checkpoint(small, start, whole, tmp_path, monkeypatch):
    """Of the last step: its damage would meet no loss."""

    def ruin(self):
        if self.trainer.global_step == 5:
            next(self.model.parameters()).data.fill_(float("inf"))

    with monkeypatch.context() as patched:
        patched.setattr(NCL, "after_update", ruin)
        with pytest.raises(
            ValueError, match=r"the weights are not finite after step \d of law; a lower rate"
        ):
            start(small(ORDER), tmp_path)
    assert not list(tmp_path.glob("stages/*"))
    start(small(ORDER), tmp_path)
    assert same(state(tmp_path), state(whole))


def test_what_one_process_has_stops_all(monkeypatch):
    check_finite({"weight": torch.ones(2)}, "law")
    monkeypatch.setattr("cpt.optim.nan_guard.all_reduce_max", lambda own: True)  # another has said so
    with pytest.raises(ValueError, match="what another process has is not finite after law"):
        check_finite({"weight": torch.ones(2)}, "law")


def test_a_base_that_is_no_number_is_not_kept(small, start, tmp_path):
    cfg = small(ORDER, f"cache_dir={tmp_path / 'cache'}", "model.base.optim.lr=1e30", "model.base.warmup=0")
    cfg.model.base.gradient_clip_val = None
    with pytest.raises(ValueError, match=r"of general; this is the base model, .*model.base.optim.lr"):
        start(cfg, tmp_path / "run")
    assert not [each for each in tmp_path.glob("cache/base/*") if each.is_dir() and each.suffix != ".partial"]


def test_a_given_model_that_is_no_number_is_told_before_anything_is_learned(small, start, whole, tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    model = AutoModelForMaskedLM.from_pretrained(whole / "model")
    torch.nn.init.constant_(next(model.parameters()), float("nan"))
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(whole / "model").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"the loss after base is not finite \(law: nan, .*model.checkpoint"):
        start(small(ORDER, f"model.checkpoint={tmp_path / 'model'}"), tmp_path / "run")
    assert not (tmp_path / "run" / "scores.json").exists()


def test_what_a_method_measures_must_be_a_number(small, start, tmp_path, monkeypatch):
    from cpt.methods import ewc

    monkeypatch.setattr(
        ewc,
        "fisher",
        lambda model, *args, **how: {
            name: torch.full_like(p, float("nan")) for name, p in model.named_parameters()
        },
    )
    with pytest.raises(ValueError, match=r"fisher.* is not finite after law"):
        start(small(ORDER, "method=ewc"), tmp_path)
    assert not list(tmp_path.glob("stages/*"))


def test_a_memory_takes_nothing_that_is_no_number(small, start, spoiled, tmp_path, monkeypatch):
    from cpt.methods import derpp

    def once(self, batch, outputs):
        add(self, batch, outputs * float("nan") if self.count() == 24 else outputs)

    add = derpp.Reservoir.add
    monkeypatch.setattr(derpp.Reservoir, "add", once)
    start(small(ORDER, "method=derpp"), tmp_path)
    assert all(value.isfinite().all() for name, value in state(tmp_path).items() if "outputs" in name)


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL

losses = ContinualMethod.losses
def bad(self, batch):
    terms = losses(self, batch)
    if self.global_rank == 1 and self.trainer.global_step == 3 and self.domain.name == "law":
        terms["lm"] = terms["lm"] + float("inf")
    return terms
NCL.losses = bad
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


RUINED = """
import sys
sys.path.insert(0, {root!r})
from cpt.methods.ncl import NCL

met = []
def ruin(self):
    if self.global_rank == 1 and self.trainer.global_step == 3 and self.domain.name == "law" and not met:
        met.append(next(self.model.parameters()).data.fill_(float("inf")))
NCL.after_update = ruin
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


CLOCKS = """
import os
import sys
sys.path.insert(0, {root!r})
import cpt.trainer.checkpoint as checkpointing

calls = iter(range(10**6))
late = os.environ.get("LOCAL_RANK") == "1"  # one process alone has a clock that goes
checkpoint.monotonic = lambda: 40.0 * next(calls) if late else 0.0
save = checkpoint.StepCheckpoint.save
def told(self, trainer, module):
    print("saved at", trainer.global_step, "by", trainer.global_rank, flush=True)
    save(self, trainer, module)
checkpoint.StepCheckpoint.save = told
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


@pytest.mark.campaign
def test_all_processes_save_by_the_clock_of_one(corpora, cache, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CLOCKS.format(root=str(ROOT)))
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law]", *SMALL]
    ddp = ["strategy=ddp", "trainer.accelerator=cpu", "trainer.checkpoint_every=1min", "trainer.steps=9"]
    arguments = [*places, *ddp, f"hydra.run.dir={tmp_path / 'run'}"]
    log = tmp_path / "log"
    code = ended(started(script, *arguments, cwd=tmp_path, log=log, twin=True), seconds=90)
    said = log.read_text()
    assert code == 0, said
    steps = [set(re.findall(rf"saved at (\d+) by {rank}", said)) for rank in (0, 1)]
    assert steps[0] == steps[1] and len(steps[0]) > 2, said


@pytest.mark.parametrize(
    ("policy", "after"), [("stop", False), ("rollback", False), ("rollback", True)], ids=str
)
def test_all_processes_hear_of_one(policy, after, corpora, cache, tmp_path):
    """The loss of one of two processes alone, with a gradient of numbers; or its weights after a step."""
    script = tmp_path / "script.py"
    script.write_text((RUINED if after else SCRIPT).format(root=str(ROOT)))
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER, *SMALL]
    ddp = ["strategy=ddp", "trainer.accelerator=cpu", f"on_nonfinite={policy}"]
    folder = Path(tmp_path / "run")
    arguments = [*places, *ddp, f"hydra.run.dir={folder}"]
    code = ended(started(script, *arguments, cwd=tmp_path, log=tmp_path / "log", twin=True), seconds=60)
    said = (tmp_path / "log").read_text()
    if after:
        assert code == 0 and "the weights are not finite after step 4 of law" in said, said
        assert scores(folder)["skipped"] == [0, 2, 0], said  # of the two steps since the checkpoint
        assert all_finite(state(folder).values())
    elif policy == "stop":
        assert code == 1 and "the lm loss is inf at step 3 of law" in said
    else:
        assert code == 0 and scores(folder)["skipped"] == [0, 2, 0], said
