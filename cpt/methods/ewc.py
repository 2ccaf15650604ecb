"""EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017, eq. 3), and online EWC (Schwarz et al.,
ICML 2018).

    L(theta) = L_lm(theta) + lambda/2 sum_i F_i (theta_i - theta*_i)^2
    F_i      = E_x [ (dL_lm(x)/dtheta_i)^2 ]    at theta*, the model at the end of the previous domain

After each domain its Fisher F_new is merged into that of the t domains before it, so that there is one
penalty however many domains there are:

    mean:  F <- (t F + F_new) / (t + 1)         decay:  F <- gamma F + F_new

The released code (ContinualLM) squares a loss with its own penalty in it and with dropout on; here the
gradient is that of the language-model loss alone, in eval mode, and in 32 bits whatever the precision."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import PreTrainedModel

from cpt.core.collectives import agree, sum_in_place
from cpt.core.options import Options, option
from cpt.core.rules import number, one_of
from cpt.core.tensors import NamedTensors
from cpt.data.batch import Batch, idle_batch, single
from cpt.methods.base import ContinualModule, Shared
from cpt.models.objectives import Objective
from cpt.models.sharding import named_weights, squared_gradients
from cpt.models.snapshots import Snapshot, pull
from cpt.models.swapping import swap_weights

ESTIMATORS = ("per_sample", "batch")
MERGES = ("mean", "decay")


def fisher(
    model: PreTrainedModel, probe: Iterable[Batch], *, objective: Objective, estimator: str
) -> dict[str, Tensor]:
    """The diagonal Fisher by the names of the parameters, from the samples of all processes; 0 where one is
    not trained.

    `per_sample` is the mean of the samples' squared gradients; `batch` the mean over batches of B g^2, with g
    the gradient of a batch's mean loss, which is as large where the mean gradient is near 0."""
    if isinstance(model, FSDPModule):
        return sharded_fisher(model, probe, objective=objective, estimator=estimator)
    weights = {name: precise(parameter) for name, parameter in model.named_parameters()}
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    count = next(iter(sums.values())).new_zeros(())
    for batch in tqdm(probe, desc="Fisher", disable=None, leave=False):
        for part in parts_of(batch, estimator):
            with swap_weights(model, weights):
                loss = objective.nll(model, part).mean()
            gradients = gradients_of(loss, [weights[name] for name in trained])
            torch._foreach_addcmul_(
                [sums[name] for name in trained], gradients, gradients, value=len(part["input_ids"])
            )
            count += 1
    sum_in_place(*sums.values(), count)
    return {name: each / count.clamp_min(1) for name, each in sums.items()}


def sharded_fisher(
    model: PreTrainedModel, probe: Iterable[Batch], *, objective: Objective, estimator: str
) -> dict[str, Tensor]:
    """The same of a sharded model, whose processes make their passes together: gradients are squared before
    they come together. Their precision is that of the weights."""
    weights = named_weights(model)
    count = torch.zeros((), device=model.device)
    for batch in tqdm(probe, desc="Fisher", disable=None, leave=False):
        parts = list(parts_of(batch, estimator))
        parts += [idle_batch(batch)] * (agree(len(parts)) - len(parts))
        for part in parts:
            with squared_gradients(model, weight=len(part["input_ids"]) * ("idle" not in part)):
                nll = objective.nll(model, part)
                (nll.sum() / max(1, len(nll))).backward()
        count += sum("idle" not in part for part in parts)
    sum_in_place(count)
    found = {name: torch.zeros_like(w.data) if w.grad is None else w.grad for name, w in weights.items()}
    model.zero_grad()
    return {name: each / count.clamp_min(1) for name, each in found.items()}


def parts_of(batch: Batch, estimator: str) -> Iterator[Batch]:
    """What of a batch has a gradient of its own: its scored samples, or all of it."""
    return samples(batch) if estimator == "per_sample" else scored_batches([batch])


def precise(parameter: nn.Parameter) -> Tensor:
    """A parameter's values in at least 32 bits, a leaf apart from it."""
    values = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
    return values.requires_grad_(parameter.requires_grad)


def samples(batch: Batch) -> Iterator[Batch]:
    """The scored samples of a batch, a batch of one each."""
    yield from scored_batches(single(batch, row) for row in range(len(batch["input_ids"])))


def scored_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches with something to predict."""
    return (batch for batch in batches if len(batch["positions"]))


def gradients_of(loss: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradient with respect to each weight; 0 for what the loss does not depend on."""
    return list(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))


def merge_fishers(old: Tensor, new: Tensor, *, domains: Tensor, merge: str, gamma: float) -> Tensor:
    """The Fisher of so many domains and that of one more."""
    return (domains * old + new) / (domains + 1) if merge == "mean" else gamma * old + new


@dataclass(frozen=True, kw_only=True)
class EWCOptions(Options):
    """Options of EWC."""

    strength: float = option("lambda, the penalty's weight", number("0 or more"))
    estimator: str = option("squares the gradients of samples, or of batches", one_of(*ESTIMATORS))
    merge: str = option("of a domain's Fisher with that of the domains before", one_of(*MERGES))
    gamma: float = option("of merge=decay: the factor on the Fisher so far", number("0 to 1"))


class EWC(ContinualModule):
    """Pulls each weight back to where the previous domain left it, by its Fisher."""

    needs_32_bits = True  # its Fisher does
    options: EWCOptions

    def __init__(self, options: EWCOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.anchor = Snapshot(self.model, persistent=True)
        self.fisher = NamedTensors({n: torch.zeros_like(p) for n, p in self.model.named_parameters()})
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"ewc": self.penalty()}

    def penalty(self) -> Tensor:
        """lambda/2 sum_i F_i (theta_i - theta*_i)^2 over the trained parameters."""
        kept = self.anchor.named(), self.fisher.named()
        return self.options.strength * pull(self.model, *kept, elsewhere=self.anchor.offloaded)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        how = {"domains": self.domains, "merge": self.options.merge, "gamma": self.options.gamma}
        kept = self.fisher.named()
        for name, new in found.items():
            old = self.fisher.at_hand(kept[name]) if name in kept else torch.zeros_like(new)
            self.fisher.update({name: merge_fishers(old, new, **how)})
        self.domains += 1
        self.anchor.take(self.model)
