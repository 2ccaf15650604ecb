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
from cpt.core.distributed import dot, full_tensor, select_local_rows, shard_rows, to_local, total_norm
from cpt.core.messages import count_noun
from cpt.core.randomness import torch_seed
from cpt.core.tensors import NamedTensors, PreciseTensors, upcast
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.lora import LoRA
from cpt.methods.options import EMAOptions, MergeLoRAOptions, MergeOptions, ReptileOptions, WiSEFTOptions
from cpt.models.fisher import estimate_fisher
from cpt.models.fsdp import named_weights
from cpt.models.weights import PreciseSnapshot, Snapshot

log = logging.getLogger(__name__)
PARALLEL_COSINE = 0.9995  # the least |cosine| at which slerp interpolates linearly


@dataclass(frozen=True)
class FinishedDomain:
    """The weights of one domain at its start and its end, in at least 32 bits, by parameter name. For a
    sharded model they are the rows of this process."""

    parameters: Mapping[str, Tensor]  # the model's parameters themselves, which say how they are sharded
    start_weights: Mapping[str, Tensor]  # s_k
    end_weights: Mapping[str, Tensor]  # theta_k
    fisher: Mapping[str, Tensor]  # F_k with rule=fisher, empty with the other rules
    seed: int  # for the entries that DARE drops, the same in all processes


def find_threshold(magnitudes: Tensor, density: float) -> Tensor:
    """The threshold at and above which a share `density` of the n magnitudes lies: the smallest of the
    floor(density n) largest ones, at least the largest one.

    >>> find_threshold(torch.tensor([3.0, 1.0, 4.0, 2.0]), 0.5)
    tensor(3.)
    """
    # A decimal fraction, as 0.29 in binary is less: of 100 entries it would keep 28.
    count = max(1, floor(Fraction(str(density)) * magnitudes.numel()))
    # kthvalue counts from the smallest.
    return magnitudes.flatten().kthvalue(magnitudes.numel() - count + 1).values


def drop_entries(task_vector: Tensor, parameter: Tensor, *, p: float, seed: int) -> Tensor:
    """A task vector whose entries are set to 0 with probability p and else divided by 1 - p. It has the rows
    of `parameter` that this process has. The draw is for all rows of the parameter, so that the same entries
    are dropped on any number of processes."""
    uniforms = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed))
    is_retained = select_local_rows(uniforms, parameter).to(task_vector.device) >= p
    return task_vector * is_retained / (1 - p)


def gather_parameter_rows(rows: Tensor, parameter: Tensor) -> Tensor:
    """All rows of a tensor that is sharded like a parameter, from the rows of this process. A collective."""
    [sharded] = shard_rows([rows], [parameter])
    return full_tensor(sharded)


def slerp(start: Tensor, end: Tensor, share: float, *, like: Tensor) -> Tensor:
    """Spherical interpolation by a share of the arc from start to end, which are the rows of this process of
    tensors that are sharded as `like` is; linear interpolation where the two are parallel or one is zero.

    >>> quarter_turn = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    >>> slerp(*quarter_turn, 0.5, like=torch.zeros(2))
    tensor([0.7071, 0.7071])
    """
    # The angle is between all rows of both tensors; each process then interpolates its own rows.
    sharded_start, sharded_end = shard_rows([start, end], [like, like])
    lengths = total_norm([sharded_start]) * total_norm([sharded_end])
    cosine = dot([sharded_start], [sharded_end]) / lengths
    # The divisor sin O is 0, or so small that it loses digits.
    if not lengths or cosine.abs() > PARALLEL_COSINE:
        return torch.lerp(start, end, share)

    arc = torch.arccos(cosine)  # O
    # Divided before they are multiplied: exact at both ends.
    return ((1 - share) * arc).sin() / arc.sin() * start + (share * arc).sin() / arc.sin() * end


