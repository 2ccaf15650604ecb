"""The lm-evaluation-harness: its tasks, and measuring them on a model in memory. It may not be installed."""

import io
import json
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import isfinite
from numbers import Real
from types import SimpleNamespace
from typing import Any

import datasets
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
from cpt.core.errors import describe_unknown_name, find_reason
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.hub_access import check_data_set_access
from cpt.core.messages import count_noun
from cpt.evaluation.options import LMEvalOptions
from cpt.models.forward import set_mode

log = logging.getLogger(__name__)
RESULTS_FORMAT = 1  # raised when the inputs of a file of results change
# The seeds of the harness's own program: of Python's generator, and of NumPy, torch and the choice of shots.
PYTHON_SEED = 0
NUMPY_TORCH_SHOTS_SEED = 1234
BOOTSTRAP_DRAWS = 100  # where an error has no formula
MIXED = {"16": "float16", "16-mixed": "float16", "bf16": "bfloat16", "bf16-mixed": "bfloat16"}
REQUEST_METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")  # of HFLM


@dataclass(frozen=True)
class Column:
    """What one column of the table of results is of: a task of the harness, or a group of tasks whose mean
    the harness computes. `groups` is empty for a single task."""

    tasks: Mapping[str, Task]
    groups: Mapping[str, Any]


