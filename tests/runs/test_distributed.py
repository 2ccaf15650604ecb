"""Two processes on one machine (gloo): the same samples, masks and weights as one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, SMALL
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.processes import ended, started
from tests.support.seams import chosen

pytestmark = pytest.mark.slow

ORDER = "order=[law,food]"
DDP = ["strategy=ddp", "trainer.accelerator=cpu"]
# Lightning starts the second process with this script's own command line, so the callback is in both.
SCRIPT = """
import hashlib, json, os, sys
sys.path.insert(0, {root!r})
import torch
from lightning.pytorch.callbacks import Callback
from cpt.data import sampler
from cpt.data.collate import labels_of
from cpt.trainer import loop

out = {out!r}
made = sampler.TrainStream.__getitem__

def noted(stream, number):
    batch = made(stream, number)
    with open(f"{{out}}/batches-{{stream.rank}}.jsonl", "a") as file:
        rows = [[ids.tolist(), labels.tolist()] for ids, labels in zip(batch["input_ids"], labels_of(batch))]
        file.write(json.dumps([list(stream.names), number, rows]) + "\\n")
    return batch

class Hashes(Callback):
    def on_fit_end(self, trainer, module):
        state = b"".join(value.numpy().tobytes() for value in module.state_dict().values())
        with open(f"{{out}}/hashes-{{trainer.global_rank}}.txt", "a") as file:
            file.write(hashlib.sha256(state).hexdigest() + "\\n")

class Death(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == {death} and trainer.datamodule.domain.name == "food":
            trainer.strategy.barrier()
            os._exit(9)

sampler.TrainStream.__getitem__ = noted
trainer = loop.make_trainer
def watched(options, *, callbacks=(), **others):
    return trainer(options, callbacks=[*callbacks, Hashes(), Death()] if callbacks else (), **others)
loop.make_trainer = watched
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


def run(
    folder: Path,
    out: Path,
    *overrides: str,
    corpora: Path,
    cache: Path,
    death: int = -1,
    starts: bool = False,
) -> int:
    """A run watched from within; gives its exit code.

    If it `starts` its second process, that is no fork of the first and orders sets in another way."""
    out.mkdir(parents=True)
    script = folder / f"{out.name}.py"
    names = {"root": str(ROOT), "out": str(out), "death": death}
    script.write_text(SCRIPT.format(**names))
    places = [
        "domains=texts",
        f"domains.root={corpora}",
        f"cache_dir={cache}",
        ORDER,
        f"hydra.run.dir={folder / 'run'}",
    ]
    options = {"cwd": folder, "log": out / "log", "twin": DDP[0] in overrides and not starts}
    return ended(started(script, *places, *SMALL, *overrides, **options))


def batches(out: Path, rank: int) -> list:
    """The domains' training batches of one process, in their order."""
    lines = (out / f"batches-{rank}.jsonl").read_text().splitlines()
    return [batch for batch in map(json.loads, lines) if batch[0] != ["general"]]


def scores(folder: Path) -> dict:
    return json.loads((folder / "run" / "scores.json").read_text())


@pytest.fixture(scope="module")
def endtasks(tmp_path_factory):
    """End tasks of both domains."""
    root = tmp_path_factory.mktemp("tasks")
    for domain in ("law", "food"):
        write_task(root, domain)
    quick = QUICK | {"root": root, "when": "each", "seeds": "[3]"}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())]


@pytest.fixture(scope="module")
def one(corpora, cache, tmp_path_factory, endtasks):
    folder = tmp_path_factory.mktemp("one")
    assert run(folder, folder / "out", *endtasks, corpora=corpora, cache=cache) == 0, (
        folder / "out" / "log"
    ).read_text()
    return folder


@pytest.fixture(scope="module")
def two(corpora, cache, tmp_path_factory, endtasks):
    folder = tmp_path_factory.mktemp("two")
    assert run(folder, folder / "out", *DDP, *endtasks, corpora=corpora, cache=cache) == 0, (
        folder / "out" / "log"
    ).read_text()
    return folder


def test_two_processes_see_the_samples_and_masks_of_one(one, two):
    whole = batches(one / "out", 0)
    parts = list(zip(batches(two / "out", 0), batches(two / "out", 1), strict=True))
    assert len(whole) == 12
    for (names, number, rows), ((_, first, mine), (_, second, theirs)) in zip(whole, parts, strict=True):
        assert number == first == second
        assert len(mine) == len(theirs) == len(rows) // 2
        assert sorted(mine + theirs) == sorted(rows), names


