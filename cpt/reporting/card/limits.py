"""What a card does not show, said plainly."""

from __future__ import annotations

from collections.abc import Iterator

from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores


def list_limits(scores: Scores, *, documents: bool, base: bool) -> list[str]:
    """A sentence each: what was not measured, and what the figures do not say. Without the losses by document
    no cell of the matrix has an interval; `base` is whether it is known where that came from."""
    unknown = [] if base else ["An older cpt made this run: where its base came from was not remembered."]
    return [*tell_unmeasured(scores, documents=documents), *unknown, *tell_meaning(scores)]


def tell_unmeasured(scores: Scores, *, documents: bool) -> Iterator[str]:
    if GENERAL not in scores.domains:
        yield "There is no general text: what the run has cost beside its domains was not measured."
    cells = len(scores.rows) * len(scores.domains)
    if missing := sum(value is None for row in scores.nll for value in row):
        yield f"{missing} of {cells} cells of the matrix were not measured."
    if not documents:
        yield "The losses by document are gone: no cell has an interval, and scores.json is taken as it is."
    if not (scores.endtasks or scores.answers or scores.probes):
        yield "No task was measured, only loss on text: no end task, no answers, no probe."
    if skipped := sum(scores.skipped):
        yield f"{skipped} steps were left out, as their loss or gradient was not finite."


def tell_meaning(scores: Scores) -> Iterator[str]:
    yield f"One run, one seed ({scores.run['seed']}), one order: how much another would differ is not known."
    if scores.alone:
        yield "Each domain was learned from the base: the exported model has met the last one alone."
    if scores.conditions.get("score_on") == "valid":
        yield "The losses are of validation text, with which settings may have been chosen."
    yield "Intervals are over held-out documents of the same sources; of other text they say nothing."
    if not scores.moved:
        yield "How far the weights lie from the base was not measured."
    yield "What the model writes, its biases, and the licences of its texts and base were not examined."
