"""Two processes on one machine (gloo): the same samples, masks and weights as one, also with FSDP."""

import csv
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from cpt.core.tensors import load_tensors
from tests.conftest import ROOT, SMALL, SMALL_GPT2, SMALL_T5
from tests.runs.reading import answers_of, assert_same_bits, command, read_scores, state_of
from tests.support.campaign import run_few
from tests.support.chat_decoder import write_checkpoint
from tests.support.endtask_fixtures import QUICK, write_task
from tests.support.forked_scripts import start_script, wait_for_exit
from tests.support.hook_methods import overrides_for
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
from cpt.data.collate import place_labels
from cpt.models import fast_kernels
from cpt.trainer import stage

fast_kernels.COMPILE_OPTIONS["backend"] = "eager"  # traced, and run as it was
made = sampler.TrainStream.__getitem__

def noted(stream, number):
    batch = made(stream, number)
    with open(f"{out}/batches-{{stream.rank}}.jsonl", "a") as file:
        rows = [[ids.tolist(), labels.tolist()] for ids, labels in zip(batch["input_ids"], place_labels(batch))]
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
trainer = stage.make_trainer
def watched(options, *, callbacks=(), **others):
    return trainer(options, callbacks=[*callbacks, Notes()] if callbacks else (), **others)
stage.make_trainer = watched
sys.argv[0] = __file__
from cpt.__main__ import main

