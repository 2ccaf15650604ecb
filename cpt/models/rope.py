"""Rotary positions (RoPE; Su et al., 2021) that are scaled beyond the positions of a checkpoint
(`model.rope_parameters`), as transformers has them in `config.rope_parameters`: linear (Chen et al., 2023),
dynamic, yarn (Peng et al., ICLR 2024), llama3, longrope."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError

KEY = "model.rope_parameters"
DEFAULT = "default"  # the type without scaling
DYNAMIC = "dynamic"  # its frequencies follow the length of the text, from max_position_embeddings on
ORIGINAL = "original_max_position_embeddings"
HAS_ORIGINAL = ("yarn", "llama3", "longrope")  # types that store the positions of pre-training
OF_EVERY_TYPE = ("rope_theta", "partial_rotary_factor")
FULL = "full_attention"  # where each layer type has its own: that of layers without a window
Parameters = dict[str, Any]


def scale_rope(config: PretrainedConfig, requested: Mapping[str, Any]) -> PretrainedConfig:
    """A copy of a configuration with other RoPE parameters and as many positions as they are for. A given
    rope_type replaces the parameters of another type; what is not given stays. Raises ValueError for a model
    without RoPE, and for parameters that transformers refuses or warns of."""
    scaled = deepcopy(config)
    text_config = scaled.get_text_config()
    stored = getattr(text_config, "rope_parameters", None)
    if not stored:
        raise InvalidOptionError(
            KEY,
            dict(requested),
            reason=f"a {config.model_type} has no rotary positions",
            allowed="null",
        )

    layer_types = [key for key, value in stored.items() if isinstance(value, Mapping)]
    check_layer_types(requested, layer_types, model_type=config.model_type)
    changed: Parameters
    if layer_types:
        changed = {**stored}
        for layer_type, parameters in requested.items():
            changed[layer_type] = join_parameters(text_config, stored[layer_type], parameters)
        deciding = FULL if FULL in requested else next(iter(requested))
        positions = count_positions(text_config, stored[deciding], changed[deciding])
    else:
        changed = join_parameters(text_config, stored, requested)
        positions = count_positions(text_config, stored, changed)
    if changed == stored:
        return scaled

    text_config.rope_parameters = changed
    text_config.max_position_embeddings = positions
    if ORIGINAL in changed and hasattr(text_config, ORIGINAL):  # of Phi-3, whose class prefers it
        setattr(text_config, ORIGINAL, changed[ORIGINAL])
    with refusing_warnings(requested):
        text_config.standardize_rope_params()
        text_config.validate_rope()
    return scaled


def check_layer_types(requested: Mapping[str, Any], layer_types: list[str], *, model_type: str) -> None:
    """Raises ValueError unless parameters are given by layer type where a model has them so, and else not."""
    if not layer_types:
        nested = [key for key, value in requested.items() if isinstance(value, Mapping)]
        if nested or not requested:
            raise InvalidOptionError(
                KEY,
                dict(requested),
                reason=f"a {model_type} has one set of parameters for all layers" if nested else "",
                allowed="null, or {rope_type: yarn, factor: 4} and other parameters of transformers",
            )
        return
    is_nested = all(isinstance(value, Mapping) and key in layer_types for key, value in requested.items())
    if not is_nested or not requested:
        raise InvalidOptionError(
            KEY,
            dict(requested),
            reason=f"a {model_type} has them by type of layer",
            allowed=f"null, or keys of {', '.join(layer_types)} with mappings, like "
            f"{{{layer_types[0]}: {{rope_type: linear, factor: 4}}}}",
        )


def join_parameters(config: PretrainedConfig, stored: Parameters, requested: Mapping[str, Any]) -> Parameters:
    """Parameters of a layer type: those that are given, and of the stored ones what stays. Raises ValueError
    for an unknown rope_type."""
    stored_type = stored.get("rope_type", DEFAULT)
    rope_type = requested.get("rope_type", stored_type)
    known_types = (DEFAULT, *ROPE_INIT_FUNCTIONS)
    if rope_type not in known_types:
        raise InvalidOptionError(f"{KEY}.rope_type", rope_type, allowed=", ".join(known_types))

    if rope_type == stored_type:
        joined = {**stored, **requested}
    else:
        lasting = {*OF_EVERY_TYPE, *config.ignore_keys_at_rope_validation}
        joined = {key: value for key, value in stored.items() if key in lasting}
        joined.update(requested, rope_type=rope_type)
    if rope_type in HAS_ORIGINAL:
        joined.setdefault(ORIGINAL, stored.get(ORIGINAL) or config.max_position_embeddings)
    return joined


def count_positions(config: PretrainedConfig, stored: Parameters, changed: Parameters) -> int:
    """`max_position_embeddings` of a configuration with changed parameters: the original positions times the
    factor. The dynamic type scales only beyond max_position_embeddings, so it stays as it is."""
    positions = int(config.max_position_embeddings)
    rope_type = changed["rope_type"]
    factor = changed.get("factor")
    if changed == stored or not isinstance(factor, int | float) or rope_type == DYNAMIC:
        return positions
    original = changed.get(ORIGINAL)
    if rope_type in HAS_ORIGINAL:
        return round(original * factor) if isinstance(original, int) else positions
    previous_factor = stored.get("factor") if stored.get("rope_type") == rope_type else None
    return round(positions * factor / (previous_factor or 1))


@contextmanager
def refusing_warnings(requested: Mapping[str, Any]) -> Iterator[None]:
    """Turns an exception of transformers' validation, or its first warning, into a ValueError of one line."""
    messages: list[str] = []

    def keep_message(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger = logging.getLogger("transformers.modeling_rope_utils")
    previous_level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addFilter(keep_message)
    try:
        yield
    except Exception as error:  # KeyErrors for missing keys, TypeErrors for values
        messages.insert(0, find_reason(error).strip("'\""))
    finally:
        logger.removeFilter(keep_message)
        logger.setLevel(previous_level)
    if messages:
        raise InvalidOptionError(
            KEY,
            dict(requested),
            reason=" ".join(messages[0].split()).rstrip("."),
            allowed="null, or parameters that transformers takes (config.rope_parameters)",
        )


def count_scaled_positions(config: PretrainedConfig) -> int | None:
    """The positions of a model by its configuration, with those that dynamic RoPE adds; None without."""
    positions = getattr(config, "max_position_embeddings", None)
    parameters = getattr(config, "rope_parameters", None)
    if not positions or not parameters:
        return positions
    full_parameters = parameters.get(FULL, parameters) or {}
    if full_parameters.get("rope_type") == DYNAMIC and isinstance(full_parameters.get("factor"), int | float):
        return int(positions * full_parameters["factor"])
    return positions


def set_max_length(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Gives a tokenizer the positions of a scaled configuration as its longest text, which programs that read
    the exported model cut at. One without a limit stays so."""
    positions = count_scaled_positions(config.get_text_config())
    if positions and tokenizer.model_max_length < VERY_LARGE_INTEGER:
        tokenizer.model_max_length = positions


def forget_lengths(model: nn.Module) -> None:
    """Lets dynamic RoPE take the frequencies for the longest row of each pass, whatever passes were before:
    transformers keeps those of the longest text until a short one comes."""
    for module in model.modules():
        if find_dynamic_prefixes(module):
            module.register_forward_pre_hook(restore_frequencies)


def find_dynamic_prefixes(module: nn.Module) -> list[str]:
    """The prefixes of a module's attributes for each layer type with dynamic RoPE, "" without layer types;
    the module is one of transformers that computes rotary positions."""
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, Mapping):
        return [f"{layer_type}_" for layer_type, of_layers in rope_type.items() if of_layers == DYNAMIC]
    return [""] if rope_type == DYNAMIC else []


def restore_frequencies(module: nn.Module, args: Any) -> None:
    """The pre-hook of a module with dynamic RoPE."""
    for prefix in find_dynamic_prefixes(module):
        current = module.get_buffer(f"{prefix}inv_freq")
        original = getattr(module, f"{prefix}original_inv_freq").to(current.device)
        module.register_buffer(f"{prefix}inv_freq", original, persistent=False)
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
