"""Methods with a part for each domain: what a domain has learned is kept bit for bit, scores its texts."""

from types import SimpleNamespace

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.domain_store import BASE
from cpt.adapters.gates import anneal
from cpt.data.options import Domain
from cpt.methods.hat import norms_of
from tests.methods.test_lifelong_moe import First
from tests.support.forward_passes import token_nll
from tests.support.method_fixtures import clone_tensors, count_state_bytes_outside_model, equal_tensors

DECAY = ["optim.weight_decay=0.5", "optim.lr=0.01"]
HARSH = ["optim.weight_decay=0.3", "optim.lr=0.01", "trainer.steps=3"]
HAT = "hat method.initial=normal method.std=1 method.strength=0.75 method.gate_rate=1 method.form="
KINDS = {  # the method with its options, and the family of the model
    "adapter": ("adapter method.per_domain=true method.placement=houlsby method.activation=silu", "masked"),
    "adapter in a causal model": ("adapter method.per_domain=true", "causal"),
    "cpt_plugin": ("cpt_plugin", "masked"),
    "demix": ("demix routing@method.routing=domain", "masked"),
    "demix of adapters": ("demix routing@method.routing=domain method.experts=adapter", "masked"),
    "hat": (f"{HAT}full", "masked"),
    "hat with a decoder": (f"{HAT}full", "both"),
    "hat in adapters": (f"{HAT}adapter method.reduction_factor=4 method.placement=ffn", "causal"),
    "lora": ("lora method.per_domain=true", "masked"),
    "prompt": ("prompt method.num_virtual_tokens=4", "causal"),
    "progprompt": ("progprompt method.num_virtual_tokens=4", "masked"),
}
OWN = (".adapter.", ".plugin.", ".lora_", "_gate.e", "prompt")  # what is not the base's
EXPORTED = [kind for kind in KINDS if kind != "lora" and "form=full" not in KINDS[kind][0]]  # in parts
FOUND: dict[str, SimpleNamespace] = {}


@pytest.fixture
def learned(build):
    """After two domains, and what was known on the way: losses by what was learned and by domain."""

    def two(kind: str) -> SimpleNamespace:
        if kind not in FOUND:
            chosen, family = KINDS[kind]
            work = build(*chosen.split(), *HARSH, on=family)
            module, batches = work.module, [work.batches(text=text)[0] for text in ("law", "food")]
            weights, sizes, rows = work.weights(), [count_state_bytes_outside_model(module)], []

            @torch.no_grad()
            def losses(domain: int) -> torch.Tensor:
                module.eval()
                return torch.cat([module.nll(batch, domain)[0] for batch in batches])

            rows.append([losses(domain) for domain in (BASE, 0)])
            for number in (0, 1):
                work.learn(number)
                rows.append([losses(domain) for domain in range(number + 1)])
                sizes.append(count_state_bytes_outside_model(module))
            FOUND[kind] = SimpleNamespace(**locals())
        return FOUND[kind]

    return two


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learned_stays_bit_for_bit_beside_the_base(kind, learned, build):
    found = learned(kind)
    (base, begun), (law,), (again, food) = found.rows
    plain = build("ncl", on=found.family).module.eval()
    with torch.no_grad():
        expected = torch.cat([plain.objective.nll(plain.model, batch) for batch in found.batches])
    assert torch.equal(base, expected) and torch.equal(begun, expected)
    assert torch.equal(law, again) and not torch.equal(law, food) and not torch.equal(law, base)
    if "demix" not in kind and "form=full" not in found.chosen:
        inside = {name for name in found.weights if any(part in name for part in OWN)}
        norms = {name for name in found.work.module.domain_params.names if name not in inside}
        after = found.work.weights()
        moved = {name for name, value in found.weights.items() if not torch.equal(value, after[name])}
        assert moved <= inside | norms and len(moved) > 0.8 * len(inside) > 0
    part = sum(value.nbytes for value in found.module.domain_params.weights(1).values())
    part = 4 * 32 * 4 if "progprompt" in kind else part  # its own, of the chain of all
    assert 0 <= found.sizes[2] - found.sizes[1] - part <= 16 * ("demix" in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_is_scored_by_its_own_part_and_a_backbone_is_a_copy_of_it(kind, learned, build):
    found = learned(kind)
    work, (batch, _) = found.work, found.batches
    state = clone_tensors(work.module.state_dict())
    copy = work.module.model_for(0)
    for parameter in copy.parameters():
        parameter.data.zero_()
    assert equal_tensors(state, work.module.state_dict())
    other = build(*found.chosen.split(), on=found.family).module.eval()
    other.load_state_dict(state)
    assert other.needs_domain
    with torch.no_grad():
        for domain in (0, 1):
            nll, count = work.module.eval().nll(batch, domain)
            own = other.objective.nll(other.model_for(domain).eval(), batch)
            torch.testing.assert_close(nll, own, rtol=1e-4, atol=1e-4)
            assert torch.equal(other.nll(batch, domain)[0], nll) and torch.equal(count, torch.ones_like(nll))
            assert other.routing_weights(domain) == {domain: 1.0}


@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_exported_is_loaded(kind, learned, tmp_path):
    found = learned(kind)
    module, (batch, _) = found.module.eval(), found.batches
    expression = module.export(tmp_path, ["law", "food"])
    assert expression == f'cpt.adapters.export.load("{tmp_path}", domain="food")'
    with torch.no_grad():
        for domain, name in enumerate(["law", "food"]):
            loaded = cpt.adapters.export.load(tmp_path, domain=name).eval()
            assert not any("_gate" in each for each, _ in loaded.named_parameters())
            torch.testing.assert_close(module.objective.nll(loaded, batch), module.nll(batch, domain)[0])
        plain = type(module.model).from_pretrained(tmp_path).eval()
        count = len(batch["positions"])
        expected = found.rows[2][1] if "demix" in kind and "adapters" not in kind else found.rows[0][0]
        if kind != "cpt_plugin":  # whose norms are the last domain's there
            torch.testing.assert_close(module.objective.nll(plain, batch), expected[:count])


def slot(work) -> dict[str, torch.Tensor]:
    return {
        name: value for name, value in work.weights().items() if name in {*work.module.domain_params.names}
    }


def part(work, domain: int) -> dict[str, torch.Tensor]:
    return clone_tensors(work.module.domain_params.weights(domain))


def enter(module, index: int, name: str = "", *, visit: bool = False) -> None:
    """Stands for the trainer at the beginning of a domain, and to its end, with weights that are drawn."""
    domain = Domain(name or str(index), index, (name or str(index),))
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=domain))
    module.activate(index)
    module.before_domain(())
    if visit:
        torch.manual_seed(index)
        for parameter in (p for p in module.model.parameters() if p.requires_grad):
            parameter.data.add_(0.2 * torch.randn_like(parameter))
        module.after_domain(())


