"""DAS's soft mask: a step is scaled by how little a unit matters to earlier knowledge (Ke et al., ICLR 2023).

A unit's gate multiplies its activation and stands at 1; the importance of unit u in layer l is (Ke et al.,
ICLR 2023, eq. 2)

    I_lu = 1/N sum_n | dL(x_n) / dg_lu |

for a loss L that tells what is to be kept: the language-model loss of a domain, or for general knowledge
the divergence of two dropout passes (eq. 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.collectives import sum_in_place
from cpt.data.collate import Batch, inputs_of, output_ids
from cpt.gradient_masks.base import GradientMask
from cpt.gradient_masks.options import SoftMaskOptions
from cpt.models.forward import at, check_dropout, divergence, dropout
from cpt.models.objectives import Objective
from cpt.models.units import Projection, Units, factors, find_units, gate_units

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


def normalise(scores: Tensor, how: str) -> Tensor:
    """The scores [units] of one layer and kind brought into [0, 1]; all 0 if they are all alike.

    `tanh_abs` is the paper's footnote, |tanh(z)| with the z-score z: it rates a unit far below the mean as
    highly as one far above. `tanh_relu` is max(0, tanh(z)); `minmax` and `rank` keep the order as well."""
    if scores.max() <= scores.min():
        return torch.zeros_like(scores)
    return NORMALISATIONS[how](scores)


def z_score(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


ROUNDING = 1e-7
NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh_abs": lambda scores: z_score(scores).tanh().abs(),
    "tanh_relu": lambda scores: z_score(scores).tanh().relu(),
    "minmax": lambda scores: (scores - scores.min()) / (scores.max() - scores.min()),
    "rank": lambda scores: scores.argsort(stable=True).argsort().to(scores) / (len(scores) - 1),
}


@dataclass(frozen=True)
class Proxy:
    """How general knowledge is measured: `compared` (logits, hidden, or null: not at all) of two passes with
    dropout at `rate` (null: the model's own). Raises ValueError where these passes could not differ."""

    model: PreTrainedModel
    objective: Objective
    compared: str | None
    rate: float | None

    def __post_init__(self) -> None:
        if self.compared is not None:
            check_dropout(self.model, self.rate, option="proxy_dropout", without="general=null")

    @classmethod
    def from_options(cls, model: PreTrainedModel, objective: Objective, options: SoftMaskOptions) -> Proxy:
        return cls(model, objective, compared=options.general, rate=options.proxy_dropout)

    def losses(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Each sample's divergence [B]; raises ValueError if it is nowhere more than rounding."""
        found = general_losses(model, batch, objective=self.objective, compared=self.compared)
        if "idle" not in batch and found.max() < ROUNDING:
            raise ValueError(
                f"two dropout passes of {type(model).__name__} do not differ (KL {found.max().item():.1e}); "
                "allowed: proxy_dropout above 0, or general=null"
            )
        return found

    def measure(self, soft: SoftMask, probe: Iterable[Batch]) -> Tensor:
        """The importances of the soft mask's units for general knowledge, [units]; 0 if it is not asked
        for."""
        if self.compared is None:
            return torch.zeros_like(soft.importance)
        with dropout(self.model, self.rate):
            return soft.measure(self.model, probe, self.losses, passes=2)


def writing(group: Units) -> Units:
    """The units with only those weights that write them; tokens and outputs as they are."""
    if group.side == "out":
        return group
    return replace(group, parts=tuple(part for part in group.parts if part.module is not group.gate))


class SoftMask(GradientMask):
    """Lets of each step 1 - I of what it does to the weights that a unit of importance I owns (Ke et al.,
    ICLR 2023, eq. 5); at first all importances are 0.

    `kinds` are those of cpt.models.units: heads, neurons, outputs, tokens. A unit owns the weights that
    write it; of the kinds in `columns` also the columns of the map that reads it."""

    lasting = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kinds: Sequence[str],
        acts_on: str,
        normalise: str,
        columns: Sequence[str] = ("heads",),
    ) -> None:
        super().__init__(acts_on=acts_on)
        self.normalise = normalise
        self.kinds, self.columns = kinds, columns
        self.known: list[tuple[nn.Parameter, Tensor]] = []
        self.cover(model)

    def cover(self, model: PreTrainedModel) -> None:
        """Finds the units; none is of importance yet."""
        found = find_units(model, self.kinds)
        self.groups = [group if group.kind in self.columns else writing(group) for group in found]
        self.sizes = [group.count for group in self.groups]
        self.register_buffer("importance", torch.zeros(sum(self.sizes)))
        self.register_buffer("last", torch.zeros(sum(self.sizes)), persistent=False)
        self.known.clear()

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        before = [self.by_group(self.importance), self.by_group(self.last)]
        self.cover(model)
        for known, values in zip(before, (self.importance, self.last), strict=True):
            for name, part in self.by_group(values).items():
                own = known.get(name, part[:0])
                part[: len(own)] = own

    @classmethod
    def from_options(cls, model: PreTrainedModel, options: SoftMaskOptions) -> SoftMask:
        how = {"acts_on": options.acts_on, "normalise": options.normalise, "columns": options.columns}
        return cls(model, kinds=options.units, **how)

    def measure(
        self, model: PreTrainedModel, batches: Iterable[Batch], losses: SampleLosses, **how: int
    ) -> Tensor:
        """The normalised importances [units] of the model on batches."""
        scores = importance(model, self.groups, batches, losses, **how)
        return torch.cat([normalise(part, self.normalise) for part in scores.split(self.sizes)])

    def set(self, scores: Tensor) -> None:
        """Replaces the importances [units]."""
        self.last.copy_(scores)
        self.importance.copy_(scores)
        self.known.clear()

    def update_max(self, scores: Tensor) -> None:
        """The maximum of the importances so far and these, [units] (eq. 4)."""
        self.set(torch.maximum(self.importance, scores))
        self.last.copy_(scores)

    def gates(self) -> dict[str, Tensor]:
        """The importances by group."""
        return self.by_group(self.importance)

    def by_group(self, values: Tensor) -> dict[str, Tensor]:
        """Values [units] by group."""
        parts = values.split(self.sizes)
        return {group.name: part for group, part in zip(self.groups, parts, strict=True)}

    def activate(self, domain: int) -> None:
        self.known.clear()

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if not self.known:
            gates = self.gates()
            self.known = [each for group in self.groups for each in factors(group, 1 - gates[group.name])]
        return iter(self.known)

    def diagnostics(self) -> dict[str, Tensor]:
        """The importances, and those that were measured last, before they were joined to the others."""
        measured = {f"measured/{name}": part for name, part in self.by_group(self.last).items()}
        return measured | {f"importance/{name}": part for name, part in self.gates().items()}
