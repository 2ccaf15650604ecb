"""Check the model with its options, the data and the method before any text is read.

The model and the method are built once without storage, on torch's meta device: units that the model lacks,
targets that match nothing and too few positions are reported at once."""

import datetime
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from cpt.adapters.options import SavedModulesOptions
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.processes import is_first_process
from cpt.data.chats import TEMPLATE_DATE, ChatEncoder
from cpt.data.separator import choose_separator
from cpt.data.sources.base import AUTO, NONE
from cpt.data.sources.examples import ASSISTANT, USER, Example, Turn
from cpt.data.text_format import TextFormat, make_text_format
from cpt.data.tokenized_tasks import Encoder
from cpt.evaluation.chat_encoding import choose_chat_length, encode_held_out_chats
from cpt.evaluation.options import ChatOptions
from cpt.methods.base import ContinualMethod
from cpt.models import loading
from cpt.models.block_attention import MASKABLE, check_isolation
from cpt.models.fsdp import list_sharded_blocks
from cpt.models.objectives import Causal, CausalAnswers, Masked, Objective, Span
from cpt.models.options import BYTES
from cpt.models.parameter_groups import check_patterns, find_multipliers
from cpt.models.quantization import OF_BITSANDBYTES, describe_stored, drop_quantization
from cpt.models.rope import count_scaled_positions, scale_rope
from cpt.models.router_loss import check_router_loss
from cpt.models.trial import make_stand_in, try_model
from cpt.models.units import UnknownLayersError, find_block_matrices
from cpt.models.vocabulary import check_head
from cpt.models.weights import find_frozen
from cpt.optim.muon import MuonWithAdamW
from cpt.trainer.base_dtype import check_base_dtype
from cpt.trainer.build import build_context
from cpt.trainer.check_checkpoint import check_stored_weights, read_checkpoint, read_tokenizer
from cpt.trainer.check_optimizer import check_optimizer
from cpt.trainer.check_quantization import check_quantization
from cpt.trainer.lightning import naming_cause
from cpt.trainer.plan import Plan
from cpt.trainer.reference_model import check_reference, check_reference_weights
from cpt.trainer.skeleton import build_skeleton, on_meta_device

log = logging.getLogger(__name__)
# Corrupted spans need a byte-level tokenizer with sentinels.
MIN_SPAN_VOCAB_SIZE = BYTES + loading.SENTINELS
# What a chat template is tried on.
SHORT_CHAT = Example(
    id="a question and its answer",
    source="",
    target="its answer",
    task="chat",
    turns=(Turn(role=USER, content="a question"), Turn(role=ASSISTANT, content="its answer")),
)


