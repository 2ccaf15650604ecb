"""Tables and numbers for W&B, and the sweep of docs/examples/sweep.yaml."""

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


@pytest.mark.slow
def test_all_numbers_are_in_the_summary_where_they_are_asked_for():
    known = summarize_scores(scores())
    for asked, expected in (("all", known), ("headlines", choose_headlines(scores()))):
        run = SimpleNamespace(summary={}, config={}, log=lambda points: None)
        wandb.publish(run, scores(), folder=Path("nowhere"), summary=asked)
        assert run.summary == pytest.approx(expected)
    assert len(known) > 80


def test_tables_are_plain_json_and_only_of_what_there_is():
    made = {name: frame.to_numpy().tolist() for name, frame in tabulate(scores()).items()}
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    broken = scores(endtasks=False)
    broken.nll[2][0] = math.nan
    broken.parts = [{} for _ in broken.rows]
    broken.measure()
    assert tabulate(broken)["matrix"].iloc[2, 1] is None and "LC/nats" not in summarize_scores(broken)
    assert set(tabulate(broken)) == {"matrix", "losses", "metrics", "costs", "seconds", "texts"}
    assert set(wandb.pictures(broken)) == {"matrix_image", "stages_image"} and task_points(broken) == []


def test_no_key_collides_whatever_domains_are_called():
    made = scores(domains=NASTY)
    summary, rows = summarize_scores(made), [stage_points(made, len(NASTY)), *task_points(made)]
    points = {key for row in rows for key in row} | set(tabulate(made)) | {"report", "trainer/global_step"}
    points |= {f"{name}_image" for name in ("matrix", "stages", "parts", "endtasks")}
    assert not points & set(summary)
    assert len([key for key in rows[0] if key.startswith("ppl/")]) == len(NASTY) + 1
    assert len([key for key in rows[-1] if key.startswith("tasks/")]) == len(NASTY)


def test_each_parameter_of_the_sweep_is_a_valid_override(composed, monkeypatch):
    sweep = yaml.safe_load((ROOT / "docs" / "examples" / "sweep.yaml").read_text())
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
