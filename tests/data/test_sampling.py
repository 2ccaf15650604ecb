"""Batches by their number: any number of processes, parts and restarts gives the same samples."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.data.collate import UNSCORED, label_batch, labels_of, single
from cpt.data.sampler import EvalSubset, ResumeSampler, ShardSampler, TrainStream
from cpt.models.objectives import Causal, Masked
from tests.support.data_fixtures import rows_by_hand


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 50


MASKED = Masked(Vocabulary(mask_token_id=1, all_special_ids=[0, 1], name_or_path="tiny"), rate=0.3)
OBJECTIVES = {"masked": MASKED, "causal": Causal()}
SIZES = {"a": (23, 3), "b": (7, 8), "c": (40, 8)}  # rows, tokens of the last
TEXTS = {name: rows_by_hand(count, last=last, seed=count) for name, (count, last) in SIZES.items()}
WHOSE = {
    tuple(ids): (name, row)
    for name, text in TEXTS.items()
    for row, ids in enumerate(text.ids(np.arange(len(text))).tolist())
}


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


def stream(names, steps, *, objective=MASKED, seed=0, batch_size=12, **options):
    texts = names if isinstance(names, dict) else {name: TEXTS[name] for name in names}
    options = {"accumulate": 1, "rank": 0, "world": 1, **options}
    return TrainStream(texts, objective=objective, seed=seed, batch_size=batch_size, steps=steps, **options)


def samples(batch):
    """The rows of a batch as the model sees them: inputs and labels."""
    pairs = zip(batch["input_ids"].tolist(), labels_of(batch).tolist(), strict=True)
    return [(tuple(inputs), tuple(labels)) for inputs, labels in pairs]


def all_samples(made):
    return [sample for number in range(len(made)) for sample in samples(made[number])]


def numbers(made):
    """Text and row of each sample, before it was masked."""
    whole = ([b if b != UNSCORED else a for a, b in zip(*each, strict=True)] for each in all_samples(made))
    return [WHOSE[tuple(each)] for each in whole]


def test_an_epoch_is_every_row_once_each_in_another_order_and_with_other_masks():
    made = stream("a", [10])
    rows = [row for _, row in numbers(made)]
    epochs = [rows[start : start + 23] for start in range(0, 115, 23)]
    assert len(made) == 10 and len(rows) == 120
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5 and list(range(23)) not in epochs
    assert len(set(all_samples(made))) > 100


def test_the_order_and_the_masks_are_the_domains_and_the_seeds():
    runs = [stream({name: TEXTS["a"]}, [2], seed=seed) for name, seed in (("a", 0), ("a", 1), ("b", 0))]
    assert numbers(runs[0]) == numbers(stream("a", [2]))
    for one, other in itertools.combinations(runs, 2):
        assert numbers(one) != numbers(other)
        assert len({*all_samples(one)} & {*all_samples(other)}) < 4


def test_the_samples_depend_neither_on_the_batch_size_nor_on_the_number_of_steps():
    whole = all_samples(stream("a", [12], batch_size=4))
    for batch_size, steps in ((1, 48), (3, 16), (16, 3), (48, 1)):
        assert all_samples(stream("a", [steps], batch_size=batch_size)) == whole
    assert all_samples(stream("a", [6], batch_size=4)) == whole[:24]


GRID = [(1, 2), (1, 4), (2, 1), (2, 2), (3, 4)]  # parts, processes


@pytest.mark.parametrize("names", ["a", "abc"])
@pytest.mark.parametrize("accumulate, world", GRID)
def test_processes_and_parts_share_out_the_same_batch(objective, accumulate, world, names):
    """The weights make the mean over all scored tokens: Lightning takes that over processes and parts."""
    how, pieces = {"steps": [3, 2, 4][: len(names)], "objective": objective}, accumulate * world
    whole = stream(names, **how)
    ranks = [stream(names, **how, accumulate=accumulate, world=world, rank=rank) for rank in range(world)]
    assert {len(rank) for rank in ranks} == {len(whole) * accumulate}
    for step in range(len(whole)):
        shared = [rank[step * accumulate + part] for part in range(accumulate) for rank in ranks]
        assert {len(batch["input_ids"]) for batch in shared} == {12 // pieces}
        assert [each for batch in shared for each in samples(batch)] == samples(whole[step])
        counts = [int((labels_of(batch) != UNSCORED).sum()) for batch in shared]
        assert counts == [len(batch["positions"]) for batch in shared]
        assert [float(batch["weight"]) for batch in shared] == pytest.approx([pieces / sum(counts)] * pieces)


def test_a_batch_with_nothing_to_score_has_weight_1():
    text = {"a": rows_by_hand(4, length=1)}
    rows = EvalSubset(text, {"a": np.arange(4)}, objective=Causal(), batch_size=4, purpose="x")
    for batch in (stream(text, [1], objective=Causal(), batch_size=4)[0], rows[0]):
        assert batch["positions"].tolist() == [] and float(batch["weight"]) == 1


@pytest.mark.parametrize("steps", [[3, 5, 2], [1, 0, 4]])
def test_the_mixture_is_exactly_the_samples_of_its_parts(objective, steps):
    mixture = all_samples(stream("abc", steps, objective=objective))
    parts = [all_samples(stream(n, [s], objective=objective)) for n, s in zip("abc", steps, strict=True)]
    assert Counter(mixture) == Counter(itertools.chain(*parts)) and mixture != list(itertools.chain(*parts))


def test_going_on_gives_what_was_left():
    made, again = (stream("abc", [2, 2, 2], accumulate=2) for _ in range(2))
    sampler = ResumeSampler(5, len(made))
    assert list(sampler) == [5, 6, 7, 8, 9, 10, 11] and len(sampler) == 12
    for number in sampler:
        assert all(torch.equal(made[number][name], each) for name, each in again[number].items())
    assert list(ResumeSampler(12, 12)) == []


@pytest.mark.parametrize("accumulate, world", [(5, 1), (1, 5), (4, 2), (0, 1)])
def test_a_batch_that_cannot_be_shared_out_is_refused(accumulate, world):
    with pytest.raises(ValueError, match=f"trainer.batch_size=12 .*_batches={accumulate}"):
        stream("abc", [1, 1, 1], accumulate=accumulate, world=world)


ROWS = {"a": np.array([22, 3, 0, 8, 7, 11]), "c": np.array([5, 39, 1])}


def subset(texts, rows, *, objective=MASKED, batch_size=4, purpose="score", **how):
    return EvalSubset(texts, rows, objective=objective, batch_size=batch_size, purpose=purpose, **how)


def test_a_subset_is_its_rows_in_batches_of_one_text():
    made = subset(TEXTS, ROWS)
    found = [made[number] for number in range(len(made))]
    assert [int(batch["column"]) for batch in found] == [0, 0, 2]
    assert [len(batch["input_ids"]) for batch in found] == [4, 2, 3]
    assert numbers(made) == [(name, row) for name, rows in ROWS.items() for row in rows]
    for batch in found:
        assert float(batch["weight"]) == pytest.approx(1 / len(batch["positions"]))


def test_evaluation_masks_are_the_texts_the_rows_and_the_purposes():
    whole = all_samples(subset(TEXTS, ROWS))
    assert all_samples(subset(TEXTS, ROWS, batch_size=9)) == whole
    reordered = subset(dict(reversed(TEXTS.items())), {name: rows[::-1] for name, rows in ROWS.items()})
    assert Counter(all_samples(reordered)) == Counter(whole)
    assert len({*all_samples(subset(TEXTS, ROWS, purpose="probe"))} & {*whole}) <= 2
    renamed = subset({"x": TEXTS["a"]}, {"x": ROWS["a"]})
    assert len({*all_samples(renamed)} & {*whole}) <= 1


def test_each_scored_token_has_its_document(objective):
    made = subset(TEXTS, {"a": np.arange(23)}, objective=objective, batch_size=6)
    ahead = int(isinstance(objective, Causal))
    for number in range(len(made)):
        owners = []
        for place, labels in enumerate(labels_of(made[number]).tolist()):
            predicted = (t + ahead for t, label in enumerate(labels) if label != UNSCORED)
            owners += [((number * 6 + place) * 8 + t) // 5 for t in predicted]
        assert made[number]["documents"].tolist() == owners


def test_shares_are_everything_once():
    for total, world in itertools.product((0, 1, 7, 8), (1, 2, 3, 9)):
        shares = [ShardSampler(total, rank=rank, world=world) for rank in range(world)]
        assert sorted(itertools.chain(*shares)) == list(range(total))
        assert [len(share) for share in shares] == [len(list(share)) for share in shares]
        assert {share.common for share in shares} == {min(map(len, shares))}


def test_processes_that_go_together_are_at_one_text_and_none_is_left_over(objective):
    """Idle batches fill each text up; what is scored is what it was."""
    rows = {name: np.arange(len(text)) for name, text in TEXTS.items()}
    how = {"objective": objective, "batch_size": 8}
    alone, together = subset(TEXTS, rows, **how), subset(TEXTS, rows, **how, together=3)
    every = [together[number] for number in range(len(together))]
    for pass_ in zip(*(every[rank::3] for rank in range(3)), strict=True):
        assert len({int(batch["column"]) for batch in pass_}) == 1
    idle = [batch for batch in every if "idle" in batch]
    assert len(idle) == len(every) - len(alone) == 3 and all(len(batch["positions"]) == 0 for batch in idle)
    kept = [samples(batch) for batch in every if "idle" not in batch]
    assert kept == [samples(alone[number]) for number in range(len(alone))]


def test_places_targets_and_rows_are_those_of_the_labels_and_a_row_is_a_batch():
    labels = torch.tensor([[-100, 7, -100, 8], [-100] * 4, [9, -100, -100, -100]])
    ids, present = torch.arange(12).view(3, 4), torch.ones(3, 4, dtype=torch.bool)
    batch = label_batch(ids, labels, present)
    assert "attention_mask" not in batch and "labels" not in batch
    assert batch["positions"].tolist() == [1, 3, 8] and batch["targets"].tolist() == [7, 8, 9]
    assert batch["rows"].tolist() == [0, 0, 2] and torch.equal(labels_of(batch), labels)
    present[1, 2:] = False
    batch = label_batch(ids, labels, present)
    for row in range(3):
        one, own = single(batch, row), slice(row, row + 1)
        alone = label_batch(ids[own], labels[own], present[own])
        alone.setdefault("attention_mask", torch.ones(1, 4, dtype=torch.long))
        assert one.keys() == alone.keys() and all(torch.equal(one[name], alone[name]) for name in alone)
