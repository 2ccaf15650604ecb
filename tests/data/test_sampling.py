"""Batches by their number: processes, parts and restarts gives the same samples, replayed ones too."""

import itertools
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.core.randomness import key, sample_keys
from cpt.data.collate import UNSCORED, label_batch, place_labels, select_row
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Budget, Domain
from cpt.data.replay import NO_REPLAY
from cpt.data.sampler import NO_DOMAIN, EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.models.objectives import Causal, Masked
from tests.support.data_fixtures import fake_trainer, make_rows


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 50


MASKED = Masked(Vocabulary(mask_token_id=1, all_special_ids=[0, 1], name_or_path="tiny"), rate=0.3)
OBJECTIVES = {"masked": MASKED, "causal": Causal()}
SIZES = {"a": 23, "b": 7, "c": 40, "now": 31, "general": 9}
TEXTS = {name: make_rows(size, last=5, seed=size) for name, size in SIZES.items()}
DOMAIN_INDICES = {"a": 0, "b": 1, "c": 2}
TRAIN = {name: TEXTS[name] for name in DOMAIN_INDICES}


def index_rows(texts):
    """The text and the number of each row, by its ids: no two rows have the same ones."""
    rows = {}
    for name, text in texts.items():
        for number, ids in enumerate(text.ids(np.arange(len(text))).tolist()):
            rows[tuple(ids)] = (name, number)
    return rows


ROWS_BY_IDS = index_rows(TEXTS)


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


def make_stream(
    texts, steps, *, objective=MASKED, seed=0, batch_size=12, accumulate=1, rank=0, world=1, **options
):
    """The training batches of a stage; its texts are names in TEXTS, or a mapping."""
    if not isinstance(texts, dict):
        texts = {name: TEXTS[name] for name in texts}
    return TrainStream(
        texts,
        objective=objective,
        seed=seed,
        batch_size=batch_size,
        steps=steps,
        accumulate=accumulate,
        rank=rank,
        world=world,
        **options,
    )


def list_batches(batches):
    """All batches of a stream or subset."""
    return [batches[number] for number in range(len(batches))]


def list_samples(*batches):
    """Inputs and labels of each sample."""
    samples = []
    for batch in batches:
        for ids, labels in zip(batch["input_ids"].tolist(), place_labels(batch).tolist(), strict=True):
            samples.append((tuple(ids), tuple(labels)))
    return samples


def list_all_samples(batches):
    return list_samples(*list_batches(batches))


def identify_rows(*batches):
    """The text and the row of each sample."""
    rows = []
    for batch in batches:
        # Masked tokens are restored: rows are known by their ids.
        for ids in MASKED.restore(batch)["input_ids"].tolist():
            rows.append(ROWS_BY_IDS[tuple(ids)])
    return rows


def identify_all_rows(batches):
    return identify_rows(*list_batches(batches))


def are_equal(batches, expected_batches):
    for batch, expected in zip(batches, expected_batches, strict=True):
        if batch.keys() != expected.keys():
            return False
        if not all(torch.equal(batch[name], expected[name]) for name in batch):
            return False
    return True


