"""Raw text as ids: what decides cached rows, special tokens that a text spells, separators, rows that begin
with BOS, and text that the tokenizer does not know."""

import itertools
import logging
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import BertweetTokenizer, ByT5Tokenizer, CanineTokenizer, PreTrainedTokenizerFast

from cpt.data import packing
from cpt.data.packers import PACKERS
from cpt.data.separator import choose_separator
from cpt.data.sources.base import PARSE, SPLIT, TextOptions
from cpt.data.text_checks import check_training_text, compute_unknown_share, report_texts
from cpt.data.text_encoder import TextEncoder, find_frame, find_unknown_id
from cpt.data.text_format import TextFormat, make_text_format
from cpt.data.tokenize import TokenizeBatch
from cpt.data.tokenizer_hash import hash_row_format, hash_tokenizer
from cpt.models.objectives import Causal
from tests.support.data_fixtures import (
    bare_tokenizer,
    bos_tokenizer,
    eos_tokenizer,
    list_documents,
    list_ids,
    make_prose,
    tokenizer_with_template,
    wordpiece_tokenizer,
    write_corpus,
)
from tests.support.tokenizer_kinds import bert_legacy, merged_end, unigram, word_level


def bertweet(folder, *, merges, **options):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{letter} 1\n" for letter in "abc@"))
    (folder / "bpe.codes").write_text(merges)
    return BertweetTokenizer(str(folder / "vocab.txt"), str(folder / "bpe.codes"), **options)


