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
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bottleneck import Bottleneck, Plugin, attach_bottlenecks, attach_plugins
from cpt.adapters.domain_store import BASE, DomainParams, Scope
from cpt.adapters.gates import (
    Gate,
    Gates,
    anneal,
    attach_gates,
    find_gated_parameters,
    list_bottleneck_units,
    regulariser,
)
from cpt.core.exceptions import InvalidOptionError
from cpt.data.collate import Batch
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import CPTPluginOptions, HATOptions
from cpt.models.narrow_layers import widen
from cpt.models.units import Units, find_blocks, find_units

# Where all units of a domain start open: the standard deviation of their first e, and the learning rate of
# e. A step of Adam moves an e by its rate, and those of units that close must change their sign.
STD_STARTING_OPEN = 1.0
LEARNING_RATE_STARTING_OPEN = 0.1
# Where the first e are N(0, std^2): the same, with the rate as a multiple of the model's.
STD_STARTING_NORMAL = 0.02
RATE_STARTING_NORMAL = 5.0


class GatedMethod(ContinualMethod):
    """A method with gates per domain on units of a model or its adapters, which claim what they open."""

    keeps_base = True
    gates: Gates
    options: HATOptions | CPTPluginOptions

    @property
    def claimed(self) -> ClaimedUnits:
        """The units that the domains so far have opened."""
        return cast(ClaimedUnits, self.masks[-1])  # a method's masks come after those of the config

    def gated_losses(self, batch: Batch, *, name: str, weight: float | None) -> dict[str, Tensor]:
        """The losses with gates at the annealed s, and the weighted regularizer of the gates."""
        s = anneal(self.progress, s_max=self.gates.s_max)
        self.gates.set(s)
        terms = super().losses(batch)
        # R [units]: the gates of this domain on units that no earlier domain has claimed.
        if self.gates.modules and weight is not None:
            terms[name] = weight * regulariser(self.gates.soft(s), self.claimed.cumulative_gates)
        return terms

    def after_update(self) -> None:
        # At a large |e| the compensated gradient vanishes too: the gate could not change any more.
        self.gates.clamp(self.options.gate_limit)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        super().after_domain(importance_batches)  # stores the domain's e, of which `open_units` reads
        if self.domain_params is not None:
            self.claimed.update_max(self.open_units(self.domain.index))

    def open_units(self, domain: int) -> Tensor:
        """The gates of a domain, 0 or 1, [units]."""
        assert self.domain_params is not None
        return self.gates.hard(self.domain_params.weights(domain))


def list_adapter_units(model: nn.Module, kind: type[Bottleneck]) -> list[Units]:
    """The neurons and outputs of all bottleneck adapters of a kind."""
    units = []
    for name, module in model.named_modules():
        if isinstance(module, kind):
            units += list_bottleneck_units(name, module.down, module.up)
    return units


