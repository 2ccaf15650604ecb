"""A Hydra config as a Plan: typed sections, and every check that needs neither torch nor text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from cpt.adapters.options import LayerLoRAOptions, Routing
from cpt.core.config import digest, identity, ignores_multiplier, make_plain_config
from cpt.core.errors import describe_unknown_name
from cpt.core.exceptions import InvalidOptionError
from cpt.core.run_command import format_install_command
from cpt.core.schema import Text, check_value
from cpt.core.secrets import hide_environment, redact
from cpt.core.sections import Choice
from cpt.data import orders
from cpt.data.options import Budget, share_batch
from cpt.data.replay import ReplayConfig
from cpt.evaluation.chat_set import find_chat_files, read_chats, stamp_chats
from cpt.evaluation.finetune_tasks import FinetunePlan, plan_endtasks
from cpt.evaluation.monitor import CHAT_LOSSES
from cpt.evaluation.options import AUTO, ChatOptions
from cpt.evaluation.run_folders import suggest_runs
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import run_objective
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.options import ModelOptions
from cpt.optim.options import KINDS, OptimizerKind, resolve_carry
from cpt.trainer.check_quantization import check_quantization
from cpt.trainer.read_config import Sections, read_sections
from cpt.trainer.run_dir import RunDir, has_chat_template

# Classes that are known to work with sharded weights. Others say so by an attribute `sharded`.
PACKAGES_WITH_SHARDING = ("cpt.methods.", "cpt.gradient_masks.")
WITHOUT_SHARDS = ("bitsandbytes.",)  # libraries whose optimizers a user may name by their class
BF16_WEIGHTS = "bf16-true"  # the precision that keeps weights in bfloat16
NAMED_GROUPS = ("method", "replay", "model")  # config groups whose choice is shown by its name


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
    rounding: str  # of steps to weights: stochastic, nearest
    endtasks: FinetunePlan | None
    config_hash: str  # of what decides the result
    ignored_rate: float | None  # method.lr_multiplier, where optim.lr does not depend on it
    similarity: orders.Similarity | None = None  # of the domains' texts, where it decides the order

    @property
    def is_ordered_by_texts(self) -> bool:
        """Whether the domains' texts decide their order."""
        return orders.is_decided_by_texts(self.run.order)

    @property
    def is_computed(self) -> bool:
        """Whether its cost is computed for a kind of device, where nothing is run."""
        return self.run.plan_device is not None

    @property
    def has_monitor(self) -> bool:
        """Whether other text is evaluated while a domain is trained."""
        return self.monitor.every is not None or self.observer.is_active

    @property
    def has_branches(self) -> bool:
        """Whether the schedule decays each domain in a branch, which the next domain does not continue."""
        return getattr(self.lr_scheduler, "branches", False)  # of a user's schedule: any callable

    @property
    def mixture(self) -> ReplayConfig:
        """The replay of the run, or of a method that has its own."""
        mixture = getattr(self.method.options, "mixture", None)
        return mixture if isinstance(mixture, ReplayConfig) else self.replay

    @property
    def reference_folder(self) -> str | None:
        """The folder of the model that weights of tokens compare with; None: the base, or no model."""
        return None if self.loss is None else getattr(self.loss.options, "reference", None)

    @property
    def needs_reference(self) -> bool:
        """Whether weights of tokens compare with a second model."""
        return self.loss is not None and self.loss.make().needs_reference

    @property
    def needs_base_weights(self) -> bool:
        """Whether the divergence from the base is measured, by an evaluator or for a budget."""
        return self.divergence is not None or self.observer.needs_divergence

    @property
    def num_weight_copies(self) -> int:
        """How many copies of the trained weights a stage keeps in memory, to go back to."""
        if self.observer.weight_copies == 0 and self.monitor.keep == "best":
            return 1
        return self.observer.weight_copies

    @property
    def evaluation_groups(self) -> list[str]:
        """The config groups of what is measured in addition to the losses."""
        groups = []
        if self.endtasks is not None:
            groups.append("endtask")
        if self.answers is not None:
            groups.append("answers")
        if self.chats is not None and self.chats.path is not None:
            groups.append("chats")
        if self.benchmark is not None:
            groups.append("benchmark")
        return groups

    @property
    def measures_chats(self) -> bool:
        """Whether chats are measured: those of a file always, the shipped ones if the tokenizer has a chat
        template."""
        if self.chats is None:
            return False
        tokenizer_source = self.model.tokenizer or self.model.name_or_path
        return self.chats.path is not None or has_chat_template(tokenizer_source)

    @property
    def evaluation_hashes(self) -> dict[str, str]:
        """Hashes of the evaluations besides the loss (options, sizes and times of data), by their keys in
        scores.json."""
        hashes = {}
        if self.endtasks is not None:
            hashes["endtasks"] = digest([self.resolved["endtask"], self.endtasks.stamp])
        if self.answers is not None:
            hashes["answers"] = digest([self.resolved["answers"], ""])  # the data are the texts
        if self.chats is not None and self.measures_chats:
            hashes["chats"] = digest([self.resolved["chats"], stamp_chats(self.chats)])
        if self.divergence is not None:
            hashes["divergence"] = digest([self.resolved["divergence"], ""])  # the data are the texts
        if self.benchmark is not None:
            hashes["benchmarks"] = digest([self.resolved["benchmark"], self.benchmark.stamp])
        return hashes


