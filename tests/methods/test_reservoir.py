"""The reservoir: every sample equally likely, floats kept as they are, exact sizes, a shard per process."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, single
from cpt.methods import reservoir as module
from cpt.methods.reservoir import Reservoir
from cpt.models.objectives import Span
from tests.support.campaign import run_few
from tests.support.making import same
from tests.support.running import batch_of

SLOT = SimpleNamespace(sides=lambda length: (length, None), most=lambda length: 2, isolated=False)


def reservoir(samples: int, *, seed: int = 0, precision: str = "float32") -> Reservoir:
    return Reservoir(SLOT, samples=samples, length=5, width=3, precision=precision, seed=seed)


def batch(numbers, *, scored=2, length=5):
    """Samples that hold their own number everywhere, and outputs that hold a tenth of it."""
    numbers = torch.as_tensor(list(numbers))
    ids = numbers[:, None].repeat(1, 5)
    labels = torch.full_like(ids, UNSCORED)
    labels[:, 1 : 1 + scored] = numbers[:, None]
    mask = (torch.arange(5) < length).long().expand_as(ids) if length < 5 else None
    return batch_of(ids, labels, mask), (numbers / 10).repeat_interleave(scored)[:, None].repeat(1, 3)


def fed(kept: Reservoir, numbers: range, *, size: int) -> Reservoir:
    for first in range(0, len(numbers), size):
        kept.add(*batch(numbers[first : first + size]))
    return kept


def held(kept: Reservoir) -> list[int]:
    return [ids[0].item() for ids, length in zip(kept.input_ids, kept.lengths, strict=True) if length]


def drawn(kept: Reservoir, count: int, purpose: str = "match") -> list[int]:
    return kept.draw(count, purpose=purpose).tolist()


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of several, without a process group."""
    return lambda rank, world: monkeypatch.setattr(module, "rank_and_world", lambda: (rank, world))


@pytest.mark.slow
@pytest.mark.parametrize("world", run_few([1, 2], [1]))
def test_every_sample_of_a_stream_is_as_likely_to_be_kept(world, as_process):
    stream, samples, trials = 120, 12, 250
    counts, expected = np.zeros(stream), trials * samples / stream
    for seed in range(trials):
        for rank in range(world):
            as_process(rank, world)
            counts[held(fed(reservoir(samples, seed=seed), range(rank, stream, world), size=4))] += 1
    assert counts.sum() == trials * samples
    chi_square = float(((counts - expected) ** 2 / (expected * (1 - samples / stream))).sum())
    assert abs(chi_square - stream) < 4 * (2 * stream) ** 0.5


def test_the_slots_are_filled_in_order_and_never_exceeded():
    kept = reservoir(10)
    for seen in range(4, 44, 4):
        kept.add(*batch(range(seen - 4, seen)))
        assert kept.seen.sum() == seen and len(held(kept)) == len(set(held(kept))) == min(seen, 10)
        assert held(kept) == list(range(seen)) or seen > 10
    states = [fed(reservoir(5), range(60), size=size).state_dict() for size in (1, 60)]
    assert max(held(kept)) >= 20 and same(*states)


