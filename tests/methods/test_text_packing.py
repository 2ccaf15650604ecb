"""Methods on rows of whole documents that are isolated from each other: a killed run ends with the same bits,
memories keep whose token is whose, and what cannot do it says so."""

import json

import numpy as np
import pytest
import torch

from cpt.data import sampler
from cpt.data.sources.base import GENERAL
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.trainer import loop
from tests.methods.test_contract import bits
from tests.support.campaign import run_few
from tests.support.data_fixtures import fake_trainer
from tests.support.killing import KilledError, Killer
from tests.support.making import ORDER, made

ISOLATED, EACH = "domains.packing=isolated", "domains.packing=per_document"
METHODS = {
    "ncl": [],
    "das": [],
    "derpp": ["method.memory=16"],
    "replay": ["method.mixture.general=0.25"],
    "agem": ["method.memory=16"],
    "migu": [],
    "kd": [],
    "demix": [],
    "lora": [],
}
RUNS = [f"{kind} {method}" for kind in ("small", "small_gpt2") for method in METHODS]
FEW = ["small das", "small derpp", "small_gpt2 ncl", "small_gpt2 replay"]


@pytest.fixture
def config(small, small_gpt2):
    kinds = {"small": small, "small_gpt2": small_gpt2}

    def build(kind: str, method: str, *overrides: str):
        given = [ORDER, "model.length=48", f"method={method}", *METHODS.get(method, [])]
        return kinds[kind](*given, *overrides)

    return build


@pytest.mark.parametrize("which", run_few(RUNS, FEW))
def test_two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits(
    which, config, start, tmp_path, monkeypatch
):
    kind, method = which.split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    cfg = config(kind, method, ISOLATED, "trainer.steps=4")
    start(cfg, whole)
    trainer = loop.make_trainer

    def deadly(options, *, callbacks=(), **others):
        extra = [Killer(step=3, domain="law")] if callbacks else []
        return trainer(options, callbacks=[*callbacks, *extra], **others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "make_trainer", deadly)
        with pytest.raises(KilledError):
            start(cfg, killed)
    start(cfg, killed)
    assert bits(killed) == bits(whole)
    scores = json.loads((whole / "scores.json").read_text())
    assert scores["run"]["finished"] and scores["nll"][-1] != scores["nll"][0]
    assert scores["conditions"]["packing"] == "isolated"


@pytest.mark.parametrize("kind", ["small", "small_gpt2"])
def test_held_out_text_is_scored_as_if_each_document_had_a_row(kind, config, start, tmp_path):
    """Of a causal model all tokens are scored but first ones, however documents are packed: the same losses
    by document. A masked model's masks are of rows, so only what may be scored is the same."""
    found = {}
    for packing in (ISOLATED, EACH, "domains.packing=concat"):
        folder = tmp_path / packing
        start(config(kind, "ncl", packing, "trainer.steps=1"), folder)
        with np.load(folder / "documents" / "000.npz") as file:
            found[packing] = Scores.load(folder / "scores.json"), dict(file)
    (one, own), (other, again), (joined, _) = found.values()
    assert one.tokens == other.tokens == joined.tokens and one.bytes == other.bytes == joined.bytes
    if kind == "small_gpt2":
        assert one.scored == other.scored < joined.scored
        for name, losses in own.items():
            np.testing.assert_allclose(losses, again[name], rtol=1e-5)
    told = [conditions(each)["packing"] for each in (one, other, joined)]
    assert told == ["isolated", "per_document", "concat"] and "packing" not in joined.conditions
    assert describe_conditions(conditions(one)).endswith(", packing isolated")
    assert "packing" not in describe_conditions(conditions(joined))


@pytest.mark.parametrize("kind", ["small", "small_gpt2"])
def test_all_text_of_a_batch_is_isolated(kind, config):
    """New, past and general text; padding is of no document, and no first token is asked for."""
    run = made(config(kind, "replay", ISOLATED))
    run.data.enter(run.data.domains[1])
    run.data.trainer = fake_trainer()
    assert {each.packing for each in (*run.data.train.values(), *run.data.held_out.values())} == {"isolated"}
    assert GENERAL in run.data.train
    kinds = set()
    for number, batch in zip(range(6), run.data.train_dataloader(), strict=False):
        segments = batch["segments"]
        present = batch.get("attention_mask", torch.ones_like(segments)).bool()
        assert torch.equal(segments >= 0, present), number
        assert all(len(set(row[row >= 0].tolist())) >= 1 for row in segments)
        kinds |= set(batch["domains"].tolist())
        if kind == "small_gpt2":
            following = segments.flatten()[batch["positions"] + 1]
            assert torch.equal(segments.flatten()[batch["positions"]], following)
    assert kinds == {-1, 0, 1}


@pytest.mark.parametrize("kind", ["small", "small_gpt2"])
@pytest.mark.parametrize("method", ["derpp", "agem"])
def test_a_memory_keeps_the_document_of_each_token(kind, method, config):
    plain, run = made(config(kind, method)), made(config(kind, method, ISOLATED))
    assert "memory.segments" not in plain.module.state_dict()
    assert "memory.segments" in run.module.state_dict()
    run.learn(0)
    if method == "agem":
        run.module.after_domain(run.probe())
    memory = run.module.memory
    drawn = memory.batch(memory.draw(4, purpose="match"))
    text = run.data.train["law"]
    stored = {
        tuple(ids[owners >= 0].tolist()): owners.tolist()
        for ids, owners in zip(
            text.ids(np.arange(len(text))), text.document_of(np.arange(len(text))), strict=True
        )
    }
    restored = run.data.objective.restored(drawn)["input_ids"]
    assert len(drawn["segments"]) == 4
    for ids, owners in zip(restored, drawn["segments"], strict=True):
        assert stored[tuple(ids[owners >= 0].tolist())] == owners.tolist()


def test_importances_and_contrasts_of_das_know_the_documents(config):
    """Its doubled and halved batches carry them: another document moves no vector of one that shares none of
    its rows, and the model is called with blocks throughout."""
    run, shapes = made(config("small", "das", ISOLATED)), []
    hook = run.module.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["position_ids"].min(1).values.tolist()),
        with_kwargs=True,
    )
    run.learn(0)
    run.module.after_domain(run.probe())
    hook.remove()
    assert len(shapes) > 6 and all(set(each) == {0} for each in shapes)


@pytest.mark.parametrize("method", ["elle", "prompt", "progprompt", "sapt"])
def test_methods_that_weigh_rows_refuse_isolated_documents(method, config):
    with pytest.raises(
        ValueError, match=f"packing=isolated does not go with method={method}, whose .*allowed"
    ):
        made(config("small_gpt2", method, ISOLATED))


def test_what_a_model_writes_for_replay_is_isolated_too(config, start, tmp_path, monkeypatch):
    packings = []
    gather = sampler.stack_rows

    def noting(texts, parts, rows, keys):
        found = gather(texts, parts, rows, keys)
        packings.extend((type(texts[part]).__name__, found.segments is None) for part in set(parts.tolist()))
        return found

    monkeypatch.setattr(sampler, "stack_rows", noting)
    how = ["replay.past=0.5", "replay.prefix=3", "replay.starts=5", "replay.batch_size=2"]
    start(
        config("small_gpt2", "ncl", ISOLATED, "replay=generated", *how, "trainer.steps=2"), tmp_path / "run"
    )
    assert set(packings) == {("Packed", False)}
