"""Change of the loss on a text between two models, with its bootstrap interval over documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cpt.evaluation.metrics import bootstrap

REPLICATES = 2000
Losses = Mapping[str, np.ndarray]  # by text [2, documents]: nats and scored tokens of each document


@dataclass(frozen=True)
class Change:
    """A text's loss by two models, nats per token, and the 95 % interval of the difference."""

    text: str
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before


def compare_losses(texts: Sequence[str], before: Losses, after: Losses) -> Iterator[Change]:
    """The change of each text; its documents are drawn alike for both models. Of a single document the
    interval is nan."""

    def compute(means: np.ndarray) -> dict[str, dict[str, np.ndarray]]:  # [draw, model, text]
        return {"loss": {"nats": means[..., 1, 0] - means[..., 0, 0]}}

    for text in texts:
        (old, counts), (new, _) = (np.asarray(row[text], float) for row in (before, after))
        there = counts > 0
        sums, counts = np.stack([old, new])[:, there], counts[there]
        bounds = [np.nan, np.nan]
        if counts.size > 1:
            bounds = bootstrap([[sums, counts]], compute, replicates=REPLICATES)["loss"]["nats"]
        yield Change(text, *(sums.sum(1) / counts.sum()).tolist(), *bounds)
