"""Frozen linear layers whose weights are stored in 4 or 8 bits (`model.quantization`). bitsandbytes rounds
the weights while transformers loads a checkpoint, one tensor after the other.

    y = D(Q(W)) x + b

    nf4    16 values, quantiles of a normal distribution, times a scale for 64 weights; the scales are stored
           in 8 bits themselves (QLoRA, Dettmers et al., NeurIPS 2023)
    int8   whole numbers from -127 to 127, times a scale for each output

Layers of bitsandbytes store the weights and do not compute here. Theirs of 8 bits round the activations too,
in evaluation and on GPUs; theirs of 4 bits round the scales to 16 bits in the first evaluation on a CPU that
multiplies in bf16. A run would train another model than it scores, and export a third."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import BitsAndBytesConfig, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.core.tensors import move_uncast

DEQUANTIZED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that kernels of bitsandbytes write
LARGEST_INT8 = 127
# How bitsandbytes stores weights, and what transformers dequantizes when it loads a checkpoint.
OF_BITSANDBYTES = ("nf4", "fp4", "int8")
MXFP4 = "mxfp4"
# What transformers leaves on a model whose quantization is removed, and peft reads where one is adapted.
QUANTIZED_ATTRIBUTES = ("is_loaded_in_4bit", "is_loaded_in_8bit")


def describe_stored(config: PretrainedConfig) -> str:
    """How the weights of a checkpoint are stored by its configuration: nf4, fp4 or int8 of bitsandbytes, the
    name that another quantization has in transformers, or "" for weights in full."""
    stored = read_stored_config(config)
    if not stored:
        return ""
    if stored.get("load_in_8bit"):
        return "int8"
    if stored.get("load_in_4bit"):
        return str(stored.get("bnb_4bit_quant_type", "fp4"))
    return str(stored.get("quant_method", "unknown"))


def read_stored_config(config: PretrainedConfig) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint, which one of text and images may have for its text; empty
    without one."""
    for part in (config, config.get_text_config()):
        stored = getattr(part, "quantization_config", None)
        if stored:
            return dict(stored) if isinstance(stored, Mapping) else cast(dict[str, Any], stored.to_dict())
    return {}


def drop_quantization(config: PretrainedConfig) -> PretrainedConfig:
    """A configuration without what it says of the quantization of a checkpoint; itself where it says
    nothing."""
    if not read_stored_config(config):
        return config
    plain = deepcopy(config)
    remove_stored_config(plain)
    return plain


def remove_stored_config(config: PretrainedConfig) -> None:
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)


def make_loading_config(config: PretrainedConfig, quantization: str) -> Any:
    """The `quantization_config` with which transformers loads a checkpoint; None: weights as they are
    stored."""
    if describe_stored(config) == MXFP4:
        return Mxfp4Config(dequantize=True)
    if quantization == "nf4":
        return BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
    if quantization == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return None


