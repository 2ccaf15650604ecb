"""Lightning's side of a method: the optimizer, a training step with its masks, the start and the end of a
stage, and evaluation. It calls the hooks of `ContinualMethod` (cpt.methods.base), in the order of
CONTRIBUTING.md."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.adapters.domain_store import BASE, DomainScorer, Scope
from cpt.core.distributed import average_gradients, clip_gradients, total_norm
from cpt.core.messages import abbreviate
from cpt.core.processes import is_first_process
from cpt.core.randomness import torch_seed
from cpt.data.collate import Batch
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Domain
from cpt.data.replay import ReplayConfig
from cpt.evaluation.perplexity import DocumentDivergence, DocumentNLL
from cpt.gradient_masks.base import (
    Constraint,
    GradientMask,
    StepSnapshot,
    mark_observed,
    mark_recorded,
    scale_,
)
from cpt.models.chunked_head import WeightedLoss
from cpt.models.divergence import BaseWeights, PositionDivergence, compare_with_base
from cpt.models.forward import set_mode
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.parameter_groups import describe_groups, find_groups, find_multipliers
from cpt.models.part_losses import PartLosses
from cpt.models.router_loss import NO_ROUTER_LOSS, RouterWeights, make_router_loss
from cpt.models.token_weights import TokenWeights
from cpt.models.weights import Snapshot
from cpt.optim.nan_guard import NanGuard
from cpt.optim.options import SAME_FOR_ALL, ParameterOptions
from cpt.optim.rounded_optimizer import RoundedOptimizer
from cpt.optim.rounding import TO_NEAREST, Rounding, StochasticRounding
from cpt.optim.schedulers import Progress, Schedule
from cpt.optim.state import CarriedState, lay_out_moments, list_parameters, unfuse_mixed

log = logging.getLogger(__name__)
REFERENCE = "reference"  # the auxiliary model that token weights compare with
MAX_OBSERVED = 32  # evaluated texts that masks observe, evenly spread over the order


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
    router_weights: RouterWeights = NO_ROUTER_LOSS  # of a mixture of experts
    parameter_options: ParameterOptions = SAME_FOR_ALL
    rounding: Rounding = TO_NEAREST  # of steps to weights in 16 bits
    token_weights: TokenWeights = field(default_factory=TokenWeights)  # in the language-model loss
    tokenizer: PreTrainedTokenizerBase | None = None  # None: not trained yet, or not needed


class StageModule(LightningModule):
    """Trains and evaluates a model stage by stage. Methods do not override what is implemented here."""

    period = 1  # steps after which the computation of a step repeats
    settled = 0  # the first step that computes what the later ones do

    def __init__(self, context: MethodContext, *, scope: Scope | None) -> None:
        super().__init__()
        self.scope = scope
        self.model = context.model
        self.objective = context.objective
        self.length = context.length
        self.masks = cast(list[GradientMask], nn.ModuleList(context.masks))
        self.replay = context.replay
        self.freezing = context.freeze
        self.auxiliary_models = nn.ModuleDict()  # by name
        self.make_optimizer = context.optimizer
        self.schedule = context.schedule
        self.seed = context.seed
        self.router_loss = make_router_loss(self.model, context.router_weights)
        self.parameter_options = context.parameter_options
        self.rounding = context.rounding
        self.token_weights = context.token_weights
        self.logged_groups: list[str] = []  # what the log says of them

        # For the next domain: what the optimizer has learned, and the weights before a decay branch.
        self.optimizer_state: CarriedState | None = None
        self.weights_before_decay: Snapshot | None = None

        # Of the current step.
        self.guard = NanGuard()
        self.step_is_made = True
        self.step_terms: dict[str, Tensor] = {}  # of the loss, means over the micro-batches so far
        self.snapshots: list[StepSnapshot] = []
        self.has_weighed = False  # whether a loss has been made with the token weights
        self.part_losses = PartLosses()  # of a mixture

        self.expanded_stages: list[Domain] = []  # the stages that the model has grown for

        # Names in the state of what the files of the base give: files of a run do not hold them.
        self.names_left_to_base: frozenset[str] = frozenset()
        self.register_state_dict_post_hook(leave_out_base)
        self.register_load_state_dict_pre_hook(add_base)
        self.router: DomainScorer | None = None

        # Of the current evaluation.
        self.evaluation: dict[str, DocumentNLL] = {}
        self.columns: list[str] = []  # evaluated texts, by their number in batches
        self.observes = False  # whether masks observe what is evaluated
        self.observed: set[str] = set()  # of the evaluated texts

        # Where the divergence from the base is measured: the base's weights, in evaluations on the device of
        # the model, and whether the current evaluation is of the divergence instead of the losses.
        self.base_weights: BaseWeights | None = None
        self.base_weights_in_use: dict[str, Tensor] = {}
        self.measures_divergence = False
        self.divergences: dict[str, DocumentDivergence] = {}
        self.watch()

    # The hooks, with their documentation in ContinualMethod.

    @property
    @abstractmethod
    def frozen(self) -> list[nn.Parameter]: ...

    @abstractmethod
    def expand(self, stage: Domain) -> None: ...

    @abstractmethod
    def activate(self, domain: int) -> None: ...

    @abstractmethod
    def rates(self) -> dict[nn.Parameter, float]: ...

    @abstractmethod
    def before_domain(self, importance_batches: Iterable[Batch]) -> None: ...

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]: ...

    @abstractmethod
    def on_gradients_ready(self) -> None: ...

    @abstractmethod
    def transform_gradients(self, optimizer: Optimizer) -> None: ...

    @abstractmethod
    def after_update(self) -> None: ...

    @abstractmethod
    def after_domain(self, importance_batches: Iterable[Batch]) -> None: ...

    @abstractmethod
    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def base_parameters(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def scoring_parameters(self, domain: int) -> dict[str, Tensor]: ...

    # The model and its stages.

    @property
    def data(self) -> DomainSequence:
        return cast(DomainSequence, cast(Any, self.trainer).datamodule)

    @property
    def domain(self) -> Domain:
        """The current stage, or the last one."""
        return self.data.domain

    @property
    def progress(self) -> float:
        """The completed share of the domain's steps: 0 at the first, 1 at the last."""
        return self.trainer.global_step / max(1, self.trainer.max_steps - 1)

    def make_generator(self) -> torch.Generator:
        """A CPU generator for draws before a domain, alike in all processes."""
        return torch.Generator().manual_seed(torch_seed(self.seed, self.domain.name, "alike"))

    def train(self, mode: bool = True) -> "StageModule":
        super().train(mode)
        for model in self.auxiliary_models.values():
            is_trained = any(parameter.requires_grad for parameter in model.parameters())
            model.train(mode and is_trained)
        return self

    def watch(self) -> None:
        """Has the masks watch the model in its present shape."""
        projections = self.scope.projections if self.scope else None
        for mask in self.masks:
            mask.watch(self.model, projections)

    def setup_stage(self, stage: Domain) -> None:
        """Grows the model and activates its modules."""
        self.expand_to(stage)
        self.activate(stage.index)

    def expand_to(self, stage: Domain) -> None:
        """Grows the model for a stage, once. Raises ValueError where new parameters would not be trained."""
        if stage in self.expanded_stages:
            return
        # Seeded by the stage alone: a resumed run repeats the growth of all stages, and has to draw the same.
        shapes_before = list_parameter_shapes(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch_seed(self.seed, "shape", stage.name))
            self.expand(stage)
        self.expanded_stages.append(stage)

        shapes = list_parameter_shapes(self.model)
        if shapes == shapes_before:
            return
        # Parameters outside of a method's scope would silently stay at their first values.
        frozen = {id(parameter) for parameter in self.frozen}
        untrained = []
        for name in shapes.keys() - shapes_before:
            parameter = self.model.get_parameter(name)
            if id(parameter) in frozen and parameter.requires_grad:
                untrained.append(name)
        if untrained:
            raise ValueError(
                f"shape of {stage.name} has added {abbreviate(sorted(untrained))}, which would not be "
                "trained. Allowed: names in the scope, outside of freeze, or requires_grad=False"
            )
        self.watch()

    # The optimizer.

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]  # as Lightning takes it
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        multipliers = self.multiplied_rates(trained)
        undecayed = {parameter for parameter in trained if parameter.ndim < 2}
        for pattern_group in find_groups(self.model, self.parameter_options.no_decay, trained):
            undecayed.update(pattern_group.parameters)

        # Groups of each distinct multiplier, first the parameters without a multiplier (1).
        groups: list[dict[str, Any]] = []
        for multiplier in dict.fromkeys([1, *multipliers.values()]):
            parameters = [parameter for parameter in trained if multipliers.get(parameter, 1) == multiplier]
            with_decay = [parameter for parameter in parameters if parameter not in undecayed]
            without_decay = [parameter for parameter in parameters if parameter in undecayed]
            groups.append({"params": with_decay, "rate": multiplier})
            groups.append({"params": without_decay, "rate": multiplier, "weight_decay": 0.0})
        self.log_groups(trained)

        # The optimizer writes its own rate into each group; only then can it be multiplied.
        optimizer = self.make_optimizer(groups)
        unfuse_mixed(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= group.pop("rate")
        if isinstance(self.rounding, StochasticRounding):
            optimizer = RoundedOptimizer(optimizer, self.rounding)
        if self.optimizer_state is not None:
            self.optimizer_state.load_into(optimizer, self.named_parameters())
        scheduler = LambdaLR(optimizer, lambda step: self.schedule(self.data.progress(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def multiplied_rates(self, trained: Sequence[nn.Parameter]) -> dict[nn.Parameter, float]:
        """The multiples of the learning rate of the method, times those of `optim.lr_multipliers`."""
        multipliers = dict(self.rates())
        for parameter, factor in find_multipliers(self.model, self.parameter_options, trained).items():
            multipliers[parameter] = multipliers.get(parameter, 1) * factor
        return multipliers

    def log_groups(self, trained: Sequence[nn.Parameter]) -> None:
        """Logs how many parameters have a rate or a decay of their own, in the first stage and whenever a
        growing model changes it."""
        lines = describe_groups(self.model, self.parameter_options, trained)
        if lines != self.logged_groups and is_first_process():
            for line in lines:
                log.info("%s", line)
        self.logged_groups = lines

    def check_optimized(self, optimizer: Optimizer) -> None:
        """Raises ValueError for a parameter that requires a gradient and is in no group of the optimizer."""
        optimized = {id(parameter) for parameter in list_parameters(optimizer)}
        missing = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in optimized:
                missing.append(name)
        if missing:
            raise ValueError(
                f"{abbreviate(sorted(missing))} requires a gradient in {self.domain.name} but is in no group "
                "of the optimizer. Allowed: what is grown in expand(stage) and switched in activate(domain)"
            )

    # A stage.

    def on_train_start(self) -> None:
        self.snapshots.clear()  # of a step that was rolled back
        for mask in self.masks:
            mask.activate(self.domain.index)
        if self.trainer.global_step == 0:
            self.start_domain()

        # Also on resume: a loaded state is row-major, whatever its parameters are.
        optimizer = self.trainer.optimizers[0]
        self.check_optimized(optimizer)
        lay_out_moments(optimizer)

    def start_domain(self) -> None:
        """Prepares a domain's first step. A resumed stage has all of this from its checkpoint."""
        if self.weights_before_decay is not None:
            self.weights_before_decay.restore(self.model)
        if self.optimizer_state is not None:
            self.optimizer_state.clear()  # the optimizer has the state by now

        self.token_weights.before_domain(self.data.importance_batches(), self.reference_nll)
        # The method before its masks: it may restore the weights that they measure.
        self.seed_torch("before")
        self.before_domain(self.data.importance_batches())
        for mask in self.masks:
            mask.before_domain(self.model, self.objective, self.data.importance_batches())
        self.zero_grad()

    def seed_torch(self, moment: int | str) -> None:
        """Seeds torch by seed, domain, moment and process, and rounding by the same but the process."""
        self.rounding.start_step(self.seed, self.domain.name, moment)
        seed = torch_seed(self.seed, self.domain.name, moment, self.global_rank)
        if self.device.type == "cpu":  # torch.manual_seed takes as long as a small layer
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    @property
    def branch_step(self) -> int:
        """The step whose weights the next domain starts from: the last, or the one before a decay branch."""
        steps = self.data.steps(self.domain)
        if self.weights_before_decay is None:
            return steps
        # Recovery has a schedule of its own; the branch is in the one after it.
        recovery_steps = self.data.recovery_steps(self.domain)
        schedule = cast(Schedule, self.schedule)
        return recovery_steps + schedule.branch_step(steps - recovery_steps)

    def capture_for_next_domain(self) -> None:
        """Stores the optimizer state, and the weights before a decay branch, for the next domain."""
        if self.weights_before_decay is not None:
            self.weights_before_decay.capture(self.model)
        if self.optimizer_state is not None:
            self.optimizer_state.capture(self.trainer.optimizers[0], self.named_parameters())

    def on_fit_end(self) -> None:
        # Not in on_train_end: a run killed after its last step comes back to fit_end, but not to train_end.
        # By then Lightning has taken the module off its device.
        previous_device = self.device
        self.to(self.trainer.strategy.root_device)
        with set_mode(self, training=False):
            self.zero_grad()
            self.seed_torch("after")
            self.after_domain(self.data.importance_batches())
            self.zero_grad()
        # With a decay branch, `on_train_batch_start` has captured the weights and the optimizer state at the
        # branch's first step: the next domain starts from these.
        has_decay_branch = self.branch_step != self.trainer.max_steps
        if not has_decay_branch:
            self.capture_for_next_domain()
        self.to(previous_device)

    # A step.

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seed_torch(batch_idx)
        if batch_idx == self.branch_step * self.trainer.accumulate_grad_batches:
            self.capture_for_next_domain()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # Gradient masks that observe activations record them in these forward passes alone.
        is_only_micro_batch = self.trainer.accumulate_grad_batches == 1
        with mark_recorded(self.masks, is_only_micro_batch=is_only_micro_batch), self.record_routers():
            terms = self.losses(batch)
        self.check_weighed()
        if self.router_loss is not None:
            # The rows of this micro-batch, relative to the mean number of rows.
            terms.update(self.router_loss.terms(len(batch["input_ids"]) / batch["mean_rows"]))
        # The guard checks them with the gradient's norm, once per step.
        self.guard.add_losses(terms)
        if self.trainer.global_step == 0 or self.is_logged():  # the bar has a loss from the first step on
            self.log_terms(terms, batch_idx)
        return cast(Tensor, sum(terms.values()))

    def log_terms(self, terms: Mapping[str, Tensor], batch_idx: int) -> None:
        """Adds the terms of a micro-batch's loss to their means over the step. After the last micro-batch of
        the step the means are logged, with the learning rate."""
        num_micro_batches = self.trainer.accumulate_grad_batches
        if batch_idx % num_micro_batches == 0:
            self.step_terms = {}
        for term, value in terms.items():
            share = value.detach() / num_micro_batches
            if term in self.step_terms:
                self.step_terms[term] = self.step_terms[term] + share
            else:
                self.step_terms[term] = share

        is_last_micro_batch = (batch_idx + 1) % num_micro_batches == 0
        if not is_last_micro_batch:
            return
        for term, mean in self.step_terms.items():
            self.log(f"train/{term}/{self.domain.name}", mean, prog_bar=term == "lm", sync_dist=True)
        self.log(f"train/lr/{self.domain.name}", self.trainer.optimizers[0].param_groups[0]["lr"])

    def lm_loss(self, batch: Batch) -> WeightedLoss:
        """The language-model loss of a training batch at its scored positions, with the token weights of the
        run (`loss=…`); made before the batch's forward pass."""
        self.has_weighed = True
        loss = self.token_weights.make_loss(batch, self.reference_nll)
        return loss if "parts" not in batch else self.part_losses.observe(loss, batch)

    @torch.no_grad()
    def reference_nll(self, batch: Batch) -> Tensor:
        """Negative log-likelihood (nats) at the scored positions, [K], by the model that token weights
        compare with."""
        reference = cast(PreTrainedModel, self.auxiliary_models[REFERENCE])
        return self.objective.nll(reference, batch)

    def check_weighed(self) -> None:
        """Raises ValueError for a method whose losses leave the weights of tokens or of sources out."""
        if not self.has_weighed and any(part.options.weight != 1 for part in self.data.mixed.values()):
            raise ValueError(
                f"a weight of replay.sources is invalid with {type(self).__name__}: its losses are not made "
                "of self.lm_loss(batch), so no token is weighted. Allowed: weight=1"
            )
        if type(self.token_weights) is not TokenWeights and not self.has_weighed:
            raise ValueError(
                f"loss={type(self.token_weights).__name__} is invalid with {type(self).__name__}: its losses "
                "are not made of self.lm_loss(batch), so no token is weighted. Allowed: loss=none"
            )

    def record_routers(self) -> AbstractContextManager[None]:
        """Records the router logits of the next forward pass with gradients inside the context, if there is a
        loss of them."""
        return nullcontext() if self.router_loss is None else self.router_loss.recording(self.model)

    def is_logged(self) -> bool:
        """Whether loggers write this step: Lightning's do at the end of every n-th."""
        return bool((self.trainer.global_step + 1) % cast(Any, self.trainer).log_every_n_steps == 0)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        # Gradients are averaged first, so that all processes compute the same below. Constraints come last: a
        # factor or a projection of the method could violate them.
        average_gradients(self)
        self.on_gradients_ready()
        self.apply_factors(optimizer)
        self.transform_gradients(optimizer)
        self.apply_constraints(optimizer)

    def apply_factors(self, optimizer: Optimizer) -> None:
        """Scales gradients by the factors of masks; parameters whose step is to be scaled are copied."""
        for mask in self.masks:
            for parameter, factor in mask.factors():
                if parameter.grad is None:
                    continue
                if mask.apply_to == "gradient":
                    scale_(parameter.grad, factor)
                else:
                    self.snapshots.append(StepSnapshot(mask, [parameter], factor=factor, optimizer=optimizer))

    def apply_constraints(self, optimizer: Optimizer) -> None:
        """Constrains gradients; parameters whose step is to be constrained are copied."""
        for mask in self.masks:
            if not isinstance(mask, Constraint):
                continue
            covered = [parameter for parameter in mask.covered() if parameter.grad is not None]
            if not covered:
                continue
            if mask.apply_to == "gradient":
                with torch.no_grad():
                    mask.constrain([(p, cast(Tensor, p.grad)) for p in covered], optimizer)
            else:
                self.snapshots.append(StepSnapshot(mask, covered))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        # torch's clip_grad_norm_ in two halves: the guard checks the norm in between.
        parameters = [parameter for parameter in list_parameters(optimizer) if parameter.grad is not None]
        norm = total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
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
        # A skipped step has moved nothing, and counts for no method.
        if self.step_is_made:
            # Constraints with `comes_first` change the step before the factors of masks limit it.
            for snapshot in sorted(self.snapshots, key=lambda snapshot: not snapshot.mask.comes_first):
                snapshot.apply(cast(Optimizer, optimizer), self.rounding)
            self.after_update()
        self.snapshots.clear()

    # Evaluation.

    def on_validation_start(self) -> None:
        if self.router is not None:
            self.router.start_evaluation()
        texts = self.data.held_out
        self.columns = list(texts)
        scored = self.data.scored_texts

        # Few texts, evenly spread: what masks observe takes time for each of them.
        self.observed = set()
        if self.observes:
            positions = np.linspace(0, len(scored) - 1, min(len(scored), MAX_OBSERVED)).round().astype(int)
            self.observed = {scored[position] for position in positions}

        self.evaluation = {name: DocumentNLL(texts[name].documents).to(self.device) for name in scored}
        if self.measures_divergence:
            self.divergences = {}
            for name in scored:
                self.divergences[name] = DocumentDivergence(texts[name].documents).to(self.device)
            self.base_weights_in_use = self.base_parameters()

    def on_validation_end(self) -> None:
        self.base_weights_in_use = {}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        column = int(batch["column"])
        name = self.columns[column]
        if self.measures_divergence:
            weights = self.scoring_parameters(self.data.domain_indices.get(name, BASE))
            divergence = self.find_divergence(batch, base_weights=self.base_weights_in_use, weights=weights)
            self.divergences[name].update(
                divergence.kl, divergence.base_nll, divergence.nll, batch["documents"]
            )
            return

        # An idle batch is a repeated one, of a process that has no more text.
        is_observed = name in self.observed and "idle" not in batch
        with mark_observed(self.masks, column if is_observed else None):
            nll, count = self.nll(batch, self.data.domain_indices.get(name, BASE))
        self.evaluation[name].update(nll, count, batch["documents"])

    def document_losses(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The last evaluation: nats and scored tokens by text, each [documents]."""
        losses = {}
        for name, metric in self.evaluation.items():
            nll, count = metric.compute()
            # torchmetrics makes a scalar of a tensor with one entry.
            losses[name] = (nll.view(-1), count.view(-1))
        return losses

    def find_divergence(
        self, batch: Batch, *, base_weights: dict[str, Tensor], weights: dict[str, Tensor]
    ) -> PositionDivergence:
        """KL(base || model) at the scored positions; `weights` are those by name that the model has for a
        text instead of its own."""
        return compare_with_base(
            self.model, batch, objective=self.objective, base_weights=base_weights, weights=weights
        )

    def document_divergences(self) -> dict[str, Tensor]:
        """The last evaluation of the divergence, by text [4, documents]: see DocumentDivergence."""
        return {name: metric.compute().view(4, -1) for name, metric in self.divergences.items()}

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel would send the first process's buffers to all at every step: copies of the
        # model, which are equal anyway, and memories that are each process's own.
        return [name for name, _ in self.named_buffers()]


def leave_out_base(module: StageModule, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
    """The hook after a state is made: without what the base gives."""
    for name in module.names_left_to_base:
        del state[prefix + name]


def add_base(module: StageModule, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """The hook before a state is loaded: with the module's own tensors of the base, where the state leaves
    them out. Files of 0.1.0 hold them."""
    for name in module.names_left_to_base:
        if prefix + name not in state:
            state[prefix + name] = module.get_parameter(name)


def list_parameter_shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module.named_parameters()}
