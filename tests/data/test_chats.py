"""Chats as tokens: each answer follows the tokens of its prompt, and nothing of a message is left out."""

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from transformers import ByT5Tokenizer

from cpt.data.chats import ChatCounts, ChatEncoder, group_into_sequences
from cpt.data.sources.base import SPLIT
from cpt.data.sources.chats import IgnoredKeys, read_chat
from cpt.data.sources.examples import (
    BadExampleError,
    BadExamples,
    Example,
    Turn,
    read_example,
    write_example,
)
from cpt.data.text_encoder import TextEncoder
from tests.support import chat_templates
from tests.support.chat_templates import BACKENDS, TEMPLATES, chat_tokenizer
from tests.support.task_fixtures import encoder
from tests.support.tokenizer_kinds import bert_legacy, lower_words, merged_end, unigram, word_level

TODAY = "2026-01-02"
SPACED_TURNS = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ANSWERS = ("one", "b", "\nnew line", " blank", "12", "é", "no.", "你好 x")
WEATHER = {"name": "w", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "w", "arguments": '{"city": "Paris"}'}}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **details):
    return {"role": "assistant", "content": content, **details}


def agent(content=None):
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "w", "content": "12"}
    return [user("hello"), assistant(content, tool_calls=[CALL]), result, assistant("yes")]


def read(messages, **row):
    raw = read_chat({"messages": messages, **row}, "chats.jsonl, line 1", IgnoredKeys())
    return Example(
        "e", "", raw.target, "talk", turns=raw.turns, tools=raw.tools, template_options=raw.template_options
    )


def exchanges(answers):
    messages = []
    for answer in answers:
        messages += [user("hello"), assistant(answer)]
    return messages


def answers_of(template, messages, *, kind="gpt2", **row):
    tokenizer = chat_tokenizer(kind, TEMPLATES.get(template, template))
    return tokenizer, ChatEncoder(tokenizer, TODAY).answers(read(messages, **row))


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_token_of_an_answer_follows_the_prompt_as_it_is_asked(kind, template):
    tokenizer, answers = answers_of(template, exchanges(ANSWERS), kind=kind)
    assert [answer.turn for answer in answers] == list(range(1, 2 * len(ANSWERS), 2))
    messages = exchanges(ANSWERS)
    for answer, text in zip(answers, ANSWERS, strict=True):
        scored = tokenizer.decode(answer.ids, skip_special_tokens=True)
        assert "<unk>" in tokenizer.convert_ids_to_tokens(answer.ids) or text.strip() in scored
        if template not in ("llama3", "granite"):  # which print the date
            prompt = tokenizer.apply_chat_template(
                messages[: answer.turn], add_generation_prompt=True, tokenize=False
            )
            assert answer.prompt == tokenizer(prompt, add_special_tokens=False)["input_ids"]

    # Answers of one sequence are scored in one pass: each continues the one before.
    for sequence in group_into_sequences(answers):
        for previous, answer in itertools.pairwise(sequence):
            assert answer.prompt[: len(previous.whole)] == previous.whole


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("template", ["spaced", "unended", "marked_spaced"])
def test_an_answer_that_would_merge_with_its_prompt_is_scored_from_its_first_letter(kind, template):
    for text in ("one", "b", "no"):
        tokenizer = chat_tokenizer(kind, TEMPLATES[template])
        example = read(exchanges([text]))
        row = encoder(tokenizer).encode(example)
        scored = [token for token, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]
        assert tokenizer.decode(scored) == f"{text}</s>"
        prompt = encoder(tokenizer).prompt(example)
        assert (prompt.ids + prompt.reference, prompt.reference) == (row.ids, scored)


@pytest.mark.parametrize("kind", BACKENDS)
def test_an_answer_to_a_question_without_a_template_is_scored_whole(kind):
    tokenizer = chat_tokenizer(kind, TEMPLATES["chatml"])
    for text in ANSWERS:
        row = encoder(tokenizer).encode(Example("e", "the answer no. one:", text, "ask"))
        begin = row.answer.index(True)
        assert row.ids[:begin] == tokenizer("the answer no. one:")["input_ids"]
        scored = tokenizer.convert_ids_to_tokens(row.ids[begin:])
        assert "<unk>" in scored or tokenizer.decode(row.ids).endswith(f": {text}</s>")


