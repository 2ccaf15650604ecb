"""Examples as rows: exactly the answer is marked, for any tokenizer, and the question is never cut."""

import re
from dataclasses import replace

import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from cpt.data import tokenized_tasks, tokenizer_hash
from cpt.data.corpora import Corpora
from cpt.data.sources.base import Encoding
from cpt.data.sources.examples import Example, Turn, read_example, write_example
from cpt.data.text_encoder import TextEncoder
from cpt.data.text_format import TextFormat
from cpt.data.tokenized_tasks import Encoder
from tests.support.data_fixtures import wordpiece_tokenizer, write_corpus
from tests.support.task_fixtures import CHATML, MARKED, STYLES, chat, encoder, make_examples
from tests.support.tokenizer_kinds import bert_legacy, lower_words, merged_end, unigram, word_level

KINDS = {
    "unigram": lambda folder: unigram(),
    "word-level": lambda folder: word_level(),
    "lower-case": lambda folder: lower_words(),
    "merged": lambda folder: merged_end(),
    "wordpieces": lambda folder: wordpiece_tokenizer(),
    "bytes": lambda folder: ByT5Tokenizer(),
    "legacy": bert_legacy,
}


@pytest.fixture(scope="module", params=STYLES)
def tokenizer(request):
    return STYLES[request.param]()


@pytest.fixture
def chat_tokenizer():
    tokenizer = STYLES["opened"]()
    tokenizer.chat_template = CHATML
    return tokenizer


def answer_ids(row):
    return [token for token, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]


def question_ids(row):
    return [token for token, is_answer in zip(row.ids, row.answer, strict=True) if not is_answer]


def decode_text(tokenizer, ids):
    text_ids = [token for token in ids if token not in tokenizer.all_special_ids]
    return tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_what_is_marked_is_the_answer_and_its_end(tokenizer, seq2seq):
    examples = make_examples(40)
    rows = encoder(tokenizer, seq2seq=seq2seq).encode_all(examples)
    for example, row in zip(examples, rows, strict=True):
        answer = answer_ids(row)
        assert answer[-1] == tokenizer.eos_token_id and answer.count(tokenizer.eos_token_id) == 1
        assert decode_text(tokenizer, answer).strip() == example.target
        # Nothing before the first token of the answer is marked.
        question = row.ids[: row.answer.index(True)]
        assert not any(row.answer[: len(question)])
        assert decode_text(tokenizer, question).strip() == example.source

    long = replace(examples[0], target="tu " * 100, choices=())
    message = "max_seq_length=40 is invalid: in example e-0 of TC its answer.* Allowed: at least"
    with pytest.raises(ValueError, match=message) as error:
        encoder(tokenizer, length=40, seq2seq=seq2seq).encode(long)
    (num_tokens,) = re.findall(r"at least (\d+)", str(error.value))
    encoder(tokenizer, length=int(num_tokens), seq2seq=seq2seq).encode(long)
    with pytest.raises(ValueError, match="is invalid: in example"):
        encoder(tokenizer, length=int(num_tokens) - 1, seq2seq=seq2seq).encode(long)


def test_a_row_has_one_frame_and_released_code_cuts_the_question_itself(tokenizer):
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id
    examples = make_examples(20)
    for example in make_examples(3):
        examples.append(replace(example, source=f"<s></s> {example.source}", text_span=(0, 3)))
    for row in encoder(tokenizer).encode_all(examples):
        assert row.ids.count(eos) == 1
        if bos is not None and tokenizer("a")["input_ids"][0] == bos:
            assert row.ids[0] == bos and row.ids.count(bos) == 1

    (example,) = make_examples(1, words=(60, 60))
    row = encoder(tokenizer, length=70, truncate="released").encode(example)
    assert len(row.ids) <= 70 and "Answer:" not in decode_text(tokenizer, row.ids)


