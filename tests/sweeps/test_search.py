"""Search, whose runs are a function here, and tuning: what is searched, on which text, chosen and resumed."""

import json
import math
import re
import shutil
import sys
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
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
from cpt.reporting import tuning
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
LR = "lr=tag(log,interval(1e-4,1))"


@contextmanager
def set_up(sweeper_class, conf, overrides, make_launcher, **options):
    """A sweeper, and the launcher that `make_launcher` makes of Hydra's context and config."""
    with initialize_config_dir(str(conf), version_base="1.3"), pytest.MonkeyPatch.context() as patched:
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", list(overrides), RunMode.MULTIRUN)
        settings = {**config.hydra.sweeper, **options}
        settings.pop("_target_")
        sweeper = sweeper_class(**settings)
        context = HydraContext(config_loader=loader, callbacks=None)
        launcher = make_launcher(context, config)
        patched.setattr(Plugins, "instantiate_launcher", lambda self, **arguments: launcher)
        sweeper.setup(hydra_context=context, task_function=None, config=config)
        yield sweeper, launcher


class FunctionLauncher:
    """A launcher whose jobs are calls of a function of the overrides, which gives the objective."""

    def __init__(self, objective, context, config):
        self.objective = objective
        self.jobs = []  # the overrides of each

    def launch(self, job_overrides, initial_job_idx):
        self.jobs += [list(overrides) for overrides in job_overrides]
        results = []
        for overrides in job_overrides:
            value = self.objective(dict(line.split("=", 1) for line in overrides))
            status = JobStatus.FAILED if isinstance(value, HydraException) else JobStatus.COMPLETED
            results.append(JobReturn(status=status, _return_value=value))
        return results


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conf/hydra").mkdir(parents=True)
    for group in ("hydra/sweeper", "endtask"):
        (tmp_path / "conf" / group).symlink_to(ROOT / "conf" / group)
    (tmp_path / "conf/config.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path / "sweep")))
    return tmp_path


@pytest.fixture
def search(folder):
    """Searches with an objective; returns the overrides of the jobs that ran."""

    def run_search(objective, *overrides, is_new=False, n_trials=4, n_jobs=1, sampler="random", **options):
        if is_new:
            shutil.rmtree(folder / "sweep", ignore_errors=True)
        make_launcher = partial(FunctionLauncher, objective)
        with set_up(
            OptunaSweeper,
            folder / "conf",
            overrides,
            make_launcher,
            n_trials=n_trials,
            n_jobs=n_jobs,
            sampler=sampler,
            **options,
        ) as (sweeper, launcher):
            sweeper.sweep(list(overrides))
        return launcher.jobs

    return run_search


@pytest.fixture
def search_grid(search):
    return partial(search, sampler="grid", n_trials=None)


@pytest.fixture
def read_refusal(search, capsys):
    """The line with which a search ends."""

    def run_search(*arguments, **options):
        with pytest.raises(SystemExit, match="1"):
            search(*arguments, **options)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run_search


def loss(values):
    """The least is at a learning rate of 0.01, of another method than ncl."""
    distance = abs(math.log10(float(values["lr"])) + 2)
    return distance + 1 if values.get("method") == "ncl" else distance


def read_results(folder):
    return OmegaConf.to_container(OmegaConf.load(folder / "sweep/optimization_results.yaml"))


def test_numbers_are_on_the_scale_asked_for(search):
    # Of 60 learning rates, about half are below 0.01 on a logarithmic scale, and a hundredth on a linear one.
    for space, low, high in ((LR, 13, 47), ("lr=interval(1e-4,1)", 0, 9)):
        jobs = search(loss, space, n_trials=60, is_new=True)
        small = [line for (line,) in jobs if float(line.removeprefix("lr=")) < 0.01]
        assert low <= len(small) <= high


@pytest.mark.parametrize(
    ("stop", "num_finished"), [(lambda: sys.exit(143), 10), (lambda: PreemptedJob("#11: preempted"), 11)]
)
def test_a_killed_or_preempted_search_ends_as_if_it_had_not_been(search, folder, stop, num_finished):
    search_methods = partial(search, n_trials=14, n_jobs=2, sampler="tpe", seed=1)
    uninterrupted = search_methods(loss, LR, "method=ncl,das")
    results = read_results(folder)
    num_calls = 0

    def stop_at_the_twelfth(values):
        nonlocal num_calls
        num_calls += 1
        return loss(values) if num_calls <= 11 else stop()

    with pytest.raises(SystemExit, match=f"143|{GO_ON}"):
        search_methods(stop_at_the_twelfth, LR, "method=ncl,das", is_new=True)
    # Of the batch that was killed both jobs run again: their folders go on.
    assert search_methods(loss, LR, "method=ncl,das") == uninterrupted[num_finished:]
    assert read_results(folder) == results


def test_the_same_command_makes_the_same_trials_and_goes_on_with_more(search, folder):
    jobs = search(loss, LR, n_trials=3)
    assert search(loss, LR, n_trials=3) == []
    assert len(search(loss, LR, n_trials=5)) == 2 and read_results(folder)["finished"] == 5

    def fail_at_the_second(values):
        return None if [f"lr={values['lr']}"] == jobs[1] else loss(values)

    search(fail_at_the_second, LR, n_trials=3, is_new=True)
    assert search(fail_at_the_second, LR, n_trials=3) == [jobs[1]]
    # What has failed twice is tried once more, then comes a new trial.
    repeated, new = search(loss, LR, n_trials=4)
    assert repeated == jobs[1] and new != jobs[1]


def test_failures_stop_nothing_and_are_tried_again_by_the_same_command(
    search_grid, read_refusal, folder, caplog
):
    def fail_three(values):
        return {"1": HydraException("boom"), "2": None, "3": math.nan}.get(values["steps"], 1.0)

    caplog.set_level("INFO")
    jobs = search_grid(fail_three, "steps=range(0,5)")
    assert jobs == [[f"steps={steps}"] for steps in range(5)]
    assert read_results(folder)["finished"] == 2 and "boom" in caplog.text
    assert "Trial 1, steps=1: starting (2 of 5)" in caplog.messages
    assert "4 of 5 trials ended, about 0:00 left of this search" in caplog.messages

    # They fail for the second time, then run; what is finished is not run again.
    for objective, num_finished in ((fail_three, 2), (lambda values: 0.5, 5)):
        jobs = search_grid(objective, "steps=range(0,5)")
        assert jobs == [["steps=1"], ["steps=2"], ["steps=3"]]
        assert read_results(folder)["finished"] == num_finished
    assert search_grid(fail_three, "steps=range(0,5)") == []
    assert "no trial" in read_refusal(lambda values: None, LR, n_trials=2, is_new=True)


def test_a_grid_is_all_points_once_in_the_order_of_a_sweep_and_the_greatest_may_be_the_best(search, folder):
    def objective(values):
        return float(values["steps"])

    space = ("method=ncl,das", "steps=range(1,4)")
    maximize = partial(search, objective, *space, sampler="grid", direction="maximize")
    points = [[f"method={method}", f"steps={steps}"] for method, steps in product(("ncl", "das"), (1, 2, 3))]
    assert maximize(n_trials=2) == points[:2]
    assert maximize(n_trials=None) == points[2:]
    assert read_results(folder)["best"]["params"] == {"method": "ncl", "steps": "3"}


def test_a_folder_of_another_search_is_refused(search, read_refusal):
    search(loss, LR, "trainer.num_workers=1")
    # How runs are carried out is no part of a search.
    assert len(search(loss, LR, "trainer.num_workers=2", n_trials=5)) == 1
    # LC.perplexity in another spelling is the same metric.
    assert len(search(loss, LR, "optimized_metric=LC/perplexity", n_trials=6)) == 1
    for overrides in (["lr=interval(0.1,1)"], [LR, "steps=2"], [LR, "optimized_metric=FG.nats"]):
        assert "is another search (" in read_refusal(loss, *overrides, n_trials=7)
    assert "direction: " in read_refusal(loss, LR, direction="maximize")


def test_a_secret_is_not_stored_with_a_search(search, folder):
    for _ in range(2):  # the second continues
        search(loss, LR, "+api_token=hidden-from-view", n_trials=1)
    journal = (folder / "sweep/study.journal").read_text()
    assert "+api_token=" in journal and "hidden-from-view" not in journal


WRONG = [
    ([LR], {"sampler": "grid"}, "is invalid with sampler=grid"),
    (["steps=1"], {}, "hydra.sweeper.params is missing"),
    ([LR, "seed=3"], {"seeds": [0, 1]}, "hydra.sweeper.seeds=[0, 1]"),
    ([LR, "seed=0,1"], {}, "seed=0,1 is invalid: the luckiest would win. Allowed: hydra.sweeper.seeds=[0,1]"),
    (
        [LR, "++order=0,1"],
        {},
        "++order=0,1 is invalid: the luckiest would win. Allowed: hydra.sweeper.orders=",
    ),
    ([LR, "endtask=none,texts"], {}, "endtask=none,texts is invalid: trials run no end tasks"),
    ([LR, "endtask=texts", "endtask.lr=1,2"], {}, "endtask.lr=1,2 is invalid: trials run no end tasks"),
]


def test_wrong_options_and_spaces_are_refused_in_one_line(read_refusal, monkeypatch):
    for overrides, options, line in WRONG:
        assert line in read_refusal(loss, *overrides, is_new=True, **options)
    monkeypatch.setitem(sys.modules, "optuna", None)
    refusal = read_refusal(loss, LR)  # `cpt.tune` says the same, without options that nobody gave
    assert "a search needs Optuna: " in refusal and "pip install -e '.[optuna]'" in refusal


def test_a_trial_is_the_mean_of_its_seeds_and_orders(search_grid, folder):
    def objective(values):
        """The best seed is that of lr=0.9, the best mean that of lr=0.1."""
        if values["lr"] == "0.1":
            return 0.0
        loss_of_seed = {"0": 3.0, "1": 3.0, "2": -5.0}[values["seed"]]
        return loss_of_seed + 1 if "b,a" in values["order"] else loss_of_seed

    orders = OmegaConf.create([["a", "b"], ["b", "a"]])
    jobs = search_grid(objective, "lr=0.1,0.9", seeds=[0, 1, 2], orders=orders)
    expected = []
    for lr, seed, order in product(("0.1", "0.9"), range(3), ("a,b", "b,a")):
        expected.append([f"lr={lr}", f"seed={seed}", f"order=[{order}]"])
    assert jobs == expected
    assert read_results(folder)["best"]["params"] == {"lr": "0.1"}


def test_a_failed_run_fails_its_trial(search_grid, folder):
    is_mended = False

    def objective(values):
        if values["lr"] == "0.9" and values["seed"] == "1" and not is_mended:
            return HydraException("no")
        return float(values["seed"])

    search_grid(objective, "lr=0.5,0.9", seeds=[0, 1])
    results = read_results(folder)
    assert results["finished"] == 1 and results["best"]["value"] == 0.5
    is_mended = True
    jobs = search_grid(objective, "lr=0.5,0.9", seeds=[0, 1])
    assert jobs == [["lr=0.9", "seed=0"], ["lr=0.9", "seed=1"]]


def test_trials_run_no_end_tasks_whose_scores_are_of_test_text(search):
    (job,) = search(loss, LR, "endtask=texts", "endtask.root=there", n_trials=1)
    assert [line for line in job if line.startswith("endtask")] == ["endtask=none"]
    tasks = ["endtask=texts", "endtask.root=there", "endtask.score_on=dev", "endtask.lr=0.1,0.9"]
    (job,) = search(lambda values: 0.0, *tasks, is_new=True, n_trials=1)
    assert tasks[:3] == job[:3] and job[3] in ("endtask.lr=0.1", "endtask.lr=0.9")


class TrainLauncher:
    """A launcher whose jobs are runs in this process; it is killed before the job of a number."""

    def __init__(self, context, config, *, killed_at):
        self.loader = context.config_loader
        self.config = config
        self.killed_at = killed_at
        self.folders = []  # of the jobs that have run

    def launch(self, job_overrides, initial_job_idx):
        return [self.run(list(overrides)) for overrides in job_overrides]

    def run(self, overrides):
        from cpt.train import train

        if len(self.folders) == self.killed_at:
            sys.exit(143)
        cfg = self.loader.load_sweep_config(self.config, [*overrides, "hydra.mode=RUN"])
        HydraConfig.instance().set_config(cfg)
        folder = cfg.hydra.run.dir
        self.folders.append(folder)
        with open_dict(cfg):
            cfg.pop("hydra")
        objective = train(cfg, run_dir=Path(folder))
        return JobReturn(working_dir=folder, status=JobStatus.COMPLETED, _return_value=objective)


@contextmanager
def set_up_tuning(overrides, *, killed_at=None, **options):
    make_launcher = partial(TrainLauncher, killed_at=killed_at)
    all_overrides = ["hydra/sweeper=tune", *overrides]
    with set_up(TuneSweeper, ROOT / "conf", all_overrides, make_launcher, **options) as (sweeper, launcher):
        yield sweeper, launcher


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """Tunes, and returns the folders of the runs."""
    monkeypatch.chdir(tmp_path)

    def run_tuning(*overrides, killed_at=None, **options):
        with set_up_tuning(overrides, killed_at=killed_at, **options) as (sweeper, launcher):
            try:
                sweeper.sweep(list(overrides))
            except SystemExit as system_exit:
                if system_exit.code != 143:
                    raise
            return launcher.folders

    return run_tuning


def read_candidates(*overrides):
    """What would be tuned, and the overrides of the final runs of each."""
    with set_up_tuning(overrides) as (sweeper, _):
        return sweeper.read_candidates(list(overrides))


def read_candidate(*overrides):
    candidates, _ = read_candidates(*overrides)
    (candidate,) = candidates
    return candidate


@pytest.fixture
def shared_overrides(corpora, cache, no_pictures):
    data = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    return [*SMALL, *data, "trainer.steps=2", "name=tuned", "seed=0,1"]


def record_splits(monkeypatch, reader_class, method):
    """The splits of which a class reads text, by this method."""
    splits = []
    read_split = getattr(reader_class, method)

    def record(self, name, split, **options):
        splits.append(split)
        return read_split(self, name, split, **options)

    monkeypatch.setattr(reader_class, method, record)
    return splits


def read_tuning(path):
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def test_trials_read_no_test_text_and_a_killed_tuning_ends_as_one_that_was_not(
    tune, shared_overrides, tmp_path, monkeypatch, capsys
):
    splits = record_splits(monkeypatch, Corpora, "packed")
    overrides = [*shared_overrides, "method=ncl,l2"]
    trials = tune(*overrides, n_trials=2, n_jobs=1, killed_at=1)
    assert len(trials) == 1 and set(splits) == {"train", "valid"}

    # The second start is killed in the final runs, which read test text.
    trial_and_run = tune(*overrides, n_trials=2, n_jobs=1, killed_at=2)
    assert ["/search/l2/" in folder for folder in trial_and_run] == [True, False] and "test" in splits
    runs = tune(*overrides, n_trials=2, n_jobs=1)
    assert len({*trials, *trial_and_run, *runs}) == 2 + 4 and all("/final/" in folder for folder in runs)

    assert "Nothing to tune: ncl." in capsys.readouterr().out
    ncl, l2 = read_tuning(tmp_path / "outputs/tuned/tuning.json")["methods"]
    assert (len(ncl["trials"]), len(ncl["runs"]), len(l2["trials"]), len(l2["runs"])) == (0, 2, 2, 2)
    assert l2["trials"][0]["values"] == ["method.strength=0.01"] and l2["flops"] > 0

    # The final runs are those of the best value; the default of 0.01 is not in the names of folders.
    best_trial = min(l2["trials"], key=lambda trial: trial["score"])
    (assignment,) = best_trial["values"]
    strength = assignment.removeprefix("method.strength=").removesuffix(".0")
    if strength != "0.01":
        assert all(strength in run["folder"] for run in l2["runs"])
    run = l2["runs"][0]
    scores = json.loads((tmp_path / run["folder"] / "scores.json").read_text())
    assert scores["conditions"]["score_on"] == "test"
    assert scores["optimized_metric"] == run["score"]


def test_by_a_metric_of_end_tasks_trials_read_dev_and_final_runs_test(
    tune, shared_overrides, tmp_path, monkeypatch
):
    splits = record_splits(monkeypatch, FileTasks, "read")
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    overrides = [*shared_overrides, "method=l2", "optimized_metric=MF1"]
    with pytest.raises(SystemExit, match="1"):
        tune(*overrides)  # without end tasks
    overrides += ["endtask=texts", f"endtask.root={tmp_path}", "endtask.epochs=1", "endtask.seeds=[0]"]
    tune(*overrides, n_trials=2, n_jobs=1, killed_at=2)
    assert set(splits) == {"train", "dev"}
    tune(*overrides, n_trials=2, n_jobs=1)
    assert "test" in splits
    tuning = read_tuning(tmp_path / "outputs/tuned/tuning.json")
    assert tuning["direction"] == "maximize" and 0 <= tuning["methods"][0]["runs"][0]["score"] <= 1


def test_candidates_are_the_choices_of_groups_and_what_is_given_is_not_searched(caplog):
    candidates, final_lines = read_candidates(
        "method=ewc,kd", "mask=none,migu", "optim.lr=tag(log,interval(1e-4,1e-2))", "seed=0,1", "order=1"
    )
    labels = [candidate.label for candidate in candidates]
    assert labels == ["ewc mask=none", "ewc mask=migu", "kd mask=none", "kd mask=migu"]
    ewc, ewc_with_mask = candidates[:2]
    assert list(ewc_with_mask.space) == ["method.strength", "mask.migu.threshold", "optim.lr"]
    assert ewc.defaults == {"method.strength": 500.0, "optim.lr": 2e-3}
    assert final_lines == [["seed=0", "seed=1"]]
    assert ewc.overrides == ["order=1", "method=ewc", "mask=none"]

    # The multiplier of a rate is searched where the rate follows from it.
    assert list(read_candidate("method=lora").space) == ["method.lr_multiplier"]
    assert list(read_candidate("method=lora", "model.lr=choice(1,2)").space) == [
        "method.lr_multiplier",
        "model.lr",
    ]
    for rate in ("3e-4", "${model.lr}", "'${times:2,${model.lr}}'"):
        assert read_candidate("method=lora", f"optim.lr={rate}").space == {}
    twice = "optim.lr='${times:2,${times:${model.lr},${method.lr_multiplier}}}'"
    assert list(read_candidate("method=lora", twice).space) == ["method.lr_multiplier"]
    space_of_rate = "+optim.search.lr=[log,1e-5,1e-2]"
    assert list(read_candidate("method=lora", space_of_rate).space) == ["optim.lr"]
    caplog.set_level("INFO")
    assert list(read_candidate("method=lora", "optim.lr=interval(1e-4,1e-2)").space) == ["optim.lr"]
    assert caplog.messages[-1].startswith("Not searched for lora: method.lr_multiplier")

    # A value that is given is no part of the space; the space itself can be given, too.
    derpp = read_candidate("method=choice(derpp)", "method.alpha=choice(0.3)")
    assert list(derpp.space) == ["method.beta"] and "method.alpha=0.3" in derpp.overrides
    assert read_candidate("method=ewc", "method.strength=7").space == {}
    ewc = read_candidate("method=ewc", "method.search.strength=choice(1,500.0,7)")
    assert ewc.defaults == {"method.strength": "500.0"}
    ewc = read_candidate("method=ewc", "method.search.strength=[1,10]")
    assert ewc.space["method.strength"].get_value_string() == "interval(1,10)"
    for override, reason in (
        ("method.search.strength=7", "Allowed: [low, high]"),
        ("domains.score_on=valid", "searches use"),
    ):
        with pytest.raises(ValueError, match=f"{re.escape(override)} is invalid.*{re.escape(reason)}"):
            read_candidate("method=ewc", override)


def test_seeds_and_orders_of_final_runs_may_have_a_plus_and_variants_have_labels_of_their_own(tmp_path):
    _, final_lines = read_candidates("method=ewc", "++seed=0,1", "+order=0,1")
    assert final_lines == [["++seed=0", "++seed=1"], ["+order=0", "+order=1"]]

    (tmp_path / "method").mkdir()
    (tmp_path / "method/ewc_strong.yaml").write_text("defaults: [ewc]\nstrength: 5000\n")
    candidates, _ = read_candidates(f"hydra.searchpath=[{tmp_path}]", "method=ewc,ewc_strong,kd")
    labels = [candidate.label for candidate in candidates]
    assert labels == ["method=ewc", "method=ewc_strong", "kd"]


def test_every_space_is_of_options_of_its_method_and_has_its_default(composed):
    for path in sorted((ROOT / "conf/method").glob("*.yaml")):
        cfg = composed(f"method={path.stem}")
        space = find_space(cfg)
        assert find_defaults(cfg, space).keys() == space.keys(), path.stem
        tunable = {key for key in cfg.method if key in ("strength", "lr_multiplier")}
        assert space or not tunable, path.stem


def test_the_ratios_of_sources_of_replay_are_searched(composed):
    sources = "replay.sources={a: {path: a.jsonl, ratio: 0.05}, b: {path: b, ratio: 0.2, end_ratio: 0}, c: {path: c}}"
    cfg = composed("method=ncl", "replay=sources", sources)
    space = find_space(cfg)
    assert list(space) == ["replay.sources.a.ratio", "replay.sources.b.ratio"]
    assert find_defaults(cfg, space) == {"replay.sources.a.ratio": 0.05, "replay.sources.b.ratio": 0.2}
    assert "interval(0.01,0.3)" in space["replay.sources.a.ratio"].get_value_string()

    named = ["+replay.search.sources.a.ratio=[0.1,0.2]", "+replay.search.sources.b.ratio=null"]
    space = find_space(composed("method=ncl", "replay=past", sources, *named))
    assert list(space) == ["replay.past_ratio", "replay.sources.a.ratio"]
    assert space["replay.sources.a.ratio"].get_value_string() == "interval(0.1,0.2)"
    assert list(find_space(composed("method=ncl", "replay=past"))) == ["replay.past_ratio"]


def make_trial(number, strength, score, flops=10):
    return Trial(number, [f"method.strength={strength}"], score, flops)


def read_rows(text, num_methods):
    """The cells of a printed table, by method."""
    rows = {}
    for line in text.splitlines()[1 : 1 + num_methods]:
        name, *cells = line.split()
        rows[name] = cells
    return rows


def test_equal_compute_is_the_best_of_the_first_trials_within_the_cheapest_search(tmp_path):
    runs = [FinalRun("a", 30.0, 0.1, 1000, 50), FinalRun("b", 32.0, 0.3, 1000, 50)]
    ncl = TunedMethod(name="ncl", space={}, default={}, trials=[], runs=runs[:1])
    space = {"method.strength": "tag(log,interval(1,1000))"}
    ewc = TunedMethod(
        name="ewc",
        space=space,
        default={"method.strength": "500"},
        trials=[make_trial(0, 500.0, 40.0), make_trial(1, 70.5, 39.0), make_trial(2, 9.25, 41.0)],
        runs=runs,
    )
    das = TunedMethod(
        name="das",
        space=space,
        default={"method.strength": "1"},
        trials=[
            make_trial(0, 1.0, 35.0, flops=25),
            make_trial(1, 0.1, 34.0, flops=25),
            make_trial(2, 3.0, math.inf, flops=5),
        ],
        runs=runs,
    )
    text = write_tuning([ncl, ewc, das], tmp_path / "tuning", "LC.perplexity", "minimize", 3)
    rows = read_rows(text, 3)
    assert rows["ncl"] == ["–", "–", "–", "–", "–", "30.00", "0.1000"]
    assert rows["ewc"][:5] == ["strength=70.5", "strength=70.5", "3", "40.00", "39.00"]
    assert rows["ewc"][5:] == ["31.00", "±", "1.41", "0.2000", "±", "0.1414"]
    # Within the 30 operations of ewc's search, das has one trial.
    assert rows["das"][:5] == ["strength=0.1", "strength=1", "2", "35.00", "34.00"]

    tuning = read_tuning(tmp_path / "tuning.json")
    assert tuning["equal_compute_flops"] == 30
    assert tuning["methods"][2]["trials"][2]["score"] is None
    files = {path.name for path in tmp_path.iterdir()}
    assert {"tuning.tex", "tuning.md", "tuning-searches.png"} < files
    text = write_tuning([ewc], tmp_path / "most", "LC.perplexity", "maximize", 3)
    assert read_rows(text, 1)["ewc"][0] == "strength=9.25"


def test_tex_shows_a_negative_number_with_a_minus_and_values_as_they_are(tmp_path):
    trials = [make_trial(0, 1e-05, 40.0)]
    default = {"method.strength": "1e-05"}
    space = {"method.strength": "tag(log,interval(1e-6,1e-4))"}
    runs = [FinalRun(str(seed), 30.0, -0.2, 1000, 50) for seed in range(2)]
    tuned = TunedMethod(name="mine", space=space, default=default, trials=trials, runs=runs)
    write_tuning([tuned], tmp_path / "tuning", "LC.perplexity", "minimize", 1)
    tex = (tmp_path / "tuning.tex").read_text()
    assert "mine & strength=1e-05 & " in tex and " & $-$0.2000 $\\pm$ 0.0000 \\\\" in tex


@pytest.mark.parametrize("ends", ["50,5000", "500,50000", "1e-6,1e-4", "1,100000", "1e-7,1e-3"])
def test_the_labels_below_a_search_do_not_touch(ends, monkeypatch):
    figures = []
    monkeypatch.setattr(tuning, "make_png", lambda figure, **options: figures.append(figure))
    low, high = map(float, ends.split(","))
    space = {"method.strength": f"tag(log,interval({ends}))"}
    trials = [make_trial(0, low, 40.0), make_trial(1, high, 39.0)]
    methods = []
    for name in ("ewc", "kd", "si"):
        methods.append(TunedMethod(name=name, space=space, default={}, trials=trials, runs=[]))
    tuning.draw_searches(methods, metric="LC.perplexity", sign=1)

    axes = figures[0].axes[0]
    figures[0].canvas.draw()
    boxes = []
    for position, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        if low <= position <= high:
            boxes.append(label.get_window_extent())
    assert len(boxes) >= 2
    for box, next_box in pairwise(boxes):
        assert box.x1 + 3 < next_box.x0


def test_a_mean_over_fewer_final_runs_than_planned_is_marked_and_its_method_named(tmp_path):
    runs = [
        FinalRun("0", 30.0, None, 1000, 50),  # without forgetting
        FinalRun("1", 31.0, 0.1, 1000, 50),
        FinalRun("2", 32.0, 0.2, 1000, 50),
    ]
    methods = [
        TunedMethod(name=name, space={}, default={}, trials=[], runs=runs[:num_runs], num_planned=3)
        for name, num_runs in (("ncl", 3), ("kd", 2), ("das", 0))
    ]
    text = write_tuning(methods, tmp_path / "tuning", "LC.perplexity", "minimize", 3)
    ncl, kd, das = text.splitlines()[1:4]
    assert ncl.startswith("ncl") and ncl.endswith("31.00 ± 1.00  0.1500 ± 0.0707 (2)")
    assert kd.startswith("kd") and "30.50 ± 0.71 (2)" in kd and kd.endswith("0.1000 (1)")
    assert das.startswith("das") and das.split()[-2:] == ["–", "–"]
    assert "over 0 to 3 runs." in text
    assert "Missing final runs, which failed: kd (1 of 3), das (3 of 3)" in text
    stored = read_tuning(tmp_path / "tuning.json")["methods"]
    counts = [(len(method["runs"]), method["num_planned"]) for method in stored]
    assert counts == [(3, 3), (2, 3), (0, 3)]

    text = write_tuning(methods[:1], tmp_path / "complete", "LC.perplexity", "minimize", 3)
    assert "over 3 runs each." in text and "Missing" not in text


def test_the_program_is_a_sweep_of_run_py():
    command = build_command(["method=ewc", "--budget", "4", "--seeds", "2", "name=tuned"])
    assert command[1:3] == ["-m", "cpt"]
    # What tuning adds stands behind the arguments, the first of which may be a flag of Hydra.
    assert command[3:] == [
        "method=ewc",
        "name=tuned",
        "hydra/sweeper=tune",
        "hydra.sweeper.n_trials=4",
        "seed=0,1",
        "--multirun",
    ]
    with pytest.raises(SystemExit, match="2"):
        build_command(["--seeds", "2", "seed=1"])
