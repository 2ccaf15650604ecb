"""CPT: a plug-in that is zero is the base, what a domain learned is kept bit for bit, and what grows."""

from types import SimpleNamespace

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.bottleneck import Plugin
from cpt.adapters.gates import Gate, anneal
from cpt.data.datamodule import Domain
from cpt.methods.cpt_plugin import norms_of
from tests.support.making import ORDER, made, same, state_beside_the_model
from tests.support.running import logits_at, token_nll

DECAY = ["optim.weight_decay=0.1", "optim.lr=0.01"]
FROZEN = "method.norms=frozen"


@pytest.fixture
def plugin(small):
    return lambda *overrides: made(small("method=cpt_plugin", ORDER, *overrides))


@pytest.fixture
def small_of(small, small_gpt2):
    return {"masked": small, "causal": small_gpt2}


def taking(weights, names) -> dict[str, torch.Tensor]:
    return {name: weights[name].clone() for name in names}


def base_of(work, *, norms: bool) -> dict[str, torch.Tensor]:
    """All tensors of the model that are not a plug-in's, with its norms or without."""
    state = work.module.model.state_dict()
    left_out = () if norms else norms_of(work.module.model)
    return {n: v.clone() for n, v in state.items() if ".plugin." not in n and n not in left_out}


def answers(work, batch, domain: int) -> torch.Tensor:
    """Logits of what scores text of a domain."""
    module = work.module.eval()
    with torch.no_grad():
        return logits_at(module.model, batch, weights=module.bank.weights(domain))


def visit(work, index: int, *, scale: float = 0.2) -> None:
    """Learns a domain with weights drawn in place of steps, kept as the masks say."""
    module, name = work.module, f"domain {index}"
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=Domain(name, index, (name,))))
    module.activate(index)
    module.before_domain([])
    kept = dict(module.taken.factors())
    with torch.no_grad():
        for number, parameter in enumerate(p for p in module.model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(1000 * index + number)
            step = scale * torch.randn(parameter.shape, generator=generator)
            parameter.add_(step * kept.get(parameter, torch.ones(())))
    module.after_domain([])


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_a_zero_plugin_is_the_base(objective, small_of):
    """Also in training, whatever the gates."""
    work = made(small_of[objective]("method=cpt_plugin", ORDER))
    plain = made(small_of[objective]("method=ncl", ORDER))
    batch, model = work.batches()[0], work.module.model
    assert same(base_of(work, norms=True), dict(plain.module.model.state_dict()))
    for training in (False, True):
        work.module.train(training), plain.module.train(training)
        work.module.gates.set(7.0)
        torch.manual_seed(0)
        found = logits_at(model, batch)
        torch.manual_seed(0)
        assert torch.equal(found, logits_at(plain.module.model, batch))
    assert torch.equal(work.module.eval().nll(batch, -1)[0], token_nll(plain.module.model.eval(), batch))
    assert work.module.used(-1) == {-1: 1.0}


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_what_was_learned_stays_bit_for_bit(objective, small_of):
    """Under AdamW with weight decay, on text of any domain."""
    work = made(small_of[objective]("method=cpt_plugin", ORDER, *DECAY))
    batches = [work.batches(text=text)[0] for text in ("law", "food")]
    before = [answers(work, batch, -1) for batch in batches]
    work.learn(0)
    first = [answers(work, batch, 0) for batch in batches]
    weights = work.weights()
    work.learn(1)
    after = work.weights()
    for batch, base, law in zip(batches, before, first, strict=True):
        assert torch.equal(answers(work, batch, 0), law)
        assert torch.equal(answers(work, batch, -1), base)
        assert not torch.equal(law, base)
        assert not torch.equal(answers(work, batch, 1), law)
    moved = [name for name in work.module.plugins if not torch.equal(weights[name], after[name])]
    assert set(moved) == set(work.module.plugins)  # so that something could have been lost


def test_what_was_learned_stays_however_far_others_go(plugin):
    work = plugin()
    batch, seen = work.batches()[0], []
    for number in range(6):
        visit(work, number, scale=1.0)
        seen.append(answers(work, batch, number))
    for number, logits in enumerate(seen):
        assert torch.equal(answers(work, batch, number), logits)
    assert len({logits.sum().item() for logits in seen}) == 6


def test_weights_of_what_is_taken_keep_their_bits_and_others_move(plugin):
    """Rows of the first map by its neurons; of the second, a weight between two units that are taken."""
    work = plugin(*DECAY, "trainer.gradient_clip_val=null")
    work.learn(0)
    part = work.module.model.get_submodule(work.module.plugins[0].rpartition(".down")[0])
    inner, outer = (gate.e.detach() > 0 for gate in (part.up.neurons_gate, part.up.outputs_gate))
    names = ("down.weight", "down.bias", "up.weight", "up.bias")
    before = {name: part.get_parameter(name).detach().clone() for name in names}
    work.learn(1)
    held = {
        "down.weight": inner[:, None], "down.bias": inner,
        "up.weight": outer[:, None] & inner, "up.bias": outer,
    }  # fmt: skip
    for name, taken in held.items():
        taken = taken.expand_as(before[name])
        stays = part.get_parameter(name) == before[name]
        assert stays[taken].all(), name
        assert stays[~taken].float().mean() < 0.6, name


@pytest.mark.parametrize("norms", ["per_domain", "frozen"])
def test_the_base_keeps_its_bits(norms, plugin):
    work = plugin(f"method.norms={norms}", *DECAY)
    base, with_norms = base_of(work, norms=False), base_of(work, norms=True)
    work.learn(0)
    work.learn(1)
    assert same(base_of(work, norms=False), base)
    assert same(base_of(work, norms=True), with_norms) == (norms == "frozen")


def test_what_is_trained(plugin):
    for options, norms in (([], True), ([FROZEN], False)):
        work = plugin(*options)
        work.module.activate(0)
        model = work.module.model
        found = {name for name, p in model.named_parameters() if p.requires_grad}
        expected = {name for name, _ in model.named_parameters() if ".plugin." in name}
        assert found == expected | (set(norms_of(model)) if norms else set())
        gates = [name for name, part in model.named_modules() if isinstance(part, Gate)]
        assert len(gates) == 2 * len([p for p in model.modules() if isinstance(p, Plugin)]) == 8
        assert {f"{name}.e" for name in gates} < found


def test_norms_begin_at_the_bases_and_are_kept_for_each_domain(plugin):
    work = plugin(*DECAY)
    module, names = work.module, norms_of(work.module.model)
    base = taking(work.weights(), names)
    assert names
    work.learn(0)
    law = taking(work.weights(), names)
    assert not same(law, base)
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=Domain("food", 1, ("food",))))
    module.before_domain([])
    assert same(taking(work.weights(), names), base)
    assert same(taking(module.bank.weights(0), names), law)
    assert same(taking(dict(module.model_for(0).named_parameters()), names), law)


