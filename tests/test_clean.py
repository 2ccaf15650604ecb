"""`python -m cpt.clean`: what it shows, what it removes, and what a run can do after it."""

import os
import time

import pytest

from cpt import clean, verify
from cpt.core.cache import locked


@pytest.fixture
def run(small, start, tmp_path):
    cfg = small("order=[law]", "trainer.steps=1", f"cache_dir={tmp_path / 'cache'}")
    start(cfg, tmp_path / "outputs" / "run")
    return cfg


def test_it_frees_what_no_run_has_used_and_a_run_makes_it_again(run, start, tmp_path, capsys):
    cache, old = tmp_path / "cache", time.time() - 40 * 86400
    artifacts = [path.parent for path in cache.rglob("checksums.json")]
    assert len(artifacts) > 5 and all(path.stat().st_mode & 0o077 == 0 for path in artifacts)
    assert clean.main([str(cache)]) == 0 and capsys.readouterr().out.startswith("0 entries")
    left, held = cache / "packed" / "a-train-0123456789abcdef.partial", artifacts[0]
    left.mkdir()
    for path in [left, *artifacts]:
        os.utime(path, (old, old))
    assert clean.main([str(cache)]) == 0
    assert f"{len(artifacts) + 1} entries; add --yes" in capsys.readouterr().out and left.exists()
    with locked(held):
        assert clean.main([str(cache), "--yes"]) == 0
    assert "in use" in capsys.readouterr().out and not left.exists()
    assert [path for path in artifacts if path.exists()] == [held]
    start(run, tmp_path / "outputs" / "again")
    assert clean.main([str(cache), "--days", "30"]) == 0  # the one that was old has been used
    assert capsys.readouterr().out.startswith("0 entries")


def test_a_finished_run_without_its_stages_stays_finished(run, start, tmp_path):
    folder = tmp_path / "outputs" / "run"
    scores = (folder / "scores.json").read_bytes()
    assert clean.main([str(folder), "--yes"]) == 0 and any((folder / "stages").iterdir())
    size = (folder / "stages" / "001.pt").stat().st_size  # without the weights, which the model keeps
    assert clean.freed_bytes(folder / "stages") == size
    assert clean.freed_bytes(folder) > (folder / "model" / "model.safetensors").stat().st_size > 2 * size
    assert clean.main([str(tmp_path / "outputs"), "--stages", "--yes"]) == 0
    assert not (folder / "stages").exists() and (folder / "model" / "model.safetensors").exists()
    assert verify.main([str(folder)]) == 0
    start(run, folder)
    assert (folder / "scores.json").read_bytes() == scores
    assert clean.main([str(tmp_path / "absent")]) == 1
