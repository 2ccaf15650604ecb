"""Chats as data sets store them: `messages` in OpenAI's form, ShareGPT's `conversations`, and TRL's `prompt`
with its `completion`. Here they become turns that chat templates of transformers take."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cpt.core.messages import abbreviate
from cpt.data.sources.examples import ASSISTANT, USER, BadExampleError, RawExample, Turn

CHATS_FORMAT = 6  # part of stamps: raise it when other turns are read of the same files
SYSTEM, TOOL = "system", "tool"
# Who speaks, by the names that data sets give, in any case. Other roles are left to the chat template.
ROLES = {
    "system": SYSTEM,
    "developer": "developer",
    "user": USER,
    "human": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "tool": TOOL,
    "function": TOOL,  # OpenAI's older name
}
# Of ShareGPT's form alone: there are templates with a role `observation`.
SHAREGPT_ROLES = {"observation": TOOL, "function_response": TOOL}
FUNCTION_CALL = "function_call"  # OpenAI's older form of a tool call, and ShareGPT's role of one
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "tool_plan")
LABEL_KEYS = ("name", "tool_call_id")  # who speaks, and which call a result belongs to
WEIGHT_KEYS = ("weight", "train")
KNOWN_KEYS = {"role", "content", "tool_calls", FUNCTION_CALL, *REASONING_KEYS, *LABEL_KEYS, *WEIGHT_KEYS}
TEMPLATE_OPTIONS = "chat_template_kwargs"  # a row's further variables of the chat template
RENDERING_KEYS = {  # of `apply_chat_template`, which cpt sets itself
    "self",
    "conversation",
    "conversations",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
}
OLDER_TOOLS = "functions"  # OpenAI's older form of `tools`
ROW_KEYS = {"id", "tools", TEMPLATE_OPTIONS}  # read of rows of each form
EMPTY: tuple[Any, ...] = (None, "", [], {})
MESSAGES_FORM = "{messages: [{role, content}, …]}"


@dataclass
class IgnoredKeys:
    """How often keys with a value are not read."""

    of_messages: Counter[str] = field(default_factory=Counter)
    of_rows: Counter[str] = field(default_factory=Counter)


def read_chat(row: Any, where: str, ignored_keys: IgnoredKeys) -> RawExample:
    """The chat of a row up to its last answer; adds the keys that are not read to `ignored_keys`. Raises
    BadExampleError for a row without a chat, or with a turn of another form."""
    if not isinstance(row, Mapping):
        raise BadExampleError(f"{where} is not an object. Allowed: {MESSAGES_FORM}", "not an object")

    # What follows the last answer is a prompt without one.
    all_turns = list(read_turns(row, where, ignored_keys.of_messages))
    turns = list(all_turns)
    while turns and not turns[-1].is_answer:
        turns.pop()
    if not turns:
        raise make_unanswered_error(all_turns, where, is_prompt_apart="prompt" in turn_keys(row))
    for turn in turns:
        if turn.is_answer and not turn.content.strip() and not turn.details:
            raise BadExampleError(
                f"{where}: an answer of the {ASSISTANT} is empty. Allowed: a text, tool_calls, weight=0",
                "an empty answer",
            )

    # An answer that only calls tools has no text: the calls stand for it, to be compared with other answers.
    last = turns[-1]
    target = last.content
    if not target.strip():
        target = json.dumps(last.details.get("tool_calls", last.details), ensure_ascii=False)
    tools = read_tools(row, where)
    template_options = read_template_options(row, where, ignored_keys.of_rows)

    read_keys = ROW_KEYS | turn_keys(row)
    if not has_value(row, "tools"):
        read_keys = read_keys | {OLDER_TOOLS}
    ignored_keys.of_rows.update(
        str(key) for key, value in row.items() if key not in read_keys and value not in EMPTY
    )
    return RawExample({}, target, turns=tuple(turns), tools=tools, template_options=template_options)


def make_unanswered_error(turns: Sequence[Turn], where: str, *, is_prompt_apart: bool) -> BadExampleError:
    """The error of a chat of which no turn is trained on or scored, with what its turns are instead."""
    roles = list(dict.fromkeys(turn.role for turn in turns))
    kind = f"no turn of the {ASSISTANT}"
    if not turns:
        reason = "its list of messages is empty"
    elif ASSISTANT not in roles:
        reason = f"its roles are {abbreviate(roles)}"
    elif is_prompt_apart:
        reason = "all are in 'prompt', or have weight=0 or train=false"
        kind = "answers that do not count alone"
    else:
        reason = "all have weight=0 or train=false"
        kind = "answers that do not count alone"
    return BadExampleError(
        f"{where} has no turn of the {ASSISTANT} to train on or to score: {reason}. Allowed: {MESSAGES_FORM} "
        f"with role={ASSISTANT} in one at least, without a weight or with weight=1",
        kind,
    )


def turn_keys(row: Mapping[str, Any]) -> set[str]:
    """The keys of a row that have its turns: of the first form that has a value. A table that was joined of
    several has null in the columns of the other forms."""
    forms = [{"messages"}, {"conversations", "system"}, {"prompt", "completion"}]
    for form in forms:
        if all(row.get(key) is not None for key in form - {"system"}):
            return form
    for form in forms:
        if form - {"system"} <= row.keys():
            return form
    return {"messages"}


def has_value(row: Mapping[str, Any], key: str) -> bool:
    """Whether a key of a row has a value, or the JSON of one, that is not empty."""
    return bool(parse_if_json(row.get(key)))


def read_turns(row: Mapping[str, Any], where: str, ignored_keys: Counter[str]) -> Iterator[Turn]:
    """All turns of a row. Those of a `prompt` are not scored."""
    keys = turn_keys(row)
    if "conversations" in keys:
        system = row.get("system")
        if isinstance(system, str) and system.strip():
            yield Turn(SYSTEM, system)
        for message in list_of_messages(row, "conversations", where):
            yield read_turn(from_sharegpt(message), where, ignored_keys)
    elif "prompt" in keys:
        for message in list_of_messages(row, "prompt", where):
            yield replace(read_turn(message, where, ignored_keys), is_scored=False)
        for message in list_of_messages(row, "completion", where):
            yield read_turn(message, where, ignored_keys)
    else:
        for message in list_of_messages(row, "messages", where):
            yield read_turn(message, where, ignored_keys)


def is_list_of_objects(value: Any) -> bool:
    """Whether it is a list of JSON objects."""
    return isinstance(value, list) and all(isinstance(element, Mapping) for element in value)


def list_of_messages(row: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    """The messages of a row: a list, or its JSON, as in tables whose cells are texts. Raises BadExampleError
    for anything else."""
    messages = parse_if_json(row.get(key))
    if messages is None:
        raise BadExampleError(
            f"{where} has no turn of the {ASSISTANT}: no {key!r}. Allowed: {MESSAGES_FORM}", f"no {key}"
        )
    if not is_list_of_objects(messages):
        raise BadExampleError(
            f"{where}: {key!r} is not a list of messages: {messages!r:.60}. Allowed: {MESSAGES_FORM}, "
            "or its JSON as a text; domains.format=jsonl with domains.columns for texts",
            f"{key} that is not a list of messages",
        )
    return messages


def from_sharegpt(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of ShareGPT's form {from, value} in OpenAI's; others as they are."""
    if "from" not in message:
        return message
    other_keys = {key: value for key, value in message.items() if key not in ("from", "value")}
    role = message["from"]
    value = message.get("value")
    folded_role = str(role).strip().lower()
    if folded_role == FUNCTION_CALL:
        return {"role": ASSISTANT, "content": "", "tool_calls": value, **other_keys}
    return {"role": SHAREGPT_ROLES.get(folded_role, role), "content": value, **other_keys}


