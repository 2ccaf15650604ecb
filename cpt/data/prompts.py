"""What a model that answers is given: the held-out examples of a domain with their tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from cpt.data.answered import examples_of
from cpt.data.corpus import Corpus
from cpt.data.encoding import Encoder
from cpt.data.examples import Example


@dataclass(frozen=True)
class Prompt:
    """An example as a model is asked it. For a causal model an answer's ids follow the prompt's; for one with
    two stacks the prompt is the encoder's, and an answer's ids are what the decoder is to write. Every answer
    ends in the end of the sequence, in a chat in what its template ends a turn with."""

    example: Example
    ids: list[int]
    choices: list[list[int]]  # each choice as an answer, in the order of the example's
    reference: list[int]  # the right answer


def prompts_of(corpus: Corpus, split: str, encoder: Encoder) -> Iterator[Prompt]:
    """The prompts of a split, in the order of the corpus: number i is row i and document i of the packed
    text, and its ids are those before the answer of that row."""
    for example in examples_of(corpus, split):
        choices = encoder.answers(example, example.choices) if example.choices else []
        yield Prompt(example, encoder.prompt(example), choices, encoder.reference(example))
