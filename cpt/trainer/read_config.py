"""The typed sections of a Hydra config. Nothing here needs torch: a wrong option is reported at once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from cpt.adapters.options import ModulesOptions
from cpt.core.config import CONF
from cpt.core.errors import describe_missing_key, describe_unknown_name, find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import NonNegative, Text, check_value, fits
from cpt.core.sections import Choice, Section, check_arguments, is_used, read_section
from cpt.data.replay import NO_REPLAY, ReplayConfig
from cpt.data.sources.base import Source
from cpt.evaluation.finetune_tasks import check_task_values
from cpt.evaluation.monitor import MonitorOptions, NoObserver, ObserverConfig
from cpt.evaluation.options import (
    ChatOptions,
    DivergenceOptions,
    EvalOptions,
    LMEvalOptions,
    TaskEvalOptions,
)
from cpt.models.options import Freeze, ModelOptions
from cpt.optim.options import ParameterOptions, read_optimizer, read_parameter_options
from cpt.optim.schedulers import Schedule
from cpt.trainer.options import ExportOptions, LoggerOptions, RunOptions, TrainerOptions

# Config groups that set values of other sections.
GROUPS_THAT_SET_OTHERS = ("strategy", "experiment", "hydra")
# Arguments of lightning.Trainer that cpt sets; others would change how much is trained or evaluated.
SET_BY_CPT = (
    "max_steps",
    "min_steps",
    "max_epochs",
    "min_epochs",
    "max_time",
    "limit_train_batches",
    "overfit_batches",
    "fast_dev_run",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "callbacks",
    "logger",
    "default_root_dir",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
    "use_distributed_sampler",
    "reload_dataloaders_every_n_epochs",
    "plugins",
    "barebones",
)


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The typed sections of a config."""

    run: RunOptions
    model: ModelOptions
    freeze: Freeze
    evaluation: EvalOptions
    monitor: MonitorOptions
    observer: ObserverConfig  # of the monitoring evaluations: the section `budget`
    modules: ModulesOptions
    method: Choice
    masks: tuple[Choice, ...]
    replay: ReplayConfig
    loss: Choice | None  # of weights of tokens; None: all weigh 1
    source: Source
    optim: Choice
    parameter_options: ParameterOptions  # of the section `optim`
    lr_scheduler: Schedule
    trainer: TrainerOptions
    export: ExportOptions
    logger: LoggerOptions
    callbacks: Mapping[str, Any]
    answers: TaskEvalOptions | None  # where the domains are tasks
    chats: ChatOptions | None
    divergence: DivergenceOptions | None
    benchmark: LMEvalOptions | None


def read_sections(cfg: DictConfig) -> Sections:
    """Raises ValueError for an unknown key and an invalid value, MissingMandatoryValue for `???`."""
    # The config as it is written shows which keys others interpolate: these are not unknown.
    text = str(OmegaConf.to_container(cfg, resolve=False))
    check_keys(cfg, text)

    def read(name: str) -> Section:
        return read_section(cfg, name, text)

    check_value("method.lr_multiplier", read("method").values.get("lr_multiplier", 1), NonNegative)
    endtask = read("endtask").values
    if endtask.get("_target_") is not None:
        check_task_values(endtask)

    # Options outside of a group are the run's, except `trainable`, which says what is frozen.
    method = read("method").choose(is_required=True)
    top = read_section(cfg, "", text, names=[field.name for field in fields(RunOptions)])
    return Sections(
        lr_scheduler=read_schedule(read("lr_scheduler")),
        run=top.read(RunOptions),
        freeze=replace(read("freeze").read(Freeze), trainable=top.values.get("trainable")),
        evaluation=read("eval").read(EvalOptions),
        monitor=read("monitor").read(MonitorOptions),
        observer=choose(read("budget"), ObserverConfig, default=NoObserver()),
        modules=read("modules").read(ModulesOptions),
        model=read_model(read("model")),
        method=replace(method, base_class="cpt.methods.base.ContinualMethod"),
        masks=read_masks(read),
        replay=choose(read("replay"), ReplayConfig, default=NO_REPLAY),
        loss=read_loss(read("loss")),
        source=read_source(read("domains")),
        optim=read_optimizer(read("optim")),
        parameter_options=read_parameter_options(read("optim")),
        answers=choose(read("answers"), TaskEvalOptions),
        chats=choose(read("chats"), ChatOptions),
        divergence=choose(read("divergence"), DivergenceOptions),
        benchmark=choose(read("benchmark"), LMEvalOptions),
        trainer=read_trainer(read("trainer")),
        export=read("export").read(ExportOptions),
        logger=read_logger(read("logger")),
        callbacks=select_targets(read("callbacks").values, "callbacks"),
    )


