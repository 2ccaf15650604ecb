"""The study of a search as Optuna keeps it: opened again, what is to be tried, what came of it."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from cpt.sweeps.averaging import average_objectives
from cpt.sweeps.search_space import DIGITS, values, write_overrides

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

log = logging.getLogger(__name__)
JOURNAL, RESULTS = "study.journal", "optimization_results.yaml"


def open_study(folder: Path, *, directions: list[str], made_of: dict[str, Any]) -> Study:
    """The study of a folder, new or as it was left. Raises ValueError if it was another search."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    path = str(folder / JOURNAL)
    # Open, not link: FAT and some network file systems know no links; FileLock keeps a second search out.
    storage = optuna.storages.JournalStorage(JournalFileBackend(path, lock_obj=JournalFileOpenLock(path)))
    known = optuna.study.get_all_study_names(storage)
    if not known:
        study = optuna.create_study(storage=storage, study_name="search", directions=directions)
        study.set_user_attr("made_of", {**made_of, "directions": directions})
        return study
    study = optuna.load_study(study_name="search", storage=storage)
    then, now = study.user_attrs.get("made_of", {}), {**made_of, "directions": directions}
    if changed := [f"{key}: {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key]]:
        raise ValueError(
            f"{path} is another search ({'; '.join(changed)}); take them back or choose another name=…"
        )
    return study


def enqueue_grid(study: Study, space: Mapping[str, Override]) -> int:
    """Puts all points that the study does not know in its queue, in the order of a sweep without a search."""
    points = list(itertools.product(*(values(each) for each in space.values())))
    known = [values_of(trial) for trial in study.trials]
    for point in points:
        params = dict(zip(space, point, strict=True))
        if params not in known:
            study.enqueue_trial(params)
    return len(points)


def retry(study: Study, *, keys: Set[str]) -> None:
    """What failed at an earlier start is tried again, and its run goes on where it failed. What was killed
    while it was asked for never had a run."""
    for trial in trials(study, "RUNNING"):
        if trial.params.keys() != keys:
            study.tell(trial.number, state=trial.state.FAIL)
    others = [values_of(trial) for trial in study.trials if trial.state.name != "FAIL"]
    for trial in trials(study, "FAIL"):
        if trial.params.keys() == keys and trial.params not in others:
            study.enqueue_trial(trial.params)
            others.append(trial.params)


def values_of(trial: FrozenTrial) -> dict[str, Any]:
    """A trial's values, also while it waits."""
    return trial.params or trial.system_attrs.get("fixed_params", {})


def trials(study: Study, *states: str) -> list[FrozenTrial]:
    return [trial for trial in study.trials if trial.state.name in states]


def tell_study(study: Study, trial: FrozenTrial, returned: Sequence[JobReturn]) -> None:
    """The objective of a trial, the mean of its runs'; where one has failed or has no finite objective, it
    fails."""
    from optuna.trial import TrialState

    label = f"trial {trial.number}, {' '.join(write_overrides(trial.params))}"
    value = average_objectives(returned)
    got = list(value) if isinstance(value, Sequence) else [value]
    whole = len(got) == len(study.directions) and all(is_objective_number(each) for each in got)
    if whole and all(each.status is JobStatus.COMPLETED for each in returned):
        study.tell(trial.number, got)
        log.info("%s: %s", label, show_number(got))
    else:
        study.tell(trial.number, state=TrialState.FAIL)
        log.error("%s: failed, objective %s", label, value)


def is_objective_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def show_number(found: Sequence[float]) -> str:
    return ", ".join(f"{value:.{DIGITS}g}" for value in found)


def conclude(study: Study, folder: Path, names: Sequence[str]) -> None:
    """Writes and tells the best trials: one, or the Pareto front of several objectives.

    Raises ValueError if no trial has finished."""
    complete = trials(study, "COMPLETE")
    if not complete:
        raise ValueError("no trial of the search has an objective; the same command tries again")
    several = len(names) > 1
    best = study.best_trials if several else [study.best_trial]
    found = [
        {
            "trial": t.number,
            "params": dict(line.split("=", 1) for line in write_overrides(t.params)),
            "values": t.values,
        }
        for t in best
    ]
    results = {"name": "optuna", "objective": list(names), "finished": len(complete), "best": found}
    OmegaConf.save(OmegaConf.create(results), folder / RESULTS)
    title = f"{len(complete)} trials; {'the Pareto front' if several else 'the best'} ({', '.join(names)}):"
    lines = [
        f"trial {t.number}: {show_number(t.values)}: {' '.join(write_overrides(t.params))}" for t in best
    ]
    log.info("%s", "\n".join([title, *lines, str(folder / RESULTS)]))
