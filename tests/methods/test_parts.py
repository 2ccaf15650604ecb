"""Methods with a part for each domain: what a domain has learned is kept bit for bit, scores its texts."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.domain_store import BASE
from cpt.adapters.gates import anneal
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod
from cpt.methods.hat import list_norm_parameters
from tests.methods.test_lifelong_moe import First
from tests.support.forward_passes import token_nll
from tests.support.method_fixtures import (
    MethodFixture,
    clone_tensors,
    count_state_bytes_outside_model,
    equal_tensors,
)

DECAY = ["optim.weight_decay=0.5", "optim.lr=0.01"]
HARSH = ["optim.weight_decay=0.3", "optim.lr=0.01", "trainer.steps=3"]
HAT = "hat method.gate_init=normal method.gate_std=1 method.strength=0.75 method.gate_rate=1 method.form="
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
EXPORTED = [kind for kind in KINDS if kind != "lora" and "form=full" not in KINDS[kind][0]]  # in parts


@dataclass
class LearnedRun:
    """A run of two domains, and what was measured on the way."""

    run: MethodFixture
    family: str
    chosen: str  # the method and its options
    module: ContinualMethod
    batches: list[Batch]  # one of each domain
    weights: dict[str, torch.Tensor]  # before the first domain
    sizes: list[int]  # bytes of state outside the model, at first and after each domain
    rows: list[list[torch.Tensor]]  # losses of the batches, likewise, by the part that scores them


RUNS: dict[str, LearnedRun] = {}


def is_of_part(name: str) -> bool:
    """Whether a parameter is not the base's."""
    return any(text in name for text in (".adapter.", ".plugin.", ".lora_", "_gate.e", "prompt"))


@pytest.fixture
def learned(build):
    """After two domains, and what was known on the way: losses by what was learned and by domain."""

    def learn_two_domains(kind: str) -> LearnedRun:
        if kind not in RUNS:
            chosen, family = KINDS[kind]
            run = build(*chosen.split(), *HARSH, on=family)
            module = run.module
            batches = [run.batches(text=text)[0] for text in ("law", "food")]
            weights = run.weights()
            sizes = [count_state_bytes_outside_model(module)]
            rows = []

            @torch.no_grad()
            def losses(domain: int) -> torch.Tensor:
                module.eval()
                return torch.cat([module.nll(batch, domain)[0] for batch in batches])

            rows.append([losses(domain) for domain in (BASE, 0)])
            for number in (0, 1):
                run.learn(number)
                rows.append([losses(domain) for domain in range(number + 1)])
                sizes.append(count_state_bytes_outside_model(module))
            RUNS[kind] = LearnedRun(run, family, chosen, module, batches, weights, sizes, rows)
        return RUNS[kind]

    return learn_two_domains


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learned_stays_bit_for_bit_beside_the_base(kind, learned, build):
    learned_run = learned(kind)
    module = learned_run.module
    at_first, after_law, after_food = learned_run.rows
    base, law_at_first = at_first
    [law] = after_law
    law_at_last, food = after_food
    plain = build("ncl", on=learned_run.family).module.eval()
    with torch.no_grad():
        expected = torch.cat([plain.objective.nll(plain.model, batch) for batch in learned_run.batches])
    assert torch.equal(base, expected) and torch.equal(law_at_first, expected)
    assert torch.equal(law, law_at_last) and not torch.equal(law, food) and not torch.equal(law, base)

    if "demix" not in kind and "form=full" not in learned_run.chosen:
        before = learned_run.weights
        after = learned_run.run.weights()
        part_names = {name for name in before if is_of_part(name)}
        norms = {name for name in module.domain_params.names if name not in part_names}
        changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
        assert changed <= part_names | norms and len(changed) > 0.8 * len(part_names) > 0

    if "progprompt" in kind:
        part_bytes = 4 * 32 * 4  # the newest prompt, of the chain of all
    else:
        part_bytes = sum(weight.nbytes for weight in module.domain_params.weights(1).values())
    other_bytes = learned_run.sizes[2] - learned_run.sizes[1] - part_bytes
    assert 0 <= other_bytes <= (16 if "demix" in kind else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_is_scored_by_its_own_part_and_a_backbone_is_a_copy_of_it(kind, learned, build):
    learned_run = learned(kind)
    run = learned_run.run
    batch, _ = learned_run.batches
    state = clone_tensors(run.module.state_dict())
    copy = run.module.model_for(0)
    for parameter in copy.parameters():
        parameter.data.zero_()
    assert equal_tensors(state, run.module.state_dict())
    loaded = build(*learned_run.chosen.split(), on=learned_run.family).module.eval()
    loaded.load_state_dict(state)
    assert loaded.needs_domain
    with torch.no_grad():
        for domain in (0, 1):
            nll, count = run.module.eval().nll(batch, domain)
            backbone_nll = loaded.objective.nll(loaded.model_for(domain).eval(), batch)
            torch.testing.assert_close(nll, backbone_nll, rtol=1e-4, atol=1e-4)
            assert torch.equal(loaded.nll(batch, domain)[0], nll) and torch.equal(count, torch.ones_like(nll))
            assert loaded.routing_weights(domain) == {domain: 1.0}


@pytest.mark.parametrize("kind", EXPORTED)
def test_what_is_exported_is_loaded(kind, learned, tmp_path):
    learned_run = learned(kind)
    module = learned_run.module.eval()
    batch, _ = learned_run.batches
    expression = module.export(tmp_path, ["law", "food"])
    assert expression == f'cpt.adapters.export.load("{tmp_path}", domain="food")'
    with torch.no_grad():
        for domain, name in enumerate(["law", "food"]):
            loaded = cpt.adapters.export.load(tmp_path, domain=name).eval()
            assert not any("_gate" in parameter for parameter, _ in loaded.named_parameters())
            torch.testing.assert_close(module.objective.nll(loaded, batch), module.nll(batch, domain)[0])
        plain = type(module.model).from_pretrained(tmp_path).eval()
        count = len(batch["positions"])
        expected = (
            learned_run.rows[2][1] if "demix" in kind and "adapters" not in kind else learned_run.rows[0][0]
        )
        if kind != "cpt_plugin":  # whose norms are the last domain's there
            torch.testing.assert_close(module.objective.nll(plain, batch), expected[:count])


def slot(run) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.weights().items() if name in {*run.module.domain_params.names}}


