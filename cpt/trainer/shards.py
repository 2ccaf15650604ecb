"""A checkpoint of weights that are shared out: every process writes and reads its own rows, at once, by
torch.distributed.checkpoint.

CHECKPOINT.ckpt                 what is no tensor, and which folder holds the tensors
CHECKPOINT.NUMBER.shards/       of each process a file, and .metadata, which says where what is

The small file is replaced as a whole when the folder is complete, and the folder before is removed then: a
kill leaves the old ones or the new ones."""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as files

from cpt.core.collectives import agree, wait_for_others
from cpt.core.files import find_damage, sync
from cpt.core.processes import in_company, is_first_process
from cpt.core.sharding import is_sharded, lay_out, local
from cpt.core.tensors import save_state

SHARDS = "shards"  # in the small file: the folder's name, and the sizes of its files
MODULE = "module/"


def split_tensors(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a trainer's checkpoint by a name each, and all else, with those names in their place."""
    tensors = {f"{MODULE}{name}": value for name, value in checkpoint["state_dict"].items()}
    optimizers = []
    for number, state in enumerate(checkpoint["optimizer_states"]):
        names, others = {}, {}
        for place, kept in state["state"].items():
            own = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
            names[place] = {key: f"optimizer/{number}/{place}/{key}" for key in own}
            tensors |= {names[place][key]: value for key, value in own.items()}
            others[place] = {key: value for key, value in kept.items() if key not in own}
        optimizers.append({**state, "state": others, "tensors": names})
    return tensors, {**checkpoint, "state_dict": {}, "optimizer_states": optimizers}


def join_tensors(checkpoint: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The checkpoint that tensors were taken out of."""
    module = {name.removeprefix(MODULE): v for name, v in tensors.items() if name.startswith(MODULE)}
    optimizers = []
    for state in checkpoint["optimizer_states"]:
        named = state.pop("tensors")
        both = {p: kept | {k: tensors[n] for k, n in named[p].items()} for p, kept in state["state"].items()}
        optimizers.append({**state, "state": both})
    return {**checkpoint, "state_dict": module, "optimizer_states": optimizers}


def save_shards(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a trainer's checkpoint; every process has to call it."""
    tensors, others = split_tensors(checkpoint)
    folder = new_folder(path)
    write_shards(tensors, folder)
    if is_first_process():
        sizes = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
        save_state({**others, SHARDS: [folder.name, sizes]}, path)
        remove_others(path, folder)


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors into a new folder, of those that are shared out each process its own rows; every process
    has to call it. Then the disk holds them."""
    if is_first_process():
        folder.mkdir(parents=True)
    wait_for_others()
    with expecting_one_process():
        files.save(dict(tensors), checkpoint_id=folder, no_dist=not in_company())
    wait_for_others()
    if is_first_process():
        for file in (*folder.iterdir(), folder):
            sync(file)


def remove_others(path: Path, folder: Path | None = None) -> None:
    """Removes the folders of shards beside a file, but for one."""
    for old in path.parent.glob(f"{path.stem}.*.{SHARDS}"):
        if old != folder:
            shutil.rmtree(old)


def new_folder(path: Path) -> Path:
    """The next folder beside a checkpoint's file, the same in all processes."""
    there = [int(each.name.split(".")[-2]) for each in path.parent.glob(f"{path.stem}.*.{SHARDS}")]
    return path.with_name(f"{path.stem}.{agree(1 + max(there, default=0))}.{SHARDS}")


def fill_in(
    checkpoint: dict[str, Any], path: Path, like: Callable[[str, torch.Size], Tensor | None]
) -> dict[str, Any]:
    """A checkpoint with its tensors: each laid out as another, `like` its name and shape, or whole. Where
    some are to be shared out, every process has to call it. Raises ValueError for files that are gone or cut
    off."""
    if SHARDS not in checkpoint:
        return checkpoint
    name, sizes = checkpoint.pop(SHARDS)
    folder = path.with_name(name)
    table = {each: (size, "") for each, size in sizes.items()}
    if damage := next(find_damage(folder, table, full=False), None):
        raise ValueError(f"{folder}: {damage}; delete {path} to learn its domain again")
    return join_tensors(checkpoint, read_shards(folder, like))


def read_shards(folder: Path, like: Callable[[str, torch.Size], Tensor | None]) -> dict[str, Tensor]:
    """The tensors of a folder by name: each laid out as another, `like` its name and shape, or whole. Where
    some are to be shared out, every process has to call it."""
    tensors = dict(rooms(folder, like))
    alone = not any(map(is_sharded, tensors.values()))
    with expecting_one_process():
        files.load(tensors, checkpoint_id=folder, no_dist=alone or not in_company())
    return tensors


@contextmanager
def expecting_one_process() -> Iterator[None]:
    """Holds back torch's warning that there may be one process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def rooms(folder: Path, like: Callable[[str, torch.Size], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """A tensor to be read into for each that a folder holds, by its name there."""
    for key, stored in files.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        model = like(key, stored.size)
        kind = stored.properties.dtype
        if model is not None and is_sharded(model):
            yield key, lay_out(torch.empty_like(local(model), dtype=kind), model)
        else:
            yield key, torch.empty(stored.size, dtype=kind)
