"""What is damaged, gone or half written is never used: of the shared cache, and of a run folder."""

import json
import os
import random
import shutil

import pytest

from cpt import verify
from cpt.core import cache as shared
from cpt.trainer import loop
from tests.conftest import ROOT, SMALL
from tests.core.test_cache import flip
from tests.support.processes import ended, started

pytestmark = pytest.mark.slow

ORDER = "order=[law,food]"
FLIPS = 10


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A cache and a finished run of its own."""
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def config(small, places):
    return lambda *overrides: small(ORDER, f"cache_dir={places / 'cache'}", *overrides)


@pytest.fixture
def done(places, config, start):
    if not (places / "run" / "scores.json").exists():
        start(config(), places / "run")
    return places / "run"


@pytest.fixture
def again(places, done, tmp_path):
    """Copies of the cache and of the finished run."""
    shutil.copytree(places / "cache", tmp_path / "cache")
    return shutil.copytree(done, tmp_path / "run")


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def without_seconds(scores):
    return {key: value for key, value in scores.items() if key not in ("seconds", "phases")}


def files(folder):
    """Every file of a cache, but for its locks."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"]


def test_no_flipped_bit_of_the_cache_is_used(done, again, config, start, tmp_path, caplog):
    """A bit anywhere, then a run: the same results, and a line that names the folder."""
    draw, cache = random.Random(0), tmp_path / "cache"
    for number in range(FLIPS):
        path = draw.choice(files(cache))
        place = draw.randrange(path.stat().st_size)
        flip(path, place)
        caplog.clear()
        start(config(f"cache_dir={cache}", "trainer.steps=1"), tmp_path / f"{number}")
        told = any(f"{path.relative_to(cache).parts[1]} is damaged" in line for line in caplog.messages)
        assert verify.main([str(cache)]) == 1 - told
        if not told:  # nobody has opened it: only making the base reads what it was made of
            assert "general-train" in str(path)
            flip(path, place)
    results = [scores_of(tmp_path / f"{number}")["nll"] for number in range(FLIPS)]
    start(config("trainer.steps=1"), tmp_path / "whole")
    assert results == [scores_of(tmp_path / "whole")["nll"]] * FLIPS


