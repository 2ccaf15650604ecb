"""A model with LoRA pairs, in its parts."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod
from tests.support.forward_passes import logits_at


def clone_base_weights(module: ContinualMethod) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.model.named_parameters() if ".lora_" not in name}


def clone_adapter_weights(module: ContinualMethod) -> dict[str, Tensor]:
    names = [name for name, _ in module.model.named_parameters() if ".lora_" in name and ".default" in name]
    return {name: module.model.get_parameter(name).detach().clone() for name in names}


@torch.no_grad()
def scored_logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The logits [K, V] at the scored positions, without dropout."""
    return logits_at(model.eval(), batch)