def read_turn(message: Mapping[str, Any], where: str, ignored_keys: Counter[str]) -> Turn:
    """A message as a turn. Raises BadExampleError for content, calls or weights that cannot be used."""
    ignored_keys.update(str(key) for key, value in message.items() if key not in KNOWN_KEYS and value)
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise BadExampleError(f"{where}: the role of a message is {role!r:.60}. Allowed: a text", "no role")
    role = ROLES.get(role.strip().lower(), role)

    details: dict[str, Any] = {}
    calls = read_tool_calls(message, where)
    if has_value(message, "tool_calls") and has_value(message, FUNCTION_CALL):
        ignored_keys[FUNCTION_CALL] += 1
    if calls:
        details["tool_calls"] = calls
    for key in (*REASONING_KEYS, *LABEL_KEYS):
        value = message.get(key)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise BadExampleError(f"{where}: {key!r} is not text: {value!r:.60}", f"{key} that is not text")
        details[key] = value

    is_scored = is_trained_message(message, where)
    if role != ASSISTANT:
        if any(message.get(key) for key in WEIGHT_KEYS):
            ignored_keys[f"weight of {role}"] += 1
        is_scored = True  # only answers are ever scored
    return Turn(
        role=role,
        content=read_content(message, where, has_calls=bool(calls)),
        details=details,
        is_scored=is_scored,
    )


def read_content(message: Mapping[str, Any], where: str, *, has_calls: bool) -> str:
    """The text of a message: a text, a number, parts of text, or nothing where there are tool calls. Raises
    BadExampleError for any other content."""
    if "content" not in message and not has_calls:
        message_keys = ", ".join(map(str, message))
        raise BadExampleError(
            f"{where} has no column 'content'; it has {message_keys}", "a message without content"
        )
    content = message.get("content")
    if content is None and has_calls:
        return ""
    if isinstance(content, list):
        return "".join(read_part_text(part, where) for part in content)
    is_number = isinstance(content, int | float) and not isinstance(content, bool) and math.isfinite(content)
    if not isinstance(content, str) and not is_number:
        raise BadExampleError(f"{where}: 'content' is not text: {content!r:.60}", "content that is not text")
    return str(content)


