"""HAT: what gates take, keep and score with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cpt.adapters.gates import anneal, hard_gates, regulariser, soft_gates
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.models.units import Part, Units, share_members
from tests.conftest import GOLDEN, needs_golden
from tests.support.forward_passes import logits_at
from tests.support.method_fixtures import StepRecorder

HARSH = ["optim.weight_decay=0.1", "model.lr=1e-2", "trainer.gradient_clip_val=0.5"]
PAPER = ["method.gate_init=normal", "method.gate_std=1", "method.strength=0.75", "method.gate_rate=1"]


@pytest.fixture
def hat(build):
    """With the paper's gates, about half of which are open whatever is learned in a few steps."""
    return lambda *overrides: build("hat", "order=[law,food,space]", *PAPER, *overrides)


@pytest.mark.parametrize(("options", "holds"), [("", True), ("method.apply_to=gradient", False)])
def test_what_a_domain_computes_keeps_its_bits_and_masked_gradients_alone_do_not_hold(options, holds, hat):
    run = hat(*HARSH, *options.split())
    module = run.module
    [batch] = run.batches()
    logits = []  # of each learned domain, after each domain
    claimed = torch.zeros(())
    for domain in range(3):
        run.learn(domain)
        module.eval()
        weights = map(module.domain_params.weights, range(domain + 1))
        logits.append([logits_at(module.model, batch, weights=domain_weights) for domain_weights in weights])

        open_units = module.open_units(domain)
        claimed_before = claimed
        claimed = module.claimed.cumulative_gates.clone()
        assert torch.equal(claimed, torch.maximum(claimed_before, open_units))
        assert claimed.sum() > claimed_before.sum()
    for domain, later_domain in ((0, 1), (0, 2), (1, 2)):
        assert torch.equal(logits[domain][domain], logits[later_domain][domain]) == holds

    open_neurons = []
    for domain in range(3):
        groups = module.claimed.by_group(module.open_units(domain))
        open_neurons.append(torch.cat([units for name, units in groups.items() if "neurons" in name]))
    overlap = torch.zeros(3, 3)
    for row, units in enumerate(open_neurons):
        for column, other_units in enumerate(open_neurons):
            overlap[row, column] = (units * other_units).sum() / units.sum()
    assert not torch.equal(overlap, overlap.T)  # of domains with unlike numbers of open units
    torch.testing.assert_close(module.diagnostics()["overlap/neurons"], overlap)


def test_taken_units_and_what_no_unit_owns_do_not_move_and_free_ones_do(hat):
    run = hat(*HARSH)
    model = run.module.model
    table = model.get_input_embeddings().weight
    table_at_first = table.detach().clone()
    run.learn(0)
    claimed = run.module.claimed.by_group(run.module.claimed.cumulative_gates)

    def claimed_of(end: str) -> Tensor:
        return next(units for name, units in claimed.items() if name.endswith(end)).bool()

    neurons = claimed_of("0.neurons")
    outputs = claimed_of("0.outputs")
    heads = claimed_of("heads")
    block = model.base_model.layers[0]
    down = block.mlp.Wo.weight
    out = block.attn.Wo.weight
    down_before, out_before, table_before = (weight.detach().clone() for weight in (down, out, table))
    run.learn(1)

    is_claimed = outputs[:, None] & neurons[None]
    assert is_claimed.any() and not is_claimed.all() and torch.equal(down_before == down, is_claimed)
    assert torch.equal((out == out_before).all(0).view(len(heads), -1).all(1), heads)
    assert not torch.equal(table_at_first, table_before) and torch.equal(table, table_before)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(run.module.gates.names) <= trained
    assert trained == {name for name in trained if ".attn.W" in name or ".mlp.W" in name}


