"""What is said beside the figures: the command, what is not known, the page."""

import shlex

import pytest

from cpt.contrib.advise.advice import Subject, find_unknown, make_blocks, say_command
from cpt.contrib.advise.candidates import Model, Setting
from cpt.contrib.advise.results import Recommendation
from cpt.contrib.advise.runs import SweepPlan

TINY = Model(("model=tiny_gpt2",), ("model=tiny_gpt2",))
LARGE = Model(("model=tiny_gpt2",), ("model=checkpoint", "model.checkpoint=big"), 24, "big is big")
APART, ALIKE = (-0.2, -0.1), (-0.2, 0.1)


def subject(model=TINY, *, epoch=400.0, left_out=0, given=()):
    return Subject(("domains=texts", "domains.root='my texts'"), given, model, SETTING, epoch, 512, left_out)


SETTING = Setting(rate=1e-4, blocks=24, domains=3)
PLAN = SweepPlan(("ncl", "kd"), 100, 1, False, 60.0)


def unknown(about, *, worth=APART, seeds=1, many=False):
    bounds = {"kd": {"worth": (0, 0)}, "ncl": {"worth": worth}}
    return find_unknown(bounds, Recommendation("kd", ""), about, PLAN, seeds=seeds, many=many)


def test_the_command_is_of_the_model_that_is_meant_and_one_line_for_a_shell():
    given = ("model.length=32", "trainer.batch_size=4")
    small = say_command(Recommendation("lr-1/4", ""), subject(given=given))
    assert shlex.split(small) == [
        *("python", "run.py", "domains=texts", "domains.root='my texts'", "model=tiny_gpt2"),
        *("model.lr=2.5e-05", *given, "trainer.steps=null", "trainer.epochs=1"),
    ]
    assert "\n" not in small
    large = say_command(Recommendation("freeze", ""), subject(LARGE, given=given))
    assert "model.checkpoint=big freeze.layers=12 trainer.batch_size=4 trainer.steps=null" in large


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (unknown(subject(LARGE)), "big is big"),
        (unknown(subject(), worth=ALIKE), "not told apart from kd by these runs: ncl"),
        (unknown(subject(), worth=(float("nan"),) * 2), "not told apart from kd by these runs: ncl"),
        (unknown(subject()), "one seed was run, intervals are over documents alone"),
        (unknown(subject(), seeds=3), "how much seeds differ is known from 3 of them"),
        (unknown(subject()), "4.0 times what was learned here; one length was run, so nothing is said of it"),
        (unknown(subject(), many=True), "over the logarithm of the tokens, extrapolated"),
        (unknown(subject(left_out=8)), "8 more domains, which were not tried"),
    ],
)
def test_what_the_runs_cannot_say_is_said(lines, said):
    assert sum(said in line for line in lines) == 1, lines


def test_what_they_can_say_is_not():
    lines = unknown(subject(epoch=101.0), seeds=5, many=True)
    assert lines == ["settings between the arms, other orders of the domains, end tasks"]


def arm(name, learned, forgotten, **more):
    around = {"learned": [learned - 0.1, learned + 0.1], "forgotten": [forgotten - 0.1, forgotten + 0.1]}
    told = {
        "arm": name,
        "meaning": name,
        "learned": learned,
        "forgotten": forgotten,
        "FG": None,
        "drift": 0.1,
    }
    lengths = [{"steps": 100, "learned": learned, "forgotten": forgotten}]
    return told | {"on_front": True, "intervals": {**around, "worth": [0.0, 0.0]} | more, "lengths": lengths}


def test_the_page_begins_with_the_recommendation_and_its_picture():
    advice = {
        "wish": {"bound": 0.3, "weight": None},
        "measured": {"steps": 100, "tokens": 51200, "seeds": [0], "lengths": [100], "epoch_steps": 400},
        "recommended": {"arm": "kd", "why": "it is best", "command": "python run.py"},
        "arms": [arm("ncl", 1.0, 0.5), arm("kd", 0.8, 0.2, learned_at=[1.0, 1.2], forgotten_at=[None, None])],
        "unknown": ["much"],
    }
    first, command, table, last = make_blocks(advice)
    assert first.title == "Recommended: kd" and first.picture and first.lines[0] == "kd: it is best."
    assert "100 steps (51,200 tokens) a domain, 1 seed: learned 0.8000 [0.7000, 0.9000]" in first.lines[1]
    assert first.lines[2].endswith("extrapolated: learned [1.0000, 1.2000], forgotten [–] nats.")
    assert command.code == "python run.py" and last.lines == ["· much"]
    assert [row[0] for row in table.cells] == ["ncl", "kd"] and table.cells[0][5] == "–"