def read_part_text(part: Any, where: str) -> str:
    """The text of a content part {type: text, text: …}, which vision templates join without a separator.
    Raises BadExampleError for a part that is no text."""
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type", part) if isinstance(part, Mapping) else part
    raise BadExampleError(
        f"{where}: a content part of type {kind!r:.60} is no text. Allowed: {{type: text, text: …}}",
        "a content part that is no text",
    )


def is_trained_message(message: Mapping[str, Any], where: str) -> bool:
    """Whether a message is trained on, as its `weight` (0 or 1) and `train` (false or true) say. Raises
    BadExampleError for other values."""
    is_scored = True
    for key in WEIGHT_KEYS:
        value = message.get(key)
        if value is not None and not (isinstance(value, bool | int | float) and value in (0, 1)):
            raise BadExampleError(
                f"{where}: {key}={value!r:.60} of a message is invalid. Allowed: 0 or 1 (false or true)",
                f"a {key} that is not 0 or 1",
            )
        is_scored = is_scored and (value is None or bool(value))
    return is_scored


def read_tool_calls(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The calls of a message as chat templates take them: {type: function, function: {name, arguments}},
    whose arguments are an object; OpenAI stores them as JSON in a text. Raises BadExampleError for calls of
    another form."""
    # OpenAI's older form is one call without a list, and some data sets have a single call without one.
    calls = parse_if_json(message.get("tool_calls")) or []
    single_call = parse_if_json(message.get(FUNCTION_CALL))
    if not calls and single_call:
        calls = [{"function": single_call}]
    if not isinstance(calls, list):
        calls = [calls]

    read: list[dict[str, Any]] = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadExampleError(
                f"{where}: a tool call has no function name: {call!r:.80}. "
                "Allowed: {type: function, function: {name, arguments}}",
                "a tool call without a name",
            )
        arguments = parse_if_json(function.get("arguments") or {})
        if arguments is None:  # the text `null`
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise BadExampleError(
                f"{where}: the arguments of {function['name']} are no JSON object: {arguments!r:.60}. "
                "Allowed: an object, or its JSON",
                "arguments that are no JSON object",
            )
        other_keys = {
            key: value for key, value in call.items() if key not in ("function", "name", "arguments")
        }
        completed = {**function, "arguments": arguments}
        if function is call:  # without the level `function`: its other keys are those of the call
            completed = {"name": function["name"], "arguments": arguments}
        read.append({"type": "function", **other_keys, "function": completed})
    return read


def read_tools(row: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """The tools that a row offers to the assistant: `tools`, or OpenAI's older `functions`. Raises
    BadExampleError for tools of another form."""
    if has_value(row, OLDER_TOOLS) and not has_value(row, "tools"):
        functions = read_schemas(row, OLDER_TOOLS, where, example="{name, parameters}")
        return tuple({"type": "function", "function": function} for function in functions)
    return tuple(read_schemas(row, "tools", where, example="{type: function, function: {…}}"))


def read_schemas(row: Mapping[str, Any], key: str, where: str, *, example: str) -> list[Mapping[str, Any]]:
    """The JSON schemas in a list of a row, or in its JSON; none for a list that is missing or empty. Raises
    BadExampleError, with an `example` of a schema, for anything else."""
    schemas = parse_if_json(row.get(key)) or []
    if not is_list_of_objects(schemas):
        raise BadExampleError(
            f"{where}: {key!r} is not a list of JSON schemas: {schemas!r:.60}. Allowed: [{example}, …]",
            f"{key} of another form",
        )
    return list(schemas)


def read_template_options(row: Mapping[str, Any], where: str, ignored_keys: Counter[str]) -> dict[str, Any]:
    """The further variables that a row gives to the chat template, like `enable_thinking`. Counts those that
    cpt sets itself in `ignored_keys`. Raises BadExampleError where they are not an object."""
    options = parse_if_json(row.get(TEMPLATE_OPTIONS)) or {}
    if not isinstance(options, Mapping):
        raise BadExampleError(
            f"{where}: {TEMPLATE_OPTIONS!r} is no object: {options!r:.60}. "
            "Allowed: {enable_thinking: false}",
            f"{TEMPLATE_OPTIONS} that is no object",
        )
    used_options = {}
    for name, value in options.items():
        if name in RENDERING_KEYS:
            ignored_keys[f"{TEMPLATE_OPTIONS}.{name}"] += 1
        elif value is not None:  # tables have null for what a row lacks
            used_options[str(name)] = value
    return used_options


def parse_if_json(value: Any) -> Any:
    """What a text holds as JSON; anything else, also a text that is not JSON, as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        return value
