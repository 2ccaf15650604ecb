"""Sources of replay: how they are read, how chats become rows, and what of them is in which batch."""

import json
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from cpt.core.exceptions import InvalidOptionError
from cpt.data.chats import TEMPLATE_DATE
from cpt.data.corpora import Corpora, MixedCorpus
from cpt.data.corpus import make_corpus
from cpt.data.datamodule import DomainSequence
from cpt.data.mixture import MixedText, Mixture, find_uses
from cpt.data.options import Budget, Domain
from cpt.data.replay import Replay, SourceShare
from cpt.data.sampler import TrainStream
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK, NONE, Encoding
from cpt.data.sources.examples import read_example
from cpt.data.sources.mixed import MixedReader, MixedSource
from cpt.data.text_format import make_text_format
from cpt.data.tokenized_tasks import Encoder
from cpt.evaluation.chat_set import read_chats
from cpt.evaluation.options import ChatOptions
from cpt.models.chunked_head import WeightedLoss
from cpt.models.objectives import Causal, CausalMixture
from cpt.models.part_losses import PartLosses
from cpt.trainer.dry_run import count_sources, count_stage_tokens
from cpt.trainer.evaluators import warn_of_trained_chats
from tests.support.chat_decoder import TEMPLATE
from tests.support.data_fixtures import bos_tokenizer, fake_trainer, make_prose, make_rows

LENGTH = 256  # tokens of rows of chats
PATH = __file__  # of any file that is there


def make_source(**options):
    arguments = {"path": PATH, "ratio": 0.1} | options
    return MixedSource(**arguments)


def make_replay(sources, *, past_ratio=0.0, general_ratio=0.0, mode="replace", **options):
    return Replay(
        past_ratio=past_ratio,
        general_ratio=general_ratio,
        buffer_size=None,
        mode=mode,
        sources=sources,
        **options,
    )


def make_mixture(sizes, sources, **options):
    """The mixture of sources with rows by hand, of these sizes."""
    replay = make_replay({name: {"path": PATH} | entry for name, entry in sources.items()}, **options)
    texts = {
        name: MixedText(replay.mixed_sources[name], make_rows(size, seed=size))
        for name, size in sizes.items()
    }
    return Mixture(texts, replay, seed=0)


def write_chats(path, count, *, seed=0, words=(1, 12)):
    """A file of chats of one question and one answer; returns them as (question, answer)."""
    questions = make_prose(count, seed=seed, words=words)
    answers = make_prose(count, seed=seed + 1, words=words)
    pairs = list(zip(questions, answers, strict=True))
    lines = []
    for question, answer in pairs:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return pairs


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer: PreTrainedTokenizerFast = bos_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def read_mixed(folder, tokenizer, *, packing, length=64, **options):
    """The rows of a source of chats or texts beside raw text with a packing."""
    reader = MixedReader("chat", make_source(**options))
    corpus = make_corpus(reader, "chat", cache=folder / "cache")
    corpora = Corpora(
        {}, folder / "cache", packing=packing, workers=1, mixed={"chat": MixedCorpus(reader.options, corpus)}
    )
    text_format = make_text_format(tokenizer, corpora.text_options, is_causal=True, is_checkpoint=False)
    return corpora.packed_source("chat", format=text_format, length=length)


# How a source is read.


def test_a_single_file_that_is_no_text_or_not_whole_is_refused_by_its_name(tmp_path):
    (tmp_path / "a.log").write_text("One.")
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no end")
    reasons = {
        "a.log": "not a file of text. Allowed: .txt",
        "b.jsonl.gz": "damaged: it",
        "c.parquet": "damaged: its",
    }
    for name, reason in reasons.items():
        reader = MixedReader("x", make_source(path=str(tmp_path / name)))
        with pytest.raises(ValueError, match=f"{name} is {reason}"):
            reader.find_files()


def test_files_after_the_last_document_are_not_opened(tmp_path):
    for number in range(2):
        texts = [f"Document {number} {line}." for line in range(20)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"train-{number}.parquet")
    (tmp_path / "train-2.parquet").write_text("no parquet")
    reader = MixedReader("web", make_source(path=str(tmp_path), max_documents=30))
    documents = list(reader.read("web"))
    assert [split for split, _ in documents] == ["train"] * 30 and documents[-1][1] == "Document 1 9."
    with pytest.raises(ValueError, match="train-2.parquet cannot be read"):
        list(MixedReader("web", make_source(path=str(tmp_path))).read("web"))


