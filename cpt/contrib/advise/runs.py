"""The runs of the advice: how many arms, seeds and steps fit into a budget, and ordinary run folders below
OUT/runs, made by the machinery of sweeps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict

from cpt.contrib.advise.candidates import REFERENCE, Setting, list_arms, work
from cpt.core.config import CONF
from cpt.evaluation.scores import Scores
from cpt.sweeps.jobs import Job, compose_jobs, divide_machine
from cpt.sweeps.launcher import run_all
from cpt.trainer.plan import Plan, make_plan

# Seeds, whether there is a shorter length too, and the steps per domain below which it is not made: what an
# arm is worth changes more from 50 steps to an epoch than from seed to seed (docs/advise.md).
DESIGNS = ((3, True, 500), (2, True, 500), (1, True, 20))
SEEDS = 3  # of the richest of them
LEAST = 10  # steps per domain below which nothing is learned
FEWEST = 3  # arms, of more that were asked for
SHORTER = 4  # the shorter length is this part of the other


@dataclass(frozen=True)
class Costs:
    """Seconds of a run: of a step of the reference, and of all that is there whatever its steps."""

    step: float
    fixed: float
    stages: int


@dataclass(frozen=True)
class Round:
    """Runs that are made together: one per arm, of one seed and number of steps per domain."""

    seed: int
    steps: int


@dataclass(frozen=True)
class SweepPlan:
    """The runs, and the seconds that they take together by the pilot's timing."""

    arms: tuple[str, ...]
    steps: int
    seeds: int
    short: bool  # whether the first seed is learned with a quarter of the steps too
    seconds: float

    @property
    def rounds(self) -> list[Round]:
        """In the order in which they are made: each can be left out with those after it."""
        shorter = [Round(0, max(1, self.steps // SHORTER))] if self.short else []
        return [Round(0, self.steps), *shorter, *(Round(seed, self.steps) for seed in range(1, self.seeds))]


def time_round(arms: Sequence[str], steps: int, costs: Costs, *, jobs: int) -> float:
    """Seconds of a round with `jobs` parallel runs."""
    return (len(arms) * costs.fixed + costs.stages * steps * costs.step * work(arms)) / jobs


def plan_sweep(
    arms: Sequence[str], costs: Costs, *, seconds: float, jobs: int, most: int, seeds: int = SEEDS
) -> SweepPlan:
    """The first of DESIGNS, with its seeds limited, in which each run learns the steps that
    it asks for, with as many of them as fit, at most `most`; where none does, one seed of one length, then of
    fewer arms. Raises ValueError where even these do not fit."""
    least = min(LEAST, most)
    designs = [(arms, count, short, min(steps, most)) for count, short, steps in DESIGNS if count <= seeds]
    fewer = range(len(arms), min(FEWEST, len(arms)) - 1, -1)
    designs += [(arms[:count], 1, False, least) for count in fewer]
    for chosen, count, short, wanted in designs:
        left = seconds * jobs - (count + short) * len(chosen) * costs.fixed  # after the starts
        steps = int(left / (costs.stages * costs.step * work(chosen) * (count + short / SHORTER)))
        if (steps := min(most, steps)) >= wanted:
            lengths = [steps] * count + [max(1, steps // SHORTER)] * short
            takes = sum(time_round(chosen, each, costs, jobs=jobs) for each in lengths)
            return SweepPlan(tuple(chosen), steps, count, short, takes)
    needed = time_round(arms[:FEWEST], least, costs, jobs=jobs)
    raise ValueError(
        f"{max(0, seconds):.0f} s are left of --hours, and {min(FEWEST, len(arms))} runs of {least} steps "
        f"take {needed:.0f} s. Allowed: more --hours; what was read and made on the way is there"
    )


PILOT = 30  # steps per domain of the run whose steps are timed
STARTS_S = 5.0  # of a process, of which its scores know nothing


@dataclass(frozen=True)
class Sweep:
    """What all runs share, where they are, and how many are made at once (None: one per core or GPU)."""

    context: HydraContext
    config: Any
    shared: tuple[str, ...]
    folder: Path
    jobs: int | None

    def plan(self) -> Plan:
        """What such a run would be. Raises ValueError for a wrong choice, before a text is read."""
        cfg = self.context.config_loader.load_sweep_config(self.config, [*self.shared, "hydra.mode=RUN"])
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            cfg.pop("hydra")
        return make_plan(cfg)

    def at_once(self, count: int) -> int:
        return len(divide_machine([self.config] * count, jobs=self.jobs, threads=None))

    def compose(self, arms: Sequence[str], given: Round, setting: Setting) -> list[Job]:
        """A job of each arm."""
        own = [*self.shared, f"trainer.steps={given.steps}", f"seed={given.seed}"]
        known, each = list_arms(setting), []
        for arm in arms:
            each.append([*own, *known[arm][1], f"hydra.run.dir={find_folder(self.folder, arm, given)}"])
        jobs = compose_jobs(each, 0, context=self.context, config=self.config)
        for job, arm in zip(jobs, arms, strict=True):
            job.label = arm
        return jobs

    def run(self, jobs: Sequence[Job]) -> float:
        """Makes the runs that are not finished; the seconds that it took. A signal has them save what they
        have learned, and ends the program."""
        waiting, began = [job for job in jobs if not job.before], time.monotonic()
        if not waiting:
            return 0.0
        configs = [job.config for job in jobs]
        places = divide_machine(configs, jobs=self.jobs, threads=None, waiting=len(waiting))
        run_all(waiting, command=(sys.executable, "-m", "cpt"), places=places, grace=60)
        return time.monotonic() - began


@contextmanager
def open_sweep(shared: Sequence[str], folder: Path, *, jobs: int | None) -> Iterator[Sweep]:
    """A sweep of runs with these overrides. Raises HydraException for what cannot be composed."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", list(shared), RunMode.MULTIRUN)
        try:
            context = HydraContext(config_loader=loader, callbacks=None)
            yield Sweep(context, config, tuple(shared), folder, jobs)
        finally:
            HydraConfig.instance().cfg = None


def find_folder(folder: Path, arm: str, given: Round) -> Path:
    return folder / f"{arm.replace('/', '.')}_steps-{given.steps}_seed-{given.seed}"


def measure_costs(sweep: Sweep, setting: Setting) -> tuple[Costs, Scores]:
    """Runs the pilot, which reads the texts and makes the base on its way; what its steps and all else
    took, and its scores. Raises ValueError where it fails."""
    (job,) = sweep.compose([REFERENCE], Round(0, PILOT), setting)
    took = sweep.run([job])
    if not job.whole:
        raise ValueError(f"the first run: {job.failure()} ({job.console})")
    scores = Scores.load(job.folder / "scores.json")
    learned = math.fsum(scores.phases["learn"].values())
    once = math.fsum(scores.phases["start"].values())
    whole = max(took, scores.seconds + STARTS_S)
    stages = len(scores.run["order"])
    return Costs(learned / (stages * PILOT), max(1.0, whole - learned - once), stages), scores
