"""A model run on a batch, as every language-model objective runs it; perhaps with other weights, by name."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.data.collate import Batch, label_batch, place_labels
from cpt.models.objectives import Causal
from cpt.models.weights import swap_weights

RUN = Causal()  # a masked one runs a model alike


def outputs_at(
    model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    with swap_weights(model, weights or {}):
        return RUN.outputs(model, batch)


def logits_at(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    return outputs_at(model, batch, weights=weights)[0]


def token_nll(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    with swap_weights(model, weights or {}):
        return RUN.nll(model, batch)


def encode_batch(model: PreTrainedModel, batch: Batch) -> Tensor:
    return RUN.encode(model, batch)


def make_batch(input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Batch:
    """The batch of rows [B, T] with labels [B, T], -100 for nothing; with the mask if there is one."""
    mask = {} if attention_mask is None else {"attention_mask": attention_mask}
    return {**label_batch(input_ids, labels, torch.ones_like(input_ids).bool()), **mask}


def select_rows(batch: Batch, rows: list[int]) -> Batch:
    mask = batch["attention_mask"][rows] if "attention_mask" in batch else None
    return make_batch(batch["input_ids"][rows], place_labels(batch)[rows], mask)
