"""The same model with less memory, or in less time: activations computed again, blocks compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from cpt.models.units import blocks

COMPILER: dict[str, Any] = {}  # what torch.compile is told of each block, beside its own choice
FLAG = "gradient_checkpointing"  # of the parts of a model of transformers


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
