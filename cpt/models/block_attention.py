"""Samples or documents that share rows, with attention inside each of them only (packing with document
masking).

transformers separates the samples of a causal row by `position_ids` that restart without an `attention_mask`;
an encoder is given a block-diagonal mask."""

import inspect
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.data.collate import Batch, Sharing, inputs_of
from cpt.models.forward import at, hidden_states, in_mode

log = logging.getLogger(__name__)
MASKABLE = ("sdpa", "eager")  # attention implementations that take a mask of blocks
PRESENT = WeakTensorKeyDictionary()  # where text is, by the input_ids [R, W] of shared rows


def inputs_for(model: PreTrainedModel, batch: Batch, *, causal: bool) -> tuple[dict[str, Any], Tensor | None]:
    """What a model takes of a batch, and the place [B * T] of each of its samples' tokens in the flattened
    input, None where every sample has its own row. Documents are separated, padding is a document too."""
    segments = batch.get("segments")
    if segments is None:
        return shared_inputs(batch)
    ids = batch["input_ids"]
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = 0  # learned positions of RoBERTa and its like begin after that of padding
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            first = module.padding_idx + 1
            break
    PRESENT[ids] = segments >= 0
    positions = columns - torch.where(begins, columns, 0).cummax(1).values + first
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    return (inputs if causal else inputs | {"attention_mask": block_masks(model, segments)}), None


def block_masks(model: PreTrainedModel, segments: Tensor) -> Tensor | dict[str, Tensor]:
    """An encoder's attention_mask [B, 1, T, T] in which each token sees its own document: boolean, or for
    eager attention additive; by kind of layer where some have a sliding window."""
    seen = (segments[:, :, None] == segments[:, None, :])[:, None]
    masks = {"full_attention": seen}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        columns = torch.arange(segments.shape[1], device=segments.device)
        near = (columns[:, None] - columns).abs() <= model.config.sliding_window
        masks["sliding_attention"] = seen & near
    if model.config._attn_implementation == "eager":
        zero = torch.zeros((), dtype=model.dtype, device=seen.device)
        least = torch.finfo(model.dtype).min
        masks = {kind: torch.where(mask, zero, least) for kind, mask in masks.items()}
    return masks if len(masks) > 1 else masks["full_attention"]


def shared_inputs(batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
    """What a model takes of a batch, and for each place [B * T] of its samples the place in the flattened
    input; None where every sample has its own row. The place of padding means nothing."""
    layout = batch.get("layout")
    if layout is None:
        return inputs_of(batch), None
    length, columns = batch["input_ids"].shape[1], torch.arange(layout.shape[1], device=layout.device)
    present = batch["attention_mask"].flatten()[layout].bool()
    filled = present.sum(1, keepdim=True)
    ids = batch["input_ids"].flatten()[layout]
    PRESENT[ids] = present
    ordinals = torch.arange(layout.numel(), device=layout.device)
    places = torch.zeros_like(batch["input_ids"]).flatten().scatter(0, layout.flatten(), ordinals)
    # The rest of a row is a sample of padding.
    return {"input_ids": ids, "position_ids": torch.where(present, layout % length, columns - filled)}, places


def by_sample(hidden: Tensor, places: Tensor, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of the samples from those [R, W, D] of shared rows; at padding, of any
    token."""
    return at(hidden, places).unflatten(0, batch["input_ids"].shape)


def present_in(inputs: dict[str, Any]) -> Tensor | None:
    """Where text is in a model's arguments, [B, T]; None: everywhere."""
    ids = inputs.get("input_ids")
    return PRESENT.get(ids, inputs.get("attention_mask")) if isinstance(ids, Tensor) else None


def present_in_target(ids: Tensor, pad: int | None) -> Tensor | None:
    """Where a decoder's inputs [B, L] are no padding, whose id the first token may have; None: everywhere."""
    absent = ids == pad if pad is not None else torch.zeros_like(ids, dtype=torch.bool)
    absent[:, 0] = False
    return ~absent if absent.any() else None


def check_isolation(model: PreTrainedModel, *, causal: bool = True) -> None:
    """Raises ValueError for a model whose class cannot separate the samples of a row."""
    if model._is_stateful:
        refuse_isolation(model, "carries a state from token to token")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse_isolation(model, "takes no positions")
    if not causal and (kernel := model.config._attn_implementation) not in MASKABLE:
        raise ValueError(
            f"domains.packing=isolated does not go with trainer.attention={kernel} of an encoder; "
            f"allowed: {', '.join(('auto', *MASKABLE))}"
        )


@torch.no_grad()
def try_isolation(model: PreTrainedModel, *, documents: bool, causal: bool = True) -> None:
    """Raises ValueError for a model whose hidden states of a few samples in shared rows, or of `documents` in
    a row of text, are not those of rows of their own."""
    check_isolation(model, causal=causal)
    lengths, device = (7, 6, 5, 4, 3, 2, 1), model.device
    entries = model.get_input_embeddings().weight.shape[0]
    ids = (37 * torch.arange(1, len(lengths) * max(lengths) + 1) % entries).view(len(lengths), -1).to(device)
    present = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(device)
    batch: Batch = {"input_ids": ids, "attention_mask": present.long()}
    with in_mode(model, training=False):
        alone = hidden_states(model, inputs_of(batch))[present]
        if documents:
            owners = torch.arange(len(lengths), device=device)[:, None].expand_as(present)[present][None]
            row: Batch = {"input_ids": ids[present][None], "segments": owners}
            try:
                shared = hidden_states(model, inputs_for(model, row, causal=causal)[0])[0]
            except (RuntimeError, TypeError, AttributeError, IndexError) as error:
                log.debug("blocks: %s", error)
                refuse_isolation(model, "takes no mask of blocks")
        else:
            inputs, places = shared_inputs(Sharing(even=1).lay_out(batch))
            assert places is not None
            shared = by_sample(hidden_states(model, inputs), places, batch)[present]
    if not (alone - shared).abs().max() <= 1e-4 * alone.abs().max():  # rounding
        refuse_isolation(model, "mixes the samples of a row")


def refuse_isolation(model: PreTrainedModel, why: str) -> NoReturn:
    raise ValueError(
        f"domains.packing=isolated does not go with a {model.config.model_type}, which {why}; "
        "allowed: domains.packing=none of examples, concat of text"
    )
