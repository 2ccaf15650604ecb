"""When the end tasks of a run are due, and on which weights."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from cpt.adapters.bank import BASE
from cpt.core.collectives import wait_for_others
from cpt.core.preemption import Preempted, leave_together
from cpt.core.processes import rank_and_world
from cpt.data.datamodule import DomainSequence
from cpt.methods.base import ContinualModule
from cpt.trainer.after_stages import AfterStages
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from cpt.evaluation.endtasks.suite import EndTasks
    from cpt.evaluation.endtasks.tasks import Planned


@dataclass(frozen=True)
class Examination(AfterStages):
    """The end tasks of a run's domains, measured on copies of what the module hands on after a stage."""

    GROUP, KIND = "endtask", "endtasks"  # what asks for them, and what they are in scores.json

    endtasks: EndTasks
    place: RunDir
    module: ContinualModule
    data: DomainSequence

    @property
    def when(self) -> str:
        return self.endtasks.plan.when

    @property
    def contents(self) -> dict[str, str]:
        """What the data of each task are known by."""
        return {name: task.content for name, task in self.endtasks.by_name.items()}

    def due(self, number: int) -> list[str]:
        """The tasks that are asked for after so many stages."""
        stages = [domain.parts for domain in self.data.domains[:number]]
        return self.endtasks.due(
            stages[-1] if stages else (),
            learned=list(dict.fromkeys(part for parts in stages for part in parts)),
            final=number == len(self.data),
            alone=self.module.alone,
        )

    def follows(self, number: int) -> bool:
        """Whether some are asked for after so many stages."""
        return bool(self.due(number))

    def missing(self, number: int) -> bool:
        """Whether something of that is not in the run folder yet."""
        folder = self.place.endtasks(number, self.name(number))
        wait_for_others()  # nobody works before all have asked: all get the same answer
        missing = self.endtasks.missing(folder, self.due(number))
        wait_for_others()
        return bool(missing)

    def measure(self, number: int, device: torch.device) -> None:
        """Fine-tunes what is missing after a stage, whose weights the module has; each process its share."""
        wait_for_others()
        rank, world = rank_and_world()
        with suppress(Preempted):  # the other processes are waited for
            self.endtasks.measure(
                lambda task: self.module.backbone(self.data.places.get(task, BASE)),
                self.due(number),
                folder=self.place.endtasks(number, self.name(number)),
                device=device,
                rank=rank,
                world=world,
                label=f"end tasks after {self.name(number)}",
            )
        leave_together(f"in the end tasks after {self.name(number)}")

    def results(self, rows: int) -> dict:
        """The `endtasks` of scores.json, from the files of so many rows."""
        folders = [self.place.endtasks(number, self.name(number)) for number in range(rows)]
        return self.endtasks.results(folders)


def make_examination(
    planned: Planned | None,
    place: RunDir,
    *,
    module: ContinualModule,
    data: DomainSequence,
    tokenizer: PreTrainedTokenizerBase,
) -> Examination | None:
    """The end tasks of a run; None where it has none."""
    if planned is None:
        return None
    from cpt.evaluation.endtasks.suite import EndTasks

    return Examination(EndTasks.of_plan(planned, tokenizer), place, module, data)
