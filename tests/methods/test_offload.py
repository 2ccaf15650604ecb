"""What rests in the host's memory: the same bits, nothing of it on the model's device, and no sum of both."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cpt.adapters.domain_store import BASE, domain_params
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.models.weights import quadratic_penalty
from cpt.optim.state import CarriedState
from tests.methods.test_contract import LEARNING, bits
from tests.support.campaign import run_few
from tests.support.devices import SecondDevice
from tests.support.killing import KilledError, Killer
from tests.support.making import DROPOUT, ORDER, Made, made

OFFLOAD = "trainer.offload=true"
MERGED = "merging.merged"
KEPT = {  # what keeps something of weights, and of what its name is
    kind: (chosen.split(), set(names.split()))
    for kind, (chosen, names) in {
        "ewc": ("method=ewc", "anchor fisher"),
        "ewc by batch": ("method=ewc method.estimator=batch method.merge=decay", "anchor fisher"),
        "l2": ("method=l2", "anchor"),
        "l2 to the base": ("method=l2 method.towards=base", "anchor"),
        "kd": ("method=kd", "teacher"),
        "ema": ("method=ema", "average"),
        "dga": ("method=dga", "base"),
        "one": ("method=one", "base"),
        "wise_ft": ("method=wise_ft", "previous"),
        "demix": ("method=demix", "bank bank.base"),
        "demix of adapters": ("method=demix method.experts=adapter", "bank bank.base"),
        "adapter": ("method=adapter method.per_domain=true", "bank bank.base"),
        "lora": ("method=lora method.per_domain=true", "bank bank.base"),
        "prompt": ("method=prompt method.tokens=3", "bank bank.base"),
        "one prompt": ("method=prompt method.tokens=3 method.per_domain=false", "bank bank.base"),
        "hat": ("method=hat", "bank bank.base"),
        "hat in adapters": ("method=hat method.form=adapter", "bank bank.base"),
        "cpt_plugin": ("method=cpt_plugin", "bank bank.base"),
        "olora": ("method=olora", "kept kept.base"),
        "progprompt": ("method=progprompt", "bank bank.base"),
        "peft": ("method=peft method.per_domain=true", "bank bank.base"),
        "sapt": ("method=sapt", "attention"),
        "lifelong_moe": ("method=lifelong_moe", "teacher shares"),
        "mas": ("method=mas", "anchor importance"),
        "si": ("method=si", "anchor importance brought"),
        "recadam": ("method=recadam", "anchor"),
        "reptile": ("method=reptile", "anchor"),
        "osf": ("method=osf", "masks.0.bases"),
        "merge": ("method=merge", f"{MERGED}.weights merging.origin"),
        "merge by fisher": (
            "method=merge method.rule=fisher method.start=previous",
            f"{MERGED}.weights {MERGED}.fishers merging.origin",
        ),
        "merge by ties": (
            "method=merge method.rule=ties method.start=base",
            f"merging.origin {MERGED}.weights {MERGED}.base {MERGED}.above {MERGED}.below "
            f"{MERGED}.counts_above {MERGED}.counts_below",
        ),
        "merge of pairs": (
            "method=merge_lora method.truncated=2",
            f"{MERGED}.weights merging.origin base",
        ),
        "branches": ("method=ncl schedule=wsd schedule.decay=0.5", "trunk"),
        "moments": ("method=ncl optim.carry=moments", "carried"),
    }.items()
}
NOTHING = ["ncl", "adapter", "lora", "inclora", "das", "migu", "derpp", "replay", "joint", "agem", "elle"]
NOTHING += ["moelora", "nlora"]
WITHOUT = ("moments", "sapt")  # of the optimizer; peft leaves a meta model's new pair on the CPU
FEW = ["ewc", "l2", "kd", "dga", "demix", "hat", "olora", "si", "osf", "merge by ties"]


def kept_of(module: nn.Module) -> dict[str, NamedTensors]:
    return {name: each for name, each in module.named_modules() if isinstance(each, NamedTensors)}


def devices(module: nn.Module) -> set[str]:
    return {each.device.type for each in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("kind", run_few(KEPT, FEW))
def test_the_model_goes_and_what_rests_stays(kind, small):
    chosen, names = KEPT[kind]
    for options in ([], [OFFLOAD]):
        module = made(small(*chosen, ORDER, *options)).module
        kept = kept_of(module)
        assert {*kept} == names
        module.to("meta")
        assert devices(module.model) == {"meta"}
        for each in kept.values():
            own = {tensor.device.type for tensor in each._buffers.values()}
            assert own <= {"cpu" if options or isinstance(each, CarriedState) else "meta"}
        assert sum(len(each._buffers) for each in kept.values()) or kind in ("moments", "osf", "sapt")
        for bank in domain_params(module).values():
            assert {each.device.type for each in bank.weights(BASE).values()} == {"meta"}


def moved(batch: Batch, device: str) -> Batch:
    return {name: each.to(device) if torch.is_tensor(each) else each for name, each in batch.items()}


def work_through(work: Made, device: str) -> None:
    """All that a method does in a domain, once each, as a run calls it."""
    module, data = work.module, work.data
    (batch,), probe = work.batches(1, text="food"), work.probe()[:1]
    batch, probe = moved(batch, device), [moved(each, device) for each in probe]
    data.enter(data.domains[1])
    module.setup_stage(data.domains[1])
    module.train()
    if module.trunk is not None:
        module.begin_from_trunk()
    module.before_domain(probe)
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1)
    sum(module.losses(batch).values()).backward()
    module.on_gradients_ready()
    module.mask(optimizer)
    module.transform_gradients(optimizer)
    module.constrain(optimizer)
    optimizer.step()
    module.correct_step(optimizer)
    module.snapshots.clear()
    module.after_update()
    module.zero_grad()
    module.eval()
    module.after_domain(probe)
    module.zero_grad()
    if module.trunk is not None:
        module.keep_trunk()
    with torch.no_grad():
        for domain in (0, 1, -1):
            module.nll(batch, domain)


@pytest.mark.parametrize("kind", run_few([kind for kind in KEPT if kind not in WITHOUT], FEW))
def test_no_sum_is_of_two_devices(kind, small_gpt2, monkeypatch):
    work = made(small_gpt2(*KEPT[kind][0], ORDER, OFFLOAD, "trainer.steps=1"))
    work.learn(0)
    held = [*work.module.parameters()]
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # meta has none
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    work.module.to("meta")  # the same parameters, as when they go to a GPU
    assert all(one is other for one, other in zip(held, work.module.parameters(), strict=True))
    with SecondDevice():
        work_through(work, "meta")
    assert devices(work.module.model) == {"meta"}
    for each in kept_of(work.module).values():
        assert {own.device.type for own in each._buffers.values()} == {"cpu"}


def drawn(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(each) for name, each in model.named_parameters()}


@pytest.mark.parametrize("weighted", [True, False])
def test_a_pull_in_pieces_has_the_bits_of_the_whole(weighted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7))
    anchors, weights = drawn(model), drawn(model) if weighted else None
    found = []
    for elsewhere in (False, True):
        model.zero_grad()
        value = quadratic_penalty(model, anchors, weights, elsewhere=elsewhere)
        (3 * value).backward()
        found.append([value.detach(), *(each.grad.clone() for each in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", run_few(KEPT, ["demix"]))
def test_what_rests_elsewhere_has_the_same_bits(kind, small, start, killing, tmp_path):
    """A killed run, too, goes on with it and without."""
    chosen = [*KEPT[kind][0], ORDER, *DROPOUT]
    start(small(*chosen), tmp_path / "plain")
    for name, first, then in (("on", [], [OFFLOAD]), ("back", [OFFLOAD], [])):
        killing(Killer(step=3, domain="food"))
        with pytest.raises(KilledError):
            start(small(*chosen, *first), tmp_path / name)
        killing(None)
        start(small(*chosen, *then), tmp_path / name)
        assert bits(tmp_path / name) == bits(tmp_path / "plain"), name


def test_every_method_is_told_of():
    names = {each.removeprefix("method=") for chosen, _ in KEPT.values() for each in chosen[:1]}
    assert {*LEARNING} - {"across", "branched", "companions", "growing"} == names | {*NOTHING}
