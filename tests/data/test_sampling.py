"""Batches by their number: any number of processes, parts and restarts gives the same samples."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.data.collate import UNSCORED, labels_of
from cpt.data.sampler import EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.models.objectives import Causal, Masked
from tests.support.data_fixtures import rows_by_hand


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 50


VOCABULARY = Vocabulary(mask_token_id=1, all_special_ids=[0, 1], name_or_path="tiny")
OBJECTIVES = {"masked": Masked(VOCABULARY, rate=0.3), "causal": Causal()}


@pytest.fixture(scope="module")
def texts():
    return {
        "a": rows_by_hand(23, last=3, seed=1),
        "b": rows_by_hand(7, seed=2),
        "c": rows_by_hand(40, seed=3),
    }


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


def stream(texts, steps, *, objective=OBJECTIVES["masked"], seed=0, batch_size=12, **options):
    options = {"accumulate": 1, "rank": 0, "world": 1, **options}
    return TrainStream(texts, objective=objective, seed=seed, batch_size=batch_size, steps=steps, **options)


def batches(made):
    return [made[number] for number in range(len(made))]


def samples(batch):
    """The rows of a batch as the model sees them: inputs and labels."""
    return [
        (tuple(inputs), tuple(labels))
        for inputs, labels in zip(batch["input_ids"].tolist(), labels_of(batch).tolist(), strict=True)
    ]


def all_samples(made):
    return [sample for batch in batches(made) for sample in samples(batch)]


def original(sample):
    """The masked sample's ids before they were masked."""
    return tuple(label if label != UNSCORED else each for each, label in zip(*sample, strict=True))


def row_numbers(made, text):
    """Which row of a text each sample of a stream is."""
    ids = {tuple(row): number for number, row in enumerate(text.ids(np.arange(len(text))).tolist())}
    return [ids[original(sample)] for sample in all_samples(made)]


