"""A gate for models: `python -m cpt.gate RUN --gain 0.05 --loss 0.02`.

Exit code 0 only where the run's last model has gained on what is new and nothing old has lost more than is
allowed, by the whole of each 95 % interval over documents, and the exported model is undamaged. 1: that
fails. 2: it could not be determined or read. A gain does not judge a corpus. Nothing is measured again."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from cpt.core.errors import readable
from cpt.core.output import run_program
from cpt.evaluation.gate import Bounds, Change, Verdict, judge
from cpt.evaluation.scores import Scores
from cpt.trainer.run_dir import RunDir

ROW = "{:24}{:>9}{:>9}{:>9}  {:20}{:>9}  {}"
CLOSED, UNKNOWN = 1, 2  # exit codes: fails; could not be determined or read
NOTE = "a gain does not judge a corpus: a model also gains on text that nobody wants it to learn"
SHOWN = 5  # texts that the last line names


def main(arguments: Sequence[str]) -> int:
    given = parser().parse_args(arguments)
    with readable(errors_only=True, code=UNKNOWN):
        for name in ("gain", "loss"):
            if not math.isfinite(getattr(given, name)):
                raise ValueError(f"--{name}={getattr(given, name)}; allowed: nats per token, a finite number")
        place = RunDir(given.run)
        scores = read_finished(place)
        since = find_row(scores, given.since)
        rows = place.load_documents([since, len(scores.rows) - 1])
        verdict = judge(scores, rows, since=since, bounds=Bounds(gain=given.gain, loss=given.loss))
        damage = [line for line in place.lost(full=True) if not line.startswith("report.")]
    if given.json:
        opens = verdict.opens and not damage
        text = json.dumps({"opens": opens, "damage": damage, "note": NOTE} | asdict(verdict))
        print(json.dumps(json.loads(text, parse_constant=lambda constant: None)))  # nan is not JSON
    else:
        print("\n".join(tell(verdict, damage)))
    if damage or verdict.fails:
        return CLOSED
    return 0 if verdict.opens else UNKNOWN


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cpt.gate", description=__doc__.split("\n\n")[1])
    made.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    made.add_argument(
        "--gain", type=float, default=0.0, help="nats per token that new text must gain (default: 0)"
    )
    made.add_argument(
        "--loss", type=float, default=0.0, help="nats per token that old text may lose (default: 0)"
    )
    made.add_argument(
        "--since",
        metavar="ROW",
        help="the row that is compared with: base, or a domain (default: the last but one)",
    )
    made.add_argument("--json", action="store_true", help="for programs")
    return made


def read_finished(place: RunDir) -> Scores:
    """The scores of a run that has learned something. Raises ValueError for others, and damaged ones."""
    scores = place.scores()
    if scores is None:
        raise ValueError(f"{place.path} holds no scores.json; needed: the folder of a finished run")
    if not scores.run["finished"]:
        raise ValueError(f"{place.path} is {scores.state}; needed: a finished run")
    if scores.alone or len(scores.rows) < 2:
        raise ValueError(
            f"{place.path}: method={scores.run['method']} has no model that goes on from another's"
        )
    place.check_documents([scores.measured(row) for row in range(len(scores.rows))])
    return scores


def find_row(scores: Scores, name: str | None) -> int:
    """The place of a row before the last."""
    if name is None:
        return len(scores.rows) - 2
    if name not in scores.rows[:-1]:
        raise ValueError(f"--since={name} is no row before the last; allowed: {', '.join(scores.rows[:-1])}")
    return scores.rows.index(name)


def tell(verdict: Verdict, damage: Sequence[str] = ()) -> Iterator[str]:
    """The table, and what follows from it and from the damage of the exported model."""
    yield f"after {verdict.row}, compared with {verdict.since}; nats per token [95 % interval]"
    yield ROW.format("text", "before", "after", "change", "", "at most", "")
    yield from map(tell_change, verdict.changes)
    if verdict.unmeasured:
        yield f"not measured in both rows (eval.rows, eval.columns): {shorten(verdict.unmeasured)}"
    yield NOTE
    failed = [*damage, *(f"{each.text} {each.verdict}" for each in verdict.changes if not each.passes)]
    failed += [f"{name} not measured" for name in verdict.unmeasured]
    yield f"closed: {shorten(failed)}" if failed else "open: what is new was gained, and nothing old was lost"


def tell_change(change: Change) -> str:
    numbers = (f"{change.before:.4f}", f"{change.after:.4f}", f"{change.difference:+.4f}")
    bounds = f"[{change.low:+.4f}, {change.high:+.4f}]"
    return ROW.format(change.text, *numbers, bounds, f"{change.most:+.4f}", change.verdict)


def shorten(names: Sequence[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + rest


if __name__ == "__main__":
    run_program(main)
