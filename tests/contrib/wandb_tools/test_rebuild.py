"""W&B runs made from run folders, read back."""

import dataclasses

import pytest
from filelock import FileLock

from cpt.contrib.wandb_tools import rebuild
from cpt.core.config import digest
from cpt.evaluation.scores import COSTS, NOTED
from tests.support import wandb_files
from tests.support.comparing import DOMAINS, endtasks, made

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


def folder(path, scores, *, config=CONFIG):
    """A run folder of these scores, with a curve that a kill cut off and a stage learned again after it."""
    path.mkdir(parents=True)
    scores.save(path / "scores.json")
    (path / "config.yaml").write_text(config)
    (path / "metrics.csv").write_text(CURVES)
    return path


def send(runs):
    """Sends offline; only then are W&B's files whole: its service writes them."""
    import wandb

    failed = rebuild.sync_runs(runs, project="p", entity="me", mode="offline")
    wandb.teardown()
    return failed


def test_one_wandb_run_per_run_folder_with_the_identifier_of_the_live_one(tmp_path, caplog):
    """Sent at once: finished, unfinished, killed before its first row, running, with a damaged file."""
    root = tmp_path / "synced"
    none = {name: [] for name in ("rows", "nll", "modules", *NOTED, *COSTS)}
    cut = made(finished=False)
    whole, damaged = (made(method="das", endtasks=endtasks([[0.5] * 3] * 4)) for _ in range(2))
    damaged.endtasks["scores"]["accuracy"] = [[0.5]]
    given = {"done": whole, "broken": whole, "cut": cut, "busy": cut}
    given |= {"early": dataclasses.replace(cut, **none, metrics={}, phases={}), "damaged": damaged}
    configs = {"broken": "seed: [0\n"}
    runs = {folder(root / n, scores, config=configs.get(n, CONFIG)): scores for n, scores in given.items()}
    with FileLock(root / "busy" / ".lock"):
        failed = send(runs)
    send({root / "cut": cut})
    runs = wandb_files.of_kind(root, "run")
    names = ("done", "cut", "early", "damaged")
    assert sorted(run.run_id for run in runs) == sorted(digest(["trial", name]) for name in names)
    (run,) = wandb_files.of_kind(root / "done", "run")
    assert (run.run_group, run.job_type) == ("trial", "das")
    assert run.display_name == "das order=law,food,space seed=0"
    assert (run.project, run.entity, list(run.tags), run.resume) == ("p", "me", ["nice"], True)
    ends = {name: [end.exit_code for end in wandb_files.of_kind(root / name, "exit")] for name in names}
    assert ends == {"done": [0], "cut": [1], "early": [1], "damaged": [1]}
    # What cannot be read, and what is at work, is named and left out.
    (broken,) = [line for line in caplog.messages if "broken" in line]
    assert failed == 2 and broken.startswith(f"Failed to send {root / 'broken'}: ")
    assert f"Skipping {root / 'busy'}, which is running" in caplog.messages
    assert not (root / "broken" / "rebuilt").exists() and not (root / "busy" / "rebuilt").exists()
    config = wandb_files.config(root / "done")  # with what that of the folder does not say
    assert config["method"] == {"name": "das", "strength": 0.5}
    assert [config["cpt"][name] for name in ("order", "finished")] == [DOMAINS, True]
    logged = wandb_files.history(root / "done")  # of metrics.csv, of two lines of a step the later one
    assert [row["train/loss"] for row in logged if "train/loss" in row] == [3.5, 3.25, 2.5]
