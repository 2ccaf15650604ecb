"""What opens the gate: numbers small enough for a hand, and a run."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from cpt import gate
from cpt.evaluation.chat_files import LOSSES, StoredLosses, find_chat_file, save_losses
from cpt.gate import judge_run
from cpt.trainer.run_dir import RunDir

COUNTS = np.array([10.0, 30.0, 0.0, 20.0])  # the third document scores nothing
CHANGES = [  # the means after food of law, food and general text; what does not pass
    ((3.01, 4.9, 3.9), {}),
    ((3.03, 4.9, 4.0), {"law": "forgotten"}),
    ((3.0, 4.96, 4.0), {"food": "improved too little"}),
    ((3.0, 4.9, 4.5), {"general": "forgotten"}),
]


def row_of(**means):
    return {name: np.stack([mean * COUNTS, COUNTS]) for name, mean in means.items()}


def compare_rows(before, after, *, gain=0.05, first_row=1, rows=("base", "law", "food"), learned=()):
    names = [*(before | after)]
    nll = [[0.0] * len(names) for _ in rows]
    nll[first_row] = [0.0 if name in before else None for name in names]
    nll[-1] = [0.0 if name in after else None for name in names]
    run = {"order": ["law", "food"]}
    base = {"learned": learned}
    scores = SimpleNamespace(rows=list(rows), domains=names, nll=nll, run=run, base=base)
    changes, unmeasured = judge_run(scores, before, after, start_row=first_row, gain=gain, loss=0.02)
    return {change.text: change for change in changes}, unmeasured


def test_what_the_run_of_init_from_learned_is_old_or_not_measured():
    rows = row_of(law=3.0, food=5.0, sea=2.0), row_of(law=3.0, food=4.9, sea=2.1)
    changes, unmeasured = compare_rows(*rows, learned=["sea", "sky"])
    assert changes["sea"].verdict == "forgotten" and unmeasured == ["sky"]


@pytest.mark.parametrize(("after", "expected_failures"), CHANGES)
def test_new_text_must_gain_and_old_text_may_lose_so_much(after, expected_failures):
    before = row_of(law=3.0, food=5.0, general=4.0)
    texts = ("law", "food", "general")
    changes, unmeasured = compare_rows(before, row_of(**dict(zip(texts, after, strict=True))))
    failed = {name: change.verdict for name, change in changes.items() if change.verdict not in gate.PASSES}
    assert failed == expected_failures and unmeasured == []
    limits = {"food": (True, -0.05), "law": (False, 0.02), "general": (False, 0.02)}
    assert {name: (change.is_new, change.limit) for name, change in changes.items()} == limits
    assert [changes[name].after for name in texts] == pytest.approx(after)
    assert compare_rows(row_of(law=3.0, food=5.0), before)[1] == ["general"]


def test_what_the_documents_do_not_agree_on_is_not_shown():
    before = row_of(law=3.0, food=5.0)
    after = row_of(law=3.0, food=5.0)
    after["food"][0] += [-20.0, +2.0, 0.0, 1.0]
    food = compare_rows(before, after)[0]["food"]
    assert food.verdict == "inconclusive" and "inconclusive" not in gate.PASSES
    assert food.difference == pytest.approx(-17 / 60) and food.low < -0.3 and food.high > -0.05
    for count in (1, 2):  # documents, which are too few
        few_documents = [np.array([[10.0 * mean] * count, [10.0] * count]) for mean in (5, 3)]
        changes, _ = compare_rows(*(dict.fromkeys(("law", "food"), loss_sums) for loss_sums in few_documents))
        assert {loss_sums.verdict for loss_sums in changes.values()} == {"inconclusive"}
    # Documents are drawn alike for both rows: they differ much, and by the same in both.
    before = row_of(law=3.0, food=5.0)
    after = row_of(law=3.0, food=4.0)
    for loss_sums in (before, after):
        loss_sums["food"][0] += [300.0, -100.0, 0.0, 9.0]
    food = compare_rows(before, after, gain=0.9)[0]["food"]
    assert (food.low, food.high) == pytest.approx((-1.0, -1.0)) and food.verdict == "improved"


@pytest.mark.parametrize(
    ("losses_by_row", "verdicts"),
    [
        ([[20.0, 30.0, 30.0], [20.0, 30.0, math.nan]], ["forgotten"]),
        ([[20.0, 30.0, 30.0], [20.0, 30.0, math.inf]], ["forgotten"]),
        ([[20.0, 30.0, math.nan], [20.0, 30.0, 30.0]], ["inconclusive"]),
        ([[20.0, 30.0, 30.0], None], []),
    ],
)
def test_chats_whose_loss_is_not_finite_are_no_chats_that_were_not_measured(
    losses_by_row, verdicts, tmp_path
):
    means = []
    for row, nats in enumerate(losses_by_row):
        is_finite = nats is not None and np.isfinite(nats).all()
        means.append(float(np.mean(nats)) if is_finite else None)
        if nats is not None:
            losses = StoredLosses(
                digest="1", seconds=0.0, chats=["a", "b", "c"], losses=np.array([nats, [10.0] * 3])
            )
            path = find_chat_file(tmp_path, ["base", "law"], row, LOSSES)
            path.parent.mkdir(parents=True)
            save_losses(path, losses)
    rises = [None, None if losses_by_row[1] is None else [None] * 3]
    scores = SimpleNamespace(rows=["base", "law"], chats={"nll": means, "rise": rises})
    changes = gate.judge_chats(RunDir(tmp_path), scores, start_row=0, limit=0.02)
    assert [change.verdict for change in changes] == verdicts


def test_since_the_base_all_learned_domains_count_as_new():
    before = row_of(law=5.0, food=5.0, space=5.0, general=4.0)
    after = row_of(law=4.0, food=4.0, space=9.0, general=4.0)  # nothing is asked of space, not learned
    for rows in (("base", "law", "food"), ("base", "joint")):
        changes, _ = compare_rows(before, after, first_row=0, rows=rows)
        assert {name: change.is_new for name, change in changes.items()} == {
            "law": True,
            "food": True,
            "general": False,
        }


@pytest.mark.parametrize(
    ("text", "high", "expected"),
    [
        ("law", 0.03, [gate.MORE_TEXT]),
        ("law", math.nan, [gate.MORE_TEXT]),  # of too few documents
        ("base's answers", 0.03, [gate.MORE_CHATS]),
        ("law", 0.02, []),
    ],
)
def test_an_inconclusive_interval_is_shown_with_what_narrows_it(text, high, expected, capsys):
    change = gate.BoundedChange(
        text=text, before=3.0, after=3.0, low=0.01, high=high, is_new=False, limit=0.02
    )
    judgement = gate.Judgement(
        last_row="food",
        start_row="base",
        changes=[change],
        unmeasured=[],
        damage=[],
        broken=[],
        max_broken=0,
    )
    gate.print_table(judgement)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in (gate.MORE_TEXT, gate.MORE_CHATS)] == expected


def test_the_exit_code_is_the_answer_and_damage_or_a_missing_text_closes_it(small, start, tmp_path, capsys):
    run = tmp_path / "run"
    start(small("order=[law,food]", "optim.lr=0.01"), run)
    capsys.readouterr()
    assert gate.main([str(run), "--min-gain", "-9", "--max-forgetting", "9"]) == 0
    output = capsys.readouterr().out
    assert "after food, compared with law" in output and output.splitlines()[-1].startswith("pass: ")
    assert gate.main([str(run), "--min-gain", "9", "--max-forgetting", "9"]) == 1
    assert "fail: food improved too little" in capsys.readouterr().out

    gate.main([str(run), "--json", "--since", "base"])  # for programs: the numbers of the matrix
    verdict = json.loads(capsys.readouterr().out)
    scores = json.loads((run / "scores.json").read_text())
    assert {change["text"] for change in verdict["changes"]} == {"law", "food", "general"}
    for change in verdict["changes"]:
        column = scores["domains"].index(change["text"])
        ends = [scores["nll"][row][column] for row in (0, -1)]
        assert [change["before"], change["after"]] == pytest.approx(ends)
        assert change["low"] <= change["after"] - change["before"] <= change["high"]

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
