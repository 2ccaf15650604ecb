"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""

import importlib
from typing import Any

__version__ = "0.1.0"
# The names that your own methods, masks and sources are written with (`from cpt import Options`), and the
# modules that they are read from when they are asked for: importing cpt imports no torch.
PUBLIC = {
    "Allowed": "cpt.core.schema",
    "Batch": "cpt.data.collate",
    "BelowOne": "cpt.core.schema",
    "Choice": "cpt.core.sections",
    "Constraint": "cpt.gradient_masks.base",
    "ContinualMethod": "cpt.methods.base",
    "Count": "cpt.core.schema",
    "Domain": "cpt.data.datamodule",
    "GradientMask": "cpt.gradient_masks.base",
    "Natural": "cpt.core.schema",
    "NonNegative": "cpt.core.schema",
    "Objective": "cpt.models.objectives",
    "OneOrMore": "cpt.core.schema",
    "Options": "cpt.core.schema",
    "Pattern": "cpt.core.schema",
    "Positive": "cpt.core.schema",
    "PositiveShare": "cpt.core.schema",
    "Probability": "cpt.core.schema",
    "Scores": "cpt.evaluation.scores",
    "MethodContext": "cpt.methods.base",
    "Snapshot": "cpt.models.weights",
    "Source": "cpt.data.sources.base",
    "Steps": "cpt.core.schema",
    "Subset": "cpt.core.schema",
    "TaskSource": "cpt.evaluation.finetune_tasks",
    "Text": "cpt.core.schema",
    "TextList": "cpt.core.schema",
    "config": "cpt.core.schema",
    "load_run": "cpt.api",
    "load_runs": "cpt.api",
    "option": "cpt.core.schema",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
