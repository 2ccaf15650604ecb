"""Release check: `python -m cpt.gate RUN --min-gain 0.05 --max-forgetting 0.02`.

Exit code 0 if the last model of the run improved on every new text, forgot no old text and none of its chats
beyond the tolerance, by the whole 95 % interval, breaks no more answers than allowed, and the exported model
is undamaged; 1 if not; 2 if the evidence is inconclusive or cannot be read. Nothing is evaluated again."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.output import run_program
from cpt.data.sources.base import GENERAL
from cpt.evaluation.chat_answers import (
    ChatAnswer,
    compute_mean_losses,
    describe_faults,
    find_chat_rise,
    find_newly_broken,
)
from cpt.evaluation.chat_files import ANSWERS, BASE_LOSSES, LOSSES, find_chat_file, load_answers, load_losses
from cpt.evaluation.metrics import Array, Change, Losses, compare_losses
from cpt.evaluation.run_folders import choose_run
from cpt.evaluation.scores import Scores, encode
from cpt.reporting.formats import shorten
from cpt.trainer.run_dir import RunDir

HEAD = f"{'text':24}{'before':>9}{'after':>9}{'change':>9}{'at most':>31}"
ROW = "{text:24}{before:9.4f}{after:9.4f}{change:+9.4f}  {interval:>18}  {limit:+9.4f}  {verdict}"
FAIL = 1  # exit codes
UNKNOWN = 2  # the evidence is inconclusive, or cannot be read
PASSES = ("improved", "within tolerance")
NOTE = "the check does not assess the corpus: a model also improves on low-quality text"
# What narrows the intervals of texts and of chats, in a new run.
MORE_TEXT = "more held-out text narrows an inconclusive interval: domains.held_out, eval.max_tokens=null"
MORE_CHATS = "more chats narrow an inconclusive interval: chats=FILE, chats.generate"
# By the name of a row of the table, the keys of a loss and of its rise in the scores of chats, and its file.
CHAT_LOSSES = {
    "chats": ("nll", "rise", LOSSES),
    "base's answers": ("base_answer_nll", "base_answer_rise", BASE_LOSSES),
}
MAX_SHOWN = 5  # texts that the last line names
MAX_QUESTION = 60  # characters of a question that the table shows


@dataclass(frozen=True)
class BoundedChange(Change):
    """The change of a new or an old text, or of chats, and by how many nats per token it may grow."""

    is_new: bool
    limit: float

    @property
    def verdict(self) -> str:
        """By the whole interval, low to high: a bound of nan, of too few documents, decides nothing."""
        if self.high <= self.limit:
            return "improved" if self.is_new else "within tolerance"
        if self.low > self.limit:
            return "improved too little" if self.is_new else "forgotten"
        return "inconclusive"


def judge_run(
    scores: Scores, before: Losses, after: Losses, *, start_row: int, gain: float, loss: float
) -> tuple[list[BoundedChange], list[str]]:
    """The changes from `start_row` to the last row, and the texts that were not measured in both. New text,
    trained between them, must improve by `gain` nats per token; earlier text and the general text may get
    worse by `loss`."""
    learned = scores.base.get("learned", [])  # by the run of init_from
    old_texts = [*learned, *scores.rows[1 : start_row + 1], GENERAL]
    new_texts = scores.rows[start_row + 1 :]
    if not set(new_texts) <= set(scores.domains):  # joint: one row for all
        new_texts = scores.run["order"]

    # By text, whether the run has a test set of it, and whether both rows have its loss.
    has_losses: dict[str, bool] = {}
    for text in (*new_texts, *old_texts):
        if text in scores.domains:
            column = scores.domains.index(text)
            is_in_both = scores.nll[start_row][column] is not None and scores.nll[-1][column] is not None
            has_losses[text] = is_in_both
    measured = [text for text, is_in_both in has_losses.items() if is_in_both]

    changes = []
    for change in compare_losses(measured, before, after):
        is_new = change.text in new_texts
        limit = 0.0 - gain if is_new else loss
        changes.append(
            BoundedChange(
                text=change.text,
                before=change.before,
                after=change.after,
                low=change.low,
                high=change.high,
                is_new=is_new,
                limit=limit,
            )
        )

    # What the run of init_from learned has to be measured; of other texts those that have a test set.
    expected = {**dict.fromkeys(learned), **has_losses}
    unmeasured = [text for text in expected if text not in measured]
    return changes, unmeasured


def judge_chats(run: RunDir, scores: Scores, *, start_row: int, limit: float) -> list[BoundedChange]:
    """The changes of the losses on held-out chats and on the base's answers from `start_row` to the last row,
    with the interval of Student's t over chats. A loss that `start_row` lacks is compared with that of the
    base; one that the last row lacks is left out. One of the last row that is not finite is infinite: no
    bound allows it. Raises ValueError for a file that is missing or damaged, and for files of different
    chats."""
    changes = []
    last = len(scores.rows) - 1
    for name, (key, rise_key, kind) in CHAT_LOSSES.items():
        mean_by_row = scores.chats.get(key, [])  # nats per token; None of a row that was not measured
        if len(mean_by_row) <= last:
            continue
        # One that is not finite is null in scores.json, too, but has a rise since the base, of nulls.
        if mean_by_row[last] is None and scores.chats[rise_key][last] is None:
            continue
        first = 0 if mean_by_row[start_row] is None else start_row
        before = load_losses(find_stored_file(run, scores, row=first, kind=kind))
        after = load_losses(find_stored_file(run, scores, row=last, kind=kind))
        if before.digest != after.digest:
            raise ValueError(f"{run.path}/chats has other chats in two rows; give the run again")

        changes.append(compare_chats(name, before.losses, after.losses, limit=limit))
    return changes


def compare_chats(name: str, before: Array, after: Array, *, limit: float) -> BoundedChange:
    """The change between the losses by chat of two rows, [2, chats] each: nats, scored tokens."""
    mean_before = float(compute_mean_losses(before).mean())
    mean_after = float(compute_mean_losses(after).mean())
    _, low, high = find_chat_rise(before, after)  # bounds are None of too few chats
    if math.isfinite(mean_before) and not math.isfinite(mean_after):
        mean_after = low = high = math.inf
    return BoundedChange(
        text=name,
        before=mean_before,
        after=mean_after,
        low=math.nan if low is None else low,
        high=math.nan if high is None else high,
        is_new=False,
        limit=limit,
    )


def has_answers(scores: Scores) -> bool:
    """Whether the base and the last model were asked to answer chats."""
    answers = scores.chats.get("answers", [])
    last = len(scores.rows) - 1
    return len(answers) > last and answers[last] is not None and answers[0] is not None


def find_broken_chats(run: RunDir, scores: Scores) -> list[ChatAnswer]:
    """The answers of the last model that are broken, of chats that the base answers well; none where the two
    were not asked. Raises ValueError for a file that is missing or damaged."""
    if not has_answers(scores):
        return []
    last = len(scores.rows) - 1
    base_answers = load_answers(find_stored_file(run, scores, row=0, kind=ANSWERS)).answers
    last_answers = load_answers(find_stored_file(run, scores, row=last, kind=ANSWERS)).answers
    return find_newly_broken(last_answers, base_answers)


def find_stored_file(run: RunDir, scores: Scores, *, row: int, kind: str) -> Path:
    """The file of a row with one of the measurements on chats: LOSSES, BASE_LOSSES or ANSWERS. Raises
    ValueError where it is missing."""
    path = find_chat_file(run.path, scores.rows, row, kind)
    if not path.is_file():
        raise ValueError(f"{path} is missing; restore it from a backup")
    return path


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cpt.gate", description=__doc__.split("\n\n")[1])
    gain = "least improvement of each new text; nats per token, default 0"
    forgetting = "largest rise of the loss on each old text; nats per token, default 0"
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--min-gain", type=float, default=0.0, help=gain)
    parser.add_argument("--max-forgetting", type=float, default=0.0, help=forgetting)
    chat = "largest rise of the loss on held-out chats; nats per token, default that of --max-forgetting"
    broken = "largest number of broken answers in chats that the base answers well; default 0"
    parser.add_argument("--max-chat-loss", type=float, help=chat)
    parser.add_argument("--max-broken-answers", type=int, help=broken)
    parser.add_argument("--since", metavar="ROW", help="row to compare with; default: the last but one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@dataclass(frozen=True)
class Judgement:
    """What a release check has found."""

    last_row: str
    start_row: str  # that the last one is compared with
    changes: list[BoundedChange]
    unmeasured: list[str]
    damage: list[str]  # of the exported model
    broken: list[ChatAnswer]  # of chats that the base answers well
    max_broken: int

    @property
    def breaks_too_many(self) -> bool:
        return len(self.broken) > self.max_broken

    @property
    def failures(self) -> list[str]:
        """What keeps the run from passing: bounds that are exceeded, and those for which the evidence is
        inconclusive."""
        failures = list(self.damage)
        for change in self.changes:
            if change.verdict not in PASSES:
                failures.append(f"{change.text} {change.verdict}")
        failures += [f"{text} not measured" for text in self.unmeasured]
        if self.breaks_too_many:
            failures.append(f"answers broken: {len(self.broken)}, at most {self.max_broken}")
        return failures

    @property
    def verdict(self) -> str:
        if not self.failures:
            return "pass"
        is_refuted = any(change.low > change.limit for change in self.changes)
        return "fail" if is_refuted or self.damage or self.breaks_too_many else "inconclusive"


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors(code=UNKNOWN):
        run = RunDir(choose_run(options.run))
        judgement = check_run(run, options)
    if options.json:
        print(format_json(judgement))
    else:
        print_table(judgement)
    return {"pass": 0, "fail": FAIL, "inconclusive": UNKNOWN}[judgement.verdict]


def check_run(run: RunDir, options: argparse.Namespace) -> Judgement:
    """Raises ValueError for a wrong option, and for a run that cannot be judged."""
    bounds = {
        "min-gain": options.min_gain,
        "max-forgetting": options.max_forgetting,
        "max-chat-loss": options.max_chat_loss,
    }
    for name, value in bounds.items():
        if value is not None and not math.isfinite(value):
            raise InvalidOptionError(f"--{name}", value, allowed="nats per token, a finite number")
    if options.max_broken_answers is not None and options.max_broken_answers < 0:
        raise InvalidOptionError("--max-broken-answers", options.max_broken_answers, allowed="0 or more")
    scores = load_finished(run)
    *earlier, last = scores.rows
    if scores.trains_from_base or not earlier:
        method = scores.run["method"]
        raise ValueError(f"{run.path}: method={method} has no model that continues from another's")
    if options.since not in (None, *earlier):
        raise InvalidOptionError("--since", options.since, allowed=", ".join(earlier))
    start_row = earlier.index(options.since or earlier[-1])

    run.check_documents(len(scores.rows))
    before, after = run.load_documents([start_row, len(earlier)])
    check_texts(run, scores, before, after, start_row=start_row)
    changes, unmeasured = judge_run(
        scores, before, after, start_row=start_row, gain=options.min_gain, loss=options.max_forgetting
    )

    # A run without chats, like one of an earlier version, is judged without them.
    chat_limit = options.max_forgetting if options.max_chat_loss is None else options.max_chat_loss
    chat_changes = judge_chats(run, scores, start_row=start_row, limit=chat_limit)
    changes += chat_changes
    if options.max_chat_loss is not None and not chat_changes:
        unmeasured.append("chats")
    broken = find_broken_chats(run, scores)
    if options.max_broken_answers is not None and not has_answers(scores):
        unmeasured.append("answers to chats")

    # The page is not part of what is released.
    damaged_outputs = run.find_damaged_outputs(full=True)
    damage = [line for line in damaged_outputs if not line.startswith("report.")]
    return Judgement(
        last_row=last,
        start_row=earlier[start_row],
        changes=changes,
        unmeasured=unmeasured,
        damage=damage,
        broken=broken,
        max_broken=options.max_broken_answers or 0,
    )


def load_finished(run: RunDir) -> Scores:
    """The scores of a run. Raises ValueError for one that is not finished."""
    scores = run.load_scores()
    allowed = "the folder of a finished run"
    if scores is None:
        raise InvalidOptionError("RUN", run.path, reason="it has no scores.json", allowed=allowed)
    if not scores.run["finished"]:
        raise InvalidOptionError("RUN", run.path, reason=scores.state, allowed=allowed)
    return scores


def check_texts(run: RunDir, scores: Scores, before: Losses, after: Losses, *, start_row: int) -> None:
    """Raises ValueError unless two rows have the losses of the same documents of each text that both have
    measured."""
    losses = zip(scores.domains, scores.nll[start_row], scores.nll[-1], strict=True)
    for text, loss_before, loss_after in losses:
        if loss_before is None or loss_after is None:
            continue
        is_complete = text in before and text in after
        if not is_complete or before[text].shape != after[text].shape:
            raise ValueError(
                f"{run.path}/documents are not those of scores.json ({text}); restore them from a backup"
            )


def format_json(judgement: Judgement) -> str:
    """What `--json` prints."""
    return encode(
        {
            "verdict": judgement.verdict,
            "damage": judgement.damage,
            "note": NOTE,
            "since": judgement.start_row,
            "row": judgement.last_row,
            "changes": [export_change(change) for change in judgement.changes],
            "unmeasured": judgement.unmeasured,
            "broken_answers": [export_answer(answer) for answer in judgement.broken],
            "most_broken_answers": judgement.max_broken,
        }
    )


def export_change(change: BoundedChange) -> dict[str, Any]:
    """The entry of a text in `--json`."""
    return {
        "text": change.text,
        "before": change.before,
        "after": change.after,
        "low": change.low,
        "high": change.high,
        "new": change.is_new,
        "most": change.limit,
    }


def export_answer(answer: ChatAnswer) -> dict[str, str]:
    """The entry of a broken answer in `--json`."""
    return {"id": answer.id, "question": answer.question, "faults": describe_faults(answer)}


def print_table(judgement: Judgement) -> None:
    """Prints each change with its limit and verdict, broken answers, and in the last line the verdict of
    all."""
    print(f"after {judgement.last_row}, compared with {judgement.start_row}; nats per token [95 % interval]")
    print(HEAD)
    for change in judgement.changes:
        interval = "no interval" if math.isnan(change.low) else f"[{change.low:+.4f}, {change.high:+.4f}]"
        row = ROW.format(
            text=change.text,
            before=change.before,
            after=change.after,
            change=change.difference,
            interval=interval,
            limit=change.limit,
            verdict=change.verdict,
        )
        print(row)
    for answer in judgement.broken:
        print(f"broken answer: {shorten(answer.question, width=MAX_QUESTION)} ({describe_faults(answer)})")
    print(NOTE)
    inconclusive = [change.text for change in judgement.changes if change.verdict == "inconclusive"]
    if set(inconclusive) - set(CHAT_LOSSES):
        print(MORE_TEXT)
    if set(inconclusive) & set(CHAT_LOSSES):
        print(MORE_CHATS)

    failures = judgement.failures
    summary = ", ".join(failures[:MAX_SHOWN])
    if len(failures) > MAX_SHOWN:
        summary += f" and {len(failures) - MAX_SHOWN} more"
    if not failures:
        summary = "every new text improved, every old text is within tolerance"
    print(f"{judgement.verdict}: {summary}")


if __name__ == "__main__":
    run_program(main)
