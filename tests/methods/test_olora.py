"""O-LoRA: the penalty against loops over pairs and maps, and what it moves."""

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.olora import group_by_width, norms, pair_overlap
from tests.support.making import ORDER, made, same, state_beside_the_model

THREE = "order=[law,food,space]"
STRONG = "optim.lr=0.05"


@pytest.fixture
def build(small):
    return lambda *overrides: made(small("method=olora", THREE, STRONG, *overrides))


@pytest.fixture
def maps():
    """A of five maps of two widths, rank 3, and those of four earlier domains."""
    torch.manual_seed(0)
    widths = (8, 6, 8, 8, 6)
    new = [torch.randn(3, width, dtype=torch.float64, requires_grad=True) for width in widths]
    earlier = [[torch.randn(3, w, dtype=torch.float64, requires_grad=True) for w in widths] for _ in range(4)]
    return new, earlier


def slow(new, earlier, *, power: int) -> float:
    """sum over maps, domains and entries of |row of A_k . row of A_t|^power, product by product."""
    found = 0.0
    for domain in earlier:
        for old, a in zip(domain, new, strict=True):
            for row in a.tolist():
                for other in old.tolist():
                    found += abs(sum(x * y for x, y in zip(row, other, strict=True))) ** power
    return found


@pytest.mark.parametrize(("penalty", "power"), [("l1", 1), ("squared", 2)])
def test_the_penalty_is_the_slow_sum(penalty, power, maps):
    found = pair_overlap(group_by_width(*maps), penalty=penalty).item()
    assert found == pytest.approx(slow(*maps, power=power), rel=1e-5)


@pytest.mark.parametrize("penalty", ["l1", "squared"])
def test_orthogonal_rows_cost_nothing_and_equal_ones_their_norms(penalty):
    rows = torch.eye(6)
    new, free, same_rows = [2 * rows[:2]], [[rows[2:4]], [rows[4:]]], [[rows[2:4]], [rows[:2]]]
    assert pair_overlap(group_by_width(new, free), penalty=penalty) == 0
    assert pair_overlap(group_by_width(new, same_rows), penalty=penalty) == {"l1": 4, "squared": 8}[penalty]


def test_the_groups_are_one_product_per_width(maps):
    groups = group_by_width(*maps)
    assert [(len(new), tuple(earlier.shape)) for new, earlier in groups] == [(3, (3, 12, 8)), (2, (2, 12, 6))]


def test_norms_are_not_squared_and_have_a_gradient_at_zero():
    a, b = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.zeros(2, 1, requires_grad=True)
    found = norms([a, b])
    found.backward()
    assert found.item() == 5 and torch.equal(a.grad, torch.tensor([[0.6, 0.8]])) and not b.grad.any()


@pytest.mark.parametrize("stored", ("merged", "pairs"))
def test_the_loss_is_strength_times_the_overlap_with_all_earlier_domains(stored, build):
    work = build(f"method.stored={stored}", "method.strength=2", "method.penalty=squared", "method.norm=0.5")
    module, batch = work.module, work.batches()[0]
    names = [name for name, _ in module.model.named_parameters() if ".lora_A.default" in name]
    kept = []
    assert module.losses(batch)["orthogonality"] == 0
    for number in range(3):
        work.learn(number)
        kept.append([module.model.get_parameter(name).detach().clone() for name in names])
        assert module.kept.domains == list(range(number + 1))
        assert [value.tolist() for value in module.kept.weights(number).values()] == [
            value.tolist() for value in kept[-1]
        ]
    module.activate(2)
    terms = module.losses(batch)
    assert terms["orthogonality"].item() == pytest.approx(2 * slow(kept[-1], kept, power=2), rel=1e-3)
    pairs = [half for layer in lora.lora_layers(module.model).values() for half in lora.factors_of(layer)]
    assert terms["norm"].item() == pytest.approx(0.5 * sum(p.norm().item() for p in pairs), rel=1e-4)


@pytest.mark.parametrize("stored", ("merged", "pairs"))
def test_the_penalty_moves_the_new_a_alone(stored, build):
    work = build(f"method.stored={stored}")
    work.learn(0)
    work.learn(1)
    module = work.module
    module.zero_grad()
    module.losses(work.batches()[0])["orthogonality"].backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {
        f"model.{name}" for name, _ in module.model.named_parameters() if "lora_A.default" in name
    }


def test_in_the_first_domain_it_is_inclora(small):
    with_penalty, without = (made(small(f"method={name}", ORDER, STRONG)) for name in ("olora", "inclora"))
    for number, equal in ((0, True), (1, False)):
        for work in (with_penalty, without):
            work.learn(number)
        assert same(with_penalty.weights(), without.weights()) == equal


def test_the_state_grows_by_the_as_alone(build):
    work = build("trainer.steps=1")
    widths = sum(layer.in_features for layer in lora.lora_layers(work.module.model).values())
    assert state_beside_the_model(work.module) == 0
    for number in range(3):
        size = sum(v.nbytes for n, v in work.module.state_dict().items() if n.startswith("model."))
        work.learn(number)
        assert state_beside_the_model(work.module) == (number + 1) * 4 * 8 * widths
        after = sum(v.nbytes for n, v in work.module.state_dict().items() if n.startswith("model."))
        assert after == size


def test_embeddings_are_held_apart_too(build):
    work = build("method.embeddings=true")
    assert sum("lora_embedding_A" in name for name in work.module.kept.names) == 1
    assert not any("_B" in name for name in work.module.kept.names)
    work.learn(0)
    work.learn(1)
    assert work.module.losses(work.batches()[0])["orthogonality"] > 0
