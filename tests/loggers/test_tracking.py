"""Curves: metrics.csv, and Weights & Biases offline, read back; the sweep of docs/examples/sweep.yaml."""

import csv
import dataclasses
import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hydra import initialize_config_dir

from cpt.contrib.wandb_tools.rebuild import REBUILT, sync_runs
from cpt.evaluation.scores import COST_COLUMNS, Scores
from cpt.loggers import wandb_run
from cpt.loggers.loggers import LoggedRun, log_scores, log_stage, track
from cpt.loggers.wandb_environment import WandbLabels, WandbPlace, read_run_identifier
from cpt.loggers.wandb_run import Curves
from cpt.reporting.frames import choose_headlines, summarize_scores
from cpt.train import train
from tests.campaigns.tracking import KEY, run_server
from tests.conftest import ROOT, SMALL, compose_in_two_steps
from tests.support.example_runs import make_endtasks, make_scores
from tests.support.wandb_files import config, history, read_records_of_kind, summary, table

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(corpora, cache, tmp_path_factory):
    """Two runs in one process and a failing one, with W&B offline."""
    import wandb

    folder = tmp_path_factory.mktemp("runs")
    options = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    options += [option for option in SMALL if option != "logger=none"]
    options += ["trainer.log_every_n_steps=1", "trainer.steps=4"]
    handler = logging.FileHandler(folder / "log.txt")
    loggers_log = logging.getLogger("cpt")
    loggers_log.addHandler(handler)
    level = loggers_log.level
    loggers_log.setLevel("INFO")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        train(compose_in_two_steps(*options, "seed=0", "tags=[a,b]"), run_dir=folder / "s0")
        rarely_logged = ["mask=migu", "trainer.log_every_n_steps=10"]
        train(compose_in_two_steps(*options, "seed=1", *rarely_logged), run_dir=folder / "s1")
        diverging = ["optim.lr=1e30", "trainer.gradient_clip_val=null"]
        with pytest.raises(ValueError, match="the lm loss is"):
            train(compose_in_two_steps(*options, *diverging), run_dir=folder / "failing")
    wandb.teardown()  # only then are W&B's files whole: its service writes them
    loggers_log.removeHandler(handler)
    handler.close()
    loggers_log.setLevel(level)
    return folder


def test_every_run_has_one_wandb_run_with_its_id_group_and_final_state(runs):
    records = read_records_of_kind(runs, "run")
    assert len({run.run_id for run in records}) == len(records) == 3
    assert {(run.run_group, run.job_type) for run in records} == {("default", "ncl")}

    (first,) = read_records_of_kind(runs / "s0", "run")
    (second,) = read_records_of_kind(runs / "s1", "run")
    assert list(first.tags) == ["a", "b"] and second.display_name == "ncl + migu order=law,food seed=1"
    assert config(runs / "s1")["trainer"]["steps"] == 4
    for name, code in {"s0": 0, "s1": 0, "failing": 1}.items():
        assert [end.exit_code for end in read_records_of_kind(runs / name, "exit")] == [code]
    assert not Path("wandb").exists() and not (ROOT / "wandb").exists()


def test_the_log_says_how_an_offline_run_is_sent_and_its_lines_are_kept_on_wandb(runs):
    (folder,) = (runs / "s0" / "wandb").glob("offline-run-*")
    lines_on_wandb = [record.line for record in read_records_of_kind(runs / "s0", "output_logger")]
    assert any("Evaluated after food" in line for line in lines_on_wandb)
    log_file = runs / "log.txt"
    assert log_file.read_text().count(f"W&B: offline; send it with: wandb sync {folder}") == 2