def test_samples_and_outputs_come_back_as_they_went_in():
    kept = fed(reservoir(8), range(30), size=3)
    slots = kept.draw(6, purpose="match")
    expected, outputs = batch([held(kept)[slot] for slot in slots])
    assert same(kept.batch(slots), expected) and torch.equal(kept.outputs_of(slots), outputs)
    kept = reservoir(3)
    for number, (scored, length) in enumerate(((2, 5), (1, 3), (0, 1))):
        kept.add(*batch([number + 1], scored=scored, length=length))
    slots = torch.tensor([1, 0, 2])
    replayed = kept.batch(slots)
    assert replayed["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]
    assert replayed["positions"].tolist() == [1, 6, 7]
    assert kept.outputs_of(slots)[:, 0].tolist() == pytest.approx([0.2, 0.1, 0.1])
    assert "attention_mask" not in kept.batch(slots[1:2])


def test_two_draws_are_independent(as_process):
    kept, counts, both = reservoir(10), np.zeros(10), 0
    assert drawn(kept, 4) == []
    for number in range(700):
        kept.add(*batch([number]))
        match, replay = drawn(kept, 4), drawn(kept, 3, "replay")
        assert len(set(match)) == len(match) == min(4, number + 1) and match == drawn(kept, 4)
        if number >= 100:
            counts[match] += 1
            both += len({*match} & {*replay})
    assert ((counts - 240) ** 2).sum() / 144 < 10 + 4 * 20**0.5
    assert both / 600 == pytest.approx(4 * 3 / 10, abs=0.1)
    one, other = (fed(reservoir(40, seed=seed), range(40), size=4) for seed in (0, 1))
    assert held(one) == held(other) and drawn(one, 8) != drawn(other, 8)
    odd = fed(reservoir(8), range(7), size=1)
    as_process(0, 2)
    assert odd.count() == 4 and odd.seen[:2].tolist() == [4, 3]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_outputs_survive_a_file_as_the_floats_they_were(precision, tmp_path):
    kept, other = (reservoir(6, precision=precision) for _ in range(2))
    torch.save(fed(kept, range(20), size=4).state_dict(), tmp_path / "file")
    other.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    for cast in ("double", "half", "bfloat16", "float"):
        getattr(torch.nn.Sequential(other), cast)()
    expected = batch(held(kept))[1].view(6, 2, 3).to(getattr(torch, precision))
    assert other.outputs.dtype == expected.dtype and torch.equal(other.outputs, expected)
    assert same(kept.state_dict(), other.state_dict())
    kept = reservoir(1, precision="float16")  # cut to its range
    kept.add(batch([1])[0], torch.tensor([[1e6, -1e6, 0.1], [0, 1, 2]]))
    assert kept.outputs[0].tolist() == [[65504, -65504, pytest.approx(0.1, rel=1e-3)], [0, 1, 2]]


@pytest.mark.parametrize(("then", "now"), [(2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("each", [3, 60])
def test_another_number_of_processes_shares_out_what_is_stored(then, now, each, as_process):
    total, shards, found = each * then * now, [], []
    for rank in range(then):
        as_process(rank, then)
        shards.append(fed(reservoir(19), range(rank, total, then), size=now))
        assert total < 19 or {*drawn(shards[rank], 99)} == {*range(rank, 19, then)}
    state = {name: value.clone() for name, value in shards[0].named_buffers()}  # as the processes save it
    for rank, shard in enumerate(shards):
        for name in ("input_ids", "labels", "lengths", "outputs", "seen"):
            state[name][rank::then] = getattr(shard, name)[rank::then]
    assert {*state["input_ids"][state["lengths"] > 0, 0].tolist()} <= {*range(total)}
    numbers = [[each // then for each in held(shard)] for shard in shards]
    assert total < 60 or numbers[0][:6] != numbers[-1][:6]
    for rank in range(now):
        as_process(rank, now)
        shard = reservoir(19)
        shard.load_state_dict(state)
        slots = drawn(shard, 99)
        assert (shard.lengths[slots] == 5).all()
        found += slots
        shard.add(*batch([1000]))
        assert shard.seen[rank] == total // now + 1
        assert total + now > 19 or shard.input_ids[total + (rank - total) % now, 0] == 1000
    assert sorted(found) == list(range(min(total, 19)))


def test_source_and_target_come_back_with_their_lengths():
    objective = Span(rate=0.3, mean=2, sentinels=list(range(99, 49, -1)), end=1, pad=0, start=0)
    kept = Reservoir(objective, samples=4, length=30, width=2, seed=0, pad=7)
    assert [kept.input_ids.shape, kept.labels.shape, kept.outputs.shape] == [(4, 26), (4, 14), (4, 14, 2)]
    ids, lengths = np.random.default_rng(0).integers(2, 50, (4, 30)), np.array([9, 30, 1, 9])
    given, _ = objective.batch(Rows(ids, lengths, sample_keys(1, np.arange(4))))
    outputs = torch.rand(len(given["positions"]), 2)
    kept.add(given, outputs)
    back = kept.batch(torch.arange(4))
    assert torch.equal(kept.outputs_of(torch.arange(4)), outputs)
    for row in range(4):
        one, own = single(given, row), single(back, row)
        assert torch.equal(one["targets"], own["targets"])
        for name in ("input_ids", "decoder_input_ids"):
            assert torch.equal(own[name][:, : one[name].shape[1]], one[name])
        assert (
            own["attention_mask"].sum() == one.get("attention_mask", torch.ones_like(one["input_ids"])).sum()
        )
