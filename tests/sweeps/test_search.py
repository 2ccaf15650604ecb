"""The search: what is asked for, told, and gone on with. The runs are a function here."""

import logging
import math
import re
import shutil
import statistics
import sys

import pytest
from filelock import FileLock
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

import cpt.sweeps.launcher  # noqa: F401  (registers the sweeper)
from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import PreemptedJob
from cpt.sweeps.optuna import OptunaSweeper
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

optuna = pytest.importorskip("optuna", reason="needs the extra `optuna`")

CONFIG = """
defaults: [_self_, {endtask: none}, {override hydra/sweeper: optuna}]
method: ncl
lr: 0.1
steps: 1
seed: 0
order: 0
objective: LC.perplexity
trainer: {workers: 0}
hydra: {sweep: {dir: FOLDER}}
"""


class Runs:
    """A launcher whose jobs are a function of their overrides; keeps the batches."""

    def __init__(self, objective):
        self.objective, self.batches = objective, []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append([list(job) for job in job_overrides])
        return [self.ended(dict(line.split("=", 1) for line in job)) for job in job_overrides]

    def ended(self, values):
        done = JobReturn()
        done.status, done.return_value = JobStatus.COMPLETED, self.objective(values)
        if isinstance(done._return_value, HydraException):
            done.status = JobStatus.FAILED
        return done

    @property
    def jobs(self):
        return [job for batch in self.batches for job in batch]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conf/hydra").mkdir(parents=True)
    (tmp_path / "conf/hydra/sweeper").symlink_to(ROOT / "conf/hydra/sweeper")
    (tmp_path / "conf/endtask").symlink_to(ROOT / "conf/endtask")
    (tmp_path / "conf/config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "sweep")))
    return tmp_path


@pytest.fixture
def search(folder, monkeypatch):
    """Starts a search; gives the runs that it had made, in batches."""

    def start(objective, *overrides, **options):
        runs = Runs(objective)
        monkeypatch.setattr(Plugins, "instantiate_launcher", lambda self, **given: runs)
        with initialize_config_dir(str(folder / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
            given = {"n_trials": 4, "n_jobs": 1, "sampler": "random"} | options
            made = {**config.hydra.sweeper, **given}
            made.pop("_target_")
            sweeper = OptunaSweeper(**made)
            context = HydraContext(config_loader=loader, callbacks=None)
            sweeper.setup(hydra_context=context, task_function=None, config=config)
            sweeper.sweep(list(overrides))
        return runs

    return start


GRID = {"sampler": "grid", "n_trials": None}
LR = "lr=tag(log,interval(1e-4,1))"


def loss(values):
    """Least at lr=0.01 with das."""
    return abs(math.log10(float(values["lr"])) + 2) + (values.get("method") == "ncl")


def results(folder):
    return OmegaConf.to_container(OmegaConf.load(folder / "sweep/optimization_results.yaml"))


def killed(after):
    """An objective that ends the whole program in a later job, as a signal does."""
    seen = []

    def objective(values):
        seen.append(values)
        if len(seen) > after:
            raise SystemExit(143)
        return loss(values)

    return objective


def one(values):
    return 1.0


def ends(capsys, start, code=1):
    """The one line that a search ends with."""
    with pytest.raises(SystemExit) as ended:
        start()
    assert ended.value.code == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_trials_are_the_given_overrides_with_values_of_the_space(search):
    runs = search(loss, "steps=7", LR, "method=ncl,das", "trainer.workers=range(0,9,4)", n_trials=6, n_jobs=4)
    assert [len(batch) for batch in runs.batches] == [4, 2]
    for fixed, lr, method, workers in runs.jobs:
        assert fixed == "steps=7" and method in ("method=ncl", "method=das")
        assert re.fullmatch(r"lr=\d\S*", lr) and 1e-4 <= float(lr[3:]) <= 1
        assert lr == f"lr={float(f'{float(lr[3:]):.6g}')!r}"  # six digits
        assert workers in ("trainer.workers=0", "trainer.workers=4", "trainer.workers=8")
    assert len(set(map(tuple, runs.jobs))) == 6


def test_numbers_are_on_the_scale_asked_for(search, folder):
    logarithmic = [float(job[0][3:]) for job in search(loss, LR, n_trials=60).jobs]
    assert 0.2 < sum(lr < 0.01 for lr in logarithmic) / 60 < 0.8
    shutil.rmtree(folder / "sweep")
    even = [float(job[0][3:]) for job in search(loss, "lr=interval(1e-4,1)", n_trials=60).jobs]
    assert sum(lr < 0.01 for lr in even) < 10


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("steps=range(0.1,0.35,0.1)", {"0.1", "0.2", "0.3"}),
        ("steps=int(interval(2,4))", {"2", "3", "4"}),
        ("steps=choice(1,true,'a b')", {"1", "True", r"a\ b"}),
        ("steps=range(5,2,-1)", {"5", "4", "3"}),
    ],
)
def test_what_values_there_are(search, given, allowed):
    runs = search(one, given, n_trials=30)
    assert {job[0].partition("=")[2] for job in runs.jobs} == allowed


def test_the_yaml_gives_a_space_too_and_the_command_line_wins(search):
    params = {"lr": "interval(0.1,0.2)", "steps": 3, "method": "ncl,das"}
    jobs = search(one, "method=ncl", params=params).jobs
    assert all(line.startswith("lr=0.1") or line == "lr=0.2" for job in jobs for line in job if "lr" in line)
    assert {line for job in jobs for line in job if not line.startswith("lr=")} == {"steps=3", "method=ncl"}


def test_the_best_is_told_and_written(search, folder, caplog):
    caplog.set_level(logging.INFO)
    runs = search(loss, LR, "method=ncl,das", n_trials=8)
    values = [loss(dict(line.split("=") for line in job)) for job in runs.jobs]
    (best,) = results(folder)["best"]
    assert best["values"] == [min(values)] and best["trial"] == values.index(min(values))
    assert [f"{key}={value}" for key, value in best["params"].items()] == runs.jobs[best["trial"]]
    assert results(folder)["finished"] == 8
    told = caplog.messages[-1].splitlines()
    assert told[1] == f"trial {best['trial']}: {min(values):.6g}: {' '.join(runs.jobs[best['trial']])}"


def test_tpe_finds_more_than_chance_and_takes_optunas_own_options(search, folder):
    """It draws its first ten trials at random, or as many as it is told."""

    def jobs(**given):
        shutil.rmtree(folder / "sweep", ignore_errors=True)
        return search(loss, LR, **given).jobs

    tpe, random = jobs(n_trials=30, sampler="tpe"), jobs(n_trials=30, sampler="random")
    late = [
        statistics.median(loss(dict([job[0].split("=")])) for job in each[-15:]) for each in (tpe, random)
    ]
    assert late[0] < late[1] / 2
    told = jobs(sampler="tpe", options={"n_startup_trials": 2})
    assert told[:2] == tpe[:2] and told[2:] != tpe[2:4]


def test_maximize(search, folder):
    search(lambda values: float(values["steps"]), "steps=range(0,9)", direction="maximize", **GRID)
    assert results(folder)["best"][0]["params"] == {"steps": "8"}


def test_the_same_command_makes_the_same_trials_and_another_seed_others(search, folder):
    first = search(loss, LR, n_trials=3).jobs
    for seed, same in ((0, True), (1, False)):
        shutil.rmtree(folder / "sweep")
        assert (search(loss, LR, n_trials=3, seed=seed).jobs == first) is same


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(search, folder, sampler):
    given = {"n_trials": 14, "n_jobs": 2, "sampler": sampler}
    whole = search(loss, LR, "method=ncl,das", **given).jobs
    best = results(folder)
    shutil.rmtree(folder / "sweep")
    with pytest.raises(SystemExit, match="143"):
        search(killed(after=11), LR, "method=ncl,das", **given)
    rest = search(loss, LR, "method=ncl,das", **given).jobs
    assert rest == whole[10:]  # both of the batch that was killed: their folders go on
    assert results(folder) == best


def test_a_preempted_trial_stays_under_way_and_the_search_ends_as_it_did(search, folder, capsys):
    whole = search(loss, LR, n_trials=4).jobs
    shutil.rmtree(folder / "sweep")
    asked = []

    def preempted(values):
        asked.append(values)
        return PreemptedJob("#2: preempted (exit 75): …") if len(asked) == 3 else loss(values)

    line = ends(capsys, lambda: search(preempted, LR, n_trials=4), GO_ON)
    assert line == "cpt: #2: preempted (exit 75): …; the same command continues"
    assert search(loss, LR, n_trials=4).jobs == whole[2:]


def test_a_finished_search_makes_nothing_and_more_trials_go_on(search, folder):
    whole = search(loss, LR, n_trials=3).jobs
    assert search(loss, LR, n_trials=3).jobs == []
    assert len(search(loss, LR, n_trials=5).jobs) == 2
    assert results(folder)["finished"] == 5
    shutil.rmtree(folder / "sweep")

    def fails(values):
        return None if [f"lr={values['lr']}"] == whole[1] else loss(values)

    assert search(fails, LR, n_trials=3).jobs[:2] == whole[:2]
    assert search(fails, LR, n_trials=3).jobs == [whole[1]]
    again = search(loss, LR, n_trials=4).jobs  # what has failed twice is tried once more
    assert again[0] == whole[1] and len(again) == 2 and again[1] != whole[1]


def test_failures_stop_nothing_and_are_tried_again_by_the_same_command(search, folder, caplog, capsys):
    def fails(values):
        return {"1": HydraException("boom"), "2": None, "3": math.nan}.get(values["steps"], 1.0)

    first = search(fails, "steps=range(0,5)", **GRID)
    assert [job[0] for job in first.jobs] == [f"steps={n}" for n in range(5)]
    assert results(folder)["finished"] == 2 and "boom" in caplog.text
    for objective, finished in ((fails, 2), (lambda values: 0.5, 5)):  # twice and once more
        again = search(objective, "steps=range(0,5)", **GRID)
        assert [job[0] for job in again.jobs] == ["steps=1", "steps=2", "steps=3"]
        assert results(folder)["finished"] == finished
    assert search(fails, "steps=range(0,5)", **GRID).jobs == []
    shutil.rmtree(folder / "sweep")
    assert "no trial" in ends(capsys, lambda: search(lambda values: None, LR, n_trials=2))


def test_a_grid_is_all_points_once_in_the_order_of_a_sweep(search):
    options = {**GRID, "n_jobs": 3}
    assert len(search(one, "method=ncl,das", "steps=range(1,4)", **options | {"n_trials": 2}).jobs) == 2
    runs = search(one, "method=ncl,das", "steps=range(1,4)", **options)
    assert runs.jobs == [[f"method={m}", f"steps={s}"] for m in ("ncl", "das") for s in (1, 2, 3)][2:]
    assert search(one, "method=ncl,das", "steps=range(1,4)", **options).jobs == []


def test_a_killed_grid_makes_each_point_once_more_at_most(search):
    with pytest.raises(SystemExit):
        search(lambda v: 1.0 if v["steps"] != "3" else sys.exit(143), "steps=range(1,6)", **GRID)
    rest = search(one, "steps=range(1,6)", **GRID)
    assert [job[0] for job in rest.jobs] == ["steps=3", "steps=4", "steps=5"]


def test_two_objectives_give_the_pareto_front(search, folder, caplog):
    caplog.set_level(logging.INFO)
    costs = {"0": [3, 1], "1": [2, 2], "2": [3, 3], "3": [1, 3], "4": [1, None], "5": [0]}
    objective = "objective=[LC.perplexity,FG.nats]"
    runs = search(lambda values: costs[values["steps"]], objective, "steps=range(0,6)", **GRID)
    assert runs.jobs[0] == [objective, "steps=0"]
    front = {each["params"]["steps"]: each["values"] for each in results(folder)["best"]}
    assert front == {"0": [3, 1], "1": [2, 2], "3": [1, 3]}
    assert results(folder)["finished"] == 4
    assert "Pareto front" in caplog.messages[-1] and "trial 0: 3, 1: steps=0" in caplog.messages[-1]


def test_a_folder_of_another_search_is_refused(search, folder, capsys):
    search(loss, LR, "trainer.workers=1")
    jobs = search(loss, LR, "trainer.workers=2", n_trials=5).jobs  # how a run is carried out is free
    assert len(jobs) == 1
    for changed in (["lr=interval(0.1,1)"], [LR, "steps=2"], [LR, "objective=FG.nats"]):
        line = ends(capsys, lambda changed=changed: search(loss, *changed, n_trials=6))
        assert "is another search (" in line and " -> " in line
    assert "directions: " in ends(capsys, lambda: search(loss, LR, direction="maximize"))
    with FileLock(folder / "sweep/.study.lock"):
        assert "another search is at work in" in ends(capsys, lambda: search(loss, LR))


def test_what_was_killed_while_it_was_asked_for_is_forgotten(search, folder):
    search(loss, LR, "method=ncl,das", n_trials=1)
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "sweep/study.journal"))
    study = optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))
    study.ask({"method": optuna.distributions.CategoricalDistribution(["ncl", "das"])})
    jobs = search(loss, LR, "method=ncl,das", n_trials=3).jobs
    assert [len(job) for job in jobs] == [2, 2]
    assert len(search(loss, LR, "method=ncl,das", n_trials=3).jobs) == 0


