"""What is damaged, gone or half written is never used: of a run folder, of the shared cache."""

import itertools
import os
import random
import shutil
import subprocess

import numpy as np
import pytest
import torch

from cpt import verify
from cpt.methods.base import ContinualMethod
from cpt.trainer import loop
from cpt.trainer.loop import ContinualTrainer
from cpt.trainer.run_dir import RunDir
from cpt.trainer.stage import StageTrainer
from tests.runs.reading import assert_same_bits, read_scores, scores_of, start_and_kill, times
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError

ORDER = "order=[law,food]"
FLIPS = 5


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@pytest.fixture
def config(small, shared_folder):
    return lambda *overrides: small(ORDER, f"cache_dir={shared_folder / 'cache'}", *overrides)


@pytest.fixture
def finished_run(shared_folder, config, start):
    if not (shared_folder / "run").exists():
        start(config(), shared_folder / "run")
    return shared_folder / "run"


@pytest.fixture
def copied_run(shared_folder, finished_run, tmp_path):
    shutil.copytree(shared_folder / "cache", tmp_path / "cache")
    subprocess.run(["cp", "-a", finished_run, tmp_path / "run"], check=True)  # with its hard links
    return tmp_path / "run"


@pytest.fixture
def begun_run(shared_folder, finished_run, config, start, killing, tmp_path):
    if not (shared_folder / "begun").exists():
        start_and_kill(start, killing, config(), shared_folder / "begun", step=3, domain="food")
    return shutil.copytree(shared_folder / "begun", tmp_path / "begun")


