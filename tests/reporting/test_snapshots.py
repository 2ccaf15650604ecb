"""The report of a run that has everything, and a comparison of many runs: each number and sentence as it was
when it was checked by hand. `SNAPSHOTS=write pytest tests/reporting/test_snapshots.py` takes them anew."""

import itertools
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from cpt import report
from cpt.evaluation.metrics import METRICS, TITLES, UNITS
from cpt.evaluation.scores import Scores
from cpt.reporting import comparison_figures, run_page
from cpt.reporting.console import format_scores
from cpt.reporting.frames import SUMMARIZED, escape_name, summarize_scores, tabulate, tidy_scores
from tests.evaluation.test_task_metrics import make_endtask_scores
from tests.support.example_runs import DOMAINS, NLL, make_endtasks, make_scores, save_scores
from tests.support.harness_tasks import make_benchmarks
from tests.support.task_answers import choose_answers, save_answers, write_answers

pytestmark = pytest.mark.slow
SNAPSHOTS = Path(__file__).parent / "snapshots"
ROWS = ["base", *DOMAINS]
RIGHT = ([0, 0, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1])


def check_snapshot(name, text):
    """All but its legends."""
    stable_lines = [
        line for line in text.splitlines() if not name.endswith(".md") or re.match(r"[#|!]|.*`", line)
    ]
    text = "\n".join(stable_lines) + "\n"
    if os.environ.get("SNAPSHOTS") == "write":
        (SNAPSHOTS / name).write_text(text)
    assert text == (SNAPSHOTS / name).read_text()


def measured(scores):
    generator, counts = np.random.default_rng(0), [np.full(30, 20)] * 4
    noise = generator.normal(0, 0.3, (4, 30))
    noise -= noise.mean(1, keepdims=True)
    sums = [(np.array(scores.nll)[:, column, None] + noise[column]) * 20 for column in range(4)]
    scores.measure(nll_sums=sums, counts=counts)
    return scores


