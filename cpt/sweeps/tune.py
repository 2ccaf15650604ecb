"""Tuning, then comparison (`python -m cpt.tune`, hydra/sweeper=tune): for each method a search with as many
trials on validation text, then final runs with the chosen values on test text.

The space of a search is in the YAML of a choice: `search: {strength: [log, 50, 5000]}`."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from omegaconf import DictConfig, OmegaConf

from cpt.core.config import MULTIPLIER, SEARCH, flatten, ignores_multiplier
from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.core.naming import make_safe, quote
from cpt.core.schema import Number, fits
from cpt.evaluation.task_metrics import ENDTASK_MEANINGS
from cpt.sweeps.jobs import read_scores
from cpt.sweeps.optuna import FOLDERS, OptunaSweeper, end_if_preempted, list_grid_values, to_overrides

if TYPE_CHECKING:
    import optuna

    from cpt.reporting.tuning import FinalRun, Trial

log = logging.getLogger(__name__)
ANY = "*"  # a part of a key of `search` that stands for any name, as of the sources of replay
SPACES = "[low, high], [log, low, high], or a sweep in Hydra's grammar like choice(a,b)"


@dataclass(frozen=True)
class Candidate:
    """A method of the comparison: its label, its overrides, and what is searched, with the default values."""

    label: str
    overrides: list[str]
    space: dict[str, Override]
    defaults: dict[str, Any]  # empty where a default is outside the space
    monitors_chats: bool  # its trials need the chats, too: they may end a stage


@dataclass(frozen=True)
class SearchResult:
    """The ended trials of a candidate, and the best values as overrides."""

    trials: list[Trial]
    best: list[str]


class TuneSweeper(OptunaSweeper):
    """Searches the values of each method, then runs it with the best for each seed and order.

    Trials are measured on validation text, by a metric of end tasks on their dev examples.

    A sweep over a config group (`method=…`, `mask=…`) makes a candidate of each choice; one over values
    (`optim.lr=interval(…)`) joins every search. Searches take the first of `seed` and of `order`."""

    @property
    def on_tasks(self) -> bool:
        return self.config.get("optimized_metric") in ENDTASK_MEANINGS

    def sweep(self, arguments: list[str]) -> None:
        with readable_errors():
            metric = self.config.get("optimized_metric")
            name = str(self.config.name)
            if not isinstance(metric, str):
                raise InvalidOptionError("optimized_metric", metric, allowed="one metric")
            if self.on_tasks:
                self.direction = "minimize" if metric == "forget_rate" else "maximize"
            from cpt.reporting.tuning import TunedMethod, write_tuning  # matplotlib: seconds

            lines = [*(f"{key}={value}" for key, value in (self.params or {}).items()), *arguments]
            candidates, final_lines = self.read_candidates(lines)
            self.params = {}
            results = {}
            for number, candidate in enumerate(candidates, start=1):
                log.info("Method %d of %d: %s", number, len(candidates), candidate.label)
                results[candidate.label] = self.search_candidate(candidate, final_lines, name=name)
            finals, failures = self.run_finals(candidates, results, final_lines, name=name)

            # Failed runs are planned, too: the page says how many of them a mean is over.
            num_runs = math.prod(map(len, final_lines))  # of each candidate
            methods = []
            for candidate in candidates:
                methods.append(
                    TunedMethod(
                        name=candidate.label,
                        space={key: str(sweep.get_value_string()) for key, sweep in candidate.space.items()},
                        default={key: format_value(value) for key, value in candidate.defaults.items()},
                        trials=results[candidate.label].trials,
                        runs=finals[candidate.label],
                        num_planned=num_runs,
                    )
                )
            folder = Path(self.config.hydra.sweep.dir)
            page = write_tuning(methods, folder / "tuning", metric, str(self.direction), self.n_trials)
            print(page, flush=True)
            if failures:
                run_count = count_noun(len(candidates) * num_runs, "final run")
                print(
                    f"cpt: {len(failures)} of {run_count} failed: {'; '.join(failures)}",
                    file=sys.stderr,
                )
                raise SystemExit(1)

    def run_finals(
        self,
        candidates: Sequence[Candidate],
        results: Mapping[str, SearchResult],
        final_lines: Sequence[Sequence[str]],
        *,
        name: str,
    ) -> tuple[dict[str, list[FinalRun]], list[str]]:
        """Runs each candidate with its best values on test text, once for each combination of seeds and
        orders (`final_lines`, as of `read_candidates`); gives the final runs by candidate, and what failed,
        in words."""
        from cpt.reporting.tuning import FinalRun

        evaluation = ["domains.score_on=test"]
        if self.on_tasks:
            evaluation.append("endtask.score_on=test")
        owners = []  # of each job, the candidate and what tells its run from the others
        jobs = []
        for candidate in candidates:
            best = results[candidate.label].best
            fixed = [*candidate.overrides, *best, f"name={quote(f'{name}/final')}"]
            for run_lines in itertools.product(*final_lines):
                owners.append((candidate, " ".join(run_lines or fixed)))
                jobs.append([*fixed, *run_lines, *evaluation])
        log.info("Starting %s on test text", count_noun(len(jobs), "final run"))
        returned: Sequence[JobReturn] = self.launcher.launch(jobs, 0)
        end_if_preempted(returned)

        finals: dict[str, list[FinalRun]] = {candidate.label: [] for candidate in candidates}
        failures = []
        for (candidate, run_label), result in zip(owners, returned, strict=True):
            value = result._return_value
            if isinstance(value, int | float):
                finals[candidate.label].append(FinalRun.read(Path(str(result.working_dir)), value))
            else:
                failures.append(f"{candidate.label} {run_label}: {value}")
        return finals, failures

    def read_candidates(self, lines: Sequence[str]) -> tuple[list[Candidate], list[list[str]]]:
        """The candidates, and the overrides of their final runs by key, [["seed=0", "seed=1"], ["order=a",
        "order=b"]]: each combination is a run. Raises ValueError for overrides of the split that is
        scored."""
        parser = OverridesParser.create(config_loader=self.loader)
        overrides = {override.get_key_element(): override for override in parser.parse_overrides(list(lines))}
        for key, override in overrides.items():
            if key.endswith(".score_on"):
                raise ValueError(
                    f"{override.input_line} is invalid: searches use valid or dev, final runs test. "
                    "Allowed: without it"
                )

        groups: list[list[str]] = []  # the choices of each swept config group
        final_lines: list[list[str]] = []
        searched: dict[str, Override] = {}
        fixed: list[str] = []
        for key, override in overrides.items():
            option = key.lstrip("+")
            if not override.is_sweep_override():
                line = str(override.input_line)
                if option in self.averaged:  # one seed of the final runs
                    final_lines.append([line])
                else:
                    fixed.append(line)
                continue

            lines_swept = []
            if not override.is_interval_sweep():
                lines_swept = [f"{key}={value}" for value in list_grid_values(override)]
            if option in ("seed", "order"):
                final_lines.append(lines_swept)
            elif self.loader.get_group_options(option.partition("@")[0]):
                groups.append(lines_swept)
            elif len(lines_swept) == 1:
                fixed.append(lines_swept[0])
            else:
                searched[remove_search_prefix(key)] = override

        candidates = []
        for choices in itertools.product(*groups):
            candidates.append(self.make_candidate(fixed, choices, searched))

        # A variant of a method, as in a file of the user's, may have its name.
        counts = Counter(candidate.label for candidate in candidates)
        for index, choices in enumerate(itertools.product(*groups)):
            if counts[candidates[index].label] > 1:
                candidates[index] = replace(candidates[index], label=" ".join(choices))
        return candidates, final_lines

    def make_candidate(
        self, fixed: Sequence[str], choices: Sequence[str], searched: Mapping[str, Override]
    ) -> Candidate:
        """The candidate of a choice of each swept group. Raises ValueError where its options do not measure
        the metric."""
        cfg = self.loader.load_sweep_config(self.config, [*fixed, *choices, "hydra.mode=RUN"])
        if self.on_tasks:
            check_endtasks(cfg)

        other_choices = [choice for choice in choices if not choice.startswith("method=")]
        label = " ".join([str(cfg.method.name), *other_choices])

        fixed_keys = {line.lstrip("+").partition("=")[0] for line in fixed}
        space = {key: override for key, override in find_space(cfg).items() if key not in fixed_keys}
        has_rate = "optim.lr" in {*space, *searched} or ignores_multiplier(cfg)
        if has_rate and space.pop(MULTIPLIER, None) is not None:
            log.info(
                "Not searched for %s: %s, which has no effect where optim.lr is given", label, MULTIPLIER
            )
        space.update(searched)
        return Candidate(
            label=label,
            overrides=[*fixed, *choices],
            space=space,
            defaults=find_defaults(cfg, space, for_grid=self.sampler == "grid"),
            monitors_chats=cfg.monitor.chats is True,
        )

    def search_candidate(
        self, candidate: Candidate, final_lines: Sequence[Sequence[str]], *, name: str
    ) -> SearchResult:
        """Searches the values of a candidate on validation text, with the first seed and order of
        `final_lines`. Without a space there are no trials, and no values."""
        if not candidate.space:
            log.info("Nothing to tune in %s: its final runs have the given values", candidate.label)
            return SearchResult([], [])
        trial_count = "the whole grid" if self.n_trials is None else count_noun(self.n_trials, "trial")
        log.info("Tuning %s: %s of %s", candidate.label, trial_count, ", ".join(candidate.space))

        # Trials are not evaluated by what does not decide the search.
        unused_groups = ["benchmark", "divergence"]
        if not candidate.monitors_chats:
            unused_groups.append("chats")
        if not self.on_tasks:
            unused_groups.append("endtask")
        evaluation = ["domains.score_on=valid", *(f"{group}=none" for group in unused_groups)]
        if self.on_tasks:
            evaluation.append("endtask.score_on=dev")
        fixed = []
        for line in candidate.overrides:
            if not line.lstrip("+~").startswith(tuple(unused_groups)):
                fixed.append(line)

        # Each trial has all seeds and orders of hydra.sweeper.seeds and orders: none of them is fixed.
        first_lines = [lines[0] for lines in final_lines]
        first_run = []
        for line in first_lines:
            if line.lstrip("+").partition("=")[0] not in self.averaged:
                first_run.append(line)
        folder = f"{name}/search/{make_safe(candidate.label)}"
        space = [f"{key}={override.get_value_string()}" for key, override in candidate.space.items()]

        # The defaults are the first trial, the others are Optuna's.
        self.first_trials = [candidate.defaults] if candidate.defaults else []
        study = super().sweep([*fixed, *first_run, f"name={quote(folder)}", *evaluation, *space])
        return SearchResult(self.list_ended_trials(study), to_overrides(study.best_trial.params))

    def list_ended_trials(self, study: optuna.Study) -> list[Trial]:
        """The trials of a search. A failed one has the worst score, since it has cost as much."""
        from cpt.reporting.tuning import Trial

        states = self.optuna.trial.TrialState
        worst_score = math.inf if self.direction == "minimize" else -math.inf
        counted_folders: set[str] = set()

        trials = []
        for trial in study.get_trials(states=[states.COMPLETE, states.FAIL]):
            folders = study.user_attrs.get(f"{FOLDERS} {trial.number}", [])
            # A trial that was tried again has the runs of the failed one, which are counted there.
            is_resumed = bool(folders) and counted_folders >= set(folders)
            flops = 0 if is_resumed else sum_flops(folders)
            counted_folders.update(folders)

            score = worst_score if trial.state == states.FAIL else trial.values[0]
            trials.append(Trial(trial.number, to_overrides(trial.params), score, flops))
        return trials


def sum_flops(folders: Sequence[str]) -> int | None:
    """The operations of the runs of a trial; None if one of them does not say it."""
    flops_by_run = [read_scores(Path(folder)).get("flops", []) for folder in folders]
    if not flops_by_run or not all(flops_by_run):
        return None
    return sum(itertools.chain(*flops_by_run))


def check_endtasks(cfg: DictConfig) -> None:
    """Raises ValueError where a config does not measure its metric of end tasks."""
    metric = cfg.optimized_metric
    if cfg.endtask.name == "none":
        raise InvalidOptionError(
            "optimized_metric",
            metric,
            context="with endtask=none",
            allowed="downstream tasks with dev examples",
        )
    # MF1 and Acc are of all tasks after the last stage, where `diagonal` measures the last task only. The
    # other metrics need each task after its own stage, where `last` measures none but the last.
    unsuitable = "diagonal" if metric in ("MF1", "Acc") else "last"
    if cfg.endtask.when == unsuitable:
        raise ValueError(
            f"optimized_metric={metric} is invalid with endtask.when={unsuitable}, which does not measure "
            "it. Allowed: each"
        )


def remove_search_prefix(key: str) -> str:
    """`method.strength` of `method.search.strength`; other keys as they are."""
    return ".".join(part for part in key.split(".") if part != SEARCH)


def find_space(cfg: DictConfig) -> dict[str, Override]:
    """What the choices of a config name under `search`, by key. Raises ValueError for another form."""
    tree: Any = OmegaConf.to_container(cfg, resolve=False)
    sections = {name: section for name, section in tree.items() if name != "hydra"}
    values = {key: value for key, value in flatten(sections) if remove_search_prefix(key) != key}

    # A space for one name, or null for none, goes before the space for any name.
    keys_of_any = [key for key in values if ANY in key.split(".")]
    for key in keys_of_any:
        value = values.pop(key)
        for named_key in name_any(key, tree):
            values.setdefault(named_key, value)

    space = {}
    for key, value in values.items():
        if value is None:
            continue
        searched_key = remove_search_prefix(key)
        sweep = parse_sweep(key, value)
        (override,) = OverridesParser.create().parse_overrides([f"{searched_key}={sweep}"])
        if not override.is_sweep_override():
            raise InvalidOptionError(key, value, allowed=SPACES)
        space[searched_key] = override
    return space


def name_any(key: str, tree: Mapping[str, Any]) -> Iterator[str]:
    """The keys that a key of `search` with ANY stands for: `replay.search.sources.*.ratio` for the
    `replay.search.sources.NAME.ratio` of each source that has a ratio in `tree`, the config."""
    before, _, option = key.partition(f".{ANY}.")
    entries: Any = tree
    for part in remove_search_prefix(before).split("."):
        entries = entries.get(part) if isinstance(entries, Mapping) else None
    if not isinstance(entries, Mapping):
        return
    for name, entry in entries.items():
        if isinstance(entry, Mapping) and entry.get(option) is not None:
            yield f"{before}.{name}.{option}"


def parse_sweep(key: str, value: Any) -> str:
    """A space in Hydra's grammar. Raises ValueError for another form."""
    match value:
        case ["log", low, high] if fits(low, Number) and fits(high, Number):
            return f"tag(log,interval({low},{high}))"
        case [low, high] if fits(low, Number) and fits(high, Number):
            return f"interval({low},{high})"
        case str():
            return value
        case _:
            raise InvalidOptionError(key, value, allowed=SPACES)


def find_defaults(
    cfg: DictConfig, space: Mapping[str, Override], *, for_grid: bool = False
) -> dict[str, Any]:
    """The values of a config as the first trial, as texts if `for_grid`; empty where one is outside the
    space."""
    defaults: dict[str, Any] = {}
    for key, override in space.items():
        default: Any = OmegaConf.select(cfg, key.lstrip("+"))
        if override.is_interval_sweep():
            sweep: Any = override.value()
            if not fits(default, Number) or not sweep.start <= default <= sweep.end:
                return {}
            defaults[key] = default
            continue

        equal_texts = []
        for text in list_grid_values(override):
            if text == format_value(default) or is_same(text, default):
                equal_texts.append(text)
        if not equal_texts:
            return {}
        defaults[key] = equal_texts[0] if for_grid or override.is_choice_sweep() else default
    return defaults


def is_same(text: str, value: Any) -> bool:
    """Whether a text is a number that equals a value: 500 and 500.0."""
    try:
        return fits(value, Number) and float(text) == value
    except ValueError:
        return False
