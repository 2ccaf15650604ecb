"""T5's denoising: counts, holes, sentinels, and that a text comes back whole."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, labels_of
from cpt.models.objectives import Span, draw_composition

V, END, PAD = 200, 1, 0
SENTINELS = list(range(V - 1, V - 101, -1))
TABLE = {  # row: source, target, hidden tokens, holes
    34: (32, 8, 5, 2),
    70: (64, 14, 10, 3),
    141: (128, 29, 21, 7),
    190: (172, 40, 29, 10),  # 28.5 hidden tokens, which are 28.500002 in 32 bits
    284: (256, 58, 43, 14),
    568: (512, 114, 85, 28),
    1137: (1024, 229, 171, 57),
}


def span(rate=0.15, mean=3, sentinels=SENTINELS):
    return Span(rate=rate, mean=mean, sentinels=sentinels, end=END, pad=PAD, start=PAD)


def rows(lengths, *, seed=0, key=5):
    """Rows of random ordinary tokens and ends of documents."""
    lengths = np.asarray(lengths)
    ids = np.random.default_rng(seed).integers(1, 90, (len(lengths), lengths.max()))
    ids[np.arange(ids.shape[1]) >= lengths[:, None]] = PAD
    return Rows(ids, lengths, sample_keys(key, np.arange(len(lengths))))


def cut(given, *chosen):
    """Some of the rows."""
    chosen = list(chosen)
    return Rows(given.ids[chosen], given.lengths[chosen], given.keys[chosen])


def sides(batch):
    """The source and the target of each row, without padding."""
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    source = [ids[here.bool()].tolist() for ids, here in zip(batch["input_ids"], mask, strict=True)]
    target = [[each for each in row if each != -100] for row in labels_of(batch).tolist()]
    return list(zip(source, target, strict=True))


def joined(source, target):
    """A text from the definition: each sentinel of the source replaced by what follows it in the target."""
    assert source[-1] == END and target[-1] == END
    holes, name = {}, None
    for token in target[:-1]:
        if token in SENTINELS:
            name, holes[token] = token, []
        else:
            holes[name].append(token)
    return [each for token in source[:-1] for each in holes.get(token, [token])]


@pytest.mark.parametrize("length", TABLE)
def test_counts_are_those_of_the_table(length):
    source, target, tokens, holes = TABLE[length]
    assert [int(each[0]) for each in span().holes(np.array([length]))] == [tokens, holes]
    assert span().sides(length) == (source, target)


@pytest.mark.parametrize(("rate", "mean"), [(0.15, 3), (0.5, 1), (0.5, 8), (0.9, 3)])
def test_source_and_target_joined_at_the_sentinels_are_the_row(rate, mean):
    given = rows([64, 33, 2, 64, 1, 7, 50])
    objective = span(rate, mean)
    batch, _ = objective.batch(given)
    for (source, target), ids, length in zip(sides(batch), given.ids, given.lengths, strict=True):
        assert joined(source, target) == ids[:length].tolist()
    restored = objective.restored(batch)
    assert torch.equal(restored["input_ids"], torch.from_numpy(given.ids))
    assert torch.equal(restored["attention_mask"], torch.from_numpy(given.present).long())
    assert torch.equal(objective.restored(batch)["input_ids"], torch.from_numpy(given.ids))
    full = objective.restored(objective.batch(cut(given, 0, 3))[0])
    assert "attention_mask" not in full and torch.equal(
        full["input_ids"], torch.from_numpy(given.ids[[0, 3]])
    )


@pytest.mark.parametrize(("total", "parts"), [(12, 1), (12, 3), (12, 6), (12, 12)])
def test_every_composition_is_equally_likely(total, parts):
    draws = 200 * math.comb(total - 1, parts - 1)
    keys = sample_keys(3, np.arange(draws))
    found = draw_composition(keys, np.full(draws, total), np.full(draws, parts), stream=0)
    assert (found.sum(1) == total).all() and (found > 0).all() and found.shape == (draws, parts)
    counts = Counter(map(tuple, found.tolist()))
    expected = math.comb(total - 1, parts - 1)
    assert len(counts) == expected == len(list(combinations(range(total - 1), parts - 1)))
    chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi2 <= expected - 1 + 4 * math.sqrt(2 * expected)


def t5():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": V}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=PAD)).eval()


@pytest.mark.parametrize("lengths", [[40] * 3, [40, 12, 1]])
def test_the_loss_is_the_models_own(lengths):
    model = t5()
    batch, _ = span().batch(rows(lengths))
    own = model(
        input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), labels=labels_of(batch)
    )
    found = span().nll(model, batch)
    torch.testing.assert_close(found.mean(), own.loss)
    scored, _ = span().scoring.batch(rows(lengths))
    places = torch.isin(batch["positions"], scored["positions"])
    torch.testing.assert_close(span().nll(model, scored), found[places])
    assert not set(scored["targets"].tolist()) & set(SENTINELS)


def test_a_place_is_that_of_the_hidden_token_or_of_the_hole_that_follows():
    given = rows([40, 12, 1])
    batch, places = span().batch(given)
    scored, of_text = span().scoring.batch(given)
    assert (scored["targets"].numpy() == given.ids.ravel()[of_text.numpy()]).all()
    assert (places.numpy() // 40 == batch["rows"].numpy()).all()
    hidden = span().hidden(given)
    for row in range(2):
        own = batch["rows"] == row
        inner, targets = (places[own] - 40 * row).tolist(), batch["targets"][own].tolist()
        firsts = [at for at in range(40) if hidden[row, at] and not hidden[row, at - 1]]
        names = [place for place, target in zip(inner, targets, strict=True) if target in SENTINELS]
        assert names == firsts
        assert inner[-1] == given.lengths[row] - 1 and targets[-1] == END
    assert places[batch["rows"] == 2].tolist() == [80, 80]


def test_a_row_is_hidden_alike_in_any_batch():
    given = rows([60, 12, 60, 1, 45])
    alone = [sides(span().batch(cut(given, row))[0])[0] for row in range(5)]
    assert sides(span().batch(given)[0]) == alone
    assert sides(span().batch(cut(given, 4, 1, 1))[0]) == [alone[4], alone[1], alone[1]]
    other = sides(span().batch(Rows(given.ids, given.lengths, given.keys + np.uint64(1)))[0])
    assert other[0] != alone[0] and other[2] != alone[2]
