"""Which part of a model scores a text: its domain's own, the base's, the last one, or a mixture by Bayes.

DEMIX (Gururangan et al., NAACL 2022, section 5): with experts j and a prior over them,

    p(x_i | x_<i) = sum_j p(x_i | x_<i, D = j) p(D = j | x_<i)
    p(D = j | x_<i) ~ p(D = j) p(x_<i | D = j)

Here x_<i are the scored tokens that stand before i in the same row: all of them in a causal model, and in a
masked one those that are predicted (a pseudo-likelihood). Every row begins at the prior. The released code
takes the token before i alone for x_<i."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpt.adapters.bank import BASE, Bank
from cpt.adapters.options import Routing
from cpt.core.collectives import sum_on_cpu
from cpt.data.collate import Batch
from cpt.models.objectives import Objective
from cpt.models.swapping import swap_weights

LEAST = 1e-3  # of the largest weight: parts with less are not told


class Scorer(ABC):
    """Scores texts with the parts of a model, and remembers which of them it took for each text.

    What it remembers is of the last evaluation, and no part of any state_dict."""

    needs_domain = False  # whether a text's domain must be known at test time
    in_sequence = False  # whether what a row scores depends on the rows before it

    def __init__(self) -> None:
        self.taken: dict[int, dict[int, Tensor]] = {}  # by domain and part: weights summed over positions

    @property
    @abstractmethod
    def parts(self) -> list[int]:
        """All parts there are."""

    @abstractmethod
    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at the scored positions, [K], of text of the domain; for one text
        after another, and of each one batch after another."""

    def begin(self) -> None:
        """An evaluation begins: what was remembered of the one before is forgotten."""
        self.taken.clear()

    def take(self, domain: int, parts: list[int], weights: Tensor) -> None:
        """Remembers the weights [n, K] of the parts."""
        taken = self.taken.setdefault(domain, {})
        for part, weight in zip(parts, weights.detach().sum(1, dtype=torch.double), strict=True):
            taken[part] = taken.get(part, 0) + weight

    def used(self, domain: int) -> dict[int, float]:
        """The parts that scored a domain's text in the last evaluation, with their mean weights over the
        positions of all processes, whose sum is 1; parts with less than a thousandth of the largest are left
        out. Asked by every process, also by one that scored none of the text."""
        taken = self.taken.get(domain, {})
        sums = sum_on_cpu(
            torch.tensor([float(taken.get(part, 0)) for part in self.parts], dtype=torch.double)
        )
        told = torch.where(sums < LEAST * sums.max(), 0, sums)
        shares = (told / told.sum()).tolist()
        return {part: share for part, share in zip(self.parts, shares, strict=True) if share > 0}


class Router(Scorer):
    """Scores texts with the parts of a bank, one of which at a time is in the model."""

    def __init__(self, bank: Bank, routing: Routing, objective: Objective) -> None:
        super().__init__()
        self.bank, self.routing, self.objective = bank, routing, objective
        self.text: tuple[int, list[int]] | None = None  # that is being scored: its domain and parts
        self.rows = 0  # of it, that a cached prior has seen
        self.prior = torch.empty(0)  # of its parts, [n]
        self.cache = torch.empty(0)  # sum of the posteriors that make up a cached prior, [n]

    @property
    def needs_domain(self) -> bool:
        return self.routing.learned == "domain"

    @property
    def in_sequence(self) -> bool:
        return self.routing.prior != "uniform"

    @property
    def parts(self) -> list[int]:
        return [BASE, *self.bank.domains]

    def rule(self, domain: int) -> str:
        """What scores text of a domain, by the name in the routing."""
        return self.routing.learned if domain in self.bank.domains else self.routing.unlearned

    def mixed(self, domain: int) -> list[int]:
        """The parts that score text of a domain: one, or those of the mixture."""
        parts, rule = self.parts, self.rule(domain)
        alone = {"domain": domain, "base": BASE, "last": parts[-1]}
        mixture = parts if self.routing.base or len(parts) == 1 else parts[1:]
        return [alone[rule]] if rule in alone else mixture

    def top_k(self, domain: int) -> int | None:
        """How many parts are mixed at a position; None for all."""
        return 1 if self.rule(domain) == "nearest" else self.routing.top_k

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        parts = self.mixed(domain)
        self.go_on(domain, parts, batch["positions"].device)
        likelihood = torch.stack([self.likelihood(model, batch, part) for part in parts])
        if len(parts) == 1:
            self.take(domain, parts, torch.ones_like(likelihood))
            return -likelihood[0]
        weights = self.weights(likelihood, batch["rows"], top_k=self.top_k(domain))
        self.take(domain, parts, weights.exp())
        return -torch.logsumexp(weights + likelihood, dim=0)

    def likelihood(self, model: PreTrainedModel, batch: Batch, part: int) -> Tensor:
        """Log-likelihood (nats) at the scored positions, [K], with one of the parts."""
        with swap_weights(model, self.bank.weights(part)):
            return -self.objective.nll(model, batch)

    def begin(self) -> None:
        super().begin()
        self.text = None

    def go_on(self, domain: int, parts: list[int], device: torch.device) -> None:
        """Begins anew with another text."""
        if self.text != (domain, parts):
            self.text, self.rows, self.taken[domain] = (domain, parts), 0, {}
            self.prior = torch.full((len(parts),), 1 / len(parts), dtype=torch.double, device=device)
            self.cache = torch.zeros_like(self.prior)

    def weights(self, likelihood: Tensor, rows: Tensor, *, top_k: int | None) -> Tensor:
        """Log weights [n, K] of n parts at positions of `rows` [K], ascending, from their log-likelihoods
        [n, K] there: the posteriors before each position."""
        before, totals, row = preceding(likelihood, rows)
        priors = torch.empty_like(totals)
        for place, total in enumerate(totals.unbind(1)):
            priors[:, place] = self.prior.log()
            self.learn(total)
        weights = (before + priors[:, row]).log_softmax(0)
        return (weights if top_k is None else keep_largest(weights, top_k)).to(likelihood)

    def learn(self, total: Tensor) -> None:
        """Moves the prior by the posterior at the end of a row, from the row's log-likelihoods [n]."""
        if self.routing.prior == "uniform" or self.rows == self.routing.cached:
            return
        posterior = (self.prior.log() + total).softmax(0)
        if self.routing.prior == "updating":
            self.prior = torch.lerp(self.prior, posterior, self.routing.decay)
            return
        self.rows, self.cache = self.rows + 1, self.cache + posterior
        if self.rows == self.routing.cached:
            self.prior = self.cache / self.rows


def preceding(likelihood: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From log-likelihoods [n, K] at positions of `rows` [K], ascending: those of what stands before each
    position in its row, [n, K], those of each row, [n, R], and the place of each position's row, [K]."""
    _, row, sizes = rows.unique_consecutive(return_inverse=True, return_counts=True)
    sums = likelihood.double().cumsum(1)
    ends = sums[:, sizes.cumsum(0) - 1]
    starts = torch.cat([ends.new_zeros(len(ends), 1), ends[:, :-1]], dim=1)
    return sums - likelihood - starts[:, row], ends - starts, row


def keep_largest(weights: Tensor, count: int) -> Tensor:
    """Log weights [n, K] of which the `count` largest, of equals the first, are kept at each position and sum
    to 1 again."""
    best = weights.sort(dim=0, descending=True, stable=True).indices[:count]
    kept = torch.full_like(weights, -torch.inf).scatter(0, best, weights.gather(0, best))
    return kept.log_softmax(0)
