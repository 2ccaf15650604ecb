"""Weights once on the disk: the exported model of a finished run holds most tensors of the last stage, whose
file then leaves them to hard links to the model's files."""

import itertools
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cpt.core.files import hash_files, sync
from cpt.core.tensor_files import open_tensors
from cpt.core.tensors import load_tensors, save_state
from cpt.trainer.state_folders import (
    LINKS,
    SHARDS,
    check_folders,
    find_newest_number,
    find_state_folder,
    read_shards,
    remove_folders,
)

log = logging.getLogger(__name__)
FileAndKey = tuple[str, str]  # of a tensor in a folder of safetensors


def link_weights(path: Path, model: Path) -> None:
    """Leaves out of a stage's file the tensors that an exported model holds bit for bit, and links the files
    of the model next to it: the stage stays whole when the model is deleted. Sharded tensors that the model
    lacks are written whole. Changes nothing on a file system without hard links. For one process, which holds
    one tensor at a time in memory."""
    # The file may be linked already, to a model that was exported before.
    exported, exported_sizes = hash_exported(model)
    state = fill_linked(load_tensors(path), path)
    shards = state.pop(SHARDS, None)
    folder = find_state_folder(path, 1 + find_newest_number(path), LINKS)
    folder.mkdir()

    linked: dict[str, FileAndKey] = {}  # by the tensor's name in the state
    sharded_tensors = () if shards is None else read_shards(shards, path)
    whole_tensors = (([name], value) for name, value in state.items() if isinstance(value, Tensor))
    for names, tensor in itertools.chain(sharded_tensors, whole_tensors):
        # Most tensors of a method's own have a size that no exported one has: these need no hash.
        entry = None
        if tensor.nbytes in exported_sizes:
            entry = exported.get(hash_tensor(tensor))
        is_sharded = state[names[0]] is None
        if entry is None and is_sharded:
            entry = (f"other-{len(linked)}.safetensors", "tensor")
            save_file({"tensor": tensor}, folder / entry[0])
        if entry is not None:
            linked.update(dict.fromkeys(names, entry))

    try:
        link_files(linked, model, folder)
    except OSError as error:
        log.info(
            "Storing the weights twice, in %s and %s: no hard links here (%s)", model, path, error.strerror
        )
        shutil.rmtree(folder)
        return
    if not linked:
        folder.rmdir()
        return

    # The folder is on disk before the small file names it: a kill in between leaves the old state.
    files = [file for file in folder.rglob("*") if file.is_file()]
    for file in (*files, *{file.parent for file in files}, folder):
        sync(file)
    links = {"folder": folder.name, "sums": hash_files(folder, files), "tensors": linked}
    save_state(state | dict.fromkeys(linked) | {LINKS: links}, path)
    remove_folders(path, except_for=folder)


def hash_exported(model: Path) -> tuple[dict[Any, FileAndKey], set[int]]:
    """File and key of the tensors of a model by their hashes, and the sizes that they have in bytes."""
    exported: dict[Any, FileAndKey] = {}
    sizes: set[int] = set()
    for file in sorted(model.rglob("*.safetensors")):
        with open_tensors(file) as opened:
            for key in opened.keys():  # noqa: SIM118  (it is not a mapping)
                tensor = opened.get_tensor(key)
                exported[hash_tensor(tensor)] = (file.relative_to(model).as_posix(), key)
                sizes.add(tensor.nbytes)
    return exported, sizes


def link_files(linked: Mapping[str, FileAndKey], model: Path, folder: Path) -> None:
    """Links the files of a model that a folder lacks. Raises OSError where the file system has no links."""
    for name in {name for name, _ in linked.values()}:
        if not (folder / name).exists():
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(model / name, folder / name)


def hash_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors of equal type, shape and bits."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(array)


def fill_linked(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """What the stage's file at `path` holds with the tensors of its linked files, mapped into memory. Raises
    ValueError for files that are missing or truncated."""
    links = state.pop(LINKS, None)
    if links is None:
        return state
    check_folders({LINKS: links}, path, remedy="restore it from a backup", full=False)
    folder = path.with_name(links["folder"])
    with ExitStack() as stack:
        opened = {name: stack.enter_context(safe_open(folder / name, "pt")) for name in links["sums"]}
        mapped: set[FileAndKey] = set()
        for name, (file, key) in links["tensors"].items():
            tensor = opened[file].get_tensor(key)
            if (file, key) in mapped:  # each name has a tensor of its own, to be changed
                tensor = tensor.clone()
            state[name] = tensor
            mapped.add((file, key))
    return state
