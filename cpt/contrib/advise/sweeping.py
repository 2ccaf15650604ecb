"""The runs of the advice: ordinary run folders below OUT/runs, made by the machinery of sweeps."""

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

from cpt.contrib.advise.arms import REFERENCE, Setting, overrides
from cpt.contrib.advise.budget import Costs, Round
from cpt.core.heartbeat import list_sweep_runs
from cpt.core.places import CONF
from cpt.evaluation.scores import Scores
from cpt.sweeps.jobs import Job, compose_jobs, divide_machine
from cpt.sweeps.launcher import run_all
from cpt.trainer.plan import Plan, make_plan

PILOT = 30  # steps per domain of the run whose steps are timed
STARTS_S = 5.0  # of a process, of which its scores know nothing
COMMAND = (sys.executable, "-m", "cpt")


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
        each = [
            [
                *self.shared,
                *overrides(arm, setting),
                f"trainer.steps={given.steps}",
                f"seed={given.seed}",
                f"hydra.run.dir={find_folder(self.folder, arm, given)}",
            ]
            for arm in arms
        ]
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
        list_sweep_runs(self.folder, [job.folder for job in jobs])
        configs = [job.config for job in jobs]
        places = divide_machine(configs, jobs=self.jobs, threads=None, waiting=len(waiting))
        run_all(waiting, command=COMMAND, places=places, grace=60)
        return time.monotonic() - began


@contextmanager
def open_sweep(shared: Sequence[str], folder: Path, *, jobs: int | None) -> Iterator[Sweep]:
    """A sweep of runs with these overrides. Raises HydraException for what cannot be composed."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        config = loader.load_configuration("config", list(shared), RunMode.MULTIRUN)
        try:
            yield Sweep(
                HydraContext(config_loader=loader, callbacks=None), config, tuple(shared), folder, jobs
            )
        finally:
            HydraConfig.instance().cfg = None


def find_folder(folder: Path, arm: str, given: Round) -> Path:
    return folder / f"{arm.replace('/', '.')}_steps-{given.steps}_seed-{given.seed}"


def measure_costs(sweep: Sweep, setting: Setting) -> tuple[Costs, Scores]:
    """Runs the pilot, which reads the texts and makes the base on its way; what its steps and the rest of
    it took, and its scores. Raises ValueError where it fails."""
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