def test_a_report_of_a_run_that_has_everything(tmp_path):
    tasks = {
        "law": [choose_answers(answers) for answers in RIGHT],
        "food": [choose_answers(answers[::-1]) for answers in RIGHT],
    }
    tasks["space"] = [write_answers(["a b"] * 3, ["a b", f"a {row}", "c"]) for row in "wbxb"]
    parts = [{}, {"law": {"law": 1.0}, "general": {"base": 1.0}}, {}, {name: {name: 1.0} for name in DOMAINS}]
    parts[3]["general"] = {"space": 0.6251, "base": 0.2249, "law": 0.149, "food": 0.001}
    nll = {"law": [5.0, 4.0], "food": [3.0, 3.25], "general": [4.0, 4.1]}
    rise = {"general": [[0.0, 0.0], [0.05, 0.2]]}
    stage = {"steps": [0, 10], "nll": nll, "rise": rise, "ended": "", "kept": None}
    title = "Budget of drift: upper ends at the kept step, of what was allowed"
    budget = {"report": {title: "general +0.200 of 0.300; kept step 10; gone back 1 times"}}
    matrix = [[1.0, 0.25, -0.5], [0.25, 1.0, 0.125], [-0.5, 0.125, 1.0]]
    like = {"names": DOMAINS, "matrix": matrix, "general": [0.5, 0.1, -0.25], "embedding": "tfidf"}
    phases = {"learn": {"law": 41.5, "space": 30.0}, "score": {"base": 1.5, "law": 2.5}}
    phases |= {"endtasks": {"law": 9.25}, "start": {"read the texts": 100.0}}
    named = make_benchmarks({"a": [0.25, None, 0.5, 0.75], "b": [None, None, None, 0.5]})
    named["tasks"]["b"] |= {"chance": None, "higher": False, "truncated": 12, "shots": None}
    about = {"method": "ewc", "mask": "migu", "seed": 41, "variant": "strength=5", "needs_domain": True}
    about |= {"loading": 'load("model")', "grown": [2], "skipped_steps": [0, 2, 0, 0]}
    about |= {"protected_movement": [[], [0.01, 0.5], [0.02, 0.5], []]}
    about |= {"numerics": {"precision": "bf16", "attention": "auto"}}
    about |= {"base": {"name": "tiny", "origin": "folder", "adapted": "the first 2 blocks"}}
    about |= {
        "similarity": like,
        "benchmarks": named,
        "activity_seconds": phases,
        "endtasks": make_endtask_scores(tasks=DOMAINS),
    }
    about |= {"monitor": {"law": stage | {"budget": budget}, "space": stage}}
    folder = tmp_path / "run"
    answer_summary = save_answers(folder, tasks, rows=ROWS) | {"intervals": {"AP": [0.1, 0.9]}}
    save_scores(
        tmp_path / "scores", answers=answer_summary, flops=[0, 2 * 10**12, 3 * 10**12, 4 * 10**12], **about
    )
    scores = measured(Scores.load(tmp_path / "scores" / "scores.json"))
    scores.modules = parts
    lines = [f"{at},train/{name}/{text},{value}" for text in ("law", "food") for at in (1, 3)
             for name, value in (("lm", 5 - at), ("tokens", 400 * at), ("grad_norm", 2))]  # fmt: skip
    (folder / "metrics.csv").write_text("\n".join(lines))
    (folder / "generated" / "002-food").mkdir(parents=True)
    facts = {"tokens": 4000, "real": 900, "texts": 12, "left_out": 3, "nll": 2.5, "nll_left_out": 3.5}
    (folder / "generated/002-food/facts.json").write_text(json.dumps({"law": facts | {"excerpt": "a party"}}))
    (folder / "config.yaml").write_text("seed: 41  # a < b\n")
    run_page.write_report(folder, scores)
    check_snapshot("report.md", (folder / "report.md").read_text())
    check_snapshot("console.txt", format_scores(scores))
    numbers = itertools.groupby(summarize_scores(scores).items(), lambda answers: answers[0].split("/")[0])
    lines = ["  ".join(f"{key} {x:.6g}" for key, x in answers) for _, answers in numbers]
    check_snapshot("summary.txt", "\n".join(lines))
    rounded = [t.map(lambda x: f"{x:.6g}" if isinstance(x, float) else x) for t in tabulate(scores).values()]
    check_snapshot("tables.csv", "\n".join(table.to_csv(index=False) for table in rounded))