def test_an_end_mark_that_takes_the_blanks_after_it_is_scored():
    tokenizer, answers = answers_of("phi3", exchanges(["yes", "no"]))
    assert [tokenizer.decode(answer.ids) for answer in answers] == ["yes<|end|>", "no<|end|>"]
    assert len(group_into_sequences(answers)) == 1


def test_a_tokenizer_without_a_fast_version_scores_whole_answers():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = TEMPLATES["spaced"]
    row = encoder(tokenizer, truncate="released").encode(read(exchanges(["é one"])))
    scored = [token for token, is_answer in zip(row.ids, row.answer, strict=True) if is_answer]
    assert tokenizer.decode(scored) == "é one</s>"


def test_answers_of_a_template_that_drops_thoughts_are_sequences_of_their_own():
    messages = [
        user("hello"),
        assistant("one", reasoning_content="b c d"),
        user("why"),
        assistant("yes", reasoning_content="no"),
    ]
    tokenizer, answers = answers_of("qwen3", messages)
    first, second = (tokenizer.decode(answer.whole) for answer in answers)
    assert "<think>\nb c d\n</think>\n\none<|im_end|>" in first
    assert "assistant\none<|im_end|>" in second and "b c d" not in second
    assert second.endswith("<think>\nno\n</think>\n\nyes<|im_end|>")
    example = read(messages)
    rows = list(encoder(tokenizer).encode_all([example]))
    assert [sum(row.answer) - 1 for row in rows] == [len(answer.ids) for answer in answers]  # 1: eos
    assert all(row.example is example for row in rows)
    assert len(list(encoder(tokenizer, scored_turns="last").encode_all([example]))) == 1

    # Thoughts may also stand in the text of a turn.
    messages = [
        user("hello"),
        assistant("<think>\nb c d\n</think>\n\none"),
        user("why"),
        assistant("<think>\nno\n</think>\n\nyes"),
    ]
    _, answers_with_inline_thoughts = answers_of("qwen3", messages)
    assert answers_with_inline_thoughts == answers


def test_a_system_prompt_before_the_last_question_only_is_in_each_prompt():
    messages = [{"role": "system", "content": "be"}, *exchanges(["one", "no"])]
    tokenizer, answers = answers_of("mistral", messages)
    assert [tokenizer.decode(answer.whole) for answer in answers] == [
        "<s>[INST] be\n\nhello[/INST] one</s>",
        "<s>[INST] hello[/INST] one</s>[INST] be\n\nhello[/INST] no</s>",
    ]


@pytest.mark.parametrize("template", ["qwen25", "mistral"])
@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_results_and_tools_are_what_the_template_prints(template, content):
    tokenizer, answers = answers_of(template, agent(content), tools=TOOLS)
    call, reply = (tokenizer.decode(answer.ids) for answer in answers)
    assert '{"name": "w", "arguments": {"city": "Paris"}' in call and reply.strip().startswith("yes")
    assert json.dumps(TOOLS[0]) in tokenizer.decode(answers[0].prompt)
    assert "12" in tokenizer.decode(answers[1].prompt)


def test_other_forms_of_calls_and_chats_are_the_same_chat():
    expected = read(agent("")).turns
    function = {"name": "w", "arguments": {"city": "Paris"}}
    legacy = agent("")
    legacy[1] = assistant("", function_call=function)
    legacy[2] = {"role": "function", "name": "w", "content": "12"}
    flat = agent("")
    flat[1] = assistant("", tool_calls=[{"id": "abcdefghi", **function}])
    parts = agent("")
    parts[0] = user([{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}])
    assert read(flat).turns == read(parts).turns == expected
    assert read(legacy).turns[1].details["tool_calls"][0]["function"] == function
    assert read(legacy).turns[2].role == "tool"

    spoken = [
        ("human", "hello"),
        ("function_call", json.dumps(function)),
        ("observation", "12"),
        ("gpt", "yes"),
    ]
    conversations = [{"from": name, "value": value} for name, value in spoken]
    row = {"conversations": conversations, "system": "be", "tools": json.dumps(TOOLS)}
    sharegpt = read_chat(row, "chats.jsonl, line 1", IgnoredKeys())
    assert [turn.role for turn in sharegpt.turns] == ["system", "user", "assistant", "tool", "assistant"]
    assert sharegpt.turns[2].details["tool_calls"][0]["function"] == function
    assert list(sharegpt.tools) == TOOLS

    row = {"prompt": exchanges(["one"]) + [user("why")], "completion": [assistant("so")]}
    halves = read_chat(row, "chats.jsonl, line 1", IgnoredKeys())
    assert [turn.is_answer for turn in halves.turns] == [False, False, False, True]
    assert read_example(write_example(read(agent(""), tools=TOOLS))) == read(agent(""), tools=TOOLS)


