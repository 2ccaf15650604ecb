"""Tuning and the comparison after it: what is searched, on which text, what is chosen, and resuming."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict

import cpt.sweeps.launcher  # noqa: F401  (registers the sweeper)
from cpt.data.corpora import Corpora
from cpt.evaluation.finetune_tasks import FileTasks
from cpt.reporting.tuning import FinalRun, Trial, TunedMethod, write_tuning
from cpt.sweeps.tune import TuneSweeper, find_defaults, find_space
from cpt.tune import build_command
from tests.conftest import ROOT, SMALL
from tests.support.endtask_fixtures import write_task

pytestmark = pytest.mark.slow
pytest.importorskip("optuna", reason="needs the extra `optuna`")


class Here:
    """A launcher whose jobs run in this process; it is killed before the job of a number."""

    def __init__(self, context, config, *, killed_at):
        self.loader, self.config, self.killed_at, self.jobs = context.config_loader, config, killed_at, []

    def launch(self, job_overrides, initial_job_idx):
        return [self.run(list(overrides)) for overrides in job_overrides]

    def run(self, overrides):
        from cpt.train import train

        if len(self.jobs) == self.killed_at:
            sys.exit(143)
        cfg = self.loader.load_sweep_config(self.config, [*overrides, "hydra.mode=RUN"])
        HydraConfig.instance().set_config(cfg)
        done = JobReturn(working_dir=cfg.hydra.run.dir, status=JobStatus.COMPLETED)
        self.jobs.append(done.working_dir)
        with open_dict(cfg):
            cfg.pop("hydra")
        done.return_value = train(cfg, run_dir=Path(done.working_dir))
        return done


@pytest.fixture
def tune(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def begin(*overrides, killed_at=None, run=True, **options):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            given = ["hydra/sweeper=tune", *overrides]
            config = loader.load_configuration("config", given, RunMode.MULTIRUN)
            context = HydraContext(config_loader=loader, callbacks=None)
            here = Here(context, config, killed_at=killed_at)
            monkeypatch.setattr(Plugins, "instantiate_launcher", lambda self, **how: here)
            chosen = {**config.hydra.sweeper, **options}
            chosen.pop("_target_")
            sweeper = TuneSweeper(**chosen)
            sweeper.setup(hydra_context=context, task_function=None, config=config)
            if not run:
                return sweeper.read_candidates(list(overrides))
            try:
                sweeper.sweep(list(overrides))
            except SystemExit as ended:
                if ended.code != 143:
                    raise
            return here.jobs

    return begin


@pytest.fixture
def given(corpora, cache, no_pictures):
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    return [*SMALL, *places, "trainer.steps=2", "name=tuned", "seed=0,1"]


def noting(monkeypatch, where, method):
    """The splits that a method is asked for, in their order."""
    splits, read = [], getattr(where, method)

    def noted(self, name, split, **how):
        splits.append(split)
        return read(self, name, split, **how)

    monkeypatch.setattr(where, method, noted)
    return splits


def test_trials_read_no_test_text_and_a_killed_tuning_ends_as_one_that_was_not(
    tune, given, tmp_path, monkeypatch, capsys
):
    read = noting(monkeypatch, Corpora, "packed")
    given += ["method=ncl,ewc"]
    first = tune(*given, n_trials=2, n_jobs=1, killed_at=1)
    assert len(first) == 1 and set(read) == {"train", "valid"}
    second = tune(*given, n_trials=2, n_jobs=1, killed_at=2)  # killed in the final runs
    assert ["/search/ewc/" in job for job in second] == [True, False] and "test" in read
    read.clear()
    third = tune(*given, n_trials=2, n_jobs=1)
    assert len({*first, *second, *third}) == 2 + 4 and all("/final/" in job for job in third)
    assert "Nothing to tune: ncl." in capsys.readouterr().out
    told = json.loads((tmp_path / "outputs/tuned/tuning.json").read_text())
    ncl, ewc = told["methods"]
    assert (len(ncl["trials"]), len(ncl["runs"]), len(ewc["trials"]), len(ewc["runs"])) == (0, 2, 2, 2)
    assert ewc["trials"][0]["values"] == ["method.strength=500.0"] and ewc["flops"] > 0
    best = min(ewc["trials"], key=lambda trial: trial["score"])["values"][0].removesuffix(".0")
    assert all(best.split("=")[1] in run["folder"] or best.endswith("=500") for run in ewc["runs"])
    scores = json.loads((tmp_path / ewc["runs"][0]["folder"] / "scores.json").read_text())
    assert scores["conditions"]["score_on"] == "test"
    assert scores["optimized_metric"] == ewc["runs"][0]["score"]


def test_by_a_metric_of_end_tasks_trials_read_dev_and_final_runs_test(tune, given, tmp_path, monkeypatch):
    read = noting(monkeypatch, FileTasks, "read")
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    given += ["method=ewc", "optimized_metric=MF1"]
    with pytest.raises(SystemExit, match="1"):
        tune(*given)  # without end tasks
    given += ["endtask=texts", f"endtask.root={tmp_path}", "endtask.epochs=1", "endtask.seeds=[0]"]
    tune(*given, n_trials=2, n_jobs=1, killed_at=2)
    assert set(read) == {"train", "dev"}
    tune(*given, n_trials=2, n_jobs=1)
    assert "test" in read
    told = json.loads((tmp_path / "outputs/tuned/tuning.json").read_text())
    assert told["direction"] == "maximize" and 0 <= told["methods"][0]["runs"][0]["score"] <= 1


def test_candidates_are_the_choices_of_groups_and_what_is_given_is_not_searched(tune):
    given = ["method=ewc,kd", "mask=none,migu", "optim.lr=tag(log,interval(1e-4,1e-2))"]
    found, runs = tune(*given, "seed=0,1", "order=1", run=False)
    labels = [f"{method} mask={mask}" for method in ("ewc", "kd") for mask in ("none", "migu")]
    assert [each.label for each in found] == labels
    assert list(found[1].space) == ["method.strength", "mask.migu.threshold", "optim.lr"]
    assert found[0].first == {"method.strength": 500.0, "optim.lr": 2e-3} and runs == [["seed=0", "seed=1"]]
    assert found[0].overrides == ["order=1", "method=ewc", "mask=none"]
    (derpp,), _ = tune("method=choice(derpp)", "method.alpha=choice(0.3)", run=False)
    assert list(derpp.space) == ["method.beta"] and "method.alpha=0.3" in derpp.overrides
    (ewc,), _ = tune("method=ewc", "method.strength=7", run=False)
    assert ewc.space == {}
    firsts = {"choice(1,500.0,7)": "500.0", "choice(100,500,a)": "500", "[1,10]": None}
    for space, first in firsts.items():
        (ewc,), _ = tune("method=ewc", f"method.search.strength={space}", run=False)
        assert [*ewc.space] == ["method.strength"] and ewc.first.get("method.strength") == first
    assert ewc.space["method.strength"].get_value_string() == "interval(1,10)"
    wrong = {"method.search.strength=7": "Allowed: [low, high]", "domains.score_on=valid": "searches use"}
    for line, why in wrong.items():
        with pytest.raises(ValueError, match=f"{re.escape(line)} is invalid.*{re.escape(why)}"):
            tune("method=ewc", line, run=False)


def test_every_space_is_of_options_of_its_method_and_has_its_default(composed):
    for path in sorted((ROOT / "conf/method").glob("*.yaml")):
        cfg = composed(f"method={path.stem}")
        space = find_space(cfg)
        assert find_defaults(cfg, space).keys() == space.keys(), path.stem
        tunable = {key for key in cfg.method if key in ("strength", "lr_multiplier")}
        assert space or not tunable, path.stem


def trial(number, value, score, flops=10):
    return Trial(number, [f"method.strength={value}"], score, flops)


def test_equal_compute_is_the_best_of_the_first_trials_within_the_cheapest_search(tmp_path):
    runs = [FinalRun("a", 30.0, 0.1, 1000, 50), FinalRun("b", 32.0, 0.3, 1000, 50)]
    ewc = [trial(0, 500.0, 40.0), trial(1, 70.5, 39.0), trial(2, 9.25, 41.0)]
    das = [trial(0, 1.0, 35.0, 25), trial(1, 0.1, 34.0, 25), trial(2, 3.0, 36.0, 5)]
    space = {"method.strength": "tag(log,interval(1,1000))"}
    methods = [
        TunedMethod(name="ncl", space={}, default={}, trials=[], runs=runs[:1]),
        TunedMethod(name="ewc", space=space, default={"method.strength": "500"}, trials=ewc, runs=runs),
        TunedMethod(name="das", space=space, default={"method.strength": "1"}, trials=das, runs=runs),
    ]
    text = write_tuning(methods, tmp_path / "tuning", "LC.perplexity", "minimize", 3)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:4]}
    assert rows["ncl"] == ["–", "–", "–", "–", "–", "30.00", "0.1000"]
    assert rows["ewc"][:5] == ["strength=70.5", "strength=70.5", "3", "40.00", "39.00"]
    assert rows["ewc"][5:] == ["31.00", "±", "1.41", "0.2000", "±", "0.1414"]
    assert rows["das"][:5] == ["strength=0.1", "strength=1", "3", "35.00", "34.00"]  # 25 of 30 operations
    assert json.loads((tmp_path / "tuning.json").read_text())["equal_compute_flops"] == 30
    assert {"tuning.tex", "tuning.md", "tuning-searches.png"} < {each.name for each in tmp_path.iterdir()}
    most = write_tuning(methods[1:], tmp_path / "most", "LC.perplexity", "maximize", 3)
    assert most.splitlines()[1].split()[1] == "strength=9.25"


@pytest.mark.parametrize(("direction", "worst"), [("minimize", math.inf), ("maximize", -math.inf)])
def test_a_failed_default_trial_costs_but_has_no_score(tmp_path, direction, worst):
    trials = [trial(0, 500.0, worst, 20), trial(1, 70.5, 39.0), trial(2, 9.25, worst)]
    own = {"space": {"method.strength": "tag(log,interval(1,1000))"}, "default": {"method.strength": "500"}}
    search = TunedMethod(name="ewc", trials=trials, runs=[], **own)
    _, line, *_ = write_tuning([search], tmp_path / "tuning", "LC.perplexity", direction, 3).splitlines()
    assert line.split()[4:6] == ["–", "39.00"]
    (method,) = json.loads((tmp_path / "tuning.json").read_text(), parse_constant=pytest.fail)["methods"]
    assert [each["score"] for each in method["trials"]] == [None, 39.0, None] and method["flops"] == 40


def test_the_program_is_a_sweep_of_run_py():
    command = build_command(["method=ewc", "--budget", "4", "--seeds", "2", "name=tuned"])
    assert command[1:3] == ["-m", "cpt"] and command[-1] == "--multirun"
    own = ["hydra/sweeper=tune", "hydra.sweeper.n_trials=4", "seed=0,1"]  # behind a flag that may come first
    assert command[3:-1] == ["method=ewc", "name=tuned", *own]
    with pytest.raises(SystemExit, match="2"):
        build_command(["--seeds", "2", "seed=1"])
