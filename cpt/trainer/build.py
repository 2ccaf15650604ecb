"""Build the pieces of a run from a plan: the method with its model, and its data."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.randomness import torch_seed
from cpt.core.tensors import NamedTensors
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.mixture import MixedText
from cpt.data.packing import Packed, balance_texts
from cpt.data.sources.base import GENERAL, TEXT
from cpt.data.text_checks import check_training_text, report_texts
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.models.activation_checkpointing import checkpoint_activations
from cpt.models.block_attention import MASKABLE, try_lengths
from cpt.models.divergence import BaseWeights
from cpt.models.fast_kernels import COMPILE_OPTIONS, pad_head
from cpt.models.fsdp import Sharding, follow_sharding
from cpt.models.loading import find_head_parameters
from cpt.models.objectives import Objective
from cpt.models.parameter_groups import bind_blocks
from cpt.models.router_loss import find_router_weights
from cpt.models.token_weights import TokenWeights
from cpt.models.trial import try_model, try_shards
from cpt.models.units import find_blocks
from cpt.models.varlen_attention import uses_flash_attention
from cpt.models.vocabulary import find_vocabulary_tables
from cpt.models.weights import Snapshot
from cpt.optim.rounding import TO_NEAREST, StochasticRounding
from cpt.optim.schedulers import Progress
from cpt.optim.state import CarriedState
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.costs import restore_original_name
from cpt.trainer.options import FP16_MIXED, Precision
from cpt.trainer.plan import Plan
from cpt.trainer.reference_model import add_reference, make_reference

MAX_REPEATS = 100  # of each row in one step: more is a slip, and may be more than the memory holds


def read_corpora(plan: Plan) -> Corpora:
    return Corpora.read(
        plan.source,
        plan.order,
        cache=Path(plan.run.cache_dir),
        workers=plan.source.preprocessing_num_workers,
        mixed=plan.mixture.readers,
    )


def build_method(
    plan: Plan, machine: Machine, base: Base, *, sharding: Sharding | None = None
) -> ContinualMethod:
    """The method with the base model; its random numbers depend on the seed alone. With a `sharding`, with
    which all processes call, the model and what the method keeps of its weights is sharded, if the files of
    the base allow it."""
    torch.manual_seed(torch_seed(plan.run.seed, "method"))
    model = base.model(machine.base_dtype, sharding=sharding)
    loaded_names = find_loaded_names(plan, base, model)
    pad_head(model)

    if machine.attn_implementation != "auto":
        model.set_attn_implementation(machine.attn_implementation)
    if machine.attn_implementation in ("auto", *MASKABLE):  # others run on GPUs only
        checkpoint = plan.model.name_or_path
        source = "model.config" if checkpoint is None else f"model.name_or_path={checkpoint}"
        trial = partial(
            try_model,
            objective=base.objective,
            objective_name=base.objective_name,
            length=base.length,
            source=source,
        )
        if isinstance(model, FSDPModule):
            try_shards(model, partial(trial, is_stand_in=True))
        else:
            trial(model)

    shares_rows = base.objective.isolated or base.objective.sharing is not None
    if shares_rows and uses_flash_attention(model):
        length_trial = partial(try_lengths, are_documents=base.objective.isolated)
        if isinstance(model, FSDPModule):
            try_shards(model, length_trial)
        else:
            length_trial(model)

    reference = None
    if plan.needs_reference:
        reference = make_reference(plan, base, model)  # before the method adds to the model

    method = assemble_method(
        plan, machine, model, base.objective, loaded_names=loaded_names, tokenizer=base.tokenizer
    )
    if reference is not None:
        add_reference(method, reference)
    return method


def assemble_method(
    plan: Plan,
    machine: Machine,
    model: PreTrainedModel,
    objective: Objective,
    *,
    loaded_names: Collection[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ContinualMethod:
    """The method with a model, and what the trainer's options add to both; `loaded_names` are those of the
    parameters that the files of the base have. The tokenizer is None of a method without storage."""
    options = plan.trainer
    context = build_context(plan, model, objective, precision=machine.precision, tokenizer=tokenizer)
    method = plan.method.make(context)
    method.auxiliary_models.update(method.aux_models())
    method.names_left_to_base = find_names_left_to_base(method, loaded_names)
    if plan.carry != "none":
        method.optimizer_state = CarriedState()
    if plan.lr_scheduler.branches:
        left_to_base = {name.removeprefix("model.") for name in method.names_left_to_base}
        method.weights_before_decay = Snapshot(method.model, persistent=True, excluded=left_to_base)
    if plan.needs_base_weights:
        method.base_weights = keep_base_weights(method)
    if isinstance(model, FSDPModule):
        follow_sharding(method, method.model)

    # Memory and speed: weights that a method keeps, activations, compiled blocks.
    if options.offload_method_state:
        for part in method.modules():
            if isinstance(part, NamedTensors):
                part.offload()
    if options.gradient_checkpointing:
        checkpoint_activations(method.model)
    if machine.compiles_blocks:
        for _, block in find_blocks(method.model):  # blocks are alike, so that one is compiled for all
            block.compile(**COMPILE_OPTIONS)
    return method


def keep_base_weights(method: ContinualMethod) -> BaseWeights:
    """What a new method has of the base's weights and does not keep as it is, for the divergence from it."""
    constant_ids = {id(parameter) for parameter in method.constant_weights}
    names = set() if method.domain_params is None else set(method.domain_params.names)  # it stores the base's
    for name, parameter in method.model.named_parameters():
        if id(parameter) in constant_ids:
            names.add(name)
    return BaseWeights(method.model, constant_names=names)


