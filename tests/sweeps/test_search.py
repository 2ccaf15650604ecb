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


SEEDS = {"seeds": [0, 1, 2], "orders": [0, 1]}
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


def refused(capsys):
    """The one line that was told."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_trials_are_the_given_overrides_with_values_of_the_space(search):
    runs = search(loss, "steps=7", LR, "method=ncl,das", "trainer.workers=range(0,9,4)", n_trials=6, n_jobs=4)
    assert [len(batch) for batch in runs.batches] == [4, 2]
    for fixed, lr, method, workers in runs.jobs:
        assert fixed == "steps=7"
        assert re.fullmatch(r"lr=\d\S*", lr) and 1e-4 <= float(lr[3:]) <= 1
        assert method in ("method=ncl", "method=das")
        assert workers in ("trainer.workers=0", "trainer.workers=4", "trainer.workers=8")
    assert len(set(map(tuple, runs.jobs))) == 6


def test_numbers_are_on_the_scale_asked_for(search):
    logarithmic = [float(job[0][3:]) for job in search(loss, LR, n_trials=60).jobs]
    assert 0.2 < sum(lr < 0.01 for lr in logarithmic) / 60 < 0.8


def test_numbers_are_linear_unless_tagged(search):
    even = [float(job[0][3:]) for job in search(loss, "lr=interval(1e-4,1)", n_trials=60).jobs]
    assert sum(lr < 0.01 for lr in even) < 10


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("steps=range(1,6,2)", {"1", "3", "5"}),
        ("steps=range(0.1,0.35,0.1)", {"0.1", "0.2", "0.3"}),
        ("steps=int(interval(2,4))", {"2", "3", "4"}),
        ("steps=choice(1,true,'a b')", {"1", "True", r"a\ b"}),
        ("steps=range(5,2,-1)", {"5", "4", "3"}),
    ],
)
def test_what_values_there_are(search, given, allowed):
    runs = search(lambda values: 1.0, given, n_trials=30)
    assert {job[0].partition("=")[2] for job in runs.jobs} == allowed


def test_a_number_in_a_run_has_six_digits(search):
    for (line,) in search(loss, LR).jobs:
        assert line == f"lr={float(f'{float(line[3:]):.6g}')!r}"


def test_the_yaml_gives_a_space_too_and_the_command_line_wins(search):
    params = {"lr": "interval(0.1,0.2)", "steps": 3, "method": "ncl,das"}
    jobs = search(lambda values: 1.0, "method=ncl", params=params).jobs
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
    assert told[0] == "8 trials; the best (LC.perplexity):"
    assert told[1] == f"trial {best['trial']}: {min(values):.6g}: {' '.join(runs.jobs[best['trial']])}"


def test_tpe_finds_more_than_chance(search, folder):
    late = {}
    for sampler in ("tpe", "random"):
        jobs = search(loss, LR, n_trials=30, sampler=sampler).jobs[-15:]
        late[sampler] = statistics.median(loss(dict([job[0].split("=")])) for job in jobs)
        shutil.rmtree(folder / "sweep")
    assert late["tpe"] < late["random"] / 2


def test_maximize(search, folder):
    search(
        lambda values: float(values["steps"]),
        "steps=range(0,9)",
        sampler="grid",
        direction="maximize",
        n_trials=9,
    )
    assert results(folder)["best"][0]["params"] == {"steps": "8"}


def test_the_same_command_makes_the_same_trials_and_another_seed_others(search, folder):
    first = search(loss, LR, n_trials=3).jobs
    for seed, same in ((0, True), (1, False)):
        shutil.rmtree(folder / "sweep")
        assert (search(loss, LR, n_trials=3, seed=seed).jobs == first) is same


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "random", "nsga2"])
def test_a_killed_search_goes_on_as_if_it_had_not_been(search, folder, sampler):
    whole = search(loss, LR, "method=ncl,das", n_trials=14, n_jobs=2, sampler=sampler).jobs
    best = results(folder)
    shutil.rmtree(folder / "sweep")
    with pytest.raises(SystemExit, match="143"):
        search(killed(after=11), LR, "method=ncl,das", n_trials=14, n_jobs=2, sampler=sampler)
    rest = search(loss, LR, "method=ncl,das", n_trials=14, n_jobs=2, sampler=sampler).jobs
    assert rest == whole[10:]  # both of the batch that was killed: their folders go on
    assert results(folder) == best


def test_a_preempted_trial_stays_under_way_and_the_search_ends_as_it_did(search, folder, capsys):
    whole = search(loss, LR, n_trials=4).jobs
    shutil.rmtree(folder / "sweep")
    asked = []

    def preempted(values):
        asked.append(values)
        return PreemptedJob("#2: preempted (exit 75): …") if len(asked) == 3 else loss(values)

    with pytest.raises(SystemExit) as end:
        search(preempted, LR, n_trials=4)
    assert end.value.code == GO_ON
    assert capsys.readouterr().err == "cpt: #2: preempted (exit 75): …; the same command continues\n"
    assert search(loss, LR, n_trials=4).jobs == whole[2:]


def test_a_finished_search_makes_nothing_and_more_trials_go_on(search, folder):
    search(loss, LR, n_trials=3)
    assert search(loss, LR, n_trials=3).jobs == []
    assert len(search(loss, LR, n_trials=5).jobs) == 2
    assert results(folder)["finished"] == 5


def test_failures_stop_nothing_and_are_tried_again_by_the_same_command(search, folder, caplog):
    def fails(values):
        return {"1": HydraException("boom"), "2": None, "3": math.nan}.get(values["steps"], 1.0)

    first = search(fails, "steps=range(0,5)", n_trials=None, sampler="grid")
    assert [job[0] for job in first.jobs] == [f"steps={n}" for n in range(5)]
    assert results(folder)["finished"] == 2
    assert "trial 1, steps=1: failed, objective boom" in caplog.messages
    again = search(lambda values: 0.5, "steps=range(0,5)", n_trials=None, sampler="grid")
    assert [job[0] for job in again.jobs] == ["steps=1", "steps=2", "steps=3"]
    assert results(folder)["finished"] == 5
    assert search(fails, "steps=range(0,5)", n_trials=None, sampler="grid").jobs == []


def test_what_has_failed_twice_is_tried_once_more(search, capsys):
    given = {"n_trials": None, "sampler": "grid"}

    def fails(values):
        return HydraException("boom") if values["steps"] == "1" else 1.0

    search(fails, "steps=range(0,3)", **given)
    assert search(fails, "steps=range(0,3)", **given).jobs == [["steps=1"]]
    assert search(lambda values: 0.5, "steps=range(0,3)", **given).jobs == [["steps=1"]]
    assert search(fails, "steps=range(0,3)", **given).jobs == []


def test_if_all_fail_that_is_an_error(search, capsys):
    with pytest.raises(SystemExit):
        search(lambda values: None, LR, n_trials=2)
    assert refused(capsys) == "cpt: no trial of the search has an objective; the same command tries again"


def test_a_grid_is_all_points_once_in_the_order_of_a_sweep(search):
    options = {"sampler": "grid", "n_trials": None, "n_jobs": 3}
    runs = search(lambda values: 1.0, "method=ncl,das", "steps=range(1,4)", **options)
    assert runs.jobs == [[f"method={m}", f"steps={s}"] for m in ("ncl", "das") for s in (1, 2, 3)]
    assert len(search(lambda values: 1.0, "method=ncl,das", "steps=range(1,4)", **options).jobs) == 0


def test_a_grid_may_be_cut_short(search):
    assert len(search(lambda values: 1.0, "steps=range(1,9)", sampler="grid", n_trials=3).jobs) == 3


def test_a_killed_grid_makes_each_point_once_more_at_most(search):
    with pytest.raises(SystemExit):
        search(
            lambda v: 1.0 if v["steps"] != "3" else sys.exit(143),
            "steps=range(1,6)",
            sampler="grid",
            n_trials=None,
        )
    rest = search(lambda values: 1.0, "steps=range(1,6)", sampler="grid", n_trials=None)
    assert [job[0] for job in rest.jobs] == ["steps=3", "steps=4", "steps=5"]


def test_two_objectives_give_the_pareto_front(search, folder, caplog):
    caplog.set_level(logging.INFO)
    costs = {"0": [3, 1], "1": [2, 2], "2": [3, 3], "3": [1, 3], "4": [1, None], "5": [0]}
    objective = "objective=[LC.perplexity,FG.nats]"
    runs = search(lambda v: costs[v["steps"]], objective, "steps=range(0,6)", sampler="grid", n_trials=None)
    assert runs.jobs[0] == [objective, "steps=0"]
    front = {each["params"]["steps"]: each["values"] for each in results(folder)["best"]}
    assert front == {"0": [3, 1], "1": [2, 2], "3": [1, 3]}
    assert results(folder)["finished"] == 4
    assert caplog.messages[-1].startswith(
        "4 trials; the Pareto front (LC.perplexity, FG.nats):\ntrial 0: 3, 1: steps=0"
    )


def test_a_folder_of_another_search_is_refused(search, capsys):
    search(loss, LR, "trainer.workers=1")
    assert (
        len(search(loss, LR, "trainer.workers=2", n_trials=5).jobs) == 1
    )  # how a run is carried out is free
    for changed in (["lr=interval(0.1,1)"], [LR, "steps=2"], [LR, "objective=FG.nats"]):
        with pytest.raises(SystemExit):
            search(loss, *changed, n_trials=6)
        line = refused(capsys)
        assert "study.journal is another search (" in line and " -> " in line and "another name=…" in line
    with pytest.raises(SystemExit):
        search(loss, LR, direction="maximize")
    assert "directions: ['minimize'] -> ['maximize']" in refused(capsys)


def test_one_process_at_a_time(search, folder, capsys):
    (folder / "sweep").mkdir()
    with FileLock(folder / "sweep/.study.lock"), pytest.raises(SystemExit):
        search(loss, LR)
    assert "another search is at work in" in refused(capsys)


def test_what_was_killed_while_it_was_asked_for_is_forgotten(search, folder):
    search(loss, LR, "method=ncl,das", n_trials=1)
    study = opened_again(folder)
    study.ask({"method": optuna.distributions.CategoricalDistribution(["ncl", "das"])})
    jobs = search(loss, LR, "method=ncl,das", n_trials=3).jobs
    assert [len(job) for job in jobs] == [2, 2]
    assert len(search(loss, LR, "method=ncl,das", n_trials=3).jobs) == 0


def opened_again(folder):
    path = str(folder / "sweep/study.journal")
    backend = optuna.storages.journal.JournalFileBackend(path)
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"sampler": "cma"}, "hydra.sweeper.sampler=cma; allowed: tpe, random, nsga2, grid"),
        ({"n_jobs": 0}, "hydra.sweeper.n_jobs=0; allowed: 1, 2, …"),
        ({"n_trials": None}, "hydra.sweeper.n_trials=None; allowed: 1, 2, …; with grid also null"),
        ({"n_trials": 1.5}, "hydra.sweeper.n_trials=1.5; allowed: 1, 2, …; with grid also null"),
        ({"seed": -1}, "hydra.sweeper.seed=-1; allowed: 0, 1, 2, …"),
        ({"direction": "up"}, "hydra.sweeper.direction=up; allowed: minimize or maximize"),
        ({"direction": ["minimize"] * 2}, "allowed: minimize or maximize, or a list of 1"),
        ({"sampler": "tpe", "options": {"wrong": 1}}, "hydra.sweeper.options={'wrong': 1}: "),
        ({"sampler": "grid"}, "has no grid; allowed with sampler=grid: choices and ranges"),
    ],
)
def test_wrong_options_are_refused_in_one_line(search, capsys, options, line):
    with pytest.raises(SystemExit):
        search(loss, LR, **options)
    assert line in refused(capsys)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("steps=1", "nothing to search for; give values like method=ncl,das"),
        ("lr=tag(log,interval(0,1))", "lr=tag(log,interval(0,1)): "),
        ("lr=interval(1,0)", "lr=interval(1,0): "),
        ("lr=tag(log,range(1,9,2))", "lr=tag(log,range(1,9,2)): "),
    ],
)
def test_wrong_spaces_are_refused_in_one_line(search, capsys, given, line):
    with pytest.raises(SystemExit):
        search(loss, given)
    assert line in refused(capsys)


def test_without_optuna_the_command_that_installs_it_is_told(search, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit):
        search(loss, LR)
    assert "pip install -e '.[optuna]'" in refused(capsys)


def test_samplers_take_optunas_own_options(search, folder):
    """TPE draws its first ten trials at random, or as many as it is told."""

    def trials(**options):
        shutil.rmtree(folder / "sweep", ignore_errors=True)
        return search(loss, LR, sampler="tpe", options=options).jobs

    told, untold = trials(n_startup_trials=2), trials()
    assert told[:2] == untold[:2]
    assert told[2:] != untold[2:]


def by_seed(values):
    """The mean over the seeds is least at the smaller lr; the least of all is at the larger, with seed 2."""
    large = float(values["lr"]) > 0.5
    return {"0": 3.0, "1": 3.0, "2": -5.0}[values["seed"]] + float(values["order"]) if large else 0.0


def test_a_trial_is_the_mean_of_its_seeds_and_orders(search, folder, capsys):
    runs = search(by_seed, "lr=0.1,0.9", sampler="grid", n_trials=None, **SEEDS)
    expected = [
        [f"lr={lr}", f"seed={seed}", f"order={order}"]
        for lr in ("0.1", "0.9")
        for seed in range(3)
        for order in range(2)
    ]
    assert runs.jobs == expected
    assert [len(batch) for batch in runs.batches] == [6, 6]
    assert results(folder)["best"][0]["params"] == {"lr": "0.1"}
    assert not search(by_seed, "lr=0.1,0.9", sampler="grid", n_trials=None, **SEEDS).jobs
    with pytest.raises(SystemExit):
        search(by_seed, "lr=0.1,0.9", sampler="grid", n_trials=None, seeds=[0, 1], orders=[0, 1])
    assert "is another search (seed: [0, 1, 2] -> [0, 1])" in refused(capsys)


def test_means_are_by_objective_and_a_failed_run_fails_its_trial(search, folder):
    def two(values):
        fails = values["lr"] == "0.9" and values["seed"] == "1" and not mended
        return HydraException("no") if fails else [float(values["seed"]), float(values["lr"])]

    mended, given = [], {"sampler": "grid", "n_trials": None, "seeds": [0, 1]}
    both = "objective=[LC.perplexity,FG.nats]"
    search(two, "lr=0.5,0.9", both, **given)
    assert results(folder)["finished"] == 1
    assert results(folder)["best"][0]["values"] == [0.5, 0.5]
    mended.append(True)
    assert search(two, "lr=0.5,0.9", both, **given).jobs == [
        [both, "lr=0.9", f"seed={seed}"] for seed in (0, 1)
    ]


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        (["seed=3"], {"seeds": [0, 1]}, "seed=… and hydra.sweeper.seeds=[0, 1]; allowed: one of them"),
        (
            ["seed=0,1"],
            {},
            "seed is invalid as a dimension of a search: the luckiest would win. Allowed: ",
        ),
        (["seed=0,1"], {}, "Allowed: hydra.sweeper.seeds=[…]"),
        (["order=0,1"], {"orders": [0]}, "Allowed: hydra.sweeper.orders=[…]"),
        (
            ["endtask=none,texts"],
            {},
            "endtask is invalid as a dimension of a search: trials run no end",
        ),
        ([], {"seeds": [1, 1]}, "hydra.sweeper.seeds=[1, 1]; allowed: null, or a list of different values"),
        ([], {"seeds": []}, "hydra.sweeper.seeds=[]; allowed: null, or a list of different values"),
        ([], {"orders": 3}, "hydra.sweeper.orders=3; allowed: null, or a list of different values"),
    ],
)
def test_what_is_averaged_over_is_a_list_and_not_searched_for(overrides, options, message, search, capsys):
    with pytest.raises(SystemExit):
        search(loss, LR, *overrides, **options)
    assert message in refused(capsys)


def test_a_trial_with_a_preempted_run_stays_under_way(search, capsys):
    def left(values):
        return PreemptedJob("#1: preempted (exit 75): …") if values["seed"] == "1" else 1.0

    given = {"sampler": "grid", "n_trials": None, "seeds": [0, 1]}
    with pytest.raises(SystemExit) as end:
        search(left, "steps=1,2", **given)
    assert end.value.code == GO_ON
    capsys.readouterr()
    assert search(lambda values: 1.0, "steps=1,2", **given).jobs == [
        [f"steps={steps}", f"seed={seed}"] for steps in (1, 2) for seed in (0, 1)
    ]


def test_trials_run_no_end_tasks_whose_scores_are_of_test_text(search, caplog):
    caplog.set_level("INFO", logger="cpt")
    runs = search(loss, LR, "endtask=texts", "endtask.root=there", n_trials=1)
    assert [line for line in runs.jobs[0] if line.startswith("endtask")] == ["endtask=none"]
    assert any(line.startswith("Skipping end tasks (endtask=texts) in trials") for line in caplog.messages)
