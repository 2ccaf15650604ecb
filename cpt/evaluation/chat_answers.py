"""What models answer in held-out chats: each answer judged, and the measures of all, compared with the base.

Of two losses one is on the chats' own answers, the other on the answers that the base itself has written: it
rises as the model moves away from the base's way to answer, also where it learns to predict prose better.
An answer is broken if it does not end, repeats itself, or is in another language than it should be. The
interval of a change is Student's t over chats, paired by chat (`cpt.evaluation.statistics`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cpt.evaluation.chat_set import HeldOutChat
from cpt.evaluation.languages import is_other_language
from cpt.evaluation.metrics import Array
from cpt.evaluation.statistics import compute_mean_intervals

GRAM_LENGTH = 4  # tokens
MAX_REPEATED = 0.5  # share of an answer's 4-grams that have occurred in it before; above it is broken
# By the key in scores.json, what of each answer a measure is the mean of.
ANSWER_MEASURES = {
    "complete": "answers that end within `chats.max_new_tokens`",
    "tokens": "length of an answer",
    "repeated": "4-grams of tokens that have occurred in the answer before",
    "other_language": "answers in another language than expected, of those whose language is known",
    "right": "answers with all texts of `expect`, of chats that have it",
    "broken": "answers that do not end, repeat themselves or are in another language",
}


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """A model's answer to the last turn of a chat."""

    id: str
    question: str
    text: str
    tokens: int  # without the one that ends it
    complete: bool
    repeated: float  # share of repeated 4-grams
    other_language: bool | None  # None: unknown
    right: bool | None  # None: nothing is expected
    ids: Sequence[int] = ()  # with the token that ends it, if it ends

    @property
    def broken(self) -> bool:
        return not self.complete or self.repeated > MAX_REPEATED or self.other_language is True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def judge_answer(chat: HeldOutChat, *, ids: Sequence[int], text: str, complete: bool) -> ChatAnswer:
    """The judgement of an answer; `ids` are its tokens, with the one that ends it if it is `complete`."""
    text_ids = ids[:-1] if complete else ids
    right = None
    if chat.expect:
        right = all(expected.casefold() in text.casefold() for expected in chat.expect)
    return ChatAnswer(
        id=chat.example.id,
        question=chat.question,
        text=text,
        tokens=len(text_ids),
        complete=complete,
        repeated=find_repeated_share(text_ids),
        other_language=is_other_language(text, chat.language),
        right=right,
        ids=list(ids),
    )


def find_repeated_share(ids: Sequence[int]) -> float:
    """The share of the 4-grams of a text that have occurred in it before; 0 of a text without any.

    >>> find_repeated_share([1, 2, 3, 4, 5]), find_repeated_share([7] * 13)
    (0.0, 0.9)
    """
    grams = [tuple(ids[begin : begin + GRAM_LENGTH]) for begin in range(len(ids) - GRAM_LENGTH + 1)]
    if not grams:
        return 0.0
    return 1 - len(set(grams)) / len(grams)


def collect_losses(losses_by_row: Sequence[Array | None]) -> tuple[list[Any], list[Any]]:
    """The mean loss over chats by row, and its rise since the base, which is row 0 and has none; None where a
    row was not measured. `losses_by_row`: [2, chats] with nats and scored tokens."""
    nll: list[float | None] = []
    rise: list[list[float | None] | None] = []
    for number, losses in enumerate(losses_by_row):
        base_losses = losses_by_row[0] if number > 0 else None
        nll.append(None if losses is None else float(compute_mean_losses(losses).mean()))
        rise.append(None if losses is None or base_losses is None else find_chat_rise(base_losses, losses))
    return nll, rise


def summarise_rows(answers_by_row: Sequence[Sequence[ChatAnswer] | None]) -> list[dict[str, Any] | None]:
    """The summary of each row's answers, with their changes since row 0, the base; None for a row without
    answers."""
    summaries: list[dict[str, Any] | None] = []
    for number, answers in enumerate(answers_by_row):
        base_answers = answers_by_row[0] if number > 0 else None
        summaries.append(None if answers is None else summarise_chat_answers(answers, base_answers))
    return summaries


def compute_mean_losses(losses: Array) -> Array:
    """The loss of each chat in nats per scored token, [chats], from [2, chats]: nats, scored tokens."""
    nats, num_tokens = losses
    return nats / num_tokens


def find_chat_rise(before: Array, after: Array) -> list[float | None]:
    """The mean rise of the loss over chats in nats per token, and its 95 % interval: mean, low, high."""
    differences = compute_mean_losses(after) - compute_mean_losses(before)
    return estimate_mean_change(differences)


def estimate_mean_change(differences: Array) -> list[float | None]:
    """The mean of paired differences and its 95 % interval, None for fewer than three and where one is not
    finite: mean, low, high."""
    mean = float(differences.mean())
    if not math.isfinite(mean):
        return [mean, None, None]
    low, high = compute_mean_intervals(differences[None])[0].tolist()
    return [mean, None, None] if math.isnan(low) else [mean, low, high]


def summarise_chat_answers(
    answers: Sequence[ChatAnswer], base_answers: Sequence[ChatAnswer] | None
) -> dict[str, Any]:
    """The measures of a row's answers, their changes since the base, and how many answers are broken that
    were not broken then (None without answers of the base)."""
    measures: dict[str, float | None] = {}
    changes: dict[str, list[float | None]] = {}
    for measure in ANSWER_MEASURES:
        values = find_answer_values(answers, measure)
        is_known = np.isfinite(values)
        measures[measure] = float(values[is_known].mean()) if is_known.any() else None
        if base_answers is not None:
            differences = values - find_answer_values(base_answers, measure)
            differences = differences[np.isfinite(differences)]
            if len(differences):
                changes[measure] = estimate_mean_change(differences)
    num_newly_broken = None if base_answers is None else len(find_newly_broken(answers, base_answers))
    return {
        "chats": len(answers),
        "measures": measures,
        "changes": changes,
        "newly_broken": num_newly_broken,
    }


def find_answer_values(answers: Sequence[ChatAnswer], measure: str) -> Array:
    """A measure of each answer, [chats], nan where it is not known."""
    values = [getattr(answer, measure) for answer in answers]
    return np.array([math.nan if value is None else float(value) for value in values])


def find_newly_broken(answers: Sequence[ChatAnswer], base_answers: Sequence[ChatAnswer]) -> list[ChatAnswer]:
    """The answers that are broken, of chats that the base answers well."""
    newly_broken = []
    for answer, base_answer in zip(answers, base_answers, strict=True):
        if answer.broken and not base_answer.broken:
            newly_broken.append(answer)
    return newly_broken


def describe_faults(answer: ChatAnswer) -> str:
    """What is wrong with an answer, in words; empty if nothing is."""
    faults: Mapping[str, bool] = {
        "does not end": not answer.complete,
        "repeats itself": answer.repeated > MAX_REPEATED,
        "another language": answer.other_language is True,
        "wrong": answer.right is False,
    }
    return ", ".join(fault for fault, is_found in faults.items() if is_found)