class Merged(nn.Module):
    """The merged weights of the domains so far, and the rule's statistics of them."""

    def __init__(self, options: MergeOptions, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.options = options
        self.weights = PreciseTensors(weights)
        self.domains = nn.Buffer(torch.zeros((), dtype=torch.int64))  # how many are merged

        # The sign of the sum is known after the last domain only: until then both candidates are kept, the
        # sums and counts of the positive and of the negative entries.
        zeros = {name: torch.zeros_like(tensor) for name, tensor in self.weights.named().items()}
        if options.has_sign_election:
            counts = {name: tensor.to(torch.int16) for name, tensor in zeros.items()}
            self.base = PreciseTensors(self.weights.named(), persistent=False)
            self.positive_sums = PreciseTensors(zeros)
            self.negative_sums = PreciseTensors(zeros)
            self.positive_counts = NamedTensors(counts)
            self.negative_counts = NamedTensors(counts)
        elif options.rule == "fisher":
            self.fishers = PreciseTensors(zeros)

    def local_weights(self) -> dict[str, Tensor]:
        """The local rows of the merged weights by name."""
        return {name: to_local(tensor) for name, tensor in self.weights.named().items()}

    @torch.no_grad()
    def add(self, domain: FinishedDomain) -> None:
        """Merges one more domain, and updates the rule's statistics."""
        # Before the first tensor is merged: trimming may compare the entries of the whole model.
        task_vectors: dict[str, Tensor] = {}
        if self.options.rule in ("ties", "dare", "dare_ties"):
            task_vectors = self.sparse_task_vectors(domain)
        for name, stored in self.local_weights().items():
            merged = self.weights.on_module_device(stored)
            stored.copy_(self.merge_domain(name, merged, domain, task_vectors.get(name)))
        # At the end: `merge_domain` reads how many domains there were before.
        self.domains.add_(1)

    def merge_domain(
        self, name: str, merged: Tensor, domain: FinishedDomain, task_vector: Tensor | None
    ) -> Tensor:
        """The merged weights of one tensor with one more domain, where `merged` are those of the domains
        before. `task_vector` is the domain's tau of this tensor, with entries set to 0 by rule=ties, dare or
        dare_ties; None with the other rules. The rules that need statistics of the domains add to these."""
        options = self.options
        start = domain.start_weights[name]
        end = domain.end_weights[name]
        if task_vector is not None:
            if options.has_sign_election:
                return self.elect(name, task_vector)
            return merged + options.scale * task_vector

        if options.rule == "average":
            num_models = int(self.domains) + 1
            if options.base:  # the base is one of the averaged models, and the first m
                num_models += 1
            return torch.lerp(merged, end, 1 / num_models)

        if options.rule == "task_arithmetic":
            # m + lambda (theta_t - s_t), written so that the result is exactly `end` where merged == start
            # and scale == 1.
            return torch.lerp(start, end, options.scale) + (merged - start)

        if options.rule == "slerp":
            # Before the first domain m is the base. Unless `base` includes it as a model, the first domain
            # replaces it.
            replaces_base = self.domains == 0 and not options.base
            share = 1.0 if replaces_base else options.share
            return slerp(merged, end, share, like=domain.parameters[name])

        # rule=fisher. A weighted mean, one term after another: m + F_t / (F_1 + ... + F_t) (theta_t - m)
        fisher = domain.fisher[name] + options.epsilon
        fisher_sum = add_to_stored(self.fishers, name, fisher)
        return torch.lerp(merged, end, fisher / fisher_sum)

    def sparse_task_vectors(self, domain: FinishedDomain) -> dict[str, Tensor]:
        """The task vectors tau of a domain by name, with entries set to 0 by the rule: `dare` drops entries
        at random, `ties` trims the small ones, and `dare_ties` drops first and trims what remains."""
        options = self.options
        task_vectors: dict[str, Tensor] = {}
        for name, end in domain.end_weights.items():
            task_vectors[name] = end - domain.start_weights[name]
        if options.rule != "ties":
            for name, task_vector in task_vectors.items():
                seed = torch_seed(domain.seed, "drop", name)
                task_vectors[name] = drop_entries(
                    task_vector, domain.parameters[name], p=options.drop, seed=seed
                )
        if options.rule == "dare" or options.density == 1:
            return task_vectors

        # A threshold is a quantile of all rows: each process would find another in the rows that it has.
        magnitudes = {}
        for name, task_vector in task_vectors.items():
            magnitudes[name] = gather_parameter_rows(task_vector.abs(), domain.parameters[name])

        # One threshold for the entries of the whole model, or one for those of each tensor.
        thresholds: dict[str, Tensor] = {}
        if options.trimmed == "model":
            all_magnitudes = torch.cat([tensor.flatten() for tensor in magnitudes.values()])
            thresholds = dict.fromkeys(task_vectors, find_threshold(all_magnitudes, options.density))
        else:
            for name, tensor in magnitudes.items():
                thresholds[name] = find_threshold(tensor, options.density)

        trimmed = {}
        for name, task_vector in task_vectors.items():
            is_large = task_vector.abs() >= thresholds[name]
            trimmed[name] = torch.where(is_large, task_vector, 0)
        return trimmed

    def elect(self, name: str, task_vector: Tensor) -> Tensor:
        """The merged weights of one tensor by TIES, with the trimmed task vector of one more domain, whose
        entries are added to the stored sums and counts: the base plus lambda times the mean over those
        domains whose entry has the sign of the sum over all domains; the base where that sum is 0."""
        positive_sum = add_to_stored(self.positive_sums, name, task_vector.clamp_min(0))
        negative_sum = add_to_stored(self.negative_sums, name, task_vector.clamp_max(0))
        positive_count = add_to_stored(self.positive_counts, name, task_vector > 0)
        negative_count = add_to_stored(self.negative_counts, name, task_vector < 0)

        sign = (positive_sum + negative_sum).sign()
        elected_sum = torch.where(sign > 0, positive_sum, negative_sum)
        # At least 1, as no domain may have an entry of that sign: a sum of 0 over 0 domains is 0.
        elected_count = torch.where(sign > 0, positive_count, negative_count).clamp_min(1)
        mean = torch.where(sign == 0, 0, elected_sum / elected_count)
        base = self.base.on_module_device(to_local(self.base.named()[name]))
        return base + self.options.scale * mean


def add_to_stored(sums: NamedTensors, name: str, term: Tensor) -> Tensor:
    """Adds a term, the rows of this process, to the sum of a name, which is changed in place; returns the
    process's rows of the sum on the module's device."""
    stored = to_local(sums.named()[name])
    stored += term.to(stored.device)
    return sums.on_module_device(stored)


class Merging(nn.Module):
    """The merged weights of a model's parameters, by name, and the weights that a domain starts from."""

    def __init__(self, options: MergeOptions, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.start = options.start
        self.merged = Merged(options, weights)
        # What a domain starts from if not from the merged weights. Only `previous` moves it: the base is
        # given again by the construction of the model.
        self.origin = Snapshot(model, persistent=options.start == "previous")

    def start_domain(self, model: nn.Module) -> None:
        if self.start != "merged":
            self.origin.restore(model)

    @torch.no_grad()
    def end_domain(
        self, model: nn.Module, weights: Mapping[str, Tensor], *, fisher: Mapping[str, Tensor], seed: int
    ) -> None:
        """Merges a finished domain's weights, which then are the merged ones."""
        origins = self.merged.local_weights() if self.start == "merged" else self.origin.named()
        start_weights = {}
        end_weights = {}
        for name, weight in weights.items():
            # Rounded as the domain has started from it: the model's precision may be coarser than that of
            # the merged weights, and tau must not have the rounding in it.
            origin = self.origin.on_module_device(to_local(origins[name])).to(weight.dtype)
            start_weights[name] = upcast(origin)
            end_weights[name] = upcast(to_local(weight))
        fishers = {name: upcast(to_local(fisher[name])) for name in weights if name in fisher}
        self.merged.add(
            FinishedDomain(
                parameters=weights,
                start_weights=start_weights,
                end_weights=end_weights,
                fisher=fishers,
                seed=seed,
            )
        )

        # Before the merged weights replace them: the next domain starts from those that were trained.
        if self.start == "previous":
            self.origin.capture(model)
        merged = self.merged.local_weights()
        for name, weight in weights.items():
            to_local(weight).copy_(merged[name])


class Merge(ContinualMethod):
    """Merges the final weights of all domains so far."""

    options: MergeOptions
    reads_importance_batches = True
    ends_domains = True

    def __init__(self, options: MergeOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.merging = Merging(options, self.model, named_weights(self.model))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        options = self.options
        # Where each domain continues the one before, and the merged weights are its end, nothing is merged.
        if self.domain.index == 0 and self.adds_whole_tasks() and options.start != "base":
            log.info(
                "No effect of method.rule=%s with start=%s: the run equals method=ncl",
                options.rule,
                options.start,
            )
        self.merging.start_domain(self.model)

    def adds_whole_tasks(self) -> bool:
        """Whether the merged weights move to the end of each domain."""
        options = self.options
        if options.rule == "slerp":
            return options.share == 1
        is_sum = options.rule == "task_arithmetic" or (options.rule == "dare" and options.drop == 0)
        return is_sum and options.scale == 1

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        fisher: dict[str, Tensor] = {}
        if self.options.rule == "fisher":
            # In the precision of the weights: 16 bits would round the gradients that are squared.
            with torch.autocast(self.device.type, enabled=False):
                fisher = estimate_fisher(
                    self.model, importance_batches, objective=self.objective, estimator=self.options.estimator
                )
        seed = self.make_generator().initial_seed()
        self.merging.end_domain(self.model, named_weights(self.model), fisher=fisher, seed=seed)


class MergeLoRA(LoRA):
    """MERGE_LORA: merges what the LoRA adapters of domains add to the weights.

    A domain trains a new adapter (Hu et al., ICLR 2022); at its end W_k = s_k + alpha / r B_k A_k, and layers
    are merged: tau_k is the product B_k A_k, not its factors."""

    takes_quantized = False  # it merges the adapters into the weights
    options: MergeLoRAOptions
    reads_importance_batches = True
    ends_domains = True

    def __init__(self, options: MergeLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.merging = Merging(options, self.model, self.merged_weights())

    @property
    def rewritten(self) -> list[nn.Parameter]:
        return list(self.adapted_weights().values())

    def merged_weights(self) -> dict[str, nn.Parameter]:
        """What is merged, by name: the frozen weights that have adapters, and modules that are trained
        fully."""
        weights = named_weights(self.model)
        return self.adapted_weights() | {name: weights[name] for name in self.saved_names}

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.merging.start_domain(self.model)
        if self.domain.index > 0:
            lora.reset_newest(self.model, self.make_generator().initial_seed())

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        seed = self.make_generator().initial_seed()
        # First W_k = s_k + alpha / r B A, then an adapter with product 0: the layers compute with W_k alone,
        # at which the Fisher is measured and which is merged.
        lora.merge_newest(self.model)
        lora.reset_newest(self.model, seed)
        fisher = self.measure_fisher(importance_batches) if self.options.rule == "fisher" else {}
        self.merging.end_domain(self.model, self.merged_weights(), fisher=fisher, seed=seed)
        lora.reset_magnitudes(self.model)  # of the weights that are merged now

    def measure_fisher(self, importance_batches: Iterable[Batch]) -> dict[str, Tensor]:
        """The diagonal Fisher of what is merged: the frozen weights require gradients meanwhile in place of
        their adapters."""
        saved = {id(self.model.get_parameter(name)) for name in self.saved_names}
        switched = [p for p in self.model.parameters() if p.requires_grad and id(p) not in saved]
        switched += self.adapted_weights().values()
        # The adapters' factors off and the frozen weights on; the same loop at the end undoes it.
        for parameter in switched:
            parameter.requires_grad_(not parameter.requires_grad)
        with torch.autocast(self.device.type, enabled=False):
            fisher = estimate_fisher(
                self.model, importance_batches, objective=self.objective, estimator=self.options.estimator
            )
        for parameter in switched:
            parameter.requires_grad_(not parameter.requires_grad)
        return fisher


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
        # theta_ema + (1 - alpha) (theta - theta_ema)
        self.average.capture(self.model, share=1 - self.options.decay)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.average.restore(self.model, rounding=self.rounding)


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
        # theta_t + p (theta_{t-1} - theta_t)
        self.previous.restore(self.model, share=self.options.previous, rounding=self.rounding)


class Reptile(ContinualMethod):
    """REPTILE (Nichol, Achiam and Schulman, 2018, algorithm 1), used against interference in meta-experience
    replay (Riemer et al., ICLR 2019, section 3) and in continual pre-training (Abbes et al., 2025):

        theta <- theta_a + epsilon (theta - theta_a),   theta_a <- theta      after every k optimizer steps

    and at a domain's end, over the remaining steps. The optimizer keeps its moments."""

    options: ReptileOptions

    def __init__(self, options: ReptileOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.anchor = Snapshot(self.model, persistent=True)
        self.steps_since_anchor = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @property
    def interval(self) -> int:
        """k, in steps; an option below 1 is a share of the domain's steps."""
        if self.options.interpolate_every >= 1:
            return int(self.options.interpolate_every)
        return max(1, round(self.options.interpolate_every * self.trainer.max_steps))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        steps = self.trainer.max_steps
        if self.interval > steps:
            log.info(
                "Interpolating once: method.interpolate_every=%d is more than the %s of %s",
                self.interval,
                count_noun(steps, "step"),
                self.domain.name,
            )
        self.anchor.capture(self.model)
        self.steps_since_anchor.zero_()

    def after_update(self) -> None:
        self.steps_since_anchor.add_(1)
        if self.steps_since_anchor == self.interval:
            self.interpolate()

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.steps_since_anchor:
            self.interpolate()

    def interpolate(self) -> None:
        """theta <- theta_a + epsilon (theta - theta_a), then theta_a <- theta."""
        # A share of 1 - epsilon of the way back is the same.
        self.anchor.restore(self.model, share=1 - self.options.share, rounding=self.rounding)
        self.anchor.capture(self.model)
        self.steps_since_anchor.zero_()
