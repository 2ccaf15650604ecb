"""Two processes on one machine (gloo): the same samples, masks and weights as one, killed or not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, SMALL, SMALL_T5
from tests.runs.reading import answers_of, command, state_of, told_by
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.processes import ended, started
from tests.support.seams import chosen
from tests.support.task_fixtures import write_tasks

pytestmark = pytest.mark.slow

ORDER = "order=[law,food]"
DDP = ["strategy=ddp", "trainer.accelerator=cpu"]
# Lightning starts the second process with this script's own command line, so the callbacks are in both.
SCRIPT = """
import hashlib, json, os, sys
sys.path.insert(0, {root!r})
import torch
from lightning.pytorch.callbacks import Callback
from cpt.core.distributed import to_local
from cpt.data import sampler
from cpt.data.collate import labels_of
from cpt.models import memory
from cpt.trainer import loop

memory.COMPILE_OPTIONS = {{"backend": "eager"}}  # traced, and run as it was
made = sampler.TrainStream.__getitem__

def noted(stream, number):
    batch = made(stream, number)
    with open(f"{out}/batches-{{stream.rank}}.jsonl", "a") as file:
        rows = [[ids.tolist(), labels.tolist()] for ids, labels in zip(batch["input_ids"], labels_of(batch))]
        file.write(json.dumps([list(stream.names), number, rows]) + "\\n")
    return batch

def count(tensors):
    every = list(tensors)
    return [sum(each.numel() for each in every), sum(to_local(each).numel() for each in every)]