def make_plan(cfg: DictConfig, *, run: RunDir | None = None) -> Plan:
    """The plan of a config, with the values that the config leaves to cpt as the first start of the `run`
    stored them. Raises ValueError for an invalid config.

    The plan is final but for an order that texts decide: `cpt.trainer.domain_order`."""
    sections = read_sections(cfg)
    stored_config = read_first_config(run, sections.run.extend)
    max_tokens = choose_max_tokens(sections, stored_config)
    rounding = choose_rounding(sections, stored_config)
    settings = with_choices(make_plain_config(cfg), max_tokens, rounding)  # raises for what is missing
    # With empty scores: raises for a metric that does not exist, before a sweep has run its jobs.
    run_objective({"metrics": {}, "endtasks": {}, "rows": []}, sections.run.optimized_metric)
    check_batch_size(sections)

    names = choose_names(settings)
    check_value("init_from", settings["init_from"], Text | None)
    if settings["init_from"] is not None:
        init_from = Path(settings["init_from"])
        check_init_from(init_from, full=sections.run.verify_inputs == "full")
        names["model"] = f"{sections.model.name} from {init_from.name}"
        sections = replace(sections, model=start_from_export(sections.model, init_from))
    if sections.source.encoding is None:  # raw text has no questions
        sections = replace(sections, answers=None)
    sections = replace(sections, chats=choose_chats(sections, stored_config))

    source = sections.source
    trainer = sections.trainer
    order = orders.resolve_order(
        sections.run.order,
        names=source.domains,
        orders=source.named_orders,
        seed=sections.run.seed,
        find_exclusion=source.find_exclusion,
    )
    resolved = redact(settings)
    plan = Plan(
        **vars(sections),
        settings=redact(with_choices(hide_environment(cfg), max_tokens, rounding)),
        resolved=resolved,
        names=names,
        order=order,
        budget=Budget(
            steps=trainer.steps, epochs=trainer.epochs, tokens=trainer.tokens, batch_size=trainer.batch_size
        ),
        carry=resolve_carry(settings["optim"].get("state_across_domains", "none")),
        rounding=rounding,
        endtasks=plan_endtasks(settings["endtask"], source.domains, order),
        config_hash=digest(identity(resolved)),
        ignored_rate=cfg.method.get("lr_multiplier", 1) if ignores_multiplier(cfg) else None,
    )
    check_evaluations(plan)
    check_conflicts(plan)
    return with_stored_export(with_stored_date(plan, stored_config), stored_config)


def start_from_export(model: ModelOptions, run_folder: Path) -> ModelOptions:
    """The options of a model that begins with the exported weights of a run, without those that make a new
    one."""
    return replace(
        model,
        name_or_path=str(run_folder / "model"),
        config=None,
        pretraining=None,
        vocab_size=None,
        num_hidden_layers=None,
    )


def read_first_config(run: RunDir | None, extend: str | None) -> Mapping[str, Any]:
    """The leaves of the config that the first start of a run stored. A new run that extends another one
    continues with the stored config of that one; of other new runs it is empty. Raises ValueError for a
    damaged file."""
    if run is None:
        return {}
    if extend is not None and not run.is_started():
        run = RunDir(Path(extend))
    return run.stored_config() if run.config.exists() else {}


