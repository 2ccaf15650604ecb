"""What a run measures after its stages in addition to losses: fine-tuned end tasks, answers of supervised
tasks, tasks of the lm-evaluation-harness."""

import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE
from cpt.core.config import digest
from cpt.core.distributed import (
    all_reduce_max,
    barrier,
    check_all_signals,
    gather_objects,
    leave_together,
    telling_errors,
    wait_for_all,
)
from cpt.core.files import replace as replace_file
from cpt.core.heartbeat import progress_bar
from cpt.core.preemption import Preempted
from cpt.core.processes import is_first_process, rank_and_world
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.tokenized_tasks import TaskPrompt, read_examples
from cpt.evaluation import finetune, predictions, task_metrics
from cpt.evaluation.finetune_tasks import FinetunePlan
from cpt.evaluation.options import KNOWN_BY, LMEvalOptions, TaskEvalOptions, is_due
from cpt.evaluation.predictions import SOURCE, endtask_file, find_predictions
from cpt.evaluation.task_answers import rank_choices, score_choices, write_answers
from cpt.evaluation.task_metrics import AnswerSummary
from cpt.methods.base import ContinualMethod
from cpt.models.forward import set_mode
from cpt.models.objectives import Objective
from cpt.trainer.base_model import Base
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
ANSWERS_FORMAT = 2  # counts changes of what a file of answers depends on


class Evaluator(ABC):
    """Measures tasks on the base and after the stages asked for. Each result is a file in the run folder with
    a digest of all that it depends on besides the model: another start measures what is missing.

    `due`, `missing` and `measure` are called by every process of a run."""

    GROUP: str  # of the config
    KIND: str  # its name in scores.json, and its folder
    LABEL: str
    contents: Mapping[str, str] = {}  # hashes of the data of each task, where a run's identity keeps them

    def __init__(self, when: str, *, place: RunDir, module: ContinualMethod, data: DomainSequence) -> None:
        self.when, self.place, self.module, self.data = when, place, module, data

    def name(self, number: int) -> str:
        """The stage's, as the row of the matrix."""
        return "base" if number == 0 else self.data.domains[number - 1].name

    def folder(self, number: int) -> Path:
        return self.place.path / self.KIND / f"{number:03d}-{self.name(number)}"

    def learned(self, number: int) -> list[str]:
        """The domains learned in the first stages, in their order."""
        return list(dict.fromkeys(part for domain in self.data.domains[:number] for part in domain.texts))

    @abstractmethod
    def asked(self, number: int) -> list[Any]:
        """What is to be measured after a stage (0: on the base), whether it is or not."""

    @abstractmethod
    def read(self, number: int, asked: Any) -> Any:
        """What a file has of one of them; None without one, and for one that is damaged or of other settings,
        data or examples."""

    def due(self, number: int) -> list[Any]:
        """What is asked for after a stage and not measured yet."""
        return [each for each in self.asked(number) if self.read(number, each) is None]

    @abstractmethod
    def work(self, number: int, due: list[Any], device: torch.device, label: str) -> None:
        """Measures what is due, of which each process has its part. May be left by Preempted."""

    @abstractmethod
    def results(self, rows: int) -> dict[str, Any]:
        """What the files of the first rows hold, for scores.json."""

    def missing(self, number: int) -> bool:
        """Whether something is due after a stage; all processes get the same answer."""
        return bool(all_reduce_max(len(self.due(number))))

    def measure(self, number: int, device: torch.device) -> None:
        """Measures what is due after a stage, whose weights the module has, on `device`."""
        due, label = self.due(number), f"{self.LABEL} after {self.name(number)}"
        barrier()  # nobody works before all have looked
        with suppress(Preempted), telling_errors():  # the other processes are waited for
            self.work(number, due, device, label)
        wait_for_all(f"cpt/{self.KIND}/{number}")
        leave_together(f"in the {label}")


