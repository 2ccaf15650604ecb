"""`python -m cpt.write_chats`: the answers of a chat model as chats that a run mixes in."""

import json

import pytest
from safetensors.torch import load_file, save_file

from cpt import write_chats
from cpt.evaluation import chat_set
from tests.support.chat_decoder import TEMPLATE, write_checkpoint

PROMPTS = ["law court", "food salt", "law food"]
# Tokens that the random model of `write_checkpoint` writes in its answers: of all three, and of the first.
IN_ALL, IN_FIRST = 349, 195


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a model whose answers end, and prompts."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "model")
    end_answers_at(IN_ALL)
    (tmp_path / "prompts.txt").write_text("law court\n\nfood salt\nlaw food\nfood salt\n", encoding="utf-8")
    return tmp_path


def end_answers_at(token):
    with open("model/generation_config.json", "r+") as file:
        config = json.load(file) | {"eos_token_id": token}
        file.seek(0)
        file.truncate()
        json.dump(config, file)


def run(**options):
    """Runs the program; an option in capitals is positional. Returns the rows of the output."""
    positional = [options.pop("MODEL", "model"), options.pop("PROMPTS", "prompts.txt")]
    options = {"output": "chats.jsonl", "max_new_tokens": 12, "batch_size": 2} | options
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert write_chats.main([*positional, *arguments]) == 0
    with open(options["output"], encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def refuse(capsys, **options):
    with pytest.raises(SystemExit) as end:
        run(**options)
    assert end.value.code == 1
    return capsys.readouterr().err.splitlines()[-1]


def test_answers_that_end_are_chats_in_the_order_of_the_prompts(capsys, folder):
    rows = run()
    assert [row["messages"][0] for row in rows] == [{"role": "user", "content": text} for text in PROMPTS]
    assert all(row["messages"][1]["role"] == "assistant" and row["messages"][1]["content"] for row in rows)
    output = capsys.readouterr().out
    assert "chats.jsonl: 3 chats of 3" in output and "Left out" not in output
    assert "replay.sources={chat: {path: chats.jsonl, format: messages, ratio: 0.1}}" in output
    assert not list(folder.glob("chats.jsonl.*"))


def test_the_answer_is_that_of_transformers_generate():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model").eval()
    turns = [{"role": "user", "content": PROMPTS[0]}]
    inputs = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    expected = tokenizer.decode(output[:-1], skip_special_tokens=True).strip()
    assert run(batch_size=1)[0]["messages"][1]["content"] == expected


def test_an_answer_that_does_not_end_or_repeats_itself_is_left_out(capsys, monkeypatch):
    end_answers_at(IN_FIRST)
    rows = run()
    assert [row["messages"][0]["content"] for row in rows] == PROMPTS[:1]
    assert "chats.jsonl: 1 chat of 3\nLeft out: 2 not ended" in capsys.readouterr().out

    assert "none of its answers can be learned from: 3 not ended" in refuse(
        capsys, output="none.jsonl", max_new_tokens=2
    )
    end_answers_at(IN_ALL)
    monkeypatch.setattr(write_chats, "MAX_REPEATED", -1.0)
    assert "none of its answers can be learned from: 3 repetitive" in refuse(capsys, output="other.jsonl")


@pytest.fixture
def asked_prompts(monkeypatch):
    """The prompts that the model is asked from now on."""
    prompts = []
    answer = write_chats.answer_questions_together

    def note_and_answer(model, tokenizer, questions, **options):
        prompts.extend(question.example.source for question in questions)
        return answer(model, tokenizer, questions, **options)

    monkeypatch.setattr(write_chats, "answer_questions_together", note_and_answer)
    return prompts


def stop_after_the_first_batch():
    """Leaves what a command has written that is stopped in its second batch."""
    answer = write_chats.answer_questions_together
    num_batches = 0

    def answer_once(*arguments, **options):
        nonlocal num_batches
        num_batches += 1
        if num_batches > 1:
            raise KeyboardInterrupt
        return answer(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_chats, "answer_questions_together", answer_once)
        with pytest.raises(SystemExit, match="run the same command again to continue"):
            run()


def test_a_stopped_command_continues_after_the_last_whole_batch(asked_prompts):
    expected = run(output="whole.jsonl")
    stop_after_the_first_batch()
    with open("chats.jsonl.unfinished", "a", encoding="utf-8") as file:
        file.write('{"prompt": "law fo')  # a line that was not written whole
    asked_prompts.clear()
    assert run() == expected
    assert asked_prompts == PROMPTS[2:]


def test_a_batch_that_was_stored_in_part_is_answered_again(asked_prompts, folder):
    expected = run(output="whole.jsonl")
    stop_after_the_first_batch()
    unfinished = folder / "chats.jsonl.unfinished"
    head, first_answer, *_ = unfinished.read_text(encoding="utf-8").splitlines()
    unfinished.write_text(f"{head}\n{first_answer}\n", encoding="utf-8")
    asked_prompts.clear()
    assert run() == expected
    assert asked_prompts == PROMPTS


def test_answers_of_another_command_are_not_continued(asked_prompts):
    stop_after_the_first_batch()
    asked_prompts.clear()
    assert len(run(max_new_tokens=11)) == 3
    assert asked_prompts == PROMPTS


def test_prompts_of_several_lines_are_rows_of_json(capsys, folder):
    file = folder / "prompts.jsonl"
    file.write_text('{"prompt": "law\\ncourt"}\n{"prompt": "food"}\n', encoding="utf-8")
    assert write_chats.read_prompts(file) == ["law\ncourt", "food"]
    assert [row["messages"][0]["content"] for row in run(PROMPTS="prompts.jsonl")] == ["food"]

    file.write_text('{"question": "law"}\n', encoding="utf-8")
    message = refuse(capsys, PROMPTS="prompts.jsonl", output="b.jsonl")
    assert 'prompts.jsonl:1: {"question": "law"} has no prompt' in message


def test_options_of_the_template_are_stored_with_the_chats(folder):
    template = TEMPLATE + "{% if shout %}law law law{% endif %}"
    (folder / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    rows = run(template_options='{"shout": true}', max_new_tokens=60)
    assert all(row["chat_template_kwargs"] == {"shout": True} for row in rows)
    assert rows[0]["messages"][1] != run(output="quiet.jsonl", max_new_tokens=60)[0]["messages"][1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"PROMPTS": "missing.txt"}, "PROMPTS=missing.txt is invalid: "),
        ({"MODEL": "missing"}, "MODEL=missing is invalid: no such folder"),
        ({"max_new_tokens": 0}, "--max-new-tokens=0 is invalid. Allowed: 1 or more"),
        ({"output": "chats.txt"}, "Allowed: a name that ends in .jsonl"),
        ({"output": "prompts.txt"}, "--output=prompts.txt is invalid: it exists"),
        ({"template_options": "[1]"}, "--template-options=[1] is invalid. Allowed: a JSON object"),
    ],
)
def test_what_cannot_be_used_is_one_line(capsys, options, message):
    assert message in refuse(capsys, **options)


