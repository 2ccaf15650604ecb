"""Models beside the model: trained or kept, saved, and left out of what is the model's alone."""

import torch

from tests.support.making import DROPOUT, ORDER, Watch, made, same
from tests.support.seams import chosen


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def test_a_peer_is_trained_and_a_teacher_is_kept(small):
    work = made(small(*chosen("companions"), ORDER, *DROPOUT))
    beside = work.module.beside
    assert same(weights(beside["peer"]), work.weights()) and same(weights(beside["teacher"]), work.weights())
    slow, modes = weights(beside["teacher"]), []
    watch = Watch(lambda module: modes.append([each.training for each in beside.values()]) or work.weights())
    work.learn(0, watch)
    for _, fast in watch.seen:
        slow = {name: torch.lerp(value, fast[name], 0.1) for name, value in slow.items()}
    assert same(weights(beside["teacher"]), slow)
    assert modes == [[True, False]] * 6
    trained = {
        id(each) for group in work.module.trainer.optimizers[0].param_groups for each in group["params"]
    }
    assert trained == {id(each) for part in (work.module.model, beside["peer"]) for each in part.parameters()}
    assert not any(torch.equal(value, slow[name]) for name, value in weights(beside["peer"]).items())


def test_companions_are_in_the_state_and_not_masked(small):
    work = made(small(*chosen("companions"), ORDER))
    [mask] = work.module.masks
    inside = {id(parameter) for parameter in work.module.model.parameters()}
    assert {id(each.module.weight) for each in mask.maps} <= inside
    work.learn(0)
    assert mask.chosen.sum() > 0
    other = made(small(*chosen("companions"), ORDER))
    other.module.load_state_dict(work.module.state_dict())
    for name in ("peer", "teacher"):
        assert same(weights(other.module.beside[name]), weights(work.module.beside[name]))
