"""Cells of the matrix: which are due, measuring them, and keeping them on disk row by row."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path

import numpy as np

from cpt.adapters.domain_store import BASE
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.journal import append_row
from cpt.evaluation.options import EvalOptions
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.optim.nan_guard import ADVICE
from cpt.trainer.evaluators import Evaluator
from cpt.trainer.lightning import make_trainer
from cpt.trainer.options import TrainerOptions
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)


HEAVIEST = 20  # parts that a text's row names, of more
SHARE = 32  # of this many rows one may be in the journal alone


@dataclass(frozen=True)
class Cells:
    """What a model scores on some of the texts, by text."""

    means: Mapping[str, float] = field(default_factory=dict)  # nats per scored token
    documents: Mapping[str, np.ndarray] = field(default_factory=dict)  # nats, scored tokens: [2, documents]
    # weights of the parts of the model that scored it, the heaviest of them
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __or__(self, other: "Cells") -> "Cells":
        return Cells(*({**own, **vars(other)[name]} for name, own in vars(self).items()))


class Scorer:
    """Measures cells of a run's matrix, as its options say."""

    def __init__(
        self,
        options: EvalOptions,
        trainer: TrainerOptions,
        *,
        module: ContinualMethod,
        data: DomainSequence,
        scores: Scores,
        place: RunDir,
    ) -> None:
        self.options, self.trainer, self.place = options, trainer, place
        self.module, self.data, self.scores = module, data, scores
        self.told = False

    def wanted(self, number: int) -> list[str]:
        """The texts that the model after a stage is to be scored on."""
        stages = [domain.parts for domain in self.data]
        return self.options.choose_columns(number, stages=stages, texts=self.scores.domains)

    def missing(self, number: int) -> list[str]:
        """Those of them that a row does not have."""
        there = set(self.scores.measured(number))
        return [text for text in self.wanted(number) if text not in there]

    def score(self, number: int, row: str, texts: Sequence[str]) -> Cells:
        """The losses on some of the texts of the model as it is now, after a stage. Where the part that
        scores a text has not changed since a row, they are taken from the last such row. Raises ValueError
        where one is not finite."""
        nll, columns, known = self.scores.nll, {name: at for at, name in enumerate(self.scores.domains)}, {}
        for text in texts:
            part = self.module.constant_part(self.data.places.get(text, BASE))
            for earlier in range(number - 1, part, -1) if part is not None else ():
                if nll[earlier][columns[text]] is not None:
                    known[text] = earlier
                    break
        cells = self.measure(row, [text for text in texts if text not in known])
        if known and not self.told:
            told = "after %s, %d of %d texts keep their losses: the part that scores them rests"
            log.info(told, row, len(known), len(texts))
            self.told = True
        for earlier in sorted(set(known.values())):
            kept = [text for text in known if known[text] == earlier]
            (losses,) = self.place.load_documents([earlier]) if is_first_process() else ({},)
            cells |= Cells(
                {text: nll[earlier][columns[text]] for text in kept},
                {text: losses[text] for text in kept if text in losses},
                {text: self.scores.parts[earlier].get(text, {}) for text in kept},
            )
        return cells

    def measure(self, row: str, texts: Sequence[str]) -> Cells:
        """The losses of the model as it is now, computed."""
        if not texts:
            return Cells()
        self.data.asked, self.data.by_length = texts, not self.module.in_sequence
        trainer = make_trainer(self.trainer.lightning, label=f"scoring after {row}")
        trainer.validate(self.module, datamodule=self.data, verbose=False)
        self.data.asked = None
        losses = self.module.row()
        cells = Cells(
            {text: (nll.sum() / count.sum()).item() for text, (nll, count) in losses.items()},
            {text: np.stack([each.cpu() for each in pair]) for text, pair in losses.items()},
            self.parts(losses),
        )
        if bad := [f"{name}: {value}" for name, value in cells.means.items() if not math.isfinite(value)]:
            advice = "allowed: a model whose losses are numbers (model.checkpoint, trainer.precision)"
            advice = advice if row == "base" else ADVICE
            raise ValueError(f"the loss after {row} is not finite ({', '.join(bad)}); {advice}")
        return cells

    def parts(self, texts: Collection[str]) -> dict[str, dict[str, float]]:
        """Weights of the parts of the model that scored each text, by name: the heaviest of them."""
        names = {place: name for name, place in self.data.places.items()} | {BASE: "base"}
        used = {text: self.module.used(self.data.places.get(text, BASE)) for text in texts}
        return {
            text: {names[part]: round(each[part], 4) for part in nlargest(HEAVIEST, each, key=each.get)}
            for text, each in used.items()
        }


class ScoreJournal:
    """Keeps the scores of a run on disk: a changed row as a line of the journal, all of them as `scores.json`
    where more than a share of the rows is in the journal alone, and always first, so that no line is appended
    to what a killed process had begun. Evaluators have files of their own; their results are collected where
    the scores are written. `digests` has a hash of the options of each, by kind."""

    def __init__(self, scores: Scores, path: Path, *, digests: Mapping[str, str]) -> None:
        self.scores, self.path, self.digests = scores, path, digests
        self.behind: int | None = None  # changes that are in the journal alone; None: nothing was written yet
        self.measured: dict[str, Evaluator] = {}  # whose results the scores do not have yet, by kind

    def note(self, evaluator: Evaluator, number: int) -> None:
        """An evaluator has measured something after a stage."""
        self.measured[evaluator.KIND] = evaluator
        self.keep_row(number)

    def keep_row(self, number: int) -> None:
        """Puts a row that is new or has changed on disk."""
        if self.behind is None or self.behind + 1 > len(self.scores.rows) // SHARE:
            self.keep_rows()
        else:
            append_row(self.path, self.scores.record(number))
            self.behind += 1

    def keep_rows(self) -> None:
        """Writes the scores with their metrics, without intervals."""
        for evaluator in self.measured.values():
            self.collect(evaluator)
        self.measured.clear()
        self.scores.measure()
        self.keep()

    def collect(self, evaluator: Evaluator) -> None:
        """Takes over the results of an evaluator so far."""
        results = evaluator.results(len(self.scores.rows))
        setattr(self.scores, evaluator.KIND, results | {"digest": self.digests[evaluator.KIND]})

    def keep(self) -> None:
        """Writes the scores as they are."""
        self.scores.sum_seconds()
        self.scores.save(self.path)
        self.behind = 0
