"""Hugging Face models and tokenizers: of a checkpoint, or new from a configuration and from text. Code that a
checkpoint brings is never run."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import modeling_auto
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME
from transformers.utils.peft_utils import find_adapter_config_file

from cpt.core.distributed import gather_objects, is_sharded, to_local
from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError
from cpt.core.hub_access import check_model_access
from cpt.core.messages import abbreviate, count_noun
from cpt.core.processes import is_first_process
from cpt.data.collate import Sharing
from cpt.data.packing import find_padding_id
from cpt.models.forward import find_padded_positions
from cpt.models.fsdp import Sharding
from cpt.models.narrow_layers import make_narrow
from cpt.models.objectives import (
    Causal,
    CausalAnswers,
    CausalMixture,
    Masked,
    Objective,
    Seq2SeqAnswers,
    Span,
)
from cpt.models.options import ModelOptions
from cpt.models.quantization import OF_BITSANDBYTES, describe_stored, make_loading_config, replace_layers
from cpt.models.rope import count_scaled_positions, scale_rope
from cpt.models.sharded_loading import NO_NEW_ROWS, UnshardableFilesError, VocabularyRows, make_sharded_class
from cpt.models.stored_weights import find_non_finite, find_weight_files
from cpt.models.tokenizer_faults import describe_fault

# Retries without network were logged twice: by this handler, and by that of the run.
logging.getLogger("huggingface_hub").handlers.clear()
log = logging.getLogger(__name__)
AUTO_MODELS = {"masked": AutoModelForMaskedLM, "causal": AutoModelForCausalLM, "span": AutoModelForSeq2SeqLM}
SEQ2SEQ = ("span",)  # objectives of encoder-decoder models
# Outputs as methods read them, whatever a checkpoint's config.json asks for.
PLAIN_OUTPUTS = {"return_dict": True, "output_hidden_states": False}
# Keys of config.json for kernels of another machine: here trainer.attn_implementation decides.
KERNELS = ("attn_implementation", "experts_implementation")
AUTO_MAP = "auto_map"  # the key of config.json that names Python code of a checkpoint's authors
SENTINELS = 100  # added to a tokenizer that has none
SPECIAL_TOKENS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
# Fields of configurations that have an entry for each block.
BLOCK_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
# Those that only some classes have as lists, like the sizes of networks in Gemma 3n.
FURTHER_BLOCK_LISTS = ("intermediate_size", "activation_sparsity_pattern", "num_attention_heads_per_layer")
CHECKED_NUMBERS = 2**20  # of a weight that is checked, at a time


def find_objectives(config: PretrainedConfig) -> list[str]:
    """The objectives that transformers has a model for, `masked`, `causal` or `span`: those of the class that
    the checkpoint was saved as, else those of its architecture."""
    saved_class = (config.architectures or [""])[0]
    model_type = config.model_type
    is_causal_class = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) == saved_class
    if config.is_encoder_decoder and not is_causal_class:
        mappings = {"span": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING}
    else:
        mappings = {
            "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
            "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        }
        # Some classes, like FlaubertWithLMHeadModel, are in both mappings; others decide.
        is_masked_class = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type) == saved_class
        if is_causal_class and not is_masked_class:
            del mappings["masked"]
        if is_masked_class and not is_causal_class:
            del mappings["causal"]
    return [name for name, mapping in mappings.items() if type(config) in mapping]


def resolve_objective(requested: str, config: PretrainedConfig) -> str:
    """`masked`, `causal` or `span`; for `auto`, what the checkpoint was saved as, else what its architecture
    is for. Raises ValueError for an objective that the configuration has no model for."""
    if requested not in (*AUTO_MODELS, "auto"):
        raise InvalidOptionError("model.objective", requested, allowed=f"{', '.join(AUTO_MODELS)}, auto")
    possible = find_objectives(config)
    if not possible or (requested != "auto" and requested not in possible):
        saved_class = (config.architectures or ["model"])[0]
        text_decoder = "" if possible else find_text_decoder(config)
        reason = ""
        allowed = ", ".join(possible) or "models with a language-model head"
        if text_decoder:
            reason = f"it reads more than text, around a text decoder ({text_decoder})"
            allowed = "this decoder alone, as docs/examples/text_decoder.py saves it"
        raise InvalidOptionError(
            "model.objective",
            requested,
            context=f"for a {config.model_type} {saved_class}",
            reason=reason,
            allowed=allowed,
        )
    return possible[0] if requested == "auto" else requested


def find_text_decoder(config: PretrainedConfig) -> str:
    """The type of the causal model that a model of images or sounds has for its text, like `llama` of LLaVA;
    empty where it has none, or none that transformers has a class for."""
    text_config = config.get_text_config(decoder=True)
    is_part = text_config is not config and not config.is_encoder_decoder
    if is_part and type(text_config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return str(text_config.model_type)
    return ""


def check_packing(name: str, *, is_isolated: bool, has_answers: bool) -> None:
    """Raises ValueError for an objective that does not go with answers to examples (`has_answers`) or with
    documents that share rows and do not see each other (`is_isolated`)."""
    if name == "masked" and has_answers:
        raise InvalidOptionError(
            "model.objective",
            "masked",
            reason="a masked model writes no answers to examples",
            allowed="a causal model, like model=tiny_gpt2, or an encoder-decoder",
        )
    if name in SEQ2SEQ and is_isolated:
        packings = "none, or a causal model, like model=tiny_gpt2" if has_answers else "concat, none"
        raise InvalidOptionError(
            "domains.packing",
            "document_mask",
            context="for an encoder-decoder",
            allowed=f"domains.packing={packings}",
        )


def make_objective(
    options: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    *,
    has_answers: bool,
    is_isolated: bool,
    mixes_chats: bool = False,
) -> Objective:
    """The objective of raw text, or with `has_answers` that of answers to examples. With `is_isolated`
    documents or samples share rows and do not see each other. With `mixes_chats` raw text is trained on
    together with chats. Raises ValueError for an objective that the model or its tokenizer does not fit."""
    objective = choose_objective(
        options, tokenizer, config, has_answers=has_answers, is_isolated=is_isolated, mixes_chats=mixes_chats
    )
    objective.max_logits = options.max_logits
    return objective


def choose_objective(
    options: ModelOptions,
    tokenizer: PreTrainedTokenizerBase,
    config: Any,
    *,
    has_answers: bool,
    is_isolated: bool,
    mixes_chats: bool,
) -> Objective:
    """What `make_objective` makes, before its limit of logits: an objective of answers to questions with
    `has_answers`, else of raw text, which a decoder may mix with chats."""
    name = resolve_objective(options.objective, config)
    check_packing(name, is_isolated=is_isolated, has_answers=has_answers)
    padding = find_padding_id(tokenizer)

    if name == "span":
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            start = padding
        # The decoder of a new model starts with padding, as those of T5.
        span = make_span(options, tokenizer, start=start if options.name_or_path else padding)
        return Seq2SeqAnswers(span, pad=padding, start=start) if has_answers else span

    raw = Masked(tokenizer, rate=options.mask_rate) if name == "masked" else Causal()
    if has_answers:
        return CausalAnswers(raw, pad=padding, sharing=make_sharing(config) if is_isolated else None)
    raw.isolated = is_isolated
    if mixes_chats:
        assert isinstance(raw, Causal)  # as cpt.trainer.check_model has seen to
        return CausalMixture(raw, pad=padding)
    return raw


def make_span(options: ModelOptions, tokenizer: PreTrainedTokenizerBase, *, start: int) -> Span:
    """Span corruption with the sentinels of a tokenizer; `start` is the decoder's first input. Raises
    ValueError for a tokenizer without padding or end."""
    if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no padding or end. Allowed: both")
    return Span(
        rate=options.mask_rate,
        mean=options.span_length,
        sentinels=find_sentinel_ids(tokenizer),
        end=tokenizer.eos_token_id,
        pad=find_padding_id(tokenizer),
        start=start,
    )


def make_sharing(config: PretrainedConfig) -> Sharing:
    """How samples share rows for a model of D features: attention to T tokens takes 4 T D operations at a
    position, its linear layers 24 D^2 (Kaplan et al., arXiv 2001.08361, table 1)."""
    text_config = config.get_text_config()
    return Sharing(6 * text_config.hidden_size, getattr(text_config, "max_position_embeddings", None))


def load_config(checkpoint: str) -> PretrainedConfig:
    """A checkpoint's configuration, with outputs as methods read them, without kernels of another machine and
    without the code of its authors, of which an exported model has none.

    Raises ValueError if there is no such checkpoint, for values that transformers refuses, for a model
    without a vocabulary, and for an adapter of peft, which transformers would load frozen into the model."""
    folder = Path(checkpoint)
    if (folder / ADAPTER_CONFIG_NAME).is_file():
        raise unmerged_error(checkpoint)
    check_has_config(folder)
    try:
        check_model_access(checkpoint)
        config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
        adapter_file = find_adapter_config_file(checkpoint)  # of the Hub
    except (OSError, ValueError) as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        if "trust_remote_code" in str(error):
            first_line = "its config.json needs Python code of its authors (auto_map), which is never run"
        absent = "" if folder.exists() else "no such folder, and not loaded from the Hub: "
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"{absent}{first_line}",
            allowed="a folder, or a name on the Hub",
        ) from error
    except Exception as error:  # strict dataclasses and the classes of configurations raise any
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"its config.json is refused by transformers ({find_reason(error)})",
            allowed="a config.json as the class of the model reads it",
        ) from error

    if adapter_file is not None:
        raise unmerged_error(checkpoint)
    if getattr(config.get_text_config(), "vocab_size", None) is None:
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"a {config.model_type} has no vocabulary (vocab_size in config.json)",
            allowed="a language model of tokens",
        )

    # A checkpoint may ask for tuples or attention maps, which methods would have to tell apart.
    for name, value in PLAIN_OUTPUTS.items():
        setattr(config, name, value)
    for name in KERNELS:
        setattr(config, f"_{name}", None)
    if hasattr(config, AUTO_MAP):
        delattr(config, AUTO_MAP)
    return config


def unmerged_error(checkpoint: str) -> InvalidOptionError:
    return InvalidOptionError(
        "model.name_or_path",
        checkpoint,
        reason=f"it has an adapter of peft ({ADAPTER_CONFIG_NAME})",
        allowed="a folder of the model with it merged (peft's merge_and_unload)",
    )


def check_has_config(folder: Path) -> None:
    """Raises ValueError for a file, and for a folder without config.json, with the folders inside that have
    one: the output of a trainer has checkpoints, a folder of the Hub's cache has snapshots. What does not
    exist may be a name on the Hub."""
    if folder.is_file():
        raise InvalidOptionError(
            "model.name_or_path", folder, reason="it is a file", allowed=f"a folder, like {folder.parent}"
        )
    if not folder.is_dir() or (folder / CONFIG_NAME).exists():
        return
    configs = sorted([*folder.glob(f"*/{CONFIG_NAME}"), *folder.glob(f"snapshots/*/{CONFIG_NAME}")])
    model_folders = abbreviate([str(path.parent) for path in configs])
    raise InvalidOptionError(
        "model.name_or_path",
        folder,
        reason=f"it has no {CONFIG_NAME}",
        allowed=f"a folder that has one, like {model_folders}" if configs else "a folder that has one",
    )


def find_ignored_settings(checkpoint: str) -> dict[str, Any]:
    """The settings of outputs and kernels in a checkpoint's config.json that `load_config` replaces."""
    stored, _ = PretrainedConfig.get_config_dict(checkpoint)
    ignored = {
        name: stored[name] for name, value in PLAIN_OUTPUTS.items() if stored.get(name, value) != value
    }
    for kernel in KERNELS:
        for key in (kernel, f"_{kernel}"):
            if stored.get(key) is not None:
                ignored[key] = stored[key]
    return ignored


