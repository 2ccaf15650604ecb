"""The matrix of test losses: a row is the model after a stage, a column is a text, a cell is a mean loss."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from pathlib import Path

import numpy as np
import torch

from cpt.adapters.domain_store import BASE
from cpt.core.distributed import leave_together
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.models.original_weights import MissingWeightError, original_weights
from cpt.optim.nan_guard import ADVICE
from cpt.trainer.auto import Machine
from cpt.trainer.evaluator import Evaluator
from cpt.trainer.lightning import make_trainer
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
MAX_MODULES = 20  # of those that scored a text, the heaviest, which its row names
MAX_ROWS = 3  # that the line on missing cells names


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """What one cell of the matrix holds, and the losses that it is the mean of."""

    nll: float  # mean in nats per scored token
    modules: Mapping[str, float]  # by domain, the weights of the modules that scored the text
    documents: np.ndarray | None  # [2, documents]: nats, scored tokens; None where it is not stored


class MatrixEvaluator(Evaluator):
    """Scores the held-out texts. The loop calls it before all other evaluators: a row begins with its
    losses."""

    KIND = "score"

    def __init__(
        self,
        *,
        plan: Plan,
        machine: Machine,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        scores: Scores,
        original_files: Sequence[Path],
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.run = run
        self.module = module
        self.data = data
        self.scores = scores
        self.original_files = original_files  # with the weights of the base before they were quantized
        self.text_scores: dict[str, TextScore] = {}  # that `measure` has found last
        self.unquantized: dict[str, float] = {}  # losses of the base before it was quantized, by text

    def missing_texts(self, number: int) -> list[str]:
        """The texts that the row of a stage is to have, and has not."""
        measured: set[str] = set()
        if number < len(self.scores.rows):
            measured.update(self.scores.measured(number))

        stages = [domain.texts for domain in self.data]
        texts = self.plan.evaluation.choose_columns(number, stages=stages, texts=self.scores.domains)
        return [text for text in texts if text not in measured]

    def is_missing(self, number: int) -> bool:
        is_new_row = number == len(self.scores.rows)
        return is_new_row or bool(self.missing_texts(number))

    def report_lost_weights(self, number: int, scores: Scores) -> None:
        """Nothing: the end of the run counts the missing cells."""

    def measure(self, number: int, device: torch.device) -> None:
        """Scores the texts that a row lacks, and stores their losses by document.

        Raises ValueError if a loss is not finite."""
        is_new_row = number == len(self.scores.rows)
        row = "base" if number == 0 else self.data.domains[number - 1].name
        texts = self.missing_texts(number)
        if not is_new_row:
            log.info("Scoring %s after %s", count_noun(len(texts), "further text"), row)

        copied_from = self.find_unchanged(number, texts)
        changed_texts = [text for text in texts if text not in copied_from]
        self.text_scores = {}
        if changed_texts:
            # Gradient masks observe the first evaluation of the base and of the final model.
            self.module.observes = is_new_row and number in (0, len(self.data))
            self.text_scores.update(self.evaluate(row, changed_texts))
            self.module.observes = False
        check_losses(row, self.text_scores)
        self.text_scores.update(self.copy_scores(copied_from))
        if number == 0 and self.original_files:
            self.unquantized = self.evaluate_unquantized(texts)

        leave_together(f"before {row} was committed")
        if is_first_process():
            self.store_documents(number)

    def find_unchanged(self, number: int, texts: Sequence[str]) -> dict[str, int]:
        """By text, the last stage with its score, for texts whose score cannot have changed since.

        Those are the texts that the modules of one domain score alone: only the stage of that domain trains
        them."""
        columns = {text: column for column, text in enumerate(self.scores.domains)}
        copied_from: dict[str, int] = {}
        for text in texts:
            scoring_domain = self.module.constant_part(self.domain_index(text))
            if scoring_domain is None:
                continue

            # The domain of index i is trained in stage i + 1, and its modules stay as they are from then on.
            for earlier in range(number - 1, scoring_domain, -1):
                if self.scores.nll[earlier][columns[text]] is not None:
                    copied_from[text] = earlier
                    break
        return copied_from

    def evaluate(self, row: str, texts: Sequence[str]) -> dict[str, TextScore]:
        """Scores texts with the module as it is."""
        arguments = self.machine.lightning_arguments(self.plan.trainer)
        lightning_trainer = make_trainer(arguments, label=f"scoring after {row}")
        # Sequences of similar length share a batch, unless the method has to score a text in its order.
        with self.data.scoring(texts, by_length=not self.module.in_sequence):
            lightning_trainer.validate(self.module, datamodule=self.data, verbose=False)

        # Cells name modules by their domain.
        domain_names = {index: name for name, index in self.data.domain_indices.items()}
        domain_names[BASE] = "base"
        text_scores = {}
        for text, (nll, num_tokens) in self.module.document_losses().items():  # both by document
            weights = self.module.routing_weights(self.domain_index(text))
            heaviest = nlargest(MAX_MODULES, weights, key=weights.__getitem__)
            text_scores[text] = TextScore(
                nll=(nll.sum() / num_tokens.sum()).item(),
                modules={domain_names[index]: round(weights[index], 4) for index in heaviest},
                documents=np.stack([nll.cpu(), num_tokens.cpu()]),
            )
        return text_scores

    def evaluate_unquantized(self, texts: Sequence[str]) -> dict[str, float]:
        """The losses of the base before it was quantized, by text. The weights are read from its files while
        texts are scored, one at a time; empty where the files store them in another form."""
        try:
            with original_weights(self.module.model, self.original_files):
                scores = self.evaluate("base, unquantized", texts)
        except MissingWeightError as error:
            log.info(
                "Not scoring the base before it was quantized: its files store %s in another form", error
            )
            return {}
        return {text: score.nll for text, score in scores.items()}

    def copy_scores(self, copied_from: Mapping[str, int]) -> dict[str, TextScore]:
        """The scores of texts after earlier stages, given by text."""
        columns = {text: column for column, text in enumerate(self.scores.domains)}
        text_scores = {}
        for number in sorted(set(copied_from.values())):  # so that each file is read once
            documents = self.load_documents(number)
            texts = [text for text, source in copied_from.items() if source == number]
            for text in texts:
                nll = self.scores.nll[number][columns[text]]
                assert nll is not None  # find_unchanged gives rows that have it
                text_scores[text] = TextScore(
                    nll=nll,
                    modules=self.scores.modules[number].get(text, {}),
                    documents=documents.get(text),
                )
        return text_scores

    def load_documents(self, number: int) -> dict[str, np.ndarray]:
        """The stored losses of a row by text; in the first process, which stores them."""
        if not is_first_process():
            return {}
        (documents,) = self.run.load_documents([number])
        return documents

    def store_documents(self, number: int) -> None:
        """Writes the losses by document of a row, together with the losses that its file has already."""
        documents: dict[str, np.ndarray] = {}
        if number < len(self.scores.rows):
            documents.update(self.load_documents(number))

        for text, score in self.text_scores.items():
            if score.documents is not None:
                documents[text] = score.documents
        self.run.save_documents(number, documents)

    def collect(self, number: int, scores: Scores) -> None:
        scores.fill(
            number,
            nll={text: score.nll for text, score in self.text_scores.items()},
            modules={text: score.modules for text, score in self.text_scores.items()},
        )
        if number == 0:
            scores.unquantized.update(self.unquantized)

    def finish(self, scores: Scores) -> None:
        """Logs how many cells of the matrix are missing: those of rows whose stage's weights were not
        kept."""
        num_missing = 0  # cells
        incomplete_rows = []
        for number, row in enumerate(scores.rows):
            missing_texts = self.missing_texts(number)
            num_missing += len(missing_texts)
            if missing_texts:
                incomplete_rows.append(row)
        if not incomplete_rows:
            return

        shown_rows = ", ".join(incomplete_rows[:MAX_ROWS])
        if len(incomplete_rows) > MAX_ROWS:
            shown_rows += ", …"
        log.info(
            "Missing cells of the matrix: %d, after %s, whose weights were not kept "
            "(save_all_stages=true keeps those of later stages)",
            num_missing,
            shown_rows,
        )

    def domain_index(self, text: str) -> int:
        """The position of a text's domain in the order; BASE for the general text, which belongs to none."""
        return self.data.domain_indices.get(text, BASE)


def check_losses(row: str, text_scores: Mapping[str, TextScore]) -> None:
    """Raises ValueError if a loss is not finite."""
    non_finite = [
        f"{text}: {score.nll}" for text, score in text_scores.items() if not math.isfinite(score.nll)
    ]
    if not non_finite:
        return

    # Before any training the model or its precision is at fault; later, most likely the learning rate.
    remedy = ADVICE
    if row == "base":
        remedy = "allowed: a model whose losses are numbers (model.name_or_path, trainer.precision)"
    raise ValueError(f"the loss after {row} is not finite ({', '.join(non_finite)}); {remedy}")
