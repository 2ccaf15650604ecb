"""What has to be predicted: against loops over rows and places."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, Sizes, labels_of
from cpt.models.objectives import Causal, Masked

SPECIAL = [0, 1, 2, 98]
MASK = 2


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return self.size


def vocabulary(**changes):
    fields = {"mask_token_id": MASK, "all_special_ids": SPECIAL, "size": 100, "name_or_path": "tiny"}
    return Vocabulary(**fields | changes)


def masked(rate=0.15):
    return Masked(vocabulary(), rate=rate)


def random_rows(count, length, *, seed=0, short=True):
    """Ids with special tokens among them, the lengths of the rows, and a key for each."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 100, (count, length))
    lengths = draw.integers(1, length + 1, count) if short else np.full(count, length)
    return ids, lengths, sample_keys(5, np.arange(count))


def text_places(ids, lengths):
    """Per row, the places of what is neither special nor padding."""
    return [
        [place for place in range(size) if row[place] not in SPECIAL]
        for row, size in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]


def batch_of(objective, ids, lengths, keys):
    return objective.batch(Rows(ids, lengths, keys))[0]


def scored_places(batch):
    return [
        [place for place, label in enumerate(row) if label != UNSCORED] for row in labels_of(batch).tolist()
    ]


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.3, 0.99])
def test_masks_are_of_text_alone_and_counted_ahead(rate):
    objective = masked(rate)
    ids, lengths, keys = random_rows(300, 21)
    text = text_places(ids, lengths)
    batch = batch_of(objective, ids, lengths, keys)
    counts = objective.scored(Sizes(np.array([len(places) for places in text]), lengths))
    for places, chosen, count in zip(text, scored_places(batch), counts, strict=True):
        assert set(chosen) <= set(places)
        assert len(chosen) == count
        assert abs(count - rate * len(places)) <= max(0.5, 1 - rate * len(places))
        assert count >= min(1, len(places))
    assert {0, 1} <= set(counts.tolist())
    assert objective.scorable(Sizes(counts, lengths)) is counts


def test_labels_are_the_ids_and_all_else_is_untouched():
    ids, lengths, keys = random_rows(200, 30)
    batch = batch_of(masked(), ids, lengths, keys)
    labels, inputs = labels_of(batch).numpy(), batch["input_ids"].numpy()
    scored = labels != UNSCORED
    assert (labels[scored] == ids[scored]).all()
    assert (inputs[~scored] == ids[~scored]).all()
    assert (inputs != ids).any()
    flat = [number for number, label in enumerate(labels.ravel().tolist()) if label != UNSCORED]
    assert batch["positions"].tolist() == flat
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())
    assert torch.nn.CrossEntropyLoss().ignore_index == UNSCORED


def test_of_the_masked_80_percent_are_masks_10_random_10_themselves():
    ids, lengths, keys = random_rows(3000, 64, short=False)
    ids[np.isin(ids, SPECIAL)] = 50
    batch = batch_of(masked(), ids, lengths, keys)
    inputs, labels = batch["input_ids"].numpy(), labels_of(batch).numpy()
    scored = labels != UNSCORED
    assert scored.mean() == pytest.approx(10 / 64)
    before, after = ids[scored], inputs[scored]
    count = len(before)
    assert (after == MASK).mean() == pytest.approx(0.8, abs=0.01)
    replaced = after[(after != MASK) & (after != before)]
    assert len(replaced) / count == pytest.approx(0.1 * 95 / 96, abs=0.006)
    assert (after == before).mean() == pytest.approx(0.1 * 97 / 96, abs=0.006)
    seen = np.bincount(replaced, minlength=100)
    assert seen[SPECIAL].tolist() == [0, 0, 0, 0]
    usual = np.delete(seen, [*SPECIAL, 50])
    assert usual.min() > 0
    assert ((usual - usual.mean()) ** 2 / usual.mean()).sum() < 95 + 4 * np.sqrt(2 * 95)


def test_a_row_is_the_same_in_any_batch():
    objective = masked()
    ids, lengths, keys = random_rows(40, 25)
    whole = batch_of(objective, ids, lengths, keys)
    for picked in ([7], [39, 0, 7, 7], list(range(10, 30))):
        part = batch_of(objective, ids[picked], lengths[picked], keys[picked])
        assert torch.equal(part["input_ids"], whole["input_ids"][picked])
        assert torch.equal(labels_of(part), labels_of(whole)[picked])


def test_causal_labels_are_the_tokens_that_follow():
    objective = Causal()
    ids, lengths, keys = random_rows(60, 9)
    batch = batch_of(objective, ids, lengths, keys)
    for row, size, labels in zip(ids.tolist(), lengths.tolist(), labels_of(batch).tolist(), strict=True):
        assert labels == [row[t + 1] if t + 1 < size else UNSCORED for t in range(9)]
    assert torch.equal(batch["input_ids"], torch.from_numpy(ids))
    sizes = Sizes(np.zeros(60), lengths)
    assert objective.scored(sizes).tolist() == [len(each) for each in scored_places(batch)]
    assert objective.scorable(sizes) is lengths