def names_authors_code(checkpoint: str) -> bool:
    """Whether a checkpoint's config.json names Python code of its authors, although transformers has a
    class of its own."""
    stored, _ = PretrainedConfig.get_config_dict(checkpoint)
    return AUTO_MAP in stored


def truncate_config(config: PretrainedConfig, num_hidden_layers: int) -> PretrainedConfig:
    """The configuration of a model's first `num_hidden_layers` blocks (of an encoder-decoder in both), which
    replaces the one that is given. Raises ValueError for more than it has, and for fewer where the class of
    the configuration does not allow it."""
    text_config = config.get_text_config()
    depth = text_config.num_hidden_layers
    if num_hidden_layers > depth:
        raise InvalidOptionError(
            "model.num_hidden_layers", num_hidden_layers, allowed=f"null, or 1 to {depth}"
        )
    # Gemma 3n has a part of a table and of a projection for each block, in tensors of all blocks.
    if num_hidden_layers < depth and getattr(text_config, "hidden_size_per_layer_input", 0):
        raise InvalidOptionError(
            "model.num_hidden_layers",
            num_hidden_layers,
            reason=f"a {config.model_type} has embeddings for each of its blocks in one table",
            allowed=f"null, or {depth}, all blocks",
        )
    for name in ("num_hidden_layers", "num_decoder_layers", "decoder_layers"):
        stack_depth = getattr(text_config, name, None)
        if stack_depth is not None:
            setattr(text_config, name, min(num_hidden_layers, stack_depth))
    for name in (*BLOCK_LISTS, *FURTHER_BLOCK_LISTS):
        entries = vars(text_config).get(name)  # not those that a property computes
        if isinstance(entries, list | tuple):
            setattr(text_config, name, entries[:num_hidden_layers])
    if num_hidden_layers == depth:
        return config

    try:
        type(config).from_dict(config.to_dict())  # as it will be read, which checks it
    except Exception as error:  # whatever a configuration raises
        cause = find_reason(error).rstrip(".")
        raise InvalidOptionError(
            "model.num_hidden_layers",
            num_hidden_layers,
            reason=f"no configuration of this {config.model_type} has as many ({cause})",
            allowed=f"null, or {depth}, all blocks",
        ) from error
    return config


