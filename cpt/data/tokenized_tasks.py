"""Supervised tasks as token ids: a row for each example, with a mask of its answer, and prompts.

A causal model's row is question and answer tokenised together, or apart where a token would span both; an
encoder-decoder's is the source, as its tokenizer frames it, and then the answer. Every answer ends in the end
of sequence. A chat is one row, or several where its template renders earlier turns differently later on."""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from datasets.arrow_writer import ArrowWriter
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.core.randomness import key, permute
from cpt.data.chats import Answer, ChatCounts, ChatEncoder, encode_within, group_into_sequences
from cpt.data.collate import Sizes
from cpt.data.corpus import Corpus
from cpt.data.packing import PADDING, Packed, find_padding_id
from cpt.data.separator import find_terminator
from cpt.data.sources.base import NONE, SPLIT, Encoding
from cpt.data.sources.chats import SYSTEM
from cpt.data.sources.examples import (
    ASSISTANT,
    SKIP_OPTION,
    USER,
    BadExampleError,
    BadExamples,
    Example,
    log_skipped,
    read_example,
)
from cpt.data.text_encoder import Frame, TextEncoder
from cpt.data.token_rows import ArrowRows
from cpt.data.tokenize import choose_id_type

log = logging.getLogger(__name__)
CACHE_VERSION = 5
ROWS_FILE, COUNTS_FILE = "examples.arrow", "counts.json"
TOO_LONG = "too many tokens"  # a kind of bad examples


@dataclass(frozen=True)
class EncodedExample:
    """The ids of an example, which of them are the answer, how many were cut of its question, and how many
    answers of a long chat are in no row."""

    ids: list[int]
    answer: list[bool]
    cut: int
    example: Example
    lost_answers: int = 0


@dataclass
class EncodingCounts:
    """What happened to the examples of a text, for the log and the report."""

    examples: int = 0
    cut: int = 0  # rows that were cut to the length
    lost_answers: int = 0  # of chats that are too long
    divided: int = 0  # chats that are several rows
    spelling: int = 0  # chats whose text spells a control token
    unused_keys: dict[str, int] = field(default_factory=dict)  # of chats, that the template does not print
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)  # BadExamples.facts

    def log(self, name: str, split: str, encoder: "Encoder") -> None:
        """Logs a line for each thing that happened."""
        text = f"{name}, {split}"
        if self.cut:
            lost = ""
            if self.lost_answers:
                lost = f"; left out: {count_noun(self.lost_answers, 'answer')} of long chats"
            log.info(
                "Truncating in %s %d of %s to model.max_seq_length=%d (domains.truncate=%s)%s",
                text,
                self.cut,
                count_noun(self.examples, "example"),
                encoder.length,
                encoder.encoding.truncate,
                lost,
            )
        if self.divided:
            log.info(
                "Splitting %d of %s of %s into a sequence for each answer: "
                "earlier turns are rendered or tokenized differently in later prompts",
                self.divided,
                count_noun(self.examples, "chat"),
                text,
            )
        if self.spelling:
            log.warning(
                "Spelling out control tokens as plain text in %d of %s of %s",
                self.spelling,
                count_noun(self.examples, "chat"),
                text,
            )
        if self.unused_keys:
            keys = ", ".join(f"{key} ({count})" for key, count in self.unused_keys.items())
            log.warning(
                "Leaving out keys of chats in %s that the chat template does not print: %s", text, keys
            )
        log_skipped(text, self.skipped)


