"""Methods on examples or documents that share rows and are isolated from each other: they learn what they do
of padded ones, a killed run ends with the same bits, and memories keep whose token is whose."""

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cpt.data import sampler
from cpt.data.sampler import TrainStream
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from tests.methods.test_contract import bits, told
from tests.support.campaign import run_few
from tests.support.data_fixtures import fake_trainer
from tests.support.killing import KilledError, Killer
from tests.support.making import ORDER, clones, made
from tests.support.task_fixtures import write_tasks

ISOLATED = "domains.packing=isolated"
OPTIONS = {"replay": "method.mixture.general=0.25", "derpp": "method.memory=16", "agem": "method.memory=16"}
OPTIONS |= dict.fromkeys(("lora", "olora"), "method.dropout=0")
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
    on_tasks = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "model.length=64"]
    on_text, on_tasks = [ORDER, "model.length=48"], [*on_tasks, "answers=none"]
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
    start(config(which, ISOLATED), whole)
    killing(Killer(step=3, domain="law"))
    with pytest.raises(KilledError):
        start(config(which, ISOLATED), killed)
    killing(None)
    start(config(which, ISOLATED), killed)
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
        assert one["conditions"]["packing"] == "isolated"


def stream_of(run, **how):
    """The last task's batches, with raw text and the task before among them where the method replays."""
    domain = run.data.domains[-1]
    given = {"seed": 0, "steps": [4], "batch_size": 16, "rank": 0, "world": 1, "accumulate": 1} | how
    texts = {part: run.data.train[part] for part in domain.parts}
    return TrainStream(texts, objective=run.data.objective, earlier=run.data.replay_pools(domain), **given)


class Noting(Callback):
    """Keeps the terms of a stage's first batch and their gradient; the step itself is as without it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            state, terms = clones(module.state_dict()), module.losses(batch)
            sum(terms.values()).backward()
            self.gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            self.terms = {name: float(value.detach()) for name, value in terms.items()}
            module.zero_grad()
            module.load_state_dict(state)


@pytest.mark.parametrize("method", run_few(sorted({*ON_TASKS} - DRAWING), ["derpp", "migu"]))
def test_terms_and_gradients_are_those_of_the_padded_batch(method, config):
    """In the second task, where memories, teachers and penalties speak, from the same state on. MIGU counts
    no padding of a shared row, and what DER draws shares rows as well."""
    runs = padded, shared = [made(config(f"tasks {method}", *packing)) for packing in ([], [ISOLATED])]
    padded.learn(0)
    for run in runs:
        run.data.enter(run.data.domains[0])
        run.module.setup_stage(run.data.domains[0])
    shared.module.load_state_dict(padded.module.state_dict())
    one, other, found = Noting(), Noting(), []
    padded.learn(1, one)
    shared.learn(1, other)
    assert one.terms == pytest.approx(other.terms, rel=1e-5) and one.terms["lm"] > 0
    assert float((one.gradient - other.gradient).norm() / one.gradient.norm()) < 1e-6
    for run in runs:
        if method == "migu":
            [mask], batch = run.module.masks, stream_of(run)[0]
            mask.sums.zero_()
            run.module.load_state_dict(padded.module.state_dict())
            mask.recording = True
            run.module.losses(batch)
            found.append(mask.sums.clone())
        if method == "derpp":
            hook = lambda module, args, kwargs: found.append(kwargs["input_ids"].numel())  # noqa: E731
            run.module.model.register_forward_pre_hook(hook, with_kwargs=True)
            run.module.replayed(4)
    if method == "migu":
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    if method == "derpp":
        assert found[0] == 8 * 64 > found[1] / 0.9 and len(found) == 2


@pytest.mark.parametrize("kind", run_few(["small", "small_gpt2"], ["small_gpt2"]))
def test_held_out_text_is_scored_as_if_each_document_had_a_row(kind, config, start, tmp_path):
    """Of a causal model all tokens are scored but first ones, however documents are packed: the same losses
    by document. A masked model's masks are of rows, so only what may be scored is the same."""
    found, packings = [], ["isolated", "per_document", "concat"]
    for packing in packings:
        folder = tmp_path / packing
        start(config(f"{kind} ncl", f"domains.packing={packing}", "trainer.steps=1"), folder)
        with np.load(folder / "documents" / "000.npz") as file:
            found.append((Scores.load(folder / "scores.json"), dict(file)))
    (one, own), (other, again), (joined, _) = found
    assert one.tokens == other.tokens == joined.tokens and one.bytes == other.bytes == joined.bytes
    if kind == "small_gpt2":
        assert one.scored == other.scored < joined.scored
        for name, losses in own.items():
            np.testing.assert_allclose(losses, again[name], rtol=1e-5)
    assert [conditions(each)["packing"] for each, _ in found] == packings
    shown = ["packing" in describe_conditions(conditions(each)) for each, _ in found]
    assert shown == [True, True, False]


@pytest.mark.parametrize("kind", ["small", "small_gpt2"])
def test_all_text_of_a_batch_is_isolated(kind, config):
    run, kinds = made(config(f"{kind} replay", ISOLATED)), set()
    run.data.enter(run.data.domains[1])
    run.data.trainer = fake_trainer()
    assert {each.packing for each in (*run.data.train.values(), *run.data.held_out.values())} == {"isolated"}
    assert GENERAL in run.data.train
    for _, batch in zip(range(6), run.data.train_dataloader(), strict=False):
        segments = batch["segments"]
        assert torch.equal(segments >= 0, batch.get("attention_mask", torch.ones_like(segments)).bool())
        kinds |= set(batch["domains"].tolist())
        if kind == "small_gpt2":
            flat = segments.flatten()
            assert torch.equal(flat[batch["positions"]], flat[batch["positions"] + 1])
    assert kinds == {-1, 0, 1}


@pytest.mark.parametrize("which", ["small derpp", "small_gpt2 agem"])
def test_a_memory_keeps_the_document_of_each_token(which, config):
    run = made(config(which, ISOLATED))
    run.learn(0)
    memory, text = run.module.memory, run.data.train["law"]
    drawn, rows = memory.batch(memory.draw(4, purpose="match")), np.arange(len(text))
    pairs = list(zip(text.ids(rows), text.document_of(rows), strict=True))
    stored = {tuple(ids[owners >= 0].tolist()): owners.tolist() for ids, owners in pairs}
    restored = run.data.objective.restored(drawn)["input_ids"]
    assert len(drawn["segments"]) == 4
    for ids, owners in zip(restored, drawn["segments"], strict=True):
        assert stored[tuple(ids[owners >= 0].tolist())] == owners.tolist()


def test_what_a_model_writes_for_replay_is_isolated_too(config, start, tmp_path, monkeypatch):
    packings, gather = [], sampler.stack_rows

    def noting(texts, parts, rows, keys):
        found = gather(texts, parts, rows, keys)
        packings.extend((type(texts[part]).__name__, found.segments is None) for part in set(parts.tolist()))
        return found

    monkeypatch.setattr(sampler, "stack_rows", noting)
    how = ["replay.past=0.5", "replay.prefix=3", "replay.starts=5", "replay.batch_size=2", "trainer.steps=2"]
    start(config("small_gpt2 ncl", ISOLATED, "replay=generated", *how), tmp_path / "run")
    assert set(packings) == {("Packed", False)}