@pytest.mark.parametrize("name", ["gpt", "chatgpt", "Bard", "bing", "Assistant", " ASSISTANT"])
def test_names_of_the_assistant_and_roles_of_any_case_are_those_of_templates(name):
    expected = read([{"role": "system", "content": "be"}, user("hello"), assistant("one")]).turns
    spoken = [("System", "be"), ("Human", "hello"), (name, "one")]
    rows = [
        {"conversations": [{"from": role, "value": text} for role, text in spoken]},
        {"messages": [{"role": role, "content": text} for role, text in spoken]},
        {"messages": [{"role": role.replace("Human", "USER"), "content": text} for role, text in spoken]},
    ]
    for row in rows:
        assert read_chat(row, "chats.jsonl, line 1", IgnoredKeys()).turns == expected
        assert read_chat(row, "chats.jsonl, line 1", IgnoredKeys()).turns[2].is_answer

    # Roles that no data set shares are the template's, which refuses them.
    for role in ("Narrator", "observation"):
        assert read([{"role": role, "content": "so"}, *exchanges(["one"])]).turns[0].role == role
    row = {"conversations": [{"from": "Narrator", "value": "so"}, {"from": "model", "value": "one"}]}
    with pytest.raises(BadExampleError, match="its roles are Narrator, model. Allowed"):
        read_chat(row, "chats.jsonl, line 1", IgnoredKeys())


def test_lists_of_messages_and_of_calls_may_be_json_in_texts():
    messages = agent("")
    halves = {"prompt": exchanges(["one"])[:1], "completion": [assistant("one")]}
    sharegpt = {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "one"}]}
    for row in ({"messages": messages, "tools": TOOLS}, halves, sharegpt):
        texts = {key: json.dumps(value) for key, value in row.items()}
        ignored = IgnoredKeys()
        assert read_chat(texts, "a.csv, row 1", ignored) == read_chat(row, "a.csv, row 1", IgnoredKeys())
        assert not ignored.of_rows and not ignored.of_messages

    calls = agent("")
    calls[1] = assistant("", tool_calls=json.dumps([CALL]))
    assert read(calls).turns == read(messages).turns
    calls[1] = assistant("", function_call=json.dumps({"name": "w", "arguments": {"city": "Paris"}}))
    assert read(calls).turns[1].details["tool_calls"][0]["function"]["name"] == "w"

    # Tables of texts have `null` for what a row lacks.
    answer = assistant("yes", tool_calls="null", function_call="null")
    row = {"messages": [user("hello"), answer], "tools": "null", "chat_template_kwargs": "null"}
    plain_row = {"messages": [user("hello"), assistant("yes")]}
    assert read_chat(row, "a.csv, row 1", IgnoredKeys()) == read_chat(plain_row, "row 1", IgnoredKeys())
    calls[1] = assistant("", function_call=json.dumps({"name": "w", "arguments": "null"}))
    assert read(calls).turns[1].details["tool_calls"][0]["function"]["arguments"] == {}

    for text in ("hello", "[1, 2]", '{"role": "user"}', "[" * 100_000):
        with pytest.raises(BadExampleError, match="'messages' is not a list of messages: .*JSON as a text"):
            read(text)


def test_arguments_are_texts_where_the_template_prints_no_objects():
    tokenizer, answers = answers_of(chat_templates.DEEPSEEK, agent(""))
    assert tokenizer.decode(answers[0].ids) == '<tool_call>w\n{"city": "Paris"}</tool_call></s>'


ASKS_ONLY = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
UNPRINTED = [
    (chat_templates.CHATML, agent(""), {}, "'tool_calls' of turn 2"),
    (chat_templates.GRANITE, agent(""), {}, "'tool_calls' of turn 2"),
    (chat_templates.LLAMA3, agent(""), {"tools": TOOLS}, "'tools'"),
    (
        chat_templates.CHATML,
        [user("a"), assistant("b", reasoning_content="c")],
        {},
        "'reasoning_content' of turn 2",
    ),
    (chat_templates.LLAMA3, [user("a"), assistant("b", thinking="c")], {}, "'thinking' of turn 2"),
    (ASKS_ONLY, [{"role": "system", "content": "be"}, user("a"), assistant("b")], {}, "the text of turn 1"),
    (ASKS_ONLY, agent("so"), {}, "'tool_calls' of turn 2"),
    (ASKS_ONLY, [user("a"), assistant("b"), agent()[2], assistant("c")], {}, "the text of turn 3"),
]


