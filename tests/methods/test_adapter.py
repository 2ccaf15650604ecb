"""Adapters: what is trained, which domain's part scores a text, what grows, and what others can load."""

from types import SimpleNamespace

import pytest
import torch

import cpt.adapters.export
from cpt.adapters.bottleneck import Bottleneck
from cpt.data.datamodule import Domain
from tests.support.making import ORDER, made, parameter_bytes, same, state_beside_the_model
from tests.support.running import logits_at, token_nll

DECAY = ["optim.weight_decay=0.1", "optim.lr=0.01"]
OWN = "method.per_domain=true"


@pytest.fixture
def adapter(small):
    return lambda *overrides: made(small("method=adapter", *(overrides or ()), ORDER))


@pytest.fixture
def small_of(small, small_gpt2):
    return {"masked": small, "causal": small_gpt2}


def names_of(work) -> set[str]:
    return {name for name, p in work.module.model.named_parameters() if p.requires_grad}


def slot(work) -> dict[str, torch.Tensor]:
    return {name: value for name, value in work.weights().items() if ".adapter." in name}


def base_of(work) -> dict[str, torch.Tensor]:
    """All tensors of the model that are not an adapter's, buffers too."""
    state = work.module.model.state_dict()
    return {name: value.clone() for name, value in state.items() if ".adapter." not in name}


def visit(module, index: int, name: str = "made-up") -> None:
    """Learns a domain with weights drawn in place of steps."""
    trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=Domain(name, index, (name,))))
    module.trainer = trainer
    module.activate(index)
    module.before_domain([])
    with torch.no_grad():
        for number, parameter in enumerate(p for p in module.model.parameters() if p.requires_grad):
            generator = torch.Generator().manual_seed(1000 * index + number)
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    module.after_domain([])


def learned(work, count: int):
    for number in range(count):
        work.learn(number)
    return work


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("options", [[], ["method.placement=houlsby", OWN]], ids=["one", "per domain"])
def test_the_base_keeps_its_bits_and_the_adapters_learn(objective, options, small_of):
    work = made(small_of[objective]("method=adapter", "method.activation=gelu", ORDER, *options, *DECAY))
    base, first = base_of(work), slot(work)
    learned(work, 2)
    assert same(base_of(work), base)
    for name, value in slot(work).items():
        assert not torch.equal(value, first[name]), name


@pytest.mark.parametrize(
    ("placement", "reduction", "sizes"),
    [("pfeiffer", 16, [2]), ("ffn", 16, [2]), ("houlsby", 4, [8, 8]), ("pfeiffer", 32, [1])],
)
def test_the_number_of_trained_parameters_is_the_formula(placement, reduction, sizes, adapter):
    """2 D d + d + D for each adapter: 2 blocks, D = 32."""
    work = adapter(f"method.placement={placement}", f"method.reduction={reduction}")
    work.module.activate(0)
    count = sum(p.numel() for p in work.module.parameters() if p.requires_grad)
    assert count == 2 * sum(2 * 32 * d + d + 32 for d in sizes)
    assert names_of(work) == set(slot(work))


def test_the_first_model_is_the_base(adapter, small):
    work, plain = adapter("method.placement=houlsby"), made(small("method=ncl", ORDER))
    batch = plain.batches()[0]
    assert same(base_of(work), dict(plain.module.model.state_dict()))
    work.module.eval(), plain.module.eval()
    assert torch.equal(logits_at(work.module.model, batch), logits_at(plain.module.model, batch))


def test_learning_a_domain_changes_no_bit_of_anothers(adapter):
    work = adapter(OWN, *DECAY)
    work.learn(0)
    bank = work.module.bank
    law = {name: value.clone() for name, value in bank.weights(0).items()}
    assert same(law, slot(work))
    base = {name: value.clone() for name, value in bank.weights(-1).items()}
    work.learn(1)
    assert same(bank.weights(0), law)
    assert same(bank.weights(1), slot(work))
    assert same(bank.weights(-1), base)
    assert not same(bank.weights(1), law)


