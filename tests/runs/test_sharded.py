"""`strategy=fsdp` on one machine (gloo): weights that are shared out are those of one process, and of ddp."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from cpt.core.tensors import load_tensors
from tests.conftest import SMALL, SMALL_GPT2, SMALL_T5
from tests.runs.reading import assert_same_bits, command, state_of, told_by
from tests.runs.test_distributed import launch
from tests.support.campaign import run_few

pytestmark = pytest.mark.slow

FSDP, DDP = "strategy=fsdp", "strategy=ddp"
WEIGHTS, NATS = 2e-6, 1e-6  # how far rounding may part two sums of other order, of weights that move by 1e-2


@pytest.fixture
def run(tmp_path, corpora, cache):
    """Runs a command in a folder by its name, to its end unless it is to die; gives the run's folder."""
    count = itertools.count()

    def go(name: str, *given: str, small=SMALL, death: int = -1) -> Path:
        folder, out = tmp_path / name, tmp_path / name / f"out-{next(count)}"
        words = command(corpora, cache, "trainer.accelerator=cpu", *small, *given)
        code = launch(folder, out, *words, death=death)
        assert (code == 0) == (death < 0), (out / "log").read_text()
        return folder / "run"

    return go


def assert_same(one: Path, other: Path, *, weights: float = WEIGHTS, nats: float = NATS) -> None:
    expected, found = state_of(one), state_of(other)
    assert expected.keys() == found.keys()
    for name in (name for name in expected if name.startswith("model.")):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=weights, msg=name)
    then, now = told_by(one), told_by(other)
    for row, same in zip(now["nll"], then["nll"], strict=True):
        assert row == pytest.approx(same, abs=nats)
    assert min(then["nll"][0][column] - then["nll"][2][column] for column in (0, 1)) > 50 * NATS  # learned
    assert (now["trained"], now["stored"]) == (then["trained"], then["stored"])


PLAIN = "ncl l2 kd replay lora ema wise_ft one migu adapter olora inclora prompt cpt_plugin osf recadam"
METHODS = {
    **{name: [f"method={name}"] for name in PLAIN.split()},
    "ewc": ["method=ewc", "method.strength=1000"],
    "demix": ["method=demix", "routing@method.routing=posterior"],
    "hat": ["method=hat", "method.form=full"],
    "reptile": ["method=reptile", "method.every=2"],
    "si": ["method=si", "method.strength=10"],
    "mofo": ["mask=mofo", "mask.mofo.share=0.5"],
    "migu by fisher": ["method=migu", "method.mask.importance=fisher", "method.mask.apply_to=update"],
    "mixed by text": ["method=sapt", "replay=past"],
    "mixed by token": ["method=moelora"],
    "mixtures of experts": ["method=lifelong_moe", "method.num_experts=2", "method.balance=1"],
    "merge": ["method=merge", "method.rule=slerp"],
    "merge by fisher": ["method=merge", "method.rule=fisher", "method.start=previous"],
    "merge of pairs": ["method=merge_lora"],
    "parts on disk": ["method=lora", "method.per_domain=true", "modules.storage=disk"],
    "moments carried": ["optim.state_across_domains=moments", "lr_scheduler=wsd", "lr_scheduler.decay=0.5"],
}


# What LoRA adds stays whole in each process, and stands in the stage's file beside the shards.
@pytest.mark.parametrize("method", run_few(METHODS, ["parts on disk"]))
def test_shared_out_weights_are_those_of_one_process(method, run):
    alone, how = run("alone", *METHODS[method]), [FSDP, *METHODS[method]]
    folder = run("sharded", *how, death=3)
    kept = load_tensors(folder / "stages" / "001.pt")
    assert kept["shards"] and (method != "parts on disk" or any(name.startswith("bank.0:") for name in kept))
    run("sharded", *how)
    assert_same(alone, folder)


# Where a process draws for itself: dropout, its part of a memory; tables that are tied, two stacks.
DRAWN = [["method=das", "mask=migu"], ["method=dga"], ["method=derpp"]]
TIED = [METHODS[name] for name in ("ncl", "migu", "inclora", "ewc")]
STEPS, KINDS = ["accumulate_grad_batches=2", "gradient_clip_val=0.05"], ["gradient_checkpointing", "compile"]
HALF = ["trainer.precision=bf16-true"]
OTHERS = [  # options, those of the run beside it, sizes of the model, how far weights and losses may be apart
    *((given, [DDP, *given], SMALL, 1e-5, NATS) for given in DRAWN),
    *((given, given, small, 1e-5, NATS) for small in (SMALL_GPT2, SMALL_T5) for given in TIED),
    *(([f"trainer.{each}"], [f"trainer.{each}"], SMALL, WEIGHTS, NATS) for each in STEPS),
    *(([f"trainer.{each}=true"], [], SMALL, WEIGHTS, NATS) for each in KINDS),
    (["trainer.reshard_after_forward=false"], [], SMALL, WEIGHTS, NATS),
    (HALF, HALF, SMALL, 3e-2, 2e-2),
]


@pytest.mark.campaign
@pytest.mark.parametrize(("given", "beside", "small", "weights", "nats"), OTHERS)
def test_shared_out_weights_are_those_of_ddp_of_other_models_and_of_steps_of_all_kinds(
    given, beside, small, weights, nats, run
):
    other, sharded = run("other", *beside, small=small), run("sharded", FSDP, *given, small=small)
    assert_same(other, sharded, weights=weights, nats=nats)


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["ewc", "kd", "demix", "moments carried"])
def test_what_is_shared_out_may_rest_on_the_cpu(method, run):
    how = [FSDP, *METHODS[method]]
    plain = run("plain", *how)
    run("killed", *how, "trainer.offload_method_state=true", death=3)
    assert_same_bits(run("killed", *how, "trainer.offload_method_state=true"), plain)


@pytest.mark.campaign
def test_a_process_holds_its_share_and_the_export_is_whole_and_a_kill_changes_no_bit(run, tmp_path):
    """Of weights, moments, anchor and Fisher half each; the model for others is a plain one."""
    how = [FSDP, "method=ewc", "optim.state_across_domains=moments"]
    through, folder = run("through", *how), run("killed", *how, death=3)
    assert told_by(folder)["rows"] == ["base", "law"]
    sizes = [each.stat().st_size for each in (folder / "checkpoints").glob("*.1.shards/*.distcp")]
    assert len(sizes) == 2 and 0.8 < sizes[0] / sizes[1] < 1.25
    assert_same_bits(run("killed", *how), through)
    for rank in (0, 1):
        (path,) = (tmp_path / "through").glob(f"out-*/held-{rank}.json")
        held = json.loads(path.read_text())
        for kind, (everything, own) in held.items():
            assert everything > 10_000 and own == pytest.approx(everything / 2, rel=0.05), (kind, rank)
    exported, state = AutoModelForMaskedLM.from_pretrained(folder / "model").state_dict(), state_of(folder)
    assert all(torch.equal(weight, state[f"model.{name}"]) for name, weight in exported.items())


@pytest.mark.campaign
@pytest.mark.parametrize(("first", "second"), [(FSDP, None), (DDP, FSDP)])
def test_a_killed_run_goes_on_in_another_way(first, second, run):
    alone, folder = run("alone", "method=kd"), run("killed", first, "method=kd", death=3)
    run("killed", *filter(None, [second]), "method=kd")
    assert_same(alone, folder)
