"""LoRA and its kin, O-LoRA, N-LoRA, MoELoRA, SAPT: where a domain begins, penalties, which pairs score."""

import math
from dataclasses import dataclass, replace

import peft  # noqa: F401  (the expressions of `export` name it)
import pytest
import torch
import transformers

from cpt.adapters import lora
from cpt.adapters.routed_lora import find_router
from cpt.data.collate import select_inputs
from cpt.gradient_masks.base import mark_recorded
from cpt.methods.lora import (
    attention_divergence,
    factors_norm,
    group_by_width,
    pad_attention,
    pair_overlap,
    product_norm,
)
from tests.support.lora_weights import clone_adapter_weights, clone_base_weights, scored_logits
from tests.support.method_fixtures import (
    ORDER,
    MethodFixture,
    build_method_fixture,
    count_state_bytes,
    count_state_bytes_outside_model,
    equal_tensors,
)

STRONG = "optim.lr=0.05"
DECAY = "optim.weight_decay=0.5"
THREE = "order=[law,food,space]"


@dataclass
class DomainStart:
    """What the model is at a domain's first step."""

    pair: dict[str, torch.Tensor]
    base: dict[str, torch.Tensor]
    logits: torch.Tensor


def record_starts(run: MethodFixture) -> list[DomainStart]:
    """A list that is filled at each domain's first step."""
    module = run.module
    before_domain = module.before_domain
    [batch] = run.batches()
    starts = []

    def record_start(importance_batches):
        before_domain(importance_batches)
        starts.append(
            DomainStart(
                pair=clone_adapter_weights(module),
                base=clone_base_weights(module),
                logits=scored_logits(module.model, batch),
            )
        )
        module.train()

    module.before_domain = record_start
    return starts


def any_equal(tensors: dict[str, torch.Tensor], other_tensors: dict[str, torch.Tensor]) -> bool:
    return any(torch.equal(tensor, other_tensors[name]) for name, tensor in tensors.items())


def find_linear_weight(module, *, is_transposed):
    """A layer's weight as [d_out, d_in]; GPT-2's are transposed."""
    weight = module.weight.detach().clone()
    return weight.T if is_transposed else weight


@pytest.mark.parametrize("on", ["masked", "causal"])
@pytest.mark.parametrize("options", ["", "per_domain=true"])
def test_the_largest_singular_triples_stay_exact(options, on, build):
    method_options = [f"method.{option}" for option in options.split()]
    run = build("lora", STRONG, DECAY, "method.protected_rank=3", "trainer.steps=3", *method_options, on=on)
    is_transposed = on == "causal"
    triples = {}
    for name, layer in lora.find_lora_layers(run.module.model).items():
        weight = find_linear_weight(layer.get_base_layer(), is_transposed=is_transposed)
        triples[name] = torch.linalg.svd(weight, full_matrices=False)
    assert triples
    starts = record_starts(run)
    run.learn(0)
    run.learn(1)
    directions = run.module.protected_directions.named()
    for start in starts:
        for name in triples:
            (a,) = (value for key, value in start.pair.items() if f"{name}.lora_A" in key)
            torch.testing.assert_close(a @ directions[f"{name}.in"], torch.zeros(len(a), 3))

    merged = run.module.model_for(1)
    for name, (u, values, v_transposed) in triples.items():
        weight = find_linear_weight(merged.get_submodule(name), is_transposed=is_transposed)
        assert torch.linalg.svdvals(weight - (u * values) @ v_transposed).max() > 0.1  # it has learned
        u = u[:, :3]
        v = v_transposed[:3].T
        largest = values[:3]
        torch.testing.assert_close(u.T @ weight @ v, largest.diag(), rtol=0, atol=1e-4)
        torch.testing.assert_close(weight @ v, u * largest, rtol=0, atol=1e-4)
        torch.testing.assert_close(u.T @ weight, largest[:, None] * v.T, rtol=0, atol=1e-4)


