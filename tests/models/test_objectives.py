"""What has to be predicted: against loops over rows and places; of examples the answers alone; spans."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, Sizes, labels_of
from cpt.data.corpus import make_corpus
from cpt.data.replay import Samples
from cpt.data.sampler import stack_rows
from cpt.data.sources.base import CONCAT, EXAMPLES, write_example
from cpt.data.tokenized_tasks import encode_corpus
from cpt.models.objectives import Causal, CausalAnswers, Masked, Seq2SeqAnswers, Span, draw_composition
from tests.support.data_fixtures import HELD_OUT, bos_tokenizer, make_rows
from tests.support.task_fixtures import encoder, some_examples

SPECIAL, MASK = [0, 1, 2, 98], 2


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 100


def masked(rate=0.15):
    return Masked(Vocabulary(mask_token_id=MASK, all_special_ids=SPECIAL, name_or_path="tiny"), rate=rate)


def random_rows(count, length):
    """Ids with special tokens among them, the lengths of the rows, and a key for each."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, 100, (count, length))
    return Rows(ids, draw.integers(1, length + 1, count), sample_keys(5, np.arange(count)))


def scored_places(batch):
    rows = labels_of(batch).tolist()
    return [[place for place, label in enumerate(row) if label != UNSCORED] for row in rows]


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.99])
def test_masks_are_of_text_alone_counted_ahead_and_the_same_in_any_batch(rate):
    objective, rows = masked(rate), random_rows(300, 21)
    text = [
        [place for place in range(size) if row[place] not in SPECIAL]
        for row, size in zip(rows.ids.tolist(), rows.lengths.tolist(), strict=True)
    ]
    sizes = Sizes(np.array([len(places) for places in text]), rows.lengths)
    batch, counts = objective.batch(rows)[0], objective.scored(sizes)
    for places, chosen, count in zip(text, scored_places(batch), counts, strict=True):
        assert set(chosen) <= set(places) and len(chosen) == count >= min(1, len(places))
        assert abs(count - rate * len(places)) <= max(0.5, 1 - rate * len(places))
    assert {0, 1} <= set(counts.tolist()) and objective.scorable(sizes) is sizes.text
    labels, inputs = labels_of(batch).numpy(), batch["input_ids"].numpy()
    scored = labels != UNSCORED  # labels are the ids, and all else is untouched
    assert (labels[scored] == rows.ids[scored]).all() and (inputs[~scored] == rows.ids[~scored]).all()
    assert (inputs != rows.ids).any() and batch["positions"].tolist() == np.flatnonzero(scored).tolist()
    for picked in ([7], [39, 0, 7, 7], list(range(10, 30))):
        part = objective.batch(rows.some(np.array(picked)))[0]
        assert torch.equal(part["input_ids"], batch["input_ids"][picked])
        assert torch.equal(labels_of(part), labels_of(batch)[picked])
        present = torch.from_numpy(rows.present[picked]).long()
        assert torch.equal(part.get("attention_mask", torch.ones_like(present)), present)


def is_even(counts):
    """Whether the chi-square statistic of equal probabilities is within four standard deviations."""
    freedom = len(counts) - 1
    spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return counts.min() > 0 and spread < freedom + 4 * math.sqrt(2 * freedom)


def test_of_the_masked_80_percent_are_masks_10_random_10_themselves():
    ids = np.random.default_rng(0).integers(0, 100, (3000, 64))
    ids[np.isin(ids, SPECIAL)] = 50
    batch = masked().batch(Rows(ids, np.full(3000, 64), sample_keys(5, np.arange(3000))))[0]
    scored = labels_of(batch).numpy() != UNSCORED
    assert scored.mean() == pytest.approx(10 / 64)
    before, after = ids[scored], batch["input_ids"].numpy()[scored]
    assert (after == MASK).mean() == pytest.approx(0.8, abs=0.01)
    replaced = after[(after != MASK) & (after != before)]
    assert len(replaced) / len(before) == pytest.approx(0.1 * 95 / 96, abs=0.006)
    assert (after == before).mean() == pytest.approx(0.1 * 97 / 96, abs=0.006)
    seen = np.bincount(replaced, minlength=100)
    assert not seen[SPECIAL].any() and is_even(np.delete(seen, [*SPECIAL, 50]))


