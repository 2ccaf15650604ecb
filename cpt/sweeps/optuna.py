"""A search over a config's values with Optuna (`hydra/sweeper=optuna`); the same command resumes it.

The study is Optuna's journal in the sweep's folder. What a sampler draws depends on the seed and on the
trials known so far, not on how often the search was started."""

from __future__ import annotations

import itertools
import logging
import math
import os
import shlex
import sys
import time
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

from cpt.core.config import is_execution_key
from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun, format_duration
from cpt.core.preemption import GO_ON
from cpt.core.run_command import format_install_command
from cpt.core.schema import Count, Natural, OneOrMore, Text, check_value
from cpt.core.secrets import redact_override
from cpt.sweeps.jobs import CONTINUES, PreemptedJob

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
JOURNAL = "study.journal"
RESULTS = "optimization_results.yaml"
FOLDERS = "folders of trial"  # with its number: the attribute of a study that names its runs
BATCH_END = "number of trials after the batch"  # the attribute of a study that says where the batch ends
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
        self.options = dict(self.options)
        self.first_trials: list[dict[str, Any]] = []  # their values, before those of the sampler

        averaged = {}
        if self.seeds is not None:
            averaged["seed"] = list(self.seeds)
        if self.orders is not None:
            averaged["order"] = list(self.orders)
        container = OmegaConf.to_container(OmegaConf.create(averaged))
        self.averaged = cast(dict[str, list[Any]], container)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Reports a wrong option, or that Optuna is missing."""
        with readable_errors():
            self.check_options()
            try:
                import optuna
            except ImportError as error:
                raise ValueError(
                    f"a search needs Optuna: {error}. Allowed: after {format_install_command('optuna')}"
                ) from error

        self.optuna: Any = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.loader = hydra_context.config_loader
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def check_options(self) -> None:
        """Raises ValueError for a wrong option of hydra.sweeper."""
        kinds: dict[str, Any] = {
            "sampler": Literal["tpe", "random", "grid"],
            "direction": Literal["minimize", "maximize"],
            "n_jobs": Count,
            "n_trials": Count | None if self.sampler == "grid" else Count,  # a grid ends by itself
            "seed": Natural,
        }
        for name, kind in kinds.items():
            check_value(f"hydra.sweeper.{name}", getattr(self, name), kind)
        for key, values in self.averaged.items():
            check_value(f"hydra.sweeper.{key}s", [str(value) for value in values], OneOrMore[Text])

    def sweep(self, arguments: list[str]) -> Any:
        """Runs what the search still lacks, and returns its study. Raises ValueError if another process works
        on it."""
        with readable_errors():
            space, fixed = self.read_overrides(arguments)
            self.check_averaged(space, fixed)
            cfg = self.loader.load_sweep_config(self.config, fixed)
            fixed = choose_endtasks(cfg, space, fixed)
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

    def read_overrides(self, arguments: Sequence[str]) -> tuple[dict[str, Override], list[str]]:
        """The searched keys with their overrides, and the overrides that all trials share. Raises ValueError
        if nothing is searched."""
        lines = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
        parser = OverridesParser.create(config_loader=self.loader)
        # The last of several overrides of a key counts.
        overrides = {override.get_key_element(): override for override in parser.parse_overrides(lines)}

        space = {}
        fixed = []
        for key, override in overrides.items():
            if override.is_sweep_override():
                space[key] = override
            else:
                fixed.append(override.input_line or key)
        if not space:
            raise ValueError(
                "hydra.sweeper.params is missing. Allowed: values like method=ncl,das or "
                "'optim.lr=tag(log,interval(1e-4,1e-2))'"
            )
        return space, fixed

    def check_averaged(self, space: Mapping[str, Override], fixed: Sequence[str]) -> None:
        """Raises ValueError for a seed or an order that is fixed as well as averaged over, or searched."""
        fixed_keys = {line.lstrip("+").partition("=")[0] for line in fixed}
        for key, values in self.averaged.items():
            if key in fixed_keys:
                raise InvalidOptionError(
                    key, "…", context=f"with hydra.sweeper.{key}s={values}", allowed="one of them"
                )
        for key, override in space.items():
            option = key.lstrip("+")
            if option in ("seed", "order"):
                raise InvalidOptionError(
                    key,
                    override.get_value_string(),
                    reason="the luckiest would win",
                    allowed=f"hydra.sweeper.{option}s=[0,1], the values that each trial is averaged over",
                )

    def search(
        self, folder: Path, space: Mapping[str, Override], fixed: Sequence[str], objective: Any
    ) -> optuna.Study:
        """Resumes the study of a folder, runs the missing trials in batches, and writes the best one."""
        study = self.open_study(folder, space, fixed, str(objective))
        num_missing = self.enqueue_new_trials(study, space)
        self.enqueue_failed_trials(study, space)

        distributions = {key: self.distribution(key, override) for key, override in space.items()}
        overrides_by_run = self.list_runs()
        num_complete = len(study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE]))
        num_trials = num_complete + num_missing
        start_time = time.monotonic()
        num_ended = 0
        while num_ended < num_missing:
            batch = self.ask_trials(study, min(self.n_jobs, num_missing - num_ended), distributions)
            overrides = []
            for ordinal, trial in enumerate(batch, start=num_complete + num_ended + 1):
                log.info("%s: starting (%d of %d)", format_trial(trial), ordinal, num_trials)
                for run in overrides_by_run:
                    overrides.append([*fixed, *to_overrides(trial.params), *run])
            returned = self.launcher.launch(
                overrides, initial_job_idx=batch[0].number * len(overrides_by_run)
            )

            for index, trial in enumerate(batch):
                results = returned[index * len(overrides_by_run) : (index + 1) * len(overrides_by_run)]
                if not any(is_preempted(result) for result in results):  # else it stays under way
                    self.tell_trial(study, trial, results)
            end_if_preempted(returned)

            num_ended += len(batch)
            duration = (time.monotonic() - start_time) / num_ended
            remaining_s = duration * (num_missing - num_ended)
            counts = f"{num_complete + num_ended} of {count_noun(num_trials, 'trial')} ended"
            log.info("%s, about %s left of this search", counts, format_duration(remaining_s))

        self.report_best(study, folder, objective)
        return study

    def enqueue_new_trials(self, study: optuna.Study, space: Mapping[str, Override]) -> int:
        """Enqueues the first trials of a new study, and the points that one of a grid lacks, in the order of
        a plain sweep. Returns how many trials the study lacks."""
        states = self.optuna.trial.TrialState
        if not study.trials:
            for params in self.first_trials:
                study.enqueue_trial(params)

        num_trials = self.n_trials or math.inf
        if self.sampler == "grid":
            points = list(itertools.product(*map(list_grid_values, space.values())))
            num_trials = min(num_trials, len(points))
            stored_values = [read_trial_values(trial) for trial in study.trials]
            for point in points:
                params = dict(zip(space, point, strict=True))
                if params not in stored_values:
                    study.enqueue_trial(params)
        return int(num_trials) - len(study.get_trials(states=[states.COMPLETE]))

    def enqueue_failed_trials(self, study: optuna.Study, space: Mapping[str, Override]) -> None:
        """Enqueues the values of trials that failed at an earlier start, once for each set of values: the
        runs of the new trial have the same folders, and resume."""
        states = self.optuna.trial.TrialState
        # A search that was killed while Optuna drew a trial's values, one by one, leaves in the journal a
        # trial under way that lacks some of them. It never had a run, and is ended as failed. Below it is
        # enqueued again only if it had been enqueued, since all of its values are stored then
        # (`read_trial_values`).
        for trial in study.get_trials(states=[states.RUNNING]):
            if trial.params.keys() != space.keys():
                study.tell(trial.number, state=states.FAIL)

        other_values = [read_trial_values(trial) for trial in study.trials if trial.state != states.FAIL]
        for trial in study.get_trials(states=[states.FAIL]):
            values = read_trial_values(trial)
            if values.keys() == space.keys() and values not in other_values:
                study.enqueue_trial(values)
                other_values.append(values)

    def list_runs(self) -> list[list[str]]:
        """The overrides of each run of a trial: one for every combination of seeds and orders."""
        overrides_by_key = []
        for key, values in self.averaged.items():
            overrides_by_key.append([f"{key}={format_value(value)}" for value in values])
        return [list(overrides) for overrides in itertools.product(*overrides_by_key)]

    def ask_trials(
        self, study: optuna.Study, size: int, distributions: Mapping[str, Any]
    ) -> list[optuna.trial.FrozenTrial]:
        """The trials of the next batch: after a kill what is left of the last one, whose folders continue.

        That batch is not filled up with further trials: Optuna would draw these before all objectives of the
        batch are known, and so others than without the kill."""
        states = self.optuna.trial.TrialState
        batch = study.get_trials(states=[states.RUNNING])[:size]
        if not batch:
            study.set_user_attr(BATCH_END, count_asked_trials(study) + size)
        batch_end = study.user_attrs.get(BATCH_END, 0)
        while len(batch) < size and count_asked_trials(study) < batch_end:
            study.sampler = self.make_sampler(len(study.trials))
            trial = study.ask(dict(distributions))
            batch.append(study.trials[trial.number])
        return batch

    def make_sampler(self, number: int) -> Any:
        """The sampler of a trial, which draws by the trial's number. Raises ValueError for options that it
        does not have."""
        samplers = self.optuna.samplers
        seed = (self.seed * 1_000_003 + number) % 2**32
        try:
            if self.sampler == "tpe":  # the constant liar keeps trials at once apart
                return samplers.TPESampler(seed=seed, constant_liar=True, **self.options)
            return samplers.RandomSampler(seed=seed)
        except TypeError as error:
            raise ValueError(f"hydra.sweeper.options={self.options} is invalid: {error}") from error

    def report_best(self, study: optuna.Study, folder: Path, objective: Any) -> None:
        """Writes and logs the best trial. Raises ValueError if none has an objective."""
        num_finished = len(study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE]))
        if not num_finished:
            raise ValueError("no trial of the search has an objective; the same command tries again")

        best = study.best_trial
        overrides = to_overrides(best.params)
        params = dict(line.split("=", 1) for line in overrides)
        results = {
            "name": "optuna",
            "objective": objective,
            "finished": num_finished,
            "best": {"trial": best.number, "params": params, "value": best.value},
        }
        path = folder / RESULTS
        OmegaConf.save(OmegaConf.create(results), path)
        log.info(
            "Best of %s, %s: %s, trial %d: %s\n%s",
            count_noun(num_finished, "trial"),
            objective,
            f"{best.value:.{DIGITS}g}",
            best.number,
            shlex.join(overrides),
            path,
        )

    def open_study(
        self, folder: Path, space: Mapping[str, Override], fixed: Sequence[str], objective: str
    ) -> optuna.Study:
        """The study of a folder, new or as it was left. Raises ValueError if it was another search."""
        path = folder / JOURNAL
        cut_incomplete_record(path)
        # Open, not link: FAT and some network file systems know no links; FileLock excludes a second search.
        journal = self.optuna.storages.journal
        backend = journal.JournalFileBackend(str(path), lock_obj=journal.JournalFileOpenLock(str(path)))
        study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name="search",
            direction=self.direction,
            load_if_exists=True,
        )

        description = self.describe_search(space, fixed, objective)
        if "made_of" not in study.user_attrs:
            study.set_user_attr("made_of", description)
        stored = study.user_attrs["made_of"]
        changes = []
        for key, value in description.items():
            if stored.get(key) != value:
                changes.append(f"{key}: {stored.get(key)} -> {value}")
        if changes:
            raise ValueError(
                f"{path} is another search ({'; '.join(changes)}); take them back or choose another name=…"
            )
        return study

    def describe_search(
        self, space: Mapping[str, Override], fixed: Sequence[str], objective: str
    ) -> dict[str, Any]:
        """What makes a search another one, without secrets, as it is stored. How a run is carried out
        (workers, logger) may change."""
        decisive = []
        for line in fixed:
            if not is_execution_key(line.lstrip("+~").partition("=")[0]):
                decisive.append(redact_override(line))
        return {
            "space": {key: str(override.get_value_string()) for key, override in sorted(space.items())},
            "fixed": sorted(decisive),
            "objective": objective.replace("/", "."),  # LC/perplexity is LC.perplexity
            "direction": self.direction,
            **self.averaged,
        }

    def distribution(self, key: str, override: Override) -> optuna.distributions.BaseDistribution:
        """Optuna's distribution for a sweep in Hydra's grammar: choices are text, ranges and intervals
        numbers unless a grid is asked for. Raises ValueError for bounds that Optuna does not take."""
        kinds = self.optuna.distributions
        if self.sampler == "grid" or override.is_choice_sweep():
            return kinds.CategoricalDistribution(list_grid_values(override))

        sweep: Any = override.value()
        logarithmic = "log" in sweep.tags
        step: int | float | None
        if isinstance(sweep, RangeSweep):
            # Rounded, so that 0.1 + 0.2 is 0.3.
            points = sorted(float(f"{float(value):.12g}") for value in list_grid_values(override))
            low = points[0]
            high = points[-1]
            step = abs(sweep.step)
        else:  # a step of 1 between whole numbers: int(interval(1,8))
            low = sweep.start
            high = sweep.end
            step = 1 if isinstance(low, int) and isinstance(high, int) else None
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
        study.set_user_attr(f"{FOLDERS} {trial.number}", [str(result.working_dir) for result in returned])
        label = format_trial(trial)
        values = []
        for result in returned:
            value = result._return_value
            is_finite = isinstance(value, int | float) and math.isfinite(value)
            if result.status is not JobStatus.COMPLETED or not is_finite:
                study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
                log.error("%s: failed, objective %s", label, value)
                return
            values.append(value)

        mean = fmean(values)
        study.tell(trial.number, mean)
        log.info("%s: %s", label, f"{mean:.{DIGITS}g}")


def choose_endtasks(cfg: DictConfig, space: Mapping[str, Override], fixed: Sequence[str]) -> list[str]:
    """The `fixed` overrides of all trials, without end tasks whose scores are of test text. Raises ValueError
    if end tasks are searched that the trials do not run."""
    endtask: Any = cfg.get("endtask") or {}
    has_tasks = endtask.get("name", "none") != "none"
    is_on_dev = endtask.get("score_on") == "dev"

    searched_key = next((key for key in space if key.startswith("endtask")), None)
    if searched_key is not None and (searched_key == "endtask" or not (has_tasks and is_on_dev)):
        raise InvalidOptionError(
            searched_key,
            space[searched_key].get_value_string(),
            reason="trials run no end tasks",
            allowed="other options, or tasks with endtask.score_on=dev",
        )
    if not has_tasks or is_on_dev:
        return list(fixed)
    log.info("Skipping end tasks (endtask=%s) in trials: their scores are of test text", endtask.name)
    remaining = [line for line in fixed if not line.lstrip("+~").startswith("endtask")]
    return [*remaining, "endtask=none"]


def cut_incomplete_record(path: Path) -> None:
    """Cuts a journal's last record if a full disk left it incomplete: the next one would be joined to it."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        log.warning("Leaving out the last record of %s, which is incomplete", path)
        os.truncate(path, content.rfind(b"\n") + 1)


