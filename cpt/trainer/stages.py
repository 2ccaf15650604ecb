"""The file of a stage: all that a method knows after it, whole, or where weights are shared out in shards.

stages/NUMBER.pt                what is whole in each process; of shards, which folder holds them
stages/NUMBER.COUNT.shards/     what is shared out: every process writes its own rows, at once

The file is there when the folder is complete, and goes before it: a stage is there as a whole or not at all.
Any number of processes reads it, with any strategy."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cpt.adapters.domain_store import load_mapped, map_stored
from cpt.core.collectives import gather_objects
from cpt.core.files import Table, check_archive, find_damage, hash_files
from cpt.core.processes import is_first_process, rank_and_world
from cpt.core.sharding import is_sharded
from cpt.core.tensors import load_tensors, save_state
from cpt.trainer.sharding import layout_of
from cpt.trainer.shards import SHARDS, new_folder, read_shards, remove_others, write_shards

Like = Callable[[str, torch.Size], Tensor | None]


def save_stage(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Writes a module's state; gives it, of what is shared out the own rows. Every process has to call it."""
    state = module.state_dict()
    if not any(map(is_sharded, state.values())):
        if is_first_process():
            save_state(state, path)
            remove_others(path)
        return dict(state)
    names = names_in_shards(module, state)
    folder = new_folder(path)
    write_shards({key: state[key] for key in names.values()}, folder)
    sums = sum_up(folder)
    if is_first_process():
        plain = {name: value for name, value in state.items() if name not in names}
        told = {"folder": folder.name, "sums": sums, "names": names, "order": [*state]}
        save_state({**plain, SHARDS: told}, path)
        remove_others(path, folder)
    return dict(state)


def names_in_shards(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, str]:
    """What of a state is shared out, and the name that it is written by: of what is tied the first."""
    parameters = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
    first: dict[Any, str] = {}
    shared = [name for name, value in state.items() if is_sharded(value)]
    return {name: first.setdefault(parameters.get(name, name), name) for name in shared}


def sum_up(folder: Path) -> Table:
    """Size and hash of the files in a folder, of which each process reads its own."""
    rank, _ = rank_and_world()
    own = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if is_first_process() else [])]
    return {name: each for table in gather_objects(hash_files(folder, own)) for name, each in table.items()}


def check_stage(path: Path, *, instead: str) -> None:
    """Raises ValueError if the file of a stage or one of its shards is gone or damaged; `instead` says what
    to do about it."""
    check_archive(path, instead=instead)
    _, shards = open_stage(path)
    if not shards:
        return
    folder = path.with_name(shards["folder"])
    if damage := next(find_damage(folder, shards["sums"], full=True), None):
        raise ValueError(f"{folder}: {damage}; {instead}")


def open_stage(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a stage's file has of its state, mapped from it, and what it says of shards: nothing where it has
    all."""
    stored = load_tensors(path)
    return stored, stored.pop(SHARDS, {})


def is_whole(name: str, shape: torch.Size) -> None:
    """Has a tensor be read as a whole."""


def read_stage(path: Path, like: Like = is_whole) -> dict[str, Tensor]:
    """The state after a stage, all of it or each tensor laid out as another, `like` its name and shape; then
    every process has to call it."""
    stored, shards = open_stage(path)
    if not shards:
        return stored
    names, read = shards["names"], read_shards(path.with_name(shards["folder"]), like)
    return {name: stored[name] if name in stored else read[names[name]] for name in shards["order"]}


def restore_stage(module: nn.Module, path: Path, *, rests: bool) -> None:
    """Gives a module the state of a stage; `rests` has the parts that it keeps lie in the file, if they are
    there as a whole. Of a module that is shared out every process has to call it, and reads its own rows."""
    stored, shards = open_stage(path)

    def like(name: str, shape: torch.Size) -> Tensor | None:
        found = layout_of(module, name)
        return found if found is not None and found.shape == shape else None

    if rests and not shards:
        load_mapped(module, stored)
    else:
        is_shared_out = any(map(is_sharded, module.parameters()))
        module.load_state_dict(read_stage(path, like if is_shared_out else is_whole))
    if rests:
        map_stored(module, path)
