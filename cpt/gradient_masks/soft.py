"""DAS's soft mask: a step is scaled by how little a unit matters to earlier knowledge (Ke et al., ICLR 2023).

A unit's gate multiplies its activation and is 1; the importance of unit u in layer l is (eq. 2)

    I_lu = 1/N sum_n | dL(x_n) / dg_lu |

for a loss L of what is to be kept: a domain's language-model loss, or for general knowledge the divergence of
two dropout passes (eq. 3)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.distributed import all_reduce_sum
from cpt.data.collate import Batch, select_inputs, select_output_ids
from cpt.gradient_masks.base import GradientMask
from cpt.models.forward import check_dropout, kl_divergence, select_positions, set_dropout
from cpt.models.objectives import Objective
from cpt.models.units import Projection, Units, find_units, gate_units, make_factors

SampleLosses = Callable[[PreTrainedModel, Batch], Tensor]


def sample_means(values: Tensor, batch: Batch) -> Tensor:
    """Means [B] over each sample's scored positions of values [K] there; 0 for a sample without any."""
    samples = len(batch["input_ids"])
    owners = batch["rows"]
    counts = torch.bincount(owners, minlength=samples).clamp_min(1)
    return values.new_zeros(samples).index_add(0, owners, values) / counts


def domain_losses(model: PreTrainedModel, batch: Batch, *, objective: Objective) -> Tensor:
    """Each sample's mean language-model loss (nats) on its corrupted text, [B]."""
    return sample_means(objective.nll(model, batch), batch)


def measure_importance(
    model: PreTrainedModel,
    groups: Sequence[Units],
    batches: Iterable[Batch],
    losses: SampleLosses,
    *,
    passes: int = 1,
) -> Tensor:
    """The importance of all units, group after group, [units]: the mean over the samples of all processes.
    Gates are per sample, so that one backward pass gives every |dL_n/dg|. The losses [B] may come from
    several `passes` over a batch, stacked along the batch."""
    device = next(model.parameters()).device
    sums = torch.zeros(sum(group.count for group in groups), device=device)
    count = torch.zeros((), device=device)
    for batch in batches:
        # An idle batch takes part in the collective passes only.
        magnitudes = gate_gradients(model, groups, batch, losses, passes=passes).abs().sum(0)
        if "idle" not in batch:
            sums += magnitudes
            count += len(batch["input_ids"])
    all_reduce_sum(sums, count)
    return sums / count


def gate_gradients(
    model: PreTrainedModel, groups: Sequence[Units], batch: Batch, losses: SampleLosses, *, passes: int
) -> Tensor:
    """dL_n/dg for every sample and unit, [B, units], in float32. Where `losses` runs the B samples several
    times as one batch [passes * B, T], a sample has the same gates in all of its passes."""
    samples = batch["input_ids"].shape[0]
    device = batch["input_ids"].device
    gates = {group.name: torch.ones(samples, group.count, device=device).requires_grad_() for group in groups}
    repeated_gates = {name: gate.repeat(passes, 1) for name, gate in gates.items()}
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), gate_units(groups, repeated_gates):
        total = losses(model, batch).sum()
        return torch.cat(torch.autograd.grad(total, list(gates.values())), dim=1)


def normalize_scores(scores: Tensor, normalization: str) -> Tensor:
    """The scores [units] of one layer and kind in [0, 1]; 0 if all equal. `tanh_abs` is the paper's
    |tanh(z)| of the z-score, high for units far below the mean too; `tanh_relu` is max(0, tanh(z))."""
    if scores.max() <= scores.min():
        return torch.zeros_like(scores)
    if normalization == "rank":
        return scores.argsort(stable=True).argsort().to(scores) / (len(scores) - 1)
    if normalization == "minmax":
        return (scores - scores.min()) / (scores.max() - scores.min())
    tanh = ((scores - scores.mean()) / scores.std()).tanh()
    return tanh.abs() if normalization == "tanh_abs" else tanh.relu()


