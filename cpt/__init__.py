"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""

import importlib
from typing import Any

__version__ = "0.1.0"
# The names that your own methods, masks and sources are written with (`from cpt import Options`), and the
# modules that they are read from when they are asked for: importing cpt imports no torch.
MODULES = {
    "cpt.api": ("load_run", "load_runs", "load_tables"),
    "cpt.core.schema": (
        *("Allowed", "BelowOne", "Count", "Natural", "NonNegative", "OneOrMore", "Options", "Pattern"),
        *("Positive", "PositiveShare", "Probability", "Steps", "Subset", "Text", "TextList"),
        *("config", "option"),
    ),
    "cpt.core.sections": ("Choice",),
    "cpt.data.collate": ("Batch",),
    "cpt.data.options": ("Domain",),
    "cpt.data.sources.base": ("Source",),
    "cpt.evaluation.finetune_tasks": ("TaskSource",),
    "cpt.evaluation.scores": ("Scores",),
    "cpt.gradient_masks.base": ("Constraint", "GradientMask"),
    "cpt.methods.base": ("ContinualMethod", "MethodContext"),
    "cpt.models.objectives": ("Objective",),
    "cpt.models.weights": ("Snapshot",),
}
PUBLIC = {name: module for module, names in MODULES.items() for name in names}
__all__ = sorted(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
