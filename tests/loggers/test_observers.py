"""Loggers observe: what fails in one is a line in the log; names that they get, W&B's environment and
identifiers."""

import os
import random
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from cpt.core.processes import JOB
from cpt.loggers import wandb_environment
from cpt.loggers.guard import MAX_FAILURES, guard_logger
from cpt.loggers.loggers import LoggedRun, LongCSV, log_scores, log_stage, track
from cpt.loggers.metric_names import MetricNames
from cpt.loggers.wandb_environment import (
    WandbLabels,
    WandbPlace,
    check_environment,
    choose_identifier,
    files_in,
    read_run_identifier,
)
from cpt.loggers.wandb_run import FINISH_TIMEOUT_S, check_settings
from cpt.trainer.callbacks import make_loggers
from cpt.trainer.run_dir import RunDir
from tests.support.example_runs import make_scores

LABELS = WandbLabels(name="ncl order=0 seed=0", group="first", job_type="ncl")
PLACE = WandbPlace(mode="offline")
FAILURES = {
    "disk": OSError(28, "No space left on device"),
    "package": ImportError("No module named 'google.protobuf'"),
    "server": ConnectionError("connection refused"),
    "exit": SystemExit(1),
}


class Recorder(Logger):
    """Keeps what it gets; fails in the methods named in `failing`."""

    name = "recorder"
    version = ""

    def __init__(self, failing=(), error="disk", digits=3):
        super().__init__()
        if digits < 1:
            raise ValueError("digits has to be positive")
        self.failing = failing
        self.error = error
        self.metrics = []
        self.calls = 0
        self.fail("init")

    def fail(self, method):
        self.calls += 1
        if method in self.failing:
            raise FAILURES[self.error]

    @property
    def experiment(self):
        self.fail("experiment")
        return self

    def log_hyperparams(self, params, *args, **kwargs):
        self.fail("log_hyperparams")

    def log_metrics(self, metrics, step=None):
        self.fail("log_metrics")
        self.metrics.append(metrics)

    def log_image(self, key, images):
        self.fail("log_image")

    def save(self):
        self.fail("save")

    def finalize(self, status):
        self.fail("finalize")
        self.status = status


def logged_run(folder, texts=()):
    folder.mkdir(exist_ok=True)
    return LoggedRun(folder=folder, labels=LABELS, config={"seed": 0}, texts=list(texts))


@pytest.fixture
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("method", ["log_hyperparams", "log_metrics", "experiment", "save", "finalize"])
def test_a_failing_logger_gives_one_warning_and_the_others_continue(tmp_path, caplog, method, error):
    failing = Recorder([method], error)
    working = Recorder()
    scores = make_scores()
    custom = {"mine": failing, "other": working}
    with track(logged_run(tmp_path), csv_file=True, wandb=None, custom=custom) as loggers:
        for logger in loggers:  # as a trainer does before each stage
            _ = logger.experiment if hasattr(logger, "experiment") else None
        for step in range(5):
            for logger in loggers:
                logger.log_metrics({"train/lm/law": 1.0}, step=step)
        log_stage(loggers, scores)
        log_scores(loggers, scores, folder=tmp_path)

    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("logger.mine failed (") and type(FAILURES[error]).__name__ in warning
    assert len(working.metrics) == 7 and working.status == "success"
    assert isinstance(failing, Recorder)  # callbacks ask for the class


def test_a_logger_that_fails_again_and_again_is_not_called_any_more():
    logger = Recorder(["log_metrics"], "server")
    guard_logger(logger, "logger.mine")
    for _ in range(3 * MAX_FAILURES):
        logger.log_metrics({})
        logger.save()
    assert logger.calls == 1 + MAX_FAILURES + MAX_FAILURES - 1  # init, failures, what succeeded between them
    assert logger.cpt_failures.is_disabled


def test_a_logger_that_fails_now_and_then_keeps_the_rest(caplog):
    logger = Recorder()
    guard_logger(logger, "logger.mine")
    for step in range(10):
        logger.failing = ["log_metrics"] if step % 2 == 1 else []
        logger.log_metrics({"step": step})
    assert [metrics["step"] for metrics in logger.metrics] == [0, 2, 4, 6, 8]

    logger.failing = ["log_image"]
    assert logger.log_image("a", []) is None and caplog.text.count("failed") == 1