def test_all_documents_are_trained_on_but_copies_and_files_of_other_splits(tmp_path):
    web = tmp_path / "web"
    web.mkdir()
    (web / "train.jsonl").write_text("\n".join(json.dumps({"text": f"One {n % 5}."}) for n in range(9)))
    (web / "test.jsonl").write_text(json.dumps({"text": "Held out."}))
    corpus = make_corpus(MixedReader("web", make_source(path=str(web))), "web", cache=tmp_path / "cache")
    assert corpus.facts["documents"] == {"train": 5, "valid": 0, "test": 0}
    assert corpus.facts["duplicates"] == 4
    held_out = MixedReader("web", make_source(path=str(web), split="validation"))
    with pytest.raises(ValueError, match="replay.sources.web.split=validation is invalid: no file of"):
        list(held_out.read("web"))


def test_chats_are_read_from_lines_of_json_and_from_parquet_and_bad_ones_stop_or_are_counted(tmp_path):
    pairs = write_chats(tmp_path / "chats.jsonl", 3)
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    for name in ("chats.jsonl", "chats.parquet"):
        reader = MixedReader("chat", make_source(path=str(tmp_path / name), format="messages"))
        examples = [read_example(document) for _, document in reader.read("chat")]
        assert [(example.turns[0].content, example.target) for example in examples] == pairs

    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user", "content": "No answer"}]}')
    options = {"path": str(tmp_path / "chats.jsonl"), "format": "messages"}
    with pytest.raises(ValueError, match="replay.sources.chat.on_bad_example=skip leaves it out"):
        list(MixedReader("chat", make_source(**options)).read("chat"))
    reader = MixedReader("chat", make_source(**options, on_bad_example="skip"))
    assert len(list(reader.read("chat"))) == 3 and reader.skipped["chat"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "./chats"}, "sources.a.path=./chats is invalid: there is no such file or folder"),
        (
            {"path": "no/file.jsonl"},
            r"sources.a.path=no/file.jsonl is invalid: there is no such file or folder",
        ),
        ({"path": "/no/folder"}, "sources.a.path=/no/folder is invalid: there is no such"),
        (
            {"path": PATH, "ration": 0.1},
            "sources.a.ration is invalid: unknown option.* Did you mean sources.a.ratio",
        ),
        ({"ratio": 0.1}, "sources.a.path is missing"),
        ({"path": PATH, "ratio": 1}, "sources.a.ratio=1 is invalid. Allowed: null or 0 or more and below 1"),
        ({"path": PATH, "ratio": 0}, "sources.a.ratio=0 is invalid: nothing is read"),
        (
            {"path": PATH, "ratio": 0.9, "end_ratio": 0.1},
            "sources=a is invalid with past_ratio=0.1.*add up to 1",
        ),
        ({"path": PATH, "end_ratio": 0.1}, "sources.a.end_ratio=0.1 is invalid: ratio is not given"),
        ({"path": PATH}, "sources.a.ratio is missing. Allowed: a share, or sources_ratio=SHARE"),
        ({"path": PATH, "ratio": 0.1, "config": "b"}, "sources.a.config=b is invalid: .* is on this machine"),
        ("chats.jsonl", r"sources.a=chats.jsonl is invalid. Allowed: \{path: …, ratio: …\}"),
    ],
)
def test_a_wrong_source_is_refused_in_one_line(entry, message):
    with pytest.raises(ValueError, match=message) as raised:
        make_replay({"a": entry}, past_ratio=0.1)
    assert "\n" not in str(raised.value)


def test_a_single_file_is_of_the_split_that_its_name_says(tmp_path, caplog):
    path = tmp_path / "chats-test.txt"
    path.write_text("One.\n")
    for split in ("test", "eval"):  # words for one split
        assert MixedReader("a", make_source(path=str(path), split=split)).find_files() == [path]
    assert caplog.messages == []

    for _ in range(2):  # said once
        assert MixedReader("a", make_source(path=str(path))).find_files() == [path]
    assert caplog.messages == [f"Training on {path} (replay.sources.a), which is held out by its name: test"]
    plain_path = tmp_path / "chats.txt"
    plain_path.write_text("One.\n")
    for wrong_path, split, reason in (
        (path, "valid", "of test by its name"),
        (plain_path, "test", "whose name says no split"),
    ):
        with pytest.raises(
            InvalidOptionError, match=f"sources.a.split={split} is invalid: .*{reason}. .* train"
        ):
            MixedReader("a", make_source(path=str(wrong_path), split=split)).find_files()
    with pytest.raises(InvalidOptionError, match=r"split=train\[:9\] is invalid: no part .*max_documents=N"):
        make_source(path=str(tmp_path), split="train[:9]")  # of which all would be read


