"""What the log says of a run's settings before it starts: options that have no effect, and what is not
trained."""

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import cast

import torch
from hydra.core.hydra_config import HydraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from cpt.adapters.domain_store import find_domain_params
from cpt.adapters.options import SavedModulesOptions, SummedLoRAOptions
from cpt.adapters.saved_modules import find_saved_tensors
from cpt.core.exceptions import format_value
from cpt.core.messages import abbreviate, count_noun
from cpt.core.processes import is_first_process
from cpt.core.tensors import NamedTensors
from cpt.data.datamodule import DomainSequence
from cpt.data.mixture import SourceUse
from cpt.methods.base import ContinualMethod
from cpt.methods.options import KDOptions
from cpt.models.narrow_layers import find_narrow_weights
from cpt.models.options import Freeze
from cpt.models.parameter_groups import find_groups
from cpt.models.units import find_block_matrices, find_expert_parameters
from cpt.models.weights import find_frozen, find_trainable, list_trainable_entries
from cpt.optim.muon import MuonWithAdamW
from cpt.optim.rounding import compute_lost_update_share
from cpt.optim.state import CarriedState
from cpt.trainer.auto import Machine, is_bf16_emulated
from cpt.trainer.export_dtype import find_export_dtype, name_dtype
from cpt.trainer.log_experts import log_experts
from cpt.trainer.log_quantization import log_quantization
from cpt.trainer.options import BF16, Precision
from cpt.trainer.plan import BF16_WEIGHTS, Plan
from cpt.trainer.run_dir import has_chat_template

log = logging.getLogger(__name__)
# Optimizers whose step is about as large as the learning rate.
ADAM_LIKE = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax)
# Keys of a base that is built or chosen, which a run that starts from the model of another one does not do.
BASE_KEYS = (
    "model.config.",
    "model.vocab_size",
    "model.name_or_path",
    "model.num_hidden_layers",
)
# Options and sections of options that only training reads.
TRAINING_KEYS = (
    "trainer.steps",
    "trainer.epochs",
    "trainer.tokens",
    "trainer.match",
    "trainer.batch_size",
    "trainer.accumulate_grad_batches",
    "trainer.micro_batch",
    "trainer.gradient_clip_val",
    "trainer.gradient_checkpointing",
    "trainer.checkpoint_every_n_steps",
    "trainer.log_every_n_steps",
    "optim",
    "lr_scheduler",
    "mask",
    "loss",
    "monitor",
    "budget",
    "on_nonfinite",
    "freeze",
    "trainable",
)


def log_settings(plan: Plan, machine: Machine, module: ContinualMethod, data: DomainSequence) -> None:
    """Logs of how many texts a part is scored, the options that are set and change nothing, and which weights
    are not trained."""
    log_scored_share(data)
    log_repeats(data)
    log_mixture(data)
    for description in (
        *find_untrained_options(plan, data),
        *find_ineffective_options(plan, machine, module),
    ):
        log.info("No effect of %s", description)

    num_micro_batches = plan.trainer.accumulate_grad_batches
    for difference in (module.describe_accumulation(), module.token_weights.describe_accumulation()):
        if num_micro_batches > 1 and difference:
            log.info(
                "Accumulating gradients (trainer.accumulate_grad_batches=%d): %s",
                num_micro_batches,
                difference,
            )

    log_frozen_weights(plan, module)
    log_export(plan, machine)
    log_muon(plan, module)
    warn_of_slow_teacher(machine, module)
    warn_of_no_rate(plan)
    warn_of_lost_updates(plan, module, precision=machine.precision)
    warn_of_untrained_rows(plan, module)
    log_experts(plan, module)
    log_saved_modules(module)
    log_quantization(module.model)
    log_left_out_chats(plan)


def log_left_out_chats(plan: Plan) -> None:
    """Logs why a chat model is not measured on the chats that cpt ships, though they are asked for."""
    is_asked_for = plan.resolved["chats"].get("_target_") is not None
    tokenizer_source = plan.model.tokenizer or plan.model.name_or_path
    if plan.chats is not None or not is_asked_for or not has_chat_template(tokenizer_source):
        return
    if plan.trainer.strategy == "fsdp":
        log.info("Skipping held-out chats: with strategy=fsdp no process has the whole model")
    else:
        log.info("Skipping held-out chats: this run began without them (chats=FILE measures those of a file)")