@pytest.mark.parametrize("truncate", ["tail", "middle"])
@pytest.mark.parametrize("seq2seq", [False, True])
def test_a_cut_example_keeps_its_question_and_its_whole_answer(tokenizer, truncate, seq2seq):
    examples = make_examples(20, words=(30, 60))
    full_rows = encoder(tokenizer, length=4000, seq2seq=seq2seq).encode_all(examples)
    cut_rows = encoder(tokenizer, length=75, truncate=truncate, seq2seq=seq2seq).encode_all(examples)
    for example, row, full in zip(examples, cut_rows, full_rows, strict=True):
        assert row.cut > 0 and answer_ids(row) == answer_ids(full)
        question = question_ids(row)
        if seq2seq:  # the answer is a sequence of its own
            assert len(question) == 75
        else:
            assert len(row.ids) <= 75

        text = decode_text(tokenizer, question).strip()
        begin, end = example.text_span
        assert text.startswith(example.source[:begin].strip()) and text.endswith("\nAnswer:")
        assert (example.source[end - 3 : end] in text) == (truncate == "middle")


def test_tokens_that_run_into_each_other_are_told_apart(monkeypatch):
    tokenizer = STYLES["opened"]()
    (example,) = make_examples(1)
    encode_pairs = Encoder.encode_pairs

    def drop_first_token(self, pairs):
        return [ids[1:] for ids in encode_pairs(self, pairs)]

    monkeypatch.setattr(Encoder, "encode_pairs", drop_first_token)
    answer = answer_ids(encoder(tokenizer).encode(example))
    assert decode_text(tokenizer, answer) == f" {example.target}"


@pytest.mark.parametrize("scored_turns", ["all", "last"])
def test_the_assistant_alone_is_marked_in_a_chat(chat_tokenizer, scored_turns):
    example = chat()
    example_encoder = encoder(chat_tokenizer, scored_turns=scored_turns, length=4000)
    row = example_encoder.encode(example)
    answers = [turn.content for turn in example.turns if turn.role == "assistant"]
    expected = answers if scored_turns == "all" else answers[-1:]
    text = chat_tokenizer.decode(answer_ids(row), clean_up_tokenization_spaces=False)
    assert text == "".join(f"{content}</s>" for content in expected)

    # The prompt ends where the last answer begins.
    num_last = row.answer[::-1].index(False)
    assert example_encoder.prompt(example).ids == row.ids[: len(row.ids) - num_last]
    chat_tokenizer.chat_template = MARKED
    assert encoder(chat_tokenizer, scored_turns=scored_turns, length=4000).encode(example) == row


def test_a_chat_that_cannot_be_rendered_is_refused_by_its_id(chat_tokenizer):
    chat_tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template.* chat-0"):
        encoder(chat_tokenizer).encode(chat())
    with pytest.raises(ValueError, match="example chat-0 is a chat, which an encoder-decoder"):
        encoder(chat_tokenizer, seq2seq=True).encode(chat())
    chat_tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="example chat-0 begins with the assistant"):
        encoder(chat_tokenizer).encode(replace(chat(), turns=(Turn("assistant", "yes"),)))


def test_a_long_chat_loses_its_oldest_exchanges_and_ends_in_its_answer(chat_tokenizer):
    for example in (chat(exchanges=6), chat(exchanges=1, words=(40, 50))):
        full = encoder(chat_tokenizer, length=4000).encode(example)
        has_one_exchange = len(example.turns) == 3
        # A single exchange cannot be left out: its question is cut.
        length = len(full.ids) - 30 if has_one_exchange else len(full.ids) // 2
        row = encoder(chat_tokenizer, length=length).encode(example)
        assert row.cut == len(full.ids) - len(row.ids) > 0
        text = chat_tokenizer.decode(row.ids, clean_up_tokenization_spaces=False)
        assert text.endswith(f"{example.target}</s>")
        if not has_one_exchange:
            assert example.turns[0].content in text
        assert read_example(write_example(example)) == example


