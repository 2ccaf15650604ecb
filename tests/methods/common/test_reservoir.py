"""The reservoir: every sample equally likely, floats kept as they are, exact sizes, a shard per process."""

import io

import numpy as np
import pytest
import torch

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, single
from cpt.methods.common import reservoir as module
from cpt.methods.common.reservoir import Reservoir, bytes_per_sample, capacity, slot_of
from cpt.models.objectives import Span
from tests.support.running import batch_of

LENGTH, SCORED, WIDTH = 5, 2, 3


def reservoir(*, samples: int, seed: int = 0, precision: str = "float32") -> Reservoir:
    return Reservoir(
        samples=samples, length=LENGTH, scored=SCORED, width=WIDTH, precision=precision, seed=seed
    )


def batch(numbers, *, scored=SCORED, length=LENGTH):
    """Samples that hold their own number everywhere, and outputs that hold a tenth of it."""
    numbers = torch.as_tensor(list(numbers))
    ids = numbers[:, None].repeat(1, LENGTH)
    labels = torch.full_like(ids, UNSCORED)
    labels[:, 1 : 1 + scored] = numbers[:, None]
    mask = (torch.arange(LENGTH) < length).long().expand_as(ids) if length < LENGTH else None
    return batch_of(ids, labels, mask), (numbers / 10).repeat_interleave(scored)[:, None].repeat(1, WIDTH)


def fed(kept: Reservoir, numbers: range, *, size: int) -> Reservoir:
    for first in range(0, len(numbers), size):
        kept.add(*batch(numbers[first : first + size]))
    return kept