def test_a_comparison_of_many_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison_figures, "build_figures", lambda section: [])
    shifts = {"ncl": 0.0, "das": -0.2, "demix": -0.5, "one": -3.0, "joint": 0.0}
    shifts |= {"ewc-1": -0.1, "ewc-9": -0.15}
    for number, (name, shift) in enumerate(shifts.items()):
        for seed in range(3 if number < 3 else 2):
            method, _, strength = name.partition("-")
            options = {"method": method, "seed": seed, "shift": shift + 0.01 * (seed * (number + 2) % 5)}
            options |= {"needs_domain": method == "demix", "flops": [0, *[10**9 + 10**8 * number] * 3]}
            options |= {
                "endtasks": make_endtasks([[None] * 3] * 3 + [[0.5 + number / 10, 0.6, 0.7 - seed / 10]])
            }
            config = {"seed": seed, "method": {"name": method}, "trainer": {"steps": 5 + (name == "das")}}
            if strength:
                options |= {"variant": f"strength={strength}"}
                config["method"]["strength"] = int(strength)
            if method == "joint":
                options |= {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"], "endtasks": None}
                options |= {"flops": [0, 10**9]}
            folder = tmp_path / f"{name}-{seed}"
            if number < 2:
                answered = [choose_answers(RIGHT[0])] * 3 + [choose_answers(np.roll(RIGHT[number + 1], seed))]
                values = [0.5, None, None, 0.5 + number / 20 + seed / 50]
                options |= {"benchmarks": make_benchmarks({"a": values})}
                options |= {
                    "answers": save_answers(tmp_path / "kept" / folder.name, {"law": answered}, rows=ROWS)
                }
            save_scores(folder, config=config, **options)
            if number < 2:
                (tmp_path / "kept" / folder.name / "answers").rename(folder / "answers")
    save_scores(tmp_path / "other", conditions={"score_on": "valid", "length": 128}, seed=1)
    save_scores(tmp_path / "half", nll=NLL[:3], finished=False)
    for name, file, text in (("bad", "scores.json", '{"dom'), ("started", "config.yaml", "seed: 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert report.main([str(tmp_path), str(tmp_path / "nowhere"), "--curve", "method.strength"]) == 1
    missing, damaged = capsys.readouterr().err.splitlines()
    assert "nowhere: no such folder" in missing and damaged.startswith(f"{tmp_path}/bad/scores.json: damaged")
    check_snapshot("comparison.md", (tmp_path / "comparison.md").read_text().replace(str(tmp_path), "PLACE"))


LACKING = {
    "base": {"nll": NLL[:1], "finished": False},
    "one stage": {"nll": NLL[:2], "finished": False},
    "joint": {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"], "method": "joint"},
    "one domain, no general text": {"nll": [row[:1] for row in NLL[:2]], "order": ["law"]},
    "diverged": {"nll": [*NLL[:2], [800.0, math.nan, math.inf, 5.0], [math.nan] * 4]},
}


@pytest.mark.parametrize("options", LACKING.values(), ids=LACKING)
def test_a_report_of_a_run_that_lacks_something(tmp_path, options):
    scores = make_scores(**options)
    scores.save(tmp_path / "scores.json")
    (tmp_path / "config.yaml").write_text("seed: 0  # a < b\n")
    run_page.write_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    metrics = markdown.partition("## Metr")[2]
    assert set(scores.metrics) == {name for name in METRICS if f"\n| {TITLES.get(name, name)} |" in metrics}
    assert ("unfinished" in markdown) == (not scores.run["finished"])
    assert all(row in format_scores(scores) for row in scores.rows)
    assert not any(f"## {title}" in markdown for title in ("Modules", "Training", "End tasks", "Answers"))


def of_two(*tasks):
    examined = make_endtasks([[None] * 2, [0.7, None], [0.5, 0.8]], tasks=tasks, when="each")
    return make_scores(
        nll=[[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]], order=tasks, endtasks=examined
    )


def test_every_value_is_a_finite_number_however_little_was_measured():
    scores = of_two("law", "food")
    scores.nll[-1] = [float("nan"), 900.0, 4.0]
    scores.measure()
    scores.metrics["ZS"]["nats"] = None  # as a file has what is not finite
    scores.metrics["ZS"]["interval"] = {unit: [None, 2.0] for unit in UNITS}
    summary = summarize_scores(scores)
    assert all(type(value) is float and math.isfinite(value) for value in summary.values())
    assert not {"LC/nats", "ppl/law/final", "ppl/food/final", "ZS/nats", "ZS/nats/low"} & set(summary)
    assert summary["ZS/nats/high"] == 2


@pytest.mark.parametrize("pair", [("law", "law/macro_f1"), ("MF1", "forward"), ("a/b", "a%2Fb")])
def test_no_two_numbers_share_a_key(pair):
    plain, odd = of_two("law", "food"), of_two(*pair)
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = {"/".join(names.get(part, part) for part in key.split("/")) for key in summarize_scores(plain)}
    assert set(summarize_scores(odd)) == renamed and len(renamed) == len(summarize_scores(plain))
    table = tidy_scores(odd)
    assert table["key"].dropna().is_unique and table["key"].notna().equals(table["kind"].isin(SUMMARIZED))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"
