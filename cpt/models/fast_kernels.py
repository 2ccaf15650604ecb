"""The same model in less time: options of compiled blocks, a head padded for GPU kernels, and dropout masks
drawn quickly on a CPU."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from cpt.models.forward import set_temporarily

COMPILE_OPTIONS: dict[str, Any] = {}  # of torch.compile for each block
PADDED_MULTIPLE = 64  # outputs of a padded head are a multiple of it
ALIGNED_MULTIPLE = 8  # entries: rows of 16-bit logits of this multiple are aligned
OTHER_HEADS = ("classifier", "seq_classif", "qa", "summary")  # rates of dropout begin so
LEVELS_16 = 1 << 16  # values of 16 bits


class PaddedHead(nn.Linear):
    """A head padded with zero rows to a multiple of 64 outputs on a GPU in 16 bits, where logits of 50,257
    entries (GPT-2) miss the fast matrix kernels: 30 of 77 ms of a step of GPT-2 124M on an H100."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.is_cuda:
            return super().forward(hidden)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else hidden.dtype
        return self.padded(hidden) if dtype.itemsize == 2 else super().forward(hidden)

    def padded(self, hidden: Tensor) -> Tensor:
        """Outputs [..., V] of hidden states [..., D], cut from a multiple of 64."""
        padding = -self.out_features % PADDED_MULTIPLE
        weight = functional.pad(self.weight, (0, 0, 0, padding))
        bias = None if self.bias is None else functional.pad(self.bias, (0, padding))
        return functional.linear(hidden, weight, bias)[..., : self.out_features]


def pad_head(model: PreTrainedModel) -> None:
    """Makes a plain head a PaddedHead where its rows of 16-bit logits are not aligned, to 8 entries."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % ALIGNED_MULTIPLE:
        head.__class__ = PaddedHead


def quick_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    plain: Callable[..., Tensor],
) -> Tensor:
    """torch.nn.functional.dropout on a CPU with 16 random bits for each entry, which is dropped with the
    probability nearest to p in 1 / 65,536; `plain` elsewhere, and where nothing or everything is dropped."""
    if not training or not 0 < p < 1 or input.device.type != "cpu":
        return plain(input, p, training, inplace)

    # Four entries share the 64 bits of a drawn number: fewer draws are what makes it quick.
    num_draws = math.ceil(input.numel() / 4)
    draws = torch.empty(num_draws, dtype=torch.int64).random_(-(2**63), None)
    levels = draws.view(torch.int16)[: input.numel()].view(input.shape)

    # The lowest levels of -32,768 to 32,767 are dropped, but never all.
    num_dropped = min(round(p * LEVELS_16), LEVELS_16 - 1)
    is_kept = levels >= num_dropped - LEVELS_16 // 2
    noise = is_kept.to(input.dtype).mul_(LEVELS_16 / (LEVELS_16 - num_dropped))
    return input.mul_(noise) if inplace else input * noise


def use_quick_dropout(is_enabled: bool) -> AbstractContextManager[None]:
    """Dropout of modules and of eager attention is quick_dropout inside the context, if enabled."""
    if not is_enabled:
        return nullcontext()
    return set_temporarily((functional, "dropout", partial(quick_dropout, plain=functional.dropout)))


def drops_attention(config: PretrainedConfig) -> bool:
    """Whether attention weights are dropped; models without a rate for them use the general one."""
    fields = config.get_text_config().to_dict()
    rates = {name: value for name, value in fields.items() if type(value) in (int, float)}
    attention_rates = []
    for name, rate in rates.items():
        if "att" in name and "drop" in name and not name.startswith(OTHER_HEADS):
            attention_rates.append(rate)
    if not attention_rates:
        attention_rates = [rates.get("dropout", 0), rates.get("dropout_rate", 0)]
    return any(attention_rates)
