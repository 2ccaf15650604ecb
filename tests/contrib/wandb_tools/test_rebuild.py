"""W&B runs made from run folders, read back."""

import dataclasses
import logging

import numpy as np
import pytest
from filelock import FileLock

from cpt.contrib.wandb_tools import rebuild
from cpt.core.config import digest
from cpt.evaluation.scores import COSTS, NOTED
from tests.support import wandb_files
from tests.support.tracked import scores

pytestmark = pytest.mark.slow

CONFIG = """
seed: 0
tags: [nice]
method: {name: das, strength: 0.5}
logger: {wandb: true}
"""
CURVES = """step,name,value
0,train/lm/law,3.5
0,train/lr/law,0.1
0,ppl/law,54.0
0,stages/seconds,0.0
1,train/lm/law,9.0
1,train/lm/law,3.25
2,train/lm/l1,train/lm/law
2,train/lm/law,2.5
3,train/l"""


def folder(path, made, *, config=CONFIG):
    """A run folder of these scores, with a curve that a kill cut off and a stage learned again after it."""
    path.mkdir(parents=True)
    made.save(path / "scores.json")
    (path / "config.yaml").write_text(config)
    (path / "metrics.csv").write_text(CURVES)
    (path / "report.html").write_text("<p>the page</p>")
    (path / "diagnostics").mkdir()
    np.savez(path / "diagnostics" / "001.npz", **{"importance/heads": np.arange(6.0)})
    return path


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """Folders sent at once: finished, with a config that is none, unfinished, at work, killed before its
    first row, with damage that is found while it is sent; the count of failures, what was said."""
    root, said = tmp_path_factory.mktemp("synced"), []
    none = {name: [] for name in ("rows", "nll", "modules", *NOTED, *COSTS)}
    cut, damaged = scores(finished=False, endtasks=False), scores()
    damaged.endtasks["scores"]["accuracy"] = [[0.5]]
    given = {"done": scores(), "broken": scores(), "cut": cut, "busy": scores(finished=False)}
    given |= {"early": dataclasses.replace(cut, **none, metrics={}, phases={}), "damaged": damaged}
    configs = {"broken": "seed: [0\n"}
    runs = {folder(root / n, made, config=configs.get(n, CONFIG)): made for n, made in given.items()}
    lines = logging.Handler()
    lines.emit = lambda record: said.append(record.getMessage())
    rebuild.log.addHandler(lines)
    with FileLock(root / "busy" / ".lock"):
        failed = send(runs)
    rebuild.log.removeHandler(lines)
    send({root / "cut": cut})
    return root, failed, said


def send(runs):
    """Sends offline; only then are W&B's files whole: its service writes them."""
    import wandb

    failed = rebuild.sync_runs(runs, project="p", entity="me", mode="offline")
    wandb.teardown()
    return failed


def test_one_wandb_run_per_run_folder_with_the_identifier_of_the_live_one(synced):
    root, failed, said = synced
    runs = wandb_files.of_kind(root, "run")
    names = ("done", "cut", "early", "damaged")
    assert sorted(run.run_id for run in runs) == sorted(digest(["first", name]) for name in names)
    (run,) = wandb_files.of_kind(root / "done", "run")
    assert (run.run_group, run.job_type, run.display_name) == ("first", "das", "das order=law,food seed=0")
    assert (run.project, run.entity, list(run.tags), run.resume) == ("p", "me", ["nice"], True)
    ends = {name: [end.exit_code for end in wandb_files.of_kind(root / name, "exit")] for name in names}
    assert ends == {"done": [0], "cut": [1], "early": [1], "damaged": [1]}
    # What cannot be read, and what is at work, is named and left out.
    (broken,) = [line for line in said if "broken" in line]
    assert (
        failed == 2
        and broken.startswith(f"Failed to send {root / 'broken'}: ParserError: ")
        and "\n" not in broken
    )
    assert f"Skipping {root / 'busy'}, which is running" in said
    assert not (root / "broken" / "rebuilt").exists() and not (root / "busy" / "rebuilt").exists()
    config = wandb_files.config(root / "done")  # with what that of the folder does not say
    assert config["method"] == {"name": "das", "strength": 0.5}
    told = [config["cpt"][name] for name in ("label", "order", "finished")]
    assert told == ["das", ["law", "food"], True] and config["cpt"]["texts"]["law"]["hash"] == "dlaw"


def test_curves_come_from_metrics_csv_of_two_lines_the_later_one(synced):
    logged = wandb_files.history(synced[0] / "done")
    assert [row["train/loss"] for row in logged if "train/loss" in row] == [3.5, 3.25, 2.5]
    metrics = {m.glob_name or m.name: m for m in wandb_files.of_kind(synced[0] / "done", "metric")}
    axes = {name: metrics[f"{name}/*"].step_metric for name in ("ppl", "stages", "tasks", "units", "train")}
    assert axes == dict.fromkeys(("ppl", "stages", "tasks", "units"), "stage") | {"train": "train/tokens"}
    patterns = [name for name in metrics if "*" in name]
    assert len(patterns) == len({name.partition("/")[0] for name in patterns})  # of which none meets another