@pytest.mark.parametrize(("template", "messages", "row", "unprinted"), UNPRINTED)
def test_what_the_template_does_not_print_is_refused_by_name(template, messages, row, unprinted):
    with pytest.raises(BadExampleError, match=f"example e: .* does not print {unprinted}"):
        answers_of(template, messages, **row)


def test_names_that_the_template_does_not_print_are_counted():
    tokenizer = chat_tokenizer("gpt2", chat_templates.CHATML)
    counts = ChatCounts()
    messages = [{**user("hello"), "name": "ann"}, assistant("one", name="bob")]
    ChatEncoder(tokenizer).answers(read(messages), counts)
    assert counts.unused_keys == {"name": 2}


def test_turns_of_weight_0_are_not_scored():
    weights = [{"weight": 0}, {"weight": 1}, {"train": True}, {"train": False}]
    messages = exchanges(["one", "two", "no", "yes"])
    for message, weight in zip(messages[1::2], weights, strict=True):
        message |= weight
    tokenizer, answers = answers_of("chatml", messages)
    assert [tokenizer.decode(answer.ids) for answer in answers] == ["two<|im_end|>", "no<|im_end|>"]
    assert "one" in tokenizer.decode(answers[0].prompt)


WRONG = [
    ([user("a"), assistant("b", weight=0.5)], "weight=0.5 of a message"),
    ([user("a"), assistant("b", train="no")], "train='no' of a message"),
    ([], "no turn of the assistant to train on or to score: its list of messages is empty"),
    (
        [user("a"), {"role": "model", "content": "b"}],
        "to score: its roles are user, model. Allowed: .*role=assist",
    ),
    (
        [user("a"), assistant("b", weight=0)],
        "to score: all have weight=0 or train=false. Allowed: .*weight=1",
    ),
    ([user("a"), assistant(" ")], "an answer of the assistant is empty"),
    ([user("a"), assistant(""), user("b"), assistant("c")], "an answer of the assistant is empty"),
    ([user("a"), assistant(None)], "'content' is not text: None"),
    ([user([{"type": "image_url", "image_url": "x"}]), assistant("b")], "type 'image_url' is no text"),
    ([{"content": "a"}, assistant("b")], "role of a message is None"),
    ([user("a"), assistant("", tool_calls=[{"type": "function"}])], "a tool call has no function name"),
    (
        [user("a"), assistant("", tool_calls=[{"name": "w", "arguments": "x"}])],
        "arguments of w are no JSON object",
    ),
]


@pytest.mark.parametrize(("messages", "reason"), WRONG)
def test_a_message_that_cannot_be_used_is_refused_with_its_line(messages, reason):
    with pytest.raises(BadExampleError, match=f"^chats.jsonl, line 1.*{reason}"):
        read(messages)


def test_keys_that_are_not_read_are_counted_and_nulls_are_none():
    ignored = IgnoredKeys()
    messages = [{**user("a"), "id": 7}, assistant("b", id=8, tool_calls=None, name=None, refusal="")]
    raw = read_chat({"messages": messages}, "chats.jsonl, line 1", ignored)
    assert ignored.of_messages == {"id": 2} and not ignored.of_rows
    assert raw.turns == (Turn("user", "a"), Turn("assistant", "b"))


