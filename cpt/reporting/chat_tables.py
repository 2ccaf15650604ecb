"""Held-out chats as the page of a run, the console and the model card show them: as formatted cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cpt.core.messages import count_noun
from cpt.evaluation.chat_answers import ChatAnswer, describe_faults
from cpt.evaluation.chat_files import ANSWERS, find_chat_file, load_answers
from cpt.evaluation.derived_rows import find_derived_rows
from cpt.evaluation.scores import Scores
from cpt.reporting.formats import (
    MISSING,
    Format,
    format_decimals,
    format_integer,
    format_interval,
    format_or_dash,
    format_percent,
    format_signed,
    format_thousandths,
    shorten,
)

Cells = list[list[str]]
CHAT_HEAD = (
    "after",
    "loss, nats",
    "its rise",
    "loss on the base's answers",
    "and its rise",
    "answers",
    "complete, %",
    "tokens",
    "repeated, %",
    "other language, %",
    "right, %",
    "broken",
    "newly broken",
)
ANSWER_HEAD = ("question", "answer of the base", "answer of the last model", "faults of the last answer")
LOSS_KEYS = ("nll", "rise", "base_answer_nll", "base_answer_rise")  # of the chats in scores.json
NOT_FINITE = "not finite"
NUM_LOSS_COLUMNS = 5  # of CHAT_HEAD, with the name of the row
SHOWN_MEASURES: Mapping[str, Format] = {  # columns of CHAT_HEAD
    "complete": format_percent,
    "tokens": format_integer,
    "repeated": format_percent,
    "other_language": format_percent,
    "right": format_percent,
}
MAX_SHOWN_TEXT = 300  # characters of a question or an answer
CHAT_MEANING = "Rise of the loss on the base's own answers to held-out chats, base to final model"
HELD_OUT_MEANING = "Rise of the loss on the answers of held-out chats, base to final model"


class ChatLoss(NamedTuple):
    """A loss on chats at the base and in the last row that has it, nats per token, and its rise."""

    before: float
    after: float
    rise: float
    low: float | None  # 95 % interval; None for too few chats
    high: float | None

    @property
    def is_higher(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low is not None and self.low > 0

    @property
    def is_lower(self) -> bool:
        return self.high is not None and self.high < 0

    def describe(self) -> str:
        """`0.715 nats at the base, 0.800 now (+0.085 [+0.040, +0.130])`."""
        rise = format_signed(self.rise) + format_interval(self.low, self.high, format_signed)
        before = format_thousandths(self.before)
        after = format_thousandths(self.after)
        return f"{before} nats at the base, {after} now ({rise})"


class ChatChange(NamedTuple):
    """The chats of the last row in which they were measured, compared with the base."""

    held_out: ChatLoss  # on the chats' own answers
    base_answers: ChatLoss | None  # on the answers that the base has written; None without generation
    last: Mapping[str, Any] | None  # a ChatAnswerKeys of that row; None where it was not asked
    first: Mapping[str, Any] | None  # that of the base

    @property
    def num_newly_broken(self) -> int:
        return 0 if self.last is None else self.last["newly_broken"] or 0


def find_chat_change(scores: Scores) -> ChatChange | None:
    """The change of the chats from the base to the last row that has them; None without two such rows."""
    chats = scores.chats
    held_out = find_loss(chats, "nll", "rise")
    if held_out is None:
        return None
    asked_rows = [row for row, answers in enumerate(chats["answers"]) if answers is not None]
    has_two_rows = len(asked_rows) > 1 and asked_rows[0] == 0
    return ChatChange(
        held_out=held_out,
        base_answers=find_loss(chats, "base_answer_nll", "base_answer_rise"),
        last=chats["answers"][asked_rows[-1]] if has_two_rows else None,
        first=chats["answers"][0] if has_two_rows else None,
    )


def find_loss(chats: Mapping[str, Any], nll_key: str, rise_key: str) -> ChatLoss | None:
    """One of the losses of a ChatKeys, infinite where it is not finite; None where it has not been measured
    on the base and after a stage."""
    losses = chats.get(nll_key) or []
    rises = chats.get(rise_key) or []
    measured_rows = [row for row, loss in enumerate(losses) if is_measured(loss, rises[row])]
    if len(measured_rows) < 2 or measured_rows[0] != 0 or not math.isfinite(losses[0]):
        return None
    last = measured_rows[-1]
    if losses[last] is None or not math.isfinite(losses[last]):
        return ChatLoss(losses[0], after=math.inf, rise=math.inf, low=math.inf, high=math.inf)
    return ChatLoss(losses[0], losses[last], *rises[last])


def is_measured(loss: float | None, rise: Sequence[float | None] | None) -> bool:
    """Whether a loss on chats was measured in a row: one that is not finite is null in the file of a run, and
    has a rise of nulls."""
    return loss is not None or rise is not None


def list_chat_tiles(scores: Scores) -> Cells:
    """The tile of chats, as cells of TILES_HEAD; none in a run without chats."""
    change = find_chat_change(scores)
    if change is None:
        return []
    loss = change.base_answers or change.held_out
    meaning = HELD_OUT_MEANING if change.base_answers is None else CHAT_MEANING
    interval = format_interval(loss.low, loss.high, format_thousandths).strip() or "no interval"
    return [["chat", f"{format_thousandths(loss.rise)} nats", interval, judge_change(change), meaning]]


def judge_change(change: ChatChange) -> str:
    """The words for a change: hurt if the loss on the base's own answers or on the held-out ones has risen,
    or answers are broken that were not; and if the held-out ones are predicted better, this too."""
    losses = [loss for loss in (change.base_answers, change.held_out) if loss is not None]
    words = []
    if any(loss.is_higher for loss in losses) or change.num_newly_broken:
        words.append("hurt")
    if change.last is not None and change.num_newly_broken:
        words.append(f"broke {change.num_newly_broken} of {count_noun(change.last['chats'], 'answer')}")
    if change.held_out.is_lower:
        # The number next to the words is of the base's own answers, where these were measured.
        words.append("better" if change.base_answers is None else "better on held-out answers")
    if not words and all(loss.low is not None for loss in losses):
        words.append("no measurable change")
    return "; ".join(words)


def describe_chats(scores: Scores) -> list[str]:
    """The change of the chats in sentences; none in a run without chats.

    `Loss on 36 held-out chats: 1.805 nats at the base, 1.793 now (-0.012 [-0.054, +0.030]).`
    `Loss on the base's own answers: 0.583 nats at the base, 0.672 now (+0.089 [+0.047, +0.131]).`
    `Answers to 16: broken 1 (base 0), complete 80.00 % (100.00 %), right 66.67 % (100.00 %).`"""
    change = find_chat_change(scores)
    if change is None:
        return []
    chat_count = count_noun(scores.chats["chats"], "held-out chat")
    sentences = [f"Loss on {chat_count}: {change.held_out.describe()}."]
    if change.base_answers is not None:
        sentences.append(f"Loss on the base's own answers: {change.base_answers.describe()}.")
    if change.last is not None and change.first is not None:
        parts = [f"broken {count_broken(change.last)} (base {count_broken(change.first)})"]
        parts += [compare_share(measure, change.last, change.first) for measure in ("complete", "right")]
        sentences.append(f"Answers to {change.last['chats']}: {', '.join(filter(None, parts))}.")
    return sentences


def count_broken(answers: Mapping[str, Any]) -> int:
    return round(answers["measures"]["broken"] * answers["chats"])


def compare_share(measure: str, last: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """A measure of the answers now and at the base, in percent; empty where it is not known."""
    share = last["measures"][measure]
    base_share = first["measures"][measure]
    if share is None or base_share is None:
        return ""
    return f"{measure} {format_percent(share)} % ({format_percent(base_share)} %)"


def format_chats(scores: Scores) -> Cells:
    """The cells of CHAT_HEAD for each row in which chats were measured."""
    cells = []
    chats = scores.chats
    for row, name in enumerate(scores.rows[: len(chats["nll"])]):
        answers = chats["answers"][row]
        if not is_measured(chats["nll"][row], chats["rise"][row]) and answers is None:
            continue
        values = {key: chats[key][row] for key in LOSS_KEYS}
        cells.append([name, *format_row_losses(values), *format_row_answers(answers)])
    return cells


def format_derived_chats(folder: Path) -> Cells:
    """The cells of CHAT_HEAD for the models in the run's folders that were derived from its last model."""
    cells = []
    for model_folder, row in find_derived_rows(folder):
        chats = row.run_chats
        if not chats:
            continue
        cells.append([model_folder.name, *format_row_losses(chats), *format_row_answers(chats["answers"])])
    return cells


