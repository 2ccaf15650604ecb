"""`strategy=fsdp`: weights, gradients and the optimizer's state are shared out among the processes.

A thin strategy of our own on `torch.distributed.fsdp.fully_shard`. Lightning's ModelParallelStrategy shards a
module without weights in `configure_model`, once per Trainer, and knows states by the names of the model
alone; here one module is learned by a Trainer per stage, and what a method keeps of the weights (anchors,
Fisher, averages, parts) is shared out like them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.sharding import is_sharded, shard_like
from cpt.core.tensors import NamedTensors, load_tensors
from cpt.methods.base import ContinualModule
from cpt.models.fsdp import named_weights, reshard, shard_model
from cpt.trainer.costs import own_names
from cpt.trainer.shards import fill_in, save_shards


def shard_module(module: ContinualModule, mesh: DeviceMesh, *, reshard: bool) -> None:
    """Shares out a method's model and what it keeps of its weights, in place; once. What the method has added
    to the model is small, and stays whole in every process."""
    model = module.model
    if isinstance(model, FSDPModule):
        return
    added = {*model.parameters()} - {*own_weights(model).values()}
    shard_model(model, mesh, ignored=added, reshard=reshard)
    shared = {name: p for name, p in named_weights(model).items() if is_sharded(p)}
    for part in module.modules():
        if isinstance(part, NamedTensors):
            part.shard(shared)
    module.register_load_state_dict_pre_hook(share_out_state)


def own_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters by name that a model has as its authors wrote it: those that are shared out."""
    own = own_names(model)
    return {name: p for name, p in model.named_parameters() if name.replace(".base_layer", "") in own}


def shareable(module: ContinualModule) -> Iterator[Tensor]:
    """What of a method that is whole would be shared out."""
    weights = own_weights(module.model)
    yield from weights.values()
    for part in module.modules():
        if isinstance(part, NamedTensors):
            for name, tensor in part.named().items():
                like = weights.get(part.parameter_of(name))
                if like is not None and like.shape == tensor.shape:
                    yield tensor


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


def share_out_state(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Of a state that is loaded, the rows of this process."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if prefix + name in state:
            state[prefix + name] = shard_like(state[prefix + name], parameter)


class Sharded(DDPStrategy):
    """FSDP2. With `reshard`, a block's weights are freed between its forward and its backward pass.

    In a checkpoint each process has its own rows; any number of processes can go on from it."""

    lockstep = True  # every process makes as many passes as the others, and of the same text

    def __init__(self, *, reshard: bool) -> None:
        super().__init__()
        self.reshard = reshard

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        if self.world_size > 1:
            mesh = init_device_mesh(self.root_device.type, (self.world_size,))
            shard_module(module, mesh, reshard=self.reshard)
        self.model_to_device()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether a checkpoint is read when it is known which rows are whose."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return inner.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save_shards(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        reshard(self.lightning_module.model)
        found = load_tensors(checkpoint_path)
        return fill_in(found, Path(checkpoint_path), self.like)

    def like(self, name: str, shape: torch.Size) -> Tensor | None:
        """What a tensor of a checkpoint is laid out as; None: it is whole."""
        kind, _, inner = name.partition("/")
        if kind == "optimizer":
            number, place, _ = inner.split("/")
            found = parameters_of(self.optimizers[int(number)])[int(place)]
        else:
            found = layout_of(self.lightning_module, inner)
        return found if found is not None and found.shape == shape else None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(share_out_moments(optimizer, state))

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


def share_out_moments(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's whole state with, of what has an entry for each of a parameter's, the own rows."""
    parameters = parameters_of(optimizer)
    found = {
        place: {
            name: shard_like(value, parameters[place])
            if isinstance(value, Tensor) and value.shape == parameters[place].shape
            else value
            for name, value in each.items()
        }
        for place, each in state["state"].items()
    }
    return {**state, "state": found}
