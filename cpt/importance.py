"""How much each unit of a model matters to what it knows, and a mask that protects the ones that do.

A unit's gate multiplies its activation and stands at 1; the importance of unit u in layer l is (Ke et al.,
ICLR 2023, eq. 2)

    I_lu = 1/N sum_n | dL(x_n) / dg_lu |

for a loss L that tells what is to be kept: the language-model loss of a domain, or for general knowledge
the divergence of two dropout passes (eq. 3)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from cpt.blocks import Units, factors, gated, units
from cpt.dropout import check_dropout, dropout
from cpt.masks import GradientMask
from cpt.model import divergence, outputs_at, token_nll
from cpt.objectives import Batch, Objective
from cpt.options import choice

SampleLosses = Callable[[PreTrainedModel, Batch], Tensor]


def sample_means(values: Tensor, batch: Batch) -> Tensor:
    """Means [B] over each sample's scored positions of values [K] there; 0 for a sample without any."""
    samples, length = batch["input_ids"].shape
    owners = batch["positions"] // length
    counts = torch.bincount(owners, minlength=samples).clamp_min(1)
    return values.new_zeros(samples).index_add(0, owners, values) / counts


def domain_losses(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Each sample's mean language-model loss (nats) on its corrupted text, [B]."""
    return sample_means(token_nll(model, batch), batch)


def general_losses(model: PreTrainedModel, batch: Batch, *, ids: Tensor, compared: str) -> Tensor:
    """The proxy for general knowledge: each sample's KL(f1 || f2), [B], of two dropout passes over its ids
    [B, T], mean over the places where it would be scored; `compared` is `logits` or `hidden`.

    Both passes run as one batch: row n and row B + n are sample n."""
    twice = doubled(batch, ids)
    logits, hidden = outputs_at(model, twice)
    if compared == "hidden":
        logits = hidden.flatten(0, 1).index_select(0, twice["positions"])
    return sample_means(divergence(*logits.chunk(2)), batch)


def doubled(batch: Batch, ids: Tensor) -> Batch:
    """A batch with every sample twice, [2B, T]; ids [B, T] in place of its own."""
    positions = torch.cat([batch["positions"], batch["positions"] + ids.numel()])
    twice = {name: batch[name].repeat(2, 1) for name in ("attention_mask",) if name in batch}
    return {"input_ids": ids.repeat(2, 1), "positions": positions, **twice}


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
        sums += gate_gradients(model, groups, batch, losses, passes=passes).abs().sum(0)
        count += len(batch["input_ids"])
    if distributed.is_initialized():
        distributed.all_reduce(sums)
        distributed.all_reduce(count)
    return sums / count


def gate_gradients(
    model: PreTrainedModel, groups: Sequence[Units], batch: Batch, losses: SampleLosses, *, passes: int
) -> Tensor:
    """dL_n/dg for every sample and unit, [B, units], in float32; no other gradient is touched."""
    samples, device = batch["input_ids"].shape[0], batch["input_ids"].device
    gates = {group.name: torch.ones(samples, group.count, device=device).requires_grad_() for group in groups}
    rows = {name: gate.repeat(passes, 1) for name, gate in gates.items()}
    with torch.enable_grad(), torch.autocast(device.type, enabled=False), gated(groups, rows):
        total = losses(model, batch).sum()
        return torch.cat(torch.autograd.grad(total, list(gates.values())), dim=1)


def normalised(scores: Tensor, how: str) -> Tensor:
    """The scores [units] of one layer and kind brought into [0, 1]; all 0 if they are all alike.

    `tanh_abs` is the paper's footnote, |tanh(z)| with the z-score z: it rates a unit far below the mean as
    highly as one far above. `tanh_relu` is max(0, tanh(z)); `minmax` and `rank` keep the order as well."""
    if scores.max() <= scores.min():
        return torch.zeros_like(scores)
    return NORMALISATIONS[how](scores)


def z_score(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std()


COMPARED = ("logits", "hidden")
READ = ("heads", "neurons")  # units within a sub-layer, which another map of it reads
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
            choice("general", self.compared, allowed=(*COMPARED, "null"))
            check_dropout(self.model, self.rate, option="proxy_dropout", without="general=null")

    def losses(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        """Each sample's divergence [B]; raises ValueError if it is nowhere more than rounding."""
        found = general_losses(model, batch, ids=self.objective.uncorrupted(batch), compared=self.compared)
        if found.max() < ROUNDING:
            raise ValueError(
                f"two dropout passes of {type(model).__name__} do not differ (KL {found.max().item():.1e}); "
                "allowed: proxy_dropout above 0, or general=null"
            )
        return found

    def measure(self, soft: "SoftMask", probe: Iterable[Batch]) -> Tensor:
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

    `kinds` are those of cpt.blocks: heads, neurons, outputs, tokens. A unit owns the weights that write it;
    of the kinds in `columns` also the columns of the map that reads it."""

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
        self.normalise = choice("normalise", normalise, allowed=tuple(NORMALISATIONS))
        if not set(columns) <= set(READ):
            raise ValueError(f"method.columns={list(columns)}; allowed: some of {', '.join(READ)}, or []")
        self.groups = [group if group.kind in columns else writing(group) for group in units(model, kinds)]
        self.sizes = [group.count for group in self.groups]
        self.register_buffer("importance", torch.zeros(sum(self.sizes)))
        self.register_buffer("last", torch.zeros(sum(self.sizes)), persistent=False)
        self.known: list[tuple[nn.Parameter, Tensor]] = []

    def measure(
        self, model: PreTrainedModel, batches: Iterable[Batch], losses: SampleLosses, **how: int
    ) -> Tensor:
        """The normalised importances [units] of the model on batches."""
        scores = importance(model, self.groups, batches, losses, **how)
        return torch.cat([normalised(part, self.normalise) for part in scores.split(self.sizes)])

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
