"""Run folders that earlier versions of cpt have written are gone on with: tests/kept/VERSION.tar.xz, one made
for each by `CPT_KEEP_RUNS=1 pytest tests/runs/test_kept.py`, and never changed.

In each: texts, a base, a run that was killed within its second domain, and a finished one of one domain."""

import json
import os
import shutil
import tarfile

import pytest

import cpt
from tests.conftest import ROOT
from tests.support.killing import KilledError, Killer

KEPT = ROOT / "tests" / "kept"
ARCHIVES = sorted(KEPT.glob("*.tar.xz"))
TINY = [
    *("model.length=16", "model.vocabulary=270", "model.config.hidden_size=16", "model.base.steps=2"),
    *("model.config.intermediate_size=16", "model.config.num_hidden_layers=1"),
    *("model.config.num_attention_heads=2", "model.base.batch_size=8"),
]
HOW = [
    *("domains=texts", "domains.root=texts", "cache_dir=cache", "logger=none", "trainer.steps=6"),
    *("trainer.batch_size=8", "trainer.eval_batch_size=16", "trainer.probe_samples=16"),
    *("trainer.checkpoint_every=2", "trainer.log_every_n_steps=2"),
]
FROM_BASE = [*HOW, "model.checkpoint=base", "model.length=16", "method=ewc"]
KILLED = [*FROM_BASE, "order=[law,food]", "mask=migu", "replay=past"]
ONE, TWO = ([*FROM_BASE, "optim.carry=moments", f"order={order}"] for order in ("[law]", "[law,food]"))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder in which all paths are relative, as they are in the archives."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def losses(folder):
    return json.loads((folder / "scores.json").read_text())["nll"]


@pytest.mark.skipif(
    "CPT_KEEP_RUNS" not in os.environ, reason="CPT_KEEP_RUNS=1 makes the archive of a version"
)
def test_a_version_keeps_its_runs(here, corpora, composed, start, killing):
    archive = KEPT / f"{cpt.__version__}.tar.xz"
    assert not archive.exists(), f"{archive} is there, and is never changed"
    for name in ("law", "food", "general"):
        shutil.copytree(corpora / name, here / "texts" / name)
    start(composed(*HOW, *TINY, "method=none", "order=[law]"), here / "first")
    (base,) = (path.parent for path in (here / "cache" / "base").rglob("model.safetensors"))
    shutil.copytree(base, here / "base")
    start(composed(*KILLED), here / "expected-killed")
    start(composed(*TWO), here / "expected-grown")
    start(composed(*ONE), here / "finished")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(composed(*KILLED), here / "killed")
    expected = {name: losses(here / f"expected-{name}") for name in ("killed", "grown")}
    (here / "expected.json").write_text(json.dumps(expected))
    KEPT.mkdir(exist_ok=True)
    with tarfile.open(archive, "w:xz") as packed:
        for name in ("texts", "base", "killed", "finished", "expected.json"):
            packed.add(here / name, name, filter=nameless)


def nameless(entry):
    """Without whose file it was."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def test_there_is_one_of_this_version_or_one_before_it():
    assert ARCHIVES


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
@pytest.mark.adopts
def test_runs_of_earlier_versions_are_gone_on_with(archive, here, composed, start):
    """Within a domain, and with one more domain; what was measured stays to the bit."""
    with tarfile.open(archive) as packed:
        packed.extractall(here, filter="data")
    expected = json.loads((here / "expected.json").read_text())
    for folder, how, name in (("killed", KILLED, "killed"), ("finished", TWO, "grown")):
        before = losses(here / folder)
        assert 0 < len(before) < 3
        start(composed(*how), here / folder)
        after = losses(here / folder)
        assert all(set(row) <= set(now) for row, now in zip(before, after, strict=False))
        for row, wanted in zip(after, expected[name], strict=True):
            assert row == pytest.approx(wanted, abs=1e-3)  # other versions of torch round otherwise