def choose_max_tokens(sections: Sections, stored_config: Mapping[str, Any]) -> int | None:
    """How many tokens of each text are scored at most: `eval.max_tokens=auto` is what the run has stored, and
    no bound where it has stored none."""
    if sections.evaluation.max_tokens == AUTO and stored_config:
        return stored_config.get("eval.max_tokens")
    return sections.evaluation.cap


def choose_rounding(sections: Sections, stored_config: Mapping[str, Any]) -> str:
    """How steps are rounded to weights: those in 32 bits to nearest. `optim.rounding=auto` is stochastic for
    weights in bfloat16, but in a run that began without the option it is nearest."""
    if sections.trainer.precision != BF16_WEIGHTS:
        return "nearest"
    rounding = sections.parameter_options.rounding
    if rounding != AUTO:
        return rounding
    return stored_config.get("optim.rounding", "nearest") if stored_config else "stochastic"


def choose_chats(sections: Sections, stored_config: Mapping[str, Any]) -> ChatOptions | None:
    """The chats that are measured. Those that cpt ships are left out of a run that began before there were
    any, which is then finished as it is, and with strategy=fsdp, where no process has the whole model."""
    chats = sections.chats
    if chats is None or chats.path is not None:
        return chats
    began_without = bool(stored_config) and "chats.name" not in stored_config
    return None if began_without or sections.trainer.strategy == "fsdp" else chats


def with_choices(settings: Mapping[str, Any], max_tokens: int | None, rounding: str) -> dict[str, Any]:
    """A config with what `auto` has become of how many tokens of each text are scored at most, and of how
    steps are rounded."""
    return {
        **settings,
        "eval": {**settings["eval"], "max_tokens": max_tokens},
        "optim": {**settings["optim"], "rounding": rounding},
    }


def with_stored_date(plan: Plan, stored_config: Mapping[str, Any]) -> Plan:
    """The plan with the day that the chat template of a run prints, where the config leaves it to cpt."""
    encoding = plan.source.encoding
    if not plan.source.chats or encoding is None or encoding.date is not None:
        return plan
    date = stored_config.get("domains.date")
    return plan if date is None else with_template_date(plan, date)


def with_stored_export(plan: Plan, stored_config: Mapping[str, Any]) -> Plan:
    """The plan of a run that began without `export.dtype` (0.1.0), which exports in 32 bits."""
    if not stored_config or "export.dtype" in stored_config or plan.export.dtype != AUTO:
        return plan
    return replace(plan, export=replace(plan.export, dtype="float32"))


def with_template_date(plan: Plan, date: str | None) -> Plan:
    """The plan of chats whose template prints a day, YYYY-MM-DD; None where it prints none."""
    source = replace(plan.source, date=date)  # type: ignore[call-arg]  # of tasks
    if date is None:
        return replace(plan, source=source)
    settings = {**plan.settings, "domains": {**plan.settings["domains"], "date": date}}
    return replace(plan, source=source, settings=settings, config_hash=digest(identity(settings)))


def check_batch_size(sections: Sections) -> None:
    """Raises ValueError for a batch that does not divide among as many devices as are named."""
    devices = sections.trainer.devices
    world_size = max(1, devices) if isinstance(devices, int) else 1
    num_micro_batches = sections.trainer.count_micro_batches(world_size)
    share_batch(sections.trainer.batch_size, accumulate=num_micro_batches, world=world_size)


def choose_names(settings: Mapping[str, Any]) -> dict[str, str]:
    """The names of method, replay, model and mask. Raises ValueError for a choice without a name."""
    for group in NAMED_GROUPS:
        if "name" not in settings[group]:
            raise ValueError(f"{group}.name is missing. Allowed: {group}.name=NAME")
    names = {group: str(settings[group]["name"]) for group in NAMED_GROUPS}
    return names | {"mask": "+".join(settings["mask"]) or "none"}


