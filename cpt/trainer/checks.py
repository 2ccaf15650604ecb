"""A config read into options, section by section. What is wrong is told before the run has a folder, before
any text is read, and without torch."""

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, TypeVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from cpt.adapters.options import PartsOptions
from cpt.core.errors import readable, unknown_name
from cpt.core.options import Choice
from cpt.core.places import CONF
from cpt.core.rules import is_text, number, show
from cpt.core.sections import Section, as_written, is_used, read_section
from cpt.data.options import DataOptions
from cpt.data.replay import NOTHING, Mixture
from cpt.data.sources.base import Source
from cpt.evaluation.budget import BudgetOptions
from cpt.evaluation.finetune_tasks import check_task_values
from cpt.evaluation.monitor import MonitorOptions
from cpt.evaluation.options import EvalOptions, LMEvalOptions, TaskEvalOptions
from cpt.models.options import Freeze, ModelOptions
from cpt.optim.options import read_optimizer
from cpt.trainer.lightning_options import PASSED, REFUSED
from cpt.trainer.options import LoggerOptions, RunOptions, TrainerOptions

Made = TypeVar("Made")
ELSEWHERE = ("strategy", "experiment", "hydra")  # groups whose values stand in other places of the config


class Checked(Callback):
    """Hydra's callback that ends a wrong start in one line, before there is a folder of it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            read_sections(config)
        if config.get("plan"):
            leave_no_trace(config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            said = read_sections(config)
            if said.run is not None and said.run.plan:
                raise ValueError(f"plan={show(said.run.plan)} is of one run; allowed: without --multirun")


def leave_no_trace(config: DictConfig) -> None:
    """Lets Hydra write neither its files nor a log into the run's folder."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.output_subdir = None
        config.hydra.job_logging.root.handlers = ["console"]
        config.hydra.job_logging.handlers.pop("file", None)


@dataclass(frozen=True)
class Sections:
    """What a config says; None where something of a section is missing, as in a sweep."""

    run: RunOptions | None
    freeze: Freeze | None
    evaluation: EvalOptions | None
    monitor: MonitorOptions | None
    drift: BudgetOptions | None
    data: DataOptions | None
    parts: PartsOptions | None
    model: ModelOptions | None
    method: Choice | None
    masks: Mapping[str, Choice | None]
    replay: Mixture | None
    source: Source | None
    optim: Choice | None
    schedule: Any
    answers: TaskEvalOptions | None
    probe: LMEvalOptions | None
    trainer: TrainerOptions | None
    logger: LoggerOptions | None
    callbacks: Mapping[str, Any]


def read_sections(cfg: DictConfig) -> Sections:
    """Raises ValueError for a key that there is not and for a value that may not be; what is missing (`???`)
    is not looked at."""
    written = as_written(cfg)
    check_top(cfg, written)
    read = partial(read_section, cfg, written=written)
    number("0 or more").check("method.rate", read("method").values.get("rate", 1))
    masks, replay = read("mask"), read("replay")
    if (endtask := read("endtask").values).get("_target_") is not None:
        check_task_values("endtask", endtask)
    return Sections(
        run=read("", names=[each.name for each in fields(RunOptions)]).read(RunOptions),
        freeze=read("freeze").read(Freeze),
        evaluation=read("eval").read(EvalOptions),
        monitor=read("monitor").read(MonitorOptions),
        drift=read("budget").read(BudgetOptions),
        data=read("data").read(DataOptions),
        parts=read("parts").read(PartsOptions),
        model=read_model(read("model")),
        method=of_methods(read("method").choose(needed=True)),
        masks={name: read(f"mask.{name}").choose() for name in check_entries(masks.values, "mask")},
        replay=NOTHING
        if replay.values.get("_target_", "") is None
        else of_kind(Mixture, "replay", replay.choose(needed=True)),
        source=of_kind(Source, "domains", make_now(read("domains").choose(needed=True))),
        optim=read_optimizer(read("optim")),
        schedule=check_called(make_now(read("schedule").choose(needed=True))),
        answers=of_kind(TaskEvalOptions, "answers", read("answers").choose()),
        probe=of_kind(LMEvalOptions, "probe", read("probe").choose()),
        trainer=read_trainer(read("trainer")),
        logger=read_logger(read("logger")),
        callbacks=check_entries(read("callbacks").values, "callbacks"),
    )


