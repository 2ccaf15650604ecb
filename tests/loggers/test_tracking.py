"""Curves: metrics.csv, and Weights & Biases offline, read back."""

import csv
import dataclasses
import json
import math

import numpy as np
import pytest

from cpt.contrib.wandb_tools.rebuild import REBUILT, sync_runs
from cpt.core.config import digest
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.loggers.loggers import LongCSV, log_scores, log_stage, track
from cpt.loggers.wandb import Curves, init_wandb, run_name
from cpt.reporting.frames import choose_headlines, summarize_scores
from tests.conftest import ROOT, SMALL
from tests.support.processes import ended, started
from tests.support.tracked import refusing, scores
from tests.support.wandb_files import config, history, of_kind, records, summary

pytestmark = pytest.mark.slow

ORDER = "order=[law,food]"


@pytest.fixture(scope="module")
def runs(corpora, cache, tmp_path_factory):
    """Two runs in one process and a failing one, with W&B offline."""
    folder = tmp_path_factory.mktemp("runs")
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER]
    quick = [*places, *[o for o in SMALL if o != "logger=none"], "trainer.log_every_n_steps=1", "tags=[a,b]"]
    program = f"""
import sys, pathlib; sys.path.insert(0, {str(ROOT)!r})
from hydra import compose, initialize_config_dir
import cpt.core.config
MASKED = ["mask=migu", "logger.histograms=true"]
from cpt.train import train
with initialize_config_dir({str(ROOT / "conf")!r}, version_base="1.3"):
    for seed in (0, 1):
        cfg = compose("config", overrides={quick!r} + [f"seed={{seed}}"] + MASKED * seed)
        train(cfg, run_dir=pathlib.Path({str(folder)!r}) / f"s{{seed}}")
    cfg = compose("config", overrides={quick!r} + ["optim.lr=1e30", "trainer.gradient_clip_val=null"])
    try:
        train(cfg, run_dir=pathlib.Path({str(folder)!r}) / "failing")
    except ValueError as error:
        print(error)
"""
    (folder / "program.py").write_text(program)
    process = started(folder / "program.py", cwd=folder, log=folder / "log")
    assert ended(process) == 0, (folder / "log").read_text()[-3000:]
    assert "the lm loss is" in (folder / "log").read_text()
    return folder


def test_every_run_is_one_run_with_its_own_id_and_group(runs):
    made = of_kind(runs, "run")
    by_name = {run.display_name: run for run in made}
    assert set(by_name) == {"ncl order=law,food seed=0", "ncl + migu order=law,food seed=1"}
    by_name = {
        path.parent.parent.parent.name: each.run for path, each in records(runs) if each.HasField("run")
    }
    assert set(by_name) == {"s0", "s1", "failing"}
    assert len(made) == len({run.run_id for run in made}) == 3
    assert {run.run_group for run in made} == {"default"}
    assert {run.job_type for run in made} == {"ncl"}
    assert list(by_name["s0"].tags) == ["a", "b"]
    assert config(runs / "s1")["seed"] == 1
    assert config(runs / "s1")["trainer"]["steps"] == 6


def test_a_failed_run_is_shown_as_failed(runs):
    codes = {
        path.parent.parent.parent.name: record.exit.exit_code
        for path, record in records(runs)
        if record.WhichOneof("record_type") == "exit"
    }
    assert codes == {"s0": 0, "s1": 0, "failing": 1}


def test_losses_are_one_curve_over_the_tokens_of_the_whole_run(runs):
    logged = list(history(runs / "s0"))
    told = json.loads((runs / "s0" / "scores.json").read_text())
    curve = [(row["train/tokens"], row["train/loss"]) for row in logged if "train/loss" in row]
    tokens = [place for place, _ in curve]
    assert len(curve) == 12 and tokens == sorted(set(tokens))
    assert (tokens[5], tokens[-1]) == (told["seen"][1], sum(told["seen"]))
    assert all(0 < loss < 20 for _, loss in curve)
    keys = {key for row in logged for key in row if key.startswith("train")}
    assert keys == {f"train/{name}" for name in ("loss", "lr", "grad_norm", "tokens", "tokens_per_s")}