def check_init_from(folder: Path, *, full: bool) -> None:
    """Raises ValueError for a folder without a finished run, or with damaged files of its model; if `full`,
    all are read."""
    scores_file = folder / "scores.json"
    if not scores_file.exists() or not Scores.load(scores_file).run["finished"]:
        raise InvalidOptionError(
            "init_from",
            folder,
            reason="no finished run",
            allowed=f"null, or the folder of one{suggest_runs(folder)}",
        )
    # The model is taken over, not the report: its damage changes nothing.
    damage = []
    for line in RunDir(folder).find_damaged_outputs(full=full):
        if not line.startswith(("report.", "report-")):
            damage.append(line)
    if damage:
        raise InvalidOptionError(
            "init_from",
            folder,
            reason="; ".join(damage),
            allowed="a whole run; its own command makes its model again",
        )


def why_not_extendable(plan: Plan) -> str:
    """Why the first domains would have been trained differently without those that follow; "" if they would
    not."""
    schedule = plan.lr_scheduler
    if plan.is_ordered_by_texts:
        return f"order={plan.run.order} gives a further domain its place among those that are learned"
    if plan.trainer.match is not None:
        return "trainer.match=ncl shares out the operations of all domains"
    if plan.source.balanced is True:
        return "domains.balanced=true cuts all domains to the smallest of them"
    if plan.method.load().requires_all_domains:
        return f"method={plan.names['method']} needs all domains before the first is learned"
    if plan.carry == "all":
        return "optim.state_across_domains=all lets the rate decay over all domains"
    if getattr(schedule, "needs_end", False):  # of a user's schedule: any callable
        return f"lr_scheduler={type(schedule).__name__} has rates that depend on how many domains follow"
    if plan.observer.counts_domains:
        return "budget.* is shared out among the domains of the order"
    return ""


def check_evaluations(plan: Plan) -> None:
    """Raises ValueError for a benchmark that is not installed, for invalid files of chats, for held-out chats
    that are replayed, and for the metric of an unknown task."""
    if plan.benchmark is not None:
        plan.benchmark.check_installed()
    if plan.chats is not None:
        if plan.chats.path is not None:
            read_chats(plan.chats)
        check_separate_chats(plan, plan.chats)
    if plan.answers is not None:
        for task in plan.answers.metric_of_task:
            if task not in plan.source.domains:
                raise ValueError(
                    describe_unknown_name(f"answers.metrics.{task}", plan.source.domains, name=task)
                )


def check_separate_chats(plan: Plan, chats: ChatOptions) -> None:
    """Raises ValueError for a source of replay that has a file of the held-out chats."""
    held_out = {path.resolve() for path in find_chat_files(chats)}
    for name, reader in plan.mixture.readers.items():
        if not reader.options.is_local:
            continue
        shared = held_out.intersection(path.resolve() for path in reader.find_files())
        if shared:
            raise InvalidOptionError(
                f"replay.sources.{name}.path",
                reader.options.path,
                reason=f"{min(shared)} is held out (chats=…)",
                allowed="chats that are not evaluated",
            )


def check_conflicts(plan: Plan) -> None:
    """Raises ValueError for options of different sections that contradict each other."""
    is_sharded = plan.trainer.strategy == "fsdp"
    if plan.model.tokenizer is not None and plan.model.name_or_path is None:
        raise InvalidOptionError(
            "model.tokenizer",
            plan.model.tokenizer,
            reason="the run trains the tokenizer of a new model",
            allowed="null, or a checkpoint in model.name_or_path",
        )
    if plan.source.encoding is not None and plan.model.objective == "masked":
        raise InvalidOptionError(
            "model.objective",
            "masked",
            context="for domains of examples",
            reason="a masked model writes no answers",
            allowed="a causal model, or an encoder-decoder",
        )

    check_custom_classes(plan)
    if plan.has_branches:
        check_branches(plan)
    if plan.model.quantization != "none":
        check_quantized_checkpoint(plan)

    plan.mixture.check_conflicts(
        has_examples=plan.source.encoding is not None,
        has_chats=plan.source.chats,
        max_seq_length=plan.model.max_seq_length,
        batch_size=plan.budget.batch_size,
        is_sharded=is_sharded,
    )

    if plan.observer.is_active:
        plan.observer.check_conflicts(
            monitor=plan.monitor,
            method=plan.method.load(),
            method_name=plan.names["method"],
            has_branches=plan.has_branches,
            is_sharded=is_sharded,
        )

    if plan.monitor.chats:
        check_monitored_chats(plan)
    if plan.needs_base_weights:
        check_divergence(plan)
    check_optimizer_kind(plan)
    if is_sharded:
        check_sharding(plan)