def check_model(plan: Plan) -> PretrainedConfig:
    """The model's transformers config.

    Raises ValueError for a model that cannot be built or loaded, or that does not go with its options, the
    data or the method."""
    options = plan.model
    stored_config, tokenizer = read_model_config(plan)
    objective = loading.resolve_objective(options.objective, stored_config)
    check_objective(plan, objective)
    check_chat_templates(plan, tokenizer)
    if plan.reference_folder is not None:
        check_reference(plan.reference_folder, tokenizer, objective)
        check_reference_weights(plan.reference_folder, objective)
    if plan.chats is not None and plan.chats.path is not None:
        check_held_out_chats(plan, plan.chats, objective, tokenizer, stored_config)
    if tokenizer is not None:
        check_tokenizer(plan, objective, tokenizer, stored_config)
    else:
        check_untrained_format(plan, objective)

    config = change_config(plan, stored_config)
    model_key = "model.config"
    has_other_head = False
    if options.name_or_path is not None:
        model_key = f"model.name_or_path={options.name_or_path}"
        head_steps = None if options.pretraining is None else options.pretraining.head_steps
        has_other_head = check_stored_weights(
            options.name_or_path, stored_config, objective, head_steps=head_steps
        )
        check_stored_quantization(plan, stored_config)
    config = drop_quantization(config)
    changed_key = model_key
    if options.num_hidden_layers is not None:  # of which none may be built though one of all blocks is
        changed_key = f"model.num_hidden_layers={options.num_hidden_layers}"
    model = build_skeleton(config, objective, source=changed_key)
    if has_other_head:  # as the loaded model has one
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight))
    check_attention(plan, model)
    check_router_loss(model, options.router_aux_loss)
    check_saving(model, options.name_or_path)

    # The objective of the run may need a tokenizer that is not trained yet.
    sentinels = [] if tokenizer is None else loading.find_sentinel_ids(tokenizer)
    stand_in = make_stand_in_objective(
        plan, model, objective, num_sentinels=len(sentinels) or loading.SENTINELS
    )
    loading.check_length(options.max_seq_length, model, stand_in)
    run_stand_in(plan, model, stand_in, objective, source=model_key)

    find_frozen(model, plan.freeze)  # raises for names that match nothing
    if plan.trainer.strategy == "fsdp":
        list_sharded_blocks(model)  # raises for a model without blocks
    # New tokens get rows in the embedding and in the head; some heads cannot have them.
    adds_sentinels = objective == "span" and tokenizer is not None and not sentinels
    if options.tokenizer is not None:
        check_head(model, extended_by=options.tokenizer)
    elif options.resize or adds_sentinels:
        check_head(model)

    method = try_method(plan, model, stand_in)
    if method is not None:
        check_base_dtype(plan, method)
        check_masks(plan, method)
        check_micro_batch(plan, method)
        check_trainable(plan, method)
        check_saved_modules(plan, method)
        if options.quantization != "none" or describe_stored(stored_config) in OF_BITSANDBYTES:
            check_saved_in_full(plan, method)
        check_parameter_options(plan, method)
        check_blocks_of_muon(plan, method)
    return config


def check_stored_quantization(plan: Plan, config: PretrainedConfig) -> None:
    """Raises ValueError for what does not go with a checkpoint whose weights are stored in few bits."""
    options = plan.model
    stored = describe_stored(config)
    if not stored:
        return
    if options.quantization != "none":
        raise InvalidOptionError(
            "model.quantization",
            options.quantization,
            reason=f"the weights of {options.name_or_path} are stored in {stored}",
            allowed="none, or a checkpoint in 16 or 32 bits",
        )
    if stored not in OF_BITSANDBYTES:  # it is dequantized
        return

    check_quantization(
        plan,
        method_name=plan.names["method"],
        key="model.name_or_path",
        value=f"{options.name_or_path} ({stored})",
    )
    # A checkpoint with fewer blocks, another head or an adapter merged is written before the run, in full.
    reason = f"the weights of {options.name_or_path} are stored in {stored}"
    if options.num_hidden_layers is not None:
        raise InvalidOptionError(
            "model.num_hidden_layers", options.num_hidden_layers, reason=reason, allowed="null"
        )
    head_steps = 0 if options.pretraining is None else options.pretraining.head_steps
    if head_steps:
        raise InvalidOptionError("model.pretraining.head_steps", head_steps, reason=reason, allowed="null, 0")
    if loading.find_adapter(str(options.name_or_path)) is not None:
        raise InvalidOptionError(
            "model.name_or_path",
            options.name_or_path,
            reason=f"it has an adapter, and weights in {stored}, into which it cannot be merged",
            allowed="the adapter merged into weights in 16 or 32 bits",
        )


