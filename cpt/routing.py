"""Which part of a model scores a text: its domain's own, the base's, the last one, or a mixture by Bayes.

DEMIX (Gururangan et al., NAACL 2022, section 5.1): with experts j and a prior over them,

    p(x_i | x_<i) = sum_j p(x_i | x_<i, D = j) p(D = j | x_<i)
    p(D = j | x_<i) ~ p(D = j) p(x_<i | D = j)

Here x_<i are the scored tokens that stand before i in the same row: all of them in a causal model, and in a
masked one those that are predicted (a pseudo-likelihood). Every row begins at the prior."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel

from cpt.model import token_nll
from cpt.objectives import Batch
from cpt.options import choice, number
from cpt.parts import BASE, Bank

LEARNED = ("domain", "posterior", "nearest")
UNLEARNED = ("base", "last", "posterior", "nearest")
PRIORS = ("uniform", "updating", "cached")


@dataclass(frozen=True)
class Routing:
    """`learned` and `unlearned` say what scores text of domains with and without a part: `domain`, the own
    part; `base` and `last`; `posterior`, the mixture of all; `nearest`, of all the most probable so far.

    The prior is `uniform`, `updating`: p <- (1 - decay) p + decay * posterior, batch by batch, or `cached`:
    the mean posterior of a text's first `cached` rows, uniform until then. With several processes each has
    the prior of its share. `top_k` parts are mixed, None for all; `base` says whether the base is among
    them.

    Raises ValueError for what is not allowed."""

    learned: str
    unlearned: str
    prior: str
    decay: float
    cached: int
    top_k: int | None
    base: bool

    def __post_init__(self) -> None:
        choice("routing.learned", self.learned, allowed=LEARNED)
        choice("routing.unlearned", self.unlearned, allowed=UNLEARNED)
        choice("routing.prior", self.prior, allowed=PRIORS)
        number("routing.decay", self.decay, allowed="0 to 1")
        for name in ("cached", "top_k"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"method.routing.{name}={value}; allowed: a whole number, 1 or more")


class Router:
    """Scores texts with the parts of a bank, and remembers which of them it took for each text."""

    def __init__(self, bank: Bank, routing: Routing) -> None:
        self.bank, self.routing = bank, routing
        self.text: int | None = None  # the domain whose text is being scored
        self.prior: Tensor | None = None  # of the parts of a mixture, [n]
        self.rows = 0  # that the prior has seen
        self.taken: dict[int, Tensor] = {}  # weights summed over scored positions, [1 + learned]

    @property
    def needs_domain(self) -> bool:
        """Whether a text's domain must be known at test time."""
        return self.routing.learned == "domain"

    @property
    def parts(self) -> list[int]:
        """All parts there are."""
        return [BASE, *self.bank.domains]

    def mixed(self, domain: int) -> list[int]:
        """The parts that score text of a domain: one, or those of the mixture."""
        learned = self.bank.domains
        rule = self.routing.learned if domain in learned else self.routing.unlearned
        alone = {"domain": domain, "base": BASE, "last": self.parts[-1]}
        mixture = self.parts if self.routing.base or not learned else learned
        return [alone[rule]] if rule in alone else mixture

    def top_k(self, domain: int) -> int | None:
        """How many parts are mixed; None for all."""
        rule = self.routing.learned if domain in self.bank.domains else self.routing.unlearned
        return 1 if rule == "nearest" else self.routing.top_k

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at the scored positions, [K], of text of the domain; for one text
        after another."""
        parts = self.mixed(domain)
        if domain != self.text:
            self.text, self.rows, self.prior = domain, 0, None
            self.taken[domain] = torch.zeros(len(self.parts), device=batch["positions"].device)
        likelihood = torch.stack([-token_nll(model, batch, weights=self.bank.weights(j)) for j in parts])
        weights = torch.zeros_like(likelihood)
        if len(parts) > 1:
            rows = batch["positions"] // batch["input_ids"].shape[1]
            weights = self.weights(likelihood, rows, top_k=self.top_k(domain))
        places = torch.tensor([self.parts.index(part) for part in parts], device=weights.device)
        self.taken[domain].index_add_(0, places, weights.exp().sum(1).to(self.taken[domain]))
        return -torch.logsumexp(weights + likelihood, dim=0)

    def weights(self, likelihood: Tensor, rows: Tensor, *, top_k: int | None) -> Tensor:
        """Log weights [n, K] of the parts at each position, from their log-likelihoods [n, K] there."""
        if self.prior is None:
            self.prior = likelihood.new_full((len(likelihood),), 1 / len(likelihood))
        before, ends = posterior(likelihood, rows, prior=self.prior.log())
        self.learn(ends.exp())
        return before if top_k is None else largest(before, top_k)

    def learn(self, ends: Tensor) -> None:
        """Moves the prior by the posteriors [n, R] at the ends of a batch's rows."""
        if self.routing.prior == "updating":
            self.prior = torch.lerp(self.prior, ends.mean(1), self.routing.decay)
        elif self.routing.prior == "cached":
            ...

    def used(self, domain: int) -> dict[int, float]:
        """The parts that scored a domain's text, with their mean weights over its positions in all processes;
        what weighs less than a thousandth is left out."""
        sums = self.taken.get(domain, torch.zeros(len(self.parts)))
        if distributed.is_initialized():
            distributed.all_reduce(sums)
        shares = (sums / sums.sum().clamp_min(1)).tolist()
        return {part: round(share, 3) for part, share in zip(self.parts, shares, strict=True) if share >= 5e-4}


def posterior(likelihood: Tensor, rows: Tensor, *, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Log posteriors of n parts from their log-likelihoods [n, K] at positions of `rows` [K], ascending, and
    a log prior [n]: before each position, [n, K], and at the end of each row, [n, R]."""
    _, row, sizes = rows.unique_consecutive(return_inverse=True, return_counts=True)
    sums = likelihood.double().cumsum(1)
    ends = sums[:, sizes.cumsum(0) - 1]
    starts = torch.cat([ends.new_zeros(len(ends), 1), ends[:, :-1]], dim=1)
    before = (sums - likelihood - starts[:, row]) + prior[:, None]
    after = (ends - starts) + prior[:, None]
    return before.log_softmax(0).to(likelihood), after.log_softmax(0).to(likelihood)


def largest(weights: Tensor, count: int) -> Tensor:
    """Log weights [n, K] of which the `count` largest are kept at each position and sum to 1 again."""
    best = weights.topk(min(count, len(weights)), dim=0)
    kept = torch.full_like(weights, -torch.inf).scatter(0, best.indices, best.values)
    return kept.log_softmax(0)
