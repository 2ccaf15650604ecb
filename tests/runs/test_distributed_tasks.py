"""Two processes (gloo) on what has two lengths or answers: span corruption of T5, and tasks of both kinds of
model; the samples, losses and answers are those of one, also of a run that was killed."""

import signal
from pathlib import Path

import pytest

from cpt.core.preemption import GO_ON
from tests.conftest import ROOT, SMALL_GPT2, SMALL_T5
from tests.runs.reading import answers_of, told_by
from tests.runs.test_distributed import (
    DDP,
    ORDER,
    assert_agree,
    assert_scored_alike,
    assert_shared,
    batches,
    launch,
)
from tests.runs.test_preemption import run_folder, stopped
from tests.support.campaign import run_few
from tests.support.processes import ended, started
from tests.support.task_fixtures import write_tasks

pytestmark = pytest.mark.slow

KINDS = ("text of T5", "tasks of T5", "tasks of GPT-2")


@pytest.fixture(scope="module")
def commands(corpora, cache, tmp_path_factory):
    """The command of a run of each kind."""
    root = write_tasks(tmp_path_factory.mktemp("tasks"), ("law", "food"), train=60, test=25)
    tasks = ["domains=tasks", f"domains.root={root}", "answers.tokens=6", "answers.batch_size=7"]
    tasks += ["model.length=64", ORDER, f"cache_dir={cache}"]
    texts = ["domains=texts", f"domains.root={corpora}", ORDER, f"cache_dir={cache}"]
    runs = ([*SMALL_T5, *texts], [*SMALL_T5, *tasks], [*SMALL_GPT2, *tasks])
    return dict(zip(KINDS, runs, strict=True))


def run(folder: Path, name: str, *command: str, death: int = -1) -> int:
    """A run watched from within, in `folder / "run"`; gives its exit code."""
    given = [*command, f"hydra.run.dir={folder / 'run'}"]
    return launch(folder / f"{name}.py", folder / name, *given, death=death, twin=DDP[0] in command)


def unpadded(rows: list) -> list:
    """Rows without what fills them up, 0 or 1: a process pads to its own longest."""
    shown = (
        [[each for each in ids if each > 1], [each for each in mask if each != -100]] for ids, mask in rows
    )
    return sorted(shown)


@pytest.mark.parametrize("kind", run_few(KINDS, ["tasks of T5"]))
def test_two_processes_learn_and_answer_as_one_whether_killed_or_not(kind, commands, tmp_path):
    one, two, command = tmp_path / "one", tmp_path / "two", commands[kind]
    one.mkdir()
    two.mkdir()
    assert run(one, "out", *command) == 0, (one / "out" / "log").read_text()
    assert run(two, "first", *command, *DDP, death=4) != 0
    assert told_by(two / "run")["rows"] == ["base", "law"]
    assert run(two, "second", *command, *DDP) == 0, (two / "second" / "log").read_text()
    whole = batches(one / "out", 0)
    assert_shared(whole[:10], [batches(two / "first", rank)[:10] for rank in (0, 1)], seen=unpadded)
    assert_shared(whole[10:], [batches(two / "second", rank) for rank in (0, 1)], seen=unpadded)
    for out in ("first", "second"):
        assert_agree(two / out, 1)
    assert_scored_alike(one / "run", two / "run")
    found = answers_of(two / "run")
    assert len(found) == (0 if kind == "text of T5" else 6) and found == answers_of(one / "run")
    mine, theirs = told_by(two / "run")["answers"], told_by(one / "run")["answers"]
    for name in ("tasks", "metrics", "intervals") if found else ():
        assert mine[name] == theirs[name]


@pytest.mark.campaign
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_within_the_answers_ends_both_and_they_go_on(rank, commands, tmp_path):
    """Whichever process it comes to; a task that was answered is not asked again."""
    command = [*commands["tasks of GPT-2"], *DDP, "answers.tokens=40", "trainer.steps=2"]
    seen = lambda: any(tmp_path.glob("outputs/default/*/answers/001-law/law.parquet"))  # noqa: E731
    code, lines = stopped(command, tmp_path, seen=seen, number=signal.SIGTERM, rank=rank, twin=True)
    assert (code, [line[2] for line in lines]) == (GO_ON, ["in the answers after law"])
    before = {path: path.read_bytes() for path in run_folder(tmp_path).glob("answers/*/*.parquet")}
    process = started(ROOT / "run.py", *command, cwd=tmp_path, log=tmp_path / "log", twin=True)
    assert ended(process) == 0 and len(before) == 3
    assert all(path.read_bytes() == was for path, was in before.items())
    assert len([*run_folder(tmp_path).glob("answers/*/*.parquet")]) == 6
