"""Methods on examples or documents that share rows and are isolated from each other."""

import numpy as np
import pytest

from tests.methods.test_contract import bits, told
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer
from tests.support.making import ORDER, made
from tests.support.task_fixtures import write_tasks

DOCUMENT_MASK = "domains.packing=document_mask"
OPTIONS = {
    "replay": "method.mixture.general_ratio=0.25",
    "derpp": "method.buffer_size=16",
    "agem": "method.buffer_size=16",
}
OPTIONS |= dict.fromkeys(("lora", "olora"), "method.lora_dropout=0")
ON_TASKS = ["ncl", "migu", "replay", "derpp", "kd", "lora", "ewc", "das", "hat", "olora", "adapter", "demix"]
ON_TASKS += ["lifelong_moe", "cpt_plugin"]
ON_TEXT = ["ncl", "das", "derpp", "replay", "agem", "migu", "kd", "demix", "lora"]
RUNS = [f"{kind} {name}" for kind in ("small", "small_gpt2") for name in ON_TEXT]
RUNS += [f"tasks {name}" for name in ON_TASKS]
DRAWING = {"das"}  # dropout at each step, which is drawn for other rows


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), ("law", "food"), train=80, test=20, size=(1, 8))


@pytest.fixture
def config(small, small_gpt2, tasks):
    on_tasks = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "model.max_seq_length=64"]
    on_text, on_tasks = [ORDER, "model.max_seq_length=48"], [*on_tasks, "answers=none"]
    kinds = {"small": (small, on_text), "small_gpt2": (small_gpt2, on_text), "tasks": (small_gpt2, on_tasks)}

    def build(which: str, *overrides: str):
        kind, method = which.split()
        config, given = kinds[kind]
        own = [OPTIONS[method]] if method in OPTIONS else []
        return config(*given, f"method={method}", *own, *overrides)

    return build


@pytest.mark.parametrize("which", run_few(RUNS, ["small das", "tasks derpp"]))
def test_two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits(
    which, config, killing, start, tmp_path
):
    whole, killed, padded = (tmp_path / name for name in ("whole", "killed", "padded"))
    start(config(which, DOCUMENT_MASK), whole)
    killing(Killer(step=3, domain="law"))
    with pytest.raises(KilledError):
        start(config(which, DOCUMENT_MASK), killed)
    killing(None)
    start(config(which, DOCUMENT_MASK), killed)
    assert bits(killed) == bits(whole)
    one = told(whole)
    assert one["run"]["finished"] and one["nll"][-1] != one["nll"][0]
    if which.startswith("tasks"):
        start(config(which), padded)
        other = told(padded)
        assert one["nll"][0] == other["nll"][0] and one["scored"] == other["scored"]
        if which.split()[1] not in DRAWING:
            np.testing.assert_allclose(one["nll"], other["nll"], rtol=1e-5)
    else:
        assert one["conditions"]["packing"] == "document_mask"


@pytest.mark.parametrize("which", ["small derpp", "small_gpt2 agem"])
def test_a_memory_keeps_the_document_of_each_token(which, config):
    run = made(config(which, DOCUMENT_MASK))
    run.learn(0)
    memory, text = run.module.memory, run.data.train["law"]
    drawn, rows = memory.batch(memory.draw(4, purpose="match")), np.arange(len(text))
    pairs = list(zip(text.ids(rows), text.document_of(rows), strict=True))
    stored = {tuple(ids[owners >= 0].tolist()): owners.tolist() for ids, owners in pairs}
    restored = run.data.objective.restored(drawn)["input_ids"]
    assert len(drawn["segments"]) == 4
    for ids, owners in zip(restored, drawn["segments"], strict=True):
        assert stored[tuple(ids[owners >= 0].tolist())] == owners.tolist()
