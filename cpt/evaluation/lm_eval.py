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
from functools import partial
from math import isfinite
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from cpt.evaluation.options import LMEvalOptions
from cpt.models.forward import set_mode

log = logging.getLogger(__name__)
RESULTS_FORMAT = 1  # counts changes of what a file of results depends on
# What the harness's own program seeds python, NumPy, torch and the choice of shots with.
RANDOM_SEED, OTHER_SEED = 0, 1234
DRAWS = 100  # of the bootstrap, where an error has no formula
MIXED = {"16": "float16", "16-mixed": "float16", "bf16": "bfloat16", "bf16-mixed": "bfloat16"}
REQUESTS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


class Column(NamedTuple):
    """What one number stands for: a task of the harness, or a group that has a mean of its own."""

    tasks: Mapping[str, Task]
    groups: Mapping[str, Any]


class Harness:
    """The tasks of a run, read at once, so that an error in them is reported before hours of training. Raises
    ValueError for an unknown task or metric, one whose data cannot be read, that runs code which the model
    writes, or that is not about text alone."""

    version = VERSION

    def __init__(self, options: LMEvalOptions, *, precision: Any = "32-true") -> None:
        self.options, self.mixed = options, MIXED.get(str(precision))
        self.columns: dict[str, Column] = {}
        with silence():
            # The harness's own 14,000 names take long to read: only where one is asked for.
            manager = TaskManager(include_path=options.include, include_defaults=False)
            if not set(options.tasks) <= set(manager.all_tasks):
                manager = TaskManager(include_path=options.include)
            for name in options.tasks:
                if name not in manager.all_tasks:
                    raise ValueError(unknown_name(f"benchmark.tasks={name}", manager.all_tasks))
                try:
                    loaded = manager.load([name])
                except Exception as error:  # what the harness, a task's code or the reader of its data raises
                    where = "bring its data into the cache of Hugging Face while there is a network"
                    told = f"benchmark.tasks={name} is invalid: {reason(error)}"
                    raise ValueError(f"{told}; {where}") from error
                groups = loaded.get("groups", {})
                if name in groups and groups[name].has_aggregation:
                    self.columns[name] = Column(loaded["tasks"], groups)
                else:  # a name stands for itself, or for the tasks of a tag, and of a group without a mean
                    for leaf, task in loaded["tasks"].items():
                        self.columns[leaf] = Column({leaf: task}, {})
        tasks = {name: task for column in self.columns.values() for name, task in column.tasks.items()}
        for name, task in tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                told = f"benchmark.tasks={name} is invalid: it runs code that the model writes"
                raise ValueError(f"{told}. Allowed: other tasks")
            if getattr(task, "MULTIMODAL", False):
                told = f"benchmark.tasks={name} is invalid: it has pictures or sounds"
                raise ValueError(f"{told}. Allowed: tasks of text")
            own, shots = task.get_config("num_fewshot"), options.shots
            if shots is not None and own == 0 != shots:  # as the harness's own program: 0 stays 0
                log.info("No effect of benchmark.shots=%d on %s: it is asked without examples", shots, name)
            elif shots is not None or own is None:
                task.set_config("num_fewshot", shots or 0)
        for name, metric in options.metrics.items():
            if name not in self.columns:
                raise ValueError(unknown_name(f"benchmark.metrics.{name}", self.columns))
            known = {each for task in self.columns[name].tasks.values() for each in task.aggregation()}
            if known and metric.partition(",")[0] not in known:
                allowed = ", ".join(sorted(known))
                raise ValueError(f"benchmark.metrics.{name}={metric} is invalid. Allowed: {allowed}")
        self.contents = {}
        for name, task in tasks.items():  # its own options, its examples, those that may be shown before them
            shown = task.fewshot_docs() if task.get_config("num_fewshot") else []
            documents = [list(task.eval_docs), list(shown or [])]
            own = json.loads(json.dumps(task.dump_config(), default=str))
            self.contents[name] = digest([own, documents])

    def digest(self, name: str) -> str:
        """What a task's results depend on besides the model: the harness, the task, its data, the options."""
        contents = [self.contents[task] for task in self.columns[name].tasks]
        options = [self.options.max_documents, self.options.max_length, self.mixed]
        return digest([RESULTS_FORMAT, self.version, name, contents, options])

    def measure(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        step: Callable[[], object],
    ) -> dict[str, Any]:
        """All metrics of a task on a model, where the model is: {metric: {value, error, higher}}, with what
        they were measured on. `step` is called after each request."""
        column, options = self.columns[name], self.options
        tasks = {"tasks": dict(column.tasks), "groups": dict(column.groups), "group_map": {}}
        causal = not model.config.is_encoder_decoder
        last = tokenizer("a")["input_ids"][-1:]
        ends = causal and bool(last) and last[0] in tokenizer.all_special_ids
        with isolate_rng(), set_mode(model, training=False), silence() as warned:
            random.seed(RANDOM_SEED)  # as the harness's own program does
            np.random.seed(OTHER_SEED)
            torch.manual_seed(OTHER_SEED)
            for task in column.tasks.values():
                task.set_fewshot_seed(seed=OTHER_SEED)
            lm = HFLM(
                pretrained=model,
                tokenizer=deepcopy(tokenizer),  # it may be given a token for padding
                backend="causal" if causal else "seq2seq",
                # None: the tokenizer's own tokens around a text, but not where they would end it
                add_bos_token=False if ends else None,
                batch_size=options.batch_size,
                max_length=options.max_length,
                mixed_precision_dtype=self.mixed,
            )
            for kind in REQUESTS:
                setattr(lm, kind, partial(getattr(lm, kind), disable_tqdm=True))
            # replaces the harness's cache, which is called for each answered request
            lm.cache_hook = SimpleNamespace(add_partial=lambda *answered: step())
            found = evaluate(
                lm=lm, task_dict=tasks, limit=options.max_documents, bootstrap_iters=DRAWS, log_samples=False
            )
        truncated = sum("runcat" in message for message in warned)
        if truncated:
            log.info("Truncating %s: %d requests or more are longer than the model reads", name, truncated)
        # {"acc,none": …, "acc_stderr,none": …}; the filter `none` is left out of a metric's name
        values, higher = found["results"][name], found["higher_is_better"].get(name, {})
        metrics = {}
        for key, value in values.items():
            metric, comma, kind = key.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, Real):
                error = values.get(f"{metric}_stderr,{kind}")
                error = float(error) if isinstance(error, Real) and isfinite(error) else None
                told = {"value": float(value), "error": error, "higher": higher.get(metric) is not False}
                metrics[metric if kind == "none" else key] = told
        shots = {task.get_config("num_fewshot") for task in column.tasks.values()}
        chances: set[float | None] = set()  # a guess gets the mean of 1 / choices over the examples
        for task in column.tasks.values():
            if task.OUTPUT_TYPE != "multiple_choice" or getattr(task, "multiple_target", 1):
                chances.add(None)
                continue
            documents = list(task.eval_docs)[: get_sample_size(task, options.max_documents)]
            chances.add(float(np.mean([1 / len(task.doc_to_choice(document)) for document in documents])))
        return {
            "digest": self.digest(name),
            "harness": self.version,
            "version": str(found["versions"].get(name)),
            "shots": shots.pop() if len(shots) == 1 else None,  # None where tasks of a group differ
            "limit": options.max_documents,
            "examples": sum(found["n-samples"][task]["effective"] for task in column.tasks),
            "chance": chances.pop() if len(chances) == 1 else None,
            "metrics": metrics,
            "truncated": truncated,
        }


@contextmanager
def silence() -> Iterator[list[str]]:
    """While it lasts the harness shows nothing and starts no processes of its own; gives its warnings."""
    logger, before, told = logging.getLogger("lm_eval"), os.environ.get("DISABLE_MULTIPROC"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    level, handlers, propagates = logger.level, logger.handlers, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.handlers, logger.propagate = [handler], False
    os.environ["DISABLE_MULTIPROC"] = "1"  # of its bootstrap
    heard = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(heard), redirect_stderr(heard):
            warnings.simplefilter("ignore")
            yield told
    finally:
        logger.setLevel(level)
        logger.handlers, logger.propagate = handlers, propagates
        del os.environ["DISABLE_MULTIPROC"]
        os.environ.update({} if before is None else {"DISABLE_MULTIPROC": before})
