"""What of a run's settings a card shows: no folders of a machine, no accounts, nothing that looks secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from cpt.core.config import is_secret

SHOWN = ("method", "mask", "replay", "schedule", "freeze")  # groups whose options a card shows
HIDDEN = (
    "domains",
    "endtask",
    "answers",
    "probe",
    "logger",
    "callbacks",
    "hydra",
    "model.checkpoint",
    "from",
)
CODE = ("_target_", "_partial_", "name")


def without_folders(value: Any) -> Any:
    """A value, of a path its last part alone."""
    if isinstance(value, (list, tuple)):
        return [without_folders(each) for each in value]
    if isinstance(value, str):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def pick_given(variant: str) -> dict[str, str]:
    """What was chosen on the command line beyond the method, the model, the order and the data, by key."""
    pairs = (value.partition("=") for value in variant.split("; ") if value)
    return {key: without_folders(value) for key, _, value in pairs if is_shown(key)}


def pick_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the method and of what is laid over it."""
    chosen = {key: value for key, value in settings.items() if key.partition(".")[0] in SHOWN}
    return {
        key: without_folders(value)
        for key, value in chosen.items()
        if is_shown(key) and key.rpartition(".")[2] not in CODE and not isinstance(value, Mapping)
    }


def is_shown(key: str) -> bool:
    group = any(key == name or key.startswith(f"{name}.") for name in HIDDEN)
    return not group and not is_secret(key)