def test_the_matrix_is_logged_over_the_stages_and_as_table_and_image(runs):
    logged = list(history(runs / "s0"))
    told = json.loads((runs / "s0" / "scores.json").read_text())
    stages = {row["stage"]: row for row in logged if "stage" in row}
    assert set(stages) == {0, 1, 2}
    assert stages[2]["ppl/law"] == pytest.approx(math.exp(told["nll"][2][0]))
    (last,) = [row for row in logged if any(key.startswith("matrix") for key in row)]
    assert {key.split(".")[0] for key in last} >= {"matrix", "matrix_image"}
    (table,) = (runs / "s0").rglob("matrix_[0-9]*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["after", "law", "food", "general"]
    assert [row[0] for row in content["data"]] == ["base", "law", "food"]


def test_a_rebuilt_run_has_the_curves_of_the_live_one(runs):
    live = history(runs / "s0")
    assert sync_runs({runs / "s0": Scores.load(runs / "s0" / "scores.json")}, project="p", entity=None,
                          mode="offline") == 0  # fmt: skip
    import wandb

    wandb.teardown()
    rebuilt = history(runs / "s0" / REBUILT)
    for name in ("train/loss", "train/lr", "train/grad_norm", "train/tokens_per_s"):
        both = [[(row["train/tokens"], row[name]) for row in rows if name in row] for rows in (live, rebuilt)]
        assert both[0] == both[1]
    keys = [{key.split(".")[0] for row in rows for key in row} - {"_timestamp"} for rows in (live, rebuilt)]
    assert keys[0] == keys[1]


def curves(run, **given):
    """Curves of two domains; a start that was killed after step 3 repeats its last two steps."""
    made = Curves(run, **given)
    for domain, before, steps in (("law", 0, (1, 2, 3)), ("a/b", 30, (1,))):
        made.enter(domain, tokens=before)
        for step in steps:
            made.log({f"train/lm/{domain}": 1.0, f"train/tokens/{domain}": 10.0 * step, "epoch": 0}, step)


class Told:
    def __init__(self):
        self.logged, self.axes = [], {}

    def log(self, points):
        self.logged.append(points)

    def define_metric(self, name, step_metric, **_):
        self.axes[name] = step_metric


def test_a_resumed_run_repeats_no_point(tmp_path):
    (tmp_path / "wandb").mkdir()
    told = Told()
    for _ in range(2):
        curves(told, high=tmp_path / "wandb" / "tokens")
    places = [points["train/tokens"] for points in told.logged]
    assert places == sorted(places) and places[:4] == [10, 20, 30, 40]
    assert {key for points in told.logged for key in points} == {"train/loss", "train/tokens"}


def test_curves_of_each_domain_are_an_option():
    told = Told()
    curves(told, per_domain=True)
    keys = {key for points in told.logged for key in points if key.endswith(("/law", "/a%2Fb"))}
    assert keys == {f"train/{name}/{domain}" for name in ("lm", "tokens") for domain in ("law", "a%2Fb")}
    assert {told.axes[key] for key in keys} == {"trainer/global_step"}
    assert [points["train/tokens/a%2Fb"] for points in told.logged[3:]] == [10]


def test_a_run_has_a_short_name():
    about = {"method": "das", "mask": "none", "replay": "none", "seed": 1, "variant": ""}
    assert run_name(about, 0) == "das order=0 seed=1"
    assert run_name(about | {"variant": "temperature=0.1"}, "reverse") == (
        "das order=reverse seed=1 (temperature=0.1)"
    )
    assert run_name(about, [f"domain-{place}" for place in range(120)]) == "das order=120 domains seed=1"


def test_what_a_mask_lets_one_see_is_logged_as_histograms(runs):
    rows = [row for row in history(runs / "s1") if "stage" in row]
    named = {key.removesuffix("._type") for row in rows for key in row if key.startswith("units/")}
    assert any(name.startswith("units/chosen/model.layers.0.attn.Wqkv") for name in named)
    assert not any(key.startswith("units/") for row in history(runs / "s0") for key in row)


def test_the_summary_has_the_metrics(runs):
    shown, metrics = summary(runs / "s0"), json.loads((runs / "s0" / "scores.json").read_text())["metrics"]
    assert shown["LC/perplexity"] == pytest.approx(metrics["LC"]["perplexity"])
    assert shown["general_drift/nats"] == pytest.approx(metrics["general_drift"]["nats"])


def test_metrics_csv_has_one_line_per_value(runs):
    with (runs / "s0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == {"step", "name", "value"}
    assert [int(row["step"]) for row in rows if row["name"] == "train/lm/food"] == list(range(6))
    assert len([row for row in rows if row["name"] == "ppl/food"]) == 3


def test_metrics_csv_is_added_to_by_a_resumed_run(tmp_path):
    for step in (1, 2):
        LongCSV(tmp_path / "metrics.csv").log_metrics({"loss": 0.5}, step=step)
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,name,value", "1,loss,0.5", "2,loss,0.5"]


def test_no_logger_writes_nothing(small, start, tmp_path):
    start(small("order=[law]", "trainer.steps=1"), tmp_path)
    assert not (tmp_path / "metrics.csv").exists()
    assert not (tmp_path / "wandb").exists()


def test_an_unknown_mode_is_told(small, start, tmp_path):
    with pytest.raises(ValueError, match="logger.mode=sometimes; allowed: online, offline, disabled"):
        start(small("order=[law]", "logger=wandb", "logger.mode=sometimes"), tmp_path)


OFFLINE = {"wandb": True, "histograms": True, "mode": "offline", "project": "p", "entity": None, "csv": True}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that fails after its first stage and is started again."""
    import wandb

    about = {
        "name": "das order=0 seed=3",
        "group": "g",
        "job_type": "das",
        "tags": ["a"],
        "config": {"seed": 3},
    }
    place, whole = tmp_path_factory.mktemp("resumed") / "das_seed-3", scores()
    place.mkdir()
    with pytest.raises(KeyboardInterrupt), track(OFFLINE, place, about=about) as loggers:
        log_stage(loggers, until(whole, 2), distributions={})
        raise KeyboardInterrupt
    with track(OFFLINE, place, about=about) as loggers:
        log_stage(loggers, until(whole, 3), distributions={"heads": np.arange(4.0)})
        log_scores(loggers, whole, folder=place, summary="headlines")
    wandb.teardown()
    return place


def until(whole, rows):
    """The scores when so many rows were done."""
    by_row = {name: getattr(whole, name)[:rows] for name in ("rows", "nll", "parts", *NOTED, *COSTS)}
    return dataclasses.replace(whole, **by_row, endtasks={})


def test_a_run_that_is_started_again_is_one_run_to_wandb(resumed):
    starts = of_kind(resumed, "run")
    assert [run.run_id for run in starts] == [digest(["g", "das_seed-3"])] * 2
    assert [run.resume for run in starts] == [
        True,
        True,
    ]  # else `wandb sync` counts the second's steps from 0
    assert [end.exit_code for end in of_kind(resumed, "exit")] == [1, 0]
    assert [row["stage"] for row in history(resumed) if "ppl/law" in row] == [1, 2]


def test_all_that_the_report_says_is_logged_at_the_end(resumed):
    known, shown = choose_headlines(scores()), summary(resumed)
    assert {key: shown[key] for key in known} == pytest.approx(known)
    assert not (set(summarize_scores(scores())) - set(known)) & set(shown)
    keys = {key.split(".")[0] for row in history(resumed) for key in row}
    assert keys >= {"matrix", "losses", "endtasks", "costs", "endtasks_image", "tasks/law"}
    assert any(key.startswith("units/heads") for row in history(resumed) for key in row)


def test_metrics_csv_has_the_points_over_the_stages(resumed):
    with (resumed / "metrics.csv").open() as file:
        lines = [(row["step"], row["name"], float(row["value"])) for row in csv.DictReader(file)]
    assert ("2", "ppl/food", pytest.approx(math.exp(3))) in lines
    assert ("2", "stages/tokens", 200.0) in lines
    assert not any(name == "stage" for _, name, _ in lines)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tags": ["x" * 65]}, r"tags=\['x+'\]; allowed: 1 to 64 characters each"),
        ({"tags": [""]}, "allowed: 1 to 64 characters each"),
        ({"tags": [], "project": "a/b"}, "W&B: .*a/b.*; logger.mode=offline keeps the run in its folder"),
    ],
)
def test_what_wandb_refuses_ends_in_one_line(tmp_path, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        init_wandb("id0", tmp_path, **{"mode": "offline", "project": "p", **given})
    assert "\n" not in str(caught.value)


def test_wandb_that_cannot_be_reached_and_a_wrong_key_are_told_apart(tmp_path, monkeypatch):
    import wandb

    for error, expected in (
        (wandb.errors.CommError("no\nanswer"), ConnectionError),
        (wandb.errors.AuthenticationError("no\nanswer"), ValueError),
    ):
        monkeypatch.setattr(wandb, "init", refusing(error))
        with pytest.raises(expected, match="W&B: no answer; logger.mode=offline keeps"):
            init_wandb("id0", tmp_path, tags=[], mode="online")
