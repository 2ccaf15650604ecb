"""Files are written as a whole; damage of archives and checksummed files is told in a line."""

import os
import re

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from cpt.core.cache import make_once
from cpt.core.files import check_archive, find_damage, hash_files, writing
from cpt.core.tensors import check_state, save_state
from cpt.evaluation.scores import documents_file, load_documents


@pytest.fixture
def archive(tmp_path):
    path = documents_file(tmp_path, 0)
    path.parent.mkdir()
    np.savez(path, law=np.ones((2, 3)))
    return path


@pytest.mark.parametrize("value", [0, 64, 255])
def test_whatever_a_byte_becomes_it_is_told_in_a_line(archive, value):
    """A version that zipfile does not know was an error of another kind."""
    whole, refused = archive.read_bytes(), 0
    for place in range(len(whole)):
        archive.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            check_archive(archive, instead="do this")
        except ValueError as error:
            assert str(error).endswith("; do this")
            refused += 1
    assert refused > len(whole) / 2


def test_losses_by_document_that_are_damaged_are_told(archive, tmp_path):
    assert load_documents(tmp_path, [0])[0]["law"].shape == (2, 3)
    archive.write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"000.npz is truncated or damaged .*; bring it back"):
        load_documents(tmp_path, [0])
    with pytest.raises(ValueError, match="001.npz is gone; bring it back"):
        load_documents(tmp_path, [1])


def flip_weight(path):
    """A bit of a value, which torch.load does not notice."""
    data = path.read_bytes()
    place = data.index(np.ones(64, np.float32).tobytes())
    path.write_bytes(data[:place] + b"\x01" + data[place + 1 :])
    assert not torch.load(path, weights_only=True)["weight"].eq(1).all()


@pytest.mark.parametrize("harm", [flip_weight, lambda path: os.truncate(path, 900), os.unlink])
def test_a_damaged_state_is_refused_before_it_is_used(tmp_path, harm):
    path = tmp_path / "001.pt"
    save_state({"weight": torch.ones(64)}, path)
    check_state(path, instead="do this")
    harm(path)
    with pytest.raises(ValueError, match=r"001.pt is (truncated or damaged|gone).*; do this$"):
        check_state(path, instead="do this")


def test_a_file_that_the_disk_cannot_read_is_damaged(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    table = hash_files(tmp_path, [tmp_path / "file"])

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("cpt.core.files.file_hash", fails)
    assert list(find_damage(tmp_path, table, full=True)) == ["file cannot be read (Input/output error)"]


@pytest.mark.parametrize("message", ["[enforce fail at inline_container.cc:672]", "PytorchStreamWriter"])
def test_a_full_disk_under_torch_names_the_file(message, tmp_path, monkeypatch):
    def full(state, path):
        raise RuntimeError(f"{message}\nmore")

    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "001.pt").write_bytes(b"before")
    with pytest.raises(OSError, match=rf"{tmp_path}/001.pt cannot be written \({re.escape(message)}\)"):
        save_state({}, tmp_path / "001.pt")
    assert (tmp_path / "001.pt").read_bytes() == b"before"


@pytest.mark.parametrize("kind", [SafetensorError, Exception])  # of safetensors, of tokenizers
def test_a_full_disk_under_an_artifact_names_its_folder(kind, tmp_path):
    def make(folder):
        raise kind("I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match=r"thing.partial cannot be written \(.*No space left on device"):
        make_once(tmp_path / "thing", make=make)
    with pytest.raises(RuntimeError, match="of no kind"), writing(tmp_path / "model"):
        raise RuntimeError("a tensor of no kind")  # no failed write
