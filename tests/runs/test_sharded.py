"""`strategy=fsdp` on one machine (gloo): weights that are shared out are those of one process, and of ddp."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from cpt.trainer.checkpoint import load_stage, open_stage
from tests.conftest import ROOT, SMALL, SMALL_GPT2, SMALL_T5
from tests.support.campaign import run_few
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.processes import ended, started

pytestmark = pytest.mark.slow

FSDP, DDP = "strategy=fsdp", "strategy=ddp"
SIZES = {"bert": SMALL, "gpt2": SMALL_GPT2, "t5": SMALL_T5}
WEIGHTS, NATS = 2e-6, 1e-6  # how far rounding may part two sums of other order, of weights that move by 1e-2
# In each process: what it holds of the weights, of what is kept of them and of the moments; and a death.
SCRIPT = """
import json, os, sys
sys.path.insert(0, {root!r})
from lightning.pytorch.callbacks import Callback
from cpt.core.distributed import is_sharded, to_local
from cpt.models import memory
from cpt.trainer import loop

memory.COMPILE_OPTIONS = {{"backend": "eager"}}  # traced, and run as it was

def count(tensors):
    every = list(tensors)
    return [sum(each.numel() for each in every), sum(to_local(each).numel() for each in every)]

class Held(Callback):
    def on_train_end(self, trainer, module):
        optimizer = trainer.optimizers[0]
        moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        held = {{"weights": count(module.parameters()), "moments": count(moments)}}
        held["kept"] = count(module.buffers())
        with open(f"{out}-{{trainer.global_rank}}.json", "w") as file:
            json.dump(held, file)

class Death(Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == {death} and trainer.datamodule.domain.name == "food":
            trainer.strategy.barrier()
            os._exit(9)

if {torn}:  # the shards of a stage are written, and then nothing more
    from cpt.trainer import checkpoint as stages
    summed = stages.gather_objects
    stages.gather_objects = lambda value: (summed(value), os._exit(9))

made = loop.make_trainer
def watched(options, *, callbacks=(), **others):
    return made(options, callbacks=[*callbacks, Held(), Death()] if callbacks else (), **others)
loop.make_trainer = watched
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


@pytest.fixture
def run(tmp_path, corpora, cache):
    """Runs a command, of a size of SIZES, in a folder by its name; gives the folder and the exit code."""

    def started_run(
        name: str, *overrides: str, size: str = "bert", death: int = -1, torn: bool = False
    ) -> tuple[Path, int]:
        folder, script = tmp_path / name, tmp_path / f"{name}-{death}{torn}.py"
        how = {"root": str(ROOT), "out": str(tmp_path / name), "death": death, "torn": torn}
        script.write_text(SCRIPT.format(**how))
        places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
        places += [f"hydra.run.dir={folder}", "trainer.accelerator=cpu"]
        twin = bool({FSDP, DDP} & {*overrides})
        options = {"cwd": tmp_path, "log": tmp_path / f"{name}.log", "twin": twin}
        return folder, ended(started(script, *places, *SIZES[size], *overrides, **options))

    return started_run


@pytest.fixture
def learned(run, tmp_path):
    """The same of a run that has to end well; gives its folder."""

    def finished_run(name: str, *overrides: str, **how) -> Path:
        folder, code = run(name, *overrides, **how)
        assert code == 0, (tmp_path / f"{name}.log").read_text()
        return folder

    return finished_run


def four(folder: Path, *overrides: str, corpora: Path, cache: Path) -> None:
    """A run in 4 processes that torchrun starts."""
    places = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law,food]"]
    places += [f"hydra.run.dir={folder}", "trainer.accelerator=cpu", FSDP]
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launched, str(ROOT / "run.py"), *places, *SMALL, *overrides]
    ran = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def state_of(folder: Path, stage: int = 2) -> dict[str, torch.Tensor]:
    return load_stage(folder / "stages" / f"{stage:03}.pt")


def scores_of(folder: Path) -> dict:
    return json.loads((folder / "scores.json").read_text())