def test_projected_steps_are_those_of_projections_in_the_forward_pass(build):
    run = build("lora", "method.protected_rank=3", "trainer.steps=1")
    module = run.module
    name, layer = next(iter(lora.find_lora_layers(module.model).items()))
    directions = module.protected_directions.named()
    u = directions[f"{name}.out"]
    v = directions[f"{name}.in"]
    projection_out = torch.eye(layer.out_features) - u @ u.T
    projection_in = torch.eye(layer.in_features) - v @ v.T
    factors = lora.get_factors(layer)
    with torch.no_grad():
        factors[1].normal_()
    module.after_update()
    free_factors = [factor.detach().clone().requires_grad_() for factor in factors]

    target = torch.randn(layer.out_features, layer.in_features)
    optimizers = [torch.optim.AdamW(pair, lr=0.1, weight_decay=0.1) for pair in (factors, free_factors)]
    for _ in range(5):
        a, b = factors
        (b @ a - target).square().sum().backward()
        module.transform_gradients(optimizers[0])
        a, b = free_factors
        (projection_out @ b @ a @ projection_in - target).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        module.after_update()
    a, b = free_factors
    expected = projection_out @ b @ a @ projection_in
    torch.testing.assert_close(factors[1] @ factors[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", ["", "per_domain=true", "per_domain=true start=previous"])
def test_where_a_domain_begins(options, build):
    run = build("lora", STRONG, DECAY, *(f"method.{option}" for option in options.split()))
    base = clone_base_weights(run.module)
    pair_at_construction = clone_adapter_weights(run.module)
    starts = record_starts(run)
    run.learn(0)
    end = clone_adapter_weights(run.module)
    run.learn(1)

    first, second = (start.pair for start in starts)
    assert equal_tensors(first, pair_at_construction) and equal_tensors(clone_base_weights(run.module), base)
    assert not any_equal(clone_adapter_weights(run.module), end)
    if options == "per_domain=true":
        assert all(bool(factor.any()) == ("lora_A" in name) for name, factor in second.items())
        assert not any_equal({name: factor for name, factor in second.items() if "lora_A" in name}, first)
    else:
        assert equal_tensors(second, end)


@pytest.mark.parametrize("storage", ["merged", "separate"])
def test_each_domain_begins_with_a_new_pair_at_the_model_before(storage, build):
    options = [THREE, "method.r=4", "method.lora_alpha=12", f"method.adapter_storage={storage}"]
    run = build("inclora", *options, STRONG, DECAY)
    module = run.module
    starts = record_starts(run)
    pairs = []
    logits = []
    sizes = []
    for number in range(3):
        run.learn(number)
        assert equal_tensors(
            clone_base_weights(module), starts[number].base
        )  # within a domain, every bit of it
        pairs.append(clone_adapter_weights(module))
        logits.append(scored_logits(module.model, run.batches()[0]))
        sizes.append(count_state_bytes(module))

    for number in (1, 2):
        torch.testing.assert_close(starts[number].logits, logits[number - 1], rtol=1e-4, atol=1e-4)
        assert not any_equal(starts[number].pair, pairs[number - 1])
    pair_bytes = 0
    if storage == "separate":
        pair_bytes = sum(factor.nbytes for factor in pairs[-1].values())
    assert [size - sizes[0] for size in sizes] == [0, pair_bytes, 2 * pair_bytes]

    loaded = build("inclora", *options).module
    loaded.load_state_dict(module.state_dict())
    loaded.activate(2)
    assert torch.equal(scored_logits(loaded.model, run.batches()[0]), logits[-1])
    trained = {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad}
    assert trained == set(pairs[-1])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(("method", "options", "folders", "family"), [
    ("lora", ["per_domain=true", "embeddings=true"], ["food", "law"], "masked"),
    ("inclora", ["adapter_storage=separate"], ["food"], "causal"),
])  # fmt: skip
def test_what_is_exported_gives_the_same_logits(method, options, folders, family, build, tmp_path):
    run = build(method, STRONG, "trainer.steps=3", *(f"method.{option}" for option in options), on=family)
    run.learn(0)
    run.learn(1)
    inputs = select_inputs(run.importance_batches()[0])
    module = run.module
    for exported, package, expected_folders in (("merged", "transformers", []), ("peft", "peft", folders)):
        module.options = replace(module.options, export_format=exported)
        expression = module.export(tmp_path / exported, ["law", "food"])
        assert expression.startswith(f"{package}.")
        loaded = eval(expression, {"peft": peft, "transformers": transformers})
        with torch.no_grad():
            loaded_logits, expected = (model.eval()(**inputs).logits for model in (loaded, module.model))
        torch.testing.assert_close(loaded_logits, expected, rtol=1e-3, atol=1e-3)
        exported_folders = sorted(path.name for path in (tmp_path / exported).glob("adapters/*"))
        assert exported_folders == expected_folders


def overlap_by_loops(new, earlier, *, power: int) -> float:
    """sum over maps, domains and entries of |row of A_k . row of A_t|^power, product by product."""
    total = 0.0
    for domain in earlier:
        for old_a, new_a in zip(domain, new, strict=True):
            for new_row in new_a:
                for old_row in old_a:
                    total += abs(float(new_row @ old_row)) ** power
    return total


@pytest.mark.parametrize(("penalty", "power"), [("l1", 1), ("squared", 2)])
def test_the_penalty_is_the_slow_sum(penalty, power):
    torch.manual_seed(0)  # A of five maps of two widths, rank 3, and those of four earlier domains
    widths = (8, 6, 8, 8, 6)
    earlier = []
    new = [torch.randn(3, width, dtype=torch.float64) for width in widths]
    for _ in range(4):
        earlier.append([torch.randn(3, width, dtype=torch.float64) for width in widths])

    groups = group_by_width(new, earlier, [1] * len(new))
    shapes = [(len(group.newest), tuple(group.earlier.shape)) for group in groups]
    assert shapes == [(3, (3, 12, 8)), (2, (2, 12, 6))]
    expected = overlap_by_loops(new, earlier, power=power)
    assert pair_overlap(groups, penalty=penalty).item() == pytest.approx(expected, rel=1e-5)

    rows = torch.eye(6)
    orthogonal = group_by_width([rows[:2]], [[rows[2:4]], [rows[4:]]], [1])
    assert pair_overlap(orthogonal, penalty=penalty) == 0


def test_the_loss_is_strength_times_the_overlap_with_all_earlier_domains(build):
    options = [
        "method.adapter_storage=merged",
        "method.strength=2",
        "method.penalty=squared",
        "method.norm=0.5",
    ]
    run = build("olora", "order=[law,food,space]", STRONG, *options)
    [batch] = run.batches()
    module = run.module
    names = [name for name, _ in module.model.named_parameters() if ".lora_A.default" in name]
    assert module.losses(batch)["orthogonality"] == 0 == count_state_bytes_outside_model(module)

    learned = []  # A of each domain
    num_bytes = 0
    for number in range(3):
        run.learn(number)
        learned.append([module.model.get_parameter(name).detach().clone() for name in names])
        num_bytes += sum(weight.nbytes for weight in learned[-1])
        stored = module.domain_factors.weights(number).values()
        assert all(torch.equal(*pair) for pair in zip(stored, learned[-1], strict=True))
    assert count_state_bytes_outside_model(module) == num_bytes

    module.activate(2)
    terms = module.losses(batch)
    expected = 2 * overlap_by_loops(learned[-1], learned, power=2)
    assert terms["orthogonality"].item() == pytest.approx(expected, rel=1e-3)
    norms = []
    for layer in lora.find_lora_layers(module.model).values():
        norms += [factor.norm().item() for factor in lora.get_factors(layer)]
    assert terms["norm"].item() == pytest.approx(0.5 * sum(norms), rel=1e-4)

    module.zero_grad()
    terms["orthogonality"].backward()
    reached = set()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            reached.add(name)
    assert reached == {f"model.{name}" for name in names}


def draw_factor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_the_product_is_b_a_of_maps_of_any_shape():
    torch.manual_seed(0)
    pairs = [(draw_factor(3, d_in), draw_factor(d_out, 3)) for d_in, d_out in ((8, 6), (6, 8), (5, 5))]
    factors = [*pairs[0], *pairs[1], *pairs[2]]
    by_hand = sum((b @ a).abs().sum() for a, b in pairs)
    norm_of_products = product_norm(pairs)
    assert norm_of_products.item() == pytest.approx(by_hand.item(), rel=1e-9)
    expected_gradients = torch.autograd.grad(by_hand, factors)
    gradients = torch.autograd.grad(2 * norm_of_products, factors)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, 2 * expected)

    bound = sum((b.abs().sum(0) * a.abs().sum(1)).sum() for a, b in pairs)
    assert factors_norm(pairs).item() == pytest.approx(bound.item(), rel=1e-6)

    # At B = 0, where the norm has no derivative, the gradient is zero.
    for norm in (product_norm, factors_norm):
        a = torch.randn(2, 5, requires_grad=True)
        b = torch.zeros(4, 2, requires_grad=True)
        norm_at_zero = norm([(a, b)])
        norm_at_zero.backward()
        assert norm_at_zero == 0 and not a.grad.any()


@pytest.mark.parametrize(("penalty", "norm"), [("product", product_norm), ("factors", factors_norm)])
def test_the_term_is_of_the_newest_pair_alone(penalty, norm, build):
    options = [
        "method.adapter_storage=separate",
        f"method.penalty={penalty}",
        "method.strength=1e-4",
        "trainer.steps=2",
    ]
    run = build("nlora", STRONG, *options)
    run.learn(0)
    run.learn(1)
    layers = lora.find_lora_layers(run.module.model)
    assert all(lora.has_earlier(layer) for layer in layers.values())

    adapter_weights = clone_adapter_weights(run.module)
    newest = []
    for name in layers:
        a = adapter_weights[f"{name}.lora_A.default.weight"]
        b = adapter_weights[f"{name}.lora_B.default.weight"]
        newest.append((a, b))
    term = run.module.losses(run.batches()[0])["sparsity"]
    assert term.item() == pytest.approx(1e-4 * norm(newest).item(), rel=1e-6) != 0
    trained = [parameter for parameter in run.module.parameters() if parameter.requires_grad]
    assert all(gradient.any() for gradient in torch.autograd.grad(term, trained))


@pytest.mark.parametrize(
    "method", ["moelora method.num_experts=3 method.r=2", "inclora method.adapter_storage=separate"]
)
def test_a_mask_ranks_rows_of_pairs_by_their_outputs(method, build):
    """A x, of MoELoRA times the gates, and W x + alpha / r sum_k B_k A_k x, over tokens without padding."""
    run = build(*method.split(), "mask=migu", STRONG, "trainer.steps=1")
    run.learn(0)
    run.learn(1)
    [mask] = run.module.masks
    [batch] = run.batches()
    assert "attention_mask" not in batch
    mask.sums.zero_()
    name, layer = next(iter(lora.find_lora_layers(run.module.model).items()))
    passed = []
    layer.register_forward_hook(lambda module, args, output: passed.extend((args[0], output)))
    with mark_recorded([mask]):
        run.module.objective.nll(run.module.model.eval(), batch)

    x, layer_output = passed
    inner = x @ lora.get_factors(layer)[0].T
    if "moelora" in method:
        inner = inner * layer.router(x).float().softmax(-1).repeat_interleave(2, -1)
    names = [projection.name for projection in mask.projections]
    for half, outputs in (("A", inner), ("B", layer_output)):
        rows = mask.row_slices[names.index(f"{name}.lora_{half}")]
        torch.testing.assert_close(mask.sums[rows], outputs.abs().sum((0, 1)), rtol=1e-4, atol=1e-4)


MOCL = ["method.key=cosine", "method.query=encoder"]
ROWS = torch.tensor([0, 1, 1, 0, -1, 1, 0, 1])  # the domains that the rows of a batch are of
DECAYED = ["optim.lr=0.01", "optim.weight_decay=0.5"]


@pytest.fixture
def sapt(small):
    return lambda *overrides: build_method_fixture(small("method=sapt", ORDER, "trainer.steps=3", *overrides))


def test_the_divergence_is_the_kl_of_padded_means():
    stored = pad_attention([torch.tensor([1.0]), torch.tensor([0.25, 0.75])], 3)
    assert stored.tolist() == [[1, 0, 0], [0.25, 0.75, 0]]
    attention = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]])
    divergences = attention_divergence(stored, attention.log())
    assert divergences.tolist() == pytest.approx([math.log(2), math.log(2)])
    assert attention_divergence(stored, stored.log().clamp_min(-50)).abs().max() < 1e-6