class HAT(GatedMethod):
    """Gives each domain gates over shared weights, and protects the units that they open."""

    options: HATOptions
    ends_domains = True

    def __init__(self, options: HATOptions, context: MethodContext) -> None:
        model = context.model
        has_adapters = options.form == "adapter"
        scope: Scope | None = None  # of form=full: all of the model is trained
        units: list[Units] = []
        if has_adapters:
            scope = attach_bottlenecks(model, **options.bottleneck)
            units = list_adapter_units(model, Bottleneck)
        elif options.units:
            units = find_units(model, options.units, skips_mixtures=True)
        gates = attach_gates(model, units, s_max=options.s_max)
        if scope is not None:
            scope = replace(scope, names=scope.names + gates.names)
        super().__init__(options, context, scope=scope)

        self.gates = gates
        if has_adapters:
            self.attached = attach_bottlenecks, options.bottleneck
        self.masks.append(ClaimedUnits(gates.groups, apply_to=options.apply_to))

        # With all units open a whole model is the base; with all closed, adapters add nothing to it.
        base_e = -options.gate_limit if has_adapters else options.gate_limit
        base = {name: torch.full_like(model.get_parameter(name), base_e) for name in gates.names}
        if base:  # without units the method is ncl
            self.use_domain_params(DomainParams(model, gates.names, base=base), options.routing)

    def activate(self, domain: int) -> None:
        super().activate(domain)
        # Parameters without gated units are protected by no gate: only the first domain may train them.
        if self.options.shared_parameters == "frozen" and domain > 0:
            gated_parameters = find_gated_parameters(self.gates.groups)
            for parameter in self.model.parameters():
                parameter.requires_grad_(parameter.requires_grad and parameter in gated_parameters)

        # Also in frozen layers, as a domain may choose which of their units it uses.
        for gate in self.gates.modules:
            gate.e.requires_grad_(True)

    @property
    def starts_open(self) -> bool:
        """Whether a domain starts with all units open.

        A pre-trained model needs its units. The second layer of an adapter is zero at first: until it has
        moved, only the regularizer moves the gates, and a gate that it has closed stays closed."""
        return self.options.gate_init in ("auto", "open")

    def rates(self) -> dict[nn.Parameter, float]:
        rate = self.options.gate_rate
        if rate is None and self.starts_open:
            # A rate of e alone, whatever the model's: what is returned is a multiple of the model's rate.
            rate = LEARNING_RATE_STARTING_OPEN / cast(partial, self.make_optimizer).keywords["lr"]
        elif rate is None:
            rate = RATE_STARTING_NORMAL
        return dict.fromkeys((gate.e for gate in self.gates.modules), rate)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        default_std = STD_STARTING_OPEN if self.starts_open else STD_STARTING_NORMAL
        std = self.options.gate_std or default_std
        self.gates.redraw(self.make_generator(), std=std, are_open=self.starts_open)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return self.gated_losses(batch, name="hat", weight=self.options.strength)

    def model_for(self, domain: int) -> PreTrainedModel:
        """A copy with the domain's gates folded into the weights, and hard and fixed in place."""
        if self.domain_params is None:
            return self.model
        # In one call, so that the copied gates are modules of the copied model.
        model, gates = deepcopy((self.model, self.gates))
        widen(model, model.parameters())
        model.requires_grad_(True)
        self.domain_params.load_into(model, domain)
        # Folded, for a model that is saved without gates; the gates of the copy multiply by the same 0 and 1
        # again, also in training, so that closed units stay closed in end tasks.
        gates.set(None)
        gates.fold(self.open_units(domain))
        for gate in gates.modules:
            gate.e.requires_grad_(False)
        return model

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        # An exported model has no gates: each domain gets a version of the shared weights with its gates
        # multiplied into them.
        gated_parameters = find_gated_parameters(self.gates.groups)
        weights_by_domain: dict[str, dict[str, Tensor]] = {}
        for index, domain in enumerate(order):
            folded_weights = self.gates.folded(self.open_units(index))
            weights_by_domain[domain] = {}
            for name, parameter in self.model.named_parameters():
                if parameter in gated_parameters:
                    weights_by_domain[domain][name] = folded_weights.get(parameter, parameter.detach())
        return weights_by_domain

    def export(self, folder: Path, order: Sequence[str]) -> str:
        if self.attached is not None:
            return super().export(folder, order)
        # A whole model has no modules that are added to it: the last domain's, without its gates.
        last_model = self.model_for(len(order) - 1)
        return export.export_parts(folder, last_model, {}, attach=None, options={})

    def diagnostics(self) -> dict[str, Tensor]:
        """Claimed units by group, and the overlap of domains' units by kind."""
        diagnostics = super().diagnostics()
        learned = self.domain_params.domains if self.domain_params else []
        if not learned:
            return diagnostics

        is_open = torch.stack([self.open_units(domain) for domain in learned])  # [domains, units]
        is_open_by_group = is_open.split(self.gates.sizes, dim=1)
        by_kind: dict[str, list[Tensor]] = {}
        for group, group_is_open in zip(self.gates.groups, is_open_by_group, strict=True):
            by_kind.setdefault(group.kind, []).append(group_is_open)

        for kind, groups in by_kind.items():
            units = torch.cat(groups, dim=1)
            # [i, j]: the share of domain i's open units that domain j has opened too
            diagnostics[f"overlap/{kind}"] = units @ units.T / units.sum(1, keepdim=True).clamp_min(1)
        return diagnostics


