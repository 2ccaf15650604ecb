"""Two processes (gloo) on what has two lengths or answers: span corruption of T5, and tasks of both kinds of
model; the samples, losses and answers are those of one."""

import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from cpt.core.preemption import GO_ON
from tests.conftest import ROOT, SMALL_GPT2, SMALL_T5
from tests.runs.test_distributed import DDP, ORDER, SCRIPT, batches, scores
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
    texts = ["domains=texts", f"domains.root={corpora}"]
    tasks = ["domains=tasks", f"domains.root={root}", "answers.tokens=6", "answers.batch_size=7"]
    long = ["model.length=64"]
    shared = [ORDER, f"cache_dir={cache}"]
    return {
        "text of T5": [*SMALL_T5, *texts, *shared],
        "tasks of T5": [*SMALL_T5, *tasks, *long, *shared],
        "tasks of GPT-2": [*SMALL_GPT2, *tasks, *long, *shared],
    }


def run(folder: Path, name: str, *command: str, death: int = -1) -> int:
    """A run watched from within, in `folder / "run"`; gives its exit code."""
    out = folder / name
    out.mkdir(parents=True)
    script = folder / f"{name}.py"
    script.write_text(SCRIPT.format(root=str(ROOT), out=str(out), death=death))
    twin = DDP[0] in command
    return ended(
        started(script, *command, f"hydra.run.dir={folder / 'run'}", cwd=folder, log=out / "log", twin=twin)
    )


@pytest.fixture(scope="module", params=run_few(KINDS, ["tasks of T5"]))
def both(request, commands, tmp_path_factory):
    """The folders of the same run by one process and by two, and its command."""
    command, folders = commands[request.param], []
    for name, strategy in (("one", []), ("two", DDP)):
        folders.append(tmp_path_factory.mktemp(name))
        assert run(folders[-1], "out", *command, *strategy) == 0, (folders[-1] / "out" / "log").read_text()
    return *folders, command


def answers(folder: Path) -> dict[str, list]:
    """Every file of answers as its rows."""
    found = sorted((folder / "run" / "answers").rglob("*.parquet"))
    return {str(path.relative_to(folder / "run")): pq.read_table(path).to_pylist() for path in found}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(next((folder / "run" / "stages").iterdir()), weights_only=True)


def unpadded(rows: list, *, filler: int) -> list:
    """Rows without what fills them up: a process pads to its own longest."""
    return sorted(
        [[each for each in ids if each != filler], [each for each in labels if each != -100]]
        for ids, labels in rows
    )


def test_two_processes_see_the_samples_and_spans_of_one(both):
    one, two, command = both
    filler = 1 if any("gpt2" in each for each in command) else 0
    whole = batches(one / "out", 0)
    parts = list(zip(batches(two / "out", 0), batches(two / "out", 1), strict=True))
    assert len(whole) == 12 == len(parts)
    for (_, number, rows), ((_, first, mine), (_, second, theirs)) in zip(whole, parts, strict=True):
        assert number == first == second
        assert len(mine) == len(theirs) == len(rows) // 2
        assert unpadded(mine + theirs, filler=filler) == unpadded(rows, filler=filler)


def test_two_processes_score_as_one(both):
    one, two, _ = both
    alone, together = scores(one), scores(two)
    assert together["run"]["finished"] and together["scored"] == alone["scored"]
    assert together["rows"] == alone["rows"] == ["base", "law", "food"]
    for row, expected in zip(together["nll"], alone["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    for rank in (0, 1):
        assert (two / "out" / f"hashes-{rank}.txt").read_text().count("\n") == 2
    assert (two / "out" / "hashes-0.txt").read_text() == (two / "out" / "hashes-1.txt").read_text()


def test_two_processes_answer_as_one(both):
    one, two, command = both
    found = answers(two)
    assert len(found) == (0 if "domains=texts" in command else 6)
    assert found == answers(one)
    mine, theirs = scores(two)["answers"], scores(one)["answers"]
    for name in ("tasks", "metrics", "intervals") if found else ():
        assert mine[name] == theirs[name]


def test_killed_and_started_again_two_processes_end_with_the_same_bits(both, tmp_path):
    _, two, command = both
    assert run(tmp_path, "first", *command, *DDP, death=4) != 0
    assert scores(tmp_path)["rows"] == ["base", "law"]
    assert run(tmp_path, "second", *command, *DDP) == 0, (tmp_path / "second" / "log").read_text()
    expected = weights(two)
    assert all(torch.equal(value, expected[name]) for name, value in weights(tmp_path).items())
    assert scores(tmp_path)["nll"] == scores(two)["nll"] and answers(tmp_path) == answers(two)


@pytest.mark.parametrize("rank", run_few([0, 1], [1]))
def test_a_signal_within_the_answers_ends_both_and_they_go_on(rank, commands, tmp_path):
    """Whichever process it comes to; a task that was answered is not asked again."""
    command = [*commands["tasks of GPT-2"], *DDP, "answers.tokens=40", "trainer.steps=2"]
    seen = lambda: any(tmp_path.glob("outputs/default/*/answers/001-law/law.parquet"))  # noqa: E731
    code, lines = stopped(command, tmp_path, seen=seen, number=signal.SIGTERM, rank=rank, twin=True)
    assert (code, [line[2] for line in lines]) == (GO_ON, ["in the answers after law"])
    before = {path: path.read_bytes() for path in run_folder(tmp_path).glob("answers/*/*.parquet")}
    assert len(before) == 3
    process = started(ROOT / "run.py", *command, cwd=tmp_path, log=tmp_path / "log", twin=True)
    assert ended(process) == 0, (tmp_path / "log").read_text()[-2000:]
    assert all(path.read_bytes() == was for path, was in before.items())
    assert len([*run_folder(tmp_path).glob("answers/*/*.parquet")]) == 6
