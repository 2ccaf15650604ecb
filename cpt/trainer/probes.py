"""When the probe of a run is due, and on which weights."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.bank import BASE
from cpt.core.preemption import Herald, Preempted, leave_together
from cpt.core.progress import progress_bar
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.probes.options import LMEval
from cpt.evaluation.probes.results import path_of, pick_metric, read_results, save_results, tell_task
from cpt.methods.base import ContinualModule
from cpt.trainer.after_stages import AfterStages
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from tqdm import tqdm

    from cpt.evaluation.probes.harness import Harness


@dataclass(frozen=True)
class Probing(AfterStages):
    """The probe of a run, measured on what the module hands on after a stage. The first process has the
    harness and works; the others wait."""

    GROUP, KIND = "probe", "probes"  # what asks for it, and what it is in scores.json

    options: LMEval
    harness: Harness | None
    place: RunDir
    module: ContinualModule
    data: DomainSequence
    tokenizer: PreTrainedTokenizerBase

    def folder(self, number: int) -> Path:
        return self.place.probes(number, self.name(number))

    def due(self, number: int) -> list[str]:
        if self.harness is None or not self.options.is_due(number, stages=len(self.data)):
            return []
        return [name for name in self.harness.columns if self.read(number, name) is None]

    def read(self, number: int, task: str) -> dict[str, Any] | None:
        return read_results(path_of(self.folder(number), task), digest=self.harness.digest(task))

    def backbone(self, number: int) -> PreTrainedModel:
        """The model after a stage, whose weights the module has: that of the last domain learned."""
        learned = self.data.domains[number - 1].parts if number else ()
        return self.module.backbone(self.data.places[learned[-1]] if learned else BASE)

    def measure(self, number: int, device: torch.device) -> None:
        """Measures what is missing after a stage; the other processes are waited for."""
        with suppress(Preempted):
            if tasks := self.due(number):
                self.work(number, tasks, device)
        leave_together(f"in the probe after {self.name(number)}")

    def work(self, number: int, tasks: list[str], device: torch.device) -> None:
        """Measures tasks on `device`, each of which leaves its file; the model is then where it was."""
        model, herald = self.backbone(number), Herald()
        before = model.device
        label = f"probe after {self.name(number)}"
        try:
            model.to(device)
            with progress_bar(label, total=0, hidden=False, unit="request") as progress:
                for task in tasks:
                    progress.set_postfix_str(task, refresh=False)
                    began = time.perf_counter()
                    found = self.harness.measure(
                        task,
                        model,
                        self.tokenizer,
                        expect=partial(expect_requests, progress),
                        step=partial(count_request, progress, herald),
                    )
                    found["seconds"] = round(time.perf_counter() - began, 3)
                    save_results(path_of(self.folder(number), task), found)
        finally:
            model.to(before)

    def results(self, rows: int) -> dict[str, Any]:
        """The `probes` of scores.json, from the files of so many rows."""
        found = {task: [self.read(row, task) for row in range(rows)] for task in self.harness.columns}
        there = {task: cells for task, cells in found.items() if any(cells)}
        return {
            "harness": self.harness.version,
            "when": self.when,
            "seconds": sum(cell["seconds"] for cells in there.values() for cell in cells if cell),
            "tasks": {task: tell_task(cells, self.metric(task, cells)) for task, cells in there.items()},
        }

    def metric(self, task: str, cells: list[dict[str, Any] | None]) -> str:
        return pick_metric(next(filter(None, cells)), task, self.options.metrics.get(task))


def make_probing(
    options: LMEval | None,
    place: RunDir,
    *,
    harness: Harness | None,
    module: ContinualModule,
    data: DomainSequence,
    tokenizer: PreTrainedTokenizerBase,
) -> Probing | None:
    """The probe of a run; None where it has none."""
    return None if options is None else Probing(options, harness, place, module, data, tokenizer)


def expect_requests(progress: tqdm, count: int) -> None:
    """More requests will come."""
    progress.total = (progress.total or 0) + count
    progress.refresh()


def count_request(progress: tqdm, herald: Herald) -> None:
    """Called after every request; leaves if a signal has come to any process."""
    progress.update()
    herald.check()
