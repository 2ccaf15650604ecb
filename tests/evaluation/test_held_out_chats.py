"""Held-out chats: read from files, answers judged, and the changes since the base by hand."""

import json
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from cpt.evaluation.chat_answers import (
    ChatAnswer,
    collect_losses,
    describe_faults,
    find_newly_broken,
    find_repeated_share,
    judge_answer,
    summarise_rows,
)
from cpt.evaluation.chat_encoding import choose_chat_length, encode_held_out_chats, find_answer_ends
from cpt.evaluation.chat_files import (
    StoredAnswers,
    StoredLosses,
    load_answers,
    load_losses,
    save_answers,
    save_losses,
)
from cpt.evaluation.chat_set import SHIPPED, read_chats
from cpt.evaluation.options import ChatOptions
from tests.support.chat_templates import CHATML, chat_tokenizer


def options(path=None):
    return ChatOptions(path=path, when="each", generate=5, max_new_tokens=8, batch_size=4)


def row(*contents, **further_keys):
    roles = ("user", "assistant") * len(contents)
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return json.dumps({"messages": messages} | further_keys, ensure_ascii=False)


def answer(
    *, id="a", text="t", tokens=4, complete=True, repeated=0.0, other_language=None, right=None, ids=()
):
    return ChatAnswer(
        id=id,
        question="q",
        text=text,
        tokens=tokens,
        complete=complete,
        repeated=repeated,
        other_language=other_language,
        right=right,
        ids=ids,
    )


def test_the_shipped_chats_are_free_different_and_answered_well_by_their_own_answers():
    lines = [json.loads(line) for line in SHIPPED.read_text().splitlines()]
    assert {line["license"] for line in lines} == {"CC0-1.0"}
    chats = read_chats(options())
    assert 24 <= len(chats) <= 40 and len({chat.example.id for chat in chats}) == len(chats)
    assert {"en", "de", "fr", "es", "zh"} <= {chat.language for chat in chats}
    assert sum(len(chat.example.turns) > 2 for chat in chats) >= 3
    for chat in chats:
        reference = chat.example.turns[-1].content
        judged = judge_answer(chat, ids=list(range(len(reference))), text=reference, complete=True)
        assert not judged.broken and judged.right in (True, None), chat.example.id
    assert Counter(bool(chat.expect) for chat in chats)[True] > 15


def test_files_of_chats_are_read_in_their_order_and_a_bad_row_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text(row("Hello you there, how are you?", "I am well.", id="x") + "\n")
    (tmp_path / "b.jsonl").write_text(
        row("Say it in French: yes", "Oui", expect="oui", language="fr") + "\n" + row("2 + 2?", "4")
    )
    chats = read_chats(options(str(tmp_path)))
    assert [chat.example.id for chat in chats] == ["x", "1", "2"]
    assert [chat.language for chat in chats] == ["en", "fr", "unknown"]
    assert [chat.expect for chat in chats] == [(), ("oui",), ()]
    assert read_chats(options(str(tmp_path / "b.jsonl")))[0].question == "Say it in French: yes"

    bad_rows = {
        "[]": "line 2 is not an object",
        row("only a question"): "line 2 has no turn of the assistant .* its roles are user. Allowed: ",
        row("a", "b").replace(
            '"content": "b"', '"content": "b", "weight": 0'
        ): "line 2 .*: all have weight=0 or",
        row("a", "b", expect=[1]): r"line 2: expect=\[1\] is invalid. Allowed: a text, or a list of texts",
        row("a", "b", expect=""): "line 2: expect=",
        row("a", "b", language="French"): "line 2: language='French' is invalid: .* Allowed: de, en, es, fr,",
        row("a", "b", language=["fr"]): r"line 2: language=\['fr'\] is invalid",
    }
    for text, message in bad_rows.items():
        (tmp_path / "b.jsonl").write_text(row("a", "b") + "\n" + text)
        with pytest.raises(ValueError, match=f"b.jsonl, {message}"):
            read_chats(options(str(tmp_path)))
    with pytest.raises(ValueError, match=r"chats.path=.*missing is invalid: it is missing"):
        read_chats(options(str(tmp_path / "missing")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match="empty is invalid: no file of the folder has JSON lines. Allowed: a fi"
    ):
        read_chats(options(str(tmp_path / "empty")))
    (tmp_path / "empty" / "chats.csv").write_text("messages\nhello")
    for path in (tmp_path / "empty", tmp_path / "empty" / "chats.csv"):
        with pytest.raises(ValueError, match="chats.path=.* is invalid: chats.csv is no file of JSON lines"):
            read_chats(options(str(path)))
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="it has no chats"):
        read_chats(options(str(tmp_path / "b.jsonl")))


