"""MAS: how much the outputs depend on a weight, and the penalty that it shares with EWC."""

import pytest
import torch

from cpt.models.fisher import samples
from tests.support.making import ORDER, assert_close, made


@pytest.fixture
def mas(small):
    return lambda *options: made(small("method=mas", ORDER, *options))


def by_hand(work, output="logits", times=1):
    """Sums of |gradients| of each sample's mean squared norm, one after another, in float64's place."""
    model, trained = work.module.model.eval(), dict(work.module.model.named_parameters())
    sums, count = {name: torch.zeros_like(p) for name, p in trained.items()}, 0
    for batch in work.probe():
        for each in samples(batch):
            logits, hidden = work.module.objective.outputs(model, each)
            values = logits if output == "logits" else hidden.flatten(0, 1)[each["positions"]]
            total = (values.float() ** 2).sum(-1).mean()
            found = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
            for name, value in zip(trained, found, strict=True):
                sums[name] += 0 if value is None else value.abs()
            count += 1
    return {name: value / count for name, value in sums.items()}


@pytest.mark.parametrize("output", ["logits", "hidden"])
def test_importance_is_the_mean_absolute_gradient_by_sample(output, mas):
    work = mas(f"method.output={output}", "trainer.probe_samples=6")
    work.learn(0)
    assert_close(work.module.importance.named(), by_hand(work, output), rtol=1e-3, atol=1e-5)


def test_labels_are_not_read(mas):
    work = mas("trainer.probe_samples=4")
    work.learn(0)
    before = {name: value.clone() for name, value in work.module.importance.named().items()}
    probe = [batch | {"targets": (batch["targets"] + 7) % 50} for batch in work.probe()]
    with torch.random.fork_rng():
        found = work.module.eval().measure(probe)
    assert_close(found, before, rtol=1e-4, atol=1e-6)


def test_the_penalty_is_lambda_times_the_weighted_squared_way(mas):
    """The paper's equation 4: lambda, not half of it."""
    work = mas("method.strength=3", "trainer.probe_samples=4")
    work.learn(0)
    anchor, importance = work.module.anchor.named(), work.module.importance.named()
    with torch.no_grad():
        for parameter in work.module.model.parameters():
            parameter.add_(0.01)
    present = dict(work.module.model.named_parameters())
    expected = 3 * sum((importance[n] * (p - anchor[n]).square()).sum() for n, p in present.items())
    found = work.module.losses(next(iter(work.probe())))["mas"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


def test_importances_add_up(mas):
    """gamma 1: the paper's sum over domains."""
    work = mas("trainer.probe_samples=4")
    work.learn(0)
    first = {name: value.clone() for name, value in work.module.importance.named().items()}
    work.learn(1)
    new = by_hand(work)
    expected = {name: first[name] + new[name] for name in first}
    assert_close(work.module.importance.named(), expected, rtol=1e-3, atol=1e-4)
