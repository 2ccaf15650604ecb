"""SI: what a weight's way has brought, without the penalty's share."""

import pytest
import torch

from cpt.methods.si import SI, accumulate
from tests.support.making import ORDER, assert_close, made

GENTLE = ["optim=sgd", "optim.lr=0.002", "schedule=constant", "schedule.warmup=0", "trainer.steps=1"]


@pytest.fixture
def si(small):
    return lambda *options: made(small("method=si", ORDER, *options))


def watched(monkeypatch):
    """omega by hand: minus the sum of the loss's gradient, without the penalty, times the step."""
    sums = {}
    gradients, update = SI.transform_gradients, SI.after_update

    def before(module, optimizer):
        module.began = {n: p.detach().clone() for n, p in module.model.named_parameters()}
        module.own = {}
        for name, parameter in module.model.named_parameters():
            pulled = module.importance.named()[name] * (parameter.detach() - module.anchor.named()[name])
            module.own[name] = parameter.grad - 2 * module.options.strength * pulled
        gradients(module, optimizer)

    def after(module):
        update(module)
        for name, parameter in module.model.named_parameters():
            way = parameter.detach() - module.began[name]
            sums[name] = sums.get(name, 0) - module.own[name] * way

    monkeypatch.setattr(SI, "transform_gradients", before)
    monkeypatch.setattr(SI, "after_update", after)
    return sums


@pytest.mark.parametrize("accumulated", [1, 2])
def test_importance_is_the_path_integral_over_the_squared_way(accumulated, si, monkeypatch):
    parts = f"trainer.accumulate_grad_batches={accumulated}"
    work = si("optim=sgd", "optim.lr=0.01", "optim.weight_decay=5", parts, "method.damping=1e-3")
    sums = watched(monkeypatch)
    base = work.weights()
    work.learn(0)
    expected = {
        name: sums[name].clamp_min(0) / ((value - base[name]) ** 2 + 1e-3)
        for name, value in work.weights().items()
    }
    assert any((each < 0).any() for each in sums.values())  # what the paper would push away
    assert_close(work.module.importance.named(), expected, rtol=1e-4, atol=1e-6)
    first = {name: value.clone() for name, value in work.module.importance.named().items()}
    sums.clear()
    start = work.weights()
    work.learn(1)
    expected = {
        name: (first[name] + sums[name] / ((value - start[name]) ** 2 + 1e-3)).clamp_min(0)
        for name, value in work.weights().items()
    }
    assert any((expected[name] < first[name]).any() for name in first)  # a later domain may take some away
    assert_close(work.module.importance.named(), expected, rtol=1e-3, atol=1e-5)
    assert all((each == 0).all() for each in work.module.brought.named().values())


def test_of_a_small_step_the_sum_is_how_far_the_loss_fell(si, monkeypatch):
    work, seen = si(*GENTLE), []
    sums = watched(monkeypatch)
    terms = SI.losses
    monkeypatch.setattr(SI, "losses", lambda module, batch: seen.append(batch) or terms(module, batch))

    def loss():
        with torch.no_grad():
            return work.module.objective.nll(work.module.model, seen[0]).mean().item()

    before = work.weights()
    work.learn(0)
    after = loss()
    work.module.model.load_state_dict(before, strict=False)
    brought = sum(float(each.sum()) for each in sums.values())
    assert brought > 1e-4
    assert brought == pytest.approx(loss() - after, rel=0.05)


def test_a_domain_without_a_step_leaves_importance_finite():
    found = torch.tensor([0.0, 0.0, 2.0])
    accumulate(found, torch.tensor([1.0, -1.0, -0.001]), torch.zeros(3), damping=1e-3)
    torch.testing.assert_close(found, torch.tensor([1000.0, 0.0, 1.0]))