def read_model(given: Section) -> ModelOptions | None:
    """The model's options; a checkpoint has no pre-training, whatever an experiment's YAML says of one."""
    is_built = given.values.get("checkpoint", ...) is None
    base = given.values.get("base") if is_built else None
    return replace(given, values={**given.values, "base": base}).read(ModelOptions)


def make_now(chosen: Any) -> Any:
    """What is chosen; made of its arguments where its class is none of cpt's kind of options."""
    return chosen.load()(**chosen.arguments) if isinstance(chosen, Choice) else chosen


def of_kind(kind: type[Made], place: str, made: Any) -> Made | None:
    """What a section has made, None included; raises ValueError for anything but that kind."""
    if made is not None and not isinstance(made, kind):
        name = made.target if isinstance(made, Choice) else f"{type(made).__module__}.{type(made).__name__}"
        raise ValueError(f"{place}._target_={name}; allowed: a class below {kind.__module__}.{kind.__name__}")
    return made


def of_methods(chosen: Choice | None) -> Choice | None:
    """The choice of a method, which is found out to be one where its class is read in."""
    return None if chosen is None else replace(chosen, below="cpt.methods.base.ContinualModule")


def check_called(schedule: Any) -> Any:
    """The schedule; raises ValueError for what can not be asked for a factor."""
    if schedule is not None and not callable(schedule):
        name = f"{type(schedule).__module__}.{type(schedule).__name__}"
        raise ValueError(f"schedule._target_={name}; allowed: a class like cpt.optim.schedulers.Linear")
    return schedule


def check_top(cfg: DictConfig, written: str) -> None:
    """Raises ValueError for a key that is none of conf/config.yaml and its groups, and for a group that is
    missing."""
    known = top_level()
    for key in map(str, cfg):
        if key not in known and key not in ELSEWHERE and not is_used(key, written):
            raise ValueError(unknown_name(key, known, whole=", ".join(known)))
    if missing := [key for key in known if key not in cfg and not OmegaConf.is_missing(cfg, key)]:
        raise ValueError(f"{missing[0]} is missing; allowed: {missing[0]}=…, one of conf/{missing[0]}")


@cache
def top_level() -> tuple[str, ...]:
    """The names that a composed config has."""
    text = OmegaConf.load(CONF / "config.yaml")
    groups = [name for each in text.pop("defaults") if each != "_self_" for name in each]
    return tuple(key for key in (*text, *groups) if key not in ELSEWHERE and " " not in key)


def read_trainer(given: Section) -> TrainerOptions | None:
    """The trainer's options. What they have no name for goes to lightning.Trainer, if that has it and cpt
    leaves it be; raises ValueError for what it does not."""
    own, others = given.split(TrainerOptions)
    others = {name: value for name, value in others.items() if name not in given.used}
    for name, value in others.items():
        if name in REFUSED:
            raise ValueError(f"trainer.{name}={show(value)} is not taken: {REFUSED[name]}")
        if name not in PASSED:
            check_lightning(name)
    return Section("trainer", {**own, "others": others}, given.complete, given.used).read(TrainerOptions)


def check_lightning(name: str) -> None:
    """Raises ValueError for a name that lightning.Trainer does not have."""
    from lightning import Trainer  # seconds, which only a name that is new here has to wait for

    theirs = set(inspect.signature(Trainer).parameters) - REFUSED.keys()
    if name not in theirs:
        own = (each.name for each in fields(TrainerOptions) if each.name != "others")
        names = sorted(f"trainer.{each}" for each in {*own, *theirs})
        whole = "what conf/trainer lists, and what lightning.Trainer takes"
        raise ValueError(unknown_name(f"trainer.{name}", names, whole=whole))


def read_logger(given: Section) -> LoggerOptions | None:
    """The loggers' options: flags of our own, and entries that say which class they are."""
    own, others = given.split(LoggerOptions)
    values = {**own, "others": check_entries(others, "logger")}
    return Section("logger", values, given.complete, given.used).read(LoggerOptions)


def check_entries(entries: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """The entries that are not null; raises ValueError for one that does not say which class it is."""
    given = {name: entry for name, entry in entries.items() if entry is not None}
    for name, entry in given.items():
        if not isinstance(entry, Mapping) or not is_text(entry.get("_target_")):
            raise ValueError(
                f"{place}.{name}={show(entry)} has no class; allowed: null, or "
                f"+{place}.{name}._target_=module.Class, and what that class takes"
            )
    return given
