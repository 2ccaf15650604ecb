"""What is tried, and its runs: texts, the model or its small sibling, and the arms of the sweep, ways of
training that trade what is learned against what is forgotten; how many arms, seeds and steps fit into a
budget; and ordinary run folders below OUT/runs, made by the machinery of sweeps."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import open_dict
from transformers import AutoModel

from cpt.core.config import CONF
from cpt.core.errors import reason
from cpt.core.naming import quote
from cpt.evaluation.scores import Scores
from cpt.models.loading import load_config, resolve_objective
from cpt.sweeps.jobs import Job, compose_jobs, divide_machine
from cpt.sweeps.launcher import run_all
from cpt.trainer.plan import Plan, make_plan

REFERENCE = "ncl"
WORK = {"kd": 1.4, "ewc": 1.2, "ewc-strong": 1.2}  # about: a step's time, of that of the reference
STRENGTH = 5000  # of EWC, as in ContinualLM and in the runs of docs/advise.md


@dataclass(frozen=True)
class Setting:
    """What arms are made of: a model's own rate and blocks, and how many domains are learned."""

    rate: float
    blocks: int
    domains: int


def list_arms(setting: Setting) -> dict[str, tuple[str, list[str]]]:
    """By arm its meaning and what it sets beyond the defaults; the first stay where a budget is small."""

    def replay(share: float) -> tuple[str, list[str]]:
        past = share / 2 if setting.domains > 1 else 0.0  # the rest is general text
        ratios = [f"replay.past_ratio={past:g}", f"replay.general_ratio={share - past:g}"]
        return f"{100 * share:g} % of each batch is past and general text", ["replay=past", *ratios]

    pulled, rate = "weights are pulled back by their Fisher", setting.rate
    ewc = ["method=ewc", f"method.strength={STRENGTH}"]
    return {
        REFERENCE: ("plain further training", []),
        "replay-5": replay(0.05),
        "lr-1/4": ("a quarter of the learning rate", [f"model.lr={rate / 4:g}"]),
        "replay-25": replay(0.25),
        "lora": ("LoRA adapters in a frozen model", ["method=lora"]),
        "ewc": (pulled, ewc),
        "kd": ("the model before the domain teaches", ["method=kd"]),
        "lr-1/2": ("half of the learning rate", [f"model.lr={rate / 2:g}"]),
        "freeze": ("the lower half of the blocks stays", [f"freeze.layers={max(1, setting.blocks // 2)}"]),
        "ewc-strong": ("the same, a hundred times as strong", [ewc[0], f"method.strength={100 * STRENGTH}"]),
        "replay-1": replay(0.01),
    }


def choose_arms(asked_for: str | None) -> list[str]:
    """The arms by name, the reference first. Raises ValueError for an unknown one, or for fewer than two."""
    known = [*list_arms(Setting(rate=1, blocks=2, domains=2))]
    if asked_for is None:
        return known
    if unknown := [name for name in asked_for.split(",") if name not in known]:
        raise ValueError(f"--arms {unknown[0]} is invalid. Allowed: {', '.join(known)}")
    chosen = list(dict.fromkeys([REFERENCE, *asked_for.split(",")]))
    if len(chosen) < 2:
        allowed = f"one or more in addition to {REFERENCE}, with commas"
        raise ValueError(f"--arms {asked_for} is invalid. Allowed: {allowed}")
    return chosen


def work(arms: Sequence[str]) -> float:
    """The time of a step of all arms together, of that of the reference."""
    return sum(WORK.get(arm, 1.0) for arm in arms)


SMALL = 30_000_000  # parameters up to which a checkpoint is tried itself
MOST_DOMAINS = 6
OWN = (  # what advise sets itself
    *("method", "replay", "model", "seed", "name", "trainer.steps", "trainer.epochs", "trainer.tokens"),
    *("freeze.layers", "save_all_stages", "eval.rows", "eval.columns", "plan", "init_from"),
    *("domains.root", "endtask"),
)
TINY = {"masked": "tiny_roberta", "causal": "tiny_gpt2", "span": "tiny_t5"}
OF_TYPE = {"modernbert": "tiny_modernbert", "roberta": "tiny_roberta", "gpt2": "tiny_gpt2", "t5": "tiny_t5"}
# Of a sibling, by the names that most families have for them.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 514}


