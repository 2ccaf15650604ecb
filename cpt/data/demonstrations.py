"""Prompts that show a model an answer to their question, made of the token ids of a prompt.

a chat:  … question, the text of the demonstration, end of the turn, generation prompt
a task:  question, the text of the demonstration"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cpt.data.chats import ChatEncoder, RenderedChat, encode_within
from cpt.data.sources.base import SPLIT
from cpt.data.sources.examples import USER, BadExampleError, Example, Turn
from cpt.data.text_encoder import TextEncoder

ANSWER_FIELD = "{demonstration}"
QUESTION = "a question"  # of the chat whose prompt shows what follows a question
ANY_DATE = "2025-01-01"  # that a chat template may print before the question


@dataclass(frozen=True)
class Demonstration:
    """The ids before and after the shown answer, and those that follow the question in the prompt of a chat:
    none of a tokenizer without a chat template."""

    before: list[int]
    after: list[int]
    end_of_question: list[int]

    @classmethod
    def encode(cls, text: str, tokenizer: PreTrainedTokenizerBase) -> "Demonstration":
        """A demonstration of the text with ANSWER_FIELD where the answer is."""
        encode_body = TextEncoder(tokenizer, SPLIT).encode_body
        text_before, _, text_after = text.partition(ANSWER_FIELD)
        return cls(
            before=encode_within(encode_body, text_before),
            after=encode_within(encode_body, text_after),
            end_of_question=find_end_of_question(tokenizer),
        )

    def ends_question(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends as that of a chat after its question."""
        length = len(self.end_of_question)
        return length > 0 and list(prompt[-length:]) == self.end_of_question

    def insert(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The prompt with an answer to it: at the end of a chat's question, else at the end of the prompt."""
        length = len(self.end_of_question) if self.ends_question(prompt) else 0
        question_length = len(prompt) - length
        question = list(prompt[:question_length])
        return [*question, *self.before, *answer, *self.after, *prompt[question_length:]]


def find_end_of_question(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids between a question and its answer in a chat: the end of the turn and the generation prompt.
    Empty for a tokenizer without a chat template, or with one that does not take a question alone."""
    encoder = ChatEncoder(tokenizer, ANY_DATE)
    turns = (Turn(role=USER, content=QUESTION),)
    chat = Example(id="a question", source="", target="", task="chat", turns=turns)
    if "default" not in encoder.templates:
        return []
    try:
        prompt = RenderedChat.of(chat, encoder).render(1, generation_prompt=True)
    except BadExampleError:
        return []
    _, question, text_after = prompt.rpartition(QUESTION)
    return encoder.ids_after(text_after) if question else []
