"""Atomic checkpoints: the trainer's state within a stage, and all that a method knows after one.

checkpoints/NUMBER-DOMAIN.ckpt  the trainer's state
stages/NUMBER.pt                the method's state; either without what is sharded, which a folder has:
NAME.COUNT.shards/              sharded tensors, by torch.distributed.checkpoint: every process writes and
                                reads its own rows; .metadata says where what is

The small file is replaced when its folder is complete, and the folder before is removed then: a kill leaves
the old ones or the new ones. Any number of processes reads them; a stage's with any strategy.

At the end of a run the exported model holds most tensors of the last stage, whose file then leaves them to

NUMBER.COUNT.linked/            hard links to the model's safetensors, so that no weights are on disk twice"""

import glob
import itertools
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from lightning.pytorch.plugins.io import TorchCheckpointIO
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as files
from torch.distributed.tensor import DTensor

from cpt.adapters.domain_store import find_domain_params, load_mapped
from cpt.core.distributed import all_reduce_max, barrier, gather_objects, is_sharded, shard_as
from cpt.core.errors import FAILED_ALLOCATION, reason
from cpt.core.files import find_damage, hash_files, sync
from cpt.core.processes import is_distributed, is_first_process, rank_and_world
from cpt.core.tensors import NamedTensors, check_state, load_tensors, save_state

log = logging.getLogger(__name__)
SHARDS = "shards"  # in the small file: the folder, its files' hashes, the places of its tensors
LINKS = "linked"  # in a stage's file: the folder, its files' hashes, by tensor its file and key there
Like = Callable[[list[Any], torch.Size], Tensor | None]  # what a tensor of a place and shape is sharded like


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints next to their place; its own writer needs room in /tmp."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return fill_tensors(super().load_checkpoint(path, *args, **kwargs), Path(path))