def test_each_text_is_scored_by_its_own_part_and_others_by_the_base(adapter, small):
    work, plain = adapter(OWN, *DECAY), made(small("method=ncl", ORDER))
    batch = plain.batches()[0]
    learned(work, 2)
    module = work.module.eval()
    assert module.needs_domain
    with torch.no_grad():
        base = token_nll(plain.module.model.eval(), batch)
        own = [token_nll(module.model_for(number).eval(), batch) for number in (0, 1)]
        for domain, expected in ((0, own[0]), (1, own[1]), (7, base), (-1, base)):
            found, count = module.nll(batch, domain)
            assert torch.equal(found, expected)
            assert torch.equal(count, torch.ones_like(expected))
    assert [module.used(domain) for domain in (0, 1, 7, -1)] == [{0: 1.0}, {1: 1.0}, {-1: 1.0}, {-1: 1.0}]
    assert not torch.equal(own[0], own[1]) and not torch.equal(own[0], base)


@pytest.mark.parametrize(("options", "parts"), [([OWN], 12), ([], 0)], ids=["per domain", "one"])
def test_a_sequence_grows_by_a_part_per_domain_or_not_at_all(options, parts, adapter):
    work = adapter(*options)
    module, part = work.module, sum(value.nbytes for value in slot(work).values())
    modules, count = len(list(module.modules())), sum(p.numel() for p in module.parameters())
    for number in range(12):
        visit(module, number)
        assert state_beside_the_model(module) == part * min(parts, number + 1)
    assert sum(p.numel() for p in module.parameters()) == count
    assert len(list(module.modules())) == modules
    assert parameter_bytes(module) == sum(value.nbytes for value in work.weights().values())


@pytest.mark.parametrize("start", ["base", "previous"])
def test_how_a_domains_adapter_begins(start, adapter):
    work = adapter(OWN, f"method.start={start}", "method.placement=houlsby")
    module = work.module
    visit(module, 0)
    previous = slot(work)
    torch.manual_seed(1)
    module.trainer.datamodule.domain = Domain("food", 1, ("food",))
    module.before_domain([])
    begun = slot(work)
    if start == "previous":
        assert same(begun, previous)
        return
    for name, value in begun.items():
        assert value.any() == name.endswith("down.weight")
        assert not torch.equal(value, previous[name])
        assert value.abs().max() < 0.1
    torch.manual_seed(2)  # as in another process
    module.before_domain([])
    assert same(slot(work), begun)
    drawn = [value for name, value in begun.items() if name.endswith("down.weight")]
    assert len({value[0, 0].item() for value in drawn}) == len(drawn)
    module.trainer.datamodule.domain = Domain("space", 2, ("space",))
    module.before_domain([])
    assert not same(slot(work), begun)


def test_migu_masks_rows_of_both_maps_by_their_own_outputs(adapter):
    """One step: of d rows the d - floor(0.7 d) with the largest outputs move, and no others."""
    work = adapter("mask=migu", "mask.migu.acts_on=update", "trainer.steps=1", "method.reduction=2")
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


def test_what_is_exported_is_loaded(adapter, tmp_path):
    work = adapter(OWN, "method.placement=houlsby", "method.activation=silu", "method.reduction=4")
    batch = work.batches()[0]
    for number in (0, 1):
        visit(work.module, number)
    expression = work.module.eval().export(tmp_path, ["law", "food"])
    with torch.no_grad():
        for number, name in enumerate(["law", "food"]):
            expected = logits_at(work.module.model_for(number), batch)
            assert torch.equal(logits_at(cpt.adapters.export.load(tmp_path, domain=name), batch), expected)
        last = eval(expression, {"cpt": cpt})
        assert torch.equal(logits_at(last, batch), expected)


def test_one_for_all_is_exported_too(adapter, tmp_path):
    work = adapter()
    batch = work.batches()[0]
    visit(work.module, 0)
    expression = work.module.eval().export(tmp_path, ["law", "food"])
    loaded = eval(expression, {"cpt": cpt})
    assert torch.equal(logits_at(loaded, batch), logits_at(work.module.model, batch))
    assert [path.stem for path in (tmp_path / "parts").iterdir()] == ["food"]