def test_gates_are_clamped_after_each_step_and_s_and_the_regulariser_follow(hat):
    run = hat("method.strength=0.5", "method.gate_limit=0.3", "model.lr=1e-1")
    module = run.module.train()
    gates = run.module.gates
    [batch] = run.batches()
    s = [1 / 400 + (400 - 1 / 400) * step / 5 for step in range(6)]

    def term(step: int) -> float:
        module._trainer = SimpleNamespace(global_step=step, max_steps=6)
        return module.losses(batch)["hat"].item()

    assert term(2) == pytest.approx(0.5 * (s[2] * gates.e()).sigmoid().mean().item(), rel=1e-5)
    module.claimed.update_max((gates.e() > 0).float())
    free = gates.e() <= 0
    assert term(0) == pytest.approx(0.5 * (gates.e()[free] / 400).sigmoid().mean().item(), rel=1e-5)
    module.claimed.cumulative_gates.fill_(1)
    assert term(2) == 0
    module.claimed.cumulative_gates.zero_()
    watch = StepRecorder(
        lambda m: ([*{part.s for part in m.gates.modules}], m.gates.e().detach().abs().max())
    )
    run.learn(0, watch)
    assert all(e <= 0.3 for _, (_, e) in watch.seen)
    assert [values for _, (values, _) in watch.seen] == [pytest.approx([value]) for value in s]


def test_every_domain_begins_with_a_draw_of_its_own(hat):
    draws = {}
    for seed, std in ((0, 1), (1, 1), (2, 0.02), (0, 1)):
        run = hat(
            "method.gate_limit=100", "model.lr=0", f"seed={seed}", f"method.gate_std={std}", "trainer.steps=1"
        )
        torch.manual_seed(len(draws))
        for domain in (0, 1):
            run.learn(domain)
            e = run.module.gates.e().detach()
            assert abs(e.mean()) < 0.3 * std and 0.8 * std < e.std() < 1.2 * std
            assert torch.equal(draws.setdefault((seed, domain), e), e)
    assert len({tuple(e.tolist()) for e in draws.values()}) == 6


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_by_default_units_begin_open_and_can_close(form, build):
    """A pre-trained model needs its units; of new adapters a gate that closes at first stays closed."""
    module = build("hat", "order=[law,food,space]", f"method.form={form}", "model.lr=1e-4").module
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=SimpleNamespace(name="food")))
    module.before_domain(())
    e = module.gates.e().detach()
    assert e.min() > 0 and e.max() < 2.2 and abs(e.mean() - 1) < 0.2
    assert all(rate == pytest.approx(0.1 / 1e-4) for rate in module.rates().values())


def test_gates_of_the_released_adapters_begin_half_closed(build):
    options = ["method.form=adapter", "method.gate_init=normal", "model.lr=1e-4"]
    module = build("hat", *options).module
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=SimpleNamespace(name="law")))
    module.before_domain(())
    e = module.gates.e().detach()
    assert 0.3 < (e > 0).float().mean() < 0.7 and e.abs().max() < 0.2
    assert all(rate == pytest.approx(5) for rate in module.rates().values())


def test_adapters_learn_the_first_domain(build):
    """With W_up = 0 only the regularizer moves the gates at first, which must not close them all."""
    run = build("hat", "method.form=adapter", "trainer.steps=20", "model.lr=1e-2")
    batches = run.batches(2)
    with torch.no_grad():
        before = [run.module.nll(batch, 0)[0].mean() for batch in batches]
        run.learn(0)
        run.module.eval()
        after = [run.module.nll(batch, 0)[0].mean() for batch in batches]
    assert run.module.open_units(0).mean() > 0.2
    assert all(new < old - 0.01 for new, old in zip(after, before, strict=True))


def read_golden(prefix: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / "hat_adapter.npz") as arrays:
        stored_names = [name for name in arrays if name.startswith(f"{prefix}/")]
        return {name.removeprefix(f"{prefix}/"): torch.from_numpy(arrays[name]) for name in stored_names}


def join(masks: dict[str, Tensor]) -> Tensor:
    return torch.cat([mask.flatten() for mask in masks.values()])


