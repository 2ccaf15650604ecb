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
SHOWN = 5  # texts that the last line names


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
    new, old = scores.rows[since + 1 :], [*learned, *scores.rows[1 : since + 1], GENERAL]
    if not set(new) <= set(scores.domains):  # joint: one row for all
        new = scores.run["order"]
    columns = {name: scores.domains.index(name) for name in (*new, *old) if name in scores.domains}
    ends = scores.nll[since], scores.nll[-1]
    known = [name for name, column in columns.items() if None not in (row[column] for row in ends)]
    changes = [
        BoundedChange(**vars(each), new=each.text in new, most=0.0 - gain if each.text in new else loss)
        for each in compare_losses(known, before, after)
    ]
    return changes, [name for name in {**dict.fromkeys(learned), **columns} if name not in known]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m cpt.gate", description=__doc__.split("\n\n")[1])
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a finished run")
    said = "nats per token, default 0"
    gain, loss = "least improvement of each new text", "largest rise of the loss on each old text"
    parser.add_argument("--min-gain", type=float, default=0.0, help=f"{gain}; {said}")
    parser.add_argument("--max-forgetting", type=float, default=0.0, help=f"{loss}; {said}")
    parser.add_argument("--since", metavar="ROW", help="row to compare with; default: the last but one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    place = RunDir(given.run)
    with readable(code=UNKNOWN):
        for name, value in (("min-gain", given.min_gain), ("max-forgetting", given.max_forgetting)):
            if not math.isfinite(value):
                raise ValueError(f"--{name}={value} is invalid. Allowed: nats per token, a finite number")
        scores = place.load_scores()
        if scores is None or not scores.run["finished"]:
            why = "it has no scores.json" if scores is None else scores.state
            raise ValueError(f"RUN={place.path} is invalid: {why}. Allowed: the folder of a finished run")
        *earlier, last = scores.rows
        if scores.alone or not earlier:
            method = f"method={scores.run['method']}"
            raise ValueError(f"{place.path}: {method} has no model that continues from another's")
        if given.since not in (None, *earlier):
            raise ValueError(f"--since={given.since} is invalid. Allowed: {', '.join(earlier)}")
        place.check_documents(len(scores.rows))
        since = earlier.index(given.since or earlier[-1])
        before, after = place.load_documents([since, len(earlier)])
        ends = zip(scores.domains, scores.nll[since], scores.nll[-1], strict=True)
        for name in (name for name, *losses in ends if None not in losses):
            found = [row[name].shape if name in row else None for row in (before, after)]
            if None in found or found[0] != found[1]:
                wrong = f"{place.path}/documents are not those of scores.json ({name})"
                raise ValueError(f"{wrong}; restore them from a backup")
        how = {"since": since, "gain": given.min_gain, "loss": given.max_forgetting}
        changes, unmeasured = judge_run(scores, before, after, **how)
        damage = [line for line in place.find_damaged_outputs(full=True) if not line.startswith("report.")]
    failed = [*damage, *(f"{e.text} {e.verdict}" for e in changes if e.verdict not in PASSES)]
    failed += [f"{name} not measured" for name in unmeasured]
    fails = damage or any(each.low > each.most for each in changes)
    verdict = ("fail" if fails else "inconclusive") if failed else "pass"
    if given.json:
        told = {"verdict": verdict, "damage": damage, "note": NOTE, "since": earlier[since], "row": last}
        print(encode(told | {"changes": [*map(asdict, changes)], "unmeasured": unmeasured}))
    else:
        rows = []
        for each in changes:
            interval = "no interval" if math.isnan(each.low) else f"[{each.low:+.4f}, {each.high:+.4f}]"
            how = {"change": each.difference, "interval": interval, "verdict": each.verdict}
            rows.append(ROW.format(**vars(each), **how))
        print(f"after {last}, compared with {earlier[since]}; nats per token [95 % interval]")
        shown = ", ".join(failed[:SHOWN]) + f" and {len(failed) - SHOWN} more" * (len(failed) > SHOWN)
        shown = shown or "every new text improved, every old text is within tolerance"
        print(HEAD, *rows, NOTE, f"{verdict}: {shown}", sep="\n")
    return {"pass": 0, "fail": FAIL, "inconclusive": UNKNOWN}[verdict]


if __name__ == "__main__":
    run_program(main)