@pytest.mark.parametrize("options", [[], [FROZEN]], ids=["per domain", "frozen"])
def test_growth_is_gates_and_norms_only(options, plugin):
    work = plugin(*options)
    module, weights = work.module, work.weights()
    own = [name for name in weights if name.endswith("_gate.e")] + list(
        () if options else norms_of(module.model)
    )
    part = sum(weights[name].nbytes for name in own)
    start, count = state_beside_the_model(module), sum(p.numel() for p in module.parameters())
    for number in range(12):
        visit(work, number)
        assert state_beside_the_model(module) == start + part * (number + 1)
    assert sum(p.numel() for p in module.parameters()) == count
    assert start == module.taken.taken.nbytes


def test_the_regulariser_is_a_term_only_where_it_is_asked_for(plugin):
    work = plugin("method.sparsity=0.5")
    module = work.module.train()
    module.taken.taken[:100] = 1
    module.trainer = SimpleNamespace(global_step=3, max_steps=6)
    found = module.losses(work.batches()[0])
    s = anneal(3 / 5, s_max=400)
    gates, free = torch.sigmoid(s * module.gates.e()), 1 - module.taken.taken
    assert found["sparsity"].item() == pytest.approx((0.5 * (gates * free).sum() / free.sum()).item())
    assert found["sparsity"].requires_grad
    plain = plugin().module
    plain.trainer = module.trainer
    assert set(plain.losses(work.batches()[0])) == {"lm"}


def test_each_text_is_scored_with_its_own_gates(plugin):
    """Others with those of the last domain, or by the base where that is asked for."""
    work = plugin(*DECAY)
    batch, module = work.batches()[0], work.module
    base = answers(work, batch, -1)
    work.learn(0)
    work.learn(1)
    module.eval()
    assert module.needs_domain
    with torch.no_grad():
        own = [token_nll(module.model_for(number).eval(), batch) for number in (0, 1)]
        for domain, expected in ((0, own[0]), (1, own[1]), (5, own[1]), (-1, own[1])):
            found, count = module.nll(batch, domain)
            assert torch.equal(found, expected)
            assert torch.equal(count, torch.ones_like(found))
    assert [module.used(domain) for domain in (0, 1, 5)] == [{0: 1.0}, {1: 1.0}, {1: 1.0}]
    assert not torch.equal(*own)
    other = plugin("method.routing.unlearned=base")
    other.module.load_state_dict(module.state_dict())
    other.module.eval().nll(batch, -1)
    assert other.module.used(-1) == {-1: 1.0}
    assert torch.equal(answers(other, batch, -1), base)


@pytest.mark.parametrize("options", [[], ["method.output_relu=true", FROZEN]], ids=["default", "released"])
def test_what_is_exported_is_loaded_without_gates(options, plugin, tmp_path):
    work = plugin(*options)
    batch = work.batches()[0]
    for number in (0, 1):
        visit(work, number)
    expected = [answers(work, batch, number) for number in (0, 1)]
    expression = work.module.export(tmp_path, ["law", "food"])
    with torch.no_grad():
        for number, name in enumerate(["law", "food"]):
            loaded = cpt.adapters.export.load(tmp_path, domain=name)
            torch.testing.assert_close(logits_at(loaded, batch), expected[number])
            assert not any(isinstance(part, Gate) for part in loaded.modules())
        torch.testing.assert_close(logits_at(eval(expression, {"cpt": cpt}), batch), expected[1])
    assert not torch.allclose(*expected)


def test_with_a_last_relu_the_first_model_is_not_the_base(plugin):
    work = plugin("method.output_relu=true", "routing@method.routing=domain")
    batch, module = work.batches()[0], work.module.eval()
    assert not torch.equal(logits_at(module.model, batch), answers(work, batch, -1))
    parts = [part for part in module.model.modules() if isinstance(part, Plugin)]
    assert all((part(torch.randn(3, 32)) >= 0).all() for part in parts)