def back_masks(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our factors by the released names: each map owns its rows, and fc1 the columns of its fc2."""
    weights = read_golden("adapter")
    maps = {}
    for name in read_golden("task0_mask"):
        d_out, d_in = weights[f"{name}.weight"].shape
        maps[name] = nn.Linear(d_in, d_out)
    groups = []
    names = {}  # of the parameters
    for name, linear in maps.items():
        names[linear.weight] = f"{name}.weight"
        names[linear.bias] = f"{name}.bias"
        members = share_members(linear.out_features, linear.out_features, 1)
        parts = [Part(linear, "weight", 0, members), Part(linear, "bias", 0, members)]
        if name.endswith("fc1"):
            parts.append(Part(maps[name.replace("fc1", "fc2")], "weight", 1, members))
        groups.append(Units(name, "outputs", linear.out_features, linear, "out", tuple(parts)))
    claimed = ClaimedUnits(groups, apply_to="update")
    claimed.update_max(join(masks))
    return {names[parameter]: factor.expand(parameter.shape) for parameter, factor in claimed.factors()}


@needs_golden
@pytest.mark.parametrize(("step", "domain", "number"), [("t0", 0, 3), ("t0_s0", 0, 0), ("t1", 1, 3)])
def test_gates_their_gradients_and_what_is_taken_are_those_of_the_released_code(step, domain, number):
    weights = read_golden("adapter")
    first = read_golden("task0_mask")
    second = read_golden("task1_mask_pre")
    masks = read_golden(f"{step}_mask")
    assert len(masks) == 12
    e_by_domain = {}
    for name in first:
        adapter, _, part = name.rpartition(".")
        e_by_domain[name] = weights[f"{adapter}.e{part}.weight"]
    s = anneal(number / 10, s_max=400)
    with np.load(GOLDEN / "hat_adapter.npz") as arrays:
        assert s == pytest.approx(arrays[f"{step}_s"].item(), rel=1e-6)
        penalty = arrays[f"{step}_loss_reg"].item()

    for name, mask in masks.items():
        e = e_by_domain[name]
        torch.testing.assert_close(soft_gates(e[domain], s, s_max=400), mask[0], rtol=1e-4, atol=1e-6)
        assert torch.equal(hard_gates(e[0]), first[name][0].round())
        after_second = torch.maximum(first[name][0], soft_gates(e[1], 400.0, s_max=400))
        torch.testing.assert_close(after_second, second[name][0], rtol=1e-4, atol=1e-6)

    gates = join(masks)
    claimed = join(first) if domain == 1 else torch.zeros_like(gates)
    assert 0.75 * regulariser(gates, claimed).item() == pytest.approx(penalty, rel=1e-4)

    # Gradients are compared where the released code's slope can be divided by.
    num_compared = 0
    compensated = read_golden(f"{step}_grad")
    for name, plain in read_golden(f"{step}_grad_plain").items():
        if ".efc" in name:
            e = weights[name][domain].double()
            slope = s * torch.sigmoid(s * e) * torch.sigmoid(-s * e)
            is_sure = ((s * e).abs() < 12) & (plain[domain].abs() > 1e-12)
            learned = e.clone().requires_grad_()
            soft_gates(learned, s, s_max=400).backward(torch.where(is_sure, plain[domain] / slope, 0))
            expected = compensated.get(name, plain)[domain].double()
            atol = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(learned.grad[is_sure], expected[is_sure], rtol=1e-3, atol=atol)
            num_compared += int(is_sure.sum())
    assert num_compared > 20

    for masks, name in ((first, "task0_mask_back"), (second, "task1_mask_back")):
        factors = back_masks(masks)
        expected = read_golden(name)
        assert factors.keys() == expected.keys()
        for parameter, factor in expected.items():
            torch.testing.assert_close(factors[parameter], factor, rtol=1e-4, atol=1e-6)
