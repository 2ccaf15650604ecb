"""Two methods on the same examples of the tasks that both were asked."""

import json

import numpy as np
import pytest
from scipy.stats import binomtest

from cpt.evaluation.predictions import answers_in
from cpt.report import main
from cpt.reporting.comparison.answered import Reader, on_answers
from cpt.reporting.comparison.notes import notes
from cpt.reporting.comparison.runs import measure_runs
from cpt.reporting.comparison.tables import tabulate_answers
from tests.support.answering import answers, kept, opened, ranked
from tests.support.comparing import DOMAINS, run, saved, section
from tests.support.probing import probes

ROWS = ["base", *DOMAINS]
DRAW = np.random.default_rng(0)
NCL, DAS = (DRAW.random((2, 60)) < share for share in (0.4, 0.6))


def asked(folder, last, *, ids=None, **given):
    """A run whose last model answers so; the others do not count."""
    told = kept(folder, {task: [each] * len(ROWS) for task, each in last.items()}, rows=ROWS, ids=ids)
    return run(folder, answers=told, **given)


def both(tmp_path, **tasks):
    """A run of ncl and one of das, each with its answers to the tasks."""
    return section(
        [
            asked(tmp_path / method, {task: each[place] for task, each in tasks.items()}, method=method)
            for place, method in enumerate(("ncl", "das"))
        ]
    )


def test_a_task_and_all_tasks_by_hand(tmp_path):
    found = on_answers(
        both(
            tmp_path,
            law=[ranked(NCL[0]), ranked(DAS[0])],
            food=[ranked(NCL[1][:20]), ranked(DAS[1][:20])],
        )
    )
    law, food = (found.by_task[task]["das"] for task in ("law", "food"))
    assert law.difference.difference.n == 60 and food.difference.difference.n == 20
    only, other = (DAS[0] & ~NCL[0]).sum(), (NCL[0] & ~DAS[0]).sum()
    assert (law.both, law.group, law.baseline) == ((DAS[0] & NCL[0]).sum(), only, other)
    assert law.difference.difference.mean == pytest.approx((only - other) / 60)
    assert law.difference.difference.p == pytest.approx(binomtest(int(only), int(only + other)).pvalue)
    whole = found.whole["das"]
    means = [each.difference.difference.mean for each in (law, food)]
    assert whole.difference.difference.mean == pytest.approx(np.mean(means)), "tasks weigh alike"
    assert whole.difference.difference.n == 80 and whole.group == law.group + food.group
    low, high = whole.difference.difference[1:3]
    spread = [np.std(DAS[0] * 1.0 - NCL[0]) ** 2 / 60, np.std(DAS[1][:20] * 1.0 - NCL[1][:20]) ** 2 / 20]
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(sum(spread)) / 2, rel=0.1)
    assert found.notes == found.failed == []


def test_seeds_are_averaged_by_example(tmp_path):
    runs = [
        asked(tmp_path / f"{method}-{seed}", {"law": ranked(right[seed])}, method=method, seed=seed)
        for method, right in (("ncl", NCL), ("das", DAS))
        for seed in (0, 1)
    ]
    line = on_answers(section(runs)).whole["das"]
    assert line.difference.difference.n == 60, "two seeds are no more examples"
    assert line.difference.difference.mean == pytest.approx((DAS * 1.0 - NCL).mean())
    assert line.group == (DAS & ~NCL).sum() and line.both == (DAS & NCL).sum()
    alone = on_answers(section([runs[0], *runs[2:]])).whole["das"]
    assert alone.group == (DAS[0] & ~NCL[0]).sum(), "only the seed that both have"


def test_open_answers_are_compared_by_what_they_are_known_by(tmp_path):
    references = ["a b c d"] * 30
    written = [["a b"] * 30, ["a b c"] * 20 + ["a"] * 5 + ["a b"] * 5]
    found = on_answers(both(tmp_path, law=[opened(each, references) for each in written])).by_task["law"]
    line = found["das"]
    rouge = {count: 2 * count / (4 + count) for count in (1, 2, 3)}
    expected = (20 * (rouge[3] - rouge[2]) + 5 * (rouge[1] - rouge[2])) / 30
    assert line.difference.difference.mean == pytest.approx(expected, abs=1e-6)
    assert (line.both, line.group, line.baseline) == (5, 20, 5) and line.measures == ["rouge_l"]
    assert line.difference.difference.p < 0.05


