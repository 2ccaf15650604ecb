"""What rests in the host's memory: the same bits, nothing of it on the model's device, and no sum of both."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cpt.adapters.domain_store import BASE, domain_params
from cpt.core.tensors import NamedTensors
from cpt.models.weights import quadratic_penalty
from tests.methods.test_contract import LEARNING, bits
from tests.support.campaign import run_few
from tests.support.devices import SecondDevice
from tests.support.killing import KilledError, Killer
from tests.support.making import DROPOUT, ORDER, Made, made

OFFLOAD = "trainer.offload=true"
KEPT = [  # methods with options that keep something of weights
    *(
        "ewc",
        "ewc estimator=batch merge=decay",
        "l2",
        "l2 towards=base",
        "kd",
        "ema",
        "dga",
        "one",
        "wise_ft",
    ),
    *("demix", "demix experts=adapter", "adapter per_domain=true", "lora per_domain=true", "prompt tokens=3"),
    *("prompt tokens=3 per_domain=false", "hat", "hat form=adapter", "cpt_plugin", "olora", "progprompt"),
    *(
        "wise_ft",
        "peft per_domain=true",
        "sapt",
        "lifelong_moe",
        "mas",
        "si",
        "recadam",
        "reptile",
        "osf",
        "merge",
    ),
    *("merge rule=fisher start=previous", "merge rule=ties start=base", "merge_lora truncated=2"),
    *("ncl schedule=wsd schedule.decay=0.5", "ncl optim.carry=moments"),
]
NOTHING = ["ncl", "adapter", "lora", "inclora", "das", "migu", "derpp", "replay", "joint", "agem", "elle"]
NOTHING += ["moelora", "nlora"]
WITHOUT = ("ncl optim.carry=moments", "sapt")  # of the optimizer; peft leaves a new pair on the CPU
FEW = ["ewc", "kd", "demix", "hat", "olora", "si", "osf", "merge rule=ties start=base"]


def options_of(kind: str) -> list[str]:
    method, *options = kind.split()
    plain = [each if "." in each or method == "ncl" else f"method.{each}" for each in options]
    return [f"method={method}", *plain, ORDER]


def devices(tensors) -> set[str]:
    return {each.device.type for each in tensors}


def work_through(work: Made, device: str) -> None:
    """All that a method does in a domain, once each, as a run calls it."""
    module, data = work.module, work.data
    batch, probe = (
        {name: each.to(device) if torch.is_tensor(each) else each for name, each in batch.items()}
        for batch in (work.batches(1, text="food")[0], work.probe()[0])
    )
    data.enter(data.domains[1])
    module.setup_stage(data.domains[1])
    module.train()
    if module.trunk is not None:
        module.begin_from_trunk()
    module.before_domain([probe])
    optimizer = torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.1)
    sum(module.losses(batch).values()).backward()
    module.on_gradients_ready()
    for change in (module.mask, module.transform_gradients, module.constrain):
        change(optimizer)
    optimizer.step()
    for snapshot in module.snapshots:
        snapshot.apply(optimizer)
    module.snapshots.clear()
    module.after_update()
    module.zero_grad()
    module.eval()
    module.after_domain([probe])
    module.zero_grad()
    if module.trunk is not None:
        module.keep_trunk()
    with torch.no_grad():
        for domain in (0, 1, -1):
            module.nll(batch, domain)


@pytest.mark.parametrize("kind", run_few([kind for kind in KEPT if kind not in WITHOUT], FEW))
def test_no_sum_is_of_two_devices(kind, small_gpt2, monkeypatch):
    work = made(small_gpt2(*options_of(kind), OFFLOAD, "trainer.steps=1"))
    work.learn(0)
    held = [*work.module.parameters()]
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: nullcontext())  # meta has none
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    work.module.to("meta")  # the same parameters, as when they go to a GPU
    assert all(one is other for one, other in zip(held, work.module.parameters(), strict=True))
    with SecondDevice():
        work_through(work, "meta")
    model = work.module.model
    assert devices([*model.parameters(), *model.buffers()]) == {"meta"}
    kept = [each for each in work.module.modules() if isinstance(each, NamedTensors)]
    assert kept and all(devices(each._buffers.values()) == {"cpu"} for each in kept)
    for bank in domain_params(work.module).values():
        assert devices(bank.weights(BASE).values()) == {"meta"}


@pytest.mark.parametrize("weighted", [True, False])
def test_a_pull_in_pieces_has_the_bits_of_the_whole(weighted):
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 7)), []
    anchors, weights = ({n: torch.randn_like(p) for n, p in model.named_parameters()} for _ in range(2))
    for elsewhere in (False, True):
        model.zero_grad()
        value = quadratic_penalty(model, anchors, weights if weighted else None, elsewhere=elsewhere)
        (3 * value).backward()
        found.append([value.detach(), *(each.grad.clone() for each in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", run_few(KEPT, ["demix"]))
def test_what_rests_elsewhere_has_the_same_bits(kind, small, start, killing, tmp_path):
    chosen = [*options_of(kind), *DROPOUT]
    start(small(*chosen), tmp_path / "plain")
    for name, first, then in (("on", [], [OFFLOAD]), ("back", [OFFLOAD], [])):
        killing(Killer(step=3, domain="food"))
        with pytest.raises(KilledError):
            start(small(*chosen, *first), tmp_path / name)
        killing(None)
        start(small(*chosen, *then), tmp_path / name)
        assert bits(tmp_path / name) == bits(tmp_path / "plain"), name


def test_every_method_is_told_of():
    names = {kind.split()[0] for kind in KEPT}
    assert {*LEARNING} - {"across", "branched", "companions", "growing"} == names | {*NOTHING}
