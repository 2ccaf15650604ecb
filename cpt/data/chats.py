"""Chats as token ids through the tokenizer's own template, with the assistant's turns marked.

The template is asked for the marks (`{% generation %}`). Where it has none, the chat is rendered up to and
with each answer: what comes in between is the answer, if the one rendering begins with the other."""

from collections.abc import Sequence
from dataclasses import replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cpt.data.examples import ASSISTANT, USER, Example
from cpt.data.sources.base import Encoding

Turns = Sequence[tuple[str, str]]
GENERATION = "generation"  # the name of the mark in a template


def encode_chat(
    example: Example, tokenizer: PreTrainedTokenizerBase, *, length: int, encoding: Encoding
) -> tuple[list[int], list[bool], int]:
    """The ids of a chat, which of them are the assistant's, and how many were cut to `length`.

    What is cut are the oldest exchanges, then the end of the last question. Raises ValueError, which names
    the example, for an answer that does not fit, and for a template that changes what it has written."""
    ids, marks = render_marked(example, tokenizer)
    whole = len(ids)
    while len(ids) > length:
        shorter = shorten(example, over=len(ids) - length, tokenizer=tokenizer)
        if shorter is None:
            raise ValueError(
                f"example {example.id} of {example.task}: its last answer and what may not be cut take "
                f"{len(ids)} tokens; allowed: model.length={length}"
            )
        example = shorter
        ids, marks = render_marked(example, tokenizer)
    if encoding.scored_turns == "last":
        before = max(at for at in range(len(marks)) if marks[at] and not (at and marks[at - 1]))
        marks = [mark and at >= before for at, mark in enumerate(marks)]
    return ids, marks, whole - len(ids)


def split_chat(
    example: Example, tokenizer: PreTrainedTokenizerBase, *, length: int
) -> tuple[list[int], list[int]]:
    """The ids that the last answer of a chat is written behind, and its own, with what ends it."""
    every = Encoding(truncate="tail", scored_turns="last")
    ids, marks, _ = encode_chat(example, tokenizer, length=length, encoding=every)
    begin = marks.index(True)
    return ids[:begin], ids[begin:]


def shorten(example: Example, *, over: int, tokenizer: PreTrainedTokenizerBase) -> Example | None:
    """A chat with less in it: without its oldest exchange, or with a shorter last question; None where
    there is nothing left to cut."""
    turns = list(example.turns)
    first = 1 if turns[0][0] == "system" else 0
    answers = [at for at, (role, _) in enumerate(turns) if role == ASSISTANT]
    if len(answers) > 1:
        return replace(example, turns=(*turns[:first], *turns[answers[0] + 1 :]))
    if len(turns) - first < 2:
        return None
    role, content = turns[-2]
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) <= over:
        return None
    text = tokenizer.decode(ids[: len(ids) - over], clean_up_tokenization_spaces=False).rstrip("\ufffd")
    shorter = text if len(text) < len(content) else content[:-1]
    return replace(example, turns=(*turns[:-2], (role, shorter), turns[-1]))


def render_marked(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """The ids of a chat and which of them are the assistant's, its end of sequence with them."""
    template = tokenizer.chat_template
    if not template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no chat template, and "
            f"example {example.id} is a chat; "
            "allowed: the tokenizer of an instruction-tuned model, or examples with a question and an answer"
        )
    try:
        ids, marks = apply_template(example, tokenizer)
    except TemplateError as error:
        raise ValueError(
            f"example {example.id}: the chat template of {tokenizer.name_or_path} does not take its turns "
            f"({', '.join(role for role, _ in example.turns)}): {error}; allowed: roles that it knows"
        ) from error
    return end_chat(ids, marks, tokenizer)


def apply_template(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Ids and marks by the template's own marks, or derived."""
    template = tokenizer.chat_template
    if f"{{% {GENERATION} %}}" in str(template).replace("{%-", "{%").replace("-%}", "%}"):
        messages = [{"role": role, "content": content} for role, content in example.turns]
        given = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(given["input_ids"]), [bool(mark) for mark in given["assistant_masks"]]
    return derive_marks(example, tokenizer)


def derive_marks(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """Ids and marks where the template has no marks of its own."""
    text, places = render(example.turns, tokenizer), []
    for number, (role, _) in enumerate(example.turns):
        if role == ASSISTANT:
            before = render(example.turns[:number], tokenizer, asked=True)
            after = render(example.turns[: number + 1], tokenizer)
            if not (after.startswith(before) and text.startswith(after.rstrip())):
                raise ValueError(
                    f"the chat template of {tokenizer.name_or_path} changes earlier turns when "
                    f"a turn follows (turn {number + 1} of example {example.id}), so its answers cannot "
                    "be told from what is asked; allowed: a template whose text goes on, or one with "
                    "{% generation %} marks"
                )
            places.append((len(before), len(after.rstrip())))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    marks = [
        any(begin <= first and last <= end for begin, end in places) and first < last
        for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), marks


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer that cannot render a question with its answer."""
    turns = ((USER, "a question"), (ASSISTANT, "its answer"))
    render_marked(Example("a question and its answer", "", "its answer", "chat", turns=turns), tokenizer)


def render(turns: Turns, tokenizer: PreTrainedTokenizerBase, *, asked: bool = False) -> str:
    """The text of a chat; `asked`: up to where the assistant begins."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked))


def end_chat(
    ids: list[int], marks: list[bool], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """A chat without what stands behind its last answer, which ends in a special token: the template's, or
    the end of the sequence."""
    if True not in marks:
        return ids, marks
    end = len(marks) - marks[::-1].index(True)
    ids, marks = ids[:end], marks[:end]
    if ids[-1] not in tokenizer.all_special_ids:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no token that ends an answer (eos)")
        ids, marks = [*ids, tokenizer.eos_token_id], [*marks, True]
    return ids, marks
