"""`strategy=fsdp`: weights, gradients and the optimizer's state are sharded across processes, and so are
checkpoints: every process writes and reads its own rows, by torch.distributed.checkpoint.

CHECKPOINT.ckpt             what is no tensor, and which folder holds the tensors
CHECKPOINT.NUMBER.shards/   of each process a file, and .metadata, which says where what is

The small file is replaced as a whole when the folder is complete, and the folder before is removed then: a
kill leaves the old ones or the new ones. Any number of processes can read them.

A thin strategy of our own on `torch.distributed.fsdp.fully_shard`. Lightning's ModelParallelStrategy shards a
module without weights in `configure_model`, once per Trainer, and knows states by the names of the model
alone; here one module is trained by a Trainer per stage, and what a method keeps of the weights (anchors,
Fisher, averages, parts) is sharded like them."""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import checkpoint as files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from cpt.core.distributed import all_reduce_max, barrier, is_sharded, shard_as, shard_like, to_local
from cpt.core.files import find_damage, sync
from cpt.core.processes import is_distributed, is_first_process
from cpt.core.tensors import NamedTensors, load_tensors, save_state
from cpt.models.fsdp import named_weights, reshard, shard_model
from cpt.trainer.costs import own_names

SHARDS = "shards"  # in the small file: the folder's name, and the sizes of its files
MODULE = "module/"
Like = Callable[[str, torch.Size], Tensor | None]  # what a tensor of such a name and shape is sharded like


class FSDP2Strategy(DDPStrategy):
    """FSDP2. With `reshard`, a block's weights are freed between its forward and its backward pass."""

    lockstep = True  # every process makes as many passes as the others, and of the same text

    def __init__(self, *, reshard: bool) -> None:
        super().__init__()
        self.reshard = reshard

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        model = module.model
        if self.world_size > 1 and not isinstance(model, FSDPModule):
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            # What the method has added to the model is small, and stays whole in every process.
            own = own_names(model)
            added = {p for name, p in model.named_parameters() if name.replace(".base_layer", "") not in own}
            shard_model(model, mesh, ignored=added, reshard=self.reshard)
            shared = {name: p for name, p in named_weights(model).items() if is_sharded(p)}
            for part in module.modules():
                if isinstance(part, NamedTensors):
                    part.shard(shared)
            module.register_load_state_dict_pre_hook(shard_state)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint is read when it is known which rows are whose."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save_shards(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module, parameters = self.lightning_module, [parameters_of(each) for each in self.optimizers]
        reshard(module.model)

        def like(name: str, shape: torch.Size) -> Tensor | None:
            kind, _, inner = name.partition("/")
            if kind == "optimizer":
                number, place, _ = inner.split("/")
                found: Tensor | None = parameters[int(number)][int(place)]
            else:
                found = layout_of(module, inner)
            return found if found is not None and found.shape == shape else None

        return fill_in(load_tensors(checkpoint_path), Path(checkpoint_path), like)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            own, parameters = {}, parameters_of(optimizer)
            for place, kept in state["state"].items():
                like = parameters[place]
                own[place] = {
                    name: shard_like(value, like)
                    if isinstance(value, Tensor) and value.shape == like.shape
                    else value
                    for name, value in kept.items()
                }
            optimizer.load_state_dict({**state, "state": own})

    def teardown(self) -> None:
        """As Lightning's, but the weights stay where they are."""
        reshard(self.lightning_module.model)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """An optimizer's parameters, as its state_dict counts them."""
    return [each for group in optimizer.param_groups for each in group["params"]]


def shard_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Of a state that is loaded, the rows of this process."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = shard_like(state[prefix + name], parameter)


def layout_of(module: nn.Module, name: str) -> Tensor | None:
    """The sharded parameter that a tensor of a module's state is, or is kept of."""
    owner, _, last = name.rpartition(".")
    try:
        part = module.get_submodule(owner)
    except AttributeError:  # a part that comes with the state
        return None
    if isinstance(part, NamedTensors):
        return part.layout.get(part.parameter_of(last.replace("/", ".")))
    return getattr(part, last, None)


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
    """The next folder beside a checkpoint's file, the same in all processes."""
    there = [int(each.name.split(".")[-2]) for each in path.parent.glob(f"{path.stem}.*.{SHARDS}")]
    return path.with_name(f"{path.stem}.{all_reduce_max(1 + max(there, default=0))}.{SHARDS}")


def remove_others(path: Path, folder: Path | None = None) -> None:
    """Removes the folders of shards beside a file, but for one."""
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
    for key, stored in files.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        model, kind = like(key, stored.size), stored.properties.dtype
        if model is not None and is_sharded(model):
            tensors[key] = shard_as(torch.empty_like(to_local(model), dtype=kind), model)
        else:
            tensors[key] = torch.empty(stored.size, dtype=kind)
    alone = not is_distributed() or not any(map(is_sharded, tensors.values()))
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a process that is alone
        files.load(tensors, checkpoint_id=folder, no_dist=alone)
    return tensors
