"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""

import importlib
import sys
from types import TracebackType
from typing import Any

__version__ = "0.1.0"
# The names that your own methods, masks and sources are written with (`from cpt import Options`), and the
# modules that they are read from when they are asked for: importing cpt imports no torch.
PUBLIC = {
    "load_run": "cpt.api",
    "load_runs": "cpt.api",
    "load_tables": "cpt.api",
    "Allowed": "cpt.core.schema",
    "BelowOne": "cpt.core.schema",
    "Count": "cpt.core.schema",
    "Natural": "cpt.core.schema",
    "NonNegative": "cpt.core.schema",
    "OneOrMore": "cpt.core.schema",
    "Options": "cpt.core.schema",
    "Pattern": "cpt.core.schema",
    "Positive": "cpt.core.schema",
    "PositiveShare": "cpt.core.schema",
    "Probability": "cpt.core.schema",
    "Steps": "cpt.core.schema",
    "Subset": "cpt.core.schema",
    "Text": "cpt.core.schema",
    "TextList": "cpt.core.schema",
    "config": "cpt.core.schema",
    "option": "cpt.core.schema",
    "Choice": "cpt.core.sections",
    "Batch": "cpt.data.collate",
    "Domain": "cpt.data.options",
    "Source": "cpt.data.sources.base",
    "TaskSource": "cpt.evaluation.finetune_tasks",
    "Scores": "cpt.evaluation.scores",
    "Constraint": "cpt.gradient_masks.base",
    "GradientMask": "cpt.gradient_masks.base",
    "ContinualMethod": "cpt.methods.base",
    "MethodContext": "cpt.methods.base",
    "Objective": "cpt.models.objectives",
    "Snapshot": "cpt.models.weights",
}
__all__ = sorted(PUBLIC)


def report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replaces `sys.excepthook`: Ctrl-C is reported without a traceback, everything else as Python does."""
    if issubclass(kind, KeyboardInterrupt):
        print("cpt: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# `python -m cpt.NAME` imports this package before the program, with this as its first argument. The program
# reports Ctrl-C itself, but only after it has imported torch, which takes seconds.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = report_interrupt


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
