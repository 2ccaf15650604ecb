"""Parts that rest on disk: the same bits as in memory, and not in memory."""

from pathlib import Path

import pytest
import torch

from cpt.adapters.domain_store import DomainParams
from cpt.trainer import loop
from tests.runs.reading import killed, same_state, state_of, told_by
from tests.support.campaign import run_few

METHODS = [
    "demix",
    "demix method.start=previous routing@method.routing=posterior",
    "adapter method.per_domain=true",
    "prompt method.num_virtual_tokens=3 method.per_domain=false",
    "hat",
    "cpt_plugin",
    "olora",
]
OPTIONS = ["order=[food,law,space]", "trainer.steps=2", "trainer.checkpoint_every=1", "save_all_stages=true"]


def assert_same(one: Path, other: Path) -> None:
    scores, expected = told_by(one), told_by(other)
    assert all(scores[name] == expected[name] for name in ("rows", "nll", "metrics", "stored", "modules"))
    assert all(same_state(state_of(one, stage), state_of(other, stage)) for stage in range(3))


def mapped(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor lie in a file of a stage."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return "/stages/" in line
    return False


@pytest.mark.slow
@pytest.mark.parametrize("method", run_few(METHODS, ["demix"]))
def test_what_rests_on_disk_is_what_rests_in_memory(start, small, killing, tmp_path, monkeypatch, method):
    rested, rest = [], loop.map_stored
    options = [*f"method={method}".split(), *OPTIONS]

    def watched(module, path):
        rest(module, path)
        for bank in (each for each in module.modules() if isinstance(each, DomainParams)):
            rested.append([mapped(each) for each in bank._buffers.values()])

    start(small(*options, "modules.storage=memory"), tmp_path / "memory")
    monkeypatch.setattr(loop, "map_stored", watched)
    on_disk = small(*options, "modules.storage=disk")
    killed(start, killing, on_disk, tmp_path / "disk", step=1, domain="space")
    start(on_disk, tmp_path / "disk")
    assert_same(tmp_path / "disk", tmp_path / "memory")
    assert len(rested) >= 3 and all(each and all(each) for each in rested)
    killed(start, killing, on_disk, tmp_path / "killed", step=1, domain="space")
    start(small(*options, "modules.storage=memory"), tmp_path / "killed")
    assert_same(tmp_path / "killed", tmp_path / "memory")