@contextmanager
def counted(
    label: str, *, total: int | None, hidden: bool, unit: str
) -> Iterator[tuple[tqdm, Callable[..., None]]]:
    """A progress bar, and what is called after each unit of work: it leaves on a signal to any process."""
    with progress_bar(label, total=total, hidden=hidden, unit=unit) as progress:

        def step(count: int = 1) -> None:
            progress.update(count)
            check_all_signals()

        yield progress, step


@contextmanager
def on_device(model: PreTrainedModel, device: torch.device) -> Iterator[PreTrainedModel]:
    """The model on a device; afterwards it is where it was."""
    before = model.device
    try:
        yield model.to(device)
    finally:
        model.to(before)


class FinetuneEvaluator(Evaluator):
    """End tasks: copies of the model fine-tuned with each seed; processes share the (task, seed) out."""

    GROUP, KIND, LABEL = "endtask", "endtasks", "end tasks"

    def __init__(self, plan: FinetunePlan, tokenizer: PreTrainedTokenizerBase, **run: Any) -> None:
        super().__init__(plan.source.when, **run)
        self.source, self.tasks = plan.source, {name: plan.source.task(name) for name in plan.tasks}
        self.contents = {name: task.content for name, task in self.tasks.items()}
        self.tokenizer = deepcopy(tokenizer)  # truncation is a state of it
        self.jobs: dict[tuple[str, int], finetune.FinetuneJob] = {}  # by task and tokens of an example

    def asked(self, number: int) -> list[tuple[str, int]]:
        """(task, seed) asked for after a stage; a run without stages measures all tasks on the base."""
        final, learned = number == len(self.data), self.learned(number)
        wanted = set(learned) if self.when == "each" or (self.when == "last" and final) else set()
        if self.module.alone or self.when == "diagonal":
            wanted = set(self.data.domains[number - 1].texts) if number else set()
        if final and not learned:
            wanted = set(self.tasks)
        return [(name, seed) for name in self.tasks if name in wanted for seed in self.source.seeds]

    def read(self, number: int, asked: tuple[str, int]) -> dict[str, Any] | None:
        name, seed = asked
        task, path = self.tasks[name], endtask_file(self.folder(number), name, seed)
        found = find_predictions(path, predictions.ENDTASK_COLUMNS, digest=task.digest(seed))
        return None if found is None or found[0].num_rows != len(task.test) else found[1]

    def work(self, number: int, due: list[tuple[str, int]], device: torch.device, label: str) -> None:
        rank, world = rank_and_world()
        share = self.asked(number)[rank::world]  # not of what is due: that changes while others work
        mine = [each for each in due if each in share]
        total = sum(self.tasks[name].steps for name, _ in mine)
        with counted(label, total=total, hidden=rank != 0 or not mine, unit="step") as (progress, step):
            for name, its in groupby(mine, key=lambda each: each[0]):
                with finetune.forked_generators(device):
                    model = self.module.model_for(self.data.domain_indices.get(name, BASE))
                for _, seed in its:
                    progress.set_postfix_str(f"{name}, seed {seed}", refresh=False)
                    self.measure_task(number, name, seed, model, device=device, step=step)

    def measure_task(self, number: int, name: str, seed: int, model: PreTrainedModel, **how: Any) -> None:
        """Fine-tunes a copy of a model on a task with a seed and writes its file."""
        task, began = self.tasks[name], time.perf_counter()
        length = finetune.longest(model, task.settings.max_seq_length)
        if (name, length) not in self.jobs:  # once for all seeds and stages
            types = (getattr(model.config, "type_vocab_size", None) or 0) > 1  # tells texts of a pair apart
            given: dict[str, Any] = {"length": length, "classes": task.classes, "types": types}
            self.jobs[name, length] = finetune.FinetuneJob(
                name=task.name,
                train=finetune.encode_examples(task.train, self.tokenizer, **given),
                dev=finetune.encode_examples(task.dev, self.tokenizer, **given),
                test=finetune.encode_examples(task.test, self.tokenizer, **given),
                classes=len(task.classes),
                settings=task.settings,
                pad=self.tokenizer.pad_token_id or 0,
                eval_batch_size=self.source.eval_batch_size,
            )
        job = self.jobs[name, length]
        predicted, epoch = finetune.fine_tune(model, job, seed=seed, **how)
        about: dict[str, Any] = {"digest": task.digest(seed), "metric": task.settings.metric}
        about |= {"classes": task.classes, "epochs": epoch, "seconds": round(time.perf_counter() - began, 3)}
        about |= finetune.scores_of(torch.from_numpy(predicted), job.test.labels, job.classes)
        columns = {name: [getattr(example, name) for example in task.test] for name in ("id", "label")}
        columns["prediction"] = [task.classes[each] for each in predicted]
        predictions.save_predictions(endtask_file(self.folder(number), name, seed), columns, about=about)

    def results(self, rows: int) -> dict[str, Any]:
        seeds, tasks = self.source.seeds, self.tasks
        found = [[[self.read(row, (name, seed)) for seed in seeds] for name in tasks] for row in range(rows)]
        return {
            **{"when": self.when, "tasks": list(tasks), "seeds": list(seeds)},
            "metric": {name: task.settings.metric for name, task in tasks.items()},
            "classes": {name: len(task.classes) for name, task in tasks.items()},
            "examples": {name: len(task.test) for name, task in tasks.items()},
            "scores": {
                kind: [[[about and about[kind] for about in task] for task in row] for row in found]
                for kind in task_metrics.ENDTASK_METRICS
            },
            "seconds": sum(about["seconds"] for row in found for task in row for about in task if about),
        }


