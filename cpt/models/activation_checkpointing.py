"""Activation checkpointing: activations are computed again in the backward pass instead of being kept."""

from contextlib import AbstractContextManager

from torch import nn
from transformers import PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.models.forward import set_temporarily

CHECKPOINTING = "gradient_checkpointing"  # the attribute of transformers' modules


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Enables activation checkpointing per block (Chen et al. 2016, arXiv 1604.06174). Raises ValueError for
    a model whose class does not support it."""
    if not model.supports_gradient_checkpointing:
        raise InvalidOptionError(
            "trainer.gradient_checkpointing",
            True,
            reason=f"{type(model).__name__} does not support it",
            allowed="false",
        )
    # transformers 5 has the second name from some version on, which warns of the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def stop_checkpointing(model: nn.Module) -> None:
    """Disables activation checkpointing."""
    for module in model.modules():
        if getattr(module, CHECKPOINTING, False):
            setattr(module, CHECKPOINTING, False)


def keep_activations(model: nn.Module) -> AbstractContextManager[None]:
    """No activation checkpointing inside the context, whose gates or dropout a recomputation would lack."""
    changes = []
    for module in model.modules():
        if getattr(module, CHECKPOINTING, False):
            changes.append((module, CHECKPOINTING, False))
    return set_temporarily(*changes)