@pytest.mark.parametrize("start", ["base", "previous"])
def test_how_a_domains_adapter_begins(start, build):
    work, begun = build("adapter", "method.per_domain=true", f"method.start={start}"), []
    enter(work.module, 0, visit=True)
    previous = slot(work)
    for seed, domain in ((1, "food"), (2, "food"), (2, "space")):  # as in other processes
        torch.manual_seed(seed)
        enter(work.module, 1, domain)
        begun.append(slot(work))
    assert equal_tensors(begun[0], begun[1]) and equal_tensors(begun[0], begun[2]) == equal_tensors(
        begun[0], previous
    )
    assert equal_tensors(begun[0], previous) == (start == "previous")


THREE = "order=[law,food,space]"


@pytest.mark.parametrize(("options", "family", "source"), [
    ("experts=ffn", "causal", None),
    ("experts=adapter", "masked", None),
    ("start=previous", "masked", 1),
    ("start=base", "masked", BASE),
])  # fmt: skip
def test_an_expert_begins_as_the_nearest(options, family, source, build):
    work = build("demix", THREE, f"method.{options}", *DECAY, on=family)
    before, names = work.weights(), {*work.module.domain_params.names}
    work.learn(0)
    work.learn(1)
    parts = {domain: part(work, domain) for domain in (BASE, 0, 1)}
    models, seen = [work.module.model_for(domain) for domain in parts], []
    work.learn(2, First(lambda *given: seen.extend((slot(work), work.importance_batches()))))
    begun, probe = seen
    if source is None:
        source, found = int(work.module.sources[2]), work.module.perplexities.tolist()
        with torch.no_grad():
            nll = [torch.cat([token_nll(each.eval(), batch) for batch in probe]).double() for each in models]
        assert found == pytest.approx([each.mean().exp().item() for each in nll], rel=1e-5)
        assert found[source + 1] == min(found) and len(set(found)) == 3
    assert equal_tensors(begun, parts[source]) and int(work.module.sources[2]) == source
    assert all(equal_tensors(part(work, domain), weights) for domain, weights in parts.items())
    assert {n for n, value in work.weights().items() if not torch.equal(value, before[n])} == names


def test_norms_begin_at_the_bases_and_are_kept_for_each_domain(build):
    work = build("cpt_plugin")
    names = norms_of(work.module.model)
    norms = lambda weights: clone_tensors({name: weights[name] for name in names})  # noqa: E731
    base = norms(work.weights())
    enter(work.module, 0, visit=True)
    law = norms(work.weights())
    enter(work.module, 1)
    assert names and not equal_tensors(law, base) and equal_tensors(norms(work.weights()), base)
    assert equal_tensors(norms(work.module.domain_params.weights(0)), law)


def test_the_regulariser_is_a_term_only_where_it_is_asked_for(build):
    plain, work = build("cpt_plugin").module, build("cpt_plugin", "method.sparsity=0.5")
    [batch], module = work.batches(), work.module.train()
    module.claimed.cumulative_gates[:100] = 1
    module.trainer = plain.trainer = SimpleNamespace(global_step=3, max_steps=6)
    gates, free = (
        torch.sigmoid(anneal(3 / 5, s_max=400) * module.gates.e()),
        1 - module.claimed.cumulative_gates,
    )
    expected = 0.5 * (gates * free).sum() / free.sum()
    assert module.losses(batch)["sparsity"].item() == pytest.approx(expected.item())
    assert set(plain.losses(batch)) == {"lm"}