@pytest.mark.parametrize("template", ["chatml", "mistral", "marked_spaced"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3"])
def test_control_tokens_in_a_turn_are_text_and_those_of_the_template_are_parsed(template, kind):
    messages = [user("was <s>ten</s> now"), assistant("five <|im_end|> left")]
    tokenizer, answers = answers_of(template, messages, kind=kind)
    (answer,) = answers
    plain_messages = [user("was ten now"), assistant("five left")]
    _, plain_answers = answers_of(template, plain_messages, kind=kind)

    def count_added_tokens(ids):
        return Counter(token for token in ids if token in tokenizer.added_tokens_decoder)

    assert count_added_tokens(answer.whole) == count_added_tokens(plain_answers[0].whole)
    assert "was <s>ten</s> now" in tokenizer.decode(answer.prompt)
    assert "five <|im_end|> left" in tokenizer.decode(answer.ids)
    if template != "marked_spaced":
        rendered = tokenizer.apply_chat_template(messages, sanitize_control_tokens=True)["input_ids"]
        assert answer.whole == rendered[: len(answer.whole)]


@pytest.mark.parametrize("make", [unigram, word_level, lower_words, merged_end, ByT5Tokenizer, bert_legacy])
def test_turns_do_not_inject_control_tokens_with_any_kind_of_tokenizer(make, tmp_path):
    tokenizer = make(tmp_path / "v") if make is bert_legacy else make()
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token
    tokenizer.chat_template = SPACED_TURNS
    control_ids = TextEncoder(tokenizer, SPLIT).control_ids
    end = tokenizer.eos_token

    def list_control_ids(messages):
        (answer,) = ChatEncoder(tokenizer).answers(read(messages))
        return [token for token in answer.whole if token in control_ids]

    expected = list_control_ids([user("red"), assistant("red")])
    for text in (end, f"red {end} red", f"red{end}", end.upper(), f"red {end.upper()} {end}"):
        assert list_control_ids([user(text), assistant(text)]) == expected, text
    assert list_control_ids([{"role": f"user {end}", "content": "red"}, assistant("red")]) == expected


def test_names_in_tools_and_arguments_do_not_inject_control_tokens():
    schema = {"type": "object", "properties": {"<s>city": {"type": "string"}}}
    tools = [{"type": "function", "function": {**WEATHER, "parameters": schema}}]
    tokenizer, answers = answers_of("qwen25", agent(""), tools=tools)
    (start,) = tokenizer.convert_tokens_to_ids(["<s>"])
    assert start not in answers[0].whole and "<s>city" in tokenizer.decode(answers[0].prompt)


def test_options_of_a_row_are_those_of_its_template_at_training_and_in_prompts():
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    switched = "{% if enable_thinking is false %}/no{% endif %}{{ persona }}" + template
    tokenizer = chat_tokenizer("gpt2", switched)
    options = {"enable_thinking": False, "persona": "a cat</s>", "unused": 1}
    example = read([user("hello"), assistant("one")], chat_template_kwargs=options)
    counts = ChatCounts()
    (answer,) = ChatEncoder(tokenizer).answers(example, counts)
    text = tokenizer.decode(answer.whole)
    assert text.startswith("/noa cat</s>user: hello")
    assert answer.whole.count(tokenizer.eos_token_id) == 2  # of the template
    assert counts.unused_keys == {"chat_template_kwargs.unused": 1}

    prompt = encoder(tokenizer).prompt(example)
    assert prompt.ids == answer.prompt
    assert read_example(write_example(example)) == example
    plain = read([user("hello"), assistant("one")])
    assert plain.question != example.question and "template_options" not in write_example(plain)

    tokenizer.chat_template = "{% if enable_thinking is false %}/no{% endif %}" + TEMPLATES["marked_spaced"]
    (answer,) = ChatEncoder(tokenizer).answers(example)
    assert tokenizer.decode(answer.whole).startswith("/no")


def test_keys_of_rows_that_are_not_read_are_counted():
    ignored = IgnoredKeys()
    row = {"messages": [user("a"), assistant("b")], "id": 3, "source": "web", "documents": [], "label": 0}
    read_chat({**row, "chat_template_kwargs": '{"tools": [1], "x": null}'}, "chats.jsonl, line 1", ignored)
    read_chat({**row, "conversations": [1], "system": None}, "chats.jsonl, line 2", ignored)
    counts = {"source": 2, "label": 2, "chat_template_kwargs.tools": 1, "conversations": 1}
    assert ignored.of_rows == counts and not ignored.of_messages
    with pytest.raises(BadExampleError, match="chats.jsonl, line 1: 'chat_template_kwargs' is no object: 'x"):
        read(row["messages"], chat_template_kwargs="x=1")


def test_tools_of_the_older_form_are_functions_and_those_beside_tools_are_counted():
    question = [user("hello"), assistant("one")]
    tool = {"name": "w", "parameters": {}}
    for functions in ([tool], json.dumps([tool])):
        assert read(question, functions=functions).tools == ({"type": "function", "function": tool},)
    for functions in (tool, json.dumps(tool), "w", ["w"], '["w"]', 5):
        with pytest.raises(BadExampleError, match="line 1: 'functions' is not a list of JSON schemas: "):
            read(question, functions=functions)
    for functions in (None, "", "null", [], {}):
        assert read(question, functions=functions).tools == ()

    ignored = IgnoredKeys()
    answer = assistant("", tool_calls=[{"name": "w"}], function_call={"name": "x"})
    row = {"messages": [user("hello"), answer], "tools": TOOLS, "functions": [tool]}
    raw = read_chat(row, "chats.jsonl, line 1", ignored)
    assert raw.tools == tuple(TOOLS) and ignored.of_rows == {"functions": 1}
    assert len(raw.turns[1].details["tool_calls"]) == 1 and ignored.of_messages == {"function_call": 1}


def test_of_a_table_that_was_joined_of_several_forms_the_one_with_a_value_is_read():
    sharegpt = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "one"}]
    halves = {"prompt": [user("hello")], "completion": [assistant("one")]}
    nulls = dict.fromkeys(("messages", "conversations", "system", "prompt", "completion"))
    for row in ({"messages": [user("hello"), assistant("one")]}, {"conversations": sharegpt}, halves):
        turns = read_chat({**nulls, **row}, "chats.jsonl, line 1", IgnoredKeys()).turns
        assert [turn.content for turn in turns] == ["hello", "one"]
    with pytest.raises(BadExampleError, match="line 1 has no turn of the assistant: no 'messages'"):
        read_chat(nulls, "chats.jsonl, line 1", IgnoredKeys())