def save_stage(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Writes a module's state and returns it. Every process has to call it."""
    state = dict(module.state_dict(keep_vars=True))  # tied parameters are one object
    save_sharded(state, path)
    return state


def check_stage(path: Path, *, instead: str) -> None:
    """Raises ValueError if a file of a stage is missing or damaged; `instead` says what to do."""
    check_folders(check_state(path, instead=instead), path, instead=instead, full=True)


def check_folders(state: Mapping[str, Any], path: Path, *, instead: str, full: bool) -> None:
    """Raises ValueError if a file of a small file's folders is missing or has another size or, if `full`,
    another hash; `instead` says what to do."""
    for kind, shared in ((SHARDS, ""), (LINKS, f", whose files {path.parent.with_name('model')} shares")):
        if found := state.get(kind):
            folder = path.with_name(found["folder"])
            if damage := next(find_damage(folder, found["sums"], full=full), None):
                raise ValueError(f"{folder}{shared}: {damage}; {instead}")


def load_stage(path: Path) -> dict[str, Tensor]:
    """The whole state of a stage, on the CPU. Raises ValueError for files that are missing or truncated."""
    return fill_tensors(load_tensors(path), path)


def restore_stage(module: nn.Module, path: Path, *, rests: bool) -> None:
    """Loads the state of a stage into a module; `rests` maps the modules of earlier domains from the file, if
    they are whole. Of a sharded module every process has to call it, and reads its own rows. Raises
    ValueError for the state of another model or method."""
    stored = fill_linked(load_tensors(path), path)
    try:
        if rests and SHARDS not in stored:
            load_mapped(module, stored)
        else:
            like = partial(layout_of, module)
            module.load_state_dict(fill_tensors(stored, path, lambda place, shape: like(place[0], shape)))
    except RuntimeError as error:  # other names or shapes
        if FAILED_ALLOCATION.search(str(error)):
            raise
        told = f"{path} is of another model or method ({reason(error)[:200]})"
        raise ValueError(f"{told}; restore it from a backup") from error
    if rests:
        map_stored(module, path)


def map_stored(module: nn.Module, path: Path) -> None:
    """Memory-maps the stored parameters of other domains from the file of the module's state."""
    stores = find_domain_params(module)
    if stores and path.is_file():
        stored = fill_linked(load_tensors(path), path)
        for prefix, each in stores.items():
            whole = {name: f"{prefix}.{name}" for name in each._buffers}
            each.map_to({name: stored[key] for name, key in whole.items() if key in stored})


def layout_of(module: nn.Module, name: str, shape: torch.Size) -> Tensor | None:
    """The parameter that a tensor of a module's state is, or is kept of, if it has its shape."""
    owner, _, last = name.rpartition(".")
    try:
        part = module.get_submodule(owner)
    except AttributeError:  # a part that comes with the state
        return None
    if isinstance(part, NamedTensors):
        found = part.layout.get(part.parameter_of(last.replace("/", ".")))
    else:
        found = getattr(part, last, None)
    return found if found is not None and found.shape == shape else None


def save_sharded(state: Mapping[str, Any], path: Path) -> None:
    """Writes nested dicts and lists: sharded tensors to a new folder, each process its own rows, all else to
    the small file. Every process has to call it; then the disk holds them."""
    shards, places = dict[str, Tensor](), dict[str, list[list[Any]]]()
    first: dict[int, str] = {}  # of one object under several names

    def take_out(value: Any, *place: Any) -> Any:
        if isinstance(value, dict):
            return {key: take_out(each, *place, key) for key, each in value.items()}
        if isinstance(value, list):
            return [take_out(each, *place, at) for at, each in enumerate(value)]
        if not is_sharded(value):
            return value.detach() if isinstance(value, Tensor) else value
        name = first.setdefault(id(value), "/".join(map(str, place)))
        shards[name] = value.detach()
        places.setdefault(name, []).append(list(place))
        return None

    tree, folder = take_out(dict(state)), None
    if shards:
        folder = path.with_name(f"{path.stem}.{all_reduce_max(1 + newest_number(path))}.{SHARDS}")
        if is_first_process():
            folder.mkdir(parents=True)
        barrier()
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
            files.save(shards, checkpoint_id=folder, no_dist=not is_distributed())
        barrier()
        own = [*folder.glob(f"__{rank_and_world()[0]}_*")]
        if is_first_process():
            own.append(folder / ".metadata")
            for file in (*folder.iterdir(), folder):
                sync(file)
        tables = gather_objects(hash_files(folder, own))
        sums = {name: each for table in tables for name, each in table.items()}
        tree[SHARDS] = {"folder": folder.name, "sums": sums, "places": places}
    if is_first_process():
        save_state(tree, path)
        remove_folders(path, but=folder)


def tensor_folders(path: Path) -> list[Path]:
    """The folders next to a small file, of both kinds."""
    return [
        each for kind in (SHARDS, LINKS) for each in path.parent.glob(f"{glob.escape(path.stem)}.*.{kind}")
    ]


def newest_number(path: Path) -> int:
    """The number of the newest folder next to a small file, 0 without one."""
    return max((int(each.name.split(".")[-2]) for each in tensor_folders(path)), default=0)


def remove_folders(path: Path, *, but: Path | None) -> None:
    for old in tensor_folders(path):
        if old != but:
            shutil.rmtree(old)


def link_weights(path: Path, model: Path) -> None:
    """Leaves out of a stage's file the tensors that an exported model holds bit for bit, and links the files
    of the model next to it: the stage stays whole when the model is deleted. Sharded tensors that the model
    lacks are written whole. Changes nothing on a file system without hard links. For one process, which holds
    one tensor at a time in memory."""
    exported, sizes = dict[Any, tuple[str, str]](), set[int]()
    for file in sorted(model.rglob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118  (it is no mapping)
                tensor = opened.get_tensor(key)
                exported[hash_tensor(tensor)] = (file.relative_to(model).as_posix(), key)
                sizes.add(tensor.nbytes)
    state = fill_linked(load_tensors(path), path)
    shards, places = state.pop(SHARDS, None), dict[str, tuple[str, str]]()
    folder = path.with_name(f"{path.stem}.{1 + newest_number(path)}.{LINKS}")
    folder.mkdir()
    sharded = () if shards is None else read_shards(shards, path)
    whole = (([name], each) for name, each in state.items() if isinstance(each, Tensor))
    for names, tensor in itertools.chain(sharded, whole):
        found = exported.get(hash_tensor(tensor)) if tensor.nbytes in sizes else None
        if found is None and state[names[0]] is None:
            found = (f"other-{len(places)}.safetensors", "tensor")
            save_file({"tensor": tensor}, folder / found[0])
        if found is not None:
            places |= dict.fromkeys(names, found)
    try:
        for name in {name for name, _ in places.values() if not (folder / name).exists()}:
            (folder / name).parent.mkdir(exist_ok=True)
            os.link(model / name, folder / name)
    except OSError as error:
        log.info("Keeping the weights of %s and of %s: no hard links here (%s)", model, path, error.strerror)
        shutil.rmtree(folder)
        return
    if not places:
        folder.rmdir()
        return
    present = [each for each in folder.rglob("*") if each.is_file()]
    for each in (*present, *{each.parent for each in present}, folder):
        sync(each)
    linked = {"folder": folder.name, "sums": hash_files(folder, present), "tensors": places}
    save_state(state | dict.fromkeys(places) | {LINKS: linked}, path)
    remove_folders(path, but=folder)


def hash_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """The same for tensors with the same type, shape and bits."""
    array: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return tensor.dtype, tensor.shape, xxhash.xxh3_128_digest(array)


def read_shards(shards: Mapping[str, Any], path: Path) -> Iterator[tuple[list[str], Tensor]]:
    """The sharded tensors of a stage, whole, with their names."""
    folder = path.with_name(shards["folder"])
    table: dict[str, Any] = files.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, places in shards["places"].items():
        tensor = torch.empty(table[name].size, dtype=table[name].properties.dtype)
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
            files.load({name: tensor}, checkpoint_id=folder, no_dist=True)
        yield ["/".join(map(str, place)) for place in places], tensor


def fill_linked(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a stage's file holds with the tensors of its linked files, mapped into memory. Raises ValueError
    for files that are missing or truncated."""
    if (linked := state.pop(LINKS, None)) is not None:
        check_folders({LINKS: linked}, path, instead="restore it from a backup", full=False)
        with ExitStack() as stack:
            folder, used = path.with_name(linked["folder"]), set[tuple[str, str]]()
            opened = {each: stack.enter_context(safe_open(folder / each, "pt")) for each in linked["sums"]}
            for name, (file, key) in linked["tensors"].items():
                tensor = opened[file].get_tensor(key)
                state[name] = tensor.clone() if (file, key) in used else tensor  # its own, to be changed
                used.add((file, key))
    return state


def fill_tensors(state: dict[str, Any], path: Path, like: Like = lambda place, shape: None) -> dict[str, Any]:
    """What a small file holds with the sharded tensors, each sharded like another or whole; if some are
    sharded, every process has to call it. Raises ValueError for files that are missing or truncated."""
    state = fill_linked(state, path)
    if SHARDS not in state:
        return state
    check_folders(state, path, instead=f"delete {path} to train its domain again", full=False)
    shards = state.pop(SHARDS)
    tensors, folder = dict[str, Tensor](), path.with_name(shards["folder"])
    table: dict[str, Any] = files.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, places in shards["places"].items():
        size, kind = table[name].size, table[name].properties.dtype
        model = like(places[0], size)
        if isinstance(model, DTensor):
            tensors[name] = shard_as(torch.empty_like(model.to_local(), dtype=kind), model)
        else:
            tensors[name] = torch.empty(size, dtype=kind)
    alone = not is_distributed() or not any(map(is_sharded, tensors.values()))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
        files.load(tensors, checkpoint_id=folder, no_dist=alone)
    for name, places in shards["places"].items():
        for *inner, last in places:
            node: Any = state
            for key in inner:
                node = node[key]
            node[last] = tensors[name]
    return state
