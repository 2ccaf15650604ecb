"""Soft masks: a step is scaled by how little a unit matters to earlier knowledge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.data.batch import Batch
from cpt.gradient_masks.base import GradientMask
from cpt.gradient_masks.importance import SampleLosses, general_losses, importance
from cpt.gradient_masks.options import SoftMaskOptions
from cpt.models.forward import check_dropout, dropout
from cpt.models.objectives import Objective
from cpt.models.units import Projection, Units, factors, find_units


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

    def raise_to(self, scores: Tensor) -> None:
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
