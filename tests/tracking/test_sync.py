"""W&B runs made from run folders, read back; and the tables that they show."""

import csv
import dataclasses
import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from cpt.core.config import digest
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.reporting.run_table import MOST, choose_headlines, summarise_run
from cpt.reporting.tables import stage_row, tabulate, task_rows
from cpt.tracking import sync, wandb_run
from tests.support import wandb_files

pytestmark = pytest.mark.slow

CONFIG = """
seed: 0
tags: [nice]
method: {name: das, strength: 0.5}
logger: {per_domain: true, histograms: true}
"""
NASTY = ["lr", "stage", "a/b", "a", "LC", "matrix", "a%2Fb", "b/final", "b"]


def scores(*, domains=("law", "food"), finished=True, endtasks=True, **run):
    """A run of made-up numbers over these domains: loss 4 at first, 3 when learned, 3.3 after that."""
    texts = [*domains, "general"]
    keys = {
        "name": "first",
        "method": "das",
        "mask": "none",
        "replay": "none",
        "variant": "",
        "model": "tiny",
    }
    made = Scores(
        domains=texts,
        tokens=[100 + i for i in range(len(texts))],
        bytes=[400 + i for i in range(len(texts))],
        scored=[10] * len(texts),
        run={**keys, "order": list(domains), "seed": 0, "finished": finished, "objective": "mlm", **run},
        texts={text: {"digest": f"d{text}", "documents": {"train": 3}} for text in texts},
        config_digest="c0",
        versions={"torch": "2"},
    )
    for row, name in enumerate(["base", *domains]):
        nll = [3.0 if d + 1 == row else 3.3 if d + 1 < row else 4.0 for d in range(len(domains))] + [
            4.0 + row
        ]
        parts = {text: {"base": 0.25, domains[0]: 0.75} for text in texts} if row else None
        costs = (
            {"seen": 100, "flops": 10**12, "memory": 5 + row, "trained": 7, "stored": 8 * row} if row else {}
        )
        costs |= {"leak": [0.25, 0.5]} if row == 2 else {}
        made.append(name, nll=nll, parts=parts, **costs)
    made.measure()
    made.metrics["LC"]["interval"] = {"nats": [3.0, 3.5]}
    made.phases = {"start": {"read the texts": 2.0}, "learn": dict.fromkeys(domains, 10.0)}
    made.phases |= {"score": {domains[0]: 0.5}}
    if endtasks:
        made.endtasks = examined(list(domains))
    return made


def examined(tasks):
    """End tasks after their own stage and all later ones: macro-F1 0.6, the rest 0.8, and then 0.1 less."""

    def cube(score):
        blank = [None, None]
        later = [[[score - 0.1 * (row > task + 1)] * 2 if task < row else blank for task in range(len(tasks))]
                 for row in range(1, len(tasks) + 1)]  # fmt: skip
        return [[blank] * len(tasks), *later]

    kinds = {"macro_f1": cube(0.6), "micro_f1": cube(0.8), "accuracy": cube(0.8)}
    about = {"metric": dict.fromkeys(tasks, "macro_f1"), "classes": dict.fromkeys(tasks, 2)}
    sizes = {"examples": dict.fromkeys(tasks, 50), "seconds": 9.0}
    return {"when": "each", "tasks": tasks, "seeds": [3, 5], "digest": "e", **about, **sizes, "scores": kinds}


def folder(path, made, *, config=CONFIG):
    """A run folder of these scores, with a curve that a kill cut off and a stage learned again after it."""
    path.mkdir(parents=True)
    made.save(path / "scores.json")
    (path / "config.yaml").write_text(config)
    with (path / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [
                ("step", "name", "value"),
                (0, "train/lm/law", 3.5),
                (0, "train/lr/law", 0.1),
                (0, "ppl/law", 54.0),
                (0, "stages/seconds", 0.0),
                (1, "train/lm/law", 9.0),
                (1, "train/lm/law", 3.25),
            ]  # fmt: skip
        )
        file.write("2,train/lm/l1,train/lm/law\n2,train/lm/law,2.5\n3,train/l")
    (path / "report.html").write_text("<p>the page</p>")
    (path / "diagnostics").mkdir()
    np.savez(path / "diagnostics" / "001.npz", **{"importance/heads": np.arange(6.0)})
    return path