class TaskEvaluator(Evaluator):
    """Supervised tasks: choices are ranked, answers written; processes share the questions out."""

    GROUP, KIND, LABEL = "answers", "answers", "answers"

    def __init__(
        self,
        options: TaskEvalOptions,
        questions: Mapping[str, Sequence[TaskPrompt]],  # by task, in the order of learning
        digests: Mapping[str, str],
        tokenizer: PreTrainedTokenizerBase,
        **run: Any,
    ) -> None:
        super().__init__(options.when, **run)
        self.options, self.questions, self.digests = options, questions, digests
        self.tokenizer = tokenizer
        self.known: dict[tuple[int, str], AnswerSummary] = {}  # of the files that have been read

    def asked(self, number: int) -> list[str]:
        return [*self.questions] * is_due(self.when, number, stages=len(self.data))

    def read(self, number: int, asked: str) -> AnswerSummary | None:
        """What the answers to a task come to; each file is read once."""
        if (number, asked) not in self.known:
            path, columns = predictions.answers_file(self.folder(number), asked), predictions.ANSWER_COLUMNS
            found = find_predictions(path, columns, optional=[SOURCE], digest=self.digests[asked])
            if found is None:
                return None
            how = {"known_by": self.options.known_by.get(asked), "seconds": found[1]["seconds"]}
            self.known[number, asked] = task_metrics.summarise_answers(predictions.answers_of(*found), **how)
        return self.known[number, asked]

    def work(self, number: int, due: list[str], device: torch.device, label: str) -> None:
        # each choice that is ranked, and each text that is written
        counts = [len(each.choices) + self.options.written for task in due for each in self.questions[task]]
        total, hidden = sum(counts) // rank_and_world()[1], not is_first_process()
        with counted(label, total=total, hidden=hidden, unit="answer") as (progress, step):
            for task in due:
                progress.set_postfix_str(task, refresh=False)
                # A domain that is not learned yet is answered by the base, of a model in parts.
                place = self.data.domain_indices[task] if task in self.learned(number) else BASE
                with (
                    on_device(self.module.model_for(place), device) as model,
                    set_mode(model, training=False),
                ):
                    self.ask(number, task, model, step=step)

    def ask(self, number: int, task: str, model: PreTrainedModel, *, step: Callable[[int], object]) -> None:
        """Asks a task, each process its share, and writes its file."""
        questions, options, began = self.questions[task], self.options, time.perf_counter()
        how: dict[str, Any] = {"batch_size": options.batch_size, "step": step, "share": rank_and_world()}
        closed = all(each.example.choices for each in questions)
        sums, texts = dict[tuple[int, int], float](), dict[int, str]()
        with suppress(Preempted):  # the other processes are waited for
            if closed:
                sums.update(score_choices(model, cast(Objective, self.data.objective), questions, **how))
            if options.written:
                texts |= write_answers(
                    model, self.tokenizer, questions, max_new_tokens=options.max_new_tokens, **how
                )
        leave_together(f"in the answers after {self.name(number)}")
        for ranked, written in gather_objects((sums, texts)):
            sums, texts = sums | ranked, texts | written
        if is_first_process():
            best, best_mean = rank_choices(questions, sums) if closed else (None, None)
            answers = [texts[at] for at in range(len(questions))] if options.written else None
            asked = [each.example for each in questions]
            ids, references = [each.id for each in asked], [each.target for each in asked]
            given = (ids, references, answers, best, best_mean)
            columns = dict(zip(predictions.ANSWER_COLUMNS, given, strict=True))
            if needs_sources(options, task):
                columns[SOURCE] = [each.about for each in questions]
            about = {"digest": self.digests[task], "seconds": round(time.perf_counter() - began, 3)}
            about |= {"choices": [list(each.choices) for each in asked]}
            path = predictions.answers_file(self.folder(number), task)
            predictions.save_predictions(path, columns, about=about)
        barrier()  # the file is there for all

    def results(self, rows: int) -> dict[str, Any]:
        """With the metrics of the matrix of scores, and their intervals after the last stage."""
        found = {task: [self.read(row, task) for row in range(rows)] for task in self.questions}
        there = {task: cells for task, cells in found.items() if any(cells)}
        answers: dict[str, Any] = {"when": self.when, "metrics": {}, "intervals": {}}
        answers["seconds"] = sum(cell.seconds for cells in there.values() for cell in cells if cell)
        answers["tasks"] = {task: task_metrics.collect_task(cells) for task, cells in there.items()}
        if there:
            names, final = [self.name(number) for number in range(rows)], rows == len(self.data) + 1
            heads = {task: [cell.head if cell else None for cell in cells] for task, cells in there.items()}
            asked = np.array([[head is not None for head in each] for each in heads.values()]).T
            matrix = task_metrics.matrix_of(answers)
            measured = task_metrics.compute_metrics(matrix, rows=names, tasks=list(there), asked=asked)
            answers["metrics"] = {name: float(value) for name, value in measured.items()}
            if final and measured:
                answers["intervals"] = task_metrics.compute_intervals(heads, rows=names)
        return answers


