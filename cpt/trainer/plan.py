"""A Hydra config as a Plan: typed sections, and every check that needs neither torch nor text."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from cpt.adapters.options import ModulesOptions
from cpt.core.config import CONF, digest, identity, plain_config
from cpt.core.errors import readable, unknown_name
from cpt.core.exceptions import format_value
from cpt.core.resolved import resolve_once, resolve_sweep_folder
from cpt.core.schema import NonNegative, Text, check_value, fits
from cpt.core.secrets import hide_environment, redact, redact_file
from cpt.core.sections import Choice, is_used, read_section
from cpt.data import orders
from cpt.data.options import Budget, DataOptions, share_batch
from cpt.data.replay import NO_REPLAY, ReplayConfig
from cpt.data.sources.base import Source
from cpt.evaluation.finetune_tasks import FinetunePlan, check_task_values, plan_endtasks
from cpt.evaluation.monitor import MonitorOptions, ObserverConfig
from cpt.evaluation.options import EvalOptions, LMEvalOptions, TaskEvalOptions
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import run_objective
from cpt.models.options import Freeze, ModelOptions
from cpt.optim.options import carried, read_optimizer
from cpt.optim.schedulers import Schedule
from cpt.trainer.options import LoggerOptions, RunOptions, TrainerOptions
from cpt.trainer.run_dir import RunDir

OWN_CODE = ("cpt.methods.", "cpt.gradient_masks.")  # classes that are known to work with sharded weights
ELSEWHERE = ("strategy", "experiment", "hydra")  # config groups that set values of other sections
# Arguments of lightning.Trainer that cpt sets; others would change how much is trained or evaluated.
SET_BY_CPT = {
    *("max_steps", "min_steps", "max_epochs", "min_epochs", "max_time", "limit_train_batches"),
    *("overfit_batches", "fast_dev_run", "limit_val_batches", "limit_test_batches", "limit_predict_batches"),
    *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "callbacks", "logger"),
    *("default_root_dir", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    *("use_distributed_sampler", "reload_dataloaders_every_n_epochs", "plugins", "barebones"),
}


class Checked(Callback):
    """Hydra callback that rejects an invalid config before a folder is made for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable():
            check_working_folder(config)
            resolve_once(config)
            read_sections(config)
        if config.get("plan"):  # Hydra writes neither its files nor a log
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.output_subdir = None
                config.hydra.job_logging.root.handlers = ["console"]
                config.hydra.job_logging.handlers.pop("file", None)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hides secrets in the files that Hydra has just written."""
        if config.hydra.output_subdir is not None:
            folder = Path(config.hydra.runtime.output_dir) / config.hydra.output_subdir
            for name in ("config.yaml", "hydra.yaml", "overrides.yaml"):
                redact_file(folder / name)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable():
            check_working_folder(config)
            resolve_sweep_folder(config)
            with suppress(MissingMandatoryValue, InterpolationToMissingValueError):  # jobs may have it
                read_sections(config)
            if config.get("plan"):
                told = f"plan={format_value(config.plan)} is invalid: it is for one run"
                raise ValueError(f"{told}. Allowed: without --multirun")


def check_working_folder(config: DictConfig) -> None:
    """Raises ValueError for a run that would work in its own folder."""
    if config.hydra.job.chdir:
        reason = (
            "relative paths (domains.root, cache_dir, hydra.run.dir) are those of the folder of the start"
        )
        raise ValueError(f"hydra.job.chdir=true is invalid: {reason}. Allowed: false")


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The typed sections of a config."""

    run: RunOptions
    model: ModelOptions
    freeze: Freeze
    evaluation: EvalOptions
    monitor: MonitorOptions
    observer: ObserverConfig  # of the monitoring evaluations: the section `budget`
    data: DataOptions
    modules: ModulesOptions
    method: Choice
    masks: tuple[Choice, ...]
    replay: ReplayConfig
    source: Source
    optim: Choice
    lr_scheduler: Schedule
    trainer: TrainerOptions
    logger: LoggerOptions
    callbacks: Mapping[str, Any]
    answers: TaskEvalOptions | None  # where the domains are tasks
    benchmark: LMEvalOptions | None


