"""A-GEM, averaged gradient episodic memory (Chaudhry et al., ICLR 2019, eq. 11): a step must not raise the
loss on a draw of earlier domains' samples, to first order.

    g <- g - (g^T g_ref / g_ref^T g_ref) g_ref     where g^T g_ref < 0

g_ref is the gradient of L_lm on samples from a memory of the domains before. With `acts_on: update` the
same holds for the step d that is made, decay included: d <- d - (d^T g_ref / g_ref^T g_ref) g_ref where d^T
g_ref > 0. Under Adam a gradient that is projected gives a step that is not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.collectives import sum_in_place
from cpt.core.options import Options, option
from cpt.core.rules import one_of, whole
from cpt.data.batch import Batch
from cpt.masks.base import Constraint, Step
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.reservoir import Reservoir, slot_of


@dataclass(frozen=True, kw_only=True)
class AGEMOptions(Options):
    """Options of A-GEM."""

    memory: int = option("samples of all domains so far that are kept", whole(1))
    draw: int = option("samples of a reference gradient, over all processes", whole(1))
    acts_on: str = option("what is projected: the gradient, or the step", one_of("gradient", "update"))


class Reference(Constraint):
    """Takes out of a step what raises the loss whose gradient is g_ref."""

    def __init__(self, *, acts_on: str) -> None:
        super().__init__(acts_on=acts_on)
        self.gradients: dict[nn.Parameter, Tensor] = {}  # g_ref of the step at hand
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))  # with a reference, and projected

    def covered(self) -> Iterable[nn.Parameter]:
        return self.gradients

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        moved = [each for _, each in steps]
        reference = [self.gradients[parameter] for parameter, _ in steps]
        product, length = dot(moved, reference), dot(reference, reference)
        against = product < 0 if self.acts_on == "gradient" else product > 0
        self.steps += torch.stack([torch.ones_like(against), against]).to(self.steps)
        if against:
            torch._foreach_sub_(moved, torch._foreach_mul(reference, product / length))

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps that were projected."""
        return {"projected": (self.steps[1] / self.steps[0].clamp_min(1)).view(1)}


class AGEM(ContinualModule):
    """Keeps samples of each domain, and steps that do not raise their loss."""

    sharded = False  # a reference gradient is one of whole weights
    options: AGEMOptions

    def __init__(self, options: AGEMOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        shape = {**slot_of(self.objective, self.length), "width": 0}
        pad = self.model.config.pad_token_id or 0
        self.memory = Reservoir(samples=options.memory, **shape, precision="float32", seed=self.seed, pad=pad)
        self.reference = Reference(acts_on=options.acts_on)
        self.masks.append(self.reference)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        for batch in probe:
            self.memory.add(batch, torch.empty(len(batch["positions"]), 0))

    def gradients(self, optimizer: Optimizer) -> None:
        self.reference.gradients = self.refer() if self.domain.index > 0 else {}

    def refer(self) -> dict[nn.Parameter, Tensor]:
        """g_ref by parameter: the gradient of the mean loss on all that the processes have drawn."""
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        share = max(1, self.options.draw // self.trainer.world_size)
        slots = self.memory.draw(share, purpose=f"step {self.trainer.global_step}")
        found, count = [torch.zeros_like(each) for each in trained], torch.zeros((), device=self.device)
        if len(slots):
            batch = self.objective.lay_out(self.memory.batch(slots))
            with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
                loss = self.objective.nll(self.model, batch).sum()
            found = list(torch.autograd.grad(loss, trained, materialize_grads=True, allow_unused=True))
            count += len(batch["positions"])
        sum_in_place(*found, count)
        if not count:
            return {}
        torch._foreach_div_(found, count)
        return dict(zip(trained, found, strict=True))


def dot(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The inner product of two lists of tensors, a scalar in at least 32 bits."""
    pairs = zip(ones, others, strict=True)
    return torch.stack([torch.dot(a.flatten().float(), b.flatten().float()) for a, b in pairs]).sum()
