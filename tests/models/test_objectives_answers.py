"""Answers alone are scored: by hand, in any split of the batch, padded on either side, beside raw text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.core.randomness import sample_keys
from cpt.data.collate import Rows, Sizes
from cpt.data.corpus import make_corpus
from cpt.data.example import write_example
from cpt.data.sampler import TrainStream, stack_rows
from cpt.data.sources.base import EXAMPLES
from cpt.data.tokenized_tasks import encode_corpus
from cpt.models.objectives import Causal, CausalAnswers, Seq2SeqAnswers, Span
from tests.support.data_fixtures import HELD_OUT, opened, rows_by_hand
from tests.support.task_fixtures import encoder, some_examples

OBJECTIVE = CausalAnswers(Causal(), pad=1)
TWO_STACKS = Seq2SeqAnswers(Causal(), pad=1, start=1)


@pytest.fixture(scope="module")
def tokenizer():
    return opened()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    source = SimpleNamespace(
        held_out=HELD_OUT,
        class_limit=None,
        form=lambda name: EXAMPLES,
        fingerprint=lambda name: 0,
        members=lambda name: [name],
    )
    source.read = lambda name: (("train", write_example(each)) for each in some_examples(60))
    return make_corpus(source, "a", cache=tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def answered(corpus, tokenizer, tmp_path_factory):
    def made(split="train", **how):
        return encode_corpus(
            corpus,
            split,
            encoder=encoder(tokenizer, **how),
            name="a",
            cache=tmp_path_factory.mktemp("rows"),
            tokenizer_digest="0",
        )

    return made


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=330, **sizes)).eval()


def rows_of(*texts, count=3):
    """The first rows of each text together."""
    parts = np.repeat(np.arange(len(texts)), count)
    rows = np.tile(np.arange(count), len(texts))
    return stack_rows(texts, parts, rows, np.arange(len(rows), dtype=np.uint64))


def by_hand(model, rows, row):
    """Nats of a row's answer, token by token."""
    ids = torch.from_numpy(rows.ids[row, : rows.lengths[row]])
    logits = model(ids[None]).logits[0].log_softmax(-1)
    return [-logits[at - 1, ids[at]] for at in np.flatnonzero(rows.answers[row])]


def test_the_loss_is_that_of_a_loop_over_answer_tokens(model, answered):
    rows = rows_of(answered(), count=5)
    batch, places = OBJECTIVE.batch(rows)
    wanted = [by_hand(model, rows, row) for row in range(5)]
    torch.testing.assert_close(OBJECTIVE.nll(model, batch), torch.stack(sum(wanted, [])))
    assert (rows.ids.ravel()[places] == batch["targets"].numpy()).all()
    assert rows.answers.ravel()[places].all()
    assert batch["rows"].tolist() == np.repeat(np.arange(5), rows.answers.sum(1)).tolist()


def test_what_is_scored_is_known_ahead(answered):
    text = rows_by_hand(6, length=30, seed=1)
    for made in (answered(), text):
        batch, _ = OBJECTIVE.batch(rows_of(made, count=6))
        counts = torch.bincount(batch["rows"], minlength=6)
        assert OBJECTIVE.scored(made.sizes(np.arange(6))).tolist() == counts.tolist()
    assert (OBJECTIVE.scorable(answered().sizes()) == answered().answer_tokens).all()


def test_raw_text_beside_examples_keeps_its_own_objective(model, answered):
    text = rows_by_hand(4, length=30, last=7, seed=1)
    parts, numbers = np.tile([1, 0], 4), np.repeat(np.arange(4), 2)  # one of each in turn
    mixed = stack_rows([answered(), text], parts, numbers, np.zeros(8, np.uint64))
    alone = rows_of(text, count=4)
    assert alone.answers is None
    batch, places = OBJECTIVE.batch(mixed)
    own = batch["rows"] % 2 == 0
    raw, raw_places = Causal().batch(alone)
    torch.testing.assert_close(OBJECTIVE.nll(model, batch)[own], Causal().nll(model, raw))
    assert mixed.ids.ravel()[places[own]].tolist() == alone.ids.ravel()[raw_places].tolist()
    assert batch["positions"].tolist() == sorted(batch["positions"].tolist())
    assert batch["rows"].tolist() == (batch["positions"] // batch["input_ids"].shape[1]).tolist()
    examples, _ = OBJECTIVE.batch(rows_of(answered(), count=4))
    torch.testing.assert_close(OBJECTIVE.nll(model, batch)[~own], OBJECTIVE.nll(model, examples))


def test_a_batch_of_raw_text_is_that_of_its_objective_to_the_bit():
    rows = rows_of(rows_by_hand(4, length=30, last=7, seed=1), count=4)
    one, two = OBJECTIVE.batch(rows), Causal().batch(rows)
    assert one[0].keys() == two[0].keys()
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert torch.equal(one[1], two[1])


def test_two_stacks_read_the_question_and_write_the_answer(answered):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    ids = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=330, **ids, **sizes)).eval()
    rows = rows_of(answered(seq2seq=True), count=5)
    batch, places = TWO_STACKS.batch(rows)
    assert batch["decoder_input_ids"].shape[1] == rows.answers.sum(1).max()
    given = {name: batch[name] for name in ("input_ids", "attention_mask", "decoder_input_ids")}
    logits = model(**given).logits.flatten(0, 1)[batch["positions"]]
    mine = functional.cross_entropy(logits, batch["targets"])
    labels = torch.full(batch["decoder_input_ids"].shape, -100)
    for row in range(5):
        answer = torch.from_numpy(rows.ids[row][rows.answers[row]])
        labels[row, : len(answer)] = answer
        assert (batch["decoder_input_ids"][row, len(answer) :] == 1).all()
        source = rows.ids[row][rows.present[row] & ~rows.answers[row]]
        assert batch["input_ids"][row, : len(source)].tolist() == source.tolist()
        assert int(batch["attention_mask"][row].sum()) == len(source)
    theirs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
    torch.testing.assert_close(mine, theirs)
    assert (rows.ids.ravel()[places] == batch["targets"].numpy()).all()