def log_frozen_weights(plan: Plan, module: ContinualMethod) -> None:
    """Logs how many frozen weights are kept in 16 bits."""
    narrow = find_narrow_weights(module.model)
    if not narrow or not is_first_process():
        return
    log.info(
        "Frozen weights (model.dtype=%s): %s, %s of %s numbers; layers compute with them in the precision of "
        "the run",
        plan.model.dtype,
        name_dtype(narrow[0].dtype),
        f"{sum(weight.numel() for weight in narrow):,}",
        f"{sum(parameter.numel() for parameter in module.model.parameters()):,}",
    )


def log_export(plan: Plan, machine: Machine) -> None:
    """Logs that the exported weights are rounded, where nothing but the checkpoint asks for it."""
    dtype = find_export_dtype(plan.export, plan.model.name_or_path, machine.precision)
    is_rounded = dtype.itemsize < 4 and machine.precision != "bf16-true"
    if plan.export.dtype == "auto" and is_rounded and is_first_process():
        log.info("Exported weights (export.dtype=auto): %s, as the checkpoint is stored", name_dtype(dtype))


def log_scored_share(data: DomainSequence) -> None:
    """Logs how many tokens of the held-out texts are scored, if not all of them."""
    sampled_texts = data.sampled_texts
    max_tokens = data.eval_tokens
    if max_tokens is None or not sampled_texts:
        return
    num_scored = 0
    num_tokens = 0
    for name, text in data.held_out.items():
        lengths = text.row_lengths
        num_tokens += int(lengths.sum())
        if name in sampled_texts:
            lengths = lengths[data.scored_rows(name)]
        num_scored += int(lengths.sum())
    log.info(
        f"Measuring losses on {num_scored:,} of {count_noun(num_tokens, 'held-out token')}, the same after "
        f"every stage: rows of {count_noun(max_tokens, 'token')} (eval.max_tokens) of each of "
        f"{abbreviate(sampled_texts, with_count=True)}. To measure all, start a new run with "
        "eval.max_tokens=null"
    )


def log_repeats(data: DomainSequence) -> None:
    """Logs the stages that have fewer rows than a batch: a step reads some of them several times, unless as
    many rows are replayed."""
    batch_size = data.budget.batch_size
    rows_by_stage: dict[str, int] = {}
    for domain in data:
        num_rows = data.count_rows(domain)
        if num_rows < batch_size:
            rows_by_stage[domain.name] = num_rows
    if rows_by_stage:
        log.info(
            "Fewer rows than a batch (trainer.batch_size=%d): %s, of which the fewest are %d; a step may "
            "read a row more than once",
            batch_size,
            abbreviate(rows_by_stage, with_count=True),
            min(rows_by_stage.values()),
        )


def log_mixture(data: DomainSequence) -> None:
    """Logs of each source of replay how large it is, how often the run reads it, and where its limit of
    repetition ends it."""
    if not data.mixed or not is_first_process():
        return
    uses_by_source: dict[str, dict[str, SourceUse]] = {name: {} for name in data.mixed}
    for domain in data:
        for use in data.find_uses(domain):
            uses_by_source[use.name][domain.name] = use

    for name, uses in uses_by_source.items():
        key = f"replay.sources.{name}"
        mixed = data.mixed[name]
        first_use = next(iter(uses.values()), None)
        if first_use is None:  # the method trains nothing
            log.info("No effect of %s: no stage is trained", key)
            continue
        epochs = max(use.epochs for use in uses.values())
        log.info(
            "Mixing in %s: %s in %s, %s in all, %.3g of the rows of a batch, read %.2f times (%s)",
            name,
            count_noun(mixed.text.documents, "chat" if mixed.options.has_chats else "document"),
            count_noun(len(mixed.text), "sequence"),
            count_noun(mixed.num_tokens, "token"),
            first_use.asked_share,
            epochs,
            key,
        )
        if epochs > 1 and mixed.max_draws is None:
            log.info(
                "Reading the rows of %s %.1f times in the run; %s.max_epochs=1 would read each once at most",
                name,
                epochs,
                key,
            )
        for stage, use in uses.items():
            if use.limit_step is None:
                continue
            log.info(
                "New text takes the share of %s from step %d of %s on: it was read %s times (%s.max_epochs)",
                name,
                use.limit_step + 1,
                stage,
                format_value(mixed.options.max_epochs),
                key,
            )
            break  # later stages read no more of it


