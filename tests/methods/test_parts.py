"""Methods with a part for each domain: what a domain has learned is kept bit for bit, scores its texts, is
handed over as a copy and is exported; what adapters are."""

from types import SimpleNamespace

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.bottleneck import Bottleneck
from cpt.adapters.domain_store import BASE
from cpt.data.datamodule import Domain
from tests.support.making import clones, same, state_beside_the_model

HARSH = ["optim.weight_decay=0.3", "optim.lr=0.01", "trainer.steps=3"]
HAT = "hat method.std=1 method.strength=0.75 method.gate_rate=1 method.form="  # the paper's: half are open
KINDS = {  # the method with its options, and the family of the model
    "adapter": ("adapter method.per_domain=true method.placement=houlsby method.activation=silu", "masked"),
    "adapter in a causal model": ("adapter method.per_domain=true", "causal"),
    "cpt_plugin": ("cpt_plugin", "masked"),
    "cpt_plugin in a causal model": ("cpt_plugin method.norms=frozen", "causal"),
    "demix": ("demix routing@method.routing=domain", "masked"),
    "demix with a decoder": ("demix routing@method.routing=domain", "both"),
    "demix of adapters": ("demix routing@method.routing=domain method.experts=adapter", "masked"),
    "hat": (f"{HAT}full", "masked"),
    "hat with a decoder": (f"{HAT}full", "both"),
    "hat in adapters": (f"{HAT}adapter method.reduction=4", "masked"),
    "hat in adapters of networks": (f"{HAT}adapter method.reduction=4 method.placement=ffn", "causal"),
    "hat in two adapters a block": (f"{HAT}adapter method.reduction=4 method.placement=houlsby", "masked"),
    "lora": ("lora method.per_domain=true", "masked"),
    "prompt": ("prompt method.tokens=4", "masked"),
    "prompt in a causal model": ("prompt method.tokens=4", "causal"),
    "progprompt": ("progprompt method.tokens=4", "masked"),
}
OWN = (".adapter.", ".plugin.", ".lora_", "_gate.e", "prompt")  # what is not the base's
BESIDE = [kind for kind in KINDS if "demix" not in kind and "form=full" not in KINDS[kind][0]]
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
            weights, sizes, rows = work.weights(), [state_beside_the_model(module)], []

            @torch.no_grad()
            def losses(domain: int) -> torch.Tensor:
                module.eval()
                return torch.cat([module.nll(batch, domain)[0] for batch in batches])

            rows.append([losses(domain) for domain in (BASE, 0)])
            for number in (0, 1):
                work.learn(number)
                rows.append([losses(domain) for domain in range(number + 1)])
                sizes.append(state_beside_the_model(module))
            FOUND[kind] = SimpleNamespace(**locals())
        return FOUND[kind]

    return two