def test_an_epoch_is_every_row_once_in_an_order_and_with_masks_of_the_epoch_the_domain_and_the_seed():
    stream = make_stream("a", [10])
    rows = [row for _, row in identify_all_rows(stream)]
    epochs = [rows[start : start + 23] for start in range(0, 115, 23)]
    assert len(stream) == 10 and len(rows) == 120 and len(set(list_all_samples(stream))) > 100
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5 and list(range(23)) not in epochs

    # The same text by another name, and another seed, have another order and other masks.
    streams = [
        make_stream({name: TEXTS["a"]}, [2], seed=seed) for name, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    assert identify_all_rows(streams[0]) == identify_all_rows(make_stream("a", [2]))
    for first, second in itertools.combinations(streams, 2):
        assert identify_all_rows(first) != identify_all_rows(second)
        assert len(set(list_all_samples(first)) & set(list_all_samples(second))) < 4

    # The size of a batch and the number of steps move no sample.
    samples = list_all_samples(make_stream("a", [12], batch_size=4))
    assert list_all_samples(make_stream("a", [3], batch_size=16)) == samples
    assert list_all_samples(make_stream("a", [6], batch_size=4)) == samples[:24]


def test_a_batch_with_nothing_to_score_has_weight_1_and_one_that_cannot_be_shared_out_is_refused():
    text = {"a": make_rows(4, length=1)}
    stream = make_stream(text, [1], objective=Causal(), batch_size=4)
    subset = EvalSubset(text, {"a": np.arange(4)}, objective=Causal(), batch_size=4, purpose="x")
    for batch in (stream[0], subset[0]):
        assert batch["positions"].tolist() == [] and float(batch["weight"]) == 1
    for accumulate, world in ((5, 1), (1, 5), (4, 2), (0, 1)):
        with pytest.raises(ValueError, match=f"trainer.batch_size=12 .*_batches={accumulate}"):
            make_stream("abc", [1, 1, 1], accumulate=accumulate, world=world)


def test_the_mixture_is_exactly_the_samples_of_its_parts(objective):
    mixture = list_all_samples(make_stream("abc", [3, 5, 2], objective=objective))
    one_by_one = []
    for name, steps in (("a", 3), ("b", 5), ("c", 2)):
        one_by_one += list_all_samples(make_stream(name, [steps], objective=objective))
    assert Counter(mixture) == Counter(one_by_one) and mixture != one_by_one


def test_resuming_gives_what_was_left_and_shares_are_everything_once():
    sampler = ResumeSampler(5, 12)
    assert list(sampler) == [5, 6, 7, 8, 9, 10, 11] and len(sampler) == 12
    assert list(ResumeSampler(12, 12)) == []
    for total, world in itertools.product((0, 7, 8), (1, 3, 9)):
        shares = [ShardSampler(total, rank=rank, world=world) for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(total))
        assert [len(share) for share in shares] == [len(list(share)) for share in shares]
        assert {share.common for share in shares} == {min(map(len, shares))}


ROWS = {"a": np.array([22, 3, 0, 8, 7, 11]), "c": np.array([5, 39, 1])}


def make_subset(texts, rows, *, objective=MASKED, batch_size=4, purpose="score", **options):
    return EvalSubset(texts, rows, objective=objective, batch_size=batch_size, purpose=purpose, **options)


def test_a_subset_is_its_rows_with_masks_of_the_text_the_row_and_the_purpose():
    subset = make_subset(TEXTS, ROWS)
    batches = list_batches(subset)
    assert [(int(batch["column"]), len(batch["input_ids"])) for batch in batches] == [(0, 4), (0, 2), (2, 3)]
    assert identify_all_rows(subset) == [("a", row) for row in ROWS["a"]] + [("c", row) for row in ROWS["c"]]
    for batch in batches:
        assert float(batch["weight"]) == pytest.approx(1 / len(batch["positions"]))

    # The size of a batch and the order of texts and rows change no mask.
    samples = list_all_samples(subset)
    assert list_all_samples(make_subset(TEXTS, ROWS, batch_size=9)) == samples
    reversed_texts = dict(reversed(TRAIN.items()))
    reversed_rows = {name: rows[::-1] for name, rows in ROWS.items()}
    assert Counter(list_all_samples(make_subset(reversed_texts, reversed_rows))) == Counter(samples)

    # Another purpose or another name of the text does; a few samples are equal by chance.
    probe = make_subset(TEXTS, ROWS, purpose="probe")
    renamed = make_subset({"x": TEXTS["a"]}, {"x": ROWS["a"]})
    assert len(set(list_all_samples(probe)) & set(samples)) <= 2
    assert len(set(list_all_samples(renamed)) & set(samples)) <= 1


def test_each_scored_token_has_its_document(objective):
    subset = make_subset(TEXTS, {"a": np.arange(23)}, objective=objective, batch_size=6)
    # A causal model predicts the token after the position, a masked one the token at it.
    offset = 1 if isinstance(objective, Causal) else 0
    for number, batch in enumerate(list_batches(subset)):
        documents = []
        for row, labels in enumerate(place_labels(batch).tolist(), start=number * 6):
            for position, label in enumerate(labels):
                if label != UNSCORED:
                    # Rows have 8 tokens, documents 5.
                    documents.append((row * 8 + position + offset) // 5)
        assert batch["documents"].tolist() == documents


def test_processes_that_go_together_are_at_one_text_and_none_is_left_over(objective):
    rows = {name: np.arange(len(text)) for name, text in TRAIN.items()}
    single_process = make_subset(TEXTS, rows, objective=objective, batch_size=8)
    lockstep = make_subset(TEXTS, rows, objective=objective, batch_size=8, lockstep_processes=3)

    batches = list_batches(lockstep)
    for simultaneous in zip(batches[0::3], batches[1::3], batches[2::3], strict=True):
        assert len({int(batch["column"]) for batch in simultaneous}) == 1
    idle_batches = [batch for batch in batches if "idle" in batch]
    assert len(idle_batches) == len(batches) - len(single_process) == 3
    assert all(len(batch["positions"]) == 0 for batch in idle_batches)
    busy_batches = [batch for batch in batches if "idle" not in batch]
    samples = [list_samples(batch) for batch in busy_batches]
    assert samples == [list_samples(batch) for batch in list_batches(single_process)]

    # A process without a batch would end a run, so that each can have a least number of them.
    filled = make_subset(TEXTS, {"b": rows["b"]}, objective=objective, batch_size=8, min_batches=4)
    assert ["idle" in batch for batch in list_batches(filled)] == [False, True, True, True]


def test_places_targets_and_rows_are_those_of_the_labels_and_a_row_is_a_batch():
    labels = torch.tensor([[-100, 7, -100, 8], [-100] * 4, [9, -100, -100, -100]])
    ids = torch.arange(12).view(3, 4)
    is_token = torch.ones(3, 4, dtype=torch.bool)
    batch = label_batch(ids, labels, is_token)
    assert "attention_mask" not in batch and "labels" not in batch
    assert batch["positions"].tolist() == [1, 3, 8] and batch["targets"].tolist() == [7, 8, 9]
    assert batch["rows"].tolist() == [0, 0, 2] and torch.equal(place_labels(batch), labels)

    # With padding in one row, the batch has an attention mask, and so has each row as a batch.
    is_token[1, 2:] = False
    batch = label_batch(ids, labels, is_token)
    for row in range(3):
        expected = label_batch(ids[[row]], labels[[row]], is_token[[row]])
        expected.setdefault("attention_mask", torch.ones(1, 4, dtype=torch.long))
        assert are_equal([select_row(batch, row)], [expected])


DOMAINS = [Domain("a", 0, ("a",)), Domain("b", 1, ("b",)), Domain("c", 2, ("c",))]
JOINT = [Domain("joint", 0, ("a", "b", "c"))]
HELD_OUT = {name: TEXTS[name] for name in ("a", "b", "c", "general")}


def make_budget(*, steps=None, epochs=None, tokens=None, batch_size=4):
    return Budget(steps=steps, epochs=epochs, tokens=tokens, batch_size=batch_size)


SIX_STEPS = make_budget(steps=6)


def enter_domain(
    number=0,
    *,
    domains=DOMAINS,
    train=TRAIN,
    held_out=HELD_OUT,
    objective=MASKED,
    budget=SIX_STEPS,
    replay=NO_REPLAY,
    seed=0,
    accumulate=1,
    eval_batch_size=4,
    importance_samples=10,
    trainer=None,
):
    """The sequence of these domains, at the one of a number."""
    sequence = DomainSequence(
        domains,
        train=train,
        held_out=held_out,
        objective=objective,
        budget=budget,
        replay=replay,
        seed=seed,
        accumulate=accumulate,
        eval_batch_size=eval_batch_size,
        importance_samples=importance_samples,
        workers=0,
    )
    sequence.trainer = trainer or fake_trainer()
    sequence.enter(domains[number])
    return sequence


def test_training_is_on_the_current_domain_and_a_batch_says_whose_text_it_is():
    sequence = enter_domain()
    assert list(sequence) == DOMAINS and sequence.domain_indices == {"a": 0, "b": 1, "c": 2}
    assert enter_domain(domains=JOINT).domain_indices == {"a": 0, "b": 1, "c": 2}
    for domain in DOMAINS:
        sequence.enter(domain)
        batches = list(sequence.train_dataloader())
        assert len(batches) == sequence.steps(domain) == 6
        assert {name for name, _ in identify_rows(*batches)} == {domain.name}
        indices = torch.cat([batch["domains"] for batch in sequence.importance_batches()])
        assert set(indices.tolist()) == {domain.index}
    columns = {(int(batch["column"]), int(batch["domains"][0])) for batch in sequence.val_dataloader()}
    assert columns == {(0, 0), (1, 1), (2, 2), (3, -1)}

    # Evaluation is every row of every text, whatever is learned, and shared out.
    batches = list(enter_domain().val_dataloader())
    expected = []
    for name in HELD_OUT:
        expected += [(name, row) for row in range(SIZES[name])]
    assert identify_rows(*batches) == expected
    changed = enter_domain(
        2,
        seed=5,
        budget=make_budget(steps=1, batch_size=2),
        importance_samples=3,
        trainer=fake_trainer(step=4),
    )
    assert are_equal(list(changed.val_dataloader()), batches)
    second_process = enter_domain(trainer=fake_trainer(rank=1, world=2))
    assert are_equal(list(second_process.val_dataloader()), batches[1::2])


def test_a_probe_is_a_fixed_random_subset_of_the_domain_with_masks_of_its_own():
    def read_probe(number=0, **options):
        batches = list(enter_domain(number, **options).importance_batches())
        return identify_rows(*batches), torch.cat([place_labels(batch) for batch in batches]).tolist()

    rows, labels = read_probe(2)
    numbers = [row for name, row in rows if name == "c"]
    assert len(set(numbers)) == len(rows) == 10 and numbers != sorted(numbers) and max(numbers) > 19
    changed = read_probe(
        2, trainer=fake_trainer(step=3), seed=7, budget=make_budget(epochs=2.0), eval_batch_size=3
    )
    assert changed == (rows, labels)

    short_rows, _ = read_probe(1)
    assert len(short_rows) == SIZES["b"]
    joint_rows, _ = read_probe(domains=JOINT)  # a share of each text
    assert Counter(name for name, _ in joint_rows) == dict.fromkeys("abc", 4)


def test_a_budget_in_steps_is_exactly_one_of_steps_epochs_and_tokens():
    for budget, expected in (
        (make_budget(steps=6.0), 6),
        (make_budget(epochs=1), 6),
        (make_budget(epochs=0.001), 1),
        (make_budget(tokens=320), 10),
        (make_budget(tokens=321), 11),
        (make_budget(epochs=1, batch_size=22), 2),
    ):
        steps = budget.steps_for(TEXTS["a"], length=8)
        assert (steps, type(steps)) == (expected, int)
    with pytest.raises(
        ValueError,
        match=r"^trainer.steps=null trainer.epochs=null trainer.tokens=null trainer.batch_size=4 is",
    ):
        make_budget()
    sequence = enter_domain(domains=JOINT, budget=make_budget(epochs=1.0))
    assert sequence.steps_by_text(JOINT[0]) == [6, 2, 10]
    assert sequence.steps(JOINT[0]) == len(sequence.train_dataloader()) == 18


BATCH = 8


def make_replay_stream(
    mixture, *, names=("now",), past="abc", steps=(20,), stage="now", seed=0, objective=None, **options
):
    """The batches of a stage whose text is "now", after the domains of `past`."""
    general = {}
    if mixture.general_ratio:
        general = {"general": TEXTS["general"]}
    pools = mixture.pools({name: TEXTS[name] for name in past}, general, stage=stage, seed=seed)
    return make_stream(
        {name: TEXTS[name] for name in names},
        list(steps),
        objective=objective or Causal(),
        seed=seed,
        batch_size=BATCH,
        pools=pools,
        domain_indices=DOMAIN_INDICES,
        **options,
    )


MIXTURES = [
    replace(NO_REPLAY, past_ratio=0.1, mode="append"),
    # In floats, 0.29 * 100 is 28.999999999999996.
    replace(NO_REPLAY, past_ratio=0.29, general_ratio=0.2),
    replace(NO_REPLAY, past_ratio=0.7, buffer_size=11),
    replace(NO_REPLAY, general_ratio=0.35),
    replace(NO_REPLAY, past_ratio=0.5, general_ratio=0.25, buffer_size=3, mode="append"),
]


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_shares_are_exact_and_new_rows_come_as_without_replay(mixture):
    stream = make_replay_stream(mixture, steps=[40], objective=MASKED)
    unreplayed = identify_all_rows(make_replay_stream(NO_REPLAY, steps=[40], objective=MASKED))
    shares = [Decimal(str(share)) for share in (mixture.past_ratio, mixture.general_ratio) if share]
    for step in range(40):
        replayed_rows = []
        for pool, share in zip(stream.pools, shares, strict=True):
            begin = int(share * BATCH * step)
            end = int(share * BATCH * (step + 1))
            text_indices, pool_rows, _ = pool.locate(np.arange(begin, end))
            names = list(pool.texts)
            replayed_rows += [(names[at], row) for at, row in zip(text_indices, pool_rows, strict=True)]

        rows = identify_rows(stream[step])
        new_rows = [row for row in rows if row[0] == "now"]
        num_new = BATCH if mixture.is_appended else BATCH - len(replayed_rows)
        assert len(new_rows) == num_new and new_rows == unreplayed[:num_new]
        assert Counter(rows) == Counter(new_rows + replayed_rows)
        indices = [DOMAIN_INDICES.get(name, NO_DOMAIN) for name, _ in rows]
        assert stream[step]["domains"].tolist() == indices
        del unreplayed[:num_new]


@pytest.mark.parametrize(("buffer_size", "num_stored"), [(None, [23, 7, 40]), (11, [3, 3, 3])])
def test_a_turn_draws_from_every_text_and_an_epoch_is_what_is_kept_of_it_in_every_stage(
    buffer_size, num_stored
):
    mixture = replace(NO_REPLAY, past_ratio=0.7, buffer_size=buffer_size)
    epochs = {}
    for stage in ("now", "later"):
        (pool,) = mixture.pools(TRAIN, {}, stage=stage, seed=0)
        text_indices, rows, _ = pool.locate(np.arange(240))
        turns = text_indices.reshape(-1, 3)
        assert (np.sort(turns) == range(3)).all() and len(np.unique(turns, axis=0)) > 1

        for index, count in enumerate(num_stored):
            # Of 240 draws 80 are of this text; those of an unfinished epoch are left out.
            text_epochs = rows[text_indices == index][: 80 // count * count].reshape(-1, count)
            assert len(np.unique(text_epochs)) == count and len(np.unique(text_epochs, axis=0)) > 1
            epochs[stage, index] = np.sort(text_epochs)
            assert (epochs[stage, index] == epochs["now", index][0]).all()


def test_the_masks_of_a_draw_are_those_of_its_number_and_replayed_rows_stand_everywhere():
    half = replace(NO_REPLAY, past_ratio=0.5)
    stream = make_replay_stream(half, past="a", steps=[12], objective=MASKED, seed=4, stage="later")
    for number in range(12):
        text_indices, rows, keys = stream.locate_step(number)
        batch_rows = identify_rows(stream[number])
        for position in np.flatnonzero(text_indices == 1):
            assert batch_rows[position] == ("a", rows[position])
        expected = sample_keys(key(4, "later", "past", "masks"), np.arange(4 * number, 4 * number + 4))
        assert sorted(keys[text_indices == 1].tolist()) == sorted(expected.tolist())

    positions = Counter()
    stream = make_replay_stream(replace(NO_REPLAY, past_ratio=0.25), steps=[400])
    for step in range(400):
        text_indices, _, _ = stream.locate_step(step)
        positions.update(np.flatnonzero(text_indices > 0).tolist())
    assert set(positions) == set(range(BATCH)) and all(60 < count < 140 for count in positions.values())


SHARED_OUT = [(mixture, ["now"], [14]) for mixture in (*MIXTURES[1:3], MIXTURES[4])]
SHARED_OUT += [(NO_REPLAY, ["a"], [3]), (NO_REPLAY, "abc", [3, 2, 4])]


@pytest.mark.parametrize(("mixture", "names", "steps"), SHARED_OUT, ids=str)
@pytest.mark.parametrize("accumulate, world", [(1, 2), (2, 1), (4, 2)])
def test_processes_and_parts_share_out_the_same_step(objective, accumulate, world, mixture, names, steps):
    undivided = make_replay_stream(mixture, names=names, steps=steps, objective=objective)
    streams = []  # by rank
    for rank in range(world):
        stream = make_replay_stream(
            mixture,
            names=names,
            steps=steps,
            objective=objective,
            accumulate=accumulate,
            rank=rank,
            world=world,
        )
        assert len(stream) == len(undivided) * accumulate
        streams.append(stream)

    num_shares = accumulate * world
    for step in range(len(undivided)):
        shares = []
        for number in range(step * accumulate, (step + 1) * accumulate):
            shares += [stream[number] for stream in streams]
        sizes = [len(share["input_ids"]) for share in shares]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1

        whole_step = undivided[step]
        for name in ("input_ids", "targets", "domains"):
            assert torch.equal(torch.cat([share[name] for share in shares]), whole_step[name])
        num_scored = sum(len(share["positions"]) for share in shares)
        num_read = sum(
            share.get("attention_mask", torch.ones_like(share["input_ids"])).sum() for share in shares
        )
        for share in shares:
            assert share["mean_tokens"].tolist() == [pytest.approx(num_read / num_shares), 0]
            assert float(share["weight"]) == pytest.approx(num_shares / num_scored)
            assert float(share["mean_rows"]) == pytest.approx(sum(sizes) / num_shares)


def enter_replaying_domain(mixture, number=3, *, step=0):
    """Three domains, then "now", at the one of a number, which begins at a step."""
    return enter_domain(
        number,
        domains=[*DOMAINS, Domain("now", 3, ("now",))],
        train=TEXTS,
        held_out={},
        objective=Causal(),
        budget=make_budget(steps=9, batch_size=BATCH),
        replay=mixture,
        accumulate=2,
        trainer=fake_trainer(step=step),
    )


def test_a_domain_that_is_resumed_gives_what_was_left_and_the_past_is_what_came_before():
    for mixture, step in itertools.product((NO_REPLAY, *MIXTURES), (1, 4, 9)):
        batches = list(enter_replaying_domain(mixture).train_dataloader())
        resumed = enter_replaying_domain(mixture, step=step).train_dataloader()
        assert are_equal(list(resumed), batches[2 * step :])
        assert len(resumed) == len(batches) == 18

    mixture = replace(NO_REPLAY, past_ratio=0.5, general_ratio=0.25)
    for number, (name, past) in enumerate((("a", ""), ("b", "a"), ("c", "ab"), ("now", "abc"))):
        counts = Counter()  # samples of each text
        for batch in enter_replaying_domain(mixture, number).train_dataloader():
            counts.update(ROWS_BY_IDS[tuple(ids)][0] for ids in batch["input_ids"].tolist())
        assert set(counts) == {name, "general", *past} and counts["general"] == 18
        assert counts[name] == (18 if past else 54)
        assert all(counts[text] * len(past) == 36 for text in past)
