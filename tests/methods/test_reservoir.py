"""The reservoir: every sample equally likely, a shard per process; DER++ and A-GEM against their formulas."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, place_labels, select_row
from cpt.data.sampler import TrainStream
from cpt.methods.reservoir import AGEM, Reference, Reservoir, inner_product, solve
from cpt.models.objectives import Span
from tests.support.campaign import run_few
from tests.support.forward_passes import make_batch, token_nll
from tests.support.method_fixtures import equal_tensors

SLOT = SimpleNamespace(
    side_lengths=lambda length: (length, None), max_scored=lambda length: 2, isolated=False
)


def make_reservoir(samples: int, *, seed: int = 0, precision: str = "float32") -> Reservoir:
    return Reservoir(SLOT, samples=samples, length=5, width=3, precision=precision, seed=seed)


def make_samples(numbers, *, scored=2, length=5):
    """Samples that hold their own number everywhere, and outputs that hold a tenth of it."""
    numbers = torch.as_tensor(list(numbers))
    ids = numbers[:, None].repeat(1, 5)
    labels = torch.full_like(ids, UNSCORED)
    labels[:, 1 : 1 + scored] = numbers[:, None]
    mask = None
    if length < 5:
        mask = (torch.arange(5) < length).long().expand_as(ids)
    outputs = (numbers / 10).repeat_interleave(scored)[:, None].repeat(1, 3)
    return make_batch(ids, labels, mask), outputs


def fill(memory: Reservoir, numbers: range, *, size: int) -> Reservoir:
    for first in range(0, len(numbers), size):
        memory.add(*make_samples(numbers[first : first + size]))
    return memory


def stored_numbers(memory: Reservoir) -> list[int]:
    return [ids[0].item() for ids, length in zip(memory.input_ids, memory.lengths, strict=True) if length]


def draw_slots(memory: Reservoir, count: int, purpose: str = "match") -> list[int]:
    return memory.draw(count, purpose=purpose).tolist()


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of several, without a process group."""
    return lambda rank, world: monkeypatch.setattr(
        "cpt.methods.reservoir.rank_and_world", lambda: (rank, world)
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", run_few([1, 2], [1]))
def test_every_sample_of_a_stream_is_as_likely_to_be_kept(world, as_process):
    stream, samples, trials = 60, 6, 250
    counts = np.zeros(stream)
    for seed in range(trials):
        for rank in range(world):
            as_process(rank, world)
            memory = fill(make_reservoir(samples, seed=seed), range(rank, stream, world), size=4)
            counts[stored_numbers(memory)] += 1
    assert counts.sum() == trials * samples
    expected = trials * samples / stream
    chi_square = float(((counts - expected) ** 2 / (expected * (1 - samples / stream))).sum())
    assert abs(chi_square - stream) < 4 * (2 * stream) ** 0.5


def test_samples_and_outputs_come_back_as_they_went_in():
    memory = fill(make_reservoir(8), range(30), size=3)
    slots = memory.draw(6, purpose="match")
    expected, outputs = make_samples([stored_numbers(memory)[slot] for slot in slots])
    assert equal_tensors(memory.batch(slots), expected) and torch.equal(memory.outputs_of(slots), outputs)

    memory = make_reservoir(3)
    for number, (scored, length) in enumerate(((2, 5), (1, 3), (0, 1))):
        memory.add(*make_samples([number + 1], scored=scored, length=length))
    slots = torch.tensor([1, 0, 2])
    replayed = memory.batch(slots)
    assert replayed["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5, [1, 0, 0, 0, 0]]
    assert replayed["positions"].tolist() == [1, 6, 7]
    assert memory.outputs_of(slots)[:, 0].tolist() == pytest.approx([0.2, 0.1, 0.1])
    assert "attention_mask" not in memory.batch(slots[1:2])


def test_two_draws_are_independent(as_process):
    memory = make_reservoir(10)
    assert draw_slots(memory, 4) == []
    counts = np.zeros(10)
    num_shared = 0
    for number in range(700):
        memory.add(*make_samples([number]))
        match = draw_slots(memory, 4)
        replay = draw_slots(memory, 3, "replay")
        assert len(set(match)) == len(match) == min(4, number + 1) and match == draw_slots(memory, 4)
        if number >= 100:
            counts[match] += 1
            num_shared += len({*match} & {*replay})
    assert ((counts - 240) ** 2).sum() / 144 < 10 + 4 * 20**0.5
    assert num_shared / 600 == pytest.approx(4 * 3 / 10, abs=0.1)

    first, second = (fill(make_reservoir(40, seed=seed), range(40), size=4) for seed in (0, 1))
    assert stored_numbers(first) == stored_numbers(second)
    assert draw_slots(first, 8) != draw_slots(second, 8)

    odd = fill(make_reservoir(8), range(7), size=1)
    as_process(0, 2)
    assert odd.rebalance_and_count() == 4 and odd.seen[:2].tolist() == [4, 3]


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_outputs_survive_a_file_as_the_floats_they_were(precision, tmp_path):
    memory, loaded = (make_reservoir(6, precision=precision) for _ in range(2))
    torch.save(fill(memory, range(20), size=4).state_dict(), tmp_path / "file")
    loaded.load_state_dict(torch.load(tmp_path / "file", weights_only=True))
    for cast in ("double", "half", "bfloat16", "float"):
        getattr(torch.nn.Sequential(loaded), cast)()
    _, outputs = make_samples(stored_numbers(memory))
    expected = outputs.view(6, 2, 3).to(getattr(torch, precision))
    assert loaded.outputs.dtype == expected.dtype and torch.equal(loaded.outputs, expected)
    assert equal_tensors(memory.state_dict(), loaded.state_dict())

    memory = make_reservoir(1, precision="float16")  # cut to its range
    batch, _ = make_samples([1])
    memory.add(batch, torch.tensor([[1e6, -1e6, 0.1], [0, 1, 2]]))
    assert memory.outputs[0].tolist() == [[65504, -65504, pytest.approx(0.1, rel=1e-3)], [0, 1, 2]]


@pytest.mark.parametrize(("stored_world", "current_world"), [(2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("per_process", [3, 60])
def test_another_number_of_processes_shards_the_stored_tensors(
    stored_world, current_world, per_process, as_process
):
    total = per_process * stored_world * current_world
    shards = []
    for rank in range(stored_world):
        as_process(rank, stored_world)
        shard = fill(make_reservoir(19), range(rank, total, stored_world), size=current_world)
        assert total < 19 or {*draw_slots(shard, 99)} == {*range(rank, 19, stored_world)}
        shards.append(shard)
    numbers = [torch.tensor(stored_numbers(shard)) // stored_world for shard in shards]
    assert total < 60 or numbers[0][:6].tolist() != numbers[-1][:6].tolist()

    # As the processes save it: each writes its own slots.
    state = {name: value.clone() for name, value in shards[0].named_buffers()}
    for rank, shard in enumerate(shards):
        for name in ("input_ids", "labels", "lengths", "outputs", "seen"):
            state[name][rank::stored_world] = getattr(shard, name)[rank::stored_world]

    all_slots = []
    for rank in range(current_world):
        as_process(rank, current_world)
        shard = make_reservoir(19)
        shard.load_state_dict(state)
        slots = draw_slots(shard, 99)
        assert (shard.lengths[slots] == 5).all()
        all_slots += slots
        shard.add(*make_samples([1000]))
        assert shard.seen[rank] == total // current_world + 1
    assert sorted(all_slots) == list(range(min(total, 19)))


def test_source_and_target_come_back_with_their_lengths():
    objective = Span(rate=0.3, mean=2, sentinels=list(range(99, 49, -1)), end=1, pad=0, start=0)
    memory = Reservoir(objective, samples=4, length=30, width=2, seed=0, pad=7)
    ids = np.random.default_rng(0).integers(2, 50, (4, 30))
    lengths = np.array([9, 30, 1, 9])
    batch, _ = objective.batch(Rows(ids, lengths, sample_keys(1, np.arange(4))))
    outputs = torch.rand(len(batch["positions"]), 2)
    memory.add(batch, outputs)
    replayed = memory.batch(torch.arange(4))
    assert torch.equal(memory.outputs_of(torch.arange(4)), outputs)

    for row in range(4):
        expected = select_row(batch, row)
        sample = select_row(replayed, row)
        assert torch.equal(expected["targets"], sample["targets"])
        for name in ("input_ids", "decoder_input_ids"):
            assert torch.equal(sample[name][:, : expected[name].shape[1]], expected[name])
        mask = expected.get("attention_mask", torch.ones_like(expected["input_ids"]))
        assert sample["attention_mask"].sum() == mask.sum()


def scored_outputs(module, ids, labels, length):
    """Logits [K, V] and last hidden states [K, D] at a row's scored positions, by a plain forward."""
    ids = ids[None, :length].long()
    is_scored = labels[:length] != UNSCORED
    hidden = module.model.base_model(input_ids=ids).last_hidden_state[0]
    return module.model(input_ids=ids).logits[0, is_scored], hidden[is_scored]


@pytest.mark.parametrize("family", ["masked", "causal"])
@pytest.mark.parametrize("matched", ["hidden", "logits"])
def test_the_losses_are_those_of_the_paper(matched, family, build):
    options = [f"method.matched={matched}", "method.alpha=0.3", "method.beta=0.7", "method.precision=float32"]
    run = build("derpp", "method.buffer_size=20", "method.minibatch_size=3", *options, on=family)
    module = run.module.double().eval()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    text = run.data.train["law"]
    stream = TrainStream(
        {"law": text},
        objective=run.data.objective,
        seed=0,
        batch_size=8,
        rank=0,
        world=1,
        accumulate=1,
        steps=[len(text) // 8 + 2],
    )
    number_of_short = next(number for number in range(len(stream)) if "attention_mask" in stream[number])
    first_terms = module.losses(stream[number_of_short])
    assert first_terms["derpp_match"] == first_terms["derpp_replay"] == 0 < first_terms["lm"]
    for number in (0, number_of_short):
        module.losses(stream[number])

    memory = module.memory
    rows = [*zip(memory.input_ids, memory.labels, memory.lengths, strict=True)]

    def matched_outputs(slot):
        logits, hidden = scored_outputs(module, *rows[slot])
        return hidden if matched == "hidden" else logits

    with torch.no_grad():
        for slot, stored in enumerate(memory.outputs):
            outputs = matched_outputs(slot)
            torch.testing.assert_close(stored[: len(outputs)].double(), outputs, rtol=1e-5, atol=1e-5)
        for parameter in module.model.parameters():
            parameter.mul_(1.2)

    # of 24: different draws, the short row in both; a micro-batch of two processes has its share of 76
    module.options = replace(module.options, minibatch_size=76)
    module._trainer = SimpleNamespace(world_size=2, accumulate_grad_batches=2)
    match, replay = (memory.draw(19, purpose=name) for name in ("match", "replay"))
    assert set(match.tolist()) != set(replay.tolist())
    assert all((memory.lengths[slots] < module.length).any() for slots in (match, replay))

    squared_errors = []
    for slot in match:
        outputs = matched_outputs(slot)
        difference = outputs - memory.outputs[slot, : len(outputs)].double()
        squared_errors += difference.square().flatten().tolist()
    replayed_nll = []
    for slot in replay:
        ids, labels, length = rows[slot]
        logits, _ = scored_outputs(module, ids, labels, length)
        targets = labels[labels != UNSCORED].long()
        replayed_nll += functional.cross_entropy(logits, targets, reduction="none").tolist()
    batch = stream[1]
    losses = []
    for ids, labels in zip(batch["input_ids"], place_labels(batch), strict=True):
        logits, _ = scored_outputs(module, ids, labels, len(ids))
        losses.append(functional.cross_entropy(logits, labels[labels != UNSCORED]).item())

    terms = module.losses(batch)
    expected = {
        "lm": sum(losses) / len(losses),
        "derpp_match": 0.3 * sum(squared_errors) / len(squared_errors),
        "derpp_replay": 0.7 * sum(replayed_nll) / len(replayed_nll),
    }
    assert {name: term.item() for name, term in terms.items()} == pytest.approx(expected, rel=1e-5)
    for term in terms.values():
        assert torch.autograd.grad(term, next(module.model.parameters()), retain_graph=True)[0].any()


def test_a_stored_row_without_a_scored_token_costs_nothing(build):
    run = build("derpp", "method.buffer_size=1", "method.minibatch_size=1")
    module = run.module.eval()
    [batch] = run.batches()
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    empty = batch | {name: batch[name][:0] for name in ("positions", "targets", "rows")}
    module.losses(empty | {"weight": torch.tensor(0.0)})
    terms = module.losses(batch)
    assert terms["derpp_match"] == terms["derpp_replay"] == 0 < terms["lm"]


@pytest.mark.parametrize(("minibatch_size", "num_drawn"), [("null", 4), ("6", 3)])
def test_derpp_replays_half_of_the_batch_or_its_share_of_the_option(
    minibatch_size, num_drawn, build, monkeypatch
):
    run = build("derpp", "method.buffer_size=40", f"method.minibatch_size={minibatch_size}")
    module = run.module.eval()
    batches = run.batches(3)
    module._trainer = SimpleNamespace(world_size=1, accumulate_grad_batches=2)
    draw = Reservoir.draw
    counts = []

    def record_count(memory, count, **arguments):
        counts.append(count)
        return draw(memory, count, **arguments)

    monkeypatch.setattr(Reservoir, "draw", record_count)
    for micro_batch in batches:
        assert len(micro_batch["input_ids"]) == 8
        module.losses(micro_batch)
    # Two draws, to match outputs and to replay labels, for each of the three micro-batches.
    assert counts == [num_drawn] * 6


SMALL = [
    "method.buffer_size=24",
    "method.minibatch_size=8",
    "order=[food,law,space]",
    "trainer.steps=12",
    "optim.lr=0.01",
]


def reference_gradient(module, domain):
    """g_ref made here, from the samples that the method draws: of a domain, or of all before (None)."""
    parameters = list(module.model.parameters())
    slots = module.memory.draw(8, purpose=f"step {module.trainer.global_step}", domain=domain)
    loss = token_nll(module.model, module.memory.batch(slots)).mean()
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def norm_of(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm()


def least_cosine(movement, references) -> float:
    """The least cosine between a movement and references."""
    cosines = []
    for reference in references:
        inner = inner_product(movement, reference)
        cosines.append((inner / norm_of(movement) / norm_of(reference)).item())
    return min(cosines)


@pytest.mark.parametrize("constraints", ["mean", "each"])
@pytest.mark.parametrize("apply_to", ["gradient", "update"])
def test_no_step_raises_the_loss_on_the_memory(apply_to, constraints, build, monkeypatch):
    cosines = {"gradient": [], "update": []}
    constrain = AGEM.on_before_optimizer_step
    transform_gradients = AGEM.transform_gradients
    after_update = AGEM.after_update
    references = []
    weights_before = []

    def measure_references(module, optimizer):
        domains = range(module.domain.index) if constraints == "each" else [None]
        references[:] = [reference_gradient(module, domain) for domain in domains]
        weights_before[:] = [parameter.detach().clone() for parameter in module.model.parameters()]
        transform_gradients(module, optimizer)

    def record_gradient(module, optimizer):
        constrain(module, optimizer)
        if module.domain.index == 2:
            gradient = [parameter.grad for parameter in module.model.parameters()]
            cosines["gradient"].append(least_cosine(gradient, references))

    def record_update(module):
        after_update(module)
        if module.domain.index == 2:
            movement = []
            for parameter, before in zip(module.model.parameters(), weights_before, strict=True):
                movement.append(before - parameter.detach())
            cosines["update"].append(least_cosine(movement, references))

    monkeypatch.setattr(AGEM, "on_before_optimizer_step", record_gradient)
    monkeypatch.setattr(AGEM, "after_update", record_update)
    options = [f"method.apply_to={apply_to}", f"method.constraints={constraints}", "optim.weight_decay=0.1"]
    run = build("agem", *SMALL, *options)
    run.learn(0)
    monkeypatch.setattr(AGEM, "transform_gradients", measure_references)
    run.learn(1)
    run.learn(2)

    constrained = cosines.pop(apply_to)
    [free] = cosines.values()
    assert len(constrained) == len(free) == 12 and min(constrained) > -1e-4 and min(free) < -1e-2


def test_a_gradient_that_does_no_harm_is_left_alone():
    weight = nn.Parameter(torch.zeros(2))
    reference = Reference(apply_to="gradient")
    reference.gradients = [{weight: torch.tensor([1.0, 0.0])}]
    for gradient, expected in (([1.0, 2.0], [1.0, 2.0]), ([-1.0, 2.0], [0.0, 2.0])):
        step = torch.tensor(gradient)
        reference.constrain([(weight, step)], None)
        assert step.tolist() == expected
    assert reference.diagnostics()["projected"].item() == 0.5


def solve_by_cases(gram, products, *, minimum):
    """The best of the minimizers for each set of multipliers that may be free of their bound."""
    smallest = math.inf
    solution = None
    for case in product([False, True], repeat=len(products)):
        is_free = torch.tensor(case)
        multipliers = torch.full_like(products, minimum)
        if is_free.any():
            constants = products + gram[:, ~is_free] @ multipliers[~is_free]
            multipliers[is_free] = -torch.linalg.solve(gram[is_free][:, is_free], constants[is_free])
        value = multipliers @ gram @ multipliers / 2 + products @ multipliers
        if (multipliers >= minimum - 1e-12).all() and value < smallest:
            smallest = value
            solution = multipliers
    return solution


@pytest.mark.parametrize("minimum", [0.0, 0.5])
def test_the_constraints_of_several_domains_are_those_of_brute_force(minimum):
    generator = torch.Generator().manual_seed(0)
    num_free = set()
    for _ in range(50):
        references = torch.randn(3, 6, generator=generator)
        gradient = torch.randn(6, generator=generator)
        gram = (references @ references.T).double()
        products = (references @ gradient).double()
        multipliers = solve(gram, products, lower_bound=minimum)
        assert torch.allclose(multipliers, solve_by_cases(gram, products, minimum=minimum), atol=1e-8)
        num_free.add((multipliers > minimum).sum().item())
    assert len(num_free) > 2  # none, some and several of them bind


def test_each_domain_has_a_reference_of_its_own_samples(build):
    options = ["method.buffer_size=40", "trainer.importance_samples=20", "method.constraints=each"]
    run = build("agem", "trainer.steps=2", *options)
    for number in (0, 1):
        run.learn(number)
    memory = run.module.memory
    newest_rows = set()
    for batch in run.importance_batches():
        newest_rows.update(tuple(row.tolist()) for row in batch["input_ids"])
    rows = memory.input_ids[memory.lengths > 0].tolist()
    assert len(rows) == 40 and 10 <= sum(tuple(row) in newest_rows for row in rows) <= 30

    for domain in (0, 1):
        slots = memory.draw(100, purpose="all", domain=domain)
        assert len(slots) and (memory.domains[slots] == domain).all()
    assert len(memory.draw(100, purpose="all")) == (memory.domains >= 0).sum()
