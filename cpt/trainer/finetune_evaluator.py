"""End tasks: copies of the model after a stage are fine-tuned on each task with each seed."""

import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE
from cpt.core.processes import rank_and_world
from cpt.data.datamodule import DomainSequence
from cpt.evaluation import finetune, predictions
from cpt.evaluation.finetune_tasks import FinetunePlan
from cpt.evaluation.predictions import endtask_file, find_predictions
from cpt.evaluation.task_metrics import ENDTASK_METRICS
from cpt.methods.base import ContinualMethod
from cpt.trainer.evaluator import FileEvaluator, count_units
from cpt.trainer.run_dir import RunDir


class FinetuneEvaluator(FileEvaluator):
    """Fine-tunes on end tasks. A request is a (task, seed); processes share them out."""

    GROUP = "endtask"
    KIND = "endtasks"
    LABEL = "end tasks"

    def __init__(
        self,
        plan: FinetunePlan,
        tokenizer: PreTrainedTokenizerBase,
        *,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        settings_hash: str,
    ) -> None:
        super().__init__(plan.source.when, run=run, module=module, data=data, settings_hash=settings_hash)
        self.source = plan.source
        self.tasks = {name: plan.source.task(name) for name in plan.tasks}
        self.contents = {name: task.content for name, task in self.tasks.items()}
        self.tokenizer = deepcopy(tokenizer)  # truncation is a state of it
        self.jobs: dict[tuple[str, int], finetune.FinetuneJob] = {}  # by task and tokens of an example

    def requests(self, number: int) -> list[tuple[str, int]]:
        names = self.tasks_after(number)
        requests: list[tuple[str, int]] = []
        for name in self.tasks:
            if name in names:
                requests.extend((name, seed) for seed in self.source.seeds)
        return requests

    def tasks_after(self, number: int) -> set[str]:
        """The tasks that the model after a stage is to be measured on. A task has the name of its domain."""
        is_last = number == len(self.data)
        learned = self.learned_domains(number)
        # A run without stages measures the base on all tasks.
        is_base_only = is_last and not learned
        if is_base_only:
            return set(self.tasks)

        # Each domain is measured only by the model of the stage that has just learned it.
        is_trained_from_base = self.module.trains_from_base
        if is_trained_from_base or self.when == "diagonal":
            if number == 0:
                return set()
            stage = self.data.domains[number - 1]
            return set(stage.texts)

        if self.when == "each" or (self.when == "last" and is_last):
            return set(learned)
        return set()

    def read(self, number: int, request: tuple[str, int]) -> dict[str, Any] | None:
        name, seed = request
        task = self.tasks[name]
        path = endtask_file(self.folder(number), name, seed)
        stored = find_predictions(path, predictions.ENDTASK_COLUMNS, digest=task.digest(seed))
        if stored is None:
            return None
        table, metadata = stored
        return metadata if table.num_rows == len(task.test) else None

    def measure_requests(
        self, number: int, requests: list[tuple[str, int]], device: torch.device, label: str
    ) -> None:
        # Shares are of all requests: which ones are missing changes while other processes work.
        rank, world = rank_and_world()
        share = self.requests(number)[rank::world]
        local_requests = [request for request in requests if request in share]
        num_steps = sum(self.tasks[name].steps for name, _ in local_requests)

        is_hidden = rank != 0 or not local_requests
        with count_units(label, total=num_steps, hidden=is_hidden, unit="step") as (progress, on_step_done):
            for name, task_requests in groupby(local_requests, key=lambda request: request[0]):
                with finetune.forked_generators(device):
                    model = self.module.model_for(self.data.domain_indices.get(name, BASE))
                for _, seed in task_requests:
                    progress.set_postfix_str(f"{name}, seed {seed}", refresh=False)
                    self.measure_task(number, name, seed, model, device=device, on_step_done=on_step_done)

    def measure_task(
        self,
        number: int,
        name: str,
        seed: int,
        model: PreTrainedModel,
        *,
        device: torch.device,
        on_step_done: Callable[..., None],
    ) -> None:
        """Fine-tunes a copy of the model after a stage on a task with a seed, and writes its predictions on
        test examples with their metrics into a file. `on_step_done` is called after every training step."""
        task = self.tasks[name]
        start_time = time.perf_counter()
        job = self.find_job(name, model)
        predicted, num_epochs = finetune.fine_tune(model, job, seed=seed, device=device, step=on_step_done)

        metadata = {
            "digest": task.digest(seed),
            "metric": task.settings.metric,
            "classes": task.classes,
            "epochs": num_epochs,
            "seconds": round(time.perf_counter() - start_time, 3),
        }
        metadata.update(finetune.score_predictions(torch.from_numpy(predicted), job.test.labels, job.classes))
        columns = {
            "id": [example.id for example in task.test],
            "label": [example.label for example in task.test],
            "prediction": [task.classes[index] for index in predicted],
        }
        path = endtask_file(self.folder(number), name, seed)
        predictions.save_predictions(path, columns, metadata=metadata)

    def find_job(self, name: str, model: PreTrainedModel) -> finetune.FinetuneJob:
        """The encoded examples and settings of a task, made once for all seeds and stages."""
        task = self.tasks[name]
        length = finetune.find_max_length(model, task.settings.max_seq_length)
        if (name, length) not in self.jobs:
            # Token types tell the texts of a pair apart, in models that have more than one.
            num_types = getattr(model.config, "type_vocab_size", None) or 0
            encode = partial(
                finetune.encode_examples,
                tokenizer=self.tokenizer,
                length=length,
                classes=task.classes,
                has_types=num_types > 1,
            )
            self.jobs[name, length] = finetune.FinetuneJob(
                name=task.name,
                train=encode(task.train),
                dev=encode(task.dev),
                test=encode(task.test),
                classes=len(task.classes),
                settings=task.settings,
                pad=self.tokenizer.pad_token_id or 0,
                eval_batch_size=self.source.eval_batch_size,
            )
        return self.jobs[name, length]

    def results(self, num_rows: int) -> dict[str, Any]:
        """The scores of the files, with the settings of their tasks: see FileEvaluator."""
        seconds: list[float] = []
        # scores[metric][row][task][seed] is None where a result is missing.
        scores: dict[str, list[list[list[Any]]]] = {metric: [] for metric in ENDTASK_METRICS}
        for row in range(num_rows):
            for metric in ENDTASK_METRICS:
                scores[metric].append([])
            for name in self.tasks:
                results_by_seed = [self.read(row, (name, seed)) for seed in self.source.seeds]
                for metric in ENDTASK_METRICS:
                    scores[metric][row].append(
                        [None if result is None else result[metric] for result in results_by_seed]
                    )
                seconds.extend(result["seconds"] for result in results_by_seed if result is not None)
        return {
            "when": self.when,
            "tasks": list(self.tasks),
            "seeds": list(self.source.seeds),
            "metric": {name: task.settings.metric for name, task in self.tasks.items()},
            "classes": {name: len(task.classes) for name, task in self.tasks.items()},
            "examples": {name: len(task.test) for name, task in self.tasks.items()},
            "scores": scores,
            "seconds": sum(seconds),
        }