def test_an_answer_is_broken_if_it_does_not_end_repeats_itself_or_is_in_another_language():
    assert find_repeated_share([1, 2, 3]) == 0.0
    assert find_repeated_share([1, 2, 1, 2, 1, 2, 1]) == 0.5  # four 4-grams, two of them different
    chat = read_chats(options())[0]  # the capital of France
    assert judge_answer(chat, ids=[1, 2, 1, 2, 1, 2, 1, 9], text="", complete=True).repeated == 0.5
    loop = judge_answer(chat, ids=[5, 6] * 30, text="La femme de France, " * 9, complete=False)
    assert loop.broken and loop.right is False and loop.other_language is True
    assert describe_faults(loop) == "does not end, repeats itself, another language, wrong"
    good = judge_answer(chat, ids=[1, 2, 3], text="It is paris.", complete=True)
    assert (good.tokens, good.ids) == (2, [1, 2, 3])  # the last one ends it
    assert not good.broken and good.right is True and describe_faults(good) == ""
    assert not answer(repeated=0.5).broken and answer(repeated=0.51).broken
    assert (
        answer(complete=False).broken
        and answer(other_language=True).broken
        and not answer(right=False).broken
    )
    assert find_newly_broken(
        [answer(complete=False, id=name) for name in "ab"], [answer(complete=False), answer()]
    ) == [answer(complete=False, id="b")]


def test_changes_are_paired_by_chat_with_the_interval_of_student():
    tokens = np.array([10.0, 20.0, 5.0])
    base = np.array([[10.0, 40.0, 5.0], tokens])
    last = np.array([[15.0, 44.0, 7.5], tokens])  # 0.5, 0.2 and 0.5 nats per token more
    rises = [0.5, 0.2, 0.5]
    nll, rise = collect_losses([base, None, last])
    assert nll == [pytest.approx(4 / 3), None, pytest.approx(4 / 3 + 0.4)]
    half_width = stats.t.ppf(0.975, 2) * stats.sem(rises)
    assert rise == [None, None, pytest.approx([0.4, 0.4 - half_width, 0.4 + half_width])]
    assert collect_losses([base[:, :2], last[:, :2]])[1][1][1:] == [None, None]  # two chats have no interval

    base_answers = [answer(), answer(), answer(right=True)]
    last_answers = [answer(complete=False, tokens=8), answer(), answer(right=False)]
    before, between, after = summarise_rows([base_answers, None, last_answers])
    assert between is None and before["changes"] == {} and before["newly_broken"] is None
    assert (
        after["measures"]["complete"] == pytest.approx(2 / 3) and after["measures"]["other_language"] is None
    )
    assert after["changes"]["tokens"][0] == pytest.approx(4 / 3) and after["newly_broken"] == 1
    assert after["changes"]["right"] == [-1.0, None, None]  # of one chat: no interval


def test_what_is_stored_is_read_again_and_damage_is_said(tmp_path):
    losses = StoredLosses(digest="d", seconds=1.5, chats=["a", "b"], losses=np.array([[0.1, 1 / 3], [3, 4]]))
    answers = StoredAnswers(
        digest="d", seconds=1.5, answers=[answer(text="ß", ids=[1, 2]), answer(right=True, ids=[3])]
    )
    save_losses(tmp_path / "losses.json", losses)
    save_answers(tmp_path / "answers.json", answers)
    assert load_answers(tmp_path / "answers.json") == answers
    read = load_losses(tmp_path / "losses.json")
    assert read.chats == ["a", "b"] and np.array_equal(read.losses, losses.losses)
    for name, load in (("losses.json", load_losses), ("answers.json", load_answers)):
        text = (tmp_path / name).read_text()
        for damaged in (text[:-20], text.replace("1.5", '"x"'), text.replace('": [', '": [0,'), "[]"):
            (tmp_path / name).write_text(damaged)
            with pytest.raises(ValueError, match=f"{name} is damaged"):
                load(tmp_path / name)


