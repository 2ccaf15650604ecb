"""When the tasks of a run are asked, and on which weights.

Processes share the questions of each task out; the first writes the file, once it has the answers of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.bank import BASE
from cpt.core.collectives import gather_objects, wait_for_others
from cpt.core.config import digest
from cpt.core.places import CONF
from cpt.core.preemption import Herald, Preempted, leave_together
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.progress import progress_bar
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.answers.asking import Question, rank_choices, score_choices, write_answers
from cpt.evaluation.answers.files import SOURCE, path_of, read_answers, save_answers
from cpt.evaluation.answers.metrics import MEASURES, RANKED, Answered
from cpt.evaluation.answers.options import KNOWN_BY, AnswerOptions
from cpt.evaluation.answers.results import (
    Told,
    compute_intervals,
    compute_metrics,
    matrix_of,
    tell_answers,
    tell_task,
)
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode
from cpt.trainer.after_stages import AfterStages
from cpt.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from pathlib import Path

    from tqdm import tqdm

    from cpt.data.corpora import Corpora
    from cpt.data.prompts import Prompt
    from cpt.trainer.base_model import Base
    from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)
FORMAT = 1  # counts changes of what a file of answers depends on


@dataclass(frozen=True)
class Asking(AfterStages):
    """The tasks of a run, asked of what the module hands on after a stage."""

    GROUP, KIND = "answers", "answers"  # what asks for them, and what they are in scores.json

    options: AnswerOptions
    questions: Mapping[str, Sequence[Question]]  # by task, in the order of learning
    digests: Mapping[str, str]  # what the answers to a task depend on besides the model
    place: RunDir
    module: ContinualModule
    data: DomainSequence
    tokenizer: PreTrainedTokenizerBase
    known: dict[tuple[int, str], Told] = field(default_factory=dict)  # of the files that have been read

    def folder(self, number: int) -> Path:
        return self.place.answers(number, self.name(number))

    def due(self, number: int) -> list[str]:
        if not self.options.is_due(number, stages=len(self.data)):
            return []
        return [name for name in self.questions if self.read(number, name) is None]

    def read(self, number: int, task: str) -> tuple[Answered, float] | None:
        return read_answers(path_of(self.folder(number), task), digest=self.digests[task])

    def measure(self, number: int, device: torch.device) -> None:
        """Asks what is missing after a stage, whose weights the module has, on `device`; the model is then
        where it was."""
        tasks = self.due(number)
        wait_for_others()  # nobody works before all have asked: all work on the same tasks
        herald, label = Herald(), f"answers after {self.name(number)}"
        total = sum(self.count(task) for task in tasks) // rank_and_world()[1]  # of the first process
        with progress_bar(label, total=total, hidden=not is_first_process(), unit="answer") as progress:
            for task in tasks:
                progress.set_postfix_str(task, refresh=False)
                model = self.backbone(number, task)
                before = model.device
                try:
                    with in_mode(model.to(device), training=False):
                        self.ask(number, task, model, step=partial(count_answers, progress, herald))
                finally:
                    model.to(before)

    def count(self, task: str) -> int:
        """Answers of a task that a bar counts: each choice that is ranked, and each text that is written."""
        questions = self.questions[task]
        return sum(len(each.answers) for each in questions) + len(questions) * self.options.written

    def backbone(self, number: int, task: str) -> PreTrainedModel:
        """The model that answers a task after a stage: that of the task's own domain, if it has been learned;
        of a model in parts the base answers what has not."""
        learned = [part for domain in self.data.domains[:number] for part in domain.parts]
        return self.module.backbone(self.data.places[task] if task in learned else BASE)

    def ask(self, number: int, task: str, model: PreTrainedModel, *, step: Callable[[int], object]) -> None:
        """Asks a task, each process its share, and writes its file."""
        questions, began = self.questions[task], time.perf_counter()
        shares: list[tuple[dict, dict]] = []
        with suppress(Preempted):  # the other processes are waited for
            shares.append(self.answer_share(questions, model, step=step))
        leave_together(f"in the answers after {self.name(number)}")
        shares = gather_objects(shares[0])
        sums = {at: value for ranked, _ in shares for at, value in ranked.items()}
        texts = {at: text for _, written in shares for at, text in written.items()}
        answered = Answered(
            [each.reference for each in questions],
            [each.choices for each in questions],
            [texts[at] for at in range(len(questions))] if self.options.written else None,
            *(rank_choices(questions, sums) if is_closed(questions) else (None, None)),
            [each.text for each in questions] if needs_sources(self.options, task) else None,
        )
        if is_first_process():
            self.save(number, task, answered, seconds=round(time.perf_counter() - began, 3))
        wait_for_others()  # the file is there for all

    def answer_share(
        self, questions: Sequence[Question], model: PreTrainedModel, *, step: Callable[[int], object]
    ) -> tuple[dict, dict]:
        """What this process has to answer: the sums of its choices, and what is written to its questions."""
        how = {"batch_size": self.options.batch_size, "step": step, "share": rank_and_world()}
        ranked, written = {}, {}
        if is_closed(questions):
            ranked = dict(score_choices(model, self.data.objective, questions, **how))
        if self.options.written:
            written = write_answers(model, self.tokenizer, questions, most=self.options.tokens, **how)
        return ranked, written

    def save(self, number: int, task: str, answered: Answered, *, seconds: float) -> None:
        save_answers(
            path_of(self.folder(number), task),
            [each.id for each in self.questions[task]],
            answered,
            digest=self.digests[task],
            seconds=seconds,
        )

    def results(self, rows: int) -> dict[str, Any]:
        """The `answers` of scores.json, from the files of so many rows; intervals after the last stage."""
        found = {task: [self.told(row, task) for row in range(rows)] for task in self.questions}
        there = {task: cells for task, cells in found.items() if any(cells)}
        answers: dict[str, Any] = {
            "when": self.when,
            "seconds": sum(cell.seconds for cells in there.values() for cell in cells if cell),
            "tasks": {task: tell_task(cells) for task, cells in there.items()},
            "metrics": {},
            "intervals": {},
        }
        names = ["base", *(domain.name for domain in self.data.domains)][:rows]
        if there:
            asked = np.array([[cell is not None for cell in cells] for cells in there.values()]).T
            measured = compute_metrics(matrix_of(answers), asked=asked, rows=names, tasks=list(there))
            answers["metrics"] = {name: float(value) for name, value in measured.items()}
            if rows == len(self.data) + 1 and measured:
                values = {task: [cell and cell.head for cell in cells] for task, cells in there.items()}
                answers["intervals"] = compute_intervals(values, rows=names)
        return answers

    def told(self, row: int, task: str) -> Told | None:
        """What the answers of a row come to; each file is read once."""
        if (row, task) not in self.known and (read := self.read(row, task)) is not None:
            known_by = self.options.known_by.get(task)
            self.known[row, task] = tell_answers(read[0], seconds=read[1], known_by=known_by)
        return self.known.get((row, task))


def make_asking(
    plan: Plan,
    place: RunDir,
    corpora: Corpora,
    start: Base,
    *,
    module: ContinualModule,
    data: DomainSequence,
) -> Asking | None:
    """What the tasks of a run are asked; None where its domains are no tasks."""
    if plan.answers is None:
        tell_unasked(plan)
        return None
    how = {"tokenizer": start.tokenizer, "length": start.length, "seq2seq": start.seq2seq}
    split = plan.source.score_on
    questions = {
        task: [
            question_of(prompt) for prompt in islice(corpora.prompts(task, split, **how), plan.answers.most)
        ]
        for task in plan.order
    }
    check_measures(plan.answers, questions)
    if not plan.answers.written:
        questions = leave_open_out(questions)
    if not questions:
        return None
    settings = asdict(replace(plan.answers, when="each"))  # which changes no answer
    del settings["measures"]  # nor do these, but that a file may have to hold the sources
    known_by = [FORMAT, settings, asdict(corpora.encoding), corpora.tokenizer_digest(start.tokenizer)]
    known_by += [start.length, split]
    held = {task: [SOURCE] * needs_sources(plan.answers, task) for task in questions}
    digests = {
        task: digest([*known_by, corpora.by_name[task].facts["digest"], *held[task]]) for task in questions
    }
    return Asking(plan.answers, questions, digests, place, module, data, start.tokenizer)


def needs_sources(options: AnswerOptions, task: str) -> bool:
    """Whether what a task is known by is of the texts that were asked about."""
    return "sources" in MEASURES[options.known_by[task]].needs if task in options.known_by else False


def check_measures(options: AnswerOptions, questions: Mapping[str, Sequence[Question]]) -> None:
    """Raises ValueError for a measure of choices where a task has none; tells of tasks that there are not."""
    if (absent := [task for task in options.known_by if task not in questions]) and is_first_process():
        log.info("answers.measures of %s: without effect, the order has no such task", ", ".join(absent))
    for task, measure in options.known_by.items():
        if measure in RANKED and not all(each.choices for each in questions.get(task, ())):
            raise ValueError(
                f"answers.measures.{task}={measure} is of choices, and its answers are open; allowed: "
                + ", ".join(name for name in KNOWN_BY if name not in RANKED)
            )


def leave_open_out(questions: Mapping[str, Sequence[Question]]) -> dict[str, Sequence[Question]]:
    """The tasks that are asked where nothing is written; those without choices are told."""
    if is_first_process() and (left := [task for task, each in questions.items() if not is_closed(each)]):
        log.info("answers.written=false: %s, whose answers are open, is not asked", ", ".join(left))
    return {task: each for task, each in questions.items() if is_closed(each)}


def tell_unasked(plan: Plan) -> None:
    """Says of options for answers that domains of raw text are asked nothing."""
    given, usual = plan.settings["answers"], OmegaConf.load(CONF / "answers" / "default.yaml")
    if given["name"] == usual["name"] and given != usual and is_first_process():
        changed = [f"answers.{name}={value}" for name, value in given.items() if value != usual[name]]
        log.info(
            "%s without effect: domains=%s are raw text", ", ".join(changed), plan.settings["domains"]["name"]
        )


def is_closed(questions: Sequence[Question]) -> bool:
    """Whether every question has choices."""
    return all(each.choices for each in questions)


def question_of(prompt: Prompt) -> Question:
    example = prompt.example
    end = prompt.reference[-1]
    choices = tuple(prompt.choices)
    return Question(
        example.id, prompt.ids, example.target, example.choices, choices, end, example.asked_about
    )


def count_answers(progress: tqdm, herald: Herald, count: int) -> None:
    """Called after every batch; leaves if a signal has come to any process."""
    progress.update(count)
    herald.check()
