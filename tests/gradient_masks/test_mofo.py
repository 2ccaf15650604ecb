"""MoFO: what has little momentum does not move, and its momentum goes on."""

import pytest
import torch
from torch import nn

from cpt.gradient_masks.base import StepSnapshot
from cpt.gradient_masks.constraints import MomentumFilter
from cpt.gradient_masks.options import MomentumFilterOptions
from tests.runs.reading import scores_of
from tests.support.making import ORDER, made


def step(weight, optimizer, gradient, *, share, form="whole"):
    chosen = MomentumFilter(MomentumFilterOptions(share=share, form=form))
    chosen.watched = [nn.ParameterList([weight])]
    weight.grad = gradient
    held = StepSnapshot(chosen, chosen.covered())
    optimizer.step()
    held.apply(optimizer)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_entries_with_the_most_momentum_move(share):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 7))
    twin = nn.Parameter(weight.detach().clone())
    optimizer, plain = (torch.optim.AdamW([each], lr=0.1, weight_decay=0.1) for each in (weight, twin))
    for _ in range(4):
        gradient, before = torch.randn(6, 7), weight.detach().clone()
        step(weight, optimizer, gradient, share=share)
        twin.grad = gradient
        plain.step()
        moved, momentum = weight.detach() != before, optimizer.state[weight]["exp_avg"].abs()
        assert moved.sum() == -(-42 * round(share * 100) // 100)
        assert momentum[moved].min() > momentum[~moved].max()
    for name in ("exp_avg", "exp_avg_sq"):  # of all entries, as without
        torch.testing.assert_close(optimizer.state[weight][name], plain.state[twin][name])


def test_the_released_form_decays_all_entries_and_filters_adams_part():
    torch.manual_seed(0)
    weight, rate, decay = nn.Parameter(torch.randn(5, 8)), 0.1, 0.2
    optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
    expected, m, v = weight.detach().clone(), torch.zeros(5, 8), torch.zeros(5, 8)
    for turn in range(1, 5):
        gradient = torch.randn(5, 8)
        step(weight, optimizer, gradient, share=0.1, form="released")
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        own = m / (1 - 0.9**turn) / ((v / (1 - 0.999**turn)).sqrt() + 1e-8)
        kept = m.abs() >= m.abs().flatten().topk(4).values.min()
        expected = expected * (1 - rate * decay) - rate * torch.where(kept, own, 0)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("form", ["released", "whole"])
def test_a_run_moves_so_many_weights_less(form, small):
    once = ["trainer.steps=1", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0", "optim.weight_decay=0"]
    work = made(small("mask=mofo", "mask.mofo.share=0.1", f"mask.mofo.form={form}", ORDER, *once))
    before = work.weights()
    work.learn(0)
    for name, value in work.weights().items():
        moved, tenth = (value != before[name]).sum(), -(-value.numel() // 10)
        free = form == "released" and ("norm" in name.lower() or name.endswith("bias"))
        assert moved > tenth if free else 0 < moved <= tenth, name


def test_what_a_method_protects_stays_protected(start, small, tmp_path):
    """Weight decay too, which the released form lets through, is that of the mask's entries."""
    given = ["method=hat", "mask=mofo", "optim.weight_decay=0.1", "order=[law,food]"]
    start(small(*given), tmp_path / "run")
    _, law, food = scores_of(tmp_path / "run").nll
    assert law[0] == food[0] and law[1] != food[1]