def change_config(plan: Plan, stored_config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a checkpoint with the blocks and the RoPE parameters of the run. Raises ValueError
    for those that it cannot have."""
    config = stored_config
    if plan.model.num_hidden_layers is not None:
        config = loading.truncate_config(deepcopy(stored_config), plan.model.num_hidden_layers)
    rope = plan.model.rope_parameters
    if rope is None:
        return config
    scaled = scale_rope(config, rope)
    if is_first_process():
        log_rope(config, scaled)
    return scaled


def log_rope(config: PretrainedConfig, scaled: PretrainedConfig) -> None:
    """Logs which RoPE parameters of a checkpoint a run changes."""
    stored = config.get_text_config()
    changed = scaled.get_text_config()
    if stored.rope_parameters == changed.rope_parameters:
        log.info("No effect of model.rope_parameters: config.json has the same")
        return
    log.info(
        "Changing RoPE of the %s, also in the exported model: %s, for %s instead of %s positions",
        config.model_type,
        format_value(changed.rope_parameters),
        count_scaled_positions(changed),
        count_scaled_positions(stored),
    )


def read_model_config(plan: Plan) -> tuple[PretrainedConfig, PreTrainedTokenizerBase | None]:
    """The config of the checkpoint and the tokenizer of the run: the checkpoint's own, or that of
    model.tokenizer. For a new model the tokenizer is None: it is trained on the texts later."""
    options = plan.model
    if options.name_or_path is not None:
        config, tokenizer = read_checkpoint(options.name_or_path, resize=options.resize)
        if options.tokenizer is not None:
            tokenizer = read_tokenizer(options.tokenizer, tokenizer, config, checkpoint=options.name_or_path)
        return config, tokenizer

    assert options.pretraining is not None and options.config is not None
    check_optimizer("model.pretraining.optim", options.pretraining.optim)
    with naming_cause("model.config"):
        config = loading.AutoConfig.for_model(**options.config)
    return config, None


def check_objective(plan: Plan, objective: str) -> None:
    """Raises ValueError for a kind of model that does not go with its options or with the data."""
    options = plan.model
    model_choice = f"model={options.name}"
    has_answers = plan.source.encoding is not None

    # The section `model` is one of a new base, by default an encoder, though another run has the model.
    earlier_run = plan.settings["init_from"]
    as_earlier = ""
    if earlier_run:
        as_earlier = f", or model=hf model.name_or_path={Path(earlier_run) / 'model'}"
    if objective == "causal" and options.mlm_probability is not None:
        raise InvalidOptionError(
            "model.mlm_probability",
            options.mlm_probability,
            reason="the model is causal",
            allowed=f"null{as_earlier}",
        )
    if objective != "span" and options.mean_span is not None:
        raise InvalidOptionError(
            "model.mean_span",
            options.mean_span,
            reason="no encoder-decoder corrupts spans",
            allowed=f"null{as_earlier}",
        )
    is_new = options.name_or_path is None
    if objective == "span" and is_new and (options.vocab_size or 0) < MIN_SPAN_VOCAB_SIZE:
        raise InvalidOptionError(
            "model.vocab_size",
            options.vocab_size,
            allowed=f"{MIN_SPAN_VOCAB_SIZE} or more, {loading.SENTINELS} of them sentinels",
        )

    loading.check_packing(objective, is_isolated=plan.source.isolated, has_answers=has_answers)
    if plan.source.chats and objective in loading.SEQ2SEQ:
        raise chats_error(plan, "is an encoder-decoder")
    if objective == "masked" and plan.benchmark is not None:
        raise InvalidOptionError(
            "benchmark",
            "lm_eval",
            reason=f"{model_choice} fills masks and continues no text",
            allowed="benchmark=none, or a causal model like model=tiny_gpt2",
        )
    plan.mixture.check_objective(objective, model=model_choice, examples=has_answers)
    if plan.method.load().needs_examples and plan.source.encoding is None:
        raise InvalidOptionError(
            "method",
            plan.names["method"],
            reason="it needs questions with answers",
            allowed="domains=tasks, domains=instructions, or another method",
        )
    if plan.method.load().needs_examples and objective != "causal":
        raise InvalidOptionError(
            "method",
            plan.names["method"],
            reason=f"{model_choice} is an encoder-decoder",
            allowed="a causal model like model=tiny_gpt2, or another method",
        )
    for name, source in plan.mixture.mixed_sources.items():
        if source.has_chats and objective != "causal":
            raise chat_source_error(plan, name, "is no causal model")


def name_model(plan: Plan) -> str:
    """The checkpoint of a plan; a new model by its config, as the subject of a sentence."""
    return plan.model.name_or_path or f"model={plan.model.name}"


def check_chat_templates(plan: Plan, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises ValueError for chats without a chat template, or with one that fails. A computed plan reads no
    tokenizer, and its chats are rows of any tokens: it is not checked."""
    if plan.source.chats:
        if tokenizer is None or not tokenizer.chat_template:
            raise chats_error(plan, "has no chat template")
        encoding = plan.source.encoding
        date = None if encoding is None else encoding.date
        ChatEncoder(tokenizer, date or datetime.date.today().isoformat()).answers(SHORT_CHAT)

    for name, source in plan.mixture.mixed_sources.items():
        if not source.has_chats:
            continue
        if tokenizer is None or not tokenizer.chat_template:
            raise chat_source_error(plan, name, "has no chat template")
        if not tokenizer.is_fast:
            raise chat_source_error(plan, name, "has no fast tokenizer, by which chats are cut")
        ChatEncoder(tokenizer, TEMPLATE_DATE).answers(SHORT_CHAT)


def chats_error(plan: Plan, problem: str) -> InvalidOptionError:
    """The error of a model that does not take domains of chats."""
    return InvalidOptionError(
        "model",
        f"model={plan.model.name}",
        context="for chats",
        reason=f"{name_model(plan)} {problem}",
        allowed="an instruction-tuned checkpoint, or examples with a question and an answer",
    )


def chat_source_error(plan: Plan, name: str, problem: str) -> InvalidOptionError:
    """The error of a model that does not take the chats of a source of replay."""
    return InvalidOptionError(
        f"replay.sources.{name}.format",
        "messages",
        context=f"with model={plan.model.name}",
        reason=f"{name_model(plan)} {problem}",
        allowed="an instruction-tuned checkpoint, or format=text",
    )


def check_held_out_chats(
    plan: Plan,
    options: ChatOptions,
    objective: str,
    tokenizer: PreTrainedTokenizerBase | None,
    config: PretrainedConfig,
) -> None:
    """Raises ValueError for a model that answers no chats, and for a chat that it does not take."""
    problem = ""
    if objective != "causal":
        problem = "is no causal model"
    elif tokenizer is None or not tokenizer.chat_template:
        problem = "has no chat template"
    if tokenizer is None or problem:
        raise InvalidOptionError(
            "chats.path",
            options.path,
            context=f"with model={plan.model.name}",
            reason=f"{name_model(plan)} {problem}",
            allowed="an instruction-tuned checkpoint, or chats=none",
        )
    length = choose_chat_length(config, trained_length=plan.model.max_seq_length)
    encode_held_out_chats(options, tokenizer, length=length)


def check_tokenizer(
    plan: Plan, objective: str, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig
) -> None:
    """Raises ValueError for a tokenizer that lacks what the objective or the data need: what needs it is
    made, and thrown away."""
    encoding = plan.source.encoding
    has_chat_sources = any(source.has_chats for source in plan.mixture.mixed_sources.values())
    loading.make_objective(
        plan.model,
        tokenizer,
        config,
        has_answers=encoding is not None,
        is_isolated=plan.source.isolated,
        mixes_chats=encoding is None and has_chat_sources,
    )
    check_text_format(plan, tokenizer, config, objective)
    if encoding is not None:
        Encoder(tokenizer, plan.model.max_seq_length, encoding, objective in loading.SEQ2SEQ)


def check_text_format(
    plan: Plan, tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, objective: str
) -> None:
    """Raises ValueError for options of raw text that a checkpoint's tokenizer does not allow; logs what
    `auto` became."""
    options = plan.source.text_options
    model_ends = loading.find_end_ids(str(plan.model.name_or_path), config)
    text_format = make_text_format(tokenizer, options, is_causal=objective == "causal", model_ends=model_ends)
    if not is_first_process():
        return

    separator = choose_separator(tokenizer, options.separator, model_ends=model_ends)
    if separator.is_doubtful:
        log.warning(
            "Separator of documents: %s. Set domains.separator=TOKEN if pre-training had another",
            separator.description,
        )
    else:
        log.info(
            "Separator of documents (domains.separator=%s): %s", options.separator, separator.description
        )
    log_row_start(text_format, bos_in_rows=options.bos_in_rows)
    if objective == "causal":
        warn_of_other_ends(tokenizer, model_ends, checkpoint=str(plan.model.name_or_path))


def warn_of_other_ends(
    tokenizer: PreTrainedTokenizerBase, model_ends: Sequence[int], *, checkpoint: str
) -> None:
    """Logs where a checkpoint's config.json and generation_config.json stop at other tokens than its
    tokenizer ends texts with: the exported model, which has these files, would write on."""
    own_end = tokenizer.eos_token_id
    known_ids = set(tokenizer.get_vocab().values())
    unknown_ends = [token_id for token_id in model_ends if token_id not in known_ids]
    is_own_end_missing = bool(model_ends) and own_end is not None and own_end not in model_ends
    if not unknown_ends and not is_own_end_missing:
        return

    fault = f"has no token {', '.join(map(str, unknown_ends))}"
    if is_own_end_missing:
        fault = f"ends texts with {tokenizer.eos_token} ({own_end})"
    log.warning(
        "The files of %s stop at eos_token_id=%s, but its tokenizer %s: what the exported model generates "
        "may not end; correct eos_token_id in config.json and generation_config.json",
        checkpoint,
        format_value(list(model_ends)),
        fault,
    )


def log_row_start(text_format: TextFormat, *, bos_in_rows: bool | str) -> None:
    if text_format.row_start is not None:
        token = text_format.name_of(text_format.row_start)
        log.info("All rows of raw text begin with %s (domains.bos_in_rows=%s)", token, bos_in_rows)


def check_untrained_format(plan: Plan, objective: str) -> None:
    """Raises ValueError for options of raw text that the tokenizer which the run will train cannot have."""
    options = plan.source.text_options
    special_tokens = list(loading.SPECIAL_TOKENS.values())
    if options.separator not in (AUTO, NONE, *special_tokens):
        raise InvalidOptionError(
            "domains.separator",
            options.separator,
            reason="the run trains its tokenizer",
            allowed=f"auto, none, {', '.join(special_tokens)}",
        )
    if options.bos_in_rows is True and objective != "causal":
        raise InvalidOptionError(
            "domains.bos_in_rows", True, reason="the model is not causal", allowed="auto, false"
        )


def check_attention(plan: Plan, model: PreTrainedModel) -> None:
    """Raises ValueError for an attention implementation that the model lacks."""
    attention = plan.trainer.attn_implementation
    if attention != "auto":
        with naming_cause(f"trainer.attn_implementation={attention}"):
            model.set_attn_implementation(attention)


def check_saving(model: PreTrainedModel, name_or_path: str | None) -> None:
    """Raises ValueError for configurations that transformers loads and would not write at the export."""
    model_key = "model.config" if name_or_path is None else f"model.name_or_path={name_or_path}"
    with TemporaryDirectory() as folder:
        with naming_option(model_key, CONFIG_NAME, model.config.to_dict()):
            model.config.save_pretrained(folder)
        if name_or_path is None or not model.can_generate():
            return
        # A checkpoint may have none, which is an OSError.
        generation_options = vars(GenerationConfig())
        with naming_option(model_key, GENERATION_CONFIG_NAME, generation_options), suppress(OSError):
            GenerationConfig.from_pretrained(name_or_path).save_pretrained(folder)


@contextmanager
def naming_option(model_key: str, file_name: str, option_names: Iterable[str]) -> Iterator[None]:
    """Around a trial save of a configuration: turns an exception of transformers into a one-line ValueError
    on the option of `file_name` that its message names; if it names several, the one with the longest
    name."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        names_in_message = [name for name in option_names if re.search(rf"\b{re.escape(name)}\b", message)]
        option = max(names_in_message, key=len, default="an option")
        raise ValueError(
            f"{model_key} is invalid: {file_name} has {option}, with which transformers does not save the "
            f"model again ({message.rstrip('.')}). Allowed: {file_name} without it"
        ) from error


def make_stand_in_objective(
    plan: Plan, model: PreTrainedModel, objective: str, *, num_sentinels: int
) -> Objective:
    """An objective like that of the run, without a tokenizer. Raises ValueError for a model that cannot
    separate documents that share rows, if they do."""
    stand_in = make_placeholder_objective(plan, model.config, objective, num_sentinels=num_sentinels)
    if not plan.source.isolated:
        return stand_in
    check_isolation(model, causal=objective == "causal")
    if plan.source.encoding is not None:
        return CausalAnswers(stand_in, pad=0, sharing=loading.make_sharing(model.config))
    stand_in.isolated = True
    return stand_in


def make_placeholder_objective(
    plan: Plan, config: PretrainedConfig, objective: str, *, num_sentinels: int
) -> Objective:
    """An objective of raw text like that of the run, without a tokenizer, which may not be trained yet."""
    options = plan.model
    if objective == "span":
        return Span(
            rate=options.mask_rate,
            mean=options.span_length,
            sentinels=range(num_sentinels),
            end=0,
            pad=0,
            start=0,
        )
    if objective == "masked":
        return Masked(PlaceholderTokenizer(config.get_text_config().vocab_size), rate=options.mask_rate)
    return Causal()


class PlaceholderTokenizer:
    """What a masked objective needs of a tokenizer."""

    mask_token_id = 0
    all_special_ids = (0,)

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size


def run_stand_in(
    plan: Plan, skeleton: PreTrainedModel, objective: Objective, objective_name: str, *, source: str
) -> None:
    """Raises ValueError for a model that does not run with its objective, or attends to the wrong side: tried
    with random weights of little memory, before the weights of a checkpoint are loaded."""
    attention = plan.trainer.attn_implementation
    with torch.random.fork_rng(devices=[]):
        try:
            stand_in = make_stand_in(skeleton)
        except Exception as error:  # of a class that initializes weights in its own way; its base is tried
            log.debug("Skipping the stand-in of %s: %s", source, error)
            return
        if attention in MASKABLE:  # others run on GPUs only
            stand_in.set_attn_implementation(attention)
        try_model(
            stand_in,
            objective,
            objective_name,
            length=plan.model.max_seq_length,
            source=source,
            is_stand_in=True,
        )


def try_method(plan: Plan, model: PreTrainedModel, objective: Objective) -> ContinualMethod | None:
    """The method on the meta device; None if it needs an operation that this device lacks. Raises ValueError
    for options that do not fit the model or the order of domains."""
    context = build_context(plan, model, objective, precision=plan.trainer.precision)
    with on_meta_device():
        try:
            with naming_method(plan, model.config):
                method = plan.method.make(context)
                method.stages(plan.order)
        except ValueError:
            raise
        except Exception as error:  # the method may still work on a real device
            log.debug("Skipping the skeleton of method %s: %s", plan.names["method"], error)
            return None
    return method


@contextmanager
def naming_method(plan: Plan, config: PretrainedConfig) -> Iterator[None]:
    """Turns the error of a model whose layers a method does not know into one that names the method."""
    try:
        yield
    except UnknownLayersError as error:
        circumstances = f"for a {config.model_type}"
        if plan.names["mask"] != "none":
            circumstances = f"with mask={plan.names['mask']} {circumstances}"
        raise InvalidOptionError(
            "method",
            plan.names["method"],
            context=circumstances,
            reason=str(error),
            allowed="what docs/support.md lists for this model",
        ) from error


def check_masks(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for a mask that works inside the backward pass of layers, if blocks are compiled."""
    if plan.trainer.compile is True and any(mask.limits_rows for mask in method.masks):
        raise InvalidOptionError(
            "trainer.compile", True, context="with backend=backward", allowed="backend=hooks"
        )


def check_micro_batch(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError where the device would decide the result: `micro_batch=auto` of a method or of token
    weights that compute something else in several micro-batches than in one."""
    if plan.trainer.micro_batch != AUTO:
        return
    for difference in (method.describe_accumulation(), method.token_weights.describe_accumulation()):
        if difference:
            raise InvalidOptionError(
                "trainer.micro_batch",
                AUTO,
                reason=f"its result would depend on the memory of the device ({difference})",
                allowed="a number, or null",
            )


def check_trainable(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError if the options freeze every parameter that the method would train."""
    freeze = plan.freeze
    trainable = freeze.trainable
    if trainable is None and not freeze.layers and not freeze.embeddings:
        return
    frozen_ids = {id(parameter) for parameter in method.frozen}
    if not all(id(parameter) in frozen_ids for parameter in method.model.parameters()):
        return

    problem = f"it leaves nothing of what method={plan.names['method']} trains"
    if trainable is not None:
        raise InvalidOptionError(
            "trainable",
            trainable,
            reason=problem,
            allowed="null, or an entry that finds some of the parameters which the method trains",
        )
    if freeze.layers:
        raise InvalidOptionError("freeze.layers", freeze.layers, reason=problem, allowed="fewer blocks")
    # An adapter may be on the embedding alone.
    raise InvalidOptionError("freeze.embeddings", True, reason=problem, allowed="false")


def check_saved_modules(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for a module that is to be trained fully and that the options freeze."""
    frozen_ids = {id(parameter) for parameter in find_frozen(method.model, plan.freeze)}
    for name in method.saved_names:
        if id(method.model.get_parameter(name)) in frozen_ids:
            options = plan.method.options
            assert isinstance(options, SavedModulesOptions)
            raise InvalidOptionError(
                "method.modules_to_save",
                options.modules_to_save,
                reason=f"{name} is frozen by freeze.embeddings, freeze.layers or trainable",
                allowed="modules that these leave, or freeze.embeddings=false freeze.layers=0 trainable=null",
            )


def check_saved_in_full(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for a module that is to be trained fully and that will be quantized; the method is
    that of a skeleton, which is in full."""
    head = method.model.get_output_embeddings()
    for name in method.saved_names:
        module = method.model.get_submodule(name.rpartition(".")[0])
        is_quantized = isinstance(module, nn.Linear | Conv1D) and module is not head
        if is_quantized:
            options = plan.method.options
            assert isinstance(options, SavedModulesOptions)
            raise InvalidOptionError(
                "method.modules_to_save",
                options.modules_to_save,
                reason=f"{name} is quantized, and cannot be trained",
                allowed="embeddings, head, and modules without linear layers",
            )


def check_blocks_of_muon(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for optim=muon with a model whose blocks are not known."""
    if plan.optim.load() is not MuonWithAdamW:
        return
    try:
        find_block_matrices(method.model)
    except ValueError as error:
        raise InvalidOptionError("optim", "muon", reason=str(error), allowed="adamw, sgd") from error


def check_parameter_options(plan: Plan, method: ContinualMethod) -> None:
    """Raises ValueError for a pattern of optim.lr_multipliers or no_decay that finds nothing trained in any
    stage, and for two patterns that find one parameter."""
    options = plan.parameter_options
    method_name = plan.names["method"]
    stages = method.stages(plan.order)
    patterns = {
        "optim.lr_multipliers": [*(options.lr_multipliers or {})],
        "optim.no_decay": [*options.no_decay],
    }
    if not any(patterns.values()) or not stages:  # method=none trains nothing
        return

    trained: dict[nn.Parameter, None] = {}
    with on_meta_device():
        for stage in stages:
            try:
                method.setup_stage(stage)
            except Exception as error:  # of an operation that the meta device lacks
                log.debug("Skipping the growth before %s on the meta device: %s", stage.name, error)
            of_stage = [parameter for parameter in method.parameters() if parameter.requires_grad]
            trained.update(dict.fromkeys(of_stage))
            find_multipliers(method.model, options, of_stage)
    for key, of_option in patterns.items():
        check_patterns(method.model, of_option, list(trained), key=key, method=method_name)
