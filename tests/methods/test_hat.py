"""HAT: what gates take, keep and score with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cpt.adapters.gates import anneal, hard, regulariser, soft
from cpt.gradient_masks.soft import ClaimedUnits
from cpt.models.units import Part, Units, share_members
from tests.conftest import GOLDEN, needs_golden
from tests.support.forward_passes import logits_at
from tests.support.method_fixtures import StepRecorder

HARSH = ["optim.weight_decay=0.1", "model.lr=1e-2", "trainer.gradient_clip_val=0.5"]
PAPER = ["method.initial=normal", "method.std=1", "method.strength=0.75", "method.gate_rate=1"]


@pytest.fixture
def hat(build):
    """With the paper's gates, about half of which are open whatever is learned in a few steps."""
    return lambda *overrides: build("hat", "order=[law,food,space]", *PAPER, *overrides)


@pytest.mark.parametrize(("options", "holds"), [("", True), ("method.apply_to=gradient", False)])
def test_what_a_domain_computes_keeps_its_bits_and_masked_gradients_alone_do_not_hold(options, holds, hat):
    work, seen, taken = hat(*HARSH, *options.split()), [], torch.zeros(())
    module, [batch] = work.module, work.batches()
    for domain in range(3):
        work.learn(domain)
        module.eval()
        weights = map(module.domain_params.weights, range(domain + 1))
        seen.append([logits_at(module.model, batch, weights=each) for each in weights])
        own, before, taken = module.open_units(domain), taken, module.claimed.cumulative_gates.clone()
        assert torch.equal(taken, torch.maximum(before, own)) and taken.sum() > before.sum()
    assert [torch.equal(seen[n][n], seen[m][n]) for n, m in ((0, 1), (0, 2), (1, 2))] == [holds] * 3
    named = [module.claimed.by_group(module.open_units(domain)) for domain in range(3)]
    units = [torch.cat([own for name, own in each.items() if "neurons" in name]) for each in named]
    shares = torch.tensor([[(one * other).sum() / one.sum() for other in units] for one in units])
    assert not torch.equal(shares, shares.T)  # of domains with unlike numbers of open units
    torch.testing.assert_close(module.diagnostics()["overlap/neurons"], shares)


def test_taken_units_and_what_no_unit_owns_do_not_move_and_free_ones_do(hat):
    work = hat(*HARSH)
    model, table = work.module.model, work.module.model.get_input_embeddings().weight
    base = table.detach().clone()
    work.learn(0)
    taken, ends = (
        work.module.claimed.by_group(work.module.claimed.cumulative_gates),
        ("0.neurons", "0.outputs", "heads"),
    )
    c_in, c_out, head = (next(v for name, v in taken.items() if name.endswith(end)).bool() for end in ends)
    block = model.base_model.layers[0]
    down, out = block.mlp.Wo.weight, block.attn.Wo.weight
    before, before_out, known = (each.detach().clone() for each in (down, out, table))
    work.learn(1)
    still, kept = before == down, c_out[:, None] & c_in[None]
    assert kept.any() and not kept.all() and torch.equal(still, kept)
    assert torch.equal((out == before_out).all(0).view(len(head), -1).all(1), head)
    assert not torch.equal(base, known) and torch.equal(table, known)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(work.module.gates.names) <= trained
    assert trained == {name for name in trained if ".attn.W" in name or ".mlp.W" in name}


def test_gates_are_clamped_after_each_step_and_s_and_the_regulariser_follow(hat):
    work = hat("method.strength=0.5", "method.limit=0.3", "model.lr=1e-1")
    module, gates, [batch] = work.module.train(), work.module.gates, work.batches()
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
    watch = StepRecorder(lambda m: ([*{part.s for part in m.gates.parts}], m.gates.e().detach().abs().max()))
    work.learn(0, watch)
    assert all(e <= 0.3 for _, (_, e) in watch.seen)
    assert [values for _, (values, _) in watch.seen] == [pytest.approx([each]) for each in s]


def test_every_domain_begins_with_a_draw_of_its_own(hat):
    draws = {}
    for seed, std in ((0, 1), (1, 1), (2, 0.02), (0, 1)):
        work = hat("method.limit=100", "model.lr=0", f"seed={seed}", f"method.std={std}", "trainer.steps=1")
        torch.manual_seed(len(draws))
        for domain in (0, 1):
            work.learn(domain)
            e = work.module.gates.e().detach()
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
    given = ["method.form=adapter", "method.initial=normal", "model.lr=1e-4"]
    module = build("hat", *given).module
    module._trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=SimpleNamespace(name="law")))
    module.before_domain(())
    e = module.gates.e().detach()
    assert 0.3 < (e > 0).float().mean() < 0.7 and e.abs().max() < 0.2
    assert all(rate == pytest.approx(5) for rate in module.rates().values())


