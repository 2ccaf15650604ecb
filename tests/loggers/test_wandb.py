"""Tables and numbers for W&B, and the sweep of docs/sweep.yaml."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from cpt.loggers import wandb
from cpt.reporting.frames import choose_headlines, stage_points, summarize_scores, tabulate, task_points
from tests.conftest import ROOT
from tests.support.tracked import scores

NASTY = ["lr", "stage", "a/b", "a", "LC", "matrix", "a%2Fb", "b/final", "b"]
MACROS = {"${env}", "${interpreter}", "${program}", "${args_no_hyphens}"}


def test_all_numbers_are_in_the_summary_where_they_are_asked_for():
    known = summarize_scores(scores())
    for asked, expected in (("all", known), ("headlines", choose_headlines(scores()))):
        run = SimpleNamespace(summary={}, config={}, log=lambda points: None)
        wandb.publish(run, scores(), folder=Path("nowhere"), summary=asked)
        assert run.summary == pytest.approx(expected)
    assert len(known) > 80


def test_tables_of_metrics_parts_costs_and_texts_are_plain_json():
    made = {name: frame.to_numpy().tolist() for name, frame in tabulate(scores()).items()}
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    frames = tabulate(scores())
    lc = {line["unit"]: line for line in frames["metrics"].to_dict("records") if line["metric"] == "LC"}
    assert (lc["nats"]["low"], lc["nats"]["high"], lc["perplexity"]["low"]) == (3.0, 3.5, None)
    assert lc["nats"]["formula"] == "mean_j L[n][j]"
    assert made["parts"][0] == [2, "food", "law", "base", 0.25] and len(made["parts"]) == 12
    heads = ["stage", "after", "trained", "stored", "tokens", "flops", "memory", "skipped"]
    assert [*frames["costs"]] == [*heads, "seconds_learn", "seconds_score", "seconds_endtasks"]
    assert made["costs"][1] == [1, "law", 7, 8, 100, 10**12, 6, 0, 10.0, 0.5, 0.0]
    assert made["seconds"][:2] == [["start", "read the texts", 2.0], ["learn", "law", 10.0]]
    assert made["texts"][1] == ["food", 101, 10, 401, "{'train': 3}", "dfood"]
    broken = scores(endtasks=False)  # and without parts there is no such table or picture
    broken.parts = [{} for _ in broken.rows]
    assert set(tabulate(broken)) == {"matrix", "losses", "metrics", "costs", "seconds", "texts"}
    assert set(wandb.pictures(broken)) == {"matrix_image", "stages_image"} and task_points(broken) == []
    broken.nll[2][0] = math.nan
    broken.measure()
    assert tabulate(broken)["matrix"].iloc[2, 1] is None and "LC/nats" not in summarize_scores(broken)


def test_no_key_collides_whatever_domains_are_called():
    made = scores(domains=NASTY)
    summary, rows = summarize_scores(made), [stage_points(made, len(NASTY)), *task_points(made)]
    points = {key for row in rows for key in row} | set(tabulate(made)) | {"report", "trainer/global_step"}
    points |= {f"{name}_image" for name in ("matrix", "stages", "parts", "endtasks")}
    assert not points & set(summary)
    assert len([key for key in rows[0] if key.startswith("ppl/")]) == len(NASTY) + 1
    assert len([key for key in rows[-1] if key.startswith("tasks/")]) == len(NASTY)


def test_each_parameter_of_the_sweep_is_a_valid_override(composed, monkeypatch):
    sweep = yaml.safe_load((ROOT / "docs" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["metric"]["goal"] == "minimize"
    assert sweep["metric"]["name"] in summarize_scores(scores())
    assert sweep["command"][:3] == ["${env}", "${interpreter}", "${program}"]
    assert sweep["command"][-1] == "${args_no_hyphens}"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    fixed = [part for part in sweep["command"] if part not in MACROS]
    assert {"method", "optim.lr"} == set(sweep["parameters"])
    for name, parameter in sweep["parameters"].items():
        for value in parameter.get("values") or [parameter["min"], parameter["max"]]:
            cfg = composed(*fixed, f"{name}={value}")
            assert (cfg.method.name if name == "method" else cfg.optim.lr) == value
            assert cfg.domains.score_on == "valid"  # what is chosen on the test texts is no result
            assert (cfg.name, cfg.logger.wandb, cfg.logger.mode) == ("s1", True, "online")
