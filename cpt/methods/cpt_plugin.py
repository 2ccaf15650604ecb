"""CPT, continual post-training with CL-plugins (Ke et al., EMNLP 2022, section 3).

    y <- y + m2 (W2 (m1 relu(W1 x + b1)) + b2)

x is what an attention or FFN of the frozen model reads, y what its output projection writes; both have a
plug-in parallel to them. All domains share the plug-ins. m are the gates of a domain, which protect what they
opened from the next ones, as in HAT (cpt.adapters.gates), but without its regulariser. The norms of the
blocks are each domain's own, from the base's on. So what is computed for a learned domain never
changes, bit for bit.

Released (UIC-Liu-Lab/CPT): the plug-in beside the attention is added in front of the output projection, its
input is added a second time beside the FFN, and a ReLU follows W2, so that the base's function is lost from
the start; norms are trained, but neither saved nor protected."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import Plugin, attach_plugins
from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.gates import Gate, Gates, anneal, attach_gates, bottleneck_units, hard, regulariser
from cpt.data.collate import Batch
from cpt.gradient_masks.hat import ClaimedUnits
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import CPTPluginOptions
from cpt.models.units import Units, blocks

NORMS = ("per_domain", "frozen")


def norms_of(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the parameters of the norms within the blocks."""
    inside = [part for name, block in blocks(model) for part in block.named_modules(prefix=name)]
    norms = [(name, part) for name, part in inside if "Norm" in type(part).__name__]
    return tuple(f"{name}.{key}" for name, part in norms for key, _ in part.named_parameters(recurse=False))


def gated_units(model: PreTrainedModel) -> list[Units]:
    """The neurons and outputs of all plug-ins of a model."""
    parts = [(name, part) for name, part in model.named_modules() if isinstance(part, Plugin)]
    return [group for name, part in parts for group in bottleneck_units(name, part.down, part.up)]


def closed_gates(gates: Gates) -> dict[str, Tensor]:
    """Values with which all gates are shut, by the names of the gates' parameters."""
    return {name: torch.full_like(gate.e, -1) for name, gate in zip(gates.names, gates.parts, strict=True)}


class CPTPlugin(ContinualModule):
    """Trains gated plug-ins beside attention and FFN, whose weights all domains share.

    The inner sizes are shares of the hidden size. `output_relu` puts a ReLU behind the second map, which can
    then not begin at zero, so that the first model is not the base."""

    counts_steps = True
    options: CPTPluginOptions

    def __init__(self, options: CPTPluginOptions, shared: Shared) -> None:
        model = shared.model
        scope = attach_plugins(model, **options.plugin)
        gates = attach_gates(model, gated_units(model), s_max=options.s_max)
        own = norms_of(model) if options.norms == "per_domain" else ()
        trained = replace(scope, names=scope.names + gates.names + own)
        super().__init__(options, shared, scope=trained)
        self.plugins, self.norms, self.gates = scope.names, own, gates
        self.masks.append(ClaimedUnits(gates.groups, acts_on="update"))
        base = {name: model.get_parameter(name) for name in own} | closed_gates(gates)
        self.keep_parts(DomainParams(model, gates.names + own, base=base), options.routing)

    @property
    def taken(self) -> ClaimedUnits:
        """What the domains so far have opened, and the protection of it."""
        return self.masks[-1]

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.gates.redraw(self.drawing())
        base = self.bank.weights(BASE)
        for norm in self.norms:
            self.model.get_parameter(norm).copy_(base[norm])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        s = anneal(self.progress, s_max=self.gates.s_max)
        self.gates.set(s)
        terms = super().losses(batch)
        if self.options.sparsity:
            terms["sparsity"] = self.options.sparsity * regulariser(self.gates.soft(s), self.taken.taken)
        return terms

    def after_update(self) -> None:
        self.gates.clamp(self.options.limit)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.taken.update_max(hard(self.gates.e().detach()))
        super().after_domain(probe)

    def backbone(self, domain: int) -> PreTrainedModel:
        """A copy of the model with the domain's norms and gates, which stay hard when it is trained."""
        model = super().backbone(domain)
        for part in model.modules():
            if isinstance(part, Gate):
                part.s = None
                part.e.requires_grad_(False)
        return model

    def export(self, folder: Path, order: Sequence[str]) -> str:
        parts = Parts(self, order)
        return export.export_parts(
            folder, self.model, parts, attach=attach_plugins, options=self.options.plugin
        )

    def folded(self, domain: int) -> dict[str, Tensor]:
        """The domain's plug-ins with its gates folded into their weights, and its norms, by name."""
        own = self.bank.weights(domain)
        changed = self.gates.folded(self.gates.hard(own))
        plugins = {name: self.model.get_parameter(name) for name in self.plugins}
        weights = {name: changed.get(parameter, parameter).detach() for name, parameter in plugins.items()}
        return weights | {name: own[name] for name in self.norms}


class Parts(Mapping):
    """What is exported of each domain by its name, made when it is asked for: each is as large as the
    plug-ins."""

    def __init__(self, module: CPTPlugin, order: Sequence[str]) -> None:
        self.module, self.places = module, {name: index for index, name in enumerate(order)}

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return self.module.folded(self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)
