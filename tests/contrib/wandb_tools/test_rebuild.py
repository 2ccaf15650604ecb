"""W&B runs made from run folders, read back."""

import pytest
from filelock import FileLock

from cpt.contrib.wandb_tools import rebuild
from cpt.loggers.wandb_environment import read_run_identifier, store_identifier
from tests.support import wandb_files
from tests.support.example_runs import DOMAINS, make_endtasks, make_scores

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


def test_one_wandb_run_per_run_folder_with_the_identifier_of_the_live_one(tmp_path, caplog):
    """Sent at once: finished, unfinished, running, damaged; of each a curve that a kill cut off."""
    import wandb

    root = tmp_path / "synced"
    runs = {}
    for name in ("done", "broken", "wide", "cut", "busy"):
        (root / name).mkdir(parents=True)
        runs[root / name] = make_scores(
            method="das", finished=name == "done", endtasks=make_endtasks([[0.5] * 3] * 4)
        )
        runs[root / name].save(root / name / "scores.json")
        (root / name / "config.yaml").write_text("seed: [0\n" if name == "broken" else CONFIG)
        (root / name / "metrics.csv").write_text(CURVES + "0" * (200_000 if name == "wide" else 0))
    store_identifier(root / "done", "of-its-own-start")

    with FileLock(root / "busy" / ".lock"):
        failed = rebuild.sync_runs(runs, project="p", entity="me", mode="offline")
    wandb.teardown()  # only then are W&B's files whole: its service writes them

    for name, code in (("done", 0), ("cut", 1)):
        (run,) = wandb_files.read_records_of_kind(root / name, "run")
        assert (run.run_id, run.project, run.entity) == (read_run_identifier(root / name), "p", "me")
        assert [end.exit_code for end in wandb_files.read_records_of_kind(root / name, "exit")] == [code]
        assert run.run_id == "of-its-own-start" or name == "cut"
    assert (run.run_group, run.job_type, list(run.tags)) == ("trial", "das", ["nice"])
    assert run.display_name == "das order=law,food,space seed=0"

    # What cannot be read, and what is at work, is named and left out.
    failures = [line for line in caplog.messages if line.startswith("Failed to send ")]
    assert failed == 2 and [line.split()[3] for line in failures] == [
        f"{root / name}:" for name in ("broken", "wide")
    ]
    assert f"Skipping {root / 'busy'}, which is running" in caplog.messages
    assert not (root / "broken" / "rebuilt").exists() and not (root / "busy" / "rebuilt").exists()

    config = wandb_files.config(root / "done")  # with what that of the folder does not say
    assert config["method"] == {"name": "das", "strength": 0.5} and config["cpt"]["order"] == DOMAINS
    logged = wandb_files.history(root / "done")  # of metrics.csv, of two lines of a step the later one
    assert [row["train/loss"] for row in logged if "train/loss" in row] == [3.5, 3.25, 2.5]