@pytest.mark.parametrize("kind", KINDS)
def test_before_anything_is_learned_it_is_the_base(kind, learned, build):
    found = learned(kind)
    plain = build("ncl", on=found.family).module.eval()
    with torch.no_grad():
        expected = torch.cat([plain.objective.nll(plain.model, batch) for batch in found.batches])
    assert all(torch.equal(each, expected) for each in found.rows[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_learned_stays_bit_for_bit(kind, learned):
    (base, _), (law,), (again, food) = learned(kind).rows
    assert torch.equal(law, again) and not torch.equal(law, food) and not torch.equal(law, base)


@pytest.mark.parametrize("kind", BESIDE)
def test_the_base_keeps_its_bits_and_the_parts_learn(kind, learned):
    found = learned(kind)
    inside = {name for name in found.weights if any(part in name for part in OWN)}
    norms = {name for name in found.work.module.bank.names if name not in inside}
    after = found.work.weights()
    moved = {name for name, value in found.weights.items() if not torch.equal(value, after[name])}
    assert moved <= inside | norms and len(moved) > 0.8 * len(inside) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_text_is_scored_by_its_own_part(kind, learned):
    module, (batch, _) = learned(kind).module.eval(), learned(kind).batches
    assert module.needs_domain
    for domain in (0, 1):
        with torch.no_grad():
            nll, count = module.nll(batch, domain)
            own = module.objective.nll(module.model_for(domain).eval(), batch)
        torch.testing.assert_close(nll, own, rtol=1e-4, atol=1e-4)
        assert torch.equal(count, torch.ones_like(nll)) and nll.shape == batch["positions"].shape
        assert module.used(domain) == {domain: 1.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_is_a_copy_that_computes_its_domain(kind, learned, build):
    found = learned(kind)
    work, (batch, _) = found.work, found.batches
    state = clones(work.module.state_dict())
    copy = work.module.model_for(0)
    for parameter in copy.parameters():
        parameter.data.zero_()
    assert same(state, work.module.state_dict())
    other = build(*found.chosen.split(), on=found.family).module.eval()
    other.load_state_dict(state)
    with torch.no_grad():
        for domain in (0, 1):
            assert torch.equal(other.nll(batch, domain)[0], work.module.eval().nll(batch, domain)[0])


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_grows_by_a_part_per_domain(kind, learned):
    found = learned(kind)
    part = sum(value.nbytes for value in found.module.bank.weights(1).values())
    if "progprompt" in kind:
        part = 4 * 32 * 4  # its own, of the chain of all
    noted = found.sizes[2] - found.sizes[1] - part
    assert 0 <= noted <= 16 * ("demix" in kind)


def slot(work) -> dict[str, torch.Tensor]:
    return {name: value for name, value in work.weights().items() if ".adapter." in name}


def enter(module, index: int, name: str = "") -> None:
    """Stands for the trainer at the beginning of a domain."""
    domain = Domain(name or str(index), index, (name or str(index),))
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=domain))
    module.activate(index)


def visit(module, index: int, *, scale: float = 0.2) -> None:
    """Learns a domain with weights drawn in place of steps, kept as the masks say."""
    enter(module, index)
    module.before_domain(())
    kept = dict(module.taken.factors()) if hasattr(module, "taken") else {}
    torch.manual_seed(index)
    for parameter in (p for p in module.model.parameters() if p.requires_grad):
        parameter.data.add_(scale * torch.randn_like(parameter) * kept.get(parameter, torch.ones(())))
    module.after_domain(())


@pytest.mark.parametrize(
    ("placement", "reduction", "sizes"),
    [("pfeiffer", 16, [2]), ("ffn", 16, [2]), ("houlsby", 4, [8, 8]), ("pfeiffer", 32, [1])],
)
def test_the_number_of_trained_parameters_is_the_formula(placement, reduction, sizes, build):
    """2 D d + d + D for each adapter: 2 blocks, D = 32."""
    work = build("adapter", f"method.placement={placement}", f"method.reduction={reduction}")
    work.module.activate(0)
    trained = {name: p.numel() for name, p in work.module.model.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == 2 * sum(2 * 32 * d + d + 32 for d in sizes)
    assert trained.keys() == slot(work).keys()


@pytest.mark.parametrize("start", ["base", "previous"])
def test_how_a_domains_adapter_begins(start, build):
    work = build("adapter", "method.per_domain=true", f"method.start={start}", "method.placement=houlsby")
    module = work.module
    visit(module, 0)
    previous, begun = slot(work), []
    for seed, domain in ((1, "food"), (2, "food"), (2, "space")):  # as in other processes
        torch.manual_seed(seed)
        module.trainer.datamodule.domain = Domain(domain, 1, (domain,))
        module.before_domain([])
        begun.append(slot(work))
    if start == "previous":
        assert same(begun[0], previous)
        return
    assert same(begun[0], begun[1]) and not same(begun[0], begun[2])
    for name, value in begun[0].items():
        assert value.any() == name.endswith("down.weight") and value.abs().max() < 0.1
        assert not torch.equal(value, previous[name])
    drawn = [value for name, value in begun[0].items() if name.endswith("down.weight")]
    assert len({value[0, 0].item() for value in drawn}) == len(drawn)


def test_migu_masks_rows_of_both_maps_by_their_own_outputs(build):
    """One step: of d rows the d - floor(0.7 d) with the largest outputs move, and no others."""
    work = build("adapter", "mask=migu", "mask.migu.acts_on=update", "trainer.steps=1", "method.reduction=2")
    model, [mask] = work.module.model, work.module.masks
    bottlenecks = [part for part in model.modules() if isinstance(part, Bottleneck)]
    linears = [linear for part in bottlenecks for linear in (part.down, part.up)]
    assert [each.module for each in mask.maps] == linears
    visit(work.module, 0)
    before, sums = [linear.weight.detach().clone() for linear in linears], {}

    def note(module, args, output):
        if module.training:
            sums[module] = output.detach().abs().sum((0, 1))

    for linear in linears:
        linear.register_forward_hook(note)
    work.learn(0)
    for linear, old in zip(linears, before, strict=True):
        moved = (linear.weight != old).any(1).nonzero().flatten().tolist()
        count = {16: 16 - 11, 32: 32 - 22}[linear.out_features]
        assert moved == sorted(sums[linear].topk(count).indices.tolist())
