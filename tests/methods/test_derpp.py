"""DER++ against its formula, and that it leaves alone what it does not change."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.nn import functional

from cpt.data.collate import UNSCORED, labels_of
from cpt.data.sampler import TrainStream
from cpt.methods.common.reservoir import bytes_per_sample
from cpt.models.objectives import Causal
from cpt.trainer import loop
from tests.runs.test_distributed import DDP, batches, run
from tests.support import making
from tests.support.running import batch_of

ORDER = "order=[law,food]"
DROPOUT = [f"+model.config.{name}_dropout=0.1" for name in ("attention", "mlp", "embedding")]
FEW = ["method=derpp", "method.memory=20", "method.draw=3"]
EXACT = [*FEW, "method.precision=float32"]


class KilledError(BaseException):
    """Stands for SIGKILL."""


class Killer(Callback):
    def __init__(self, *, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and trainer.datamodule.domain.name == "food":
            raise KilledError


@pytest.fixture(params=["small", "small_gpt2"])
def either(request):
    """The config of a masked and of a causal model."""
    return request.getfixturevalue(request.param)


def made(cfg):
    """A method's module and its data, as a run makes them."""
    run = making.made(cfg)
    return run.module, run.data


def stream(data) -> TrainStream:
    """The first domain in batches of 8; the one before the last has the short row."""
    text = data.train[data.domains[0].name]
    options = {"objective": data.objective, "seed": 0, "batch_size": 8, "steps": [len(text) // 8 + 2]}
    return TrainStream({data.domains[0].name: text}, **options, accumulate=1, rank=0, world=1)


def scored_outputs(module, ids, labels, length):
    """Logits [K, V] and last hidden states [K, D] at a row's scored positions, by a plain forward."""
    ids, places = ids[None, :length].long(), labels[:length] != UNSCORED
    hidden = module.model.base_model(input_ids=ids).last_hidden_state[0]
    return module.model(input_ids=ids).logits[0, places], hidden[places]


@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_the_losses_are_those_of_the_paper(matched, either):
    """Against loops over the drawn samples in float64, the batch with the short row among those stored."""
    options = [f"method.matched={matched}", "method.alpha=0.3", "method.beta=0.7"]
    module, data = made(either(ORDER, *EXACT, *options))
    module.double().eval()
    parts = stream(data)
    short = next(number for number in range(len(parts)) if "attention_mask" in parts[number])
    for number in (short, 0, short):
        module.losses(parts[number])
    with torch.no_grad():
        for parameter in module.model.parameters():
            parameter.mul_(1.2)
    kept, batch = module.memory, parts[1]
    module.options = replace(module.options, draw=19)  # of 24: different draws, the short row in both
    match, replay = (kept.draw(19, purpose=name) for name in ("match", "replay"))
    assert set(match.tolist()) != set(replay.tolist())
    assert all((kept.lengths[slots] < module.length).any() for slots in (match, replay))
    errors, nll = [], []
    for slot in match:
        row = (kept.input_ids[slot], kept.labels[slot], kept.lengths[slot])
        now = scored_outputs(module, *row)[matched == "hidden"]
        stored = kept.outputs[slot, : len(now)].double()
        errors += [(number - old) ** 2 for number, old in zip(now.flatten(), stored.flatten(), strict=True)]
    for slot in replay:
        logits, _ = scored_outputs(module, kept.input_ids[slot], kept.labels[slot], kept.lengths[slot])
        labels = kept.labels[slot][kept.labels[slot] != UNSCORED].long()
        nll += [-row.log_softmax(0)[label] for row, label in zip(logits, labels, strict=True)]
    plain = sum(
        functional.cross_entropy(scored_outputs(module, ids, labels, len(ids))[0], labels[labels != UNSCORED])
        for ids, labels in zip(batch["input_ids"], labels_of(batch), strict=True)
    )
    terms = module.losses(batch)
    assert list(terms) == ["lm", "derpp_match", "derpp_replay"]
    torch.testing.assert_close(
        terms["derpp_match"].double(), 0.3 * sum(errors) / len(errors), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(terms["derpp_replay"].double(), 0.7 * sum(nll) / len(nll), rtol=1e-5, atol=0)
    torch.testing.assert_close(terms["lm"].double(), plain / len(batch["input_ids"]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("matched", ["hidden", "logits"])
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_what_is_stored_is_what_the_model_gave(matched, precision, tolerance, either):
    """Nothing is to be held right after; padded rows too."""
    module, data = made(either(ORDER, *FEW, f"method.matched={matched}", f"method.precision={precision}"))
    module.eval()
    parts = stream(data)
    batch = next(parts[number] for number in range(len(parts)) if "attention_mask" in parts[number])
    module.losses(batch)
    kept = module.memory
    assert kept.lengths[:8].tolist() == batch["attention_mask"].sum(1).tolist()
    for row in range(8):
        length = int(kept.lengths[row])
        outputs = scored_outputs(module, batch["input_ids"][row], labels_of(batch)[row], length)
        outputs = outputs[matched == "hidden"].detach()
        assert torch.equal(kept.input_ids[row].long(), batch["input_ids"][row])
        assert torch.equal(kept.labels[row].long(), labels_of(batch)[row])
        scale = outputs.abs().max().item()
        torch.testing.assert_close(
            kept.outputs[row, : len(outputs)].float(), outputs, rtol=tolerance, atol=tolerance * scale
        )
        assert (kept.outputs[row, len(outputs) :] == 0).all()
    module.options = replace(module.options, draw=8)
    match, replay = module.replayed(8)
    assert match < (tolerance * kept.outputs.float().abs().max()) ** 2
    assert replay > 1
    torch.testing.assert_close(replay, module.losses(batch)["lm"])


def test_the_first_step_has_nothing_to_replay(either):
    module, data = made(either(ORDER, *FEW))
    terms = module.losses(stream(data)[0])
    assert terms["derpp_match"] == terms["derpp_replay"] == 0
    assert terms["lm"] > 0
    later = module.losses(stream(data)[1])
    assert later["derpp_replay"] > 0


def test_stored_outputs_carry_no_gradient_and_all_terms_do(small):
    module, data = made(small(ORDER, *EXACT))
    parts = stream(data)
    module.losses(parts[0])
    assert not any(buffer.requires_grad or buffer.grad_fn for buffer in module.memory.buffers())
    with torch.no_grad():
        next(module.model.parameters()).mul_(1.5)
    terms = module.losses(parts[1])
    for term in terms.values():
        gradient = torch.autograd.grad(term, next(module.model.parameters()), retain_graph=True)[0]
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(("draw", "sizes"), [("null", [8, 8]), ("3", [8, 6]), ("500", [8, 16])])
def test_a_step_runs_one_more_forward_for_both_draws(draw, sizes, small):
    module, data = made(small(ORDER, *FEW, f"method.draw={draw}"))
    parts, seen = stream(data), []
    module.losses(parts[0])
    module.model.register_forward_pre_hook(
        lambda model, inputs, named: seen.append(len(named["input_ids"])), with_kwargs=True
    )
    module.losses(parts[1])
    assert seen == sizes


def test_draws_and_decisions_leave_the_global_generators_alone(small):
    cfg = small(ORDER, *FEW)
    module, data = made(cfg)
    batch = stream(data)[0]
    module.losses(batch)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    kept = module.memory
    kept.add(batch, torch.zeros(len(batch["positions"]), kept.outputs.shape[2]))
    kept.batch(kept.draw(4, purpose="match"))
    module.train().width("hidden")
    assert torch.equal(torch.get_rng_state(), before)


def states(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)


def bits(state: dict[str, torch.Tensor]) -> str:
    parts = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(state.items()))
    return hashlib.sha256(parts).hexdigest()


def test_without_weights_it_is_ncl_bit_for_bit(small, start, tmp_path):
    start(small(ORDER, *DROPOUT, "method=ncl"), tmp_path / "ncl")
    start(small(ORDER, *DROPOUT, *FEW, "method.alpha=0", "method.beta=0"), tmp_path / "derpp")
    start(small(ORDER, *DROPOUT, *FEW, "method.alpha=0"), tmp_path / "replay")
    plain, same, other = (states(tmp_path / name) for name in ("ncl", "derpp", "replay"))
    assert same["memory.seen"].sum() == 96
    assert all(torch.equal(value, same[name]) for name, value in plain.items())
    assert not all(torch.equal(value, other[name]) for name, value in plain.items())
    scores = [json.loads((tmp_path / name / "scores.json").read_text())["nll"] for name in ("ncl", "derpp")]
    assert scores[0] == scores[1]


@pytest.mark.parametrize(("step", "accumulate"), [(2, 1), (5, 2)])
def test_killed_with_a_full_memory_it_ends_with_the_same_bits(
    step, accumulate, small, start, tmp_path, monkeypatch
):
    cfg = small(ORDER, *DROPOUT, *FEW, f"trainer.accumulate_grad_batches={accumulate}")
    start(cfg, tmp_path / "whole")
    trainer = loop.make_trainer
    with monkeypatch.context() as patched:
        patched.setattr(
            loop,
            "make_trainer",
            lambda options, *, callbacks=(), **others: trainer(
                options, callbacks=[*callbacks, Killer(step=step)] if callbacks else (), **others
            ),
        )
        with pytest.raises(KilledError):
            start(cfg, tmp_path / "killed")
    start(cfg, tmp_path / "killed")
    state = states(tmp_path / "whole")
    assert state["memory.seen"].sum() == 96  # every accumulated part went in
    assert state["memory.outputs"].dtype == torch.float16
    assert (state["memory.outputs"].float() % 1 != 0).float().mean() > 0.9
    assert bits(states(tmp_path / "killed")) == bits(state)


def test_both_domains_are_in_the_memory(small, start, tmp_path):
    cfg = small(ORDER, "method=derpp", "method.memory=48")
    start(cfg, tmp_path)
    module, data = made(cfg)
    module.load_state_dict(states(tmp_path))
    original = {
        name: {tuple(row) for row in text.ids(torch.arange(len(text)).numpy()).tolist()}
        for name, text in data.train.items()
    }
    kept = module.memory
    rows = module.objective.restored(batch_of(kept.input_ids, kept.labels))["input_ids"]
    counts = {name: sum(tuple(row) in ids for row in rows.tolist()) for name, ids in original.items()}
    assert sum(counts.values()) == 48
    assert 12 <= counts["law"] <= 36


@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_the_memory_takes_its_budget(matched, either):
    cfg = either(ORDER, "method=derpp", "method.memory=null", "method.memory_bytes=100000")
    cfg.method.matched = matched
    module, _ = made(cfg)
    width = {"hidden": 32, "logits": module.model.config.vocab_size}[matched]
    scored = 15 if isinstance(module.objective, Causal) else 5
    each = bytes_per_sample(length=16, scored=scored, width=width, precision="float16")
    assert each == 16 * 8 + 4 + 8 + 2 * scored * width
    samples = 100000 // each
    assert module.memory.bytes == samples * each <= 100000
    state = [value for name, value in module.state_dict().items() if name.startswith("memory.")]
    assert sum(value.nbytes for value in state) == module.memory.bytes


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method.alpha=-1"], "method.alpha=-1; allowed: 0 or more"),
        (["method.beta=-0.1"], "method.beta=-0.1; allowed: 0 or more"),
        (["method.alpha=nan"], "method.alpha=nan; allowed: 0 or more"),
        (["method.draw=0"], "method.draw=0; allowed: null or a whole number, 1 or more"),
        (["method.draw=0.5"], "method.draw=0.5; allowed: null or a whole number, 1 or more"),
        (["method.matched=both"], "method.matched=both; allowed: hidden, logits"),
        (["method.precision=int8"], "method.precision=int8; allowed: float16, bfloat16, float32"),
        (["method.memory=0"], "method.memory=0; allowed: null or a whole number, 1 or more"),
        (["method.memory_bytes=9"], "method.memory=512 and memory_bytes=9; allowed: exactly one"),
        (
            ["method.memory=null", "method.memory_bytes=9"],
            "method.memory_bytes=9; allowed: 460 or more, one sample",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(overrides, said, small):
    with pytest.raises(ValueError, match=said):
        made(small(ORDER, "method=derpp", *overrides))


def test_two_processes_keep_a_shard_each_and_go_on_with_the_same_bits(corpora, cache, tmp_path):
    """Slot s is of process s mod 2; the file of the first process has both shards."""
    options = [*DDP, *FEW]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert run(whole, whole / "out", *options, corpora=corpora, cache=cache) == 0, (
        whole / "out" / "log"
    ).read_text()
    state = states(whole / "run")
    stored = [
        json.dumps([ids, row])
        for ids, row in zip(state["memory.input_ids"].tolist(), state["memory.labels"].tolist(), strict=True)
    ]
    seen = [
        {json.dumps(sample) for batch in batches(whole / "out", rank) for sample in batch[2]}
        for rank in (0, 1)
    ]
    assert set(stored[0::2]) <= seen[0] and set(stored[1::2]) <= seen[1]
    assert not set(stored[0::2]) & set(stored[1::2])
    assert state["memory.seen"].sum() == 96
    first, second = ((whole / "out" / f"hashes-{rank}.txt").read_text() for rank in (0, 1))
    assert first == second
    assert run(killed, killed / "first", *options, corpora=corpora, cache=cache, death=5) != 0
    assert json.loads((killed / "run" / "scores.json").read_text())["rows"] == ["base", "law"]
    assert run(killed, killed / "second", *options, corpora=corpora, cache=cache) == 0
    assert bits(states(killed / "run")) == bits(state)
