"""What has to be predicted: against loops over rows and places; of examples the answers alone; spans."""

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.collate import UNSCORED, Rows, Sizes, place_labels
from cpt.data.corpus import make_corpus
from cpt.data.replay import Samples
from cpt.data.sampler import stack_rows
from cpt.data.sources.base import CONCAT, EXAMPLES
from cpt.data.sources.examples import write_example
from cpt.data.tokenized_tasks import encode_corpus
from cpt.models.objectives import Causal, CausalAnswers, Masked, Seq2SeqAnswers, Span, draw_composition
from tests.support.data_fixtures import HELD_OUT, bos_tokenizer, make_rows
from tests.support.task_fixtures import encoder, make_examples

SPECIAL = [0, 1, 2, 98]
MASK = 2


class Vocabulary(SimpleNamespace):
    def __len__(self):
        return 100


def masked(rate=0.15):
    return Masked(Vocabulary(mask_token_id=MASK, all_special_ids=SPECIAL, name_or_path="tiny"), rate=rate)


def random_rows(count, length):
    """Ids with special tokens among them, the lengths of the rows, and a key for each."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 100, (count, length))
    lengths = generator.integers(1, length + 1, count)
    return Rows(ids, lengths, sample_keys(5, np.arange(count)))


def find_text(rows):
    """The columns of each row's tokens that are not special."""
    columns = []
    for ids, length in zip(rows.ids, rows.lengths, strict=True):
        columns.append(np.flatnonzero(~np.isin(ids[:length], SPECIAL)).tolist())
    return columns


def find_scored(batch):
    """The columns of each row's labels."""
    return [np.flatnonzero(labels != UNSCORED).tolist() for labels in place_labels(batch).numpy()]


@pytest.mark.parametrize("rate", [0.01, 0.15, 0.99])
def test_masks_are_of_text_alone_counted_ahead_and_the_same_in_any_batch(rate):
    objective = masked(rate)
    rows = random_rows(300, 21)
    text = find_text(rows)
    sizes = Sizes(np.array([len(columns) for columns in text]), rows.lengths)
    batch, _ = objective.batch(rows)
    counts = objective.scored(sizes)
    for columns, scored_columns, count in zip(text, find_scored(batch), counts, strict=True):
        assert set(scored_columns) <= set(columns)
        assert len(scored_columns) == count >= min(1, len(columns))
        assert abs(count - rate * len(columns)) <= max(0.5, 1 - rate * len(columns))
    assert {0, 1} <= set(counts.tolist())
    assert objective.scorable(sizes) is sizes.text

    labels = place_labels(batch).numpy()
    inputs = batch["input_ids"].numpy()
    is_scored = labels != UNSCORED  # labels are the ids, and all else is untouched
    assert (labels[is_scored] == rows.ids[is_scored]).all()
    assert (inputs[~is_scored] == rows.ids[~is_scored]).all()
    assert (inputs != rows.ids).any()
    assert batch["positions"].tolist() == np.flatnonzero(is_scored).tolist()

    for picked in ([7], [39, 0, 7, 7], list(range(10, 30))):
        part, _ = objective.batch(rows.some(np.array(picked)))
        assert torch.equal(part["input_ids"], batch["input_ids"][picked])
        assert torch.equal(place_labels(part), place_labels(batch)[picked])
        mask = torch.from_numpy(rows.is_token[picked]).long()
        assert torch.equal(part.get("attention_mask", torch.ones_like(mask)), mask)


def is_even(counts):
    """Whether the chi-square statistic of equal probabilities is within four standard deviations."""
    freedom = len(counts) - 1
    spread = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return counts.min() > 0 and spread < freedom + 4 * math.sqrt(2 * freedom)


