"""OSF: nothing of a step is in the directions that are protected."""

from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

from cpt.gradient_masks.base import StepSnapshot
from cpt.gradient_masks.subspace import Subspaces
from cpt.models.fisher import measure_similarity
from cpt.models.units import Projection, blocks
from tests.support.making import ORDER, made


@contextmanager
def watch_blocks(layers):
    """What each block is given and gives, by its place."""
    seen = {}

    def note(place, module, args, given, made):
        seen[place] = (
            args[0] if args else given["hidden_states"],
            made[0] if isinstance(made, tuple) else made,
        )

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            handle = layer.register_forward_hook(partial(note, place), with_kwargs=True)
            hooks.callback(handle.remove)
        yield seen


def protecting(weight, rank, *, acts_on="update", protected="both"):
    layer = nn.Linear(*reversed(weight.shape))
    layer.weight = nn.Parameter(weight)
    chosen = Subspaces(acts_on=acts_on, protected=protected)
    chosen.over([Projection("map", layer, 0, ())])
    chosen.span({"map": rank})
    return chosen, layer.weight


def projectors(weight, rank):
    u, _, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return u[:, :rank] @ u[:, :rank].T, v[:rank].T @ v[:rank]


def learn(chosen, weight, steps=50):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.1)
    scales = torch.rand(weight.shape) ** 4  # Adam would even them out
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape) * scales + 0.1 * scales
        if chosen.acts_on == "gradient":
            with torch.no_grad():
                chosen.constrain([(weight, weight.grad)], optimizer)
            optimizer.step()
        else:
            held = StepSnapshot(chosen, chosen.covered())
            optimizer.step()
            held.apply(optimizer)


def shares(moved, left, right):
    """The squared share of a movement in either subspace, and in both."""
    free = moved - left @ moved - moved @ right + left @ moved @ right
    both = left @ moved @ right
    return ((moved - free).square().sum() / moved.square().sum(), both.square().sum() / moved.square().sum())


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (16, 16)])
def test_under_adamw_with_decay_nothing_moves_inside(shape):
    torch.manual_seed(0)
    start = torch.randn(shape)
    left, right = projectors(start, 6)
    chosen, weight = protecting(start.clone(), 6)
    learn(chosen, weight)
    either, _ = shares(weight.detach().double() - start, left, right)
    assert either < 1e-9
    assert (weight.detach() - start).norm() > 0.5


def test_a_projected_gradient_leaks_under_adamw():
    """What released code does: about an eighth of the movement and more is inside again."""
    torch.manual_seed(0)
    start = torch.randn(16, 16)
    left, right = projectors(start, 8)
    chosen, weight = protecting(start.clone(), 8, acts_on="gradient")
    learn(chosen, weight)
    either, _ = shares(weight.detach().double() - start, left, right)
    assert either > 0.1


def test_of_a_block_only_what_is_in_both_is_taken_out():
    torch.manual_seed(0)
    start = torch.randn(12, 20)
    left, right = projectors(start, 6)
    chosen, weight = protecting(start.clone(), 6, protected="block")
    learn(chosen, weight)
    either, both = shares(weight.detach().double() - start, left, right)
    assert both < 1e-9 < either


def test_directions_are_those_of_the_model_before_each_domain(small):
    work = made(small("method=osf", ORDER, "method.protected=0.25", "method.growth=0.25", "method.most=0.4"))
    before = {name: weight.detach().clone() for name, weight in work.module.subspaces.maps.items()}
    for number, share in ((0, 0.25), (1, 0.4)):
        work.learn(number)
        for name, start in before.items():
            rank = int(share * min(start.shape) + 1e-9)
            left, right = projectors(start, rank)
            now = work.module.subspaces.maps[name].detach()
            assert work.module.subspaces.bases.named()[f"{name}.left"].shape[1] == rank
            assert shares(now.double() - start, left, right)[0] < 1e-8, name
        before = {name: weight.detach().clone() for name, weight in work.module.subspaces.maps.items()}


