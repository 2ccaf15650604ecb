"""The same model with less memory or time: activation checkpointing, compiled blocks, a head padded for GPU
kernels, and dropout masks drawn quickly on a CPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from cpt.models.forward import set_temporarily

COMPILE_OPTIONS: dict[str, Any] = {}  # of torch.compile for each block
CHECKPOINTING = "gradient_checkpointing"  # the attribute of transformers' modules
PADDED_MULTIPLE = 64  # outputs of a padded head are a multiple of it
OTHER_HEADS = ("classifier", "seq_classif", "qa", "summary")  # rates of dropout begin so
LEVELS_16 = 1 << 16  # values of 16 bits


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enables activation checkpointing per block (Chen et al. 2016, arXiv 1604.06174)."""
    if not model.supports_gradient_checkpointing:
        told = f"trainer.gradient_checkpointing=true is invalid: {type(model).__name__} does not support it"
        raise ValueError(f"{told}. Allowed: false")
    # transformers 5 has the second name from some version on, which warns of the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def keep_activations(model: nn.Module) -> AbstractContextManager[None]:
    """No activation checkpointing inside the context, whose gates or dropout a recomputation would lack."""
    enabled = [part for part in model.modules() if getattr(part, CHECKPOINTING, False)]
    return set_temporarily(*((part, CHECKPOINTING, False) for part in enabled))


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
        more = -self.out_features % PADDED_MULTIPLE
        weight = functional.pad(self.weight, (0, 0, 0, more))
        bias = None if self.bias is None else functional.pad(self.bias, (0, more))
        return functional.linear(hidden, weight, bias)[..., : self.out_features]


def pad_head(model: PreTrainedModel) -> None:
    """Makes a plain head a PaddedHead where its rows of 16-bit logits are not aligned, to 8 entries."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % 8:
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
    dropped = min(round(p * LEVELS_16), LEVELS_16 - 1)
    bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    drawn = bits.view(torch.int16)[: input.numel()].view(input.shape)
    noise = (drawn >= dropped - LEVELS_16 // 2).to(input.dtype).mul_(LEVELS_16 / (LEVELS_16 - dropped))
    return input.mul_(noise) if inplace else input * noise


def use_quick_dropout(wanted: bool) -> AbstractContextManager[None]:
    """Dropout of modules and of eager attention is quick_dropout inside the context, if wanted."""
    quick = partial(quick_dropout, plain=functional.dropout)
    return set_temporarily(*[(functional, "dropout", quick)] * wanted)


def drops_attention(config: PretrainedConfig) -> bool:
    """Whether attention weights are dropped; models without a rate for them use the general one."""
    rates = {n: r for n, r in config.get_text_config().to_dict().items() if type(r) in (int, float)}
    own = [r for n, r in rates.items() if "att" in n and "drop" in n and not n.startswith(OTHER_HEADS)]
    return any(own or [rates.get("dropout", 0), rates.get("dropout_rate", 0)])
