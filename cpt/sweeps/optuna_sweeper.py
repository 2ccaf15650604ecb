"""A search over a config's values with Optuna (`hydra/sweeper=optuna`); the same command goes on with it."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from cpt.core.errors import readable
from cpt.core.preemption import GO_ON
from cpt.sweeps.averaging import Averaged, group
from cpt.sweeps.jobs import CONTINUES, PreemptedJob
from cpt.sweeps.search_space import distributions, identify_space, write_overrides
from cpt.sweeps.study import conclude, enqueue_grid, open_study, retry, tell_study, trials

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)
SAMPLERS = ("tpe", "random", "nsga2", "grid")
DIRECTIONS = ("minimize", "maximize")


class OptunaSweeper(Sweeper):
    """Asks Optuna for `n_jobs` trials, has them run, tells their objectives, until there are `n_trials`."""

    def __init__(
        self,
        *,
        params: Mapping[str, Any] | None,
        sampler: str,
        options: Mapping[str, Any],
        seed: int,
        direction: str | Sequence[str],
        n_trials: int | None,
        n_jobs: int,
        seeds: Sequence[Any] | None = None,
        orders: Sequence[Any] | None = None,
    ) -> None:
        self.params, self.sampler, self.options = dict(params or {}), sampler, dict(options)
        self.seed, self.direction, self.n_trials, self.n_jobs = seed, direction, n_trials, n_jobs
        self.averaged = {
            key: given for key, given in (("seed", seeds), ("order", orders)) if given is not None
        }

    def check(self) -> None:
        """Raises ValueError for an option that there cannot be, or if Optuna is missing."""
        given = "hydra.sweeper"
        if self.sampler not in SAMPLERS:
            raise ValueError(f"{given}.sampler={self.sampler}; allowed: {', '.join(SAMPLERS)}")
        if type(self.n_jobs) is not int or self.n_jobs < 1:
            raise ValueError(f"{given}.n_jobs={self.n_jobs}; allowed: 1, 2, …")
        endless = self.n_trials is None and self.sampler == "grid"  # the grid ends
        if not endless and (type(self.n_trials) is not int or self.n_trials < 1):
            raise ValueError(f"{given}.n_trials={self.n_trials}; allowed: 1, 2, …; with grid also null")
        if type(self.seed) is not int or self.seed < 0:
            raise ValueError(f"{given}.seed={self.seed}; allowed: 0, 1, 2, …")
        try:
            import optuna
        except ImportError as error:
            advice = "pip install -e '.[optuna]' in the checkout of cpt"
            raise ValueError(f"hydra/sweeper=optuna needs Optuna ({error}): {advice}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            self.check()
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Runs what the search still lacks; one process at a time is at work on it."""
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            space, fixed = self.parsed(arguments)
            averaged = Averaged(self.averaged)
            averaged.check_free([line.lstrip("+").partition("=")[0] for line in fixed], space=space)
            fixed = self.without_endtasks(space, fixed)
            cfg = self.hydra_context.config_loader.load_sweep_config(self.config, fixed)
            folder = Path(cfg.hydra.sweep.dir)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with FileLock(folder / ".study.lock", timeout=0):
                    self.search(folder, space, fixed, averaged=averaged, objective=cfg.get("objective"))
            except Timeout as error:
                raise ValueError(f"another search is at work in {folder}; choose another name=…") from error

    def parsed(self, arguments: Sequence[str]) -> tuple[dict[str, Override], list[str]]:
        """What is searched for by key, and the overrides that all trials share."""
        lines = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        given = {each.get_key_element(): each for each in parser.parse_overrides(lines)}
        space = {key: each for key, each in given.items() if each.is_sweep_override()}
        if not space:
            raise ValueError(
                "nothing to search for; give values like method=ncl,das or "
                "'optim.lr=tag(log,interval(1e-4,1e-2))'"
            )
        return space, [each.input_line or key for key, each in given.items() if key not in space]

    def without_endtasks(self, space: Mapping[str, Override], fixed: list[str]) -> list[str]:
        """The overrides with `endtask=none`, where end tasks are asked for: they are scored on test text, by
        which nothing may be chosen. Raises ValueError where they are searched over."""
        if searched := [key for key in space if key.startswith("endtask")]:
            raise ValueError(f"{searched[0]} is invalid as a dimension of a search: trials run no end tasks")
        others = [line for line in fixed if not line.lstrip("+~").startswith("endtask")]
        asked = self.hydra_context.config_loader.load_sweep_config(self.config, fixed).get("endtask")
        if asked is None or asked.get("name", "none") == "none":
            return fixed
        log.info("Skipping end tasks (endtask=%s) in trials: their scores are of test text", asked.name)
        return [*others, "endtask=none"]

    def search(
        self,
        folder: Path,
        space: Mapping[str, Override],
        fixed: list[str],
        *,
        averaged: Averaged,
        objective: Any,
    ) -> None:
        names = [objective] if isinstance(objective, str) else list(objective or ["objective"])
        made_of = identify_space(space, fixed, names) | {key: list(v) for key, v in averaged.values.items()}
        study = open_study(folder, directions=self.directions(names), made_of=made_of)
        total = self.n_trials or math.inf
        if self.sampler == "grid":
            total = min(total, enqueue_grid(study, space))
        left = int(total) - len(trials(study, "COMPLETE"))
        retry(study, keys=space.keys())
        asked = Asked(study, distributions(space, grid=self.sampler == "grid"), self.made)
        while left > 0:
            batch = asked.batch(min(self.n_jobs, left))
            self.run(study, batch, fixed, averaged.runs)
            left -= len(batch)
        conclude(study, folder, names)

    def directions(self, names: Sequence[str]) -> list[str]:
        """A direction for each objective."""
        many = isinstance(self.direction, Sequence) and not isinstance(self.direction, str)
        given = [str(each) for each in self.direction] if many else [str(self.direction)] * len(names)
        if len(given) != len(names) or set(given) - set(DIRECTIONS):
            allowed = f"{' or '.join(DIRECTIONS)}, or a list of {len(names)}, for objective={names}"
            raise ValueError(f"hydra.sweeper.direction={self.direction}; allowed: {allowed}")
        return given

    def made(self, number: int) -> BaseSampler:
        """The sampler of one trial. What it draws depends on the seed and the trials told so far, not on how
        often the search was started."""
        from optuna import samplers

        seed = (self.seed * 1_000_003 + number) % 2**32
        if self.sampler in ("random", "grid"):
            return samplers.RandomSampler(seed=seed)
        kind, extra = {
            "tpe": (samplers.TPESampler, {"constant_liar": True}),  # trials at once keep apart
            "nsga2": (samplers.NSGAIISampler, {}),
        }[self.sampler]
        try:
            return kind(seed=seed, **extra, **self.options)
        except TypeError as error:
            raise ValueError(f"hydra.sweeper.options={self.options}: {error}") from error

    def run(
        self, study: Study, batch: Sequence[FrozenTrial], fixed: list[str], runs: Sequence[list[str]]
    ) -> None:
        """Has the trials of a batch run, and tells Optuna how they ended."""
        overrides = [[*fixed, *write_overrides(trial.params), *run] for trial in batch for run in runs]
        returned = self.launcher.launch(overrides, initial_job_idx=batch[0].number * len(runs))
        left = [each for each in returned if isinstance(each._return_value, PreemptedJob)]
        for trial, each in zip(batch, group(returned, len(runs)), strict=True):
            if not any(job in left for job in each):  # else it stays under way
                tell_study(study, trial, each)
        if left:
            print(f"cpt: {left[0]._return_value}; {CONTINUES}", file=sys.stderr)
            raise SystemExit(GO_ON)


@dataclass(frozen=True)
class Asked:
    """Where the trials of a batch come from."""

    study: Study
    distributions: Mapping[str, BaseDistribution]
    sampler: Any  # of a trial's number

    def batch(self, size: int) -> list[FrozenTrial]:
        """First those that a killed search left running: their run folders go on; then new ones."""
        batch = trials(self.study, "RUNNING")[:size]
        while len(batch) < size:
            self.study.sampler = self.sampler(len(self.study.trials))
            asked = self.study.ask(dict(self.distributions))
            batch.append(self.study.trials[asked.number])
        return batch
