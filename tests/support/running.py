"""A model run on a batch, as every language-model objective runs it; perhaps with other weights, by name."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from cpt.data.batch import Batch
from cpt.models.objectives import Causal
from cpt.models.swapping import swapped

RUN = Causal()  # a masked one runs a model alike


def outputs_at(
    model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    with swapped(model, weights or {}):
        return RUN.outputs(model, batch)


def logits_at(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    return outputs_at(model, batch, weights=weights)[0]


def token_nll(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    with swapped(model, weights or {}):
        return RUN.nll(model, batch)


def encoded(model: PreTrainedModel, batch: Batch) -> Tensor:
    return RUN.encode(model, batch)