@pytest.fixture(scope="module")
def synced(tmp_path_factory):
    """Folders sent at once: finished, unfinished, damaged, at work; the count of failures, what was said."""
    root = tmp_path_factory.mktemp("synced")
    runs = {
        folder(root / "done", scores()): scores(),
        folder(root / "broken", scores(), config="seed: [0\n"): scores(),
        folder(root / "cut", scores(finished=False, endtasks=False)): scores(finished=False, endtasks=False),
        folder(root / "busy", scores(finished=False)): scores(finished=False),
        folder(root / "early", early()): early(),
    }
    lines = Lines()
    sync.log.addHandler(lines)
    with FileLock(root / "busy" / ".lock"):
        failed = send(runs)
    sync.log.removeHandler(lines)
    return root, failed, lines.said


def early():
    """The scores of a run that was killed before its first row."""
    none = {name: [] for name in ("rows", "nll", "parts", *NOTED, *COSTS)}
    return dataclasses.replace(scores(finished=False, endtasks=False), **none, metrics={}, phases={})


def send(runs):
    """Sends offline; only then are W&B's files whole: its service writes them."""
    import wandb

    failed = sync.sync_runs(runs, project="p", entity="me", mode="offline")
    wandb.teardown()
    return failed


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


def test_one_wandb_run_per_run_folder_with_the_identifier_of_the_live_one(synced):
    root, failed, _ = synced
    runs = wandb_files.of_kind(root, "run")
    assert {run.run_id for run in runs} == {digest(["first", name]) for name in ("done", "cut", "early")}
    assert len(runs) == 3
    assert failed == 1
    (run,) = wandb_files.of_kind(root / "done", "run")
    assert (run.run_group, run.job_type, run.display_name) == (
        "first",
        "das",
        "das order=law,food seed=0",
    )
    assert (run.project, run.entity, list(run.tags), run.resume) == ("p", "me", ["nice"], True)


def test_what_cannot_be_read_and_what_is_at_work_is_named_and_left_out(synced):
    root, _, said = synced
    (broken,) = [line for line in said if "broken" in line]
    assert broken.startswith(f"{root / 'broken'}: ParserError: ")
    assert "\n" not in broken
    assert f"{root / 'busy'}: is at work; left out" in said
    assert not (root / "broken" / "rebuilt").exists()
    assert not (root / "busy" / "rebuilt").exists()


def test_a_rebuilt_run_ends_as_the_run_did(synced):
    root, _, _ = synced
    assert [end.exit_code for end in wandb_files.of_kind(root / "done", "exit")] == [0]
    assert [end.exit_code for end in wandb_files.of_kind(root / "cut", "exit")] == [1]
    assert [end.exit_code for end in wandb_files.of_kind(root / "early", "exit")] == [1]


def test_the_config_is_that_of_the_folder_with_what_it_does_not_say(synced):
    config = wandb_files.config(synced[0] / "done")
    assert config["method"] == {"name": "das", "strength": 0.5}
    assert config["cpt"]["label"] == "das"
    assert config["cpt"]["order"] == ["law", "food"]
    assert config["cpt"]["finished"] is True
    assert config["cpt"]["texts"]["law"]["digest"] == "dlaw"


def test_curves_come_from_metrics_csv_of_two_lines_the_later_one(synced):
    logged = wandb_files.history(synced[0] / "done")
    curve = [(row["trainer/global_step"], row["train/lm/law"]) for row in logged if "train/lm/law" in row]
    assert curve == [(0, 3.5), (1, 3.25), (2, 2.5)]
    assert [row["train/lr/law"] for row in logged if "train/lr/law" in row] == [0.1]
    assert [row["train/loss"] for row in logged if "train/loss" in row] == [3.5, 3.25, 2.5]