class QuantizedLinear(nn.Linear):
    """A frozen linear layer with a weight in 4 or 8 bits, which is dequantized for each product. As in a
    layer of torch, the product is in the precision of the input, or that of autocast.

    The weight is taken from `layer`, one of bitsandbytes."""

    # Reads the weight as it was before it was quantized; None: the quantized weight is used.
    read_original: Callable[[], Tensor] | None = None

    def __init__(self, layer: nn.Linear) -> None:
        has_bias = layer.bias is not None
        super().__init__(layer.in_features, layer.out_features, bias=has_bias, device="meta")
        self.weight = nn.Parameter(layer.weight.data, requires_grad=False)
        self.bias = layer.bias
        # The class of the layer in the plain model: GPT-2's Conv1D has the weight transposed.
        self.plain_class = cast(Any, layer).source_cls
        self.train(layer.training)

    def set_statistics(self, **tensors: Tensor) -> None:
        """Registers what is stored of the weight in addition to its few bits, as buffers."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach(), persistent=False)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """D(Q(W)) [outputs, inputs]."""
        raise NotImplementedError

    def weight_for_product(self, dtype: torch.dtype) -> Tensor:
        """The weight [outputs, inputs] that the layer computes with."""
        if self.read_original is None:
            return self.dequantize(dtype)
        return self.read_original().to(device=self.weight.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        product = cast(Tensor, _FrozenProduct.apply(x, self))
        # A bias is in full, and may be trained.
        return product if self.bias is None else product + self.bias.to(product.dtype)

    def plain_weight(self, dtype: torch.dtype) -> Tensor:
        """The dequantized weight as the layer of the plain model has it."""
        weight = self.dequantize(dtype)
        return weight.T.contiguous() if issubclass(self.plain_class, Conv1D) else weight

    def make_linear(self, dtype: torch.dtype) -> nn.Linear:
        """A layer of torch with the dequantized weight."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.dequantize(dtype))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().to(dtype))
        return linear.train(self.training)

    def make_plain(self, linear: nn.Linear, dtype: torch.dtype) -> nn.Module:
        """The layer of the plain model with the weights of one of `make_linear`, into which adapters may have
        been merged, in a type."""
        linear.to(dtype)
        if not issubclass(self.plain_class, Conv1D):
            return linear
        plain = Conv1D(self.out_features, 0)
        plain.nx = self.in_features
        plain.weight = nn.Parameter(linear.weight.detach().T.contiguous())
        plain.bias = linear.bias
        return plain.train(self.training)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Moves the layer, and casts its bias; the scales are never cast."""
        statistics = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, tensor in statistics.items():
            self._buffers[name] = move_uncast(fn, tensor)
        return self


class Linear4Bit(QuantizedLinear):
    """Weights of `bitsandbytes.nn.Linear4bit`, nf4 or fp4: two in a byte."""

    # The scales of blocks of weights. Nested scales are whole numbers around a mean, and have values and
    # scales of their own.
    scales: Tensor
    mean: Tensor
    nested_scales: Tensor
    nested_values: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        state = cast(Any, layer.weight).quant_state
        self.quant_type: str = state.quant_type
        self.block_size: int = state.blocksize  # weights of one scale
        self.has_nested_scales: bool = state.nested
        self.set_statistics(scales=state.absmax)
        if self.has_nested_scales:
            nested = state.state2
            self.nested_block_size: int = nested.blocksize
            self.set_statistics(mean=state.offset, nested_scales=nested.absmax, nested_values=nested.code)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        nested = None
        if self.has_nested_scales:
            nested = QuantState(
                absmax=self.nested_scales,
                code=self.nested_values,
                blocksize=self.nested_block_size,
                dtype=torch.float32,
            )
        # As one row: with AVX-512 the kernel of 0.50.2 takes wrong scales for rows that are not a multiple of
        # a block.
        state = QuantState(
            absmax=self.scales,
            shape=torch.Size((1, self.num_weights)),
            blocksize=self.block_size,
            quant_type=self.quant_type,
            dtype=dtype if dtype in DEQUANTIZED_DTYPES else torch.float32,
            offset=self.mean if self.has_nested_scales else None,
            state2=nested,
        )
        weight = dequantize_4bit(self.weight.data, state)
        return weight.view(self.out_features, self.in_features).to(dtype)


class Linear8Bit(QuantizedLinear):
    """Weights of `bitsandbytes.nn.Linear8bitLt`."""

    scales: Tensor  # [outputs]

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.set_statistics(scales=cast(Any, layer.weight).SCB / LARGEST_INT8)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.weight.data * self.scales[:, None]).to(dtype)


class _FrozenProduct(torch.autograd.Function):
    """x W^T of a quantized layer. The weight is dequantized a second time in the backward pass: no copy in
    16 or 32 bits is stored in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight_for_product(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.layer.weight_for_product(gradient.dtype), None


def replace_layers(model: PreTrainedModel) -> None:
    """Replaces the layers of bitsandbytes in a model that transformers has loaded, and makes it a plain model
    otherwise, which can be moved, adapted and saved as one."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            model.set_submodule(name, Linear4Bit(module))
        elif isinstance(module, Linear8bitLt):
            model.set_submodule(name, Linear8Bit(module))

    cast(Any, model).hf_quantizer.remove_quantization_config(model)
    for name in QUANTIZED_ATTRIBUTES:
        vars(model).pop(name, None)
    remove_stored_config(model.config)
    copy_from_file(model)


def copy_from_file(model: nn.Module) -> None:
    """Copies the weights that are not quantized out of the file that they are mapped from. As long as one of
    them is mapped, all pages of the file that were read count as memory of the process."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()


def find_quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantized layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def count_stored(model: nn.Module) -> dict[int, int]:
    """By the id of each quantized parameter, how many weights it holds: several may be in one number."""
    return {id(layer.weight): layer.num_weights for layer in find_quantized_layers(model).values()}


def dequantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces the quantized layers within a model by plain ones with weights of a type."""
    for name, layer in find_quantized_layers(model).items():
        model.set_submodule(name, layer.make_plain(layer.make_linear(dtype), dtype))
