"""How long a run still takes, by what of it is done."""

from types import SimpleNamespace

import pytest

from cpt.trainer.loop import KINDS, ContinualTrainer

NAMES, STEPS = ["base", "law", "food", "art"], {"law": 10, "food": 20, "art": 40}
BASE, LAW = {"score": {"base": 4.0}}, {"score": {"base": 4.0, "law": 8.0}, "learn": {"law": 20.0}}


@pytest.mark.parametrize(
    ("phases", "rows", "phase", "seconds", "steps", "done"),
    [
        # Before a step is made nobody knows; then the first domain stands for the steps of the others.
        ({}, 0, ("score", 0), None, 70, 0),
        (BASE, 1, ("learn", 1), 3 * 4.0, 60, 0),
        # What is done is the measure; food is on its way for the second time: its row is not there.
        (LAW | {"learn": {"law": 20.0, "food": 80.0}}, 2, ("learn", 2), 2 * 6.0 + 2.0 * 40, 0, 10),
        (LAW, 2, ("generate", 2), 2 * 6.0 + 2.0 * 60, 0, 10),
        (LAW | {"endtasks": {"base": 6.0}}, 2, ("endtasks", 1), 2 * 9.0 + 2.0 * 60, 0, 10),
    ],
)
def test_what_is_left_by_what_is_done(phases, rows, phase, seconds, steps, done):
    class Data(list):
        def steps(self, domain):
            return STEPS[domain]

    scores = SimpleNamespace(phases=dict.fromkeys(KINDS, {}) | phases, rows=NAMES[:rows])
    found = ContinualTrainer.phase(SimpleNamespace(data=Data(STEPS), scores=scores), *phase, NAMES)
    assert (found.remaining_s, found.remaining_steps, found.done, found.total) == (seconds, steps, done, 70)
