"""EWC, elastic weight consolidation (Kirkpatrick et al., PNAS 2017, eq. 3), and online EWC (Schwarz et al.,
ICML 2018).

    L(theta) = L_lm(theta) + lambda/2 sum_i F_i (theta_i - theta*_i)^2
    F_i      = E_x [ (dL_lm(x)/dtheta_i)^2 ]    at theta*, the model at the end of the previous domain

After each domain its Fisher F_new is merged into that of the t domains before it; the penalty stays one
term:

    mean:  F <- (t F + F_new) / (t + 1)         decay:  F <- gamma F + F_new"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.distributed import to_local
from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Options
from cpt.core.tensors import NamedTensors, PreciseTensors
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Constraint, Protection, Step
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import (
    ConsolidationOptions,
    EWCOptions,
    L2Options,
    MASOptions,
    RecAdamOptions,
    SIOptions,
)
from cpt.models.fisher import estimate_fisher, estimate_sensitivity, project_on_important
from cpt.models.forward import select_positions
from cpt.models.fsdp import named_weights
from cpt.models.weights import Snapshot, quadratic_penalty

MAX_PULL = 2.0  # of eta gamma: there a step moves a weight past theta* by the distance that it had


class AnchorPenalty(ContinualMethod):
    """A method that pulls the weights to `anchor`, those of the base or of the end of the last domain; the
    most important twentieth of each parameter counts as protected."""

    def __init__(self, options: Options, context: MethodContext, *, anchor_moves: bool = True) -> None:
        super().__init__(options, context)
        self.anchor = Snapshot(self.model, persistent=anchor_moves)

    @property
    def importances(self) -> NamedTensors | None:
        """The weights of the penalty; None: all are 1."""
        return None

    def make_zeros(self) -> dict[str, Tensor]:
        """A zero for each weight, by parameter name: importances before the first domain."""
        return {name: torch.zeros_like(parameter) for name, parameter in self.model.named_parameters()}

    def weighted_distance(self, factor: float) -> Tensor:
        """factor/2 sum_i w_i (theta_i - theta*_i)^2, a scalar; w are the importances, or 1."""
        weights = None if self.importances is None else self.importances.named()  # None: all are 1
        anchors = self.anchor.named()
        return factor * quadratic_penalty(self.model, anchors, weights, is_offloaded=self.anchor.offloaded)

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        if self.importances is None:
            return super().protected_subspace()
        return project_on_important(self.model, self.importances.named()) | super().protected_subspace()


class Consolidation(AnchorPenalty):
    """An anchor penalty whose importances are measured after each domain and merged with those before."""

    needs_32_bits = True  # the importances do
    options: ConsolidationOptions
    reads_importance_batches = True

    def __init__(self, options: ConsolidationOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.domains = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """The importances of a domain by parameter name, in 32 bits."""

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            measured = self.measure(importance_batches)
        importances = cast(NamedTensors, self.importances)
        stored = importances.named()
        # One parameter at a time: where importances are offloaded, the device then holds one of the old ones.
        for name, new in measured.items():
            old = torch.zeros_like(new)  # of a parameter that the model has grown
            if name in stored:
                old = importances.on_module_device(stored[name])
            merged = merge_importances(
                old, new, domains=self.domains, merge=self.options.merge, gamma=self.options.gamma
            )
            importances.update({name: merged})
        # `merge_importances` needs the number of earlier domains, so it is increased only now. The anchor is
        # the weights at which the importances were measured.
        self.domains.add_(1)
        self.anchor.capture(self.model)


def merge_importances(old: Tensor, new: Tensor, *, domains: Tensor, merge: str, gamma: float) -> Tensor:
    """The importances of `domains` domains with those of one more.

    >>> first, second, one = torch.tensor(2.0), torch.tensor(4.0), torch.tensor(1)
    >>> merge_importances(first, second, domains=one, merge="mean", gamma=0.5)
    tensor(3.)
    >>> merge_importances(first, second, domains=one, merge="decay", gamma=0.5)
    tensor(5.)
    """
    return (domains * old + new) / (domains + 1) if merge == "mean" else gamma * old + new


class EWC(Consolidation):
    """Pulls each weight to its value after the previous domain, by its Fisher."""

    options: EWCOptions

    def __init__(self, options: EWCOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.fisher = NamedTensors(self.make_zeros())

    @property
    def importances(self) -> NamedTensors:
        return self.fisher

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"ewc": self.penalty()}

    def penalty(self) -> Tensor:
        return self.weighted_distance(self.options.strength)

    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        return estimate_fisher(
            self.model, importance_batches, objective=self.objective, estimator=self.options.estimator
        )


class L2(AnchorPenalty):
    """L2: EWC with every weight equally important, its reference (Kirkpatrick et al., PNAS 2017, fig. 2);
    towards the base it is L2-SP (Li et al., ICML 2018, eq. 2).

        L(theta) = L_lm(theta) + lambda/2 ||theta - theta*||^2

    theta* is the model at the end of the previous domain, or the base."""

    options: L2Options

    def __init__(self, options: L2Options, context: MethodContext) -> None:
        super().__init__(options, context, anchor_moves=options.towards == "previous")

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.towards == "previous":
            self.anchor.capture(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"l2": self.weighted_distance(self.options.strength)}


class MAS(Consolidation):
    """MAS, memory aware synapses (Aljundi et al., ECCV 2018, eq. 2 to 4): EWC's penalty with importances that
    need no label.

        L(theta)  = L_lm(theta) + lambda sum_i Omega_i (theta_i - theta*_i)^2
        Omega_i   = E_x | d mean_k ||f(x)_k||^2 / d theta_i |      at theta*, in eval mode

    f(x)_k are the logits, or the last hidden states, at the k-th scored position of a sample; the mean over
    positions makes Omega independent of its length. Omega is merged over domains as in EWC; the paper's sum
    is `merge: decay` at gamma 1."""

    options: MASOptions

    def __init__(self, options: MASOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.importance = NamedTensors(self.make_zeros())

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        # lambda, not lambda/2. Computed before L_lm, as gradients are summed in the order of the terms.
        penalty = self.weighted_distance(2 * self.options.strength)
        return super().losses(batch) | {"mas": penalty}

    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        def sum_squares(outputs: Tensor, positions: slice) -> Tensor:
            """||f||^2 of outputs [k, D or V] at a slice of the positions, [k]: a TokenLoss without labels."""
            return outputs.float().square().sum(-1)

        def squared_norms(model: PreTrainedModel, batch: Batch) -> Tensor:
            """||f||^2 at all scored positions of a batch, [K]."""
            if self.options.output == "hidden":
                _, hidden = self.objective.run(model, batch, lambda logits: None)
                return sum_squares(select_positions(hidden, batch["positions"]), slice(None))
            norms, _ = self.objective.run(model, batch, lambda logits: logits.values(sum_squares))
            return norms

        return estimate_sensitivity(
            self.model,
            importance_batches,
            squared_norms,
            estimator=self.options.estimator,
            power=1,
        )


class SI(AnchorPenalty):
    """SI, synaptic intelligence (Zenke, Poole and Ganguli, ICML 2017, eq. 3 to 5): EWC's penalty with
    importances accumulated along the training path.

        L(theta) = L_lm(theta) + c sum_i Omega_i (theta_i - theta*_i)^2
        omega_i  = - sum over steps of g_i (theta_i' - theta_i)      g the gradient of L_lm alone
        Omega_i <- max(0, Omega_i + omega_i / ((theta_i - theta*_i)^2 + xi))    at a domain's end; omega <- 0

    theta' - theta is the step as made, with clipping, decay and masks; g is averaged over processes and
    micro-batches, before masks and clipping. The maximum is from the authors' code."""

    options: SIOptions

    def __init__(self, options: SIOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.importance = NamedTensors(self.make_zeros())
        # omega, in at least 32 bits: a step adds little to it.
        self.path_integral = PreciseTensors(self.make_zeros())
        # The gradient of L_lm and the weight by parameter name, between backward and the step's end.
        self.before_step: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.anchor.capture(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"si": self.weighted_distance(2 * self.options.strength)}

    @torch.no_grad()
    def on_gradients_ready(self) -> None:
        anchors = self.anchor.named()
        importances = self.importance.named()
        for name, parameter in named_weights(self.model).items():
            if parameter.grad is None:
                continue
            weight = to_local(parameter)
            anchor = self.anchor.on_module_device(to_local(anchors[name]))
            importance = self.anchor.on_module_device(to_local(importances[name]))
            # `grad` is that of both terms of the loss; omega takes that of L_lm alone.
            penalty_gradient = 2 * self.options.strength * importance * (weight - anchor)
            self.before_step[name] = (to_local(parameter.grad) - penalty_gradient, weight.clone())

    @torch.no_grad()
    def after_update(self) -> None:
        integrals = self.path_integral.named()
        for name, parameter in named_weights(self.model).items():
            if name in self.before_step:
                gradient, start = self.before_step[name]
                integral = to_local(integrals[name])
                # omega <- omega - g (theta' - theta)
                integral.sub_((gradient * (to_local(parameter) - start)).to(integral.device))
        self.before_step.clear()

    @torch.no_grad()
    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        anchors = self.anchor.named()
        importances = self.importance.named()
        weights = named_weights(self.model)
        # Integrals, importances and anchors are stored on one device, which may be the CPU: weights are moved
        # to it.
        for name, sharded_integral in self.path_integral.named().items():
            integral = to_local(sharded_integral)
            distance = to_local(weights[name]).to(integral.device) - to_local(anchors[name])
            # Omega <- max(0, Omega + omega / (distance^2 + xi))
            damped = distance.square() + self.options.damping
            to_local(importances[name]).add_(integral / damped).clamp_min_(0)
            integral.zero_()
        # Only now: the distances above are from the weights with which the domain started.
        self.anchor.capture(self.model)


class Recall(Constraint):
    """Keeps the share lambda of a step and adds the pull to the anchor."""

    comes_first = True

    def __init__(self, anchor: Snapshot, options: RecAdamOptions) -> None:
        super().__init__(apply_to="update")
        self.options = options
        # Methods of the anchor, not the module itself, which is part of the method's state already.
        self.named_anchors = anchor.named
        self.on_module_device = anchor.on_module_device
        self.anchor_names: dict[nn.Parameter, str] = {}  # of parameters that are pulled; set before each step
        self.share = 1.0  # lambda of the current step

    def covered(self) -> Iterable[nn.Parameter]:
        return self.anchor_names if self.options.annealed or self.options.strength else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        rates: dict[nn.Parameter, float] = {}
        for group in optimizer.param_groups:
            rates.update(dict.fromkeys(group["params"], group["lr"]))
        anchors = self.named_anchors()
        pull_share = 1 - self.share if self.options.annealed else 1

        for parameter, sharded_step in steps:
            step = to_local(sharded_step)
            pull = rates[parameter] * self.options.strength * pull_share
            # The parameter has made its whole step already. The pull is towards theta* from where lambda of
            # the step leads.
            weight_before = to_local(parameter) - step
            step.mul_(self.share)
            anchor = self.on_module_device(to_local(anchors[self.anchor_names[parameter]]))
            distance = weight_before + step - anchor
            step.sub_(distance, alpha=pull)


class RecAdam(ContinualMethod):
    """RECADAM (Chen et al., EMNLP 2020, eq. 9 and algorithm 1): a penalty towards theta* outside of the
    optimizer, and a weight of the task's step that grows over the domain.

        lambda(t) = 1 / (1 + exp(-k (t - t_0)))
        theta <- theta + lambda(t) step(t);    theta <- theta - eta(t) (1 - lambda(t)) gamma (theta - theta*)

    theta* is the base, or the model before the domain; step(t) is the optimizer's, weight decay included.
    Without `annealed`, lambda is 1 in the first line and the second's factor eta gamma: decoupled L2-SP."""

    options: RecAdamOptions

    def __init__(self, options: RecAdamOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        # An optimizer of a plug-in may be another function than a partial, whose rate is not known here.
        rate = getattr(context.optimizer, "keywords", {}).get("lr", 0.0)
        if rate * options.strength >= MAX_PULL:
            raise InvalidOptionError(
                "method.strength",
                f"{options.strength:g}",
                reason=f"at optim.lr={rate:g} it pulls weights past where they were",
                allowed=f"below {MAX_PULL / rate:g}",
            )
        self.anchor = Snapshot(self.model, persistent=options.towards == "previous")
        self.recall = Recall(self.anchor, options)
        self.masks.append(self.recall)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.towards == "previous":
            self.anchor.capture(self.model)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        # Looked up at each step: where weights are sharded they are other parameters than at first.
        anchors = self.anchor.named()
        weights = named_weights(self.model)
        self.recall.anchor_names = {weight: name for name, weight in weights.items() if name in anchors}
        if self.options.annealed:  # lambda at a step of the domain, counted from 0
            distance = self.trainer.global_step / self.trainer.max_steps - self.options.middle
            self.recall.share = 1 / (1 + math.exp(-self.options.slope * distance))
