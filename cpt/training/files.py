"""Tensors in a file that is whole at any time."""

from pathlib import Path
from typing import Any

import torch

from cpt.core.files import replacing


def save_state(state: Any, path: Path) -> None:
    """Writes tensors to a file that is the old one or the new one at any time. Raises OSError where it cannot
    be written."""
    try:
        with replacing(path) as partial:
            torch.save(state, partial)
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error):  # what torch makes of a full disk
            raise
        raise OSError(f"{path} cannot be written ({str(error).splitlines()[0]})") from error
