"""Supervised tasks: the model after a stage ranks the choices of each question, or writes an answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE
from cpt.core.distributed import barrier, gather_objects, leave_together
from cpt.core.preemption import Preempted
from cpt.core.processes import is_first_process, rank_and_world
from cpt.data.datamodule import DomainSequence
from cpt.data.tokenized_tasks import TaskPrompt
from cpt.evaluation import predictions, task_metrics
from cpt.evaluation.options import TaskEvalOptions, is_due
from cpt.evaluation.predictions import SOURCE, find_predictions
from cpt.evaluation.task_answers import score_choices, select_likeliest_choices, write_answers
from cpt.evaluation.task_metrics import AnswerSummary
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.models.objectives import Objective
from cpt.trainer.evaluator import FileEvaluator, count_units, on_device
from cpt.trainer.run_dir import RunDir


@dataclass
class RawAnswers:
    """What a model answers to the questions of a task, which are counted from 0."""

    choice_nll: dict[tuple[int, int], float] = field(default_factory=dict)  # nats, by question and choice
    texts: dict[int, str] = field(default_factory=dict)  # generated, by question


class TaskEvaluator(FileEvaluator):
    """Asks supervised tasks. A request is a task; processes share its questions out."""

    GROUP = "answers"
    KIND = "answers"
    LABEL = "answers"

    def __init__(
        self,
        options: TaskEvalOptions,
        questions: Mapping[str, Sequence[TaskPrompt]],  # by task, in the order of learning
        digests: Mapping[str, str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        settings_hash: str,
    ) -> None:
        super().__init__(options.when, run=run, module=module, data=data, settings_hash=settings_hash)
        self.options = options
        self.questions = questions
        self.digests = digests
        self.tokenizer = tokenizer
        self.summaries: dict[tuple[int, str], AnswerSummary] = {}  # of the files that have been read

    def requests(self, number: int) -> list[str]:
        if not is_due(self.when, number, stages=len(self.data)):
            return []
        return list(self.questions)

    def read(self, number: int, request: str) -> AnswerSummary | None:
        """A summary of the answers to a task; each file is read once."""
        if (number, request) not in self.summaries:
            stored = find_predictions(
                predictions.answers_file(self.folder(number), request),
                predictions.ANSWER_COLUMNS,
                optional=[SOURCE],
                digest=self.digests[request],
            )
            if stored is None:
                return None
            table, metadata = stored
            self.summaries[number, request] = task_metrics.summarise_answers(
                predictions.parse_answer_table(table, metadata),
                main_measure=self.options.metric_of_task.get(request),
                seconds=metadata["seconds"],
            )
        return self.summaries[number, request]

    def measure_requests(self, number: int, requests: list[str], device: torch.device, label: str) -> None:
        _, world = rank_and_world()
        num_answers = sum(self.count_answers(task) for task in requests) // world
        is_hidden = not is_first_process()
        with count_units(label, total=num_answers, hidden=is_hidden, unit="answer") as (
            progress,
            on_batch_done,
        ):
            for task in requests:
                progress.set_postfix_str(task, refresh=False)

                # With modules per domain, the base answers for a domain that is not learned yet.
                is_learned = task in self.learned_domains(number)
                model = self.module.model_for(self.data.domain_indices[task] if is_learned else BASE)
                with on_device(model, device) as moved_model, set_mode(moved_model, training=False):
                    self.ask(number, task, moved_model, on_batch_done=on_batch_done)

    def count_answers(self, task: str) -> int:
        """The choices that are ranked and the texts that are written for a task."""
        questions = self.questions[task]
        num_choices = sum(len(question.choices) for question in questions) if self.ranks(task) else 0
        num_texts = len(questions) if self.options.written else 0
        return num_choices + num_texts

    def ranks(self, task: str) -> bool:
        """Whether the choices of a task are ranked."""
        return self.options.ranked and has_choices(self.questions[task])

    def ask(
        self, number: int, task: str, model: PreTrainedModel, *, on_batch_done: Callable[[int], object]
    ) -> None:
        """Asks the model after a stage the questions of a task, and writes the answers into one file. Each
        process asks its share of the questions; the first writes the file."""
        start_time = time.perf_counter()
        answers = RawAnswers()
        # A process that is to be preempted still waits for the others: all leave together.
        with suppress(Preempted):
            self.answer_local_share(task, model, answers, on_batch_done=on_batch_done)
        leave_together(f"in the answers after {self.stage_name(number)}")
        for other_answers in gather_objects(answers):
            answers.choice_nll.update(other_answers.choice_nll)
            answers.texts.update(other_answers.texts)

        if is_first_process():
            self.save(number, task, answers, start_time=start_time)
        barrier()  # the file is there for all

    def answer_local_share(
        self,
        task: str,
        model: PreTrainedModel,
        answers: RawAnswers,
        *,
        on_batch_done: Callable[[int], object],
    ) -> None:
        """Adds the model's answers to this process's share of the questions of a task to `answers`.

        `on_batch_done` is called after each batch with its number of answers. It raises Preempted on a
        signal."""
        questions = self.questions[task]
        options = self.options
        # The data declare their objective as a Collator: they call nothing else of it.
        objective = cast(Objective, self.data.objective)
        if self.ranks(task):
            answers.choice_nll.update(
                score_choices(
                    model,
                    objective,
                    questions,
                    batch_size=options.batch_size,
                    step=on_batch_done,
                    share=rank_and_world(),
                )
            )
        if options.written:
            answers.texts.update(
                write_answers(
                    model,
                    self.tokenizer,
                    questions,
                    max_new_tokens=options.max_new_tokens,
                    batch_size=options.batch_size,
                    step=on_batch_done,
                    share=rank_and_world(),
                )
            )

    def save(self, number: int, task: str, answers: RawAnswers, *, start_time: float) -> None:
        """Writes the answers to a task: the texts by question, and the choices of the largest likelihood."""
        questions = self.questions[task]
        examples = [question.example for question in questions]
        ranked: list[str] | None = None
        ranked_mean: list[str] | None = None
        if self.ranks(task):
            ranked, ranked_mean = select_likeliest_choices(questions, answers.choice_nll)
        written_texts: list[str] | None = None
        if self.options.written:
            written_texts = [answers.texts[question] for question in range(len(questions))]

        columns: dict[str, Sequence[str] | None] = {
            "id": [example.id for example in examples],
            "reference": [example.target for example in examples],
            "written": written_texts,
            "ranked": ranked,
            "ranked_mean": ranked_mean,
        }
        if needs_sources(self.options, task):
            columns[SOURCE] = [question.about for question in questions]
        metadata = {
            "digest": self.digests[task],
            "seconds": round(time.perf_counter() - start_time, 3),
            "choices": [list(example.choices) for example in examples],
        }
        path = predictions.answers_file(self.folder(number), task)
        predictions.save_predictions(path, columns, metadata=metadata)

    def results(self, num_rows: int) -> dict[str, Any]:
        """With the metrics of the matrix of scores, and their intervals after the last stage."""
        summaries: dict[str, list[AnswerSummary | None]] = {}  # by task, of each row
        for task in self.questions:
            summaries_by_row = [self.read(row, task) for row in range(num_rows)]
            if any(summaries_by_row):
                summaries[task] = summaries_by_row

        seconds: list[float] = []
        for summaries_by_row in summaries.values():
            seconds.extend(summary.seconds for summary in summaries_by_row if summary)
        answers: dict[str, Any] = {
            "when": self.when,
            "metrics": {},
            "intervals": {},
            "seconds": sum(seconds),
            "tasks": {task: task_metrics.collect_task(by_row) for task, by_row in summaries.items()},
        }
        if summaries:
            self.add_metrics(answers, summaries, num_rows)
        return answers

    def add_metrics(
        self, answers: dict[str, Any], summaries: Mapping[str, Sequence[AnswerSummary | None]], num_rows: int
    ) -> None:
        """Adds `metrics` of the matrix of tasks to `answers`, and `intervals` once all stages have their
        row."""
        names = [self.stage_name(number) for number in range(num_rows)]
        heads: dict[str, list[task_metrics.Array | None]] = {}  # by task, of each row the scores by example
        for task, summaries_by_row in summaries.items():
            heads[task] = [summary.head if summary else None for summary in summaries_by_row]

        is_measured = np.zeros((num_rows, len(heads)), dtype=bool)
        for column, heads_by_row in enumerate(heads.values()):
            for row, head in enumerate(heads_by_row):
                is_measured[row, column] = head is not None
        metrics = task_metrics.compute_metrics(
            task_metrics.build_answer_matrix(answers), rows=names, tasks=list(summaries), is_asked=is_measured
        )
        answers["metrics"] = {name: float(value) for name, value in metrics.items()}
        is_complete = num_rows == len(self.data) + 1
        if is_complete and metrics:
            answers["intervals"] = task_metrics.compute_intervals(heads, rows=names)


def has_choices(questions: Sequence[TaskPrompt]) -> bool:
    """Whether the answers to all questions are among given choices, which the model can rank."""
    return all(question.example.choices for question in questions)


def needs_sources(options: TaskEvalOptions, task: str) -> bool:
    """Whether the measure that a task is known by is of the texts that were asked about."""
    if task not in options.metric_of_task:
        return False
    return "sources" in task_metrics.MEASURES[options.metric_of_task[task]].fields