def find_loaded_names(plan: Plan, base: Base, model: PreTrainedModel) -> set[str]:
    """The names of a base model's parameters that are as its files have them: not rows that are set for new
    tokens, nor the head of a checkpoint that may have none."""
    computed: list[Tensor] = []
    if base.resize or base.own_tokenizer is not None:
        computed.extend(find_vocabulary_tables(model))
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    pretraining = plan.model.pretraining
    if plan.model.name_or_path is not None and pretraining is not None and pretraining.head_steps == 0:
        names.difference_update(find_head_parameters(model))
    computed_ids = {id(tensor) for tensor in computed}
    return {name for name in names if id(model.get_parameter(name)) not in computed_ids}


def find_names_left_to_base(method: ContinualMethod, loaded_names: Collection[str]) -> frozenset[str]:
    """The names in a method's state of what the files of its base give, bit for bit, in every stage."""
    constant_ids = {id(parameter) for parameter in method.constant_weights}
    names = set()
    for name, parameter in method.named_parameters(remove_duplicate=False):
        is_loaded = restore_original_name(name).removeprefix("model.") in loaded_names
        if is_loaded and id(parameter) in constant_ids:
            names.add(name)
    return frozenset(names)


def build_context(
    plan: Plan,
    model: PreTrainedModel,
    objective: Objective,
    *,
    precision: Precision,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> MethodContext:
    """What every method gets in addition to its own options."""
    arguments = dict(plan.optim.arguments)
    if "fused" in arguments and precision in FP16_MIXED:
        arguments["fused"] = False  # it would scale gradients back itself, after they are clipped

    def joined_schedule(progress: Progress) -> float:
        """The schedule of a single domain over the steps of all domains."""
        return plan.lr_scheduler(progress.joined)

    return MethodContext(
        model=model,
        objective=objective,
        length=plan.model.max_seq_length,
        masks=[mask.make() for mask in plan.masks],
        replay=plan.replay,
        freeze=plan.freeze,
        optimizer=bind_blocks(partial(plan.optim.load(), **arguments), model),
        schedule=joined_schedule if plan.carry == "all" else plan.lr_scheduler,
        seed=plan.run.seed,
        router_weights=find_router_weights(plan.model.router_aux_loss, model.config),
        parameter_options=plan.parameter_options,
        rounding=StochasticRounding() if plan.rounding == "stochastic" else TO_NEAREST,
        token_weights=TokenWeights() if plan.loss is None else plan.loss.make(),
        tokenizer=tokenizer,
    )


def build_data(
    plan: Plan, machine: Machine, corpora: Corpora, base: Base, method: ContinualMethod
) -> DomainSequence:
    """The stages of a method over the domains of a plan.

    Raises ValueError for training text from which nothing would be learned."""
    source = plan.source
    domains = method.stages(plan.order)

    def pack(name: str, split: str) -> Packed:
        return corpora.packed(
            name, split, format=base.text_format, length=plan.model.max_seq_length, seq2seq=base.seq2seq
        )

    train: dict[str, Packed] = {}
    for domain in domains:
        for name in domain.texts:
            train[name] = pack(name, "train")
    held_out = {name: pack(name, source.score_on) for name in (*plan.order, GENERAL)}

    # Raw text is checked for control tokens and the like: each training text, then all texts together.
    for name, text in train.items():
        if source.form(name) == TEXT:
            check_training_text(name, text, base.text_format)
    raw_texts = {f"{name} train": text for name, text in train.items() if source.form(name) == TEXT}
    for name, text in held_out.items():
        if source.form(name) == TEXT:
            raw_texts[f"{name} {source.score_on}"] = text
    report_texts(raw_texts, base.text_format, is_causal=base.objective_name == "causal")

    general: dict[str, Packed] = {}
    if method.replay.general_ratio:
        general[GENERAL] = pack(GENERAL, "train")
    mixed: dict[str, MixedText] = {}
    for name, part in corpora.mixed.items():
        text = corpora.packed_source(
            name, format=base.text_format, length=plan.model.max_seq_length, seq2seq=base.seq2seq
        )
        if not part.options.has_chats:
            check_training_text(name, text, base.text_format)
        mixed[name] = MixedText(part.options, text)
    mixed_texts = {f"replay.sources.{name}": part.text for name, part in mixed.items()}
    check_training_texts(train | general | mixed_texts, base)
    if source.balanced is not False and train:
        train = balance_texts(train, tokens=None if source.balanced is True else source.balanced)

    validation: dict[str, Packed] = {}
    if plan.has_monitor:
        validation = {name: pack(name, "valid") for name in (*plan.order, GENERAL)}
    return DomainSequence(
        domains,
        train=train | general,
        held_out=held_out,
        objective=base.objective,
        budget=plan.budget,
        replay=method.replay,
        seed=plan.run.seed,
        accumulate=plan.trainer.accumulate_grad_batches,
        eval_batch_size=plan.trainer.eval_batch_size,
        importance_samples=plan.trainer.importance_samples,
        workers=machine.num_workers,
        eval_tokens=plan.settings["eval"]["max_tokens"],
        validation=validation,
        mixed=mixed,
    )


def check_row_repeats(data: DomainSequence) -> None:
    """Raises ValueError for a batch that has each row of a stage more than MAX_REPEATS times."""
    batch_size = data.budget.batch_size
    for domain in data:
        num_rows = data.count_rows(domain)
        limit = MAX_REPEATS * num_rows
        if batch_size > limit:
            raise InvalidOptionError(
                "trainer.batch_size",
                batch_size,
                context=f"for {domain.name}",
                reason=f"a step would read each of its {count_noun(num_rows, 'row')} "
                f"{batch_size // num_rows:,} times",
                allowed=f"{limit} or less; at {num_rows} a step reads each row once",
            )


def check_training_texts(texts: Mapping[str, Packed], base: Base) -> None:
    """Raises ValueError for training text from which nothing would be learned, as documents of one token in
    sequences of their own."""
    objective = base.objective.scoring
    for name, text in texts.items():
        if len(text) == 0 or not objective.scored(text.sizes()).any():
            raise ValueError(
                f"the training text of {name} has no token that is scored. "
                f"Allowed: longer text that the tokenizer {base.tokenizer.name_or_path} knows"
            )
