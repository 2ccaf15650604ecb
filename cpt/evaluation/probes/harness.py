"""The lm-evaluation-harness: its tasks read once, and measured on a model in memory. Read in by those alone
who have it."""

import io
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from lm_eval import __version__ as VERSION
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.core.errors import reason, unknown_name
from cpt.evaluation.probes.options import LMEval
from cpt.evaluation.probes.results import read_metrics
from cpt.models.forward import in_mode

log = logging.getLogger(__name__)
FORMAT = 1  # counts changes of what a file of results depends on
# What the harness's own program seeds python, NumPy, torch and the choice of shots with.
RANDOM_SEED, OTHER_SEED = 0, 1234
DRAWS = 100  # of the bootstrap, where an error has no formula
MIXED = {"16": "float16", "16-mixed": "float16", "bf16": "bfloat16", "bf16-mixed": "bfloat16"}
WHERE = "bring its data into the cache of Hugging Face while there is a network"


@dataclass(frozen=True)
class Column:
    """What one number stands for: a task of the harness, or a group that has a mean of its own."""

    name: str
    tasks: Mapping[str, Task]
    groups: Mapping[str, Any]

    @property
    def shots(self) -> int | None:
        """Examples before each question; None of a group whose tasks differ."""
        return shared([task.get_config("num_fewshot") for task in self.tasks.values()])

    def chance(self, limit: float | None) -> float | None:
        """The accuracy of a guess; None where it is not told, or the tasks of a group differ."""
        return shared([guess(task, get_sample_size(task, limit)) for task in self.tasks.values()])


