"""Frozen weights that stay in 16 bits, as a checkpoint stores them, in layers that compute with them in the
precision of the run.

Each number of 16 bits is one of 32, so that a layer gives the bits of one with a copy of its weight in 32
bits: in its output, and in the gradient of its input. No such copy is kept: the weight is widened when it is
used, and again in the backward pass. Embeddings, linear layers and GPT-2's convolutions are narrow, which
have nearly all weights of a decoder; norms, biases and other parameters are in 32 bits."""

from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import Any, Self, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.models.fast_kernels import ALIGNED_MULTIPLE, PaddedHead
from cpt.models.forward import set_temporarily


class _WidenedProduct(torch.autograd.Function):
    """x W^T + b, of inputs x [..., d_in] and a frozen W [d_out, d_in] in another type."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(inputs, weight.to(inputs.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        needs_input, _, needs_bias = ctx.needs_input_grad
        input_gradient = gradient @ weight.to(gradient.dtype) if needs_input else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return input_gradient, None, bias_gradient


def multiply(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in the precision of the run: that of autocast, or of the inputs."""
    device_type = inputs.device.type
    dtype = inputs.dtype
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        cast_bias = None if bias is None else bias.to(dtype)
        if weight.dtype == dtype:
            return functional.linear(inputs.to(dtype), weight, cast_bias)
        return cast(Tensor, _WidenedProduct.apply(inputs.to(dtype), weight, cast_bias))


class NarrowLayer(nn.Module):
    """A layer of another class whose `weight` may be in 16 bits."""

    weight: Any  # a parameter
    plain_class: type[nn.Module]  # with the weight in 32 bits
    # The type of its outputs; peft makes adapters of this type.
    compute_dtype = torch.float32

    @property
    def is_narrow(self) -> bool:
        return cast(int, self.weight.itemsize) < self.compute_dtype.itemsize

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # What casts a module casts its outputs.
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device)).dtype
        return super()._apply(fn, recurse)


class NarrowLinear(NarrowLayer, nn.Linear):
    plain_class = nn.Linear

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_narrow:
            return super().forward(inputs)
        return multiply(inputs, self.weight, self.bias)


class NarrowHead(NarrowLinear, PaddedHead):
    plain_class = PaddedHead

    def forward(self, inputs: Tensor) -> Tensor:
        # A GPU multiplies with a padded weight, whatever its type.
        if inputs.is_cuda and torch.is_autocast_enabled("cuda"):
            return PaddedHead.forward(self, inputs)
        return super().forward(inputs)


class NarrowConv1D(NarrowLayer, Conv1D):
    plain_class = Conv1D

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.is_narrow:
            return cast(Tensor, super().forward(inputs))
        return multiply(inputs, self.weight.T, cast(Tensor, self.bias))


class NarrowEmbedding(NarrowLayer, nn.Embedding):
    plain_class = nn.Embedding

    def forward(self, ids: Tensor) -> Tensor:
        if not self.is_narrow:
            return super().forward(ids)
        rows = functional.embedding(ids, self.weight).to(self.compute_dtype)
        if self.plain_class is nn.Embedding:
            return rows

        # A subclass may change the rows that it looks up, for example scale them. So its own forward pass
        # looks them up again, in a table of these rows alone, where a row has its number in the batch as its
        # id. The id of padding means another row there: it is taken away.
        table = cast(nn.Parameter, rows.flatten(0, -2))
        numbers = torch.arange(len(table), device=ids.device).view(ids.shape)
        narrow_weight = self.weight
        self._parameters["weight"] = table
        try:
            with set_temporarily((self, "padding_idx", None)):
                return super().forward(numbers)
        finally:
            self._parameters["weight"] = narrow_weight


@cache
def make_narrow_class(kind: type[nn.Module]) -> type[NarrowLayer] | None:
    """The narrow class of a class of layers, None for those without."""
    for narrow_class in (NarrowLinear, NarrowConv1D, NarrowEmbedding, NarrowHead):
        if kind is narrow_class.plain_class:
            return narrow_class
    if issubclass(kind, nn.Embedding):
        return type(f"Narrow{kind.__name__}", (NarrowEmbedding, kind), {"plain_class": kind})
    return None


def make_narrow(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Makes the layers of a model narrow, and their weights of a type of 16 bits. Weights stay in 32 bits if
    another module has them too, or if transformers keeps them in 32 bits."""
    head = model.get_output_embeddings()
    wide_names = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    layers: dict[nn.Module, type[NarrowLayer]] = {}
    wide_ids = set[int]()  # of parameters that stay in 32 bits
    for name, module in model.named_modules():
        kind = type(module)
        if module is head and kind is nn.Linear and module.out_features % ALIGNED_MULTIPLE:
            kind = PaddedHead  # which `pad_head` makes of it
        narrow_class = make_narrow_class(cast(Any, kind))
        is_kept_wide = not wide_names.isdisjoint(name.split("."))
        for parameter_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if narrow_class is not None and parameter_name == "weight" and not is_kept_wide:
                layers[module] = narrow_class
            else:
                wide_ids.add(id(parameter))

    for module, narrow_class in layers.items():
        if id(module.weight) not in wide_ids:
            module.__class__ = narrow_class
            module.weight.data = cast(Tensor, module.weight).data.to(dtype)


@torch.no_grad()
def widen(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Makes parameters of a model 32 bits wide, and their layers plain ones. Nothing changes in a model
    without narrow layers."""
    narrow_layers = [module for module in model.modules() if isinstance(module, NarrowLayer)]
    if not narrow_layers:
        return
    widened_ids = {id(parameter) for parameter in parameters}
    for layer in narrow_layers:
        weight = layer.weight
        if id(weight) not in widened_ids:
            continue
        if layer.is_narrow:  # not if a layer with the same weight has widened it
            weight.data = weight.data.to(layer.compute_dtype)
        layer.__dict__.pop("compute_dtype", None)
        layer.__class__ = layer.plain_class  # type: ignore[assignment]


def find_narrow_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of a model that are in 16 bits, a tied one once."""
    weights = dict[nn.Parameter, None]()
    for module in model.modules():
        if isinstance(module, NarrowLayer) and module.is_narrow:
            weights[module.weight] = None
    return list(weights)


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """The type of what a layer with a weight computes: what is trained with it has this type."""
    if isinstance(layer, NarrowLayer):
        return layer.compute_dtype
    return cast(Tensor, layer.weight).dtype


def find_hidden_dtype(model: PreTrainedModel) -> torch.dtype:
    """The type of a model's hidden states outside of autocast."""
    table = model.get_input_embeddings()
    return compute_dtype(table.get_base_layer() if isinstance(table, BaseTunerLayer) else table)


def make_empty_hidden(model: PreTrainedModel) -> Tensor:
    """An empty tensor like a model's hidden states outside of autocast: of their type, on their device."""
    return torch.empty(0, dtype=find_hidden_dtype(model), device=model.get_input_embeddings().weight.device)


def copy_trainable(model: PreTrainedModel) -> PreTrainedModel:
    """A copy in 32 bits, all of it trainable."""
    copied = deepcopy(model)
    widen(copied, copied.parameters())
    return copied.requires_grad_(True)
