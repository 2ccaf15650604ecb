"""Tasks of the lm-evaluation-harness on the model after a stage."""

import json
import logging
import time
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import write_atomically as replace_file
from cpt.core.messages import log_once
from cpt.data.datamodule import DomainSequence
from cpt.evaluation import predictions
from cpt.evaluation.options import LMEvalOptions, is_due
from cpt.methods.base import ContinualMethod
from cpt.trainer.evaluator import FileEvaluator, count_units, on_device
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)


class LMEvalEvaluator(FileEvaluator):
    """Measures tasks of the harness, by name. The first process has the harness and works; others wait."""

    GROUP = "benchmark"
    KIND = "benchmarks"
    LABEL = "benchmark"

    def __init__(
        self,
        options: LMEvalOptions,
        harness: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        run: RunDir,
        module: ContinualMethod,
        data: DomainSequence,
        settings_hash: str,
    ) -> None:
        super().__init__(options.when, run=run, module=module, data=data, settings_hash=settings_hash)
        self.options = options
        self.harness = harness
        self.tokenizer = tokenizer

    def requests(self, number: int) -> list[str]:
        if self.harness is None or not is_due(self.when, number, stages=len(self.data)):
            return []
        return list(self.harness.columns)

    def read(self, number: int, request: str) -> dict[str, Any] | None:
        try:
            result = predictions.load_results(predictions.results_file(self.folder(number), request))
        except FileNotFoundError:
            return None
        except ValueError as error:
            log_once(log, f"Measuring again: {error}")
            return None
        return result if result["digest"] == self.harness.digest(request) else None

    def measure_requests(self, number: int, requests: list[str], device: torch.device, label: str) -> None:
        """Measures requests, which are names of tasks; `number` is the row of the results."""
        if not requests:
            return
        learned = self.learned_domains(number)
        domain = self.data.domain_indices[learned[-1]] if learned else BASE  # the last one learned
        with (
            on_device(self.module.model_for(domain), device) as model,
            count_units(label, total=None, hidden=False, unit="request") as (progress, on_request_done),
        ):
            for task in requests:
                progress.set_postfix_str(task, refresh=False)
                start_time = time.perf_counter()
                result = self.harness.measure(task, model, self.tokenizer, step=on_request_done)
                result["seconds"] = round(time.perf_counter() - start_time, 3)
                path = predictions.results_file(self.folder(number), task)
                replace_file(path, json.dumps(result, indent=1) + "\n")

    def results(self, num_rows: int) -> dict[str, Any]:
        tasks: dict[str, Any] = {}
        seconds = 0.0
        for task in self.harness.columns:
            results_by_row = [self.read(row, task) for row in range(num_rows)]
            measured = [result for result in results_by_row if result]
            if not measured:
                continue
            tasks[task] = self.describe_task(task, results_by_row, first_result=measured[0])
            seconds += sum(result["seconds"] for result in measured)
        return {"harness": self.harness.version, "when": self.when, "seconds": seconds, "tasks": tasks}

    def describe_task(
        self, task: str, results_by_row: list[dict[str, Any] | None], *, first_result: dict[str, Any]
    ) -> dict[str, Any]:
        """The values of the metric of a task in all rows, and what they were measured on.

        Raises InvalidOptionError for a metric of the config that the task does not have."""
        metric = self.options.metrics.get(task) or next(iter(first_result["metrics"]))
        if metric not in first_result["metrics"]:
            allowed = ", ".join(first_result["metrics"])
            raise InvalidOptionError(f"benchmark.metrics.{task}", metric, allowed=allowed)

        measurements = []  # by row; empty where it was not measured
        for result in results_by_row:
            measurements.append(result["metrics"].get(metric, {}) if result else {})
        return {
            "shots": first_result["shots"],
            "limit": first_result["limit"],
            "examples": first_result["examples"],
            "version": first_result["version"],
            "truncated": first_result["truncated"],
            "chance": first_result["chance"] if metric.startswith("acc") else None,
            "metric": metric,
            "higher": first_result["metrics"][metric]["higher"],
            "values": [measurement.get("value") for measurement in measurements],
            "errors": [measurement.get("error") for measurement in measurements],
        }
