"""The search: what is asked for, told, and gone on with. The runs are a function here."""

import logging
import math
import shutil
import sys

import pytest
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
pytest.importorskip("optuna", reason="needs the extra `optuna`")

CONFIG = """
defaults: [_self_, {endtask: none}, {override hydra/sweeper: optuna}]
method: ncl
lr: 0.1
steps: 1
seed: 0
order: 0
optimized_metric: LC.perplexity
trainer: {num_workers: 0}
hydra: {sweep: {dir: FOLDER}}
"""
GRID, LR = {"sampler": "grid", "n_trials": None}, "lr=tag(log,interval(1e-4,1))"


class Runs:
    def __init__(self, objective):
        self.objective, self.batches = objective, []

    def launch(self, job_overrides, initial_job_idx):
        self.batches.append([list(job) for job in job_overrides])
        found = [self.objective(dict(line.split("=", 1) for line in job)) for job in job_overrides]
        status = {True: JobStatus.FAILED, False: JobStatus.COMPLETED}
        return [JobReturn(status=status[isinstance(one, HydraException)], _return_value=one) for one in found]

    @property
    def jobs(self):
        return [job for batch in self.batches for job in batch]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conf/hydra").mkdir(parents=True)
    for group in ("hydra/sweeper", "endtask"):
        (tmp_path / "conf" / group).symlink_to(ROOT / "conf" / group)
    (tmp_path / "conf/config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "sweep")))
    return tmp_path


@pytest.fixture
def search(folder, monkeypatch):
    def start(objective, *overrides, anew=False, **options):
        if anew:
            shutil.rmtree(folder / "sweep", ignore_errors=True)
        runs = Runs(objective)
        monkeypatch.setattr(Plugins, "instantiate_launcher", lambda self, **given: runs)
        with initialize_config_dir(str(folder / "conf"), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
            made = {**config.hydra.sweeper, "n_trials": 4, "n_jobs": 1, "sampler": "random"} | options
            made.pop("_target_")
            sweeper, context = OptunaSweeper(**made), HydraContext(config_loader=loader, callbacks=None)
            sweeper.setup(hydra_context=context, task_function=None, config=config)
            sweeper.sweep(list(overrides))
        return runs

    return start


@pytest.fixture
def ends(search, capsys):
    def line(*given, code=1, **options):
        with pytest.raises(SystemExit, match=str(code)):
            search(*given, **options)
        (said,) = capsys.readouterr().err.splitlines()
        return said

    return line


def loss(values):
    return abs(math.log10(float(values["lr"])) + 2) + (values.get("method") == "ncl")


def results(folder):
    return OmegaConf.to_container(OmegaConf.load(folder / "sweep/optimization_results.yaml"))


def test_trials_are_the_given_overrides_with_values_of_the_space_and_the_best_is_told(search, folder, caplog):
    caplog.set_level(logging.INFO)
    runs = search(loss, "steps=7", LR, "method=ncl,das", n_trials=6, n_jobs=4)
    assert [len(batch) for batch in runs.batches] == [4, 2]
    for fixed, lr, method in runs.jobs:
        assert fixed == "steps=7" and method in ("method=ncl", "method=das") and 1e-4 <= float(lr[3:]) <= 1
        assert lr == f"lr={float(f'{float(lr[3:]):.6g}')!r}"  # six digits
    values = [loss(dict(line.split("=") for line in job)) for job in runs.jobs]
    best = results(folder)["best"]
    assert best["value"] == min(values) and best["trial"] == values.index(min(values))
    assert [f"{key}={value}" for key, value in best["params"].items()] == runs.jobs[best["trial"]][1:]
    assert results(folder)["finished"] == 6 and f"trial {best['trial']}: " in caplog.messages[-1]


def test_numbers_are_on_the_scale_asked_for(search):
    for given, least, most in ((LR, 13, 47), ("lr=interval(1e-4,1)", 0, 9)):
        jobs = search(loss, given, n_trials=60, anew=True).jobs
        assert least <= sum(float(job[0][3:]) < 0.01 for job in jobs) <= most


@pytest.mark.parametrize(
    ("stop", "left"), [(lambda: sys.exit(143), 10), (lambda: PreemptedJob("#11: preempted"), 11)]
)
def test_a_killed_or_preempted_search_ends_as_if_it_had_not_been(search, folder, stop, left):
    given = {"n_trials": 14, "n_jobs": 2, "sampler": "tpe"}
    whole, seen = search(loss, LR, "method=ncl,das", **given).jobs, []
    best = results(folder)

    def stopped(values):
        seen.append(values)
        return loss(values) if len(seen) <= 11 else stop()

    with pytest.raises(SystemExit, match=f"143|{GO_ON}"):
        search(stopped, LR, "method=ncl,das", anew=True, **given)
    rest = search(loss, LR, "method=ncl,das", **given).jobs
    assert rest == whole[left:]  # of the batch that was killed both: their folders go on
    assert results(folder) == best


def test_the_same_command_makes_the_same_trials_and_goes_on_with_more(search, folder):
    whole = search(loss, LR, n_trials=3).jobs
    assert search(loss, LR, n_trials=3).jobs == []
    assert len(search(loss, LR, n_trials=5).jobs) == 2 and results(folder)["finished"] == 5

    def fails(values):
        return None if [f"lr={values['lr']}"] == whole[1] else loss(values)

    search(fails, LR, n_trials=3, anew=True)
    assert search(fails, LR, n_trials=3).jobs == [whole[1]]
    again = search(loss, LR, n_trials=4).jobs  # what has failed twice is tried once more
    assert again[0] == whole[1] and len(again) == 2 and again[1] != whole[1]


def test_failures_stop_nothing_and_are_tried_again_by_the_same_command(search, ends, folder, caplog):
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
    assert "no trial" in ends(lambda values: None, LR, n_trials=2, anew=True)


def test_a_grid_is_all_points_once_in_the_order_of_a_sweep_and_the_greatest_may_be_the_best(search, folder):
    def steps(values):
        return float(values["steps"])

    space, most = ("method=ncl,das", "steps=range(1,4)"), {**GRID, "direction": "maximize"}
    points = [[f"method={m}", f"steps={s}"] for m in ("ncl", "das") for s in (1, 2, 3)]
    assert search(steps, *space, **most | {"n_trials": 2}).jobs == points[:2]
    assert search(steps, *space, **most).jobs == points[2:]
    assert results(folder)["best"]["params"] == {"method": "ncl", "steps": "3"}


def test_a_folder_of_another_search_is_refused(search, ends):
    search(loss, LR, "trainer.num_workers=1")
    assert len(search(loss, LR, "trainer.num_workers=2", n_trials=5).jobs) == 1  # execution is free
    for changed in (["lr=interval(0.1,1)"], [LR, "steps=2"], [LR, "optimized_metric=FG.nats"]):
        assert "is another search (" in ends(loss, *changed, n_trials=6)
    assert "direction: " in ends(loss, LR, direction="maximize")


def test_a_record_that_a_full_disk_has_cut_is_left_out(search, folder):
    before = search(loss, LR, n_trials=2)
    with (folder / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')
    assert len(search(loss, LR, n_trials=3).jobs) == len(before.jobs) - 1


WRONG = [
    ([LR], {"sampler": "grid"}, "is invalid with sampler=grid"),
    (["steps=1"], {}, "hydra.sweeper.params is missing"),
    ([LR, "seed=3"], {"seeds": [0, 1]}, "hydra.sweeper.seeds=[0, 1]"),
    ([LR], {"seeds": [0, 0]}, "hydra.sweeper.seeds=[0,0] is invalid"),
    ([LR, "endtask=none,texts"], {}, "endtask=none,texts is invalid: trials run no end tasks"),
    ([LR, "endtask=texts", "endtask.lr=1,2"], {}, "endtask.lr=1,2 is invalid: trials run no end tasks"),
]


def test_wrong_options_and_spaces_are_refused_in_one_line(ends, monkeypatch):
    for given, options, line in WRONG:
        assert line in ends(loss, *given, anew=True, **options)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install -e '.[optuna]'" in ends(loss, LR)


def test_a_trial_is_the_mean_of_its_seeds_and_orders(search, folder):
    def by_seed(values):
        seeds = {"0": 3.0, "1": 3.0, "2": -5.0}
        return seeds[values["seed"]] + values["order"].count("b,a") if values["lr"] == "0.9" else 0.0

    orders = OmegaConf.create([["a", "b"], ["b", "a"]])
    runs = search(by_seed, "lr=0.1,0.9", seeds=[0, 1, 2], orders=orders, **GRID)
    places = [(lr, seed, order) for lr in ("0.1", "0.9") for seed in range(3) for order in ("a,b", "b,a")]
    assert runs.jobs == [[f"lr={lr}", f"seed={seed}", f"order=[{order}]"] for lr, seed, order in places]
    assert results(folder)["best"]["params"] == {"lr": "0.1"}


def test_a_failed_run_fails_its_trial(search, folder):
    def one_fails(values):
        fails = values["lr"] == "0.9" and values["seed"] == "1" and not mended
        return HydraException("no") if fails else float(values["seed"])

    mended = []
    search(one_fails, "lr=0.5,0.9", seeds=[0, 1], **GRID)
    assert results(folder)["finished"] == 1 and results(folder)["best"]["value"] == 0.5
    mended.append(True)
    jobs = search(one_fails, "lr=0.5,0.9", seeds=[0, 1], **GRID).jobs
    assert jobs == [["lr=0.9", f"seed={seed}"] for seed in (0, 1)]


def test_trials_run_no_end_tasks_whose_scores_are_of_test_text(search):
    runs = search(loss, LR, "endtask=texts", "endtask.root=there", n_trials=1)
    assert [line for line in runs.jobs[0] if line.startswith("endtask")] == ["endtask=none"]
    tasks = ["endtask=texts", "endtask.root=there", "endtask.score_on=dev", "endtask.lr=0.1,0.9"]
    (job,) = search(lambda values: 0.0, *tasks, anew=True, n_trials=1).jobs
    assert tasks[:3] == job[:3] and job[3] in ("endtask.lr=0.1", "endtask.lr=0.9")