def test_a_model_without_template_or_weights_is_refused(capsys, folder):
    weights = load_file("model/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, "model/model.safetensors", metadata={"format": "pt"})
    message = refuse(capsys)
    assert "its files lack 1 weight, for example model.layers.1.mlp.up_proj.weight" in message

    (folder / "model" / "chat_template.jinja").unlink()
    assert "MODEL=model is invalid: it has no chat template" in refuse(capsys)

    (folder / "model" / "tokenizer.json").write_text("{")
    message = refuse(capsys)
    assert "MODEL=model is invalid: its tokenizer.json is no JSON. Allowed: the whole file; copy" in message
    assert message.count("Allowed") == 1


def test_a_prompt_that_the_template_refuses_is_named(capsys, folder):
    template = "{{ raise_exception('too rude') }}"
    (folder / "model" / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert "does not take the prompt 'law court': too rude" in refuse(capsys)


def test_prompts_that_are_shipped_are_no_questions_of_held_out_chats(monkeypatch):
    prompts = write_chats.read_prompts(write_chats.SHIPPED_PROMPTS)
    held_out = chat_set.SHIPPED.read_text(encoding="utf-8")
    assert len(prompts) == 200
    assert [prompt for prompt in prompts if json.dumps(prompt) in held_out] == []

    read_paths = []
    monkeypatch.setattr(write_chats, "read_prompts", lambda path: read_paths.append(path) or PROMPTS)
    assert write_chats.main(["model", "--output=own.jsonl"]) == 0
    assert read_paths == [write_chats.SHIPPED_PROMPTS]


def test_rows_may_hold_other_ends_of_lines(folder):
    file = folder / "prompts.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "law\u2028court"}\r\n{"prompt": "food\x85"}\r\n'.encode())
    assert write_chats.read_prompts(file) == ["law\u2028court", "food\x85"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("law".encode("utf-16-le"), "PROMPTS=odd.jsonl is invalid: it has characters of number 0"),
        (b"[" * 100_000, "odd.jsonl:1: [[[[["),
    ],
)
def test_prompts_that_are_no_rows_of_text_are_one_line(capsys, folder, content, message):
    (folder / "odd.jsonl").write_bytes(content)
    assert message in refuse(capsys, PROMPTS="odd.jsonl")


@pytest.mark.parametrize(
    ("template_options", "message"),
    [
        ("{shout", "--template-options={shout is invalid. Allowed: a JSON object"),
        ('{"shuot": true}', "the chat template of model does not read shuot. Allowed: variables of the chat"),
        ('{"tokenize": false}', "the chat template of model does not read tokenize"),
        ('{"messages": []}', "does not take the prompt 'law court'"),
    ],
)
def test_options_that_the_template_does_not_read_are_refused(capsys, template_options, message):
    assert message in refuse(capsys, template_options=template_options)


def test_a_prompt_longer_than_the_positions_is_left_out_and_shortens_no_answer(capsys, folder):
    expected = run(output="whole.jsonl", batch_size=4)
    capsys.readouterr()
    num_words = 230  # with the answer just beyond 256 positions
    (folder / "long.txt").write_text("\n".join([*PROMPTS, "law " * num_words]), encoding="utf-8")
    assert run(PROMPTS="long.txt", batch_size=4) == expected
    output = capsys.readouterr().out
    assert "chats.jsonl: 3 chats of 4\nLeft out: 1 longer than the positions of the model allow" in output

    (folder / "long.txt").write_text("law " * 1000, encoding="utf-8")
    message = refuse(capsys, PROMPTS="long.txt", output="none.jsonl")
    assert "none of its answers can be learned from: 1 longer than the positions of the model" in message


def test_a_model_that_does_not_continue_text_is_refused(capsys, folder):
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained("model")
    sizes = {"num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    bert = BertForMaskedLM(BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16, **sizes))
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_heads=2, **sizes))
    for model_type, model in {"bert": bert, "t5": t5}.items():
        model.save_pretrained(model_type)
        tokenizer.save_pretrained(model_type)
        message = refuse(capsys, MODEL=model_type)
        assert f"MODEL={model_type} is invalid: a {model_type} does not continue text" in message


