"""Atomic checkpoints: the trainer's state within a stage, and all that a method knows after one.

checkpoints/NUMBER-DOMAIN.ckpt  the trainer's state
stages/NUMBER.pt                what is whole in each process; of shards, which folder has them
NAME.COUNT.shards/              sharded tensors of either, by torch.distributed.checkpoint: every process
                                writes and reads its own rows; .metadata says where what is

The small file is replaced when its folder is complete, and the folder before is removed then: a kill leaves
the old ones or the new ones. Any number of processes reads them; a stage's with any strategy."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed import checkpoint as files
from torch.distributed.tensor import DTensor

from cpt.adapters.domain_store import load_mapped, map_stored
from cpt.core.distributed import all_reduce_max, barrier, gather_objects, is_sharded, shard_as
from cpt.core.files import check_archive, find_damage, hash_files, sync
from cpt.core.preemption import leave_all
from cpt.core.processes import is_distributed, is_first_process, rank_and_world
from cpt.core.tensors import NamedTensors, load_tensors, save_state
from cpt.optim.nan_guard import NanGuard
from cpt.trainer.options import minutes_of

SHARDS = "shards"  # in the small file: the folder's name, and the sizes or hashes of its files
MODULE = "module/"
Like = Callable[[str, torch.Size], Tensor | None]  # what a tensor of such a name and shape is sharded like


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints next to their place; its own writer needs room in the system's temporary
    folder."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        save_state(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return fill_in(super().load_checkpoint(path, *args, **kwargs), Path(path), lambda name, shape: None)


class StepCheckpoint(Callback):
    """Saves the trainer's state every `every` optimizer steps or minutes (`10min`, by the clock of any of the
    processes), after the last step, and when a signal asks the run to leave, which it then does. The modules
    of earlier domains, which a checkpoint has restored, are mapped from the stage file `parts` again."""

    def __init__(self, path: Path, *, every: int | str, guard: NanGuard, parts: Path | None = None) -> None:
        self.minutes = minutes_of(every)
        self.path, self.every, self.guard, self.parts, self.step = path, every, guard, parts, 0
        self.saved = monotonic()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.step = trainer.global_step
        if self.parts is not None:
            map_stored(pl_module, self.parts)
        if self.guard.policy == "rollback" and self.step == 0:
            self.save(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *args: Any) -> None:
        step, leaving = trainer.global_step, self.guard.leaving()
        if step == self.step:  # an accumulated batch
            return
        self.step = step
        if self.minutes is None:
            is_due = step % int(self.every) == 0
        else:  # what one process asks for, all hear of in the next step
            is_due, self.guard.asks = self.guard.asked, monotonic() - self.saved >= 60 * self.minutes
        if leaving or is_due or step == trainer.max_steps or trainer.should_stop:
            self.save(trainer, pl_module)
        if leaving:
            place = f"after step {step} of {trainer.max_steps} of {trainer.datamodule.domain.name}"
            leave_all(leaving, place)

    def save(self, trainer: Any, pl_module: LightningModule) -> None:
        self.guard.check_weights(trainer, pl_module.parameters())
        trainer.save_checkpoint(self.path)
        self.saved, self.guard.asks, self.guard.asked = monotonic(), False, False


def save_stage(module: nn.Module, path: Path) -> dict[str, Tensor]:
    """Writes a module's state and returns it, sharded tensors as shards. Every process has to call it."""
    state = module.state_dict()
    sharded = [name for name, value in state.items() if is_sharded(value)]
    if not sharded:
        if is_first_process():
            save_state(state, path)
            remove_others(path)
        return dict(state)
    parameters = {name: id(each) for name, each in module.named_parameters(remove_duplicate=False)}
    first: dict[Any, str] = {}  # tied parameters are written once
    names = {name: first.setdefault(parameters.get(name, name), name) for name in sharded}
    folder, (rank, _) = new_folder(path), rank_and_world()
    write_shards({key: state[key] for key in names.values()}, folder)
    own = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if is_first_process() else [])]
    sums = {name: each for table in gather_objects(hash_files(folder, own)) for name, each in table.items()}
    if is_first_process():
        plain = {name: value for name, value in state.items() if name not in names}
        shards = {"folder": folder.name, "sums": sums, "names": names, "order": [*state]}
        save_state({**plain, SHARDS: shards}, path)
        remove_others(path, folder)
    return dict(state)