class Harness:
    """The tasks that a probe asks for, read at once, so that what is wrong with them is told before hours of
    learning. Raises ValueError for a task or metric that there is not, whose data cannot be read, or that
    runs code of the model's."""

    version = VERSION

    def __init__(self, options: LMEval, *, precision: Any = "32-true") -> None:
        self.options, self.mixed = options, MIXED.get(str(precision))
        with silence():
            manager = make_manager(options)
            found = [column for name in options.tasks for column in load_columns(manager, name)]
        self.columns = {column.name: column for column in found}
        tasks = {name: task for column in found for name, task in column.tasks.items()}
        for name, task in tasks.items():
            check_task(name, task)
            set_shots(name, task, options.shots)
        self.check_metrics()
        self.contents = {name: hash_task(task) for name, task in tasks.items()}

    def check_metrics(self) -> None:
        """Raises ValueError for a metric of no task, and for one that its task does not have."""
        for name, metric in self.options.metrics.items():
            if name not in self.columns:
                raise ValueError(unknown_name(f"probe.metrics.{name}", self.columns))
            column = self.columns[name]
            known = {each for task in column.tasks.values() for each in task.aggregation()}
            if known and metric.partition(",")[0] not in known:
                raise ValueError(f"probe.metrics.{name}={metric}; allowed: {', '.join(sorted(known))}")

    def digest(self, name: str) -> str:
        """What a task's results depend on besides the model: the harness, the task, its data, the options."""
        contents = [self.contents[task] for task in self.columns[name].tasks]
        options = [self.options.limit, self.options.max_length, self.mixed]
        return digest([FORMAT, self.version, name, contents, options])

    def measure(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        expect: Callable[[int], object],
        step: Callable[[], object],
    ) -> dict[str, Any]:
        """All metrics of a task on a model, where the model is: {metric: {value, error, higher}}, with what
        they were measured on. `expect` is told of requests to come, `step` is called after each.

        The model's weights and mode, and the generators of python, NumPy and torch, stay as they were."""
        column, options = self.columns[name], self.options
        tasks = {"tasks": dict(column.tasks), "groups": dict(column.groups), "group_map": {}}
        with isolate_rng(), in_mode(model, training=False), silence() as warned:
            seed_all(column.tasks.values())
            lm = self.take_in(model, tokenizer)
            lm.expect, lm.cache_hook = expect, Steps(step)
            found = evaluate(
                lm=lm, task_dict=tasks, limit=options.limit, bootstrap_iters=DRAWS, log_samples=False
            )
        truncated = sum("runcat" in told for told in warned)
        if truncated:
            log.info("probe %s: %d requests or more were longer than is read, and cut", name, truncated)
        return self.tell(column, found) | {"truncated": truncated}

    def take_in(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> "CountedModel":
        """The model as the harness takes one. A text has its tokenizer's own tokens around it; none where
        these would end it, since the harness goes on with a text behind its last token."""
        causal = not model.config.is_encoder_decoder
        return CountedModel(
            pretrained=model,
            tokenizer=deepcopy(tokenizer),  # it may be given a token for padding
            backend="causal" if causal else "seq2seq",
            add_bos_token=False if causal and ends_texts(tokenizer) else None,
            batch_size=self.options.batch_size,
            max_length=self.options.max_length,
            mixed_precision_dtype=self.mixed,
        )

    def tell(self, column: Column, found: Mapping[str, Any]) -> dict[str, Any]:
        """The harness's results in our words."""
        name = column.name
        higher = found["higher_is_better"].get(name, {})
        return {
            "digest": self.digest(name),
            "harness": self.version,
            "version": str(found["versions"].get(name)),
            "shots": column.shots,
            "limit": self.options.limit,
            "examples": sum(found["n-samples"][task]["effective"] for task in column.tasks),
            "chance": column.chance(self.options.limit),
            "metrics": read_metrics(found["results"][name], higher),
        }


class CountedModel(HFLM):
    """The harness's model, that tells how many requests there will be and shows no bars of its own."""

    expect: Callable[[int], object]

    def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
        self.expect(len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list:
        self.expect(len(requests))
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: list, disable_tqdm: bool = True) -> list:
        self.expect(len(requests))
        return super().generate_until(requests, disable_tqdm=True)


class Steps:
    """Stands for the harness's cache, which hears of each request that is answered."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.step = step

    def add_partial(self, attr: str, req: Any, res: Any) -> None:
        self.step()


class Warned(logging.Handler):
    """Keeps what the harness warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@contextmanager
def silence() -> Iterator[list[str]]:
    """While it lasts the harness shows nothing and starts no processes of its own; gives its warnings."""
    logger, before, warned = logging.getLogger("lm_eval"), dict(os.environ), Warned()
    level, handlers, propagates = logger.level, logger.handlers, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [warned], False
    os.environ["DISABLE_MULTIPROC"] = "1"  # of its bootstrap
    heard = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(heard), redirect_stderr(heard):
            warnings.simplefilter("ignore")
            yield warned.told
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagates
        os.environ.pop("DISABLE_MULTIPROC")
        os.environ.update({name: value for name, value in before.items() if name == "DISABLE_MULTIPROC"})


def make_manager(options: LMEval) -> TaskManager:
    """What knows the tasks; of the harness's own 14,000 names, which take long to read, only where one is
    asked for."""
    own = TaskManager(include_path=options.include, include_defaults=False)
    if set(options.tasks) <= set(own.all_tasks):
        return own
    return TaskManager(include_path=options.include)


def load_columns(manager: TaskManager, name: str) -> Iterator[Column]:
    """The columns that a name stands for: itself, or the tasks of a tag, and of a group without a mean."""
    if name not in manager.all_tasks:
        raise ValueError(unknown_name(f"probe.tasks={name}", manager.all_tasks))
    try:
        loaded = manager.load([name])
    except Exception as error:  # whatever the harness, a task's own code or the reader of its data raises
        raise ValueError(f"probe.tasks={name} cannot be read ({reason(error)}); {WHERE}") from error
    groups = loaded.get("groups", {})
    if name in groups and groups[name].has_aggregation:
        yield Column(name, loaded["tasks"], groups)
    else:
        yield from (Column(leaf, {leaf: task}, {}) for leaf, task in loaded["tasks"].items())


def check_task(name: str, task: Task) -> None:
    """Raises ValueError for a task that runs what the model writes, or is not about text alone."""
    if getattr(task, "UNSAFE_CODE", False):
        raise ValueError(f"probe.tasks={name} runs code that the model writes; allowed: tasks that do not")
    if getattr(task, "MULTIMODAL", False):
        raise ValueError(f"probe.tasks={name} shows the model pictures or sounds; allowed: tasks of text")


def set_shots(name: str, task: Task, shots: int | None) -> None:
    """Examples before each question, as the harness's own program sets them: a task that says 0 keeps it."""
    own = task.get_config("num_fewshot")
    if shots is not None and own == 0 != shots:
        log.info("probe.shots=%d has no effect on %s, which is asked without examples", shots, name)
    elif shots is not None or own is None:
        task.set_config("num_fewshot", shots or 0)


def hash_task(task: Task) -> str:
    """A hash of a task's own options, of its examples and of those that may be shown before them."""
    shown = task.fewshot_docs() if task.get_config("num_fewshot") else []
    documents = [list(task.eval_docs), list(shown or [])]
    return digest([json.loads(json.dumps(task.dump_config(), default=str)), documents])


def ends_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer puts a token of its own behind a text."""
    last = tokenizer("a")["input_ids"][-1:]
    return bool(last) and last[0] in tokenizer.all_special_ids


def seed_all(tasks: Any) -> None:
    """Seeds as the harness's own program does, so that a number does not depend on what was drawn before."""
    random.seed(RANDOM_SEED)
    np.random.seed(OTHER_SEED)
    torch.manual_seed(OTHER_SEED)
    for task in tasks:
        task.set_fewshot_seed(seed=OTHER_SEED)


def guess(task: Task, count: int | None) -> float | None:
    """The mean of 1 / choices over the first examples of a multiple choice."""
    if task.OUTPUT_TYPE != "multiple_choice" or getattr(task, "multiple_target", 1):
        return None
    documents = list(task.eval_docs)[:count]
    return float(np.mean([1 / len(task.doc_to_choice(document)) for document in documents]))


def shared(values: Sequence[Any]) -> Any:
    """What all values are; None where they differ."""
    return values[0] if len(set(values)) == 1 else None
