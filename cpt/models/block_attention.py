"""Packing with document masking: samples or documents share rows, and attend to themselves only.

transformers separates the samples of a causal row by `position_ids` that restart without an `attention_mask`;
an encoder is given a block-diagonal mask, as is a gpt-oss, whose class makes its masks without positions.
Flash attention is given the cumulative lengths of all documents in addition (cpt.models.varlen_attention)."""

import inspect
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.data.collate import Batch, Sharing, select_inputs
from cpt.models.forward import (
    SOURCE_TOKENS,
    TARGET_TOKENS,
    find_padded_positions,
    hidden_states,
    select_positions,
    set_mode,
)
from cpt.models.narrow_layers import find_hidden_dtype
from cpt.models.varlen_attention import REFERENCE, make_length_arguments, takes_lengths

log = logging.getLogger(__name__)
MASKABLE = ("sdpa", "eager")  # attention implementations that take a mask of blocks
MASKS_WITHOUT_POSITIONS = ("gpt_oss",)  # model types whose class makes masks that do not depend on positions
TEXT_MASKS = WeakTensorKeyDictionary()  # where text is, by the input_ids [R, W] of shared rows


def make_inputs(
    model: PreTrainedModel, batch: Batch, *, causal: bool
) -> tuple[dict[str, Any], Tensor | None]:
    """What a model takes of a batch; where samples share rows, also the position [B * T] of each of their
    tokens in the flattened input, without meaning at padding. Documents are separated, padding is one too."""
    if "segments" in batch:
        return separate_documents(model, batch["input_ids"], batch["segments"], causal=causal), None
    if "layout" in batch:
        return separate_samples(model, batch, batch["layout"])
    return select_inputs(batch), None


def separate_documents(
    model: PreTrainedModel, ids: Tensor, segments: Tensor, *, causal: bool
) -> dict[str, Any]:
    """The arguments for rows [B, T] of ids whose documents, by their `segments`, do not see each other."""
    is_first = torch.ones_like(segments, dtype=torch.bool)
    is_first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    document_starts = torch.where(is_first, columns, 0).cummax(1).values
    table = find_padded_positions(model)
    first_position = 0 if table is None or table.padding_idx is None else table.padding_idx + 1

    # No attention_mask says where text is, so that modules which need it look it up by the ids.
    TEXT_MASKS[ids] = segments >= 0
    position_ids = columns - document_starts + first_position
    if takes_lengths(model):
        return {"input_ids": ids, "position_ids": position_ids, **make_length_arguments(is_first)}
    if causal and not needs_causal_masks(model):
        return {"input_ids": ids, "position_ids": position_ids}
    masks = make_block_masks(model, segments, causal=causal)
    return {"input_ids": ids, "position_ids": position_ids, "attention_mask": masks}