def find_ineffective_replay(plan: Plan) -> Iterator[str]:
    """Replay that mixes nothing into the batches of this run, with the reason."""
    mixture = plan.mixture
    replay = plan.names["replay"]
    if replay != "none" and not (mixture.past_ratio or mixture.general_ratio or mixture.mixed_sources):
        yield f"replay={replay}: it has neither a share nor a source"
    if mixture.past_ratio and len(plan.order) == 1:
        yield f"replay.past_ratio={mixture.past_ratio:g}: a single domain has no past ones"
    elif mixture.past_ratio and plan.method.load().requires_all_domains:
        reason = f"method={plan.names['method']} learns all domains at once"
        yield f"replay.past_ratio={mixture.past_ratio:g}: {reason}"


def find_untrained_options(plan: Plan, data: DomainSequence) -> Iterator[str]:
    """The options of training that the command line sets where no stage is trained."""
    if len(data):
        return
    prefixes = tuple(f"{name}." for name in TRAINING_KEYS)
    keys = [key for key in list_set_keys() if key in TRAINING_KEYS or key.startswith(prefixes)]
    if keys:
        yield f"{', '.join(keys)}: method={plan.names['method']} trains nothing"


def find_ineffective_evaluation(plan: Plan) -> Iterator[str]:
    """Options of evaluations that the command line sets, and that this run does not do, with the reason."""
    keys = list_set_keys()
    monitor_keys = [key for key in keys if key.startswith("monitor.") and key != "monitor.every"]
    if monitor_keys and not plan.has_monitor:
        yield f"{', '.join(monitor_keys)}: monitor.every is null"
    chat_keys = [key for key in keys if key.startswith("chats.")]
    if chat_keys and not plan.measures_chats and is_chosen(plan, "chats"):
        yield f"{', '.join(chat_keys)}: no held-out chats are measured"
    answer_keys = [key for key in keys if key.startswith("answers.")]
    if answer_keys and plan.answers is None and is_chosen(plan, "answers"):
        yield f"{', '.join(answer_keys)}: the model answers no tasks"
    writes_no_answers = plan.chats is not None and plan.chats.generate == 0
    if "chats.max_new_tokens" in keys and writes_no_answers:
        yield "chats.max_new_tokens: chats.generate is 0"


def find_ineffective_logging(plan: Plan) -> Iterator[str]:
    """Options of trackers that this run does not have, with the reason."""
    if plan.run.tags and not plan.logger.wandb:
        yield f"tags={format_value(list(plan.run.tags))}: nothing is logged to W&B (logger=wandb)"


def find_options_of_nothing(plan: Plan) -> Iterator[str]:
    """Options that the command line adds to a choice without any, like `+replay.sources=… replay=none`."""
    for key in list_set_keys():
        group, _, option = key.partition(".")
        if option and not is_chosen(plan, group):
            yield f"{key}: {group}={plan.resolved[group].get('name', 'none')}"


def is_chosen(plan: Plan, group: str) -> bool:
    """Whether a config group has something chosen; of sections without a class True."""
    section = plan.resolved.get(group)
    return not isinstance(section, Mapping) or section.get("_target_", "") is not None


def find_ineffective_importances(plan: Plan, module: ContinualMethod) -> Iterator[str]:
    """The number of importance samples, where it is set and nothing of cpt's own reads one. A class of the
    user may read them without saying so."""
    if "trainer.importance_samples" not in list_set_keys():
        return
    readers = [module, module.token_weights, *module.masks]
    packages = {type(reader).__module__.partition(".")[0] for reader in readers}
    if packages == {"cpt"} and not any(reader.reads_importance_batches for reader in readers):
        choices = f"method={plan.names['method']} with mask={plan.names['mask']}"
        yield f"trainer.importance_samples: {choices} estimates nothing on samples"