def test_a_damaged_checkpoint_of_a_half_made_base_is_told(done, config, start, tmp_path, monkeypatch):
    own = config(f"cache_dir={tmp_path / 'cache'}")
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr("cpt.trainer.base_model.CHECKPOINT_EVERY", 2)
        patched.setattr("transformers.PreTrainedModel.save_pretrained", killed)
        start(own, tmp_path / "new")
    (left,) = (tmp_path / "cache" / "base").glob("*.partial/base.ckpt")
    flip(left, left.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{left} is truncated or damaged .*; delete it to pre-train"):
        start(own, tmp_path / "new")
    left.unlink()
    start(own, tmp_path / "new")
    assert scores_of(tmp_path / "new")["nll"] == scores_of(done)["nll"]


def killed(*arguments, **options):
    raise RuntimeError("killed")


def test_a_full_check_comes_before_anything_is_learned(
    again, done, config, start, tmp_path, monkeypatch, caplog
):
    """A large artifact is checked by size alone without it."""
    monkeypatch.setattr(shared, "SMALL", 0)
    own = config(f"cache_dir={tmp_path / 'cache'}", "check=full")
    learn, seen = loop.ContinualTrainer.fit, []
    harmed = [*(tmp_path / "cache").glob("packed/law-train-*/rows.arrow")]
    harmed += (tmp_path / "cache").glob("base/*/model.safetensors")
    before = [path.read_bytes() for path in harmed]
    for path in harmed:
        flip(path, path.stat().st_size // 2)
    monkeypatch.setattr(
        loop.ContinualTrainer,
        "fit",
        lambda self: (seen.extend(path.read_bytes() for path in harmed), learn(self)),
    )
    start(own, tmp_path / "new")
    assert seen == before
    told = [line for line in caplog.messages if "differs from its checksum): making it again" in line]
    assert len(told) == 2 and scores_of(tmp_path / "new")["nll"] == scores_of(done)["nll"]


LOST = {
    "model": lambda run: shutil.rmtree(run / "model"),
    "truncated weights": lambda run: os.truncate(run / "model" / "model.safetensors", 1000),
    "truncated checksums": lambda run: os.truncate(run / "checksums.json", 10),
    "checksums": lambda run: (run / "checksums.json").unlink(),
}


@pytest.mark.parametrize("what", LOST)
def test_a_finished_run_makes_again_what_it_has_lost(
    done, again, config, start, what, monkeypatch, caplog, capsys
):
    caplog.set_level("INFO")
    LOST[what](again)
    assert verify.main([str(again)]) == 1
    assert "the same command makes it again\n" in capsys.readouterr().out
    with monkeypatch.context() as patched:
        patched.setattr(loop.ContinualTrainer, "fit_stage", None)
        start(config(), again)
    assert "made again, without learning" in caplog.text
    assert without_seconds(scores_of(again)) == without_seconds(scores_of(done))
    for name in ("model/model.safetensors", "model/tokenizer.json"):
        assert (again / name).read_bytes() == (done / name).read_bytes()
    assert (again / "report.html").stat().st_size > 1000 and (again / "report.md").is_file()
    assert verify.main([str(again)]) == 0
    caplog.clear()
    start(config(), again)
    assert "is finished already" in caplog.text


def test_a_full_check_reads_the_model_through(done, again, config, start, caplog):
    caplog.set_level("INFO")
    flip(again / "model" / "model.safetensors")
    start(config(), again)
    assert "is finished already" in caplog.text
    start(config("check=full"), again)
    assert "model/model.safetensors differs from its checksum: made again" in caplog.text
    assert (again / "model/model.safetensors").read_bytes() == (done / "model/model.safetensors").read_bytes()


def test_a_model_whose_last_stage_is_gone_cannot_be_made_again(again, config, start):
    shutil.rmtree(again / "model")
    (again / "stages" / "002.pt").unlink()
    with pytest.raises(ValueError, match=rf"002.pt is gone; delete {again} to start again"):
        start(config(), again)


DOCUMENTS = {
    "gone": lambda path: path.unlink(),
    "truncated": lambda path: os.truncate(path, 100),
    "a bit": lambda path: flip(path, path.stat().st_size // 2),
}


@pytest.mark.parametrize("how", DOCUMENTS)
def test_documents_are_looked_at_when_a_run_goes_on(again, config, start, how, monkeypatch, capsys):
    scores = scores_of(again)
    scores["run"]["finished"] = False
    (again / "scores.json").write_text(json.dumps(scores))
    DOCUMENTS[how](again / "documents" / "001.npz")
    monkeypatch.setattr(loop.ContinualTrainer, "fit", lambda self: pytest.fail("learned"))
    message = r"documents/001.npz is .*; bring it back from a copy, or delete .* to learn again"
    with pytest.raises(ValueError, match=message):
        start(config(), again)
    assert verify.main([str(again)]) == 1
    assert "001.npz is " in capsys.readouterr().out


def test_what_a_dead_process_left_in_a_run_folder_is_removed(again, config, start):
    left = [".scores.json.123.tmp", "stages/002.pt.partial", "checkpoints/002-food.ckpt.partial"]
    left += ["documents/002.npz.partial", "identity.json.partial", "endtasks/002-food/law-0.parquet.partial"]
    for name in left:
        (again / name).parent.mkdir(parents=True, exist_ok=True)
        (again / name).write_text("half")
    (again / "model" / "parts.partial").write_text("the user's own")
    start(config(), again)
    assert [name for name in left if (again / name).exists()] == []
    assert (again / "model" / "parts.partial").exists()


def test_verify_names_what_is_damaged_and_touches_nothing_else(again, tmp_path, capsys):
    (tmp_path / "data" / "corpora" / "law").mkdir(parents=True)  # texts are no cache
    (tmp_path / "data" / "endtasks" / "law").mkdir(parents=True)
    assert verify.main([str(tmp_path)]) == 0
    assert "folders: 0 damaged" in capsys.readouterr().out
    harmed = [*(tmp_path / "cache").glob("base/*/model.safetensors"), again / "stages" / "002.pt"]
    harmed += [*(tmp_path / "cache").glob("corpora/food-*/documents.arrow")]
    for path in harmed:
        flip(path, path.stat().st_size // 2)
    assert verify.main([str(tmp_path), str(again)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith(": 3 damaged")
    assert [any(path.name in line for line in lines) for path in harmed] == [True] * 3
    assert len(lines) == 3 and all("again" in line for line in lines)
    assert verify.main([str(tmp_path / "nowhere")]) == 1
    assert "no folder" in capsys.readouterr().out


def test_verify_misses_the_stages_that_a_finished_run_keeps(again, capsys):
    path = again / "stages" / "002.pt"
    stage = path.read_bytes()
    path.unlink()
    assert verify.main([str(again)]) == 1
    [line, _] = capsys.readouterr().out.splitlines()
    assert f"{path} is missing; bring it back" in line
    config = again / "config.yaml"
    config.write_text(config.read_text().replace("keep_stages: false", "keep_stages: true"))
    path.write_bytes(stage)
    assert verify.main([str(again)]) == 1
    assert "001.pt is missing" in capsys.readouterr().out


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from cpt.core import cache

cache.SMALL = 0
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


def test_two_processes_read_what_is_made_again(again, corpora, tmp_path):
    script = tmp_path / "two.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    (path,) = (tmp_path / "cache").glob("packed/food-train-*/rows.arrow")
    whole = path.read_bytes()
    flip(path, path.stat().st_size // 2)
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={tmp_path / 'cache'}", "check=full"]
    given = [*places, *SMALL, ORDER, f"hydra.run.dir={tmp_path / 'two'}", "strategy=ddp", "trainer.devices=2"]
    given += ["trainer.accelerator=cpu"]
    log = tmp_path / "log"
    assert ended(started(script, *given, cwd=tmp_path, log=log, twin=True), seconds=100) == 0
    assert path.read_bytes() == whole
    assert "differs from its checksum): making it again" in log.read_text()
