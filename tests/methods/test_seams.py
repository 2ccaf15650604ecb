"""Methods of other kinds than ours: models beside the model, and a model that grows per stage."""

import pytest
import torch
from torch import nn

from cpt.gradient_masks.soft import SoftMask
from cpt.methods.adapter import Adapter
from cpt.models.units import blocks
from tests.support.making import DROPOUT, ORDER, Watch, clones, made, same
from tests.support.seams import chosen

GROWING = [*chosen("growing"), ORDER]


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return clones({name: value.detach() for name, value in module.named_parameters()})


def test_a_peer_is_trained_and_a_teacher_is_kept(small):
    work = made(small(*chosen("companions"), ORDER, *DROPOUT))
    beside = work.module.beside
    slow, modes = weights(beside["teacher"]), []
    assert same(weights(beside["peer"]), work.weights()) and same(slow, work.weights())
    watch = Watch(lambda module: modes.append([each.training for each in beside.values()]) or work.weights())
    work.learn(0, watch)
    for _, fast in watch.seen:
        slow = {name: torch.lerp(value, fast[name], 0.1) for name, value in slow.items()}
    assert same(weights(beside["teacher"]), slow) and modes == [[True, False]] * 6
    optimizer, [mask] = work.module.trainer.optimizers[0], work.module.masks
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    own = {id(each) for each in work.module.model.parameters()}
    assert trained == own | {id(each) for each in beside["peer"].parameters()}
    assert {id(each.module.weight) for each in mask.maps} <= own and mask.chosen.sum() > 0
    assert not any(torch.equal(value, slow[name]) for name, value in weights(beside["peer"]).items())
    other = made(small(*chosen("companions"), ORDER)).module
    other.load_state_dict(work.module.state_dict())
    assert all(same(weights(other.beside[name]), weights(beside[name])) for name in ("peer", "teacher"))


def grown(work) -> set[str]:
    """The names of what has come since the base, 2 blocks."""
    return {name for name in work.weights() if any(f"layers.{n}." in name for n in (2, 3))}


def test_what_has_grown_is_trained_and_masked(small):
    work = made(small(*GROWING))
    work.learn(0)
    work.data.enter(work.data.domains[1])
    work.module.setup_stage(work.data.domains[1])
    before, [mask] = work.weights(), work.module.masks
    known = clones(mask.diagnostics())
    work.learn(1)
    after, model = work.weights(), work.module.model
    assert len(blocks(model)) == 4
    assert all(not torch.equal(after[name], before[name]) for name in grown(work))
    assert {each.name.split(".")[2] for each in mask.maps} == {"0", "1", "2", "3"}
    assert sum(bool(shares.any()) for shares in known.values()) == len(known) * 3 / 4
    for each, place in zip(mask.maps, mask.places, strict=True):
        steps = 6 if ".layers.3." in each.name else 12
        assert mask.chosen[place].max() <= steps
        assert mask.chosen[place].sum() == pytest.approx(steps * mask.chosen[place].numel() * 0.3, rel=0.1)
        assert sum("record" in str(hook) for hook in each.module._forward_hooks.values()) == 1
    assert len(model._forward_pre_hooks) == 1


def test_a_stage_is_shaped_once_and_draws_what_it_always_draws(small):
    one, other = made(small(*GROWING, "freeze.layers=2")), made(small(*GROWING))
    for domain in one.data.domains:
        one.module.setup_stage(domain)
        one.module.setup_stage(domain)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for domain in other.data.domains:
        other.module.expand_to(domain)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(blocks(one.module.model)) == 4 and same(one.weights(), other.weights())
    flags = {name: p.requires_grad for name, p in one.module.model.named_parameters() if ".layers." in name}
    assert flags == {name: name in grown(one) for name in flags}  # two of what is there now are frozen


def test_importances_stay_with_their_units(small):
    work = made(small(*GROWING))
    soft = SoftMask(work.module.model, kinds=["heads", "neurons"], acts_on="update", normalise="minmax")
    soft.update_max(torch.rand(sum(soft.sizes)))
    work.module.masks.append(soft)
    before = clones(soft.gates())
    work.module.expand_to(work.data.domains[0])
    after = soft.gates()
    assert len(after) == len(before) * 3 / 2
    assert all(torch.equal(gate, before.get(name, torch.zeros_like(gate))) for name, gate in after.items())


def test_what_is_new_must_be_in_the_scope(build, monkeypatch):
    work, extra = build("adapter"), nn.Linear(2, 2, bias=False)
    monkeypatch.setattr(Adapter, "expand", lambda module, stage: setattr(module.model, "extra", extra))
    with pytest.raises(ValueError, match=r"has added extra\.weight"):
        work.module.setup_stage(work.data.domains[0])
