"""End tasks: classification tasks that a copy of the model is fine-tuned on after the stages asked for."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.preemption import Herald
from cpt.core.progress import progress_bar
from cpt.evaluation.endtasks import predictions
from cpt.evaluation.endtasks.classifier import fine_tune, scores_of, unchanged_generators
from cpt.evaluation.endtasks.encoding import FineTuning, encode, has_types, longest
from cpt.evaluation.endtasks.tasks import METRICS, Planned, Task, hash_json, plan_endtasks

log = logging.getLogger(__name__)

Measurement = tuple[str, int]  # task, seed


class EndTasks:
    """The end tasks of a run: `tasks` are those of the domains that it learns, in the order of learning.

    Each (stage, task, seed) leaves a file of predictions as soon as it is done; what it depends on besides
    the model is in its digest, so that another start measures what is missing and nothing else."""

    def __init__(self, plan: Planned, tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> None:
        self.plan, self.by_name = plan, {task.name: task for task in tasks}
        self.tokenizer = deepcopy(tokenizer)  # truncation is a state of it
        self.encoded: dict[tuple[str, int], FineTuning] = {}

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any],
        *,
        order: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        names: Sequence[str] | None = None,
    ) -> "EndTasks | None":
        """The end tasks that the options of `conf/endtask` ask for, with their examples; None for none.
        `names` are the domains that could be learned. Raises ValueError for what is wrong with either."""
        plan = plan_endtasks(options, names, order)
        return None if plan is None else cls.of_plan(plan, tokenizer)

    @classmethod
    def of_plan(cls, plan: Planned, tokenizer: PreTrainedTokenizerBase) -> "EndTasks":
        """The end tasks of a plan, with their examples."""
        return cls(plan, [plan.task(name) for name in plan.tasks], tokenizer)

    @property
    def tasks(self) -> list[str]:
        return self.plan.tasks

    def due(self, stage: Sequence[str], *, learned: Sequence[str], final: bool, alone: bool) -> list[str]:
        """The tasks to measure after a stage that learned the domains `stage`; `learned` are all domains
        learned so far, and `final` says that no stage follows. A model that learned its domains `alone` is
        asked for these only. A run without stages measures all tasks on the base."""
        if final and not learned:
            return self.tasks
        wanted = set(learned) if self.plan.when == "each" or (self.plan.when == "last" and final) else set()
        if alone or self.plan.when == "diagonal":
            wanted = set(stage)
        return [name for name in self.tasks if name in wanted]

    def missing(self, folder: Path, tasks: Sequence[str]) -> list[Measurement]:
        """What of (task, seed) a stage's folder does not hold: absent, damaged, or of other settings."""
        return [each for each in self.wanted(tasks) if not self.is_done(folder, *each)]

    def wanted(self, tasks: Sequence[str]) -> list[Measurement]:
        return [(name, seed) for name in tasks for seed in self.plan.seeds]

    def is_done(self, folder: Path, name: str, seed: int) -> bool:
        task = self.by_name[name]
        return predictions.is_whole_file(
            path(folder, name, seed), digest=task.digest(seed), examples=len(task.test)
        )

    def measure(
        self,
        backbone: Callable[[str], PreTrainedModel],
        tasks: Sequence[str],
        *,
        folder: Path,
        device: torch.device,
        rank: int,
        world: int,
        label: str,
    ) -> None:
        """Fine-tunes what is missing of this process's share on copies of `backbone(task)`, on `device`, and
        writes its files. Processes share the work without speaking to each other: all are asked alike, and
        who needs all results waits for the others. The models that `backbone` gives are not changed."""
        mine = share_measurements(self.costs(tasks), rank=rank, world=world)
        jobs = [each for each in self.wanted(tasks) if each in mine and not self.is_done(folder, *each)]
        if not jobs:
            return
        costs, herald = self.costs(tasks), Herald()
        with progress_bar(
            label, total=sum(costs[each] for each in jobs), hidden=rank != 0, unit="step"
        ) as progress:
            for name in dict.fromkeys(name for name, _ in jobs):
                with unchanged_generators(device):
                    model = backbone(name)
                for seed in (seed for each, seed in jobs if each == name):
                    progress.set_postfix_str(f"{name}, seed {seed}", refresh=False)
                    step = partial(count_step, progress, herald)
                    self.one(model, name, seed, folder=folder, device=device, step=step)

    def costs(self, tasks: Sequence[str]) -> dict[Measurement, int]:
        """Optimizer steps of each (task, seed)."""
        return {(name, seed): steps_of(self.by_name[name]) for name, seed in self.wanted(tasks)}

    def one(
        self,
        model: PreTrainedModel,
        name: str,
        seed: int,
        *,
        folder: Path,
        device: torch.device,
        step: Callable[[], object],
    ) -> None:
        """Measures a task with a seed and writes its file."""
        task, job = self.by_name[name], self.job(name, model)
        began = time.perf_counter()
        found, epoch = fine_tune(model, job, seed=seed, device=device, step=step)
        scores = scores_of(torch.from_numpy(found), job.test.labels, job.classes)
        about = {
            "digest": task.digest(seed),
            "metric": task.settings.metric,
            "classes": task.classes,
            **scores,
            "seconds": round(time.perf_counter() - began, 3),
            "epochs": epoch,
        }
        columns = {
            "id": [example.id for example in task.test],
            "label": [example.label for example in task.test],
            "prediction": [task.classes[number] for number in found],
        }
        predictions.save_predictions(path(folder, name, seed), columns, about=about)

    def job(self, name: str, model: PreTrainedModel) -> FineTuning:
        """A task encoded for models of its length, once for all seeds and stages."""
        task = self.by_name[name]
        length = longest(model, task.settings.length)
        if (name, length) not in self.encoded:
            options = {"length": length, "classes": task.classes, "types": has_types(model)}
            self.encoded[name, length] = FineTuning(
                name=name,
                train=encode(task.train, self.tokenizer, **options),
                dev=encode(task.dev, self.tokenizer, **options) if task.dev else None,
                test=encode(task.test, self.tokenizer, **options),
                classes=len(task.classes),
                settings=task.settings,
                pad=self.tokenizer.pad_token_id or 0,
                eval_batch_size=self.plan.eval_batch_size,
            )
        return self.encoded[name, length]

    def results(self, folders: Sequence[Path]) -> dict[str, Any]:
        """What the files of all rows say, `folders[row]` being a row's, which need not be there: the
        `endtasks` of scores.json. Files of other settings or data count as not measured."""
        rows = [
            [[self.said(folder, *each) for each in group] for group in self.groups()] for folder in folders
        ]
        found = [about for row in rows for task in row for about in task if about]
        tasks = [self.by_name[name] for name in self.tasks]
        return {
            "when": self.plan.when,
            "tasks": list(self.tasks),
            "seeds": list(self.plan.seeds),
            "digest": hash_json([task.digest(seed) for task in tasks for seed in self.plan.seeds]),
            "metric": {task.name: task.settings.metric for task in tasks},
            "classes": {task.name: len(task.classes) for task in tasks},
            "examples": {task.name: len(task.test) for task in tasks},
            "scores": {
                name: [[[about and about[name] for about in task] for task in row] for row in rows]
                for name in METRICS
            },
            "seconds": sum(about["seconds"] for about in found),
        }

    def groups(self) -> Iterator[list[Measurement]]:
        """(task, seed) by task."""
        return (self.wanted([name]) for name in self.tasks)

    def said(self, folder: Path, name: str, seed: int) -> dict[str, Any] | None:
        about = predictions.about(path(folder, name, seed))
        return about if about and about["digest"] == self.by_name[name].digest(seed) else None


def path(folder: Path, name: str, seed: int) -> Path:
    """The predictions of a task and a seed in a stage's folder."""
    return folder / f"{name}-{seed}.parquet"


def count_step(progress: tqdm, herald: Herald) -> None:
    """Called after every optimizer step; leaves if a signal has come to any process."""
    progress.update()
    herald.check()


def steps_of(task: Task) -> int:
    """Optimizer steps of a task."""
    return -(-len(task.train) // task.settings.batch_size) * task.settings.epochs


def share_measurements(costs: Mapping[Measurement, int], *, rank: int, world: int) -> set[Measurement]:
    """The measurements of one process: the costliest first, each to the process that has the least so far.

    It counts all of them and not those that are missing, which change while other processes work."""
    loads, shares = [0] * world, [set() for _ in range(world)]
    for each in sorted(costs, key=lambda each: -costs[each]):
        least = loads.index(min(loads))
        shares[least].add(each)
        loads[least] += costs[each]
    return shares[rank]
