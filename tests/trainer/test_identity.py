"""A run goes on with the texts, the order, the base and the tokenizer that it was begun with, or says what
differs."""

import json
import logging
import os
import shutil

import pytest

from cpt.train import is_done
from cpt.trainer import loop
from tests.support.endtask_fixtures import QUICK, write_task

REMEDY = r"bring back what it had, choose another name=…, or delete "


@pytest.fixture(scope="module")
def own(corpora, tmp_path_factory):
    """Texts of this file's own, which its tests change and bring back."""
    root = tmp_path_factory.mktemp("own")
    for name in ("law", "food", "general"):
        shutil.copytree(corpora / name, root / name)
    return root


@pytest.fixture
def texts(own, tmp_path):
    return shutil.copytree(own, tmp_path / "texts")


@pytest.fixture
def config(small, texts):
    return lambda *overrides: small(f"domains.root={texts}", *overrides)


@pytest.fixture
def run(config, start, tmp_path):
    """Starts the run of this test's folder; gives its scores."""

    def go(*overrides):
        start(config(*overrides), tmp_path / "run")
        return json.loads((tmp_path / "run" / "scores.json").read_text())

    return go


@pytest.fixture
def killed(run, monkeypatch):
    """The same, killed after its first domain."""

    def go(*overrides):
        commit = loop.ContinualTrainer.commit_row

        def once(self, row, **costs):
            if row == "law":
                raise RuntimeError("killed")
            commit(self, row, **costs)

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
            patched.setattr(loop.ContinualTrainer, "commit_row", once)
            run(*overrides)

    return go


def edit(path):
    """Another text of the same size."""
    path.write_text(path.read_text().replace(" 7.\n", " 8.\n", 1))


def test_changed_text_is_refused_by_name_whether_finished_or_not(run, killed, texts, tmp_path):
    killed("order=[law,food]")
    whole = (texts / "food" / "all.txt").read_bytes()
    with (texts / "food" / "all.txt").open("a") as file:
        file.write("one more document of eight words stands here.\n")
    sizes = r"120 documents, \d+ bytes, \w{8} -> 121 documents, \d+ bytes, \w{8}"
    message = rf"run was begun with other contents \(the text of food changed: {sizes}\); {REMEDY}"
    with pytest.raises(ValueError, match=message):
        run("order=[law,food]")
    (texts / "food" / "all.txt").write_bytes(whole)
    scores = run("order=[law,food]")
    assert scores["rows"] == ["base", "law", "food"]
    edit(texts / "food" / "all.txt")
    with pytest.raises(ValueError, match=r"the text of food changed: 120 documents, .* -> 120 documents"):
        run("order=[law,food]")
    assert json.loads((tmp_path / "run" / "scores.json").read_text()) == scores


def test_text_that_only_looks_changed_goes_on(run, texts, tmp_path, caplog, monkeypatch):
    scores = run("order=[law,food]")
    for path in texts.glob("*/all.txt"):
        os.utime(path, ns=(1, 1))
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("cpt.trainer.loop.train_run", None)  # never called
    assert run("order=[law,food]") == scores
    assert "comparing the text of law" in caplog.text
    caplog.clear()
    run("order=[law,food]")
    assert "comparing" not in caplog.text


def test_texts_may_move(run, config, start, texts, tmp_path, monkeypatch):
    scores = run("order=[law,food]")
    texts.rename(tmp_path / "moved")
    monkeypatch.setattr("cpt.trainer.loop.train_run", None)
    start(config("order=[law,food]", f"domains.root={tmp_path / 'moved'}"), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "scores.json").read_text()) == scores


def test_new_and_vanished_domains_are_told_by_name(run, killed, texts, corpora, tmp_path):
    killed("order=0")
    shutil.copytree(corpora / "space", texts / "art")  # the first by name: not one more at the end
    folder = tmp_path / "run"
    message = (
        rf"^order=0 means other domains than when {folder} was begun \(new: art\); 'order=\[food,law\]' "
    )
    with pytest.raises(ValueError, match=rf"{message}'hydra.run.dir={folder}' goes on .* another name=…"):
        run("order=0")
    scores = run("order=[food,law]")
    assert scores["rows"] == ["base", "food", "law"]
    with pytest.raises(ValueError, match=r"\(new: art\)"):
        run("order=0")
    shutil.rmtree(texts / "art")
    assert run("order=0") == scores
    shutil.rmtree(texts / "food")
    with pytest.raises(ValueError, match=r"\(gone: food\); bring them back, another name=… begins"):
        run("order=0")


def test_another_order_is_told(run, texts):
    run("order=[law,food]")
    with pytest.raises(ValueError, match=r"order=\[.*\] means other domains .* \(law food -> food law\)"):
        run("order=[food,law]")


