"""Runs that are held to a budget of drift."""

import csv
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.contrib.drift_budget import controller
from cpt.contrib.drift_budget.controller import DriftController
from cpt.contrib.drift_budget.options import DriftBudget
from tests.support.killing import KilledError, Killer
from tests.support.making import DROPOUT

THREE = ["order=[law,food,space]", "trainer.steps=12", "monitor.every=2", "monitor.tokens=400"]
STEEP = ["optim.lr=0.03", "schedule=constant", "schedule.warmup=0"]
HELD = ["budget.general=1.2", "budget.past=0.3"]


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def weights(folder):
    return torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)


def rises(scores):
    """Of the last row: of the general text since the base, of past domains in the mean since their own."""
    nll, columns, rows = np.array(scores["nll"]), scores["domains"], scores["rows"]
    past = [nll[-1, columns.index(name)] - nll[rows.index(name), columns.index(name)] for name in rows[1:-1]]
    general = columns.index("general")
    return nll[-1, general] - nll[0, general], np.mean(past)


EVERY = ["method=ncl", *THREE, *STEEP, "monitor.tokens=1000000", "domains.score_on=valid"]
EVERY += ["logger=csv", "trainer.log_every_n_steps=1"]


def test_without_a_budget_it_drifts(small, start, tmp_path):
    start(small(*EVERY), tmp_path)
    free = scores_of(tmp_path)
    column = free["domains"].index("general")
    assert free["nll"][1][column] - free["nll"][0][column] > 0.4 and rises(free)[1] > 0.3
    assert "Budget of drift" not in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("steer", ["line", "rate"])
def test_it_is_held_where_it_would_not_have_been(steer, small, start, tmp_path, caplog):
    caplog.set_level("INFO")
    start(small(*EVERY, *HELD, f"budget.steer={steer}"), tmp_path / "held")
    held = scores_of(tmp_path / "held")
    column = held["domains"].index("general")
    assert rises(held)[0] <= 1.2 and rises(held)[1] <= 0.3
    assert "Budget of drift" in (tmp_path / "held" / "report.md").read_text()
    for number, (stage, seen) in enumerate(held["monitor"].items(), start=1):
        budget, kept = seen["budget"], seen["steps"].index(seen["budget"]["kept"])
        assert budget["allowed"]["general"] == pytest.approx(0.4 * number)
        assert budget["drift"]["general"][kept][1] <= 0.4 * number
        drift = held["nll"][held["rows"].index(stage)][column] - held["nll"][0][column]
        assert drift == pytest.approx(budget["drift"]["general"][kept][0], abs=1e-4)  # weights went back
        assert all(f"budget of {stage}, {act}" in caplog.text for act in budget["acts"])
    assert "past" not in held["monitor"]["law"]["budget"]["drift"]
    assert rises(held)[1] == pytest.approx(budget["drift"]["past"][kept][0], abs=1e-4)
    assert any("back to" in act for act in budget["acts"])
    assert (held["rates"][1][-1] < held["rates"][1][0]) == (steer == "rate")
    # The rate of every step is that share of the schedule's.
    with (tmp_path / "held" / "metrics.csv").open() as file:
        told = list(csv.DictReader(file))
    assert {"budget/pace/law", "budget/general/law"} <= {row["name"] for row in told}
    rates = {int(row["step"]): float(row["value"]) for row in told if row["name"] == "train/lr/law"}
    seen = held["monitor"]["law"]
    for at, pace in zip(seen["steps"][:-1], seen["budget"]["pace"][:-1], strict=True):
        assert rates[at] == pytest.approx(0.03 * pace) or at not in rates
    assert len(rates) > 5 and (min(rates.values()) < 0.0299) == (steer == "rate")


def test_by_line_it_is_left_between_where_the_stage_began_and_where_it_got(small, start, tmp_path):
    """With one look, at the end, it is on the line between the base and what is learned without a budget."""
    given = ["order=[law]", "trainer.steps=6", "monitor.every=6", "monitor.tokens=1000000", *STEEP]
    start(small("method=ncl", *given), tmp_path / "free")
    left = {}  # of the way between them, by the share that is kept
    for bound in (0.2, 0.1):
        start(small("method=ncl", *given, f"budget.general={bound}"), tmp_path / f"{bound}")
        seen = scores_of(tmp_path / f"{bound}")["monitor"]["law"]
        way, (rise, upper) = seen["budget"]["ways"][-1], seen["budget"]["drift"]["general"][-1]
        assert 0 < way < 0.9 and 0.95 * bound <= upper <= bound
        # what is told of a look is of the weights that are kept
        assert seen["nll"]["general"][-1] - seen["nll"]["general"][0] == pytest.approx(rise, abs=1e-6)
        left[way] = weights(tmp_path / f"{bound}")
    (one, first), (other, second) = left.items()
    for name, free in weights(tmp_path / "free").items():
        moved = (free - first[name]) / (1 - one)
        assert torch.allclose(moved, (free - second[name]) / (1 - other), atol=1e-5)
    assert one > other and moved.abs().max() > 1e-3