main()
"""


def launch(folder: Path, out: Path, *options: str, death: int = -1, starts=False) -> int:
    """A run in `folder / "run"`, watched from within; gives its exit code.

    The second process is a fork of the first unless it `starts`, which orders sets in another way."""
    out.mkdir(parents=True)
    script = folder / f"{out.name}.py"
    log = out / "log"
    script.write_text(SCRIPT.format(root=str(ROOT), out=str(out), death=death))
    twin = not starts and any(option in options for option in (DDP[0], "strategy=fsdp"))
    run_dir_option = f"hydra.run.dir={folder / 'run'}"
    return wait_for_exit(
        start_script(script, *options, run_dir_option, cwd=folder, log=log, twin=twin), seconds=180
    )


def run(folder: Path, out: Path, *overrides: str, corpora: Path, cache: Path, **options: Any) -> int:
    return launch(folder, out, *command(corpora, cache, *SMALL, *overrides), **options)


def batches(out: Path, rank: int) -> list:
    lines = (out / f"batches-{rank}.jsonl").read_text().splitlines()
    return [batch for batch in map(json.loads, lines) if batch[0] != ["general"]]


def assert_shared(single_batches: list, parts: list[list], *, normalize=sorted) -> None:
    assert len(single_batches) == len(parts[0]) == len(parts[1])
    for whole_batch, first_part, second_part in zip(single_batches, *parts, strict=True):
        names, number, rows = whole_batch
        _, first_number, first_rows = first_part
        _, second_number, second_rows = second_part
        assert number == first_number == second_number
        assert len(first_rows) == len(second_rows) == len(rows) // 2
        assert normalize(first_rows + second_rows) == normalize(rows), names


def assert_agree(out: Path, count: int) -> None:
    first, second = ((out / f"hashes-{rank}.txt").read_text().splitlines() for rank in (0, 1))
    assert first == second and len({*first}) == count


def assert_scored_alike(single_run: Path, shared_run: Path, *, rel: float = 1e-5) -> None:
    single_scores = read_scores(single_run)
    shared_scores = read_scores(shared_run)
    assert shared_scores["rows"] == single_scores["rows"]
    assert shared_scores["scored"] == single_scores["scored"]
    for row, expected in zip(shared_scores["nll"], single_scores["nll"], strict=True):
        assert row == pytest.approx(expected, rel=rel)


@pytest.fixture(scope="module")
def endtasks(tmp_path_factory):
    root = tmp_path_factory.mktemp("tasks")
    for domain in ("law", "food"):
        write_task(root, domain)
    quick = QUICK | {"root": root, "when": "each", "seeds": "[3]"}
    return ["endtask=texts", *(f"endtask.{name}={value}" for name, value in quick.items())]


@pytest.fixture(scope="module")
def single_run(corpora, cache, tmp_path_factory, endtasks):
    folder = tmp_path_factory.mktemp("one")
    assert run(folder, folder / "out", *endtasks, corpora=corpora, cache=cache) == 0
    return folder


@pytest.fixture(scope="module")
def shared_run(corpora, cache, tmp_path_factory, endtasks):
    """Killed within the second domain and started again; what it had left then lies in `left`."""
    folder = tmp_path_factory.mktemp("two")
    options = [*DDP, *endtasks]
    assert run(folder, folder / "first", *options, corpora=corpora, cache=cache, death=4) != 0
    assert read_scores(folder / "run")["rows"] == ["base", "law"]
    shutil.copytree(folder / "run", folder / "left" / "run")
    code = run(folder, folder / "second", *options, corpora=corpora, cache=cache)
    assert code == 0, (folder / "second" / "log").read_text()
    return folder


def assert_learned_alike(single_run: Path, shared_run: Path, *, normalize=sorted) -> None:
    single_batches = batches(single_run / "out", 0)
    assert len(single_batches) == 12
    before_kill = [batches(shared_run / "first", rank)[:10] for rank in (0, 1)]
    assert_shared(single_batches[:10], before_kill, normalize=normalize)
    after_kill = [batches(shared_run / "second", rank) for rank in (0, 1)]
    assert_shared(single_batches[10:], after_kill, normalize=normalize)
    for out in ("first", "second"):
        assert_agree(shared_run / out, 1)
    assert_scored_alike(single_run / "run", shared_run / "run")


def test_two_processes_learn_as_one(single_run, shared_run):
    assert_learned_alike(single_run, shared_run)


def test_two_processes_score_as_one(single_run, shared_run):
    assert_scored_alike(single_run / "run", shared_run / "run")
    single_scores = read_scores(single_run / "run")
    shared_scores = read_scores(shared_run / "run")
    for kind, rows in shared_scores["endtasks"]["scores"].items():
        expected = single_scores["endtasks"]["scores"][kind]
        is_missing = [[None in seed_scores for seed_scores in row] for row in rows]
        assert is_missing == [[True] * 2, [False, True], [False] * 2]
        pairs = zip(sum(sum(rows, []), []), sum(sum(expected, []), []), strict=True)
        assert all(value == pytest.approx(score, abs=0.11) for value, score in pairs)  # 2 of 20 examples
    assert shared_scores["seen"] == single_scores["seen"]
    assert shared_scores["trained"] == single_scores["trained"]
    assert shared_scores["flops"] == pytest.approx(single_scores["flops"], rel=1e-6)
    assert min(shared_scores["memory"][1:]) > 1e8


def test_a_run_resumes_with_another_number_of_processes(single_run, shared_run, corpora, cache, endtasks):
    """Killed with two processes within a domain, it goes on with one, and with the same order of samples."""
    assert run(shared_run / "left", shared_run / "left" / "out", *endtasks, corpora=corpora, cache=cache) == 0
    assert batches(shared_run / "left" / "out", 0) == batches(single_run / "out", 0)[10:]
    assert_scored_alike(single_run / "run", shared_run / "left" / "run")
    assert read_scores(shared_run / "left" / "run")["seen"] == read_scores(single_run / "run")["seen"]


@pytest.mark.campaign
def test_statistics_are_those_of_all_processes(launched):
    method = ["method=das", "mask=migu", "method.general_importance=null", "trainer.importance_samples=40"]
    method += ["trainer.accumulate_grad_batches=2"]
    # What is dropped is each process's own draw; fewer samples would be the first of each micro-batch.
    method += ["method.contrast_dropout=1e-9", "method.contrast_samples=1"]
    single_run = launched("one", *method)
    shared_run = launched("two", *DDP, *method, starts=True)
    assert_agree(shared_run.parent / "out-1", 2)
    assert_scored_alike(single_run, shared_run, rel=1e-4)
    single_state = state_of(single_run)
    shared_state = state_of(shared_run)
    for name in single_state:
        if name.startswith("model."):
            continue
        atol = 1e-3 * single_state[name].abs().max().item()
        torch.testing.assert_close(shared_state[name], single_state[name], rtol=2e-2, atol=atol)


PARTS = {
    "demix": ["method=demix", "routing@method.routing=posterior"],
    "lifelong_moe": ["method=lifelong_moe", "method.num_experts=2", "method.balance=1"],
}
SEAMS = {
    name: [*overrides_for(name), "optim.state_across_domains=moments"]
    for name in ("agem", "companions", "elle")
}
# Each token's weight depends on its own sample alone.
LOSSES = {
    "eaft": ["loss=eaft"],
    "rho1": ["loss=rho1", "loss.ranked=sequence"],
    "flow": ["loss=flow"],
}


@pytest.mark.parametrize("method", run_few(PARTS | SEAMS | LOSSES, ["demix"]))
def test_two_processes_agree_and_are_as_one(method, small, start, launched, tmp_path):
    """On what is drawn, where an expert begins and which parts score a text, a projected gradient, a grown
    model and a peer; the memory of A-GEM alone is each process's own."""
    options = {**PARTS, **SEAMS, **LOSSES}[method]
    shared_run = launched("two", *DDP, *options)
    assert_agree(shared_run.parent / "out-0", 2)
    start(small(ORDER, *options), tmp_path / "alone")
    if method != "agem":
        assert_scored_alike(tmp_path / "alone", shared_run, rel=1e-4)
        single_scores = read_scores(tmp_path / "alone")
        shared_scores = read_scores(shared_run)
        for row, expected in zip(shared_scores["modules"], single_scores["modules"], strict=True):
            assert {text: pytest.approx(weights, abs=1e-3) for text, weights in expected.items()} == row


