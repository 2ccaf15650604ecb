"""Tasks as the harness reads them: the same questions, of them the same tokens, and of these our accuracy."""

import json
import shlex
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from cpt.contrib.lm_eval_export.__main__ import main
from cpt.contrib.lm_eval_export.tasks import HarnessTexts, export_group, export_task
from cpt.data.sources.base import Example
from cpt.evaluation.task_answers import rank_choices, score_choices
from cpt.models.objectives import Causal, CausalAnswers, Seq2SeqAnswers
from tests.support.probing import options
from tests.support.task_fixtures import LABELS, STYLES, encoder, some_examples, write_tasks

CHOICES = ("mu", "na", "pe", "so", "tu")  # of one length, so that not always the same is the likeliest
NEEDED = pytest.mark.skipif(not find_spec("lm_eval"), reason="the extra: pip install -e '.[lm-eval]'")


def rows(folder, task):
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_of_every_style_are_ours_and_what_differs_is_told(style, seq2seq, tmp_path):
    made, examples = encoder(STYLES[style](), seq2seq=seq2seq), some_examples(20)
    texts = HarnessTexts(made)
    found = export_task(tmp_path, "TC", map(made.prompt, examples), texts)
    assert (found.name, found.examples, found.differing) == ("cpt_TC", 20, [])
    for row, example in zip(rows(tmp_path, "TC"), examples, strict=True):
        assert row["id"] == example.id and row["question"].endswith(example.source)
        assert row["choices"] == [texts.choice(label) for label in LABELS]
        assert LABELS[row["answer"]] == example.target
    if style == "opened" and not seq2seq:  # a special token that is spelled out
        special = made.tokenizer.eos_token
        odd = Example("odd", f"What is {special} for?\nAnswer:", LABELS[0], "TC", LABELS)
        assert export_task(tmp_path, "TC", map(made.prompt, [*examples, odd]), texts).differing == ["odd"]


@pytest.mark.slow
def test_the_command_line_writes_a_run_s_tasks_and_says_how_to_ask_them(cache, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    tasks = write_tasks(tmp_path / "texts", ("food", "law"), train=60, test=24)
    given = ["domains=tasks", f"domains.root={tasks}", f"cache_dir={cache}", "model=tiny_gpt2"]
    out = tmp_path / "my out"
    main([str(out), *given, "model.vocab_size=300", "order=[law]", "answers.max_documents=5"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "cpt_law: 5 examples"
    asked = ["benchmark=lm_eval", f"benchmark.include='{out}'", "benchmark.tasks=[cpt_tasks]"]
    assert shlex.split(second) == asked
    ids = {row["id"] for row in rows(out, "law")}
    assert len(ids) == 5 and ids != {f"law-test-{place}" for place in range(5)}  # a draw


def causal(vocabulary):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes)), CausalAnswers(Causal(), pad=0)


def seq2seq(vocabulary):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(vocab_size=vocabulary, **sizes, **tokens))
    return model, Seq2SeqAnswers(Causal(), pad=0, start=0)


@NEEDED
@pytest.mark.slow
@pytest.mark.parametrize(("build", "style", "length"), [
    (causal, "metaspace", 200), (causal, "opened", 60), (seq2seq, "closed", 40),
])  # fmt: skip
def test_accuracy_is_ours_of_each_task_and_of_all(build, style, length, tmp_path):
    from cpt.evaluation.lm_eval import Harness

    encoding = encoder(STYLES[style](), length=length, seq2seq=build is seq2seq)
    torch.manual_seed(5)
    model, objective = build(len(encoding.tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # so that the answers differ
    texts, done, accuracies, chosen = HarnessTexts(encoding), [], [], set()
    for seed, count in enumerate((31, 13)):
        examples = some_examples(count, seed=seed, words=(1, 30))
        examples = [replace(e, choices=CHOICES, target=CHOICES[at % 5]) for at, e in enumerate(examples)]
        given = list(map(encoding.prompt, examples))
        done.append(export_task(tmp_path, f"t{seed}", given, texts))
        assert done[-1].differing == []
        sums = score_choices(model.eval(), objective, given, batch_size=7, step=lambda count: None)
        ours = rank_choices(given, sums)[0]
        chosen |= {*ours}
        accuracies.append(sum(one == each.target for one, each in zip(ours, examples, strict=True)) / count)
    names = (export_group(tmp_path, done), "cpt_t0", "cpt_t1")
    harness, nothing = Harness(options(*names, include=str(tmp_path))), lambda count=0: None
    found = [harness.measure(n, model, encoding.tokenizer, expect=nothing, step=nothing) for n in names]
    values = [each["metrics"]["acc"]["value"] for each in found]
    assert values == pytest.approx([sum(accuracies) / 2, *accuracies]) and len(chosen) > 1
