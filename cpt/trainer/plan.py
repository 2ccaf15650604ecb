"""What a run will do: a config read into options and checked, before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from cpt.adapters.options import PartsOptions
from cpt.core.config import digest, identity, plain_config, redact
from cpt.core.options import Choice
from cpt.core.rules import TEXT, or_null
from cpt.data import orders
from cpt.data.budget import Budget, share_batch
from cpt.data.options import DataOptions
from cpt.data.replay import Generated, Mixture
from cpt.data.sources.base import GENERAL, Source
from cpt.evaluation.budget import PAST, BudgetOptions
from cpt.evaluation.finetune_tasks import FinetunePlan, plan_endtasks
from cpt.evaluation.metrics import objective_value
from cpt.evaluation.monitor import MonitorOptions
from cpt.evaluation.options import EvalOptions, LMEvalOptions, TaskEvalOptions
from cpt.evaluation.scores import Scores
from cpt.models.options import Freeze, ModelOptions
from cpt.optim.options import carried
from cpt.optim.schedulers import Schedule
from cpt.trainer.checks import read_sections
from cpt.trainer.options import LoggerOptions, RunOptions, TrainerOptions

SHARDED = ("cpt.methods.", "cpt.gradient_masks.")  # whose classes are right where weights are shared out


@dataclass(frozen=True)
class Plan:
    """A config that has been checked: nothing below the plan reads the config itself."""

    settings: Mapping[str, Any]  # all of the config, for the folder, the report and W&B, without secrets
    names: Mapping[str, str]  # what was chosen of method, mask, replay, model
    run: RunOptions
    model: ModelOptions
    freeze: Freeze
    evaluation: EvalOptions
    monitor: MonitorOptions
    drift: BudgetOptions  # nats by which losses on other text may rise
    data: DataOptions
    parts: PartsOptions
    method: Choice
    masks: tuple[Choice, ...]
    replay: Mixture
    source: Source
    order: list[str]  # where the texts decide it, the first named one until cpt.trainer.domain_order
    budget: Budget
    optim: Choice
    carry: str  # what of the optimizer goes on from domain to domain: none, moments, all
    schedule: Schedule
    trainer: TrainerOptions
    logger: LoggerOptions
    callbacks: Mapping[str, Any]
    endtasks: FinetunePlan | None
    answers: TaskEvalOptions | None  # where the domains are tasks
    probe: LMEvalOptions | None
    config_digest: str  # of what decides the result
    lost_rate: float | None  # a method's own learning rate that has no effect
    similarity: orders.Similarity | None = None  # of the domains' texts, where it decides the order

    @property
    def cap(self) -> int | None:
        """Tokens of each text that are scored at most; None: no bound."""
        return cast("int | None", self.settings["eval"]["tokens"])

    @property
    def by_texts(self) -> bool:
        """Whether the domains' texts decide their order."""
        return orders.by_texts(self.run.order)

    @property
    def watches(self) -> bool:
        """Whether other text is looked at while a domain is learned."""
        return self.monitor.every is not None or bool(self.drift.given)

    @property
    def keeps(self) -> int:
        """How many copies of the weights are kept at a time while a domain is learned, to go back to."""
        return self.drift.copies or int(self.monitor.keep == "best")

    @property
    def mixture(self) -> Mixture:
        """What is mixed into the batches: by the run, or by a method that has a mixture of its own."""
        own = getattr(self.method.options, "mixture", None)
        return own if isinstance(own, Mixture) else self.replay

    @property
    def digests(self) -> dict[str, str]:
        """What is measured beside the losses, by its name in scores.json, and what it is known by: its
        options, and the sizes and times of its data."""
        measured = {"endtasks": self.endtasks, "answers": self.answers, "probes": self.probe}
        groups = {"endtasks": "endtask", "answers": "answers", "probes": "probe"}
        return {
            kind: digest([self.settings[groups[kind]], getattr(options, "stamp", "")])
            for kind, options in measured.items()
            if options is not None
        }