ANSWERS = CausalAnswers(Causal(), pad=1)
TWO_STACKS = Seq2SeqAnswers(Causal(), pad=1, start=1)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    source = SimpleNamespace(held_out=HELD_OUT, class_limit=None, form=lambda name: EXAMPLES, skipped={})
    source.fingerprint, source.members = lambda name: 0, lambda name: [name]
    source.read = lambda name: (("train", write_example(each)) for each in some_examples(60))
    corpus, tokenizer = make_corpus(source, "a", cache=tmp_path_factory.mktemp("corpus")), bos_tokenizer()

    def made(**how):
        where = {"name": "a", "cache": tmp_path_factory.mktemp("rows"), "rows_digest": "0"}
        return encode_corpus(corpus, "train", encoder=encoder(tokenizer, **how), **where)

    return made


@pytest.fixture(scope="module")
def model():
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=330, **sizes)).eval()


@pytest.fixture(scope="module")
def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    ids = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=330, **ids, **sizes)).eval()


def rows_of(*texts, count):
    parts, rows = np.tile(np.arange(len(texts)), count), np.repeat(np.arange(count), len(texts))
    return stack_rows(texts, Samples(parts, rows, np.zeros(len(rows), np.uint64)))


def test_the_loss_is_that_of_a_loop_over_answer_tokens_and_what_is_scored_is_known_ahead(model, answered):
    rows, wanted = rows_of(answered(), count=5), []
    batch, places = ANSWERS.batch(rows)
    for row in range(5):
        ids = torch.from_numpy(rows.ids[row, : rows.lengths[row]])
        logits = model(ids[None]).logits[0].log_softmax(-1)
        wanted += [-logits[at - 1, ids[at]] for at in np.flatnonzero(rows.answers[row])]
    torch.testing.assert_close(ANSWERS.nll(model, batch), torch.stack(wanted))
    assert (rows.ids.ravel()[places] == batch["targets"].numpy()).all() and rows.answers.ravel()[places].all()
    for made in (answered(), make_rows(6, length=30, seed=1)):
        counts = torch.bincount(ANSWERS.batch(rows_of(made, count=6))[0]["rows"], minlength=6)
        assert ANSWERS.scored(made.sizes(np.arange(6))).tolist() == counts.tolist()
    assert (ANSWERS.scorable(answered().sizes()) == answered().answer_tokens).all()


def test_raw_text_beside_examples_keeps_its_own_objective(model, answered):
    text = make_rows(4, length=30, last=7, seed=1)
    mixed = rows_of(text, answered(), count=4)
    batch, places = ANSWERS.batch(mixed)
    assert mixed.ids.shape[1] > 30 and (mixed.ids[::2, 30:] == text.pad).all()
    own = batch["rows"] % 2 == 0
    raw, raw_places = Causal().batch(rows_of(text, count=4))
    torch.testing.assert_close(ANSWERS.nll(model, batch)[own], Causal().nll(model, raw))
    assert mixed.ids.ravel()[places[own]].tolist() == rows_of(text, count=4).ids.ravel()[raw_places].tolist()
    examples, _ = ANSWERS.batch(rows_of(answered(), count=4))
    torch.testing.assert_close(ANSWERS.nll(model, batch)[~own], ANSWERS.nll(model, examples))
    alone, _ = ANSWERS.batch(rows_of(text, count=4))  # to the bit
    assert alone.keys() == raw.keys() and all(torch.equal(alone[name], raw[name]) for name in raw)