def open_stage(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in a stage's file, mapped from it, and its description of shards: empty without any."""
    stored = load_tensors(path)
    return stored, stored.pop(SHARDS, {})


def check_stage(path: Path, *, instead: str) -> None:
    """Raises ValueError if a stage's file or a shard is missing or damaged; `instead` says what to do."""
    check_archive(path, instead=instead)
    _, shards = open_stage(path)
    if shards:
        folder = path.with_name(shards["folder"])
        if damage := next(find_damage(folder, shards["sums"], full=True), None):
            raise ValueError(f"{folder}: {damage}; {instead}")


def load_stage(path: Path, like: Like = lambda name, shape: None) -> dict[str, Tensor]:
    """The state after a stage, tensors whole or sharded as another, `like` its name and shape; then every
    process has to call it."""
    stored, shards = open_stage(path)
    if not shards:
        return stored
    names, read = shards["names"], read_shards(path.with_name(shards["folder"]), like)
    return {name: stored[name] if name in stored else read[names[name]] for name in shards["order"]}


def restore_stage(module: nn.Module, path: Path, *, rests: bool) -> None:
    """Loads the state of a stage into a module; `rests` maps the modules of earlier domains from the file, if
    they are whole. Of a sharded module every process has to call it, and reads its own rows."""
    stored, shards = open_stage(path)
    if rests and not shards:
        load_mapped(module, stored)
    elif any(map(is_sharded, module.parameters())):
        module.load_state_dict(load_stage(path, partial(layout_of, module)))
    else:
        module.load_state_dict(load_stage(path))
    if rests:
        map_stored(module, path)


def layout_of(module: nn.Module, name: str, shape: torch.Size) -> Tensor | None:
    """The sharded parameter that a tensor of a module's state is, or is kept of, if it has its shape."""
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


def save_shards(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes a trainer's checkpoint; every process has to call it."""
    tensors = {f"{MODULE}{name}": value for name, value in checkpoint["state_dict"].items()}
    optimizers = []
    for number, state in enumerate(checkpoint["optimizer_states"]):
        names: dict[int, dict[str, str]] = {}
        others: dict[int, dict[str, Any]] = {}
        for place, kept in state["state"].items():
            names[place], others[place] = {}, {}
            for key, value in kept.items():
                if isinstance(value, Tensor):
                    names[place][key] = f"optimizer/{number}/{place}/{key}"
                    tensors[names[place][key]] = value
                else:
                    others[place][key] = value
        optimizers.append({**state, "state": others, "tensors": names})
    folder = new_folder(path)
    write_shards(tensors, folder)
    if is_first_process():
        sizes = {each.name: each.stat().st_size for each in sorted(folder.iterdir())}
        plain = {**checkpoint, "state_dict": {}, "optimizer_states": optimizers}
        save_state({**plain, SHARDS: [folder.name, sizes]}, path)
        remove_others(path, folder)


def fill_in(checkpoint: dict[str, Any], path: Path, like: Like) -> dict[str, Any]:
    """A checkpoint with its tensors, each sharded like another or whole; if some are sharded, every process
    has to call it. Raises ValueError for files that are missing or truncated."""
    if SHARDS not in checkpoint:
        return checkpoint
    name, sizes = checkpoint.pop(SHARDS)
    folder = path.with_name(name)
    table = {each: (size, "") for each, size in sizes.items()}
    if damage := next(find_damage(folder, table, full=False), None):
        raise ValueError(f"{folder}: {damage}; delete {path} to learn its domain again")
    tensors = read_shards(folder, like)
    checkpoint["state_dict"] = {
        name.removeprefix(MODULE): value for name, value in tensors.items() if name.startswith(MODULE)
    }
    for state in checkpoint["optimizer_states"]:
        for place, names in state.pop("tensors").items():
            state["state"][place] |= {key: tensors[name] for key, name in names.items()}
    return checkpoint


def new_folder(path: Path) -> Path:
    """The next folder of a checkpoint's shards, the same in all processes."""
    there = [int(each.name.split(".")[-2]) for each in path.parent.glob(f"{path.stem}.*.{SHARDS}")]
    return path.with_name(f"{path.stem}.{all_reduce_max(1 + max(there, default=0))}.{SHARDS}")


def remove_others(path: Path, folder: Path | None = None) -> None:
    """Removes the folders of a file's shards but one."""
    for old in path.parent.glob(f"{path.stem}.*.{SHARDS}"):
        if old != folder:
            shutil.rmtree(old)


def write_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Writes tensors into a new folder, of sharded ones each process its own rows; every process has to call
    it. Then the disk holds them."""
    if is_first_process():
        folder.mkdir(parents=True)
    barrier()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
        files.save(dict(tensors), checkpoint_id=folder, no_dist=not is_distributed())
    barrier()
    if is_first_process():
        for file in (*folder.iterdir(), folder):
            sync(file)


def read_shards(folder: Path, like: Like) -> dict[str, Tensor]:
    """The tensors of a folder by name, each sharded like another or whole; if some are sharded, every process
    has to call it."""
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = files.FileSystemReader(folder).read_metadata().state_dict_metadata
    for key, stored in table.items():
        model, kind = like(key, stored.size), stored.properties.dtype
        if isinstance(model, DTensor):
            tensors[key] = shard_as(torch.empty_like(model.to_local(), dtype=kind), model)
        else:
            tensors[key] = torch.empty(stored.size, dtype=kind)
    alone = not is_distributed() or not any(map(is_sharded, tensors.values()))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
        files.load(tensors, checkpoint_id=folder, no_dist=alone)
    return tensors