class Notes(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == {death} and trainer.datamodule.domain.name == "food":
            trainer.strategy.barrier()
            os._exit(9)

    def on_train_end(self, trainer, module):
        states = trainer.optimizers[0].state.values()
        moments = [value for state in states for value in state.values() if value.ndim]
        held = {{"weights": module.parameters(), "moments": moments, "kept": module.buffers()}}
        with open(f"{out}/held-{{trainer.global_rank}}.json", "w") as file:
            json.dump({{name: count(tensors) for name, tensors in held.items()}}, file)

    def on_fit_end(self, trainer, module):
        own = [to_local(each).reshape(-1).contiguous() for each in module.state_dict().values()]
        state = b"".join(each.view(torch.uint8).numpy().tobytes() for each in own)
        with open(f"{out}/hashes-{{trainer.global_rank}}.txt", "a") as file:
            file.write(hashlib.sha256(state).hexdigest() + "\\n")

sampler.TrainStream.__getitem__ = noted
trainer = loop.make_trainer
def watched(options, *, callbacks=(), **others):
    return trainer(options, callbacks=[*callbacks, Notes()] if callbacks else (), **others)
loop.make_trainer = watched
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


def launch(folder: Path, out: Path, *given: str, death: int = -1, starts=False) -> int:
    """A run in `folder / "run"`, watched from within; gives its exit code.

    The second process is a fork of the first unless it `starts`, which orders sets in another way."""
    out.mkdir(parents=True)
    script, log = folder / f"{out.name}.py", out / "log"
    script.write_text(SCRIPT.format(root=str(ROOT), out=str(out), death=death))
    twin = not starts and any(each in given for each in (DDP[0], "strategy=fsdp"))
    place = f"hydra.run.dir={folder / 'run'}"
    return ended(started(script, *given, place, cwd=folder, log=log, twin=twin), seconds=180)


def run(folder: Path, out: Path, *overrides: str, corpora: Path, cache: Path, **how: Any) -> int:
    return launch(folder, out, *command(corpora, cache, *SMALL, *overrides), **how)


def batches(out: Path, rank: int) -> list:
    """The domains' training batches of one process, in their order."""
    lines = (out / f"batches-{rank}.jsonl").read_text().splitlines()
    return [batch for batch in map(json.loads, lines) if batch[0] != ["general"]]


def assert_shared(whole: list, parts: list[list], *, seen=sorted) -> None:
    assert len(whole) == len(parts[0]) == len(parts[1])
    for (names, number, rows), (_, first, mine), (_, second, theirs) in zip(whole, *parts, strict=True):
        assert number == first == second and len(mine) == len(theirs) == len(rows) // 2
        assert seen(mine + theirs) == seen(rows), names


def assert_agree(out: Path, count: int) -> None:
    """Both processes have ended so many stages with the same weights."""
    first, second = ((out / f"hashes-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert first == second and len({*first}) == count


def assert_scored_alike(one: Path, two: Path, *, rel: float = 1e-5) -> None:
    alone, together = told_by(one), told_by(two)
    assert together["rows"] == alone["rows"] and together["scored"] == alone["scored"]
    for row, expected in zip(together["nll"], alone["nll"], strict=True):
        assert row == pytest.approx(expected, rel=rel)


@pytest.fixture(scope="module")
def endtasks(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    for domain in ("law", "food"):
        write_task(root, domain)
    quick = QUICK | {"root": root, "when": "each", "seeds": "[3]"}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())]


@pytest.fixture(scope="module")
def one(corpora, cache, tmp_path_factory, endtasks):
    folder = tmp_path_factory.mktemp("one")
    assert run(folder, folder / "out", *endtasks, corpora=corpora, cache=cache) == 0
    return folder


@pytest.fixture(scope="module")
def two(corpora, cache, tmp_path_factory, endtasks):
    """Killed within the second domain and started again; what it had left then lies in `left`."""
    folder, given = tmp_path_factory.mktemp("two"), [*DDP, *endtasks]
    assert run(folder, folder / "first", *given, corpora=corpora, cache=cache, death=4) != 0
    assert told_by(folder / "run")["rows"] == ["base", "law"]
    shutil.copytree(folder / "run", folder / "left" / "run")
    code = run(folder, folder / "second", *given, corpora=corpora, cache=cache)
    assert code == 0, (folder / "second" / "log").read_text()
    return folder


def assert_learned_alike(one: Path, two: Path, *, seen=sorted) -> None:
    """By one process and by two that were killed, in batches, weights and scores."""
    whole = batches(one / "out", 0)
    assert len(whole) == 12
    assert_shared(whole[:10], [batches(two / "first", rank)[:10] for rank in (0, 1)], seen=seen)
    assert_shared(whole[10:], [batches(two / "second", rank) for rank in (0, 1)], seen=seen)
    for out in ("first", "second"):
        assert_agree(two / out, 1)
    assert_scored_alike(one / "run", two / "run")


def test_two_processes_learn_as_one(one, two):
    assert_learned_alike(one, two)


def test_two_processes_score_as_one(one, two):
    assert_scored_alike(one / "run", two / "run")
    alone, together = told_by(one / "run"), told_by(two / "run")
    for kind, rows in together["endtasks"]["scores"].items():
        expected = alone["endtasks"]["scores"][kind]
        assert [[None in task for task in row] for row in rows] == [[True] * 2, [False, True], [False] * 2]
        pairs = zip(sum(sum(rows, []), []), sum(sum(expected, []), []), strict=True)
        assert all(found == pytest.approx(score, abs=0.11) for found, score in pairs)  # 2 of 20 examples
    assert together["seen"] == alone["seen"] and together["trained"] == alone["trained"]
    assert together["flops"] == pytest.approx(alone["flops"], rel=1e-6) and min(together["memory"][1:]) > 1e8


def test_a_run_goes_on_with_another_number_of_processes(one, two, corpora, cache, endtasks):
    """Killed with two processes within a domain, it goes on with one, and with the same order of samples."""
    assert run(two / "left", two / "left" / "out", *endtasks, corpora=corpora, cache=cache) == 0
    assert batches(two / "left" / "out", 0) == batches(one / "out", 0)[10:]
    assert_scored_alike(one / "run", two / "left" / "run")
    assert told_by(two / "left" / "run")["seen"] == told_by(one / "run")["seen"]


@pytest.mark.campaign
def test_statistics_are_those_of_all_processes(corpora, cache, tmp_path):
    method = ["method=das", "mask=migu", "method.general=null", "trainer.importance_samples=40"]
    method += ["trainer.accumulate_grad_batches=2"]
    method += ["method.contrast_dropout=1e-9"]  # what is dropped is each process's own draw
    for name, strategy in (("one", []), ("two", DDP)):
        given = [tmp_path / name, tmp_path / name / "out", *strategy, *method]
        assert run(*given, corpora=corpora, cache=cache, starts=True) == 0
    assert_agree(tmp_path / "two" / "out", 2)
    assert_scored_alike(tmp_path / "one" / "run", tmp_path / "two" / "run", rel=1e-4)
    alone, together = (state_of(tmp_path / name / "run") for name in ("one", "two"))
    for name in (name for name in alone if not name.startswith("model.")):
        atol = 1e-3 * alone[name].abs().max().item()
        torch.testing.assert_close(together[name], alone[name], rtol=2e-2, atol=atol)


PARTS = {
    "demix": ["method=demix", "routing@method.routing=posterior"],
    "lifelong_moe": ["method=lifelong_moe", "method.num_experts=2", "method.balance=1"],
}
SEAMS = {
    name: [*chosen(name), "optim.state_across_domains=moments"] for name in ("agem", "companions", "elle")
}


@pytest.mark.parametrize("method", run_few(PARTS | SEAMS, ["demix"]))
def test_two_processes_agree_and_are_as_one(method, small, start, corpora, cache, tmp_path):
    """On what is drawn, where an expert begins and which parts score a text, a projected gradient, a grown
    model and a peer; the memory of A-GEM alone is each process's own."""
    options = {**PARTS, **SEAMS}[method]
    assert run(tmp_path, tmp_path / "out", *DDP, *options, corpora=corpora, cache=cache) == 0
    assert_agree(tmp_path / "out", 2)
    start(small(ORDER, *options), tmp_path / "alone")
    if method != "agem":
        assert_scored_alike(tmp_path / "alone", tmp_path / "run", rel=1e-4)
        alone, together = told_by(tmp_path / "alone"), told_by(tmp_path / "run")
        for row, expected in zip(together["modules"], alone["modules"], strict=True):
            assert {text: pytest.approx(weights, abs=1e-3) for text, weights in expected.items()} == row


def unpadded(rows: list) -> list:
    """Rows without what fills them up, 0 or 1: a process pads to its own longest."""
    return sorted(
        [[each for each in ids if each > 1], [each for each in labels if each != -100]]
        for ids, labels in rows
    )


def test_two_processes_learn_and_answer_as_one_whether_killed_or_not(cache, tmp_path):
    root = write_tasks(tmp_path, ("law", "food"), train=60, test=25)
    given = [*SMALL_T5, "domains=tasks", f"domains.root={root}", "answers.max_new_tokens=6"]
    given += ["answers.batch_size=7", "model.max_seq_length=64", ORDER, f"cache_dir={cache}"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert launch(one, one / "out", *given) == 0, (one / "out" / "log").read_text()
    assert launch(two, two / "first", *given, *DDP, death=4) != 0
    assert launch(two, two / "second", *given, *DDP) == 0, (two / "second" / "log").read_text()
    assert_learned_alike(one, two, seen=unpadded)
    found = answers_of(two / "run")
    assert len(found) == 6 and found == answers_of(one / "run")
    mine, theirs = told_by(two / "run")["answers"], told_by(one / "run")["answers"]
    assert all(mine[name] == theirs[name] for name in ("tasks", "metrics", "intervals"))
