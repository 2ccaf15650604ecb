"""RECADAM (Chen et al., EMNLP 2020, eq. 9 and algorithm 1): a penalty towards theta* outside of the
optimizer, and a weight of the task's step that grows over the domain.

    lambda(t) = 1 / (1 + exp(-k (t - t_0)))
    theta <- theta + lambda(t) step(t);    theta <- theta - eta(t) (1 - lambda(t)) gamma (theta - theta*)

theta* is the base, or the model before the domain; step(t) is the optimizer's, weight decay included. Without
`annealed`, lambda is 1 in the first line and the second's factor eta gamma: decoupled L2-SP."""

import math
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from cpt.core.distributed import to_local
from cpt.data.collate import Batch
from cpt.gradient_masks.base import Constraint, Step
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import RecAdamOptions
from cpt.models.fsdp import named_weights
from cpt.models.weights import Snapshot

MOST = 2.0  # of eta gamma: from there on a weight overshoots theta* by its distance


class Recall(Constraint):
    """Keeps the share lambda of a step and adds the pull to the anchor."""

    def __init__(self, anchor: Snapshot, options: RecAdamOptions) -> None:
        super().__init__(apply_to="update")
        self.options = options
        self.anchors: dict[nn.Parameter, str] = {}
        self.share = 1.0  # lambda of the current step
        self.named, self.at_hand = anchor.named, anchor.at_hand

    def covered(self) -> Iterable[nn.Parameter]:
        return self.anchors if self.options.annealed or self.options.strength else ()

    def constrain(self, steps: Sequence[Step], optimizer: Optimizer) -> None:
        rates = {p: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        present, left = self.named(), (1 - self.share if self.options.annealed else 1)
        for parameter, step in steps:
            pulled = rates[parameter] * self.options.strength * left
            old, own = to_local(parameter) - to_local(step), to_local(step)
            own.mul_(self.share)
            apart = old + own - self.at_hand(to_local(present[self.anchors[parameter]]))
            own.sub_(apart, alpha=pulled)


class RecAdam(ContinualMethod):
    """Recalls the previous weights first, and then learns."""

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

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.towards == "previous":
            self.anchor.take(self.model)

    def transform_gradients(self, optimizer: Optimizer) -> None:
        present = self.anchor.named()
        self.recall.anchors = {p: name for name, p in named_weights(self.model).items() if name in present}
        if self.options.annealed:  # lambda at a step of the domain, counted from 0
            at = self.trainer.global_step / self.trainer.max_steps - self.options.middle
            self.recall.share = 1 / (1 + math.exp(-self.options.slope * at))