def test_rows_costs_and_end_tasks_are_points_over_the_stages(synced):
    logged = [row for row in wandb_files.history(synced[0] / "done") if "stage" in row]
    rows = [row for row in logged if "ppl/law" in row]
    assert [row["stage"] for row in rows] == [0, 1, 2]
    assert [row["ppl/food"] for row in rows] == pytest.approx(np.exp([4, 4, 3]).tolist())
    assert [row.get("stages/learned") for row in rows] == [
        None,
        pytest.approx(np.exp(3)),
        pytest.approx((np.exp(3) + np.exp(3.3)) / 2),
    ]
    assert [row["stages/tokens"] for row in rows] == [0, 100, 200]
    assert [row["stages/stored"] for row in rows] == [0, 8, 16]
    assert [row["stages/seconds"] for row in rows] == [0, 10, 20]
    assert [row.get("stages/leak") for row in rows] == [None, None, 0.25]
    law = [(row["stage"], row["tasks/law"]) for row in logged if "tasks/law" in row]
    assert law == [(1, pytest.approx(0.6)), (2, pytest.approx(0.5))]
    assert [key for row in rows for key in row if key.startswith("units/importance/heads")]


def test_curves_have_their_axes(synced):
    metrics = {m.glob_name or m.name: m for m in wandb_files.of_kind(synced[0] / "done", "metric")}
    for name in ("ppl/*", "stages/*", "tasks/*", "units/*"):
        assert metrics[name].step_metric == "stage"
    for name in ("train/*", "monitor/*"):
        assert metrics[name].step_metric == "train/tokens"
    patterns = [name for name in metrics if "*" in name]
    assert len(patterns) == len({name.partition("/")[0] for name in patterns})  # of which none meets another


def test_the_summary_has_the_headlines_and_few_entries(synced):
    known, shown = choose_headlines(scores()), wandb_files.summary(synced[0] / "done")
    assert {key: shown[key] for key in known} == pytest.approx(known)
    entries = {key.split(".")[0] for key in shown if not key.startswith("_")}
    assert len(known) <= MOST and len(entries) <= 40
    assert entries - set(known) - {"stage", "train/tokens", "trainer/global_step"} >= set(tabulate(scores()))


def test_all_numbers_are_in_the_summary_where_they_are_asked_for():
    class Run:
        def __init__(self):
            self.summary, self.config = {}, {}

        def log(self, points):
            pass

    known = summarise_run(scores())
    for asked, expected in (("all", known), ("headlines", choose_headlines(scores()))):
        run = Run()
        wandb_run.publish(run, scores(), folder=Path("nowhere"), summary=asked)
        assert run.summary == pytest.approx(expected)
    assert len(known) > 80


def test_every_table_and_picture_is_there(synced):
    done = synced[0] / "done"
    (last,) = [row for row in wandb_files.history(done) if any(key.startswith("matrix_image") for key in row)]
    names = {key.split(".")[0] for key in last}
    assert names >= {
        "matrix_image",
        "stages_image",
        "parts_image",
        "endtasks_image",
        "report",
        *tabulate(scores()),
    }
    assert len(list(done.rglob("media/images/*.png"))) == 4
    assert [page.read_text() for page in done.rglob("media/html/*.html")] == ["<p>the page</p>"]
    cells = wandb_files.table(done, "losses")
    assert len(cells) == 9
    assert cells[0] == {
        "stage": 2, "after": "food", "text": "law", "learned": True, "nats": 3.3,
        "perplexity": pytest.approx(np.exp(3.3)), "bits_per_byte": pytest.approx(3.3 * 100 / 400 / np.log(2)),
    }  # fmt: skip
    assert [row["learned"] for row in cells[3:]] == [True, False, False, False, False, False]
    assert wandb_files.table(done, "matrix")[1]["law"] == pytest.approx(np.exp(3))
    wandb_files.table(done, "texts")


def test_a_run_without_end_tasks_or_parts_has_no_such_table_or_picture():
    plain = scores(endtasks=False)
    plain.parts = [{} for _ in plain.rows]
    assert set(tabulate(plain)) == {"matrix", "losses", "metrics", "costs", "seconds", "texts"}
    assert set(wandb_run.pictures(plain)) == {"matrix_image", "stages_image"}
    assert task_rows(plain) == []


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
    assert "LC/nats" not in summarise_run(broken)


def test_no_key_collides_whatever_domains_are_called():
    made = scores(domains=NASTY)
    summary, rows = summarise_run(made), [stage_row(made, len(NASTY)), *task_rows(made)]
    points = {key for row in rows for key in row} | set(tabulate(made)) | {"report", "trainer/global_step"}
    points |= {f"{name}_image" for name in ("matrix", "stages", "parts", "endtasks")}
    assert not points & set(summary)
    assert len([key for key in rows[0] if key.startswith("ppl/")]) == len(NASTY) + 1
    assert len([key for key in rows[-1] if key.startswith("tasks/")]) == len(NASTY)


