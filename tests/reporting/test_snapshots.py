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


def measure_documents(scores):
    """Measures scores over thirty documents of twenty tokens in each text, with noise around their means."""
    generator = np.random.default_rng(0)
    noise = generator.normal(0, 0.3, (4, 30))
    noise -= noise.mean(1, keepdims=True)
    sums = [(np.array(scores.nll)[:, column, None] + noise[column]) * 20 for column in range(4)]
    scores.measure(nll_sums=sums, counts=[np.full(30, 20)] * 4)
    return scores


def write_training_curves(path):
    values_of_step = {
        1: {"lm": 4, "tokens": 400, "grad_norm": 2},
        3: {"lm": 2, "tokens": 1200, "grad_norm": 2},
    }
    lines = []
    for text in ("law", "food"):
        for step, values in values_of_step.items():
            for name, value in values.items():
                lines.append(f"{step},train/{name}/{text},{value}")
    path.write_text("\n".join(lines))


def write_facts_of_generation(folder):
    facts = {
        "tokens": 4000,
        "real": 900,
        "texts": 12,
        "left_out": 3,
        "nll": 2.5,
        "nll_left_out": 3.5,
        "excerpt": "a party",
    }
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text(json.dumps({"law": facts}))


def test_a_report_of_a_run_that_has_everything(tmp_path):
    tasks = {
        "law": [choose_answers(answers) for answers in RIGHT],
        "food": [choose_answers(answers[::-1]) for answers in RIGHT],
        "space": [write_answers(["a b"] * 3, ["a b", f"a {row}", "c"]) for row in "wbxb"],
    }
    folder = tmp_path / "run"
    answer_summary = save_answers(folder, tasks, rows=ROWS) | {"intervals": {"AP": [0.1, 0.9]}}

    monitored_stage = {
        "steps": [0, 10],
        "nll": {"law": [5.0, 4.0], "food": [3.0, 3.25], "general": [4.0, 4.1]},
        "rise": {"general": [[0.0, 0.0], [0.05, 0.2]]},
        "ended": "",
        "kept": None,
    }
    title = "Budget of drift: upper ends at the kept step, of what was allowed"
    budget = {"report": {title: "general +0.200 of 0.300; kept step 10; gone back 1 time"}}
    similarity = {
        "names": DOMAINS,
        "matrix": [[1.0, 0.25, -0.5], [0.25, 1.0, 0.125], [-0.5, 0.125, 1.0]],
        "general": [0.5, 0.1, -0.25],
        "embedding": "tfidf",
    }
    activity_seconds = {
        "learn": {"law": 41.5, "space": 30.0},
        "score": {"base": 1.5, "law": 2.5},
        "endtasks": {"law": 9.25},
        "start": {"read the texts": 100.0},
    }
    benchmarks = make_benchmarks({"a": [0.25, None, 0.5, 0.75], "b": [None, None, None, 0.5]})
    benchmarks["tasks"]["b"].update(chance=None, higher=False, truncated=12, shots=None)
    save_scores(
        tmp_path / "scores",
        method="ewc",
        mask="migu",
        seed=41,
        variant="strength=5",
        needs_domain=True,
        loading='load("model")',
        grown=[2],
        skipped_steps=[0, 2, 0, 0],
        protected_movement=[[], [0.01, 0.5], [0.02, 0.5], []],
        numerics={"precision": "bf16", "attention": "auto"},
        base={"name": "tiny", "origin": "folder", "adapted": "the first 2 blocks"},
        similarity=similarity,
        benchmarks=benchmarks,
        activity_seconds=activity_seconds,
        endtasks=make_endtask_scores(tasks=DOMAINS),
        monitor={"law": monitored_stage | {"budget": budget}, "space": monitored_stage},
        answers=answer_summary,
        flops=[0, 2 * 10**12, 3 * 10**12, 4 * 10**12],
    )

    scores = measure_documents(Scores.load(tmp_path / "scores" / "scores.json"))
    routed = {name: {name: 1.0} for name in DOMAINS}
    routed["general"] = {"space": 0.6251, "base": 0.2249, "law": 0.149, "food": 0.001}
    scores.modules = [{}, {"law": {"law": 1.0}, "general": {"base": 1.0}}, {}, routed]

    write_training_curves(folder / "metrics.csv")
    write_facts_of_generation(folder / "generated" / "002-food")
    (folder / "config.yaml").write_text("seed: 41  # a < b\n")
    run_page.write_report(folder, scores)
    check_snapshot("report.md", (folder / "report.md").read_text())
    check_snapshot("console.txt", format_scores(scores))

    lines = []
    for _, numbers in itertools.groupby(summarize_scores(scores).items(), lambda item: item[0].split("/")[0]):
        lines.append("  ".join(f"{key} {number:.6g}" for key, number in numbers))
    check_snapshot("summary.txt", "\n".join(lines))
    texts = []
    for table in tabulate(scores).values():
        rounded = table.map(lambda value: f"{value:.6g}" if isinstance(value, float) else value)
        texts.append(rounded.to_csv(index=False))
    check_snapshot("tables.csv", "\n".join(texts))