def test_adapters_learn_the_first_domain(build):
    """With W_up = 0 only the regularizer moves the gates at first, which must not close them all."""
    work = build("hat", "method.form=adapter", "trainer.steps=20", "model.lr=1e-2")
    batches = work.batches(2)
    with torch.no_grad():
        before = [work.module.nll(batch, 0)[0].mean() for batch in batches]
        work.learn(0)
        work.module.eval()
        after = [work.module.nll(batch, 0)[0].mean() for batch in batches]
    assert work.module.open_units(0).mean() > 0.2
    assert all(new < old - 0.01 for new, old in zip(after, before, strict=True))


NEAR = {"rtol": 1e-4, "atol": 1e-6}


def under(prefix: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / "hat_adapter.npz") as arrays:
        own = [name for name in arrays if name.startswith(f"{prefix}/")]
        return {name.removeprefix(f"{prefix}/"): torch.from_numpy(arrays[name]) for name in own}


def back_masks(masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our factors by the released names: each map owns its rows, and fc1 the columns of its fc2."""
    weights, groups = under("adapter"), []
    maps = {name: nn.Linear(*reversed(weights[f"{name}.weight"].shape)) for name in under("task0_mask")}
    for name, own in maps.items():
        members = share_members(own.out_features, own.out_features, 1)
        parts = [Part(own, "weight", 0, members), Part(own, "bias", 0, members)]
        if name.endswith("fc1"):
            parts.append(Part(maps[name[:-1] + "2"], "weight", 1, members))
        groups.append(Units(name, "outputs", own.out_features, own, "out", tuple(parts)))
    taken = ClaimedUnits(groups, apply_to="update")
    taken.update_max(torch.cat([mask.flatten() for mask in masks.values()]))
    names = {p: f"{name}.{key}" for name, own in maps.items() for key, p in own.named_parameters()}
    return {names[parameter]: factor.expand(parameter.shape) for parameter, factor in taken.factors()}


@needs_golden
@pytest.mark.parametrize(("step", "domain", "number"), [("t0", 0, 3), ("t0_s0", 0, 0), ("t1", 1, 3)])
def test_gates_their_gradients_and_what_is_taken_are_those_of_the_released_code(step, domain, number):
    own, first, second, compared = under("adapter"), under("task0_mask"), under("task1_mask_pre"), 0
    gate = {name: own["{0}.e{2}.weight".format(*name.rpartition("."))] for name in first}  # e by domain
    s, masks = anneal(number / 10, s_max=400), under(f"{step}_mask")
    with np.load(GOLDEN / "hat_adapter.npz") as arrays:
        assert s == pytest.approx(arrays[f"{step}_s"].item(), rel=1e-6)
        penalty = arrays[f"{step}_loss_reg"].item()
    for name, mask in masks.items():
        torch.testing.assert_close(soft(gate[name][domain], s, s_max=400), mask[0], **NEAR)
        assert torch.equal(hard(gate[name][0]), first[name][0].round())
        later = torch.maximum(first[name][0], soft(gate[name][1], 400.0, s_max=400))
        torch.testing.assert_close(later, second[name][0], **NEAR)
    gates = torch.cat([mask.flatten() for mask in masks.values()])
    before = torch.cat([m.flatten() for m in first.values()]) * (domain == 1)
    assert len(masks) == 12 and 0.75 * regulariser(gates, before).item() == pytest.approx(penalty, rel=1e-4)
    changed = under(f"{step}_grad")
    for name, plain in under(f"{step}_grad_plain").items():
        if ".efc" in name:
            e = own[name][domain].double()
            slope = s * torch.sigmoid(s * e) * torch.sigmoid(-s * e)
            sure = ((s * e).abs() < 12) & (plain[domain].abs() > 1e-12)
            learned = e.clone().requires_grad_()
            soft(learned, s, s_max=400).backward(torch.where(sure, plain[domain] / slope, 0))
            expected = changed.get(name, plain)[domain].double()
            near = {"rtol": 1e-3, "atol": 1e-5 * expected.abs().max().item()}
            torch.testing.assert_close(learned.grad[sure], expected[sure], **near)
            compared += int(sure.sum())
    assert compared > 20
    for masks, expected in ((first, under("task0_mask_back")), (second, under("task1_mask_back"))):
        found = back_masks(masks)
        assert found.keys() == expected.keys()
        for name, factor in expected.items():
            torch.testing.assert_close(found[name], factor, **NEAR)