def test_the_processes_agree_before_validation(two):
    first, second = ((two / "out" / f"hashes-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert len(first) == 2
    assert first == second
    assert len(set(first)) == 2


def test_two_processes_score_as_one(one, two):
    alone, together = scores(one), scores(two)
    assert together["rows"] == alone["rows"]
    for row, expected in zip(together["nll"], alone["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
    assert together["scored"] == alone["scored"]


def test_two_processes_share_the_end_tasks_and_have_the_costs_of_one(one, two):
    alone, together = scores(one), scores(two)
    for kind, rows in together["endtasks"]["scores"].items():
        expected = alone["endtasks"]["scores"][kind]
        assert [[None in task for task in row] for row in rows] == [[True] * 2, [False, True], [False] * 2]
        pairs = zip(sum(sum(rows, []), []), sum(sum(expected, []), []), strict=True)
        assert all(found == pytest.approx(score, abs=0.11) for found, score in pairs), (
            kind
        )  # 2 of 20 examples
    assert together["seen"] == alone["seen"]
    assert together["flops"] == pytest.approx(alone["flops"], rel=1e-6)
    assert together["trained"] == alone["trained"] and min(together["memory"][1:]) > 1e8


def test_a_run_goes_on_with_another_number_of_processes(one, corpora, cache, tmp_path):
    """Killed with two processes within a domain, it goes on with one, and with the same order of samples."""
    assert run(tmp_path, tmp_path / "first", *DDP, corpora=corpora, cache=cache, death=4) != 0
    assert scores(tmp_path)["rows"] == ["base", "law"]
    assert run(tmp_path, tmp_path / "second", corpora=corpora, cache=cache) == 0
    went_on = batches(tmp_path / "second", 0)
    assert [number for _, number, _ in went_on] == [4, 5]
    assert went_on == [batch for batch in batches(one / "out", 0) if batch[0] == ["food"]][4:]
    for row, expected in zip(scores(tmp_path)["nll"], scores(one)["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_statistics_are_those_of_all_processes(corpora, cache, tmp_path):
    """Importances, magnitudes, candidates of the contrast: of the whole batch and probe."""
    method = ["method=das", "mask=migu", "method.general=null", "trainer.probe_samples=40"]
    method += ["trainer.accumulate_grad_batches=2"]
    method += ["method.contrast_dropout=1e-9"]  # what is dropped is each process's own draw
    ran = {}
    for name, strategy in (("one", []), ("two", DDP)):
        folder = tmp_path / name
        folder.mkdir()
        code = run(folder, folder / "out", *strategy, *method, corpora=corpora, cache=cache, starts=True)
        assert code == 0, (folder / "out" / "log").read_text()
        ran[name] = folder
    first, second = ((ran["two"] / "out" / f"hashes-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    for row, expected in zip(scores(ran["two"])["nll"], scores(ran["one"])["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    states = [torch.load(folder / "run" / "stages" / "002.pt", weights_only=True) for folder in ran.values()]
    for name, value in states[0].items():
        if not name.startswith("model."):
            torch.testing.assert_close(
                states[1][name], value, rtol=2e-2, atol=1e-3 * value.abs().max().item()
            )


@pytest.mark.parametrize(
    "method",
    [
        ["method=demix", "routing@method.routing=posterior"],
        ["method=hat", "method.form=adapter", "method.routing.unlearned=posterior"],
        ["method=lifelong_moe", "method.experts=2", "method.balance=1"],
    ],
    ids=lambda method: method[0],
)
def test_two_processes_have_the_same_parts_as_one(method, small, start, corpora, cache, tmp_path):
    """What is drawn, where an expert begins and which parts score a text."""
    start(small(ORDER, *method), tmp_path / "alone")
    assert run(tmp_path, tmp_path / "out", *DDP, *method, corpora=corpora, cache=cache) == 0, (
        tmp_path / "out" / "log"
    ).read_text()
    first, second = ((tmp_path / "out" / f"hashes-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    alone, together = json.loads((tmp_path / "alone" / "scores.json").read_text()), scores(tmp_path)
    for row, expected in zip(together["nll"], alone["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-4)
    assert len(alone["parts"][-1]["general"]) == 3 - (method[0] == "method=hat")  # hat mixes no base
    for row, expected in zip(together["parts"], alone["parts"], strict=True):
        assert {text: pytest.approx(weights, abs=1e-3) for text, weights in expected.items()} == row


@pytest.mark.parametrize("method", run_few(["agem", "growing", "companions", "elle"], ["elle"]))
def test_two_processes_agree_where_a_seam_is_used(method, small, start, corpora, cache, tmp_path):
    """A projected gradient, a grown block and a peer are the same in both, and as in one process; the memory
    of A-GEM alone is each process's own."""
    options = [*chosen(method), "optim.carry=moments"]
    assert run(tmp_path, tmp_path / "out", *DDP, *options, corpora=corpora, cache=cache) == 0, (
        tmp_path / "out" / "log"
    ).read_text()
    first, second = ((tmp_path / "out" / f"hashes-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    start(small(ORDER, *options), tmp_path / "alone")
    alone, together = json.loads((tmp_path / "alone" / "scores.json").read_text()), scores(tmp_path)
    rows = zip(together["nll"], alone["nll"], strict=True)
    assert method == "agem" or all(row == pytest.approx(expected, rel=1e-4) for row, expected in rows)


@pytest.mark.campaign
def test_a_sweep_of_distributed_runs_is_swept_by_the_first_process_alone(
    small, start, corpora, cache, tmp_path
):
    """With `-m` on their command line, the second processes would run the sweep themselves and cross."""
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER]
    swept = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), "-m", *places, *SMALL, *DDP, "seed=1"],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert swept.returncode == 0, swept.stdout + swept.stderr
    [found] = [json.loads(path.read_text()) for path in tmp_path.rglob("scores.json")]
    start(small(ORDER, "seed=1"), tmp_path / "alone")
    alone = json.loads((tmp_path / "alone" / "scores.json").read_text())
    assert found["run"]["seed"] == 1
    for row, expected in zip(found["nll"], alone["nll"], strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
