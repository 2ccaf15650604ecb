"""What opens the gate: numbers small enough for a hand, and a run."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from cpt import gate
from cpt.gate import judge_run

COUNTS = np.array([10.0, 30.0, 0.0, 20.0])  # the third document scores nothing
CHANGES = [  # the means after food of law, food and general text; what does not pass
    ((3.01, 4.9, 3.9), {}),
    ((3.03, 4.9, 4.0), {"law": "forgotten"}),
    ((3.0, 4.96, 4.0), {"food": "improved too little"}),
    ((3.0, 4.9, 4.5), {"general": "forgotten"}),
]


def row_of(**means):
    return {name: np.stack([mean * COUNTS, COUNTS]) for name, mean in means.items()}


def compared(before, after, *, gain=0.05, since=1, rows=("base", "law", "food"), learned=()):
    names = [*(before | after)]
    nll = [[0.0] * len(names) for _ in rows]
    nll[since], nll[-1] = ([0.0 if name in row else None for name in names] for row in (before, after))
    about = {"run": {"order": ["law", "food"]}, "base": {"learned": learned}}
    scores = SimpleNamespace(rows=list(rows), domains=names, nll=nll, **about)
    changes, unmeasured = judge_run(scores, before, after, since=since, gain=gain, loss=0.02)
    return {each.text: each for each in changes}, unmeasured


def test_what_the_run_of_init_from_learned_is_old_or_not_measured():
    rows = row_of(law=3.0, food=5.0, sea=2.0), row_of(law=3.0, food=4.9, sea=2.1)
    found, unmeasured = compared(*rows, learned=["sea", "sky"])
    assert found["sea"].verdict == "forgotten" and unmeasured == ["sky"]


@pytest.mark.parametrize(("after", "told"), CHANGES)
def test_new_text_must_gain_and_old_text_may_lose_so_much(after, told):
    before, texts = row_of(law=3.0, food=5.0, general=4.0), ("law", "food", "general")
    found, unmeasured = compared(before, row_of(**dict(zip(texts, after, strict=True))))
    failed = {name: each.verdict for name, each in found.items() if each.verdict not in gate.PASSES}
    assert failed == told and unmeasured == []
    limits = {"food": (True, -0.05), "law": (False, 0.02), "general": (False, 0.02)}
    assert {name: (each.new, each.most) for name, each in found.items()} == limits
    assert [found[name].after for name in texts] == pytest.approx(after)
    assert compared(row_of(law=3.0, food=5.0), before)[1] == ["general"]


def test_what_the_documents_do_not_agree_on_is_not_shown():
    before, after = row_of(law=3.0, food=5.0), row_of(law=3.0, food=5.0)
    after["food"][0] += [-20.0, +2.0, 0.0, 1.0]
    food = compared(before, after)[0]["food"]
    assert food.verdict == "inconclusive" and "inconclusive" not in gate.PASSES
    assert food.difference == pytest.approx(-17 / 60) and food.low < -0.3 and food.high > -0.05
    for count in (1, 2):  # documents, which are too few
        few = [np.array([[10.0 * mean] * count, [10.0] * count]) for mean in (5, 3)]
        found, _ = compared(*(dict.fromkeys(("law", "food"), each) for each in few))
        assert {each.verdict for each in found.values()} == {"inconclusive"}
    # Documents are drawn alike for both rows: they differ much, and by the same in both.
    before, after = row_of(law=3.0, food=5.0), row_of(law=3.0, food=4.0)
    for each in (before, after):
        each["food"][0] += [300.0, -100.0, 0.0, 9.0]
    food = compared(before, after, gain=0.9)[0]["food"]
    assert (food.low, food.high) == pytest.approx((-1.0, -1.0)) and food.verdict == "improved"


def test_since_the_base_all_that_was_learned_is_new():
    before = row_of(law=5.0, food=5.0, space=5.0, general=4.0)
    after = row_of(law=4.0, food=4.0, space=9.0, general=4.0)  # nothing is asked of space, not learned
    for rows in (("base", "law", "food"), ("base", "joint")):
        found, _ = compared(before, after, since=0, rows=rows)
        assert {name: each.new for name, each in found.items()} == {
            "law": True,
            "food": True,
            "general": False,
        }


def test_the_exit_code_is_the_answer_and_damage_or_a_missing_text_closes_it(small, start, tmp_path, capsys):
    run = tmp_path / "run"
    start(small("order=[law,food]", "optim.lr=0.01"), run)
    capsys.readouterr()
    assert gate.main([str(run), "--min-gain", "-9", "--max-forgetting", "9"]) == 0
    told = capsys.readouterr().out
    assert "after food, compared with law" in told and told.splitlines()[-1].startswith("pass: ")
    assert gate.main([str(run), "--min-gain", "9", "--max-forgetting", "9"]) == 1
    assert "fail: food improved too little" in capsys.readouterr().out
    gate.main([str(run), "--json", "--since", "base"])  # for programs: the numbers of the matrix
    found, scores = json.loads(capsys.readouterr().out), json.loads((run / "scores.json").read_text())
    assert {each["text"] for each in found["changes"]} == {"law", "food", "general"}
    for each in found["changes"]:
        place = scores["domains"].index(each["text"])
        ends = [scores["nll"][row][place] for row in (0, -1)]
        assert [each["before"], each["after"]] == pytest.approx(ends)
        assert each["low"] <= each["after"] - each["before"] <= each["high"]
    scores["nll"][-1][scores["domains"].index("general")] = None
    (run / "scores.json").write_text(json.dumps(scores))
    assert gate.main([str(run), "--min-gain", "-9", "--max-forgetting", "9"]) == 2
    assert "inconclusive: general not measured" in capsys.readouterr().out
    path = run / "model" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert gate.main([str(run), "--min-gain", "-9", "--max-forgetting", "9"]) == 1
    assert "fail: model/model.safetensors differs from its checksum" in capsys.readouterr().out
    np.savez(run / "documents" / "002.npz", other=np.ones((2, 3)))
    with pytest.raises(SystemExit, match="2"):
        gate.main([str(run)])
    assert "/documents are not those of scores.json (law)" in capsys.readouterr().err
