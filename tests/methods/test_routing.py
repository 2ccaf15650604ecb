"""Which part scores a text: posteriors against Bayes by hand, priors, and what is remembered of them."""

import math
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from cpt.adapters.domain_store import BASE, Router, keep_largest
from cpt.adapters.options import Routing
from cpt.models.objectives import Causal
from tests.support.forward_passes import token_nll

DEFAULTS = {"learned": "domain", "unlearned": "base", "prior": "uniform", "decay": 0.3, "cached": 100}
DEFAULTS |= {"top_k": None, "base": True}
STARTS = [0, 3, 7, 9]
# Log-likelihoods [3, 12] at positions of four rows, one of which has no scored position.
LIKELIHOOD = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)) - 2
ROWS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 4, 4, 4])


def router(domains: int = 2, **options) -> Router:
    parts = SimpleNamespace(domains=list(range(domains)))
    mixing = Router(parts, Routing(**(DEFAULTS | options)), Causal())
    count = len(mixing.all_sources)
    mixing.prior = torch.full((count,), 1 / count, dtype=torch.double)
    mixing.posterior_sum = torch.zeros_like(mixing.prior)
    return mixing


def weigh(mixing: Router, likelihood=LIKELIHOOD, rows=ROWS, **how) -> torch.Tensor:
    return mixing.log_weights(likelihood, rows, **({"top_k": None} | how)).exp()


def slow(likelihood, rows, *, prior="uniform", decay=0.3, cached=100) -> torch.Tensor:
    """The weights [n, K] at each position, by Bayes' rule with products, token by token."""
    parts, found, cache = len(likelihood), [], []
    p = [1 / parts] * parts
    product, row = list(p), None
    for k, here in enumerate([*rows.tolist(), None]):
        if here != row:
            if row is not None:
                end = [each / sum(product) for each in product]
                if prior == "updating":
                    p = [(1 - decay) * a + decay * b for a, b in zip(p, end, strict=True)]
                if prior == "cached" and len(cache) < cached:
                    cache.append(end)
                    if len(cache) == cached:
                        p = [sum(each) / cached for each in zip(*cache, strict=True)]
            product, row = list(p), here
        if here is not None:
            found.append([each / sum(product) for each in product])
            product = [a * math.exp(v) for a, v in zip(product, likelihood[:, k].tolist(), strict=True)]
    return torch.tensor(found).T


@pytest.mark.parametrize("prior", ["uniform", "updating", "cached"])
@pytest.mark.parametrize("size", [12, 3])
def test_the_weights_are_the_slow_ones(prior, size):
    mixing, cut = router(prior=prior, decay=0.4, cached=2), [slice(0, size), slice(size, None)]
    found = torch.cat([weigh(mixing, LIKELIHOOD[:, at], ROWS[at]) for at in cut], dim=1)
    expected = slow(LIKELIHOOD, ROWS, prior=prior, decay=0.4, cached=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_largest_are_kept_and_sum_to_one():
    weights = torch.tensor([[0.1, 0.4], [0.6, 0.2], [0.3, 0.4]]).log()
    expected = [torch.tensor([[0, 1], [1, 0], [0, 0]]), torch.tensor([[0, 0.5], [2 / 3, 0], [1 / 3, 0.5]])]
    for count, kept in enumerate([*expected, weights.exp(), weights.exp()], start=1):
        torch.testing.assert_close(keep_largest(weights, count).exp(), kept.float())
    found, inner = weigh(router(), top_k=1), [k for k in range(12) if k not in STARTS]
    assert found[0, STARTS].tolist() == [1] * 4 and set(found.flatten().tolist()) == {0, 1}
    assert torch.equal(found[:, inner].argmax(0), slow(LIKELIHOOD, ROWS)[:, inner].argmax(0))


BY_TEXT, NEAR = ({"learned": how, "unlearned": how} for how in ("posterior", "nearest"))


@pytest.mark.parametrize(("options", "domains", "own", "other"), [
    ({}, 2, [1], [BASE]),
    ({"unlearned": "last"}, 2, [1], [1]),
    ({"unlearned": "last"}, 0, [BASE], [BASE]),
    (BY_TEXT, 2, [BASE, 0, 1], [BASE, 0, 1]),
    (NEAR | {"base": False}, 2, [0, 1], [0, 1]),
    ({"unlearned": "posterior", "base": False}, 0, [BASE], [BASE]),
])  # fmt: skip
def test_which_parts_are_mixed(options, domains, own, other):
    mixing = router(domains, **options)
    assert mixing.sources(1) == own and mixing.sources(BASE) == mixing.sources(7) == other
    assert mixing.needs_domain == (options.get("learned", "domain") == "domain")


@torch.no_grad()
def test_the_mixture_is_that_of_bayes_by_hand(build):
    run = build("demix", "order=[law,food,space]")
    module, (batch,) = run.module.eval(), run.batches()
    for domain in range(3):
        for name in module.domain_params.names:
            parameter = module.model.get_parameter(name)
            parameter.data.add_(
                0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(domain))
            )
        module.domain_params.capture(module.model, domain)
    module.router.start_evaluation()
    found, _ = module.nll(batch, BASE)
    nll = [
        token_nll(module.model, batch, weights=module.domain_params.weights(part)) for part in (-1, 0, 1, 2)
    ]
    likelihood = -torch.stack(nll)
    weights = slow(likelihood, batch["rows"])
    torch.testing.assert_close(found, -(weights * likelihood.exp()).sum(0).log(), rtol=1e-4, atol=1e-5)
    used = module.routing_weights(BASE)
    assert list(used) == [BASE, 0, 1, 2]
    assert list(used.values()) == pytest.approx(weights.mean(1).tolist(), rel=1e-4)


def test_another_text_starts_from_the_uniform_prior():
    nats = cycle([1.0, 3.0])  # of the parts in turn
    objective = SimpleNamespace(nll=lambda model, batch: torch.tensor([next(nats)]))
    how = {"learned": "posterior", "unlearned": "posterior", "prior": "updating", "decay": 1.0}
    routing = Routing(**how, cached=1, top_k=None, base=False)
    store = SimpleNamespace(domains=[0, 1], weights=lambda part: {})
    router, batch = Router(store, routing, objective), {"positions": torch.zeros(1), "rows": torch.zeros(1)}
    first, second, other = (router.nll(nn.Linear(1, 1), batch, text) for text in (0, 0, 1))
    assert second < first - 0.1 and torch.equal(other, first)