def held(kept: Reservoir) -> list[int]:
    return [ids[0].item() for ids, length in zip(kept.input_ids, kept.lengths, strict=True) if length]


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of several, without a process group."""
    return lambda rank, world: monkeypatch.setattr(module, "rank_and_world", lambda: (rank, world))


def merged(shards: list[Reservoir]) -> dict[str, torch.Tensor]:
    """What the state_dict of processes with these shards would be."""
    state = {name: value.clone() for name, value in shards[0].named_buffers()}
    for rank, shard in enumerate(shards):
        for name in ("input_ids", "labels", "lengths", "outputs", "seen"):
            state[name][rank :: len(shards)] = getattr(shard, name)[rank :: len(shards)]
    return state


def chi_square(counts: np.ndarray, probability: float, trials: int) -> float:
    expected = trials * probability
    return float(((counts - expected) ** 2 / (expected * (1 - probability))).sum())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_sample_of_a_stream_is_as_likely_to_be_kept(world, as_process):
    stream, samples, trials = 120, 12, 250
    counts = np.zeros(stream)
    for seed in range(trials):
        for rank in range(world):
            as_process(rank, world)
            kept = fed(reservoir(samples=samples, seed=seed), range(rank, stream, world), size=4)
            counts[held(kept)] += 1
    assert counts.sum() == trials * samples
    assert stream - 4 * (2 * stream) ** 0.5 < chi_square(counts, samples / stream, trials)
    assert chi_square(counts, samples / stream, trials) < stream + 4 * (2 * stream) ** 0.5


def test_the_slots_are_filled_in_order_and_never_exceeded():
    kept = reservoir(samples=10)
    for first in range(0, 40, 4):
        kept.add(*batch(range(first, first + 4)))
        seen = first + 4
        assert kept.seen.sum() == seen
        assert len(held(kept)) == len(set(held(kept))) == min(seen, 10)
        assert kept.bytes == reservoir(samples=10).bytes
        if seen <= 10:
            assert held(kept) == list(range(seen))
    assert max(held(kept)) >= 20


def test_what_is_kept_does_not_depend_on_how_the_stream_is_cut():
    """Of two samples of one batch that take the same slot, the later one has to stay."""
    states = [fed(reservoir(samples=5), range(60), size=size).state_dict() for size in (1, 4, 60)]
    for state in states[1:]:
        assert all(torch.equal(value, state[name]) for name, value in states[0].items())


def test_domains_are_kept_in_proportion():
    counts = np.zeros(3)
    for seed in range(20):
        kept = np.array(held(fed(reservoir(samples=60, seed=seed), range(600), size=10)))
        counts += np.histogram(kept, bins=[0, 100, 300, 600])[0]
    assert counts / counts.sum() == pytest.approx([1 / 6, 2 / 6, 3 / 6], abs=0.03)


def test_samples_and_outputs_come_back_as_they_went_in():
    kept = fed(reservoir(samples=8), range(30), size=3)
    slots = kept.draw(6, purpose="match")
    numbers = [held(kept)[slot] for slot in slots]
    expected, outputs = batch(numbers)
    replayed = kept.batch(slots)
    assert replayed.keys() == expected.keys() == {"input_ids", "positions", "targets", "rows"}
    assert all(torch.equal(value, expected[name]) for name, value in replayed.items())
    assert replayed["positions"].tolist() == [row * LENGTH + at for row in range(6) for at in (1, 2)]
    assert torch.equal(kept.outputs_of(slots), outputs)


def test_rows_of_other_sizes_come_back_without_their_padding():
    kept = reservoir(samples=3)
    for number, (scored, length) in enumerate(((2, 5), (1, 3), (0, 1))):
        kept.add(*batch([number + 1], scored=scored, length=length))
    slots = torch.tensor([1, 0, 2])
    replayed = kept.batch(slots)
    assert replayed["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]
    assert replayed["positions"].tolist() == [1, 6, 7]
    assert kept.outputs_of(slots)[:, 0].tolist() == pytest.approx([0.2, 0.1, 0.1])
    assert "attention_mask" not in kept.batch(slots[1:2])
    assert kept.outputs[1, 1].tolist() == [0, 0, 0]


def test_a_draw_is_uniform_without_repetition_and_reproducible():
    counts = np.zeros(10)
    kept = reservoir(samples=10)
    for number in range(600):
        kept.add(*batch([number]))
        slots = kept.draw(4, purpose="match")
        assert len(set(slots.tolist())) == len(slots) == min(4, number + 1)
        assert torch.equal(slots, kept.draw(4, purpose="match"))
        if number >= 100:
            counts[slots] += 1
    assert chi_square(counts, 0.4, 500) < 10 + 4 * 20**0.5


def test_draws_and_shares_follow_the_seed_and_the_number_of_processes(as_process):
    one, other = (fed(reservoir(samples=40, seed=seed), range(40), size=4) for seed in (0, 1))
    assert held(one) == held(other)
    assert one.draw(8, purpose="match").tolist() != other.draw(8, purpose="match").tolist()
    odd = fed(reservoir(samples=8), range(7), size=1)
    as_process(0, 2)
    assert odd.count() == 4 and odd.seen[:2].tolist() == [4, 3]


def test_two_draws_are_independent():
    """Where one chooses a slot, the other does as often as by chance."""
    kept = fed(reservoir(samples=10), range(100), size=10)
    both, trials = 0, 600
    for number in range(trials):
        kept.add(*batch([number]))
        match, replay = (set(kept.draw(3, purpose=name).tolist()) for name in ("match", "replay"))
        both += len(match & replay)
    assert both / trials == pytest.approx(3 * 3 / 10, abs=0.1)


def test_an_empty_memory_gives_no_samples():
    assert len(reservoir(samples=4).draw(3, purpose="match")) == 0


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_outputs_survive_a_file_as_the_floats_they_were(precision):
    """The released code casts them to integers when it loads them."""
    kept = fed(reservoir(samples=6, precision=precision), range(20), size=4)
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    other = reservoir(samples=6, precision=precision)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.outputs.dtype == getattr(torch, precision)
    assert (other.outputs % 1 != 0).any()
    expected = batch(held(kept))[1].view(6, SCORED, WIDTH).to(other.outputs.dtype)
    assert torch.equal(other.outputs, expected)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in kept.state_dict().items())
    assert torch.equal(other.draw(3, purpose="match"), kept.draw(3, purpose="match"))


def test_outputs_are_cut_to_the_range_of_half_precision():
    kept = reservoir(samples=1, precision="float16")
    kept.add(batch([1])[0], torch.tensor([[1e6, -1e6, 0.1], [0, 1, 2]]))
    assert kept.outputs[0].tolist() == [[65504, -65504, pytest.approx(0.1, rel=1e-3)], [0, 1, 2]]


@pytest.mark.parametrize("cast", ["double", "half", "bfloat16", "float"])
@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_a_cast_of_the_module_leaves_what_is_stored(cast, precision):
    kept = fed(reservoir(samples=6, precision=precision), range(6), size=2)
    before = kept.outputs.clone()
    getattr(torch.nn.Sequential(kept), cast)()
    assert kept.outputs.dtype == before.dtype
    assert torch.equal(kept.outputs, before)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
def test_a_budget_in_bytes_is_never_exceeded_and_used_up_to_the_last_sample(precision):
    slot = {"length": LENGTH, "scored": SCORED, "width": WIDTH, "precision": precision}
    each = bytes_per_sample(**slot)
    assert each == 4 * LENGTH + 4 * LENGTH + 4 + 8 + SCORED * WIDTH * (4 if precision == "float32" else 2)
    for budget in (each, 10 * each, 11 * each - 1, 11 * each):
        samples = capacity(memory=None, memory_bytes=budget, sample_bytes=each)
        kept = Reservoir(samples=samples, **slot, seed=0)
        assert kept.bytes == samples * each <= budget < kept.bytes + each
        assert kept.bytes == sum(value.nbytes for value in kept.state_dict().values())
    assert capacity(memory=7, memory_bytes=None, sample_bytes=each) == 7


def test_processes_keep_shards_of_their_own(as_process):
    shards = []
    for rank in range(3):
        as_process(rank, 3)
        shards.append(fed(reservoir(samples=10), range(rank * 100, rank * 100 + 40), size=4))
        assert shards[rank].seen[rank] == 40
        assert set(shards[rank].draw(99, purpose="match").tolist()) == set(range(rank, 10, 3))
    state = merged(shards)
    assert [number // 100 for number in state["input_ids"][:, 0].tolist()] == [0, 1, 2] * 3 + [0]
    places = [np.array(held(shard)) % 100 for shard in shards]
    assert not np.array_equal(places[1], places[2])


@pytest.mark.parametrize(("then", "now"), [(2, 1), (1, 2), (2, 3), (3, 2), (1, 4)])
@pytest.mark.parametrize("each", [3, 60])
def test_another_number_of_processes_shares_out_what_is_stored(then, now, each, as_process):
    """Filled slots stay together, so the new shards are filled as if they had been from the start."""
    total, shards = each * then * now, []
    for rank in range(then):
        as_process(rank, then)
        shards.append(fed(reservoir(samples=19), range(rank, total, then), size=now))
    state, drawn = merged(shards), []
    for rank in range(now):
        as_process(rank, now)
        shard = reservoir(samples=19)
        shard.load_state_dict(state)
        slots = shard.draw(99, purpose="match")
        assert (shard.lengths[slots] == LENGTH).all()
        drawn += slots.tolist()
        shard.add(*batch([1000]))
        assert shard.seen[rank] == total // now + 1
        if total + now <= 19:
            assert shard.input_ids[total + (rank - total) % now, 0] == 1000
    assert sorted(drawn) == list(range(min(total, 19)))


@pytest.mark.parametrize("steps", [4, 40])
def test_processes_with_unequal_shares_go_on_as_they_were(steps, as_process):
    """As where replayed text does not divide among them: each has its own count."""

    def step(shard: Reservoir, rank: int, number: int) -> None:
        as_process(rank, 2)
        shard.add(*batch(range(number * 10, number * 10 + 1 + 2 * rank)))

    shards = [reservoir(samples=21) for _ in range(2)]
    for number in range(steps):
        for rank, shard in enumerate(shards):
            step(shard, rank, number)
    state = merged(shards)
    assert state["seen"][:3].tolist() == [steps, 3 * steps, 0]
    for rank, shard in enumerate(shards):
        resumed = reservoir(samples=21)
        resumed.load_state_dict(state)
        step(shard, rank, steps)
        step(resumed, rank, steps)
        assert torch.equal(resumed.input_ids[rank::2], shard.input_ids[rank::2])
        assert torch.equal(resumed.draw(3, purpose="match"), shard.draw(3, purpose="match"))
    as_process(0, 1)
    alone = reservoir(samples=21)
    alone.load_state_dict(state)
    filled = int((state["lengths"] > 0).sum())
    assert sorted(alone.draw(99, purpose="match").tolist()) == list(range(filled))
    assert sorted(held(alone)) == sorted(state["input_ids"][state["lengths"] > 0, 0].tolist())
    assert alone.seen.tolist() == [4 * steps] + [0] * 20


def test_source_and_target_come_back_with_their_lengths():
    """Of a model with a decoder; also from a batch that is narrower than a slot."""
    objective = Span(rate=0.3, mean=2, sentinels=list(range(99, 49, -1)), end=1, pad=0, start=0)
    room = {**slot_of(objective, 30), "width": 2, "precision": "float32"}
    assert room["length"] == 26 and room["target"] == room["scored"] == 14
    kept = Reservoir(samples=8, seed=0, **room)
    assert kept.bytes == 8 * bytes_per_sample(**room)
    ids = np.random.default_rng(0).integers(2, 50, (4, 30))
    for lengths in ([30, 30, 7, 30], [9, 4, 1, 9]):
        given, _ = objective.batch(Rows(ids, np.array(lengths), sample_keys(1, np.arange(4))))
        outputs = torch.rand(len(given["positions"]), 2)
        first = int((kept.lengths > 0).sum())
        kept.add(given, outputs)
        slots = torch.arange(first, first + 4)
        back = kept.batch(slots)
        for row in range(4):
            one, own = single(given, row), single(back, row)
            assert torch.equal(one["targets"], own["targets"])
            for name in ("input_ids", "decoder_input_ids"):
                width = one[name].shape[1]
                assert torch.equal(own[name][:, :width], one[name]) and not own[name][:, width:].any()
            present = one.get("attention_mask", torch.ones_like(one["input_ids"])).sum()
            assert own["attention_mask"].sum() == present
        assert torch.equal(kept.outputs_of(slots), outputs)
    first = single(given, 0)
    kept = Reservoir(samples=1, seed=0, **room, pad=7)
    kept.input_ids[0], kept.decoder_input_ids[0], kept.labels[0] = 5, 5, 5  # a longer one was there
    kept.add({**first, "domains": torch.zeros(1)}, outputs[: len(first["positions"])])
    length, taken = int(first["attention_mask"].sum()), first["decoder_input_ids"].shape[1]
    assert (kept.input_ids[0, first["input_ids"].shape[1] :] == 7).all() and kept.lengths.tolist() == [length]
    assert (kept.decoder_input_ids[0, taken:] == 7).all()
    assert torch.equal(kept.batch(torch.tensor([0]))["targets"], first["targets"])
    kept = Reservoir(samples=8, seed=0, **room)
    kept.add(given, outputs)
    again = Reservoir(samples=8, seed=0, **room)
    again.load_state_dict(kept.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(kept.buffers(), again.buffers(), strict=True))
