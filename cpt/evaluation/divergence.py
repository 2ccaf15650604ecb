"""The divergence from the base as scores.json has it: means by text with intervals over documents."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cpt.evaluation.metrics import CHANGE_REPLICATES, Array, ByMetricAndUnit, bootstrap

Documents = np.ndarray  # [4, documents] of a text: see FIELDS
FIELDS = ("kl", "base_nll", "nll", "tokens")  # sums over a document in nats; scored tokens
Estimate = list[float | None]  # mean, low and high of the 95 % interval over documents


def find_mean(documents: Documents, field: str) -> float:
    """The mean of one of FIELDS per scored token; nan of a text without any."""
    num_tokens = documents[FIELDS.index("tokens")].sum()
    if num_tokens == 0:
        return math.nan
    return float(documents[FIELDS.index(field)].sum() / num_tokens)


def collect_divergences(
    rows: Sequence[Mapping[str, Documents]],
    estimates: dict[tuple[int, str], Estimate],
    *,
    stages: Sequence[Sequence[str]],
) -> dict[str, Any]:
    """A DivergenceKeys of what was measured, by row and text. `stages` are the texts of each stage.
    `estimates` are the earlier ones, by row and text, which take long for many rows; new ones are added."""
    means: list[dict[str, Estimate]] = []
    for number, documents_by_text in enumerate(rows):
        for text, documents in documents_by_text.items():
            if (number, text) not in estimates:
                estimates[number, text] = estimate_mean([documents])
        means.append({text: estimates[number, text] for text in documents_by_text})

    # The texts of its own stage in each trained row. Row 0 is the base, which is not trained.
    trained_texts: list[Documents] = []
    for number, texts in enumerate(stages[: len(rows) - 1], start=1):
        trained_texts += [rows[number][text] for text in texts if text in rows[number]]
    just_trained = estimate_mean(trained_texts) if trained_texts else None
    return {"kl": means, "just_trained": just_trained}


def estimate_mean(texts: Sequence[Documents]) -> Estimate:
    """The mean over texts, of equal weight, of the divergence per scored token, and its interval; nothing
    where one of the texts has no scored token."""
    mean = float(np.mean([find_mean(documents, "kl") for documents in texts]))
    if math.isnan(mean):
        return [None, None, None]

    samples = []  # for each text a matrix of one row, [1, documents], and the tokens [documents]
    for documents in texts:
        tokens = documents[FIELDS.index("tokens")]
        is_scored = tokens > 0
        kl = documents[FIELDS.index("kl")][is_scored]
        samples.append((kl[None], tokens[is_scored]))

    def compute_mean(means: Array) -> ByMetricAndUnit:  # [draw, 1, text]
        return {"kl": {"nats": means[..., 0, :].mean(-1)}}

    intervals = bootstrap(samples, compute_mean, replicates=CHANGE_REPLICATES, adjusted=True)
    low, high = intervals["kl"]["nats"]
    return [to_number(mean), to_number(low), to_number(high)]


def to_number(value: float) -> float | None:
    """A finite number that is at least 0, as a divergence is; None for others."""
    return max(0.0, value) if np.isfinite(value) else None