def find_ineffective_base(plan: Plan) -> Iterator[str]:
    """Options of a base that is built or chosen in a run that starts from the model of another one, and those
    of pre-training where a checkpoint is given."""
    base_keys = [key for key in list_set_keys() if key.startswith(BASE_KEYS)]
    earlier_run = plan.settings["init_from"]
    if base_keys and earlier_run:
        yield f"{', '.join(base_keys)}: init_from={earlier_run} has the model"

    checkpoint = plan.model.name_or_path
    pretraining = plan.settings["model"]["pretraining"]
    pretraining_keys = [key for key in list_set_keys() if key.startswith("model.pretraining.")]
    if checkpoint and pretraining and pretraining.get("steps"):
        yield f"model.pretraining.steps: {checkpoint} is given"
    elif checkpoint and pretraining_keys and plan.model.pretraining is None:
        yield f"{', '.join(pretraining_keys)}: {checkpoint} is given, and head_steps is null"


def find_ineffective_freezing(plan: Plan, module: ContinualMethod) -> Iterator[str]:
    """Options that freeze, or leave to be trained, only what an adapter method does not train anyway."""
    # What a model that grows trains is not there yet.
    is_growing = type(module).expand is not ContinualMethod.expand
    if module.scope is None or is_growing:
        return
    untrained_ids = {id(parameter) for parameter in module.scope.others(module.model)}

    def trains_some(parameters: Iterable[nn.Parameter]) -> bool:
        return any(id(parameter) not in untrained_ids for parameter in parameters)

    method = plan.names["method"]
    freeze = plan.freeze
    if freeze.embeddings:
        embeddings = find_frozen(module.model, Freeze(embeddings=True, layers=0))
        if not trains_some(embeddings):
            yield f"freeze.embeddings=true: method={method} trains no embedding"
    if freeze.layers:
        blocks = find_frozen(module.model, Freeze(embeddings=False, layers=freeze.layers))
        if not trains_some(blocks):
            yield f"freeze.layers={freeze.layers}: method={method} trains nothing in these blocks"
    for entry in list_trainable_entries(freeze.trainable):
        if not trains_some(find_trainable(module.model, entry)):
            yield f"trainable={entry}: method={method} trains nothing of what it finds"

    # The modules that are trained fully may be all that is left.
    adapter_names = set(module.scope.names) - set(module.saved_names)
    frozen_ids = {id(parameter) for parameter in module.frozen}
    adapters = [module.model.get_parameter(name) for name in adapter_names]
    if module.saved_names and all(id(parameter) in frozen_ids for parameter in adapters):
        yield f"method={method}: freeze or trainable leaves method.modules_to_save alone, and no adapter"


def find_ineffective_masks(plan: Plan, module: ContinualMethod) -> Iterator[str]:
    """Masks of the config or of the method that limit no weight which `freeze` and `trainable` leave."""
    masks_of_config = module.masks[: len(plan.masks)]
    frozen_ids = {id(parameter) for parameter in module.frozen}
    for mask in module.masks:
        weights = list(mask.masked_weights())
        if not weights or any(id(weight) not in frozen_ids for weight in weights):
            continue
        if mask in masks_of_config:
            choice = f"mask={plan.names['mask']}"
        else:
            choice = f"the mask of method={plan.names['method']}"
        yield f"{choice}: freeze or trainable leaves none of the weights that {type(mask).__name__} limits"