def check_keys(cfg: DictConfig, text: str) -> None:
    """Raises ValueError for a key that conf/config.yaml does not have, unless the config, written as `text`,
    interpolates it, and for one that is missing."""
    defaults = cast(DictConfig, OmegaConf.load(CONF / "config.yaml"))
    groups = []
    for choice in defaults.pop("defaults"):
        if choice != "_self_":
            groups.extend(choice)
    allowed_keys = []
    for key in map(str, (*defaults, *groups)):
        if key not in GROUPS_THAT_SET_OTHERS and " " not in key:  # `override hydra/launcher` is no key
            allowed_keys.append(key)

    for key in map(str, cfg):
        if key not in allowed_keys and key not in GROUPS_THAT_SET_OTHERS and not is_used(key, text):
            raise ValueError(describe_unknown_name(key, allowed_keys, listing=", ".join(allowed_keys)))
    for key in allowed_keys:
        if key not in cfg and not OmegaConf.is_missing(cfg, key):
            raise ValueError(describe_missing_key(key))


def choose(section: Section, kind: type, *, default: Any = None) -> Any:
    """The options of the class that a section chooses, a subclass of `kind`; `default` if its `_target_` is
    null."""
    if default is not None and section.values.get("_target_", "") is None:
        return default
    options = section.choose(is_required=default is not None)
    if options is not None:
        check_kind(section, options, kind)
    return options


def check_kind(section: Section, options: Any, kind: type) -> None:
    """Raises ValueError for a choice that is not of a kind."""
    if isinstance(options, kind):
        return
    target = options.target if isinstance(options, Choice) else format_full_name(type(options))
    raise InvalidOptionError(
        f"{section.name}._target_", target, allowed=f"a class below {format_full_name(kind)}"
    )


def format_full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def read_model(section: Section) -> ModelOptions:
    """The options of the model. A checkpoint has none of pre-training but `head_steps`: the others are of an
    experiment with a new model."""
    pretraining = section.values.get("pretraining")
    is_new = section.values.get("name_or_path", ...) is None
    if not is_new and (not pretraining or pretraining.get("head_steps") is None):
        section = replace(section, values={**section.values, "pretraining": None})
    return section.read(ModelOptions)


def make_custom(section: Section, choice: Choice) -> Any:
    """What a class of the user's makes of the arguments in its section. Raises ValueError for those that it
    does not take, and where one is missing."""
    check_arguments(section.name, {"_target_": choice.target, **choice.arguments})
    try:
        return choice.load()(**choice.arguments)
    except TypeError as error:
        raise InvalidOptionError(
            f"{section.name}._target_",
            choice.target,
            reason=find_reason(error),
            allowed=f"a class, with its arguments as {section.name}.NAME=VALUE",
        ) from error


def read_schedule(section: Section) -> Any:
    """The schedule: one of cpt's, or what a class of the user's makes. Raises ValueError for what cannot be
    called."""
    schedule = section.choose(is_required=True)
    if isinstance(schedule, Choice):
        schedule = make_custom(section, schedule)
    if not callable(schedule):
        raise InvalidOptionError(
            "lr_scheduler._target_",
            format_full_name(type(schedule)),
            allowed="a class like cpt.optim.schedulers.Linear",
        )
    return schedule


def read_source(section: Section) -> Source:
    """Where the text comes from: a source of cpt's, or what a class of the user's makes."""
    source = section.choose(is_required=True)
    if isinstance(source, Choice):
        source = make_custom(section, source)
    check_kind(section, source, Source)
    return source


def read_masks(read: Callable[[str], Section]) -> tuple[Choice, ...]:
    """The masks in their order; `read` gives the section of a name."""
    names = select_targets(read("mask").values, "mask")
    return tuple(read(f"mask.{name}").choose() for name in names)


def read_loss(section: Section) -> Choice | None:
    """The weights of tokens in the loss; None where all weigh 1."""
    choice = section.choose()
    return None if choice is None else replace(choice, base_class="cpt.models.token_weights.TokenWeights")


def read_trainer(section: Section) -> TrainerOptions:
    """The options of the trainer. Options that cpt does not have go to lightning.Trainer, which rejects
    unknown ones; those that other values interpolate are left out. Raises ValueError for those that cpt
    sets."""
    options, further_options = section.split(TrainerOptions)
    lightning_options = {
        name: value for name, value in further_options.items() if name not in section.interpolated
    }
    for name, value in lightning_options.items():
        if name in SET_BY_CPT:
            raise InvalidOptionError(
                f"trainer.{name}",
                value,
                reason="cpt sets it",
                allowed="trainer.steps, epochs or tokens; callbacks=…, logger=… and hydra.run.dir=…",
            )
    return replace(section, values={**options, "others": lightning_options}).read(TrainerOptions)


def read_logger(section: Section) -> LoggerOptions:
    """The options of cpt's loggers; further entries are loggers of Lightning or of the user."""
    options, entries = section.split(LoggerOptions)
    custom_loggers = select_targets(entries, "logger")
    return replace(section, values={**options, "others": custom_loggers}).read(LoggerOptions)


def select_targets(entries: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """The entries that are not null. Raises ValueError for one without a `_target_`."""
    chosen = {name: entry for name, entry in entries.items() if entry is not None}
    for name, entry in chosen.items():
        if not isinstance(entry, Mapping) or not fits(entry.get("_target_"), Text):
            raise InvalidOptionError(
                f"{group}.{name}",
                entry,
                reason="it has no class",
                allowed=f"null, or +{group}.{name}._target_=module.Class, and what that class takes",
            )
    return chosen
