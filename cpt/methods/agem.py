"""A-GEM, averaged gradient episodic memory (Chaudhry et al., ICLR 2019, eq. 11): to first order, no step may
raise the loss on a draw of earlier domains' samples.

    g <- g - (g^T g_ref / g_ref^T g_ref) g_ref     where g^T g_ref < 0

g_ref is the gradient of L_lm on samples from a memory of the domains before. `constraints: each` is GEM
(Lopez-Paz and Ranzato, NeurIPS 2017, eq. 11), with one per earlier domain, the rows of G:

    g <- g + G^T v,    v = argmin_{v >= margin} 1/2 v^T G G^T v + (G g)^T v     where an entry of G g is < 0

With `apply_to: update` the same holds for -d of the step d that is made, decay included."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpt.core.distributed import all_reduce_sum
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Constraint, Step
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.common.reservoir import Reservoir, slot_of
from cpt.methods.options import AGEMOptions

log = logging.getLogger(__name__)

SWEEPS = 1000  # over the entries of v, at most
CLOSE = 1e-12  # relative change of v that ends the sweeps


class Reference(Constraint):
    """Projects steps so that they raise none of the losses whose gradients are the references."""

    steps: Tensor

    def __init__(self, *, apply_to: str, margin: float = 0.0) -> None:
        super().__init__(apply_to=apply_to)
        self.margin = margin
        self.gradients: list[Mapping[nn.Parameter, Tensor]] = []  # the references of the current step
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))  # with a reference, and projected

    def covered(self) -> Iterable[nn.Parameter]:
        return self.gradients[0] if self.gradients else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        moved, sign = [each for _, each in steps], 1 if self.apply_to == "gradient" else -1
        references = [[found[parameter] for parameter, _ in steps] for found in self.gradients]
        products = sign * torch.stack([inner_product(moved, each) for each in references])
        against = bool((products < 0).any())
        self.steps += torch.tensor([1, against], device=self.steps.device)
        if against:
            gram = [torch.stack([inner_product(a, b) for b in references]) for a in references]
            weights = solve(torch.stack(gram), products, least=self.margin).tolist()
            for weight, reference in zip(weights, references, strict=True):
                torch._foreach_add_(moved, reference, alpha=sign * weight)

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps that were projected."""
        return {"projected": (self.steps[1] / self.steps[0].clamp_min(1)).view(1)}


class AGEM(ContinualMethod):
    """Stores samples of each domain, and constrains steps not to raise their loss."""

    sharded = False  # reference gradients are of whole weights
    options: AGEMOptions

    def __init__(self, options: AGEMOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        shape = slot_of(self.objective, self.length) | {"width": 0, "precision": "float32"}
        how: dict[str, Any] = {
            "by_domain": self.each,
            "seed": self.seed,
            "pad": self.model.config.pad_token_id or 0,
        }
        self.memory = Reservoir(samples=options.buffer_size, **shape, **how)
        self.reference = Reference(apply_to=options.apply_to, margin=options.margin)
        self.masks.append(self.reference)

    @property
    def each(self) -> bool:
        return self.options.constraints == "each"

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.each and (passes := self.domain.index) > 1:
            log.info("Computing %d more backward passes per step (method.constraints=each)", passes)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        for batch in probe:
            self.memory.add(batch, torch.empty(len(batch["positions"]), 0), domain=self.domain.index)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        earlier = self.domain.index
        sources = [*range(earlier)] if self.each else [None] * (earlier > 0)
        self.reference.gradients = [found for source in sources if (found := self.refer(source))]

    def refer(self, source: int | None) -> dict[nn.Parameter, Tensor]:
        """The mean loss's gradient by parameter on a draw from a domain's samples, or (None) from all."""
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        share = max(1, self.options.minibatch_size // self.trainer.world_size)
        slots = self.memory.draw(share, purpose=f"step {self.trainer.global_step}", domain=source)
        found, count = [torch.zeros_like(each) for each in trained], torch.zeros((), device=self.device)
        if len(slots):
            batch = self.objective.lay_out(self.memory.batch(slots))
            with torch.autocast(self.device.type, enabled=False), torch.enable_grad():
                loss = self.objective.nll(self.model, batch).sum()
            found = list(torch.autograd.grad(loss, trained, materialize_grads=True, allow_unused=True))
            count += len(batch["positions"])
        all_reduce_sum(*found, count)
        if not count:
            return {}
        torch._foreach_div_(found, count)
        return dict(zip(trained, found, strict=True))


def solve(gram: Tensor, products: Tensor, *, least: float) -> Tensor:
    """argmin over v [t] >= least of 1/2 v^T gram v + products^T v, by coordinate descent in 64 bits."""
    gram, products = gram.double().cpu(), products.double().cpu()
    found = torch.full_like(products, least)
    for _ in range(SWEEPS):
        before = found.clone()
        for k in gram.diagonal().nonzero().flatten().tolist():
            found[k] = (found[k] - (gram[k] @ found + products[k]) / gram[k, k]).clamp_min(least)
        if (found - before).abs().max() <= CLOSE * found.abs().max():
            break
    return found


def inner_product(ones: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """The inner product of two lists of tensors, a scalar in at least 32 bits."""
    pairs = zip(ones, others, strict=True)
    return torch.stack([torch.dot(a.flatten().float(), b.flatten().float()) for a, b in pairs]).sum()