def test_names_and_options_without_effect_are_refused():
    for name in ("new", "past", "general", "a/b", ""):
        with pytest.raises(InvalidOptionError, match="it is no name of a source"):
            make_replay({name: {"path": PATH, "ratio": 0.1}})
    with pytest.raises(InvalidOptionError, match="sources_ratio=0.1 is invalid: there are no sources"):
        make_replay(None, sources_ratio=0.1)
    with pytest.raises(
        InvalidOptionError, match="sources_temperature=2 is invalid: every source has a ratio"
    ):
        make_replay({"a": {"path": PATH, "ratio": 0.1}}, sources_temperature=2)
    # Of three kinds each may take almost a sample more than its share.
    replay = make_replay({"a": {"path": PATH, "ratio": 0.1}}, past_ratio=0.3, general_ratio=0.3)
    replay.check(domains=2, general=True, batch_size=7)
    with pytest.raises(
        ValueError, match="1.8 new samples remain in a batch of trainer.batch_size=6. Allowed: 2"
    ):
        replay.check(domains=2, general=True, batch_size=6)


# Shares.


def test_sources_without_a_ratio_share_theirs_by_their_sizes_and_the_temperature():
    sources = {"a": {"path": PATH}, "b": {"path": PATH}, "c": {"path": PATH, "ratio": 0.05}}
    for temperature, expected in ((1, (0.18, 0.02)), (2, (0.15, 0.05)), (0.001, (0.2, 0.0))):
        replay = make_replay(sources, sources_ratio=0.2, sources_temperature=temperature)
        shares = replay.find_source_shares({"a": 900, "b": 100, "c": 7})
        assert [float(shares[name].start) for name in "abc"] == [*expected, 0.05]
    assert float(replay.source_share) == 0.25


def test_a_share_that_changes_is_exact_over_the_stage():
    share = SourceShare(Fraction("0.3"), Fraction("0.1"))
    counts = [share.count_draws(samples, stage_samples=1000) for samples in range(0, 1001, 10)]
    assert (counts[10], counts[-1] - counts[-11], counts[-1]) == (29, 11, 200)
    exact = [0.3 * samples - 0.0001 * samples**2 for samples in range(0, 1001, 10)]
    assert np.abs(np.array(counts) - exact).max() <= 1


def test_a_source_continues_from_stage_to_stage_and_ends_at_its_limit():
    mixture = make_mixture({"a": 10}, {"a": {"ratio": 0.25, "max_epochs": 2.5}})
    drawn = []
    stages = [40, 40, 40, 40]
    for number in range(1, 5):
        (pool,) = mixture.pools(stages[:number])
        num_draws = pool.count_draws(40)
        drawn.append(pool.locate(np.arange(num_draws)).rows.tolist())
    assert [len(rows) for rows in drawn] == [10, 10, 5, 0]
    # Each epoch has every row once, in another order.
    assert sorted(drawn[0]) == sorted(drawn[1]) == list(range(10)) and drawn[0] != drawn[1]

    (pool,) = mixture.pools(stages[:3])
    (use,) = find_uses([pool], steps=5, batch_size=8)
    assert (use.draws, use.epochs, use.limit_step, use.asked_share) == (5, 2.5, 2, 0.25)


@pytest.mark.parametrize("mode", ["replace", "append"])
@pytest.mark.parametrize("processes", [(1, 1), (2, 2)])
def test_batches_have_their_shares_of_all_parts_and_count_them(mode, processes):
    world, accumulate = processes
    mixture = make_mixture(
        {"a": 10, "b": 7}, {"a": {"ratio": 0.25}, "b": {"ratio": 0.125, "weight": 3}}, mode=mode
    )
    text = make_rows(31, seed=31)

    batches = []
    for rank in range(world):
        stream = TrainStream(
            {"now": text},
            objective=Causal(),
            seed=0,
            batch_size=16,
            steps=[4],
            accumulate=accumulate,
            rank=rank,
            world=world,
            pools=mixture.pools([64]),
            part_names=mixture.part_names,
            domain_indices={"a": 0, "now": 1},  # a source may have the name of a domain
        )
        batches.append([stream[number] for number in range(len(stream))])

    num_new = 64 if mode == "append" else 40
    counted = torch.zeros(5, dtype=torch.int64)
    for rank_batches in batches:
        for batch in rank_batches:
            counted += torch.bincount(batch["parts"], minlength=5)
            assert torch.equal(batch["part_weights"], torch.where(batch["parts"] == 4, 3.0, 1.0))
            assert torch.equal(batch["domains"], torch.where(batch["parts"] == 0, 1, -1))
    assert counted.tolist() == [num_new, 0, 0, 16, 8]
    # The counts are of whole steps, and alike in all processes and micro-batches.
    total = sum(batch["part_counts"] for batch in batches[-1][::accumulate])
    assert total[0].tolist() == counted.tolist()
    assert torch.equal(total[1] - total[0], total[2])  # all but the first token of each row


