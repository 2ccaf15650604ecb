"""Methods on examples that share rows: they learn what they learn of padded ones, and a killed run ends with
the same bits."""

import json

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from cpt.data.sampler import TrainStream
from cpt.trainer import loop
from tests.methods.test_contract import bits
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer
from tests.support.making import made
from tests.support.task_fixtures import write_tasks

TASKS = ("law", "food")
ISOLATED = "domains.packing=isolated"
METHODS = {
    "ncl": [],
    "migu": [],
    "replay": ["method.mixture.general=0.25"],
    "derpp": ["method.memory=16"],
    "kd": [],
    "lora": ["method.dropout=0"],
    "ewc": [],
    "das": [],
    "hat": [],
    "olora": ["method.dropout=0"],
    "adapter": [],
    "demix": [],
    "lifelong_moe": [],
    "cpt_plugin": [],
}
FEW = ["ncl", "migu", "derpp", "replay"]
DRAWING = {"das"}  # dropout at each step, which is drawn for other rows


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), TASKS, train=80, test=20, size=(1, 8))


@pytest.fixture
def config(small_gpt2, tasks):
    def build(method: str, *overrides: str):
        given = ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "model.length=64"]
        others = ["answers=none", "trainer.steps=6", f"method={method}", *METHODS[method], *overrides]
        return small_gpt2(*given, *others)

    return build


def stream_of(run, **how):
    """The last task's batches, with raw text and the task before among them where the method replays."""
    domain = run.data.domains[-1]
    given = {"seed": 0, "steps": [4], "batch_size": 16, "rank": 0, "world": 1, "accumulate": 1} | how
    texts = {part: run.data.train[part] for part in domain.parts}
    return TrainStream(texts, objective=run.data.objective, earlier=run.data.replay_pools(domain), **given)


@pytest.mark.parametrize("method", run_few(METHODS, FEW))
def test_two_tasks_are_learned_and_a_killed_run_ends_with_the_same_bits(
    method, config, start, tmp_path, monkeypatch
):
    whole, killed, padded = (tmp_path / name for name in ("whole", "killed", "padded"))
    start(config(method, ISOLATED), whole)
    trainer = loop.make_trainer

    def deadly(options, *, callbacks=(), **others):
        extra = [Killer(step=4, domain=TASKS[0])] if callbacks else []
        return trainer(options, callbacks=[*callbacks, *extra], **others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "make_trainer", deadly)
        with pytest.raises(KilledError):
            start(config(method, ISOLATED, "trainer.checkpoint_every=2"), killed)
    start(config(method, ISOLATED, "trainer.checkpoint_every=2"), killed)
    assert bits(killed) == bits(whole)
    start(config(method), padded)
    one, other = (json.loads((folder / "scores.json").read_text()) for folder in (whole, padded))
    assert one["run"]["finished"] and one["nll"][-1] != one["nll"][0]
    assert one["nll"][0] == other["nll"][0] and one["scored"] == other["scored"]
    if method not in DRAWING:
        np.testing.assert_allclose(one["nll"], other["nll"], rtol=1e-5)


@pytest.mark.parametrize("method", ["ncl", "replay"])
@pytest.mark.parametrize(("accumulate", "world"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_part_of_a_batch_shares_its_own_rows(method, accumulate, world, config):
    padded, shared = made(config(method)), made(config(method, ISOLATED))
    samples = rows = 0
    for rank in range(world):
        how = {"accumulate": accumulate, "rank": rank, "world": world}
        one, other = stream_of(padded, **how), stream_of(shared, **how)
        for number in range(len(one)):
            batch, again = one[number], other[number]
            samples, rows = (
                samples + len(batch["input_ids"]),
                rows + len(again.pop("layout", batch["input_ids"])),
            )
            assert batch.keys() == again.keys()
            assert all(torch.equal(value, again[name]) for name, value in batch.items())
    assert samples == 4 * 16 and rows < 0.9 * samples


class Noting(Callback):
    """Keeps the terms of a stage's first batch and their gradient; the step itself is as without it."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0:
            state = {name: value.clone() for name, value in module.state_dict().items()}
            terms = module.losses(batch)
            sum(terms.values()).backward()
            trained = [each.grad for each in module.parameters() if each.grad is not None]
            self.gradient = torch.cat([each.flatten().clone() for each in trained])
            self.terms = {name: float(value.detach()) for name, value in terms.items()}
            module.zero_grad()
            module.load_state_dict(state)


@pytest.mark.parametrize("method", run_few(sorted(METHODS.keys() - DRAWING), FEW))
def test_terms_and_gradients_are_those_of_the_padded_batch(method, config):
    """In the second task, where memories, teachers and penalties speak, from the same state on."""
    padded, shared = made(config(method)), made(config(method, ISOLATED))
    padded.learn(0)
    for run in (padded, shared):
        run.data.enter(run.data.domains[0])
        run.module.setup_stage(run.data.domains[0])
    shared.module.load_state_dict(padded.module.state_dict())
    one, other = Noting(), Noting()
    padded.learn(1, one)
    shared.learn(1, other)
    assert one.terms == pytest.approx(other.terms, rel=1e-5) and one.terms["lm"] > 0
    assert float((one.gradient - other.gradient).norm() / one.gradient.norm()) < 1e-6


def test_migu_counts_no_padding_of_a_shared_row(config):
    """Its sums are those of the same tokens in rows of their own."""
    sums = []
    for overrides in ([], [ISOLATED]):
        run = made(config("migu", *overrides))
        mask, batch = run.module.masks[0], stream_of(run)[0]
        run.data.enter(run.data.domains[0])
        run.module.setup_stage(run.data.domains[0])
        mask.recording = True
        run.module.losses(batch)
        sums.append(mask.sums.clone())
    assert sums[0].min() > 0
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-5, atol=1e-6)


def test_what_der_draws_shares_rows_as_well(config):
    """Its memory has slots as long as a sample may be; the model reads no more than it must."""
    seen = []
    for overrides in ([], [ISOLATED]):
        run = made(config("derpp", *overrides))
        run.learn(0)
        shapes = []
        hook = run.module.model.register_forward_pre_hook(
            lambda module, args, kwargs, shapes=shapes: shapes.append(kwargs["input_ids"].numel()),
            with_kwargs=True,
        )
        run.module.replayed(4)
        hook.remove()
        seen.append(shapes)
    assert seen[0] == [8 * 64]
    assert len(seen[1]) == 1 and seen[1][0] < 0.9 * 8 * 64
