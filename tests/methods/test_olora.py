"""O-LoRA, N-LoRA and MoELoRA: penalties against loops over pairs and maps, and what they move."""

import pytest
import torch

from cpt.adapters import lora
from cpt.gradient_masks.base import recording
from cpt.methods.lora import factors_norm, group_by_width, pair_overlap, product_norm
from tests.support.making import state_beside_the_model
from tests.support.pairs import pair_of

STRONG = "optim.lr=0.05"


def slow(new, earlier, *, power: int) -> float:
    """sum over maps, domains and entries of |row of A_k . row of A_t|^power, product by product."""
    found = 0.0
    for old, a in (each for domain in earlier for each in zip(domain, new, strict=True)):
        for row in a.tolist():
            products = [sum(x * y for x, y in zip(row, other, strict=True)) for other in old.tolist()]
            found += sum(abs(each) ** power for each in products)
    return found


@pytest.mark.parametrize(("penalty", "power"), [("l1", 1), ("squared", 2)])
def test_the_penalty_is_the_slow_sum(penalty, power):
    torch.manual_seed(0)  # A of five maps of two widths, rank 3, and those of four earlier domains
    drawn = [[torch.randn(3, width, dtype=torch.float64) for width in (8, 6, 8, 8, 6)] for _ in range(5)]
    maps = drawn[0], drawn[1:]
    groups = group_by_width(*maps)
    assert [(len(new), tuple(earlier.shape)) for new, earlier in groups] == [(3, (3, 12, 8)), (2, (2, 12, 6))]
    assert pair_overlap(groups, penalty=penalty).item() == pytest.approx(slow(*maps, power=power), rel=1e-5)
    rows = torch.eye(6)
    assert pair_overlap(group_by_width([rows[:2]], [[rows[2:4]], [rows[4:]]]), penalty=penalty) == 0


def test_the_loss_is_strength_times_the_overlap_with_all_earlier_domains(build):
    given = ["method.stored=merged", "method.strength=2", "method.penalty=squared", "method.norm=0.5"]
    work = build("olora", "order=[law,food,space]", STRONG, *given)
    [batch], module, kept = work.batches(), work.module, []
    names = [name for name, _ in module.model.named_parameters() if ".lora_A.default" in name]
    assert module.losses(batch)["orthogonality"] == 0 == state_beside_the_model(module)
    for number in range(3):
        work.learn(number)
        kept.append([module.model.get_parameter(name).detach().clone() for name in names])
        own = module.kept.weights(number).values()
        assert all(torch.equal(*each) for each in zip(own, kept[-1], strict=True))
    assert state_beside_the_model(module) == sum(each.nbytes for domain in kept for each in domain)
    module.activate(2)
    terms = module.losses(batch)
    assert terms["orthogonality"].item() == pytest.approx(2 * slow(kept[-1], kept, power=2), rel=1e-3)
    pairs = [half for layer in lora.lora_layers(module.model).values() for half in lora.factors_of(layer)]
    assert terms["norm"].item() == pytest.approx(0.5 * sum(p.norm().item() for p in pairs), rel=1e-4)
    module.zero_grad()
    terms["orthogonality"].backward()
    moved = {name for name, p in module.named_parameters() if p.grad is not None and p.grad.any()}
    assert moved == {f"model.{name}" for name in names}


def test_the_product_is_b_a_of_maps_of_any_shape():
    torch.manual_seed(0)
    sizes = [((3, d_in), (d_out, 3)) for d_in, d_out in ((8, 6), (6, 8), (5, 5))]
    pairs = [[torch.randn(size, dtype=torch.float64, requires_grad=True) for size in each] for each in sizes]
    tensors = [each for pair in pairs for each in pair]
    by_hand, found = sum((b @ a).abs().sum() for a, b in pairs), product_norm(pairs)
    assert found.item() == pytest.approx(by_hand.item(), rel=1e-9)
    expected = torch.autograd.grad(by_hand, tensors)
    for one, other in zip(torch.autograd.grad(2 * found, tensors), expected, strict=True):
        torch.testing.assert_close(one, 2 * other)
    bound = sum(b[:, k].abs().sum() * a[k].abs().sum() for a, b in pairs for k in range(3))
    assert factors_norm(pairs).item() == pytest.approx(bound.item(), rel=1e-6)
    for norm in (product_norm, factors_norm):
        a, b = torch.randn(2, 5, requires_grad=True), torch.zeros(4, 2, requires_grad=True)
        none = norm([(a, b)])
        none.backward()
        assert none == 0 and not a.grad.any()


@pytest.mark.parametrize(("penalty", "norm"), [("product", product_norm), ("factors", factors_norm)])
def test_the_term_is_of_the_newest_pair_alone(penalty, norm, build):
    given = ["method.stored=pairs", f"method.penalty={penalty}", "method.strength=1e-4", "trainer.steps=2"]
    work = build("nlora", STRONG, *given)
    work.learn(0)
    work.learn(1)
    layers, own = lora.lora_layers(work.module.model), pair_of(work.module)
    assert all(lora.has_earlier(layer) for layer in layers.values())
    newest = [tuple(own[f"{name}.lora_{half}.default.weight"] for half in "AB") for name in layers]
    term = work.module.losses(work.batches()[0])["sparsity"]
    assert term.item() == pytest.approx(1e-4 * norm(newest).item(), rel=1e-6) != 0
    trained = [p for p in work.module.parameters() if p.requires_grad]
    assert all(each.any() for each in torch.autograd.grad(term, trained))


@pytest.mark.parametrize("method", ["moelora method.num_experts=3 method.r=2", "inclora method.stored=pairs"])
def test_a_mask_ranks_rows_of_pairs_by_their_outputs(method, build):
    """A x, of MoELoRA times the gates, and W x + alpha / r sum_k B_k A_k x, over tokens without padding."""
    work = build(*method.split(), "mask=migu", STRONG, "trainer.steps=1")
    work.learn(0)
    work.learn(1)
    [mask], [batch], seen = work.module.masks, work.batches(), []
    mask.sums.zero_()
    name, layer = next(iter(lora.lora_layers(work.module.model).items()))
    layer.register_forward_hook(lambda module, args, output: seen.extend((args[0], output)))
    with recording([mask]):
        work.module.objective.nll(work.module.model.eval(), batch)
    (x, whole), inner = seen, seen[0] @ lora.factors_of(layer)[0].T
    if "moelora" in method:
        inner = inner * layer.router(x).float().softmax(-1).repeat_interleave(2, -1)
    assert "attention_mask" not in batch
    for half, outputs in (("A", inner), ("B", whole)):
        found = mask.sums[mask.places[[each.name for each in mask.maps].index(f"{name}.lora_{half}")]]
        torch.testing.assert_close(found, outputs.abs().sum((0, 1)), rtol=1e-4, atol=1e-4)
