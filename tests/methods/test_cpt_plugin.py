"""CPT: a plug-in that is zero is the base, what weights of taken units do, and what grows."""

from types import SimpleNamespace

import pytest
import torch

from cpt.adapters.bottleneck import Plugin
from cpt.adapters.gates import Gate, anneal
from cpt.methods.cpt_plugin import norms_of
from tests.methods.test_parts import enter, visit
from tests.support.making import same, state_beside_the_model
from tests.support.running import logits_at

DECAY = ["optim.weight_decay=0.1", "optim.lr=0.01"]


def taking(weights, names) -> dict[str, torch.Tensor]:
    return {name: weights[name].detach().clone() for name in names}


@torch.no_grad()
def answers(work, batch, domain: int) -> torch.Tensor:
    """Logits of what scores text of a domain."""
    module = work.module.eval()
    return logits_at(module.model, batch, weights=module.bank.weights(domain))


@pytest.mark.parametrize("family", ["masked", "causal"])
def test_a_zero_plugin_is_the_base(family, build):
    work, plain = build("cpt_plugin", on=family), build("ncl", on=family)
    [batch], found = work.batches(), []
    work.module.gates.set(7.0)
    for training in (False, True):
        for each in (work, plain):
            each.module.train(training)
            torch.manual_seed(0)
            found.append(logits_at(each.module.model, batch))
    assert torch.equal(*found[:2]) and torch.equal(*found[2:])
    other = build("cpt_plugin", "method.output_relu=true", "routing@method.routing=domain", on=family)
    assert not torch.equal(logits_at(other.module.eval().model, batch), answers(other, batch, -1))
    parts = [part for part in other.module.model.modules() if isinstance(part, Plugin)]
    assert parts and all((part(torch.randn(3, 32)) >= 0).all() for part in parts)


@pytest.mark.parametrize("norms", ["per_domain", "frozen"])
def test_what_is_trained_and_what_grows(norms, build):
    work = build("cpt_plugin", *["method.norms=frozen"] * (norms == "frozen"))
    module, weights, [batch], seen = work.module, work.weights(), work.batches(), []
    own = {name for name in weights if name.endswith("_gate.e")}
    own |= set() if norms == "frozen" else {*norms_of(module.model)}
    part, start = sum(weights[name].nbytes for name in own), state_beside_the_model(module)
    for number in range(8):
        visit(module, number, scale=1)
        seen.append(answers(work, batch, number))
        assert state_beside_the_model(module) == start + part * (number + 1)
    trained = {name for name, p in module.model.named_parameters() if p.requires_grad}
    assert trained == own | {name for name in weights if ".plugin." in name}
    assert sum(isinstance(each, Gate) for each in module.model.modules()) == 8
    assert weights.keys() == work.weights().keys() and start == module.taken.taken.nbytes
    assert all(torch.equal(answers(work, batch, number), logits) for number, logits in enumerate(seen))
    assert len({logits.sum().item() for logits in seen}) == 8


def test_weights_of_what_is_taken_keep_their_bits_and_others_move(build):
    work = build("cpt_plugin", *DECAY, "trainer.gradient_clip_val=null")
    work.learn(0)
    part = work.module.model.get_submodule(work.module.plugins[0].rpartition(".down")[0])
    inner, outer = (gate.e.detach() > 0 for gate in (part.up.neurons_gate, part.up.outputs_gate))
    held = {"down.weight": inner[:, None], "down.bias": inner}
    held |= {"up.weight": outer[:, None] & inner, "up.bias": outer}
    before = {name: part.get_parameter(name).detach().clone() for name in held}
    work.learn(1)
    for name, taken in held.items():
        taken, stays = taken.expand_as(before[name]), part.get_parameter(name) == before[name]
        assert stays[taken].all() and stays[~taken].float().mean() < 0.6, name


def test_norms_begin_at_the_bases_and_are_kept_for_each_domain(build):
    work = build("cpt_plugin", *DECAY)
    module, names = work.module, norms_of(work.module.model)
    base = taking(work.weights(), names)
    work.learn(0)
    law = taking(work.weights(), names)
    assert names and not same(law, base)
    enter(module, 1)
    module.before_domain([])
    assert same(taking(work.weights(), names), base)
    assert same(taking(module.bank.weights(0), names), law)
    assert same(taking(dict(module.model_for(0).named_parameters()), names), law)


def test_the_regulariser_is_a_term_only_where_it_is_asked_for(build):
    work, plain = build("cpt_plugin", "method.sparsity=0.5"), build("cpt_plugin").module
    module, [batch] = work.module.train(), work.batches()
    module.taken.taken[:100] = 1
    module.trainer = plain.trainer = SimpleNamespace(global_step=3, max_steps=6)
    found = module.losses(batch)["sparsity"]
    gates, free = torch.sigmoid(anneal(3 / 5, s_max=400) * module.gates.e()), 1 - module.taken.taken
    assert found.item() == pytest.approx((0.5 * (gates * free).sum() / free.sum()).item())
    assert found.requires_grad and set(plain.losses(batch)) == {"lm"}