@pytest.mark.parametrize("form", [[], MOCL], ids=["sapt", "mocl"])
def test_the_second_domain_trains_its_adapter_its_key_and_the_query(form, sapt, small):
    options = [*DECAYED, "method.target_modules=[Wqkv,Wo,Wi]"]  # SAPT has no pair in the head
    run = sapt("method.strength=0", *options, *form)
    plain = build_method_fixture(small("method=lora", ORDER, "trainer.steps=3", *options))
    run.learn(0)
    plain.learn(0)
    without_router = {name: weight for name, weight in run.weights().items() if "pair_router" not in name}
    assert equal_tensors(without_router, plain.weights())

    model = run.module.model
    first_pair = clone_adapter_weights(run.module)
    first_key = find_router(model).key.detach().clone()
    before = run.weights()
    run.learn(1)
    after = run.weights()
    changed = {name for name, weight in before.items() if not torch.equal(after[name], weight)}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert changed == trained == {name for name in before if ".default." in name or "pair_router" in name}

    assert torch.equal(find_router(model).earlier, first_key)
    for name, layer in lora.find_lora_layers(model).items():
        for half, earlier in zip("AB", lora.get_factors(layer, "earlier"), strict=True):
            assert torch.equal(earlier, first_pair[f"{name}.lora_{half}.default.weight"])


