"""Artifacts are made once, also by processes that start together, and never loaded damaged or half made."""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cpt.core import cache
from cpt.core.cache import check_all, make_once
from cpt.core.cache_use import end_uses
from cpt.core.files import CHECKSUMS, check_archive
from cpt.evaluation.scores import documents_file, load_documents
from tests.conftest import ROOT

MAKER = """
import sys, time
from pathlib import Path
from cpt.core.cache import make_once
folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def make(partial):
    with log.open("a") as lines:
        lines.write("made\\n")
    (partial / "first").write_text("half")
    time.sleep(seconds)
    (partial / "second").write_text("whole")

while not (log.parent / "go").exists():
    time.sleep(0.005)
print((make_once(folder, make=make) / "second").read_text())
"""


def flip(path):
    """Changes a bit of the last byte; size and times stay."""
    stat = path.stat()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class Artifact:
    """An artifact of two files in a cache; `num_builds` counts how often it was made."""

    def __init__(self, folder):
        self.folder = folder
        self.num_builds = 0

    def open(self):
        return make_once(self.folder, make=self.make)

    def make(self, partial):
        self.num_builds += 1
        assert not self.folder.exists()
        (partial / "deep").mkdir(exist_ok=True)
        (partial / "first").write_bytes(b"x" * 1000)
        (partial / "deep" / "second").write_text("whole")


@pytest.fixture
def artifact(tmp_path):
    return Artifact(tmp_path / "kind" / "artifact")


def test_the_first_process_of_a_run_makes_what_is_missing_and_without_it_another(
    artifact, tmp_path, monkeypatch
):
    """Only the first logs and shows bars: a second that comes first waits for it."""
    monkeypatch.setenv("LOCAL_RANK", "1")

    def make_in_first_process():
        time.sleep(0.1)
        with cache.FileLock(tmp_path / "kind" / "artifact.lock"):
            (tmp_path / "partial").mkdir()
            (tmp_path / "partial" / "first").write_text("by the first")
            cache.finish_artifact(tmp_path / "partial", artifact.folder)

    monkeypatch.setattr(cache, "HEAD_START", 60)
    with ThreadPoolExecutor() as threads:
        first_process = threads.submit(make_in_first_process)
        assert (artifact.open() / "first").read_text() == "by the first" and artifact.num_builds == 0
        first_process.result()  # raises what it raised

    monkeypatch.setattr(cache, "HEAD_START", 0.05)
    cache.discard(artifact.folder)
    assert (artifact.open() / "first").read_text() == "x" * 1000 and artifact.num_builds == 1


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_is_loaded_and_those_that_start_together_make_one(tmp_path):
    folder = tmp_path / "kind" / "artifact"
    half_made = tmp_path / "kind" / "artifact.partial" / "first"
    log = tmp_path / "log"
    go = tmp_path / "go"  # makers wait for this file

    def start_maker(seconds):
        command = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    go.touch()
    killed = start_maker(60)
    deadline = time.monotonic() + 30
    while not half_made.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.kill()
    killed.communicate(timeout=30)
    assert half_made.exists() and not folder.exists()

    go.unlink()
    processes = [start_maker(0.2) for _ in range(2)]
    go.touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "first", "second"]
    assert log.read_text() == "made\nmade\n"


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first"), "first"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second"),
    "a size": (lambda folder: (folder / CHECKSUMS).write_text('{"files": {"first": [{}, ""]}}'), CHECKSUMS),
    "half the checksums": (lambda folder: os.truncate(folder / CHECKSUMS, 50), CHECKSUMS),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1,000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is missing"),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_damaged_artifact_is_rebuilt(artifact, caplog, harm):
    folder = artifact.open()
    assert artifact.open() == folder and artifact.num_builds == 1

    damage, reason = DAMAGE[harm]
    damage(folder)
    assert artifact.open() == folder and artifact.num_builds == 2
    assert (folder / "deep" / "second").read_text() == "whole"
    (message,) = caplog.messages
    assert message.startswith(f"Rebuilding {folder}, which is damaged ({reason}")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["artifact", "artifact.lock"]


