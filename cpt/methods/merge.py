"""MERGE: after each domain, the weights that the domains have ended with become one model.

    theta <- rule(theta_0; theta_1, ..., theta_t)        the rules: cpt.methods.common.merging

A domain starts from the merged model (`merged`), from the base (`base`: domains are trained apart, and only
merged) or from what the last one has ended with (`previous`: the path is that of plain further pre-training,
and what is scored and exported is the merge). The papers of task arithmetic, TIES and DARE train each domain
from the base, which is these rules' default; that of the others is `merged`. There average leaves 1/t of what
domain t has learned, and task_arithmetic at scale 1 and slerp at share 1 are plain further pre-training,
which a log line reports."""

import logging
from collections.abc import Iterable

import torch

from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.merging import Merging, put
from cpt.methods.options import MergeOptions
from cpt.models.fisher import fisher
from cpt.models.fsdp import named_weights

log = logging.getLogger(__name__)


class Merge(ContinualModule):
    """Merges the weights of all domains so far at the end of each."""

    options: MergeOptions

    def __init__(self, options: MergeOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.merging = Merging(options, self.model, named_weights(self.model))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.domain.index == 0 and self.options.keeps_all:
            log.info(
                "method.rule=%s with start=%s merges nothing: the run equals method=ncl by construction",
                self.options.rule,
                self.options.start,
            )
        self.merging.begin(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        found = {}
        if self.options.rule == "fisher":
            with torch.autocast(self.device.type, enabled=False):
                found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        weights, seed = named_weights(self.model), self.drawing().initial_seed()
        put(self.merging.end(self.model, weights, fisher=found, seed=seed), weights)