def remove_padding(rows: list) -> list:
    """Rows without what fills them up, 0 or 1: a process pads to its own longest."""
    unpadded_rows = []
    for ids, labels in rows:
        real_ids = [token for token in ids if token > 1]
        real_labels = [label for label in labels if label != -100]
        unpadded_rows.append([real_ids, real_labels])
    return sorted(unpadded_rows)


def test_two_processes_learn_and_answer_as_one_whether_killed_or_not(cache, tmp_path):
    root = write_tasks(tmp_path, ("law", "food"), train=60, test=25)
    options = [*SMALL_T5, "domains=tasks", f"domains.root={root}", "answers.max_new_tokens=6"]
    options += ["answers.batch_size=7", "model.max_seq_length=64", ORDER, f"cache_dir={cache}"]
    single_run = tmp_path / "one"
    shared_run = tmp_path / "two"
    assert launch(single_run, single_run / "out", *options) == 0, (single_run / "out" / "log").read_text()
    assert launch(shared_run, shared_run / "first", *options, *DDP, death=4) != 0
    assert launch(shared_run, shared_run / "second", *options, *DDP) == 0, (
        shared_run / "second" / "log"
    ).read_text()
    assert_learned_alike(single_run, shared_run, normalize=remove_padding)
    shared_answers = answers_of(shared_run / "run")
    assert len(shared_answers) == 6 and shared_answers == answers_of(single_run / "run")
    shared_record = read_scores(shared_run / "run")["answers"]
    single_record = read_scores(single_run / "run")["answers"]
    assert all(shared_record[name] == single_record[name] for name in ("tasks", "metrics", "intervals"))


def test_two_processes_write_the_answers_of_one_whether_killed_or_not(cache, tmp_path):
    """Of method=sdft: what is written to an example does not depend on the process that has it."""
    root = write_tasks(tmp_path, ("law", "food"), train=60, test=10, size=(1, 8))
    options = [*SMALL_GPT2, "method=sdft", "domains=tasks", "domains/template=bare", f"domains.root={root}"]
    options += [
        "answers=none",
        "model.max_seq_length=64",
        "method.max_new_tokens=8",
        ORDER,
        f"cache_dir={cache}",
    ]
    single_run = tmp_path / "one"
    shared_run = tmp_path / "two"
    assert launch(single_run, single_run / "out", *options) == 0, (single_run / "out" / "log").read_text()
    assert launch(shared_run, shared_run / "first", *options, *DDP, death=4) != 0
    assert launch(shared_run, shared_run / "second", *options, *DDP) == 0
    assert_scored_alike(single_run / "run", shared_run / "run")


