"""Supervised tasks as token ids: a row for each example, with a mask of its answer, and prompts.

A causal model's row is question and answer tokenised together; an encoder-decoder's is the source, as its
tokenizer frames it, and then the answer. Every answer ends in the end of sequence."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.randomness import key, shuffle
from cpt.data.collate import Sizes
from cpt.data.corpus import Corpus
from cpt.data.packing import PADDING, Packed, frame_of, padding_id, terminator
from cpt.data.sources.base import ASSISTANT, NONE, USER, Encoding, Example, read_example

log = logging.getLogger(__name__)
CACHE_VERSION, ROWS_FILE = 2, "rows.arrow"
ROW_FEATURES = {
    **{name: ListOf(Value("int32")) for name in ("ids", "answers")},
    **{name: Value("int32") for name in ("text_tokens", "answer_tokens", "lengths", "bytes")},
}


@dataclass(frozen=True)
class EncodedExample:
    """The ids of an example, which of them are the answer, and how many were cut of its question."""

    ids: list[int]
    answer: list[bool]
    cut: int


@dataclass(frozen=True)
class TaskPrompt:
    """An example as a model is asked it. The ids of each choice and of the right answer follow those of the
    prompt; of an encoder-decoder the prompt is the encoder's, and the decoder writes the answer."""

    example: Example
    ids: list[int]
    choices: list[list[int]]
    reference: list[int]

    @property
    def about(self) -> str:
        """The text that is asked about, else all of the question; of a chat the user's last turn."""
        said = (text for role, text in reversed(self.example.turns[:-1]) if role == USER)
        source = self.example.source
        return next(said, "") if self.example.turns else source[slice(*self.example.text)] or source


