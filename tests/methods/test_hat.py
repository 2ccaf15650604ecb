"""HAT: what an earlier domain computes never changes, and what gates take, keep, score with and export."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import BASE
from cpt.trainer import loop
from tests.support.making import DROPOUT, Made, Watch, learned, made, same
from tests.support.running import batch_of, logits_at, token_nll

ORDER = "order=[law,food,space]"
HARSH = ["optim.weight_decay=0.1", "model.lr=1e-2", "trainer.gradient_clip_val=0.5"]
FORMS = {
    "full": [],
    "adapter": ["method.form=adapter", "method.reduction=4"],
    "ffn": ["method.form=adapter", "method.reduction=4", "method.placement=ffn"],
    "houlsby": ["method.form=adapter", "method.reduction=4", "method.placement=houlsby"],
}
PAPER = ["method.std=1", "method.strength=0.75", "method.gate_rate=1"]


@pytest.fixture
def hat(small):
    """With the paper's gates, about half of which are open whatever is learned in a few steps."""
    return lambda *overrides: made(small("method=hat", ORDER, *PAPER, *overrides))


@pytest.fixture
def causal(small_gpt2):
    return lambda *overrides: made(small_gpt2("method=hat", ORDER, *PAPER, *overrides))


def some_batch(vocabulary: int) -> dict[str, Tensor]:
    """Text that no domain has, scored everywhere."""
    ids = torch.randint(5, vocabulary, (4, 12), generator=torch.Generator().manual_seed(7))
    return batch_of(ids, ids)


def function(work: Made, domain: int) -> Tensor:
    """What the model of a domain computes, logits [48, V]."""
    module = work.module.eval()
    batch = some_batch(module.model.config.vocab_size)
    with torch.no_grad():
        return logits_at(module.model, batch, weights=module.bank.weights(domain))


def plain(model: torch.nn.Module) -> Tensor:
    """The same of a model as it is."""
    with torch.no_grad():
        return logits_at(model.eval(), some_batch(model.config.vocab_size))


def hold(work: Made) -> list[Tensor]:
    """Learns all three domains; what the first one's model, and then the second's, computed when they were
    learned and at the end."""
    work.learn(0)
    first = function(work, 0)
    work.learn(1)
    again, second = function(work, 0), function(work, 1)
    work.learn(2)
    return [first, again, function(work, 0), second, function(work, 1)]


@pytest.mark.parametrize("family", ["masked", "causal"])
@pytest.mark.parametrize("form", FORMS)
def test_earlier_domains_compute_the_same_bits(form, family, hat, causal):
    """With weight decay, momentum and clipping; new domains do learn, and otherwise."""
    work = (hat if family == "masked" else causal)(*HARSH, *FORMS[form])
    before = work.weights()
    first, again, at_last, second, second_at_last = hold(work)
    assert torch.equal(first, again) and torch.equal(first, at_last)
    assert torch.equal(second, second_at_last)
    assert not torch.equal(first, second) and not torch.equal(second, function(work, 2))
    moved = [n for n, p in work.weights().items() if not torch.equal(p, before[n]) and not n.endswith(".e")]
    assert moved


@pytest.mark.parametrize("form", FORMS)
def test_masked_gradients_alone_do_not_hold(form, hat):
    """Weight decay gets around them."""
    first, again, *_ = hold(hat(*HARSH, *FORMS[form], "method.acts_on=gradient"))
    assert not torch.equal(first, again)


def test_frozen_moments_hold_as_well(hat):
    first, again, at_last, *_ = hold(hat(*HARSH, "method.acts_on=frozen"))
    assert torch.equal(first, again) and torch.equal(first, at_last)


def test_what_is_shared_and_trained_leaks(hat):
    first, again, *_ = hold(hat(*HARSH, "method.shared=trained"))
    assert not torch.equal(first, again)


def test_taken_units_do_not_move_and_free_ones_do(hat):
    work = hat(*HARSH)
    work.learn(0)
    module, taken = work.module, work.module.gates.split(work.module.taken.taken)
    block = module.model.base_model.layers[0]
    [name] = [n for n in taken if n.endswith("0.neurons")]
    rows = [n for n in taken if n.endswith("0.outputs")]
    c_in, c_out = taken[name].bool(), taken[rows[0]].bool()
    down, head = block.mlp.Wo.weight, taken[next(n for n in taken if n.endswith("heads"))].bool()
    before, out = down.detach().clone(), block.attn.Wo.weight.detach().clone()
    work.learn(1)
    still = before == down
    kept = c_out[:, None] & c_in[None]
    assert kept.any() and not kept.all()
    assert still[kept].all()
    assert not still[~kept].any()
    columns = (block.attn.Wo.weight == out).all(0).view(len(head), -1).all(1)
    assert torch.equal(columns, head)