def make_plan(cfg: DictConfig) -> Plan:
    """The plan of a config; raises ValueError for what is wrong with it."""
    said = read_sections(cfg)
    settings = with_cap(plain_config(cfg), said.evaluation.cap)  # raises for what is missing
    objective_value({}, said.run.objective)
    check_share(said.trainer)
    check_answered(said.model, said.source)
    check_schedule(said.schedule, carried(settings["optim"].get("carry", "none")))
    answers = said.answers if said.source.encoding is not None else None
    if answers is not None:
        answers.check_tasks(said.source.domains)
    order = orders.resolve_order(
        said.run.order, names=said.source.domains, orders=said.source.named_orders, seed=said.run.seed
    )
    if orders.by_texts(said.run.order):
        said.source.check_embedding()
    if said.probe is not None:
        said.probe.check_installed()
    plan = Plan(
        settings=redact(settings),
        names=names_of(settings) | begun(settings["from"], said.model.name),
        run=said.run,
        model=begin_from(said.model, settings["from"]),
        freeze=said.freeze,
        evaluation=said.evaluation,
        monitor=check_ending(said.monitor, said.schedule),
        drift=said.drift,
        data=said.data,
        parts=said.parts,
        method=said.method,
        masks=tuple(said.masks.values()),
        replay=said.replay,
        source=said.source,
        order=order,
        budget=budget_of(said.trainer),
        optim=said.optim,
        carry=carried(settings["optim"].get("carry", "none")),
        schedule=said.schedule,
        trainer=said.trainer,
        logger=said.logger,
        callbacks=said.callbacks,
        endtasks=plan_endtasks(settings["endtask"], said.source.domains, order),
        answers=answers,
        probe=said.probe,
        config_digest=digest(identity(redact(settings))),
        lost_rate=lost_rate(cfg),
    )
    check_generated(plan)
    return check_sharded(check_drift(plan))


def with_cap(settings: Mapping[str, Any], cap: int | None) -> dict[str, Any]:
    """A config with this bound of what is scored of each text."""
    return {**settings, "eval": {**settings["eval"], "tokens": cap}}


def check_ending(monitor: MonitorOptions, schedule: Schedule) -> MonitorOptions:
    """The monitor's options; raises ValueError where a stage may end before the step that its schedule
    branches at."""
    if monitor.decides and getattr(schedule, "branches", False):
        raise ValueError(
            "monitor.stop, patience and keep do not go with a schedule whose decay is a branch (wsd, "
            "infinite): the next domain goes on before it; allowed: stop=null, patience=null, keep=last"
        )
    return monitor


def check_drift(plan: Plan) -> Plan:
    """The plan; raises ValueError for a budget that can not be held, or would bound nothing."""
    if not plan.drift.given:
        return plan
    given = ", ".join(f"budget.{name}={value}" for name, value in plan.drift.given.items())
    method, monitor = plan.method.load(), plan.monitor
    wrong = {
        f"method={plan.names['method']}, which learns each domain from the base": method.alone,
        f"method={plan.names['method']}, which has no past": PAST in plan.drift.given and method.needs_all,
        "a schedule whose decay is a branch (wsd, infinite)": getattr(plan.schedule, "branches", False),
        "monitor.keep=best, whose weights may be over it": monitor.keep == "best",
        "monitor.general=false": GENERAL in plan.drift.given and not monitor.general,
        "monitor.past=0": PAST in plan.drift.given and not monitor.past,
        "strategy=fsdp: weights are kept as a whole": plan.trainer.strategy == "fsdp",
    }
    if found := [reason for reason, holds in wrong.items() if holds]:
        raise ValueError(
            f"{given} does not go with {found[0]}; allowed: budget.general=null, budget.past=null"
        )
    return plan


def begin_from(model: ModelOptions, folder: str | None) -> ModelOptions:
    """The model's options with the last model of another run as its checkpoint. Raises ValueError for a
    folder that is no finished run's."""
    if folder is None:
        return model
    scores = Path(folder) / "scores.json"
    if not scores.exists() or not Scores.load(scores).run["finished"]:
        raise ValueError(f"from={folder} is no finished run; allowed: null, or the folder of one")
    new = {"config": None, "base": None, "vocabulary": None}  # of a new model
    return replace(model, checkpoint=str(Path(folder) / "model"), **new)


