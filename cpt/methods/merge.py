"""MERGE: after each domain, the final weights of all domains so far become one model.

    theta <- rule(theta_0; theta_1, ..., theta_t)        the rules: cpt.methods.common.merging

A domain starts from the merged model (`merged`), from the base (`base`: domains are trained separately) or
from the end of the last one (`previous`: training is plain continual pre-training, the merge is scored and
exported). The papers of task arithmetic, TIES and DARE train each domain from the base, these rules' default;
that of the others is `merged`. There, average keeps 1/t of domain t, and task_arithmetic at scale 1 and slerp
at share 1 equal plain continual pre-training, which is logged."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.merging import Merging
from cpt.methods.common.options import MergingOptions
from cpt.models.fisher import fisher
from cpt.models.fsdp import named_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MergeOptions(MergingOptions):
    """Options of merging."""


class Merge(ContinualModule):
    """Merges the final weights of all domains so far."""

    options: MergeOptions

    def __init__(self, options: MergeOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.merging = Merging(options, self.model, named_weights(self.model))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index == 0 and self.options.keeps_all:
            log.info(
                "method.rule=%s with start=%s merges nothing: the run equals method=ncl by construction",
                *(self.options.rule, self.options.start),
            )
        self.merging.begin(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        found = {}
        if self.options.rule == "fisher":
            with torch.autocast(self.device.type, enabled=False):
                found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        weights, seed = named_weights(self.model), self.drawing().initial_seed()
        rows = self.merging.end(self.model, weights, fisher=found, seed=seed)
        self.merging.put(rows, weights)
