"""LoRA and its kin, O-LoRA, N-LoRA, MoELoRA, SAPT: where a domain begins, penalties, which pairs score."""

import math
from dataclasses import replace

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from cpt.adapters.routed_lora import router_of
from cpt.data.collate import inputs_of
from cpt.gradient_masks.base import mark_recorded
from cpt.methods.lora import (
    attention_divergence,
    factors_norm,
    group_by_width,
    kept_attention,
    pair_overlap,
    product_norm,
)
from tests.support.lora_weights import clone_adapter_weights, clone_base_weights, scored_logits
from tests.support.method_fixtures import (
    ORDER,
    build_method_fixture,
    count_state_bytes,
    count_state_bytes_outside_model,
    equal_tensors,
)

STRONG, DECAY, THREE = "optim.lr=0.05", "optim.weight_decay=0.5", "order=[law,food,space]"


def starts_of(work) -> list:
    """What the model is at each domain's first step: pair, base weights and logits on one batch."""
    module, before, found, [probe] = work.module, work.module.before_domain, [], work.batches()

    def noted(batches):
        before(batches)
        found.append(
            (clone_adapter_weights(module), clone_base_weights(module), scored_logits(module.model, probe))
        )
        module.train()

    module.before_domain = noted
    return found


@pytest.mark.parametrize("options", ["", "per_domain=true", "per_domain=true start=previous"])
def test_where_a_domain_begins(options, build):
    work = build("lora", STRONG, DECAY, *(f"method.{each}" for each in options.split()))
    base, first, starts = clone_base_weights(work.module), clone_adapter_weights(work.module), starts_of(work)
    work.learn(0)
    end = clone_adapter_weights(work.module)
    work.learn(1)
    second = starts[1][0]
    assert equal_tensors(starts[0][0], first) and equal_tensors(clone_base_weights(work.module), base)
    assert not any(
        torch.equal(value, end[name]) for name, value in clone_adapter_weights(work.module).items()
    )
    if options == "per_domain=true":
        assert all(bool(value.any()) == ("lora_A" in name) for name, value in second.items())
        assert not any(torch.equal(value, first[name]) for name, value in second.items() if "lora_A" in name)
    else:
        assert equal_tensors(second, end)


@pytest.mark.parametrize("stored", ["merged", "pairs"])
def test_each_domain_begins_with_a_new_pair_at_the_model_before(stored, build):
    given = [THREE, "method.r=4", "method.lora_alpha=12", f"method.stored={stored}"]
    work = build("inclora", *given, STRONG, DECAY)
    starts, ends, sizes, module = starts_of(work), [], [], work.module
    for number in range(3):
        work.learn(number)
        pair = clone_adapter_weights(module)
        assert equal_tensors(
            clone_base_weights(module), starts[number][1]
        )  # within a domain, every bit of it
        ends.append((pair, scored_logits(module.model, work.batches()[0])))
        sizes.append(count_state_bytes(module))
        if number:
            (first, _, out), (old, before) = starts[number], ends[number - 1]
            torch.testing.assert_close(out, before, rtol=1e-4, atol=1e-4)
            assert not any(torch.equal(value, old[name]) for name, value in first.items())
    size = sum(value.nbytes for value in pair.values()) * (stored == "pairs")
    assert [each - sizes[0] for each in sizes] == [0, size, 2 * size]
    other = build("inclora", *given).module
    other.load_state_dict(module.state_dict())
    other.activate(2)
    assert torch.equal(scored_logits(other.model, work.batches()[0]), ends[-1][1])
    assert {name for name, p in other.model.named_parameters() if p.requires_grad} == set(pair)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("method", "options", "folders", "family"), [
    ("lora", ["per_domain=true", "embeddings=true"], ["food", "law"], "masked"),
    ("inclora", ["stored=pairs"], ["food"], "causal"),
])  # fmt: skip
def test_what_is_exported_gives_the_same_logits(method, options, folders, family, build, tmp_path):
    work = build(method, STRONG, "trainer.steps=3", *(f"method.{each}" for each in options), on=family)
    work.learn(0)
    work.learn(1)
    inputs, module = inputs_of(work.importance_batches()[0]), work.module
    for exported, package in (("merged", "transformers"), ("peft", "peft")):
        module.options = replace(module.options, exported=exported)
        expression = module.export(tmp_path / exported, ["law", "food"])
        assert expression.startswith(f"{package}.")
        loaded = eval(expression, {"peft": peft, "transformers": transformers})
        with torch.no_grad():
            found, expected = (each.eval()(**inputs).logits for each in (loaded, module.model))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        own = sorted(path.name for path in (tmp_path / exported).glob("adapters/*"))
        assert own == folders * (exported == "peft")


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
    assert module.losses(batch)["orthogonality"] == 0 == count_state_bytes_outside_model(module)
    for number in range(3):
        work.learn(number)
        kept.append([module.model.get_parameter(name).detach().clone() for name in names])
        own = module.kept.weights(number).values()
        assert all(torch.equal(*each) for each in zip(own, kept[-1], strict=True))
    assert count_state_bytes_outside_model(module) == sum(each.nbytes for domain in kept for each in domain)
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
    layers, own = lora.lora_layers(work.module.model), clone_adapter_weights(work.module)
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
    with mark_recorded([mask]):
        work.module.objective.nll(work.module.model.eval(), batch)
    (x, whole), inner = seen, seen[0] @ lora.factors_of(layer)[0].T
    if "moelora" in method:
        inner = inner * layer.router(x).float().softmax(-1).repeat_interleave(2, -1)
    assert "attention_mask" not in batch
    for half, outputs in (("A", inner), ("B", whole)):
        found = mask.sums[mask.places[[each.name for each in mask.maps].index(f"{name}.lora_{half}")]]
        torch.testing.assert_close(found, outputs.abs().sum((0, 1)), rtol=1e-4, atol=1e-4)