@dataclass(frozen=True)
class TaskPrompt:
    """An example as a model is asked it. The ids of each choice and of the right answer follow those of the
    prompt. In an encoder-decoder the prompt is the encoder's, and the decoder writes the answer."""

    example: Example
    ids: list[int]
    choices: list[list[int]]
    reference: list[int]

    @property
    def about(self) -> str:
        """The text that is asked about, else all of the question; of a chat the user's last turn."""
        if self.example.turns:
            questions = [turn.content for turn in self.example.turns[:-1] if turn.role == USER]
            return questions[-1] if questions else ""
        source = self.example.source
        begin, end = self.example.text_span
        return source[begin:end] or source


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
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path} has no fast version, by which examples are "
                "cut. Allowed: another model, or domains.truncate=released"
            )

    @cached_property
    def chats(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self.encoding.date)

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """Encodes questions and answers, whose spelled special tokens stay text."""
        return TextEncoder(self.tokenizer, SPLIT)

    def encode(self, example: Example) -> EncodedExample:
        """The row of an example; the last one of a chat that is several rows."""
        return list(self.encode_all([example]))[-1]

    def encode_all(
        self,
        examples: Sequence[Example],
        *,
        bad: BadExamples | None = None,
        counts: ChatCounts | None = None,
    ) -> Iterator[EncodedExample]:
        """The rows of examples, in their order; adds to `counts` of chats. Raises BadExampleError for one
        that cannot be encoded, unless `bad` skips them."""
        bad = bad or BadExamples(is_skipping=False)
        # A tokenizer is faster with many texts at once than with one; chats are rendered one by one.
        pairs = [(example.source, example.target) for example in examples if not example.turns]
        tokenized = zip(self.ids_of([source for source, _ in pairs]), self.encode_pairs(pairs), strict=True)
        for example in examples:
            tokens = None if example.turns else next(tokenized)
            try:
                if tokens is None:
                    rows = self.encode_chat(example, self.encoding.scored_turns, counts)
                else:
                    rows = [self.encode_pair(example, *tokens)]
            except BadExampleError as error:
                bad.add(error)
                continue
            yield from rows

    def encode_pair(self, example: Example, question: list[int], joint_ids: list[int]) -> EncodedExample:
        """The row of a question and its answer, from the ids of the question and of both."""
        answer = self.answer_of(example.target, question, joint_ids)
        prompt, cut = self.fit(example, question, answer)
        marks = [False] * len(prompt) + [True] * len(answer)
        return EncodedExample(ids=prompt + answer, answer=marks, cut=cut, example=example)

    def encode_chat(
        self, example: Example, scored_turns: str, counts: ChatCounts | None = None
    ) -> list[EncodedExample]:
        """The rows of a chat: those answers share one of which each prompt begins with the previous one.
        Raises ValueError for an encoder-decoder."""
        if self.seq2seq:
            raise ValueError(f"example {example.id} is a chat, which an encoder-decoder does not take")
        rows = []
        for answers in group_into_sequences(self.scored_answers(example, scored_turns, counts)):
            rows.append(self.fit_chat(example, answers, scored_turns))
        return rows

    def scored_answers(
        self, example: Example, scored_turns: str, counts: ChatCounts | None = None
    ) -> list[Answer]:
        """The answers of a chat, or with `scored_turns` "last" those of its last answered turn."""
        answers = self.chats.answers(example, counts)
        if scored_turns == "last":
            return [answer for answer in answers if answer.turn == answers[-1].turn]
        return answers

    def fit_chat(self, example: Example, answers: Sequence[Answer], scored_turns: str) -> EncodedExample:
        """The row of some answers of a chat. The oldest exchanges are cut, then the last question's end."""
        part = replace(example, turns=example.turns[: answers[-1].turn + 1])
        ids, marks = self.chat_row(answers)
        # The template decides how many tokens a turn has, so the chat is rendered again after each cut.
        num_tokens = len(ids)
        num_answers = len(answers)
        while len(ids) > self.length:
            part = self.shorten_chat(part, num_tokens=len(ids))
            answers = group_into_sequences(self.scored_answers(part, scored_turns))[-1]
            ids, marks = self.chat_row(answers)
        return EncodedExample(
            ids=ids,
            answer=marks,
            cut=num_tokens - len(ids),
            example=example,
            lost_answers=num_answers - len(answers),
        )

    def chat_row(self, answers: Sequence[Answer]) -> tuple[list[int], list[bool]]:
        """The ids up to the end of the last answer, a special token, and which of them are answers."""
        ids = answers[-1].whole
        marks = [False] * len(ids)
        for answer in answers:
            begin = len(answer.prompt)
            end = len(answer.whole)
            marks[begin:end] = [True] * (end - begin)
        if ids[-1] in self.tokenizer.all_special_ids:
            return ids, marks
        end_token = self.tokenizer.eos_token_id
        if end_token is None:
            name = self.tokenizer.name_or_path
            raise ValueError(f"the tokenizer {name} has no token that ends an answer (eos)")
        return [*ids, end_token], [*marks, True]

    def shorten_chat(self, example: Example, *, num_tokens: int) -> Example:
        """A chat of too many tokens without its oldest exchange, or with the end of its only question cut.

        The result may still be too long: the caller calls until it fits, so each call makes the chat
        shorter. Raises BadExampleError where nothing is left to cut."""
        turns = example.turns
        first = count_system_turns(example)
        # Later exchanges begin where a user's turn follows another role's.
        for number in range(first + 1, len(turns)):
            if turns[number].role == USER and turns[number - 1].role != USER:
                return replace(example, turns=(*turns[:first], *turns[number:]))
        return self.cut_last_question(example, num_tokens=num_tokens)

    def cut_last_question(self, example: Example, *, num_tokens: int) -> Example:
        """A chat with one exchange of too many tokens, `num_tokens`: its question is cut at the end until the
        chat fits. Raises BadExampleError where the question has no more than these."""
        # turns[-1] is the answer, turns[-2] its question, unless that is the system message or another turn
        # of the assistant: these may not be cut.
        turns = list(example.turns)
        num_turns = len(turns) - count_system_turns(example)
        has_question = num_turns >= 2 and turns[-2].role != ASSISTANT
        question = turns[-2].content if has_question else ""

        num_over = num_tokens - self.length
        question_ids = self.tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
        if len(question_ids) <= num_over:
            token_count = count_noun(num_tokens, "token")
            raise BadExampleError(
                f"example {example.id} of {example.task}: its last exchange takes {token_count} where "
                f"{self.length} fit, and its question is too short to be cut by the difference. "
                f"Allowed: model.max_seq_length of at least {num_tokens}",
                TOO_LONG,
                num_tokens,
            )

        shorter = self.tokenizer.decode(question_ids[:-num_over], clean_up_tokenization_spaces=False)
        # A cut within a character leaves a replacement character.
        shorter = shorter.rstrip("\ufffd")
        # Some tokenizers return more text than there was.
        if len(shorter) >= len(question):
            shorter = question[:-1]
        turns[-2] = replace(turns[-2], content=shorter)
        return replace(example, turns=tuple(turns))

    def prompts(self, examples: Iterable[Example]) -> Iterator[TaskPrompt]:
        """The prompts of examples. Raises BadExampleError for one without, unless bad ones are skipped."""
        bad = BadExamples(is_skipping=self.encoding.on_bad_example == "skip")
        for example in examples:
            try:
                prompt = self.prompt(example)
            except BadExampleError as error:
                bad.add(error)
                continue
            yield prompt

    def prompt(self, example: Example) -> TaskPrompt:
        """The ids before the answer in the example's row, which are the same for each choice."""
        if example.turns:
            row = self.encode_chat(example, "last")[0]
            begin = row.answer.index(True)
            reference = row.ids[begin:]
            # What a model writes is compared with calls and thoughts, too, as the template renders them.
            if example.turns[-1].details:
                rendered_answer = self.tokenizer.decode(reference, skip_special_tokens=True).strip()
                example = replace(example, target=rendered_answer or example.target)
            return TaskPrompt(example=example, ids=row.ids[:begin], choices=[], reference=reference)

        (question,) = self.ids_of([example.source])
        texts = [*example.choices, example.target]
        joint_ids = self.encode_pairs([(example.source, text) for text in texts])
        answers = []
        for text, ids in zip(texts, joint_ids, strict=True):
            answers.append(self.answer_of(text, question, ids))

        *choices, reference = answers
        prompt, _ = self.fit(example, question, reference)
        return TaskPrompt(example=example, ids=prompt, choices=choices, reference=reference)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The ids of questions with their answers; none for an encoder-decoder, which reads them apart."""
        if self.seq2seq:
            return [[] for _ in pairs]
        return self.ids_of([" ".join(pair) for pair in pairs])

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of questions with the special tokens around them; those spelled out in a text stay text."""
        if not texts:
            return []
        encoded = self.text_encoder.encode(list(texts))
        if self.seq2seq:
            return encoded
        # The end of the frame follows the answer.
        return [ids[: len(ids) - len(self.frame.end)] for ids in encoded]

    @property
    def frame(self) -> Frame:
        return self.text_encoder.frame

    @cached_property
    def ending(self) -> list[int]:
        return self.frame.end or find_terminator(self.tokenizer)

    def answer_of(self, text: str, question: list[int], joint_ids: list[int]) -> list[int]:
        """The ids of the answer `text`, with the token that ends it.

        `joint_ids` are those of question and answer as one text: the answer's are those after the question's.
        Where one token is of both, the answer is encoded alone."""
        if self.seq2seq:
            ids = self.text_encoder.encode_target(text)
            return ids if self.frame.end else [*ids, *self.ending]
        # Not where a choice is measured without a question, or a token is of both.
        num_question = len(question)
        if question and joint_ids[:num_question] == question and len(joint_ids) > num_question:
            return [*joint_ids[num_question:], *self.ending]
        return [*encode_within(self.text_encoder.encode_body, f" {text}"), *self.ending]

    def fit(self, example: Example, question: list[int], answer: list[int]) -> tuple[list[int], int]:
        """The question's ids, cut so that every answer fits, and how many are cut. Raises BadExampleError
        where the instruction, the options and the answer are too long without any text."""
        room = self.length
        if self.seq2seq:  # the decoder has as much room for the answer
            if len(answer) > self.length:
                raise self.too_long_error(example, "its answer alone takes", num_tokens=len(answer))
        else:
            room -= max(len(answer), self.longest_choice(example.choices))

        num_over = len(question) - room
        if num_over <= 0:
            return question, 0
        if self.encoding.truncate == "released" and room > 0:
            return question[:room], num_over

        # Instruction and options stay: only the text that is asked about is cut, at its end or middle.
        begin, end = self.find_text_tokens(example, len(question))
        num_kept = end - begin - num_over  # of the text's tokens
        if num_kept < 0:
            num_fixed = len(question) - (end - begin) + self.length - room
            raise self.too_long_error(
                example, "its answer and what may not be cut take", num_tokens=num_fixed
            )
        num_head = num_kept if self.encoding.truncate == "tail" else (num_kept + 1) // 2
        cut_begin = begin + num_head
        return question[:cut_begin] + question[cut_begin + num_over :], num_over

    def longest_choice(self, choices: tuple[str, ...]) -> int:
        """Tokens of the longest of the choices; computed once for all examples of a task."""
        if choices not in self.longest:
            lengths = [len(self.answer_of(choice, [], [])) for choice in choices]
            self.longest[choices] = max(lengths, default=0)
        return self.longest[choices]

    def find_text_tokens(self, example: Example, num_ids: int) -> tuple[int, int]:
        """The positions (begin, end) of the tokens of the text that may be cut, among the first `num_ids` of
        the question; (0, 0) if no token is wholly within the text."""
        text_begin, text_end = example.text_span
        # A token that is partly outside belongs to the template, which may not be cut.
        positions = []
        for position, (begin, end) in enumerate(self.text_encoder.offsets(example.source)[:num_ids]):
            if text_begin <= begin < end <= text_end:
                positions.append(position)
        return (positions[0], positions[-1] + 1) if positions else (0, 0)

    def too_long_error(self, example: Example, problem: str, *, num_tokens: int) -> BadExampleError:
        """The error of an example that does not fit. `problem` ends in a verb whose object is the number of
        tokens that the example needs, like `its answer alone takes`."""
        token_count = count_noun(num_tokens, "token")
        return BadExampleError(
            f"model.max_seq_length={self.length} is invalid: in example {example.id} of {example.task} "
            f"{problem} {token_count}. Allowed: at least {num_tokens}, or a shorter domains/template=…",
            TOO_LONG,
            num_tokens,
        )