@dataclass(frozen=True)
class Model:
    """Overrides of what is tried and of what is meant, and what they differ in."""

    tried: tuple[str, ...]
    real: tuple[str, ...]
    blocks: int | None = None  # of the real one, if it differs
    gap: str = ""  # what is not known of the real one

    @property
    def is_itself(self) -> bool:
        return self.tried == self.real


def find_texts(folder: Path, given: Sequence[str]) -> list[str]:
    """The overrides that read a folder: its sub-folders are domains, or those of its `corpora`. Raises
    ValueError where there is no folder."""
    if not folder.is_dir():
        told = f"{folder} is invalid: there is no such folder"
        raise ValueError(f"{told}. Allowed: a folder of folders of text, as domains.root")
    root = f"domains.root={quote(str(folder))}"
    if any(each.startswith("domains=") for each in given):
        return [root]
    inner = ["domains.folder=corpora"] * (folder / "corpora").is_dir()
    return ["domains=texts", root, *inner]


def check_overrides(given: Iterable[str]) -> None:
    """Raises ValueError for an override of what advise sets."""
    for each in given:
        key, sign, _ = each.lstrip("+~").partition("=")
        if not sign:
            raise ValueError(f"{each} is invalid: it is no override. Allowed: key=value, as of python run.py")
        if key in OWN or key.startswith("hydra"):
            raise ValueError(f"{each} is invalid: advise sets {key} itself. Allowed: other options of conf/")


def find_model(given: str) -> Model:
    """A tiny model of conf/model, a small checkpoint itself, or the sibling of a larger one. Raises
    ValueError for any other."""
    names = sorted(path.stem for path in (CONF / "model").glob("tiny_*.yaml"))
    chosen = "tiny_modernbert" if given == "tiny" else given
    if chosen in names:
        return Model((f"model={chosen}",), (f"model={chosen}",))
    try:
        config = load_config(given)
    except ValueError as error:
        allowed = f"tiny, {', '.join(names)}, a checkpoint"
        raise ValueError(f"--model {given} is invalid: {reason(error)}. Allowed: {allowed}") from error
    real = ("model=hf", f"model.name_or_path={quote(given)}")
    with torch.device("meta"):
        size = sum(each.numel() for each in AutoModel.from_config(config).parameters())
    if size <= SMALL:
        return Model(real, real)
    told = f"{given} has {size / 1e6:.0f} M parameters: what was tried is a sibling of about 1 M, made and "
    told += "pre-trained here; how much of the trade, and which strength, carries over is not known"
    objective = resolve_objective("auto", config)
    sibling = [f"model={OF_TYPE.get(config.model_type, TINY[objective])}"]
    if config.model_type not in OF_TYPE and objective != "span":  # a small model of the same family
        known = {name: size for name, size in SIZES.items() if getattr(config, name, None) is not None}
        sizes = {config.attribute_map.get(name, name): size for name, size in known.items()}
        family = {"model_type": config.model_type, **sizes}
        shown = ", ".join(f"{name}: {size}" for name, size in family.items())
        sibling += ["~model.config", f"+model.config={{{shown}}}"]
    return Model(tuple(sibling), real, config.num_hidden_layers, told)


def choose_domains(order: Sequence[str]) -> list[str]:
    """At most MOST_DOMAINS of them, evenly spaced, in their order."""
    count = min(len(order), MOST_DOMAINS)
    return [order[place * len(order) // count] for place in range(count)]


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
    learned = math.fsum(scores.activity_seconds["learn"].values())
    once = math.fsum(scores.activity_seconds["start"].values())
    whole = max(took, scores.seconds + STARTS_S)
    stages = len(scores.run["order"])
    return Costs(learned / (stages * PILOT), max(1.0, whole - learned - once), stages), scores