def test_losses_are_one_curve_over_all_tokens_and_the_matrix_is_one_over_stages_and_a_table(runs):
    logged = history(runs / "s0")
    scores = Scores.load(runs / "s0" / "scores.json")
    curve = {row["train/tokens"]: row["train/loss"] for row in logged if "train/loss" in row}
    tokens = [*curve]
    assert len(curve) == 8 and tokens == sorted(tokens) and all(0 < loss < 20 for loss in curve.values())
    assert (tokens[3], tokens[-1]) == (scores.tokens_read[1], sum(scores.tokens_read))
    ends = [row["train/tokens"] for row in history(runs / "s1") if "train/loss" in row]
    assert ends == [tokens[3], tokens[-1]]  # a stage shorter than log_every_n_steps has a point at its end

    keys = set().union(*logged)
    train_keys = {key for key in keys if key.startswith("train")}
    names = ("loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "memory_gb")
    assert train_keys == {f"train/{name}" for name in (*names, "global_step", "stage")}
    steps = [(row["train/stage"], row["train/global_step"]) for row in logged if "train/global_step" in row]
    assert steps == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 5), (2, 6), (2, 7), (2, 8)]
    assert any("matrix_image" in key for key in keys)

    stages = {row["stage"]: row for row in logged if "stage" in row}
    assert set(stages) == {0, 1, 2} and stages[2]["ppl/law"] == pytest.approx(math.exp(scores.nll[2][0]))
    assert stages[2]["nats/law"] == pytest.approx(scores.nll[2][0]) and 0 < stages[2]["bits_per_byte/law"] < 9
    lines = table(runs / "s0", "matrix")
    assert [[*line] for line in lines] == [["after", "law", "food", "general"]] * 3
    assert [line["after"] for line in lines] == ["base", "law", "food"]
    for name in ("learned", "FG", "LC"):
        for unit in ("nats", "perplexity", "bits_per_byte"):
            metric = scores.metrics[name]
            low, high = metric["interval"][unit]
            key = f"{name}/{unit}"
            values = [summary(runs / "s0")[f"{key}{end}"] for end in ("", "/low", "/high")]
            assert values == pytest.approx([metric[unit], low, high])

    with (runs / "s0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["name"] == "train/lm/food"] == list(range(4))


def test_a_rebuilt_run_has_the_curves_of_the_live_one(runs):
    import wandb

    live = history(runs / "s0")
    scores = Scores.load(runs / "s0" / "scores.json")
    assert sync_runs({runs / "s0": scores}, project="p", entity=None, mode="offline") == 0
    wandb.teardown()
    rebuilt = history(runs / "s0" / REBUILT)

    for name in ("train/loss", "train/learning_rate", "train/grad_norm", "train/global_step", "train/stage"):
        assert points_of(name, rebuilt) == points_of(name, live)
    assert names_in(rebuilt) == names_in(live)


def points_of(name, rows):
    return [(row["train/tokens"], row[name]) for row in rows if name in row]


def names_in(rows):
    """The names of all rows up to their first point, but for the time, which is another at each logging."""
    return {key.split(".")[0] for key in set().union(*rows)} - {"_timestamp"}


def test_a_resumed_run_repeats_no_point(tmp_path):
    (tmp_path / "wandb").mkdir()
    points = []
    run = SimpleNamespace(log=points.append, define_metric=lambda *args, **kwargs: None)
    for _ in range(2):  # the second start begins after a kill
        curves = Curves(run, progress=tmp_path / "wandb" / "tokens")
        stages = (("law", 0, (1, 2, 3)), ("a/b", 30, (1,)))
        for number, (domain, earlier_tokens, steps) in enumerate(stages, start=1):
            curves.enter(domain, stage=number, tokens=earlier_tokens)
            for step in steps:
                curves.log({f"train/lm/{domain}": 1.0, f"train/tokens/{domain}": 10.0 * step, "epoch": 0})

    tokens = [point["train/tokens"] for point in points]
    assert tokens == sorted(tokens) and tokens[:4] == [10, 20, 30, 40]
    assert set().union(*points) == {"train/loss", "train/stage", "train/tokens"}


def test_a_run_is_online_for_a_logged_in_user_if_the_server_answers(tmp_path, monkeypatch, caplog):
    modes = []  # of the calls of init, in their order
    labels = WandbLabels(name="ncl", group="g", job_type="ncl")

    def init(identifier, folder, *, mode, **options):
        modes.append(mode)
        if mode == "online" and identifier == "down":
            raise ConnectionError("W&B: timed out; logger.mode=offline keeps the run in its folder")

    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(wandb_run, "init_wandb", init)

    def open_run(identifier, mode="auto"):
        destination = WandbPlace(mode=mode)
        wandb_run.open_wandb(identifier, tmp_path, destination=destination, labels=labels, config={})

    open_run("a")  # without an API key
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    open_run("a")
    assert modes == ["offline", "online"] and not caplog.text

    for mode in ("auto", "online"):  # of a server that does not answer
        caplog.clear()
        open_run("down", mode)
        assert modes[-2:] == ["online", "offline"] and "timed out" in caplog.text


def test_a_refusal_of_wandb_ends_with_what_the_program_offers(tmp_path, monkeypatch):
    import wandb

    def refuse(**options):
        raise wandb.errors.AuthenticationError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    labels = WandbLabels(name="ncl", group="g", job_type="ncl")
    options = {"mode": "online", "destination": WandbPlace(mode="online"), "labels": labels, "config": {}}
    message = "W&B: No API key configured; logger.mode=offline keeps the run in its folder"
    with pytest.raises(ValueError, match=f"^{message}$"):
        wandb_run.init_wandb("a", tmp_path, **options)

    (tmp_path / "config.yaml").write_text("seed: 0\n")
    scores = make_scores()
    with pytest.raises(ValueError, match="^W&B: No API key configured; --mode=offline writes RUN/rebuilt"):
        sync_runs({tmp_path: scores}, project="p", entity=None, mode="online")


def test_a_run_that_fails_after_its_first_stage_and_is_started_again_is_one_run_to_wandb(tmp_path):
    import wandb

    folder = tmp_path / "das_seed-3"
    folder.mkdir()
    scores = make_scores(method="das", endtasks=make_endtasks([[0.5] * 3] * 4, when="each"))
    labels = WandbLabels(name="das order=0 seed=3", group="g", job_type="das")
    run = LoggedRun(folder=folder, labels=labels, config={"seed": 3}, texts=scores.domains)
    destination = WandbPlace(mode="offline", project="p")

    def scores_of_rows(num_rows):
        columns = ("rows", "nll", "modules", *COST_COLUMNS)
        values = {name: getattr(scores, name)[:num_rows] for name in columns}
        return dataclasses.replace(scores, **values, endtasks={})

    tracked = track(run, csv_file=True, wandb=destination, custom={})
    with pytest.raises(KeyboardInterrupt), tracked as loggers:
        log_stage(loggers, scores_of_rows(3))
        raise KeyboardInterrupt
    with track(run, csv_file=True, wandb=destination, custom={}) as loggers:
        log_stage(loggers, scores_of_rows(4))
        log_scores(loggers, scores, folder=folder)
    wandb.teardown()

    starts = read_records_of_kind(folder, "run")  # else `wandb sync` counts the second's steps from 0
    assert [(run.run_id, run.resume) for run in starts] == [(read_run_identifier(folder), True)] * 2
    assert [end.exit_code for end in read_records_of_kind(folder, "exit")] == [1, 0]
    assert not (set(summarize_scores(scores)) - set(choose_headlines(scores))) & set(summary(folder))
    assert [row["stage"] for row in history(folder) if "ppl/law" in row] == [2, 3]


def test_each_parameter_of_the_sweep_is_a_valid_override(composed, monkeypatch):
    sweep = yaml.safe_load((ROOT / "docs" / "examples" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["metric"]["name"] in summarize_scores(make_scores())
    fixed = [part for part in sweep["command"] if not part.startswith("${")]
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    for name, parameter in sweep["parameters"].items():
        for value in parameter.get("values") or [parameter["min"], parameter["max"]]:
            cfg = composed(*fixed, f"{name}={value}")
            assert (cfg.method.name if name == "method" else cfg.optim.lr) == value
            assert cfg.domains.score_on == "valid"  # what is chosen on the test texts is no result
            assert (cfg.name, cfg.logger.wandb, cfg.logger.mode) == ("s1", True, "online")


def test_a_run_that_the_server_refuses_at_its_start_is_logged_offline(tmp_path, monkeypatch, caplog):
    import wandb

    labels = WandbLabels(name="r", group="g", job_type="ncl", tags=[])
    with run_server() as server:
        server.is_refusing = True
        variables = {"WANDB_API_KEY": KEY, "WANDB_INIT_TIMEOUT": "3", "HOME": str(tmp_path)}
        for name, value in {**variables, "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("WANDB_MODE", raising=False)
        destination = WandbPlace(mode="online", project="p")
        try:
            run = wandb_run.open_wandb("refused", tmp_path, destination=destination, labels=labels, config={})
            run.log({"loss": 1.0})
            run.finish()
        finally:
            wandb.teardown()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "503; logging offline" in line
    assert [row["loss"] for row in history(tmp_path)] == [1.0]
