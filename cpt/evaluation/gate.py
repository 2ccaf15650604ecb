"""Whether a model may take the place of the one before it: it must have gained on what is new, and have lost
no more than is allowed on what is old, each with its interval over documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import bootstrap
from cpt.evaluation.scores import Scores

REPLICATES = 2000
Losses = Mapping[str, np.ndarray]  # by text [2, documents]: nats and scored tokens of each document


@dataclass(frozen=True)
class Bounds:
    """Nats per token: what new text must at least gain, and what old text may at most lose."""

    gain: float
    loss: float


@dataclass(frozen=True)
class Change:
    """A text's loss in two rows, nats per token, and by how much it has grown, with a 95 % interval."""

    text: str
    new: bool
    before: float
    after: float
    low: float
    high: float
    most: float  # that it may grow by

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def passes(self) -> bool:
        """Whether all of the interval lies where it may."""
        return self.high <= self.most

    @property
    def verdict(self) -> str:
        if self.passes:
            return "gained" if self.new else "held"
        if self.low > self.most:
            return "gained too little" if self.new else "fell"
        return "not shown"


@dataclass(frozen=True)
class Verdict:
    """What was compared, and the texts of which one row has no loss."""

    since: str
    row: str
    changes: tuple[Change, ...]
    unmeasured: tuple[str, ...]

    @property
    def fails(self) -> bool:
        """Whether a text does not pass for certain: its whole interval lies where it may not."""
        return any(each.low > each.most for each in self.changes)

    @property
    def opens(self) -> bool:
        return all(each.passes for each in self.changes) and not self.unmeasured


def judge(scores: Scores, rows: Sequence[Losses], *, since: int, bounds: Bounds) -> Verdict:
    """A run's last row against an earlier one, from the losses by document of both. New is what was learned
    between them, old what was learned until then, and the general text; of domains that are learned by no
    row nothing is asked."""
    new, old = scores.rows[since + 1 :], [*scores.rows[1 : since + 1], GENERAL]
    if not set(new) <= set(scores.domains):  # joint: one row for all
        new = scores.run["order"]
    asked = [name for name in (*new, *old) if name in scores.domains]
    known = [name for name in asked if is_measured(scores, name, since) and is_measured(scores, name, -1)]
    changes = tuple(compare(known, rows, new=set(new), bounds=bounds))
    missing = tuple(name for name in asked if name not in known)
    return Verdict(scores.rows[since], scores.rows[-1], changes, missing)


def is_measured(scores: Scores, text: str, row: int) -> bool:
    return scores.nll[row][scores.domains.index(text)] is not None


def compare(
    texts: Sequence[str], rows: Sequence[Losses], *, new: set[str], bounds: Bounds
) -> Iterator[Change]:
    """The change of each text between two rows; its documents are drawn alike for both."""
    for text in texts:
        (before, counts), (after, _) = (np.asarray(row[text], float) for row in rows)
        there = counts > 0
        sums, counts = np.stack([before, after])[:, there], counts[there]
        low, high = np.nan, np.nan  # of one document there is no interval: nothing is shown
        if counts.size > 1:
            low, high = bootstrap([[sums, counts]], grown, replicates=REPLICATES)["loss"]["nats"]
        is_new = text in new
        most = -bounds.gain if is_new else bounds.loss
        was, became = sums.sum(1) / counts.sum()
        yield Change(text, is_new, float(was), float(became), low, high, most)


def grown(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """By how much the loss has grown, of means [draw, row, column] of two rows and one column."""
    return {"loss": {"nats": means[..., 1, 0] - means[..., 0, 0]}}
