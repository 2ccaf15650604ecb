"""The base class of all methods: plain continual pre-training, with the hooks that a method overrides. Their
order is drawn in CONTRIBUTING.md; Lightning's own hooks, at the end of the class, call them.

Where a paper's released code departs from a method here, docs/fidelity.md has a row."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.domain_store import DomainParams, DomainScorer, Router, Scope
from cpt.adapters.options import Routing
from cpt.core.distributed import average_gradients, clip_gradients, total_norm
from cpt.core.randomness import key
from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.data.replay import ReplayConfig
from cpt.evaluation.perplexity import DocumentNLL
from cpt.gradient_masks.base import (
    Constraint,
    GradientMask,
    Protection,
    StepSnapshot,
    mark_observed,
    mark_recorded,
    scale_,
)
from cpt.models.forward import set_mode
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.weights import Snapshot, find_frozen, swap_weights
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Progress, Schedule
from cpt.optim.state import CarriedState, lay_out_moments, unfuse_mixed

OBSERVED = 32  # evaluated texts that masks observe, evenly spread over the order


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


class ContinualMethod(LightningModule):
    """Plain continual pre-training on a sequence of domains; a method overrides what it changes.

    All state is in the `state_dict`: buffers, neutral at construction. `scope` names the trained part of the
    model, None for all of it. A method with modules per domain calls `use_domain_params`."""

    requires_all_domains = False  # whether all domains must be known before the first one starts
    ends_domains = False  # whether the next domain has to start from what the end of one makes of the weights
    alone = False  # whether each domain starts from the base, so that its model is of that domain only
    period = 1  # steps after which the computation of a step repeats
    settled = 0  # the first step that computes what the later ones do
    needs_32_bits = False  # whether sharded weights must be in at least 32 bits
    # Where the export has modules: what adds them to a plain model (None: they are weights of it), and how.
    attached: tuple[Callable[..., Scope] | None, Mapping[str, Any]] | None = None
    options: Options

    def __init__(self, options: Options, context: MethodContext, *, scope: Scope | None = None) -> None:
        super().__init__()
        self.options, self.scope = options, scope
        self.model, self.objective, self.length = context.model, context.objective, context.length
        self.masks = cast(list[GradientMask], nn.ModuleList(context.masks))
        self.replay, self.freezing = context.replay, context.freeze
        self.auxiliary_models = nn.ModuleDict()  # auxiliary models by name
        self.make_optimizer, self.schedule, self.seed = context.optimizer, context.schedule, context.seed
        self.optimizer_state: CarriedState | None = None
        self.weights_before_decay: Snapshot | None = None  # the weights before a decay branch
        self.domain_params: DomainParams | None = None
        self.router: DomainScorer | None = None
        self.guard = NanGuard()
        self.snapshots: list[StepSnapshot] = []  # of the current step
        self.expanded_stages: list[Domain] = []  # the stages that the model has grown for
        self.evaluation: dict[str, DocumentNLL] = {}
        self.columns: list[str] = []  # evaluated texts, by their number in batches
        self.observes = False  # whether masks observe what is evaluated
        self.observed: set[str] = set()  # of the evaluated texts
        self.watch()

    def watch(self) -> None:
        for mask in self.masks:
            mask.watch(self.model, self.scope.maps if self.scope else None)

    @property
    def frozen(self) -> list[nn.Parameter]:
        """Parameters of the present model that no method trains."""
        outside = self.scope.others(self.model) if self.scope else []
        return find_frozen(self.model, self.freezing) + outside

    def use_domain_params(self, domain_params: DomainParams, routing: Routing) -> None:
        """Stores parameters per domain from now on, and scores texts with those that the routing selects."""
        self.domain_params, self.router = domain_params, Router(domain_params, routing, self.objective)

    def aux_models(self) -> dict[str, nn.Module]:
        """Auxiliary models by name (teachers, generators), kept in the state_dict; those
        with parameters that require a gradient are trained. Scores and export cover `self.model` alone."""
        return {}

    def train(self, mode: bool = True) -> "ContinualMethod":
        super().train(mode)
        for each in self.auxiliary_models.values():
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
        """Grows the model for a stage (blocks, heads, rows), without data, before the optimizer is made. A
        resumed run repeats it for all stages so far before their state is loaded. New trained parameters must
        be in the `scope`, if there is one."""

    def activate(self, domain: int) -> None:
        """Switches experts, adapters, requires_grad for a domain, without data; idempotent."""
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        """Called before a domain's first step; not on resume."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named scalar terms, whose sum is minimized, averaged over processes and micro-batches."""
        return {"lm": self.objective.nll(self.model, batch).sum() * batch["weight"]}

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

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood (nats) and number of predictions at each scored position, both [K], for
        text of the domain with this place in the order (-1: general text)."""
        score = self.objective.nll if self.router is None else partial(self.router.nll, domain=domain)
        nll = score(self.model, batch)
        return nll, torch.ones_like(nll)

    def exported_nll(self, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at each scored position, [K], that the exported model has to give:
        with modules per domain that of the domain's own."""
        if self.domain_params is None or self.router is None:
            return self.nll(batch, domain)[0]
        with swap_weights(self.model, self.domain_params.weights(domain)):
            return self.objective.nll(self.model, batch)

    def routing_weights(self, domain: int) -> dict[int, float]:
        """The weights, of sum 1, with which domains' modules (-1: the base) scored a domain's text in the
        last evaluation; empty without a router. Called in every process."""
        return {} if self.router is None else self.router.routing_weights(domain)

    @property
    def in_sequence(self) -> bool:
        return self.router is not None and self.router.in_sequence

    def constant_part(self, domain: int) -> int | None:
        """The domain (-1: the base) whose modules alone decide the scores of a domain's text, or None."""
        alone = type(self).nll is ContinualMethod.nll and type(self.router) is Router
        if not alone or type(self.domain_params) is not DomainParams or self.scope is None:
            return None
        parts = cast(Router, self.router).mixed(domain)
        return parts[0] if len(parts) == 1 and {*self.scope.names} <= {*self.domain_params.names} else None

    def model_for(self, domain: int) -> PreTrainedModel:
        """The model for a domain: it is exported, and end tasks fine-tune a copy of it. With a `scope` it is
        a copy already, in which everything is trainable."""
        if self.scope is None:
            return self.model
        copy = deepcopy(self.model).requires_grad_(True)
        if self.domain_params is not None:
            self.domain_params.load_into(copy, domain)
        return copy

    def domain_modules(self, order: Sequence[str]) -> Mapping[str, Mapping[str, Tensor]]:
        """The parameters of modules by domain, for the export; without them those of the last domain."""
        if self.domain_params is not None:
            return {name: self.domain_params.weights(index) for index, name in enumerate(order)}
        names = self.scope.names if self.scope else ()
        return {order[-1]: {name: self.model.get_parameter(name) for name in names}}

    def export(self, folder: Path, order: Sequence[str]) -> str:
        """Writes the model after the domains of the order; returns the Python expression that loads it."""
        if self.attached is not None:
            attach, how = self.attached
            return export.export_parts(
                folder, self.model, self.domain_modules(order), attach=attach, options=how
            )
        last = self.model_for(len(order) - 1)
        last.save_pretrained(folder)
        shown = json.dumps(str(folder), ensure_ascii=False)
        return f"transformers.{type(last).__name__}.from_pretrained({shown})"

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        """By parameter, the projection of a movement on the subspace protected for the whole domain; by
        default that of the first mask with one."""
        return {p: each for mask in [*self.masks][::-1] for p, each in mask.protected_subspace().items()}

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

    # From here on Lightning's side, which methods do not override.

    @property
    def data(self) -> DomainSequence:
        found: DomainSequence = self.trainer.datamodule  # type: ignore[attr-defined]
        return found

    @property
    def domain(self) -> Domain:
        """The current stage, or the last one."""
        return self.data.domain

    def expand_to(self, stage: Domain) -> None:
        """Grows the model for a stage, once. Raises ValueError where new parameters would not be trained."""
        if stage in self.expanded_stages:
            return
        before = parameter_shapes(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "shape", stage.name) % 2**63)
            self.expand(stage)
        self.expanded_stages.append(stage)
        if (after := parameter_shapes(self.model)) != before:
            frozen = {id(each) for each in self.frozen}
            new = {name: self.model.get_parameter(name) for name in after.keys() - before}
            if left := [name for name, p in new.items() if id(p) in frozen and p.requires_grad]:
                raise ValueError(
                    f"shape of {stage.name} has added {first_names(left)}, which would not be trained. "
                    "Allowed: names in the scope, outside of freeze, or requires_grad=False"
                )
            self.watch()

    def setup_stage(self, stage: Domain) -> None:
        """Grows the model and activates its modules."""
        self.expand_to(stage)
        self.activate(stage.index)

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]  # as Lightning takes it
        rates, groups = self.rates(), []
        for times in dict.fromkeys([1, *rates.values()]):
            own = [p for p in self.parameters() if p.requires_grad and rates.get(p, 1) == times]
            groups.append({"params": [p for p in own if p.ndim >= 2], "times": times})
            vectors = [p for p in own if p.ndim < 2]  # do not decay
            groups.append({"params": vectors, "times": times, "weight_decay": 0.0})
        optimizer = self.make_optimizer(groups)
        unfuse_mixed(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= group.pop("times")
        if self.optimizer_state is not None:
            self.optimizer_state.load_into(optimizer, self.named_parameters())
        scheduler = LambdaLR(optimizer, lambda step: self.schedule(self.data.progress(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.snapshots.clear()  # of a step that was rolled back
        for mask in self.masks:
            mask.activate(self.domain.index)
        if self.trainer.global_step == 0:
            if self.weights_before_decay is not None:  # a resumed stage has the weights from its checkpoint
                self.weights_before_decay.restore(self.model)
            if self.optimizer_state is not None:
                self.optimizer_state.clear()  # the optimizer has the state by now
            self.seeded("before")
            self.before_domain(self.data.importance_batches())
            for mask in self.masks:
                mask.before_domain(self.model, self.objective, self.data.importance_batches())
            self.zero_grad()
        optimizer = self.trainer.optimizers[0]
        inside = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if outside := [n for n, p in self.named_parameters() if p.requires_grad and id(p) not in inside]:
            raise ValueError(
                f"{first_names(outside)} requires a gradient in {self.domain.name} but is in no group of the "
                "optimizer. Allowed: what is grown in expand(stage) and switched in activate(domain)"
            )
        lay_out_moments(optimizer)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seeded(batch_idx)
        if batch_idx == self.branch_step * self.trainer.accumulate_grad_batches:
            self.capture_for_next_domain()

    @property
    def branch_step(self) -> int:
        """The step whose weights the next domain starts from: the last, or the one before a decay branch."""
        steps, ahead = self.data.steps(self.domain), self.data.recovery_steps(self.domain)
        if self.weights_before_decay is None:
            return steps
        return ahead + cast(Schedule, self.schedule).branch_step(steps - ahead)

    def capture_for_next_domain(self) -> None:
        """Stores the optimizer state, and the weights before a decay branch, for the next domain."""
        if self.weights_before_decay is not None:
            self.weights_before_decay.capture(self.model)
        if self.optimizer_state is not None:
            self.optimizer_state.capture(self.trainer.optimizers[0], self.named_parameters())

    def seeded(self, moment: int | str) -> None:
        """Seeds torch by seed, domain, moment and process."""
        seed = key(self.seed, self.domain.name, moment, self.global_rank) % 2**63
        if self.device.type == "cpu":  # torch.manual_seed takes as long as a small layer
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with mark_recorded(self.masks, alone=self.trainer.accumulate_grad_batches == 1):
            terms = self.losses(batch)
        self.guard.add_losses(terms)
        if self.trainer.global_step == 0 or self.is_logged():  # the bar has a loss from the first step on
            for term, value in terms.items():
                name = f"train/{term}/{self.domain.name}"
                self.log(name, value.detach(), prog_bar=term == "lm", sync_dist=True)
            self.log(f"train/lr/{self.domain.name}", self.trainer.optimizers[0].param_groups[0]["lr"])
        return cast(Tensor, sum(terms.values()))

    def is_logged(self) -> bool:
        """Whether loggers write this step: Lightning's do at the end of every n-th."""
        return bool((self.trainer.global_step + 1) % cast(Any, self.trainer).log_every_n_steps == 0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        average_gradients(self)
        self.on_gradients_ready()
        # Gradients are changed here; of steps to change, the parameters before them are kept.
        for mask in self.masks:
            for parameter, factor in mask.factors():
                if parameter.grad is not None and mask.apply_to == "gradient":
                    scale_(parameter.grad, factor)
                elif parameter.grad is not None:
                    self.snapshots.append(StepSnapshot(mask, [parameter], factor=factor, optimizer=optimizer))
        self.transform_gradients(optimizer)
        for constraint in (mask for mask in self.masks if isinstance(mask, Constraint)):
            covered = [parameter for parameter in constraint.covered() if parameter.grad is not None]
            if covered and constraint.apply_to == "gradient":
                with torch.no_grad():
                    constraint.constrain([(p, cast(Tensor, p.grad)) for p in covered], optimizer)
            elif covered:
                self.snapshots.append(StepSnapshot(constraint, covered))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        # torch's clip_grad_norm_ in two halves: the guard checks the norm in between.
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm([parameter.grad for parameter in parameters])
        if self.is_logged():
            self.log(f"train/grad_norm/{self.domain.name}", norm)
        self.step_is_made = self.guard.allows(self.trainer, norm)
        if not self.step_is_made:
            for parameter in parameters:
                parameter.grad = None  # every optimizer of torch then skips it, moments and decay too
        elif gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip_gradients(parameters, gradient_clip_val, norm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.step_is_made:
            for snapshot in sorted(self.snapshots, key=lambda each: not each.mask.comes_first):
                snapshot.apply(cast(Optimizer, optimizer))
            self.after_update()
        self.snapshots.clear()

    def on_fit_end(self) -> None:
        # Not in on_train_end: a run killed after its last step comes back to fit_end, but not to train_end.
        # By then Lightning has taken the module off its device.
        home = self.device
        self.to(self.trainer.strategy.root_device)
        with set_mode(self, training=False):
            self.zero_grad()
            self.seeded("after")
            self.after_domain(self.data.importance_batches())
            self.zero_grad()
        if self.branch_step == self.trainer.max_steps:
            self.capture_for_next_domain()
        self.to(home)

    def on_validation_start(self) -> None:
        if self.router is not None:
            self.router.begin()
        texts, self.columns = self.data.held_out, list(self.data.held_out)
        scored = self.data.scored_texts
        places = np.linspace(0, len(scored) - 1, min(len(scored), OBSERVED)).round().astype(int)
        self.observed = {scored[place] for place in places} if self.observes else set()
        sizes = {name: texts[name].documents for name in scored}
        self.evaluation = {name: DocumentNLL(size).to(self.device) for name, size in sizes.items()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        column = int(batch["column"])
        name = self.columns[column]
        seen = name in self.observed and "idle" not in batch
        with mark_observed(self.masks, column if seen else None):
            nll, count = self.nll(batch, self.data.domain_indices.get(name, -1))
        self.evaluation[name].update(nll, count, batch["documents"])

    def row(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The last evaluation: nats and scored tokens by text, each [documents]."""
        computed = {name: metric.compute() for name, metric in self.evaluation.items()}
        # torchmetrics makes a scalar of a tensor with one entry.
        return {name: (nll.view(-1), count.view(-1)) for name, (nll, count) in computed.items()}

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel would send the first process's buffers to all at every step: copies of the
        # model, which are equal anyway, and memories that are each process's own.
        return [name for name, _ in self.named_buffers()]


def parameter_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def first_names(names: Collection[str]) -> str:
    return ", ".join([*sorted(names)[:3], *["…"][: len(names) > 3]])
