"""HAT, hard attention to the task (Serra et al., ICML 2018, section 2), on a whole model or in adapters.

    h_l    <- a_l^t h_l,   a_l^t = sigmoid(s e_l^t)                        a gate per unit, e per domain
    step_ij <- (1 - min(a_i^(<t), a_j^(<t))) step_ij                       units of earlier domains stay
    L      = L_lm + c sum a^t (1 - a^(<t)) / sum (1 - a^(<t))              and few units are used

s rises from 1/s_max to s_max over a domain's steps (formulas: cpt.adapters.gates). Parameters that no unit
owns (embeddings, norms, the head) are frozen after the first domain; then the model of an earlier domain
never changes, bit for bit. The base has all gates open, in adapters all gates closed."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import bottleneck, export
from cpt.adapters.domain_store import DomainParams
from cpt.adapters.gates import Gates, anneal, attach_gates, bottleneck_units, owned_parameters, regulariser
from cpt.data.collate import Batch
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import CPTPluginOptions, HATOptions
from cpt.models.units import Units, find_units


class GatedMethod(ContinualMethod):
    """A method with gates per domain on units of a model or its adapters, which claim what they open."""

    gates: Gates
    options: HATOptions | CPTPluginOptions

    @property
    def taken(self) -> ClaimedUnits:
        return cast(ClaimedUnits, self.masks[-1])

    def gated_losses(self, batch: Batch, *, name: str, weight: float | None) -> dict[str, Tensor]:
        """The losses with gates at the annealed s, and the weighted regularizer of the gates."""
        s = anneal(self.progress, s_max=self.gates.s_max)
        self.gates.set(s)
        terms = super().losses(batch)
        if self.gates.parts and weight is not None:
            terms[name] = weight * regulariser(self.gates.soft(s), self.taken.taken)
        return terms

    def after_update(self) -> None:
        self.gates.clamp(self.options.limit)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        super().after_domain(probe)
        if self.bank is not None:
            self.taken.update_max(self.opened(self.domain.index))

    def opened(self, domain: int) -> Tensor:
        """The gates of a domain, 0 or 1, [units]."""
        assert self.bank is not None
        return self.gates.hard(self.bank.weights(domain))


def units_of_adapters(model: nn.Module, kind: type[bottleneck.Bottleneck]) -> list[Units]:
    """The neurons and outputs of all bottleneck adapters of a kind."""
    found = [(name, part) for name, part in model.named_modules() if isinstance(part, kind)]
    return [group for name, part in found for group in bottleneck_units(name, part.down, part.up)]


class HAT(GatedMethod):
    """Gives each domain gates over shared weights, and protects the units that they open."""

    options: HATOptions

    def __init__(self, options: HATOptions, context: MethodContext) -> None:
        model, scope, groups, attached = context.model, None, [], None
        if options.form == "adapter":
            scope = bottleneck.attach_bottlenecks(model, **options.bottleneck)
            groups = units_of_adapters(model, bottleneck.Bottleneck)
            attached = bottleneck.attach_bottlenecks, options.bottleneck
        elif options.units:
            groups = find_units(model, options.units)
        gates = attach_gates(model, groups, s_max=options.s_max)
        scope = scope and replace(scope, names=scope.names + gates.names)
        super().__init__(options, context, scope=scope)
        self.gates, self.attached = gates, attached
        self.masks.append(ClaimedUnits(gates.groups, apply_to=options.apply_to))
        side = -options.limit if options.form == "adapter" else options.limit
        base = {name: torch.full_like(model.get_parameter(name), side) for name in gates.names}
        if base:
            self.use_domain_params(DomainParams(model, gates.names, base=base), options.routing)

    def activate(self, domain: int) -> None:
        super().activate(domain)
        owners = owned_parameters(self.gates.groups) | {part.e for part in self.gates.parts}
        if self.options.shared == "frozen" and domain > 0:
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.requires_grad and parameter in owners)
        for part in self.gates.parts:
            part.e.requires_grad_(True)  # also in frozen layers: which of their units a domain uses

    def rates(self) -> dict[nn.Parameter, float]:
        return {part.e: self.options.gate_rate for part in self.gates.parts}

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.gates.redraw(self.drawing(), std=self.options.std)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.gated_losses(batch, name="hat", weight=self.options.strength)

    def model_for(self, domain: int) -> PreTrainedModel:
        """A copy with the domain's gates folded into the weights, and hard and fixed in place."""
        if self.bank is None:
            return self.model
        model, gates = deepcopy((self.model, self.gates))
        model.requires_grad_(True)
        self.bank.put(model, domain)
        gates.set(None)
        gates.fold(self.opened(domain))
        for part in gates.parts:
            part.e.requires_grad_(False)
        return model

    def parts(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        own, found = owned_parameters(self.gates.groups), {}
        for index, domain in enumerate(order):
            folded, named = self.gates.folded(self.opened(index)), self.model.named_parameters()
            found[domain] = {name: folded.get(p, p.detach()) for name, p in named if p in own}
        return found

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.attached is not None:
            return super().export(folder, order)
        last = self.model_for(len(order) - 1)
        return export.export_parts(folder, last, {}, attach=None, options={})

    def diagnostics(self) -> dict[str, Tensor]:
        """Claimed units by group, and the overlap of domains' units by kind."""
        found, learned = super().diagnostics(), self.bank.domains if self.bank else []
        if learned:
            masks = torch.stack([self.opened(domain) for domain in learned])
            parts = list(zip(self.gates.groups, masks.split(self.gates.sizes, dim=1), strict=True))
            for kind in dict.fromkeys(group.kind for group, _ in parts):
                own = torch.cat([part for group, part in parts if group.kind == kind], dim=1)
                found[f"overlap/{kind}"] = own @ own.T / own.sum(1, keepdim=True).clamp_min(1)
        return found
