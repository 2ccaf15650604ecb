"""Weights of the tokens of a training batch in the language-model loss: the config group `loss`.

    L = 1/N sum_i w_i l_i,    l_i the negative log-likelihood (nats) of scored token i of N in a step

    EntropyWeights        w_i = (H_k(p_i) / ln k)^alpha, H_k the entropy of the model's prediction p_i
                          over its k likeliest tokens, renormalized
                          (EAFT; Diao et al., 2026, arXiv 2601.02151, eq. 2 and 3; alpha: section 5.1)
    ExcessLossSelection   w_i = 1 / share for the `share` of tokens with the largest l_i - l_i(reference),
                          0 for the others
                          (Rho-1; Lin et al., NeurIPS 2024, arXiv 2404.07965, eq. 3 to 5)
    SampleWeights         w_i = exp(-f / tau), f the base's mean loss over the sample of token i
                          (FLOW; Sanyal et al., ICML 2025, arXiv 2502.02797, algorithm 1; tau: remark 4.2)

No gradient flows through weights, and N counts all scored tokens, also those of weight 0. What is evaluated,
and what importances are measured by, is never weighted. Where released code differs, docs/fidelity/ has a
row."""

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from cpt.core.distributed import gather_rows
from cpt.core.schema import Options
from cpt.core.tensors import move_uncast
from cpt.data.collate import Batch
from cpt.models.chunked_head import Logits, WeightedLoss, make_nll
from cpt.models.forward import token_nll
from cpt.models.options import EntropyWeightsOptions, ExcessLossSelectionOptions, SampleWeightsOptions

NO_OPTIONS = Options()
ReferenceNLL = Callable[[Batch], Tensor]  # the reference model's loss (nats) at each scored position, [K]


class TokenWeights(nn.Module):
    """All tokens of a batch weigh 1. A class below it weighs them otherwise."""

    needs_reference = False  # whether a frozen second model scores each training batch
    reads_importance_batches = False  # whether `before_domain` reads its batches

    def __init__(self, options: Options = NO_OPTIONS) -> None:
        super().__init__()

    def before_domain(self, batches: Iterable[Batch], reference_nll: ReferenceNLL) -> None:
        """Called before a domain's first step with the process's share of its importance batches, in every
        process; not on resume."""

    def make_loss(self, batch: Batch, reference_nll: ReferenceNLL) -> WeightedLoss:
        """The weighted language-model loss of a training batch, by position."""
        return WeightedLoss(make_nll(batch))

    def describe_accumulation(self) -> str:
        """How a step of several micro-batches differs from one of the whole batch; empty: it does not."""
        return ""


class EntropyWeights(TokenWeights):
    """EAFT: tokens of which the model is sure weigh little, so that contradicting text changes it little."""

    def __init__(self, options: EntropyWeightsOptions) -> None:
        super().__init__()
        self.options = options

    def make_loss(self, batch: Batch, reference_nll: ReferenceNLL) -> WeightedLoss:
        def weighted_nll(logits: Tensor, positions: slice) -> Tensor:
            entropy = top_entropy(logits.detach(), k=self.options.top_k)
            return entropy.pow(self.options.alpha) * token_nll(logits, batch, positions)

        return WeightedLoss(weighted_nll)


