"""Losses by document of a run folder: `documents/000.npz` for the base, a file for each row of the matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from cpt.core.files import check_archive
from cpt.evaluation.scores import Scores

Losses = Mapping[str, np.ndarray]  # by text [2, documents]: nats and scored tokens of each document


def documents_file(folder: Path, row: int) -> Path:
    """Where a run folder has the losses of a row."""
    return folder / "documents" / f"{row:03d}.npz"


def load_documents(folder: Path, rows: Iterable[int]) -> list[dict[str, np.ndarray]]:
    """The losses of some rows of a run folder, by text [2, documents]. Raises ValueError for what is gone or
    damaged."""
    loaded = []
    for row in rows:
        path = documents_file(folder, row)
        check_archive(path, instead="bring it back from a copy")
        with np.load(path) as file:
            loaded.append(dict(file))
    return loaded


def gather_documents(rows: Sequence[Losses], scores: Scores) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By column, nats of each row and document, nan in a row without it, and scored tokens by document."""
    sums, counts = [], []
    for column, name in enumerate(scores.domains):
        count = next(row[name][1] for row in rows if name in row)
        blank = np.full(len(count), np.nan)
        there = [losses[column] is not None for losses in scores.nll]
        sums.append(np.stack([row[name][0] if own else blank for row, own in zip(rows, there, strict=True)]))
        counts.append(count)
    return sums, counts
