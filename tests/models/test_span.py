"""T5's denoising: counts, holes, sentinels, and that a text comes back whole."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.batch import Rows, Sizes, inputs_of, label_batch, labels_of, output_ids, single
from cpt.data.sampling import Stream, Subset
from cpt.models.objectives import Span, draw_composition
from tests.support.data_fixtures import rows_by_hand

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


def test_counts_and_lengths_are_known_before_anything_is_drawn():
    lengths = np.arange(2, 601)
    batch, _ = span().batch(rows(lengths))
    for (source, target), length in zip(sides(batch), lengths.tolist(), strict=True):
        hidden = min(max(int(np.rint(np.float32(length) * np.float32(0.15))), 1), length - 1)
        holes = max(1, int(np.rint(hidden / 3)))
        assert (len(source), len(target)) == (length - hidden + holes + 1, hidden + holes + 1)
    sizes = Sizes(lengths, lengths)
    assert span().scored(sizes).tolist() == [len(target) for _, target in sides(batch)]
    scored = span().scoring.batch(rows(lengths))[0]
    counts = torch.bincount(scored["rows"], minlength=len(lengths))
    assert span().scoring.scored(sizes).tolist() == counts.tolist()
    assert (span().scored(sizes) - counts.numpy() == span().holes(lengths)[1] + 1).all()
    assert span().scorable(sizes) is lengths


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


def test_holes_and_texts_are_drawn_apart():
    """Of 40 tokens 20 are hidden in 10 holes: as many parts of as many tokens on both sides."""
    same = 0
    for hidden in span(0.5, 2).hidden(rows([40] * 50)):
        ends = np.flatnonzero(np.diff(np.append(hidden, False)) != 0) + 1
        lengths = np.diff(np.concatenate([[0], ends])).reshape(10, 2)
        assert lengths.sum(0).tolist() == [20, 20]
        same += (lengths[:, 0] == lengths[:, 1]).all()
    assert same < 5


def test_the_first_token_is_never_hidden_and_the_last_always():
    given = rows([40] * 200 + [9] * 50)
    hidden = span().hidden(given)
    last = given.lengths - 1
    assert not hidden[:, 0].any() and hidden[np.arange(250), last].all()
    assert not (hidden & ~given.present).any()
    assert hidden[:200, 1:-1].any(0).all()


def test_a_sentinel_is_the_same_in_source_and_target_and_ids_descend():
    for source, target in sides(span().batch(rows([128] * 20))[0]):
        own = [[each for each in side if each in SENTINELS] for side in (source, target)]
        assert own[0] == own[1] == SENTINELS[: len(own[0])] and len(own[0]) == 6
        assert target[0] == SENTINELS[0]


def test_more_holes_than_sentinels_are_told():
    assert span().longest == 2009
    span().batch(rows([2009]))
    with pytest.raises(
        ValueError, match="2010 tokens has 101 holes; allowed: 2009 tokens, for 100 sentinels"
    ):
        span().batch(rows([2010]))
    assert span(sentinels=SENTINELS[:1]).longest == 30


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


def test_outputs_are_those_of_the_whole_model_and_text_is_encoded_alone():
    model = t5()
    batch, _ = span().batch(rows([40, 12, 1]))
    span().outputs(model, batch)
    assert not any(module._forward_hooks for module in model.modules())
    whole = model(**inputs_of(batch), output_hidden_states=True)
    logits, hidden = span().outputs(model, batch)
    torch.testing.assert_close(logits, whole.logits.flatten(0, 1)[batch["positions"]])
    torch.testing.assert_close(hidden, whole.decoder_hidden_states[-1])
    torch.testing.assert_close(span().encode(model, batch), whole.encoder_last_hidden_state)


def test_a_row_is_hidden_alike_in_any_batch():
    given = rows([60, 12, 60, 1, 45])
    alone = [sides(span().batch(cut(given, row))[0])[0] for row in range(5)]
    assert sides(span().batch(given)[0]) == alone
    assert sides(span().batch(cut(given, 4, 1, 1))[0]) == [alone[4], alone[1], alone[1]]
    other = sides(span().batch(Rows(given.ids, given.lengths, given.keys + np.uint64(1)))[0])
    assert other[0] != alone[0] and other[2] != alone[2]


def test_a_batch_is_the_same_on_any_number_of_processes():
    texts = {"a": rows_by_hand(20, length=24, last=5)}
    how = {"objective": span(), "seed": 0, "batch_size": 8, "steps": [3]}
    whole = [Stream(texts, **how, accumulate=1, rank=0, world=1)[number] for number in range(3)]
    parts = [Stream(texts, **how, accumulate=2, rank=rank, world=2) for rank in range(2)]
    for step, batch in enumerate(whole):
        found = [side for part in (0, 1) for rank in (0, 1) for side in sides(parts[rank][2 * step + part])]
        assert found == sides(batch)
        pieces = [parts[rank][2 * step + part] for part in (0, 1) for rank in (0, 1)]
        assert all(piece["weight"] == pytest.approx(4 * float(batch["weight"])) for piece in pieces)
        assert float(batch["weight"]) == pytest.approx(1 / len(batch["positions"]))


def test_what_documents_lose_sums_to_the_batchs_loss():
    text, model = rows_by_hand(12, length=24, last=7), t5()
    for objective in (span(), span().scoring):
        made = Subset({"a": text}, {"a": np.arange(12)}, objective=objective, batch_size=5, purpose="score")
        for number in range(len(made)):
            batch, chosen = made[number], made.blocks[number][1]
            nll, owners = objective.nll(model, batch), text.document_of(chosen)
            assert len(batch["documents"]) == len(nll) and (batch["documents"] >= 0).all()
            sums = torch.zeros(text.documents).index_add(0, batch["documents"], nll)
            torch.testing.assert_close(sums.sum(), nll.sum())
            for row in range(len(chosen)):
                mine = batch["documents"][batch["rows"] == row]
                assert set(mine.tolist()) <= set(owners[row].tolist())
                assert mine.tolist() == sorted(mine.tolist())


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


def test_a_row_of_one_token_has_nothing_to_hide():
    batch, _ = span().batch(rows([1]))
    ((source, target),) = sides(batch)
    assert len(source) == 2 and target == [SENTINELS[0], END]
    one = Sizes(np.array([1]), np.array([1]))
    assert span().scored(one).tolist() == [2] and span().scoring.scored(one).tolist() == [0]
    assert span().scoring.batch(rows([1, 30]))[0]["rows"].min() == 1


def test_a_row_of_a_batch_is_the_batch_of_the_row():
    model = t5()
    batch, _ = span().batch(rows([40, 12, 1]))
    whole = span().nll(model, batch)
    for row in range(3):
        one = single(batch, row)
        assert torch.equal(labels_of(one), labels_of(batch)[row : row + 1])
        assert torch.equal(output_ids(one), batch["decoder_input_ids"][row : row + 1])
        torch.testing.assert_close(span().nll(model, one), whole[batch["rows"] == row])


def test_the_decoder_takes_the_target_moved_by_one():
    model = t5()
    batch, _ = span().batch(rows([40, 12]))
    shifted = model._shift_right(labels_of(batch))
    present = labels_of(batch) != -100
    assert torch.equal(batch["decoder_input_ids"][present], shifted[present])
    assert (batch["decoder_input_ids"][~present] == PAD).all()
    again = label_batch(
        batch["input_ids"],
        labels_of(batch),
        batch["attention_mask"].bool(),
        decoder_input_ids=batch["decoder_input_ids"],
    )
    assert all(torch.equal(again[name], value) for name, value in batch.items())


def test_two_passes_run_on_the_text_as_it_is():
    from cpt.gradient_masks.importance import double_batch, general_losses

    model = t5()
    batch, _ = span().batch(rows([40, 12, 6]))
    twice = double_batch(span().restored(batch))
    logits, _ = span().outputs(model, twice)
    one, other = logits.chunk(2)
    torch.testing.assert_close(one, other)
    alone = span().outputs(model, span().restored(batch))[0]
    torch.testing.assert_close(one, alone)
    assert (alone - span().outputs(model, batch)[0]).abs().max() > 1e-3
    for compared in ("logits", "hidden"):
        assert general_losses(model, batch, objective=span(), compared=compared).abs().max() < 1e-6
        found = general_losses(model.train(), batch, objective=span(), compared=compared)
        assert found.shape == (3,) and (found > 1e-5).all()
        model.eval()


@pytest.mark.parametrize("rate", [None, 0, 1])
def test_what_is_no_rate(rate):
    with pytest.raises(ValueError, match=f"model.mask_rate={rate}; allowed: above 0 and below 1"):
        span(rate)


@pytest.mark.parametrize("mean", [None, 0.5])
def test_what_is_no_mean_length(mean):
    with pytest.raises(ValueError, match=f"model.mean_span={mean}; allowed: 1 or more"):
        span(mean=mean)


def test_logits_do_not_depend_on_what_pads_a_target():
    model = t5()
    batch, _ = span().batch(rows([40, 12]))
    found = functional.log_softmax(span().outputs(model, batch)[0], -1)
    other = {**batch, "decoder_input_ids": batch["decoder_input_ids"].clone()}
    other["decoder_input_ids"][1, 4:] = 7
    torch.testing.assert_close(functional.log_softmax(span().outputs(model, other)[0], -1), found)