@dataclass(frozen=True, kw_only=True)
class Plan(Sections):
    """A complete config that has been checked."""

    # All of the config without secrets, for the run folder, the report and W&B; texts from environment
    # variables stand there as `${oc.env:NAME}#fingerprint`.
    settings: Mapping[str, Any]
    resolved: Mapping[str, Any]  # the same with the values of environment variables, which is not shown
    names: Mapping[str, str]  # of the chosen method, mask, replay and model
    order: Sequence[str]  # where texts decide it, the first named one until cpt.trainer.domain_order
    budget: Budget
    carry: str  # what of the optimizer's state passes from domain to domain: none, moments, all
    endtasks: FinetunePlan | None
    config_hash: str  # of what decides the result
    ignored_rate: float | None  # method.lr_multiplier, where optim.lr is given as a number
    similarity: orders.Similarity | None = None  # of the domains' texts, where it decides the order

    @property
    def is_ordered_by_texts(self) -> bool:
        """Whether the domains' texts decide their order."""
        return orders.by_texts(self.run.order)

    @property
    def has_monitor(self) -> bool:
        """Whether other text is evaluated while a domain is trained."""
        return self.monitor.every is not None or bool(self.observer.given)

    @property
    def mixture(self) -> ReplayConfig:
        """The replay of the run, or of a method that has its own."""
        own = getattr(self.method.options, "mixture", None)
        return own if isinstance(own, ReplayConfig) else self.replay

    @property
    def evaluation_hashes(self) -> dict[str, str]:
        """Hashes of what is measured in addition to the losses (options, sizes and times of data), by its key
        in scores.json."""
        measured = {"endtask": self.endtasks, "answers": self.answers, "benchmark": self.benchmark}
        kinds = {"endtask": "endtasks", "answers": "answers", "benchmark": "benchmarks"}
        given = {group: [self.resolved[group], getattr(o, "stamp", "")] for group, o in measured.items() if o}
        return {kinds[group]: digest(each) for group, each in given.items()}