def find_head_parameters(model: PreTrainedModel) -> list[str]:
    """The names of the parameters of a model's head that it does not share with its body; [] without one."""
    if model.base_model is model:
        return []
    body_ids = {id(parameter) for parameter in model.base_model.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) not in body_ids]


def load_model(
    checkpoint: str | Path,
    objective: str,
    *,
    num_hidden_layers: int | None = None,
    rope: Mapping[str, Any] | None = None,
    quantization: str = "none",
    dtype: torch.dtype = torch.float32,
    rows: VocabularyRows = NO_NEW_ROWS,
    sharding: Sharding | None = None,
) -> PreTrainedModel:
    """A checkpoint's model in float32 and train mode, with an adapter of peft in its folder merged. It has
    the first `num_hidden_layers` blocks only, and other `rope` parameters, if these are not None. Its linear
    layers are quantized as `quantization` says, or as they are stored; with a `dtype` of 16 bits the others
    are narrow (`make_narrow`). Parameters of a head that the checkpoint lacks are random, the same in each
    copy. `rows` sets those of the vocabulary.

    With a `sharding`, which all processes call with, each reads its rows of every weight, if the files allow
    it: else each has the whole model. Raises ValueError for weights that are not finite."""
    config = load_config(str(checkpoint))
    is_quantized = quantization != "none" or describe_stored(config) in OF_BITSANDBYTES
    if rope is not None:
        config = scale_rope(config, rope)
    if num_hidden_layers is not None:
        config = truncate_config(config, num_hidden_layers)

    if sharding is not None and not is_quantized:
        sharded_model = load_shards(checkpoint, config, objective, dtype=dtype, rows=rows, sharding=sharding)
        if sharded_model is not None:
            return sharded_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class: Any = AUTO_MODELS[objective]
        if dtype != torch.float32 and not is_quantized:
            model_class = make_narrow_model_class(config, objective, dtype)
        model = model_class.from_pretrained(
            checkpoint,
            config=config,
            dtype=torch.float32,
            quantization_config=make_loading_config(config, quantization),
            # Without a map transformers quantizes on the first GPU, whichever is that of this process.
            device_map={"": "cpu"} if is_quantized else None,
            trust_remote_code=False,
        )

    if is_quantized:
        replace_layers(model)
        if dtype != torch.float32:
            make_narrow(model, dtype)
    elif dtype != torch.float32:
        model.__class__ = type(model).__base__
    adapter = find_adapter(checkpoint)
    if adapter is not None:
        model = merge_adapter(model, adapter, checkpoint=checkpoint)
    if is_quantized:  # NaN would have become numbers
        weight_files = find_weight_files(str(checkpoint), config)
        check_finite_names(find_non_finite(weight_files), checkpoint)
    else:
        check_finite_weights(model, checkpoint)
    log_separate_head(model, checkpoint)
    rows.set_rows(model)
    return model.train()


