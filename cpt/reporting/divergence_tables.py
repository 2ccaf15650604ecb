"""The divergence from the base as the page of a run, the console and the model card show it."""

from __future__ import annotations

from collections.abc import Sequence

from cpt.core.messages import count_noun
from cpt.evaluation.scores import Scores
from cpt.reporting.formats import (
    MISSING,
    format_decimals,
    format_interval,
    format_or_dash,
    list_names,
)

Cells = list[list[str]]


def describe_divergence(scores: Scores) -> str:
    """A sentence on the divergence from the base; empty in a run without.

    `KL(base || model), nats per token: 0.3277 [0.3161, 0.3379] on the text just trained, mean of 3 stages; at
    the end 0.3349 networkx, 0.3485 pandas, 0.3241 general.`"""
    kl = scores.divergence.get("kl") or []
    just_trained = scores.divergence.get("just_trained")
    if not kl or just_trained is None:
        return ""
    num_stages = sum(1 for estimates in kl[1:] if estimates)
    last = [f"{format_mean_divergence(estimate)} {text}" for text, estimate in kl[-1].items()]
    ending = f"; at the end {list_names(last)}" if last else ""
    return (
        f"KL(base || model), nats per token: {format_divergence(just_trained)} on the text just trained, "
        f"mean of {count_noun(num_stages, 'stage')}{ending}."
    )


def format_divergences(scores: Scores) -> Cells:
    """For each measured row its name, and the divergence on each text with its interval."""
    cells = []
    measured = scores.divergence.get("kl") or []  # of an unfinished run, its first rows
    for name, estimates in zip(scores.rows, measured, strict=False):
        if estimates:
            cells.append([name, *(format_divergence(estimates.get(text)) for text in scores.domains)])
    return cells


def format_divergence(estimate: Sequence[float | None] | None) -> str:
    """A mean with its interval, in nats per token; a dash where nothing was measured."""
    if estimate is None:
        return MISSING
    _, low, high = estimate
    return format_mean_divergence(estimate) + format_interval(low, high, format_decimals)


def format_mean_divergence(estimate: Sequence[float | None]) -> str:
    return format_or_dash(estimate[0], format_decimals)