FSDP = "strategy=fsdp"
WEIGHTS, NATS = 5e-6, 1e-6  # how far rounding may part two sums of other order, of weights that move by 1e-2


@pytest.fixture
def launched(tmp_path, corpora, cache):
    """Runs a command in a folder by its name, to its end unless it is to die; gives the run's folder."""
    count = itertools.count()

    def go(name: str, *options: str, small=SMALL, death: int = -1, starts=False) -> Path:
        folder = tmp_path / name
        out = tmp_path / name / f"out-{next(count)}"
        words = command(corpora, cache, "trainer.accelerator=cpu", *small, *options)
        code = launch(folder, out, *words, death=death, starts=starts)
        assert (code == 0) == (death < 0), (out / "log").read_text()
        return folder / "run"

    return go


@pytest.mark.campaign
def test_two_processes_measure_chats_as_one(launched, tmp_path):
    write_checkpoint(tmp_path / "decoder")
    options = [f"model.name_or_path={tmp_path / 'decoder'}", "chats.generate=5", "chats.max_new_tokens=8"]
    options += ["chats.batch_size=2", "optim.lr=0.01"]
    chats = []
    for name, further_options in (("one", []), ("two", DDP)):
        run = launched(name, *options, *further_options, small=SMALL_GPT2)
        chats.append(read_scores(run)["chats"])
    single_chats, shared_chats = chats
    assert shared_chats["answers"][0] == single_chats["answers"][0]
    for key in ("nll", "base_answer_nll"):
        assert shared_chats[key] == pytest.approx(single_chats[key], abs=1e-4)


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["strategy=ddp", "strategy=fsdp"])
def test_two_processes_read_sources_of_replay_as_one_whether_killed_or_not(strategy, launched, tmp_path):
    write_checkpoint(tmp_path / "decoder")
    turns = [{"role": "user", "content": "A star?"}, {"role": "assistant", "content": "A young star."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "web.jsonl").write_text("\n".join(json.dumps({"text": f"Word {n}."}) for n in range(300)))
    options = [f"model.name_or_path={tmp_path / 'decoder'}", "model.max_seq_length=64", "chats=none", ORDER]
    options += ["replay=sources", "trainer.steps=4", "+logger.csv=true"]
    options.append(
        f"replay.sources={{chat: {{path: {tmp_path / 'chats.jsonl'}, format: messages, ratio: 0.25}}, "
        f"web: {{path: {tmp_path / 'web.jsonl'}, ratio: 0.25, end_ratio: 0.125}}}}"
    )
    single_run = launched("one", *options, small=SMALL_GPT2)
    options += [strategy, "trainer.devices=2"]
    launched("two", *options, small=SMALL_GPT2, death=3)
    shared_run = launched("two", *options, small=SMALL_GPT2)

    single_scores = read_scores(single_run)
    shared_scores = read_scores(shared_run)
    assert shared_scores["mixture"] == single_scores["mixture"]
    for row, expected_row in zip(shared_scores["nll"], single_scores["nll"], strict=True):
        assert row == pytest.approx(expected_row, abs=1e-4)
    single_curves = read_part_losses(single_run)
    shared_curves = read_part_losses(shared_run)
    assert shared_curves.keys() == single_curves.keys() and len(single_curves) > 4
    for point, loss in single_curves.items():
        assert shared_curves[point] == pytest.approx(loss, abs=1e-3)


def read_part_losses(run: Path) -> dict[tuple[str, str], float]:
    """The losses of parts of the mixture in metrics.csv, by name and step."""
    losses = {}
    with (run / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            if row["name"].startswith("train/lm_"):
                losses[row["name"], row["step"]] = float(row["value"])
    return losses


@pytest.mark.campaign
@pytest.mark.parametrize("strategy", ["strategy=ddp", "strategy=fsdp"])
def test_two_processes_measure_the_divergence_as_one(strategy, launched):
    options = ["divergence=base", "optim.lr=0.01", "monitor.every=3", "monitor.max_tokens=200"]
    single_scores = read_scores(launched("one", *options))
    shared_scores = read_scores(launched("two", *options, strategy, "trainer.devices=2"))
    single_rows = single_scores["divergence"]["kl"]
    shared_rows = shared_scores["divergence"]["kl"]
    assert {tuple(estimate) for estimate in shared_rows[0].values()} == {(0, 0, 0)}
    for single_row, shared_row in zip(single_rows, shared_rows, strict=True):
        for text, estimate in single_row.items():
            assert shared_row[text] == pytest.approx(estimate, rel=1e-3, abs=1e-6)
    single_law = single_scores["monitor"]["law"]["divergence"]["law"][-1]
    shared_law = shared_scores["monitor"]["law"]["divergence"]["law"][-1]
    assert single_law[0] > 1e-4 and shared_law == pytest.approx(single_law, rel=1e-3)


def assert_same(run: Path, other_run: Path, *, weights: float = WEIGHTS, nats: float = NATS) -> None:
    expected = state_of(run)
    state = state_of(other_run)
    assert expected.keys() == state.keys()
    for name in expected:
        if name.startswith("model."):
            torch.testing.assert_close(state[name], expected[name], rtol=0, atol=weights, msg=name)

    expected_scores = read_scores(run)
    scores = read_scores(other_run)
    for row, expected_row in zip(scores["nll"], expected_scores["nll"], strict=True):
        assert row == pytest.approx(expected_row, abs=nats)
    base_row, _, last_row = expected_scores["nll"]
    assert min(base_row[column] - last_row[column] for column in (0, 1)) > 50 * NATS  # learned
    assert (scores["trained"], scores["stored"]) == (expected_scores["trained"], expected_scores["stored"])


PLAIN = "ncl l2 kd replay lora ema wise_ft one migu adapter olora inclora prompt cpt_plugin osf recadam"
METHODS = {
    **{name: [f"method={name}"] for name in PLAIN.split()},
    "ewc": ["method=ewc", "method.strength=1000"],
    "demix": ["method=demix", "routing@method.routing=posterior"],
    "hat": ["method=hat", "method.form=full"],
    "reptile": ["method=reptile", "method.interpolate_every=2"],
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


# What these methods add to a frozen base stays whole in each process; files have none of the base's shards.
WITHOUT_SHARDS = {
    "lora",
    "adapter",
    "prompt",
    "mixed by text",
    "mixed by token",
    "parts on disk",
}


@pytest.mark.parametrize("method", run_few(METHODS, ["parts on disk"]))
def test_sharded_weights_equal_those_of_one_process(method, launched):
    single_run = launched("alone", *METHODS[method])
    options = [FSDP, *METHODS[method]]
    folder = launched("sharded", *options, death=3)
    stage = load_tensors(folder / "stages" / "001.pt")
    assert ("shards" in stage) == (method not in WITHOUT_SHARDS)
    assert method != "parts on disk" or any(name.startswith("domain_params.0:") for name in stage)
    launched("sharded", *options)
    tolerance = 1e-5 if method == "osf" else WEIGHTS  # singular vectors are less exact
    assert_same(single_run, folder, weights=tolerance)


# Where a process draws for itself: dropout, its part of a memory; tables that are tied, two stacks.
DRAWN = [["method=das", "mask=migu"], ["method=dga"], ["method=derpp"]]
TIED = [METHODS[name] for name in ("ncl", "migu", "inclora", "ewc")]
STEPS = ["accumulate_grad_batches=2", "gradient_clip_val=0.05"]
KINDS = ["gradient_checkpointing", "compile"]
HALF = ["trainer.precision=bf16-true"]
OTHERS = [  # options, those of the run beside it, sizes of the model, how far weights and losses may be apart
    *((options, ["strategy=ddp", *options], SMALL, 1e-5, NATS) for options in DRAWN),
    *((options, options, SMALL_GPT2, 1e-5, NATS) for options in TIED),
    *((options, options, SMALL_T5, 1e-5, NATS) for options in TIED),
    *(([f"trainer.{option}"], [f"trainer.{option}"], SMALL, WEIGHTS, NATS) for option in STEPS),
    *(([f"trainer.{option}=true"], [], SMALL, WEIGHTS, NATS) for option in KINDS),
    (["trainer.reshard_after_forward=false"], [], SMALL, WEIGHTS, NATS),
    (HALF, HALF, SMALL, 3e-2, 2e-2),
]


@pytest.mark.campaign
@pytest.mark.parametrize(("options", "other_options", "small", "weights", "nats"), OTHERS)
def test_sharded_weights_equal_those_of_ddp_for_other_models_and_all_kinds_of_steps(
    options, other_options, small, weights, nats, launched
):
    other_run = launched("other", *other_options, small=small)
    sharded = launched("sharded", FSDP, *options, small=small)
    assert_same(other_run, sharded, weights=weights, nats=nats)


@pytest.mark.campaign
@pytest.mark.parametrize("method", ["ewc", "kd", "demix", "moments carried"])
def test_what_is_shared_out_may_rest_on_the_cpu(method, launched):
    options = [FSDP, *METHODS[method]]
    plain = launched("plain", *options)
    launched("killed", *options, "trainer.offload_method_state=true", death=3)
    assert_same_bits(launched("killed", *options, "trainer.offload_method_state=true"), plain)


@pytest.mark.campaign
def test_a_process_holds_its_share_and_the_export_is_whole_and_a_kill_changes_no_bit(launched, tmp_path):
    """Of weights, moments, anchor and Fisher half each; the model for others is a plain one."""
    options = [FSDP, "method=ewc", "optim.state_across_domains=moments"]
    through = launched("through", *options)
    folder = launched("killed", *options, death=3)
    assert read_scores(folder)["rows"] == ["base", "law"]
    sizes = [shard.stat().st_size for shard in (folder / "checkpoints").glob("*.1.shards/*.distcp")]
    assert len(sizes) == 2 and 0.8 < sizes[0] / sizes[1] < 1.25
    assert_same_bits(launched("killed", *options), through)
    for rank in (0, 1):
        (path,) = (tmp_path / "through").glob(f"out-*/held-{rank}.json")
        bytes_by_kind = json.loads(path.read_text())
        for kind, (everything, process_bytes) in bytes_by_kind.items():
            assert everything > 10_000 and process_bytes == pytest.approx(everything / 2, rel=0.05), (
                kind,
                rank,
            )
    exported = AutoModelForMaskedLM.from_pretrained(folder / "model").state_dict()
    state = state_of(folder)
    assert all(torch.equal(weight, state[f"model.{name}"]) for name, weight in exported.items())


@pytest.mark.campaign
@pytest.mark.parametrize(("first", "second"), [(FSDP, None), ("strategy=ddp", FSDP)])
def test_a_killed_run_resumes_under_another_strategy(first, second, launched):
    single_run = launched("alone", "method=kd")
    folder = launched("killed", first, "method=kd", death=3)
    launched("killed", *filter(None, [second]), "method=kd")
    assert_same(single_run, folder)


@pytest.mark.campaign
def test_two_processes_round_weights_in_16_bits_alike(launched):
    """Each has the whole weights, and draws the same numbers for them."""
    shared_run = launched("two", *DDP, *HALF, ORDER, "mask=migu", "mask.migu.apply_to=update")
    assert_agree(shared_run.parent / "out-0", 2)


@pytest.mark.campaign
def test_a_killed_run_with_sharded_weights_in_16_bits_ends_with_the_same_bits(launched):
    options = [FSDP, *HALF, "optim.state_across_domains=moments"]
    uninterrupted = launched("through", *options)
    launched("killed", *options, death=3)
    assert_same_bits(launched("killed", *options), uninterrupted)


# A step of Muon multiplies matrices in bfloat16, whose sums of rows have another order when they are sharded.
@pytest.mark.campaign
@pytest.mark.parametrize(("options", "weights"), [
    ([], 2e-3),
    (HALF, 3e-2),
    (["mask=mofo", "mask.mofo.share=0.5"], 2e-3),
])  # fmt: skip
def test_sharded_matrices_are_trained_by_muon(options, weights, launched):
    options = ["optim=muon", "optim.state_across_domains=moments", *options]
    single_run = launched("alone", *options)
    uninterrupted = launched("sharded", FSDP, *options)
    assert_same(single_run, uninterrupted, weights=weights, nats=2e-2)
    launched("killed", FSDP, *options, death=3)
    assert_same_bits(launched("killed", FSDP, *options), uninterrupted)
