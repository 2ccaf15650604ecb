"""Whole runs that measure held-out chats: beside a plain model, after a kill, and where they are left out."""

import json
import logging

import pytest
import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt import gate, graft, withdraw
from cpt.evaluation.derived_rows import DerivedRow
from cpt.train import is_done
from cpt.trainer import chat_evaluator
from cpt.trainer.chat_monitor import draw_chats
from tests.runs.reading import assert_same_bits, read_scores
from tests.support.chat_decoder import write_checkpoint, write_tuned
from tests.support.kill_callback import KilledError, Killer

CHATS = [
    ("What does the court find?", "The court finds that a party must pay."),
    ("Who brought the bread?", "The waiter brought warm bread to the old house near the river."),
    ("Name a star.", "A young star."),
    ("What do people do every morning?", "People walk along its quiet streets."),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "decoder"
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def chats_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("held_out") / "chats.jsonl"
    rows = []
    for question, text in CHATS:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        rows.append(json.dumps({"messages": messages, "expect": text.split()[1]}))
    path.write_text("\n".join(rows))
    return path


@pytest.fixture
def chat_run(small_gpt2, decoder, chats_file, start):
    """A function that trains one or two domains and measures chats; the scores as they are stored."""

    def run(folder, *overrides):
        options = [f"model.name_or_path={decoder}", "trainer.steps=4", "optim.lr=1e-2"]
        if "chats=none" not in overrides:
            options += [f"chats.path={chats_file}", "chats.max_new_tokens=12", "chats.generate=3"]
        start(small_gpt2("order=[law]", *options, *overrides), folder)
        return read_scores(folder)

    return run


def losses_of_answer(model, tokenizer, question, answer_ids):
    """The mean loss of a plain model on an answer after the rendered question, and the ids of both."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([prompt_ids + answer_ids])
    logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    return cross_entropy(logits, torch.tensor(answer_ids)).item(), prompt_ids


@torch.no_grad()
def test_losses_and_answers_are_those_of_a_plain_model_and_change_no_bit_of_training(
    chat_run, decoder, tmp_path
):
    scores = chat_run(tmp_path / "run")
    chats = scores["chats"]
    assert chats["chats"] == 4 and scores["phases"]["chats"].keys() == {"base", "law"}
    base_answers = json.loads((tmp_path / "run/chats/000-base/answers.json").read_text())["answers"]
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    for row, folder in enumerate((decoder, tmp_path / "run" / "model")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        held_out = []
        for question, text in CHATS:
            answer_ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
            held_out.append(losses_of_answer(model, tokenizer, question, answer_ids)[0])
        assert chats["nll"][row] == pytest.approx(sum(held_out) / 4, abs=1e-4)

        own_losses = []
        answers = json.loads(
            (tmp_path / f"run/chats/00{row}-{('base', 'law')[row]}/answers.json").read_text()
        )
        for (question, _), base_answer, answer in zip(CHATS, base_answers, answers["answers"], strict=False):
            loss, prompt_ids = losses_of_answer(model, tokenizer, question, base_answer["ids"])
            own_losses.append(loss)
            new_ids = model.generate(
                torch.tensor([prompt_ids]),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=[end, tokenizer.eos_token_id],
            )[0, len(prompt_ids) :].tolist()
            assert answer["ids"] == new_ids and answer["complete"] == (
                new_ids[-1] in (end, tokenizer.eos_token_id)
            )
        assert len(own_losses) == 3 and chats["base_answer_nll"][row] == pytest.approx(
            sum(own_losses) / 3, abs=1e-4
        )

    assert chats["rise"][0] is None and chats["rise"][1][0] == pytest.approx(
        chats["nll"][1] - chats["nll"][0]
    )
    assert chat_run(tmp_path / "without", "chats=none")["chats"] == {}
    assert_same_bits(tmp_path / "run", tmp_path / "without")

    # A finished run is given its chats by a later start; the base and the last model are there.
    later_chats = chat_run(tmp_path / "without")["chats"]
    assert later_chats | {"seconds": 0} == chats | {"seconds": 0}
    assert_same_bits(tmp_path / "run", tmp_path / "without")


def test_a_run_that_is_killed_between_its_answers_and_what_is_written_of_them_ends_with_the_same_bits(
    chat_run, tmp_path, monkeypatch
):
    complete = chat_run(tmp_path / "complete")
    stopped_after = []
    for function in ("save_losses", "save_answers", "save_losses"):
        save = getattr(chat_evaluator, function)

        def deadly(path, stored, save=save):
            if path.parent.name == "000-base":
                return save(path, stored)
            raise KeyError("killed")  # before the file is there

        with monkeypatch.context() as patched, pytest.raises(KeyError, match="killed"):
            patched.setattr(chat_evaluator, function, deadly)
            chat_run(tmp_path / "killed")
        stopped_after.append(sorted(path.name for path in (tmp_path / "killed/chats").glob("001-law/*")))
    assert stopped_after == [[], ["losses.json"], ["answers.json", "losses.json"]]
    assert not read_scores(tmp_path / "killed")["run"]["finished"]
    chats = chat_run(tmp_path / "killed")["chats"]
    assert chats | {"seconds": 0} == complete["chats"] | {"seconds": 0}
    for path in (tmp_path / "complete/chats").rglob("*.json"):
        other_path = tmp_path / "killed" / path.relative_to(tmp_path / "complete")
        contents = [json.loads(file.read_text()) | {"seconds": 0} for file in (path, other_path)]
        assert contents[0] == contents[1]


def test_shipped_chats_are_measured_where_there_is_a_template_and_not_in_a_run_that_began_without(
    small_gpt2, decoder, start, tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="cpt")
    options = ["order=[law]", "method=none", f"model.name_or_path={decoder}"]
    quick = ["chats.generate=1", "chats.max_new_tokens=2"]
    start(small_gpt2(*options, *quick), tmp_path / "run")
    assert read_scores(tmp_path / "run")["chats"]["chats"] == 36
    assert is_done(small_gpt2(*options, *quick), tmp_path / "run")

    start(small_gpt2("order=[law]", "method=none"), tmp_path / "other")  # a model that the run makes
    assert read_scores(tmp_path / "other")["chats"] == {} and "Skipping chats" not in caplog.text

    # A run of 0.1.0: its config has no chats.
    start(small_gpt2(*options, "chats=none"), tmp_path / "old")
    config = yaml.safe_load((tmp_path / "old" / "config.yaml").read_text())
    del config["chats"]
    (tmp_path / "old" / "config.yaml").write_text(yaml.safe_dump(config))
    assert is_done(small_gpt2(*options), tmp_path / "old")
    (tmp_path / "old" / "report.html").unlink()
    start(small_gpt2(*options), tmp_path / "old")
    assert "Skipping held-out chats: this run began without them" in caplog.text
    assert read_scores(tmp_path / "old")["chats"] == {}


MONITORED = ["monitor.every=2", "monitor.max_tokens=100000", "monitor.chats=true"]


def test_monitored_chats_have_the_losses_of_the_stages_and_change_no_bit(chat_run, tmp_path):
    scores = chat_run(tmp_path / "run", *MONITORED, "+logger.csv=true")
    stage = scores["monitor"]["law"]
    names = ["held-out chats", "base's answers"]
    assert stage["steps"] == [0, 2, 4] and list(stage["nll"]) == ["law", "general", *names]
    for name, key in zip(names, ("nll", "base_answer_nll"), strict=True):
        losses = stage["nll"][name]
        assert [losses[0], losses[-1]] == pytest.approx(scores["chats"][key], rel=1e-5)
        assert len(stage["rise"][name]) == 3 and stage["rise"][name][0] == [0, 0]
    report = (tmp_path / "run" / "report.md").read_text()
    assert "| held-out chats | base's answers |" in report
    assert "monitor/held-out chats/law" in (tmp_path / "run" / "metrics.csv").read_text()

    assert chat_run(tmp_path / "without", "chats=none")["monitor"] == {}
    assert_same_bits(tmp_path / "run", tmp_path / "without")

    ending = ["monitor.stop=0.01", "monitor.past=0", "monitor.general=false"]
    ended_stage = chat_run(tmp_path / "ended", *MONITORED, *ending)["monitor"]["law"]
    assert ended_stage["steps"] == [0, 2] and ended_stage["ended"].startswith("base's answers has risen by")


def test_monitored_chats_are_whole_chats_up_to_a_number_of_tokens():
    rows_by_chat = [[([0] * size, [True] * size)] for size in (4, 8, 6, 2)]
    for max_tokens in range(1, 21):
        drawn = draw_chats(rows_by_chat, max_tokens=max_tokens)
        sizes = [len(ids) for [(ids, _)] in drawn]
        assert drawn == [rows for rows in rows_by_chat if rows in drawn] and drawn
        assert sum(sizes) >= max_tokens and min(sum(sizes) - size for size in sizes) < max_tokens
    assert drawn == rows_by_chat


def test_chats_that_nothing_monitors_are_refused_in_one_line(small_gpt2, decoder, start, tmp_path):
    model = f"model.name_or_path={decoder}"
    for options, message in (
        ([model, "monitor.chats=true"], "monitor.chats=true is invalid: every=null monitors nothing"),
        (MONITORED, "monitor.chats=true is invalid: this run measures no chats"),
        ([model, *MONITORED, "strategy=fsdp"], "monitor.chats=true is invalid: this run measures no chats"),
        ([model, *MONITORED, "chats=none"], "monitor.chats=true is invalid: this run measures no chats"),
    ):
        with pytest.raises(ValueError, match=message):
            start(small_gpt2(*options), tmp_path / "run")


def test_a_killed_stage_resumes_with_the_chats_it_began_with(chat_run, killing, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cpt")
    options = ["trainer.checkpoint_every_n_steps=1", *MONITORED]
    undisturbed = chat_run(tmp_path / "whole", *options)["monitor"]

    def kill(folder, *overrides):
        killing(Killer(step=3, domain="law"))
        with pytest.raises(KilledError):
            chat_run(folder, "trainer.checkpoint_every_n_steps=1", *overrides)
        killing(None)

    kill(tmp_path / "killed", *MONITORED)
    assert chat_run(tmp_path / "killed", *options)["monitor"] == undisturbed
    kill(tmp_path / "off", *MONITORED)
    off = chat_run(tmp_path / "off", *options, "monitor.chats=false")["monitor"]["law"]
    assert list(off["nll"]) == ["law", "general"] and len(off["nll"]["law"]) == 3
    kill(tmp_path / "on", *MONITORED, "monitor.chats=false")
    on = chat_run(tmp_path / "on", *options)["monitor"]["law"]
    assert on == off and "Monitoring no chats in the rest of this stage" in caplog.text


def test_what_cannot_answer_chats_is_refused_in_one_line(small_gpt2, decoder, chats_file, start, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"chats.path=.* is invalid with model=tiny_gpt2: model=tiny_gpt2 has no chat template",
    ):
        start(small_gpt2(f"chats.path={chats_file}"), tmp_path / "run")
    sharded = [f"model.name_or_path={decoder}", "strategy=fsdp"]
    with pytest.raises(ValueError, match="chats is invalid with strategy=fsdp"):
        start(small_gpt2(f"chats.path={chats_file}", *sharded), tmp_path / "run")
    with pytest.raises(ValueError, match="chats.path=.*nowhere is invalid: it is missing"):
        start(small_gpt2("chats.path=nowhere"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_longest_of_several_too_long_chats_is_named(small_gpt2, decoder, start, tmp_path):
    rows = []
    for num_words in (400, 900, 500):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "star " * num_words}]
        rows.append(json.dumps({"messages": messages}))
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"line 2: .* of at least \d+\. 2 other examples are too long as"):
        start(small_gpt2(f"model.name_or_path={decoder}", f"chats.path={path}"), tmp_path / "run")


def test_the_gate_judges_chats_and_broken_answers(chat_run, tmp_path, capsys):
    run = tmp_path / "run"
    chat_run(run)

    def judged(*options):
        code = gate.main([str(run), "--json", "--min-gain=-99", "--max-forgetting=99", *options])
        return code, json.loads(capsys.readouterr().out)

    code, judgement = judged("--max-broken-answers=9")
    changes = {change["text"]: change for change in judgement["changes"]}
    assert code == 0 and changes["chats"]["most"] == 99
    chats = read_scores(run)["chats"]
    mean, low, high = chats["base_answer_rise"][1]
    change = changes["base's answers"]
    assert [change["after"] - change["before"], change["low"], change["high"]] == pytest.approx(
        [mean, low, high]
    )
    assert judged("--max-chat-loss=-99", "--max-broken-answers=9")[0] == gate.FAIL

    path = run / "chats" / "001-law" / "answers.json"
    base_path = run / "chats" / "000-base" / "answers.json"
    for answers_path, value in ((base_path, "true"), (path, "false")):
        text = answers_path.read_text()
        for was in ("true", "false"):
            text = text.replace(f'"complete": {was}', f'"complete": {value}')
        answers_path.write_text(text.replace('"other_language": true', '"other_language": false'))
    lines = [json.loads(line.rstrip(",")) for line in base_path.read_text().splitlines()[1:-1]]
    num_broken = sum(line["repeated"] <= 0.5 for line in lines)
    code, judgement = judged()
    assert code == (gate.FAIL if num_broken else 0) and len(judgement["broken_answers"]) == num_broken
    assert judged(f"--max-broken-answers={num_broken}")[0] == 0
    path.write_text("{}")
    with pytest.raises(SystemExit):
        gate.main([str(run)])
    assert "is damaged" in capsys.readouterr().err
    for name in ("answers.json", "losses.json"):
        (path.parent / name).unlink()
        with pytest.raises(SystemExit):
            gate.main([str(run)])
        assert f"001-law/{name} is missing; restore it from a backup" in capsys.readouterr().err

    # A limit on answers that were not asked for is not met.
    scores = json.loads((run / "scores.json").read_text())
    for key in ("nll", "rise", "base_answer_nll", "base_answer_rise", "answers"):
        scores["chats"][key] = [None, None]
    (run / "scores.json").write_text(json.dumps(scores))
    assert judged()[0] == 0
    code, judgement = judged("--max-broken-answers=0", "--max-chat-loss=99")
    assert code == gate.UNKNOWN and judgement["unmeasured"] == ["chats", "answers to chats"]


@pytest.mark.campaign
def test_a_run_that_is_extended_keeps_its_chats_and_measures_those_of_what_is_new(chat_run, tmp_path):
    options = ["lr_scheduler=constant"]
    short = chat_run(tmp_path / "short", *options)["chats"]
    options.append("order=[law,food]")
    extended = chat_run(tmp_path / "extended", f"extend={tmp_path / 'short'}", *options)["chats"]
    at_once = chat_run(tmp_path / "at_once", *options)["chats"]
    for key in ("nll", "base_answer_nll"):
        assert extended[key] == at_once[key]
    assert extended["answers"][:2] == short["answers"]
    assert at_once["answers"][1] is None and extended["answers"][2] == at_once["answers"][2]


def test_an_extended_run_without_chats_has_none_until_a_later_start_measures_them(chat_run, tmp_path):
    """The numbers of the run before are not those of the new last model, also not for the release check."""
    options = ["lr_scheduler=constant"]
    chat_run(tmp_path / "short", *options)
    options += ["order=[law,food]", f"extend={tmp_path / 'short'}"]
    assert chat_run(tmp_path / "long", *options, "chats=none")["chats"] == {}
    check = [str(tmp_path / "long"), "--min-gain=-99", "--max-forgetting=99", "--max-chat-loss=99"]
    assert gate.main(check) == gate.UNKNOWN

    chats = chat_run(tmp_path / "long", *options)["chats"]
    assert len(chats["nll"]) == 3 and None not in chats["nll"] + chats["base_answer_nll"]
    assert gate.main(check) == 0


def test_a_model_made_of_a_run_has_its_row_in_the_chats_of_the_run(chat_run, decoder, tmp_path, capsys):
    run = tmp_path / "run"
    chats = chat_run(run)["chats"]
    tuned = write_tuned(decoder, tmp_path / "tuned")
    # The weight is so small that the sum is the model of the run.
    arguments = ["--instruct", str(tuned), "--base", str(decoder), "--weight", "1e-20"]
    assert graft.main([str(run), *arguments]) == 0
    row = DerivedRow.load(run / "graft" / "row.json").run_chats
    for key in ("nll", "rise", "base_answer_nll", "base_answer_rise", "answers"):
        assert row[key] == chats[key][-1]
    answers = json.loads((run / "graft" / "answers.json").read_text())["answers"]
    assert answers == json.loads((run / "chats/001-law/answers.json").read_text())["answers"]
    assert "Loss on the answers of the run's base: " in capsys.readouterr().out
    assert "Loss on the run's 4 held-out chats: " in (run / "graft" / "README.md").read_text()
    page = (run / "report.md").read_text()
    assert page.count("| graft |") == 2  # of perplexities, and of chats

    # Without the answers of the base there is nothing to compare with.
    (run / "chats/000-base/losses.json").unlink()
    assert graft.main([str(run), *arguments, "--output", str(tmp_path / "again")]) == 0
    assert DerivedRow.load(tmp_path / "again" / "row.json").run_chats == {}


def test_a_withdrawn_domain_leaves_chats_that_are_measured(chat_run, tmp_path):
    run = tmp_path / "run"
    chat_run(run, "order=[law,food]", "method=inclora", "save_all_stages=true")
    assert withdraw.main([str(run), "food", "--form", "subtracted", "--output", str(tmp_path / "out")]) == 0
    row = DerivedRow.load(tmp_path / "out" / "row.json").run_chats
    assert row["nll"] == pytest.approx(read_scores(run)["chats"]["nll"][1], abs=1e-5)  # as after law
    assert "Loss on the run's 4 held-out chats: " in (tmp_path / "out" / "README.md").read_text()

    assert withdraw.main([str(run), "food", "--form", "continued", "--output", str(tmp_path / "two")]) == 0
    chats = read_scores(tmp_path / "two")["chats"]
    assert chats["nll"] == read_scores(run)["chats"]["nll"][:2] and chats["answers"][1]["chats"] == 3
