"""A model and its configuration that change together, so that the model can be saved and read by others.

Which fields say what is told by the configuration's own names. A model of the new configuration, made without
memory, tells what all else has to be: what the changed one has not got in the same shape is refused, and
modules know of the same sizes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.errors import reason

NEURONS = (
    "intermediate_size", "d_ff", "n_inner", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"
)  # fmt: skip
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")
GROUPS = ("num_key_value_heads",)
SIZES = ("head_dim", "d_kv")
LAYERS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
HIDDEN = ("hidden_size", "word_embed_proj_dim")
BY_LAYER = "layer_types"  # what a configuration says of each layer
NUMBERS = (int, float, tuple)  # what modules know of their sizes; no bool, which is a mode


@contextmanager
def adjusted(model: PreTrainedModel, what: str) -> Iterator[Callable[[], PreTrainedModel]]:
    """While it lasts a model and its configuration are changed; then the model is what the configuration
    makes: gives what makes one without memory. Raises ValueError for `what` a configuration can not say."""

    def skeleton() -> PreTrainedModel:
        try:
            type(model.config).from_dict(model.config.to_dict())  # as it will be read, which checks it
            with torch.device("meta"):
                return type(model)(deepcopy(model.config))
        except Exception as error:  # whatever a configuration raises
            raise ValueError(f"{what} can not be grown: {reason(error)}") from error

    yield skeleton
    wanted = skeleton()
    check_shapes(model, wanted, what)
    follow(model, wanted)


def set_fields(model: PreTrainedModel, values: Mapping[str, Any]) -> None:
    """Sets those of some fields that a configuration has."""
    known = model.config.attribute_map
    for name, value in values.items():
        if name in known or name in vars(model.config):
            setattr(model.config, name, value)


def check_shapes(model: PreTrainedModel, wanted: PreTrainedModel, what: str) -> None:
    """Raises ValueError where a model has not all that one of its configuration has, in the same shapes."""
    own = {name: value.shape for name, value in model.state_dict().items()}
    for name, value in wanted.state_dict().items():
        if own.get(name) != value.shape:
            raise ValueError(
                f"{what} can not be grown: its configuration makes {name} {list(value.shape)}, "
                f"not {list(own.get(name, ()))}"
            )


def follow(model: PreTrainedModel, wanted: PreTrainedModel) -> None:
    """Gives modules the sizes that those of another model know of, and stacks their configurations."""
    parts = dict(model.named_modules())
    for name, other in wanted.named_modules():
        part = parts[name]
        for key, value in vars(other).items():
            if type(value) in NUMBERS and vars(part).get(key) != value:
                setattr(part, key, value)
        if (config := getattr(other, "config", None)) is not None and part.config is not model.config:
            vars(part.config).update(deepcopy(vars(config)))


def describe(model: PreTrainedModel) -> str:
    return f"a {model.config.model_type}"


def replace_parameter(module: nn.Module, name: str, value: Tensor) -> None:
    """Gives a module a parameter of another shape, trained if the one before was."""
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=getattr(module, name).requires_grad))
