"""The reservoir: every sample equally likely, a shard per process; DER++ and A-GEM against their formulas."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, labels_of, single
from cpt.data.sampler import TrainStream
from cpt.methods import reservoir as module
from cpt.methods.reservoir import AGEM, Reference, Reservoir, inner_product, solve
from cpt.models.objectives import Span
from tests.support.campaign import run_few
from tests.support.forward_passes import make_batch, token_nll
from tests.support.method_fixtures import equal_tensors

SLOT = SimpleNamespace(
    side_lengths=lambda length: (length, None), max_scored=lambda length: 2, isolated=False
)


def reservoir(samples: int, *, seed: int = 0, precision: str = "float32") -> Reservoir:
    return Reservoir(SLOT, samples=samples, length=5, width=3, precision=precision, seed=seed)


def batch(numbers, *, scored=2, length=5):
    """Samples that hold their own number everywhere, and outputs that hold a tenth of it."""
    numbers = torch.as_tensor(list(numbers))
    ids = numbers[:, None].repeat(1, 5)
    labels = torch.full_like(ids, UNSCORED)
    labels[:, 1 : 1 + scored] = numbers[:, None]
    mask = (torch.arange(5) < length).long().expand_as(ids) if length < 5 else None
    return make_batch(ids, labels, mask), (numbers / 10).repeat_interleave(scored)[:, None].repeat(1, 3)


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


def test_samples_and_outputs_come_back_as_they_went_in():
    kept = fed(reservoir(8), range(30), size=3)
    slots = kept.draw(6, purpose="match")
    expected, outputs = batch([held(kept)[slot] for slot in slots])
    assert equal_tensors(kept.batch(slots), expected) and torch.equal(kept.outputs_of(slots), outputs)
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
    assert equal_tensors(kept.state_dict(), other.state_dict())
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
    assert sorted(found) == list(range(min(total, 19)))


def test_source_and_target_come_back_with_their_lengths():
    objective = Span(rate=0.3, mean=2, sentinels=list(range(99, 49, -1)), end=1, pad=0, start=0)
    kept = Reservoir(objective, samples=4, length=30, width=2, seed=0, pad=7)
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
        present = one.get("attention_mask", torch.ones_like(one["input_ids"]))
        assert own["attention_mask"].sum() == present.sum()


def scored_outputs(module, ids, labels, length):
    """Logits [K, V] and last hidden states [K, D] at a row's scored positions, by a plain forward."""
    ids, places = ids[None, :length].long(), labels[:length] != UNSCORED
    hidden = module.model.base_model(input_ids=ids).last_hidden_state[0]
    return module.model(input_ids=ids).logits[0, places], hidden[places]


