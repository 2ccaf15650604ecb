"""Losses far above their running median are told once per stage, and stand in the report."""

import json

import pytest

from cpt.methods.base import ContinualMethod
from cpt.methods.ncl import NCL
from cpt.optim.nan_guard import DEVIATIONS, ENOUGH, TIMES, Spikes
from tests.methods.test_contract import told
from tests.support.killing import KilledError, Killer


def seen(losses, spikes=None):
    spikes = spikes or Spikes()
    return [step for step, loss in enumerate(losses) if spikes.see(step, loss)], spikes.noted


@pytest.mark.parametrize(
    ("calm", "loss", "spike"),
    [
        ([4.0] * ENOUGH, TIMES * 4.0 + 0.1, True),
        ([4.0] * ENOUGH, TIMES * 4.0 - 0.1, False),
        ([4.0] * (ENOUGH - 1), 400.0, False),  # too few to judge by
        ([2.0, 3.0, 4.0] * ENOUGH, 3.0 + DEVIATIONS - 0.1, False),  # as uneven as that
        ([2.0, 3.0, 4.0] * ENOUGH, 3.0 + DEVIATIONS + 0.1, True),
        ([9.0] * 60 + [1.0] * 60, 2.0, True),  # of the last steps, not of all
    ],
)
def test_a_loss_far_above_its_running_median_is_a_spike(calm, loss, spike):
    assert seen([*calm, loss])[0] == [len(calm)] * spike


def test_a_stage_tells_of_its_first_one_and_counts_the_others():
    losses = [4.0] * 30 + [9.0, 4.0, 10.0, 4.0]
    assert seen(losses) == ([30], [2, 30, 9.0, 4.0])
    one, other = Spikes(), Spikes()
    seen(losses[:31], one)
    other.load(json.loads(json.dumps(one.state())))
    assert seen(losses[31:], other)[0] == [] and other.noted == [2, 30, 9.0, 4.0]


def test_a_killed_run_tells_the_same_and_the_report_has_it(small, start, killing, tmp_path, monkeypatch):
    losses = ContinualMethod.losses

    def jumping(self, batch):
        here = self.trainer.global_step in (21, 24) and self.domain.name == "law"
        return {name: term + 50.0 * here for name, term in losses(self, batch).items()}

    monkeypatch.setattr(NCL, "losses", jumping)
    cfg = small("order=[law,food]", "trainer.steps=26")
    start(cfg, tmp_path / "whole")
    killing(Killer(step=23, domain="law"))
    with pytest.raises(KilledError):
        start(cfg, tmp_path / "killed")
    killing(None)
    start(cfg, tmp_path / "killed")
    both = [told(tmp_path / name)["spikes"] for name in ("whole", "killed")]
    assert both[0] == both[1] and both[0][1][:2] == [2, 21] and not both[0][0] and not both[0][2]
    assert "law: 2, first at step 21, 5" in (tmp_path / "killed" / "report.md").read_text()
