"""Models without storage, inside torch's FakeTensorMode: operations compute shapes and types alone, by the
kernels of a device."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpt.models.forward import set_temporarily

ATEN = torch.ops.aten


@contextmanager
def without_storage(mode: FakeTensorMode, *, is_gpu: bool) -> Iterator[None]:
    """What is built and run inside has no storage, and leaves the random numbers as they are. Attention is
    computed as on a GPU, or on a CPU."""
    changes: list[tuple[Any, str, Any]] = [
        (nn.Module, "_apply", apply_in_place),
        (functional, "grouped_mm", multiply_by_experts),
        # Its log of operations that fail: who catches an error reports it.
        (logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
    ]
    if is_gpu:
        changes.append((functional, "scaled_dot_product_attention", attend_on_gpu))
    with torch.random.fork_rng(devices=[]), set_temporarily(*changes), mode:
        yield


def apply_in_place(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As nn.Module._apply, which would replace parameters without storage by new ones, while methods and
    masks still refer to the old ones."""
    if recurse:
        for child in module.children():
            child._apply(convert)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        converted = convert(parameter.data)
        if parameter.is_meta and not converted.is_meta:  # of a new block, to which nothing refers yet
            module._parameters[name] = nn.Parameter(converted, requires_grad=parameter.requires_grad)
        else:
            parameter.data = converted
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = convert(buffer)
    return module


def multiply_by_experts(rows: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """torch.nn.functional.grouped_mm: the products of rows [S, D], each with one of the weights [E, D, F].
    Its options, such as which rows an expert has, change no size."""
    return cast(Tensor, _GroupedProduct.apply(rows, weights))


class _GroupedProduct(torch.autograd.Function):
    """Has the sizes and operations of a grouped product: the weight of one expert stands for all. As the
    product of torch it is in the type of its inputs, whatever autocast says."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        with torch.autocast("cpu", enabled=False):
            return rows @ weights[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weights = ctx.saved_tensors
        rows_gradient = None
        weights_gradient = None
        if ctx.needs_input_grad[0]:
            rows_gradient = gradient @ weights[0].T
        if ctx.needs_input_grad[1]:
            weights_gradient = torch.empty_like(weights)
            weights_gradient[0] = rows.T @ gradient
        return rows_gradient, weights_gradient


def attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention by the kernel that it chooses on a GPU (sdp_utils.cpp
    of torch 2.13): flash attention takes 16 bits and no mask, memory-efficient attention takes masks and
    32 bits, but no heads that share keys. Where neither does, all scores are computed."""
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)

    # Dropout changes no size: kernels are called with a probability of 0.
    if attn_mask is None and query.itemsize == 2:
        return ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]

    if query.shape[1] == key.shape[1]:
        bias = None
        if attn_mask is not None:
            # The kernel adds a mask to the scores, in their type; the heads share its memory.
            scores_shape = (*query.shape[:3], key.shape[2])
            bias = torch.zeros_like(attn_mask, dtype=query.dtype).expand(scores_shape)
        keeps_log_sums = True  # of the scores, for the backward pass
        return ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, keeps_log_sums, 0.0, is_causal
        )[0]
    with sdpa_kernel(SDPBackend.MATH):
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
