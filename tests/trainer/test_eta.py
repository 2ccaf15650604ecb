"""How long a run still takes, by what of it is done."""

from types import SimpleNamespace

import pytest

from cpt.trainer.loop import RunETA

NONE = {kind: {} for kind in ("start", "generate", "learn", "score", "endtasks", "answers", "benchmarks")}
STEPS = {"law": 10, "food": 20, "art": 40}


class Data(list):
    replay_source = None

    @property
    def domains(self):
        return list(self)

    def steps(self, domain):
        return STEPS.get(domain.name, 1)


def outlook(phases, rows, *, endtasks=(), generates=False):
    """Three domains, two texts scored after each and three after the last."""
    tasks = SimpleNamespace(KIND="endtasks", follows=lambda number: number in endtasks)
    data = Data(SimpleNamespace(name=name) for name in STEPS)
    data.replay_source = SimpleNamespace() if generates else None
    policy = SimpleNamespace(wanted=lambda number: "abc"[: 2 + (number == 3)])
    scores = SimpleNamespace(phases=NONE | phases, rows=rows.split())
    return RunETA(data, policy, scores, [tasks] * bool(endtasks))


BASE, LAW = {"base": 4.0}, {"law": 20.0}
BOTH = {"score": BASE, "learn": LAW}
TASKS = {"endtasks": (2, 3), "generates": True}
MADE = {"score": {"base": 4.0, "law": 8.0}, "learn": {"law": 20.0, "food": 80.0}}


@pytest.mark.parametrize(
    ("phases", "rows", "how", "phase", "seconds", "steps", "untimed"),
    [
        # Before a step is made nobody knows; then the first domain stands for the steps of the others.
        ({"start": {"tokenise": 3.0}}, "", {}, ("score", 0), None, 0, ["learn", "score"]),
        ({"score": BASE}, "base", {}, ("learn", 1), 2 * (2 + 2 + 3), 60, []),
        # What is done is the measure; food is on its way for the second time: its row is not there.
        (MADE, "base law", {}, ("learn", 2), 3.0 * (2 + 3) + 2.0 * 40, 0, []),
        # What was never timed is named.
        (BOTH, "base law", TASKS, ("learn", 2), 2.0 * (2 + 3) + 2.0 * 40, 0, ["generate", "endtasks"]),
    ],
)
def test_what_is_left_by_what_is_done(phases, rows, how, phase, seconds, steps, untimed):
    found = outlook(phases, rows, **how).phase(*phase)
    assert (found.remaining_s, found.remaining_steps, list(found.untimed)) == (seconds, steps, untimed)