@dataclass(frozen=True)
class TokenizedTask(Packed):
    """Rows of one example each, in the order of the corpus; `bytes` are those of the answers."""

    rows: ArrowRows
    packing: str = NONE

    @cached_property
    def answer_tokens(self) -> np.ndarray:
        """Tokens of each answer with its end of sequence, [rows]."""
        return self.rows.column("answer_tokens").astype(np.int64)

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        return Sizes(
            text=self.text_tokens[rows], all=self.row_lengths[rows], answers=self.answer_tokens[rows]
        )

    def answers(self, rows: np.ndarray) -> np.ndarray:
        return self.rows.read("answers", rows).padded(self.length, 0).astype(bool)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The example of each token, [B, length] int64, -1 on padding."""
        is_token = np.arange(self.length) < self.row_lengths[rows][:, None]
        return np.where(is_token, np.asarray(rows)[:, None], PADDING)


def count_system_turns(example: Example) -> int:
    """1 for a chat that begins with a system message, which is never cut, else 0."""
    return 1 if example.turns[0].role == SYSTEM else 0


def make_row_features(tokenizer: PreTrainedTokenizerBase) -> Features:
    """The columns of rows of examples on disk."""
    return Features(
        {
            "ids": ListOf(Value(choose_id_type(tokenizer).name)),
            "answers": ListOf(Value("bool")),
            "text_tokens": Value("int32"),
            "answer_tokens": Value("int32"),
            "bytes": Value("int32"),
        }
    )


def write_examples(
    path: Path, rows: Iterable[EncodedExample], *, tokenizer: PreTrainedTokenizerBase
) -> EncodingCounts:
    """Writes encoded examples as an Arrow file; returns how many they are, and what was cut of them."""
    special = set(tokenizer.all_special_ids)
    counts = EncodingCounts()
    previous: Example | None = None
    num_rows = 0  # of the same example
    with ArrowWriter(path=str(path), features=make_row_features(tokenizer)) as writer:
        for row in rows:
            # The answers of a chat are rendered, so their text is what the scored tokens say.
            scored = [token for token, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]
            if row.example.turns:
                answer_text = tokenizer.decode(scored, skip_special_tokens=True)
            else:
                answer_text = row.example.target
            values = {
                "ids": row.ids,
                "answers": row.answer,
                "text_tokens": sum(token not in special for token in row.ids),
                "answer_tokens": len(scored),
                "bytes": len(answer_text.encode()),
            }
            writer.write(values)

            # The rows of a chat come one after another: the first counts it, the second that it is divided.
            num_rows = num_rows + 1 if row.example is previous else 1
            previous = row.example
            if num_rows == 1:
                counts.examples += 1
            elif num_rows == 2:
                counts.divided += 1
            if row.cut:
                counts.cut += 1
            counts.lost_answers += row.lost_answers
        writer.finalize()
    return counts


def open_examples(path: Path, tokenizer: PreTrainedTokenizerBase) -> TokenizedTask:
    """The encoded examples of a file of `write_examples`."""
    rows = ArrowRows(Dataset.from_file(str(path)))
    return TokenizedTask(
        rows=rows,
        length=int(rows.lengths.max()),
        pad=find_padding_id(tokenizer),
        documents=len(rows),
        bytes=int(rows.column("bytes").sum()),
    )


def encode_corpus(
    corpus: Corpus,
    split: str,
    *,
    encoder: Encoder,
    name: str,
    cache: Path,
    rows_digest: str,
    skip_option: str = SKIP_OPTION,
) -> TokenizedTask:
    """The rows of a split, made once for all runs with these examples, tokenizer and encoding; `rows_digest`
    is the key of what the tokenizer and its template make of them. Raises ValueError where no example of the
    split can be used, and for one that cannot, unless `skip_option` skips those."""
    options = [asdict(encoder.encoding), encoder.length, encoder.seq2seq]
    cache_key = digest(["examples", CACHE_VERSION, corpus.facts["digest"], split, rows_digest, options])

    def make(folder: Path) -> None:
        documents = corpus.documents(split)
        bad = BadExamples(is_skipping=encoder.encoding.on_bad_example == "skip", option=skip_option)
        chat_counts = ChatCounts()

        def rows() -> Iterator[EncodedExample]:
            for examples in read_batches(documents, title=f"tokenizing {name}"):
                yield from encoder.encode_all(examples, bad=bad, counts=chat_counts)

        try:
            counts = write_examples(folder / ROWS_FILE, rows(), tokenizer=encoder.tokenizer)
        except BadExampleError as error:
            if error.num_tokens is None:
                raise
            batches = read_batches(documents, title=f"finding the longest example of {name}")
            raise find_longest(batches, encoder, skip_option=skip_option) from error
        # Chats and bad examples are counted while the rows are made, one by one, so only here.
        if not counts.examples:
            raise bad.all_skipped(f"{name}, {split}")
        counts.spelling = chat_counts.num_spelling
        counts.unused_keys = dict(chat_counts.unused_keys)
        counts.skipped = bad.facts
        (folder / COUNTS_FILE).write_text(json.dumps(asdict(counts)))

    folder = make_once(cache / "packed" / f"{name}-{split}-{cache_key}", make=make)
    # Also for rows of an earlier run: cuts concern every run that trains on them.
    counts = EncodingCounts(**json.loads((folder / COUNTS_FILE).read_text()))
    if is_first_process():
        counts.log(name, split, encoder)
    return replace(open_examples(folder / ROWS_FILE, encoder.tokenizer), skipped=counts.skipped)


def read_batches(documents: Dataset, *, title: str) -> Iterator[list[Example]]:
    """The examples of some documents, a few at a time, with a progress bar of this title."""
    with tqdm(None, title, len(documents), leave=False, unit=" examples", disable=None) as bar:
        for batch in documents.iter(batch_size=16):
            yield list(map(read_example, batch["text"]))
            bar.update(len(batch["text"]))


def find_longest(
    batches: Iterable[Sequence[Example]], encoder: Encoder, *, skip_option: str
) -> BadExampleError:
    """The error of the longest example that does not fit; there is at least one."""
    bad = BadExamples(is_skipping=True)
    for examples in batches:
        for _ in encoder.encode_all(examples, bad=bad):
            pass
    return BadExampleError(f"{bad.describe_longest()} ({skip_option}=skip leaves them out)", TOO_LONG)


def read_examples(corpus: Corpus, split: str, *, max_examples: int | None = None) -> Iterator[Example]:
    """The examples of a split in their order; with `max_examples`, at most that many of them, drawn at random
    but always the same: a file may be sorted by its answers."""
    documents = corpus.documents(split)
    if max_examples is not None and max_examples < len(documents):
        drawn = permute(np.arange(max_examples), len(documents), stream=key("examples", split))
        documents = documents.select(np.sort(drawn))
    for batch in documents.iter(batch_size=16):
        yield from map(read_example, batch["text"])
