"""Averages of weights (EMA, WiSE-FT, Reptile) and merges.

MERGE: after each domain, the final weights of all domains so far become one model.

    theta <- rule(theta_0; theta_1, ..., theta_t)

A domain starts from the merged model (`merged`), from the base (`base`, the default of task arithmetic, TIES
and DARE) or from the end of the last one (`previous`: plain continual pre-training, whose merge is scored and
exported). With `merged`, average keeps 1/t of domain t, and task_arithmetic at scale 1 and slerp at share 1
equal plain continual pre-training, which is logged.

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

from cpt.adapters import lora
from cpt.core.distributed import dot, full_tensor, local_rows, to_local, total_norm, with_rows
from cpt.core.randomness import key
from cpt.core.tensors import NamedTensors, PreciseTensors, precise
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.lora import LoRA
from cpt.methods.options import EMAOptions, MergeLoRAOptions, MergeOptions, ReptileOptions, WiSEFTOptions
from cpt.models.fisher import estimate_fisher
from cpt.models.fsdp import named_weights
from cpt.models.weights import PreciseSnapshot, Snapshot

log = logging.getLogger(__name__)
ALIKE = 0.9995  # cosine from which slerp is a lerp


@dataclass(frozen=True)
class Ended:
    """A finished domain: tensors in at least 32 bits by parameter name, local rows where sharded."""

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

    def __init__(self, options: MergeOptions, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.options = options
        self.weights = PreciseTensors(weights)
        zeros = {name: torch.zeros_like(each) for name, each in self.weights.named().items()}
        self.domains = nn.Buffer(torch.zeros((), dtype=torch.int64))
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
        tasks = self.tasks(domain) if self.options.rule in ("ties", "dare", "dare_ties") else {}
        for name, own in self.rows().items():
            own.copy_(self.one_more(name, self.weights.on_module_device(own), domain, tasks.get(name)))
        self.domains.add_(1)

    def one_more(self, name: str, merged: Tensor, domain: Ended, task: Tensor | None) -> Tensor:
        """A merged tensor with one more domain; `task` is its trimmed or dropped tau."""
        options, began, ended = self.options, domain.began[name], domain.ended[name]
        if task is not None:
            return self.vote(name, task) if options.signs else merged + options.scale * task
        if options.rule == "average":
            return torch.lerp(merged, ended, 1 / (int(self.domains) + 1 + options.base))
        if options.rule == "task_arithmetic":  # in this form it is exact where m is s_k and lambda is 1
            return torch.lerp(began, ended, options.scale) + (merged - began)
        if options.rule == "slerp":
            first = self.domains == 0 and not options.base
            return slerp(merged, ended, 1.0 if first else options.share, like=domain.like[name])
        fisher, kept = domain.fisher[name] + options.epsilon, to_local(self.fishers.named()[name])
        kept += fisher.to(kept.device)
        return torch.lerp(merged, ended, fisher / self.fishers.on_module_device(kept))

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
        least = {name: find_threshold(each, options.density) for name, each in sizes.items()}
        if options.trimmed == "model":
            whole = torch.cat([each.flatten() for each in sizes.values()])
            least = dict.fromkeys(tasks, find_threshold(whole, options.density))
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
            sums.append(each.on_module_device(own))
        above, below, count_above, count_below = sums
        sign = (above + below).sign()
        total = torch.where(sign > 0, above, below)
        count = torch.where(sign > 0, count_above, count_below).clamp_min(1)
        elected = torch.where(sign == 0, 0, total / count)
        return self.base.on_module_device(to_local(self.base.named()[name])) + self.options.scale * elected


class Merging(nn.Module):
    """The merged weights of a model's parameters, by name, and the weights that a domain starts from."""

    def __init__(self, options: MergeOptions, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.start = options.start
        self.merged = Merged(options, weights)
        self.origin = Snapshot(model, persistent=options.start == "previous")

    def begin(self, model: nn.Module) -> None:
        if self.start != "merged":
            self.origin.restore(model)

    @torch.no_grad()
    def end(
        self, model: nn.Module, weights: Mapping[str, Tensor], *, fisher: Mapping[str, Tensor], seed: int
    ) -> None:
        """Merges a finished domain's weights, which then are the merged ones."""
        rows = self.merged.rows() if self.start == "merged" else self.origin.named()
        # In the model's precision, which may be coarser than that of the merged weights.
        began = {
            n: precise(self.origin.on_module_device(to_local(rows[n])).to(p.dtype))
            for n, p in weights.items()
        }
        ended = {name: precise(to_local(own)) for name, own in weights.items()}
        fishers = {name: precise(to_local(fisher[name])) for name in weights if name in fisher}
        self.merged.add(Ended(like=weights, began=began, ended=ended, fisher=fishers, seed=seed))
        if self.start == "previous":
            self.origin.capture(model)
        merged = self.merged.rows()
        for name, own in weights.items():
            to_local(own).copy_(merged[name])


class Merge(ContinualMethod):
    """Merges the final weights of all domains so far."""

    options: MergeOptions
    ends_domains = True

    def __init__(self, options: MergeOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.merging = Merging(options, self.model, named_weights(self.model))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        options, rule = self.options, self.options.rule
        whole = rule == "task_arithmetic" or (rule == "dare" and options.drop == 0)
        unchanged = (whole and options.scale == 1) or (rule == "slerp" and options.share == 1)
        if self.domain.index == 0 and unchanged and options.start != "base":
            log.info(
                "No effect of method.rule=%s with start=%s: the run equals method=ncl", rule, options.start
            )
        self.merging.begin(self.model)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        found = {}
        if self.options.rule == "fisher":
            with torch.autocast(self.device.type, enabled=False):
                found = estimate_fisher(
                    self.model, importance_batches, objective=self.objective, estimator=self.options.estimator
                )
        seed = self.make_generator().initial_seed()
        self.merging.end(self.model, named_weights(self.model), fisher=found, seed=seed)


class MergeLoRA(LoRA):
    """MERGE_LORA: merges what the LoRA adapters of domains add to the weights.

    A domain trains a new adapter (Hu et al., ICLR 2022); at its end W_k = s_k + alpha / r B_k A_k, and layers
    are merged: tau_k is the product B_k A_k, not its factors."""

    options: MergeLoRAOptions
    ends_domains = True

    def __init__(self, options: MergeLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.merging = Merging(options, self.model, self.maps())

    def maps(self) -> dict[str, nn.Parameter]:
        """The frozen weights that have adapters, by name."""
        present = named_weights(self.model)
        names = [f"{name}.base_layer.weight" for name in lora.lora_layers(self.model)]
        return {name: present[name] for name in names}

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.merging.begin(self.model)
        if self.domain.index > 0:
            lora.reset_newest(self.model, self.make_generator().initial_seed())

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        seed = self.make_generator().initial_seed()
        lora.merge_newest(self.model)
        lora.reset_newest(self.model, seed)  # with product 0
        found = self.measure(importance_batches) if self.options.rule == "fisher" else {}
        self.merging.end(self.model, self.maps(), fisher=found, seed=seed)

    def measure(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """The diagonal Fisher of the frozen weights."""
        flipped = [*(each for each in self.model.parameters() if each.requires_grad), *self.maps().values()]
        for each in flipped:
            each.requires_grad_(not each.requires_grad)
        with torch.autocast(self.device.type, enabled=False):
            found = estimate_fisher(
                self.model, importance_batches, objective=self.objective, estimator=self.options.estimator
            )
        for each in flipped:
            each.requires_grad_(not each.requires_grad)
        return found


class EMA(ContinualMethod):
    """An exponential moving average of the weights (Polyak and Juditsky, 1992; Tarvainen and Valpola, NeurIPS
    2017, eq. 1).

        theta_ema <- alpha theta_ema + (1 - alpha) theta    after every optimizer step of a domain

    It starts at the model before each domain and replaces the model at the domain's end."""

    options: EMAOptions
    ends_domains = True

    def __init__(self, options: EMAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.average = PreciseSnapshot(self.model, persistent=True)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.average.capture(self.model)

    def after_update(self) -> None:
        self.average.capture(self.model, share=1 - self.options.decay)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.average.restore(self.model)


class WiSEFT(ContinualMethod):
    """Weight-space ensembles (Wortsman et al., CVPR 2022, eq. 1) from domain to domain.

        theta_t <- (1 - p) theta_t + p theta_{t-1}    at the end of each domain

    The paper does so once, with the zero-shot model as theta_{t-1} and alpha = 1 - p, by default 0.5."""

    options: WiSEFTOptions
    ends_domains = True

    def __init__(self, options: WiSEFTOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.previous = Snapshot(self.model, persistent=True)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.previous.capture(self.model)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.previous.restore(self.model, share=self.options.previous)


class Reptile(ContinualMethod):
    """REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), used against interference in meta-experience
    replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al., 2025):

        theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

    and at a domain's end, over the remaining steps. The optimizer keeps its moments."""

    options: ReptileOptions

    def __init__(self, options: ReptileOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.anchor = Snapshot(self.model, persistent=True)
        self.gone = nn.Buffer(torch.zeros((), dtype=torch.int64))  # steps since the anchor

    @property
    def interval(self) -> int:
        """k, in steps."""
        every = self.options.every
        return int(every) if every >= 1 else max(1, round(every * self.trainer.max_steps))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.interval > (steps := self.trainer.max_steps):
            told = "Interpolating once: method.every=%d is more than the %d steps of %s"
            log.info(told, self.interval, steps, self.domain.name)
        self.anchor.capture(self.model)
        self.gone.zero_()

    def after_update(self) -> None:
        self.gone.add_(1)
        if self.gone == self.interval:
            self.interpolate()

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.gone:
            self.interpolate()

    def interpolate(self) -> None:
        self.anchor.restore(self.model, share=1 - self.options.share)
        self.anchor.capture(self.model)
        self.gone.zero_()
