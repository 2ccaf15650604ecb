"""Tuning, then comparison (`python -m cpt.tune`, hydra/sweeper=tune): for each method a search with as many
trials on validation text, then final runs with the chosen values on test text.

The space of a search is in the YAML of a choice: `search: {strength: [log, 50, 5000]}`."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import SEARCH, flatten
from cpt.core.errors import readable
from cpt.core.exceptions import format_value
from cpt.core.naming import UNSAFE, quote
from cpt.core.schema import Number, fits
from cpt.evaluation.task_metrics import ENDTASK_MEANINGS
from cpt.sweeps.jobs import read_scores
from cpt.sweeps.optuna import FOLDERS, OptunaSweeper, end_if_preempted, grid_values, to_overrides

log = logging.getLogger(__name__)
SPACES = "[low, high], [log, low, high], or a sweep in Hydra's grammar like choice(a,b)"


@dataclass(frozen=True)
class Candidate:
    """A method of the comparison: its label, its overrides, and what is searched, with the default values."""

    label: str
    overrides: list[str]
    space: dict[str, Override]
    first: dict[str, Any]  # empty where a default is outside the space


class TuneSweeper(OptunaSweeper):
    """Searches the values of each method, then runs it with the best for each seed and order.

    Trials are measured on validation text, by a metric of end tasks on their dev examples.

    A sweep over a config group (`method=…`, `mask=…`) makes a candidate of each choice; one over values
    (`optim.lr=interval(…)`) joins every search. Searches take the first of `seed` and of `order`."""

    @property
    def on_tasks(self) -> bool:
        return self.config.get("optimized_metric") in ENDTASK_MEANINGS

    def sweep(self, arguments: list[str]) -> None:
        with readable():
            metric, name = self.config.get("optimized_metric"), str(self.config.name)
            if not isinstance(metric, str):
                raise ValueError(f"optimized_metric={format_value(metric)} is invalid. Allowed: one metric")
            if self.on_tasks:
                self.direction = "minimize" if metric == "forget_rate" else "maximize"
            from cpt.reporting.tuning import FinalRun, Trial, TunedMethod, write_tuning  # matplotlib: seconds

            lines = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
            candidates, runs = self.read_candidates(lines)
            self.params = {}
            found = {each.label: self.search_candidate(each, runs, name=name) for each in candidates}
            jobs = [
                (each, [*each.overrides, *found[each.label][1], f"name={quote(f'{name}/final')}", *run])
                for each in candidates
                for run in itertools.product(*runs)
            ]
            own = ["domains.score_on=test", *["endtask.score_on=test"] * self.on_tasks]
            returned = self.launcher.launch([[*job, *own] for _, job in jobs], 0)
            end_if_preempted(returned)
            finals: dict[str, list[FinalRun]] = {each.label: [] for each in candidates}
            failed = []
            for (each, job), done in zip(jobs, returned, strict=True):
                if isinstance(done._return_value, int | float):
                    finals[each.label].append(FinalRun.read(Path(str(done.working_dir)), done._return_value))
                else:
                    failed.append(f"{each.label} {' '.join(job[-len(runs) :])}: {done._return_value}")
            methods = [
                TunedMethod(
                    name=each.label,
                    space={key: str(own.get_value_string()) for key, own in each.space.items()},
                    default={key: format_value(value) for key, value in each.first.items()},
                    trials=[Trial(*trial) for trial in found[each.label][0]],
                    runs=finals[each.label],
                    num_planned=math.prod(map(len, runs)),
                )
                for each in candidates
            ]
            folder = Path(self.config.hydra.sweep.dir)
            told = write_tuning(methods, folder / "tuning", metric, str(self.direction), self.n_trials)
            print(told, flush=True)
            if failed:
                wrong = f"{len(failed)} of {len(jobs)} final runs failed: {'; '.join(failed)}"
                print(f"cpt: {wrong}", file=sys.stderr)
                raise SystemExit(1)

    def read_candidates(self, lines: Sequence[str]) -> tuple[list[Candidate], list[list[str]]]:
        """The candidates, and the swept seeds and orders of the final runs."""
        parser = OverridesParser.create(config_loader=self.loader)
        given = {each.get_key_element(): each for each in parser.parse_overrides(list(lines))}
        if split := next((key for key in given if key.lstrip("+").endswith(".score_on")), None):
            told = f"{given[split].input_line} is invalid: searches use valid or dev, final runs test"
            raise ValueError(f"{told}. Allowed: without it")
        groups, runs, searched, fixed = [], [], {}, []
        for key, each in given.items():
            values = grid_values(each) if each.is_sweep_override() and not each.is_interval_sweep() else None
            swept = [f"{key}={value}" for value in values or ()]
            if key in self.averaged and not each.is_sweep_override():  # one seed of the final runs
                runs.append([str(each.input_line)])
            elif not each.is_sweep_override():
                fixed.append(str(each.input_line))
            elif key in ("seed", "order"):
                runs.append(swept)
            elif self.loader.get_group_options(key.lstrip("+").partition("@")[0]):
                groups.append(swept)
            elif len(swept) == 1:
                fixed.append(swept[0])
            else:
                searched[without_search(key)] = each
        keys = {line.lstrip("+").partition("=")[0] for line in fixed}
        candidates = []
        grid = self.sampler == "grid"
        for choice in itertools.product(*groups):
            cfg = self.loader.load_sweep_config(self.config, [*fixed, *choice, "hydra.mode=RUN"])
            if self.on_tasks and cfg.endtask.name == "none":
                told = f"optimized_metric={cfg.optimized_metric} is invalid with endtask=none"
                raise ValueError(f"{told}. Allowed: downstream tasks with dev examples")
            without = "diagonal" if cfg.optimized_metric in ("MF1", "Acc") else "last"
            if self.on_tasks and cfg.endtask.when == without:
                told = f"optimized_metric={cfg.optimized_metric} is invalid with endtask.when={without}"
                raise ValueError(f"{told}, which does not measure it. Allowed: each")
            space = {key: own for key, own in find_space(cfg).items() if key not in keys} | searched
            others = [each for each in choice if not each.startswith("method=")]
            label = " ".join([str(cfg.method.name), *others])
            first = find_defaults(cfg, space, grid=grid)
            candidates.append(Candidate(label, [*fixed, *choice], space, first))
        return candidates, runs

    def search_candidate(
        self, given: Candidate, runs: Sequence[Sequence[str]], *, name: str
    ) -> tuple[list[tuple[Any, ...]], list[str]]:
        """The ended trials of a candidate on validation text, as the fields of Trial; and the best values as
        overrides."""
        if not given.space:
            log.info("Nothing to tune in %s: its final runs have the given values", given.label)
            return [], []
        log.info("Tuning %s: %s trials over %s", given.label, self.n_trials, ", ".join(given.space))
        own = ["domains.score_on=valid", "benchmark=none"]
        own.append("endtask.score_on=dev" if self.on_tasks else "endtask=none")
        left_out = ("benchmark",) if self.on_tasks else ("benchmark", "endtask")
        kept = [line for line in given.overrides if not line.lstrip("+~").startswith(left_out)]
        first = [run[0] for run in runs if run[0].partition("=")[0] not in self.averaged]
        folder = f"name={quote(f'{name}/search/' + UNSAFE.sub('.', given.label).strip('.'))}"
        space = [f"{key}={each.get_value_string()}" for key, each in given.space.items()]
        self.first = [given.first] if given.first else []  # then Optuna's
        study = super().sweep([*kept, *first, folder, *own, *space])
        done, counted = [], set[str]()
        states, worst = self.optuna.trial.TrialState, math.inf if self.direction == "minimize" else -math.inf
        for each in study.get_trials(states=[states.COMPLETE, states.FAIL]):
            folders = study.user_attrs.get(f"{FOLDERS} {each.number}", [])
            again = bool(folders) and counted >= {*folders}  # the runs of a failed trial, resumed
            costs = [read_scores(Path(each)).get("flops", []) for each in folders]
            flops = 0 if again else sum(itertools.chain(*costs)) if costs and all(costs) else None
            counted |= {*folders}
            score = worst if each.state == states.FAIL else each.values[0]  # a failed one has cost as much
            done.append((each.number, to_overrides(each.params), score, flops))
        return done, to_overrides(study.best_trial.params)


def without_search(key: str) -> str:
    """`method.strength` of `method.search.strength`; other keys as they are."""
    return ".".join(part for part in key.split(".") if part != SEARCH)


def find_space(cfg: DictConfig) -> dict[str, Override]:
    """What the choices of a config name under `search`, by key. Raises ValueError for another form."""
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    found = {}
    for key, given in flatten({name: each for name, each in tree.items() if name != "hydra"}):
        if given is None or (searched := without_search(key)) == key:
            continue
        match given:
            case ["log", low, high] if fits(low, Number) and fits(high, Number):
                sweep = f"tag(log,interval({low},{high}))"
            case [low, high] if fits(low, Number) and fits(high, Number):
                sweep = f"interval({low},{high})"
            case str():
                sweep = given
            case _:
                raise ValueError(f"{key}={format_value(given)} is invalid. Allowed: {SPACES}")
        (override,) = OverridesParser.create().parse_overrides([f"{searched}={sweep}"])
        if not override.is_sweep_override():
            raise ValueError(f"{key}={format_value(given)} is invalid. Allowed: {SPACES}")
        found[searched] = override
    return found


def find_defaults(cfg: DictConfig, space: Mapping[str, Override], *, grid: bool = False) -> dict[str, Any]:
    """The values of a config as the first trial, of a grid as text; empty where one is outside the space."""
    first: dict[str, Any] = {}
    for key, each in space.items():
        default: Any = OmegaConf.select(cfg, key.lstrip("+"))
        sweep: Any = each.value()
        if each.is_interval_sweep():
            inside = fits(default, Number) and sweep.start <= default <= sweep.end
            same = [default] * inside
        else:
            same = [
                text for text in grid_values(each) if text == format_value(default) or is_same(text, default)
            ]
        if not same:
            return {}
        first[key] = same[0] if grid or each.is_choice_sweep() else default
    return first


def is_same(text: str, value: Any) -> bool:
    """Whether a text is a number that equals a value: 500 and 500.0."""
    try:
        return fits(value, Number) and float(text) == value
    except ValueError:
        return False
