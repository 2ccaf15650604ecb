"""Tensors in a file that is whole at any time."""

from pathlib import Path
from typing import Any

import torch

from cpt.core.files import check_archive, replacing, writing
from cpt.core.tensors import load_tensors


def save_state(state: Any, path: Path) -> None:
    """Writes tensors to a file that is the old one or the new one at any time. Raises OSError where it cannot
    be written."""
    with writing(path), replacing(path) as partial:
        torch.save(state, partial)


def check_state(path: Path, *, instead: str) -> None:
    """Raises ValueError if a file of tensors is truncated or damaged, or holds things that could bring code;
    `instead` says what to do about it."""
    check_archive(path, instead=instead)
    try:
        load_tensors(path)
    except ValueError as error:
        raise ValueError(f"{error}; {instead}") from error
