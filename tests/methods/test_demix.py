"""DEMIX: where an expert begins, what is trained, and which expert scores a text."""

import numpy as np
import pytest
import torch
from torch import distributed

from cpt.adapters.domain_store import BASE
from cpt.core import distributed as collectives
from cpt.data.sampler import EvalSubset
from tests.methods.test_lifelong_moe import First
from tests.methods.test_parts import enter, visit
from tests.support.making import same
from tests.support.running import token_nll

DECAY = ["optim.weight_decay=0.5", "optim.lr=0.01"]


@pytest.fixture
def demix(build):
    return lambda *overrides, **how: build("demix", "order=[law,food,space]", *overrides, **how)


def batches(work, name: str, *, rows: int = 20) -> list:
    """Training rows of a text, with fixed masks, as a probe has them."""
    options = {"objective": work.data.objective, "batch_size": 10, "purpose": "probe"}
    made_of = EvalSubset({name: work.data.train[name]}, {name: np.arange(rows)}, **options)
    return [made_of[number] for number in range(len(made_of))]


def slot(work) -> dict[str, torch.Tensor]:
    weights = work.weights()
    return {name: weights[name] for name in work.module.bank.names}


def part(work, domain: int) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in work.module.bank.weights(domain).items()}


@torch.no_grad()
def perplexity(model, probe) -> float:
    return torch.cat([token_nll(model.eval(), batch) for batch in probe]).double().mean().exp().item()


@pytest.mark.parametrize(("experts", "family"), [("ffn", "masked"), ("ffn", "causal"), ("adapter", "masked")])
def test_an_expert_begins_as_the_nearest(experts, family, demix):
    """Its weights are the source's bit for bit, and so is its perplexity on the probe; whole models that hold
    one expert each find the same one nearest. The trunk keeps every bit, all of an expert learns."""
    work = demix(f"method.experts={experts}", *DECAY, on=family)
    before, names = work.weights(), {*work.module.bank.names}
    wanted = {"masked": ("mlp.Wi.", "mlp.Wo."), "causal": ("mlp.c_fc.", "mlp.c_proj.")}[family]
    assert experts == "adapter" or names == {n for n in before if any(each in n for each in wanted)}
    work.learn(0)
    work.learn(1)
    parts = {domain: part(work, domain) for domain in (BASE, 0, 1)}
    models, seen = [work.module.model_for(domain) for domain in parts], []
    work.learn(2, First(lambda *given: seen.extend((slot(work), work.probe()))))
    begun, probe = seen
    source, found = int(work.module.sources[2]), work.module.perplexities.tolist()
    assert same(begun, parts[source]) and work.module.sources[0] == BASE
    assert found == pytest.approx([perplexity(model, probe) for model in models], rel=1e-5)
    assert found[source + 1] == min(found) and len(set(found)) == 3
    assert all(same(part(work, domain), weights) for domain, weights in parts.items())
    assert {n for n, value in work.weights().items() if not torch.equal(value, before[n])} == names
    assert {name for name, p in work.module.model.named_parameters() if p.requires_grad} == names


@pytest.mark.parametrize(
    ("options", "found", "source"),
    [
        ([], [3.0, 2.0, 1.5, 1.5], 1),
        ([], [1.5, 1.5, 2.0, 1.5], BASE),
        (["method.routing.base=false"], [2.0, 1.5, 1.5], 1),
        (["method.start=previous"], None, 2),
        (["method.start=base"], None, BASE),
    ],
    ids=str,
)
def test_where_an_expert_begins(options, found, source, demix, monkeypatch):
    work, measured = demix(*options), []
    for domain in range(3):
        visit(work.module, domain)
    measure = lambda probe, parts: measured.append(parts) or torch.tensor(found)  # noqa: E731
    monkeypatch.setattr(work.module, "measure", measure)
    enter(work.module, 3)
    work.module.before_domain(())
    assert int(work.module.sources[-1]) == source and len(work.module.sources) == 4
    assert same(slot(work), part(work, source))
    assert measured == ([] if found is None else [[-1, 0, 1, 2][-len(found) :]])


def test_processes_agree_on_the_nearest(demix, monkeypatch):
    work, sums = demix(), []
    visit(work.module, 0)
    shares = batches(work, "food")
    expected = work.module.measure(shares, [BASE, 0])
    monkeypatch.setattr(collectives, "is_distributed", lambda: True)
    monkeypatch.setattr(distributed, "all_reduce", lambda values: sums.append(values.clone()))
    work.module.measure(shares[1:], [BASE, 0])
    monkeypatch.setattr(distributed, "all_reduce", lambda values: values.add_(sums[0]))
    torch.testing.assert_close(work.module.measure(shares[:1], [BASE, 0]), expected)
    assert len(sums) == 1
