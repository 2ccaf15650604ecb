"""A write that fails is told in one line with the path, on a full disk with the free bytes."""

import json
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from cpt.core.errors import readable_errors
from cpt.core.files import LOCK, new_folder, replacing, write_atomically, writing
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
    with pytest.raises(SystemExit), readable_errors():
        write(tmp_path / "file")
    message = capsys.readouterr().err
    assert MESSAGE.fullmatch(message)
    assert "inline_container" not in message and "unexpected pos" not in message  # the words of torch.save
    if write is not write_without_a_name:
        assert message.startswith(f"cpt: {tmp_path / 'file'} cannot be written")


@contextmanager
def size_limit(num_bytes):
    """Files of this process may have as many bytes, as after `ulimit -f`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write_long_text(path):
    write_atomically(path, "x" * 100_000)


def write_long_state(path):
    with writing(path):
        torch.save({"weights": torch.zeros(100_000)}, path)


def write_long_text_without_a_name(path):
    with path.open("w") as file:
        file.write("x" * 100_000)


def write_long_weights(path):
    with writing(path):
        save_file({"weights": torch.zeros(100_000)}, path)


@pytest.mark.parametrize(
    "write", [write_long_text, write_long_state, write_long_text_without_a_name, write_long_weights]
)
def test_a_file_above_the_limit_of_its_size_is_one_line_with_the_limit(write, tmp_path, capsys):
    with size_limit(4096), pytest.raises(SystemExit), readable_errors():
        write(tmp_path / "file")
    message = capsys.readouterr().err
    assert "cannot be written" in message and message.count("\n") == 1
    assert message.count("ulimit -f allows 4,096 bytes in a file") == 1
    if write is not write_long_state:
        assert "File too large" in message
    if write in (write_long_text, write_long_text_without_a_name):
        assert "raise the limit" in message and "bytes free" not in message


def test_atomic_writes_tell_their_path_and_leave_the_old_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "state.json"
    write_atomically(path, "old")

    def refuse(descriptor):
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr("os.fsync", refuse)
    for write in (lambda: write_atomically(path, "new"), lambda: save_state({}, path)):
        with pytest.raises(SystemExit), readable_errors():
            write()
        message = capsys.readouterr().err
        assert MESSAGE.fullmatch(message) and f"{path} cannot be written: Disk quota exceeded" in message
    assert path.read_text() == "old"


def test_other_errors_within_a_write_keep_their_class_and_words(tmp_path):
    with pytest.raises(KeyError, match="law"), replacing(tmp_path / "file"):
        raise KeyError("law")
    with pytest.raises(FileNotFoundError, match="absent"), replacing(tmp_path / "file"):
        (tmp_path / "absent").read_text()


def test_a_new_folder_removes_what_a_killed_process_left_of_it_and_nothing_else(tmp_path):
    stale = tmp_path / ".out-abcdefgh.partial"
    unrelated = [
        tmp_path / name for name in (".out-mine", ".model-abcdefgh.partial", ".out-12345678.partial")
    ]
    for folder in (stale, *unrelated[:2]):
        (folder / "out").mkdir(parents=True)
        (folder / LOCK).touch()
    (unrelated[2] / "out").mkdir(parents=True)  # without a lock it is no folder of ours
    with new_folder(tmp_path / "out") as first:
        (first / "weights").write_text("1")
        with new_folder(tmp_path / "out") as second:  # of a process that is at work nothing is removed
            (second / "more").write_text("2")
        assert (first / "weights").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["out", *(path.name for path in unrelated)]
    )
