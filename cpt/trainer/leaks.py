"""How much of a stage's movement lies inside what was protected.

    leak = ||P (theta_end - theta_begin)||^2 / ||theta_end - theta_begin||^2

over the parameters of which a method or a mask protects something for a whole stage, with P what it
protects of each (`protects`). What a step should leave alone moves all the same where gradients are masked,
and an optimizer divides by entry, remembers, or decays. Beside it stands what of a random movement would
lie inside: of a protection that does nothing both are alike."""

import logging
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.core.randomness import key
from cpt.core.sharding import is_sharded
from cpt.data.batch import Batch
from cpt.methods.base import ContinualModule, Protection

log = logging.getLogger(__name__)


class Leak(Callback):
    """Keeps where what is protected began, on the CPU, and measures its movement at the stage's end; a stage
    that is gone on with has it from its checkpoint."""

    def __init__(self) -> None:
        self.began: dict[str, Tensor] = {}
        self.noted: list[float] = []  # the leak, and that of a random movement

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.global_step or self.began:
            return
        protected, model = pl_module.protects(), pl_module.model
        names = {name: each for name, each in model.named_parameters() if each in protected}
        if any(map(is_sharded, names.values())):
            log.info("with strategy=fsdp it is not measured how much moves inside what is protected")
        else:
            self.began = {name: each.detach().cpu().clone() for name, each in names.items()}

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the method's work after the domain, which protects more.
        if self.began:
            self.noted = measure_leak(pl_module, self.began, seed=key(pl_module.seed, "leak") % 2**63)

    def state_dict(self) -> dict[str, Any]:
        return {"began": self.began}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.began = dict(state["began"])


@torch.no_grad()
def measure_leak(module: ContinualModule, began: dict[str, Tensor], *, seed: int) -> list[float]:
    """The leak since these weights, by name, and that of a random movement; nothing where nothing moved."""
    protected, draw = module.protects(), torch.Generator().manual_seed(seed)
    moved, random = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for name, old in began.items():
        parameter = module.model.get_parameter(name)
        inside = protected[parameter]
        way = parameter.detach() - old.to(parameter.device)
        moved += squares(inside, way)
        random += squares(inside, torch.randn(old.shape, generator=draw).to(way))
    return [float(inside / whole) for inside, whole in (moved, random)] if moved[1] else []


def squares(inside: Protection, way: Tensor) -> Tensor:
    """Squared length of a movement inside what is protected, and of all of it."""
    norms = [torch.linalg.vector_norm(each) for each in (inside(way), way)]  # without a copy of either
    return torch.stack(norms).double().square().cpu()
