"""Folders next to the small file of a state, which hold tensors that the file leaves to them.

NAME.COUNT.shards/   sharded tensors, by torch.distributed.checkpoint
NAME.COUNT.linked/   hard links to the safetensors of an exported model: `linked_weights.py`

The small file is replaced when its folder is complete, and the folder before is removed then: a kill leaves
the old ones or the new ones."""

import glob
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint

from cpt.core.files import find_damage
from cpt.core.shards import ShardReader, read_index

SHARDS = "shards"  # in the small file: the folder, its files' hashes, the key paths of its tensors
LINKS = "linked"  # in a stage's file: the folder, its files' hashes, by tensor its file and key there


def check_folders(state: Mapping[str, Any], path: Path, *, remedy: str, full: bool) -> None:
    """Raises ValueError if a file of the folders of the small file at `path` is missing or has another size
    or, if `full`, another hash, or if the index of its shards is damaged; `remedy` says what to do."""
    model = path.parent.with_name("model")
    for kind, note in ((SHARDS, ""), (LINKS, f", whose files {model} shares")):
        if kind not in state:
            continue
        folder = path.with_name(state[kind]["folder"])
        damage = next(find_damage(folder, state[kind]["sums"], full=full), None)
        if damage is not None:
            raise ValueError(f"{folder}{note}: {damage}; {remedy}")
        if kind == SHARDS:
            check_index(folder, remedy=remedy)


def check_index(folder: Path, *, remedy: str) -> None:
    """Raises ValueError if the index of a folder of shards is damaged, or holds something else."""
    try:
        read_index(folder)
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from error


def find_folders(path: Path) -> list[Path]:
    """The folders next to a small file, of both kinds."""
    stem = glob.escape(path.stem)
    return [*path.parent.glob(f"{stem}.*.{SHARDS}"), *path.parent.glob(f"{stem}.*.{LINKS}")]


def find_newest_number(path: Path) -> int:
    """The number of the newest folder next to a small file, 0 without one."""
    return max((int(folder.name.split(".")[-2]) for folder in find_folders(path)), default=0)


def find_state_folder(path: Path, number: int, kind: str) -> Path:
    """The path of a folder next to a small file; `kind` is SHARDS or LINKS."""
    return path.with_name(f"{path.stem}.{number}.{kind}")


def remove_folders(path: Path, *, except_for: Path | None) -> None:
    """Removes the folders next to a small file but one."""
    for folder in find_folders(path):
        if folder != except_for:
            shutil.rmtree(folder)


def read_shards(shards: Mapping[str, Any], path: Path) -> Iterator[tuple[list[str], Tensor]]:
    """Yields the sharded tensors of the stage at `path`, whole, with their names."""
    folder = path.with_name(shards["folder"])
    metadata: dict[str, Any] = read_index(folder).state_dict_metadata
    for name, key_paths in shards["places"].items():
        tensor = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        with without_warnings():
            checkpoint.load({name: tensor}, storage_reader=ShardReader(folder), no_dist=True)
        yield ["/".join(map(str, key_path)) for key_path in key_paths], tensor


def without_warnings() -> AbstractContextManager[None]:
    """torch warns of a process that is alone."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
