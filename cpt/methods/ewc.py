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

MOST = 2.0  # of eta gamma: from there on a weight overshoots theta* by its distance


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

    def zeros(self) -> dict[str, Tensor]:
        return {name: torch.zeros_like(each) for name, each in self.model.named_parameters()}

    def weighted_distance(self, factor: float) -> Tensor:
        """factor/2 sum_i w_i (theta_i - theta*_i)^2, a scalar; w are the importances, or 1."""
        weights = None if self.importances is None else self.importances.named()
        away = self.anchor.offloaded
        return factor * quadratic_penalty(self.model, self.anchor.named(), weights, elsewhere=away)

    def protected_subspace(self) -> dict[nn.Parameter, Protection]:
        if self.importances is None:
            return super().protected_subspace()
        return project_on_important(self.model, self.importances.named()) | super().protected_subspace()


class Consolidation(AnchorPenalty):
    """An anchor penalty whose importances are measured after each domain and merged with those before."""

    needs_32_bits = True  # the importances do
    options: ConsolidationOptions

    def __init__(self, options: ConsolidationOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.domains = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @abstractmethod
    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """The importances of a domain by parameter name, in 32 bits."""

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        with torch.autocast(self.device.type, enabled=False):
            found = self.measure(importance_batches)
        merge, gamma, kept = self.options.merge, self.options.gamma, cast(NamedTensors, self.importances)
        known = kept.named()
        for name, new in found.items():
            old = kept.on_module_device(known[name]) if name in known else torch.zeros_like(new)
            kept.update({name: merge_importances(old, new, domains=self.domains, merge=merge, gamma=gamma)})
        self.domains.add_(1)
        self.anchor.capture(self.model)


def merge_importances(old: Tensor, new: Tensor, *, domains: Tensor, merge: str, gamma: float) -> Tensor:
    return (domains * old + new) / (domains + 1) if merge == "mean" else gamma * old + new


class EWC(Consolidation):
    """Pulls each weight to its value after the previous domain, by its Fisher."""

    options: EWCOptions

    def __init__(self, options: EWCOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.fisher = NamedTensors(self.zeros())

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
        self.importance = NamedTensors(self.zeros())

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        penalty = self.weighted_distance(2 * self.options.strength)  # first: the order of sums of gradients
        return super().losses(batch) | {"mas": penalty}

    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        def squared_norms(model: PreTrainedModel, batch: Batch) -> Tensor:  # ||f||^2, [K]
            logits, hidden = self.objective.outputs(model, batch)
            output = (
                logits if self.options.output == "logits" else select_positions(hidden, batch["positions"])
            )
            return output.float().square().sum(-1)

        estimator = self.options.estimator
        return estimate_sensitivity(
            self.model, importance_batches, squared_norms, estimator=estimator, power=1, label="MAS"
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
        self.importance, self.brought = NamedTensors(self.zeros()), PreciseTensors(self.zeros())
        self.before: dict[str, tuple[Tensor, Tensor]] = {}  # gradient and weight before the step, by name

    @property
    def importances(self) -> NamedTensors:
        return self.importance

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.anchor.capture(self.model)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        return super().losses(batch) | {"si": self.weighted_distance(2 * self.options.strength)}

    @torch.no_grad()
    def on_gradients_ready(self) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        for name, parameter in named_weights(self.model).items():
            if parameter.grad is not None:
                own, on_module_device = to_local(parameter), self.anchor.on_module_device
                apart = own - on_module_device(to_local(anchors[name]))
                penalty = 2 * self.options.strength * on_module_device(to_local(importances[name])) * apart
                self.before[name] = (to_local(parameter.grad) - penalty, own.clone())

    @torch.no_grad()
    def after_update(self) -> None:
        brought = self.brought.named()
        for name, parameter in named_weights(self.model).items():
            if name in self.before:
                gradient, start = self.before[name]
                kept = to_local(brought[name])
                kept.sub_((gradient * (to_local(parameter) - start)).to(kept.device))
        self.before.clear()

    @torch.no_grad()
    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        anchors, importances = self.anchor.named(), self.importance.named()
        present = named_weights(self.model)
        for name, brought in self.brought.named().items():
            way = to_local(present[name]).to(brought.device) - to_local(anchors[name])
            # Omega <- max(0, Omega + omega / (way^2 + xi))
            brought, squared = to_local(brought), way.square() + self.options.damping
            to_local(importances[name]).add_(brought / squared).clamp_min_(0)
            brought.zero_()
        self.anchor.capture(self.model)


class Recall(Constraint):
    """Keeps the share lambda of a step and adds the pull to the anchor."""

    comes_first = True

    def __init__(self, anchor: Snapshot, options: RecAdamOptions) -> None:
        super().__init__(apply_to="update")
        self.options = options
        self.anchors: dict[nn.Parameter, str] = {}
        self.share = 1.0  # lambda of the current step
        self.named, self.on_module_device = anchor.named, anchor.on_module_device

    def covered(self) -> Iterable[nn.Parameter]:
        return self.anchors if self.options.annealed or self.options.strength else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        present, left = self.named(), (1 - self.share if self.options.annealed else 1)
        for parameter, step in steps:
            pulled = rates[parameter] * self.options.strength * left
            old, own = to_local(parameter) - to_local(step), to_local(step)
            own.mul_(self.share)
            apart = old + own - self.on_module_device(to_local(present[self.anchors[parameter]]))
            own.sub_(apart, alpha=pulled)


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
        rate = getattr(context.optimizer, "keywords", {}).get("lr", 0.0)
        if rate * options.strength >= MOST:
            given = f"method.strength={options.strength:g} is invalid: at optim.lr={rate:g} it pulls"
            raise ValueError(f"{given} weights past where they were. Allowed: below {MOST / rate:g}")
        self.anchor = Snapshot(self.model, persistent=options.towards == "previous")
        self.recall = Recall(self.anchor, options)
        self.masks.append(self.recall)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.towards == "previous":
            self.anchor.capture(self.model)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        present = self.anchor.named()
        self.recall.anchors = {p: name for name, p in named_weights(self.model).items() if name in present}
        if self.options.annealed:  # lambda at a step of the domain, counted from 0
            at = self.trainer.global_step / self.trainer.max_steps - self.options.middle
            self.recall.share = 1 / (1 + math.exp(-self.options.slope * at))