def test_masked_positions_are_80_percent_masks_10_random_10_unchanged():
    ids = np.random.default_rng(0).integers(0, 100, (3000, 64))
    ids[np.isin(ids, SPECIAL)] = 50
    batch, _ = masked().batch(Rows(ids, np.full(3000, 64), sample_keys(5, np.arange(3000))))
    is_scored = place_labels(batch).numpy() != UNSCORED
    assert is_scored.mean() == pytest.approx(10 / 64)
    before = ids[is_scored]
    after = batch["input_ids"].numpy()[is_scored]
    assert (after == MASK).mean() == pytest.approx(0.8, abs=0.01)
    replaced = after[(after != MASK) & (after != before)]
    assert len(replaced) / len(before) == pytest.approx(0.1 * 95 / 96, abs=0.006)
    assert (after == before).mean() == pytest.approx(0.1 * 97 / 96, abs=0.006)
    counts = np.bincount(replaced, minlength=100)
    assert not counts[SPECIAL].any()
    assert is_even(np.delete(counts, [*SPECIAL, 50]))


ANSWERS = CausalAnswers(Causal(), pad=1)
SEQ2SEQ_ANSWERS = Seq2SeqAnswers(Causal(), pad=1, start=1)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    source = SimpleNamespace(held_out=HELD_OUT, class_limit=None, form=lambda name: EXAMPLES, skipped={})
    source.fingerprint = lambda name: 0
    source.members = lambda name: [name]
    source.read = lambda name: [("train", write_example(example)) for example in make_examples(60)]
    corpus = make_corpus(source, "a", cache=tmp_path_factory.mktemp("corpus"))
    tokenizer = bos_tokenizer()

    def encode(**options):
        return encode_corpus(
            corpus,
            "train",
            encoder=encoder(tokenizer, **options),
            name="a",
            cache=tmp_path_factory.mktemp("rows"),
            rows_digest="0",
        )

    return encode


def test_the_longest_of_several_too_long_examples_is_named(answered):
    with pytest.raises(ValueError, match="other examples are too long as well") as error:
        answered(length=4)
    num_needed = int(re.search(r"at least (\d+)", str(error.value))[1])
    with pytest.raises(ValueError, match=f"at least {num_needed}"):
        answered(length=num_needed - 1)
    assert len(answered(length=num_needed)) > 0


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
    parts = np.tile(np.arange(len(texts)), count)
    rows = np.repeat(np.arange(count), len(texts))
    return stack_rows(texts, Samples(parts, rows, np.zeros(len(rows), np.uint64)))


def test_the_loss_is_that_of_a_loop_over_answer_tokens_and_what_is_scored_is_known_ahead(model, answered):
    rows = rows_of(answered(), count=5)
    batch, positions = ANSWERS.batch(rows)
    expected = []
    for row in range(5):
        ids = torch.from_numpy(rows.ids[row, : rows.lengths[row]])
        logits = model(ids[None]).logits[0].log_softmax(-1)
        expected += [-logits[column - 1, ids[column]] for column in np.flatnonzero(rows.answers[row])]
    torch.testing.assert_close(ANSWERS.nll(model, batch), torch.stack(expected))
    assert (rows.ids.ravel()[positions] == batch["targets"].numpy()).all()
    assert rows.answers.ravel()[positions].all()

    for text in (answered(), make_rows(6, length=30, seed=1)):
        batch, _ = ANSWERS.batch(rows_of(text, count=6))
        counts = torch.bincount(batch["rows"], minlength=6)
        assert ANSWERS.scored(text.sizes(np.arange(6))).tolist() == counts.tolist()
    assert (ANSWERS.scorable(answered().sizes()) == answered().answer_tokens).all()


def test_raw_text_beside_examples_keeps_its_own_objective(model, answered):
    text = make_rows(4, length=30, last=7, seed=1)
    mixed = rows_of(text, answered(), count=4)
    batch, positions = ANSWERS.batch(mixed)
    assert mixed.ids.shape[1] > 30
    assert (mixed.ids[::2, 30:] == text.pad).all()
    of_text = batch["rows"] % 2 == 0
    raw_rows = rows_of(text, count=4)
    raw_batch, raw_positions = Causal().batch(raw_rows)
    torch.testing.assert_close(ANSWERS.nll(model, batch)[of_text], Causal().nll(model, raw_batch))
    assert mixed.ids.ravel()[positions[of_text]].tolist() == raw_rows.ids.ravel()[raw_positions].tolist()
    examples, _ = ANSWERS.batch(rows_of(answered(), count=4))
    torch.testing.assert_close(ANSWERS.nll(model, batch)[~of_text], ANSWERS.nll(model, examples))
    text_batch, _ = ANSWERS.batch(rows_of(text, count=4))  # to the bit
    assert text_batch.keys() == raw_batch.keys()
    assert all(torch.equal(text_batch[name], raw_batch[name]) for name in raw_batch)