@pytest.mark.parametrize("family", ["masked", "causal"])
@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_the_losses_are_those_of_the_paper(matched, family, build):
    options = [f"method.matched={matched}", "method.alpha=0.3", "method.beta=0.7", "method.precision=float32"]
    work = build("derpp", "method.buffer_size=20", "method.minibatch_size=3", *options, on=family)
    text, module = work.data.train["law"], work.module.double().eval()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    options = {"objective": work.data.objective, "seed": 0, "batch_size": 8, "rank": 0, "world": 1}
    parts = TrainStream({"law": text}, **options, accumulate=1, steps=[len(text) // 8 + 2])
    short = next(number for number in range(len(parts)) if "attention_mask" in parts[number])
    first = module.losses(parts[short])
    assert first["derpp_match"] == first["derpp_replay"] == 0 < first["lm"]
    for number in (0, short):
        module.losses(parts[number])
    kept, batch = module.memory, parts[1]
    rows = [*zip(kept.input_ids, kept.labels, kept.lengths, strict=True)]
    with torch.no_grad():
        for row, stored in zip(rows, kept.outputs, strict=True):
            outputs = scored_outputs(module, *row)[matched == "hidden"]
            torch.testing.assert_close(stored[: len(outputs)].double(), outputs, rtol=1e-5, atol=1e-5)
        for parameter in module.model.parameters():
            parameter.mul_(1.2)
    # of 24: different draws, the short row in both; a micro-batch of two processes has its share of 76
    module.options = replace(module.options, minibatch_size=76)
    module._trainer = SimpleNamespace(world_size=2, accumulate_grad_batches=2)
    match, replay = (kept.draw(19, purpose=name) for name in ("match", "replay"))
    assert set(match.tolist()) != set(replay.tolist())
    assert all((kept.lengths[slots] < module.length).any() for slots in (match, replay))
    errors, nll, plain = [], [], []
    for slot in match:
        now = scored_outputs(module, *rows[slot])[matched == "hidden"]
        errors += (now - kept.outputs[slot, : len(now)].double()).square().flatten().tolist()
    for slot in replay:
        logits, labels = scored_outputs(module, *rows[slot])[0], rows[slot][1]
        loss = functional.cross_entropy(logits, labels[labels != UNSCORED].long(), reduction="none")
        nll += loss.tolist()
    for ids, labels in zip(batch["input_ids"], labels_of(batch), strict=True):
        logits, _ = scored_outputs(module, ids, labels, len(ids))
        plain.append(functional.cross_entropy(logits, labels[labels != UNSCORED]).item())
    terms = module.losses(batch)
    expected = {"lm": sum(plain) / len(plain), "derpp_match": 0.3 * sum(errors) / len(errors)}
    expected["derpp_replay"] = 0.7 * sum(nll) / len(nll)
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)
    for term in terms.values():
        assert torch.autograd.grad(term, next(module.model.parameters()), retain_graph=True)[0].any()


def test_a_stored_row_without_a_scored_token_costs_nothing(build):
    work = build("derpp", "method.buffer_size=1", "method.minibatch_size=1")
    module, (batch,) = work.module.eval(), work.batches()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    empty = batch | {name: batch[name][:0] for name in ("positions", "targets", "rows")}
    module.losses(empty | {"weight": torch.tensor(0.0)})
    terms = module.losses(batch)
    assert terms["derpp_match"] == terms["derpp_replay"] == 0 < terms["lm"]


@pytest.mark.parametrize(("minibatch_size", "drawn"), [("null", 4), ("6", 3)])
def test_derpp_replays_half_of_the_batch_or_its_share_of_the_option(
    minibatch_size, drawn, build, monkeypatch
):
    work = build("derpp", "method.buffer_size=40", f"method.minibatch_size={minibatch_size}")
    module, batches = work.module.eval(), work.batches(3)
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=2)
    draw, counts = Reservoir.draw, []

    def record_count(memory, count, **arguments):
        counts.append(count)
        return draw(memory, count, **arguments)

    monkeypatch.setattr(Reservoir, "draw", record_count)
    for micro_batch in batches:
        assert len(micro_batch["input_ids"]) == 8
        module.losses(micro_batch)
    # Two draws, to match outputs and to replay labels, for each of the three micro-batches.
    assert counts == [drawn] * 6


SMALL = ["method.buffer_size=24", "method.minibatch_size=8", "order=[food,law,space]", "trainer.steps=12"]
SMALL += ["optim.lr=0.01"]


def reference_of(module, domain):
    """g_ref made here, from the samples that the method draws: of a domain, or of all before (None)."""
    trained = list(module.model.parameters())
    slots = module.memory.draw(8, purpose=f"step {module.trainer.global_step}", domain=domain)
    loss = token_nll(module.model, module.memory.batch(slots)).mean()
    return list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


def along(moved, references) -> float:
    """The least cosine between a movement and references."""
    long = [torch.cat([each.flatten() for each in tensors]).norm() for tensors in (moved, *references)]
    cosines = zip(references, long[1:], strict=True)
    return min((inner_product(moved, each) / long[0] / norm).item() for each, norm in cosines)


