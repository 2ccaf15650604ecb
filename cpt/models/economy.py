"""The same model with less memory, or in less time: activations computed again, blocks compiled, a head whose
size suits a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.models.units import blocks

COMPILER: dict[str, Any] = {}  # what torch.compile is told of each block, beside its own choice
FLAG = "gradient_checkpointing"  # of the parts of a model of transformers
ALIGNED = 8  # numbers in 16 bits, of which a row must be a multiple for the fast kernels of a GPU
EVEN = 64  # of which a multiple is computed instead


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Has each block keep only what it reads, and compute the rest again in the backward pass (Chen et al.
    2016, arXiv 1604.06174), with the random numbers of the first time: the gradients keep their bits, but for
    the order in which those of an encoder's output are added.

    Raises ValueError for a model that cannot do so."""
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"trainer.gradient_checkpointing=true: {type(model).__name__} cannot compute activations again; "
            "allowed: false"
        )
    # transformers 5 has the second name from some version on, which warns of the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


@contextmanager
def keep_activations(model: nn.Module) -> Iterator[None]:
    """The activations of passes made meanwhile are kept: what is in force only while a pass is made (gates, a
    dropout rate) would not be there when they are computed again."""
    computing = [part for part in model.modules() if getattr(part, FLAG, False)]
    for part in computing:
        setattr(part, FLAG, False)
    try:
        yield
    finally:
        for part in computing:
            setattr(part, FLAG, True)


def compile_blocks(model: PreTrainedModel) -> None:
    """Has torch compile the transformer blocks, each by itself: they are alike, so that one is compiled. What
    stands around them, embedding and head, is computed as ever. The numbers differ in their last digits."""
    for _, block in blocks(model):
        block.compile(**COMPILER)


class EvenHead(nn.Linear):
    """A head that a GPU in 16 bits computes with rows of zeros beside its own, whose outputs are cut away.

    Of a number of entries that is no multiple of 8 (50,257 of GPT-2, 50,265 of RoBERTa) the rows of logits do
    not begin where the fast matrix kernels can read them, and cuBLAS falls back to those of older GPUs: 30 of
    77 ms of a step of GPT-2 124M on an H100 were the three products of its head."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not (hidden.is_cuda and in_16_bits(hidden)):
            return super().forward(hidden)
        return self.filled(hidden)

    def filled(self, hidden: Tensor) -> Tensor:
        """Outputs [..., V] of hidden states [..., D], of which -V % 64 more are computed."""
        more = -self.out_features % EVEN
        weight = functional.pad(self.weight, (0, 0, 0, more))
        bias = None if self.bias is None else functional.pad(self.bias, (0, more))
        return functional.linear(hidden, weight, bias)[..., : self.out_features]


def in_16_bits(given: Tensor) -> bool:
    """Whether a product with it is computed in 16 bits here."""
    kind = given.device.type
    found = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype
    return found.itemsize == 2


def even_head(model: PreTrainedModel) -> None:
    """Has a plain head whose entries are no multiple of 8 be an EvenHead: the same parameters, and elsewhere
    than on a GPU in 16 bits the same bits."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.out_features % ALIGNED:
        head.__class__ = EvenHead