def test_a_second_rebuild_replaces_the_first(synced):
    root, _, _ = synced
    send({root / "cut": scores(finished=False, endtasks=False)})
    assert len(list((root / "cut").rglob("run-*.wandb"))) == 1


def test_the_identifier_is_that_of_the_last_start_with_wandb(tmp_path):
    for name in (
        "run-20260102_000000-new-er",
        "offline-run-20260101_000000-older",
        "latest-run",
        "debug.log",
    ):
        (tmp_path / "wandb" / name).mkdir(parents=True)
    assert sync.identifier(tmp_path, scores()) == "new-er"
    assert sync.identifier(tmp_path / "elsewhere", scores()) == digest(["first", "elsewhere"])


def test_a_run_that_wandb_knows_gets_what_is_missing(tmp_path, monkeypatch):
    class Run:
        resumed, config = True, {}

        def __init__(self):
            self.logged, self.summary, self.code = [], {"stage": 1}, None

        def log(self, points):
            self.logged.append(points)

        def finish(self, exit_code):
            self.code = exit_code

    run = Run()
    monkeypatch.setattr(sync, "open_run", lambda *args, **about: run)
    assert (
        sync.sync_runs(
            {folder(tmp_path / "done", scores()): scores()}, project=None, entity=None, mode="online"
        )
        == 0
    )
    assert [row["stage"] for row in run.logged if "ppl/law" in row] == [2]
    assert not any("train/lm/law" in row for row in run.logged)
    assert run.summary["LC/nats"] == pytest.approx(3.15)
    assert run.code == 0
    assert not (tmp_path / "done" / "rebuilt").exists()


def refusing(error):
    def opened(*args, **about):
        raise error

    return opened


def test_wandb_that_takes_no_run_ends_in_one_line(tmp_path, monkeypatch):
    runs = {folder(tmp_path / str(place), scores()): scores() for place in range(5)}
    monkeypatch.setattr(sync, "open_run", refusing(ConnectionError("W&B: no answer")))
    with pytest.raises(ValueError, match="W&B took none of 3 runs; W&B: no answer"):
        sync.sync_runs(runs, project=None, entity=None, mode="online")
    few = dict(list(runs.items())[:2])
    assert sync.sync_runs(few, project=None, entity=None, mode="online") == 2
    monkeypatch.setattr(sync, "open_run", refusing(ValueError("W&B: no key")))
    with pytest.raises(ValueError, match="W&B: no key"):
        sync.sync_runs(few, project=None, entity=None, mode="online")


def test_damage_found_while_sending_fails_that_run_alone(tmp_path):
    damaged = scores()
    damaged.endtasks["scores"]["accuracy"] = [[0.5]]
    runs = {folder(tmp_path / "damaged", damaged): damaged, folder(tmp_path / "whole", scores()): scores()}
    assert send(runs) == 1
    assert [end.exit_code for end in wandb_files.of_kind(tmp_path / "damaged", "exit")] == [1]
    assert [end.exit_code for end in wandb_files.of_kind(tmp_path / "whole", "exit")] == [0]


def test_an_unknown_mode_is_told():
    with pytest.raises(ValueError, match="mode=disabled; allowed: online, offline"):
        sync.sync_runs({}, project=None, entity=None, mode="disabled")


def test_a_bare_folder_is_enough(tmp_path):
    assert sync.read_folder(tmp_path, scores()) == (tmp_path, {}, [], [{}, {}, {}])


def test_tables_are_plain_json():
    rows = {name: table.to_numpy().tolist() for name, table in tabulate(scores()).items()}
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_of_a_table_that_wandb_cuts_the_last_stages_are_shown(tmp_path):
    import wandb

    many = scores(domains=[f"d{place}" for place in range(100)], endtasks=False)
    many.parts = [{} for _ in many.rows]
    send({folder(tmp_path / "many", many): many})
    lines = wandb_files.table(tmp_path, "losses")
    assert len(lines) == wandb.Table.MAX_ROWS < 101**2
    assert {line["stage"] for line in lines[:101]} == {100}
    assert min(line["stage"] for line in lines) > 0
