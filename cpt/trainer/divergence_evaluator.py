"""KL(base || model) on the test texts, after each stage that is due: how far the model is from the base.

It needs no text but that on which it is measured. On the text of the domain that was just trained it is meant
to predict how much of other text is forgotten (Shenfeld et al., arXiv 2509.04259)."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpt.core.distributed import barrier
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import check_archive
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.divergence import Documents, Estimate, collect_divergences, find_mean
from cpt.evaluation.options import DivergenceOptions, EvalOptions, is_due
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.trainer.auto import Machine
from cpt.trainer.evaluator import FileEvaluator
from cpt.trainer.lightning import make_trainer
from cpt.trainer.options import TrainerOptions
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
FILE = "divergence.npz"
# The largest difference, in nats per token, of losses whose batches are divided differently.
MAX_LOSS_DIFFERENCE = 0.01


class DivergenceEvaluator(FileEvaluator):
    """Measures the divergence from the base. A request is a text; all processes share each text."""

    GROUP = "divergence"
    KIND = "divergence"
    LABEL = "divergence"

    def __init__(
        self,
        options: DivergenceOptions,
        evaluation: EvalOptions,
        *,
        machine: Machine,
        trainer_options: TrainerOptions,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        settings_hash: str,
    ) -> None:
        super().__init__(options.when, run=run, module=module, data=data, settings_hash=settings_hash)
        self.evaluation = evaluation
        self.machine = machine
        self.trainer_options = trainer_options
        self.stored: dict[int, dict[str, Documents]] = {}  # of the rows whose file was read
        self.estimates: dict[tuple[int, str], Estimate] = {}  # by row and text

    def requests(self, number: int) -> list[str]:
        """The texts that the matrix has of a row."""
        if not is_due(self.when, number, stages=len(self.data)):
            return []
        stages = [domain.texts for domain in self.data]
        return self.evaluation.choose_columns(number, stages=stages, texts=list(self.data.held_out))

    def path(self, number: int) -> Path:
        return self.folder(number) / FILE

    def read(self, number: int, request: str) -> Documents | None:
        return self.read_row(number).get(request)

    def read_row(self, number: int) -> dict[str, Documents]:
        """What the file of a row holds, by text; nothing without a file, or with a damaged one. Each file is
        read once."""
        path = self.path(number)
        if number not in self.stored and path.exists():
            try:
                check_archive(path, remedy="it is measured again")
            except ValueError as error:
                log.info("Measuring again: %s", error)
                self.stored[number] = {}  # until it is measured
                return {}
            with np.load(path) as archive:
                self.stored[number] = dict(archive)
        return self.stored.get(number, {})

    def report_lost_weights(self, number: int, scores: Scores) -> None:
        """Logs it: a later start may ask for the divergence of a run whose stages were not kept."""
        log.info(
            "Skipping the divergence after %s: its weights were not kept (save_all_stages=true keeps them)",
            scores.rows[number],
        )

    def measure_requests(self, number: int, requests: list[str], device: torch.device, label: str) -> None:
        lightning_trainer = make_trainer(
            self.machine.lightning_arguments(self.trainer_options), label=f"scoring the {label}"
        )
        self.module.measures_divergence = True
        try:
            with self.data.scoring(requests, by_length=True):
                lightning_trainer.validate(self.module, datamodule=self.data, verbose=False)
            measured = self.module.document_divergences()  # a collective
        finally:
            self.module.measures_divergence = False

        if is_first_process():
            documents = dict(self.read_row(number))
            documents.update({text: values.cpu().numpy() for text, values in measured.items()})
            self.run.save_arrays(self.path(number), documents)
        barrier()  # the file is there for all

        # What was read and estimated before is out of date.
        self.stored.pop(number, None)
        for text in measured:
            self.estimates.pop((number, text), None)

    def collect(self, number: int, scores: Scores) -> None:
        self.check_losses(number, scores)
        if not self.estimates:  # the first row of this start: those of rows before are in scores.json
            for row, estimates in enumerate(scores.divergence.get("kl", [])[:number]):
                self.estimates.update({(row, text): estimate for text, estimate in estimates.items()})
        super().collect(number, scores)

    def check_losses(self, number: int, scores: Scores) -> None:
        """Raises ValueError where the losses that were found with the divergence are not those of the matrix:
        then one of the two models is another one, as of a method that computes its scores otherwise. The file
        is removed, so that the next start does not take it for a result."""
        difference = self.describe_difference(number, scores)
        barrier()  # all have read the file
        if not difference:
            return
        if is_first_process():
            self.path(number).unlink(missing_ok=True)
        raise InvalidOptionError(
            "divergence",
            "base",
            reason=f"{difference}: {type(self.module).__name__} has no single model to compare with the base",
            allowed="divergence=none",
        )

    def describe_difference(self, number: int, scores: Scores) -> str:
        """The first loss of a row's file that differs from the matrix, in words; empty where all are."""
        for text, documents in self.read_row(number).items():
            column = scores.domains.index(text)
            for field, row in (("base_nll", 0), ("nll", number)):
                loss = find_mean(documents, field)
                expected = scores.nll[row][column]  # None: the matrix does not have this text
                if expected is None:
                    continue
                is_equal = abs(loss - expected) <= MAX_LOSS_DIFFERENCE  # false of nan
                if not is_equal:
                    return (
                        f"the loss of {scores.rows[row]} on {text} is {expected:.4f} nats, "
                        f"and {loss:.4f} in the comparison"
                    )
        return ""

    def results(self, num_rows: int) -> dict[str, Any]:
        rows: Sequence[dict[str, Documents]] = [self.read_row(number) for number in range(num_rows)]
        stages = [domain.texts for domain in self.data]
        return collect_divergences(rows, self.estimates, stages=stages)
