"""Release check: `python -m cpt.gate RUN --min-gain 0.05 --max-forgetting 0.02`.

Exit code 0 if the last model of the run improved on every new text and forgot no old text beyond the
tolerance, by the whole 95 % interval over documents, and the exported model is undamaged; 1 if not; 2 if
the evidence is inconclusive or cannot be read. Nothing is evaluated again."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cpt.core.errors import readable
from cpt.core.exceptions import InvalidOptionError
from cpt.core.output import run_program
from cpt.data.sources.base import GENERAL
from cpt.evaluation.metrics import Change, Losses, compare_losses
from cpt.evaluation.scores import Scores, encode
from cpt.trainer.run_dir import RunDir

HEAD = f"{'text':24}{'before':>9}{'after':>9}{'change':>9}{'at most':>31}"
ROW = "{text:24}{before:9.4f}{after:9.4f}{change:+9.4f}  {interval:>18}  {most:+9.4f}  {verdict}"
FAIL, UNKNOWN = 1, 2  # exit codes: fail; inconclusive or unreadable
PASSES = ("improved", "within tolerance")
NOTE = "the check does not assess the corpus: a model also improves on low-quality text"
MAX_SHOWN = 5  # texts that the last line names


@dataclass(frozen=True)
class BoundedChange(Change):
    """The change of a new or an old text, and by how many nats per token it may grow."""

    new: bool
    most: float

    @property
    def verdict(self) -> str:
        if self.high <= self.most:
            return "improved" if self.new else "within tolerance"
        if self.low > self.most:
            return "improved too little" if self.new else "forgotten"
        return "inconclusive"


def judge_run(
    scores: Scores, before: Losses, after: Losses, *, since: int, gain: float, loss: float
) -> tuple[list[BoundedChange], list[str]]:
    """The changes from a row to the last one, and the texts that were not measured in both. New text,
    trained between them, must improve by `gain` nats per token; earlier text and the general text may get
    worse by `loss`."""
    learned = scores.base.get("learned", [])  # by the run of init_from
    old_texts = [*learned, *scores.rows[1 : since + 1], GENERAL]
    new_texts = scores.rows[since + 1 :]
    if not set(new_texts) <= set(scores.domains):  # joint: one row for all
        new_texts = scores.run["order"]

    columns = {
        text: scores.domains.index(text) for text in (*new_texts, *old_texts) if text in scores.domains
    }
    rows = (scores.nll[since], scores.nll[-1])
    measured = [text for text, column in columns.items() if all(row[column] is not None for row in rows)]

    changes = []
    for change in compare_losses(measured, before, after):
        is_new = change.text in new_texts
        limit = 0.0 - gain if is_new else loss
        changes.append(BoundedChange(**vars(change), new=is_new, most=limit))
    unmeasured = [text for text in {**dict.fromkeys(learned), **columns} if text not in measured]
    return changes, unmeasured


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cpt.gate", description=__doc__.split("\n\n")[1])
    unit = "nats per token, default 0"
    gain = f"least improvement of each new text; {unit}"
    forgetting = f"largest rise of the loss on each old text; {unit}"
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--min-gain", type=float, default=0.0, help=gain)
    parser.add_argument("--max-forgetting", type=float, default=0.0, help=forgetting)
    parser.add_argument("--since", metavar="ROW", help="row to compare with; default: the last but one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


@dataclass(frozen=True)
class Judgement:
    """What a release check has found."""

    row: str  # the last one
    since: str  # the row that it is compared with
    changes: list[BoundedChange]
    unmeasured: list[str]
    damage: list[str]  # of the exported model

    @property
    def failures(self) -> list[str]:
        """What keeps the run from passing; of some of it the evidence is inconclusive."""
        failures = list(self.damage)
        for change in self.changes:
            if change.verdict not in PASSES:
                failures.append(f"{change.text} {change.verdict}")
        failures += [f"{text} not measured" for text in self.unmeasured]
        return failures

    @property
    def verdict(self) -> str:
        if not self.failures:
            return "pass"
        is_refuted = bool(self.damage) or any(change.low > change.most for change in self.changes)
        return "fail" if is_refuted else "inconclusive"


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    run = RunDir(options.run)
    with readable(code=UNKNOWN):
        judgement = check_run(run, options)
    if options.json:
        print(format_json(judgement))
    else:
        print_table(judgement)
    return {"pass": 0, "fail": FAIL, "inconclusive": UNKNOWN}[judgement.verdict]


def check_run(run: RunDir, options: argparse.Namespace) -> Judgement:
    """Raises ValueError for a wrong option, and for a run that cannot be judged."""
    for name, value in (("min-gain", options.min_gain), ("max-forgetting", options.max_forgetting)):
        if not math.isfinite(value):
            raise InvalidOptionError(f"--{name}", value, allowed="nats per token, a finite number")
    scores = load_finished(run)
    *earlier, last = scores.rows
    if scores.alone or not earlier:
        method = scores.run["method"]
        raise ValueError(f"{run.path}: method={method} has no model that continues from another's")
    if options.since not in (None, *earlier):
        raise InvalidOptionError("--since", options.since, allowed=", ".join(earlier))
    since = earlier.index(options.since or earlier[-1])

    run.check_documents(len(scores.rows))
    before, after = run.load_documents([since, len(earlier)])
    check_texts(run, scores, before, after, since=since)
    changes, unmeasured = judge_run(
        scores, before, after, since=since, gain=options.min_gain, loss=options.max_forgetting
    )
    # The page is no part of what is released.
    outputs = run.find_damaged_outputs(full=True)
    damage = [line for line in outputs if not line.startswith("report.")]
    return Judgement(row=last, since=earlier[since], changes=changes, unmeasured=unmeasured, damage=damage)


def load_finished(run: RunDir) -> Scores:
    scores = run.load_scores()
    allowed = "the folder of a finished run"
    if scores is None:
        raise InvalidOptionError("RUN", run.path, reason="it has no scores.json", allowed=allowed)
    if not scores.run["finished"]:
        raise InvalidOptionError("RUN", run.path, reason=scores.state, allowed=allowed)
    return scores


def check_texts(run: RunDir, scores: Scores, before: Losses, after: Losses, *, since: int) -> None:
    """Raises ValueError unless two rows have the losses of the same documents of each text that both have
    measured."""
    for text, loss_before, loss_after in zip(scores.domains, scores.nll[since], scores.nll[-1], strict=True):
        if loss_before is None or loss_after is None:
            continue
        is_complete = text in before and text in after
        if not is_complete or before[text].shape != after[text].shape:
            message = f"{run.path}/documents are not those of scores.json ({text})"
            raise ValueError(f"{message}; restore them from a backup")


def format_json(judgement: Judgement) -> str:
    return encode(
        {
            "verdict": judgement.verdict,
            "damage": judgement.damage,
            "note": NOTE,
            "since": judgement.since,
            "row": judgement.row,
            "changes": [asdict(change) for change in judgement.changes],
            "unmeasured": judgement.unmeasured,
        }
    )


def print_table(judgement: Judgement) -> None:
    print(f"after {judgement.row}, compared with {judgement.since}; nats per token [95 % interval]")
    print(HEAD)
    for change in judgement.changes:
        interval = "no interval" if math.isnan(change.low) else f"[{change.low:+.4f}, {change.high:+.4f}]"
        row = ROW.format(
            text=change.text,
            before=change.before,
            after=change.after,
            change=change.difference,
            interval=interval,
            most=change.most,
            verdict=change.verdict,
        )
        print(row)
    print(NOTE)

    failures = judgement.failures
    summary = ", ".join(failures[:MAX_SHOWN])
    if len(failures) > MAX_SHOWN:
        summary += f" and {len(failures) - MAX_SHOWN} more"
    if not failures:
        summary = "every new text improved, every old text is within tolerance"
    print(f"{judgement.verdict}: {summary}")


if __name__ == "__main__":
    run_program(main)