def format_row_losses(values: Mapping[str, Any]) -> list[str]:
    """The cells of a row's losses, from its values by LOSS_KEYS."""
    return [
        format_chat_loss(values["nll"], values["rise"]),
        format_rise(values["rise"]),
        format_chat_loss(values["base_answer_nll"], values["base_answer_rise"]),
        format_rise(values["base_answer_rise"]),
    ]


def format_chat_loss(loss: float | None, rise: Sequence[float | None] | None) -> str:
    """A loss on chats; a dash where it was not measured."""
    if is_measured(loss, rise) and (loss is None or not math.isfinite(loss)):
        return NOT_FINITE
    return format_or_dash(loss, format_decimals)


def format_rise(rise: Sequence[float | None] | None) -> str:
    """A change with its interval."""
    if rise is None:
        return MISSING
    mean, low, high = rise
    return format_or_dash(mean, format_signed) + format_interval(low, high, format_signed)


def format_row_answers(answers: Mapping[str, Any] | None) -> list[str]:
    """The cells of a row's answers."""
    if answers is None:
        return [MISSING] * (len(CHAT_HEAD) - NUM_LOSS_COLUMNS)
    cells = [str(answers["chats"])]
    for measure, format_value in SHOWN_MEASURES.items():
        cells.append(format_or_dash(answers["measures"][measure], format_value))
    newly_broken = answers["newly_broken"]
    return [*cells, str(count_broken(answers)), MISSING if newly_broken is None else str(newly_broken)]


def read_chat_answers(folder: Path, scores: Scores) -> list[tuple[ChatAnswer, ChatAnswer]]:
    """The answers of the base and of the last model that was asked, by chat; none where a file is missing or
    damaged, or of other chats."""
    asked_rows = [row for row, answers in enumerate(scores.chats.get("answers") or []) if answers is not None]
    if not asked_rows or asked_rows[0] != 0:
        return []
    try:
        base_answers = load_answers(find_chat_file(folder, scores.rows, 0, ANSWERS)).answers
        last_answers = load_answers(find_chat_file(folder, scores.rows, asked_rows[-1], ANSWERS)).answers
    except (FileNotFoundError, ValueError):
        return []
    return list(zip(base_answers, last_answers, strict=False))


def format_chat_answers(pairs: Sequence[tuple[ChatAnswer, ChatAnswer]]) -> Cells:
    """The cells of ANSWER_HEAD for the answers of the base and the last model; broken ones first."""
    cells = []
    for base_answer, answer in sorted(pairs, key=lambda pair: not pair[1].broken):
        texts = (answer.question, base_answer.text, answer.text)
        row = [shorten(" ".join(text.split()), width=MAX_SHOWN_TEXT) or MISSING for text in texts]
        cells.append([*row, describe_faults(answer) or "none"])
    return cells