def find_ineffective_options(plan: Plan, machine: Machine, module: ContinualMethod) -> Iterator[str]:
    """The options that are set and change nothing, each with the reason."""
    options = plan.trainer
    method = plan.names["method"]

    yield from find_ineffective_base(plan)
    if "domains.embedding_samples" in list_set_keys() and not plan.is_ordered_by_texts:
        yield f"domains.embedding_samples: order={format_value(plan.run.order)} is not one by similarity"

    yield from find_options_of_nothing(plan)
    yield from find_ineffective_logging(plan)
    yield from find_ineffective_evaluation(plan)
    yield from find_ineffective_importances(plan, module)
    yield from find_ineffective_freezing(plan, module)
    yield from find_ineffective_masks(plan, module)
    yield from find_ineffective_replay(plan)
    multiplier = plan.ignored_rate
    if multiplier not in (None, 1):
        yield f"method.lr_multiplier={multiplier}: optim.lr is given (by default, model.lr times it)"
    if options.offload_method_state and (not keeps_weights(module) or machine.device.type == "cpu"):
        yield f"trainer.offload_method_state=true: {method} keeps no weights, or the device is a CPU"

    method_options = module.options
    adapts_experts = (
        isinstance(method_options, SummedLoRAOptions) and method_options.target_parameters == "auto"
    )
    if adapts_experts and not find_expert_parameters(module.model):
        yield f"method.target_parameters=auto: this {module.model.config.model_type} has no experts"
    undecayed = find_undecayed_anyway(plan, module)
    if undecayed:
        yield f"optim.no_decay={format_value(undecayed)}: biases, norms and other vectors never decay"
    elif plan.parameter_options.no_decay and not plan.optim.arguments.get("weight_decay", 0):
        yield f"optim.no_decay={format_value(plan.parameter_options.no_decay)}: optim.weight_decay is 0"

    rounding = plan.parameter_options.rounding
    if rounding != "auto" and machine.precision != BF16_WEIGHTS:
        yield f"optim.rounding={rounding}: trainer.precision={machine.precision} has no weights in bfloat16"

    num_micro_batches = options.accumulate_grad_batches
    has_single_samples = plan.source.encoding is not None and plan.budget.batch_size == num_micro_batches
    if plan.source.isolated and has_single_samples:
        yield "domains.packing=document_mask: samples come one by one"
    has_faster_teacher = isinstance(module.options, KDOptions) and module.options.teacher != "run"
    if has_faster_teacher and machine.precision in BF16:
        yield f"method.teacher: all is in 16 bits (trainer.precision={machine.precision})"
    if num_micro_batches > 1 and any(mask.limits_rows for mask in module.masks):
        yield "the mask's backend=backward: later micro-batches of a step select rows too"

    is_sharded = options.strategy == "fsdp"
    if plan.modules.storage == "disk" and (is_sharded or not find_domain_params(module)):
        yield f"modules.storage=disk: {method} has no modules per domain, or they are sharded"


def find_undecayed_anyway(plan: Plan, module: ContinualMethod) -> list[str]:
    """The patterns of optim.no_decay that find nothing but vectors."""
    patterns = []
    for group in find_groups(module.model, plan.parameter_options.no_decay, module.model.parameters()):
        if group.parameters and all(parameter.ndim < 2 for parameter in group.parameters):
            patterns.append(group.pattern)
    return patterns


def list_set_keys() -> list[str]:
    """The options that the command line sets, each once."""
    if not HydraConfig.initialized():
        return []
    keys = [override.partition("=")[0].lstrip("+~") for override in HydraConfig.get().overrides.task]
    return list(dict.fromkeys(keys))


def keeps_weights(module: ContinualMethod) -> bool:
    """Whether a method stores weights besides the optimizer's state."""
    for part in module.modules():
        if isinstance(part, NamedTensors) and not isinstance(part, CarriedState):
            return True
    return False


def log_muon(plan: Plan, module: ContinualMethod) -> None:
    """Logs how many weights optim=muon trains with Muon, and how many with AdamW."""
    if plan.optim.load() is not MuonWithAdamW:
        return

    matrices = set(find_block_matrices(module.model))
    frozen = set(module.frozen)
    num_muon = 0
    num_adamw = 0
    for parameter in module.model.parameters():
        if parameter in frozen:
            continue
        if parameter in matrices:
            num_muon += parameter.numel()
        else:
            num_adamw += parameter.numel()

    if num_muon:
        log.info(
            "Optimizer (optim=muon): Muon for %s weights, the matrices of the blocks; AdamW for the other %s",
            f"{num_muon:,}",
            f"{num_adamw:,}",
        )
        if module.device.type == "cpu" and is_bf16_emulated():
            log.warning(
                "optim=muon is slow on this CPU: its products are in bf16, for which the CPU has no AVX-512. "
                "optim=adamw is faster"
            )
    else:
        log.info(
            "No effect of optim=muon: method=%s trains no matrix of the blocks, and AdamW the rest",
            plan.names["method"],
        )


def warn_of_slow_teacher(machine: Machine, module: ContinualMethod) -> None:
    """Logs that the precision which is to make a teacher faster makes it slower on this CPU, unless the run
    has that precision: then the choice of it has warned."""
    has_own_precision = isinstance(module.options, KDOptions) and module.options.teacher != "run"
    if not has_own_precision or machine.precision in BF16:
        return
    if machine.device.type == "cpu" and is_bf16_emulated():
        log.warning(
            "method.teacher=bf16-mixed is slow on this CPU: it has no AVX-512. method.teacher=run is faster"
        )