def log_separate_head(model: PreTrainedModel, checkpoint: str | Path) -> None:
    """Logs that a head is not tied to the embedding, against config.json."""
    stored_config, _ = PretrainedConfig.get_config_dict(checkpoint)
    if stored_config.get("tie_word_embeddings") is True and not is_tied(model) and is_first_process():
        log.info(
            "Keeping head and embedding of %s untied, as they are stored, although config.json ties them",
            checkpoint,
        )


def load_shards(
    checkpoint: str | Path,
    config: PretrainedConfig,
    objective: str,
    *,
    dtype: torch.dtype,
    rows: VocabularyRows,
    sharding: Sharding,
) -> PreTrainedModel | None:
    """As `load_model` with a `sharding`, whose rows are on the CPU; None where the files do not allow it. A
    line says why."""
    try:
        if find_adapter(checkpoint) is not None:
            raise UnshardableFilesError("an adapter is merged into them")
        plain_class = find_model_class(config, objective)
        model_class = plain_class
        if dtype != torch.float32:
            model_class = make_narrow_model_class(config, objective, dtype)

        sharded_class = make_sharded_class(model_class, plain_class, sharding=sharding, rows=rows)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = sharded_class.from_pretrained(
                checkpoint, config=config, dtype=torch.float32, trust_remote_code=False
            )
    except UnshardableFilesError as error:
        if is_first_process():
            log.info("Loading all weights of %s in each process: %s", checkpoint, error)
        return None

    model.cpu()  # moves nothing, but has FSDP register the rows that were loaded
    check_finite_weights(model, checkpoint)
    log_separate_head(model, checkpoint)
    return model.train()


