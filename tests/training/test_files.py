"""Files of tensors on a disk that is full."""

import re

import pytest
import torch

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


def test_other_errors_stay_what_they_are(tmp_path, monkeypatch):
    def broken(state, path):
        raise RuntimeError("a tensor of no kind")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(RuntimeError, match="of no kind"):
        save_state({}, tmp_path / "001.pt")