def separate_samples(model: PreTrainedModel, batch: Batch, layout: Tensor) -> tuple[dict[str, Any], Tensor]:
    """The arguments for the samples of a batch in the shared rows of a layout [R, W], and the position
    [B * T] of each of their tokens in these."""
    length = batch["input_ids"].shape[1]
    is_token = batch["attention_mask"].flatten()[layout].bool()
    ids = batch["input_ids"].flatten()[layout]
    TEXT_MASKS[ids] = is_token

    # The rest of a row is a sample of padding: its positions restart at 0, as those of every sample.
    num_tokens = is_token.sum(1, keepdim=True)
    columns = torch.arange(layout.shape[1], device=layout.device)
    position_ids = torch.where(is_token, layout % length, columns - num_tokens)

    # The layout says which token is at each place of the rows: its inverse gives the place of each token.
    row_positions = torch.arange(layout.numel(), device=layout.device)
    positions = torch.zeros_like(batch["input_ids"]).flatten().scatter(0, layout.flatten(), row_positions)
    if takes_lengths(model):
        lengths = make_length_arguments(position_ids == 0)
        return {"input_ids": ids, "position_ids": position_ids, **lengths}, positions
    if not needs_causal_masks(model):
        return {"input_ids": ids, "position_ids": position_ids}, positions

    owners = torch.where(is_token, layout // length, -1)
    masks = make_block_masks(model, owners, causal=True)
    return {"input_ids": ids, "position_ids": position_ids, "attention_mask": masks}, positions


def needs_causal_masks(model: PreTrainedModel) -> bool:
    """Whether a causal model has to be given masks."""
    has_wrong_masks = model.config.model_type in MASKS_WITHOUT_POSITIONS
    return has_wrong_masks and model.config._attn_implementation in MASKABLE


def make_block_masks(model: PreTrainedModel, segments: Tensor, *, causal: bool) -> Tensor | dict[str, Tensor]:
    """The masks [B, 1, T, T] in which each token sees its own document, by kind of layer: all of it, of a
    causal model what is before."""
    is_seen = (segments[:, :, None] == segments[:, None, :])[:, None]
    columns = torch.arange(segments.shape[1], device=segments.device)
    distances = columns[:, None] - columns
    if causal:
        is_seen = is_seen & (distances >= 0)

    masks = {"full_attention": is_seen}
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
        # A causal window counts the token itself, an encoder's the tokens on each side.
        window = model.config.sliding_window
        is_near = distances < window if causal else distances.abs() <= window
        masks["sliding_attention"] = is_seen & is_near

    # Eager attention adds a mask to its scores, others take it as truth values.
    if model.config._attn_implementation == "eager":
        dtype = find_hidden_dtype(model)
        zero = torch.zeros((), dtype=dtype, device=is_seen.device)
        lowest = torch.finfo(dtype).min
        masks = {kind: torch.where(mask, zero, lowest) for kind, mask in masks.items()}
    return masks if len(masks) > 1 else masks["full_attention"]


def split_samples(hidden: Tensor, positions: Tensor | None, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of the samples from those [R, W, D] of rows that they may share."""
    if positions is None:
        return hidden
    return select_positions(hidden, positions).unflatten(0, batch["input_ids"].shape)


def find_text_masks(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    """Where text is in a model's arguments, [B, T] by SOURCE_TOKENS and TARGET_TOKENS; None: everywhere. A
    decoder's inputs may begin with the id of padding."""
    ids = inputs.get("input_ids")
    attention_mask = inputs.get("attention_mask")
    # Masks registered for these very input ids (by identity), where padding is not masked.
    source_mask = TEXT_MASKS.get(ids, attention_mask) if isinstance(ids, Tensor) else None
    masks: dict[str, Tensor | None] = {SOURCE_TOKENS: source_mask}

    decoder_ids = inputs.get("decoder_input_ids")
    if decoder_ids is not None:
        pad = model.config.pad_token_id
        target_mask = torch.ones_like(decoder_ids, dtype=torch.bool) if pad is None else decoder_ids != pad
        target_mask[:, 0] = True
        masks[TARGET_TOKENS] = None if target_mask.all() else target_mask
    return masks


def check_isolation(model: PreTrainedModel, *, causal: bool = True) -> None:
    """Raises ValueError for a model whose class cannot separate the samples of a row."""
    # Only restarting positions mark where a sample begins, and recurrent states ignore them.
    if model._is_stateful:
        refuse_isolation(model, "carries a state from token to token")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse_isolation(model, "takes no positions")
    implementation = model.config._attn_implementation
    if not causal and implementation not in MASKABLE:
        raise InvalidOptionError(
            "trainer.attn_implementation",
            implementation,
            context="with domains.packing=document_mask",
            allowed=f"auto, {', '.join(MASKABLE)}",
        )


@torch.no_grad()
def try_isolation(model: PreTrainedModel, *, are_documents: bool, causal: bool = True) -> None:
    """Raises ValueError for a model whose hidden states of a few samples in shared rows, or with
    `are_documents` in a row of text, are not those of rows of their own."""
    check_isolation(model, causal=causal)

    # Samples of different lengths, and the same ones in shared rows.
    lengths = torch.tensor([7, 6, 5, 4, 3, 2, 1])
    longest = int(lengths.max())
    num_entries = model.get_input_embeddings().weight.shape[0]
    ids = (37 * torch.arange(1, len(lengths) * longest + 1) % num_entries).view(len(lengths), -1)
    ids = ids.to(model.device)
    is_token = (torch.arange(longest) < lengths[:, None]).to(model.device)
    batch: Batch = {"input_ids": ids, "attention_mask": is_token.long()}
    if are_documents:
        owners = torch.arange(len(lengths), device=model.device)[:, None].expand_as(is_token)
        shared_batch: Batch = {"input_ids": ids[is_token][None], "segments": owners[is_token][None]}
    else:
        shared_batch = Sharing(even=1).lay_out(batch)

    with set_mode(model, training=False):
        separate = hidden_states(model, select_inputs(batch))[is_token]
        inputs, positions = make_inputs(model, shared_batch, causal=causal)
        try:
            shared = hidden_states(model, inputs)
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            # Samples in shared rows need no mask of blocks, so the error has another cause.
            if not are_documents:
                raise
            log.debug("blocks: %s", error)
            refuse_isolation(model, "takes no mask of blocks")
    shared = shared[0] if are_documents else split_samples(shared, positions, batch)[is_token]
    if not (separate - shared).abs().max() <= 1e-4 * separate.abs().max():  # rounding; nan differs
        refuse_isolation(model, "mixes the samples of a row")


def try_lengths(model: PreTrainedModel, *, are_documents: bool) -> None:
    """Raises ValueError for a causal model whose class does not pass the lengths of samples, or of documents
    with `are_documents`, on to flash attention, which would mix them. Tried with a plain form of it."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(REFERENCE)
    try:
        try_isolation(model, are_documents=are_documents)
    except InvalidOptionError as error:
        raise InvalidOptionError(
            "trainer.attn_implementation",
            implementation,
            context="with domains.packing=document_mask",
            reason=f"a {model.config.model_type} does not tell it where documents begin",
            allowed=f"auto, {', '.join(MASKABLE)}",
        ) from error
    finally:
        model.set_attn_implementation(implementation)


def refuse_isolation(model: PreTrainedModel, reason: str) -> NoReturn:
    raise InvalidOptionError(
        "domains.packing",
        "document_mask",
        reason=f"a {model.config.model_type} {reason}",
        allowed="domains.packing=none of examples, concat of text",
    )
