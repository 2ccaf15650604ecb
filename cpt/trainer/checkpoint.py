"""Atomic checkpoints: the trainer's state within a stage, and all that a method knows after one.

checkpoints/NUMBER-DOMAIN.ckpt  the trainer's state
stages/NUMBER.pt                the method's state; either without what is sharded, which a folder has:
NAME.COUNT.shards/              sharded tensors, by torch.distributed.checkpoint: every process writes and
                                reads its own rows; .metadata says where what is

Any number of processes reads them; a stage's with any strategy. At the end of a run the file of the last
stage leaves to links (`linked_weights.py`) what the exported model holds."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from cpt.adapters.domain_store import find_domain_params, load_mapped
from cpt.core.distributed import all_reduce_max, barrier, gather_objects, is_sharded, shard_as
from cpt.core.errors import FAILED_ALLOCATION, find_reason
from cpt.core.files import ChecksumTable, hash_files, sync
from cpt.core.processes import is_distributed, is_first_process, rank_and_world
from cpt.core.shards import INDEX, ShardReader, read_index
from cpt.core.tensors import NamedTensors, load_checked_state, load_tensors, save_state
from cpt.trainer.linked_weights import fill_linked
from cpt.trainer.state_folders import (
    SHARDS,
    check_folders,
    find_newest_number,
    find_state_folder,
    remove_folders,
    without_warnings,
)

MAX_CAUSE_LENGTH = 200  # characters of a message of torch
KeyPath = list[Any]  # the keys and indices of a value in nested dicts and lists
# What a tensor of a key path and shape is sharded like; None: it is whole.
FindLayout = Callable[[KeyPath, torch.Size], Tensor | None]


def find_no_layout(key_path: KeyPath, shape: torch.Size) -> Tensor | None:
    """All tensors are whole."""
    return None


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints next to their path; its own writer needs room in /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return fill_tensors(super().load_checkpoint(path, *args, **kwargs), Path(path))


def save_stage(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Writes a module's state and returns it. Every process has to call it."""
    state = dict(module.state_dict(keep_vars=True))  # tied parameters are one object
    save_sharded(state, path)
    return state


def check_stage(path: Path, *, remedy: str) -> None:
    """Raises ValueError if a file of a stage is missing or damaged; `remedy` says what to do."""
    check_folders(load_checked_state(path, remedy=remedy), path, remedy=remedy, full=True)


def load_stage(path: Path) -> dict[str, Tensor]:
    """The whole state of a stage, on the CPU. Raises ValueError for files that are missing or truncated."""
    return fill_tensors(load_tensors(path), path)


def restore_stage(module: nn.Module, path: Path, *, stores_on_disk: bool) -> None:
    """Loads the state of a stage into a module. If it `stores_on_disk` the modules of earlier domains, they
    are memory-mapped from the file instead, if they are whole there. With a sharded module every process has
    to call it, and reads its own rows. Raises ValueError for the state of another model or method."""
    state = fill_linked(load_tensors(path), path)

    def find_layout(key_path: KeyPath, shape: torch.Size) -> Tensor | None:
        return find_layout_parameter(module, key_path[0], shape)

    try:
        if stores_on_disk and SHARDS not in state:
            load_mapped(module, state)
        else:
            module.load_state_dict(fill_tensors(state, path, find_layout))
    except RuntimeError as error:  # other names or shapes
        if FAILED_ALLOCATION.search(str(error)):
            raise
        cause = find_reason(error)[:MAX_CAUSE_LENGTH]
        raise ValueError(
            f"{path} is of another model or method ({cause}); restore it from a backup"
        ) from error
    if stores_on_disk:
        map_stored(module, path)


def map_stored(module: nn.Module, path: Path) -> None:
    """Memory-maps the stored parameters of other domains from the file of the module's state."""
    stores = find_domain_params(module)
    if not stores or not path.is_file():
        return
    state = fill_linked(load_tensors(path), path)
    for prefix, store in stores.items():
        tensors = {}
        for name in store._buffers:
            key = f"{prefix}.{name}"
            if key in state:
                tensors[name] = state[key]
        store.map_to(tensors)


def find_layout_parameter(module: nn.Module, name: str, shape: torch.Size) -> Tensor | None:
    """The parameter that a tensor of a module's state is, or is kept of, if it has its shape."""
    owner_name, _, tensor_name = name.rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:  # a part that comes with the state
        return None
    if isinstance(owner, NamedTensors):
        parameter = owner.layout.get(owner.parameter_of(tensor_name.replace("/", ".")))
    else:
        parameter = getattr(owner, tensor_name, None)
    if parameter is None or parameter.shape != shape:
        return None
    return parameter