def test_an_epoch_is_every_row_once_and_each_epoch_in_another_order(texts):
    text = texts["a"]
    made = stream({"a": text}, [10])
    assert len(made) == 10
    rows = row_numbers(made, text)
    assert len(rows) == 120
    epochs = [rows[start : start + 23] for start in range(0, 115, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert list(range(23)) not in epochs


def test_masks_change_from_epoch_to_epoch(texts):
    made = stream({"c": texts["c"]}, [30])
    seen = Counter()
    for sample in all_samples(made):
        seen[original(sample)] += 1
    assert set(seen.values()) == {9}
    assert len(set(all_samples(made))) > 300


def test_the_order_is_the_domains_and_the_seeds(texts):
    first = row_numbers(stream({"a": texts["a"]}, [2]), texts["a"])
    assert row_numbers(stream({"a": texts["a"]}, [2]), texts["a"]) == first
    assert row_numbers(stream({"a": texts["a"]}, [2], seed=1), texts["a"]) != first
    assert row_numbers(stream({"b": texts["a"]}, [2]), texts["a"]) != first
    masks = [
        set(all_samples(stream({name: texts["a"]}, [2], seed=seed)))
        for name, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    for one, other in itertools.combinations(masks, 2):
        assert len(one & other) < 4


def test_the_samples_do_not_depend_on_the_batch_size(texts):
    whole = all_samples(stream({"a": texts["a"]}, [12], batch_size=4))
    for batch_size, steps in ((1, 48), (3, 16), (16, 3), (48, 1)):
        assert all_samples(stream({"a": texts["a"]}, [steps], batch_size=batch_size)) == whole


def test_the_samples_do_not_depend_on_the_number_of_steps(texts):
    short, long = (all_samples(stream({"a": texts["a"]}, [steps])) for steps in (3, 9))
    assert long[: len(short)] == short


GRID = [
    (accumulate, world) for accumulate in (1, 2, 3) for world in (1, 2, 4) if 12 % (accumulate * world) == 0
]


@pytest.mark.slow
@pytest.mark.parametrize("names", ["a", "abc"])
@pytest.mark.parametrize("accumulate, world", GRID)
def test_processes_and_parts_share_out_the_same_batch(texts, objective, accumulate, world, names):
    chosen = {name: texts[name] for name in names}
    steps = [3, 2, 4][: len(names)]
    whole = batches(stream(chosen, steps, objective=objective))
    ranks = [
        stream(chosen, steps, objective=objective, accumulate=accumulate, world=world, rank=rank)
        for rank in range(world)
    ]
    assert {len(rank) for rank in ranks} == {sum(steps) * accumulate}
    for step, expected in enumerate(whole):
        shared = [rank[step * accumulate + part] for part in range(accumulate) for rank in ranks]
        assert {len(batch["input_ids"]) for batch in shared} == {12 // (accumulate * world)}
        assert [each for batch in shared for each in samples(batch)] == samples(expected)


@pytest.mark.parametrize("accumulate, world", GRID)
def test_the_weights_make_the_mean_over_all_scored_tokens(texts, objective, accumulate, world):
    """Lightning takes the mean over the processes and over the accumulated parts."""
    chosen, steps = {"a": texts["a"], "b": texts["b"]}, [3, 3]
    for step in range(6):
        total, scored = 0.0, 0
        for rank, part in itertools.product(range(world), range(accumulate)):
            made = stream(chosen, steps, objective=objective, accumulate=accumulate, world=world, rank=rank)
            batch = made[step * accumulate + part]
            count = int((labels_of(batch) != UNSCORED).sum())
            assert len(batch["positions"]) == count
            total += float(batch["weight"]) * count / (accumulate * world)
            scored += count
        assert total == pytest.approx(1)
        assert float(batch["weight"]) == pytest.approx(accumulate * world / scored)


def test_a_batch_with_nothing_to_score():
    text = rows_by_hand(4, length=1)
    batch = stream({"a": text}, [1], objective=Causal(), batch_size=4)[0]
    assert batch["positions"].tolist() == []
    assert float(batch["weight"]) == 1
    assert (
        float(
            EvalSubset({"a": text}, {"a": np.arange(4)}, objective=Causal(), batch_size=4, purpose="x")[0][
                "weight"
            ]
        )
        == 1
    )


@pytest.mark.parametrize("steps", [[3, 5, 2], [1, 0, 4], [7, 1, 1]])
def test_the_mixture_is_exactly_the_samples_of_its_parts(texts, objective, steps):
    mixture = all_samples(stream(texts, steps, objective=objective))
    alone = [
        all_samples(stream({name: texts[name]}, [count], objective=objective))
        for name, count in zip("abc", steps, strict=True)
    ]
    assert Counter(mixture) == Counter(itertools.chain(*alone))
    assert mixture != list(itertools.chain(*alone))


def test_the_mixture_is_mixed(texts):
    steps = [20, 20]
    made = stream({"a": texts["a"], "c": texts["c"]}, steps)
    of_a = {tuple(row) for row in texts["a"].ids(np.arange(23)).tolist()}
    counts = [sum(original(each) in of_a for each in samples(batch)) for batch in batches(made)]
    assert sum(counts) == 240
    assert 1 <= min(counts) <= max(counts) <= 11
    other = stream({"a": texts["a"], "c": texts["c"]}, steps, seed=1)
    assert counts != [sum(original(each) in of_a for each in samples(batch)) for batch in batches(other)]


def test_going_on_gives_what_was_left(texts):
    made = stream(texts, [2, 2, 2], accumulate=2)
    sampler = ResumeSampler(5, len(made))
    assert list(sampler) == [5, 6, 7, 8, 9, 10, 11]
    assert len(sampler) == 12
    again = stream(texts, [2, 2, 2], accumulate=2)
    for number in sampler:
        assert all(torch.equal(made[number][name], each) for name, each in again[number].items())
    assert list(ResumeSampler(12, 12)) == []


@pytest.mark.parametrize("accumulate, world", [(5, 1), (1, 5), (4, 2), (0, 1)])
def test_a_batch_that_cannot_be_shared_out(texts, accumulate, world):
    with pytest.raises(ValueError) as error:
        stream(texts, [1, 1, 1], accumulate=accumulate, world=world)
    assert f"trainer.batch_size=12 is not a multiple of trainer.accumulate_grad_batches={accumulate}" in str(
        error.value
    )
    assert f"times {world} processes" in str(error.value)


def subset(texts, rows, *, objective=OBJECTIVES["masked"], batch_size=4, purpose="score"):
    return EvalSubset(texts, rows, objective=objective, batch_size=batch_size, purpose=purpose)


ROWS = {"a": np.array([22, 3, 0, 8, 7, 11]), "c": np.array([5, 39, 1])}


def test_a_subset_is_its_rows_in_batches_of_one_text(texts):
    chosen = {name: texts[name] for name in "ac"}
    made = subset(chosen, ROWS)
    found = batches(made)
    assert [int(batch["column"]) for batch in found] == [0, 0, 1]
    assert [len(batch["input_ids"]) for batch in found] == [4, 2, 3]
    expected = [tuple(row) for name in "ac" for row in texts[name].ids(ROWS[name]).tolist()]
    assert [original(each) for each in all_samples(made)] == expected
    for batch in found:
        assert float(batch["weight"]) == pytest.approx(1 / len(batch["positions"]))


def test_evaluation_masks_are_the_texts_the_rows_and_the_purposes(texts):
    whole = all_samples(subset({"a": texts["a"], "c": texts["c"]}, ROWS))
    for batch_size in (1, 2, 9):
        assert all_samples(subset({"a": texts["a"], "c": texts["c"]}, ROWS, batch_size=batch_size)) == whole
    reordered = subset({"c": texts["c"], "a": texts["a"]}, {name: rows[::-1] for name, rows in ROWS.items()})
    assert Counter(all_samples(reordered)) == Counter(whole)
    assert len(set(all_samples(subset(texts, ROWS | {"b": np.arange(0)}, purpose="probe"))) & set(whole)) <= 2
    renamed = subset({"x": texts["a"], "c": texts["c"]}, {"x": ROWS["a"], "c": ROWS["c"]})
    assert len(set(all_samples(renamed)[:6]) & set(whole)) <= 1


def test_each_scored_token_has_its_document(texts, objective):
    made = subset({"a": texts["a"]}, {"a": np.arange(23)}, objective=objective, batch_size=6)
    ahead = int(isinstance(objective, Causal))
    for number, batch in enumerate(batches(made)):
        owners = []
        for place, labels in enumerate(labels_of(batch).tolist()):
            row = number * 6 + place
            predicted = (t + ahead for t, label in enumerate(labels) if label != UNSCORED)
            owners += [(row * 8 + t) // 5 for t in predicted]
        assert batch["documents"].tolist() == owners
        assert len(owners) == len(batch["positions"])


def test_shares_are_everything_once():
    for total, world in itertools.product((0, 1, 7, 8), (1, 2, 3, 9)):
        shares = [ShardSampler(total, rank=rank, world=world) for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(total))
        assert [len(share) for share in shares] == [len(list(share)) for share in shares]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_that_go_together_are_at_one_text_and_none_is_left_over(texts, objective):
    """Idle batches fill each text up; what is scored is what it was."""
    rows = {name: np.arange(len(text)) for name, text in texts.items()}
    how = {"objective": objective, "batch_size": 8, "purpose": "score"}
    alone, together = EvalSubset(texts, rows, **how), EvalSubset(texts, rows, **how, together=3)
    shares = [
        [together[number] for number in ShardSampler(len(together), rank=rank, world=3)] for rank in range(3)
    ]
    for pass_ in zip(*shares, strict=True):
        assert len({int(batch["column"]) for batch in pass_}) == 1
    every = [together[number] for number in range(len(together))]
    idle = [batch for batch in every if "idle" in batch]
    assert len(idle) == len(every) - len(alone) == 3 and all(len(batch["positions"]) == 0 for batch in idle)
    kept = [batch for batch in every if "idle" not in batch]
    for batch, expected in zip(kept, batches(alone), strict=True):
        assert samples(batch) == samples(expected)
