"""A run goes on with the texts, the order, the base and the tokenizer that it was started with, or says what
differs."""

import os
import shutil

import pytest

from cpt.data.sources import texts as module
from cpt.train import is_done
from cpt.trainer import preflight
from tests.runs.reading import read_scores, start_and_kill

ORDER = "order=[law,food]"


@pytest.fixture
def texts(corpora, tmp_path):
    for name in ("law", "food", "general"):
        shutil.copytree(corpora / name, tmp_path / "texts" / name)
    return tmp_path / "texts"


@pytest.fixture
def config(small, texts):
    return lambda *overrides: small(f"domains.root={texts}", "trainer.steps=2", *overrides)


@pytest.fixture
def run(config, start, tmp_path):
    def go(*overrides):
        start(config(*overrides), tmp_path / "run")
        return read_scores(tmp_path / "run")

    return go


def edit(path):
    path.write_text(path.read_text().replace(" 7.\n", " 8.\n", 1))


def test_changed_text_is_refused_by_name_whether_finished_or_not(
    run, config, start, killing, texts, corpora, tmp_path
):
    folder = tmp_path / "run"
    food = texts / "food" / "all.txt"
    law = texts / "law" / "all.txt"
    start_and_kill(start, killing, config("order=0"), folder, step=1, domain="law")

    original = food.read_bytes()
    food.write_bytes(original + b"one more document of eight words stands here.\n")
    with pytest.raises(ValueError, match="the text of food changed: 120 documents, .* -> 121 documents"):
        run("order=0")
    food.write_bytes(original)

    scores = run("order=0")
    assert scores["rows"] == ["base", "food", "law"] and is_done(config("order=0"), folder)

    edit(food)
    assert not is_done(config("order=0"), folder)  # which a sweep asks
    with pytest.raises(ValueError, match=r"the text of food changed: 120 documents, .* -> 120 documents"):
        run("order=0")
    food.write_bytes(original)
    assert run("order=0") == scores

    before = law.stat()
    edit(law)
    os.utime(law, ns=(before.st_atime_ns, before.st_mtime_ns))
    run("order=0")
    with pytest.raises(ValueError, match="the text of law changed"):  # every document is read
        run("order=0", "verify_inputs=full")


def test_text_with_new_times_or_in_another_folder_is_the_same_run(
    run, config, start, texts, tmp_path, monkeypatch
):
    scores = run(ORDER)
    for path in texts.glob("*/all.txt"):
        os.utime(path, ns=(1, 1))
    monkeypatch.setattr("cpt.trainer.loop.train_run", None)  # never called
    assert run(ORDER) == scores
    texts.rename(tmp_path / "moved")
    start(config(ORDER, f"domains.root={tmp_path / 'moved'}"), tmp_path / "run")
    assert read_scores(tmp_path / "run") == scores


def test_new_and_vanished_domains_are_reported_by_name(run, config, start, killing, texts, corpora, tmp_path):
    folder = tmp_path / "run"
    start_and_kill(start, killing, config("order=0"), folder, step=1, domain="law")
    shutil.copytree(corpora / "space", texts / "art")  # the first by name: not one more at the end
    with pytest.raises(ValueError, match=r"\(new: art\); 'order=\[food,law\]' "):
        run("order=0")
    assert run("order=[food,law]")["rows"] == ["base", "food", "law"]
    assert not is_done(config("order=0"), folder)
    shutil.rmtree(texts / "art")
    shutil.rmtree(texts / "food")
    with pytest.raises(ValueError, match=r"\(gone: food\)"):
        run("order=0")


def test_a_checkpoint_that_changed_is_reported_by_its_file(run, config, killing, tmp_path, small, start):
    start(small("order=[law]", "trainer.steps=1"), tmp_path / "first")
    base = tmp_path / "first" / "model"
    options = [ORDER, f"model.name_or_path={base}"]
    start_and_kill(start, killing, config(*options), tmp_path / "run", step=1, domain="food")
    for path in base.iterdir():
        os.utime(path, ns=(1, 1))
    scores = run(*options)
    weights = base / "model.safetensors"
    original = weights.read_bytes()
    weights.write_bytes(original[:-5] + bytes([original[-5] ^ 1]) + original[-4:])
    with pytest.raises(ValueError, match=rf"model.safetensors of .*={base} changed\)"):
        run(*options)
    weights.write_bytes(original)
    assert run(*options) == scores


def test_text_that_changes_while_it_is_read_is_reported(
    run, config, start, killing, texts, tmp_path, monkeypatch
):
    def slowly(*arguments, **options):
        yield from read(*arguments, **options)
        (texts / "law" / "late.txt").write_text("late\n")

    read = module.read_folder
    prepare = preflight.prepare_run
    with monkeypatch.context() as patched:
        patched.setattr(module, "read_folder", slowly)
        with pytest.raises(ValueError, match="the text of law changed while it was read; start again"):
            run("order=[law]")
    start_and_kill(start, killing, config(ORDER), tmp_path / "run", step=1, domain="law")

    def late(*arguments):
        edit(texts / "law" / "all.txt")
        return prepare(*arguments)

    monkeypatch.setattr(preflight, "prepare_run", late)
    with pytest.raises(ValueError, match="with other contents .the text of law changed"):
        run(ORDER)