def spell_tokens(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ").strip()


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_questions_answers_and_choices_do_not_inject_special_tokens(kind, seq2seq, tmp_path):
    tokenizer = KINDS[kind](tmp_path / "v")
    example_encoder = encoder(tokenizer, truncate="released", seq2seq=seq2seq)
    control = TextEncoder(tokenizer, "split").control_ids
    end = tokenizer.eos_token or tokenizer.sep_token
    if not tokenizer.eos_token:
        tokenizer.eos_token = end  # which ends answers

    def list_control_ids(text):
        """Those of the row, the choices and the right answer, where `text` is in each text."""
        example = Example("e", f"red {text} q", f"red {text}", "colors", (f"a {text}", f"red {text}"))
        prompt = example_encoder.prompt(example)
        control_ids = []
        for ids in (example_encoder.encode(example).ids, prompt.ids, *prompt.choices, prompt.reference):
            control_ids.append([token for token in ids if token in control])
        return control_ids

    for spelling in (end, f"red{end}red", end.upper(), f"{end} {end}"):
        assert list_control_ids(spelling) == list_control_ids("red"), spelling


def test_answers_of_slow_tokenizers_have_added_words_and_no_special_tokens():
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["benzol"])
    word = tokenizer.convert_tokens_to_ids("benzol")
    for seq2seq in (False, True):
        example_encoder = encoder(tokenizer, truncate="released", seq2seq=seq2seq)
        example = Example("e", "is it benzol?</s>", "a benzol </s>", "yes", ("benzol", "no"))
        prompt = example_encoder.prompt(example)
        row = example_encoder.encode(example)
        assert prompt.ids.count(word) == 1 == prompt.reference.count(word) == prompt.choices[0].count(word)
        assert row.ids.count(word) == 2
        assert prompt.reference.count(tokenizer.eos_token_id) == 1


def test_decoders_answers_have_the_frame_of_targets():
    tokenizer = unigram()
    template = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    switched = processors.TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )

    def set_frame(frame):
        tokenizer.backend_tokenizer.post_processor = frame

    tokenizer._switch_to_target_mode = lambda: set_frame(switched)  # as of tokenizers of several languages
    tokenizer._switch_to_input_mode = lambda: set_frame(template)
    answer = encoder(tokenizer, seq2seq=True).prompt(Example("e", "as", "a</s>b", "t")).reference
    assert answer[0] == tokenizer.pad_token_id and answer[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in answer[1:-1]
    assert spell_tokens(tokenizer, answer[1:-1]) == "a</s>b"


@pytest.mark.parametrize("truncate", ["tail", "middle"])
def test_a_cut_text_that_spells_special_tokens_keeps_what_is_around_it(truncate):
    tokenizer = unigram()
    text = "ab</s>s" * 12
    example = Example("e", f"bbb {text} sss", "as", "t", (), (4, 4 + len(text)))
    full = encoder(tokenizer, length=400).encode(example)
    row = encoder(tokenizer, length=60, truncate=truncate).encode(example)
    assert len(row.ids) == 60 and row.cut == len(full.ids) - 60
    assert row.ids.count(tokenizer.eos_token_id) == 1
    question = spell_tokens(tokenizer, row.ids[: row.answer.index(True)])
    assert question.startswith("bbb ab</s>s") and question.endswith(" sss")
    assert question.removesuffix(" sss").endswith("</s>s") == (truncate == "middle")


def test_the_key_of_rows_of_examples_has_the_libraries_of_slow_tokenizers(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path, [write_example(example) for example in make_examples(4)])
    texts = Corpora({"law": corpus}, tmp_path, encoding=Encoding(truncate="released", scored_turns="all"))
    make_once = tokenized_tasks.make_once

    def find_folder(tokenizer):
        """The folder of the cache that has the rows, named by their key."""
        folders = []

        def record_folder(folder, make):
            folders.append(folder)
            return make_once(folder, make=make)

        monkeypatch.setattr(tokenized_tasks, "make_once", record_folder)
        texts.packed("law", "train", format=TextFormat(tokenizer, ()), length=400)
        return folders[0]

    slow = ByT5Tokenizer()
    fast = STYLES["opened"]()
    slow_folder = find_folder(slow)
    fast_folder = find_folder(fast)
    monkeypatch.setattr(tokenizer_hash.metadata, "version", lambda name: "0.0")
    assert find_folder(slow) != slow_folder and find_folder(fast) == fast_folder
    fast.chat_template = CHATML
    assert find_folder(fast) != fast_folder
