"""Parts of a model that are not trained, whatever the method."""

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from cpt.models.units import blocks


@dataclass(frozen=True)
class Freeze:
    """`embeddings`: tokens, positions and types, with a language-model head that is tied to them; `layers`:
    the first so many blocks. Raises ValueError for more blocks than there are."""

    embeddings: bool = False
    layers: int = 0

    def parameters(self, model: PreTrainedModel) -> list[nn.Parameter]:
        """The parameters that stay as they are."""
        if not self.embeddings and self.layers == 0:
            return []
        found = blocks(model)
        if not 0 <= self.layers <= len(found):
            raise ValueError(f"freeze.layers={self.layers}; allowed: 0 to {len(found)}, the model's blocks")
        within = {module for _, block in found for module in block.modules()}
        embedded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in within]
        chosen = [block for _, block in found[: self.layers]] + (embedded if self.embeddings else [])
        return list({id(p): p for module in chosen for p in module.parameters()}.values())
