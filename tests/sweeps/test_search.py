"""Search, whose runs are a function here, and tuning: what is searched, on which text, chosen and resumed."""

import json
import math
import re
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict

import cpt.sweeps.launcher  # noqa: F401  (registers the sweeper)
from cpt.core.preemption import GO_ON
from cpt.data.corpora import Corpora
from cpt.evaluation.finetune_tasks import FileTasks
from cpt.reporting.tuning import FinalRun, Trial, TunedMethod, write_tuning
from cpt.sweeps.jobs import PreemptedJob
from cpt.sweeps.optuna import OptunaSweeper
from cpt.sweeps.tune import TuneSweeper, find_defaults, find_space
from cpt.tune import build_command
from tests.conftest import ROOT, SMALL
from tests.support.endtask_fixtures import write_task

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


@contextmanager
def set_up(kind, conf, overrides, launch, **options):
    """A sweeper with the launcher that `launch` makes of context and config."""
    with initialize_config_dir(str(conf), version_base="1.3"), pytest.MonkeyPatch.context() as patched:
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
        made = {**config.hydra.sweeper, **options}
        made.pop("_target_")
        sweeper, context = kind(**made), HydraContext(config_loader=loader, callbacks=None)
        launcher = launch(context, config)
        patched.setattr(Plugins, "instantiate_launcher", lambda self, **given: launcher)
        sweeper.setup(hydra_context=context, task_function=None, config=config)
        yield sweeper, launcher


class Runs:
    def __init__(self, objective, *given):
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
def search(folder):
    def start(objective, *overrides, anew=False, **options):
        if anew:
            shutil.rmtree(folder / "sweep", ignore_errors=True)
        made = {"n_trials": 4, "n_jobs": 1, "sampler": "random"} | options
        with set_up(OptunaSweeper, folder / "conf", overrides, partial(Runs, objective), **made) as (
            sweeper,
            runs,
        ):
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


