"""Packing with document masking: samples or documents share rows, and attend to themselves only.

transformers separates the samples of a causal row by `position_ids` that restart without an `attention_mask`;
an encoder is given a block-diagonal mask."""

import inspect
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.data.collate import Batch, Sharing, inputs_of
from cpt.models.forward import (
    SOURCE_TOKENS,
    TARGET_TOKENS,
    find_padded_positions,
    hidden_states,
    select_positions,
    set_mode,
)

log = logging.getLogger(__name__)
MASKABLE = ("sdpa", "eager")  # attention implementations that take a mask of blocks
TEXT_MASKS = WeakTensorKeyDictionary()  # where text is, by the input_ids [R, W] of shared rows


def make_inputs(
    model: PreTrainedModel, batch: Batch, *, causal: bool
) -> tuple[dict[str, Any], Tensor | None]:
    """What a model takes of a batch; where samples share rows, also the place [B * T] of each of their tokens
    in the flattened input, without meaning at padding. Documents are separated, padding is one too."""
    if (segments := batch.get("segments")) is not None:
        ids = batch["input_ids"]
        columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
        begins = torch.ones_like(segments, dtype=torch.bool)
        begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
        table = find_padded_positions(model)
        first = 0 if table is None or table.padding_idx is None else table.padding_idx + 1
        TEXT_MASKS[ids] = segments >= 0
        positions = columns - torch.where(begins, columns, 0).cummax(1).values + first
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        return (inputs if causal else inputs | {"attention_mask": make_block_masks(model, segments)}), None
    if (layout := batch.get("layout")) is None:
        return inputs_of(batch), None
    length, columns = batch["input_ids"].shape[1], torch.arange(layout.shape[1], device=layout.device)
    present = batch["attention_mask"].flatten()[layout].bool()
    filled = present.sum(1, keepdim=True)  # the rest of a row is a sample of padding
    ids = batch["input_ids"].flatten()[layout]
    TEXT_MASKS[ids] = present
    ordinals = torch.arange(layout.numel(), device=layout.device)
    places = torch.zeros_like(batch["input_ids"]).flatten().scatter(0, layout.flatten(), ordinals)
    return {"input_ids": ids, "position_ids": torch.where(present, layout % length, columns - filled)}, places


def make_block_masks(model: PreTrainedModel, segments: Tensor) -> Tensor | dict[str, Tensor]:
    """An encoder's masks [B, 1, T, T] in which each token sees its own document, by kind of layer."""
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


def split_samples(hidden: Tensor, places: Tensor | None, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of the samples from those [R, W, D] of rows that they may share."""
    return (
        hidden if places is None else select_positions(hidden, places).unflatten(0, batch["input_ids"].shape)
    )


def find_text_masks(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Where text is in a model's arguments, [B, T] by SOURCE_TOKENS and TARGET_TOKENS; None: everywhere. A
    decoder's inputs may begin with the id of padding."""
    ids, target = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    given = inputs.get("attention_mask")
    present = {SOURCE_TOKENS: TEXT_MASKS.get(ids, given) if isinstance(ids, Tensor) else None}
    if target is not None:
        pad = model.config.pad_token_id
        read = torch.ones_like(target, dtype=torch.bool) if pad is None else target != pad
        read[:, 0] = True
        present[TARGET_TOKENS] = None if read.all() else read
    return present


def check_isolation(model: PreTrainedModel, *, causal: bool = True) -> None:
    """Raises ValueError for a model whose class cannot separate the samples of a row."""
    if model._is_stateful:
        refuse_isolation(model, "carries a state from token to token")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse_isolation(model, "takes no positions")
    if not causal and (kernel := model.config._attn_implementation) not in MASKABLE:
        told = f"trainer.attn_implementation={kernel} is invalid with domains.packing=document_mask"
        raise ValueError(f"{told}. Allowed: auto, {', '.join(MASKABLE)}")


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
    row = Sharing(even=1).lay_out(batch)
    if documents:
        owners = torch.arange(len(lengths), device=device)[:, None].expand_as(present)[present][None]
        row = {"input_ids": ids[present][None], "segments": owners}
    with set_mode(model, training=False):
        alone = hidden_states(model, inputs_of(batch))[present]
        inputs, places = make_inputs(model, row, causal=causal)
        try:
            shared = hidden_states(model, inputs)
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            if not documents:
                raise
            log.debug("blocks: %s", error)
            refuse_isolation(model, "takes no mask of blocks")
    shared = shared[0] if documents else split_samples(shared, places, batch)[present]
    if not (alone - shared).abs().max() <= 1e-4 * alone.abs().max():  # rounding
        refuse_isolation(model, "mixes the samples of a row")


def refuse_isolation(model: PreTrainedModel, why: str) -> NoReturn:
    told = f"domains.packing=document_mask is invalid: a {model.config.model_type} {why}"
    raise ValueError(f"{told}. Allowed: domains.packing=none of examples, concat of text")
