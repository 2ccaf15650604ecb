"""Chats as token ids: every answer after the tokens of its prompt, as the model is asked at generation.

The prompt of an answer is what the chat template renders of the turns before it, with the generation prompt,
tokenized on its own; so the last token of a prompt never merges with the first of the answer. Where the
prompt of an answer begins with the tokens of the previous prompt and answer, both share a sequence; where the
template renders earlier turns differently later on, as those that drop thoughts do, each answer is a sequence
of its own."""

import copy
import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from cpt.data.sources.base import SPLIT
from cpt.data.sources.chats import LABEL_KEYS, TEMPLATE_OPTIONS
from cpt.data.sources.examples import ASSISTANT, BadExampleError, Example
from cpt.data.text_encoder import TextEncoder

# Around a control token that a text of the chat spells: private characters of Unicode's last plane.
MARK_BEGIN, MARK_END = "\U0010fffc", "\U0010fffd"
TEMPLATE_DATE = "2025-01-01"  # that templates print in chats that are the same in all runs
MARK = re.compile(f"[{MARK_BEGIN}{MARK_END}]")
DEFAULT_TEMPLATE = "default"  # the name of the template that is taken, of several
WORD = re.compile(r"\S+")
MARKED_TOKEN = re.compile(f"{MARK_BEGIN}([^{MARK_BEGIN}{MARK_END}]*){MARK_END}")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
ANCHORS = ("\n", ":", "0")  # texts before which the middle of another text is tokenized
OTHER_TEXT = "another text"  # stands for the content of a turn, to see whether the template prints it
DATE_CALL = re.compile(r"strftime_now\(\s*(['\"])([^'\"\\]*)\1\s*\)")
RENDER_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


Span = tuple[int, int]  # characters of a text, from the first to before the second


@dataclass(frozen=True)
class Answer:
    """An answer of a chat, or a part of it: the number of its turn, the ids before it, and its own ids."""

    turn: int
    prompt: list[int]
    ids: list[int]

    @property
    def whole(self) -> list[int]:
        return self.prompt + self.ids


@dataclass
class ChatCounts:
    """What is worth a line about chats that were encoded."""

    num_spelling: int = 0  # chats whose text spells a control token
    unused_keys: Counter[str] = field(default_factory=Counter)  # that the template does not print