class LMEvalEvaluator(Evaluator):
    """Tasks of the lm-evaluation-harness; the first process has it and works, the others wait."""

    GROUP, KIND, LABEL = "benchmark", "benchmarks", "benchmark"

    def __init__(
        self, options: LMEvalOptions, harness: Any, tokenizer: PreTrainedTokenizerBase, **run: Any
    ) -> None:
        super().__init__(options.when, **run)
        self.options, self.harness, self.tokenizer = options, harness, tokenizer

    def asked(self, number: int) -> list[str]:
        is_asked = self.harness is not None and is_due(self.when, number, stages=len(self.data))
        return list(self.harness.columns) if is_asked else []

    def read(self, number: int, asked: str) -> dict[str, Any] | None:
        try:
            found = predictions.load_results(predictions.results_file(self.folder(number), asked))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log.info("Measuring again: %s", error)
            return None
        return found if found["digest"] == self.harness.digest(asked) else None

    def work(self, number: int, due: list[str], device: torch.device, label: str) -> None:
        if not due:
            return
        learned = self.learned(number)
        # The model of the last domain that was trained on.
        place = self.data.domain_indices[learned[-1]] if learned else BASE
        with (
            on_device(self.module.model_for(place), device) as model,
            counted(label, total=None, hidden=False, unit="request") as (progress, step),
        ):
            for task in due:
                progress.set_postfix_str(task, refresh=False)
                began = time.perf_counter()
                found = self.harness.measure(task, model, self.tokenizer, step=step)
                found["seconds"] = round(time.perf_counter() - began, 3)
                path = predictions.results_file(self.folder(number), task)
                replace_file(path, json.dumps(found, indent=1) + "\n")

    def results(self, rows: int) -> dict[str, Any]:
        tasks, seconds = {}, 0.0
        for task in self.harness.columns:
            cells = [self.read(row, task) for row in range(rows)]
            there = next(filter(None, cells), None)
            if there is None:
                continue
            metric = self.options.metrics.get(task) or next(iter(there["metrics"]))
            if metric not in there["metrics"]:
                allowed = ", ".join(there["metrics"])
                raise ValueError(f"benchmark.metrics.{task}={metric} is invalid. Allowed: {allowed}")
            values = [cell["metrics"].get(metric, {}) if cell else {} for cell in cells]
            tasks[task] = {
                **{name: there[name] for name in ("shots", "limit", "examples", "version", "truncated")},
                "chance": there["chance"] if metric.startswith("acc") else None,
                "metric": metric,
                "higher": there["metrics"][metric]["higher"],
                "values": [each.get("value") for each in values],
                "errors": [each.get("error") for each in values],
            }
            seconds += sum(cell["seconds"] for cell in cells if cell)
        return {"harness": self.harness.version, "when": self.when, "seconds": seconds, "tasks": tasks}