class Harness:
    """The tasks of a run, read at once, so that an error in them is reported before hours of training. Raises
    ValueError for an unknown task or metric, one whose data cannot be read, that runs code which the model
    writes, or that is not about text alone."""

    version = VERSION

    def __init__(self, options: LMEvalOptions, *, precision: Any = "32-true") -> None:
        self.options = options
        self.mixed_precision = MIXED.get(str(precision))
        with silence():
            self.columns = load_columns(options)

        tasks: dict[str, Task] = {}
        for column in self.columns.values():
            tasks.update(column.tasks)
        for name, task in tasks.items():
            check_task(name, task)
            set_num_shots(name, task, options.shots)
        for name, metric in options.metrics.items():
            self.check_metric(name, metric)
        self.contents = {name: hash_contents(task) for name, task in tasks.items()}

    def check_metric(self, name: str, metric: str) -> None:
        """Raises ValueError for a metric that a task does not have, or of a task that is not measured."""
        if name not in self.columns:
            raise ValueError(describe_unknown_name(f"benchmark.metrics.{name}", self.columns, name=name))
        task_metrics: set[str] = set()
        for task in self.columns[name].tasks.values():
            task_metrics.update(task.aggregation())
        if task_metrics and metric.partition(",")[0] not in task_metrics:
            raise InvalidOptionError(
                f"benchmark.metrics.{name}", metric, allowed=", ".join(sorted(task_metrics))
            )

    def digest(self, name: str) -> str:
        """A hash of what a column's results depend on besides the model: the harness, the tasks, their data,
        the options."""
        contents = [self.contents[task] for task in self.columns[name].tasks]
        options = [self.options.max_documents, self.options.max_length, self.mixed_precision]
        return digest([RESULTS_FORMAT, self.version, name, contents, options])

    def measure(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        step: Callable[[], object],
    ) -> dict[str, Any]:
        """The results of a column on a model, on the model's device, as scores.json has them: `metrics` as
        {metric: {value, error, higher}}, and what they were measured on. `step` is called after each request
        that the model has answered."""
        column = self.columns[name]
        results, warnings_shown = self.evaluate(column, model, tokenizer, step=step)

        num_truncated = sum("runcat" in message for message in warnings_shown)
        if num_truncated:
            log.info(
                "Truncating %s or more of %s, longer than the model reads",
                count_noun(num_truncated, "request"),
                name,
            )
        tasks = column.tasks.values()
        return {
            "digest": self.digest(name),
            "harness": self.version,
            "version": str(results["versions"].get(name)),
            "shots": find_common({task.get_config("num_fewshot") for task in tasks}),
            "limit": self.options.max_documents,
            "examples": sum(results["n-samples"][task]["effective"] for task in column.tasks),
            "chance": find_common({self.find_chance(task) for task in tasks}),
            "metrics": read_metrics(results["results"][name], results["higher_is_better"].get(name, {})),
            "truncated": num_truncated,
        }

    def evaluate(
        self,
        column: Column,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        step: Callable[[], object],
    ) -> tuple[dict[str, Any], list[str]]:
        """The results of the harness for the task or group of tasks of a column of the table of results, and
        the warnings that it logs. `step` is called after each request that the model has answered. Random
        generators are left as they were."""
        is_causal = not model.config.is_encoder_decoder
        last_token = tokenizer("a")["input_ids"][-1:]
        ends_texts = is_causal and bool(last_token) and last_token[0] in tokenizer.all_special_ids
        with isolate_rng(), set_mode(model, training=False), silence() as warnings_shown:
            # As the harness's own program does, whose numbers these are to be.
            random.seed(PYTHON_SEED)
            np.random.seed(NUMPY_TORCH_SHOTS_SEED)
            torch.manual_seed(NUMPY_TORCH_SHOTS_SEED)
            for task in column.tasks.values():
                task.set_fewshot_seed(seed=NUMPY_TORCH_SHOTS_SEED)

            lm = HFLM(
                pretrained=model,
                tokenizer=deepcopy(tokenizer),  # it may be given a token for padding
                backend="causal" if is_causal else "seq2seq",
                # None: the tokenizer's own tokens around a text, but not where they would end it
                add_bos_token=False if ends_texts else None,
                batch_size=self.options.batch_size,
                max_length=self.options.max_length,
                mixed_precision_dtype=self.mixed_precision,
            )
            # Our own bar shows the progress.
            for method in REQUEST_METHODS:
                setattr(lm, method, partial(getattr(lm, method), disable_tqdm=True))
            # The harness hands each answered request to its cache. The cache is not used, but requests can be
            # counted there.
            lm.cache_hook = SimpleNamespace(add_partial=lambda *answered: step())

            results = evaluate(
                lm=lm,
                task_dict={"tasks": dict(column.tasks), "groups": dict(column.groups), "group_map": {}},
                limit=self.options.max_documents,
                bootstrap_iters=BOOTSTRAP_DRAWS,
                log_samples=False,
            )
        return results, warnings_shown

    def find_chance(self, task: Task) -> float | None:
        """What a guess gets: the mean of 1 / choices over the examples; None where an answer is free."""
        if task.OUTPUT_TYPE != "multiple_choice" or getattr(task, "multiple_target", 1):
            return None
        num_documents = get_sample_size(task, self.options.max_documents)
        documents = list(task.eval_docs)[:num_documents]
        return float(np.mean([1 / len(task.doc_to_choice(document)) for document in documents]))


def load_columns(options: LMEvalOptions) -> dict[str, Column]:
    """The tasks and groups of the options, by name. Raises ValueError for an unknown or unreadable one."""
    # The harness's own 14,000 names take long to read: only where one is asked for.
    manager = TaskManager(include_path=options.include, include_defaults=False)
    if not set(options.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=options.include)

    columns: dict[str, Column] = {}
    for name in options.tasks:
        if name not in manager.all_tasks:
            typed_tasks = options.tasks if len(options.tasks) > 1 else name
            raise ValueError(
                describe_unknown_name(
                    f"benchmark.tasks={format_value(typed_tasks)}",
                    manager.all_tasks,
                    name=name,
                    kind=f"task {name}",
                )
            )
        try:
            with checking_data_set_access():
                loaded = manager.load([name])
        except Exception as error:  # what the harness, a task's code or the reader of its data raises
            raise ValueError(
                f"benchmark.tasks={name} is invalid: {find_reason(error)}; "
                "bring its data into the cache of Hugging Face while there is a network"
            ) from error

        groups = loaded.get("groups", {})
        if name in groups and groups[name].has_aggregation:
            columns[name] = Column(loaded["tasks"], groups)
        else:  # a name stands for itself, or for the tasks of a tag, and of a group without a mean
            for task_name, task in loaded["tasks"].items():
                columns[task_name] = Column({task_name: task}, {})
    return columns


