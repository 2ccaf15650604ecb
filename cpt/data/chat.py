"""Chats as token ids through the tokenizer's own template, with the assistant's turns marked."""

from dataclasses import replace

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cpt.data.example import ASSISTANT, USER, Example
from cpt.data.sources.base import Encoding


def encode_chat(
    example: Example, tokenizer: PreTrainedTokenizerBase, *, length: int, encoding: Encoding
) -> tuple[list[int], list[bool], int]:
    """The ids of a chat, which of them are the assistant's, and how many were cut to fit into `length`.

    Cut are the oldest exchanges, then the end of the last question. Raises ValueError, with the example's id,
    for an answer that does not fit and for a template that changes earlier turns."""
    ids, marks = render_chat(example, tokenizer)
    whole = len(ids)
    while (over := len(ids) - length) > 0:
        turns = list(example.turns)
        first = 1 if turns[0][0] == "system" else 0
        answers = [at for at, (role, _) in enumerate(turns) if role == ASSISTANT]
        question = "" if len(turns) - first < 2 else turns[-2][1]
        words = tokenizer(question, add_special_tokens=False, verbose=False)["input_ids"]
        if len(answers) > 1:
            del turns[first : answers[0] + 1]
        elif len(words) > over:
            kept = tokenizer.decode(words[:-over], clean_up_tokenization_spaces=False).rstrip("\ufffd")
            turns[-2] = (turns[-2][0], kept if len(kept) < len(question) else question[:-1])
        else:
            raise ValueError(
                f"example {example.id} of {example.task}: its last answer and what may not be cut take "
                f"{len(ids)} tokens; allowed: model.length={length}"
            )
        example = replace(example, turns=tuple(turns))
        ids, marks = render_chat(example, tokenizer)
    if encoding.scored_turns == "last":
        last = max(at for at in range(len(marks)) if marks[at] and not (at and marks[at - 1]))
        marks = [mark and at >= last for at, mark in enumerate(marks)]
    return ids, marks, whole - len(ids)


def render_chat(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[bool]]:
    """The ids of a chat up to the end of its last answer, a special token, and which are the assistant's."""
    template, name = tokenizer.chat_template, tokenizer.name_or_path
    if not template:
        raise ValueError(
            f"the tokenizer {name} has no chat template, and example {example.id} is a chat; allowed: the "
            "tokenizer of an instruction-tuned model, or examples with a question and an answer"
        )
    turns = [{"role": role, "content": content} for role, content in example.turns]
    try:
        if "{% generation %}" in str(template).replace("{%-", "{%").replace("-%}", "%}"):
            given = tokenizer.apply_chat_template(
                turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, marks = list(given["input_ids"]), [bool(mark) for mark in given["assistant_masks"]]
        else:
            ids, marks = derive_marks(turns, tokenizer, example=example.id)
    except TemplateError as error:
        raise ValueError(
            f"example {example.id}: the chat template of {name} does not take its turns "
            f"({', '.join(role for role, _ in example.turns)}): {error}; allowed: roles that it knows"
        ) from error
    if True not in marks:
        return ids, marks
    end = len(marks) - marks[::-1].index(True)
    ids, marks = ids[:end], marks[:end]
    if ids[-1] not in tokenizer.all_special_ids:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer {name} has no token that ends an answer (eos)")
        ids, marks = [*ids, tokenizer.eos_token_id], [*marks, True]
    return ids, marks


def derive_marks(
    turns: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, *, example: str
) -> tuple[list[int], list[bool]]:
    """Ids and marks of a template without `{% generation %}`: an answer is what the chat with it adds to the
    chat up to where the assistant begins."""

    def render(count: int, *, asked: bool = False) -> str:
        return str(tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=asked))

    text, spans = render(len(turns)), []
    for number in (at for at, turn in enumerate(turns) if turn["role"] == ASSISTANT):
        before, after = render(number, asked=True), render(number + 1)
        if not (after.startswith(before) and text.startswith(after.rstrip())):
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} changes earlier turns when a turn follows "
                f"(turn {number + 1} of example {example}), so its answers cannot be found; "
                "allowed: a template whose text goes on, or one with {% generation %} marks"
            )
        spans.append((len(before), len(after.rstrip())))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    marks = [
        any(begin <= first and last <= end for begin, end in spans) and first < last
        for first, last in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), marks


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError for a tokenizer that cannot render a question with its answer."""
    turns = ((USER, "a question"), (ASSISTANT, "its answer"))
    render_chat(Example("a question and its answer", "", "its answer", "chat", turns=turns), tokenizer)
