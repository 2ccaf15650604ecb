"""Adapters: what is trained, where a domain's begins, and which rows MIGU masks."""

from types import SimpleNamespace

import pytest
import torch

from cpt.adapters.bottleneck import Bottleneck
from cpt.data.datamodule import Domain
from tests.support.making import same

OWN = "method.per_domain=true"


def slot(work) -> dict[str, torch.Tensor]:
    return {name: value for name, value in work.weights().items() if ".adapter." in name}


def visit(module, index: int, name: str = "made-up") -> None:
    """Learns a domain with weights drawn in place of steps."""
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(domain=Domain(name, index, (name,))))
    module.activate(index)
    module.before_domain([])
    torch.manual_seed(index)
    for parameter in (p for p in module.model.parameters() if p.requires_grad):
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    module.after_domain([])


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
    work = build("adapter", OWN, f"method.start={start}", "method.placement=houlsby")
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
