"""A write that fails is told in one line with the path, on a full disk with the free bytes."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors import SafetensorError

from cpt.core.errors import readable
from cpt.core.files import replace, replacing, writing
from cpt.core.tensors import save_state

FULL = Path("/dev/full")  # whose every write fails as on a full disk
MESSAGE = re.compile(r"cpt: .+ cannot be written.*[\d,]+ bytes free.*\n")


def write_arrow(path):
    table = pa.table({"text": ["x" * 100_000]})
    with writing(path), pa.OSFile(str(FULL), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def write_safetensors(path):
    with writing(path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def write_state(path):
    with writing(path):
        torch.save({"weights": torch.zeros(100_000)}, FULL)


def write_without_a_name(path):
    with FULL.open("w") as file:
        json.dump(["x"] * 10_000, file)


WRITERS = [write_arrow, write_safetensors, write_state, write_without_a_name]


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_one_line_with_the_free_bytes(write, tmp_path, capsys):
    with pytest.raises(SystemExit), readable():
        write(tmp_path / "file")
    message = capsys.readouterr().err
    assert MESSAGE.fullmatch(message)
    assert "inline_container" not in message and "unexpected pos" not in message  # the words of torch.save
    if write is not write_without_a_name:
        assert message.startswith(f"cpt: {tmp_path / 'file'} cannot be written")


def test_atomic_writes_tell_their_path_and_leave_the_old_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "state.json"
    replace(path, "old")

    def refuse(descriptor):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("os.fsync", refuse)
    for write in (lambda: replace(path, "new"), lambda: save_state({}, path)):
        with pytest.raises(SystemExit), readable():
            write()
        message = capsys.readouterr().err
        assert MESSAGE.fullmatch(message) and f"{path} cannot be written: Disk quota exceeded" in message
    assert path.read_text() == "old"


def test_other_errors_within_a_write_keep_their_class_and_words(tmp_path):
    with pytest.raises(KeyError, match="law"), replacing(tmp_path / "file"):
        raise KeyError("law")
    with pytest.raises(FileNotFoundError, match="absent"), replacing(tmp_path / "file"):
        (tmp_path / "absent").read_text()
