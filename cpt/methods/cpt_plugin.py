"""CPT, continual post-training with CL-plugins (Ke et al., EMNLP 2022, section 3).

    y <- y + m2 (W2 (m1 relu(W1 x + b1)) + b2)

x is the input of an attention or FFN of the frozen model, y its output projection's output; both have a
parallel plug-in, shared by all domains. m are a domain's gates, which protect the units that they opened as
in HAT, without its regularizer. Each domain has its own norms of the blocks, which start at the base's."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters.bottleneck import Plugin, attach_plugins
from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.gates import Gate, attach_gates
from cpt.data.collate import Batch
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.methods.base import MethodContext
from cpt.methods.hat import GatedMethod, units_of_adapters
from cpt.methods.options import CPTPluginOptions
from cpt.models.units import blocks


def norms_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the parameters of the norms within the blocks."""
    inside = [part for name, block in blocks(model) for part in block.named_modules(prefix=name)]
    norms = [(name, part) for name, part in inside if "Norm" in type(part).__name__]
    return tuple(f"{name}.{key}" for name, part in norms for key, _ in part.named_parameters(recurse=False))


class CPTPlugin(GatedMethod):
    """Trains gated plug-ins parallel to attention and FFN, whose weights all domains share."""

    options: CPTPluginOptions
    bank: DomainParams

    def __init__(self, options: CPTPluginOptions, context: MethodContext) -> None:
        model = context.model
        scope = attach_plugins(model, **options.plugin)
        gates = attach_gates(model, units_of_adapters(model, Plugin), s_max=options.s_max)
        own = norms_of(model) if options.norms == "per_domain" else ()
        trained = replace(scope, names=scope.names + gates.names + own)
        super().__init__(options, context, scope=trained)
        self.attached = attach_plugins, options.plugin
        self.plugins, self.norms, self.gates = scope.names, own, gates
        self.masks.append(ClaimedUnits(gates.groups, apply_to="update"))
        base = {name: model.get_parameter(name) for name in own}
        base |= {name: torch.full_like(model.get_parameter(name), -1) for name in gates.names}
        self.use_domain_params(DomainParams(model, gates.names + own, base=base), options.routing)

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.gates.redraw(self.drawing())
        base = self.bank.weights(BASE)
        for norm in self.norms:
            self.model.get_parameter(norm).copy_(base[norm])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.gated_losses(batch, name="sparsity", weight=self.options.sparsity or None)

    def model_for(self, domain: int) -> PreTrainedModel:
        """A copy with the domain's norms and gates, which stay hard in training."""
        model = super().model_for(domain)
        for gate in (part for part in model.modules() if isinstance(part, Gate)):
            gate.s = None
            gate.e.requires_grad_(False)
        return model

    def parts(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        plugins = {name: self.model.get_parameter(name) for name in self.plugins}
        for index, domain in enumerate(order):  # its norms, and the plug-ins with its gates folded in
            own, folded = self.bank.weights(index), self.gates.folded(self.opened(index))
            found[domain] = {name: folded.get(each, each).detach() for name, each in plugins.items()}
            found[domain] |= {name: own[name] for name in self.norms}
        return found
