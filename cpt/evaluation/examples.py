"""What is kept by example, in parquet files, and what became of each example from one model to another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pyarrow import Table

Array = np.ndarray
AGAIN = "delete it and give the run again"


def read_columns(path: Path, columns: Sequence[str], *, what: str, beside: Sequence[str] = ()) -> Table:
    """These columns of a file of `what`, every byte of them checked, and those `beside` that it has. Raises
    FileNotFoundError where there is none, and ValueError where it is damaged."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path, page_checksum_verification=True) as file:
            there = [name for name in beside if name in file.schema_arrow.names]
            return file.read(columns=[*columns, *there]).select([*columns, *there])
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, ArrowException) as error:
        said = " ".join(str(error).split())
        raise ValueError(f"{path}: damaged {what} ({said})") from None


def count_transitions(before: Array, after: Array, *, classes: float | None = None) -> dict[str, float]:
    """What became of each example, from its scores [example] by two models: forgotten (lower than it was; of
    right and wrong, 1 to 0), gained (higher; 0 to 1) and the others, which stayed.

    Counts and shares of all examples; of right and wrong with the number of classes C also the shares beyond
    chance, as in the code that Harmon et al. 2025 (arXiv 2510.17776) released: `max(0, share - (1 - a)
    (1 - b) / (C - 1))`, a and b the accuracies. It assumes that an example is either known or guessed,
    uniformly over the classes and independently each time. Then the guessed share is `C (1 - a) / (C - 1)`,
    right by luck before is `(1 - a) / (C - 1)`, wrong after is `1 - b`. Two fine-tunings guess alike, so this
    subtracts too much rather than too little.
    """
    counts = {"forgotten": int((after < before).sum()), "gained": int((after > before).sum())}
    found = {"examples": len(before), "before": float(before.mean()), "after": float(after.mean()), **counts}
    shares = {name: count / len(before) for name, count in counts.items()}
    found |= {f"{name}_share": share for name, share in shares.items()}
    if classes is not None and classes > 1:
        luck = (1 - found["before"]) * (1 - found["after"]) / (classes - 1)
        found |= {f"{name}_adjusted": max(0.0, share - luck) for name, share in shares.items()}
    return found
