"""How much a model's blocks make of what they are given: ShortGPT's and AdaSVD's measure (Men et al., 2024,
arXiv 2403.03853; Li et al., 2025, arXiv 2502.01403), a block's input beside its output."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.core.collectives import sum_in_place
from cpt.data.collate import Batch
from cpt.models.objectives import Objective
from cpt.models.units import blocks

Seen = tuple[Tensor, Tensor]  # the hidden states that a block is given and those that it gives, [B, T, D]


@torch.no_grad()
def measure_similarity(model: PreTrainedModel, objective: Objective, batches: Iterable[Batch]) -> Tensor:
    """The mean cosine of each block's input and output over all tokens of all processes' batches, [blocks] in
    the order of `cpt.models.units.blocks`; 1 where there is none."""
    layers = [layer for _, layer in blocks(model)]
    sums = torch.zeros(2, len(layers), device=model.device)
    for batch in batches:
        with watch_blocks(layers) as seen:
            objective.nll(model, batch)
        for place, (given, made) in seen.items():
            cosines = functional.cosine_similarity(given.float(), made.float(), dim=-1)  # [B, T]
            present = batch.get("attention_mask")
            there = torch.ones_like(cosines) if present is None else present.to(cosines)
            if there.shape != cosines.shape:  # a mask of blocks, or of the other stack
                there = torch.ones_like(cosines)
            sums[:, place] += torch.stack([(cosines * there).sum(), there.sum()])
    sum_in_place(sums)
    total, count = sums
    return torch.where(count > 0, total / count.clamp_min(1), 1.0)


@contextmanager
def watch_blocks(layers: Sequence[nn.Module]) -> Iterator[dict[int, Seen]]:
    """While it lasts, what the latest forward pass gave each block and took from it, by the block's place."""
    seen: dict[int, Seen] = {}

    def look(place: int, module: nn.Module, args: tuple, given: dict[str, Any], made: Any) -> None:
        before = args[0] if args else given["hidden_states"]
        seen[place] = (before, made[0] if isinstance(made, tuple) else made)

    hooks = [
        layer.register_forward_hook(partial(look, place), with_kwargs=True)
        for place, layer in enumerate(layers)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