def list_norm_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    """The names of the parameters of the norms within the blocks."""
    names = []
    for block_name, block in find_blocks(model):
        for name, module in block.named_modules(prefix=block_name):
            if "Norm" in type(module).__name__:
                names += [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
    return tuple(names)


class CPTPlugin(GatedMethod):
    """CPT, continual post-training with CL-plugins (Ke et al., EMNLP 2022, section 3).

        y <- y + m2 (W2 (m1 relu(W1 x + b1)) + b2)

    x is the input of an attention or FFN of the frozen model, y its output projection's output; both have a
    parallel plug-in, shared by all domains. m are a domain's gates, which protect the units that they opened
    as in HAT, without its regularizer. Each domain has its own norms of the blocks, which start at the
    base's."""

    options: CPTPluginOptions
    ends_domains = True
    domain_params: DomainParams

    def __init__(self, options: CPTPluginOptions, context: MethodContext) -> None:
        model = context.model
        try:
            scope = attach_plugins(model, **options.plugin)
        except ValueError as error:  # mixtures of experts, or sublayers of unknown form
            raise InvalidOptionError(
                "method",
                "cpt_plugin",
                reason=str(error),
                allowed="models whose attentions and feed-forward networks are known",
            ) from error
        gates = attach_gates(model, list_adapter_units(model, Plugin), s_max=options.s_max)
        norms = list_norm_parameters(model) if options.norms == "per_domain" else ()
        trained = replace(scope, names=scope.names + gates.names + norms)
        super().__init__(options, context, scope=trained)

        self.attached = attach_plugins, options.plugin
        self.plugins = scope.names
        self.norms = norms
        self.gates = gates
        self.masks.append(ClaimedUnits(gates.groups, apply_to="update"))

        # The base has its own norms, and all gates closed (e below 0): plug-ins add nothing.
        base: dict[str, Tensor] = {name: model.get_parameter(name) for name in norms}
        for name in gates.names:
            base[name] = torch.full_like(model.get_parameter(name), -1)
        self.use_domain_params(DomainParams(model, gates.names + norms, base=base), options.routing)

    @torch.no_grad()
    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.gates.redraw(self.make_generator())
        base = self.domain_params.weights(BASE)
        for norm in self.norms:
            self.model.get_parameter(norm).copy_(base[norm])

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        # At 0 the term is left out, as in the paper.
        return self.gated_losses(batch, name="sparsity", weight=self.options.sparsity or None)

    def model_for(self, domain: int) -> PreTrainedModel:
        """A copy with the domain's norms and gates, which stay hard in training."""
        model = super().model_for(domain)
        for module in model.modules():
            if isinstance(module, Gate):
                module.s = None
                module.e.requires_grad_(False)
        return model

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        # The shared plug-ins with each domain's gates multiplied into them, and each domain's norms.
        weights_by_domain: dict[str, dict[str, Tensor]] = {}
        for index, domain in enumerate(order):
            folded_weights = self.gates.folded(self.open_units(index))
            stored_weights = self.domain_params.weights(index)
            weights_by_domain[domain] = {}
            for name in self.plugins:
                parameter = self.model.get_parameter(name)
                weights_by_domain[domain][name] = folded_weights.get(parameter, parameter).detach()
            for name in self.norms:
                weights_by_domain[domain][name] = stored_weights[name]
        return weights_by_domain
