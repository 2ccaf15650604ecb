"""Masks of dropout drawn quickly on a processor.

torch draws a Bernoulli number for each entry, one after another (docs/performance.md has what that takes).
Here 64 random bits of the same generator serve four entries. An entry is dropped with the probability nearest
to p in steps of 1 / 65,536, and the others are scaled by that very probability: the mean is the input's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig

LEVELS = 1 << 16  # values of 16 bits
ELSEWHERE = ("classifier", "seq_classif", "qa", "summary", "layerdrop")  # of other heads, or of whole layers
ONLY = ("dropout", "dropout_rate")  # attention's too, in models without a rate for attention

Dropout = Callable[..., Tensor]


def quick_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, plain: Dropout
) -> Tensor:
    """torch.nn.functional.dropout of a tensor of any shape on a processor; `plain` is called elsewhere, and
    where nothing or everything is dropped."""
    if not training or not 0 < p < 1 or input.device.type != "cpu":
        return plain(input, p, training, inplace)
    dropped = min(round(p * LEVELS), LEVELS - 1)
    bits = torch.empty(-(-input.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    drawn = bits.view(torch.int16)[: input.numel()].view(input.shape)
    noise = (drawn >= dropped - LEVELS // 2).to(input.dtype).mul_(LEVELS / (LEVELS - dropped))
    return input.mul_(noise) if inplace else input * noise


@contextmanager
def draw_quickly(wanted: bool) -> Iterator[None]:
    """Dropout of modules and of transformers' eager attention is quick_dropout while it lasts, if wanted."""
    plain = functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return quick_dropout(input, p, training, inplace, plain=plain)

    try:
        if wanted:
            functional.dropout = dropout
        yield
    finally:
        functional.dropout = plain


def dropout_rates(config: PretrainedConfig) -> dict[str, float]:
    """The rates of dropout that a configuration has, by name; some may be 0."""
    named = {name: rate for name, rate in config.get_text_config().to_dict().items() if "drop" in name}
    rates = {name: rate for name, rate in named.items() if type(rate) in (int, float)}
    return {name: rate for name, rate in rates.items() if not name.startswith(ELSEWHERE)}


def drops_attention(config: PretrainedConfig) -> bool:
    """Whether entries of the attention's weights are dropped."""
    rates = dropout_rates(config)
    own = [rate for name, rate in rates.items() if "att" in name]
    return any(own or [rate for name, rate in rates.items() if name in ONLY])