def assert_same(one: Path, other: Path, *, weights: float = WEIGHTS, nats: float = NATS) -> None:
    """The models and scores of two runs, and what is counted of their methods."""
    expected, found = state_of(one), state_of(other)
    assert expected.keys() == found.keys()
    for name in (name for name in expected if name.startswith("model.")):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=weights, msg=name)
    then, now = scores_of(one), scores_of(other)
    for row, same in zip(now["nll"], then["nll"], strict=True):
        assert row == pytest.approx(same, abs=nats)
    assert min(then["nll"][0][column] - then["nll"][2][column] for column in (0, 1)) > 50 * NATS  # learned
    for key in ("trained", "stored"):
        assert now[key] == then[key], key


METHODS = {
    **{name: [f"method={name}"] for name in ("ncl", "l2", "kd", "replay", "lora", "ema", "wise_ft", "one")},
    "ewc": ["method=ewc", "method.strength=1000"],
    "ewc by batch": ["method=ewc", "method.strength=1000", "method.estimator=batch"],
    "migu": ["method=migu"],
    "migu by rows": ["method=migu", "method.mask.backend=backward"],
    "migu by gradient": ["method=migu", "method.mask.importance=gradient", "method.mask.acts_on=frozen"],
    "migu by weight": ["method=migu", "method.mask.importance=weight", "method.mask.acts_on=update"],
    "demix": ["method=demix", "routing@method.routing=posterior"],
    "hat": ["method=hat", "method.form=full"],
    "hat in adapters": ["method=hat", "method.form=adapter", "method.routing.unlearned=posterior"],
    **{name: [f"method={name}"] for name in ("adapter", "olora", "inclora", "prompt", "cpt_plugin")},
    "pairs apart": ["method=inclora", "method.stored=pairs"],
    "osf": ["method=osf"],
    "osf by gradient": ["method=osf", "method.acts_on=gradient", "method.sides=block"],
    "recadam": ["method=recadam"],
    "reptile": ["method=reptile", "method.every=2"],
    "si": ["method=si", "method.strength=10"],
    "mas": ["method=mas"],
    "mofo": ["mask=mofo", "mask.mofo.share=0.5"],
    "migu by fisher": ["method=migu", "method.mask.importance=fisher", "method.mask.acts_on=update"],
    "a chain of prompts": ["method=progprompt", "method.residual=8"],
    "mixed by text": ["method=sapt", "replay=past"],
    "mixed by text, mocl": ["method=sapt", "method.key=cosine", "method.query=encoder"],
    "mixed by token": ["method=moelora"],
    "mixtures of experts": ["method=lifelong_moe", "method.experts=2", "method.balance=1"],
    "mixtures in a frozen trunk": ["method=lifelong_moe", "method.dense=frozen"],
    "sparse pairs": ["method=nlora", "method.strength=1e-4"],
    "merge": ["method=merge", "method.rule=slerp"],
    "merge by ties": ["method=merge", "method.rule=ties", "method.start=base"],
    "merge by ties of tensors": ["method=merge", "method.rule=dare_ties", "method.trimmed=tensor"],
    "merge by fisher": ["method=merge", "method.rule=fisher", "method.start=previous"],
    "merge of pairs": ["method=merge_lora", "method.truncated=2"],
    "moments carried": ["method=ncl", "optim.carry=moments", "schedule=wsd", "schedule.decay=0.5"],
}


# LoRA's pairs stay whole in each process, and lie in memory otherwise than their gradients come.
@pytest.mark.parametrize("method", run_few(METHODS, ["ewc", "lora"]))
def test_shared_out_weights_are_those_of_one_process(method, learned):
    alone = learned("alone", *METHODS[method])
    assert_same(alone, learned("sharded", FSDP, *METHODS[method]))


DRAWN = {  # where a process draws for itself: dropout, its part of a memory
    "das": ["method=das", "mask=migu"],
    "dga": ["method=dga"],
    "derpp": ["method=derpp"],
    "derpp by logits": ["method=derpp", "method.matched=logits"],
}


@pytest.mark.parametrize("method", run_few(DRAWN, []))
def test_shared_out_weights_are_those_of_ddp(method, learned):
    together = learned("together", DDP, *DRAWN[method])
    assert_same(together, learned("sharded", FSDP, *DRAWN[method]), weights=1e-5)


