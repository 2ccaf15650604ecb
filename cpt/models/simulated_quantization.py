"""Quantized layers without storage and without the kernels of bitsandbytes, which need not be installed where
a plan is computed: they store and dequantize what its layers do."""

from math import ceil
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.models.quantization import DEQUANTIZED_DTYPES, Linear8Bit, QuantizedLinear

BLOCK_SIZE = 64  # weights of one scale
NESTED_BLOCK_SIZE = 256  # scales of one nested scale
NUM_VALUES = 256  # of a scale in 8 bits


@torch.library.custom_op("cpt::dequantize_4bit", mutates_args=())
def dequantize_4bit(packed: Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> Tensor:
    """A weight [outputs, inputs] of the size that the kernel of bitsandbytes writes; its values are not
    computed. Computed time counts this operation apart from others."""
    return packed.new_empty(num_outputs, num_inputs, dtype=dtype)


dequantize_4bit.register_fake(
    lambda packed, num_outputs, num_inputs, dtype: packed.new_empty(num_outputs, num_inputs, dtype=dtype)
)
DEQUANTIZE_4BIT = torch.ops.cpt.dequantize_4bit.default


class Simulated4Bit(QuantizedLinear):
    """As cpt.models.quantization.Linear4Bit with nested scales."""

    def __init__(self, layer: nn.Module) -> None:
        num_weights = cast(Tensor, layer.weight).numel()
        super().__init__(describe_layer(layer, torch.empty(num_weights // 2, 1, dtype=torch.uint8)))
        num_scales = ceil(num_weights / BLOCK_SIZE)
        self.set_statistics(
            scales=torch.empty(num_scales, dtype=torch.uint8),
            mean=torch.empty(()),
            nested_scales=torch.empty(ceil(num_scales / NESTED_BLOCK_SIZE)),
            nested_values=torch.empty(NUM_VALUES),
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        written_dtype = dtype if dtype in DEQUANTIZED_DTYPES else torch.float32
        weight = dequantize_4bit(self.weight, self.out_features, self.in_features, written_dtype)
        return cast(Tensor, weight).to(dtype)


class Simulated8Bit(Linear8Bit):
    """As cpt.models.quantization.Linear8Bit."""

    def __init__(self, layer: nn.Module) -> None:
        num_inputs, num_outputs = find_sizes(layer)
        weight = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
        weight.SCB = torch.empty(num_outputs)  # type: ignore[attr-defined]  # as bitsandbytes has it
        super().__init__(describe_layer(layer, weight))


def describe_layer(layer: nn.Module, stored_weight: Tensor) -> Any:
    """What a quantized layer reads of one of bitsandbytes."""
    num_inputs, num_outputs = find_sizes(layer)
    parameter = nn.Parameter(stored_weight, requires_grad=False)
    if hasattr(stored_weight, "SCB"):
        parameter.SCB = stored_weight.SCB  # type: ignore[attr-defined]
    return SimpleNamespace(
        in_features=num_inputs,
        out_features=num_outputs,
        weight=parameter,
        bias=layer.bias,
        source_cls=type(layer),
        training=layer.training,
    )


def find_sizes(layer: nn.Module) -> tuple[int, int]:
    """The inputs and outputs of a linear layer."""
    if isinstance(layer, Conv1D):
        return layer.nx, layer.nf
    linear = cast(nn.Linear, layer)
    return linear.in_features, linear.out_features


def simulate_quantization(model: PreTrainedModel, quantization: str) -> None:
    """Replaces the linear layers of a model without storage, but for its head, by quantized ones: in 8 bits
    for int8, else in 4."""
    layer_class = Simulated8Bit if quantization == "int8" else Simulated4Bit
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D) and module is not head:
            model.set_submodule(name, layer_class(module))