def test_weights_scale_losses_and_sums_are_of_the_losses_before_them():
    batch = {
        "parts": torch.tensor([0, 1, 1]),
        "part_weights": torch.tensor([1.0, 4.0, 4.0]),
        "part_counts": torch.zeros(3, 2, dtype=torch.int64),
        "rows": torch.tensor([0, 0, 1, 2, 2]),
    }
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    losses = PartLosses()
    weighted = losses.observe(WeightedLoss(lambda logits, positions: values[positions]), batch)
    chunks = [weighted.loss(values, slice(0, 2)), weighted.loss(values, slice(2, 5))]
    assert torch.cat(chunks).tolist() == [1, 2, 12, 16, 20]
    assert losses.take().tolist() == [[3, 12], [2, 3]] and losses.take() is None


# Chats in rows of raw text.


@pytest.mark.parametrize("packing", [CONCAT, DOCUMENT_MASK, NONE])
def test_rows_have_whole_chats_of_which_the_answers_are_scored(packing, tmp_path, tokenizer):
    write_chats(tmp_path / "chats.jsonl", 40)
    options = {"path": str(tmp_path / "chats.jsonl"), "format": "messages"}
    text = read_mixed(tmp_path, tokenizer, packing=packing, length=LENGTH, **options)
    encoding = Encoding(truncate="tail", scored_turns="all", date=TEMPLATE_DATE)
    encoder = Encoder(tokenizer, LENGTH, encoding, seq2seq=False)
    expected = []
    for _, document in MixedReader("chat", make_source(**options)).read("chat"):
        row = encoder.encode(read_example(document))
        expected.append((tuple(row.ids), tuple(row.answer)))

    numbers = np.arange(len(text))
    ids = text.ids(numbers)
    answers = text.answers(numbers)
    chats_of_rows = text.document_of(numbers)
    rows_of_chats = []
    for row in range(len(text)):
        documents = chats_of_rows[row]
        for chat in dict.fromkeys(documents[documents >= 0].tolist()):
            is_here = documents == chat
            rows_of_chats.append((tuple(ids[row, is_here].tolist()), tuple(answers[row, is_here].tolist())))
    assert sorted(rows_of_chats) == sorted(expected)
    assert np.array_equal(text.row_lengths, (chats_of_rows >= 0).sum(1))
    is_shared = packing != NONE
    assert (len(text) < len(expected)) == is_shared
    if is_shared:  # rows are filled as well as whole chats allow
        assert text.row_lengths.mean() > 0.85 * LENGTH

    sizes = text.sizes(numbers)
    assert np.array_equal(sizes.answers, answers.sum(1)) and np.array_equal(sizes.all, text.row_lengths)
    chosen = text.rows.select(np.array([2, 0]))
    assert chosen.ids(np.arange(2)).split() == text.rows.ids(np.array([2, 0])).split()
    assert chosen.text_tokens.tolist() == text.text_tokens[[2, 0]].tolist()


