"""Tables and numbers for W&B, and the sweep of docs/examples/sweep.yaml."""

import json
import math
from pathlib import Path

import pytest
import yaml

from cpt.loggers import wandb
from cpt.reporting.frames import choose_headlines, stage_points, summarize_scores, tabulate, task_points
from tests.conftest import ROOT
from tests.support.tracked import scores

NASTY = ["lr", "stage", "a/b", "a", "LC", "matrix", "a%2Fb", "b/final", "b"]
MACROS = {"${env}", "${interpreter}", "${program}", "${args_no_hyphens}"}


def test_all_numbers_are_in_the_summary_where_they_are_asked_for():
    class Run:
        def __init__(self):
            self.summary, self.config = {}, {}

        def log(self, points):
            pass

    known = summarize_scores(scores())
    for asked, expected in (("all", known), ("headlines", choose_headlines(scores()))):
        run = Run()
        wandb.publish(run, scores(), folder=Path("nowhere"), summary=asked)
        assert run.summary == pytest.approx(expected)
    assert len(known) > 80


def test_a_run_without_end_tasks_or_parts_has_no_such_table_or_picture():
    plain = scores(endtasks=False)
    plain.parts = [{} for _ in plain.rows]
    assert set(tabulate(plain)) == {"matrix", "losses", "metrics", "costs", "seconds", "texts"}
    assert set(wandb.pictures(plain)) == {"matrix_image", "stages_image"}
    assert task_points(plain) == []


def test_the_table_of_end_tasks_has_a_line_per_stage_task_seed_and_metric():
    frame = tabulate(scores())["endtasks"]
    lines = frame.to_dict("records")
    assert len(lines) == 3 * 2 * 3  # (stage, task) measured, seeds, metrics
    (one,) = [
        x for x in lines if (x["stage"], x["task"], x["seed"], x["metric"]) == (2, "law", 5, "macro_f1")
    ]
    assert one == {
        "stage": 2, "after": "food", "task": "law", "seed": 5, "metric": "macro_f1", "own_metric": True,
        "value": pytest.approx(0.5),
    }  # fmt: skip
    assert {x["metric"] for x in lines if not x["own_metric"]} == {"micro_f1", "accuracy"}


def test_tables_of_metrics_parts_costs_and_texts():
    made = tabulate(scores())
    lines = made["metrics"].to_dict("records")
    (lc,) = [x for x in lines if (x["metric"], x["unit"]) == ("LC", "nats")]
    assert (lc["low"], lc["high"]) == (3.0, 3.5)
    assert lc["formula"] == "mean_j L[n][j]"
    (ppl,) = [x for x in lines if (x["metric"], x["unit"]) == ("LC", "perplexity")]
    assert (ppl["low"], ppl["high"]) == (None, None)
    assert made["parts"].to_numpy().tolist()[0] == [2, "food", "law", "base", 0.25]
    assert len(made["parts"]) == 12
    assert [*made["costs"]] == [
        "stage", "after", "trained", "stored", "tokens", "flops", "memory", "skipped", "seconds_learn",
        "seconds_score", "seconds_endtasks",
    ]  # fmt: skip
    assert made["costs"].to_numpy().tolist()[1] == [1, "law", 7, 8, 100, 10**12, 6, 0, 10.0, 0.5, 0.0]
    assert made["seconds"].to_numpy().tolist()[:2] == [
        ["start", "read the texts", 2.0],
        ["learn", "law", 10.0],
    ]
    assert made["texts"].to_numpy().tolist()[1] == ["food", 101, 10, 401, "{'train': 3}", "dfood"]


def test_a_number_that_is_not_finite_is_none_in_a_table_and_left_out_of_the_summary():
    broken = scores(endtasks=False)
    broken.nll[2][0] = math.nan
    broken.measure()
    assert tabulate(broken)["matrix"].iloc[2, 1] is None
    assert "LC/nats" not in summarize_scores(broken)


def test_no_key_collides_whatever_domains_are_called():
    made = scores(domains=NASTY)
    summary, rows = summarize_scores(made), [stage_points(made, len(NASTY)), *task_points(made)]
    points = {key for row in rows for key in row} | set(tabulate(made)) | {"report", "trainer/global_step"}
    points |= {f"{name}_image" for name in ("matrix", "stages", "parts", "endtasks")}
    assert not points & set(summary)
    assert len([key for key in rows[0] if key.startswith("ppl/")]) == len(NASTY) + 1
    assert len([key for key in rows[-1] if key.startswith("tasks/")]) == len(NASTY)


def test_tables_are_plain_json():
    rows = {name: table.to_numpy().tolist() for name, table in tabulate(scores()).items()}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


@pytest.fixture(scope="module")
def sweep():
    return yaml.safe_load((ROOT / "docs" / "sweep.yaml").read_text())


def candidates(parameter):
    """Values that W&B may choose for a parameter."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


def test_each_parameter_of_the_sweep_is_a_valid_override(sweep, composed, monkeypatch):
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    fixed = [part for part in sweep["command"] if part not in MACROS]
    assert {"method", "optim.lr"} == set(sweep["parameters"])
    for name, parameter in sweep["parameters"].items():
        for value in candidates(parameter):
            cfg = composed(*fixed, f"{name}={value}")
            assert (cfg.method.name if name == "method" else cfg.optim.lr) == value
            assert cfg.domains.score_on == "valid"  # what is chosen on the test texts is no result
            assert (cfg.name, cfg.logger.wandb, cfg.logger.mode) == ("s1", True, "online")


def test_the_sweep_runs_the_program_and_minimises_a_number_that_there_is(sweep):
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["command"][:3] == ["${env}", "${interpreter}", "${program}"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    assert sweep["metric"]["name"] in summarize_scores(scores())
    assert sweep["metric"]["goal"] == "minimize"
    for parameter in sweep["parameters"].values():
        assert all(not isinstance(value, str) or value.isidentifier() for value in candidates(parameter))