def mixed_stacks():
    """Examples and raw text in turn, for two stacks, with what each would be alone."""
    draw = np.random.default_rng(0)
    raw = Span(rate=0.3, mean=2, sentinels=list(range(329, 300, -1)), end=2, pad=1, start=1)
    both = Seq2SeqAnswers(raw, pad=1, start=1)
    lengths = np.array([20, 9, 14, 25, 17, 6])
    ids = draw.integers(5, 300, (6, 25))
    ids[np.arange(25) >= lengths[:, None]] = 1
    answers = np.zeros(ids.shape, bool)
    for row in (0, 2, 4):
        answers[row, lengths[row] - 3 : lengths[row]] = True
    return both, raw, Rows(ids, lengths, sample_keys(7, np.arange(6)), answers)


def test_span_corruption_beside_answers_is_each_as_it_is_alone():
    both, raw, rows = mixed_stacks()
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    tokens = {"pad_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=330, **tokens, **sizes)).eval()
    for objective, own in ((both, raw), (both.scoring, raw.scoring)):
        batch, places = objective.batch(rows)
        nll = objective.nll(model, batch)
        assert (
            rows.ids.ravel()[places[batch["rows"] % 2 == 0]]
            == batch["targets"][batch["rows"] % 2 == 0].numpy()
        ).all()
        examples, example_places = objective.batch(rows.some(np.array([0, 2, 4])))
        torch.testing.assert_close(nll[batch["rows"] % 2 == 0], objective.nll(model, examples))
        text = rows.some(np.array([1, 3, 5]))
        alone, alone_places = own.batch(Rows(text.ids, text.lengths, text.keys))
        torch.testing.assert_close(nll[batch["rows"] % 2 == 1], own.nll(model, alone))
        assert (
            rows.ids.ravel()[places[batch["rows"] % 2 == 1]].tolist()
            == text.ids.ravel()[alone_places].tolist()
        )
        counts = objective.scored(Sizes(rows.lengths, rows.lengths, rows.answers.sum(1)))
        assert counts.tolist() == torch.bincount(batch["rows"], minlength=6).tolist()


def test_what_is_hidden_is_put_back_and_a_question_stays():
    both, raw, rows = mixed_stacks()
    batch, _ = both.batch(rows)
    whole = both.restored(batch)
    mask = whole.get("attention_mask", torch.ones_like(whole["input_ids"]))
    for row in range(6):
        found = whole["input_ids"][row][mask[row].bool()].tolist()
        kept = rows.present[row] & ~rows.answers[row]
        assert found == rows.ids[row][kept].tolist()
    assert torch.equal(both.restored(batch)["input_ids"], whole["input_ids"])
    asked, _ = both.batch(rows.some(np.array([0, 2, 4])))
    assert both.restored(asked) is asked


@pytest.mark.parametrize(("accumulate", "world"), [(2, 1), (1, 4), (2, 2)])
def test_splitting_a_batch_changes_no_gradient(model, answered, accumulate, world):
    texts = {"a": answered(), "b": rows_by_hand(7, length=30, seed=2)}

    def gradient(accumulate, world):
        total = 0
        for rank in range(world):
            given = {"seed": 0, "batch_size": 8, "steps": [1, 1], "objective": OBJECTIVE}
            stream = TrainStream(texts, accumulate=accumulate, rank=rank, world=world, **given)
            for part in range(accumulate):
                batch = stream[part]
                loss = (OBJECTIVE.nll(model, batch) * batch["weight"]).sum() / (accumulate * world)
                total = total + torch.cat(
                    [each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]
                )
        return total

    torch.testing.assert_close(gradient(accumulate, world), gradient(1, 1), rtol=1e-5, atol=1e-6)