def test_what_no_unit_owns_is_frozen_after_the_first_domain(hat):
    work = hat()
    model, table = work.module.model, work.module.model.get_input_embeddings().weight
    before = table.detach().clone()
    work.learn(0)
    after = table.detach().clone()
    assert not torch.equal(before, after)
    work.learn(1)
    assert torch.equal(table, after)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name in trained if ".attn.W" in name or ".mlp.W" in name}
    assert set(work.module.gates.names) <= trained


def test_the_base_of_an_adapter_never_moves(hat):
    work = hat(*FORMS["houlsby"], *HARSH)
    before = work.weights()
    start = function(work, BASE)
    hold(work)
    assert torch.equal(function(work, BASE), start)
    inside = (".adapter.", "_gate.e")
    after = work.weights()
    own = [n for n in before if not any(part in n for part in inside)]
    assert own and all(torch.equal(before[n], after[n]) for n in own)
    scope = {n for n, p in work.module.model.named_parameters() if p.requires_grad}
    assert scope == set(before) - set(own)
    assert not {part.e for part in work.module.gates.parts} & set(work.module.frozen)


@pytest.mark.parametrize("form", FORMS)
def test_before_anything_is_learned_it_is_the_base(form, hat, small):
    """Bit for bit, and so are its scores."""
    base, work = made(small("method=ncl", ORDER)), hat(*FORMS[form])
    assert torch.equal(function(work, BASE), plain(base.module.model))
    batch = some_batch(base.module.model.config.vocab_size)
    nll, count = work.module.nll(batch, 0)
    assert torch.equal(nll, token_nll(base.module.model, batch).detach())
    assert torch.equal(count, torch.ones(48))
    assert work.module.used(0) == {BASE: 1.0}


def terms(work: Made, step: int = 2) -> dict[str, Tensor]:
    """The terms of a loss at one of six steps, outside a trainer."""
    module = work.module.train()
    module._trainer = SimpleNamespace(global_step=step, max_steps=6)
    return module.losses(some_batch(module.model.config.vocab_size) | {"weight": torch.tensor(1 / 48)})


def test_s_follows_the_steps_and_the_regulariser_the_gates(hat):
    work = hat("method.strength=0.5")
    found, gates = terms(work, step=2), work.module.gates
    s = 1 / 400 + (400 - 1 / 400) * 2 / 5
    assert all(part.s == pytest.approx(s) for part in gates.parts)
    values = (s * gates.e()).sigmoid()
    assert found["hat"].item() == pytest.approx(0.5 * values.mean().item(), rel=1e-5)
    work.module.taken.update_max((gates.e() > 0).float())
    free = gates.e() <= 0
    again = terms(work, step=0)["hat"].item()
    assert again == pytest.approx(0.5 * (gates.e()[free] / 400).sigmoid().mean().item(), rel=1e-5)
    work.module.taken.update_max(torch.ones(len(free)))
    assert terms(work)["hat"].item() == 0


def test_the_last_step_is_at_s_max(hat):
    work, watch = hat(), Watch(lambda module: [part.s for part in module.gates.parts])
    work.learn(0, watch)
    seen = [values[0] for _, values in watch.seen]
    assert all(len(set(values)) == 1 for _, values in watch.seen)
    assert seen == pytest.approx([1 / 400 + (400 - 1 / 400) * k / 5 for k in range(6)])


def test_gates_are_clamped_after_each_step(hat):
    work, watch = hat("method.limit=0.3", "model.lr=1e-1"), Watch(lambda module: module.gates.e().detach())
    work.learn(0, watch)
    assert all(e.abs().max() <= 0.3 for _, e in watch.seen)


def test_every_domain_begins_with_a_draw_of_its_own(hat):
    """Of its name and the run's seed, the same in each process."""
    draws = {}
    for seed in (0, 1):
        work = hat("method.limit=100", "model.lr=0", f"seed={seed}")
        for domain in (0, 1):
            work.learn(domain)
            draws[seed, domain] = work.module.gates.e().detach()
    assert len({tuple(e.tolist()) for e in draws.values()}) == 4
    for e in draws.values():
        assert abs(e.mean()) < 0.3 and 0.8 < e.std() < 1.2
    work = hat("model.lr=0", "seed=0")
    work.module._trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=SimpleNamespace(name="food")))
    torch.manual_seed(99)
    work.module.before_domain(())
    assert torch.equal(work.module.gates.e(), draws[0, 1])


def test_the_draws_width_is_an_option(hat):
    work = hat("method.std=0.02", "model.lr=0")
    work.learn(0)
    assert 0.015 < work.module.gates.e().std() < 0.025


