"""Examples as rows of token ids, one row each, of which the answer's tokens are marked.

A causal model's row is the question and the answer, tokenised together; a model with two stacks has the
source, as the tokenizer frames it, and behind it the answer. Every answer ends in the end of the sequence."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from cpt.data.chats import encode_chat, split_chat
from cpt.data.examples import Example
from cpt.data.packing import frame_of, terminator
from cpt.data.sources.base import Encoding


@dataclass(frozen=True)
class Encoded:
    """The row of an example: the ids, which of them are the answer, and how many were cut of its question."""

    ids: list[int]
    answer: list[bool]
    cut: int


@dataclass(frozen=True)
class Encoder:
    """How a tokenizer makes rows of examples, for a model of `length` tokens: of a causal one these hold
    question and answer, of a `seq2seq` one either of the two."""

    tokenizer: PreTrainedTokenizerBase
    length: int
    encoding: Encoding
    seq2seq: bool
    lengths: dict[tuple[str, ...], int] = field(default_factory=dict)  # of choices that were met

    def encode(self, example: Example) -> Encoded:
        """Raises ValueError, which names the example, where what may not be cut does not fit."""
        return next(self.encode_all([example]))

    def encode_all(self, examples: Sequence[Example]) -> Iterator[Encoded]:
        """The rows of examples, in their order."""
        plain = [example for example in examples if not example.turns]
        questions = iter(self.ids_of([example.source for example in plain]))
        wholes = iter(self.together([(example.source, example.target) for example in plain]))
        for example in examples:
            if example.turns:
                yield self.encode_turns(example)
            else:
                question, whole = next(questions), next(wholes)
                answer = self.answer_of(example.target, question, whole)
                prompt, cut = self.fit(example, question, answer)
                yield Encoded(prompt + answer, [False] * len(prompt) + [True] * len(answer), cut)

    def encode_turns(self, example: Example) -> Encoded:
        self.refuse_chat(example)
        return Encoded(*encode_chat(example, self.tokenizer, length=self.length, encoding=self.encoding))

    def prompt(self, example: Example) -> list[int]:
        """The ids that an answer is written behind: what stands before the answer in the example's row,
        whichever of its choices that is."""
        if example.turns:
            return self.split_turns(example)[0]
        question = self.ids_of([example.source])[0]
        return self.fit(example, question, self.answers(example, [example.target])[0])[0]

    def reference(self, example: Example) -> list[int]:
        """The ids of the right answer, as they stand in the example's row, with what ends them."""
        if example.turns:
            return self.split_turns(example)[1]
        return self.answers(example, [example.target])[0]

    def split_turns(self, example: Example) -> tuple[list[int], list[int]]:
        self.refuse_chat(example)
        return split_chat(example, self.tokenizer, length=self.length)

    def answers(self, example: Example, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts as answers to an example that is no chat, each with the end of the sequence."""
        question = self.ids_of([example.source])[0]
        wholes = self.together([(example.source, text) for text in texts])
        return [self.answer_of(text, question, whole) for text, whole in zip(texts, wholes, strict=True)]

    def together(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The ids of questions with their answers; nothing for a model that reads them apart."""
        return (
            [[] for _ in pairs] if self.seq2seq else self.ids_of([f"{one} {other}" for one, other in pairs])
        )

    def refuse_chat(self, example: Example) -> None:
        if self.seq2seq:
            raise ValueError(
                f"example {example.id} is a chat, which a model with two stacks does not take; allowed: a "
                "causal model"
            )

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of questions, with what the tokenizer puts around them; special tokens that are spelled out
        stay text."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), split_special_tokens=True, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded if self.seq2seq else [ids[: len(ids) - len(self.frame[1])] for ids in encoded]

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and behind a text."""
        return frame_of(self.tokenizer)

    @cached_property
    def ending(self) -> list[int]:
        """What ends an answer."""
        return self.frame[1] or terminator(self.tokenizer)

    def answer_of(self, text: str, question: list[int], whole: list[int]) -> list[int]:
        """The ids of an answer: of the two tokenised together what follows the question; where their
        tokens run into each other, the answer tokenised for itself."""
        if self.seq2seq:
            ids = self.tokenizer(text_target=text, split_special_tokens=True, verbose=False)["input_ids"]
            return list(ids) if self.frame[1] else [*ids, *self.ending]
        if question and whole[: len(question)] == question and len(whole) > len(question):
            return [*whole[len(question) :], *self.ending]
        apart = self.tokenizer(
            f" {text}", add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]
        return [*apart, *self.ending]

    def fit(self, example: Example, question: list[int], answer: list[int]) -> tuple[list[int], int]:
        """The question's ids, cut so that every answer fits, and how many are cut."""
        room = self.length - (0 if self.seq2seq else max(len(answer), self.longest(example)))
        if self.seq2seq and len(answer) > self.length:
            raise too_long(example, f"its answer alone takes {len(answer)} tokens", self.length)
        over = len(question) - room
        if over <= 0:
            return question, 0
        if self.encoding.truncate == "released" and room > 0:
            return question[:room], over
        begin, end = self.span(example, len(question))
        if end - begin < over:
            needed = len(question) - (end - begin) + self.length - room
            raise too_long(example, f"its answer and what may not be cut take {needed} tokens", self.length)
        kept = end - begin - over
        head = kept if self.encoding.truncate == "tail" else (kept + 1) // 2
        return question[: begin + head] + question[begin + head + over :], over

    def longest(self, example: Example) -> int:
        """Tokens of the longest choice as an answer, so that no choice changes what is cut."""
        if example.choices not in self.lengths:
            lengths = (len(self.answer_of(each, [], [])) for each in example.choices)
            self.lengths[example.choices] = max(lengths, default=0)
        return self.lengths[example.choices]

    def span(self, example: Example, count: int) -> tuple[int, int]:
        """The places of the ids, of `count`, that are the example's text."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"example {example.id} is too long, and the tokenizer {self.tokenizer.name_or_path} does not "
                "say where its tokens stand; allowed: a fast tokenizer, or a larger model.length"
            )
        begin, end = example.text
        offsets = self.tokenizer(
            example.source, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )["offset_mapping"][:count]
        inside = [at for at, (first, last) in enumerate(offsets) if begin <= first < last <= end]
        return (inside[0], inside[-1] + 1) if inside else (0, 0)


def too_long(example: Example, told: str, length: int) -> ValueError:
    return ValueError(
        f"example {example.id} of {example.task}: {told}, and model.length={length}; allowed: a larger "
        "model.length, or a shorter template (domains/template=…)"
    )