def find_model_class(config: PretrainedConfig, objective: str) -> type[PreTrainedModel]:
    """The class of a configuration's models."""
    with torch.device("meta"):
        return type(AUTO_MODELS[objective].from_config(config))


def make_narrow_model_class(
    config: PretrainedConfig, objective: str, dtype: torch.dtype
) -> type[PreTrainedModel]:
    """The class of a configuration's models, below which they are narrow from the start: transformers loads
    each tensor at once in the type that its parameter has by then."""
    plain_class = find_model_class(config, objective)

    def initialize(model: PreTrainedModel, *args: Any, **options: Any) -> None:
        plain_class.__init__(model, *args, **options)
        make_narrow(model, dtype)

    attributes = {"__init__": initialize, "__module__": plain_class.__module__}
    return type(plain_class.__name__, (plain_class,), attributes)


def check_finite_weights(model: PreTrainedModel, checkpoint: str | Path) -> None:
    """Raises ValueError for parameters that are NaN or infinite."""
    names = []
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if not is_finite(to_local(parameter.detach())):
            names.append(name)
    if any(map(is_sharded, parameters.values())):  # another process may have the rows
        found_anywhere = set(chain.from_iterable(gather_objects(names)))
        names = [name for name in parameters if name in found_anywhere]
    check_finite_names(names, checkpoint)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity. Torch makes copies to find out, here of a piece at a
    time."""
    return all(bool(piece.isfinite().all()) for piece in tensor.reshape(-1).split(CHECKED_NUMBERS))


def check_finite_names(names: Sequence[str], checkpoint: str | Path) -> None:
    """Raises ValueError if there are `names` of tensors that are NaN or infinite."""
    if names:
        tensor_count = count_noun(len(names), "tensor")
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"it has {tensor_count} with NaN or infinite weights, the first {names[0]}",
            allowed="a checkpoint of finite weights",
        )


def find_adapter(checkpoint: str | Path) -> Path | None:
    """The folder of the only adapter that a checkpoint has; raises ValueError if it has several."""
    configs = sorted(Path(checkpoint).glob("adapters/*/adapter_config.json"))
    if len(configs) > 1:
        raise InvalidOptionError(
            "model.name_or_path",
            checkpoint,
            reason=f"it has {count_noun(len(configs), 'adapter')}",
            allowed="a copy with one of them merged (peft's merge_and_unload)",
        )
    return configs[0].parent if configs else None


def merge_adapter(model: PreTrainedModel, adapter: Path, *, checkpoint: str | Path) -> PreTrainedModel:
    """A model with the weights of an adapter of peft in its folder merged. Raises ValueError for one that is
    of another model."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            adapted = PeftModel.from_pretrained(model, adapter)
            # Loaded a second time for the report of keys, which only this function gives.
            report = adapted.load_adapter(adapter, adapted.active_adapter)
        merged: PreTrainedModel = adapted.merge_and_unload()
    except Exception as error:  # shapes, names of layers, options: classes of peft, torch and safetensors
        raise adapter_error(checkpoint, adapter, find_reason(error)) from error
    if report.missing_keys:
        raise adapter_error(checkpoint, adapter, f"it lacks {abbreviate(report.missing_keys)}")
    if report.unexpected_keys:
        unused = abbreviate(report.unexpected_keys)
        raise adapter_error(checkpoint, adapter, f"the model has no place for {unused}")
    return merged.requires_grad_(True)