def warn_of_no_rate(plan: Plan) -> None:
    """Logs that an optimizer with a rate of 0 trains nothing."""
    trains_nothing = plan.optim.arguments.get("lr") == 0 and plan.names["method"] != "none"
    if trains_nothing and is_first_process():
        log.warning("optim.lr=0: no step changes a weight")


def warn_of_lost_updates(plan: Plan, module: ContinualMethod, *, precision: Precision) -> None:
    """Logs which share of weights in bfloat16 an optimizer step of the peak rate does not change."""
    if precision != BF16_WEIGHTS or plan.rounding != "nearest":
        return
    rate = plan.optim.arguments.get("lr")
    remedy = (
        "a new run with optim.rounding=stochastic loses none; trainer.precision=bf16-mixed has 32-bit weights"
    )
    if rate is None or not issubclass(plan.optim.load(), ADAM_LIKE):
        log.warning(
            "optim.rounding=nearest: updates below about 1/512 of a weight in bf16-true are lost; %s",
            remedy,
        )
        return

    # Of Adam a step is about as large as the rate, whatever the gradient, so the share is known before.
    frozen = {id(parameter) for parameter in module.frozen}
    trained = [parameter for parameter in module.model.parameters() if id(parameter) not in frozen]
    share = compute_lost_update_share(trained, rate=rate)
    log.warning(
        "optim.rounding=nearest: in bf16-true a step of optim.lr=%s is lost for %.0f %% of the trained "
        "weights, and for more of them as the rate decays; %s",
        format_value(rate),
        100 * share,
        remedy,
    )


def warn_of_untrained_rows(plan: Plan, module: ContinualMethod) -> None:
    """Logs where rows for new tokens are asked for and the method does not train them."""
    options = plan.model
    if plan.names["method"] == "none" or not (options.resize or options.tokenizer):
        return
    option = f"model.tokenizer={options.tokenizer}" if options.tokenizer else "model.resize=true"
    model = module.model
    frozen_ids = {id(parameter) for parameter in module.frozen}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tables = {"embedding": embedding}
    if head is not None and head.weight is not embedding.weight:
        tables["head"] = head
    untrained = [name for name, table in tables.items() if not trains_rows(table, frozen_ids)]
    if not untrained:
        return

    freeze = plan.freeze
    if isinstance(module.options, SavedModulesOptions):
        remedy = "method.modules_to_save=[embeddings,head] trains them (docs/methods.md)"
        if freeze.embeddings or freeze.trainable is not None:
            remedy += ", with freeze.embeddings=false trainable=null"
    elif module.scope is None and (freeze.embeddings or freeze.trainable is not None):
        remedy = "freeze.embeddings=false trainable=null does"
    else:
        remedy = "a method that trains all weights does"
    log.warning(
        "Rows of new tokens (%s) in %s are not trained by method=%s and stay at their initial values: %s",
        option,
        " and ".join(untrained),
        plan.names["method"],
        remedy,
    )


def trains_rows(table: nn.Module, frozen_ids: Collection[int]) -> bool:
    """Whether the rows of an embedding or a head are trained, or an adapter that adds to them."""
    weights = [cast(nn.Parameter, table.weight)]
    if isinstance(table, BaseTunerLayer):
        weights = [weight for weight in table.parameters() if weight.ndim > 1]
    return any(weight.requires_grad and id(weight) not in frozen_ids for weight in weights)


def log_saved_modules(module: ContinualMethod) -> None:
    """Logs which modules are trained fully in addition to adapters."""
    if not module.saved_names or not is_first_process():
        return
    saved = [module.model.get_parameter(name) for name in module.saved_names]
    sets = "one set for all domains"
    if module.domain_params is not None:
        sets = "one set for each domain"
    modules = find_saved_tensors(module.model, module.saved_names)
    tied = ", one weight" if len(modules) > len(saved) else ""
    log.info(
        "Training fully in addition to the adapters (method.modules_to_save): %s (%s parameters%s, %s)",
        ", ".join(modules),
        f"{sum(parameter.numel() for parameter in saved):,}",
        tied,
        sets,
    )