def test_a_full_check_reads_every_document(run, texts):
    run("order=[law,food]")
    path = texts / "law" / "all.txt"
    before = path.stat()
    edit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    run("order=[law,food]")
    with pytest.raises(ValueError, match="the text of law changed"):
        run("order=[law,food]", "check=full")
    with pytest.raises(ValueError, match="check=slow; allowed: fast, full"):
        run("order=[law,food]", "check=slow")


def test_a_sweep_does_not_take_a_run_of_other_text_for_finished(run, config, texts, corpora, tmp_path):
    run("order=0")
    folder = tmp_path / "run"
    assert is_done(config("order=0"), folder)
    before = (texts / "law" / "all.txt").read_bytes()
    edit(texts / "law" / "all.txt")
    assert not is_done(config("order=0"), folder)
    (texts / "law" / "all.txt").write_bytes(before)
    run("order=0")
    assert is_done(config("order=0"), folder)
    shutil.copytree(corpora / "space", texts / "space")
    assert not is_done(config("order=0"), folder)


def test_a_checkpoint_that_changed_is_told_by_its_file(run, killed, tmp_path, small, start, texts):
    start(small("order=[law]"), tmp_path / "first")
    base = tmp_path / "first" / "model"
    given = ["order=[law,food]", f"model.checkpoint={base}"]
    killed(*given)
    for path in base.iterdir():
        os.utime(path, ns=(1, 1))
    (base / "notes.md").write_text("of no matter")
    scores = run(*given)
    weights = base / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        ValueError, match=rf"model.safetensors of model.checkpoint={base} changed\); {REMEDY}"
    ):
        run(*given)
    data[-5] ^= 1
    weights.write_bytes(data)
    (base / "tokenizer.json").rename(base / "aside")
    with pytest.raises(ValueError, match="has no tokenizer.json any more"):
        run(*given)
    (base / "aside").rename(base / "tokenizer.json")
    assert run(*given) == scores
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"model.checkpoint={base} has no config.json any more"):
        run(*given)


def test_a_base_that_is_made_again_with_other_bits_is_told(run, killed, tmp_path):
    private = f"cache_dir={tmp_path / 'cache'}"
    killed("order=[law,food]", private)
    remembered = tmp_path / "run" / "identity.json"
    told = json.loads(remembered.read_text())
    shutil.rmtree(tmp_path / "cache" / "base")
    (name,) = told["base"]
    value = told["base"][name][2]
    remembered.write_text(json.dumps({**told, "base": {name: [1, 1, "0" * 32]}}))
    with pytest.raises(ValueError, match=r"\(the base model changed: model.safetensors\)"):
        run("order=[law,food]", private)
    remembered.write_text(json.dumps({**told, "base": {name: [1, 1, value]}, "tokenizer": "another"}))
    with pytest.raises(ValueError, match=r"\(the tokenizer of the base model changed\)"):
        run("order=[law,food]", private)
    remembered.write_text("{")
    with pytest.raises(ValueError, match=r"identity.json is damaged .*; bring it back"):
        run("order=[law,food]", private)
    remembered.write_text(json.dumps(told))
    assert run("order=[law,food]", private)["run"]["finished"]


def test_changed_data_of_an_end_task_is_told_and_measured_again(run, tmp_path, caplog, monkeypatch):
    for name in ("law", "food"):
        write_task(tmp_path, name)
    quick = [f"endtask.{name}={value}" for name, value in (QUICK | {"seeds": "[3]"}).items()]
    asked = ["order=[law,food]", "endtask=texts", f"endtask.root={tmp_path}", *quick]
    caplog.set_level(logging.INFO)
    before = run(*asked)
    data = tmp_path / "endtasks" / "law" / "test.jsonl"
    os.utime(data, ns=(1, 1))
    with monkeypatch.context() as patched:
        patched.setattr(
            "cpt.evaluation.finetune.fine_tune", None
        )  # the data are the same: nothing is measured
        assert run(*asked)["endtasks"]["scores"] == before["endtasks"]["scores"]
        run(*asked)
    assert "is finished already" in caplog.text and "its data changed" not in caplog.text
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:15]) + "\n")
    files = {name: tmp_path / f"run/endtasks/002-food/{name}-3.parquet" for name in ("law", "food")}
    kept = files["food"].stat().st_mtime_ns
    after = run(*asked)
    assert "end task law: its data changed; it is measured again" in caplog.text
    assert "end task food: its data changed" not in caplog.text
    assert after["endtasks"]["examples"] == {"law": 15, "food": 20}
    assert after["nll"] == before["nll"] and files["food"].stat().st_mtime_ns == kept


def test_text_that_changes_while_it_is_read_is_told(run, texts, monkeypatch):
    from cpt.data.sources import texts as module

    def slowly(*arguments, **options):
        yield from read(*arguments, **options)
        (texts / "law" / "late.txt").write_text("late\n")

    read = module.read_folder
    monkeypatch.setattr(module, "read_folder", slowly)
    with pytest.raises(ValueError, match="the text of law changed while it was read; start again"):
        run("order=[law]")