def save_compared_run(root, name, *, number, seed, shift):
    """One run of a comparison: of a method, or of one of its strengths (`ewc-9`), the `number`-th in order."""
    method, _, strength = name.partition("-")
    folder = root / f"{name}-{seed}"
    config = {"seed": seed, "method": {"name": method}, "trainer": {"steps": 6 if name == "das" else 5}}
    if strength:
        config["method"]["strength"] = int(strength)

    nll = NLL
    rows = None
    endtasks = make_endtasks([[None] * 3] * 3 + [[0.5 + number / 10, 0.6, 0.7 - seed / 10]])
    flops = [0, *[10**9 + 10**8 * number] * 3]
    if method == "joint":
        nll = [NLL[0], NLL[3]]
        rows = ["base", "joint"]
        endtasks = None
        flops = [0, 10**9]

    # The first two methods have benchmarks, and answers to a task.
    benchmarks = {}
    answer_summary = {}
    answers_folder = root / "answers of runs" / folder.name
    has_answers = number < 2
    if has_answers:
        benchmarks = make_benchmarks({"a": [0.5, None, None, 0.5 + number / 20 + seed / 50]})
        last_answers = choose_answers(np.roll(RIGHT[number + 1], seed))
        answers = [choose_answers(RIGHT[0])] * 3 + [last_answers]
        answer_summary = save_answers(answers_folder, {"law": answers}, rows=ROWS)

    save_scores(
        folder,
        config=config,
        method=method,
        seed=seed,
        shift=shift,
        variant=f"strength={strength}" if strength else "",
        needs_domain=method == "demix",
        nll=nll,
        rows=rows,
        endtasks=endtasks,
        flops=flops,
        benchmarks=benchmarks,
        answers=answer_summary,
    )
    if has_answers:
        (answers_folder / "answers").rename(folder / "answers")


def test_a_comparison_of_many_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(comparison_figures, "build_figures", lambda section: [])
    shifts = {
        "ncl": 0.0,
        "das": -0.2,
        "demix": -0.5,
        "one": -3.0,
        "joint": 0.0,
        "ewc-1": -0.1,
        "ewc-9": -0.15,
    }
    for number, (name, shift) in enumerate(shifts.items()):
        for seed in range(3 if number < 3 else 2):
            seed_shift = 0.01 * (seed * (number + 2) % 5)
            save_compared_run(tmp_path, name, number=number, seed=seed, shift=shift + seed_shift)
    save_scores(tmp_path / "other", conditions={"score_on": "valid", "max_seq_length": 128}, seed=1)
    save_scores(tmp_path / "half", nll=NLL[:3], finished=False)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text('{"dom')
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "config.yaml").write_text("seed: 1\n")

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


def make_scores_of_two(*tasks):
    examined = make_endtasks([[None] * 2, [0.7, None], [0.5, 0.8]], tasks=tasks, when="each")
    return make_scores(
        nll=[[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]], order=tasks, endtasks=examined
    )


def test_every_value_is_a_finite_number_however_little_was_measured():
    scores = make_scores_of_two("law", "food")
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
    plain = make_scores_of_two("law", "food")
    odd = make_scores_of_two(*pair)
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = set()
    for key in summarize_scores(plain):
        renamed.add("/".join(names.get(part, part) for part in key.split("/")))
    assert set(summarize_scores(odd)) == renamed and len(renamed) == len(summarize_scores(plain))
    table = tidy_scores(odd)
    assert table["key"].dropna().is_unique and table["key"].notna().equals(table["kind"].isin(SUMMARIZED))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"
