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
from transformers import PreTrainedModel

from cpt.core.distributed import all_reduce_max, all_reduce_sum
from cpt.core.tensors import upcast
from cpt.data.collate import Batch, make_idle_batch, select_row
from cpt.models.fsdp import named_weights, raised_gradients
from cpt.models.objectives import Objective
from cpt.models.units import find_blocks
from cpt.models.weights import swap_weights


def estimate_fisher(
    model: PreTrainedModel, probe: Iterable[Batch], *, objective: Objective, estimator: str
) -> dict[str, Tensor]:
    """The diagonal Fisher by parameter name, from the samples of all processes; 0 where not trained."""
    return estimate_sensitivity(model, probe, objective.nll, estimator=estimator, power=2)


def estimate_sensitivity(
    model: PreTrainedModel,
    probe: Iterable[Batch],
    measured: Callable[[PreTrainedModel, Batch], Tensor],
    *,
    estimator: str,
    power: int,
) -> dict[str, Tensor]:
    """|g|^power by parameter name, averaged over the samples of all processes; 0 where a parameter is not
    trained. g is the gradient of the mean of `measured(model, batch)`, values at the scored positions, [K].

    With the estimator `per_sample`, g is of one sample; with `batch`, it is of the B samples of a batch, and
    B |g|^power is averaged. Processes of a sharded model make their passes together, and raise gradients
    before they reduce them."""
    if isinstance(model, FSDPModule):
        sums, count = sum_sharded_powers(model, probe, measured, estimator=estimator, power=power)
    else:
        sums, count = sum_powers(model, probe, measured, estimator=estimator, power=power)
    return {name: total / count.clamp_min(1) for name, total in sums.items()}


def sum_powers(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    measured: Callable[[PreTrainedModel, Batch], Tensor],
    *,
    estimator: str,
    power: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """The sums of |g|^power over the backward passes of all processes, in at least 32 bits, and the number of
    these passes."""
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = upcast(parameter).requires_grad_(parameter.requires_grad)
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    count = next(iter(sums.values())).new_zeros(())

    # Only trained weights have gradients; of the others the sums stay 0.
    trained_names = [name for name, weight in weights.items() if weight.requires_grad]
    trained_weights = [weights[name] for name in trained_names]
    trained_sums = [sums[name] for name in trained_names]
    for batch in batches:
        for part in split_batch(batch, estimator):
            # Gradients are of the copies in 32 bits.
            with swap_weights(model, weights):
                value = measured(model, part).mean()
            gradients = torch.autograd.grad(value, trained_weights, allow_unused=True, materialize_grads=True)
            size = len(part["input_ids"])
            if power == 2:
                torch._foreach_addcmul_(trained_sums, gradients, gradients, value=size)
            else:
                torch._foreach_add_(trained_sums, torch._foreach_abs(gradients), alpha=size)
            count += 1
    all_reduce_sum(*sums.values(), count)
    return sums, count


def sum_sharded_powers(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    measured: Callable[[PreTrainedModel, Batch], Tensor],
    *,
    estimator: str,
    power: int,
) -> tuple[dict[str, Tensor], Tensor]:
    """The sums of |g|^power of a sharded model over the backward passes of all processes, each of the local
    rows of a weight, and the number of these passes: gradients add the powers up as they are reduced."""
    weights = named_weights(model)
    count = torch.zeros((), device=model.device)
    for batch in batches:
        parts = split_batch(batch, estimator)
        count += sum("idle" not in part for part in parts)
        # All processes make as many passes, those with fewer parts idle ones.
        num_passes = all_reduce_max(len(parts))
        parts += [make_idle_batch(batch)] * (num_passes - len(parts))
        for part in parts:
            size = 0 if "idle" in part else len(part["input_ids"])
            with raised_gradients(model, power, weight=size):
                values = measured(model, part)
                (values.sum() / max(1, len(values))).backward()
    all_reduce_sum(count)

    sums = {}
    for name, weight in weights.items():
        sums[name] = torch.zeros_like(weight.data) if weight.grad is None else weight.grad
    model.zero_grad()
    return sums, count


def split_batch(batch: Batch, estimator: str) -> list[Batch]:
    """The parts of a batch whose gradients are raised to a power: single samples with `per_sample`, else the
    batch itself. Parts without anything to predict are left out."""
    if estimator != "per_sample":
        parts = [batch]
    else:
        parts = [select_row(batch, row) for row in range(len(batch["input_ids"]))]
    return [part for part in parts if len(part["positions"])]


def project_on_important(
    model: PreTrainedModel, importances: Mapping[str, Tensor]
) -> dict[nn.Parameter, Callable[[Tensor], Tensor]]:
    """By parameter, the projection of a movement on the entries of its most important twentieth."""

    def keep_important(importance: Tensor, movement: Tensor) -> Tensor:
        num_kept = max(1, importance.numel() // 20)
        threshold = importance.flatten().kthvalue(importance.numel() - num_kept + 1).values
        # Where fewer entries have any importance, the threshold is 0, which all others would reach.
        return movement * ((importance >= threshold) & (importance > 0)).to(movement.device)

    projections: dict[nn.Parameter, Callable[[Tensor], Tensor]] = {}
    for name, parameter in named_weights(model).items():
        if name in importances and importances[name].any():
            projections[parameter] = partial(keep_important, importances[name])
    return projections


@torch.no_grad()
def measure_block_similarity(
    model: PreTrainedModel, objective: Objective, batches: Iterable[Batch]
) -> Tensor:
    """The mean cosine of each block's input and output over all tokens of all processes, [blocks]; 1 without
    any token (ShortGPT; Men et al., 2024, arXiv 2403.03853; AdaSVD; Li et al., 2025, arXiv 2502.01403)."""
    blocks = [block for _, block in find_blocks(model)]
    states: dict[int, tuple[Tensor, Tensor]] = {}  # by the number of the block, its input and its output

    def record(number: int, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        block_input = args[0] if args else kwargs["hidden_states"]
        block_output = output[0] if isinstance(output, tuple) else output
        states[number] = block_input, block_output

    sums = torch.zeros(2, len(blocks), device=model.device)  # of cosines, and of tokens
    for batch in batches:
        states.clear()
        # Hooks are there for one pass: others must not pay for them.
        with ExitStack() as hooks:
            for number, block in enumerate(blocks):
                handle = block.register_forward_hook(partial(record, number), with_kwargs=True)
                hooks.callback(handle.remove)
            objective.nll(model, batch)

        # An idle batch keeps this process in step with processes that have more batches: it counts nowhere.
        if "idle" in batch:
            continue
        for number, (block_input, block_output) in states.items():
            # [B, T], as the mask
            cosines = functional.cosine_similarity(block_input.float(), block_output.float(), dim=-1)
            mask = batch.get("attention_mask")
            # A mask of another shape is not of these tokens: it is the 4-D mask of packed documents, or in an
            # encoder-decoder the mask of the other stack. Then all tokens count.
            if mask is None or mask.shape != cosines.shape:
                mask = torch.ones_like(cosines)
            weights = mask.to(cosines)
            sums[:, number] += torch.stack([(cosines * weights).sum(), weights.sum()])
    all_reduce_sum(sums)
    total, count = sums
    return torch.where(count > 0, total / count.clamp_min(1), 1.0)
