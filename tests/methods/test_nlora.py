"""N-LoRA: the norms against sums over entries, what they move, and what they leave."""

import pytest
import torch

from cpt.adapters import lora
from cpt.methods.nlora import factors_norm, product_norm
from tests.support.making import ORDER, made
from tests.support.pairs import base_of, pair_of

STRONG = "optim.lr=0.05"
SIZES = ((8, 6), (6, 8), (5, 5))  # d_in and d_out of maps


@pytest.fixture
def build(small):
    return lambda *overrides: made(small("method=nlora", ORDER, STRONG, *overrides))


@pytest.fixture
def pairs():
    """A [3, d_in] and B [d_out, 3] of three maps."""
    torch.manual_seed(0)
    return [
        tuple(torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, d_in), (d_out, 3)))
        for d_in, d_out in SIZES
    ]


def slow(pairs) -> float:
    """sum over maps, outputs o and inputs i of |sum_r B[o, r] A[r, i]|."""
    return sum(
        abs(sum((b[o, r] * a[r, i]).item() for r in range(len(a))))
        for a, b in pairs
        for o in range(len(b))
        for i in range(a.shape[1])
    )


def test_the_product_is_b_a_of_maps_of_any_shape(pairs):
    """The released ||A B||_1 is one of d_in = d_out alone."""
    assert product_norm(pairs).item() == pytest.approx(slow(pairs), rel=1e-9)


def test_its_gradients_are_those_of_autograd(pairs):
    tensors = [each for pair in pairs for each in pair]
    expected = torch.autograd.grad(sum((b @ a).abs().sum() for a, b in pairs), tensors)
    for one, other in zip(torch.autograd.grad(2 * product_norm(pairs), tensors), expected, strict=True):
        torch.testing.assert_close(one, 2 * other)


def test_no_product_waits_for_the_backward_pass():
    a, b = torch.randn(2, 500, requires_grad=True), torch.randn(400, 2, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: kept.append(each.numel()) or each, lambda x: x
    ):
        product_norm([(a, b)])
    assert sum(kept) == a.numel() + b.numel()


def test_the_factors_bound_the_product(pairs):
    assert factors_norm(pairs).item() > product_norm(pairs).item()
    single = [(a[:1], b[:, :1]) for a, b in pairs]
    assert factors_norm(single).item() == pytest.approx(product_norm(single).item(), rel=1e-6)
    a, b = pairs[0]
    by_hand = sum(b[:, rank].abs().sum() * a[rank].abs().sum() for rank in range(3))
    assert factors_norm([(a, b)]).item() == pytest.approx(by_hand.item(), rel=1e-6)


@pytest.mark.parametrize("norm", [product_norm, factors_norm])
def test_a_new_pair_has_none_and_pulls_nothing(norm):
    a, b = torch.randn(2, 5, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
    found = norm([(a, b)])
    found.backward()
    assert found == 0 and not a.grad.any()


@pytest.mark.parametrize("penalty", ["product", "factors"])
def test_the_term_is_of_the_newest_pair_alone(penalty, build):
    work = build(
        "method.stored=pairs", f"method.penalty={penalty}", "method.strength=1e-4", "trainer.steps=2"
    )
    before = base_of(work.module)
    for number in (0, 1):
        work.learn(number)
    layers = lora.lora_layers(work.module.model)
    assert all(lora.has_earlier(layer) for layer in layers.values())
    newest = [
        tuple(pair_of(work.module)[f"{name}.lora_{half}.default.weight"] for half in "AB") for name in layers
    ]
    norm = product_norm if penalty == "product" else factors_norm
    terms = work.module.losses(work.batches()[0])
    assert terms["sparsity"].item() == pytest.approx(1e-4 * norm(newest).item(), rel=1e-6) != 0
    gradients = torch.autograd.grad(
        terms["sparsity"], [p for p in work.module.parameters() if p.requires_grad]
    )
    assert all(each.any() for each in gradients)
    after = {name: value for name, value in base_of(work.module).items() if ".earlier." not in name}
    assert all(torch.equal(before[name], value) for name, value in after.items())
    assert "sparsity" not in build("method.strength=0").module.losses(work.batches()[0])
