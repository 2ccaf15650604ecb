"""Loggers observe a run: whatever one of them raises is a line in the log, and the run continues."""

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment

from cpt.core.errors import find_reason
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.loggers.metric_names import MetricNames

log = logging.getLogger(__name__)
MAX_FAILURES = 3  # in a row: a server that does not answer may take minutes each time


class LoggerFailures:
    """The failures of one logger: the first is a warning, and after MAX_FAILURES in a row it is not called
    any more."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.total = 0
        self.consecutive = 0
        self.is_inside = False  # a method of the logger, which may call others of its own

    @property
    def is_disabled(self) -> bool:
        return self.consecutive >= MAX_FAILURES

    def record(self, error: BaseException) -> None:
        """Counts a failure, and warns of the first."""
        if self.total == 0:
            warn_of_failure(self.label, error, "the run continues, and this logger's data may be incomplete")
        self.total += 1
        self.consecutive += 1


def warn_of_failure(label: str, error: BaseException, consequence: str) -> None:
    """Warns of a logger's failure, once for all processes."""
    if is_first_process():
        log.warning("%s failed (%s: %s); %s", label, type(error).__name__, find_reason(error), consequence)


def report_failures(logger: Logger) -> None:
    """Logs how many calls of a guarded logger failed, if more than the one that its warning names."""
    failures = getattr(logger, "cpt_failures", None)  # a dummy logger has a method of any name
    if isinstance(failures, LoggerFailures) and failures.total > 1 and is_first_process():
        log.info("%s failed in %s", failures.label, count_noun(failures.total, "call"))


def guard_logger(logger: Logger, label: str, names: MetricNames | None = None) -> Logger:
    """The same logger, whose public methods and properties do not raise any more. It stays an instance of its
    class: callbacks ask for that.

    A method that fails returns None, `experiment` an object that ignores every call. `label` names the logger
    in the log. With `names` it gets the metrics by names that it need not change."""
    failures = LoggerFailures(label)
    logger_class = type(logger)
    members: dict[str, Any] = {"cpt_failures": failures}
    for name in dir(logger_class):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(logger_class, name)
        if isinstance(member, property) and member.fget is not None:
            fallback = DummyExperiment() if name == "experiment" else None
            members[name] = property(catch_failures(member.fget, failures, fallback), member.fset)
        elif isinstance(member, FunctionType):
            function: Callable = member
            if name == "log_metrics" and names is not None:
                function = rename_metrics(member, names)
            members[name] = catch_failures(function, failures, None)

    logger.__class__ = type(logger_class.__name__, (logger_class,), members)
    return logger


def catch_failures(function: Callable, failures: LoggerFailures, fallback: Any) -> Callable:
    """The function, which returns a fallback where it fails or its logger is disabled. Where methods call
    each other, the outermost one fails."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if failures.is_disabled:
            failures.total += 1
            return fallback
        if failures.is_inside:
            return function(*args, **kwargs)

        failures.is_inside = True
        try:
            result = function(*args, **kwargs)
        except (Exception, SystemExit) as error:  # whatever a foreign class raises
            failures.record(error)
            return fallback
        finally:
            failures.is_inside = False
        if function.__name__ == "log_metrics":  # others may succeed by doing nothing
            failures.consecutive = 0
        return result

    return call


def rename_metrics(log_metrics: Callable, names: MetricNames) -> Callable:
    """A logger's `log_metrics`, which gets the metrics by their logged names."""

    @wraps(log_metrics)
    def call(logger: Logger, metrics: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        renamed = {names.logged(name): value for name, value in metrics.items()}
        return log_metrics(logger, renamed, *args, **kwargs)

    return call
