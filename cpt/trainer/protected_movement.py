"""How much of a stage's movement lies in the subspace that a method or a mask protects."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.core.distributed import is_sharded
from cpt.core.randomness import torch_seed
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod

log = logging.getLogger(__name__)


class ProtectedMovement(Callback):
    """The share of a stage's movement that lies in the subspace that a method or a mask protects,

        ||P (theta_end - theta_begin)||^2 / ||theta_end - theta_begin||^2

    over the parameters with a projection P (`protected_subspace`), and that of a random movement: with
    masked gradients an optimizer still moves protected directions, by its division by entry, momentum and
    weight decay."""

    def __init__(self) -> None:
        self.initial_weights: dict[str, Tensor] = {}  # of the protected parameters, on the CPU
        self.shares: list[float] = []  # of the movement, and of a random one

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        if trainer.global_step > 0 or self.initial_weights:
            return
        projections = pl_module.protected_subspace()
        protected = {}
        for name, parameter in pl_module.model.named_parameters():
            if parameter in projections:
                protected[name] = parameter

        if any(map(is_sharded, protected.values())):
            log.info("Movement in the protected subspace is not measured with strategy=fsdp")
            return
        for name, parameter in protected.items():
            self.initial_weights[name] = parameter.detach().cpu().clone()

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if self.initial_weights:  # before the method's work after the domain, which protects more
            seed = torch_seed(pl_module.seed, "leak")
            self.shares = compute_protected_shares(pl_module, self.initial_weights, seed=seed)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.initial_weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.initial_weights = dict(state["began"])


@torch.no_grad()
def compute_protected_shares(
    module: ContinualMethod, initial_weights: Mapping[str, Tensor], *, seed: int
) -> list[float]:
    """The protected share of the movement since the initial weights, and of a random movement; empty if
    nothing moved."""
    projections = module.protected_subspace()
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(2, 2, dtype=torch.float64)  # [actual or random movement, its protected part or all]
    for name, initial_weight in initial_weights.items():
        parameter = module.model.get_parameter(name)
        project = projections[parameter]
        movement = parameter.detach() - initial_weight.to(parameter.device)
        random_movement = torch.randn(initial_weight.shape, generator=generator).to(movement)

        for row, values in enumerate((movement, random_movement)):
            protected_norm = torch.linalg.vector_norm(project(values))
            norms = torch.stack([protected_norm, torch.linalg.vector_norm(values)])
            sums[row] += norms.double().square().cpu()

    has_moved = bool(sums[0, 1])
    if not has_moved:
        return []
    return [float(protected / total) for protected, total in sums]