def list_grid_values(override: Override) -> list[str]:
    """The values of a choice or a range, as an override gives them. Raises ValueError for any other sweep."""
    if override.is_interval_sweep():
        raise ValueError(f"{override.input_line} is invalid with sampler=grid. Allowed: choices and ranges")
    return list(dict.fromkeys(override.sweep_string_iterator()))


def to_overrides(params: Mapping[str, Any]) -> list[str]:
    """A trial's values as overrides; numbers with DIGITS digits."""
    overrides = []
    for key, value in params.items():
        rounded = float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        overrides.append(f"{key}={rounded}")
    return overrides


def count_asked_trials(study: optuna.Study) -> int:
    """How many trials of a study have started; others wait in its queue."""
    return sum(trial.state.name != "WAITING" for trial in study.trials)


def format_trial(trial: optuna.trial.FrozenTrial) -> str:
    """A trial's number and values: `Trial 3, lr=0.01 steps=10`."""
    return f"Trial {trial.number}, {' '.join(to_overrides(trial.params))}"


def read_trial_values(trial: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """A trial's values by key: those with which it was enqueued, which Optuna stores before it begins, else
    those that were drawn so far."""
    return trial.system_attrs.get("fixed_params") or trial.params


def is_preempted(job: JobReturn) -> bool:
    return isinstance(job._return_value, PreemptedJob)


def end_if_preempted(returned: Sequence[JobReturn]) -> None:
    """Ends the program with GO_ON where a job continues when it is started again."""
    for result in returned:
        if is_preempted(result):
            print(f"cpt: {result._return_value}; {CONTINUES}", file=sys.stderr)
            raise SystemExit(GO_ON)
