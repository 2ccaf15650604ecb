"""How much each unit of a model matters to what it knows, and a mask that protects the ones that do.

A unit's gate multiplies its activation and stands at 1; the importance of unit u in layer l is (Ke et al.,
ICLR 2023, eq. 2)

    I_lu = 1/N sum_n | dL(x_n) / dg_lu |

for a loss L that tells what is to be kept: the language-model loss of a domain, or for general knowledge
the divergence of two dropout passes (eq. 3)."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.core.collectives import sum_in_place
from cpt.data.batch import Batch, inputs_of, output_ids
from cpt.models.forward import at, divergence
from cpt.models.objectives import Objective
from cpt.models.units import Units, gate_units

SampleLosses = Callable[[PreTrainedModel, Batch], Tensor]


def sample_means(values: Tensor, batch: Batch) -> Tensor:
    """Means [B] over each sample's scored positions of values [K] there; 0 for a sample without any."""
    samples, owners = len(batch["input_ids"]), batch["rows"]
    counts = torch.bincount(owners, minlength=samples).clamp_min(1)
    return values.new_zeros(samples).index_add(0, owners, values) / counts


def domain_losses(model: PreTrainedModel, batch: Batch, *, objective: Objective) -> Tensor:
    """Each sample's mean language-model loss (nats) on its corrupted text, [B]."""
    return sample_means(objective.nll(model, batch), batch)


def general_losses(model: PreTrainedModel, batch: Batch, *, objective: Objective, compared: str) -> Tensor:
    """The proxy for general knowledge: each sample's KL(f1 || f2), [B], of two dropout passes over its
    uncorrupted ids, mean over the places where it would be scored; `compared` is `logits` or `hidden`.

    Both passes run as one batch: row n and row B + n are sample n."""
    twice = double_batch(objective.restored(batch))
    logits, hidden = objective.outputs(model, twice)
    if compared == "hidden":
        logits = at(hidden, twice["positions"])
    return sample_means(divergence(*logits.chunk(2)), batch)


def double_batch(batch: Batch) -> Batch:
    """A batch with every sample twice, [2B, T]."""
    positions = torch.cat([batch["positions"], batch["positions"] + output_ids(batch).numel()])
    return {"positions": positions, **{name: each.repeat(2, 1) for name, each in inputs_of(batch).items()}}


def importance(
    model: PreTrainedModel,
    groups: Sequence[Units],
    batches: Iterable[Batch],
    losses: SampleLosses,
    *,
    passes: int = 1,
) -> Tensor:
    """The importance of all units, group after group, [units]: the mean over the samples of all processes.

    Each sample has its own gates, and samples do not meet within a model, so that one backward pass gives
    every |dL_n/dg|. The losses [B] may come from several `passes` over a batch, one below the other."""
    device = next(model.parameters()).device
    sums = torch.zeros(sum(group.count for group in groups), device=device)
    count = torch.zeros((), device=device)
    for batch in batches:
        found = gate_gradients(model, groups, batch, losses, passes=passes).abs().sum(0)
        if "idle" not in batch:
            sums += found
            count += len(batch["input_ids"])
    sum_in_place(sums, count)
    return sums / count


def gate_gradients(
    model: PreTrainedModel, groups: Sequence[Units], batch: Batch, losses: SampleLosses, *, passes: int
) -> Tensor:
    """dL_n/dg for every sample and unit, [B, units], in float32; no other gradient is touched."""
    samples, device = batch["input_ids"].shape[0], batch["input_ids"].device
    gates = {group.name: torch.ones(samples, group.count, device=device).requires_grad_() for group in groups}
    rows = {name: gate.repeat(passes, 1) for name, gate in gates.items()}
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), gate_units(groups, rows):
        total = losses(model, batch).sum()
        return torch.cat(torch.autograd.grad(total, list(gates.values())), dim=1)
