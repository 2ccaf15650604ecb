"""A model that grows per stage: what is new is trained, masked and kept, or the run ends in one line."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cpt.gradient_masks.soft import SoftMask
from cpt.methods.adapter import Adapter
from cpt.models.units import blocks
from tests.support.making import ORDER, made
from tests.support.seams import Growing, chosen

GROWING = [*chosen("growing"), ORDER]


def grown(work) -> set[str]:
    """The names of what has come since the base, 2 blocks."""
    return {name for name in work.weights() if any(f"layers.{n}." in name for n in (2, 3))}


def test_what_has_grown_is_trained_and_masked(small):
    work = made(small(*GROWING))
    work.learn(0)
    work.data.enter(work.data.domains[1])
    work.module.setup_stage(work.data.domains[1])
    before, [mask] = work.weights(), work.module.masks
    known = {name: shares.clone() for name, shares in mask.diagnostics().items()}
    work.learn(1)
    after = work.weights()
    assert len(blocks(work.module.model)) == 4
    assert all(not torch.equal(after[name], before[name]) for name in grown(work))
    assert {each.name.split(".")[2] for each in mask.maps} == {"0", "1", "2", "3"}
    assert sum(bool(shares.any()) for shares in known.values()) == len(known) * 3 / 4
    for each, place in zip(mask.maps, mask.places, strict=True):
        steps = 6 if ".layers.3." in each.name else 12
        assert mask.chosen[place].max() <= steps
        assert mask.chosen[place].sum() == pytest.approx(steps * mask.chosen[place].numel() * 0.3, rel=0.1)


def test_a_mask_that_watches_again_sees_each_output_once(small):
    """Hooks that stayed would count double."""
    work = made(small(*GROWING))
    for domain in work.data.domains:
        work.module.expand_to(domain)
    for _, module in work.module.model.named_modules():
        own = [each for each in module._forward_hooks.values() if "record" in str(each)]
        assert len(own) <= 1
    assert len(work.module.model._forward_pre_hooks) == 1


def test_a_stage_is_shaped_once_and_draws_what_it_always_draws(small):
    one, other = made(small(*GROWING)), made(small(*GROWING))
    for domain in one.data.domains:
        one.module.setup_stage(domain)
        one.module.setup_stage(domain)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for domain in other.data.domains:
        other.module.expand_to(domain)
    assert torch.equal(torch.get_rng_state(), state)
    weights = one.weights(), other.weights()
    assert len(grown(one)) == 2 * len(grown(one) & {name for name in grown(one) if "layers.2." in name})
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_importances_stay_with_their_units(small):
    work = made(small(*GROWING))
    soft = SoftMask(work.module.model, kinds=["heads", "neurons"], acts_on="update", normalise="minmax")
    soft.update_max(torch.rand(sum(soft.sizes)))
    work.module.masks.append(soft)
    before = {name: gate.clone() for name, gate in soft.gates().items()}
    work.module.expand_to(work.data.domains[0])
    after = soft.gates()
    assert len(after) == len(before) * 3 / 2
    assert all(torch.equal(gate, before.get(name, torch.zeros_like(gate))) for name, gate in after.items())


@pytest.mark.parametrize("in_scope", [False, True])
def test_what_is_new_must_be_in_the_scope(in_scope, small, monkeypatch):
    work = made(small("method=adapter", ORDER))

    def expand(module, stage):
        module.model.extra = nn.Linear(2, 2, bias=False)
        if in_scope:
            module.scope = replace(module.scope, names=(*module.scope.names, "extra.weight"))

    monkeypatch.setattr(Adapter, "expand", expand)
    if in_scope:
        work.module.setup_stage(work.data.domains[0])
        assert work.module.model.extra.weight.requires_grad
    else:
        with pytest.raises(ValueError, match="^shape of law has added extra.weight, which would not"):
            work.module.setup_stage(work.data.domains[0])


def test_freezing_goes_by_what_the_model_is_now(small):
    work = made(small(*GROWING, "freeze.layers=2"))
    for domain in work.data.domains:
        work.module.setup_stage(domain)
    flags = {name: p.requires_grad for name, p in work.module.model.named_parameters() if ".layers." in name}
    assert flags == {name: name in grown(work) for name in flags}
    assert isinstance(work.module, Growing)