def prints_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template prints the day on which it is rendered."""
    return "strftime_now(" in "".join(read_chat_templates(tokenizer).values())


def read_chat_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """The chat templates of a tokenizer by name, `default` where there is one."""
    template = tokenizer.chat_template
    if not template:
        return {}
    return dict(template) if isinstance(template, Mapping) else {DEFAULT_TEMPLATE: str(template)}


def set_template_date(template: str, date: str | None) -> str:
    """The template with `strftime_now("…")` replaced by that day. Raises ValueError for a call in another
    form, which would print today."""
    if "strftime_now(" not in template:
        return template
    if date is None:
        raise ValueError("domains.date=null is invalid: the chat template prints a date. Allowed: YYYY-MM-DD")
    day = datetime.datetime.fromisoformat(date)
    dated = DATE_CALL.sub(lambda call: json.dumps(day.strftime(call[2]), ensure_ascii=False), template)
    if "strftime_now(" in dated:
        raise ValueError(
            "the chat template computes the format of its date. Allowed: strftime_now('%d %b %Y')"
        )
    return dated


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and tokenizes the answers of chats. `date` is the day that the template prints, YYYY-MM-DD.
    Raises BadExampleError, with the example's id, for a chat that cannot be rendered as it is generated."""

    tokenizer: PreTrainedTokenizerBase
    date: str | None = None

    @property
    def name(self) -> str:
        return str(self.tokenizer.name_or_path)

    @cached_property
    def templates(self) -> dict[str, str]:
        return {
            name: set_template_date(template, self.date)
            for name, template in read_chat_templates(self.tokenizer).items()
        }

    @cached_property
    def text_encoder(self) -> TextEncoder:
        """Encodes what stays text whatever it spells."""
        return TextEncoder(self.tokenizer, SPLIT)

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        return re.compile(self.text_encoder.spelled_pattern or "(?!)")

    def template_of(self, example: Example) -> str:
        """The template for a chat: the one for tools, where the tokenizer has several and the chat has tools.
        Raises ValueError where the tokenizer has none."""
        name = "tool_use" if example.tools and "tool_use" in self.templates else DEFAULT_TEMPLATE
        if name not in self.templates:
            raise ValueError(
                f"the tokenizer {self.name} has no chat template, and example {example.id} is a chat. "
                "Allowed: the tokenizer of an instruction-tuned model"
            )
        return self.templates[name]

    def used_options(self, example: Example, template: str) -> dict[str, Any]:
        """The options of a chat that its template reads."""
        return {
            name: value
            for name, value in example.template_options.items()
            if name.isidentifier() and re.search(rf"\b{name}\b", template)
        }

    def answers(self, example: Example, counts: ChatCounts | None = None) -> list[Answer]:
        """The scored answers of a chat, in their order; adds to `counts`. Raises BadExampleError for a chat
        without any."""
        # Where answers are is found in the text; then all texts are tokenized at once.
        chat = RenderedChat.of(example, self)
        numbers = [number for number, turn in enumerate(example.turns) if turn.is_answer]
        pieces: list[tuple[int, str, Span]] = []  # number of the turn, text, span of the answer
        text_of_answer: dict[int, str] = {}
        for number in numbers:
            text, spans = chat.find_answer(number)
            text_of_answer[number] = text
            pieces += [(number, text, span) for span in spans]
        unused_keys = chat.check_use(text_of_answer)
        unused_keys += [
            f"{TEMPLATE_OPTIONS}.{name}" for name in example.template_options if name not in chat.options
        ]
        if counts is not None:
            counts.unused_keys.update(unused_keys)
            if chat.is_marked:
                counts.num_spelling += 1

        # The prompt of each piece, and the prompt with the answer: the second one adds the answer's ids.
        texts = []
        for _, text, (begin, end) in pieces:
            texts += [text[:begin], text[:end]]
        encoded = self.ids_of_all(texts)
        answers = []
        for (number, text, (begin, end)), prompt, joint_ids in zip(
            pieces, encoded[::2], encoded[1::2], strict=True
        ):
            ids = joint_ids[len(prompt) :]
            if joint_ids[: len(prompt)] != prompt:  # a token spans the boundary
                ids = self.ids_after(text[begin:end])
            if not ids:
                raise self.unscored_error(example)
            answers.append(Answer(turn=number, prompt=prompt, ids=ids))
        if not answers:
            raise self.unscored_error(example)
        return answers

    def unscored_error(self, example: Example) -> BadExampleError:
        """The error for an example in which the template marks no token of an answer."""
        return BadExampleError(
            f"example {example.id}: the chat template of {self.name} marks no token as the {ASSISTANT}'s. "
            "Allowed: answers that are not empty",
            "no token of an answer",
        )

    def ids_of_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts most of which begin alike. Control tokens divide a text into sections that are
        tokenized on their own; each different section is tokenized once where that gives the same ids."""
        if not texts:
            return []
        if any(MARK.search(text) for text in texts):
            return [self.ids_of_marked(text) for text in texts]

        sections_by_text = [self.sections(text) for text in texts]
        different = list(dict.fromkeys(chain.from_iterable(sections_by_text)))
        ids_of_section = dict(zip(different, self.ids_of(different), strict=True))

        joined = []
        for sections in sections_by_text:
            ids: list[int] = []
            for section in sections:
                ids += ids_of_section[section]
            joined.append(ids)

        longest = max(range(len(texts)), key=lambda index: len(texts[index]))
        if joined[longest] == self.ids_of([texts[longest]])[0]:
            return joined
        return self.ids_of(texts)

    def sections(self, text: str) -> list[str]:
        """A text before each of its control tokens divided."""
        begins = [0, *(match.start() for match in self.control_pattern.finditer(text)), len(text)]
        return [text[begin:end] for begin, end in zip(begins, begins[1:], strict=False) if begin < end]

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts in which control tokens are parsed."""
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=False, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def parse(self, text: str) -> list[int]:
        return self.ids_of([text])[0]

    def ids_after(self, text: str) -> list[int]:
        """The ids of a text that follows another, in which control tokens are parsed, but for marked ones."""
        if MARK.search(text):
            return self.ids_of_marked(text, is_first=False)
        return encode_within(self.parse, text)

    def ids_of_marked(self, text: str, *, is_first: bool = True) -> list[int]:
        """The ids of a text in which marked control tokens are spelled out; those of the template are parsed.
        The pieces are those of `apply_chat_template(…, sanitize_control_tokens=True)`."""
        ids: list[int] = []
        for index, piece in enumerate(MARKED_TOKEN.split(text)):
            is_marked = index % 2 == 1
            if index == 0 and is_first and piece:
                ids += self.parse(piece)
            elif piece:
                ids += encode_within(self.text_encoder.encode_body if is_marked else self.parse, piece)
        return ids

    def mark(self, text: str) -> str:
        """The text with marks around what would become a control token.

        These are the control tokens that it spells. With a tokenizer that changes texts first, as to lower
        case, other words may become one: each of these is marked, and if this is not enough the whole text.
        """
        marked = self.control_pattern.sub(mark_match, text)
        if not self.has_unmarked_control(marked):
            return marked
        marked = WORD.sub(
            lambda word: mark_match(word) if self.has_unmarked_control(word[0]) else word[0], text
        )
        return marked if not self.has_unmarked_control(marked) else f"{MARK_BEGIN}{text}{MARK_END}"

    def has_unmarked_control(self, text: str) -> bool:
        """Whether a text has control tokens outside marks."""
        if not self.text_encoder.may_normalize:
            return False
        return self.text_encoder.parses_control(MARKED_TOKEN.sub(" ", text))