@pytest.mark.parametrize(
    ("given", "options", "line"),
    [
        ([LR], {"sampler": "cma"}, "hydra.sweeper.sampler=cma; allowed: tpe, random, nsga2, grid"),
        ([LR], {"n_jobs": 0}, "hydra.sweeper.n_jobs=0; allowed"),
        ([LR], {"n_trials": None}, "hydra.sweeper.n_trials=None; allowed"),
        ([LR], {"n_trials": 1.5}, "hydra.sweeper.n_trials=1.5; allowed"),
        ([LR], {"seed": -1}, "hydra.sweeper.seed=-1; allowed"),
        ([LR], {"direction": "up"}, "hydra.sweeper.direction=up; allowed"),
        ([LR], {"direction": ["minimize"] * 2}, "allowed: minimize or maximize, or a list of 1"),
        ([LR], {"sampler": "tpe", "options": {"wrong": 1}}, "hydra.sweeper.options={'wrong': 1}: "),
        ([LR], {"sampler": "grid"}, "has no grid; allowed with sampler=grid"),
        (["steps=1"], {}, "nothing to search for"),
        (["lr=tag(log,interval(0,1))"], {}, "lr=tag(log,interval(0,1)): "),
        (["lr=interval(1,0)"], {}, "lr=interval(1,0): "),
        (["lr=tag(log,range(1,9,2))"], {}, "lr=tag(log,range(1,9,2)): "),
        ([LR, "seed=3"], {"seeds": [0, 1]}, "hydra.sweeper.seeds=[0, 1]; allowed: one of them"),
        ([LR, "seed=0,1"], {}, "seed is invalid as a dimension of a search"),
        ([LR, "order=0,1"], {"orders": [0]}, "Allowed: hydra.sweeper.orders=[…]"),
        ([LR, "endtask=none,texts"], {}, "endtask is invalid as a dimension of a search"),
        ([LR], {"seeds": [1, 1]}, "hydra.sweeper.seeds=[1, 1]; allowed"),
        ([LR], {"seeds": []}, "hydra.sweeper.seeds=[]; allowed"),
        ([LR], {"orders": 3}, "hydra.sweeper.orders=3; allowed"),
    ],
)
def test_wrong_options_and_spaces_are_refused_in_one_line(search, capsys, given, options, line):
    assert line in ends(capsys, lambda: search(loss, *given, **options))


