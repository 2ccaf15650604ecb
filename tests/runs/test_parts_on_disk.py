"""Parts that rest on disk: the same bits as in memory, and not in memory."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from cpt.adapters.domain_store import DomainParams, map_stored
from cpt.trainer import loop
from tests.conftest import ROOT
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer

METHODS = [
    "demix",
    "demix method.start=previous routing@method.routing=posterior",
    "demix method.experts=adapter",
    "adapter method.per_domain=true",
    "lora method.per_domain=true",
    "prompt method.tokens=3",
    "prompt method.tokens=3 method.per_domain=false",
    "hat",
    "hat method.form=adapter",
    "cpt_plugin",
    "olora",
    "peft method.per_domain=true",
]
WITHOUT = ["ncl", "adapter", "lora", "inclora", "ewc"]
OPTIONS = ["trainer.steps=2", "trainer.checkpoint_every=1", "keep_stages=true"]


@pytest.fixture(scope="module")
def three(corpora):
    return sorted(path.name for path in corpora.iterdir() if path.name != "general")[:3]


@pytest.fixture
def learned(small, start, three):
    """What a run leaves: its matrix, what it stored, and the state of each stage."""

    def run(folder: Path, method: str, keep: str) -> tuple[dict, list[dict]]:
        options = [*f"method={method}".split(), *OPTIONS, f"order=[{','.join(three)}]"]
        start(small(*options, f"parts.keep={keep}"), folder)
        scores = json.loads((folder / "scores.json").read_text())
        states = [torch.load(path, weights_only=True) for path in sorted((folder / "stages").glob("*.pt"))]
        return {name: scores[name] for name in ("rows", "nll", "metrics", "stored", "parts")}, states

    return run


def mapped(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor lie in a file of a stage."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return "/stages/" in line
    return False


def same(one: list[dict], other: list[dict]) -> bool:
    return len(one) == len(other) == 3 and all(
        list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(METHODS, ["demix", "hat", "olora"]))
def test_what_rests_on_disk_is_what_rests_in_memory(learned, tmp_path, monkeypatch, method):
    rested, rest = [], loop.map_stored

    def watched(module, path):
        rest(module, path)
        for bank in (each for each in module.modules() if isinstance(each, DomainParams)):
            rested.append([mapped(each) for each in bank._buffers.values()])

    scores, states = learned(tmp_path / "memory", method, "memory")
    monkeypatch.setattr(loop, "map_stored", watched)
    found, stages = learned(tmp_path / "disk", method, "disk")
    assert found == scores
    assert same(stages, states)
    assert len(rested) == 3 and all(each and all(each) for each in rested)


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(["demix", "olora"], ["demix"]))
def test_a_run_that_is_killed_goes_on_with_what_rests(learned, killing, three, tmp_path, method):
    scores, states = learned(tmp_path / "whole", method, "disk")
    killing(Killer(step=1, domain=three[2]))
    with pytest.raises(KilledError):
        learned(tmp_path / "killed", method, "disk")
    killing(None)
    found, stages = learned(tmp_path / "killed", method, "memory")  # and it may rest elsewhere then
    assert found == scores and same(stages, states)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1], ids=["from its stage", "from its checkpoint"])
def test_a_run_that_is_begun_again_holds_nothing_that_rests(
    learned, killing, three, tmp_path, monkeypatch, step
):
    class Held(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            held.append([mapped(each) for each in module.bank._buffers.values()])

    class Dies(Killer):
        def on_train_start(self, trainer, *args):
            self.on_train_batch_end(trainer)

    class Reading(DomainParams):
        def room(self, name, stored):
            rooms.append(name)
            return super().room(name, stored)

    held, rooms = [], []
    killing(Dies(step=step, domain=three[2]))
    with pytest.raises(KilledError):
        learned(tmp_path, "demix", "disk")
    killing(Held())
    monkeypatch.setattr("cpt.methods.demix.DomainParams", Reading)
    learned(tmp_path, "demix", "disk")
    assert len(held) == 2 - step and all(each and all(each) for each in held)
    assert bool(rooms) == (step > 0)  # a checkpoint holds all parts; a stage is not read


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(WITHOUT, ["ewc"]))
def test_a_method_without_such_parts_says_so(learned, tmp_path, caplog, method):
    caplog.set_level(logging.INFO)
    learned(tmp_path, method, "disk")
    lines = [each.getMessage() for each in caplog.records if "parts.keep" in each.getMessage()]
    assert lines == [f"No effect of parts.keep=disk: {method} has no modules per domain"]


def test_every_method_is_told_of():
    names = {method.split()[0] for method in (*METHODS, *WITHOUT)}
    with_parts = {"demix", "adapter", "lora", "prompt", "hat", "cpt_plugin", "olora", "peft"}
    found = {
        path.stem
        for path in (ROOT / "cpt" / "methods").glob("*.py")
        if path.stem != "base" and re.search(r"DomainParams\(|use_domain_params\(", path.read_text())
    }
    assert found == with_parts <= names


@pytest.fixture
def bank(tmp_path):
    """A module with a bank of three parts, one of which is not in the file yet."""
    torch.manual_seed(0)
    module, own = nn.Module(), nn.Linear(3, 4)
    module.bank = DomainParams(own, ["weight", "bias"])
    for domain in range(2):
        own.weight.data.normal_()
        module.bank.keep(own, domain)
    place = tmp_path / "stages"
    place.mkdir()
    torch.save(module.state_dict(), place / "002.pt")
    own.weight.data.normal_()
    module.bank.keep(own, 2)
    return module, own, place / "002.pt"


def test_what_the_file_lacks_stays_in_memory(bank):
    module, own, path = bank
    before = {domain: {k: v.clone() for k, v in module.bank.weights(domain).items()} for domain in range(3)}
    map_stored(module, path)
    for domain in range(3):
        found = module.bank.weights(domain)
        assert list(found) == list(before[domain])
        assert all(torch.equal(found[name], values) for name, values in before[domain].items())
        assert [mapped(values) for values in found.values()] == [domain < 2] * 2


def test_what_rests_stays_where_it_is_and_is_read_to_where_it_is_used(bank):
    module, _, path = bank
    map_stored(module, path)
    order = list(module.bank._buffers)
    module.to("meta")
    assert list(module.bank._buffers) == order
    kept = {name: each.device.type for name, each in module.bank._buffers.items()}
    assert kept == {name: "meta" if name.startswith("2:") else "cpu" for name in order}
    assert {each.device.type for each in module.bank.weights(0).values()} == {"meta"}


def test_a_part_that_is_kept_anew_does_not_change_the_file(bank):
    module, own, path = bank
    map_stored(module, path)
    before = path.read_bytes()
    own.weight.data.normal_()
    module.bank.keep(own, 0)
    assert torch.equal(module.bank.weights(0)["weight"], own.weight)
    assert path.read_bytes() == before
    module.load_state_dict(torch.load(path, weights_only=True))
    assert not module.bank.mapped and not torch.equal(module.bank.weights(0)["weight"], own.weight)