def test_what_is_taken_only_grows(hat):
    work, seen = hat(*HARSH), []
    for domain in range(3):
        work.learn(domain)
        own = work.module.opened(domain)
        assert torch.equal(own, (work.module.gates.e() > 0).float())
        seen.append((own, work.module.taken.taken.clone()))
    assert all(set(own.tolist()) == {0, 1} for own, _ in seen)
    assert torch.equal(seen[0][0], seen[0][1])
    for (_, before), (own, after) in zip(seen, seen[1:], strict=False):
        assert torch.equal(after, torch.maximum(before, own))
        assert after.sum() > before.sum()


@pytest.mark.parametrize("form", FORMS)
def test_a_backbone_is_a_copy_that_computes_its_domain(form, hat):
    work = hat(*HARSH, *FORMS[form])
    work.learn(0)
    work.learn(1)
    before = work.weights()
    for domain in (0, 1):
        model, expected = work.module.model_for(domain), function(work, domain)
        assert torch.equal(plain(model), expected)
        assert torch.equal(plain(model.train()), expected)
        model.train()
        held = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert set(work.module.gates.names) <= held
        batch = some_batch(model.config.vocab_size)
        assert torch.equal(token_nll(model, batch).detach(), token_nll(model.eval(), batch).detach())
        for parameter in model.parameters():
            parameter.data.zero_()
    assert same(work.weights(), before)
    assert all(p.requires_grad for p in (part.e for part in work.module.gates.parts))


class KilledError(BaseException):
    """Ends a run where nothing catches it."""


class Killer(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == 3 and trainer.datamodule.domain.name == "space":
            raise KilledError


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_it_goes_on_within_the_third_domain(form, small, start, tmp_path, monkeypatch):
    cfg = small("method=hat", ORDER, *FORMS[form], *DROPOUT)
    whole = learned(start, cfg, tmp_path / "whole")
    trainer = loop.make_trainer
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(
            loop,
            "make_trainer",
            lambda *args, callbacks=(), **how: trainer(
                *args, callbacks=[*callbacks, Killer()] if callbacks else (), **how
            ),
        )
        start(cfg, tmp_path / "killed")
    assert same(learned(start, cfg, tmp_path / "killed"), whole)


def test_a_state_with_more_domains_is_taken(hat):
    work = hat()
    work.learn(0)
    work.learn(1)
    other = hat()
    other.module.load_state_dict(work.module.state_dict())
    for domain in (0, 1):
        assert torch.equal(function(other, domain), function(work, domain))
    assert torch.equal(other.module.taken.taken, work.module.taken.taken)


@pytest.mark.parametrize("form", ["full", "adapter"])
def test_gates_learn_at_a_rate_of_their_own(form, hat):
    """Adam's first step is the rate: that of e is gate_rate times that of the weights, to the end of the
    schedule."""
    moved, seen = {}, {}
    for times in (1, 20):
        work = hat(*FORMS[form], f"method.gate_rate={times}", "trainer.steps=4", "method.strength=0")
        parts = work.module.gates.parts
        watch = Watch(lambda m, parts=parts: torch.cat([part.e.detach() for part in parts]))
        rates = Watch(lambda m: [group["lr"] for group in m.trainer.optimizers[0].param_groups])
        work.learn(0, watch, rates)
        first, second = (e for _, e in watch.seen[:2])
        moved[times], seen[times] = (second - first).abs().median(), rates.seen
    assert moved[20] / moved[1] == pytest.approx(20, rel=0.05)
    for (_, plain), (_, own) in zip(seen[1], seen[20], strict=True):
        assert own == [plain[0], plain[0], 20 * plain[0], 20 * plain[0]]
        assert plain == plain[:1] * 2


def test_what_a_domain_opens_is_learned_and_not_drawn(small):
    """At the defaults; with the paper's draw and strength, and the weights' rate, hardly a gate turns under
    AdamW."""
    turned = {}
    for name, given in (("default", []), ("paper", PAPER)):
        work = made(small("method=hat", ORDER, "trainer.steps=40", *given))
        parts = work.module.gates.parts
        watch = Watch(lambda m, parts=parts: torch.cat([part.e.detach().clone() for part in parts]))
        work.learn(0, watch)
        (_, first), (_, last) = watch.seen[0], watch.seen[-1]
        turned[name] = ((first > 0) != (last > 0)).float().mean().item()
    assert turned["paper"] < 0.1 < 0.2 < turned["default"]


def test_frozen_layers_still_have_gates(hat):
    work = hat("freeze.layers=1", *HARSH)
    before = work.weights()
    work.learn(0)
    after = work.weights()
    first = [n for n in before if n.startswith("model.layers.0.") and not n.endswith(".e")]
    assert first and all(torch.equal(before[n], after[n]) for n in first)
    gates = [part.e.requires_grad for part in work.module.gates.parts]
    assert all(gates) and len(gates) == 6
