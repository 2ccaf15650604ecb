"""How much something that a model gives depends on each of its weights: the mean over samples of the
squared or absolute gradient. Of a loss and squared it is the diagonal Fisher."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm
from transformers import PreTrainedModel

from cpt.core.collectives import agree, sum_in_place
from cpt.core.tensors import precise
from cpt.data.collate import Batch, idle_batch, single
from cpt.models.objectives import Objective
from cpt.models.sharding import named_weights, raised_gradients
from cpt.models.swapping import swap_weights

Measured = Callable[[PreTrainedModel, Batch], Tensor]  # a number for each scored position of a batch, [K]


def fisher(
    model: PreTrainedModel, probe: Iterable[Batch], *, objective: Objective, estimator: str
) -> dict[str, Tensor]:
    """The diagonal Fisher by the names of the parameters, from the samples of all processes; 0 where one is
    not trained."""
    return sensitivity(model, probe, objective.nll, estimator=estimator, power=2, label="Fisher")


def sensitivity(
    model: PreTrainedModel,
    probe: Iterable[Batch],
    measured: Measured,
    *,
    estimator: str,
    power: int,
    label: str,
) -> dict[str, Tensor]:
    """|g|^power by the names of the parameters, g the gradient of the mean of what is measured of a sample,
    averaged over the samples of all processes; 0 where a parameter is not trained.

    `per_sample` is the mean over samples; `batch` the mean over batches of B |g|^power, with g the gradient
    of a batch's mean, which is as large where the mean gradient is near 0."""
    if isinstance(model, FSDPModule):
        return sharded_sensitivity(model, probe, measured, estimator=estimator, power=power, label=label)
    weights = {name: apart(parameter) for name, parameter in model.named_parameters()}
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    count = next(iter(sums.values())).new_zeros(())
    for batch in tqdm(probe, desc=label, disable=None, leave=False):
        for part in parts_of(batch, estimator):
            with swap_weights(model, weights):
                value = measured(model, part).mean()
            gradients, size = gradients_of(value, [weights[name] for name in trained]), len(part["input_ids"])
            own = [sums[name] for name in trained]
            if power == 2:
                torch._foreach_addcmul_(own, gradients, gradients, value=size)
            else:
                torch._foreach_add_(own, torch._foreach_abs(gradients), alpha=size)
            count += 1
    sum_in_place(*sums.values(), count)
    return {name: each / count.clamp_min(1) for name, each in sums.items()}


def sharded_sensitivity(
    model: PreTrainedModel,
    probe: Iterable[Batch],
    measured: Measured,
    *,
    estimator: str,
    power: int,
    label: str,
) -> dict[str, Tensor]:
    """The same of a sharded model, whose processes make their passes together: gradients are raised to the
    power before they come together. Their precision is that of the weights."""
    weights = named_weights(model)
    count = torch.zeros((), device=model.device)
    for batch in tqdm(probe, desc=label, disable=None, leave=False):
        parts = list(parts_of(batch, estimator))
        parts += [idle_batch(batch)] * (agree(len(parts)) - len(parts))
        for part in parts:
            with raised_gradients(model, power, weight=len(part["input_ids"]) * ("idle" not in part)):
                values = measured(model, part)
                (values.sum() / max(1, len(values))).backward()
        count += sum("idle" not in part for part in parts)
    sum_in_place(count)
    found = {name: torch.zeros_like(w.data) if w.grad is None else w.grad for name, w in weights.items()}
    model.zero_grad()
    return {name: each / count.clamp_min(1) for name, each in found.items()}


def parts_of(batch: Batch, estimator: str) -> Iterator[Batch]:
    """What of a batch has a gradient of its own: its scored samples, or all of it."""
    return samples(batch) if estimator == "per_sample" else scored_batches([batch])


def apart(parameter: nn.Parameter) -> Tensor:
    """A parameter's values in at least 32 bits, a leaf apart from it."""
    return precise(parameter).requires_grad_(parameter.requires_grad)


def samples(batch: Batch) -> Iterator[Batch]:
    """The scored samples of a batch, a batch of one each."""
    yield from scored_batches(single(batch, row) for row in range(len(batch["input_ids"])))


def scored_batches(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches with something to predict."""
    return (batch for batch in batches if len(batch["positions"]))


def gradients_of(value: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradient with respect to each weight; 0 for what the value does not depend on."""
    return list(torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True))


def keep_important(
    model: PreTrainedModel, importances: Mapping[str, Tensor]
) -> dict[nn.Parameter, Callable[[Tensor], Tensor]]:
    """By parameter of which some entries are known to matter: what of a movement lies in its most important
    twentieth."""
    return {
        parameter: partial(within_most, importances[name])
        for name, parameter in named_weights(model).items()
        if name in importances and importances[name].any()
    }


def within_most(importance: Tensor, way: Tensor) -> Tensor:
    """A movement where the importance is among the largest twentieth, and above 0."""
    count = max(1, importance.numel() // 20)
    least = importance.flatten().kthvalue(importance.numel() - count + 1).values
    return way * ((importance >= least) & (importance > 0)).to(way.device)