def mark_match(match: re.Match[str]) -> str:
    return f"{MARK_BEGIN}{match[0]}{MARK_END}"


def encode_within(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """The ids that `encode` gives of a text that follows another: without the blank that SentencePiece puts
    before a text."""
    for anchor in ANCHORS:
        anchor_ids = encode(anchor)
        ids = encode(anchor + text)
        if ids[: len(anchor_ids)] == anchor_ids:
            return ids[len(anchor_ids) :]
    return encode(text)


def group_into_sequences(answers: Sequence[Answer]) -> list[list[Answer]]:
    """The answers of a chat by sequence: an answer shares that of the previous one if its prompt begins with
    the tokens of that one's prompt and answer."""
    sequences: list[list[Answer]] = []
    for answer in answers:
        previous = sequences[-1][-1].whole if sequences else []
        if previous and answer.prompt[: len(previous)] == previous:
            sequences[-1].append(answer)
        else:
            sequences.append([answer])
    return sequences


def replace_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value in which `change` has replaced each text, except keys and roles that are identifiers: by
    these chat templates find a value or a role."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        changed = {}
        for key, entry in value.items():
            is_name = key == "role" and str(entry).isidentifier()
            changed_key = key if str(key).isidentifier() else change(str(key))
            changed[changed_key] = entry if is_name else replace_texts(entry, change)
        return changed
    if isinstance(value, list | tuple):
        return [replace_texts(element, change) for element in value]
    return value


@dataclass(frozen=True)
class RenderedChat:
    """A chat as its template takes it, and its renderings."""

    example: Example
    encoder: ChatEncoder
    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: Mapping[str, Any]  # further variables that the template reads
    is_marked: bool = False  # whether its texts spell control tokens, which are between marks

    @classmethod
    def of(cls, example: Example, encoder: ChatEncoder) -> "RenderedChat":
        """With control tokens in its texts marked, and the arguments of tool calls as the template takes
        them: as objects, else as JSON texts. Raises BadExampleError for a text with the characters that mark
        them."""
        template = encoder.template_of(example)
        messages = [copy.deepcopy(turn.message) for turn in example.turns]
        tools = [dict(tool) for tool in example.tools] or None
        options = encoder.used_options(example, template)
        unmarked = [messages, tools, options]
        marked = replace_texts(unmarked, encoder.mark)
        text = json.dumps(unmarked, ensure_ascii=False)
        is_marked = json.dumps(marked, ensure_ascii=False) != text
        if is_marked and MARK.search(text):
            raise BadExampleError(
                f"example {example.id}: a turn has a control token and the character U+10FFFC or FFFD. "
                "Allowed: text without them",
                "private characters in a turn",
            )
        messages, tools, options = marked
        chat = cls(example, encoder, template, messages, tools, options, is_marked)
        return chat.with_argument_texts() if chat.needs_argument_texts() else chat

    def render(self, count: int, *, generation_prompt: bool = False) -> str:
        """The text of the first turns. Raises BadExampleError where the template does not take them."""
        key = (count, generation_prompt)
        if key not in self.rendered:
            self.rendered[key] = self.render_messages(
                self.messages[:count], self.tools, generation_prompt=generation_prompt
            )
        return self.rendered[key]

    @cached_property
    def rendered(self) -> dict[tuple[int, bool], str]:
        return {}

    def render_messages(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        generation_prompt: bool = False,
    ) -> str:
        """The text of messages. Raises BadExampleError if the template fails, or cuts a marked token."""
        try:
            text = self.encoder.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.options,
            )
        except RENDER_ERRORS as error:
            raise self.rendering_error(error) from error
        # Marks come in pairs around a token: one is left alone where the template cut the text between them.
        if MARK.search(MARKED_TOKEN.sub("", text)):
            raise BadExampleError(
                f"example {self.example.id}: the chat template of {self.encoder.name} cuts a turn within a "
                "control token. Allowed: text without it",
                "a control token in a turn",
            )
        return str(text)

    def rendering_error(self, error: Exception) -> BadExampleError:
        """The error for an example whose turns the template does not take."""
        cause = " ".join(str(error).split())
        return BadExampleError(
            f"the chat template of {self.encoder.name} does not take the turns of example "
            f"{self.example.id}: {cause}. Allowed: roles that it knows",
            f"turns that the chat template does not take: {cause}",
        )

    def find_answer(self, number: int) -> tuple[str, list[Span]]:
        """The text of a chat up to its answer of that number, and where the answer is in it: as `{%
        generation %}` says, else what follows the generation prompt. Raises BadExampleError for an answer
        without a prompt."""
        if GENERATION.search(self.template):
            return self.find_marked_answer(number)
        if number == 0:
            raise BadExampleError(
                f"example {self.example.id} begins with the {ASSISTANT}, as no prompt of {self.encoder.name} "
                "does. Allowed: a first turn of the user, or weight=0 of this one",
                f"a first turn of the {ASSISTANT}",
            )
        before = self.render(number, generation_prompt=True)
        text = self.render(number + 1)
        if not text.startswith(before):
            text = before + text[self.find_end_of_prompt(number, before, text) :]
        end = len(text.rstrip())
        return text, [(len(before), end)] if end > len(before) else []

    def find_end_of_prompt(self, number: int, before: str, text: str) -> int:
        """Where the answer begins in a rendered chat `text` that does not begin with its prompt `before`. The
        answer follows the part of the prompt from the last question on, which is searched in the text: some
        templates print the system prompt before the last turn only, if that is a question."""
        question = str(self.messages[number - 1]["content"]).strip()
        begin = before.rfind(question) if question else -1
        end_of_prompt = before[begin:]
        prompt_position = text.rfind(end_of_prompt) if begin >= 0 else -1
        answer_begin = prompt_position + len(end_of_prompt)
        answer = text[answer_begin:]
        if prompt_position < 0 or remove_blanks(self.messages[number]["content"]) not in remove_blanks(
            answer
        ):
            raise BadExampleError(
                f"the chat template of {self.encoder.name} changes earlier turns or its generation prompt "
                f"(in example {self.example.id}). Allowed: "
                "one whose answers begin with its generation prompt, or has {% generation %}",
                "an answer that does not begin with the generation prompt",
            )
        return answer_begin

    def find_marked_answer(self, number: int) -> tuple[str, list[Span]]:
        """The text of a chat up to an answer, and the spans of the answer, by the marks of the template: the
        marked spans that come after the text of the turns before the answer."""
        variables = {**self.encoder.tokenizer.special_tokens_map, **self.options}
        try:
            texts, spans = render_jinja_template(
                conversations=[self.messages[: number + 1]],
                tools=self.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **variables,
            )
        except RENDER_ERRORS as error:
            raise self.rendering_error(error) from error
        # Templates mark earlier answers as well. If the prefix is rendered differently in the longer chat,
        # offsets do not match; take the last marked span.
        text = texts[0]
        before = self.render(number) if number else ""
        if text.startswith(before):
            marked = [(begin, end) for begin, end in spans[0] if len(before) <= begin < end]
        else:
            marked = [(begin, end) for begin, end in spans[0][-1:] if begin < end]

        # Spans that touch are one answer, as of a template with a mark for thoughts and one for the text.
        joined: list[Span] = []
        for begin, end in marked:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        return text, joined

    def check_use(self, text_of_answer: Mapping[int, str]) -> list[str]:
        """The keys of names and ids that the template leaves out. Raises BadExampleError where it leaves out
        a turn, an answer's text, calls, thoughts or tools. The texts up to scored answers are by number."""
        turns = self.example.turns
        unused_keys = []
        last = max(text_of_answer)
        for number, turn in enumerate(turns[: last + 1]):
            answer = number  # before which, or as which, the template has to print the turn
            while turns[answer].role != ASSISTANT:
                answer += 1
            text = text_of_answer.get(answer) or self.render(answer + 1)

            # The text of an answer has to be printed, except for blanks. A template may cut or reformat other
            # turns: it is enough that another text in their place changes what is rendered.
            content = remove_blanks(self.messages[number]["content"])
            if content not in remove_blanks(text):
                is_scored = number in text_of_answer
                if is_scored or not self.is_changed_by(number, answer, content=OTHER_TEXT):
                    self.refuse_unused(
                        f"the text of turn {number + 1} ({turn.role})", f"a turn of {turn.role}"
                    )

            # A model learns nothing that the template does not print: names and ids are collected for a log
            # line, anything else is an error.
            for key in turn.details:
                if self.is_changed_by(number, answer, removed_key=key):
                    continue
                if key not in LABEL_KEYS:
                    self.refuse_unused(f"{key!r} of turn {number + 1} ({turn.role})", key)
                unused_keys.append(key)

        if self.tools:
            count = last + 1
            if self.render(count) == self.render_messages(self.messages[:count], None):
                self.refuse_unused("'tools'", "tools")
        return unused_keys

    def is_changed_by(
        self, number: int, last: int, *, content: str | None = None, removed_key: str | None = None
    ) -> bool:
        """Whether the text up to turn `last` changes with the content of a turn, or without a key of it."""
        message = {key: value for key, value in self.messages[number].items() if key != removed_key}
        if content is not None:
            message["content"] = content
        messages = [*self.messages[:number], message, *self.messages[number + 1 : last + 1]]
        try:
            return self.render_messages(messages, self.tools) != self.render(last + 1)
        except BadExampleError:
            return True

    def refuse_unused(self, unused: str, kind: str) -> None:
        """Raises BadExampleError for a part of a chat that the template does not print."""
        raise BadExampleError(
            f"example {self.example.id}: the chat template of {self.encoder.name} does not print {unused}. "
            "Allowed: a template that does, or chats without it",
            f"{kind} that the chat template does not print",
        )

    def argument_objects(self) -> list[dict[str, Any]]:
        """The functions of all tool calls: {name, arguments}."""
        functions = []
        for message in self.messages:
            functions += [call["function"] for call in message.get("tool_calls", ())]
        return functions

    def needs_argument_texts(self) -> bool:
        """Whether the template cannot print objects as arguments, or prints them in Python's form."""
        arguments = [function["arguments"] for function in self.argument_objects() if function["arguments"]]
        if not arguments:
            return False
        try:
            text = self.render(len(self.messages))
        except BadExampleError as error:
            return isinstance(error.__cause__, TypeError)
        return any(str(argument) in text for argument in arguments)

    def with_argument_texts(self) -> "RenderedChat":
        """The chat with the arguments of tool calls as JSON texts."""
        messages = copy.deepcopy(self.messages)
        chat = replace(self, messages=messages)
        for function in chat.argument_objects():
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        return chat


def remove_blanks(text: str) -> str:
    """A text without its blanks, which templates trim."""
    return "".join(text.split())