def top_entropy(logits: Tensor, *, k: int) -> Tensor:
    """The entropy of the k largest of logits [K, V], renormalized, over its maximum ln k: 0 to 1, [K].

    >>> top_entropy(torch.tensor([[1.0, 1.0, 0.0], [9.0, -90.0, -90.0]]), k=2)
    tensor([1., 0.])
    """
    num_tokens = min(k, logits.shape[-1])
    log_probabilities = logits.float().topk(num_tokens, dim=-1).values.log_softmax(-1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    # Rounding must not lead below 0: a fractional power of that is NaN.
    return (entropy / math.log(num_tokens)).clamp_min(0)


class ExcessLossSelection(TokenWeights):
    """Rho-1: only tokens whose loss is furthest above that of a reference model are trained on."""

    def __init__(self, options: ExcessLossSelectionOptions) -> None:
        super().__init__()
        self.options = options
        self.needs_reference = options.share < 1  # else all tokens are chosen

    def make_loss(self, batch: Batch, reference_nll: ReferenceNLL) -> WeightedLoss:
        nll = make_nll(batch)
        if not self.needs_reference:
            return WeightedLoss(nll)
        reference = reference_nll(batch)

        def find_weights(logits: Logits) -> Tensor:
            excess = logits.values(nll) - reference
            groups = torch.zeros_like(batch["rows"])
            if self.options.ranked == "sequence":
                groups = batch["rows"]
            return choose_highest(excess, groups, share=self.options.share) / self.options.share

        return WeightedLoss(nll, find_weights=find_weights)

    def describe_accumulation(self) -> str:
        if not self.needs_reference or self.options.ranked == "sequence":
            return ""
        return "loss=rho1 ranks the tokens of each micro-batch among themselves"


def choose_highest(values: Tensor, groups: Tensor, *, share: float) -> Tensor:
    """1 for the round(share n) highest of the n values of each group, at least one, and 0 for the others,
    [K]; `groups` [K] are numbers from 0 on. Among equal values the first ones are chosen.

    >>> values = torch.tensor([3.0, 1.0, 2.0, 5.0])
    >>> choose_highest(values, torch.tensor([0, 0, 0, 1]), share=0.5)
    tensor([1., 0., 1., 1.])
    """
    # By group, and within it from the highest value on: two stable sorts, the minor key first.
    by_value = values.argsort(descending=True, stable=True)
    order = by_value[groups[by_value].argsort(stable=True)]

    counts = torch.bincount(groups)
    num_chosen = (share * counts.double()).round().clamp_min(1)
    group_starts = counts.cumsum(0) - counts
    sorted_groups = groups[order]
    ranks = torch.arange(len(order), device=order.device) - group_starts[sorted_groups]
    is_chosen = ranks < num_chosen[sorted_groups]
    return torch.zeros_like(values).index_copy(0, order, is_chosen.to(values))


class SampleWeights(TokenWeights):
    """FLOW: samples that the base predicts well weigh more. A sample is a sequence, or a document where
    documents share sequences isolated."""

    def __init__(self, options: SampleWeightsOptions) -> None:
        super().__init__()
        self.options = options
        self.needs_reference = options.temperature is not None
        self.reads_importance_batches = options.temperature == "median"
        # tau (nats). Its median is estimated before each domain, and is part of a run's files.
        temperature = math.nan
        if isinstance(options.temperature, int | float):
            temperature = options.temperature
        self.temperature = nn.Buffer(torch.tensor(temperature, dtype=torch.double))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SampleWeights":
        """Moves tau, as `nn.Module.to` does by an `fn`, but does not cast it to 16 bits (bf16-true)."""
        return super()._apply(partial(move_uncast, fn), recurse)

    @torch.no_grad()
    def before_domain(self, batches: Iterable[Batch], reference_nll: ReferenceNLL) -> None:
        if self.options.temperature != "median":
            return
        losses = [self.temperature.new_empty(0)]  # a process may have no batches
        for batch in batches:
            losses.append(sample_losses(reference_nll(batch), batch)[0].to(losses[0]))
        all_losses, _ = gather_rows(torch.cat(losses))
        self.temperature.copy_(all_losses.quantile(0.5))

    def make_loss(self, batch: Batch, reference_nll: ReferenceNLL) -> WeightedLoss:
        nll = make_nll(batch)
        if not self.needs_reference:
            return WeightedLoss(nll)
        losses, samples = sample_losses(reference_nll(batch), batch)
        weights = torch.exp(-losses / self.temperature.to(losses))[samples]

        def weighted_nll(logits: Tensor, positions: slice) -> Tensor:
            return weights[positions] * nll(logits, positions)

        return WeightedLoss(weighted_nll)


def sample_losses(nll: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean loss of each sample that has scored positions, [n], from losses [K] at these, and the sample
    of each position, [K]. Samples are rows, or documents within rows where these are isolated."""
    owners = batch["rows"][None]  # the numbers that tell samples apart, [1, K] or [2, K]
    if "segments" in batch:
        documents = batch["segments"].flatten()[batch["positions"]]
        owners = torch.stack([batch["rows"], documents])
    _, samples, counts = owners.unique(dim=1, return_inverse=True, return_counts=True)
    sums = nll.new_zeros(len(counts)).index_add(0, samples, nll)
    return sums / counts, samples
