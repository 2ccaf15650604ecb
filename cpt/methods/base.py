"""The base of all methods: plain continual pre-training, with hooks for what a method changes.

The hooks follow the constructor of `ContinualMethod`; `cpt.methods.wiring` calls them from Lightning's."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.adapters.domain_store import DomainParams, DomainScorer, Router, Scope
from cpt.adapters.options import Routing
from cpt.core.randomness import key
from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.data.replay import ReplayConfig
from cpt.evaluation.perplexity import DocumentNLL
from cpt.gradient_masks.base import GradientMask, Protection, StepSnapshot
from cpt.methods.wiring import LightningWiring
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.weights import Snapshot, frozen_parameters
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Progress
from cpt.optim.state import CarriedState


@dataclass(frozen=True, kw_only=True)
class MethodContext:
    """What a run gives every method in addition to its own options."""

    model: PreTrainedModel
    objective: Objective
    length: int  # tokens per sample
    masks: Sequence[GradientMask]  # of the config; a method's own come after them
    replay: ReplayConfig
    freeze: Freeze
    optimizer: Callable[..., Optimizer]  # of parameter groups
    schedule: Callable[[Progress], float]
    seed: int


class ContinualMethod(LightningWiring):
    """Plain continual pre-training on a sequence of domains; a method overrides what it changes.

    All state is in the `state_dict`: buffers, neutral at construction. `scope` names the trained part of the
    model, None for all of it. A method with modules per domain calls `use_domain_params`."""

    requires_all_domains = False  # whether all domains must be known before the first one starts
    alone = False  # whether each domain starts from the base, so that its model is of that domain only

    depends_on_total_steps = (
        False  # whether a step depends on the domain's number of steps, beyond its learning rate
    )
    period = 1  # steps after which the computation of a step repeats

    needs_32_bits = False  # whether sharded weights must be in at least 32 bits
    options: Options

    def __init__(self, options: Options, context: MethodContext, *, scope: Scope | None = None) -> None:
        super().__init__()
        self.options, self.scope = options, scope
        self.model, self.objective, self.length = context.model, context.objective, context.length
        self.masks = cast(list[GradientMask], nn.ModuleList(context.masks))
        self.replay, self.freezing = context.replay, context.freeze
        self.beside = nn.ModuleDict()  # auxiliary models by name
        self.make_optimizer, self.schedule, self.seed = context.optimizer, context.schedule, context.seed
        self.carried: CarriedState | None = None
        self.trunk: Snapshot | None = None  # the weights before a decay branch
        self.bank: DomainParams | None = None
        self.router: DomainScorer | None = None
        self.guard = NanGuard()
        self.snapshots: list[StepSnapshot] = []  # of the current step
        self.shaped: list[Domain] = []  # the stages that the model has grown for
        self.evaluation: dict[str, DocumentNLL] = {}
        self.columns: list[str] = []  # evaluated texts, by their number in batches
        self.watch()

    def watch(self) -> None:
        """Registers the present model with the masks."""
        for mask in self.masks:
            mask.watch(self.model, self.scope.maps if self.scope else None)

    @property
    def frozen(self) -> list[nn.Parameter]:
        """Parameters of the present model that no method trains."""
        outside = self.scope.others(self.model) if self.scope else []
        return frozen_parameters(self.model, self.freezing) + outside

    def use_domain_params(self, bank: DomainParams, routing: Routing) -> None:
        """Stores parameters per domain from now on, and scores texts with those that the routing selects."""
        self.bank, self.router = bank, Router(bank, routing, self.objective)

    def aux_models(self) -> dict[str, nn.Module]:
        """Auxiliary models by name (teachers, generators), asked for once and then in `self.beside`: they
        move with the model and are in the state_dict. Parameters that require a gradient are trained; a model
        without any stays in eval mode. Masks, freezing, scores and export cover `self.model` alone."""
        return {}

    def train(self, mode: bool = True) -> "ContinualMethod":
        super().train(mode)
        for each in self.beside.values():
            each.train(mode and any(parameter.requires_grad for parameter in each.parameters()))
        return self

    @property
    def needs_domain(self) -> bool:
        """Whether `nll` needs the domain of a text that has been trained on."""
        return self.router is not None and self.router.needs_domain

    def stages(self, order: Sequence[str]) -> list[Domain]:
        """The stages of a run: one per domain of the order."""
        return [Domain(name, index, (name,)) for index, name in enumerate(order)]

    def expand(self, stage: Domain) -> None:
        """Grows the model for a stage (blocks, heads, rows), without data. Called once per stage, in order,
        before the optimizer is made; a resumed run repeats it for all stages so far before their state is
        loaded, so that sizes depend on the stage, and draws on seed and stage. New trained parameters must be
        in the `scope`, if there is one."""

    def activate(self, domain: int) -> None:
        """Switches experts, adapters, requires_grad for a domain, without data; idempotent. Default: freezes
        what the config freezes."""
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        """Called before a domain's first step; not on resume."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named scalar terms, whose sum is minimized, averaged over processes and micro-batches."""
        return {"lm": self.objective.nll(self.model, batch).sum() * batch["weight"]}

    def on_gradients_ready(self) -> None:
        """Called with a step's gradients, averaged over processes and micro-batches, before masks."""

    def transform_gradients(self, optimizer: Optimizer) -> None:
        """Changes a step's averaged gradients in `parameter.grad`, after masks on gradients and before
        clipping, alike in all processes. The step may still be skipped: count steps in `after_update`."""

    def after_update(self) -> None:
        """Called after each optimizer step, masks applied."""

    def after_domain(self, probe: Iterable[Batch]) -> None:
        """Called after a domain's last step, in eval mode, gradients cleared before and after. `probe` is the
        process's share of batches on its device, possibly empty. Default: stores the domain's parameters."""
        if self.bank is not None:
            self.bank.keep(self.model, self.domain.index)

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood (nats) and number of predictions at each scored position, both [K], for
        text of the domain with this place in the order (-1: general text)."""
        score = self.objective.nll if self.router is None else partial(self.router.nll, domain=domain)
        nll = score(self.model, batch)
        return nll, torch.ones_like(nll)

    def used(self, domain: int) -> dict[int, float]:
        """The weights, of sum 1, with which domains' modules (-1: the base) scored a domain's text in the
        last evaluation; empty without a router. Called in every process."""
        return {} if self.router is None else self.router.used(domain)

    @property
    def in_sequence(self) -> bool:
        """Whether scores depend on the rows before."""
        return self.router is not None and self.router.in_sequence

    def constant_part(self, domain: int) -> int | None:
        """The domain (-1: the base) whose modules alone decide the scores of a domain's text, where nothing
        else is trained, so that they are constant until those are trained. None where more decides."""
        alone = type(self).nll is ContinualMethod.nll and type(self.router) is Router
        if not alone or type(self.bank) is not DomainParams or self.scope is None:
            return None
        if not set(self.scope.names) <= set(self.bank.names):
            return None
        parts = cast(Router, self.router).mixed(domain)
        return parts[0] if len(parts) == 1 else None

    def model_for(self, domain: int) -> PreTrainedModel:
        """The model for a domain: it is exported, and end tasks fine-tune a copy of it. With a `scope` it is
        a copy already, in which everything is trainable."""
        if self.scope is None:
            return self.model
        copy = deepcopy(self.model).requires_grad_(True)
        if self.bank is not None:
            self.bank.put(copy, domain)
        return copy

    def export(self, folder: Path, order: Sequence[str]) -> str:
        """Writes the model after the domains of the order; returns the Python expression that loads it."""
        last = self.model_for(len(order) - 1)
        last.save_pretrained(folder)
        return f'transformers.{type(last).__name__}.from_pretrained("{folder}")'

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        """By parameter, the projection of a movement on the subspace protected for the whole domain. Default:
        that of the first mask that protects the parameter."""
        found: dict[nn.Parameter, Protection] = {}
        for mask in self.masks:
            found = mask.protected_subspace() | found
        return found

    def diagnostics(self) -> dict[str, Tensor]:
        """Named tensors that the run folder keeps after a domain."""
        return {name: values for mask in self.masks for name, values in mask.diagnostics().items()}

    def drawing(self) -> torch.Generator:
        """A CPU generator for draws before a domain, alike in all processes."""
        return torch.Generator().manual_seed(key(self.seed, self.domain.name, "alike") % 2**63)

    @property
    def progress(self) -> float:
        """The completed share of the domain's steps: 0 at the first, 1 at the last."""
        return self.trainer.global_step / max(1, self.trainer.max_steps - 1)

    def rates(self) -> dict[nn.Parameter, float]:
        """Multiples of the learning rate by parameter. Default: none."""
        return {}

    def parameter_groups(self) -> Iterator[dict]:
        """The trained parameters as optimizer groups: per multiple of the learning rate (`times`) matrices,
        and all others, which do not decay."""
        rates = self.rates()
        for times in dict.fromkeys([1, *rates.values()]):
            own = [p for p in self.parameters() if p.requires_grad and rates.get(p, 1) == times]
            yield {"params": [p for p in own if p.ndim >= 2], "times": times}
            yield {"params": [p for p in own if p.ndim < 2], "times": times, "weight_decay": 0.0}
