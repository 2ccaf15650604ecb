"""Reptile: a share of the way that so many steps have gone."""

import pytest
import torch

from tests.support.making import ORDER, assert_close, made, same

SMALL = [ORDER, "trainer.steps=4"]


@pytest.fixture
def reptile(small):
    return lambda *options: made(small("method=reptile", *SMALL, *options))


def test_a_share_of_the_way_is_gone_at_a_domains_end(reptile, small):
    work, plain = reptile("method.every=9", "method.share=0.3"), made(small("method=ncl", *SMALL))
    for number in (0, 1):
        before = work.weights()
        plain.module.model.load_state_dict(work.module.model.state_dict())
        work.learn(number)
        plain.learn(number)
        expected = {name: torch.lerp(before[name], value, 0.3) for name, value in plain.weights().items()}
        assert_close(work.weights(), expected)


def test_it_is_gone_after_every_so_many_steps(reptile, monkeypatch):
    work, ways = reptile("method.every=2", "method.share=0.5", "optim.weight_decay=0"), []
    kind = type(work.module)
    interpolate = kind.interpolate

    def watched(module):
        fast = work.weights()
        anchor = {name: value.clone() for name, value in module.anchor.named().items()}
        ways.append(int(module.gone))
        interpolate(module)
        assert_close(work.weights(), {n: torch.lerp(anchor[n], v, 0.5) for n, v in fast.items()})
        assert same(work.weights(), module.anchor.named())

    monkeypatch.setattr(kind, "interpolate", watched)
    work.learn(0)
    assert ways == [2, 2] and int(work.module.gone) == 0


def test_nothing_of_the_way_leaves_the_model_where_it_was(reptile):
    work = reptile("method.every=3", "method.share=0")
    before = work.weights()
    work.learn(0)
    assert same(work.weights(), before)


def test_a_share_of_the_steps_is_a_number_of_them(reptile, caplog):
    caplog.set_level("INFO", logger="cpt")
    ends = []
    for every in ("0.5", "2"):  # of four steps
        work = reptile(f"method.every={every}", "method.share=0.5")
        for number in (0, 1):
            work.learn(number)
        ends.append(work.weights())
    assert same(*ends) and "one interpolation" not in caplog.text


def test_more_steps_than_a_domain_has_are_told(reptile, caplog):
    caplog.set_level("INFO", logger="cpt")
    reptile("method.every=5").learn(0)
    assert "method.every=5 is more than the 4 steps of law: one interpolation, at its end" in caplog.text