class OneWeight(torch.nn.Linear):
    """Its one weight is by how much the general text has risen."""

    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.move(0.0)

    def move(self, value):
        self.weight.data.fill_(value)

    def set_lr_scale(self, pace):
        assert pace == 1

    def losses(self):
        return {"general": torch.stack([self.weight.detach().view(1) * 10.0, torch.full((1,), 10.0)])}


def test_the_way_is_counted_from_where_the_stage_began(monkeypatch):
    """Whatever looks within the budget come between; and what was tried last is not what is kept."""
    place = SimpleNamespace(load_looks=lambda number: {"general": np.array([[-2.0], [10.0]])})
    options = DriftBudget(general=1.0, past=None, steer="line")
    steering = DriftController(options, place, 1, stages=1, own=())
    model, trainer = OneWeight(), SimpleNamespace(global_step=0, datamodule=SimpleNamespace(domain=place))
    place.name = "law"
    for step, weight in enumerate([0.0, 0.5, 2.0]):
        trainer.global_step = step
        model.move(weight)
        losses = steering.see(trainer, model, model.losses(), model.losses)
    share = (1 - 0.02 * 0.8 - 0.2) / 2  # a fifth was spent before the stage
    assert model.weight.item() == pytest.approx(2 * share)
    assert steering.seen.ways == pytest.approx([1, 1, share])
    assert losses["general"][0].item() == pytest.approx(20 * share)
    model.move(0.9)
    monkeypatch.setattr(controller, "TRIALS", 2)
    monkeypatch.setattr(
        model, "losses", lambda: {"general": torch.tensor([[40.0 * (model.weight.item() > 0.25)], [10.0]])}
    )
    steering.see(trainer, model, model.losses(), model.losses)
    assert model.weight.item() == pytest.approx(0.9 * share / 2)  # the second is over


def test_a_budget_that_is_never_touched_changes_no_bit_and_is_part_of_what_a_run_is(small, start, tmp_path):
    """And where nothing is said of looks, there are a few."""
    every = ["method=ewc", "order=[law,food]", "trainer.steps=12", *DROPOUT, "monitor.past=0"]
    start(small(*every), tmp_path / "free")
    start(small(*every, "budget.general=9"), tmp_path / "held")
    assert scores_of(tmp_path / "held")["monitor"]["law"]["steps"] == [0, 3, 6, 9, 12]
    one, other = weights(tmp_path / "free"), weights(tmp_path / "held")
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    with pytest.raises(ValueError, match="budget.general"):
        start(small(*every, "budget.general=8"), tmp_path / "held")


def test_spent_before_a_stage_it_learns_nothing(small, start, tmp_path, monkeypatch):
    """One step is made, at no rate; the stages after it are learned."""
    monkeypatch.setattr(
        DriftBudget, "allow", lambda self, number, stages: {"general": (9.0, 1e-6, 9.0)[number - 1]}
    )
    start(small("method=ncl", *THREE, *STEEP, "budget.general=0.5"), tmp_path)
    found = scores_of(tmp_path)
    assert "before its first step" in found["monitor"]["food"]["ended"]
    assert found["nll"][1] == pytest.approx(found["nll"][2], abs=1e-6) != found["nll"][3]
    assert found["seen"][2] < found["seen"][1] / 2


@pytest.mark.parametrize(("method", "steer"), [("ewc", "line"), ("lora", "rate")])
def test_killed_it_ends_with_the_same_bits(method, steer, small, start, killing, tmp_path):
    given = [f"method={method}", *THREE, *STEEP, *DROPOUT, "budget.general=0.05", "budget.past=0.2"]
    given += [f"budget.steer={steer}", "trainer.checkpoint_every=3", "order=[law,food]"]
    start(small(*given), tmp_path / "whole")
    whole = scores_of(tmp_path / "whole")
    last = whole["monitor"]["food"]["steps"][-1]
    for step in sorted({1, min(5, last), last}):
        killing(Killer(step=step, domain="food"))
        with pytest.raises(KilledError):
            start(small(*given), tmp_path / "killed")
    killing(None)
    shutil.copytree(tmp_path / "killed", tmp_path / "damaged")
    start(small(*given), tmp_path / "killed")
    killed = scores_of(tmp_path / "killed")
    assert all(whole[name] == killed[name] for name in ("nll", "monitor", "seen", "rates", "metrics"))
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert any(whole["monitor"][stage]["budget"]["acts"] for stage in ("law", "food"))
    path = tmp_path / "damaged" / "looks" / "001.npz"  # what drift is counted from
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="001.npz is truncated or damaged"):
        start(small(*given), tmp_path / "damaged")
