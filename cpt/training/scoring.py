"""The cells of the matrix: which of a row are to be measured, and measuring them."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
from torch import Tensor

from cpt.adapters.bank import BASE
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.policy import EvalOptions
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualModule
from cpt.optim.guard import check_losses
from cpt.training.options import TrainerOptions
from cpt.training.run_folder import RunFolder
from cpt.training.trainer import make_trainer

log = logging.getLogger(__name__)
SHOWN = 6  # texts at both ends of those that a line names
HEAVIEST = 20  # parts that a text's row names, of more


@dataclass(frozen=True)
class Cells:
    """What a model scores on some of the texts, by text."""

    losses: Mapping[str, tuple[Tensor, Tensor]]  # nats and scored tokens, each [documents]
    parts: Mapping[str, Mapping[str, float]]  # the parts of the model that scored it, the heaviest of them

    @property
    def means(self) -> dict[str, float]:
        """Nats per scored token."""
        return {text: (nll.sum() / count.sum()).item() for text, (nll, count) in self.losses.items()}

    @property
    def documents(self) -> dict[str, np.ndarray]:
        """Nats and scored tokens by document, [2, documents]."""
        return {text: np.stack([each.cpu() for each in pair]) for text, pair in self.losses.items()}


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
        place: RunFolder,
    ) -> None:
        self.options, self.trainer, self.place = options, trainer, place
        self.module, self.data, self.scores = module, data, scores

    def wanted(self, number: int) -> list[str]:
        """The texts that the model after so many stages is to be scored on."""
        stages = [domain.parts for domain in self.data]
        return self.options.choose_columns(number, stages=stages, texts=self.scores.domains)

    def missing(self, number: int) -> list[str]:
        """Those of them that a row has not got."""
        there = set(self.scores.measured(number))
        return [text for text in self.wanted(number) if text not in there]

    def score(self, row: str, texts: Collection[str]) -> Cells:
        """The losses of the model as it is now on some of the texts; raises ValueError where one is no
        number."""
        self.data.asked = texts
        label = f"scoring after {row}"
        make_trainer(self.trainer.lightning, label=label).validate(
            self.module, datamodule=self.data, verbose=False
        )
        self.data.asked = None
        losses = self.module.row()
        cells = Cells(losses, self.parts(losses))
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