@dataclass(frozen=True)
class Encoder:
    """Tokenizes examples for a model of `length` tokens, of an encoder-decoder (`seq2seq`) in each of the
    two. Raises ValueError for a tokenizer that does not say what it cuts, and, with the example's id, where
    what may not be cut does not fit."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    encoding: Encoding
    seq2seq: bool
    longest: dict[tuple[str, ...], int] = field(default_factory=dict)  # choice in tokens, by the choices

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast and self.encoding.truncate != "released":
            told = (
                f"the tokenizer {self.tokenizer.name_or_path} has no fast version, by which examples are cut"
            )
            raise ValueError(f"{told}. Allowed: another model, or domains.truncate=released")

    def encode(self, example: Example) -> EncodedExample:
        return next(self.encode_all([example]))

    def encode_all(self, examples: Sequence[Example]) -> Iterator[EncodedExample]:
        pairs = [(example.source, example.target) for example in examples if not example.turns]
        tokenized = zip(self.ids_of([source for source, _ in pairs]), self.together(pairs), strict=True)
        for example in examples:
            if example.turns:
                yield self.encode_chat(example, self.encoding.scored_turns)
            else:
                question, whole = next(tokenized)
                answer = self.answer_of(example.target, question, whole)
                prompt, cut = self.fit(example, question, answer)
                yield EncodedExample(prompt + answer, [False] * len(prompt) + [True] * len(answer), cut)

    def encode_chat(self, example: Example, scored_turns: str) -> EncodedExample:
        """The row of a chat. Cut are the oldest exchanges, then the end of the last question."""
        if self.seq2seq:
            raise ValueError(f"example {example.id} is a chat, which a model with two stacks does not take")
        ids, marks = render_chat(example, self.tokenizer)
        whole = len(ids)
        while (over := len(ids) - self.length) > 0:
            turns = list(example.turns)
            first = 1 if turns[0][0] == "system" else 0
            answers = [at for at, (role, _) in enumerate(turns) if role == ASSISTANT]
            question = "" if len(turns) - first < 2 else turns[-2][1]
            words = self.tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
            if len(answers) > 1:
                del turns[first : answers[0] + 1]
            elif len(words) > over:
                kept = self.tokenizer.decode(words[:-over], clean_up_tokenization_spaces=False)
                kept = kept.rstrip("\ufffd")
                turns[-2] = (turns[-2][0], kept if len(kept) < len(question) else question[:-1])
            else:
                told = f"example {example.id} of {example.task}: its last answer and what may not be cut "
                raise ValueError(f"{told}take {len(ids)} tokens. Allowed: model.max_seq_length={self.length}")
            example = replace(example, turns=tuple(turns))
            ids, marks = render_chat(example, self.tokenizer)
        if scored_turns == "last":
            last = max(at for at in range(len(marks)) if marks[at] and not (at and marks[at - 1]))
            marks = [mark and at >= last for at, mark in enumerate(marks)]
        return EncodedExample(ids, marks, whole - len(ids))

    def prompt(self, example: Example) -> TaskPrompt:
        """The ids before the answer in the example's row, which are the same for each choice."""
        if example.turns:
            row = self.encode_chat(example, "last")
            begin = row.answer.index(True)
            return TaskPrompt(example, row.ids[:begin], [], row.ids[begin:])
        (question,) = self.ids_of([example.source])
        texts = [*example.choices, example.target]
        wholes = self.together([(example.source, text) for text in texts])
        *choices, reference = (
            self.answer_of(text, question, whole) for text, whole in zip(texts, wholes, strict=True)
        )
        return TaskPrompt(example, self.fit(example, question, reference)[0], choices, reference)

    def together(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The ids of questions with their answers; none for an encoder-decoder, which reads them apart."""
        return [[]] * len(pairs) if self.seq2seq else self.ids_of([" ".join(pair) for pair in pairs])

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of questions with the special tokens around them; those spelled out in a text stay text."""
        if not texts:
            return []
        how = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
        encoded = self.tokenizer(list(texts), **how)["input_ids"]
        return encoded if self.seq2seq else [ids[: len(ids) - len(self.frame[1])] for ids in encoded]

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        return frame_of(self.tokenizer)

    @cached_property
    def ending(self) -> list[int]:
        return self.frame[1] or terminator(self.tokenizer)

    def answer_of(self, text: str, question: list[int], whole: list[int]) -> list[int]:
        """The ids of an answer: what follows the question in `whole`; on its own where a token spans both."""
        if self.seq2seq:
            ids = self.tokenizer(text_target=text, split_special_tokens=True, verbose=False)["input_ids"]
            return list(ids) if self.frame[1] else [*ids, *self.ending]
        if question and whole[: len(question)] == question and len(whole) > len(question):
            return [*whole[len(question) :], *self.ending]
        how = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return [*self.tokenizer(f" {text}", **how)["input_ids"], *self.ending]

    def fit(self, example: Example, question: list[int], answer: list[int]) -> tuple[list[int], int]:
        """The question's ids, cut so that every answer fits, and how many are cut."""
        if (longest := self.longest.get(example.choices)) is None:
            lengths = (len(self.answer_of(each, [], [])) for each in example.choices)
            longest = self.longest[example.choices] = max(lengths, default=0)
        room = self.length - (0 if self.seq2seq else max(len(answer), longest))
        over, needed = len(question) - room, ""
        if self.seq2seq and len(answer) > self.length:
            needed = f"its answer alone takes {len(answer)} tokens"
        elif over <= 0:
            return question, 0
        elif self.encoding.truncate == "released" and room > 0:
            return question[:room], over
        else:
            how = {"split_special_tokens": True, "return_offsets_mapping": True, "verbose": False}
            offsets = self.tokenizer(example.source, **how)["offset_mapping"][: len(question)]
            first, last = example.text
            inside = [at for at, (start, stop) in enumerate(offsets) if first <= start < stop <= last]
            begin, end = (inside[0], inside[-1] + 1) if inside else (0, 0)  # the text among the ids
            kept = end - begin - over
            if kept >= 0:
                head = kept if self.encoding.truncate == "tail" else (kept + 1) // 2
                return question[: begin + head] + question[begin + head + over :], over
            tokens = len(question) - (end - begin) + self.length - room
            needed = f"its answer and what may not be cut take {tokens} tokens"
        told = f"model.max_seq_length={self.length} is invalid: in example {example.id} of {example.task}"
        raise ValueError(f"{told} {needed}. Allowed: a larger one, or a shorter domains/template=…")


@dataclass(frozen=True)
class TokenizedTask(Packed):
    """Rows of one example each, in the order of the corpus; `bytes` are those of the answers."""

    packing: str = NONE

    @cached_property
    def answer_tokens(self) -> np.ndarray:
        """Tokens of each answer with its end of sequence, [rows]."""
        return self.column("answer_tokens").astype(np.int64)

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], self.answer_tokens[rows])

    def answers(self, rows: np.ndarray) -> np.ndarray:
        return self.table(rows, "answers", 0).astype(bool)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The example of each token, [B, length] int64, -1 on padding."""
        present = np.arange(self.length) < self.row_lengths[rows][:, None]
        return np.where(present, np.asarray(rows)[:, None], PADDING)


def write_examples(
    path: Path, pairs: Iterable[tuple[EncodedExample, Example]], *, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """Writes encoded examples as an Arrow file; returns how many, and of how many the question was cut."""
    special, count, cut = set(tokenizer.all_special_ids), 0, 0
    with ArrowWriter(path=str(path), features=Features(ROW_FEATURES)) as writer:
        for row, example in pairs:
            answers, text = [int(each) for each in row.answer], sum(each not in special for each in row.ids)
            scored = [each for each, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]
            said = tokenizer.decode(scored, skip_special_tokens=True) if example.turns else example.target
            values = (row.ids, answers, text, sum(answers), len(row.ids), len(said.encode()))
            writer.write(dict(zip(ROW_FEATURES, values, strict=True)))
            count, cut = count + 1, cut + (row.cut > 0)
        writer.finalize()
    return count, cut


def open_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenizedTask:
    rows = Dataset.from_file(str(path))
    text = TokenizedTask(rows, 0, padding_id(tokenizer), len(rows), 0)
    return replace(text, length=int(text.row_lengths.max()), bytes=int(text.column("bytes").sum()))


def encode_corpus(
    corpus: Corpus, split: str, *, encoder: Encoder, name: str, cache: Path, tokenizer_digest: str
) -> TokenizedTask:
    """The rows of a split, made once for all runs with these examples, tokenizer and encoding."""
    options = [vars(encoder.encoding), encoder.length, encoder.seq2seq]
    made_of = ["examples", CACHE_VERSION, corpus.facts["digest"], split, tokenizer_digest, options]

    def make(folder: Path) -> None:
        documents = corpus.documents(split)
        batches = ([*map(read_example, few["text"])] for few in documents.iter(batch_size=16))
        pairs = (pair for batch in batches for pair in zip(encoder.encode_all(batch), batch, strict=True))
        bar = tqdm(pairs, f"tokenising {name}", len(documents), leave=False, unit=" examples", disable=None)
        count, cut = write_examples(folder / ROWS_FILE, bar, tokenizer=encoder.tokenizer)
        if cut:
            log.info(
                "Truncating in %s, %s %d of %d examples to model.max_seq_length=%d (domains.truncate=%s)",
                *(name, split, cut, count, encoder.length, encoder.encoding.truncate),
            )

    folder = make_once(cache / "packed" / f"{name}-{split}-{digest(made_of)}", make=make)
    return open_examples(folder / ROWS_FILE, encoder.tokenizer)


def read_examples(corpus: Corpus, split: str, *, most: int | None = None) -> Iterator[Example]:
    """The examples of a split in their order; with `most`, that many of them, drawn at random but always the
    same: a file may be sorted by its answers."""
    documents = corpus.documents(split)
    if most is not None and most < len(documents):
        drawn = shuffle(np.arange(most), len(documents), stream=key("examples", split))
        documents = documents.select(np.sort(drawn))
    batches = documents.iter(batch_size=16)
    return (read_example(text) for few in batches for text in few["text"])


def render_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """The ids of a chat up to the end of its last answer, a special token, and which are the assistant's: as
    `{% generation %}` says, else what the chat with an answer adds to the one up to where it begins."""
    template, name = tokenizer.chat_template, tokenizer.name_or_path
    if not template:
        told = f"the tokenizer {name} has no chat template, and example {example.id} is a chat"
        raise ValueError(f"{told}. Allowed: the tokenizer of an instruction-tuned model")
    if spelled := next((s for s in tokenizer.all_special_tokens for _, t in example.turns if s in t), None):
        told = f"example {example.id}: a turn has {spelled}, a control token of the tokenizer {name}"
        raise ValueError(f"{told}. Allowed: text without it")
    turns = [{"role": role, "content": content} for role, content in example.turns]

    def render(count: int, **how: Any) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, **how))

    try:
        if "{% generation %}" in str(template).replace("{%-", "{%").replace("-%}", "%}"):
            how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            given = tokenizer.apply_chat_template(turns, **how)
            ids, marks = list(given["input_ids"]), [bool(mark) for mark in given["assistant_masks"]]
        else:
            text, spans = render(len(turns)), []
            if turns[0]["role"] == ASSISTANT:
                told = f"example {example.id} begins with the {ASSISTANT}, as no prompt of {name} does"
                raise ValueError(f"{told}. Allowed: a first turn of the {USER}")
            for number in (at for at, turn in enumerate(turns) if turn["role"] == ASSISTANT):
                before, after = render(number, add_generation_prompt=True), render(number + 1)
                if not (after.startswith(before) and text.startswith(after.rstrip())):
                    told = f"the chat template of {name} changes earlier turns (in example {example.id})"
                    raise ValueError(f"{told}. Allowed: one that only appends, or has {{% generation %}}")
                spans.append((len(before), len(after.rstrip())))
            given = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            places = [(first, last, first < last) for first, last in given["offset_mapping"]]
            marks = [some and any(begin <= a and b <= end for begin, end in spans) for a, b, some in places]
            ids = list(given["input_ids"])
    except TemplateError as error:
        told = f"the chat template of {name} does not take the turns of example {example.id}: {error}"
        raise ValueError(f"{told}. Allowed: roles that it knows") from error
    if True not in marks:
        told = f"example {example.id}: the chat template of {name} marks no token as the {ASSISTANT}'s"
        raise ValueError(f"{told}. Allowed: answers that are not empty")
    end = len(marks) - marks[::-1].index(True)
    ids, marks = ids[:end], marks[:end]
    if ids[-1] not in tokenizer.all_special_ids:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {name} has no token that ends an answer (eos)")
        ids, marks = [*ids, tokenizer.eos_token_id], [*marks, True]
    return ids, marks
