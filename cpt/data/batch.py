"""What the loaders give: rows of tokens, which places of them are scored, and whose text they are."""

from dataclasses import dataclass
from typing import Protocol, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

INPUTS = ("input_ids", "attention_mask", "segments", "decoder_input_ids")  # what of a batch a model takes
UNSCORED = -100  # as in transformers: a label that nothing is to predict


class Batch(TypedDict, total=False):
    """B rows of T tokens, K of whose places are scored. An objective may add what its model takes. A model of
    encoder and decoder reads T tokens and gives L."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T], 0 at padding; only where a row is padded
    segments: Tensor  # [B, T], -1 at padding: where documents share rows isolated, the document of each token
    decoder_input_ids: Tensor  # [B, L], padded: of a model with a decoder, whose output it is that is scored
    positions: Tensor  # [K], ascending: the scored places of the model's output, flattened row after row
    targets: Tensor  # [K]: what is to be predicted there
    rows: Tensor  # [K]: the row that each scored place is in
    domains: Tensor  # [B]: the place in the order of the domain that a row's text is of, -1 for general text
    weight: Tensor  # a scalar: what the loss of each scored place is multiplied by
    layout: Tensor  # [R, W]: where samples share rows, the place in input_ids that stands at each of theirs
    column: Tensor  # a scalar, in evaluation: which held-out text it is
    documents: Tensor  # [K], in evaluation: the document that each target is of
    idle: Tensor  # a scalar: nothing is scored, the process only goes along with a pass of the others


@dataclass(frozen=True)
class Sizes:
    """What is known of rows before they are read."""

    text: np.ndarray  # [B]: tokens that are not special
    all: np.ndarray  # [B]: tokens
    answers: np.ndarray | None = None  # [B]: tokens of the answer, 0 for raw text; None where all is raw text
    documents: np.ndarray | None = None  # [B]: documents that share a row isolated; None where none do

    @classmethod
    def full(cls, length: int) -> "Sizes":
        """One row of so many tokens of text."""
        return cls(np.array([length]), np.array([length]))


@dataclass(frozen=True)
class Rows:
    """Rows as they are packed."""

    ids: np.ndarray  # [B, T] int64, padded
    lengths: np.ndarray  # [B]: tokens without padding
    keys: np.ndarray  # [B] uint64: what is drawn for a row is a function of its key
    answers: np.ndarray | None = None  # [B, T] bool: tokens of the answer; None where all is raw text
    segments: np.ndarray | None = None  # [B, T] int64: the document of each token, -1 at padding; None where
    # documents are not isolated

    @property
    def present(self) -> np.ndarray:
        """Where there is no padding, [B, T]."""
        return np.arange(self.ids.shape[1]) < self.lengths[:, None]

    def some(self, chosen: np.ndarray) -> "Rows":
        """The rows at some places."""
        answers = None if self.answers is None else self.answers[chosen]
        segments = None if self.segments is None else self.segments[chosen]
        return Rows(self.ids[chosen], self.lengths[chosen], self.keys[chosen], answers, segments)


class Collator(Protocol):
    """What makes batches of rows; `scored` tells ahead what `batch` will score."""

    @property
    def scoring(self) -> "Collator":
        """What makes the batches that held-out text is scored on."""

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch of rows, and for each scored place [K] which token of the rows it is there for: a place
        of their ids, flattened row after row."""

    def scored(self, sizes: Sizes) -> np.ndarray:
        """Scored places per row, [B], of rows of such sizes."""

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with a layout, where its samples are to share rows; else as it is."""


def label_batch(
    input_ids: Tensor,
    labels: Tensor,
    present: Tensor,
    *,
    decoder_input_ids: Tensor | None = None,
    segments: Tensor | None = None,
) -> Batch:
    """The batch of rows [B, T] whose outputs are to predict labels [B, T], nothing where they are UNSCORED;
    text stands at `present` [B, T], isolated by `segments` [B, T] where there are some. Of a model with a
    decoder, labels are those of its `decoder_input_ids` [B, L]."""
    positions = (labels.flatten() != UNSCORED).nonzero().flatten()
    targets, rows = labels.flatten()[positions], positions // labels.shape[1]
    batch: Batch = {"input_ids": input_ids, "positions": positions, "targets": targets, "rows": rows}
    if decoder_input_ids is not None:
        batch["decoder_input_ids"] = decoder_input_ids
    if segments is not None:
        batch["segments"] = segments
    return batch if present.all() else {**batch, "attention_mask": present.long()}


def output_ids(batch: Batch) -> Tensor:
    """The ids [B, L] that the places of a batch are those of: what a decoder takes, else `input_ids`."""
    return batch.get("decoder_input_ids", batch["input_ids"])


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    """What of a batch a model takes."""
    return {name: value for name, value in batch.items() if name in INPUTS and isinstance(value, Tensor)}


def labels_of(batch: Batch) -> Tensor:
    """Labels [B, L] as transformers takes them."""
    labels = torch.full_like(output_ids(batch).flatten(), UNSCORED)
    labels[batch["positions"]] = batch["targets"]
    return labels.view_as(output_ids(batch))


def single(batch: Batch, row: int) -> Batch:
    """One row of a batch as a batch, without a weight."""
    own, length = batch["rows"] == row, output_ids(batch).shape[1]
    one: Batch = {
        "positions": batch["positions"][own] - row * length,
        "targets": batch["targets"][own],
        "rows": torch.zeros_like(batch["rows"][own]),
    }
    inputs = {name: value[row : row + 1] for name, value in inputs_of(batch).items()}
    return cast(Batch, {**one, **inputs})


def idle_batch(batch: Batch) -> Batch:
    """The rows of a batch with nothing to score, with which a process only goes along with a pass of the
    others."""
    tensors = cast(dict[str, Tensor], batch)
    scored = ("positions", "targets", "rows", "documents")
    nothing = {name: value[:0] for name, value in tensors.items() if name in scored}
    return cast(Batch, {**tensors, **nothing, "idle": torch.tensor(1)})