def test_keys_start_as_released_and_train_at_a_rate_of_their_own(sapt):
    run = sapt("trainer.steps=1", "method.key_rate=0.25")
    router = find_router(run.module.model)
    for number in (0, 1):
        run.learn(number)
        groups = run.module.trainer.optimizers[0].param_groups
        rates = {group["initial_lr"] for group in groups}
        assert max(rates) == pytest.approx(4 * min(rates))
        slow_parameters = []
        for group in groups:
            if group["initial_lr"] == min(rates):
                slow_parameters += group["params"]
        assert len(slow_parameters) == 5 and set(slow_parameters) == set(router.parameters())
        assert router.key.abs().max() < 1.05 and 0.45 < router.key.std() < 0.7  # U(-1, 1): 0.58


def test_texts_of_earlier_domains_are_kept_with_their_pairs(sapt):
    run = sapt("replay=past", "replay.past_ratio=0.5", "method.strength=2")
    run.learn(0)
    assert [attention.tolist() for attention in run.module.mean_attention] == [[1.0]]
    run.learn(1)
    router = find_router(run.module.model)
    batch = run.batches()[0] | {"domains": ROWS}
    term = run.module.losses(batch)["reflection"]
    first_domain_log_attention = router.row_log_weights[batch["domains"] == 0]
    expected = 2 * -first_domain_log_attention[:, 0].sum() / len(batch["domains"])  # of domain 0, p = (1, 0)
    torch.testing.assert_close(term, expected)

    trained = {}
    for name, parameter in run.module.model.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter
    gradients = torch.autograd.grad(term, list(trained.values()), allow_unused=True)
    reached = {name for name, gradient in zip(trained, gradients, strict=True) if gradient is not None}
    assert reached == {name for name in trained if "pair_router" in name}

    means = run.module.diagnostics()["sapt/attention"]
    assert means.shape == (2, 2) and torch.allclose(means.sum(1), torch.ones(2)) and means[0, 1] == 0


def test_mocl_pulls_the_new_key_to_new_texts(sapt):
    run = sapt(*MOCL, "method.strength=3")
    for number in (0, 1):
        run.learn(number)
    router = find_router(run.module.model)
    batch = run.batches()[0] | {"domains": ROWS}
    term = run.module.losses(batch)["matching"]
    new = router.cosines[:, 0, 1][batch["domains"] == 1]
    torch.testing.assert_close(term, 3 * (1 - new).sum() / len(batch["domains"]))
    assert torch.autograd.grad(term, [router.key])[0].any()


def test_options_that_freeze_layers_freeze_their_adapters(small):
    options = ("method=lora", "method.embeddings=true", "freeze.embeddings=true", "freeze.layers=1")
    module = build_method_fixture(small(ORDER, *options)).module
    frozen_ids = {id(parameter) for parameter in module.frozen}
    adapters = {name: p for name, p in module.model.named_parameters() if "lora_" in name}
    frozen = {name for name, parameter in adapters.items() if id(parameter) in frozen_ids}
    assert frozen == {name for name in adapters if "tok_embeddings" in name or ".layers.0." in name}
    assert any("lora_embedding" in name for name in frozen)