def test_without_optuna_the_command_that_installs_it_is_told(search, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install -e '.[optuna]'" in ends(capsys, lambda: search(loss, LR))


def by_seed(values):
    """The mean over the seeds is least at the smaller lr; the least of all is at the larger, with seed 2."""
    large = float(values["lr"]) > 0.5
    return {"0": 3.0, "1": 3.0, "2": -5.0}[values["seed"]] + float(values["order"]) if large else 0.0


def test_a_trial_is_the_mean_of_its_seeds_and_orders(search, folder, capsys):
    both = {**GRID, "orders": [0, 1]}
    runs = search(by_seed, "lr=0.1,0.9", seeds=[0, 1, 2], **both)
    places = [(lr, seed, order) for lr in ("0.1", "0.9") for seed in range(3) for order in range(2)]
    assert runs.jobs == [[f"lr={lr}", f"seed={seed}", f"order={order}"] for lr, seed, order in places]
    assert [len(batch) for batch in runs.batches] == [6, 6]
    assert results(folder)["best"][0]["params"] == {"lr": "0.1"}
    assert not search(by_seed, "lr=0.1,0.9", seeds=[0, 1, 2], **both).jobs
    line = ends(capsys, lambda: search(by_seed, "lr=0.1,0.9", seeds=[0, 1], **both))
    assert "is another search (seed: [0, 1, 2] -> [0, 1])" in line


def test_means_are_by_objective_and_a_failed_run_fails_its_trial(search, folder):
    def two(values):
        fails = values["lr"] == "0.9" and values["seed"] == "1" and not mended
        return HydraException("no") if fails else [float(values["seed"]), float(values["lr"])]

    mended, both = [], "objective=[LC.perplexity,FG.nats]"
    search(two, "lr=0.5,0.9", both, seeds=[0, 1], **GRID)
    assert results(folder)["finished"] == 1
    assert results(folder)["best"][0]["values"] == [0.5, 0.5]
    mended.append(True)
    jobs = search(two, "lr=0.5,0.9", both, seeds=[0, 1], **GRID).jobs
    assert jobs == [[both, "lr=0.9", f"seed={seed}"] for seed in (0, 1)]


def test_a_trial_with_a_preempted_run_stays_under_way(search, capsys):
    def left(values):
        return PreemptedJob("#1: preempted (exit 75): …") if values["seed"] == "1" else 1.0

    ends(capsys, lambda: search(left, "steps=1,2", seeds=[0, 1], **GRID), GO_ON)
    jobs = search(one, "steps=1,2", seeds=[0, 1], **GRID).jobs
    assert jobs == [[f"steps={steps}", f"seed={seed}"] for steps in (1, 2) for seed in (0, 1)]


def test_trials_run_no_end_tasks_whose_scores_are_of_test_text(search, caplog):
    caplog.set_level("INFO", logger="cpt")
    runs = search(loss, LR, "endtask=texts", "endtask.root=there", n_trials=1)
    assert [line for line in runs.jobs[0] if line.startswith("endtask")] == ["endtask=none"]
    assert "Skipping end tasks" in caplog.text
