"""Batches: rows of tokens, the places whose loss counts, and samples that share rows.

A batch keeps a row for each sample. Where samples share rows, its `layout` says which of its places,
flattened row after row, is at each place of the fewer, fuller rows that the model is run on."""

from dataclasses import dataclass
from typing import Protocol, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

INPUTS = ("input_ids", "attention_mask", "segments", "decoder_input_ids")  # what of a batch a model takes
UNSCORED = -100  # the label of a place without a loss, as in transformers
# Widths of shared rows that are tried, as multiples of the longest sample's.
WIDTH_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


class Batch(TypedDict, total=False):
    """B rows of T tokens, K of them scored; an encoder-decoder reads T tokens and predicts L."""

    input_ids: Tensor  # [B, T]
    attention_mask: Tensor  # [B, T], 0 at padding; only where a row is padded
    segments: Tensor  # [B, T], -1 at padding: the document of each token, where documents share rows isolated
    decoder_input_ids: Tensor  # [B, L], padded: of an encoder-decoder, whose decoder's output is scored
    positions: Tensor  # [K], ascending: the scored places of the model's output, flattened row after row
    targets: Tensor  # [K]: the token to predict there
    rows: Tensor  # [K]: the row of each scored place
    domains: Tensor  # [B]: the index of each row's domain in the order, -1 for other text
    weight: Tensor  # scalar: the factor of each scored place's loss
    mean_rows: Tensor  # scalar, in training: rows of a step over the parts that it is divided into
    mean_tokens: Tensor  # [2], in training: tokens read in a step (`count_read`) over its parts
    parts: Tensor  # [B], of a mixture: the part that each row is of, as numbered by Mixture.part_names
    part_weights: Tensor  # [B], of a mixture whose parts weigh differently: the factor of the loss on the row
    part_counts: Tensor  # [3, parts], of a mixture: rows, tokens and scored tokens of the whole step
    layout: Tensor  # [R, W]: the place in input_ids that is at each place of shared rows
    column: Tensor  # scalar, in evaluation: the number of the held-out text
    documents: Tensor  # [K], in evaluation: the document of each target
    idle: Tensor  # scalar: nothing is scored; the process only takes part in a collective forward pass


@dataclass(frozen=True)
class Sizes:
    """Token counts of rows, known before they are read."""

    text: np.ndarray  # [B]: tokens that are not special
    all: np.ndarray  # [B]: tokens
    answers: np.ndarray | None = None  # [B]: tokens of the answer, 0 for raw text; None where all is raw text
    documents: np.ndarray | None = None  # [B]: documents that share a row isolated; None where none do
    inserted: np.ndarray | None = None  # [B]: tokens that begin rows and are not of the text; None without


@dataclass(frozen=True)
class Rows:
    """Packed rows."""

    ids: np.ndarray  # [B, T] int64, padded
    lengths: np.ndarray  # [B]: tokens without padding
    keys: np.ndarray  # [B] uint64: what is drawn for a row is a function of its key
    answers: np.ndarray | None = None  # [B, T] bool: tokens of the answer; None where all is raw text
    segments: np.ndarray | None = None  # [B, T] int64: the document of each token, -1 at padding; or None

    @property
    def is_token(self) -> np.ndarray:
        """Where there is no padding, [B, T]."""
        return np.arange(self.ids.shape[1]) < self.lengths[:, None]

    def some(self, chosen: np.ndarray) -> "Rows":
        """Some of the rows."""
        return Rows(
            ids=self.ids[chosen],
            lengths=self.lengths[chosen],
            keys=self.keys[chosen],
            answers=None if self.answers is None else self.answers[chosen],
            segments=None if self.segments is None else self.segments[chosen],
        )


class Collator(Protocol):
    """Makes batches of rows; `scored` tells their scored places before they are read."""

    @property
    def scoring(self) -> "Collator":
        """The collator of held-out text."""

    def batch(self, rows: Rows) -> tuple[Batch, Tensor]:
        """The batch, and for each scored place [K] the place of its token in the flattened `rows.ids`."""

    def scored(self, sizes: Sizes) -> np.ndarray:
        """Scored places of each row, [B]."""

    def count_read(self, sizes: Sizes) -> np.ndarray:
        """Tokens of each row that a model reads, [2, B]: its encoder or body, and its decoder, 0 without an
        encoder."""

    def lay_out(self, batch: Batch) -> Batch:
        """The batch, with a `layout` where its samples are to share rows."""


def label_batch(
    input_ids: Tensor,
    labels: Tensor,
    is_token: Tensor,
    *,
    decoder_input_ids: Tensor | None = None,
    segments: Tensor | None = None,
) -> Batch:
    """The batch of rows [B, T] whose outputs predict `labels` ([B, T], or [B, L] of `decoder_input_ids`)
    where these are not UNSCORED; `is_token` [B, T] is false at padding."""
    positions = (labels.flatten() != UNSCORED).nonzero().flatten()
    batch: Batch = {
        "input_ids": input_ids,
        "positions": positions,
        "targets": labels.flatten()[positions],
        "rows": positions // labels.shape[1],
    }
    if decoder_input_ids is not None:
        batch["decoder_input_ids"] = decoder_input_ids
    if segments is not None:
        batch["segments"] = segments
    if not is_token.all():
        batch["attention_mask"] = is_token.long()
    return batch


