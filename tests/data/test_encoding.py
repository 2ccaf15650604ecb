"""Examples as rows: exactly the answer is marked, for any tokenizer, and the question is never cut."""

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
from tests.support.task_fixtures import CHATML, MARKED, STYLES, chat, encoder, some_examples
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
def chatting():
    made = STYLES["opened"]()
    made.chat_template = CHATML
    return made


def marked(row, mark=True):
    return [each for each, own in zip(row.ids, row.answer, strict=True) if own == mark]


def plain(tokenizer, ids):
    kept = [each for each in ids if each not in tokenizer.all_special_ids]
    return tokenizer.decode(kept, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("seq2seq", [False, True])
def test_what_is_marked_is_the_answer_and_its_end(tokenizer, seq2seq):
    examples = some_examples(40)
    for example, row in zip(examples, encoder(tokenizer, seq2seq=seq2seq).encode_all(examples), strict=True):
        answer = marked(row)
        assert answer[-1] == tokenizer.eos_token_id and answer.count(tokenizer.eos_token_id) == 1
        assert plain(tokenizer, answer).strip() == example.target
        before = row.ids[: row.answer.index(True)]
        assert not any(row.answer[: len(before)]) and plain(tokenizer, before).strip() == example.source
    with pytest.raises(ValueError, match="max_seq_length=40 is invalid: in example e-0 of TC its answer"):
        long = replace(examples[0], target="tu " * 100, choices=())
        encoder(tokenizer, length=40, seq2seq=seq2seq).encode(long)


def test_a_row_has_one_frame_and_released_code_cuts_the_question_itself(tokenizer):
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    spelled = [replace(each, source=f"<s></s> {each.source}", text=(0, 3)) for each in some_examples(3)]
    for row in encoder(tokenizer).encode_all(some_examples(20) + spelled):
        assert row.ids.count(eos) == 1
        if bos is not None and tokenizer("a")["input_ids"][0] == bos:
            assert row.ids[0] == bos and row.ids.count(bos) == 1
    (example,) = some_examples(1, words=(60, 60))
    row = encoder(tokenizer, length=70, truncate="released").encode(example)
    assert len(row.ids) <= 70 and "Answer:" not in plain(tokenizer, row.ids)


@pytest.mark.parametrize("truncate", ["tail", "middle"])
@pytest.mark.parametrize("seq2seq", [False, True])
def test_a_cut_example_keeps_its_question_and_its_whole_answer(tokenizer, truncate, seq2seq):
    examples, length = some_examples(20, words=(30, 60)), 75
    whole = encoder(tokenizer, length=4000, seq2seq=seq2seq).encode_all(examples)
    cut = encoder(tokenizer, length=length, truncate=truncate, seq2seq=seq2seq).encode_all(examples)
    for example, row, full in zip(examples, cut, whole, strict=True):
        assert row.cut > 0 and marked(row) == marked(full)
        assert len(marked(row, False)) == length if seq2seq else len(row.ids) <= length
        text = plain(tokenizer, marked(row, False)).strip()
        assert text.startswith(example.source[: example.text[0]].strip()) and text.endswith("\nAnswer:")
        assert (example.source[example.text[1] - 3 : example.text[1]] in text) == (truncate == "middle")


def test_tokens_that_run_into_each_other_are_told_apart(monkeypatch):
    tokenizer, (example,) = STYLES["opened"](), some_examples(1)
    joined = Encoder.together
    monkeypatch.setattr(Encoder, "together", lambda self, pairs: [ids[1:] for ids in joined(self, pairs)])
    assert plain(tokenizer, marked(encoder(tokenizer).encode(example))) == f" {example.target}"


@pytest.mark.parametrize("scored_turns", ["all", "last"])
def test_the_assistant_alone_is_marked_in_a_chat(chatting, scored_turns):
    example, made = chat(), encoder(chatting, scored_turns=scored_turns, length=4000)
    row = made.encode(example)
    answers = [turn.content for turn in example.turns if turn.role == "assistant"]
    wanted = answers if scored_turns == "all" else answers[-1:]
    told = chatting.decode(marked(row), clean_up_tokenization_spaces=False)
    assert told == "".join(f"{content}</s>" for content in wanted)
    trailing = next(at for at, mark in enumerate(reversed(row.answer)) if not mark)
    assert made.prompt(example).ids == row.ids[: len(row.ids) - trailing]
    chatting.chat_template = MARKED
    assert encoder(chatting, scored_turns=scored_turns, length=4000).encode(example) == row


def test_a_chat_that_cannot_be_rendered_is_refused_by_its_id(chatting):
    chatting.chat_template = None
    with pytest.raises(ValueError, match="has no chat template.* chat-0"):
        encoder(chatting).encode(chat())
    with pytest.raises(ValueError, match="example chat-0 is a chat, which a model with two stacks"):
        encoder(chatting, seq2seq=True).encode(chat())
    chatting.chat_template = CHATML
    with pytest.raises(ValueError, match="example chat-0 begins with the assistant"):
        encoder(chatting).encode(replace(chat(), turns=(Turn("assistant", "yes"),)))


def test_a_long_chat_loses_its_oldest_exchanges_and_ends_in_its_answer(chatting):
    for example, drop in ((chat(exchanges=6), None), (chat(exchanges=1, words=(40, 50)), 30)):
        whole = encoder(chatting, length=4000).encode(example)
        room = len(whole.ids) - drop if drop else len(whole.ids) // 2
        row = encoder(chatting, length=room).encode(example)
        assert row.cut == len(whole.ids) - len(row.ids) > 0
        end = chatting.decode(row.ids, clean_up_tokenization_spaces=False)
        assert end.endswith(f"{example.target}</s>") and (drop or example.turns[0].content in end)
        assert read_example(write_example(example)) == example


def spelled_by(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids)).replace("▁", " ").strip()


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_questions_answers_and_choices_do_not_inject_special_tokens(kind, seq2seq, tmp_path):
    tokenizer = KINDS[kind](tmp_path / "v")
    encode = encoder(tokenizer, truncate="released", seq2seq=seq2seq)
    control = TextEncoder(tokenizer, "split").control_ids
    end = tokenizer.eos_token or tokenizer.sep_token
    if not tokenizer.eos_token:
        tokenizer.eos_token = end  # which ends answers

    def special_ids(text):
        """Those of the row, the choices and the right answer, where `text` is in each text."""
        example = Example("e", f"red {text} q", f"red {text}", "colors", (f"a {text}", f"red {text}"))
        prompt = encode.prompt(example)
        parts = [encode.encode(example).ids, prompt.ids, *prompt.choices, prompt.reference]
        return [[token for token in part if token in control] for part in parts]

    for spelled in (end, f"red{end}red", end.upper(), f"{end} {end}"):
        assert special_ids(spelled) == special_ids("red"), spelled