def part(run, domain: int) -> dict[str, torch.Tensor]:
    return clone_tensors(run.module.domain_params.weights(domain))


def enter(module, index: int, name: str = "", *, visit: bool = False) -> None:
    """Stands for the trainer at the beginning of a domain, and to its end, with weights that are drawn."""
    domain = Domain(name or str(index), index, (name or str(index),))
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=domain))
    module.activate(index)
    module.before_domain(())
    if visit:
        torch.manual_seed(index)
        for parameter in module.model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
        module.after_domain(())


@pytest.mark.parametrize("start", ["base", "previous"])
def test_how_a_domains_adapter_begins(start, build):
    run = build("adapter", "method.per_domain=true", f"method.start={start}")
    enter(run.module, 0, visit=True)
    previous = slot(run)
    starts = []
    for seed, domain in ((1, "food"), (2, "food"), (2, "space")):  # as in other processes
        torch.manual_seed(seed)
        enter(run.module, 1, domain)
        starts.append(slot(run))
    assert equal_tensors(starts[0], starts[1])
    is_previous = start == "previous"
    assert equal_tensors(starts[0], starts[2]) == is_previous
    assert equal_tensors(starts[0], previous) == is_previous


THREE = "order=[law,food,space]"


@pytest.mark.parametrize(("options", "family", "source"), [
    ("experts=ffn", "causal", None),
    ("experts=adapter", "masked", None),
    ("start=previous", "masked", 1),
    ("start=base", "masked", BASE),
])  # fmt: skip
def test_an_expert_begins_as_the_nearest(options, family, source, build):
    run = build("demix", THREE, f"method.{options}", *DECAY, on=family)
    before = run.weights()
    names = {*run.module.domain_params.names}
    run.learn(0)
    run.learn(1)
    parts = {domain: part(run, domain) for domain in (BASE, 0, 1)}
    models = [run.module.model_for(domain) for domain in parts]
    starts = []
    importance_batches = []

    def record_start(module, batch) -> None:
        starts.append(slot(run))
        importance_batches.extend(run.importance_batches())

    run.learn(2, First(record_start))
    if source is None:
        source = int(run.module.sources[2])
        perplexities = run.module.perplexities.tolist()
        expected = []
        with torch.no_grad():
            for model in models:
                nll = torch.cat([token_nll(model.eval(), batch) for batch in importance_batches])
                expected.append(nll.double().mean().exp().item())
        assert perplexities == pytest.approx(expected, rel=1e-5)
        assert perplexities[source + 1] == min(perplexities) and len(set(perplexities)) == 3
    assert equal_tensors(starts[0], parts[source]) and int(run.module.sources[2]) == source
    assert all(equal_tensors(part(run, domain), weights) for domain, weights in parts.items())
    assert {name for name, weight in run.weights().items() if not torch.equal(weight, before[name])} == names


def test_norms_begin_at_the_bases_and_are_kept_for_each_domain(build):
    run = build("cpt_plugin")
    names = list_norm_parameters(run.module.model)

    def norms(weights):
        return clone_tensors({name: weights[name] for name in names})

    base = norms(run.weights())
    enter(run.module, 0, visit=True)
    law = norms(run.weights())
    enter(run.module, 1)
    assert names and not equal_tensors(law, base) and equal_tensors(norms(run.weights()), base)
    assert equal_tensors(norms(run.module.domain_params.weights(0)), law)


def test_the_regulariser_is_a_term_only_where_it_is_asked_for(build):
    plain = build("cpt_plugin").module
    run = build("cpt_plugin", "method.sparsity=0.5")
    [batch] = run.batches()
    module = run.module.train()
    module.claimed.cumulative_gates[:100] = 1
    module.trainer = plain.trainer = SimpleNamespace(global_step=3, max_steps=6)
    gates = torch.sigmoid(anneal(3 / 5, s_max=400) * module.gates.e())
    free = 1 - module.claimed.cumulative_gates
    expected = 0.5 * (gates * free).sum() / free.sum()
    assert module.losses(batch)["sparsity"].item() == pytest.approx(expected.item())
    assert set(plain.losses(batch)) == {"lm"}