def read_sections(cfg: DictConfig) -> Sections:
    """Raises ValueError for an unknown key and an invalid value, MissingMandatoryValue for `???`."""
    written = str(OmegaConf.to_container(cfg, resolve=False))
    top = cast(DictConfig, OmegaConf.load(CONF / "config.yaml"))
    groups = [name for each in top.pop("defaults") if each != "_self_" for name in each]
    known = tuple(str(key) for key in (*top, *groups) if key not in ELSEWHERE and " " not in key)
    for key in map(str, cfg):
        if key not in known and key not in ELSEWHERE and not is_used(key, written):
            raise ValueError(unknown_name(key, known, whole=", ".join(known)))
    if missing := [key for key in known if key not in cfg and not OmegaConf.is_missing(cfg, key)]:
        raise ValueError(f"{missing[0]} is missing. Allowed: {missing[0]}=CHOICE, one of conf/{missing[0]}")
    read = partial(read_section, cfg, written=written)

    def choose(section: str, kind: type, *, otherwise: Any = None) -> Any:
        """The object of the class that a section chooses, or a Choice; `otherwise` where it chooses none."""
        chosen = read(section)
        if chosen.values.get("_target_", "") is None and otherwise is not None:
            return otherwise
        made = chosen.choose(needed=otherwise is not None or kind is Source)
        if isinstance(made, Choice) and kind is Source:
            made = made.load()(**made.arguments)
        if made is not None and not isinstance(made, kind):
            name = made.target if isinstance(made, Choice) else name_of(type(made))
            raise ValueError(f"{section}._target_={name} is invalid. Allowed: a class below {name_of(kind)}")
        return made

    check_value("method.lr_multiplier", read("method").values.get("lr_multiplier", 1), NonNegative)
    if (endtask := read("endtask").values).get("_target_") is not None:
        check_task_values(endtask)
    method, model, logger = read("method").choose(needed=True), read("model"), read("logger")
    pretraining, is_new = model.values.get("pretraining"), model.values.get("name_or_path", ...) is None
    if not is_new and (pretraining or {}).get("head_steps") is None:  # of an experiment with a new model
        model = replace(model, values={**model.values, "pretraining": None})
    schedule = read("lr_scheduler").choose(needed=True)
    schedule = schedule.load()(**schedule.arguments) if isinstance(schedule, Choice) else schedule
    if not callable(schedule):
        allowed = "a class like cpt.optim.schedulers.Linear"
        raise ValueError(f"lr_scheduler._target_={name_of(type(schedule))} is invalid. Allowed: {allowed}")
    run, freeze = read("", names=[each.name for each in fields(RunOptions)]), read("freeze").read(Freeze)
    flags, loggers = logger.split(LoggerOptions)
    flags["others"], trainer = check_targets(loggers, "logger"), read("trainer")
    own, others = trainer.split(TrainerOptions)  # others go to lightning.Trainer, which rejects what it lacks
    others = {name: value for name, value in others.items() if name not in trainer.used}
    if wrong := [name for name in others if name in SET_BY_CPT]:
        told = f"trainer.{wrong[0]}={format_value(others[wrong[0]])} is invalid: cpt sets it"
        allowed = "trainer.steps, epochs or tokens; callbacks=…, logger=… and hydra.run.dir=…"
        raise ValueError(f"{told}. Allowed: {allowed}")
    sections: dict[str, Any] = {
        "run": run.read(RunOptions),
        "freeze": replace(freeze, trainable=run.values.get("trainable")),
        "evaluation": read("eval").read(EvalOptions),
        "monitor": read("monitor").read(MonitorOptions),
        "observer": choose("budget", ObserverConfig, otherwise=ObserverConfig()),
        "data": read("data").read(DataOptions),
        "modules": read("modules").read(ModulesOptions),
        "model": model.read(ModelOptions),
        "method": replace(method, below="cpt.methods.base.ContinualMethod"),
        "masks": tuple(read(f"mask.{name}").choose() for name in check_targets(read("mask").values, "mask")),
        "replay": choose("replay", ReplayConfig, otherwise=NO_REPLAY),
        "source": choose("domains", Source),
        "optim": read_optimizer(read("optim")),
        "lr_scheduler": schedule,
        "answers": choose("answers", TaskEvalOptions),
        "benchmark": choose("benchmark", LMEvalOptions),
        "trainer": replace(trainer, values={**own, "others": others}).read(TrainerOptions),
        "logger": replace(logger, values=flags).read(LoggerOptions),
        "callbacks": check_targets(read("callbacks").values, "callbacks"),
    }
    return Sections(**sections)


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def check_targets(entries: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    """The entries that are not null; raises ValueError for one without a `_target_`."""
    given = {name: entry for name, entry in entries.items() if entry is not None}
    for name, entry in given.items():
        if not isinstance(entry, Mapping) or not fits(entry.get("_target_"), Text):
            allowed = f"null, or +{group}.{name}._target_=module.Class, and what that class takes"
            raise ValueError(
                f"{group}.{name}={format_value(entry)} is invalid: it has no class. Allowed: {allowed}"
            )
    return given


def make_plan(cfg: DictConfig) -> Plan:
    """The plan of a config; raises ValueError for an invalid one."""
    read = read_sections(cfg)
    settings = with_cap(plain_config(cfg), read.evaluation.cap)  # raises for what is missing
    run_objective({"metrics": {}, "endtasks": {}, "rows": []}, read.run.optimized_metric)
    trainer, source, folder = read.trainer, read.source, settings["init_from"]
    processes = trainer.devices if isinstance(trainer.devices, int) else 1
    share_batch(trainer.batch_size, accumulate=trainer.accumulate_grad_batches, world=max(1, processes))
    groups = ("method", "replay", "model")
    for group in (each for each in groups if "name" not in settings[each]):
        raise ValueError(f"{group}.name is missing. Allowed: {group}.name=NAME")
    names = {group: str(settings[group]["name"]) for group in groups}
    check_value("init_from", folder, Text | None)
    if folder is not None:
        scores = Path(folder) / "scores.json"
        if not scores.exists() or not Scores.load(scores).run["finished"]:
            told = f"init_from={folder} is invalid: no finished run"
            raise ValueError(f"{told}. Allowed: null, or the folder of one")
        lost = RunDir(Path(folder)).find_damaged_outputs(full=read.run.verify_inputs == "full")
        if damage := [each for each in lost if not each.startswith(("report.", "report-"))]:
            told = f"init_from={folder} is invalid: {'; '.join(damage)}"
            raise ValueError(f"{told}. Allowed: a whole run; its own command makes its model again")
        # Without the options of a new model.
        new_options: dict[str, Any] = dict.fromkeys(("config", "pretraining", "vocab_size", "layers"))
        model = replace(read.model, name_or_path=str(Path(folder) / "model"), **new_options)
        read = replace(read, model=model)
        names["model"] = f"{model.name} from {Path(folder).name}"
    seed, texts = read.run.seed, source.domains
    order = orders.resolve_order(read.run.order, names=texts, orders=source.named_orders, seed=seed)
    plan = Plan(
        **vars(read) | {"answers": read.answers if source.encoding is not None else None},
        settings=redact(with_cap(hide_environment(cfg), read.evaluation.cap)),
        resolved=redact(settings),
        names=names | {"mask": "+".join(settings["mask"]) or "none"},
        order=order,
        budget=Budget(trainer.steps, trainer.epochs, trainer.tokens, trainer.batch_size),
        carry=carried(settings["optim"].get("state_across_domains", "none")),
        endtasks=plan_endtasks(settings["endtask"], source.domains, order),
        config_hash=digest(identity(redact(settings))),
        ignored_rate=None
        if OmegaConf.is_interpolation(cfg.optim, "lr")
        else cfg.method.get("lr_multiplier", 1),
    )
    if plan.benchmark is not None:
        plan.benchmark.check_installed()
    asked = plan.answers.known_by if plan.answers is not None else {}
    if absent := [task for task in asked if task not in source.domains]:
        raise ValueError(unknown_name(f"answers.measures.{absent[0]}", source.domains))
    if conflict := next(conflicts(plan), None):
        raise ValueError(conflict)
    return plan


def with_cap(settings: Mapping[str, Any], cap: int | None) -> dict[str, Any]:
    """A config with another bound of how many tokens of each text are scored."""
    return {**settings, "eval": {**settings["eval"], "max_tokens": cap}}


def with_template_date(plan: Plan, date: str | None) -> Plan:
    """The plan of chats whose template prints a day, YYYY-MM-DD; None where it prints none."""
    source = replace(plan.source, date=date)  # type: ignore[call-arg]  # of tasks
    if date is None:
        return replace(plan, source=source)
    settings = {**plan.settings, "domains": {**plan.settings["domains"], "date": date}}
    return replace(plan, source=source, settings=settings, config_hash=digest(identity(settings)))


def conflicts(plan: Plan) -> Iterator[str]:
    """Options of different sections that contradict each other, as messages."""
    source, monitor, name = plan.source, plan.monitor, plan.names["method"]
    branches, sharded = getattr(plan.lr_scheduler, "branches", False), plan.trainer.strategy == "fsdp"
    if source.encoding is not None and plan.model.objective == "masked":
        why = "a masked model writes no answers. Allowed: a causal model, or an encoder-decoder"
        yield f"model.objective=masked is invalid for domains of examples: {why}"
    if plan.carry == "all" and branches:
        why = f"lr_scheduler={type(plan.lr_scheduler).__name__} ends each domain in a branch"
        yield f"optim.state_across_domains=all is invalid: {why}. Allowed: none, moments"
    if monitor.decides and branches:
        why = "the next domain starts before it. Allowed: stop=null, patience=null, keep=last"
        yield f"monitor.stop, patience, keep is invalid with a schedule whose decay is a branch: {why}"
    if branches and plan.method.load().ends_domains:
        schedule = type(plan.lr_scheduler).__name__
        why = f"the next domain starts before the decay, and without what method={name} makes of its end"
        yield f"lr_scheduler={schedule} is invalid: {why}. Allowed: a schedule without branches, like linear"
    sizes = {"length": plan.model.max_seq_length, "batch_size": plan.budget.batch_size}
    yield from plan.mixture.conflicts(
        examples=source.encoding is not None, chats=source.chats, sharded=sharded, **sizes
    )
    if plan.observer.given:
        about: dict[str, Any] = {"monitor": monitor, "method": plan.method.load(), "name": name}
        yield from plan.observer.conflicts(**about, branches=branches, sharded=sharded)
    if not sharded:
        return
    method = plan.method.load()
    for group, chosen in (("method", plan.method), *(("mask", mask) for mask in plan.masks)):
        if not getattr(chosen.load(), "sharded", chosen.target.startswith(OWN_CODE)):
            why = f"{group} {chosen.target} does not support sharded weights (docs/distributed.md)"
            yield f"strategy=fsdp is invalid: {why}. Allowed: single, ddp"
    if monitor.keep == "best":
        yield "monitor.keep=best is invalid with strategy=fsdp. Allowed: last"
    measured = {"endtask": plan.endtasks, "answers": plan.answers, "benchmark": plan.benchmark}
    for group in (name for name, value in measured.items() if value is not None):
        why = f"{group} is invalid with strategy=fsdp: it needs the whole model"
        yield f"{why}. Allowed: {group}=none, and {group} with strategy=single in the end"
    if plan.trainer.precision == "bf16-true" and method.needs_32_bits:
        told = f"trainer.precision=bf16-true is invalid with method={name} and strategy=fsdp"
        yield f"{told}. Allowed: 32-true, bf16-mixed"


def why_not_growable(plan: Plan) -> str:
    """Why the first domains would have been trained differently without those that follow, if so."""
    order, schedule, method = plan.run.order, plan.lr_scheduler, plan.method.load()
    needs_end = getattr(schedule, "needs_end", False)
    reasons: dict[str, Any] = {
        f"order={order} gives a further domain "
        "its place among those that are learned": plan.is_ordered_by_texts,
        "trainer.match=ncl shares out the operations of all domains": plan.trainer.match is not None,
        "domains.balanced=true cuts all domains to the smallest of them": plan.source.balanced is True,
        f"method={plan.names['method']} needs all domains "
        "before the first is learned": method.requires_all_domains,
        "optim.state_across_domains=all lets the rate decay over all domains": plan.carry == "all",
        f"lr_scheduler={type(schedule).__name__} has rates that depend on how many domains follow": needs_end,
        "budget.* is shared out among the domains of the order": (
            plan.observer.given and plan.observer.counts_domains
        ),
    }
    return next((why for why, holds in reasons.items() if holds), "")