def test_a_token_without_a_row_is_refused(capsys, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("model")
    model.resize_token_embeddings(100)
    model.save_pretrained("model")
    assert "and its embedding has 100 rows" in refuse(capsys)


ignore_warning_of_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def write_adapter(folder):
    """An adapter of peft with random weights for the model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=["down_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained("model"), config).save_pretrained(folder)


@ignore_warning_of_peft
def test_an_adapter_in_the_folder_answers_as_well(folder):
    end_answers_at(list(range(300, 400)))
    plain = run(output="plain.jsonl", max_new_tokens=60)
    write_adapter(folder / "model" / "adapters" / "law")
    assert run(max_new_tokens=60) != plain


@ignore_warning_of_peft
def test_an_adapter_alone_is_refused(capsys, folder):
    write_adapter(folder / "adapter")
    message = refuse(capsys, MODEL="adapter")
    assert "MODEL=adapter is invalid: it has an adapter of peft (adapter_config.json)" in message


def test_a_second_process_on_one_output_is_refused(capsys, monkeypatch):
    answer = write_chats.answer_questions_together
    messages = []

    def run_another_and_answer(*arguments, **options):
        messages.append(refuse(capsys))
        return answer(*arguments, **options)

    monkeypatch.setattr(write_chats, "answer_questions_together", run_another_and_answer)
    assert len(run()) == 3
    assert "--output=chats.jsonl is invalid: another process is writing it" in messages[0]


def test_the_printed_option_holds_any_path(capsys):
    import shlex

    from hydra.core.override_parser.overrides_parser import OverridesParser

    run(output="our, own {chats}.jsonl")
    line = capsys.readouterr().out.splitlines()[-1]
    argument = shlex.split(line.removeprefix("Use them: "))[0]
    sources = OverridesParser.create().parse_override(argument).value()
    assert sources["chat"]["path"] == "our, own {chats}.jsonl"
