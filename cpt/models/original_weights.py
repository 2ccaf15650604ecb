"""What the base loses by quantization: its quantized layers compute with the weights of the checkpoint, which
are read from its files at each use. One weight at a time is in memory in addition to the quantized model."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from cpt.models.quantization import QuantizedLinear, find_quantized_layers


class MissingWeightError(LookupError):
    """The files of a checkpoint do not have the weight of a layer as the layer has it."""


@contextmanager
def original_weights(model: PreTrainedModel, files: Iterable[Path]) -> Iterator[None]:
    """Inside the context the quantized layers of a model have the weights of a checkpoint's files. Raises
    MissingWeightError where they are not safetensors, or store a weight in another form."""
    layers = find_quantized_layers(model)
    with ExitStack() as stack:
        opened = {}  # by the name of a tensor, the open file that holds it
        for path in files:
            if path.suffix == ".safetensors":
                file = stack.enter_context(safe_open(path, "pt"))
                opened.update(dict.fromkeys(file.keys(), file))
        for name, layer in layers.items():
            stored_name = find_weight_name(model, name, layer, opened)
            layer.read_original = partial(
                read_layer_weight, opened[stored_name], stored_name, layer.plain_class
            )
        try:
            yield
        finally:
            for layer in layers.values():
                layer.read_original = None


def find_weight_name(
    model: PreTrainedModel, name: str, layer: QuantizedLinear, opened: Mapping[str, Any]
) -> str:
    """The name of a layer's weight in the files. Raises MissingWeightError where they have none."""
    is_transposed = issubclass(layer.plain_class, Conv1D)
    shape = [layer.out_features, layer.in_features]
    if is_transposed:
        shape.reverse()

    # peft puts `.base_layer` into the name of a layer with an adapter. Files may have other names than the
    # model, and those of its body with or without the body's prefix.
    parameter_name = f"{name}.weight".replace(".base_layer.", ".")
    candidates = list(revert_weight_conversion(model, {parameter_name: torch.empty(shape, device="meta")}))
    prefix = f"{model.base_model_prefix}."
    for candidate in list(candidates):
        candidates.append(candidate.removeprefix(prefix))
        candidates.append(prefix + candidate)
    for candidate in candidates:
        if candidate in opened and opened[candidate].get_slice(candidate).get_shape() == shape:
            return candidate
    raise MissingWeightError(parameter_name)


def read_layer_weight(file: Any, name: str, plain_class: type) -> Tensor:
    """The weight [outputs, inputs] of a layer in an open file."""
    weight = cast(Tensor, file.get_tensor(name))
    return weight.T if issubclass(plain_class, Conv1D) else weight