def test_answers_of_slow_tokenizers_have_added_words_and_no_special_tokens():
    tokenizer = ByT5Tokenizer()
    tokenizer.add_tokens(["benzol"])
    word = tokenizer.convert_tokens_to_ids("benzol")
    for seq2seq in (False, True):
        encode = encoder(tokenizer, truncate="released", seq2seq=seq2seq)
        example = Example("e", "is it benzol?</s>", "a benzol </s>", "yes", ("benzol", "no"))
        prompt = encode.prompt(example)
        row = encode.encode(example)
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
    assert spelled_by(tokenizer, answer[1:-1]) == "a</s>b"


@pytest.mark.parametrize("truncate", ["tail", "middle"])
def test_a_cut_text_that_spells_special_tokens_keeps_what_is_around_it(truncate):
    tokenizer = unigram()
    text = "ab</s>s" * 12
    example = Example("e", f"bbb {text} sss", "as", "t", (), (4, 4 + len(text)))
    whole = encoder(tokenizer, length=400).encode(example)
    row = encoder(tokenizer, length=60, truncate=truncate).encode(example)
    assert len(row.ids) == 60 and row.cut == len(whole.ids) - 60
    assert row.ids.count(tokenizer.eos_token_id) == 1
    question = spelled_by(tokenizer, row.ids[: row.answer.index(True)])
    assert question.startswith("bbb ab</s>s") and question.endswith(" sss")
    assert question.removesuffix(" sss").endswith("</s>s") == (truncate == "middle")


def test_the_key_of_rows_of_examples_has_the_libraries_of_slow_tokenizers(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path, [write_example(each) for each in some_examples(4)])
    texts = Corpora({"law": corpus}, tmp_path, encoding=Encoding(truncate="released", scored_turns="all"))
    made_by = tokenized_tasks.make_once

    def folder_of(tokenizer):
        folders = []

        def make_once(folder, make):
            folders.append(folder)
            return made_by(folder, make=make)

        monkeypatch.setattr(tokenized_tasks, "make_once", make_once)
        texts.packed("law", "train", format=TextFormat(tokenizer, ()), length=400)
        return folders[0]

    tokenizers = (ByT5Tokenizer(), STYLES["opened"]())
    before = [folder_of(tokenizer) for tokenizer in tokenizers]
    monkeypatch.setattr(tokenizer_hash.metadata, "version", lambda name: "0.0")
    slow, fast = [folder_of(tokenizer) for tokenizer in tokenizers]
    assert slow != before[0] and fast == before[1]
    tokenizers[1].chat_template = CHATML
    assert folder_of(tokenizers[1]) != fast
