"""Parts of a model that are not trained, whatever the method."""

from torch import nn
from transformers import PreTrainedModel

from cpt.models.options import Freeze
from cpt.models.units import blocks


def frozen_parameters(model: PreTrainedModel, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters that stay as they are. Raises ValueError for more blocks than there are."""
    if not freeze.embeddings and freeze.layers == 0:
        return []
    found = blocks(model)
    if freeze.layers > len(found):
        raise ValueError(f"freeze.layers={freeze.layers}; allowed: 0 to {len(found)}, the model's blocks")
    within = {module for _, block in found for module in block.modules()}
    embedded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in within]
    chosen = [block for _, block in found[: freeze.layers]] + (embedded if freeze.embeddings else [])
    return list({id(p): p for module in chosen for p in module.parameters()}.values())
