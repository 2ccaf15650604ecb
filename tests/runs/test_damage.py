"""What is damaged, gone or half written is never used: of a run folder, of the shared cache, of scores that a
report reads."""

import copy
import json
import os
import random
import shutil

import pytest

from cpt import report, verify
from cpt.core import cache as shared
from cpt.evaluation.scores import Scores
from cpt.reporting import figures, run_page
from cpt.trainer import loop
from tests.conftest import ROOT, SMALL
from tests.runs.reading import assert_same_bits, killed, times, told_by
from tests.support.comparing import endtasks, made, saved
from tests.support.processes import ended, started

ORDER = "order=[law,food]"
FLIPS = 5


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A cache, a finished run and one that was killed within its second domain."""
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def config(small, places):
    return lambda *overrides: small(ORDER, f"cache_dir={places / 'cache'}", *overrides)


@pytest.fixture
def done(places, config, start):
    if not (places / "run").exists():
        start(config(), places / "run")
    return places / "run"


@pytest.fixture
def again(places, done, tmp_path):
    """Copies of the cache and of the finished run."""
    shutil.copytree(places / "cache", tmp_path / "cache")
    return shutil.copytree(done, tmp_path / "run")


@pytest.fixture
def begun(places, done, config, start, killing, tmp_path):
    """A copy of the one that was killed."""
    if not (places / "begun").exists():
        killed(start, killing, config(), places / "begun", step=3, domain="food")
    return shutil.copytree(places / "begun", tmp_path / "begun")


def flip(path, place=None):
    """Changes one bit, in the middle if nothing else is said."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


HARMS = {"gone": os.unlink, "cut off": cut, "a bit": flip}
KEPT = ["checksums.json", "model/model.safetensors", "documents/001.npz", "stages/002.pt"]
GOES_ON = ["scores.json", "config.yaml", "identity.json", "documents/001.npz", "stages/001.pt"]
GOES_ON.append("checkpoints/002-food.ckpt")
ROWS = [("finished", name, how) for name in KEPT for how in HARMS]
ROWS += [("begun", name, how) for name in GOES_ON for how in HARMS]
ROWS.remove(("begun", "scores.json", "a bit"))  # which has no checksum


UNREAD = {"stages/002.pt", "documents/001.npz"}  # of a finished run, but by cpt.verify
UNSEEN = {("gone", name) for name in ("scores.json", "stages/001.pt", "checkpoints/002-food.ckpt")}


@pytest.mark.slow
@pytest.mark.parametrize(("of", "name", "how"), ROWS, ids=map(" ".join, ROWS))
def test_a_damaged_file_of_a_run_is_made_again_or_refused(
    of, name, how, done, request, config, start, monkeypatch
):
    """A finished run learns nothing; one that goes on ends with the same bits. A refusal is one line that
    names the file's folder, and leaves all files."""
    run = request.getfixturevalue("again" if of == "finished" else "begun")
    HARMS[how](run / name)
    binary = name not in ("config.yaml", "identity.json")
    assert verify.main([str(run)]) == 1 or not binary or (how, name) in UNSEEN
    if of == "finished":
        monkeypatch.setattr(loop.ContinualTrainer, "fit_stage", None)
    before = {path: time for path, time in times(run).items() if "identity" not in path}
    try:
        start(config("check=full"), run)
    except ValueError as error:
        assert "\n" not in str(error) and str((run / name).parent) in str(error)
        assert before.items() <= times(run).items()
        return
    assert told_by(run)["nll"] == told_by(done)["nll"] and told_by(run)["metrics"] == told_by(done)["metrics"]
    if of == "begun" or name not in UNREAD:
        assert_same_bits(run, done)
        assert verify.main([str(run)]) == 0
    for each in ("model/model.safetensors", "model/tokenizer.json"):
        assert (run / each).read_bytes() == (done / each).read_bytes()