def test_two_stacks_read_the_question_and_write_the_answer(t5, answered):
    rows = rows_of(answered(seq2seq=True), count=5)
    batch, places = TWO_STACKS.batch(rows)
    labels = torch.full(batch["decoder_input_ids"].shape, -100)
    for row in range(5):
        answer = torch.from_numpy(rows.ids[row][rows.answers[row]])
        labels[row, : len(answer)] = answer
        assert (batch["decoder_input_ids"][row, len(answer) :] == 1).all()
        source = rows.ids[row][rows.present[row] & ~rows.answers[row]]
        assert batch["input_ids"][row, : len(source)].tolist() == source.tolist()
        assert int(batch["attention_mask"][row].sum()) == len(source)
    theirs = t5(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    torch.testing.assert_close(TWO_STACKS.nll(t5, batch).mean(), theirs)
    assert (rows.ids.ravel()[places] == batch["targets"].numpy()).all()


END, PAD, SENTINELS = 2, 1, list(range(329, 229, -1))
# Row: source, target, hidden tokens, holes; of 190, 28.5 hidden tokens, which are 28.500002 in 32 bits.
TABLE = {34: (32, 8, 5, 2), 70: (64, 14, 10, 3), 190: (172, 40, 29, 10)}
TABLE |= {568: (512, 114, 85, 28), 1137: (1024, 229, 171, 57)}


def span(rate=0.15, mean=3):
    return Span(rate=rate, mean=mean, sentinels=SENTINELS, end=END, pad=PAD, start=PAD)


def texts(lengths, *, key=5):
    lengths = np.asarray(lengths)
    ids = np.random.default_rng(0).integers(2, 90, (len(lengths), lengths.max()))
    ids[np.arange(ids.shape[1]) >= lengths[:, None]] = PAD
    return Rows(ids, lengths, sample_keys(key, np.arange(len(lengths))))


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


def test_counts_are_those_of_the_table_and_both_sides_joined_at_the_sentinels_are_the_row():
    for length, (source, target, *counts) in TABLE.items():
        assert [int(each[0]) for each in span().count_holes(np.array([length]))] == counts
        assert span().side_lengths(length) == (source, target)
    for rate, mean in ((0.15, 3), (0.5, 1), (0.5, 8), (0.9, 3)):
        given, objective = texts([64, 33, 2, 64, 1, 7, 50]), span(rate, mean)
        batch, _ = objective.batch(given)
        for (source, target), ids, length in zip(sides(batch), given.ids, given.lengths, strict=True):
            assert joined(source, target) == ids[:length].tolist()
        restored = objective.restore(batch)
        assert torch.equal(restored["input_ids"], torch.from_numpy(given.ids))
        assert torch.equal(restored["attention_mask"], torch.from_numpy(given.present).long())


def test_raw_text_between_answers_has_its_places_and_its_width(answered):
    raw = span(0.5, 1)
    source, target = raw.side_lengths(64)
    assert Seq2SeqAnswers(raw, pad=PAD, start=PAD).side_lengths(64) == (max(64, source), max(64, target))
    tasks, ids = answered(), np.arange(3 * 200).reshape(3, 200) % 90
    general = SimpleNamespace(length=200, pad=1, packing=CONCAT, row_lengths=np.full(3, 200))
    general.ids, general.answers = lambda rows: ids[rows], lambda rows: None
    assert tasks.length < 200
    stacked = stack_rows(
        [tasks, general], Samples(np.array([1, 1]), np.array([0, 2]), np.zeros(2, np.uint64))
    )
    assert stacked.ids.tolist() == ids[[0, 2]].tolist() and stacked.lengths.tolist() == [200, 200]


def test_every_composition_is_equally_likely():
    for parts in (1, 3, 12):
        draws = 200 * math.comb(11, parts - 1)
        keys = sample_keys(3, np.arange(draws))
        found = draw_composition(keys, np.full(draws, 12), np.full(draws, parts), stream=0)
        assert (found.sum(1) == 12).all() and (found > 0).all() and found.shape == (draws, parts)
        counts = np.unique(found, axis=0, return_counts=True)[1]
        assert len(counts) == draws // 200 and (len(counts) == 1 or is_even(counts))


def test_the_loss_is_the_models_own(t5):
    for lengths in ([40] * 3, [40, 12, 1]):
        batch, _ = span().batch(texts(lengths))
        given = {"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}
        found = span().nll(t5, batch)
        torch.testing.assert_close(found.mean(), t5(**given, labels=labels_of(batch)).loss)
        scored, _ = span().scoring.batch(texts(lengths))
        places = torch.isin(batch["positions"], scored["positions"])
        torch.testing.assert_close(span().nll(t5, scored), found[places])
        assert not set(scored["targets"].tolist()) & set(SENTINELS)


def test_a_place_is_that_of_the_hidden_token_or_of_the_hole_that_follows():
    given = texts([40, 12, 1])
    batch, places = span().batch(given)
    scored, of_text = span().scoring.batch(given)
    assert (scored["targets"].numpy() == given.ids.ravel()[of_text.numpy()]).all()
    hidden = span().draw_hidden(given)
    for row in range(2):
        own = batch["rows"] == row
        inner, targets = (places[own] - 40 * row).tolist(), batch["targets"][own].tolist()
        firsts = [at for at in range(40) if hidden[row, at] and not hidden[row, at - 1]]
        names = [place for place, target in zip(inner, targets, strict=True) if target in SENTINELS]
        assert names == firsts
        assert inner[-1] == given.lengths[row] - 1 and targets[-1] == END
    assert places[batch["rows"] == 2].tolist() == [80, 80]
    whole = sides(batch)  # a row is hidden alike in any batch
    assert sides(span().batch(given.some(np.array([1, 0, 1])))[0]) == [whole[1], whole[0], whole[1]]
    assert sides(span().batch(texts([40, 12, 1], key=6))[0])[0] != whole[0]
