"""Positions and attention masks of documents that share rows: blocks along the diagonal."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

KERNELS = ("sdpa", "eager")  # ways to compute attention that take a mask of blocks
SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers, as configurations name them


def positions_within(segments: Tensor) -> Tensor:
    """The place of each token in its document, [B, T], from 0 on; `segments` [B, T] says which that is."""
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - torch.where(begins, columns, 0).cummax(1).values


def first_position(model: PreTrainedModel) -> int:
    """The position of a row's first token: 0; of RoBERTa and its like, whose learned positions stand behind
    that of padding, the one behind it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def block_masks(model: PreTrainedModel, segments: Tensor) -> Tensor | dict[str, Tensor]:
    """What an encoder takes as its attention_mask so that each token sees its own document alone,
    [B, 1, T, T]: for torch's attention whether it is seen, for eager what is added to the scores. By the kind
    of layer where some of them have a window."""
    seen = (segments[:, :, None] == segments[:, None, :])[:, None]
    if SLIDING not in (getattr(model.config, "layer_types", None) or ()):
        return as_taken(model, seen)
    columns = torch.arange(segments.shape[1], device=segments.device)
    near = (columns[:, None] - columns).abs() <= model.config.sliding_window
    return {FULL: as_taken(model, seen), SLIDING: as_taken(model, seen & near)}


def as_taken(model: PreTrainedModel, seen: Tensor) -> Tensor:
    """A mask as the model's attention takes it."""
    if model.config._attn_implementation != "eager":
        return seen
    nothing = torch.zeros((), dtype=model.dtype, device=seen.device)
    return torch.where(seen, nothing, torch.finfo(model.dtype).min)