def test_examples_are_joined_by_id_and_what_is_left_out_is_told(tmp_path):
    ids = [f"e{number}" for number in range(60)]
    runs = [
        asked(tmp_path / "ncl", {"law": ranked(NCL[0][:40])}, ids=ids[:40]),
        asked(tmp_path / "das", {"law": ranked(DAS[0])}, ids=ids, method="das"),
    ]
    found = on_answers(section(runs))
    assert found.whole["das"].difference.difference.n == 40
    assert found.whole["das"].group == (DAS[0] & ~NCL[0])[:40].sum()
    assert found.notes == [
        "das: left out are 20 examples of 1 task, which not all runs of it and of its baseline were asked."
    ]


def test_files_that_are_gone_or_damaged_are_a_line_each_and_the_rest_goes_on(tmp_path):
    tasks = {task: [ranked(NCL[0]), ranked(DAS[0])] for task in DOMAINS}
    compared = both(tmp_path, **tasks)
    answers_in(tmp_path / "das", ROWS, 3, "law").unlink()
    damaged = answers_in(tmp_path / "ncl", ROWS, 3, "food")
    damaged.write_text("damaged")
    found = on_answers(compared)
    assert list(found.by_task) == ["space"] and found.whole["das"].measures == ["accuracy_ranked"]
    assert found.notes == [f"{tmp_path / 'das'} has no files of the answers to law."]
    assert len(found.failed) == 1 and found.failed[0].startswith(f"{damaged}: damaged predictions")


def test_runs_that_lack_the_same_files_are_told_in_one_line():
    reader = Reader(gone={"a": ["law"], "b": ["law", "food"], "c": ["law"], "d": ["law"]})
    assert reader.notes == [
        "a has no files of the answers to law, nor have 2 more runs.",
        "b has no files of the answers to law, food.",
    ]


def test_tasks_known_by_different_measures_are_not_compared(tmp_path):
    compared = both(tmp_path, law=[ranked(NCL[0]), opened(["a"] * 60, ["a"] * 60)])
    found = on_answers(compared)
    assert found.whole == {} and found.failed == []
    assert found.notes == ["law is left out, as accuracy_ranked and rouge_l are different measures."]
    assert "AP and what goes with it compare different measures: law (accuracy_ranked, rouge_l)." in notes(
        compared
    )
    blocks, _ = tabulate_answers(compared)
    assert [block.cells for block in blocks] == [[]] and blocks[0].lines == found.notes


def test_of_some_domains_the_metrics_are_of_these_tasks(tmp_path):
    """Of law and food alone, both are forgotten since their own rows."""
    values = {"law": [0.2, 0.9, 0.8, 0.5], "food": [0.3, 0.3, 0.7, 0.6], "space": [0.1, 0.1, 0.1, 0.9]}
    (only,) = measure_runs([run(answers=answers(values, rows=ROWS))], domains=["law", "food"])
    found = {key: value for key, value in only.values.items() if key.startswith("answers/")}
    assert found == pytest.approx({"answers/AP": 0.55, "answers/LA": 0.8, "answers/BWT": -0.25})
    (last,) = measure_runs([run(answers=answers(values, rows=ROWS))], domains=["space"])
    found = {key: value for key, value in last.values.items() if key.startswith("answers/")}
    assert found == pytest.approx({"answers/AP": 0.9, "answers/LA": 0.9}), "the last cannot be forgotten"


def test_page_and_json_have_them(tmp_path, capsys):
    for method, right in (("ncl", NCL), ("das", DAS)):
        folder = tmp_path / method
        given = kept(folder / "kept", {task: [ranked(right[0])] * 4 for task in DOMAINS}, rows=ROWS)
        value = 0.5 + 0.25 * (method == "das")
        saved(folder / "run", method=method, answers=given, probes=probes({"a": [0.5, None, None, value]}))
        (folder / "kept" / "answers").rename(folder / "run" / "answers")
    assert main([str(tmp_path), "--domains", "law,food", "--export", "json,latex"]) == 0
    assert "AP (%)" in capsys.readouterr().out and r"AP (\%)" in (tmp_path / "comparison.tex").read_text()
    text = (tmp_path / "comparison.md").read_text()
    table = text.split("## Answers, over examples")[1].split("\n\n## ")[0]
    assert "| das | ncl | 2 | 120 |" in table
    each = text.split("## Answers to each task, over examples")[1].split("\n\n## ")[0]
    assert "| law | das | ncl | accuracy of the likeliest choice | 60 |" in each and "| space" not in each
    assert "| das | ncl | 1 | 0.2500 | 1 | 1 |" in text.split("## Probes: differences from ncl")[1]
    (told,) = json.loads((tmp_path / "comparison.json").read_text())["sections"]
    found = told["differences_on_answers"]["das"]
    assert found["n"] == 120 and list(found["tasks"]) == ["law", "food"]
    assert found["tasks"]["law"]["measure"] == "accuracy_ranked"
    assert told["differences"]["probe/a (acc, 0 shots, version 1.0)"]["das"]["mean"] == 0.25
