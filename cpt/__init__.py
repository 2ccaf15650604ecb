"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""

import importlib
from typing import Any

__version__ = "0.1.0"
# The names that your own methods, masks and sources are written with (`from cpt import Options`), and the
# modules that they are read from when they are asked for: importing cpt imports no torch.
PUBLIC = {
    "Batch": "cpt.data.collate",
    "Constraint": "cpt.gradient_masks.base",
    "ContinualModule": "cpt.methods.base",
    "Domain": "cpt.data.datamodule",
    "GradientMask": "cpt.gradient_masks.base",
    "Objective": "cpt.models.objectives",
    "Options": "cpt.core.options",
    "Rule": "cpt.core.rules",
    "Scores": "cpt.evaluation.scores",
    "Shared": "cpt.methods.base",
    "Snapshot": "cpt.models.weights",
    "Source": "cpt.data.sources.base",
    "TEXT": "cpt.core.rules",
    "TaskSource": "cpt.evaluation.finetune_tasks",
    "YES_NO": "cpt.core.rules",
    "between": "cpt.core.rules",
    "number": "cpt.core.rules",
    "one_of": "cpt.core.rules",
    "option": "cpt.core.options",
    "or_null": "cpt.core.rules",
    "some_of": "cpt.core.rules",
    "whole": "cpt.core.rules",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
