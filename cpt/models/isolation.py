"""A model run on samples, or on documents, that share rows, as if each had a row of its own.

transformers keeps the samples of a row of a causal model apart by positions that begin anew (`position_ids`
without an `attention_mask`): eager attention and torch's own get a mask of blocks, windows and all,
FlexAttention its own. Of an encoder cpt.models.blocks makes the mask."""

import inspect
import logging
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from cpt.data.collate import Batch, Sharing, inputs_of
from cpt.models.blocks import KERNELS, block_masks, first_position, positions_within
from cpt.models.forward import at, hidden_states, in_mode

log = logging.getLogger(__name__)
LENGTHS = (7, 6, 5, 4, 3, 2, 1)  # of the samples that a model is tried on
APART = 1e-4  # of the largest hidden state: what rounding may make of a sample in another row
PRESENT = WeakTensorKeyDictionary()  # where text stands, by the input_ids [R, W] of shared rows


def inputs_for(model: PreTrainedModel, batch: Batch, *, causal: bool) -> tuple[dict[str, Any], Tensor | None]:
    """What a model takes of a batch, and where its samples stand in it, as `shared_inputs` has it. Documents
    that share rows are kept apart; padding is a document of its own."""
    segments = batch.get("segments")
    if segments is None:
        return shared_inputs(batch)
    ids, places = batch["input_ids"], positions_within(segments) + first_position(model)
    PRESENT[ids] = segments >= 0
    inputs = {"input_ids": ids, "position_ids": places}
    return (inputs if causal else inputs | {"attention_mask": block_masks(model, segments)}), None


def shared_inputs(batch: Batch) -> tuple[dict[str, Tensor], Tensor | None]:
    """What a model takes of a batch, and for each place [B * T] of its samples where it stands in the
    flattened input; None where every sample has its own row. The place of padding says nothing."""
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
    # The rest of a row is a sample of its own, of padding.
    return {"input_ids": ids, "position_ids": torch.where(present, layout % length, columns - filled)}, places


def by_sample(hidden: Tensor, places: Tensor, batch: Batch) -> Tensor:
    """Hidden states [B, T, D] of the samples from those [R, W, D] of the rows they share; at padding those of
    any token."""
    return at(hidden, places).unflatten(0, batch["input_ids"].shape)


def text_of(inputs: dict[str, Any]) -> Tensor | None:
    """Where text stands in what a model is called with, [B, T]; None where it stands everywhere."""
    ids = inputs.get("input_ids")
    return PRESENT.get(ids, inputs.get("attention_mask")) if isinstance(ids, Tensor) else None


def text_of_target(ids: Tensor, pad: int | None) -> Tensor | None:
    """Where a decoder's inputs [B, L] are no padding, which the first may look like; None: everywhere."""
    absent = ids == pad if pad is not None else torch.zeros_like(ids, dtype=torch.bool)
    absent[:, 0] = False
    return ~absent if absent.any() else None


def check_isolation(model: PreTrainedModel, *, causal: bool = True) -> None:
    """Raises ValueError for a model that, as far as its class tells, cannot keep samples of a row apart."""
    if model._is_stateful:
        refuse(model, "carries a state from token to token")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        refuse(model, "takes no positions")
    if not causal and (kernel := model.config._attn_implementation) not in KERNELS:
        raise ValueError(
            f"domains.packing=isolated does not go with trainer.attention={kernel} of an encoder; "
            f"allowed: {', '.join(('auto', *KERNELS))}"
        )


@torch.no_grad()
def try_isolation(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that does not give a sample in a shared row the hidden states that it has
    in a row of its own: a few samples are read both ways."""
    check_isolation(model)
    batch, present = tried_samples(model)
    inputs, places = shared_inputs(Sharing(even=1).lay_out(batch))
    assert places is not None
    with in_mode(model, training=False):
        alone = hidden_states(model, inputs_of(batch))[present]
        shared = by_sample(hidden_states(model, inputs), places, batch)[present]
    compare(model, alone, shared)


@torch.no_grad()
def try_documents(model: PreTrainedModel, *, causal: bool) -> None:
    """As `try_isolation`, of documents that share a row of text."""
    check_isolation(model, causal=causal)
    batch, present = tried_samples(model)
    owners = torch.arange(len(LENGTHS), device=model.device)[:, None].expand_as(present)[present][None]
    row: Batch = {"input_ids": batch["input_ids"][present][None], "segments": owners}
    with in_mode(model, training=False):
        alone = hidden_states(model, inputs_of(batch))[present]
        try:
            shared = hidden_states(model, inputs_for(model, row, causal=causal)[0])[0]
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            log.debug("blocks: %s", error)
            refuse(model, "takes no mask of blocks")
    compare(model, alone, shared)


def tried_samples(model: PreTrainedModel) -> tuple[Batch, Tensor]:
    """Samples that a model is tried on, and where they are no padding, [B, T]."""
    samples, width = len(LENGTHS), max(LENGTHS)
    entries, device = model.get_input_embeddings().weight.shape[0], model.device
    ids = (37 * torch.arange(1, samples * width + 1) % entries).view(samples, width).to(device)
    present = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    return {"input_ids": ids, "attention_mask": present.long().to(device)}, present.to(device)


def compare(model: PreTrainedModel, alone: Tensor, shared: Tensor) -> None:
    if not (alone - shared).abs().max() <= APART * alone.abs().max():
        refuse(model, "mixes the samples of a row")


def refuse(model: PreTrainedModel, why: str) -> NoReturn:
    raise ValueError(
        f"domains.packing=isolated does not go with a {model.config.model_type}, which {why}; "
        "allowed: domains.packing=none of examples, concat of text"
    )
