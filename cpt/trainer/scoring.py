"""The cells of the matrix: which of a row are to be measured, and measuring them."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from cpt.adapters.bank import BASE
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.policy import EvalOptions
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualModule
from cpt.optim.guard import check_losses
from cpt.trainer.lightning import make_trainer
from cpt.trainer.options import TrainerOptions
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
SHOWN = 6  # texts at both ends of those that a line names
HEAVIEST = 20  # parts that a text's row names, of more


@dataclass(frozen=True)
class Cells:
    """What a model scores on some of the texts, by text."""

    means: Mapping[str, float]  # nats per scored token
    documents: Mapping[str, np.ndarray]  # nats and scored tokens by document, [2, documents]
    parts: Mapping[str, Mapping[str, float]]  # the parts of the model that scored it, the heaviest of them

    def __or__(self, other: "Cells") -> "Cells":
        return Cells(
            {**self.means, **other.means},
            {**self.documents, **other.documents},
            {**self.parts, **other.parts},
        )


class Scorer:
    """Measures cells of a run's matrix, as its options say."""

    def __init__(
        self,
        options: EvalOptions,
        trainer: TrainerOptions,
        *,
        module: ContinualModule,
        data: DomainSequence,
        scores: Scores,
        place: RunDir,
    ) -> None:
        self.options, self.trainer, self.place = options, trainer, place
        self.module, self.data, self.scores = module, data, scores
        self.told = False

    def wanted(self, number: int) -> list[str]:
        """The texts that the model after so many stages is to be scored on."""
        stages = [domain.parts for domain in self.data]
        return self.options.choose_columns(number, stages=stages, texts=self.scores.domains)

    def missing(self, number: int) -> list[str]:
        """Those of them that a row has not got."""
        there = set(self.scores.measured(number))
        return [text for text in self.wanted(number) if text not in there]

    def score(self, number: int, row: str, texts: Sequence[str]) -> Cells:
        """The losses of the model as it is now, after so many stages, on some of the texts. Those that only a
        part scores which has scored them before are not computed again. Raises ValueError where one is no
        number."""
        known = self.find_known(number, texts)
        cells = self.measure(row, [text for text in texts if text not in known])
        if known and not self.told:
            told = "after %s, %d of %d texts keep their losses: the part that scores them rests"
            log.info(told, row, len(known), len(texts))
            self.told = True
        for earlier in sorted(set(known.values())):
            cells |= self.recall(earlier, [text for text in known if known[text] == earlier])
        return cells

    def find_known(self, number: int, texts: Collection[str]) -> dict[str, int]:
        """Of the texts whose losses after so many stages are those of an earlier row, the last such row."""
        found = {}
        for text in texts:
            part = self.module.lasting(self.data.places.get(text, BASE))
            if part is not None:
                column = self.scores.domains.index(text)
                earlier = range(number - 1, part, -1)
                row = next((r for r in earlier if self.scores.nll[r][column] is not None), None)
                found |= {} if row is None else {text: row}
        return found

    def recall(self, number: int, texts: Sequence[str]) -> Cells:
        """What a row has of some texts; the documents for the process that writes."""
        nll = dict(zip(self.scores.domains, self.scores.nll[number], strict=True))
        (losses,) = self.place.load_documents([number]) if is_first_process() else ({},)
        return Cells(
            {text: nll[text] for text in texts},
            {text: losses[text] for text in texts if text in losses},
            {text: self.scores.parts[number].get(text, {}) for text in texts},
        )

    def measure(self, row: str, texts: Sequence[str]) -> Cells:
        """The losses of the model as it is now, computed."""
        if not texts:
            return Cells({}, {}, {})
        self.data.asked, self.data.by_length = texts, not self.module.in_sequence
        label = f"scoring after {row}"
        make_trainer(self.trainer.lightning, label=label).validate(
            self.module, datamodule=self.data, verbose=False
        )
        self.data.asked = None
        losses = self.module.row()
        cells = Cells(
            {text: (nll.sum() / count.sum()).item() for text, (nll, count) in losses.items()},
            {text: np.stack([each.cpu() for each in pair]) for text, pair in losses.items()},
            self.parts(losses),
        )
        check_losses(cells.means, row)
        return cells

    def parts(self, texts: Collection[str]) -> dict[str, dict[str, float]]:
        """The parts of the model that scored each text, by name: the heaviest of them."""
        places = self.data.places
        names = {place: name for name, place in places.items()} | {BASE: "base"}
        used = {text: self.module.used(places.get(text, BASE)) for text in texts}
        return {
            text: {names[part]: round(each[part], 4) for part in nlargest(HEAVIEST, each, key=each.get)}
            for text, each in used.items()
        }

    def tell_missing(self) -> str:
        """Which cells a finished run lacks and why, in words; nothing where none is."""
        left = {number: len(self.missing(number)) for number in range(len(self.scores.rows))}
        rows = [self.scores.rows[number] for number, count in left.items() if count]
        if not rows:
            return ""
        listed = ", ".join(rows[:3]) + ", …" * (len(rows) > 3)
        return (
            f"{sum(left.values())} cells of the matrix are missing, in the rows {listed}: the weights after "
            "these stages were not kept (keep_stages=true keeps them for later)"
        )


def tell_row(row: str, means: Mapping[str, float]) -> None:
    """A line with the perplexities of a row; of many texts the first and last."""
    shown = [f"{name} {value:.1f}" for name, value in zip(means, np.exp([*means.values()]), strict=True)]
    few = shown if len(shown) <= 2 * SHOWN else [*shown[:SHOWN], "…", *shown[-SHOWN:]]
    log.info("after %s, perplexity: %s", row, ", ".join(few))
