"""One run folder with a damaged scores.json never takes the other runs' report with it."""

import copy
import json
import random

import pytest

from cpt.evaluation.scores import Scores
from cpt.report import main
from cpt.reporting import figures, run_page
from tests.support.comparing import endtasks, made, saved

WRONG = (None, "x", -1, 1.5, True, [], {}, [[]], [None], {"a": None}, 10**400)


def places(value, at=()):
    """Where something stands within JSON: of a list the first and last entry."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        for place in {0, len(value) - 1}:
            yield from places(value[place], (*at, place))


def changed(data, at, wrong):
    """The same with another value at one place."""
    spoilt = copy.deepcopy(data)
    inner = spoilt
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = wrong
    return spoilt


@pytest.fixture
def no_charts(monkeypatch):
    for name in ("draw_plane", "draw_stages", "draw_heat_maps"):
        monkeypatch.setattr(figures, name, lambda *_, **__: b"")


def full():
    """Scores with everything that scores can have."""
    parts = [{"law": {"base": 1.0}}, *[{"law": {"law": 0.7, "food": 0.3}}] * 3]
    given = made(endtasks=endtasks([[0.5, 0.6, 0.7]] * 4))
    given.parts, given.objective = parts, [1.0, None]
    for metric in given.metrics.values():
        metric["interval"] = {unit: [0.0, 1.0] for unit in ("nats", "perplexity", "bits_per_byte")}
    return given


def test_whatever_is_changed_is_refused_or_reported(tmp_path, no_charts):
    full().save(tmp_path / "scores.json")
    data = json.loads((tmp_path / "scores.json").read_text())
    cases = [(at, wrong) for at in list(places(data))[1:] for wrong in WRONG]
    refused = [case for case in random.Random(0).sample(cases, 300) if not survived(tmp_path, data, *case)]
    assert 200 < len(refused) < 300
    assert main([str(tmp_path / "runs")]) == 0


def survived(top, data, at, wrong):
    """Whether scores with this damage are read; they are then told as any others, and kept as a run."""
    path = top / "scores.json"
    path.write_text(json.dumps(changed(data, at, wrong)))
    try:
        scores = Scores.load(path)
    except ValueError as error:
        assert "\n" not in str(error)
        return False
    run_page.format_scores(scores)
    folder = top / "runs" / str(len(list(top.glob("runs/*"))))
    folder.mkdir(parents=True)
    scores.save(folder / "scores.json")
    return True


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (("run", "order"), None),
        (("run", "variant"), 5),
        (("nll", 0, 0), {}),
        (("tokens", 0), "x"),
        (("seen",), [1]),
        (("memory", 1), None),
        (("parts", 0), None),
        (("parts", 1, "law"), 1.0),
        (("phases", "learn", "law"), "long"),
        (("metrics", "LC"), None),
        (("metrics", "LC", "nats"), "x"),
        (("metrics", "LC", "interval", "nats"), [1.0]),
        (("endtasks", "tasks"), "law"),
        (("endtasks", "classes"), {}),
        (("endtasks", "scores", "macro_f1", 0), [[None]]),
        (("texts", "law"), None),
        (("versions",), []),
        (("seconds",), None),
    ],
)
def test_a_damaged_run_is_one_line_and_the_rest_is_reported(tmp_path, no_charts, capsys, at, wrong):
    saved(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    path = tmp_path / "bad" / "scores.json"
    full().save(path)
    path.write_text(json.dumps(changed(json.loads(path.read_text()), at, wrong)))
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{path}: damaged")
    assert said.err.count("\n") == 1
    assert str(at[0]) in said.err or at[0] == "endtasks"
    markdown = (tmp_path / "comparison.md").read_text()
    assert "| ncl | ncl | tiny |" in markdown
    assert str(path) in markdown