def select_output_ids(batch: Batch) -> Tensor:
    """The ids [B, L] of the places that a model's output has: the decoder's, else `input_ids`."""
    return batch.get("decoder_input_ids", batch["input_ids"])


def select_inputs(batch: Batch) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name in INPUTS and isinstance(value, Tensor)}


def place_labels(batch: Batch) -> Tensor:
    """Labels [B, L], each at the position that predicts it."""
    labels = torch.full_like(select_output_ids(batch).flatten(), UNSCORED)
    labels[batch["positions"]] = batch["targets"]
    return labels.view_as(select_output_ids(batch))


def select_row(batch: Batch, row: int) -> Batch:
    """One row of a batch as a batch, without a weight."""
    is_of_row = batch["rows"] == row
    length = select_output_ids(batch).shape[1]
    row_batch: Batch = {
        "positions": batch["positions"][is_of_row] - row * length,
        "targets": batch["targets"][is_of_row],
        "rows": torch.zeros_like(batch["rows"][is_of_row]),
    }
    inputs = {name: value[row : row + 1] for name, value in select_inputs(batch).items()}
    row_batch.update(cast(Batch, inputs))
    return row_batch


def make_idle_batch(batch: Batch) -> Batch:
    """A batch without scored places, for a process that only takes part in a collective forward pass."""
    tensors = dict(cast(dict[str, Tensor], batch))
    for name in ("positions", "targets", "rows", "documents"):
        if name in tensors:
            tensors[name] = tensors[name][:0]
    tensors["idle"] = torch.tensor(1)
    return cast(Batch, tensors)


@dataclass(frozen=True)
class SharedRows:
    """Where samples are in rows that they share."""

    rows: np.ndarray  # [B]: the row of each sample
    begins: np.ndarray  # [B]: its first place in the row
    num_rows: int
    width: int  # places of a row, of which the fullest row has none free

    @classmethod
    def fill(cls, lengths: np.ndarray, max_width: int) -> "SharedRows":
        """Rows filled by first fit decreasing (Johnson, Demers, Ullman, Garey, Graham, SIAM Journal on
        Computing 3(4), 1974) with samples of `lengths` [B], none longer than `max_width`."""
        rows = np.zeros_like(lengths)
        begins = np.zeros_like(lengths)
        room = np.full(len(lengths), max_width)
        for sample in np.argsort(-lengths, kind="stable"):
            row = int(np.argmax(room >= lengths[sample]))
            rows[sample] = row
            begins[sample] = max_width - room[row]
            room[row] -= lengths[sample]
        return cls(rows, begins, num_rows=int(rows.max()) + 1, width=int((begins + lengths).max()))

    def layout(self, is_token: np.ndarray) -> np.ndarray:
        """The `layout` [R, W] of a batch whose places `is_token` [B, T] says are not padding."""
        # What stays free in the shared rows is filled with a place of padding, here the first.
        padding_place = np.argmin(is_token)
        layout = np.full((self.num_rows, self.width), padding_place)

        columns = np.arange(is_token.shape[1])
        flat_places = (self.rows * self.width + self.begins)[:, None] + columns  # [B, T]
        layout.ravel()[flat_places[is_token]] = np.flatnonzero(is_token)
        return layout


@dataclass(frozen=True)
class Sharing:
    """Lays the samples of a batch out in the cheapest rows, at most as long as the longest sample or `limit`
    tokens (None: any). A place costs as much as `even` tokens of attention, which masks do not spare."""

    even: int
    limit: int | None = None

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with its `layout` where shared rows cost less; their rest is filled with padding. Rows of
        several widths are tried."""
        mask = batch.get("attention_mask")
        if mask is None:  # no row is padded, so there is nothing to gain
            return batch

        # The cost of a token: a linear part (`even`) and attention over the width of its row.
        lengths = mask.sum(1).cpu().numpy()
        cheapest = None
        lowest_cost = mask.numel() * (self.even + mask.shape[1])  # of a row for each sample
        for width in self.widths(int(lengths.max())):
            shared_rows = SharedRows.fill(lengths, width)
            num_places = shared_rows.num_rows * shared_rows.width
            cost = num_places * (self.even + shared_rows.width)
            if cost < lowest_cost:
                cheapest = shared_rows
                lowest_cost = cost
        if cheapest is None:
            return batch

        is_token = np.arange(mask.shape[1]) < lengths[:, None]
        layout = torch.from_numpy(cheapest.layout(is_token))
        laid_out = batch.copy()
        laid_out["layout"] = layout.to(mask.device)
        return laid_out

    def widths(self, longest: int) -> list[int]:
        """Widths of rows to try for samples of which the longest has `longest` tokens, ascending."""
        widths = set()
        for factor in WIDTH_FACTORS:
            width = int(factor * longest)
            if self.limit:
                width = min(width, max(longest, self.limit))
            widths.add(width)
        return sorted(widths)