MODELS = [("gpt2", "ncl"), ("gpt2", "migu"), ("gpt2", "inclora"), ("t5", "ncl"), ("t5", "ewc")]


@pytest.mark.campaign
@pytest.mark.parametrize(("size", "method"), MODELS)
def test_tied_tables_and_two_stacks_are_shared_out(size, method, learned):
    alone = learned("alone", *METHODS[method], size=size)
    assert_same(alone, learned("sharded", FSDP, *METHODS[method], size=size), weights=1e-5)


WAYS = {
    "accumulated": (["trainer.accumulate_grad_batches=2"], NATS),
    "clipped": (["trainer.gradient_clip_val=0.05"], NATS),
    "clipped by value": (
        ["trainer.gradient_clip_val=1e-3", "+trainer.gradient_clip_algorithm=value"],
        NATS,
    ),
    "whole between passes": (["trainer.reshard_after_forward=false"], NATS),
    "activations again": (["trainer.gradient_checkpointing=true"], NATS),
    "compiled": (["trainer.compile=true"], NATS),
    "bf16-mixed": (["trainer.precision=bf16-mixed"], 2e-3),
    "bf16-true": (["trainer.precision=bf16-true"], 2e-2),
}


@pytest.mark.parametrize("way", run_few(WAYS, []))
def test_steps_of_all_kinds_are_those_of_one_process(way, learned):
    options, nats = WAYS[way]
    own = [each for each in options if "reshard" in each or "=true" in each]
    alone = learned("alone", *(each for each in options if each not in own))
    weights = WEIGHTS if nats == NATS else 3e-2
    assert_same(alone, learned("sharded", FSDP, *options), weights=weights, nats=nats)


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["ncl", "ewc", "kd", "demix", "hat"])
def test_four_processes_started_by_torchrun(method, learned, corpora, cache, tmp_path):
    alone = learned("alone", *METHODS[method])
    four(tmp_path / "four", *METHODS[method], corpora=corpora, cache=cache)
    assert_same(alone, tmp_path / "four")


RESTING = ["ewc", "l2", "kd", "ema", "demix", "moments carried"]


