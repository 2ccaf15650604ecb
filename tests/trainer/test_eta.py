"""How long a run still takes, by what of it is done."""

from types import SimpleNamespace

from cpt.trainer.loop import RunETA

NONE = {kind: {} for kind in ("start", "generate", "learn", "score", "endtasks", "answers", "probes")}
STEPS = {"law": 10, "food": 20, "art": 40}


class Data(list):
    replay_source = None

    @property
    def domains(self):
        return list(self)

    def steps(self, domain):
        return STEPS[domain.name]


def outlook(phases, *, rows=(), endtasks=(), generates=False):
    """Three domains, two texts scored after each and three after the last."""
    tasks = SimpleNamespace(KIND="endtasks", follows=lambda number: number in endtasks)
    data = Data(SimpleNamespace(name=name) for name in STEPS)
    data.replay_source = SimpleNamespace() if generates else None
    return RunETA(
        data,
        SimpleNamespace(wanted=lambda number: "abc"[: 2 + (number == 3)]),
        SimpleNamespace(phases=NONE | phases, rows=list(rows)),
        [tasks] * bool(endtasks),
    )


def told(phase):
    return phase.remaining_s, phase.remaining_steps, tuple(phase.untimed)


def test_before_a_step_is_made_nobody_knows():
    phase = outlook({"start": {"tokenise": 3.0}}).phase("score", 0)
    assert told(phase) == (None, 0, ("learn", "score"))
    assert (phase.name, phase.stage, phase.stages, phase.done, phase.total) == (
        "scoring after base",
        0,
        3,
        0,
        70,
    )


def test_the_first_domain_stands_for_the_steps_of_the_others():
    phase = outlook({"score": {"base": 4.0}}, rows=["base"]).phase("learn", 1)
    assert told(phase) == (2 * (2 + 2 + 3), 60, ())
    assert (phase.name, phase.done, phase.trains) == ("learning law", 0, True)


def test_what_is_done_is_the_measure_of_what_follows():
    phases = {"score": {"base": 4.0, "law": 8.0}, "learn": {"law": 20.0, "food": 80.0}}
    seen = outlook(phases, rows=["base", "law"])
    phase = seen.phase("learn", 2)  # food is on its way for the second time: its row is not there
    assert told(phase) == (3.0 * (2 + 3) + 2.0 * 40, 0, ())
    assert phase.done == 10
    phase = seen.phase("score", 2)
    assert told(phase) == (3.0 * 3 + 2.0 * 40, 0, ()) and phase.done == 30


def test_what_was_never_timed_is_named():
    phases = {"score": {"base": 4.0}, "learn": {"law": 20.0}}
    seen = outlook(phases, rows=["base", "law"], endtasks=(2, 3), generates=True)
    assert told(seen.phase("learn", 2)) == (2.0 * (2 + 3) + 2.0 * 40, 0, ("generate", "endtasks"))
    later = outlook(phases | {"endtasks": {"food": 7.0}}, rows=["base", "law", "food"], endtasks=(2, 3))
    assert told(later.phase("endtasks", 2)) == (2.0 * 3 + 2.0 * 40 + 7.0, 0, ())
    assert told(later.phase("probes", 3)) == (0.0, 0, ())


def test_stages_that_are_learned_are_not_foreseen_again():
    phases = {"score": {"base": 4.0, "law": 4.0}, "learn": {"law": 20.0}}
    phase = outlook(phases, rows=["base", "law", "food"], endtasks=(0, 1, 2, 3)).phase("endtasks", 0)
    assert told(phase) == (2.0 * 3 + 2.0 * 40, 0, ("endtasks",))


def test_the_latest_stages_set_the_pace():
    """The stage that is not committed yet does not."""
    names = [f"d{number}" for number in range(300)]
    took = dict.fromkeys(names[:200], 90.0) | dict.fromkeys(names[200:280], 2.0) | {names[280]: 50.0}
    many = outlook({"learn": took}, rows=["base", *names[:280]])
    many.data[:] = [SimpleNamespace(name=name) for name in names]
    many.data.steps = lambda domain: 1
    phase = many.phase("learn", 281)
    assert (phase.done, phase.total, phase.remaining_s) == (
        280,
        300,
        19 * 2.0,
    ) and "learn" not in phase.untimed