def check_custom_classes(plan: Plan) -> None:
    """Raises ValueError for classes of the user's that do not take the arguments in their sections."""
    plan.method.check_call("method", num_shared=1)
    mask_names = [name for name, entry in plan.settings["mask"].items() if entry is not None]
    for name, mask in zip(mask_names, plan.masks, strict=True):
        mask.check_call(f"mask.{name}", num_shared=0)
    if plan.loss is not None:
        plan.loss.check_call("loss", num_shared=0)


def check_monitored_chats(plan: Plan) -> None:
    """Raises ValueError where a stage evaluates nothing, where the run measures no chats, and where a domain
    has a name of their losses."""
    if not plan.has_monitor:
        raise InvalidOptionError(
            "monitor.chats",
            True,
            reason="every=null monitors nothing",
            allowed="false, or monitor.every=STEPS",
        )
    if not plan.measures_chats:
        raise InvalidOptionError(
            "monitor.chats",
            True,
            reason="this run measures no chats (chats=none, strategy=fsdp, or no chat template)",
            allowed="false, or a causal model with a chat template and chats=default",
        )
    for name in CHAT_LOSSES:
        if name in plan.source.domains:
            raise InvalidOptionError(
                "monitor.chats",
                True,
                reason=f"the domain {name} has the name of a loss on chats",
                allowed="false, or another name of the domain",
            )


def check_divergence(plan: Plan) -> None:
    """Raises ValueError for a method whose model cannot be run with the weights of the base again, or whose
    predictions are of several modules."""
    from cpt.methods.base import ContinualMethod  # loads torch

    group = "divergence"
    choice = "base"
    if plan.divergence is None:  # the observer of a budget needs it
        group = "budget"
        choice = "divergence"
    if plan.method.load().expand is not ContinualMethod.expand:
        raise InvalidOptionError(
            group,
            choice,
            context=f"with method={plan.names['method']}",
            reason="its model grows, and has no weights with which it is the base",
            allowed=f"{group}=none",
        )
    routing = getattr(plan.method.options, "routing", None)  # of methods with modules per domain
    has_modules = getattr(plan.method.options, "per_domain", True)
    if isinstance(routing, Routing) and has_modules and routing.is_mixture:
        raise InvalidOptionError(
            group,
            choice,
            context=f"with method.routing.learned={routing.learned}, unlearned={routing.unlearned}",
            reason="a text is scored by several modules",
            allowed=f"{group}=none, or learned=domain and unlearned=base or last",
        )


def check_quantized_checkpoint(plan: Plan) -> None:
    """Raises ValueError for what does not go with `model.quantization`."""
    quantization = plan.model.quantization
    if plan.model.name_or_path is None:
        raise InvalidOptionError(
            "model.quantization",
            quantization,
            reason="the run pre-trains all weights of a new model",
            allowed="none, or a checkpoint in model.name_or_path",
        )
    check_quantization(
        plan,
        method_name=plan.names["method"],
        key="model.quantization",
        value=quantization,
        needs_packages=not plan.is_computed,
    )


def check_optimizer_kind(plan: Plan) -> None:
    """Raises ValueError for an optimizer whose library is not installed, or that does not support a mask or
    sharding."""
    is_sharded = plan.trainer.strategy == "fsdp"
    kind = KINDS.get(plan.optim.target)
    if kind is None:  # another of a library, or a user's
        if is_sharded and plan.optim.target.startswith(WITHOUT_SHARDS):
            raise InvalidOptionError(
                "optim._target_",
                plan.optim.target,
                context="with strategy=fsdp",
                reason="its kernels do not know sharded weights",
                allowed=list_kinds(lambda kind: kind.supports_shards),
            )
        return
    if not kind.is_installed and not plan.is_computed:
        raise InvalidOptionError(
            "optim",
            kind.name,
            reason=f"{kind.extra} is not installed",
            allowed=f"adamw, or after {format_install_command(kind.extra)}",
        )
    if is_sharded and not kind.supports_shards:
        raise InvalidOptionError(
            "optim",
            kind.name,
            context="with strategy=fsdp",
            reason="its state is of whole parameters",
            allowed=list_kinds(lambda kind: kind.supports_shards),
        )

    needs_momentum = filters_momentum(plan)
    if not kind.has_moments and (needs_momentum or scales_moments(plan)):
        raise InvalidOptionError(
            "optim",
            kind.name,
            context="with mask=mofo" if needs_momentum else "with apply_to=frozen",
            reason="it keeps no moment for each weight",
            allowed=list_kinds(lambda kind: kind.has_moments),
        )
    if needs_momentum and plan.optim.arguments.get("momentum") == 0:
        raise InvalidOptionError(
            "optim.momentum", 0, context="with mask=mofo", reason="it filters by momentum", allowed="above 0"
        )