def test_a_large_artifact_is_checked_by_size_and_in_full_if_wanted(artifact, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    folder = artifact.open()
    flip(folder / "first")
    for full, num_builds in ((False, 1), (True, 2)):
        check_all.set(full)
        assert artifact.open() == folder and artifact.num_builds == num_builds
    check_all.set(False)


def test_a_full_disk_is_reported_with_the_path(tmp_path):
    def fill(partial):
        with open("/dev/full", "wb", buffering=0) as file:  # whose write knows no name
            file.write(b"a")

    folder = tmp_path / "kind" / "artifact"
    with pytest.raises(OSError, match=rf"No space left on device, [\d,]+ bytes free: '{folder}"):
        make_once(folder, make=fill)


def test_all_is_on_the_disk_before_it_has_its_name(artifact, tmp_path, monkeypatch):
    events = []  # a text: this file or folder was synced; a path: something was renamed to it
    replace = os.replace

    def record_sync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    def record_rename(source, destination):
        events.append(destination)
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    folder = artifact.open()

    partial = tmp_path / "kind" / "artifact.partial"
    checksums_written = events.index(partial / CHECKSUMS)
    folder_renamed = events.index(folder)
    names = ("first", "deep", "deep/second", f"{CHECKSUMS}.partial")
    assert {*events[:checksums_written]} == {str(partial), *(str(partial / name) for name in names)}
    assert events[checksums_written + 1 : folder_renamed] == [str(partial)]
    assert events[folder_renamed + 1 :] == [str(folder.parent)]


def test_an_archive_of_losses_by_document_with_any_byte_changed_is_reported_in_a_line(tmp_path):
    archive = documents_file(tmp_path, 0)
    archive.parent.mkdir()
    np.savez(archive, law=np.ones((2, 3)))
    content = archive.read_bytes()

    num_refused = 0
    for position, byte in enumerate(content):
        archive.write_bytes(content[:position] + bytes([byte ^ 255]) + content[position + 1 :])
        try:
            check_archive(archive, remedy="do this")
        except ValueError as error:
            assert str(error).endswith("; do this")
            num_refused += 1
    assert num_refused > len(content) / 2  # not all: some bytes of a zip file mean nothing

    archive.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="000.npz is truncated or damaged"):
        load_documents(tmp_path, [0])


OTHER_USER = """
import os, sys
from pathlib import Path
from cpt.core.cache import make_once
from cpt.core.errors import readable_errors

os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
os.umask(0o002)

def make(partial):
    (partial / "first").write_text("by the other user")

with readable_errors():
    print((make_once(Path(sys.argv[1]), make=make) / "first").read_text())
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def open_as_other_user(folder, *, group):
    command = [sys.executable, "-c", OTHER_USER, str(folder), str(group)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def open_cache():
    """A cache of group 4242 that anybody may enter.

    Not below tmp_path: whenever another pytest of this user starts, it closes their common folder to other
    users (`TempPathFactory.getbasetemp`)."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        root = Path(folder) / "cache"
        root.mkdir()
        os.chown(root, -1, 4242)
        root.chmod(0o2775)
        yield root


@needs_root
def test_two_users_of_one_group_share_a_cache_under_umask_002(open_cache):
    folder = open_cache / "packed" / "a-0123456789abcdef"

    def make(partial):
        (partial / "deep").mkdir(mode=0o700)
        (partial / "first").write_text("by the first user")
        (partial / "first").chmod(0o600)  # as safetensors does

    umask = os.umask(0o002)
    try:
        cache.make_once(folder, make=make)
    finally:
        os.umask(umask)
        end_uses()

    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert modes == {folder.name: 0o775, "deep": 0o775, "first": 0o664, CHECKSUMS: 0o664}
    assert folder.stat().st_gid == 4242

    # The other user of the group reads it, and builds it anew where it is damaged.
    assert open_as_other_user(folder, group=4242).stdout == "by the first user\n"
    (folder / "first").write_text("damaged")
    assert open_as_other_user(folder, group=4242).stdout == "by the other user\n"


@needs_root
@pytest.mark.parametrize("closed", ["first", CHECKSUMS, "."])
def test_what_may_not_be_read_is_reported_with_cache_dir_and_is_no_damage(open_cache, closed):
    folder = open_cache / "packed" / "a-0123456789abcdef"
    cache.make_once(folder, make=lambda partial: (partial / "first").write_text("whole"))
    end_uses()
    (folder / closed).chmod(0o000)
    refused = open_as_other_user(folder, group=65534)
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 1 and line.startswith(f"cpt: cache_dir={open_cache} is invalid: {folder}")
    assert "Permission denied" in line and "owner 0, mode 0000" in line and "Allowed:" in line
    (folder / closed).chmod(0o755)
    assert (folder / "first").read_text() == "whole"


@needs_root
def test_a_cache_that_may_be_read_only_serves_what_it_has_and_names_itself_otherwise(open_cache):
    folder = open_cache / "packed" / "a-0123456789abcdef"
    cache.make_once(folder, make=lambda partial: (partial / "first").write_text("whole"))
    end_uses()
    open_cache.chmod(0o755)
    assert open_as_other_user(folder, group=65534).stdout == "whole\n"
    line = open_as_other_user(folder.with_name("b-0123456789abcdef"), group=65534).stderr.splitlines()[-1]
    assert line.startswith(f"cpt: cache_dir={open_cache} is invalid: ") and "Permission denied" in line
