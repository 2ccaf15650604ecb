"""Samples of a batch laid out in fewer, fuller rows: what a model is run on, never what a batch means.

A batch keeps a row for each sample. Its `layout` says which of its places, flattened row after row, stands at
each place of the rows that samples share."""

import numpy as np
import torch

from cpt.data.batch import Batch


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


def lay_out(batch: Batch) -> Batch:
    """The batch with its layout [R, T], where its samples, padded at their ends, take fewer rows R than there
    are samples; else as it is. What is left of a row is filled with padding."""
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    lengths, width = mask.sum(1).cpu().numpy(), mask.shape[1]
    rows, begins = share_rows(lengths, width)
    if (count := int(rows.max()) + 1) == len(lengths):
        return batch
    columns = np.arange(width)
    present = columns < lengths[:, None]
    layout = np.full(count * width, np.argmin(present))
    layout[((rows * width + begins)[:, None] + columns)[present]] = np.flatnonzero(present)
    return {**batch, "layout": torch.from_numpy(layout).view(count, width).to(mask.device)}
