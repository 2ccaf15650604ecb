"""MERGE: after each domain, the final weights of all domains so far become one model.

    theta <- rule(theta_0; theta_1, ..., theta_t)

A domain starts from the merged model (`merged`), from the base (`base`: domains are trained separately) or
from cpt.methods.options import MergeOptions, MergingOptions
from cpt.core.schema import Options, show
from the end of the last one (`previous`: training is plain continual pre-training, the merge is scored and
exported). The papers of task arithmetic, TIES and DARE train each domain from the base, these rules' default;
that of the others is `merged`. There, average keeps 1/t of domain t, and task_arithmetic at scale 1 and slerp
at share 1 equal plain continual pre-training, which is logged.

The rules work on one tensor at a time. theta_0 is the base, theta_k the end of domain k and s_k its start,
tau_k = theta_k - s_k, and m the merged weights of the domains before. A rule keeps 32-bit statistics of
earlier domains, and adds one more:

    average          m + (theta_t - m) / t                                    (Wortsman et al., ICML 2022)
    task_arithmetic  m + lambda tau_t, so theta_0 + lambda sum_k tau_k         (Ilharco et al., ICLR 2023)
    ties             theta_0 + lambda mean of those trimmed tau_k whose sign is that of their sum
                                                              (Yadav et al., NeurIPS 2023, Algorithm 1)
    dare             task_arithmetic, dare_ties ties, of tau_k whose entries are dropped with probability p
                     and else divided by 1 - p                     (Yu et al., ICML 2024, section 3.1)
    slerp            sin((1 - u) O) / sin O m + sin(u O) / sin O theta_t, O between the two (Shoemake, 1985)
    fisher           sum_k F_k theta_k / sum_k F_k, by entry    (Matena and Raffel, NeurIPS 2022, eq. 3)

All but slerp and the trimming are elementwise."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import floor

import torch
from torch import Tensor, nn

from cpt.core.distributed import dot, full_tensor, local_rows, to_local, total_norm, with_rows
from cpt.core.randomness import key
from cpt.core.tensors import NamedTensors, PreciseTensors, precise
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import MergeOptions, MergingOptions
from cpt.models.fisher import fisher
from cpt.models.fsdp import named_weights
from cpt.models.weights import Snapshot

ALIKE = 0.9995  # cosine from which slerp is a lerp


@dataclass(frozen=True)
class Ended:
    """A finished domain: tensors by parameter name, in at least 32 bits, local rows where they are sharded.
    `like` are the parameters themselves."""

    like: Mapping[str, Tensor]
    began: Mapping[str, Tensor]
    ended: Mapping[str, Tensor]
    fisher: Mapping[str, Tensor]  # of rule=fisher
    seed: int  # of dropped entries, alike in all processes


def find_threshold(values: Tensor, density: float) -> Tensor:
    """The smallest of the floor(density n) largest of n magnitudes, of at least one."""
    count = max(1, floor(Fraction(str(density)) * values.numel()))
    return values.flatten().kthvalue(values.numel() - count + 1).values


def drop_entries(task: Tensor, like: Tensor, *, p: float, seed: int) -> Tensor:
    """Entries dropped with probability p, the others divided by 1 - p; drawn for the whole tensor."""
    draw = torch.rand(like.shape, generator=torch.Generator().manual_seed(seed))
    kept = local_rows(draw, like).to(task.device) >= p
    return task * kept / (1 - p)


def slerp(one: Tensor, other: Tensor, share: float, *, like: Tensor) -> Tensor:
    """Spherical interpolation by a share of the arc; linear where tensors are parallel or zero."""
    a, b = with_rows([one, other], [like, like])
    lengths = total_norm([a]) * total_norm([b])
    cosine = dot([a], [b]) / lengths
    if not lengths or cosine.abs() > ALIKE:
        return torch.lerp(one, other, share)
    arc = torch.arccos(cosine)
    # Divided before they are multiplied: exact at both ends.
    return ((1 - share) * arc).sin() / arc.sin() * one + (share * arc).sin() / arc.sin() * other


class Merged(nn.Module):
    """The merged weights of the domains so far, and the rule's statistics of them."""

    domains: Tensor

    def __init__(self, options: MergingOptions, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.options = options
        self.weights = PreciseTensors(weights)
        zeros = {name: torch.zeros_like(each) for name, each in self.weights.named().items()}
        self.register_buffer("domains", torch.zeros((), dtype=torch.int64))
        if options.signs:
            counts = {name: each.to(torch.int16) for name, each in zeros.items()}
            self.base = PreciseTensors(self.weights.named(), persistent=False)
            self.above, self.below = PreciseTensors(zeros), PreciseTensors(zeros)
            self.counts_above, self.counts_below = NamedTensors(counts), NamedTensors(counts)
        elif options.rule == "fisher":
            self.fishers = PreciseTensors(zeros)

    def rows(self) -> dict[str, Tensor]:
        """The local rows of the merged weights by name."""
        return {name: to_local(each) for name, each in self.weights.named().items()}

    @torch.no_grad()
    def add(self, domain: Ended) -> None:
        """Merges one more domain."""
        tasks = self.tasks(domain) if self.options.rule in ("ties", "dare", "dare_ties") else {}
        for name, own in self.rows().items():
            own.copy_(self.one_more(name, self.weights.at_hand(own), domain, tasks.get(name)))
        self.domains += 1

    def one_more(self, name: str, merged: Tensor, domain: Ended, task: Tensor | None) -> Tensor:
        """A merged tensor with one more domain; `task` is its trimmed or dropped tau."""
        options, began, ended = self.options, domain.began[name], domain.ended[name]
        if task is not None:
            return self.vote(name, task) if options.signs else merged + options.scale * task
        match options.rule:
            case "average":
                return torch.lerp(merged, ended, 1 / (int(self.domains) + 1 + options.base))
            case "task_arithmetic":  # in this form it is exact where m is s_k and lambda is 1
                return torch.lerp(began, ended, options.scale) + (merged - began)
            case "slerp":
                first = self.domains == 0 and not options.base
                return slerp(merged, ended, 1.0 if first else options.share, like=domain.like[name])
            case _:
                fisher, kept = domain.fisher[name] + options.epsilon, to_local(self.fishers.named()[name])
                kept += fisher.to(kept.device)
                return torch.lerp(merged, ended, fisher / self.fishers.at_hand(kept))

    def tasks(self, domain: Ended) -> dict[str, Tensor]:
        """tau by name, trimmed and dropped by the rule."""
        options, like = self.options, domain.like
        tasks = {name: ended - domain.began[name] for name, ended in domain.ended.items()}
        if options.rule != "ties":
            for name, each in tasks.items():
                seed = key(domain.seed, "drop", name) % 2**63
                tasks[name] = drop_entries(each, like[name], p=options.drop, seed=seed)
        if options.rule == "dare" or options.density == 1:
            return tasks
        sizes = {name: full_tensor(*with_rows([each.abs()], [like[name]])) for name, each in tasks.items()}
        if options.trimmed == "model":
            of_all = find_threshold(torch.cat([each.flatten() for each in sizes.values()]), options.density)
            least = dict.fromkeys(tasks, of_all)
        else:
            least = {name: find_threshold(each, options.density) for name, each in sizes.items()}
        return {name: torch.where(each.abs() >= least[name], each, 0) for name, each in tasks.items()}

    def vote(self, name: str, task: Tensor) -> Tensor:
        """The base plus lambda times the mean of the trimmed tau whose sign is that of their sum, from sums
        and counts of positive and negative entries; 0 where the sum is."""
        kept = (self.above, self.below, self.counts_above, self.counts_below)
        added = (task.clamp_min(0), task.clamp_max(0), task > 0, task < 0)
        sums = []
        for each, more in zip(kept, added, strict=True):
            own = to_local(each.named()[name])
            own += more.to(own.device)
            sums.append(each.at_hand(own))
        above, below, count_above, count_below = sums
        sign = (above + below).sign()
        total = torch.where(sign > 0, above, below)
        count = torch.where(sign > 0, count_above, count_below).clamp_min(1)
        elected = torch.where(sign == 0, 0, total / count)
        return self.base.at_hand(to_local(self.base.named()[name])) + self.options.scale * elected


class Merging(nn.Module):
    """The merged weights of a model's parameters, by name, and the weights that a domain starts from."""

    def __init__(self, options: MergingOptions, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.start = options.start
        self.merged = Merged(options, weights)
        self.origin = Snapshot(model, persistent=options.start == "previous")

    def begin(self, model: nn.Module) -> None:
        """Sets the model to the start of a domain."""
        if self.start != "merged":
            self.origin.restore(model)

    def end(
        self, model: nn.Module, weights: Mapping[str, Tensor], *, fisher: Mapping[str, Tensor], seed: int
    ) -> dict[str, Tensor]:
        """Merges a finished domain; returns local rows of the merged weights by name."""
        began = self.merged.rows() if self.start == "merged" else self.origin.named()
        at_hand = self.origin.at_hand
        ended = Ended(
            like=weights,
            # In the model's precision, which may be coarser than that of the merged weights.
            began={
                name: precise(at_hand(to_local(began[name])).to(own.dtype)) for name, own in weights.items()
            },
            ended={name: precise(to_local(own)) for name, own in weights.items()},
            fisher={name: precise(to_local(fisher[name])) for name in weights if name in fisher},
            seed=seed,
        )
        self.merged.add(ended)
        if self.start == "previous":
            self.origin.take(model)
        return self.merged.rows()

    @torch.no_grad()
    def put(self, rows: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
        """Sets parameters to merged weights, by name."""
        for name, own in weights.items():
            to_local(own).copy_(rows[name])


log = logging.getLogger(__name__)


class Merge(ContinualMethod):
    """Merges the final weights of all domains so far."""

    options: MergeOptions

    def __init__(self, options: MergeOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.merging = Merging(options, self.model, named_weights(self.model))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        rule, start = self.options.rule, self.options.start
        whole = rule == "task_arithmetic" or (rule == "dare" and self.options.drop == 0)
        unchanged = whole and self.options.scale == 1 or (rule == "slerp" and self.options.share == 1)
        if self.domain.index == 0 and unchanged and start != "base":
            told = "method.rule=%s with start=%s merges nothing: the run equals method=ncl by construction"
            log.info(told, rule, start)
        self.merging.begin(self.model)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        found = {}
        if self.options.rule == "fisher":
            with torch.autocast(self.device.type, enabled=False):
                found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        weights, seed = named_weights(self.model), self.drawing().initial_seed()
        rows = self.merging.end(self.model, weights, fisher=found, seed=seed)
        self.merging.put(rows, weights)