@pytest.mark.parametrize("constraints", ["mean", "each"])
@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_no_step_raises_the_loss_on_the_memory(apply_to, constraints, build, monkeypatch):
    seen = {"gradient": [], "update": []}
    constrain, gradients, update = AGEM.on_before_optimizer_step, AGEM.transform_gradients, AGEM.after_update

    def before(module, optimizer):
        domains = range(module.domain.index) if constraints == "each" else [None]
        module.expected = [reference_of(module, domain) for domain in domains]
        module.old = [each.detach().clone() for each in module.model.parameters()]
        gradients(module, optimizer)

    def between(module, optimizer):
        constrain(module, optimizer)
        if module.domain.index == 2:
            own = [each.grad for each in module.model.parameters()]
            seen["gradient"].append(along(own, module.expected))

    def after(module):
        update(module)
        if module.domain.index == 2:
            own = [old - p.detach() for p, old in zip(module.model.parameters(), module.old, strict=True)]
            seen["update"].append(along(own, module.expected))

    monkeypatch.setattr(AGEM, "on_before_optimizer_step", between)
    monkeypatch.setattr(AGEM, "after_update", after)
    given = [f"method.apply_to={apply_to}", f"method.constraints={constraints}", "optim.weight_decay=0.1"]
    work = build("agem", *SMALL, *given)
    work.learn(0)
    monkeypatch.setattr(AGEM, "transform_gradients", before)
    work.learn(1)
    work.learn(2)
    held = seen.pop(apply_to)
    [free] = seen.values()
    assert len(held) == len(free) == 12 and min(held) > -1e-4 and min(free) < -1e-2


def test_a_gradient_that_does_no_harm_is_left_alone():
    weight, reference = nn.Parameter(torch.zeros(2)), Reference(apply_to="gradient")
    reference.gradients = [{weight: torch.tensor([1.0, 0.0])}]
    for given, expected in (([1.0, 2.0], [1.0, 2.0]), ([-1.0, 2.0], [0.0, 2.0])):
        step = torch.tensor(given)
        reference.constrain([(weight, step)], None)
        assert step.tolist() == expected
    assert reference.diagnostics()["projected"].item() == 0.5


def by_hand(gram, products, *, least):
    best = None
    for free in product([False, True], repeat=len(products)):
        found, chosen = torch.full_like(products, least), torch.tensor(free)
        if chosen.any():
            rest = products + gram[:, ~chosen] @ found[~chosen]
            found[chosen] = -torch.linalg.solve(gram[chosen][:, chosen], rest[chosen])
        value = found @ gram @ found / 2 + products @ found
        if (found >= least - 1e-12).all() and (best is None or value < best[0]):
            best = value, found
    return best[1]


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_the_constraints_of_several_domains_are_those_of_brute_force(least):
    draw, bound = torch.Generator().manual_seed(0), []
    for _ in range(50):
        references, gradient = torch.randn(3, 6, generator=draw), torch.randn(6, generator=draw)
        gram, products = (references @ references.T).double(), (references @ gradient).double()
        found = solve(gram, products, least=least)
        assert torch.allclose(found, by_hand(gram, products, least=least), atol=1e-8)
        bound.append((found > least).sum().item())
    assert len(set(bound)) > 2  # none, some and several of them bind


def test_each_domain_has_a_reference_of_its_own_samples(build):
    given = ["method.buffer_size=40", "trainer.importance_samples=20", "method.constraints=each"]
    work = build("agem", "trainer.steps=2", *given)
    for number in (0, 1):
        work.learn(number)
    memory, newest = (
        work.module.memory,
        {tuple(row.tolist()) for b in work.importance_batches() for row in b["input_ids"]},
    )
    rows = memory.input_ids[memory.lengths > 0].tolist()
    assert len(rows) == 40 and 10 <= sum(tuple(row) in newest for row in rows) <= 30
    for domain in (0, 1):
        drawn = memory.draw(100, purpose="all", domain=domain)
        assert len(drawn) and (memory.domains[drawn] == domain).all()
    assert len(memory.draw(100, purpose="all")) == (memory.domains >= 0).sum()
