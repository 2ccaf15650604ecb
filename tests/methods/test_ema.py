"""EMA: the recurrence over optimizer steps, and what a domain ends and begins with."""

import pytest
import torch

from tests.support.making import (
    ORDER,
    Watch,
    assert_close,
    made,
    same,
)


@pytest.fixture
def ema(small):
    return lambda *overrides: made(small("method=ema", ORDER, *overrides))


def copies(module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.model.named_parameters()}


def averaged(start, path, *, decay: float) -> dict[str, torch.Tensor]:
    """The recurrence in double precision."""
    average = {name: value.double() for name, value in start.items()}
    for weights in path:
        average = {name: decay * average[name] + (1 - decay) * weights[name].double() for name in average}
    return average


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_average_is_that_of_the_optimizer_steps(accumulate, ema):
    """A batch in several parts is one step of it, and the second domain begins at the first one's average."""
    work = ema("method.decay=0.6", f"trainer.accumulate_grad_batches={accumulate}")
    for number in (0, 1):
        start, watch = work.weights(), Watch(copies)
        work.learn(number, watch)
        assert len(watch.seen) == 6 * accumulate
        path = list(dict(watch.seen[accumulate - 1 :: accumulate]).values())
        assert len(path) == 6
        assert_close(work.weights(), averaged(start, path, decay=0.6), rtol=1e-4, atol=1e-6)
        assert not same(work.weights(), path[-1])


def test_a_domain_starts_at_the_model_that_it_finds(ema):
    work, watch = ema("method.decay=0.6"), Watch(copies)
    for parameter in work.module.model.parameters():
        parameter.data.add_(0.1)
    start = work.weights()
    work.learn(0, watch)
    assert_close(work.weights(), averaged(start, dict(watch.seen).values(), decay=0.6), rtol=1e-4, atol=1e-6)


def test_a_checkpoint_holds_the_average_of_its_step(ema):
    work = ema("method.decay=0.6")
    start, path = work.weights(), Watch(copies)
    kept = Watch(lambda module: {k: v.clone() for k, v in module.average.named().items()})
    work.learn(0, path, kept)
    for step, average in kept.seen:
        assert_close(
            average, averaged(start, [weights for _, weights in path.seen[:step]], decay=0.6), atol=1e-6
        )


def test_masks_count_before_the_average(ema):
    """What a mask leaves of a step is what is averaged."""
    from tests.methods.test_base import Half

    work = ema("method.decay=0.6")
    work.module.masks.append(Half(acts_on="update", factor=0.0, model=work.module.model))
    before = work.weights()
    work.learn(0)
    for name, value in work.weights().items():
        if value.ndim == 2:
            assert torch.equal(value[: len(value) // 2], before[name][: len(value) // 2]), name
            assert not torch.equal(value[len(value) // 2 :], before[name][len(value) // 2 :]), name
