"""OSF: nothing of a step is in protected directions. MoFO: what has little momentum does not move."""

import math
from fractions import Fraction

import pytest
import torch
from torch import nn

from cpt.data.collate import make_idle_batch
from cpt.gradient_masks.base import StepSnapshot
from cpt.gradient_masks.constraints import MomentumFilter, Subspaces
from cpt.gradient_masks.options import MomentumFilterOptions
from cpt.models.fisher import measure_block_similarity
from cpt.models.units import Projection, find_blocks
from tests.runs.reading import scores_of
from tests.support.method_fixtures import ORDER, build_method_fixture


def projectors(weight, rank):
    u, _, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return u[:, :rank] @ u[:, :rank].T, v[:rank].T @ v[:rank]


def make_step(constraint, optimizer, weight, gradient) -> None:
    weight.grad = gradient
    snapshot = StepSnapshot(constraint, constraint.covered())
    optimizer.step()
    snapshot.apply(optimizer)


def train_weight(start, rank, *, protected="both"):
    """A weight after 50 steps of AdamW with decay under a constraint."""
    layer = nn.Linear(*reversed(start.shape))
    weight = nn.Parameter(start.clone())
    layer.weight = weight
    subspaces = Subspaces(apply_to="update", protected=protected)
    subspaces.set_layers([Projection("layer", layer, 0, ())])
    subspaces.protect_directions({"layer": rank})
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    scales = torch.rand(weight.shape) ** 4  # Adam would even them out
    for _ in range(50):
        make_step(subspaces, optimizer, weight, torch.randn(weight.shape) * scales + 0.1 * scales)
    return weight.detach()


def find_shares(movement, left, right):
    """The squared share of a movement in either subspace, and in both."""
    in_both = left @ movement @ right
    in_either = left @ movement + movement @ right - in_both
    total = movement.square().sum()
    return in_either.square().sum() / total, in_both.square().sum() / total


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_under_adamw_with_decay_nothing_moves_inside(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    left, right = projectors(start, 6)
    movement = train_weight(start, 6).double() - start
    share_in_either, _ = find_shares(movement, left, right)
    assert share_in_either < 1e-9 and movement.norm() > 0.5
    movement = train_weight(start, 6, protected="block").double() - start
    share_in_either, share_in_both = find_shares(movement, left, right)
    assert share_in_both < 1e-9 < share_in_either


def test_directions_are_those_of_the_model_before_each_domain(build):
    work = build("osf", "method.protected_share=0.25", "method.growth=0.25", "method.max_protected_share=0.4")
    for number, share in ((0, 0.25), (1, 0.4)):
        subspaces = work.module.subspaces
        start_weights = {name: weight.detach().clone() for name, weight in subspaces.weights.items()}
        work.learn(number)
        for name, start in start_weights.items():
            rank = int(share * min(start.shape) + 1e-9)
            assert subspaces.bases.named()[f"{name}.left"].shape[1] == rank
            movement = subspaces.weights[name].detach().double() - start
            share_in_either, _ = find_shares(movement, *projectors(start, rank))
            assert share_in_either < 1e-8, name


def test_a_block_that_changes_less_is_protected_more(build):
    work = build(
        "osf",
        "method.protected_layers=blocks",
        "method.protected_share=0.5",
        "method.min_protected_share=0.1",
        "method.max_protected_share=0.8",
    )
    assert work.module.protected_shares(work.data.domains[0]) == [Fraction(1, 2)] * (
        len(work.module.blocks) + 1
    )
    work.learn(0)
    assert len(set(work.module.similarity.tolist())) == len(work.module.similarity) > 1
    for similarity, expected in (([0.2, 0.6], [0.3, 0.7, 0.5]), ([-1.0, 0.5], [0.1, 0.8, 0.5])):
        work.module.similarity = torch.tensor(similarity)
        shares = [float(share) for share in work.module.protected_shares(work.data.domains[1])]
        assert shares == pytest.approx(expected)
    work.learn(1)
    bases = work.module.subspaces.bases.named()
    for name, weight in work.module.subspaces.weights.items():
        in_block = [name.startswith(f"{block}.") for block in work.module.blocks]
        share = (0.1, 0.8)[in_block.index(True)]
        assert bases[f"{name}.left"].shape[1] == int(share * min(weight.shape)), name


def test_similarity_is_the_mean_cosine_over_tokens_that_are_there(build):
    work = build("ncl")
    model = work.module.model.eval()
    objective = work.module.objective
    [batch] = work.batches()
    batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    batch["attention_mask"][:, -5:] = 0

    cosines = []  # of each block's input and output
    handles = []
    for _, layer in find_blocks(model):
        hook = lambda module, args, output: cosines.append(  # noqa: E731
            torch.cosine_similarity(args[0], output, dim=-1)
        )
        handles.append(layer.register_forward_hook(hook))
    objective.nll(model, batch)
    for handle in handles:
        handle.remove()
    expected = torch.stack(cosines)[:, :, :-5].mean((1, 2)).detach()
    for batches in ([batch], [batch, make_idle_batch(batch)]):  # the last of a process that only takes part
        torch.testing.assert_close(measure_block_similarity(model, objective, batches), expected)
    assert torch.equal(measure_block_similarity(model, objective, []), torch.ones(len(expected)))


def filter_of(weight, *, share, form="whole") -> MomentumFilter:
    momentum_filter = MomentumFilter(MomentumFilterOptions(share=share, form=form))
    momentum_filter.watched = [nn.ParameterList([weight])]
    return momentum_filter


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_entries_with_the_most_momentum_move(share):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 7))
    twin = nn.Parameter(weight.detach().clone())
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.1)
    plain_optimizer = torch.optim.AdamW([twin], lr=0.1, weight_decay=0.1)
    for _ in range(4):
        gradient = torch.randn(6, 7)
        old = weight.detach().clone()
        make_step(filter_of(weight, share=share), optimizer, weight, gradient)
        twin.grad = gradient
        plain_optimizer.step()
        has_moved = weight.detach() != old
        momentum = optimizer.state[weight]["exp_avg"].abs()
        assert has_moved.sum() == math.ceil(42 * round(share * 100) / 100)
        assert momentum[has_moved].min() > momentum[~has_moved].max()
    for name in ("exp_avg", "exp_avg_sq"):  # of all entries, as without
        torch.testing.assert_close(optimizer.state[weight][name], plain_optimizer.state[twin][name])


