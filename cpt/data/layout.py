"""Samples of a batch laid out in fewer, fuller rows: what a model is run on, never what a batch means.

A batch keeps a row for each sample. Its `layout` says which of its places, flattened row after row, stands at
each place of the rows that samples share."""

from dataclasses import dataclass

import numpy as np
import torch

from cpt.data.batch import Batch

WIDER = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # widths that are tried, over the longest sample's


def share_rows(lengths: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """In rows of `width` tokens, the row of each sample [B] of so many tokens, and the place in it where the
    sample begins, [B]: the longest first, each in the first row that has room (first fit decreasing: Johnson,
    Demers, Ullman, Garey, Graham, SIAM Journal on Computing 3(4), 1974)."""
    rows, begins = np.zeros_like(lengths), np.zeros_like(lengths)
    room = np.full(len(lengths), width)
    for sample in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(room >= lengths[sample]))
        rows[sample], begins[sample] = row, width - room[row]
        room[row] -= lengths[sample]
    return rows, begins


@dataclass(frozen=True)
class Sharing:
    """How samples share rows: in those that cost least, and are at most as long as a sample or `limit` tokens
    (None: any). At each of a row's T places a model computes as much for attention, which masks do not
    spare, as T / `even` of all else."""

    even: int
    limit: int | None = None

    def cost(self, rows: int, width: int) -> int:
        """What so many rows of so many places cost."""
        return rows * width * (self.even + width)

    def lay_out(self, batch: Batch) -> Batch:
        """The batch with its layout [R, W], where its samples, padded at their ends, are cheaper in shared
        rows; else as it is. What is left of a row is filled with padding."""
        mask = batch.get("attention_mask")
        if mask is None:
            return batch
        lengths, columns = mask.sum(1).cpu().numpy(), np.arange(mask.shape[1])
        found = self.cheapest(lengths, mask.shape[1])
        if found is None:
            return batch
        rows, begins, count, width = found
        present = columns < lengths[:, None]
        layout = np.full(count * width, np.argmin(present))
        layout[((rows * width + begins)[:, None] + columns)[present]] = np.flatnonzero(present)
        return {**batch, "layout": torch.from_numpy(layout).view(count, width).to(mask.device)}

    def cheapest(self, lengths: np.ndarray, padded: int) -> tuple[np.ndarray, np.ndarray, int, int] | None:
        """The row and the beginning of each sample [B], how many rows, and how wide; None where padding the
        samples to so many tokens costs no more."""
        best, least, longest = None, self.cost(len(lengths), padded), int(lengths.max())
        widths = (int(times * longest) for times in WIDER)
        for width in sorted({min(width, max(longest, self.limit or width)) for width in widths}):
            rows, begins = share_rows(lengths, width)
            count, used = int(rows.max()) + 1, int((begins + lengths).max())
            if self.cost(count, used) < least:
                best, least = (rows, begins, count, used), self.cost(count, used)
        return best