def test_chats_are_encoded_as_the_template_renders_them_and_the_shipped_ones_may_be_skipped(tmp_path):
    tokenizer = chat_tokenizer("gpt2", CHATML, eos="<|im_end|>")
    encoded = encode_held_out_chats(options(), tokenizer, length=1024)
    assert len(encoded) == len(read_chats(options()))
    two_turns = next(chat for chat in encoded if len(chat.chat.example.turns) > 2)
    messages = [turn.message for turn in two_turns.chat.example.turns]
    rendered = two_turns.rows[0].ids
    assert tokenizer.decode(rendered) == tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
    scored = [token for token, mark in zip(rendered, two_turns.rows[0].answer, strict=True) if mark]
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert tokenizer.decode(scored) == "".join(f"{text}<|im_end|>" for text in answers)
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(two_turns.prompt.ids) == prompt
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_answer_ends(tokenizer, encoded, [end, 7]) == [end, 7]

    assert len(encode_held_out_chats(options(), tokenizer, length=60)) < len(encoded)
    (tmp_path / "long.jsonl").write_text(row("a", "word " * 200))
    with pytest.raises(ValueError, match="long.jsonl, line 1: .*its last exchange takes .* of at least"):
        encode_held_out_chats(options(str(tmp_path / "long.jsonl")), tokenizer, length=60)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    messages = [{"role": "user", "content": "a"}, call]
    (tmp_path / "tools.jsonl").write_text(row("a", "b") + "\n" + json.dumps({"messages": messages}))
    with pytest.raises(ValueError, match="tools.jsonl, line 2: .* does not print 'tool_calls'"):
        encode_held_out_chats(options(str(tmp_path / "tools.jsonl")), tokenizer, length=1024)


def test_why_shipped_chats_are_skipped_is_reported(caplog):
    caplog.set_level("INFO", logger="cpt")
    tokenizer = chat_tokenizer("gpt2", CHATML, eos="<|im_end|>")
    num_chats = len(read_chats(options()))
    num_short = len(encode_held_out_chats(options(), tokenizer, length=60))
    (line,) = [record for record in caplog.records if "Skipping" in record.getMessage()]
    num_skipped = num_chats - num_short
    assert line.levelname == "INFO"
    assert f"Skipping {num_skipped} of {num_chats} chats: {num_skipped} × " in line.getMessage()

    caplog.clear()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}"  # without its end
    assert encode_held_out_chats(options(), tokenizer, length=1024) == []
    (line,) = caplog.records
    assert line.levelname == "WARNING" and "Not measuring chats" in line.getMessage()
    assert f": {num_chats} × turns that the chat template does not take: " in line.getMessage()


@pytest.mark.parametrize("template", [None, "", {"rag": CHATML}])
def test_shipped_chats_need_a_template_that_is_taken(template, caplog, tmp_path):
    """A folder may look as if it had one: chat_template.json of a processor, an empty chat_template.jinja."""
    caplog.set_level("INFO", logger="cpt")
    tokenizer = chat_tokenizer("gpt2", CHATML, eos="<|im_end|>")
    tokenizer.chat_template = template
    assert encode_held_out_chats(options(), tokenizer, length=1024) == []
    assert "Skipping chats: the tokenizer has no chat template" in caplog.text
    (tmp_path / "own.jsonl").write_text(row("a", "b"))
    with pytest.raises(ValueError, match="has no chat template"):
        encode_held_out_chats(options(str(tmp_path / "own.jsonl")), tokenizer, length=1024)


def test_a_chat_may_be_longer_than_the_rows_of_training_where_the_model_takes_it():
    class Config:
        max_position_embeddings = 300

    assert choose_chat_length(Config(), trained_length=64) == 300
    assert choose_chat_length(Config(), trained_length=512) == 512
    Config.max_position_embeddings = 8192
    assert choose_chat_length(Config(), trained_length=64) == 1024