def bengali(*, template: str):
    """A BPE of letters that has no token for `a`, and none for what it does not know."""
    vocabulary = {token: number for number, token in enumerate(["<s>", "</s>", "ক", "খ"])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def chat_tokenizer(eos, *, special=(), template=None):
    """A byte-level BPE with further special tokens, of which `eos` is one."""
    alphabet = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.add_special_tokens({"extra_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


def make_template(token):
    return "{% for m in messages %}[{{ m.role }}]{{ m.content }}" + token + "{% endfor %}"


def test_the_hash_of_a_slow_tokenizer_has_its_options_and_files(tmp_path):
    tokenizers = {
        "plain": bert_legacy(tmp_path / "a"),
        "cased": bert_legacy(tmp_path / "a", do_lower_case=False),
        "accents": bert_legacy(tmp_path / "a", strip_accents=False),
        "characters": bert_legacy(tmp_path / "a", tokenize_chinese_chars=False),
        "tweets": bertweet(tmp_path / "b", merges="a b 1\n"),
        "normalized": bertweet(tmp_path / "b", merges="a b 1\n", normalization=True),
        "merged": bertweet(tmp_path / "c", merges="a b 1\nb c 1\n"),
        "bytes": ByT5Tokenizer(),
        "sentinels": ByT5Tokenizer(extra_ids=3),
    }
    assert len({hash_tokenizer(tokenizer) for tokenizer in tokenizers.values()}) == len(tokenizers)
    changed = bert_legacy(tmp_path / "a")
    changed.basic_tokenizer.do_lower_case = False
    assert hash_tokenizer(changed) == hash_tokenizer(tokenizers["cased"])


def test_the_hash_of_a_slow_tokenizer_is_the_same_elsewhere_and_after_use(tmp_path):
    tokenizers = {
        "bert": bert_legacy(tmp_path / "v"),
        "bytes": ByT5Tokenizer(),
        "tweets": bertweet(tmp_path / "w", merges="a b 1\n"),  # which keeps the paths of its files
    }
    for name, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(tmp_path / name)
        shutil.copytree(tmp_path / name, tmp_path / "moved" / name)
        copies = [type(tokenizer).from_pretrained(folder / name) for folder in (tmp_path, tmp_path / "moved")]
        copies[0]("River stones @abc", split_special_tokens=True)
        hashes = {hash_tokenizer(copy) for copy in copies}
        row_hashes = {hash_row_format(copy) for copy in copies}
        assert len(hashes) == len(row_hashes) == 1 and row_hashes != hashes
        if name != "tweets":  # transformers does not save the merges of these as it reads them
            assert hashes == {hash_tokenizer(tokenizer)}


def test_the_key_of_rows_has_what_becomes_of_the_text():
    tokenizer = bos_tokenizer()
    formats = [
        TextFormat(tokenizer, (2,)),
        TextFormat(tokenizer, ()),
        TextFormat(tokenizer, (3,)),
        TextFormat(tokenizer, (2,), row_start=0),
        TextFormat(tokenizer, (2,), special_tokens=PARSE),
    ]
    assert len({text_format.digest for text_format in formats}) == len(formats)
    assert TextFormat(bos_tokenizer(), (2,)).digest == formats[0].digest


@pytest.mark.parametrize("make", [unigram, word_level, merged_end])
def test_text_that_spells_a_special_token_does_not_inject_it(make):
    tokenizer = make()
    encoder = TextEncoder(tokenizer, SPLIT)
    eos = tokenizer.eos_token
    plain = "as" if make is unigram else "red"
    assert encoder.encode([plain]) == tokenizer([plain])["input_ids"]
    for text in (eos, f"{plain} {eos} {plain}", f"{plain}{eos}"):
        (ids,) = encoder.encode([text])
        assert ids and tokenizer.eos_token_id not in ids
        if make is unigram:  # it knows the characters
            assert tokenizer.unk_token_id not in ids

    # Without the encoder, these tokenizers do inject it.
    ids = tokenizer(f"{plain} {eos}", split_special_tokens=True)["input_ids"]
    assert tokenizer.eos_token_id in ids


def test_slow_tokenizers_do_not_inject_special_tokens_either(tmp_path):
    tokenizer = bert_legacy(tmp_path / "v")
    begin, end = TextEncoder(tokenizer, SPLIT).frame
    (split,) = TextEncoder(tokenizer, SPLIT).encode(["river [SEP] stones"])
    (parsed,) = TextEncoder(tokenizer, PARSE).encode(["river [SEP] stones"])
    assert tokenizer.sep_token_id not in split[len(begin) : -len(end)]
    expected = ["[CLS]", "river", "[SEP]", "stone", "##s", "[SEP]"]
    assert tokenizer.convert_ids_to_tokens(parsed) == expected


def test_added_words_are_used_and_special_ones_split_or_parsed():
    for tokenizer in (ByT5Tokenizer(), bos_tokenizer()):
        tokenizer.add_tokens(["benzol", AddedToken("toluol", normalized=False)])
        tokenizer.add_tokens([AddedToken("<drug>", special=True)], special_tokens=True)
        words = {tokenizer.convert_tokens_to_ids(word) for word in ("benzol", "toluol")}
        tag = tokenizer.convert_tokens_to_ids("<drug>")
        text = "ba benzol <drug>toluol de"
        (split,) = TextEncoder(tokenizer, SPLIT).encode([text])
        (parsed,) = TextEncoder(tokenizer, PARSE).encode([text])
        assert words <= {*split} and tag not in split
        assert words <= {*parsed} and parsed.count(tag) == 1
        assert tokenizer.decode(split, skip_special_tokens=True) == text


def test_a_text_that_spells_its_own_frame_does_not_get_it_twice():
    tokenizer = bos_tokenizer()
    text_format = TextFormat(tokenizer, (tokenizer.eos_token_id,), special_tokens=PARSE)
    table = TokenizeBatch(text_format)(pa.table({"text": ["ba de", "<s>ba de</s>", "ba</s>de"]}))
    plain, framed, divided = table["ids"].to_pylist()
    assert framed == plain and divided.count(tokenizer.eos_token_id) == 2
    assert table["spelled"].to_pylist() == [0, 2, 1]


def test_spelled_tokens_of_many_chunks_are_counted_at_once(monkeypatch):
    """Each chunk would have the pattern compiled."""
    columns = []
    count_substrings = pc.count_substring_regex

    def count(values, pattern):
        columns.append(values)
        return count_substrings(values, pattern=pattern)

    monkeypatch.setattr(pc, "count_substring_regex", count)
    encoder = TextEncoder(bos_tokenizer(), SPLIT)
    counts = encoder.count_spelled(pa.chunked_array([["ba <s>"], [], ["</s></s>", "de"]], pa.large_string()))
    assert counts.to_pylist() == [1, 2, 0]
    assert [type(values) for values in columns] == [pa.LargeStringArray]


@pytest.mark.parametrize(
    ("eos", "special", "template", "ends", "expected"),
    [
        ("<|im_end|>", ["<|endoftext|>"], make_template("<|im_end|>"), [], "<|endoftext|>"),
        ("<|im_end|>", ["<|endoftext|>"], None, [], "<|endoftext|>"),  # without a template
        ("<|eot_id|>", ["<|end_of_text|>"], make_template("<|eot_id|>"), [], "<|end_of_text|>"),
        ("<|eot|>", ["<eos>", "<end_of_turn>"], make_template("<end_of_turn>"), [], "<eos>"),
        ("<turn-end>", ["<doc-end>"], make_template("<turn-end>"), ["<turn-end>", "<doc-end>"], "<doc-end>"),
        ("<turn-end>", ["<x>"], make_template("<turn-end>"), ["<turn-end>"], "<turn-end>"),  # not known
        ("</s>", ["<|endoftext|>"], make_template("</s>"), [], "</s>"),  # Mistral: also that of pre-training
        ("<|endoftext|>", ["<|im_end|>"], make_template("<|im_end|>"), [], "<|endoftext|>"),  # a base model
        ("<stop>", ["<|endoftext|>"], None, [], "<stop>"),  # no chat: as it is
    ],
)
def test_the_separator_is_that_of_pre_training(eos, special, template, ends, expected):
    tokenizer = chat_tokenizer(eos, special=special, template=template)
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in ends]
    separator = choose_separator(tokenizer, model_ends=end_ids)
    assert tokenizer.convert_ids_to_tokens(list(separator.ids)) == [expected]
    assert separator.is_doubtful == (eos == expected == "<turn-end>")
    assert tokenizer.eos_token == eos


def test_a_separator_by_name_is_one_token_of_the_vocabulary():
    tokenizer = chat_tokenizer("<|im_end|>", special=["<|endoftext|>"])
    assert choose_separator(tokenizer, "none").ids == ()
    assert choose_separator(tokenizer, "<|im_end|>").ids == (tokenizer.eos_token_id,)
    with pytest.raises(
        ValueError, match=r"^domains.separator=<two tokens> is invalid: .* Allowed: auto, none"
    ):
        choose_separator(tokenizer, "<two tokens>")
    closed = eos_tokenizer()
    assert choose_separator(closed, "</s>").ids == choose_separator(closed).ids == ()
    conditions = make_text_format(tokenizer, TextOptions()).conditions
    assert conditions == {"separator": "<|endoftext|>"}
    assert make_text_format(bos_tokenizer(), TextOptions()).conditions == {}


@pytest.mark.parametrize("kind", PACKERS)
def test_each_row_begins_with_bos_and_no_token_is_lost(tmp_path, kind):
    tokenizer = bos_tokenizer()
    texts = make_prose(60)
    text_format = make_text_format(tokenizer, TextOptions(), is_causal=True)
    assert text_format.row_start == tokenizer.bos_token_id
    packed = packing.pack(
        write_corpus(tmp_path, texts),
        "train",
        format=text_format,
        length=16,
        name="a",
        cache=tmp_path,
        packing=kind,
    )
    rows = list_ids(packed)
    bos = tokenizer.bos_token_id
    assert all(row[0] == bos and 1 < len(row) <= 16 for row in rows)
    if kind == "concat":
        assert {len(row) for row in rows[:-1]} == {16}

    # Put together again without the inserted tokens, the pieces are the documents.
    documents = [[] for _ in texts]
    num_inserted = 0
    for row, numbers in zip(rows, list_documents(packed), strict=True):
        position = 0
        for number, tokens in itertools.groupby(numbers):
            piece = row[position : position + len(list(tokens))]
            # A row of "concat" has BOS at its start alone, other rows have it before each document.
            has_bos = kind != "concat" or position == 0
            position += len(piece)
            if documents[number] and has_bos:
                assert piece[0] == bos
                piece = piece[1:]
                num_inserted += 1
            documents[number] += piece
    expected = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert num_inserted and documents == expected

    sizes = packed.sizes()
    assert Causal().scorable(sizes).sum() == sum(map(len, documents)) == packed.facts["tokens"]
    assert packed.facts["rows_with_bos"] == len(rows)
    segments = 1 if sizes.documents is None else sizes.documents
    assert np.array_equal(Causal().scored(sizes), packed.row_lengths - segments)


def test_an_inserted_bos_is_of_the_document_that_it_begins(tmp_path):
    tokenizer = tokenizer_with_template("$A", bos_token="<s>", eos_token="</s>")
    text_format = make_text_format(tokenizer, TextOptions(bos_in_rows=True), is_causal=True)
    packed = packing.pack(
        write_corpus(tmp_path, make_prose(5, words=(1, 2))),
        "train",
        format=text_format,
        length=64,
        name="a",
        cache=tmp_path,
        packing="none",
    )
    assert packed.inserted.tolist() == [1] * 5
    assert [set(documents) for documents in list_documents(packed)] == [{0}, {1}, {2}, {3}, {4}]


def test_tokenizers_whose_rows_begin_with_bos():
    opened = bos_tokenizer()
    bare = bare_tokenizer()
    auto = TextOptions(bos_in_rows="auto")
    yes = TextOptions(bos_in_rows=True)
    no = TextOptions(bos_in_rows=False)
    assert make_text_format(opened, auto, is_causal=True, is_checkpoint=False).row_start is None
    assert make_text_format(opened, auto, is_causal=False).row_start is None
    assert make_text_format(opened, no, is_causal=True).row_start is None
    assert make_text_format(bare, auto, is_causal=True).row_start is None
    assert make_text_format(opened, yes, is_causal=True, is_checkpoint=False).row_start is not None

    # A tokenizer that has BOS but does not put it before texts, as GPT-2's.
    unframed = tokenizer_with_template("$A", bos_token="<s>", eos_token="</s>")
    assert make_text_format(unframed, auto, is_causal=True).row_start is None
    assert make_text_format(unframed, yes, is_causal=True).row_start == unframed.bos_token_id
    for tokenizer, is_causal in ((bare, True), (opened, False)):
        with pytest.raises(
            ValueError, match=r"^domains.bos_in_rows=true is invalid: .* Allowed: auto, false"
        ):
            make_text_format(tokenizer, yes, is_causal=is_causal)


def pack_texts(folder, texts, tokenizer, *, length=16, **options):
    text_format = make_text_format(tokenizer, TextOptions(**options))
    corpus = write_corpus(folder, texts)
    packed = packing.pack(corpus, "train", format=text_format, length=length, name="a", cache=folder)
    return packed, text_format


def test_unknown_tokens_are_counted_whatever_the_model_of_the_tokenizer(tmp_path):
    cases = {
        "wordpieces": (wordpiece_tokenizer(), ["ba q de q", "ba de"], 2 / 6),
        "word-level": (word_level(), ["red blue", "green <end>"], 2 / 4),
        "unigram": (unigram(), ["ab x", "ab"], 1 / 8),
        "bytes": (bos_tokenizer(), ["ba \u0e02", "<unk>"], 0),
        "slow": (ByT5Tokenizer(), ["\u0e02 ba"], 0),
    }
    for name, (tokenizer, texts, share) in cases.items():
        packed, _ = pack_texts(tmp_path / name, texts, tokenizer)
        assert compute_unknown_share(packed) == pytest.approx(share), name
    assert find_unknown_id(bos_tokenizer()) is None and find_unknown_id(CanineTokenizer()) is None


def test_the_log_has_unknown_and_special_tokens_and_rows_without_bos(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    texts = [f"{text} <mask> q\u0e02" for text in make_prose(30)]
    packed, text_format = pack_texts(tmp_path / "1", texts, wordpiece_tokenizer())
    report_texts({"law train": packed}, text_format, is_causal=False)
    record = caplog.records[-1]
    assert (
        record.levelname == "WARNING"
        and f"{compute_unknown_share(packed):.2%} of law train" in record.message
    )
    unreadable, _ = pack_texts(tmp_path / "2", ["\u0e02\u0e03", "\u0e04"], wordpiece_tokenizer())
    with pytest.raises(ValueError, match="has no token that the tokenizer .* knows: 100% of its tokens"):
        check_training_text("law", unreadable, text_format)
    check_training_text("law", packed, text_format)

    # Special tokens that texts spell, and rows that begin with BOS.
    opened, text_format = pack_texts(tmp_path / "3", texts, bos_tokenizer())
    caplog.clear()
    report_texts({"law train": opened}, text_format, is_causal=True)
    spelled, starts = [record.message for record in caplog.records]
    assert "30 in law train; split into ordinary tokens" in spelled
    rows_with_bos = [row for row in list_ids(opened) if row[0] == 0]
    percent = 100 * len(rows_with_bos) / len(opened)
    assert starts.startswith(f"{percent:.0f} % of rows begin with <s>")

    parsed, text_format = pack_texts(tmp_path / "4", texts, bos_tokenizer(), special_tokens=PARSE)
    caplog.clear()
    report_texts({"law train": parsed}, text_format, is_causal=False)
    assert "30 in law train; parsed as their ids" in caplog.records[0].message
    mask = bos_tokenizer().convert_tokens_to_ids("<mask>")
    assert sum(row.count(mask) for row in list_ids(parsed)) == 30


def test_tokens_around_a_text_are_found_by_a_tokenizer_without_latin_letters():
    assert find_frame(bengali(template="<s> $A")) == ([0], [])
    assert find_frame(bengali(template="$A </s>")) == ([], [1])
    assert find_frame(bengali(template="<s> $A </s>")) == ([0], [1])
    assert choose_separator(bengali(template="<s> $A")).ids == (1,)