MOCL = ["method.key=cosine", "method.query=encoder"]
ROWS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1])  # the domains that the rows of a batch are of
DECAYED = ["optim.lr=0.01", "optim.weight_decay=0.5"]


@pytest.fixture
def sapt(small):
    return lambda *overrides: build_method_fixture(small("method=sapt", ORDER, "trainer.steps=3", *overrides))


def test_the_divergence_is_the_kl_of_padded_means():
    kept = kept_attention([torch.tensor([1.0]), torch.tensor([0.25, 0.75])], 3)
    assert kept.tolist() == [[1, 0, 0], [0.25, 0.75, 0]]
    a = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]])
    found = attention_divergence(kept, a.log())
    assert found.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert attention_divergence(kept, kept.log().clamp_min(-50)).abs().max() < 1e-6


@pytest.mark.parametrize("form", [[], MOCL], ids=["sapt", "mocl"])
def test_of_the_second_domain_its_pair_its_key_and_the_query_learn(form, sapt, small):
    given = [*DECAYED, "method.target_modules=[Wqkv,Wo,Wi]"]  # SAPT has no pair in the head
    work = sapt("method.strength=0", *given, *form)
    plain = build_method_fixture(small("method=lora", ORDER, "trainer.steps=3", *given))
    for each in (work, plain):
        each.learn(0)
    assert equal_tensors(
        {n: value for n, value in work.weights().items() if "pair_router" not in n}, plain.weights()
    )
    first, before = clone_adapter_weights(work.module), work.weights()
    key = router_of(work.module.model).key.detach().clone()
    work.learn(1)
    router, after = router_of(work.module.model), work.weights()
    moved = {name for name, value in before.items() if not torch.equal(after[name], value)}
    wanted = {n for n in before if ".default." in n or "pair_router" in n}
    assert moved == wanted == {n for n, p in work.module.model.named_parameters() if p.requires_grad}
    assert torch.equal(router.earlier, key)
    for name, layer in lora.lora_layers(work.module.model).items():
        for half, earlier in zip("AB", lora.factors_of(layer, "earlier"), strict=True):
            assert torch.equal(earlier, first[f"{name}.lora_{half}.default.weight"])


def test_keys_start_as_released_and_train_at_a_rate_of_their_own(sapt):
    work = sapt("trainer.steps=1", "method.key_rate=0.25")
    router = router_of(work.module.model)
    for number in (0, 1):
        work.learn(number)
        groups = work.module.trainer.optimizers[0].param_groups
        rates = {group["initial_lr"] for group in groups}
        slow = [each for group in groups if group["initial_lr"] == min(rates) for each in group["params"]]
        assert len(slow) == 5 and set(slow) == set(router.parameters())
        assert max(rates) == pytest.approx(4 * min(rates))
        assert router.key.abs().max() < 1.05 and 0.45 < router.key.std() < 0.7  # U(-1, 1): 0.58


def test_texts_of_earlier_domains_are_kept_with_their_pairs(sapt):
    work = sapt("replay=past", "replay.past_ratio=0.5", "method.strength=2")
    work.learn(0)
    assert [each.tolist() for each in work.module.kept] == [[1.0]]
    work.learn(1)
    router, batch = router_of(work.module.model), work.batches()[0] | {"domains": ROWS}
    terms = work.module.losses(batch)
    own = router.whole[batch["domains"] == 0]
    expected = 2 * -own[:, 0].sum() / len(batch["domains"])  # of domain 0, p = (1, 0)
    torch.testing.assert_close(terms["reflection"], expected)
    trained = {n: p for n, p in work.module.model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(terms["reflection"], list(trained.values()), allow_unused=True)
    reached = {n for n, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    assert reached == {n for n in trained if "pair_router" in n}
    means = work.module.diagnostics()["sapt/attention"]
    assert means.shape == (2, 2) and torch.allclose(means.sum(1), torch.ones(2)) and means[0, 1] == 0


def test_mocl_pulls_the_new_key_to_new_texts(sapt):
    work = sapt(*MOCL, "method.strength=3")
    for number in (0, 1):
        work.learn(number)
    router, batch = router_of(work.module.model), work.batches()[0] | {"domains": ROWS}
    term = work.module.losses(batch)["matching"]
    new = router.cosines[:, 0, 1][batch["domains"] == 1]
    torch.testing.assert_close(term, 3 * (1 - new).sum() / len(batch["domains"]))
    assert torch.autograd.grad(term, [router.key])[0].any()