@pytest.mark.parametrize("method", run_few(RESTING, ["ewc", "demix"]))
def test_what_is_shared_out_may_rest_on_the_cpu(method, run, learned):
    """With the same bits, also of a run that is killed and goes on with it."""
    how = [FSDP, *METHODS[method]]
    plain = learned("plain", *how)
    folder, code = run("killed", *how, "trainer.offload=true", death=3)
    assert code != 0 and learned("killed", *how, "trainer.offload=true") == folder
    expected, found = state_of(plain), state_of(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert scores_of(folder)["nll"] == scores_of(plain)["nll"]


def test_parts_that_are_whole_in_each_process_lie_in_the_stages_file(run, learned):
    """What LoRA adds is not shared out, and stands in the file beside the shards."""
    how = [FSDP, "method=lora", "method.per_domain=true"]
    plain, (folder, code) = learned("plain", *how), run("killed", *how, "parts.keep=disk", death=3)
    kept, shards = open_stage(folder / "stages" / "001.pt")
    assert code != 0 and shards and any(name.startswith("bank.0:") for name in kept)
    learned("killed", *how, "parts.keep=disk")
    expected, found = state_of(plain), state_of(folder)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_process_holds_its_share_and_the_export_is_whole(learned, tmp_path):
    """Of weights, moments, anchor and Fisher half each; the model for others is a plain one."""
    folder = learned("sharded", FSDP, "method=ewc")
    for rank in (0, 1):
        held = json.loads((tmp_path / f"sharded-{rank}.json").read_text())
        for kind, (everything, own) in held.items():
            assert everything > 10_000 and own == pytest.approx(everything / 2, rel=0.05), (kind, rank)
    exported, state = AutoModelForMaskedLM.from_pretrained(folder / "model").state_dict(), state_of(folder)
    for name, weight in exported.items():
        assert torch.equal(weight, state[f"model.{name}"]), name


def test_a_killed_run_goes_on_with_the_same_bits(run, learned):
    how = [FSDP, "method=ewc", "optim.carry=moments"]
    through, (folder, code) = learned("through", *how), run("killed", *how, death=3)
    assert code != 0 and scores_of(folder)["rows"] == ["base", "law"]
    first, second = (each.stat().st_size for each in (folder / "checkpoints").glob("*.1.shards/*.distcp"))
    assert 0.8 < first / second < 1.25  # each process its rows
    assert learned("killed", *how) == folder
    expected, found = state_of(through), state_of(folder)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert scores_of(folder)["nll"] == scores_of(through)["nll"]


@pytest.mark.campaign
def test_four_processes_go_on_with_what_two_have_left(run, learned, corpora, cache, tmp_path):
    how = METHODS["moments carried"]
    alone, (folder, code) = learned("alone", *how), run("killed", FSDP, *how, death=3)
    assert code != 0
    four(folder, *how, corpora=corpora, cache=cache)
    assert_same(alone, folder)


OTHER_WAYS = {"to one process": (FSDP, None), "from ddp": (DDP, FSDP)}


@pytest.mark.parametrize("way", run_few(OTHER_WAYS, []))
def test_a_killed_run_goes_on_in_another_way(way, run, learned):
    first, second = ([each] if each else [] for each in OTHER_WAYS[way])
    alone, (folder, code) = learned("alone", "method=kd"), run("killed", *first, "method=kd", death=3)
    assert code != 0
    learned("killed", *second, "method=kd")
    assert_same(alone, folder)


def stages_of(folder: Path) -> list[str]:
    return sorted(each.name for each in (folder / "stages").iterdir())


def test_a_stage_that_was_half_written_does_not_count(run, learned):
    """Its shards are there and its file is not: it is learned on from its checkpoint, by one process."""
    alone = learned("alone", "method=ewc")
    folder, code = run("killed", FSDP, "method=ewc", torn=True)
    assert code != 0 and stages_of(folder) == ["001.1.shards"]
    assert scores_of(folder)["rows"] == ["base"]
    assert len([*(folder / "stages" / "001.1.shards").glob("*.distcp")]) == 2
    learned("killed", "method=ewc")
    assert_same(alone, folder)
    assert stages_of(folder) == ["002.pt"]


def test_stages_in_shards_grow_and_are_filled_by_any_number_of_processes(learned):
    """Stages of two processes: one more domain, and cells of an earlier stage, of one process and of two."""
    every = ["method=kd", "keep_stages=true"]
    alone, few_cells = learned("alone", *every), ["eval.columns=seen"]
    folder = learned("grown", FSDP, *every, *few_cells, "order=[law]")
    assert stages_of(folder) == ["001.1.shards", "001.pt"]
    shards = [each for each in (folder / "stages" / "001.1.shards").iterdir() if each.suffix == ".distcp"]
    sizes = [each.stat().st_size for each in shards]
    assert len(sizes) == 2 and 0.8 < sizes[0] / sizes[1] < 1.25
    learned("grown", *every, *few_cells)
    assert stages_of(folder) == ["001.1.shards", "001.pt", "002.pt"]
    assert None in scores_of(folder)["nll"][1]
    learned("grown", FSDP, *every)
    assert_same(alone, folder)
    assert scores_of(folder)["nll"][1] == pytest.approx(scores_of(alone)["nll"][1], abs=NATS)


def test_what_is_refused_is_measured_on_the_finished_run(learned, tmp_path):
    """End tasks ask a model as a whole: later, in one process."""
    for domain in ("law", "food"):
        write_task(tmp_path / "tasks", domain)
    quick = QUICK | {"root": tmp_path / "tasks", "when": "last", "seeds": "[3]"}
    folder = learned("sharded", FSDP, "method=kd")
    before = scores_of(folder)
    learned(
        "sharded", "method=kd", "endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())
    )
    after = scores_of(folder)
    assert (
        not before["endtasks"].get("scores") and after["endtasks"]["scores"] and after["nll"] == before["nll"]
    )
