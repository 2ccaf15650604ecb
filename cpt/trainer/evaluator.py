"""What a run measures after its stages: the interface that the loop calls, and evaluators whose results are
files. Stages are numbered as the rows of the matrix: 0 is the base model."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from cpt.core.distributed import (
    all_reduce_max,
    barrier,
    check_all_signals,
    leave_together,
    sharing_errors,
    wait_for_all,
)
from cpt.core.exceptions import InvalidOptionError
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.preemption import Preempted
from cpt.core.processes import is_first_process
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.evaluation.withdrawals import WITHDRAWN_FILE
from cpt.methods.base import ContinualMethod
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)


class Evaluator(ABC):
    """Measures something on the model after a stage.

    Every process of a run has to call `is_missing` and `measure`."""

    KIND: str  # its name among the activities of scores.json

    @abstractmethod
    def is_missing(self, number: int) -> bool:
        """Whether something is to be measured after a stage that has not been; alike in all processes."""

    @abstractmethod
    def report_lost_weights(self, number: int, scores: Scores) -> None:
        """Called where something is missing after a stage whose weights were not kept."""

    @abstractmethod
    def measure(self, number: int, device: torch.device) -> None:
        """Measures what is missing after a stage, whose weights the module has, on `device`."""

    @abstractmethod
    def collect(self, number: int, scores: Scores) -> None:
        """Copies what was measured after a stage into the scores, which have its row."""

    @abstractmethod
    def finish(self, scores: Scores) -> None:
        """Called at the end of a run, in the first process."""


class FileEvaluator(Evaluator):
    """Measures tasks. Each result is a file in the run's folder with a digest of all that it depends on
    besides the model: another start measures what is missing."""

    GROUP: str  # of the config
    KIND: str  # its field of the scores, and its folder
    LABEL: str  # of its progress bars
    contents: Mapping[str, str] = {}  # hashes of the data of each task, where a run's identity keeps them

    def __init__(
        self, when: str, *, run: RunDir, module: ContinualMethod, data: DomainSequence, settings_hash: str
    ) -> None:
        self.when = when
        self.run = run
        self.module = module
        self.data = data
        self.settings_hash = settings_hash  # of options and data

    @abstractmethod
    def requests(self, number: int) -> list[Any]:
        """What is to be measured after a stage, whether it has been or not: one result each."""

    @abstractmethod
    def read(self, number: int, request: Any) -> Any:
        """The result of a request; None if there is no file, or one that is damaged or of other settings,
        data or examples."""

    @abstractmethod
    def measure_requests(self, number: int, requests: list[Any], device: torch.device, label: str) -> None:
        """Measures requests after stage `number`, each process its share, and writes their files. Progress
        bars have the `label`. Preempted may be raised meanwhile."""

    @abstractmethod
    def results(self, num_rows: int) -> dict[str, Any]:
        """What the files of the first rows hold, for scores.json."""

    def missing_requests(self, number: int) -> list[Any]:
        return [request for request in self.requests(number) if self.read(number, request) is None]

    def is_missing(self, number: int) -> bool:
        return bool(all_reduce_max(len(self.missing_requests(number))))

    def report_lost_weights(self, number: int, scores: Scores) -> None:
        """Logs it for a run that was extended, which had removed the weights of its stages, and for one that
        was made of another run by giving a domain back.

        Raises InvalidOptionError in any other run."""
        row = scores.rows[number]
        is_reduced = (self.run.path / WITHDRAWN_FILE).exists()
        if is_reduced or number <= max(scores.grown, default=0):
            log.info(
                "Skipping %s after %s: its weights were not kept (save_all_stages=true keeps them)",
                self.GROUP,
                row,
            )
            return
        raise InvalidOptionError(
            f"{self.GROUP}.when",
            self.when,
            reason=f"the weights after {row} were not kept",
            allowed=f"{self.GROUP}.when=last, or a new name=… (save_all_stages=true keeps them for later)",
        )

    def measure(self, number: int, device: torch.device) -> None:
        requests = self.missing_requests(number)
        label = f"{self.LABEL} after {self.stage_name(number)}"
        # No process writes a result before all have listed the missing ones.
        barrier()
        # A process with a signal waits for the others too: they leave together.
        with suppress(Preempted), sharing_errors():
            self.measure_requests(number, requests, device, label)
        wait_for_all(f"cpt/{self.KIND}/{number}")
        leave_together(f"in the {label}")

    def collect(self, number: int, scores: Scores) -> None:
        if is_first_process():
            self.collect_all(scores)

    def finish(self, scores: Scores) -> None:
        self.collect_all(scores)

    def collect_all(self, scores: Scores) -> None:
        """Copies the results after all stages into the scores, with the hash of what they depend on."""
        results = self.results(len(scores.rows))
        results["hash"] = self.settings_hash
        scores.set_results(self.KIND, results)

    def stage_name(self, number: int) -> str:
        """The name of a stage, as the row of the matrix."""
        if number == 0:
            return "base"
        return self.data.domains[number - 1].name

    def folder(self, number: int) -> Path:
        return self.run.path / self.KIND / f"{number:03d}-{self.stage_name(number)}"

    def learned_domains(self, number: int) -> list[str]:
        """The domains learned until a stage, in their order."""
        learned: dict[str, None] = {}
        for stage in self.data.domains[:number]:
            learned.update(dict.fromkeys(stage.texts))
        return list(learned)


@contextmanager
def count_units(
    label: str, *, total: int | None, hidden: bool, unit: str
) -> Iterator[tuple[tqdm, Callable[..., None]]]:
    """A progress bar, and a function that the caller calls after some units of work with their number: it
    advances the bar, and raises Preempted if any process has had a signal."""
    with make_progress_bar(label, total=total, hidden=hidden, unit=unit, delay=DELAY) as progress:

        def on_units_done(count: int = 1) -> None:
            progress.update(count)
            check_all_signals()

        yield progress, on_units_done


@contextmanager
def on_device(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """The model on a device; afterwards it is where it was."""
    initial_device = model.device
    try:
        yield model.to(device)
    finally:
        model.to(initial_device)