@pytest.mark.parametrize("packing", [CONCAT, DOCUMENT_MASK])
def test_a_batch_of_raw_text_and_chats_has_the_loss_of_each(packing, tmp_path, tokenizer):
    write_chats(tmp_path / "chats.jsonl", 20)
    chats = read_mixed(
        tmp_path,
        tokenizer,
        packing=packing,
        path=str(tmp_path / "chats.jsonl"),
        format="messages",
        on_bad_example="skip",
    )
    (tmp_path / "raw.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in make_prose(30)))
    raw = read_mixed(tmp_path, tokenizer, packing=packing, path=str(tmp_path / "raw.jsonl"))
    causal = Causal()
    causal.isolated = packing == DOCUMENT_MASK
    objective = CausalMixture(causal, pad=0)
    mixture = make_mixture({"chat": 1}, {"chat": {"ratio": 0.5}})
    mixture = Mixture({"chat": MixedText(mixture.texts["chat"].options, chats)}, mixture.replay, seed=0)
    options = {"seed": 0, "batch_size": 4, "steps": [3], "accumulate": 1, "rank": 0, "world": 1}
    stream = TrainStream(
        {"now": raw}, objective=objective, pools=mixture.pools([12]), part_names=mixture.part_names, **options
    )
    plain_stream = TrainStream({"now": raw}, objective=causal, **options)
    assert objective.scoring is causal and objective.scores == causal.scores

    raw_rows = set()
    for number in range(3):
        batch = stream[number]
        num_scored = int(batch["part_counts"][2].sum())
        assert num_scored == len(batch["positions"]) == round(1 / float(batch["weight"]))
        for row, part in enumerate(batch["parts"].tolist()):
            targets = batch["targets"][batch["rows"] == row]
            if part == 0:
                raw_rows.add(tuple(targets.tolist()))
            else:  # turns of users end in the same token as answers, and are half of all: answers alone are scored
                ends = int((targets == tokenizer.convert_tokens_to_ids("<|end|>")).sum())
                ids = batch["input_ids"][row]
                assert ends == int((ids == tokenizer.convert_tokens_to_ids("<|end|>")).sum()) / 2
        if packing == DOCUMENT_MASK:  # no document, of text or chats, sees another
            segments = batch["segments"].flatten()
            is_same = segments[batch["positions"]] == segments[batch["positions"] + 1]
            assert is_same.all()
    # The rows of raw text have the labels that they have without chats.
    plain_rows = set()
    for number in range(3):
        batch = plain_stream[number]
        plain_rows.update(tuple(batch["targets"][batch["rows"] == row].tolist()) for row in range(4))
    assert raw_rows <= plain_rows and raw_rows


def test_the_stages_of_a_run_have_their_sources():
    mixture = make_mixture({"a": 10}, {"a": {"ratio": 0.25}}, past_ratio=0.25)
    texts = {name: make_rows(20, length=12, seed=number) for number, name in enumerate("xy", start=1)}
    data = DomainSequence(
        [Domain("x", 0, ("x",)), Domain("y", 1, ("y",))],
        train=texts,
        held_out={},
        objective=Causal(),
        budget=Budget(steps=5, epochs=None, tokens=None, batch_size=8),
        replay=mixture.replay,
        seed=0,
        accumulate=1,
        eval_batch_size=8,
        importance_samples=8,
        workers=0,
        mixed=mixture.texts,
    )
    data.trainer = fake_trainer()
    assert data.find_asked_shares(data.domains[0]) == {"new": 0.75, "past": 0, "general": 0, "a": 0.25}
    assert data.find_asked_shares(data.domains[1]) == {"new": 0.5, "past": 0.25, "general": 0, "a": 0.25}
    assert [data.find_uses(domain)[0].epochs for domain in data] == [1, 2]
    # The plan counts the tokens of a source in place of those that it displaces.
    own_tokens = data.train["x"].tokens_per_row
    source_tokens = data.mixed["a"].text.row_lengths.mean()
    expected_tokens = 30 * own_tokens + 10 * source_tokens
    assert count_stage_tokens(data, data.domains[0]) == pytest.approx(expected_tokens)
    (counted,) = count_sources(data)
    assert counted["tokens"] == int(20 * source_tokens) and counted["epochs"] == 2
    data.enter(data.domains[1])
    batch = next(iter(data.train_dataloader()))
    assert batch["part_counts"][0].tolist() == [4, 2, 0, 2]


def test_held_out_chats_that_a_source_trains_on_are_reported(tmp_path, caplog):
    def make_row(question, answer):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": turns}) + "\n"

    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(make_row(f"question {number}", "Yes.") for number in range(5)))
    trained = tmp_path / "trained.jsonl"
    trained.write_text(
        make_row("another", "Yes.") + make_row("question 1", "No.") + make_row("question 3", "Yes.")
    )
    options = ChatOptions(path=str(held_out), when="last", generate=0, max_new_tokens=4, batch_size=4)
    chats = read_chats(options)

    source = make_source(path=str(trained), format="messages")
    corpus = make_corpus(MixedReader("talk", source), "talk", cache=tmp_path / "cache")
    corpora = Corpora({}, tmp_path / "cache", mixed={"talk": MixedCorpus(source, corpus)})
    warn_of_trained_chats(chats[:1], corpora)
    assert "also trained on" not in caplog.text
    warn_of_trained_chats(chats, corpora)
    assert "also trained on bias their losses: of 5 chats 2 in replay.sources.talk" in caplog.text
