"""A search over a config's values with Optuna (`hydra/sweeper=optuna`); the same command resumes it.

The study is Optuna's journal in the sweep's folder. What a sampler draws depends on the seed and on the
trials known so far, not on how often the search was started."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, cast

from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import executes
from cpt.core.errors import readable
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.preemption import GO_ON
from cpt.core.schema import Count, Natural, OneOrMore, Text, check_value
from cpt.sweeps.jobs import CONTINUES, PreemptedJob

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
JOURNAL, RESULTS = "study.journal", "optimization_results.yaml"
FOLDERS = "folders of trial"  # with its number: the attribute of a study that names its runs
DIGITS = 6  # of a number that is given to a run: it is part of the folder's name


@dataclass(kw_only=True, eq=False)
class OptunaSweeper(Sweeper):
    """Asks Optuna for `n_jobs` trials, has them run, tells their objectives, until there are `n_trials`.

    seeds, orders: a trial is a run with every combination of them, and its objective is their mean."""

    params: Mapping[str, Any] | None
    sampler: str
    options: Mapping[str, Any]
    seed: int
    direction: str
    n_trials: int | None
    n_jobs: int
    seeds: Sequence[Any] | None = None
    orders: Sequence[Any] | None = None
    config: DictConfig = field(init=False)
    launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        self.options, given = dict(self.options), {"seed": self.seeds, "order": self.orders}
        chosen = OmegaConf.create({key: [*values] for key, values in given.items() if values is not None})
        self.averaged = cast(dict[str, list[Any]], OmegaConf.to_container(chosen))
        self.first: list[dict[str, Any]] = []  # the values of the first trials, before those of the sampler

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Reports a wrong option, or that Optuna is missing."""
        kinds: dict[str, Any] = {
            "sampler": Literal["tpe", "random", "grid"],
            "direction": Literal["minimize", "maximize"],
            "n_jobs": Count,
            "n_trials": Count | None if self.sampler == "grid" else Count,  # a grid ends by itself
            "seed": Natural,
        }
        with readable():
            for name, kind in kinds.items():
                check_value(f"hydra.sweeper.{name}", getattr(self, name), kind)
            for key, asked in self.averaged.items():
                check_value(f"hydra.sweeper.{key}s", [str(each) for each in asked], OneOrMore[Text])
            try:
                import optuna
            except ImportError as error:
                advice = "pip install -e '.[optuna]' in the checkout of cpt"
                told = f"hydra/sweeper=optuna is invalid: {error}"
                raise ValueError(f"{told}. Allowed: after {advice}") from error
        self.optuna: Any = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.loader, self.config = hydra_context.config_loader, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Runs what the search still lacks, and gives its study; one process at a time may work on it."""
        with readable():
            lines = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
            parser = OverridesParser.create(config_loader=self.loader)
            given = {each.get_key_element(): each for each in parser.parse_overrides(lines)}
            space = {key: each for key, each in given.items() if each.is_sweep_override()}
            fixed = [each.input_line or key for key, each in given.items() if key not in space]
            if not space:
                values = "values like method=ncl,das or 'optim.lr=tag(log,interval(1e-4,1e-2))'"
                raise ValueError(f"hydra.sweeper.params is missing. Allowed: {values}")
            for key in self.averaged:
                if any(line.lstrip("+").partition("=")[0] == key for line in fixed):
                    told = f"{key}=… is invalid with hydra.sweeper.{key}s={self.averaged[key]}"
                    raise ValueError(f"{told}. Allowed: one of them")
            for key in space:
                told = f"{key}={space[key].get_value_string()} is invalid"
                if key in ("seed", "order"):
                    allowed = f"hydra.sweeper.{key}s=[0,1], the values that each trial is averaged over"
                    raise ValueError(f"{told}: the luckiest would win. Allowed: {allowed}")
            cfg = self.loader.load_sweep_config(self.config, fixed)
            endtask: Any = cfg.get("endtask") or {}
            has_tasks, on_dev = endtask.get("name", "none") != "none", endtask.get("score_on") == "dev"
            first = next((each for each in space if each.startswith("endtask")), "")
            if first == "endtask" or (first and not (has_tasks and on_dev)):
                told = f"{first}={space[first].get_value_string()} is invalid: trials run no end tasks"
                raise ValueError(f"{told}. Allowed: other options, or tasks with endtask.score_on=dev")
            if has_tasks and not on_dev:
                told = "Skipping end tasks (endtask=%s) in trials: their scores are of test text"
                log.info(told, endtask.name)
                fixed = [line for line in fixed if not line.lstrip("+~").startswith("endtask")]
                fixed.append("endtask=none")
            if OmegaConf.select(cfg, "domains.score_on") == "test":
                log.warning("Searching on test text; domains.score_on=valid keeps it for the final runs")
            folder = Path(cfg.hydra.sweep.dir)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(folder / ".study.lock", timeout=0):
                    return self.search(folder, space, fixed, cfg.get("optimized_metric"))
            except Timeout as error:
                raise InvalidOptionError(
                    "name",
                    cfg.name,
                    reason=f"another search is using {folder}",
                    allowed="another name=…; the same command once it has ended, which continues it; to run "
                    f"more trials at once, hydra.sweeper.n_jobs={2 * self.n_jobs} in one search",
                ) from error

    def search(
        self, folder: Path, space: Mapping[str, Override], fixed: Sequence[str], objective: Any
    ) -> optuna.Study:
        """Resumes the study of a folder, runs the missing trials in batches, and writes the best one."""
        study = self.open_study(folder, space, fixed, str(objective))
        states, samplers = self.optuna.trial.TrialState, self.optuna.samplers
        for params in self.first if not study.trials else ():
            study.enqueue_trial(params)
        total = self.n_trials or math.inf
        if self.sampler == "grid":  # the points that the study lacks, in the order of a plain sweep
            points = list(itertools.product(*map(grid_values, space.values())))
            total, known = min(total, len(points)), [values_of(trial) for trial in study.trials]
            for params in (dict(zip(space, point, strict=True)) for point in points):
                if params not in known:
                    study.enqueue_trial(params)
        left = int(total) - len(study.get_trials(states=[states.COMPLETE]))
        # What failed at an earlier start is enqueued again: its run resumes. A trial that was killed while it
        # was asked for never had a run: with values of its own it is enqueued too.
        for trial in study.get_trials(states=[states.RUNNING]):
            if trial.params.keys() != space.keys():
                study.tell(trial.number, state=states.FAIL)
        others = [values_of(trial) for trial in study.trials if trial.state != states.FAIL]
        for trial in study.get_trials(states=[states.FAIL]):
            if (values := values_of(trial)).keys() == space.keys() and values not in others:
                study.enqueue_trial(values)
                others.append(values)
        made = {key: self.distribution(key, each) for key, each in space.items()}
        lists = ([f"{key}={format_value(value)}" for value in given] for key, given in self.averaged.items())
        runs = [list(each) for each in itertools.product(*lists)]  # the overrides of each run of a trial
        while left > 0:
            size = min(self.n_jobs, left)
            # Those of a search that was killed first: their run folders continue.
            batch = study.get_trials(states=[states.RUNNING])[:size]
            while len(batch) < size:
                seed = (self.seed * 1_000_003 + len(study.trials)) % 2**32  # by the number of the trial
                try:
                    if self.sampler == "tpe":  # the constant liar keeps trials at once apart
                        study.sampler = samplers.TPESampler(seed=seed, constant_liar=True, **self.options)
                    else:
                        study.sampler = samplers.RandomSampler(seed=seed)
                except TypeError as error:
                    raise ValueError(f"hydra.sweeper.options={self.options} is invalid: {error}") from error
                asked = study.ask(dict(made))
                batch.append(study.trials[asked.number])
            overrides = [[*fixed, *to_overrides(trial.params), *run] for trial in batch for run in runs]
            returned = self.launcher.launch(overrides, initial_job_idx=batch[0].number * len(runs))
            for place, trial in enumerate(batch):
                of_trial = returned[place * len(runs) : (place + 1) * len(runs)]
                if not any(map(is_preempted, of_trial)):  # else it stays under way
                    self.tell_trial(study, trial, of_trial)
            end_if_preempted(returned)
            left -= len(batch)
        if not (finished := len(study.get_trials(states=[states.COMPLETE]))):
            raise ValueError("no trial of the search has an objective; the same command tries again")
        best, given = study.best_trial, to_overrides(study.best_trial.params)
        params = dict(line.split("=", 1) for line in given)
        results = {"name": "optuna", "objective": objective, "finished": finished}
        results["best"] = {"trial": best.number, "params": params, "value": best.value}
        OmegaConf.save(OmegaConf.create(results), folder / RESULTS)
        told = f"Best of {finished} trials, {objective}: {best.value:.{DIGITS}g}, trial {best.number}:"
        log.info("%s %s\n%s", told, " ".join(given), folder / RESULTS)
        return study

    def open_study(
        self, folder: Path, space: Mapping[str, Override], fixed: Sequence[str], objective: str
    ) -> optuna.Study:
        """The study of a folder, new or as it was left. Raises ValueError if it was another search."""
        now = {
            "space": {key: str(each.get_value_string()) for key, each in sorted(space.items())},
            # how a run is carried out (workers, logger) may change
            "fixed": sorted(line for line in fixed if not executes(line.lstrip("+~").partition("=")[0])),
            "objective": objective,
            "direction": self.direction,
            **self.averaged,
        }
        path, journal = str(folder / JOURNAL), self.optuna.storages.journal
        known = Path(path).read_bytes() if Path(path).exists() else b""
        if known and not known.endswith(b"\n"):  # of a full disk: the next record would be joined to it
            log.warning("Leaving out the last record of %s, which is incomplete", path)
            os.truncate(path, known.rfind(b"\n") + 1)
        # Open, not link: FAT and some network file systems know no links; FileLock excludes a second search.
        backend = journal.JournalFileBackend(path, lock_obj=journal.JournalFileOpenLock(path))
        study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name="search",
            direction=self.direction,
            load_if_exists=True,
        )
        if "made_of" not in study.user_attrs:
            study.set_user_attr("made_of", now)
        then = study.user_attrs["made_of"]
        if changed := [f"{key}: {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key]]:
            told = f"{path} is another search ({'; '.join(changed)})"
            raise ValueError(f"{told}; take them back or choose another name=…")
        return study

    def distribution(self, key: str, override: Override) -> optuna.distributions.BaseDistribution:
        """Optuna's distribution for a sweep in Hydra's grammar: choices are text, ranges and intervals
        numbers unless a grid is asked for. Raises ValueError for bounds that Optuna does not take."""
        kinds = self.optuna.distributions
        if self.sampler == "grid" or override.is_choice_sweep():
            return kinds.CategoricalDistribution(grid_values(override))
        sweep: Any = override.value()
        logarithmic = "log" in sweep.tags
        if isinstance(sweep, RangeSweep):
            points = sorted(float(f"{float(v):.12g}") for v in grid_values(override))  # 0.1 + 0.2 is 0.3
            low, high, step = points[0], points[-1], abs(sweep.step)
        else:  # a step of 1 between whole numbers: int(interval(1,8))
            low, high = sweep.start, sweep.end
            step = 1 if isinstance(low, int) and isinstance(high, int) else None  # type: ignore[assignment]
        try:
            if isinstance(step, int):
                return kinds.IntDistribution(int(low), int(high), log=logarithmic, step=step)
            return kinds.FloatDistribution(float(low), float(high), log=logarithmic, step=step)
        except ValueError as error:
            raise ValueError(f"{key}={override.get_value_string()} is invalid: {error}") from error

    def tell_trial(
        self, study: optuna.Study, trial: optuna.trial.FrozenTrial, returned: Sequence[JobReturn]
    ) -> None:
        """Tells Optuna the objective of a trial, the mean over its runs; it fails where a run failed or has
        no finite objective."""
        study.set_user_attr(f"{FOLDERS} {trial.number}", [str(each.working_dir) for each in returned])
        label = f"Trial {trial.number}, {' '.join(to_overrides(trial.params))}"
        values = [each._return_value for each in returned]
        for job, value in zip(returned, values, strict=True):
            finite = isinstance(value, int | float) and math.isfinite(value)
            if job.status is not JobStatus.COMPLETED or not finite:
                study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                log.error("%s: failed, objective %s", label, value)
                return
        mean = fmean(values)
        study.tell(trial.number, mean)
        log.info("%s: %s", label, f"{mean:.{DIGITS}g}")


def grid_values(override: Override) -> list[str]:
    """The values of a choice or a range, as an override gives them."""
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line} is invalid with sampler=grid. Allowed: choices and ranges")
    return list(dict.fromkeys(override.sweep_string_iterator()))


def to_overrides(params: Mapping[str, Any]) -> list[str]:
    """A trial's values as overrides; numbers with DIGITS digits."""
    rounded = {key: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for key, v in params.items()}
    return [f"{key}={value}" for key, value in rounded.items()]


def values_of(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """A trial's values, also while it waits or is asked for."""
    return trial.system_attrs.get("fixed_params") or trial.params


def is_preempted(job: JobReturn) -> bool:
    return isinstance(job._return_value, PreemptedJob)


def end_if_preempted(returned: Sequence[JobReturn]) -> None:
    """Ends the program with GO_ON where a job continues when it is started again."""
    if preempted := list(filter(is_preempted, returned)):
        print(f"cpt: {preempted[0]._return_value}; {CONTINUES}", file=sys.stderr)
        raise SystemExit(GO_ON)