def list_kinds(is_allowed: Callable[[OptimizerKind], bool]) -> str:
    return ", ".join(kind.name for kind in KINDS.values() if is_allowed(kind))


def filters_momentum(plan: Plan) -> bool:
    """Whether a mask reads the momentum of each weight."""
    for mask in plan.masks:
        if isinstance(mask.options, MomentumFilterOptions) and mask.options.share < 1:
            return True
    return False


def scales_moments(plan: Plan) -> bool:
    """Whether a mask, or the method, scales moments of the optimizer."""
    choices = [*plan.masks, plan.method]
    mask_of_method = getattr(plan.method.options, "mask", None)
    if isinstance(mask_of_method, Choice):
        choices.append(mask_of_method)
    return any(getattr(choice.options, "apply_to", "") == "frozen" for choice in choices)


def check_branches(plan: Plan) -> None:
    """Raises ValueError for options that need the end of a domain's decay, which is a branch."""
    schedule = type(plan.lr_scheduler).__name__
    if plan.carry == "all":
        raise InvalidOptionError(
            "optim.state_across_domains",
            "all",
            reason=f"lr_scheduler={schedule} ends each domain in a branch",
            allowed="none, moments",
        )
    if plan.monitor.decides:
        raise ValueError(
            "monitor.stop, patience, keep is invalid with a schedule whose decay is a branch: "
            "the next domain starts before it. Allowed: stop=null, patience=null, keep=last"
        )
    if plan.method.load().ends_domains:
        name = plan.names["method"]
        raise InvalidOptionError(
            "lr_scheduler",
            schedule,
            reason=(
                f"the next domain starts before the decay, and without what method={name} makes of its end"
            ),
            allowed="a schedule without branches, like linear",
        )


def check_sharding(plan: Plan) -> None:
    """Raises ValueError for what does not go with strategy=fsdp."""
    method = plan.method.load()
    choices = [(f"method={plan.names['method']}", plan.method)]
    choices.extend((f"the mask {mask.target}", mask) for mask in plan.masks)
    for label, choice in choices:
        # A user's class has the attribute where it supports sharded weights.
        if not getattr(choice.load(), "sharded", choice.target.startswith(PACKAGES_WITH_SHARDING)):
            raise InvalidOptionError(
                "strategy",
                "fsdp",
                reason=f"{label} does not support sharded weights (docs/distributed.md)",
                allowed="single, ddp",
            )

    if plan.loss is not None and plan.needs_reference:
        raise InvalidOptionError(
            "loss._target_",
            plan.loss.target,
            context="with strategy=fsdp",
            reason="each process would hold the whole reference model",
            allowed="loss=eaft or none, or strategy=single or ddp",
        )
    if isinstance(plan.method.options, LayerLoRAOptions) and plan.method.options.use_dora:
        raise InvalidOptionError(
            "method.use_dora",
            True,
            context="with strategy=fsdp",
            reason="a norm is of whole rows of weights",
            allowed="false, or strategy=single or ddp",
        )
    if plan.monitor.keep == "best":
        raise InvalidOptionError("monitor.keep", "best", context="with strategy=fsdp", allowed="last")

    if plan.evaluation_groups:
        group = plan.evaluation_groups[0]
        raise ValueError(
            f"{group} is invalid with strategy=fsdp: it needs the whole model. "
            f"Allowed: {group}=none, and {group} with strategy=single in the end"
        )
    if plan.trainer.precision == BF16_WEIGHTS and method.needs_32_bits:
        raise InvalidOptionError(
            "trainer.precision",
            BF16_WEIGHTS,
            context=f"with method={plan.names['method']} and strategy=fsdp",
            allowed="32-true, bf16-mixed",
        )