def test_an_encoder_reads_the_question_and_a_decoder_writes_the_answer(t5, answered):
    rows = rows_of(answered(seq2seq=True), count=5)
    batch, positions = SEQ2SEQ_ANSWERS.batch(rows)
    labels = torch.full(batch["decoder_input_ids"].shape, -100)
    for row in range(5):
        answer = torch.from_numpy(rows.ids[row][rows.answers[row]])
        labels[row, : len(answer)] = answer
        assert (batch["decoder_input_ids"][row, len(answer) :] == 1).all()
        source = rows.ids[row][rows.is_token[row] & ~rows.answers[row]]
        assert batch["input_ids"][row, : len(source)].tolist() == source.tolist()
        assert int(batch["attention_mask"][row].sum()) == len(source)
    theirs = t5(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    torch.testing.assert_close(SEQ2SEQ_ANSWERS.nll(t5, batch).mean(), theirs)
    assert (rows.ids.ravel()[positions] == batch["targets"].numpy()).all()


END, PAD = 2, 1
SENTINELS = list(range(329, 229, -1))
# Row: source, target, hidden tokens, holes; of 190, 28.5 hidden tokens, which are 28.500002 in 32 bits.
TABLE = {
    34: (32, 8, 5, 2),
    70: (64, 14, 10, 3),
    190: (172, 40, 29, 10),
    568: (512, 114, 85, 28),
    1137: (1024, 229, 171, 57),
}


def span(rate=0.15, mean=3):
    return Span(rate=rate, mean=mean, sentinels=SENTINELS, end=END, pad=PAD, start=PAD)


def draw_rows(lengths, *, key=5):
    lengths = np.asarray(lengths)
    ids = np.random.default_rng(0).integers(2, 90, (len(lengths), lengths.max()))
    ids[np.arange(ids.shape[1]) >= lengths[:, None]] = PAD
    return Rows(ids, lengths, sample_keys(key, np.arange(len(lengths))))


def split_sides(batch):
    """The source and the target of each row, without padding."""
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    sources = [ids[mask].tolist() for ids, mask in zip(batch["input_ids"], masks, strict=True)]
    targets = [labels[labels != UNSCORED].tolist() for labels in place_labels(batch)]
    return list(zip(sources, targets, strict=True))


def join(source, target):
    """A text from the definition: each sentinel of the source replaced by what follows it in the target."""
    assert source[-1] == END and target[-1] == END
    holes = {}
    sentinel = None
    for token in target[:-1]:
        if token in SENTINELS:
            sentinel = token
            holes[sentinel] = []
        else:
            holes[sentinel].append(token)
    text = []
    for token in source[:-1]:
        text += holes.get(token, [token])
    return text


def test_counts_are_those_of_the_table_and_both_sides_joined_at_the_sentinels_are_the_row():
    for length, (source_length, target_length, hidden, holes) in TABLE.items():
        num_hidden, num_holes = span().count_holes(np.array([length]))
        assert (num_hidden.tolist(), num_holes.tolist()) == ([hidden], [holes])
        assert span().side_lengths(length) == (source_length, target_length)
    for rate, mean in ((0.15, 3), (0.5, 1), (0.5, 8), (0.9, 3)):
        rows = draw_rows([64, 33, 2, 64, 1, 7, 50])
        objective = span(rate, mean)
        batch, _ = objective.batch(rows)
        num_read = objective.count_read(Sizes(text=rows.lengths, all=rows.lengths))
        for number, (source, target) in enumerate(split_sides(batch)):
            assert join(source, target) == rows.ids[number, : rows.lengths[number]].tolist()
            assert num_read[:, number].tolist() == [len(source), len(target)]
        restored = objective.restore(batch)
        assert torch.equal(restored["input_ids"], torch.from_numpy(rows.ids))
        assert torch.equal(restored["attention_mask"], torch.from_numpy(rows.is_token).long())


def test_raw_text_between_answers_has_its_places_and_its_width(answered):
    raw = span(0.5, 1)
    source, target = raw.side_lengths(64)
    assert Seq2SeqAnswers(raw, pad=PAD, start=PAD).side_lengths(64) == (max(64, source), max(64, target))
    tasks = answered()
    ids = np.arange(3 * 200).reshape(3, 200) % 90
    general = SimpleNamespace(length=200, pad=1, packing=CONCAT, row_lengths=np.full(3, 200))
    general.ids = lambda rows: ids[rows]
    general.answers = lambda rows: None
    assert tasks.length < 200
    samples = Samples(np.array([1, 1]), np.array([0, 2]), np.zeros(2, np.uint64))
    stacked = stack_rows([tasks, general], samples)
    assert stacked.ids.tolist() == ids[[0, 2]].tolist() and stacked.lengths.tolist() == [200, 200]


def test_every_composition_is_equally_likely():
    for parts in (1, 3, 12):
        draws = 200 * math.comb(11, parts - 1)
        keys = sample_keys(3, np.arange(draws))
        lengths = draw_composition(keys, np.full(draws, 12), np.full(draws, parts), stream=0)
        assert lengths.shape == (draws, parts)
        assert (lengths.sum(1) == 12).all() and (lengths > 0).all()
        _, counts = np.unique(lengths, axis=0, return_counts=True)
        assert len(counts) == draws // 200 and (len(counts) == 1 or is_even(counts))


def test_the_loss_is_the_models_own(t5):
    for lengths in ([40] * 3, [40, 12, 1]):
        batch, _ = span().batch(draw_rows(lengths))
        nll = span().nll(t5, batch)
        outputs = t5(
            input_ids=batch["input_ids"],
            attention_mask=batch.get("attention_mask"),
            labels=place_labels(batch),
        )
        torch.testing.assert_close(nll.mean(), outputs.loss)
        scored_batch, _ = span().scoring.batch(draw_rows(lengths))
        is_scored = torch.isin(batch["positions"], scored_batch["positions"])
        torch.testing.assert_close(span().nll(t5, scored_batch), nll[is_scored])
        assert not set(scored_batch["targets"].tolist()) & set(SENTINELS)


def test_a_place_is_that_of_the_hidden_token_or_of_the_hole_that_follows():
    rows = draw_rows([40, 12, 1])
    batch, positions = span().batch(rows)
    scored_batch, scored_positions = span().scoring.batch(rows)
    assert (scored_batch["targets"].numpy() == rows.ids.ravel()[scored_positions.numpy()]).all()

    is_hidden = span().draw_hidden(rows)
    for row in range(2):
        of_row = batch["rows"] == row
        columns = (positions[of_row] - 40 * row).tolist()
        targets = batch["targets"][of_row].tolist()
        hole_starts = np.flatnonzero(np.diff(is_hidden[row].astype(int), prepend=0) == 1).tolist()
        pairs = zip(columns, targets, strict=True)
        sentinel_columns = [column for column, target in pairs if target in SENTINELS]
        assert sentinel_columns == hole_starts
        assert columns[-1] == rows.lengths[row] - 1 and targets[-1] == END
    assert positions[batch["rows"] == 2].tolist() == [80, 80]

    first, second, _ = split_sides(batch)  # a row is hidden alike in any batch
    permuted, _ = span().batch(rows.some(np.array([1, 0, 1])))
    assert split_sides(permuted) == [second, first, second]
    of_other_key, _ = span().batch(draw_rows([40, 12, 1], key=6))
    assert split_sides(of_other_key)[0] != first