def test_all_protects_every_matrix_and_tells_what_moves_freely(small, caplog):
    caplog.set_level("INFO", logger="cpt")
    work = made(small("method=osf", ORDER, "method.protect=all", "method.protected=0.5"))
    before = {name: p.detach().clone() for name, p in work.module.model.named_parameters()}
    work.learn(0)
    after = work.module.model.get_parameter
    for name, start in before.items():
        if start.ndim == 2:
            left, right = projectors(start, min(start.shape) // 2)
            moved = after(name).detach().double() - start
            assert shares(moved, left, right)[0] < 1e-8 and moved.any(), name
    assert "method.protect=all: 2 % of the trained weights move freely: 7 norms and biases\n" in caplog.text
    made(small("method=osf", ORDER, "method.protect=blocks")).learn(0)
    assert "norms and biases, model.embeddings.tok_embeddings.weight" in caplog.text


BY_BLOCK = ["method.protect=blocks", "method.protected=0.5", "method.least=0.1", "method.most=0.9"]


def test_a_block_that_changes_less_is_protected_more(small):
    work = made(small("method=osf", ORDER, *BY_BLOCK))
    work.learn(0)
    similar = work.module.similarity
    assert len(set(similar.tolist())) == len(similar) > 1
    work.learn(1)  # measures anew behind it
    part = similar / similar.mean()
    bases = work.module.subspaces.bases.named()
    for name, weight in work.module.subspaces.maps.items():
        share = (
            0.1
            + 0.4 * part[next(k for k, b in enumerate(work.module.blocks) if name.startswith(f"{b}."))].item()
        )
        assert bases[f"{name}.left"].shape[1] == int(share * min(weight.shape)), name


def test_before_the_first_domain_all_blocks_have_the_share_asked_for(small):
    work = made(small("method=osf", ORDER, *BY_BLOCK))
    assert work.module.shares(work.data.domains[0]) == [Fraction(1, 2)] * (len(work.module.blocks) + 1)


@pytest.mark.parametrize(
    ("similar", "shares"), [([0.2, 0.6], [0.3, 0.7, 0.5]), ([-1.0, 0.5], [0.1, 0.8, 0.5])]
)
def test_shares_lie_between_the_least_and_the_most(small, similar, shares):
    work = made(small("method=osf", ORDER, "method.protected=0.5", "method.least=0.1", "method.most=0.8"))
    work.module.similarity = torch.tensor(similar)
    found = [float(each) for each in work.module.shares(work.data.domains[1])]
    assert found == pytest.approx(shares)


def test_similarity_is_the_mean_cosine_over_tokens_that_are_there(small):
    """By hand, from the hidden states that the model itself gives; tokens of padding do not count."""
    work = made(small("method=ncl", ORDER))
    model, objective = work.module.model.eval(), work.module.objective
    found = measure_similarity(model, objective, batches := work.batches(2))
    again = []
    for batch in batches:
        hidden = model(batch["input_ids"], output_hidden_states=True).hidden_states
        states = list(hidden)
        with watch_blocks([layer for _, layer in blocks(model)]) as seen:
            objective.nll(model, batch)
        states = [seen[0][0], *(made for _, made in seen.values())]
        again.append(
            [torch.cosine_similarity(a, b, dim=-1) for a, b in zip(states[:-1], states[1:], strict=True)]
        )
        torch.testing.assert_close(states[1], hidden[1])
    means = torch.stack([torch.stack(each).mean((1, 2)) for each in again]).mean(0)
    torch.testing.assert_close(found, means)
    padded = dict(batches[0], attention_mask=torch.ones_like(batches[0]["input_ids"]))
    padded["attention_mask"][:, -5:] = 0
    with watch_blocks([layer for _, layer in blocks(model)]) as seen:
        objective.nll(model, padded)
    there = [torch.cosine_similarity(*each, dim=-1)[:, :-5].mean() for each in seen.values()]
    torch.testing.assert_close(measure_similarity(model, objective, [padded]), torch.stack(there))
    assert torch.equal(measure_similarity(model, objective, []), torch.ones(len(found)))