def make_evaluators(plan: Plan, corpora: Corpora, start: Base, harness: Any, **run: Any) -> list[Evaluator]:
    """The evaluators of a plan, for the place, module and data of a `run`. Raises ValueError for a measure of
    choices where a task has none."""
    found: list[Evaluator] = []
    if plan.endtasks is not None:
        found.append(FinetuneEvaluator(plan.endtasks, start.tokenizer, **run))
    if plan.answers is not None:
        options, left, questions = plan.answers, list[str](), dict[str, list[TaskPrompt]]()
        encoder = corpora.encoder(start.tokenizer, start.length, seq2seq=start.seq2seq)
        for task in plan.order:  # open questions only where answers are written
            corpus, most = corpora.by_name[task], options.max_documents
            asked = list(encoder.prompts(read_examples(corpus, plan.source.score_on, most=most)))
            measure, closed = options.known_by.get(task), all(each.example.choices for each in asked)
            if measure in task_metrics.RANKED and not closed:
                told = f"answers.measures.{task}={measure} is invalid: the answers are open, not choices"
                allowed = ", ".join(name for name in KNOWN_BY if name not in task_metrics.RANKED)
                raise ValueError(f"{told}. Allowed: {allowed}")
            if closed or options.written:
                questions[task] = asked
            else:
                left.append(task)
        if left and is_first_process():
            log.info("Skipping %s, whose answers are open (answers.written=false)", ", ".join(left))
        settings = asdict(replace(options, when="each"))  # which changes no answer
        del settings["measures"]  # nor do these, but that a file may have to hold the sources
        known_by = [ANSWERS_FORMAT, settings, asdict(cast(Any, corpora.encoding))]
        known_by += [corpora.tokenizer_digest(start.tokenizer), start.length, plan.source.score_on]
        digests = {}
        for task in questions:
            held = [SOURCE] * needs_sources(options, task)
            digests[task] = digest([*known_by, corpora.by_name[task].facts["digest"], *held])
        if questions:
            found.append(TaskEvaluator(options, questions, digests, start.tokenizer, **run))
    if plan.benchmark is not None:
        found.append(LMEvalEvaluator(plan.benchmark, harness, start.tokenizer, **run))
    return found


def needs_sources(options: TaskEvalOptions, task: str) -> bool:
    """Whether the measure that a task is known by is of the texts that were asked about."""
    return task in options.known_by and "sources" in task_metrics.MEASURES[options.known_by[task]].needs