def test_bad_examples_stop_or_are_skipped_and_counted():
    tokenizer = chat_tokenizer("gpt2", chat_templates.GEMMA)
    systems = [{"role": "system", "content": "be"}, *exchanges(["one"])]
    examples = [read(exchanges(["no"])), read(systems), read(exchanges(["word " * 300])), read(systems)]
    with pytest.raises(
        BadExampleError, match=r"System role not supported.*on_bad_example=skip leaves it out"
    ):
        list(encoder(tokenizer).encode_all(examples, bad=BadExamples(is_skipping=False)))
    bad = BadExamples(is_skipping=True)
    assert len(list(encoder(tokenizer).encode_all(examples, bad=bad))) == 1
    assert sorted(bad.counts.values()) == [1, 2] and bad.counts["too many tokens"] == 1


def test_the_date_that_a_template_prints_is_that_of_the_run():
    for template, printed in (
        (chat_templates.LLAMA3, "02 Jan 2026"),
        (chat_templates.GRANITE, "January 02, 2026"),
    ):
        tokenizer = chat_tokenizer("gpt2", template)
        prompts = []
        for day in (TODAY, TODAY, "1999-12-31"):
            (answer,) = ChatEncoder(tokenizer, day).answers(read(exchanges(["one"])))
            prompts.append(tokenizer.decode(answer.prompt))
        assert printed in prompts[0] and prompts[0] == prompts[1] != prompts[2]
        with pytest.raises(ValueError, match="domains.date=null is invalid"):
            ChatEncoder(tokenizer).answers(read(exchanges(["one"])))
    computed = "{% set form = '%d' %}{{ strftime_now(form) }}"
    with pytest.raises(ValueError, match="computes the format of its date"):
        ChatEncoder(chat_tokenizer("gpt2", computed), TODAY).answers(read(exchanges(["one"])))


def test_a_long_chat_keeps_a_call_with_its_result():
    tokenizer = chat_tokenizer("gpt2", chat_templates.QWEN25)
    example = read([*agent(""), user("hello"), assistant("one")])
    full = encoder(tokenizer, length=4000).encode(example)
    row = encoder(tokenizer, length=len(full.ids) - 1).encode(example)
    assert tokenizer.decode(row.ids) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|></s>"
    )
    assert (row.lost_answers, row.cut) == (2, len(full.ids) - len(row.ids))

    # Where all turns are a question, a call, its result and the answer, nothing can be left out.
    single = replace(example, turns=example.turns[:4])
    size = len(encoder(tokenizer, length=4000).encode(single).ids)
    message = f"its last exchange takes {size} tokens .* Allowed: model.max_seq_length of at least {size} "
    with pytest.raises(BadExampleError, match=message):
        encoder(tokenizer, length=size - 40).encode(single)