@contextmanager
def checking_data_set_access() -> Iterator[None]:
    """Inside the context `datasets.load_dataset` raises ConnectionError at once for a data set of the Hub if
    the Hub cannot be reached. The client of the Hub would retry for minutes. A task of the harness calls it
    when it is constructed."""
    load = datasets.load_dataset

    def load_within_reach(path: str, *arguments: Any, **options: Any) -> Any:
        # With files of its own a task names how they are read, like `json`: no data set of the Hub.
        is_reader = "/" not in path and bool(options.get("data_files") or options.get("data_dir"))
        if not is_reader:
            try:
                check_data_set_access(path)
            except ConnectionError as error:
                raise ConnectionError(f"its data set {path}: {error}") from None
        return load(path, *arguments, **options)

    datasets.load_dataset = load_within_reach
    try:
        yield
    finally:
        datasets.load_dataset = load


def check_task(name: str, task: Task) -> None:
    """Raises ValueError for a task that runs a model's code, or is not of text alone."""
    if getattr(task, "UNSAFE_CODE", False):
        raise InvalidOptionError(
            "benchmark.tasks", name, reason="it runs code that the model writes", allowed="other tasks"
        )
    if getattr(task, "MULTIMODAL", False):
        raise InvalidOptionError(
            "benchmark.tasks", name, reason="it has pictures or sounds", allowed="tasks of text"
        )


def set_num_shots(name: str, task: Task, shots: int | None) -> None:
    """Sets how many examples a task shows before a question; `shots` is None for the task's own number."""
    task_shots = task.get_config("num_fewshot")
    if shots is None:
        if task_shots is None:
            task.set_config("num_fewshot", 0)
    elif task_shots == 0 and shots != 0:  # as the harness's own program: 0 stays 0
        log.info("No effect of benchmark.shots=%d on %s: it is asked without examples", shots, name)
    else:
        task.set_config("num_fewshot", shots)


def hash_contents(task: Task) -> str:
    """A hash of a task's own options, its examples, and those that may be shown before them."""
    examples = task.fewshot_docs() if task.get_config("num_fewshot") else []
    documents = [list(task.eval_docs), list(examples or [])]
    options = json.loads(json.dumps(task.dump_config(), default=str))
    return digest([options, documents])


def read_metrics(values: Mapping[str, Any], higher_is_better: Mapping[str, Any]) -> dict[str, Any]:
    """{metric: {value, error, higher}} from the harness's {"acc,none": …, "acc_stderr,none": …}; the filter
    `none` is left out of a metric's name."""
    metrics = {}
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, Real):
            continue
        error = values.get(f"{metric}_stderr,{filter_name}")
        has_error = isinstance(error, Real) and isfinite(error)
        metrics[metric if filter_name == "none" else key] = {
            "value": float(value),
            "error": float(error) if has_error else None,  # type: ignore[arg-type]
            "higher": higher_is_better.get(metric) is not False,
        }
    return metrics


def find_common(values: set[Any]) -> Any:
    """The value that all tasks of a column have; None where they differ."""
    return next(iter(values)) if len(values) == 1 else None


@contextmanager
def silence() -> Iterator[list[str]]:
    """Inside the context the harness prints nothing and starts no processes of its own. Yields the list to
    which the warnings that it logs are added."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]

    logger = logging.getLogger("lm_eval")
    level = logger.level
    handlers = logger.handlers
    propagates = logger.propagate
    logger.setLevel(logging.WARNING)
    logger.handlers = [handler]
    logger.propagate = False

    bootstrap_processes = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    output = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(output), redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield messages
    finally:
        logger.setLevel(level)
        logger.handlers = handlers
        logger.propagate = propagates
        if bootstrap_processes is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = bootstrap_processes
