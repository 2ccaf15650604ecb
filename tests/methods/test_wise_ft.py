"""WiSE-FT: the interpolation between the models before and after a domain."""

import pytest

from tests.support.making import (
    ORDER,
    assert_close,
    made,
    same,
)


@pytest.fixture
def wise(small):
    return lambda *overrides: made(small("method=wise_ft", ORDER, *overrides))


def test_a_domain_ends_between_before_and_after(wise, small):
    """Both domains: the second one mixes with what the first one ended with, not with the base."""
    work, plain = wise("method.previous=0.3"), made(small("method=ncl", ORDER))
    for number in (0, 1):
        before = work.weights()
        plain.module.model.load_state_dict(work.module.model.state_dict())
        work.learn(number)
        plain.learn(number)
        after = plain.weights()
        mixed = {name: 0.7 * after[name].double() + 0.3 * before[name].double() for name in before}
        assert_close(work.weights(), mixed, rtol=1e-5, atol=1e-7)
        assert not same(work.weights(), after)


def test_all_of_the_previous_model_is_the_base_for_ever(wise):
    work = wise("method.previous=1")
    before = work.weights()
    for number in (0, 1):
        work.learn(number)
        assert same(work.weights(), before)