@dataclass(frozen=True)
class Proxy:
    """Measures importance for general knowledge, by `compared` (logits, hidden; None: not measured) of two
    passes with dropout at `rate` (None: the model's own). Raises ValueError if they could not differ."""

    model: PreTrainedModel
    objective: Objective
    compared: str | None
    rate: float | None

    def __post_init__(self) -> None:
        if self.compared is not None:
            check_dropout(
                self.model, self.rate, option="proxy_dropout", alternative="general_importance=null"
            )

    def losses(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Each sample's KL(f1 || f2), [B], of two dropout passes over its uncorrupted ids, mean over its
        scored positions. Both passes run as one batch [2B, T]."""
        restored = self.objective.restore(batch)
        doubled = cast(Batch, {name: tensor.repeat(2, 1) for name, tensor in select_inputs(restored).items()})

        # Positions count the tokens of the whole batch: the second half comes after all of the first.
        num_tokens = select_output_ids(restored).numel()
        doubled["positions"] = torch.cat([restored["positions"], restored["positions"] + num_tokens])

        def compare_passes(outputs: Tensor, positions: slice) -> Tensor:
            return kl_divergence(*outputs.chunk(2))

        if self.compared == "hidden":
            _, hidden = self.objective.run(model, doubled, lambda logits: None)
            divergence = compare_passes(select_positions(hidden, doubled["positions"]), slice(None))
        else:
            divergence, _ = self.objective.run(
                model, doubled, lambda logits: logits.values(compare_passes, passes=2)
            )
        return sample_means(divergence, batch)

    def measure(self, soft: SoftMask, importance_batches: Iterable[Batch]) -> Tensor:
        """The importances of the soft mask's units, [units]; 0 if not measured."""
        if self.compared is None:
            return torch.zeros_like(soft.importance)
        with set_dropout(self.model, self.rate):
            return soft.measure(self.model, importance_batches, self.losses, passes=2)


class UnitMask(GradientMask):
    """Scales steps on the weights of units, alike in all steps of a domain."""

    static = True

    def __init__(self, groups: Sequence[Units], *, apply_to: str) -> None:
        super().__init__(apply_to=apply_to)
        self.set_groups(groups)

    def set_groups(self, groups: Sequence[Units]) -> None:
        self.groups = list(groups)
        self.sizes = [group.count for group in groups]
        self.cached_factors: list[tuple[nn.Parameter, Tensor]] | None = None

    def by_group(self, values: Tensor) -> dict[str, Tensor]:
        """Values of all units, group after group, [units], by the names of the groups."""
        return dict(zip([group.name for group in self.groups], values.split(self.sizes), strict=True))

    def masked_weights(self) -> Iterable[nn.Parameter]:
        weights = []
        for group in self.groups:
            weights += [getattr(part.module, part.attribute) for part in group.parts]
        return weights

    def activate(self, domain: int) -> None:
        self.cached_factors = None

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.cached_factors is None:
            self.cached_factors = list(self.make_unit_factors())
        return iter(self.cached_factors)

    @abstractmethod
    def make_unit_factors(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        """The factors, made once per domain."""


class SoftMask(UnitMask):
    """Scales a step on the weights of a unit of importance I by 1 - I (eq. 5). `kinds` (cpt.models.units):
    heads, neurons, outputs, tokens. A unit owns the weights that write it; for `columns` also those that
    read it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kinds: Sequence[str],
        apply_to: str,
        normalize: str,
        columns: Sequence[str] = ("heads",),
    ) -> None:
        self.normalize = normalize
        self.kinds = kinds
        self.columns = columns
        super().__init__(self.find_groups(model), apply_to=apply_to)

    def find_groups(self, model: PreTrainedModel) -> list[Units]:
        # A norm over the features of all heads, as of OLMo 2's queries, makes a head's output depend on the
        # weights of all. The gate of eq. 2 is on the output, so dL/dg is still that of one head, and a
        # step times 1 - I (eq. 5) promises of no unit that it stays as it is. HAT's hard gates do.
        units = find_units(model, self.kinds, skips_mixtures=True, needs_separation=False)
        groups = []
        for group in units:
            if group.kind not in self.columns and group.side != "out":  # only the weights that write it
                parts = tuple(part for part in group.parts if part.module is not group.gate)
                group = replace(group, parts=parts)
            groups.append(group)
        return groups

    def set_groups(self, groups: Sequence[Units]) -> None:
        super().set_groups(groups)
        self.importance = nn.Buffer(torch.zeros(sum(self.sizes)))
        self.last = nn.Buffer(torch.zeros(sum(self.sizes)))

    def watch(self, model: PreTrainedModel, projections: Sequence[Projection] | None) -> None:
        importance = self.by_group(self.importance)
        last = self.by_group(self.last)
        self.set_groups(self.find_groups(model))
        self.copy_scores(importance, self.importance)
        self.copy_scores(last, self.last)

    def copy_scores(self, previous: Mapping[str, Tensor], scores: Tensor) -> None:
        """Copies scores by group into those of all units; units that a group has gained keep theirs."""
        for name, group_scores in self.by_group(scores).items():
            if name in previous:
                group_scores[: len(previous[name])] = previous[name]

    def measure(
        self, model: PreTrainedModel, batches: Iterable[Batch], losses: SampleLosses, *, passes: int = 1
    ) -> Tensor:
        """The normalized importances [units] of the model on batches."""
        scores = measure_importance(model, self.groups, batches, losses, passes=passes)
        return torch.cat([normalize_scores(part, self.normalize) for part in scores.split(self.sizes)])

    def set_importance(self, scores: Tensor) -> None:
        self.last.copy_(scores)
        self.importance.copy_(scores)
        self.cached_factors = None

    def update_max(self, scores: Tensor) -> None:
        """Takes the maximum of the importances so far and these, [units] (eq. 4)."""
        self.set_importance(torch.maximum(self.importance, scores))
        self.last.copy_(scores)

    def gates(self) -> dict[str, Tensor]:
        return self.by_group(self.importance)

    def make_unit_factors(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        gates = self.gates()
        for group in self.groups:
            yield from make_factors(group, 1 - gates[group.name])

    def diagnostics(self) -> dict[str, Tensor]:
        measured = {f"measured/{name}": part for name, part in self.by_group(self.last).items()}
        return measured | {f"importance/{name}": part for name, part in self.gates().items()}


class ClaimedUnits(UnitMask):
    """Blocks updates to what the units claimed by earlier domains compute: the factor of a step is 1 - a for
    the weights of one unit with gate a in [0, 1], and 1 - min(a_i, a_j) between two units (eq. 2)."""

    def __init__(self, groups: Sequence[Units], *, apply_to: str) -> None:
        super().__init__(groups, apply_to=apply_to)
        self.cumulative_gates = nn.Buffer(torch.zeros(sum(self.sizes)))

    def update_max(self, gates: Tensor) -> None:
        """Claims the units of one more domain by its gates [units]."""
        self.cumulative_gates.copy_(torch.maximum(self.cumulative_gates, gates.to(self.cumulative_gates)))
        self.cached_factors = None

    def make_unit_factors(self) -> Iterable[tuple[nn.Parameter, Tensor]]:
        factors: dict[nn.Parameter, Tensor] = {}
        if not self.cumulative_gates.any():
            return factors.items()
        for group, claimed in zip(self.groups, self.cumulative_gates.split(self.sizes), strict=True):
            for parameter, factor in make_factors(group, 1 - claimed):
                if parameter in factors:  # between two units the larger one
                    factor = torch.maximum(factors[parameter], factor)
                factors[parameter] = factor
        return factors.items()

    def diagnostics(self) -> dict[str, Tensor]:
        return {f"taken/{name}": part for name, part in self.by_group(self.cumulative_gates).items()}
