"""The strategy `fsdp`: weights, gradients, optimizer state and checkpoints are sharded across processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from cpt.core.distributed import shard_like
from cpt.core.tensors import load_tensors
from cpt.models.fsdp import Sharding, follow_sharding, reshard, shard_model
from cpt.optim.state import list_parameters
from cpt.trainer.checkpoint import fill_tensors, find_layout_parameter, save_sharded
from cpt.trainer.costs import find_original_names, restore_original_name


class FSDP2Strategy(DDPStrategy):
    """`strategy=fsdp`. With `reshard`, a block's weights are freed between its forward and its backward pass.

    A thin strategy of our own on `torch.distributed.fsdp.fully_shard`: Lightning's ModelParallelStrategy
    shards a module in `configure_model`, once per Trainer; here one module is trained by a Trainer per stage,
    and what a method keeps of the weights (anchors, Fisher, averages, parts) is sharded like them."""

    lockstep = True  # every process makes as many passes as the others, and of the same text

    def __init__(self, *, reshard: bool) -> None:
        super().__init__()
        self.reshard = reshard

    def setup(self, trainer: Trainer) -> None:
        """As DDPStrategy's, with the model sharded before it is moved to the device, which then holds
        the rows of this process alone, and before the optimizer is made of its parameters."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module: Any = self.lightning_module
        is_fit = trainer.state.fn == TrainerFn.FITTING
        self.precision_plugin.convert_module(module)
        if self.world_size > 1 and not isinstance(module.model, FSDPModule):
            self.shard(module)

        self.model_to_device()
        if is_fit:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fit:
            _optimizers_to_device(self.optimizers, self.root_device)

    def shard(self, module: Any) -> None:
        """Shards the model of a method that each process has loaded as a whole, and what the method keeps of
        its weights."""
        # What the method has added to the model is small, and stays whole in every process.
        model = module.model
        names_without_additions = find_original_names(model)
        added_parameters = set()
        for name, parameter in model.named_parameters():
            if restore_original_name(name) not in names_without_additions:
                added_parameters.add(parameter)
        shard_model(model, self.make_sharding(), ignored=added_parameters)
        follow_sharding(module, model)

    def make_sharding(self) -> Sharding:
        """The processes of this strategy, which have joined."""
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        return Sharding(mesh, reshard=self.reshard)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint is read after the setup, which decides which process has which rows."""
        return True

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save_sharded(checkpoint, Path(filepath))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        module: Any = self.lightning_module
        parameters = [list_parameters(optimizer) for optimizer in self.optimizers]
        reshard(module.model)

        def find_layout(path: list[Any], shape: torch.Size) -> Tensor | None:
            """The parameter like which the tensor at a path of keys in the checkpoint is sharded."""
            if path[0] == "state_dict":
                return find_layout_parameter(module, path[1], shape)
            # ["optimizer_states", optimizer, "state", parameter, "exp_avg"]
            parameter = parameters[path[1]][path[3]]
            return parameter if parameter.shape == shape else None

        return fill_tensors(load_tensors(checkpoint_path), Path(checkpoint_path), find_layout)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = list_parameters(optimizer)
            sharded_state: dict[int, dict[str, Any]] = {}
            for index, entries in state["state"].items():
                sharded_state[index] = shard_entries(entries, parameters[index])
            optimizer.load_state_dict({**state, "state": sharded_state})

    def teardown(self) -> None:
        """As Lightning's, but the weights stay where they are."""
        module: Any = self.lightning_module
        reshard(module.model)
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def shard_entries(entries: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """The optimizer's entries of a parameter. Entries with the shape of the parameter are sharded like it."""
    sharded = {}
    for name, value in entries.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            value = shard_like(value, parameter)
        sharded[name] = value
    return sharded
