"""Attention within the documents of shared rows, by their cumulative lengths: the arguments with which
transformers calls the varlen functions of flash attention, and a plain form of these for a CPU.

transformers' own way, positions that restart, separates the documents of a single row only: of several rows
its flash attention ignores them (`_is_packed_sequence`, transformers 5.24)."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flash_attention_mask
from transformers.utils.generic import is_flash_attention_requested

REFERENCE = "cpt_varlen"  # the plain form's name in transformers


def takes_lengths(model: PreTrainedModel) -> bool:
    """Whether the attention of a model is given the lengths of documents in place of masks."""
    return model.config._attn_implementation == REFERENCE or uses_flash_attention(model)


def uses_flash_attention(model: PreTrainedModel) -> bool:
    """Whether a model runs a kernel of flash attention, not the plain form."""
    return is_flash_attention_requested(model.config)


def make_length_arguments(is_first: Tensor) -> dict[str, Any]:
    """The arguments of a model for rows [R, W] in which a document, or padding, begins where `is_first` is
    true, as it is at the first position of each row. Documents are counted through all rows, one after
    another: `cu_seq_lens` [documents + 1] int32 has where each begins in R * W, and R * W at last."""
    starts = is_first.flatten().nonzero().flatten()
    boundaries = functional.pad(starts, (0, 1), value=is_first.numel()).int()
    # No document is longer than a row. Its own length would have to be read from the device.
    longest = is_first.shape[1]
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def attend_within(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention, [R, W, heads, d], of queries [R, heads, W, d] to the keys and values of the same
    document, of which there may be fewer heads; without `cu_seq_lens_q` a row is a document, whose padding
    comes last. It has no dropout, caps and sinks, and ignores their arguments: it only serves to try whether
    the class of a model passes the lengths on (cpt.models.block_attention.try_lengths)."""
    num_rows, _, width, _ = query.shape
    boundaries = [width * row for row in range(num_rows + 1)]
    if cu_seq_lens_q is not None:
        boundaries = cu_seq_lens_q.tolist()

    # The rows one after the other: [heads, R * W, d].
    queries = query.transpose(0, 1).flatten(1, 2)
    keys = key.transpose(0, 1).flatten(1, 2)
    values = value.transpose(0, 1).flatten(1, 2)
    outputs = []
    for start, end in pairwise(boundaries):
        positions = torch.arange(end - start)
        distances = positions[:, None] - positions  # of a query from a key that is before it
        is_seen = distances >= 0
        if sliding_window is not None:
            is_seen = is_seen & (distances < sliding_window)
        output = functional.scaled_dot_product_attention(
            queries[:, start:end],
            keys[:, start:end],
            values[:, start:end],
            attn_mask=is_seen.to(query.device),
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(output)
    all_outputs = torch.cat(outputs, dim=1)  # [heads, R * W, d]
    return all_outputs.transpose(0, 1).unflatten(0, (num_rows, width)), None  # no weights of attention


AttentionInterface.register(REFERENCE, attend_within)
AttentionMaskInterface.register(REFERENCE, flash_attention_mask)
