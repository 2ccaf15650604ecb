"""WiSE-FT: the interpolation between the models before and after a domain."""

import pytest
import torch

from tests.support.making import (
    DROPOUT,
    ORDER,
    assert_close,
    learned,
    made,
    parameter_bytes,
    same,
    state_beside_the_model,
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


def test_nothing_of_the_previous_model_is_ncl_bit_for_bit(small, start, tmp_path):
    ncl = learned(start, small("method=ncl", ORDER, *DROPOUT), tmp_path / "ncl")
    for previous in (0, 0.5):
        cfg = small("method=wise_ft", f"method.previous={previous}", ORDER, *DROPOUT)
        assert same(learned(start, cfg, tmp_path / str(previous)), ncl) == (previous == 0)


def test_the_state_is_one_copy(wise):
    work = wise()
    assert state_beside_the_model(work.module) == parameter_bytes(work.module)


def test_frozen_embeddings_stay(wise):
    work = wise("freeze.embeddings=true", "method.previous=0.3")
    before = work.weights()
    work.learn(0)
    frozen = {id(p) for p in work.module.frozen}
    names = [name for name, p in work.module.model.named_parameters() if id(p) in frozen]
    assert names and all(torch.equal(work.weights()[name], before[name]) for name in names)
    assert not same(work.weights(), before)


@pytest.mark.parametrize("previous", ["-0.1", "1.1", "nan", "half", "true"])
def test_a_wrong_share_is_told(previous, wise):
    with pytest.raises(ValueError, match=r"^method\.previous=\S+; allowed: 0 to 1$"):
        wise(f"method.previous={previous}")
