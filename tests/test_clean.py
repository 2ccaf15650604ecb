"""`python -m cpt.clean`: what it shows, what it removes, and what a run can do after it."""

import doctest
import os
import shutil
import time

import pytest
from lightning.pytorch.callbacks import Callback

from cpt import clean, verify
from cpt.core.cache import locked
from cpt.core.cache_use import USES, end_uses, record_use
from cpt.reporting.formats import format_bytes
from tests.support.example_runs import save_scores


def permissions(path):
    return f"{path.stat().st_mode & 0o7777:04o}"


@pytest.fixture
def run(small, start, tmp_path):
    cfg = small("order=[law]", "trainer.steps=1", f"cache_dir={tmp_path / 'cache'}")
    start(cfg, tmp_path / "outputs" / "run")
    return cfg


def test_it_frees_what_no_run_has_used_and_a_run_makes_it_again(run, start, tmp_path, capsys):
    cache = tmp_path / "cache"
    artifacts = [path.parent for path in cache.rglob("checksums.json")]
    assert len(artifacts) > 5 and all(permissions(path) == "0755" for path in artifacts)
    assert clean.main([str(cache)]) == 0 and capsys.readouterr().out == "Nothing to remove\n"

    partial = cache / "packed" / "a-train-0123456789abcdef.partial"
    partial.mkdir()
    days_ago = time.time() - 40 * 86400
    for path in [partial, *artifacts]:
        os.utime(path, (days_ago, days_ago))
    assert clean.main([str(cache)]) == 0
    shown_lines = capsys.readouterr().out.splitlines()
    total_size = sum(map(clean.count_freed_bytes, [partial, *artifacts]))
    summary = f"{len(artifacts) + 1} entries, {format_bytes(total_size)}; add --yes to remove"
    assert shown_lines[-1] == summary and partial.exists()

    locked_artifact = artifacts[0]
    with locked(locked_artifact):
        assert clean.main([str(cache), "--yes"]) == 0
    assert "in use" in capsys.readouterr().out and not partial.exists()
    assert [path for path in artifacts if path.exists()] == [locked_artifact]

    start(run, tmp_path / "outputs" / "again")
    assert clean.main([str(cache), "--days", "30"]) == 0  # the one that was old has been used
    assert capsys.readouterr().out == "Nothing to remove\n"
    assert doctest.testmod(clean).failed == 0


def test_a_finished_run_without_its_stages_stays_finished(run, start, tmp_path, capsys):
    folder = tmp_path / "outputs" / "run"
    scores = (folder / "scores.json").read_bytes()
    assert clean.main([str(folder), "--yes"]) == 0 and any((folder / "stages").iterdir())

    size = (folder / "stages" / "001.pt").stat().st_size  # without the weights, which the model keeps
    weights = folder / "model" / "model.safetensors"
    assert clean.count_freed_bytes(folder / "stages") == size
    assert clean.count_freed_bytes(folder) > weights.stat().st_size > 2 * size
    assert clean.main([str(tmp_path / "outputs"), "--stages", "--yes"]) == 0
    assert "cpt.withdraw gives back those that were added since" in capsys.readouterr().out
    assert not (folder / "stages").exists() and weights.exists()
    assert verify.main([str(folder)]) == 0
    start(run, folder)
    assert (folder / "scores.json").read_bytes() == scores
    assert clean.main([str(tmp_path / "absent")]) == 1


def test_rows_of_an_older_format_may_go_at_any_age(tmp_path, capsys):
    for name, file in (("law-train", "rows.arrow"), ("law-test", "begins.uint32")):
        folder = tmp_path / "packed" / f"{name}-0123456789abcdef"
        folder.mkdir(parents=True)
        (folder / file).write_bytes(b"1234")
    assert clean.main([str(tmp_path), "--yes"]) == 0
    assert "law-train-0123456789abcdef: of an older format" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "packed").glob("*f")] == ["law-test-0123456789abcdef"]


def test_what_could_not_be_removed_is_not_called_removed(tmp_path, monkeypatch, capsys):
    """As of a folder of another user, of which `discard` leaves what it may not remove."""
    cached = tmp_path / "packed" / "law-train-0123456789abcdef"
    save_scores(tmp_path / "run")
    for folder, file in ((cached, "rows.arrow"), (tmp_path / "run" / "stages", "003.pt")):
        folder.mkdir(parents=True)
        (folder / file).write_bytes(b"1234")
    monkeypatch.setattr(clean, "discard", lambda path: None)
    assert clean.main([str(tmp_path), "--stages", "--yes"]) == 1
    *lines, _ = capsys.readouterr().out.splitlines()
    assert ["; not removed (files are left in " in line for line in lines] == [True, True]


class AtStep(Callback):
    """Calls a function once, after the first step on a domain."""

    def __init__(self, function, domain):
        self.function, self.domain = function, domain

    def on_train_batch_end(self, trainer, *args):
        if self.function is not None and trainer.datamodule.domain.name == self.domain:
            function = self.function
            self.function = None
            function()


def test_it_leaves_all_that_a_run_uses(small, start, tmp_path, killing, capsys):
    cache = tmp_path / "cache"
    printed = []

    def clean_all():
        assert clean.main([str(cache), "--days", "0"]) == 0
        assert clean.main([str(cache), "--days", "0", "--yes"]) == 0
        printed.append(capsys.readouterr().out)

    killing(AtStep(clean_all, "law"))
    start(small("order=[law]", "trainer.steps=2", f"cache_dir={cache}"), tmp_path / "outputs" / "run")
    artifacts = [path.parent for path in cache.rglob("checksums.json")]
    assert len(artifacts) > 5 and not list(cache.rglob("*.removed.partial"))

    # Each artifact is listed twice: in the list alone and in that of the removal.
    lines = [line for line in printed[0].splitlines() if f"in use by process {os.getpid()} on " in line]
    assert len(lines) == 2 * len(artifacts)

    # The run has ended: its records of use are gone, and everything may be removed.
    assert not list((cache / USES).iterdir())
    assert clean.main([str(cache), "--days", "0", "--yes"]) == 0
    assert not [path for path in artifacts if path.exists()]


def test_a_base_removed_during_a_run_is_rebuilt_with_the_same_result(small, start, tmp_path, killing, caplog):
    cfg = small("order=[law]", "trainer.steps=2", f"cache_dir={tmp_path / 'cache'}")
    base = tmp_path / "cache" / "base"
    killing(AtStep(lambda: [shutil.rmtree(path.parent) for path in base.glob("*/config.json")], "law"))
    disturbed = start(cfg, tmp_path / "outputs" / "disturbed")
    assert [line for line in caplog.messages if "which was removed while the run used it" in line]

    killing(None)
    assert start(cfg, tmp_path / "outputs" / "run") == disturbed
    models = [tmp_path / "outputs" / name / "model/model.safetensors" for name in ("run", "disturbed")]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_an_artifact_whose_use_is_recorded_while_it_is_removed_stays(tmp_path, monkeypatch):
    """The use comes between the look at the list and the removal."""
    artifact = tmp_path / "base" / "tiny-0123456789abcdef"
    artifact.mkdir(parents=True)
    (artifact / "weights").write_text("1")
    replace = os.replace

    def use_and_replace(*paths):
        record_use(artifact)
        replace(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(clean.os, "replace", use_and_replace)
        assert clean.remove(artifact).startswith("in use by process")
    assert (artifact / "weights").read_text() == "1"
    end_uses()
    assert clean.remove(artifact) == "removed" and not artifact.exists()
