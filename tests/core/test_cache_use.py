"""Records of who uses what of a cache."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from cpt.core import cache_use
from cpt.core.cache_use import REMOTE_S, USES, end_uses, find_users, record_use
from cpt.core.heartbeat import ProcessId
from tests.conftest import ROOT

USER = """
import os, sys, time
from pathlib import Path
from cpt.core.cache_use import record_use
record_use(Path(sys.argv[1]))
print("recorded", flush=True)
sys.stdin.read()
os._exit(0)  # without removing its record
"""


@pytest.fixture
def artifact(tmp_path):
    yield tmp_path / "packed" / "law-train-0123456789abcdef"
    end_uses()


def test_a_process_is_a_user_until_it_ends_and_leaves_no_record_for_ever(artifact, tmp_path):
    command = [sys.executable, "-c", USER, str(artifact)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"recorded\n"
        assert [user.pid for user in find_users(artifact)] == [process.pid]
        assert find_users(artifact.with_name("law-test-0123456789abcdef")) == []
        process.stdin.close()
        process.wait(timeout=30)
    assert find_users(artifact) == [] and len(list((tmp_path / USES).iterdir())) == 1
    record_use(artifact)  # another process finds the record of the one that ended
    (record,) = (tmp_path / USES).iterdir()
    assert str(os.getpid()) in record.name
    end_uses()
    assert not list((tmp_path / USES).iterdir())


def test_a_process_of_another_machine_is_a_user_for_a_day_after_it_was_heard_of(artifact, tmp_path):
    process = dataclasses.replace(ProcessId.current(), host="elsewhere")
    record = tmp_path / USES / "elsewhere-1-1.jsonl"
    record.parent.mkdir()
    lines = [json.dumps(dataclasses.asdict(process)), json.dumps(cache_use.format_artifact_name(artifact))]
    record.write_text("\n".join(lines) + "\n")
    assert find_users(artifact) == [process]
    os.utime(record, (time.time() - 2 * REMOTE_S,) * 2)
    assert find_users(artifact) == []


def test_a_half_written_or_damaged_record_is_ignored(artifact, tmp_path):
    (tmp_path / USES).mkdir()
    (tmp_path / USES / "empty.jsonl").touch()
    (tmp_path / USES / "half.jsonl").write_text('{"host": "a", "pi')
    (tmp_path / USES / "other.jsonl").write_text('[1]\n"x"\n')
    record_use(artifact)
    assert [user.pid for user in find_users(artifact)] == [os.getpid()]


def test_a_cache_that_may_not_be_written_is_used_without_a_record(artifact, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    record_use(artifact)
    assert find_users(artifact) == []
