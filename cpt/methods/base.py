"""The base class of all methods: plain continual pre-training, with the hooks that a method overrides. Their
order is drawn in CONTRIBUTING.md; cpt.methods.stage_module calls them.

Where a paper's released code departs from a method here, docs/fidelity/ has a row."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.domain_store import BASE, DomainParams, Router, Scope
from cpt.adapters.options import Routing
from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.gradient_masks.base import Protection
from cpt.methods.stage_module import MethodContext, StageModule
from cpt.models.narrow_layers import find_hidden_dtype, widen
from cpt.models.quantization import dequantize_layers, find_quantized_layers
from cpt.models.weights import find_frozen, swap_weights


class ContinualMethod(StageModule):
    """Plain continual pre-training on a sequence of domains; a method overrides what it changes.

    All state is in the `state_dict`: buffers, neutral at construction. `scope` names the trained part of the
    model, None for all of it. A method with modules per domain calls `use_domain_params`."""

    requires_all_domains = False  # whether all domains must be known before the first one starts
    ends_domains = False  # whether the next domain has to start from what the end of one makes of the weights
    trains_from_base = (
        False  # whether each domain starts from the base, so that its model is of that domain only
    )
    needs_examples = False  # whether training text has to be questions with answers, read by a causal model
    needs_32_bits = False  # whether sharded weights must be in at least 32 bits
    # Whether untrained weights, except `rewritten`, stay as they were loaded: files of a run leave them out.
    keeps_base = False
    has_base_blocks = True  # whether a block of the base has its name in the exported model, too
    # Whether `before_domain` or `after_domain` reads its importance batches, also if only for some options.
    reads_importance_batches = False
    takes_quantized = False  # whether the base may be quantized: no weight of its linear layers is changed
    saved_names: tuple[str, ...] = ()  # parameters of modules that are trained fully in addition to adapters
    # Where the export has modules: what adds them to a plain model (None: they are weights of it), and with
    # which options.
    attached: tuple[Callable[..., Scope] | None, Mapping[str, Any]] | None = None
    options: Options

    def __init__(self, options: Options, context: MethodContext, *, scope: Scope | None = None) -> None:
        super().__init__(context, scope=scope)
        self.options = options
        self.domain_params: DomainParams | None = None

        # What is trained or rewritten is in 32 bits, before anything is copied from it. Without a scope, a
        # method may train all of the model.
        constant = self.constant_weights if self.scope is not None else []
        constant_ids = {id(parameter) for parameter in constant}
        widen(self.model, [p for p in self.model.parameters() if id(p) not in constant_ids])
        for parameter in constant:  # FSDP accepts two types if only one is trained
            parameter.requires_grad_(False)

    def use_domain_params(self, domain_params: DomainParams, routing: Routing) -> None:
        """Stores parameters per domain from now on, and scores texts with those that the routing selects."""
        self.domain_params = domain_params
        self.router = Router(domain_params, routing, self.objective)

    # The model and its stages.

    def aux_models(self) -> dict[str, nn.Module]:
        """Auxiliary models by name (teachers, generators), kept in the state_dict; those
        with parameters that require a gradient are trained. Scores and export cover `self.model` alone."""
        return {}

    def stages(self, order: Sequence[str]) -> list[Domain]:
        """The stages of a run: one per domain of the order."""
        return [Domain(name, index, (name,)) for index, name in enumerate(order)]

    def expand(self, stage: Domain) -> None:
        """Grows the model for a stage (blocks, heads, rows), without data, before the optimizer is made. A
        resumed run repeats it for all stages so far before their state is loaded. New trained parameters must
        be in the `scope`, if there is one."""

    @property
    def frozen(self) -> list[nn.Parameter]:
        """Parameters of the present model that no method trains."""
        outside_scope = self.scope.others(self.model) if self.scope else []
        return find_frozen(self.model, self.freezing) + outside_scope

    @property
    def rewritten(self) -> list[nn.Parameter]:
        """Parameters of the base that no step trains and that the method itself changes, as those that it
        merges adapters into; of a method that `keeps_base`."""
        return []

    @property
    def constant_weights(self) -> list[nn.Parameter]:
        """Parameters that stay as they are at construction through all stages; empty of a method that does
        not say so by `keeps_base`."""
        if not self.keeps_base:
            return []
        rewritten_ids = {id(parameter) for parameter in self.rewritten}
        return [parameter for parameter in self.frozen if id(parameter) not in rewritten_ids]

    def activate(self, domain: int) -> None:
        """Switches experts, adapters, requires_grad for a domain, without data; idempotent."""
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def rates(self) -> dict[nn.Parameter, float]:
        """Multiples of the learning rate by parameter. Default: none."""
        return {}

    # Training.

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        """Called before a domain's first step; not on resume."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named scalar terms, whose sum is minimized, averaged over processes and micro-batches."""
        sums, _ = self.objective.sum_losses(self.model, batch, {"lm": self.lm_loss(batch)})
        return {"lm": sums["lm"] * batch["weight"]}

    def describe_accumulation(self) -> str:
        """How a step of several micro-batches differs from one of the whole batch; empty: it does not."""
        return ""

    def on_gradients_ready(self) -> None:
        """Called with a step's gradients, averaged over processes and micro-batches, before masks."""

    def transform_gradients(self, optimizer: Optimizer) -> None:
        """Changes a step's averaged gradients in `parameter.grad`, after masks on gradients and before
        clipping, alike in all processes. The step may still be skipped: count steps in `after_update`."""

    def after_update(self) -> None:
        """Called after each optimizer step, masks applied."""

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        """Called after a domain's last step, in eval mode, gradients cleared before and after.
        `importance_batches` are the process's share, on its device, possibly empty. Default: stores the
        domain's parameters."""
        if self.domain_params is not None:
            self.domain_params.capture(self.model, self.domain.index)

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        """By parameter, the projection of a movement on the subspace protected for the whole domain; by
        default that of the first mask with one."""
        protections: dict[nn.Parameter, Protection] = {}
        for mask in reversed(list(self.masks)):  # the first mask is the last to overwrite
            protections.update(mask.protected_subspace())
        return protections

    # Evaluation.

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood (nats) and number of predictions at each scored position, both [K], for
        text of the domain with this place in the order (-1: general text)."""
        if self.router is None:
            nll = self.objective.nll(self.model, batch)
        else:
            nll = self.router.nll(self.model, batch, domain=domain)
        return nll, torch.ones_like(nll)

    def exported_nll(self, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at each scored position, [K], that the exported model has to give:
        with modules per domain that of the domain's own."""
        if self.domain_params is None or self.router is None:
            return self.nll(batch, domain)[0]
        with swap_weights(self.model, self.domain_params.weights(domain)):
            return self.objective.nll(self.model, batch)

    def base_parameters(self) -> dict[str, Tensor]:
        """The base's values, by name, of the parameters that the method may change: loaded into the model
        they restore the base."""
        assert self.base_weights is not None
        weights = self.base_weights.complete(self.model)
        if self.domain_params is not None:
            weights |= self.domain_params.weights(BASE)
        return weights

    def scoring_parameters(self, domain: int) -> dict[str, Tensor]:
        """The parameters by name with which `nll` scores text of a domain (-1: general text) in place of the
        model's own. With modules per domain these are the parameters of the domain that scores the text."""
        if not isinstance(self.router, Router):
            return {}
        [source] = self.router.sources(domain)
        return self.router.domain_params.weights(source)

    def routing_weights(self, domain: int) -> dict[int, float]:
        """The weights, of sum 1, with which domains' modules (-1: the base) scored a domain's text in the
        last evaluation; empty without a router. Called in every process."""
        if self.router is None:
            return {}
        return self.router.routing_weights(domain)

    @property
    def needs_domain(self) -> bool:
        """Whether `nll` needs the domain of a text that has been trained on."""
        return self.router is not None and self.router.needs_domain

    @property
    def in_sequence(self) -> bool:
        """Whether a row's score depends on the rows before it."""
        return self.router is not None and self.router.in_sequence

    def constant_part(self, domain: int) -> int | None:
        """The domain (-1: the base) whose modules alone decide the scores of a domain's text, or None."""
        # A subclass may compute scores from anything else, and without a scope all of the model is trained.
        has_default_scores = type(self).nll is ContinualMethod.nll and type(self.router) is Router
        if not has_default_scores or type(self.domain_params) is not DomainParams or self.scope is None:
            return None

        # What is trained and not stored per domain changes the scores of all domains.
        stores_whole_scope = set(self.scope.names) <= set(self.domain_params.names)
        sources = cast(Router, self.router).sources(domain)
        return sources[0] if len(sources) == 1 and stores_whole_scope else None

    def diagnostics(self) -> dict[str, Tensor]:
        """Named tensors that the run folder keeps after a domain."""
        diagnostics = {}
        for mask in self.masks:
            diagnostics.update(mask.diagnostics())
        return diagnostics

    # Export.

    def model_for(self, domain: int) -> PreTrainedModel:
        """The model for a domain: it is exported, and end tasks fine-tune a copy of it. With a `scope`, or a
        base that is quantized, it is a copy already, in which everything is trainable."""
        if self.scope is None and not find_quantized_layers(self.model):
            return self.model
        copy = self.copy_for(domain)
        dequantize_layers(copy, find_hidden_dtype(copy))
        widen(copy, copy.parameters())
        return copy.requires_grad_(True)

    def copy_for(self, domain: int) -> PreTrainedModel:
        """A copy of the model with the modules of a domain, as the next domains need the model itself."""
        copy = deepcopy(self.model)
        if self.domain_params is not None:
            self.domain_params.load_into(copy, domain)
        return copy

    def domain_modules(self, order: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        """The parameters of modules by domain, for the export; without them those of the last domain."""
        if self.domain_params is not None:
            return {name: self.domain_params.weights(index) for index, name in enumerate(order)}
        names = self.scope.names if self.scope else ()
        return {order[-1]: {name: self.model.get_parameter(name) for name in names}}

    def exported_weights(self, order: Sequence[str]) -> Mapping[str, Tensor]:
        """The parameters of the last domain's modules, which the exported model has; empty where the model
        has them already."""
        if self.domain_params is None:
            return {}
        return self.domain_params.weights(len(order) - 1)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        """Writes the model after the domains of the order; returns the Python expression that loads it."""
        if self.attached is not None:
            attach, options = self.attached
            modules = self.domain_modules(order)
            return export.export_parts(folder, self.model, modules, attach=attach, options=options)
        model = self.model_for(len(order) - 1)
        model.save_pretrained(folder)
        quoted_folder = json.dumps(str(folder), ensure_ascii=False)
        return f"transformers.{type(model).__name__}.from_pretrained({quoted_folder})"