def test_the_released_form_decays_all_entries_and_filters_adams_part():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 8))
    rate, decay = 0.1, 0.2
    optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=decay)
    expected = weight.detach().clone()
    m = torch.zeros(5, 8)
    v = torch.zeros(5, 8)
    for step in range(1, 5):
        gradient = torch.randn(5, 8)
        make_step(filter_of(weight, share=0.1, form="released"), optimizer, weight, gradient)
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        adam_step = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        is_updated = m.abs() >= m.abs().flatten().topk(4).values.min()
        expected = expected * (1 - rate * decay) - rate * torch.where(is_updated, adam_step, 0)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("form", ["released", "whole"])
def test_a_run_moves_so_many_weights_less(form, small):
    one_step = ("trainer.steps=1", "lr_scheduler=constant", "lr_scheduler.warmup_ratio=0")
    options = ("mask=mofo", "mask.mofo.share=0.1", f"mask.mofo.form={form}", "optim.weight_decay=0", ORDER)
    work = build_method_fixture(small(*options, *one_step))
    start_weights = work.weights()
    work.learn(0)
    for name, weight in work.weights().items():
        num_moved = (weight != start_weights[name]).sum()
        tenth = math.ceil(weight.numel() / 10)
        is_unfiltered = form == "released" and ("norm" in name.lower() or name.endswith("bias"))
        if is_unfiltered:
            assert num_moved > tenth, name
        else:
            assert 0 < num_moved <= tenth, name


def test_what_a_method_protects_stays_protected(start, small, tmp_path):
    options = ["method=hat", "mask=mofo", "optim.weight_decay=0.1", "order=[law,food]"]
    start(small(*options), tmp_path / "run")
    _, law, food = scores_of(tmp_path / "run").nll
    assert law[0] == food[0] and law[1] != food[1]