def adapter_error(checkpoint: str | Path, adapter: Path, reason: str) -> InvalidOptionError:
    """The error of an adapter in a checkpoint's folder that cannot be merged."""
    return InvalidOptionError(
        "model.name_or_path",
        checkpoint,
        reason=f"its adapter {adapter.name} cannot be merged: {reason}",
        allowed=f"a whole adapter of this model in {adapter}, or a copy of the checkpoint without adapters",
    )


def find_end_ids(checkpoint: str, config: PretrainedConfig) -> list[int]:
    """The eos ids in a checkpoint's configuration and generation configuration, which may list several."""
    generation_ids: Any = None
    with suppress(OSError, ValueError):  # most base models have none
        generation_ids = GenerationConfig.from_pretrained(checkpoint).eos_token_id
    config_ids = getattr(config.get_text_config(), "eos_token_id", None)
    end_ids: dict[int, None] = {}  # in order
    for ids in (generation_ids, config_ids):
        id_list = ids if isinstance(ids, list) else [ids]
        for token_id in id_list:
            if token_id is not None:
                end_ids[token_id] = None
    return list(end_ids)


def load_tokenizer(checkpoint: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of a name on the Hub. Raises ConnectionError where the Hub would be asked
    without a network, ValueError for a length that cannot be compared with those of texts and for files that
    are of another class or damaged, and whatever else a class raises for files that it does not take."""
    check_model_access(str(checkpoint))
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except Exception as error:  # whatever the class raises
        fault = describe_fault(Path(checkpoint), error)
        if not fault:
            raise
        raise ValueError(fault) from error
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float):
        raise ValueError(f"its model_max_length is {longest!r:.60}. Allowed: a number, or null")
    return tokenizer


def build_model(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, objective: str, *, seed: int
) -> PreTrainedModel:
    """A new model of a configuration (`model_type` and its arguments) for a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    token_ids = {}
    for name, token in SPECIAL_TOKENS.items():
        if token in vocabulary:
            token_ids[f"{name}_token_id"] = vocabulary[token]
    if objective == "span":
        token_ids["decoder_start_token_id"] = token_ids["pad_token_id"]
    else:
        token_ids["cls_token_id"] = token_ids["bos_token_id"]
        token_ids["sep_token_id"] = token_ids["eos_token_id"]

    arguments = dict(config)
    model_type = arguments.pop("model_type")
    full_config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **token_ids, **arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AUTO_MODELS[objective].from_config(full_config)
        if arguments.get("tie_word_embeddings") is False and is_tied(model):
            # transformers 5 ties every T5: a head of its own, with logits of size 1, N(0, 1 / D)
            head = model.get_output_embeddings()
            head.weight = nn.Parameter(torch.randn_like(head.weight) * head.weight.shape[1] ** -0.5)
        return model


def find_max_positions(model: PreTrainedModel) -> int | None:
    """The longest sequence that a model takes; None: unbounded."""
    limit = count_scaled_positions(model.config)
    table = find_padded_positions(model)
    if table is not None:
        limit = table.num_embeddings - (table.padding_idx or 0) - 1
    return limit if limit and limit > 0 else None


def check_length(length: int, model: PreTrainedModel, objective: Objective) -> None:
    """Raises ValueError for samples longer than the model has positions, or than the tokenizer has sentinel
    tokens for (T5's objective)."""
    longest = objective.longest
    positions = find_max_positions(model)
    # Where both limits are equal, the positions are named.
    if longest is not None and longest != positions and length > longest:
        raise InvalidOptionError(
            "model.max_seq_length",
            length,
            allowed=f"2 to {longest}, for which the tokenizer's sentinels suffice",
        )
    if positions is not None and length > positions:
        has_rope = getattr(model.config.get_text_config(), "rope_parameters", None)
        remedy = "; more with RoPE that is scaled (model.rope_parameters)" if has_rope else ""
        raise InvalidOptionError(
            "model.max_seq_length",
            length,
            allowed=f"2 to {positions}, the positions of this {model.config.model_type}{remedy}",
        )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's weight is the embedding's: transformers 5 sets it for every T5."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def make_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """An unmodified model of the same class and configuration, without storage."""
    with torch.device("meta"):
        return type(model)(deepcopy(model.config))


def train_tokenizer(texts: Iterator[str], *, vocabulary: int, objective: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE (Radford et al. 2019) learned from texts. A text becomes `<s> … </s>` for a `masked`
    model, `<s> …` for a `causal` one (packing ends documents), and `… </s>` for a `span` one, with sentinels
    as the last ids, as T5's."""
    has_sentinels = objective == "span"
    names = ("pad", "eos", "unk") if has_sentinels else tuple(SPECIAL_TOKENS)
    special_tokens = {}
    for name in names:
        token = AddedToken(SPECIAL_TOKENS[name], special=True, lstrip=name == "mask")
        special_tokens[f"{name}_token"] = token

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - SENTINELS if has_sentinels else vocabulary,
        special_tokens=list(special_tokens.values()),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = make_post_processor(bpe, objective)

    # The names that BERT has for the same two tokens. Sentinels come last, by which T5 finds them.
    if not has_sentinels:
        special_tokens["cls_token"] = special_tokens["bos_token"]
        special_tokens["sep_token"] = special_tokens["eos_token"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special_tokens)
    if has_sentinels:
        add_sentinels(tokenizer)
    return tokenizer


def make_post_processor(bpe: Tokenizer, objective: str) -> processors.TemplateProcessing:
    """What puts the start and the end of an objective around a text, and between two."""
    start = SPECIAL_TOKENS["bos"]
    end = SPECIAL_TOKENS["eos"]
    if objective == "masked":
        single = f"{start} $A {end}"
        pair = f"{start} $A {end} {end} $B {end}"
    elif objective == "causal":
        single = f"{start} $A"
        pair = f"{start} $A {end} {start} $B"
    else:
        single = f"$A {end}"
        pair = f"$A {end} $B {end}"
    ids = [(token, bpe.token_to_id(token)) for token in (start, end) if token in pair.split()]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


def add_sentinels(tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds <extra_id_0> … <extra_id_99> to a tokenizer, <extra_id_0> with the last id."""
    names = [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))]
    tokenizer.add_tokens([AddedToken(name, special=True) for name in names], special_tokens=True)


def find_sentinel_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids of <extra_id_0>, <extra_id_1>, …; mT5's are words with a blank before them."""
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    while True:
        name = f"<extra_id_{len(ids)}>"
        token_id = vocabulary.get(name, vocabulary.get(f"\u2581{name}"))
        if token_id is None:
            return ids
        ids.append(token_id)
