"""Artifacts are made once, also by processes that start together, and never loaded damaged or half made."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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
    stat, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.fixture
def thing(tmp_path):
    """A function that opens an artifact of two files, and a list of how often it was made."""
    made = []

    def make(partial):
        made.append(partial)
        assert not (tmp_path / "kind" / "thing").exists()
        (partial / "deep").mkdir(exist_ok=True)
        (partial / "first").write_bytes(b"x" * 1000)
        (partial / "deep" / "second").write_text("whole")

    return lambda: make_once(tmp_path / "kind" / "thing", make=make), made


def test_the_first_process_of_a_run_makes_what_is_missing_and_without_it_another(
    thing, tmp_path, monkeypatch
):
    """Only the first logs and shows bars: a second that comes first waits for it."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    opened, made = thing

    def first():
        time.sleep(0.1)
        with cache.FileLock(tmp_path / "kind" / "thing.lock"):
            (tmp_path / "partial").mkdir()
            (tmp_path / "partial" / "first").write_text("by the first")
            cache.finish_artifact(tmp_path / "partial", tmp_path / "kind" / "thing")

    monkeypatch.setattr(cache, "HEAD_START", 60)
    with ThreadPoolExecutor() as threads:
        began = threads.submit(first)
        assert (opened() / "first").read_text() == "by the first" and not made
        began.result()
    monkeypatch.setattr(cache, "HEAD_START", 0.05)
    cache.discard(tmp_path / "kind" / "thing")
    assert (opened() / "first").read_text() == "x" * 1000 and len(made) == 1


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_is_loaded_and_those_that_start_together_make_one(tmp_path):
    folder, log, go = tmp_path / "kind" / "thing", tmp_path / "log", tmp_path / "go"

    def started(seconds):
        command = [sys.executable, "-c", MAKER, str(folder), str(log), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    go.touch()
    killed, deadline = started(60), time.monotonic() + 30
    while not (tmp_path / "kind" / "thing.partial" / "first").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    killed.kill()
    killed.communicate(timeout=30)
    assert (tmp_path / "kind" / "thing.partial" / "first").exists() and not folder.exists()
    go.unlink()
    processes = [started(0.2) for _ in range(2)]
    go.touch()
    assert [process.communicate(timeout=30)[0] for process in processes] == ["whole\n"] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["checksums.json", "first", "second"]
    assert log.read_text() == "made\nmade\n"


DAMAGE = {
    "a bit": (lambda folder: flip(folder / "first"), "first"),
    "a bit of a deep file": (lambda folder: flip(folder / "deep" / "second"), "deep/second"),
    "half the checksums": (lambda folder: os.truncate(folder / CHECKSUMS, 50), CHECKSUMS),
    "truncated": (lambda folder: os.truncate(folder / "first", 10), "first has 10 bytes, not 1000"),
    "a file": (lambda folder: (folder / "first").unlink(), "first is missing"),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_damaged_artifact_is_made_again(thing, tmp_path, caplog, harm):
    opened, made = thing
    folder = opened()
    assert opened() == folder and len(made) == 1
    damage, message = DAMAGE[harm]
    damage(folder)
    assert opened() == folder and len(made) == 2
    assert (folder / "deep" / "second").read_text() == "whole"
    (told,) = caplog.messages
    assert told.startswith(f"Rebuilding {folder}, which is damaged ({message}")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["thing", "thing.lock"]


def test_a_large_artifact_is_checked_by_size_and_in_full_if_wanted(thing, monkeypatch):
    monkeypatch.setattr(cache, "SMALL", 0)
    opened, made = thing
    folder = opened()
    flip(folder / "first")
    for full, count in ((False, 1), (True, 2)):
        check_all.set(full)
        assert opened() == folder and len(made) == count
    check_all.set(False)


def test_a_full_disk_is_told_with_the_path(tmp_path):
    def fill(partial):
        with open("/dev/full", "wb", buffering=0) as file:  # whose write knows no name
            file.write(b"a")

    with pytest.raises(OSError, match=rf"No space left on device, [\d,]+ bytes free: '{tmp_path}/kind/thing"):
        make_once(tmp_path / "kind" / "thing", make=fill)


def test_all_is_on_the_disk_before_it_has_its_name(thing, tmp_path, monkeypatch):
    done, replace = [], os.replace
    monkeypatch.setattr(os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}")))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths[1]), replace(*paths)))
    folder, partial = thing[0](), tmp_path / "kind" / "thing.partial"
    checksums, renamed = done.index(partial / CHECKSUMS), done.index(folder)
    names = ("first", "deep", "deep/second", f"{CHECKSUMS}.partial")
    assert {*done[:checksums]} == {str(partial), *(str(partial / name) for name in names)}
    assert done[checksums + 1 : renamed] == [str(partial)] and done[renamed + 1 :] == [str(folder.parent)]


def test_an_archive_of_losses_by_document_with_any_byte_changed_is_told_in_a_line(tmp_path):
    archive = documents_file(tmp_path, 0)
    archive.parent.mkdir()
    np.savez(archive, law=np.ones((2, 3)))
    whole, refused = archive.read_bytes(), 0
    for place in range(len(whole)):
        archive.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            check_archive(archive, instead="do this")
        except ValueError as error:
            assert str(error).endswith("; do this")
            refused += 1
    assert refused > len(whole) / 2
    archive.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="000.npz is truncated or damaged"):
        load_documents(tmp_path, [0])


OTHER_USER = """
import os, sys
from pathlib import Path
from cpt.core.cache import make_once
from cpt.core.errors import readable

os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(65534)
os.umask(0o002)

def make(partial):
    (partial / "first").write_text("by the other user")

with readable():
    print((make_once(Path(sys.argv[1]), make=make) / "first").read_text())
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def open_as_other_user(folder, *, group):
    command = [sys.executable, "-c", OTHER_USER, str(folder), str(group)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture
def open_cache(tmp_path):
    """A cache of group 4242 below folders that anybody may enter."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    root = tmp_path / "cache"
    root.mkdir()
    os.chown(root, -1, 4242)
    root.chmod(0o2775)
    return root


@needs_root
def test_two_users_of_one_group_share_a_cache_under_umask_002(open_cache):
    folder = open_cache / "packed" / "a-0123456789abcdef"

    def make(partial):
        (partial / "deep").mkdir(mode=0o700)
        (partial / "first").write_text("by the first user")
        (partial / "first").chmod(0o600)  # as safetensors does

    before = os.umask(0o002)
    try:
        cache.make_once(folder, make=make)
    finally:
        os.umask(before)
        end_uses()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, *folder.rglob("*"))}
    assert modes == {folder.name: 0o775, "deep": 0o775, "first": 0o664, CHECKSUMS: 0o664}
    assert folder.stat().st_gid == 4242
    assert open_as_other_user(folder, group=4242).stdout == "by the first user\n"
    (folder / "first").write_text("damaged")
    assert open_as_other_user(folder, group=4242).stdout == "by the other user\n"


@needs_root
@pytest.mark.parametrize("closed", ["first", CHECKSUMS, "."])
def test_what_may_not_be_read_is_told_with_cache_dir_and_is_no_damage(open_cache, closed):
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
