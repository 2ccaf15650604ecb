"""HAT, hard attention to the task (Serra et al., ICML 2018, section 2), on a whole model or in adapters.

    h_l    <- a_l^t h_l,   a_l^t = sigmoid(s e_l^t)                        a gate per unit, e per domain
    step_ij <- (1 - min(a_i^(<t), a_j^(<t))) step_ij                       what earlier domains use stays
    L      = L_lm + c sum a^t (1 - a^(<t)) / sum (1 - a^(<t))              and little is used

s rises from 1/s_max to s_max over a domain's steps; cpt.adapters.gates holds the formulas. Parameters that no
unit owns (embeddings, norms, the biases of what no gate follows, the language-model head) are frozen after
the first domain; then the model of a domain that has been learned never changes again, bit for bit. On the
whole model the base is what gates that are all open leave before anything is learned. In adapters it is what
gates that are all closed leave, at any time.

Released (ContinualLM), adapters: each linear map is two, both gated and with GELU; e begins at N(0, 0.02^2);
the head is trained and leaks; masks scale gradients, which weight decay and momentum get around; without
DistributedDataParallel no name matches and nothing is protected. Of the whole model only hooks are there."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import bottleneck, export
from cpt.adapters.domain_store import DomainParams, Scope
from cpt.adapters.gates import Gates, anneal, attach_gates, bottleneck_units, owned_parameters, regulariser
from cpt.adapters.options import Routing
from cpt.data.collate import Batch
from cpt.gradient_masks.hat import ClaimedUnits
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import HATOptions
from cpt.models.units import find_units as find_units

GATED = ("heads", "neurons", "outputs")
SHARED = ("frozen", "trained")


def adapter_gates(model: PreTrainedModel, *, s_max: float, **options: Any) -> tuple[Scope, Gates]:
    """Attaches adapters to the model, and gates to the neurons and outputs of each."""
    scope = bottleneck.attach_bottlenecks(model, **options)
    found = [each for each in model.named_modules() if isinstance(each[1], bottleneck.Bottleneck)]
    groups = [group for name, part in found for group in bottleneck_units(name, part.down, part.up)]
    gates = attach_gates(model, groups, s_max=s_max)
    return replace(scope, names=scope.names + gates.names), gates


def gate_overlap(masks: Tensor) -> Tensor:
    """The share of row i's units that row j has too, [n, n] from n domains' gates [n, units] of 0 and 1."""
    return masks @ masks.T / masks.sum(1, keepdim=True).clamp_min(1)


class HAT(ContinualModule):
    """Gives each domain gates of its own over weights that all share, and keeps what they opened."""

    counts_steps = True
    options: HATOptions

    def __init__(self, options: HATOptions, shared: Shared) -> None:
        if options.form == "adapter":
            scope, gates = adapter_gates(shared.model, s_max=options.s_max, **options.bottleneck)
        else:
            groups = find_units(shared.model, options.units) if options.units else ()
            scope, gates = None, attach_gates(shared.model, groups, s_max=options.s_max)
        super().__init__(options, shared, scope=scope)
        self.gates = gates
        self.masks.append(ClaimedUnits(gates.groups, acts_on=options.acts_on))
        self.remember(options.routing)

    def remember(self, routing: Routing) -> None:
        """Makes room for the gates of each domain; the base's are all open, in adapters all closed."""
        side = -self.options.limit if self.options.form == "adapter" else self.options.limit
        base = {name: torch.full_like(self.model.get_parameter(name), side) for name in self.gates.names}
        if base:
            self.keep_parts(DomainParams(self.model, self.gates.names, base=base), routing)

    @property
    def taken(self) -> ClaimedUnits:
        return self.masks[-1]

    def activate(self, domain: int) -> None:
        super().activate(domain)
        owners = owned_parameters(self.gates.groups) | {part.e for part in self.gates.parts}
        for parameter in self.model.parameters():
            if parameter not in owners and self.options.shared == "frozen" and domain > 0:
                parameter.requires_grad_(False)
        for part in self.gates.parts:
            part.e.requires_grad_(True)  # also in frozen layers: which of their units a domain uses

    def rates(self) -> dict[nn.Parameter, float]:
        return {part.e: self.options.gate_rate for part in self.gates.parts}

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.gates.redraw(self.drawing(), std=self.options.std)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        s = anneal(self.progress, s_max=self.gates.s_max)
        self.gates.set(s)
        terms = super().losses(batch)
        if self.gates.parts:
            terms["hat"] = self.options.strength * regulariser(self.gates.soft(s), self.taken.taken)
        return terms

    def after_update(self) -> None:
        self.gates.clamp(self.options.limit)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        super().after_domain(probe)
        if self.bank is not None:
            self.taken.update_max(self.opened(self.domain.index))

    def opened(self, domain: int) -> Tensor:
        """The gates of a domain, 0 or 1, [units]."""
        return self.gates.hard(self.bank.weights(domain))

    def backbone(self, domain: int) -> PreTrainedModel:
        """A copy with the domain's gates in the weights, and also hard and fixed where they were: an end task
        does not bring closed units back."""
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

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.options.form == "full":
            last = self.backbone(len(order) - 1)
            return export.export_parts(folder, last, {}, attach=None, options={})
        parts = {name: self.adapter(index) for index, name in enumerate(order)}
        how = {"attach": bottleneck.attach_bottlenecks, "options": self.options.bottleneck}
        return export.export_parts(folder, self.model, parts, **how)

    def adapter(self, domain: int) -> dict[str, Tensor]:
        """The adapters' weights, by name, with a domain's gates in them."""
        folded = self.gates.folded(self.opened(domain))
        own = owned_parameters(self.gates.groups)
        named = [each for each in self.model.named_parameters() if each[1] in own]
        return {name: folded.get(parameter, parameter.detach()) for name, parameter in named}

    def diagnostics(self) -> dict[str, Tensor]:
        """What is taken of each group of units, and for each kind how far domains use the same ones."""
        found, learned = super().diagnostics(), self.bank.domains if self.bank else []
        if learned:
            masks = torch.stack([self.opened(domain) for domain in learned])
            parts = list(zip(self.gates.groups, masks.split(self.gates.sizes, dim=1), strict=True))
            for kind in dict.fromkeys(group.kind for group, _ in parts):
                found[f"overlap/{kind}"] = gate_overlap(
                    torch.cat([p for g, p in parts if g.kind == kind], dim=1)
                )
        return found