def begun(folder: str | None, name: str) -> dict[str, str]:
    """What the model is called where it goes on from another run's end. Raises ValueError for what is no
    folder's name."""
    or_null(TEXT).check("from", folder)
    return {} if folder is None else {"model": f"{name} from {Path(folder).name}"}


def names_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """What each group's choice is called; several masks by a plus. Raises ValueError for one without name."""
    groups = ("method", "replay", "model")
    if nameless := [group for group in groups if "name" not in settings[group]]:
        raise ValueError(f"{nameless[0]}.name is missing; needed: {nameless[0]}.name=…")
    names = {group: str(settings[group]["name"]) for group in groups}
    return names | {"mask": "+".join(settings["mask"]) or "none"}


def budget_of(trainer: TrainerOptions) -> Budget:
    return Budget(
        steps=trainer.steps, epochs=trainer.epochs, tokens=trainer.tokens, batch_size=trainer.batch_size
    )


def check_share(trainer: TrainerOptions) -> None:
    """Raises ValueError for a batch that cannot be shared out among the processes."""
    processes = trainer.devices if isinstance(trainer.devices, int) else 1
    share_batch(trainer.batch_size, accumulate=trainer.accumulate_grad_batches, world=max(1, processes))


def check_sharded(plan: Plan) -> Plan:
    """The plan; raises ValueError for what a model that no process has as a whole can not be asked."""
    if plan.trainer.strategy != "fsdp":
        return plan
    for group, chosen in (("method", plan.method), *(("mask", mask) for mask in plan.masks)):
        if not getattr(chosen.load(), "sharded", chosen.target.startswith(SHARDED)):
            raise ValueError(
                f"{group}: {chosen.target} is not right where weights are shared out, or does not say so "
                "(docs/clusters.md: sharded = True in its class); allowed with it: strategy=single, ddp"
            )
    asked = {"endtask": plan.endtasks, "answers": plan.answers, "probe": plan.probe}
    if plan.monitor.keep == "best":
        raise ValueError("monitor.keep=best does not go with strategy=fsdp; allowed: last")
    for group, value in asked.items():
        if value is not None:
            raise ValueError(
                f"{group} asks a model as a whole, of which strategy=fsdp leaves every process a share; "
                f"allowed: {group}=none, and {group}=… with strategy=single once the run is finished"
            )
    return plan


def check_generated(plan: Plan) -> None:
    """Raises ValueError where nothing that is to be replayed can be generated."""
    mixture = plan.mixture
    if not isinstance(mixture, Generated):
        return
    if plan.source.encoding is None:
        mixture.check_length(plan.model.length)
    else:
        mixture.check_examples(batch_size=plan.budget.batch_size)
    if plan.source.chats:
        raise ValueError(
            "replay=generated does not go with chats, which no model learns to write; allowed: replay=past"
        )
    if plan.trainer.strategy == "fsdp":
        raise ValueError(
            "replay=generated asks a model as a whole to write, of which strategy=fsdp leaves every process "
            "a share; allowed: strategy=single, ddp"
        )


def check_answered(model: ModelOptions, source: Source) -> None:
    """Raises ValueError for a model that is said to be masked and is to answer."""
    if source.encoding is not None and model.objective == "masked":
        raise ValueError(
            "model.objective=masked does not go with domains of examples: a masked model writes no answers; "
            "allowed: a causal model, like model=tiny_gpt2, or one with two stacks"
        )


def check_schedule(schedule: Schedule, carry: str) -> None:
    """Raises ValueError where a schedule and what the optimizer carries on contradict each other."""
    if carry == "all" and getattr(schedule, "branches", False):
        raise ValueError(
            f"optim.carry=all makes one domain of all for schedule={type(schedule).__name__}, whose decay is "
            "a branch of each; allowed: optim.carry=moments, or a decay that is none"
        )


def lost_rate(cfg: DictConfig) -> float | None:
    """A method's own rate where it has no effect: a learning rate that is given stands as it is."""
    rate = cfg.method.get("rate", 1)
    return rate if rate != 1 and not OmegaConf.is_interpolation(cfg.optim, "lr") else None