class ShardedTensors:
    """The sharded tensors of nested dicts and lists, and their key paths."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.key_paths: dict[str, list[KeyPath]] = {}  # of each tensor by its name, several if it is shared
        self.names: dict[int, str] = {}  # by id: the first key path, joined

    def take_from(self, value: Any, *key_path: Any) -> Any:
        """The value with None in place of sharded tensors, which are stored here; others are detached."""
        if isinstance(value, dict):
            return {key: self.take_from(entry, *key_path, key) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.take_from(entry, *key_path, index) for index, entry in enumerate(value)]
        if not is_sharded(value):
            return value.detach() if isinstance(value, Tensor) else value

        name = self.names.setdefault(id(value), "/".join(map(str, key_path)))
        self.tensors[name] = value.detach()
        self.key_paths.setdefault(name, []).append(list(key_path))
        return None


def save_sharded(state: Mapping[str, Any], path: Path) -> None:
    """Writes nested dicts and lists: sharded tensors to a new folder, each process its own rows, everything
    else to the file `path`. Every process has to call it; when it returns, the files are on the disk."""
    sharded = ShardedTensors()
    whole_state = sharded.take_from(dict(state))
    folder = None
    if sharded.tensors:
        folder = find_state_folder(path, all_reduce_max(1 + find_newest_number(path)), SHARDS)
        sums = write_shards(sharded.tensors, folder)
        whole_state[SHARDS] = {"folder": folder.name, "sums": sums, "places": sharded.key_paths}
    if is_first_process():
        save_state(whole_state, path)
        remove_folders(path, except_for=folder)


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> ChecksumTable:
    """Writes sharded tensors to a new folder, each process its own rows; returns the sizes and hashes of its
    files. Every process has to call it."""
    if is_first_process():
        folder.mkdir(parents=True)
    barrier()
    with without_warnings():
        checkpoint.save(dict(tensors), checkpoint_id=folder, no_dist=not is_distributed())
    barrier()

    rank, _ = rank_and_world()
    files = [*folder.glob(f"__{rank}_*")]
    if is_first_process():
        files.append(folder / INDEX)
        for file in (*folder.iterdir(), folder):
            sync(file)
    # Each process hashes its own files, which it has just written; all need the hashes of all.
    sums: ChecksumTable = {}
    for process_sums in gather_objects(hash_files(folder, files)):
        sums.update(process_sums)
    return sums


def fill_tensors(
    state: dict[str, Any], path: Path, find_layout: FindLayout = find_no_layout
) -> dict[str, Any]:
    """`state`, read from the small file at `path`, with the tensors of its folder of shards.

    `find_layout` gives the tensor like which a tensor is sharded, or None for one that every process has
    whole. If some are sharded, every process has to call this. Raises ValueError for files that are missing
    or truncated."""
    state = fill_linked(state, path)
    if SHARDS not in state:
        return state
    check_folders(state, path, remedy=f"delete {path} to train its domain again", full=False)
    shards = state.pop(SHARDS)
    folder = path.with_name(shards["folder"])
    metadata: dict[str, Any] = read_index(folder).state_dict_metadata

    # torch loads into tensors that are there. Equal tensors are stored once, for several paths of keys.
    tensors: dict[str, Tensor] = {}
    for name, key_paths in shards["places"].items():
        size = metadata[name].size
        dtype = metadata[name].properties.dtype
        layout = find_layout(key_paths[0], size)
        if isinstance(layout, DTensor):
            tensors[name] = shard_as(torch.empty_like(layout.to_local(), dtype=dtype), layout)
        else:
            tensors[name] = torch.empty(size, dtype=dtype)

    # A tensor that is whole in this process is read by it alone, without the others.
    is_alone = not is_distributed() or not any(map(is_sharded, tensors.values()))
    with without_warnings():
        checkpoint.load(tensors, storage_reader=ShardReader(folder), no_dist=is_alone)
    for name, key_paths in shards["places"].items():
        for key_path in key_paths:
            set_value(state, key_path, tensors[name])
    return state


def set_value(tree: Any, key_path: KeyPath, value: Any) -> None:
    """Sets the value of a key path in nested dicts and lists.

    >>> tree = {"a": [1, {"b": None}]}
    >>> set_value(tree, ["a", 1, "b"], 2)
    >>> tree
    {'a': [1, {'b': 2}]}
    """
    *parents, last = key_path
    for key in parents:
        tree = tree[key]
    tree[last] = value
