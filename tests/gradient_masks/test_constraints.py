"""OSF: nothing of a step is in protected directions. MoFO: what has little momentum does not move."""

from fractions import Fraction

import pytest
import torch
from torch import nn

from cpt.data.collate import idle_batch
from cpt.gradient_masks.base import StepSnapshot
from cpt.gradient_masks.constraints import MomentumFilter, Subspaces
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.fisher import measure_similarity
from cpt.models.units import Projection, find_blocks
from tests.runs.reading import scores_of
from tests.support.method_fixtures import ORDER, build_method_fixture


def projectors(weight, rank):
    u, _, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return u[:, :rank] @ u[:, :rank].T, v[:rank].T @ v[:rank]


def make_step(constraint, optimizer, weight, gradient) -> None:
    weight.grad = gradient
    held = StepSnapshot(constraint, constraint.covered())
    optimizer.step()
    held.apply(optimizer)


def learned(start, rank, *, protected="both"):
    """What is left of 50 steps of AdamW with decay under a mask over a weight."""
    layer = nn.Linear(*reversed(start.shape))
    layer.weight = weight = nn.Parameter(start.clone())
    chosen = Subspaces(apply_to="update", protected=protected)
    chosen.set_layers([Projection("map", layer, 0, ())])
    chosen.protect_directions({"map": rank})
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    scales = torch.rand(weight.shape) ** 4  # Adam would even them out
    for _ in range(50):
        make_step(chosen, optimizer, weight, torch.randn(weight.shape) * scales + 0.1 * scales)
    return weight.detach()


def shares(moved, left, right):
    """The squared share of a movement in either subspace, and in both."""
    both = left @ moved @ right
    within = left @ moved + moved @ right - both
    return tuple(each.square().sum() / moved.square().sum() for each in (within, both))


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_under_adamw_with_decay_nothing_moves_inside(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    planes = projectors(start, 6)
    moved = learned(start, 6).double() - start
    assert shares(moved, *planes)[0] < 1e-9 and moved.norm() > 0.5
    either, both = shares(learned(start, 6, protected="block").double() - start, *planes)
    assert both < 1e-9 < either


def test_directions_are_those_of_the_model_before_each_domain(build):
    work = build("osf", "method.protected=0.25", "method.growth=0.25", "method.most=0.4")
    for number, share in ((0, 0.25), (1, 0.4)):
        before = {name: weight.detach().clone() for name, weight in work.module.subspaces.maps.items()}
        work.learn(number)
        for name, start in before.items():
            rank = int(share * min(start.shape) + 1e-9)
            moved = work.module.subspaces.maps[name].detach().double() - start
            assert work.module.subspaces.bases.named()[f"{name}.left"].shape[1] == rank
            assert shares(moved, *projectors(start, rank))[0] < 1e-8, name


def test_a_block_that_changes_less_is_protected_more(build):
    work = build(
        "osf", "method.protect=blocks", "method.protected=0.5", "method.least=0.1", "method.most=0.8"
    )
    assert work.module.shares(work.data.domains[0]) == [Fraction(1, 2)] * (len(work.module.blocks) + 1)
    work.learn(0)
    assert len(set(work.module.similarity.tolist())) == len(work.module.similarity) > 1
    for given, expected in (([0.2, 0.6], [0.3, 0.7, 0.5]), ([-1.0, 0.5], [0.1, 0.8, 0.5])):
        work.module.similarity = torch.tensor(given)
        found = [float(each) for each in work.module.shares(work.data.domains[1])]
        assert found == pytest.approx(expected)
    work.learn(1)
    bases = work.module.subspaces.bases.named()
    for name, weight in work.module.subspaces.maps.items():
        place = next(k for k, block in enumerate(work.module.blocks) if name.startswith(f"{block}."))
        assert bases[f"{name}.left"].shape[1] == int((0.1, 0.8)[place] * min(weight.shape)), name


def test_similarity_is_the_mean_cosine_over_tokens_that_are_there(build):
    work, seen = build("ncl"), []
    model, objective, (batch,) = work.module.model.eval(), work.module.objective, work.batches()
    batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    batch["attention_mask"][:, -5:] = 0
    hook = lambda module, args, output: seen.append(torch.cosine_similarity(args[0], output, dim=-1))  # noqa: E731
    handles = [layer.register_forward_hook(hook) for _, layer in find_blocks(model)]
    objective.nll(model, batch)
    for handle in handles:
        handle.remove()
    expected = torch.stack(seen)[:, :, :-5].mean((1, 2)).detach()
    for some in ([batch], [batch, idle_batch(batch)]):  # the last of a process that only takes part
        torch.testing.assert_close(measure_similarity(model, objective, some), expected)
    assert torch.equal(measure_similarity(model, objective, []), torch.ones(len(expected)))


def filter_of(weight, *, share, form="whole") -> MomentumFilter:
    chosen = MomentumFilter(MomentumFilterOptions(share=share, form=form))
    chosen.watched = [nn.ParameterList([weight])]
    return chosen


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_entries_with_the_most_momentum_move(share):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 7))
    twin = nn.Parameter(weight.detach().clone())
    optimizer, plain = (torch.optim.AdamW([each], lr=0.1, weight_decay=0.1) for each in (weight, twin))
    for _ in range(4):
        gradient, before = torch.randn(6, 7), weight.detach().clone()
        make_step(filter_of(weight, share=share), optimizer, weight, gradient)
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
        make_step(filter_of(weight, share=0.1, form="released"), optimizer, weight, gradient)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        own = m / (1 - 0.9**turn) / ((v / (1 - 0.999**turn)).sqrt() + 1e-8)
        kept = m.abs() >= m.abs().flatten().topk(4).values.min()
        expected = expected * (1 - rate * decay) - rate * torch.where(kept, own, 0)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("form", ["released", "whole"])
def test_a_run_moves_so_many_weights_less(form, small):
    once = ["trainer.steps=1", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0", "optim.weight_decay=0"]
    work = build_method_fixture(
        small("mask=mofo", "mask.mofo.share=0.1", f"mask.mofo.form={form}", ORDER, *once)
    )
    before = work.weights()
    work.learn(0)
    for name, value in work.weights().items():
        moved, tenth = (value != before[name]).sum(), -(-value.numel() // 10)
        free = form == "released" and ("norm" in name.lower() or name.endswith("bias"))
        assert moved > tenth if free else 0 < moved <= tenth, name


def test_what_a_method_protects_stays_protected(start, small, tmp_path):
    given = ["method=hat", "mask=mofo", "optim.weight_decay=0.1", "order=[law,food]"]
    start(small(*given), tmp_path / "run")
    _, law, food = scores_of(tmp_path / "run").nll
    assert law[0] == food[0] and law[1] != food[1]
