"""MERGE: after each domain, the weights that the domains have ended with become one model.

    theta <- rule(theta_0; theta_1, ..., theta_t)        the rules: cpt.methods.common.merging

A domain starts from the merged model (`merged`), from the base (`base`: domains are learned apart, and only
merged) or from what the last one has ended with (`previous`: the path is that of plain further pre-training,
and what is scored and exported is the merge). With start=merged, task_arithmetic at scale 1 and slerp at
share 1 are plain further pre-training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpt.adapters.bank import Scope
from cpt.core.sharding import local
from cpt.core.tensors import precise
from cpt.data.batch import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.merging import Ended, Merged
from cpt.methods.common.options import MergingOptions
from cpt.models.sensitivity import fisher
from cpt.models.sharding import named_weights
from cpt.models.snapshots import Snapshot


@dataclass(frozen=True, kw_only=True)
class MergeOptions(MergingOptions):
    """Options of merging."""


class Merge(ContinualModule):
    """Merges the weights of all domains so far at the end of each."""

    options: MergingOptions

    def __init__(self, options: MergingOptions, shared: Shared, *, scope: Scope | None = None) -> None:
        super().__init__(options, shared, scope=scope)
        self.merged = Merged(options, self.joined())
        # What a domain starts from; of start=merged that is the model.
        self.origin = Snapshot(self.model, persistent=options.start == "previous")

    def joined(self) -> Mapping[str, Tensor]:
        """The parameters that are merged, by name."""
        return named_weights(self.model)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.start != "merged":
            self.origin.restore(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        found = self.measure(probe) if self.options.rule == "fisher" else {}
        like, start = self.joined(), self.options.start
        began = self.merged.rows() if start == "merged" else self.origin.named()
        at_hand = self.origin.at_hand
        ended = Ended(
            like=like,
            # As the model had it, where its type is coarser than what is merged.
            began={name: precise(at_hand(local(began[name])).to(each.dtype)) for name, each in like.items()},
            ended={name: precise(local(each)) for name, each in like.items()},
            fisher={name: precise(local(found[name])) for name in like if name in found},
            seed=self.drawing().initial_seed(),
        )
        self.merged.add(ended)
        if start == "previous":
            self.origin.take(self.model)
        self.put(self.merged.rows())

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        """The diagonal Fisher of what the domain has ended with, as EWC estimates it."""
        with torch.autocast(self.device.type, enabled=False):
            return fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)

    @torch.no_grad()
    def put(self, rows: Mapping[str, Tensor]) -> None:
        """Makes the merged weights the model's."""
        for name, parameter in self.joined().items():
            local(parameter).copy_(rows[name])