def flip(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


HARMS = {"gone": os.unlink, "cut off": cut, "a bit": flip}
FINISHED_FILES = ["checksums.json", "model/model.safetensors", "documents/001.npz", "stages/002.pt"]
BEGUN_FILES = ["scores.json", "config.yaml", "identity.json", "documents/001.npz", "stages/001.pt"]
BEGUN_FILES.append("checkpoints/002-food.ckpt")
ROWS = [*itertools.product(["finished"], FINISHED_FILES, HARMS)]
ROWS += itertools.product(["begun"], BEGUN_FILES, HARMS)
ROWS.remove(("begun", "scores.json", "a bit"))  # which has no checksum
FEW = {row for row in ROWS if row[2] == ("a bit" if row[0] == "finished" else "cut off")}
FEW.add(("finished", "stages/002.pt", "gone"))


UNREAD = {"stages/002.pt", "documents/001.npz"}  # of a finished run, but by cpt.verify
UNSEEN = {("gone", name) for name in ("scores.json", "stages/001.pt", "checkpoints/002-food.ckpt")}


@pytest.mark.slow
@pytest.mark.parametrize("row", run_few(ROWS, FEW), ids=map(" ".join, ROWS))
def test_a_damaged_file_of_a_run_is_rebuilt_or_refused(
    row, finished_run, request, config, start, monkeypatch
):
    """A finished run learns nothing; one that goes on ends with the same bits. A refusal is one line that
    names the file's folder, and leaves all files."""
    of, name, harm = row
    run = request.getfixturevalue("copied_run" if of == "finished" else "begun_run")
    HARMS[harm](run / name)
    binary = name not in ("config.yaml", "identity.json")
    assert verify.main([str(run)]) == 1 or not binary or (harm, name) in UNSEEN
    if of == "finished":
        monkeypatch.setattr(StageTrainer, "train", None)

    before = {path: time for path, time in times(run).items() if "identity" not in path}
    refused = (of, name) == (
        "finished",
        "model/model.safetensors",
    ) and harm != "gone"  # the stage's file, too

    try:
        start(config("verify_inputs=full"), run)
    except ValueError as error:
        assert "\n" not in str(error) and str((run / name).parent) in str(error)
        assert before.items() <= times(run).items()

        assert not refused or "run/stages/002.1.linked" in str(error)
        return
    assert not refused
    assert read_scores(run)["nll"] == read_scores(finished_run)["nll"]
    assert read_scores(run)["metrics"] == read_scores(finished_run)["metrics"]
    if of == "finished" and name in UNREAD:
        shutil.copy(finished_run / name, run / name)  # no other file of the run has gone
    assert_same_bits(run, finished_run)
    assert verify.main([str(run)]) == 0
    for file_name in ("model/model.safetensors", "model/tokenizer.json"):
        assert (run / file_name).read_bytes() == (finished_run / file_name).read_bytes()


def test_a_folder_of_a_stage_without_its_file_goes_unless_the_stage_is_committed(begun_run):
    for folder in ("001.1.linked", "001.2.shards", "002.1.shards"):
        (begun_run / "stages" / folder).mkdir()
    (begun_run / "stages" / "001.pt").unlink()
    RunDir(begun_run).clean()
    assert {path.name for path in (begun_run / "stages").iterdir()} == {"001.1.linked", "001.2.shards"}


def test_a_kill_while_a_lost_model_is_exported_again_leaves_the_last_stage(
    copied_run, finished_run, start, config, monkeypatch
):
    (copied_run / "model" / "config.json").unlink()

    def half_written(module, folder, order):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KilledError

    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(ContinualMethod, "export", half_written)
        start(config(), copied_run)
    assert verify.main([str(copied_run)]) == 1
    start(config(), copied_run)
    assert_same_bits(copied_run, finished_run)
    for file_name in ("model/model.safetensors", "model/config.json"):
        assert (copied_run / file_name).read_bytes() == (finished_run / file_name).read_bytes()


def test_a_run_continues_from_a_row_that_scores_json_does_not_have(
    config, finished_run, start, killing, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "is_file_of_all_rows_due", lambda *_, num_rows, num_stored: num_stored == 0)
        start_and_kill(start, killing, config(), run, step=3, domain="food")
    assert read_scores(run)["rows"] == ["base"] and scores_of(run).rows == ["base", "law"]
    start(config(), run)
    assert_same_bits(run, finished_run)
    assert read_scores(run)["metrics"] == read_scores(finished_run)["metrics"]
    assert not (run / "rows").exists() and verify.main([str(run)]) == 0


def test_a_file_of_something_else_is_refused(begun_run, config, start):
    replacements = [("config.yaml", b"\xff", "is damaged"), ("config.yaml", b"- a", "is damaged")]
    torch.save([torch.ones(2)], begun_run / "other")
    replacements += [("stages/001.pt", (begun_run / "other").read_bytes(), "")]
    for name, data, reason in replacements:
        original = (begun_run / name).read_bytes()
        (begun_run / name).write_bytes(data)
        with pytest.raises(ValueError, match=rf"{begun_run / name} {reason}.*(delete|restore it)"):
            start(config(), begun_run)
        (begun_run / name).write_bytes(original)


def test_a_folder_that_is_deleted_while_it_is_trained_ends_the_run_at_the_next_row(
    config, start, tmp_path, monkeypatch
):
    committed = []
    commit = ContinualTrainer.commit_row

    def deleting(trainer, number):
        committed.append(number)
        commit(trainer, number)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(ContinualTrainer, "commit_row", deleting)
    with pytest.raises(ValueError, match="run was moved or deleted while it was trained"):
        start(config(), tmp_path / "run")
    assert committed == [0]


def test_verify_names_what_is_damaged_and_touches_nothing_else(copied_run, tmp_path, capsys):
    assert verify.main([str(tmp_path)]) == 0 and "folders: 0 damaged" in capsys.readouterr().out
    harmed = [*(tmp_path / "cache").glob("base/*/model.safetensors"), copied_run / "stages" / "002.pt"]
    harmed += [*(tmp_path / "cache").glob("corpora/food-*/documents.arrow")]
    harmed += [copied_run / "documents" / "000.npz"]
    for path in harmed:
        flip(path)
    assert verify.main([str(tmp_path), str(copied_run)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.endswith(": 3 damaged") and len(lines) == 4  # folders, and files in them
    (tmp_path / "empty").mkdir()
    assert verify.main([str(tmp_path / "empty")]) == verify.main([str(tmp_path / "missing")]) == 2
    for path, remedy in zip(harmed, ("rebuilds", "restore it", "rebuilds", "restore it"), strict=True):
        assert any(path.name in line and remedy in line for line in lines), path


def test_no_flipped_bit_of_the_cache_is_used(copied_run, config, start, tmp_path, caplog):
    draw = random.Random(0)
    cache = tmp_path / "cache"
    start(config("trainer.steps=1"), tmp_path / "whole")
    for number in range(FLIPS):
        files = [path for path in sorted(cache.rglob("*")) if path.is_file() and path.suffix != ".lock"]
        path = draw.choice(files)
        position = draw.randrange(path.stat().st_size)
        flip(path, position)
        caplog.clear()
        start(config(f"cache_dir={cache}", "trainer.steps=1"), tmp_path / f"{number}")
        is_reported = any(
            f"{path.relative_to(cache).parts[1]}, which is damaged" in line for line in caplog.messages
        )
        assert verify.main([str(cache)]) == 1 - is_reported
        if not is_reported:  # nobody has opened it: only making the base reads what it was made of
            assert "general-train" in str(path)
            flip(path, position)
        assert read_scores(tmp_path / f"{number}")["nll"] == read_scores(tmp_path / "whole")["nll"]


def test_a_line_has_one_remedy(tmp_path):
    path = tmp_path / "divergence" / "001-law" / "law.npz"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no archive")
    (line,) = verify.find_damage_in_run(tmp_path)
    assert line.endswith("; the same command measures it again")


def test_models_made_of_a_run_and_withdrawals_are_verified(tmp_path):
    (tmp_path / "graft").mkdir()
    (tmp_path / "graft" / "row.json").write_text("{")
    (tmp_path / "graft" / "documents.npz").write_bytes(b"no archive")
    (tmp_path / "withdrawn.json").write_text('[{"domain": 1}]')
    row_line, documents_line, withdrawn_line = verify.find_damage_in_run(tmp_path)
    assert row_line.startswith(f"{tmp_path}/graft/row.json") and row_line.endswith("; make the model again")
    assert "documents.npz" in documents_line and documents_line.endswith("; make the model again")
    assert "withdrawn.json" in withdrawn_line and withdrawn_line.endswith("; restore it from a backup")


def test_pictures_of_the_page_and_diagnostics_are_verified(tmp_path, capsys):
    run = RunDir(tmp_path / "run")
    run.model.mkdir(parents=True)
    run.write_config({"name": "x", "save_all_stages": False})
    for name in ("model/model.safetensors", "report.html", "report.md", "report-matrix.png"):
        (run.path / name).write_bytes(b"content of " + name.encode())
    run.save_arrays(run.path / "diagnostics" / "001.npz", {"gates": np.ones(9)})
    run.write_checksums()
    assert run.find_damaged_outputs(full=True) == []
    flip(run.path / "report-matrix.png")
    assert run.find_damaged_outputs(full=True) == ["report-matrix.png differs from its checksum"]
    flip(run.path / "diagnostics" / "001.npz")
    assert verify.main([str(tmp_path)]) == 1
    assert "diagnostics/001.npz is truncated or damaged" in capsys.readouterr().out
