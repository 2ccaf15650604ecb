"""Curves: metrics.csv, and Weights & Biases offline, read back."""

import csv
import json
import subprocess
import sys

import pytest
from conftest import ROOT, SMALL

from cpt.tracking import LongCSV

ORDER = "order=[law,food]"


def records(folder):
    """The records of offline W&B files below a folder: a 7-byte header, then LevelDB log blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.rglob("run-*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                record = Record()
                record.ParseFromString(whole)
                whole = b""
                yield path, record


def history(folder):
    """What was logged, a dictionary per step."""
    for _, record in records(folder):
        if record.WhichOneof("record_type") == "history":
            yield {
                ".".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }


@pytest.fixture(scope="module")
def tracked(corpora, cache, tmp_path_factory):
    """Two runs in one process and a failing one, with W&B offline."""
    folder = tmp_path_factory.mktemp("tracked")
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER]
    quick = [*places, *[o for o in SMALL if o != "logger=none"], "trainer.log_every_n_steps=1", "tags=[a,b]"]
    program = f"""
import sys, pathlib; sys.path.insert(0, {str(ROOT)!r})
from hydra import compose, initialize_config_dir
import cpt.config
from cpt.sequence import run
with initialize_config_dir({str(ROOT / "conf")!r}, version_base="1.3"):
    for seed in (0, 1):
        cfg = compose("config", overrides={quick!r} + [f"seed={{seed}}"] + ["mask=migu"] * seed)
        run(cfg, folder=pathlib.Path({str(folder)!r}) / f"s{{seed}}")
    cfg = compose("config", overrides={quick!r} + ["optim.lr=1e30", "trainer.gradient_clip_val=null"])
    try:
        run(cfg, folder=pathlib.Path({str(folder)!r}) / "failing")
    except ValueError as error:
        print(error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "the lm loss is" in ended.stdout
    return folder


def test_every_run_is_one_run_with_its_own_id_and_group(tracked):
    runs = [record.run for _, record in records(tracked) if record.WhichOneof("record_type") == "run"]
    by_name = {run.display_name: run for run in runs}
    assert set(by_name) == {"s0", "s1", "failing"}
    assert len({run.run_id for run in runs}) == 3
    assert {run.run_group for run in runs} == {"default"}
    assert {run.job_type for run in runs} == {"ncl"}
    assert list(by_name["s0"].tags) == ["a", "b"]
    config = {item.key: json.loads(item.value_json) for item in by_name["s1"].config.update}
    assert config["seed"] == 1
    assert config["trainer"]["steps"] == 6


def test_a_failed_run_is_shown_as_failed(tracked):
    codes = {
        path.parent.parent.parent.name: record.exit.exit_code
        for path, record in records(tracked)
        if record.WhichOneof("record_type") == "exit"
    }
    assert codes == {"s0": 0, "s1": 0, "failing": 1}


def test_losses_are_kept_by_domain(tracked):
    logged = list(history(tracked / "s0"))
    for domain in ("law", "food"):
        losses = [row[f"train/lm/{domain}"] for row in logged if f"train/lm/{domain}" in row]
        assert len(losses) == 6
        assert all(0 < loss < 20 for loss in losses)


def test_the_matrix_is_logged_over_the_stages_and_as_table_and_image(tracked):
    logged = list(history(tracked / "s0"))
    scores = json.loads((tracked / "s0" / "scores.json").read_text())
    stages = {row["stage"]: row for row in logged if "stage" in row}
    assert set(stages) == {0, 1, 2}
    import math

    assert stages[2]["ppl/law"] == pytest.approx(math.exp(scores["nll"][2][0]))
    (last,) = [row for row in logged if any(key.startswith("matrix") for key in row)]
    assert {key.split(".")[0] for key in last} >= {"matrix", "matrix_image"}
    (table,) = (tracked / "s0").rglob("matrix_[0-9]*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["after", "law", "food", "general"]
    assert [row[0] for row in content["data"]] == ["base", "law", "food"]


def test_what_a_mask_lets_one_see_is_logged_as_histograms(tracked):
    rows = [row for row in history(tracked / "s1") if "stage" in row]
    named = {key.removesuffix("._type") for row in rows for key in row if key.startswith("units/")}
    assert any(name.startswith("units/chosen/model.layers.0.attn.Wqkv") for name in named)
    assert not any(key.startswith("units/") for row in history(tracked / "s0") for key in row)


def test_the_summary_has_the_metrics(tracked):
    summary = {}
    for path, record in records(tracked):
        if "/s0/" in str(path) and record.WhichOneof("record_type") == "summary":
            summary |= {
                item.key or ".".join(item.nested_key): item.value_json for item in record.summary.update
            }
    scores = json.loads((tracked / "s0" / "scores.json").read_text())
    assert float(summary["LC/perplexity"]) == pytest.approx(scores["metrics"]["LC"]["perplexity"])
    assert float(summary["general_drift/nats"]) == pytest.approx(scores["metrics"]["general_drift"]["nats"])


def test_metrics_csv_has_one_line_per_value(tracked):
    with (tracked / "s0" / "metrics.csv").open() as file:
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
