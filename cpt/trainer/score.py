"""Cells of the matrix: which are due, measuring them, and keeping them on disk row by row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any, cast

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
from cpt.trainer.run_dir import RunDir

HEAVIEST = 20  # modules that a text's row names, of more
SHARE = 32  # of this many rows one may be in the journal alone


@dataclass(frozen=True)
class Cell:
    """The loss of a model on a text: nats per scored token; nats and scored tokens by document, [2, N];
    weights of the heaviest modules of the model that scored it."""

    mean: float
    documents: np.ndarray | None
    modules: Mapping[str, float]


def documents_of(cells: Mapping[str, Cell]) -> dict[str, np.ndarray]:
    return {text: cell.documents for text, cell in cells.items() if cell.documents is not None}


class Scorer:
    """Measures cells of a run's matrix, as its options say."""

    def __init__(
        self,
        options: EvalOptions,
        arguments: Mapping[str, Any],  # of lightning.Trainer
        *,
        module: ContinualMethod,
        data: DomainSequence,
        scores: Scores,
        place: RunDir,
    ) -> None:
        self.options, self.arguments, self.place = options, arguments, place
        self.module, self.data, self.scores = module, data, scores

    def wanted(self, number: int) -> list[str]:
        """The texts that the model after a stage is to be scored on."""
        stages = [domain.parts for domain in self.data]
        return self.options.choose_columns(number, stages=stages, texts=self.scores.domains)

    def missing(self, number: int) -> list[str]:
        """Those of them that a row does not have."""
        there = set(self.scores.measured(number))
        return [text for text in self.wanted(number) if text not in there]

    def score(self, number: int, row: str, texts: Sequence[str]) -> dict[str, Cell]:
        """The losses on some of the texts of the model as it is now, after a stage. Where the part that
        scores a text has not changed since a row, they are taken from the last such row. Raises ValueError
        where one is not finite."""
        scores, column, known = self.scores, {name: at for at, name in enumerate(self.scores.domains)}, {}
        for text in texts:
            part = self.module.constant_part(self.data.places.get(text, BASE))
            rows = range(number - 1, part, -1) if part is not None else ()
            earlier = next((each for each in rows if scores.nll[each][column[text]] is not None), None)
            if earlier is not None:
                known[text] = earlier
        cells = self.measure(row, [text for text in texts if text not in known])
        for earlier in sorted(set(known.values())):
            (losses,) = self.place.load_documents([earlier]) if is_first_process() else ({},)
            for text in (text for text in known if known[text] == earlier):
                mean = cast(float, scores.nll[earlier][column[text]])
                cells[text] = Cell(mean, losses.get(text), scores.modules[earlier].get(text, {}))
        return cells

    def measure(self, row: str, texts: Sequence[str]) -> dict[str, Cell]:
        """The losses of the model as it is now, computed."""
        if not texts:
            return {}
        self.data.asked, self.data.by_length = texts, not self.module.in_sequence
        trainer = make_trainer(self.arguments, label=f"scoring after {row}")
        trainer.validate(self.module, datamodule=self.data, verbose=False)
        self.data.asked = None
        names = {place: name for name, place in self.data.places.items()} | {BASE: "base"}
        cells = {}
        for text, (nll, count) in self.module.row().items():
            used = self.module.used(self.data.places.get(text, BASE))
            heaviest = nlargest(HEAVIEST, used, used.__getitem__)
            modules = {names[place]: round(used[place], 4) for place in heaviest}
            documents = np.stack([nll.cpu(), count.cpu()])
            cells[text] = Cell((nll.sum() / count.sum()).item(), documents, modules)
        if bad := [f"{text}: {cell.mean}" for text, cell in cells.items() if not math.isfinite(cell.mean)]:
            advice = "allowed: a model whose losses are numbers (model.name_or_path, trainer.precision)"
            advice = advice if row == "base" else ADVICE
            raise ValueError(f"the loss after {row} is not finite ({', '.join(bad)}); {advice}")
        return cells


class ScoreJournal:
    """Keeps the scores of a run on disk: a changed row as a line of the journal, all of them as `scores.json`
    where more than a share of the rows is in the journal alone, and always first, so that no line is appended
    to that of a killed process. Evaluators have files of their own; their results are collected when the
    scores are written. `digests` has a hash of the options of each, by kind."""

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
        setattr(self.scores, evaluator.KIND, results | {"hash": self.digests[evaluator.KIND]})

    def keep(self) -> None:
        """Writes the scores as they are."""
        self.scores.sum_seconds()
        self.scores.save(self.path)
        self.behind = 0
