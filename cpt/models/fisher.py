"""Importance of weights and blocks: the diagonal Fisher, mean absolute gradients, and how much a block
changes its input."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from cpt.core.distributed import all_reduce_max, all_reduce_sum
from cpt.core.tensors import precise
from cpt.data.collate import Batch, idle_batch, single
from cpt.models.fsdp import named_weights, raised_gradients
from cpt.models.objectives import Objective
from cpt.models.units import find_blocks
from cpt.models.weights import swap_weights


def estimate_fisher(
    model: PreTrainedModel, probe: Iterable[Batch], *, objective: Objective, estimator: str
) -> dict[str, Tensor]:
    """The diagonal Fisher by parameter name, from the samples of all processes; 0 where not trained."""
    return estimate_sensitivity(model, probe, objective.nll, estimator=estimator, power=2, label="Fisher")


def estimate_sensitivity(
    model: PreTrainedModel,
    probe: Iterable[Batch],
    measured: Callable[[PreTrainedModel, Batch], Tensor],
    *,
    estimator: str,
    power: int,
    label: str,
) -> dict[str, Tensor]:
    """|g|^power by parameter name, g the gradient of the mean of what is `measured` at scored positions, [K],
    averaged over the samples of all processes; 0 where a parameter is not trained.

    `per_sample`, g is of one sample; `batch`, of B samples, and B |g|^power is averaged. Processes of a
    sharded model make their passes together, and raise gradients before they reduce them."""
    sharded = isinstance(model, FSDPModule)
    if sharded:
        weights: dict[str, Tensor] = dict(named_weights(model))
        count = torch.zeros((), device=model.device)
    else:  # leaves in at least 32 bits
        weights = {n: precise(p).requires_grad_(p.requires_grad) for n, p in model.named_parameters()}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        count = next(iter(sums.values())).new_zeros(())
    trained = [name for name, weight in weights.items() if weight.requires_grad]
    for batch in tqdm(probe, desc=label, disable=None, leave=False):
        parts = split_batch(batch) if estimator == "per_sample" else [batch] * bool(len(batch["positions"]))
        if sharded:
            count += sum("idle" not in part for part in parts)
            parts += [idle_batch(batch)] * (all_reduce_max(len(parts)) - len(parts))
        for part in parts:
            size = len(part["input_ids"])
            if sharded:
                with raised_gradients(model, power, weight=size * ("idle" not in part)):
                    values = measured(model, part)
                    (values.sum() / max(1, len(values))).backward()
                continue
            with swap_weights(model, weights):
                value = measured(model, part).mean()
            leaves, own = [weights[name] for name in trained], [sums[name] for name in trained]
            gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            if power == 2:
                torch._foreach_addcmul_(own, gradients, gradients, value=size)
            else:
                torch._foreach_add_(own, torch._foreach_abs(gradients), alpha=size)
            count += 1
    if sharded:
        all_reduce_sum(count)
        sums = {name: torch.zeros_like(w.data) if w.grad is None else w.grad for name, w in weights.items()}
        model.zero_grad()
    else:
        all_reduce_sum(*sums.values(), count)
    return {name: each / count.clamp_min(1) for name, each in sums.items()}


def split_batch(batch: Batch) -> list[Batch]:
    """The samples of a batch that have something to predict, a batch of one each."""
    alone = (single(batch, row) for row in range(len(batch["input_ids"])))
    return [each for each in alone if len(each["positions"])]


def project_on_important(
    model: PreTrainedModel, importances: Mapping[str, Tensor]
) -> dict[nn.Parameter, Callable[[Tensor], Tensor]]:
    """By parameter, the projection of a movement on the entries of its most important twentieth."""

    def within_most(importance: Tensor, way: Tensor) -> Tensor:
        count = max(1, importance.numel() // 20)
        least = importance.flatten().kthvalue(importance.numel() - count + 1).values
        return way * ((importance >= least) & (importance > 0)).to(way.device)

    own = {p: importances[name] for name, p in named_weights(model).items() if name in importances}
    return {parameter: partial(within_most, each) for parameter, each in own.items() if each.any()}


@torch.no_grad()
def measure_similarity(model: PreTrainedModel, objective: Objective, batches: Iterable[Batch]) -> Tensor:
    """The mean cosine of each block's input and output over all tokens of all processes, [blocks]; 1 without
    any token (ShortGPT; Men et al., 2024, arXiv 2403.03853; AdaSVD; Li et al., 2025, arXiv 2502.01403)."""
    layers, seen = [layer for _, layer in find_blocks(model)], {}

    def note(place: int, module: nn.Module, args: tuple, given: dict[str, Any], made: Any) -> None:
        read = args[0] if args else given["hidden_states"]
        seen[place] = read, made[0] if isinstance(made, tuple) else made

    sums = torch.zeros(2, len(layers), device=model.device)
    for batch in batches:
        with ExitStack() as hooks:
            for place, layer in enumerate(layers):
                handle = layer.register_forward_hook(partial(note, place), with_kwargs=True)
                hooks.callback(handle.remove)
            objective.nll(model, batch)
        for place, (given, made) in seen.items() if "idle" not in batch else ():
            cosines = functional.cosine_similarity(given.float(), made.float(), dim=-1)  # [B, T]
            present = batch.get("attention_mask")
            if present is None or present.shape != cosines.shape:  # a block mask, or the other stack's
                present = torch.ones_like(cosines)
            sums[:, place] += torch.stack([(cosines * present.to(cosines)).sum(), present.to(cosines).sum()])
        seen.clear()
    all_reduce_sum(sums)
    total, count = sums
    return torch.where(count > 0, total / count.clamp_min(1), 1.0)
