"""Files on a disk that is full: what libraries make of it, in one form."""

import re

import pytest
import torch
from safetensors import SafetensorError

from cpt.core.cache import make_once
from cpt.core.files import writing
from cpt.training.files import save_state

FULL = [
    "[enforce fail at inline_container.cc:672] . unexpected pos 360128 vs 360064",
    "PytorchStreamWriter failed writing file data/0: file write failed",
]


@pytest.mark.parametrize("message", FULL)
def test_what_torch_makes_of_a_full_disk_names_the_file(message, tmp_path, monkeypatch):
    def full(state, path):
        raise RuntimeError(f"{message}\nmore")

    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "001.pt").write_bytes(b"before")
    said = rf"{tmp_path}/001.pt cannot be written \({re.escape(message)}\)"
    with pytest.raises(OSError, match=said):
        save_state({}, tmp_path / "001.pt")
    assert (tmp_path / "001.pt").read_bytes() == b"before"


MORE = {
    "safetensors": SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    ),
    "tokenizers": Exception("No space left on device (os error 28)"),
}


@pytest.mark.parametrize("library", MORE)
def test_what_is_made_once_or_exported_names_its_folder_on_a_full_disk(library, tmp_path):
    def make(folder):
        raise MORE[library]

    with pytest.raises(OSError, match=r"thing.partial cannot be written \(.*No space left on device"):
        make_once(tmp_path / "thing", make=make)
    with pytest.raises(OSError, match="model cannot be written"), writing(tmp_path / "model"):
        raise MORE[library]


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    def broken(state, path):
        raise RuntimeError("a tensor of no kind")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="of no kind"):
        save_state({}, tmp_path / "001.pt")