def test_metrics_csv_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "metrics.csv").mkdir()
    with track(logged_run(tmp_path), csv_file=True, wandb=None, custom={}) as loggers:
        loggers[0].log_metrics({"a": 1.0}, step=0)
    assert "logger.csv failed (IsADirectoryError" in caplog.text


@pytest.mark.parametrize("stored", ["step,name,value\n0,lm,4.0\n", "step,name,value\n0,lm,4.0\n1,lm"])
def test_a_line_that_a_killed_process_began_does_not_swallow_the_next(stored, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text(stored)
    logger = LongCSV(path)
    for step in (1, 2):
        logger.log_metrics({"lm": 3.0}, step=step)
    assert path.read_text().splitlines()[-2:] == ["1,lm,3.0", "2,lm,3.0"]


def entry(**options):
    return {"mine": {"_target_": f"{__name__}.Recorder", **options}}


def test_a_failure_at_construction_is_a_warning_and_a_wrong_option_is_refused(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("cpt.core.sections.resolve_name", lambda target: Recorder)
    monkeypatch.setattr("hydra._internal.utils._locate", lambda target: Recorder)
    monkeypatch.setattr("hydra._internal.instantiate._instantiate2._locate", lambda target: Recorder)
    for error in ("disk", "package", "server"):
        caplog.clear()
        loggers = make_loggers(entry(failing=["init"], error=error), folder=tmp_path)
        assert isinstance(loggers["mine"], DummyLogger)
        assert caplog.text.count("logger.mine failed") == 1

    with pytest.raises(ValueError, match="digits has to be positive"):
        make_loggers(entry(digits=0), folder=tmp_path)
    with pytest.raises(ValueError, match="logger.mine.digit"):
        make_loggers(entry(digit=1), folder=tmp_path)


def test_wandb_that_cannot_be_opened_is_a_warning(tmp_path, monkeypatch, caplog, no_variables):
    def fail(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("wandb.init", fail)
    with track(logged_run(tmp_path), csv_file=False, wandb=PLACE, custom={}) as loggers:
        log_stage(loggers, make_scores())
        log_scores(loggers, make_scores(), folder=tmp_path)
    assert caplog.text.count("logger.wandb failed (OSError: [Errno 30] Read-only file system)") == 1


@pytest.mark.parametrize("variable", ["", "20"])
def test_an_unreachable_server_at_the_end_gives_a_warning_after_a_limited_wait(
    variable, tmp_path, monkeypatch, caplog, no_variables
):
    def finish(exit_code):
        raise TimeoutError("Timed out finishing run.")

    all_settings = []  # of the calls of init

    def init(*args, settings, **options):
        all_settings.append(settings)
        run = mock.MagicMock(disabled=False, offline=False, url="https://server/run", finish=finish)
        run.settings.sync_dir = "files"
        return run

    if variable:
        monkeypatch.setenv("WANDB_FINISH_TIMEOUT", variable)
    monkeypatch.setattr("wandb.init", init)
    destination = WandbPlace(mode="online")
    with track(logged_run(tmp_path), csv_file=False, wandb=destination, custom={}) as loggers:
        log_stage(loggers, make_scores())
    (settings,) = all_settings
    assert settings.finish_timeout_raises
    assert settings.finish_timeout == (0 if variable else FINISH_TIMEOUT_S)  # 0: W&B obeys the variable
    expected = "logger.wandb failed (TimeoutError: not all was sent; send it with: wandb sync files)"
    assert caplog.text.count(expected) == 1


@pytest.mark.slow
def test_a_run_whose_observers_all_fail_is_finished_and_the_same_command_makes_its_report(
    small, start, tmp_path, monkeypatch, caplog
):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    missing = "+logger.board._target_=lightning.pytorch.loggers.TensorBoardLogger"  # its package is not there
    cfg = small("order=[law,food]", missing, "logger=csv")
    with monkeypatch.context() as patched:
        patched.setattr(LongCSV, "log_metrics", fail)
        patched.setattr("cpt.reporting.run_page.build_blocks", fail)
        patched.setattr("cpt.trainer.finalize.write_model_card", fail)
        start(cfg, tmp_path / "run")

    run = RunDir(tmp_path / "run")
    assert run.load_scores().run["finished"] and not (run.path / "report.html").exists()
    for name in ("logger.board", "logger.csv", "The report", "The model card"):
        assert len([line for line in caplog.messages if name in line]) == 1, name

    start(cfg, run.path)
    assert (run.path / "report.html").exists() and run.find_damaged_outputs(full=True) == []


# Names of texts


SIMILAR_NAMES = {
    "signs": ["C", "C++", "C#", "C*"],
    "blanks": ["my data", "my_data", "my  data", "my-data"],
    "case": ["Law", "law", "LAW", "food"],
    "unicode": ["é", "e\u0301", "e", "法律", "料理"],
    "paths": ["a/b", "a%2Fb", "a2Fb", "a", "..", ".", "a//b"],
    "long": ["x" * 300, "x" * 301],
}


def clean_for_mlflow(name):
    return re.sub("[^a-zA-Z0-9_/. -]+", "", name)


def clean_for_tensorboard(name):
    return re.sub(r"[^-/\w\.]", "_", name).lstrip("/")


@pytest.mark.parametrize("texts", SIMILAR_NAMES.values(), ids=SIMILAR_NAMES)
def test_texts_have_distinct_names_that_no_logger_changes(texts):
    names = MetricNames(texts)
    logged = [names.logged(f"train/lm/{text}") for text in texts]
    assert len({name.casefold() for name in logged}) == len(texts)
    for name in logged:
        assert clean_for_mlflow(name) == name == clean_for_tensorboard(name)
        assert os.path.normpath(name) == name and len(name) <= 250
        assert names.logged(name) == name or name.split("/")[-1] in names.alike

    # A name does not depend on the order of the texts.
    assert logged == [MetricNames(texts[::-1]).logged(f"train/lm/{text}") for text in texts]


def test_plain_names_stay_and_custom_loggers_get_one_value_for_each_text(tmp_path, caplog):
    for name in ("train/lm/law", "ppl/das_6.1-x", "stages/mean_perplexity", "lr-AdamW/pg1"):
        assert MetricNames(["law"]).logged(name) == name
    caplog.set_level("INFO")
    texts = ["C", "C++", "C#"]
    logger = Recorder()
    scores = make_scores(order=texts)
    with track(logged_run(tmp_path, texts), csv_file=True, wandb=None, custom={"mlflow": logger}) as loggers:
        log_stage(loggers, scores)
    (row,) = logger.metrics
    perplexities = [name for name in row if name.startswith("ppl/C")]
    assert len({clean_for_mlflow(name) for name in perplexities}) == 3 and "ppl/C" in perplexities
    assert "Renaming 2 texts in mlflow: C++ is C_-" in caplog.text
    assert "ppl/C++" in (tmp_path / "metrics.csv").read_text()  # a CSV file has any name


# The environment and the identifiers of W&B


def test_an_identifier_is_drawn_once_and_moves_with_the_folder(tmp_path, no_variables):
    random.seed(0)
    state = random.getstate()
    identifiers = {}
    for name in ("a", "b", "a/deep"):
        (tmp_path / name).mkdir()
        identifiers[name] = choose_identifier(tmp_path / name)
    assert len({*identifiers.values()}) == 3 and random.getstate() == state
    shutil.move(tmp_path / "a", tmp_path / "moved")
    assert (
        choose_identifier(tmp_path / "moved") == identifiers["a"] == read_run_identifier(tmp_path / "moved")
    )
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").mkdir()  # deleted and begun again: W&B refuses deleted ids
    assert choose_identifier(tmp_path / "b") != identifiers["b"]


def test_a_damaged_identifier_is_drawn_anew(tmp_path, no_variables):
    (tmp_path / wandb_environment.ID_FILE).write_text("a/b\n")
    assert choose_identifier(tmp_path) == read_run_identifier(tmp_path) != "a/b"


def test_wandb_run_id_is_taken_once_and_not_by_the_jobs_of_a_sweep(
    tmp_path, monkeypatch, caplog, no_variables
):
    folders = [tmp_path / name for name in ("first", "job", "agent")]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    assert choose_identifier(folders[0]) == "mine"
    monkeypatch.setenv("WANDB_RUN_ID", "other")
    assert choose_identifier(folders[0]) == "mine" and "WANDB_RUN_ID=other is not used" in caplog.text
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    assert choose_identifier(folders[0]) == "other"  # W&B's agent chooses it at each start
    assert choose_identifier(folders[2]) == "other"
    monkeypatch.delenv("WANDB_SWEEP_ID")
    monkeypatch.setenv(JOB, "1")
    assert choose_identifier(folders[1]) not in ("mine", "other") and "all jobs of the sweep" in caplog.text


def test_labels_and_places_are_the_variables_unless_an_option_is_given(monkeypatch, no_variables):
    assert LABELS.obey_environment() == LABELS
    assert wandb_environment.choose_project(None) == "cpt" and wandb_environment.choose_entity(None) is None
    values = {"NAME": "n", "RUN_GROUP": "g", "JOB_TYPE": "j", "TAGS": "a, b,", "PROJECT": "p", "ENTITY": "e"}
    for name, value in values.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert LABELS.obey_environment() == WandbLabels(name="n", group="g", job_type="j", tags=("a", "b"))
    labels = WandbLabels(name="x", group="x", job_type="x", tags=("mine",))
    assert labels.obey_environment().tags == ("mine",)  # tags of the config stay
    assert wandb_environment.choose_project(None) == "p" and wandb_environment.choose_project("q") == "q"
    assert wandb_environment.choose_entity(None) == "e" and wandb_environment.choose_entity("f") == "f"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WANDB_MODE", "OFFLINE", "WANDB_MODE=OFFLINE is invalid.*Allowed: online, offline, disabled"),
        ("WANDB_MODE", "no", "WANDB_MODE=no is invalid: .*Allowed: online, offline"),
        ("WANDB_TAGS", "a," + "b" * 65, "WANDB_TAGS is invalid.*65 characters"),
        ("WANDB_RUN_ID", "a/b", "WANDB_RUN_ID=a/b is invalid"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch, no_variables, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message) as caught:
        check_environment()
    assert "\n" not in str(caught.value)


def test_what_wandb_refuses_is_named(monkeypatch, no_variables):
    check_settings(PLACE)
    with pytest.raises(ValueError, match="logger.project=a/b is invalid"):
        check_settings(WandbPlace(project="a/b"))
    for name, value in (("WANDB_PROJECT", "a#b"), ("WANDB_BASE_URL", "nowhere"), ("WANDB_QUIET", "perhaps")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(ValueError, match=f"^{name} is invalid: [^\n]+$"):
                check_settings(PLACE)
    monkeypatch.setenv("WANDB_API_KEY", " secret")
    with pytest.raises(ValueError, match="WANDB_API_KEY is invalid") as caught:
        check_settings(PLACE)
    assert "secret" not in str(caught.value)


def test_files_of_wandb_are_in_the_run_folder_unless_a_variable_or_a_settings_file_says_otherwise(
    tmp_path, monkeypatch, no_variables
):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_CACHE_DIR", "/mine")
    environment = dict(os.environ)
    with files_in(tmp_path / "run"):
        changed = {name: value for name, value in os.environ.items() if value != environment.get(name)}
    folder = tmp_path / "run" / "wandb"
    assert changed == {"WANDB_DATA_DIR": str(folder / "data"), "WANDB_CONFIG_DIR": str(folder / "config")}
    assert dict(os.environ) == environment

    settings = Path(tmp_path, "home", ".config", "wandb", "settings")
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org\n")
    with files_in(tmp_path / "run"):
        assert "WANDB_CONFIG_DIR" not in os.environ  # the file names the user's server