WRONG = [
    ([LR], {"sampler": "grid"}, "is invalid with sampler=grid"),
    (["steps=1"], {}, "hydra.sweeper.params is missing"),
    ([LR, "seed=3"], {"seeds": [0, 1]}, "hydra.sweeper.seeds=[0, 1]"),
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
        given, launch = ["hydra/sweeper=tune", *overrides], partial(Here, killed_at=killed_at)
        with set_up(TuneSweeper, ROOT / "conf", given, launch, **options) as (sweeper, here):
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
    given += ["method=ncl,l2"]
    first = tune(*given, n_trials=2, n_jobs=1, killed_at=1)
    assert len(first) == 1 and set(read) == {"train", "valid"}
    second = tune(*given, n_trials=2, n_jobs=1, killed_at=2)  # killed in the final runs
    assert ["/search/l2/" in job for job in second] == [True, False] and "test" in read
    read.clear()
    third = tune(*given, n_trials=2, n_jobs=1)
    assert len({*first, *second, *third}) == 2 + 4 and all("/final/" in job for job in third)
    assert "Nothing to tune: ncl." in capsys.readouterr().out
    told = json.loads((tmp_path / "outputs/tuned/tuning.json").read_text())
    ncl, l2 = told["methods"]
    assert (len(ncl["trials"]), len(ncl["runs"]), len(l2["trials"]), len(l2["runs"])) == (0, 2, 2, 2)
    assert l2["trials"][0]["values"] == ["method.strength=0.01"] and l2["flops"] > 0
    best = min(l2["trials"], key=lambda trial: trial["score"])["values"][0].removesuffix(".0")
    assert all(best.split("=")[1] in run["folder"] or best.endswith("=0.01") for run in l2["runs"])
    scores = json.loads((tmp_path / l2["runs"][0]["folder"] / "scores.json").read_text())
    assert scores["conditions"]["score_on"] == "test"
    assert scores["optimized_metric"] == l2["runs"][0]["score"]


def test_by_a_metric_of_end_tasks_trials_read_dev_and_final_runs_test(tune, given, tmp_path, monkeypatch):
    read = noting(monkeypatch, FileTasks, "read")
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    given += ["method=l2", "optimized_metric=MF1"]
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
    assert found[0].defaults == {"method.strength": 500.0, "optim.lr": 2e-3}
    assert runs == [["seed=0", "seed=1"]]
    assert found[0].overrides == ["order=1", "method=ewc", "mask=none"]
    (derpp,), _ = tune("method=choice(derpp)", "method.alpha=choice(0.3)", run=False)
    assert list(derpp.space) == ["method.beta"] and "method.alpha=0.3" in derpp.overrides
    (ewc,), _ = tune("method=ewc", "method.strength=7", run=False)
    assert ewc.space == {}
    (ewc,), _ = tune("method=ewc", "method.search.strength=choice(1,500.0,7)", run=False)
    assert ewc.defaults == {"method.strength": "500.0"}
    (ewc,), _ = tune("method=ewc", "method.search.strength=[1,10]", run=False)
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
    das = [trial(0, 1.0, 35.0, 25), trial(1, 0.1, 34.0, 25), trial(2, 3.0, math.inf, 5)]
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
    assert rows["das"][:5] == ["strength=0.1", "strength=1", "2", "35.00", "34.00"]  # 25 of 30 operations
    told = json.loads((tmp_path / "tuning.json").read_text(), parse_constant=pytest.fail)
    assert told["equal_compute_flops"] == 30 and told["methods"][2]["trials"][2]["score"] is None
    assert {"tuning.tex", "tuning.md", "tuning-searches.png"} < {each.name for each in tmp_path.iterdir()}
    most = write_tuning(methods[1:2], tmp_path / "most", "LC.perplexity", "maximize", 3)
    assert most.splitlines()[1].split()[1] == "strength=9.25"


def test_a_mean_over_fewer_final_runs_than_planned_is_marked_and_its_method_named(tmp_path):
    runs = [FinalRun(str(i), 30.0 + i, 0.1 * i if i else None, 1000, 50) for i in range(3)]
    methods = [
        TunedMethod(name=name, space={}, default={}, trials=[], runs=runs[:count], num_planned=3)
        for name, count in (("ncl", 3), ("kd", 2), ("das", 0))
    ]
    lines = write_tuning(methods, tmp_path / "tuning", "LC.perplexity", "minimize", 3).splitlines()
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert rows["ncl"].endswith("31.00 ± 1.00  0.1500 ± 0.0707 (2)")  # a run without forgetting
    assert "30.50 ± 0.71 (2)" in rows["kd"] and rows["kd"].endswith("0.1000 (1)")
    assert rows["das"].split()[-2:] == ["–", "–"]
    text = "\n".join(lines)
    assert (
        "over 0 to 3 runs." in text and "Missing final runs, which failed: kd (1 of 3), das (3 of 3)" in text
    )
    stored = json.loads((tmp_path / "tuning.json").read_text())["methods"]
    assert [(len(each["runs"]), each["num_planned"]) for each in stored] == [(3, 3), (2, 3), (0, 3)]
    whole = write_tuning(methods[:1], tmp_path / "whole", "LC.perplexity", "minimize", 3)
    assert "over 3 runs each." in whole and "Missing" not in whole


def test_the_program_is_a_sweep_of_run_py():
    command = build_command(["method=ewc", "--budget", "4", "--seeds", "2", "name=tuned"])
    assert command[1:3] == ["-m", "cpt"] and command[-1] == "--multirun"
    own = ["hydra/sweeper=tune", "hydra.sweeper.n_trials=4", "seed=0,1"]  # behind a flag that may come first
    assert command[3:-1] == ["method=ewc", "name=tuned", *own]
    with pytest.raises(SystemExit, match="2"):
        build_command(["--seeds", "2", "seed=1"])
