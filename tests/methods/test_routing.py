"""Which part scores a text: posteriors against Bayes by hand, priors, and what is remembered of them."""

import math
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpt.adapters.domain_store import BASE, Router, keep_largest
from cpt.adapters.options import Routing
from cpt.models.objectives import Causal
from tests.support.forward_passes import token_nll

ROUTING = Routing(
    learned="domain",
    unlearned="base",
    prior="uniform",
    decay=0.3,
    cached=100,
    top_k=None,
    base=True,
)
STARTS = [0, 3, 7, 9]
# Log-likelihoods [3, 12] at positions of four rows, one of which has no scored position.
LIKELIHOOD = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)) - 2
ROWS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 4, 4, 4])


def make_router(domains: int = 2, **options) -> Router:
    parts = SimpleNamespace(domains=list(range(domains)))
    router = Router(parts, replace(ROUTING, **options), Causal())
    num_sources = len(router.all_sources)
    router.prior = torch.full((num_sources,), 1 / num_sources, dtype=torch.double)
    router.posterior_sum = torch.zeros_like(router.prior)
    return router


def weigh(router: Router, likelihood=LIKELIHOOD, rows=ROWS, *, top_k=None) -> torch.Tensor:
    return router.weigh_and_move_prior(likelihood, rows, top_k=top_k).exp()


def normalize(values: list[float]) -> list[float]:
    return [value / sum(values) for value in values]


def weigh_by_loops(likelihood, rows, *, prior="uniform", decay=0.3, cached=100) -> torch.Tensor:
    """The weights [n, K] at each position, by Bayes' rule with products, token by token."""
    num_parts = len(likelihood)
    part_priors = [1 / num_parts] * num_parts
    cache = []
    weights = []
    for row in rows.unique_consecutive().tolist():
        product = list(part_priors)
        for position in (rows == row).nonzero().flatten().tolist():
            weights.append(normalize(product))
            log_likelihoods = likelihood[:, position].tolist()
            product = [p * math.exp(value) for p, value in zip(product, log_likelihoods, strict=True)]

        posteriors = normalize(product)
        if prior == "updating":
            part_priors = [(1 - decay) * p + decay * q for p, q in zip(part_priors, posteriors, strict=True)]
        if prior == "cached" and len(cache) < cached:
            cache.append(posteriors)
            if len(cache) == cached:
                part_priors = [sum(column) / cached for column in zip(*cache, strict=True)]
    return torch.tensor(weights).T


@pytest.mark.parametrize("prior", ["uniform", "updating", "cached"])
@pytest.mark.parametrize("size", [12, 3])
def test_the_weights_are_the_slow_ones(prior, size):
    mixing = make_router(prior=prior, decay=0.4, cached=2)
    cut = [slice(0, size), slice(size, None)]
    weights = torch.cat([weigh(mixing, LIKELIHOOD[:, at], ROWS[at]) for at in cut], dim=1)
    expected = weigh_by_loops(LIKELIHOOD, ROWS, prior=prior, decay=0.4, cached=2)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_the_largest_are_kept_and_sum_to_one():
    weights = torch.tensor([[0.1, 0.4], [0.6, 0.2], [0.3, 0.4]]).log()
    expected = [torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.tensor([[0, 0.5], [2 / 3, 0], [1 / 3, 0.5]])]
    for count, largest in enumerate([*expected, weights.exp(), weights.exp()], start=1):
        torch.testing.assert_close(keep_largest(weights, count).exp(), largest.float())
    nearest = weigh(make_router(), top_k=1)
    inner = [k for k in range(12) if k not in STARTS]
    assert nearest[0, STARTS].tolist() == [1] * 4 and set(nearest.flatten().tolist()) == {0, 1}
    assert torch.equal(nearest[:, inner].argmax(0), weigh_by_loops(LIKELIHOOD, ROWS)[:, inner].argmax(0))


BY_TEXT = {"learned": "posterior", "unlearned": "posterior"}
NEAREST = {"learned": "nearest", "unlearned": "nearest", "base": False}


@pytest.mark.parametrize(("options", "domains", "learned_sources", "unlearned_sources"), [
    ({}, 2, [1], [BASE]),
    ({"unlearned": "last"}, 2, [1], [1]),
    ({"unlearned": "last"}, 0, [BASE], [BASE]),
    (BY_TEXT, 2, [BASE, 0, 1], [BASE, 0, 1]),
    (NEAREST, 2, [0, 1], [0, 1]),
    ({"unlearned": "posterior", "base": False}, 0, [BASE], [BASE]),
])  # fmt: skip
def test_which_parts_are_mixed(options, domains, learned_sources, unlearned_sources):
    mixing = make_router(domains, **options)
    assert mixing.sources(1) == learned_sources
    assert mixing.sources(BASE) == mixing.sources(7) == unlearned_sources
    assert mixing.needs_domain == (options.get("learned", "domain") == "domain")


@torch.no_grad()
def test_the_mixture_is_that_of_bayes_by_hand(build):
    run = build("demix", "order=[law,food,space]")
    module = run.module.eval()
    [batch] = run.batches()

    # Modules that differ: untrained ones would all have one loss, and equal weights.
    for domain in range(3):
        for name in module.domain_params.names:
            parameter = module.model.get_parameter(name)
            generator = torch.Generator().manual_seed(domain)
            parameter.data.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        module.domain_params.capture(module.model, domain)
    module.router.start_evaluation()
    mixed_nll, _ = module.nll(batch, BASE)

    # By hand: p(token) = sum over modules of p(module | tokens before) p(token | module).
    nll = []
    for domain in (BASE, 0, 1, 2):
        nll.append(token_nll(module.model, batch, weights=module.domain_params.weights(domain)))
    log_likelihood = -torch.stack(nll)  # [module, token]
    weights = weigh_by_loops(log_likelihood, batch["rows"])
    expected_nll = -(weights * log_likelihood.exp()).sum(0).log()
    torch.testing.assert_close(mixed_nll, expected_nll, rtol=1e-4, atol=1e-5)

    routing_weights = module.routing_weights(BASE)
    assert list(routing_weights) == [BASE, 0, 1, 2]
    assert list(routing_weights.values()) == pytest.approx(weights.mean(1).tolist(), rel=1e-4)


def test_another_text_starts_from_the_uniform_prior():
    nats = cycle([1.0, 3.0])  # of the parts in turn
    objective = SimpleNamespace(nll=lambda model, batch: torch.tensor([next(nats)]))
    routing = replace(
        ROUTING, learned="posterior", unlearned="posterior", prior="updating", decay=1.0, base=False
    )
    store = SimpleNamespace(domains=[0, 1], weights=lambda part: {})
    router = Router(store, routing, objective)
    batch = {"positions": torch.zeros(1), "rows": torch.zeros(1)}
    first, second, other_text = (router.nll(nn.Linear(1, 1), batch, text) for text in (0, 0, 1))
    assert second < first - 0.1 and torch.equal(other_text, first)