def test_a_fast_check_takes_the_model_by_its_size(again, done, config, start, caplog, capsys):
    caplog.set_level("INFO")
    flip(again / "model" / "model.safetensors")
    start(config(), again)
    assert "is finished already" in caplog.text
    shutil.rmtree(again / "model")
    start(config(), again)
    assert "made again, without learning" in caplog.text
    stage = again / "stages" / "002.pt"
    whole, kept = stage.read_bytes(), (again / "config.yaml").read_text()
    stage.unlink()
    assert verify.main([str(again)]) == 1 and "002.pt is missing" in capsys.readouterr().out
    shutil.rmtree(again / "model")
    with pytest.raises(ValueError, match=rf"002.pt is gone; delete {again} to start again"):
        start(config(), again)
    stage.write_bytes(whole)
    start(config(), again)
    (again / "config.yaml").write_text(kept.replace("keep_stages: false", "keep_stages: true"))
    assert verify.main([str(again)]) == 1 and "001.pt is missing" in capsys.readouterr().out


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
    assert verify.main([str(tmp_path)]) == 0 and "folders: 0 damaged" in capsys.readouterr().out
    harmed = [*(tmp_path / "cache").glob("base/*/model.safetensors"), again / "stages" / "002.pt"]
    harmed += [*(tmp_path / "cache").glob("corpora/food-*/documents.arrow")]
    for path in harmed:
        flip(path)
    assert verify.main([str(tmp_path), str(again)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith(": 3 damaged") and len(lines) == 3
    assert all(any(path.name in line and "again" in line for line in lines) for path in harmed)
    assert verify.main([str(tmp_path / "nowhere")]) == 1 and "no folder" in capsys.readouterr().out


# The cache


def files(folder):
    """Every file of a cache, but for its locks."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".lock"]


def test_no_flipped_bit_of_the_cache_is_used(again, config, start, tmp_path, caplog):
    """A bit anywhere, then a run: the same results, and a line that names the folder."""
    draw, cache = random.Random(0), tmp_path / "cache"
    start(config("trainer.steps=1"), tmp_path / "whole")
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
        assert told_by(tmp_path / f"{number}")["nll"] == told_by(tmp_path / "whole")["nll"]


def broken(*given, **how):
    raise RuntimeError("killed")


def test_a_damaged_checkpoint_of_a_half_made_base_is_told(done, config, start, tmp_path, monkeypatch):
    own = config(f"cache_dir={tmp_path / 'cache'}")
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr("cpt.trainer.base_model.CHECKPOINT_EVERY", 2)
        patched.setattr("transformers.PreTrainedModel.save_pretrained", broken)
        start(own, tmp_path / "new")
    (left,) = (tmp_path / "cache" / "base").glob("*.partial/base.ckpt")
    whole = left.read_bytes()
    flip(left)
    with pytest.raises(ValueError, match=rf"{left} is truncated or damaged"):
        start(own, tmp_path / "new")
    left.write_bytes(whole)
    start(own, tmp_path / "new")
    assert told_by(tmp_path / "new")["nll"] == told_by(done)["nll"]


def test_a_full_check_reads_also_large_artifacts(again, done, config, start, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shared, "SMALL", 0)
    harmed = [*(tmp_path / "cache").glob("packed/law-train-*/rows.arrow")]
    harmed += (tmp_path / "cache").glob("base/*/model.safetensors")
    before = [path.read_bytes() for path in harmed]
    for path in harmed:
        flip(path)
    start(config(f"cache_dir={tmp_path / 'cache'}", "check=full"), tmp_path / "new")
    assert [path.read_bytes() for path in harmed] == before
    assert told_by(tmp_path / "new")["nll"] == told_by(done)["nll"]
    assert caplog.text.count("differs from its checksum): making it again") == 2


SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from cpt.core import cache
cache.SMALL = 0
sys.argv[0] = __file__
from cpt.__main__ import main
main()
"""


@pytest.mark.campaign
def test_two_processes_read_what_is_made_again(again, corpora, tmp_path):
    script, log = tmp_path / "two.py", tmp_path / "log"
    script.write_text(SCRIPT)
    (path,) = (tmp_path / "cache").glob("packed/food-train-*/rows.arrow")
    whole = path.read_bytes()
    flip(path)
    given = ["domains=texts", f"domains.root={corpora}", f"cache_dir={tmp_path / 'cache'}", *SMALL, ORDER]
    given += ["check=full", f"hydra.run.dir={tmp_path / 'two'}", "strategy=ddp", "trainer.devices=2"]
    given += ["trainer.accelerator=cpu"]
    assert ended(started(script, *given, cwd=tmp_path, log=log, twin=True), seconds=100) == 0
    assert path.read_bytes() == whole and "making it again" in log.read_text()


# Scores that a report reads

WRONG = (None, "x", -1, 1.5, True, [], {}, [[]], [None], {"a": None}, 10**400)


def spots(value, at=()):
    """Where something stands within JSON: of a list the first and last entry."""
    yield at
    if isinstance(value, dict):
        for key in value:
            yield from spots(value[key], (*at, key))
    elif isinstance(value, list) and value:
        for place in {0, len(value) - 1}:
            yield from spots(value[place], (*at, place))


def changed(data, at, wrong):
    """The same with another value at one place."""
    spoilt = copy.deepcopy(data)
    inner = spoilt
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = wrong
    return spoilt


@pytest.fixture
def full(tmp_path, monkeypatch):
    """Scores with everything that scores can have, as JSON, and no charts of them."""
    for name in ("draw_plane", "draw_stages", "draw_heat_maps"):
        monkeypatch.setattr(figures, name, lambda *_, **__: b"")
    given = made(endtasks=endtasks([[0.5, 0.6, 0.7]] * 4))
    given.parts = [{"law": {"base": 1.0}}, *[{"law": {"law": 0.7, "food": 0.3}}] * 3]
    given.objective = [1.0, None]
    for metric in given.metrics.values():
        metric["interval"] = {unit: [0.0, 1.0] for unit in ("nats", "perplexity", "bits_per_byte")}
    given.save(tmp_path / "scores.json")
    return json.loads((tmp_path / "scores.json").read_text())


def test_whatever_is_changed_is_refused_or_reported(full, tmp_path):
    path, refused = tmp_path / "scores.json", 0
    cases = [(at, wrong) for at in list(spots(full))[1:] for wrong in WRONG]
    for number, case in enumerate(random.Random(0).sample(cases, 300)):
        path.write_text(json.dumps(changed(full, *case)))
        try:
            scores = Scores.load(path)
        except ValueError as error:
            assert "\n" not in str(error), case
            refused += 1
            continue
        run_page.format_scores(scores)
        (tmp_path / "runs" / str(number)).mkdir(parents=True)
        scores.save(tmp_path / "runs" / str(number) / "scores.json")
    assert 200 < refused < 300
    assert report.main([str(tmp_path / "runs")]) == 0


def test_a_damaged_run_is_one_line_and_the_rest_is_reported(full, tmp_path, capsys):
    cases = [(("run", "order"), None), (("nll", 0, 0), {}), (("metrics", "LC", "nats"), "x")]
    cases += [(("endtasks", "scores", "macro_f1", 0), [[None]]), (("parts", 1, "law"), 1.0)]
    saved(tmp_path / "runs" / "good")
    for number, case in enumerate(cases):
        (tmp_path / "runs" / str(number)).mkdir()
        (tmp_path / "runs" / str(number) / "scores.json").write_text(json.dumps(changed(full, *case)))
    assert report.main([str(tmp_path / "runs")]) == 1
    lines = capsys.readouterr().err.splitlines()
    markdown = (tmp_path / "runs" / "comparison.md").read_text()
    assert "| ncl | ncl | tiny |" in markdown and len(lines) == len(cases)
    for number, line in enumerate(lines):
        path = tmp_path / "runs" / str(number) / "scores.json"
        assert line.startswith(f"{path}: damaged") and str(path) in markdown
