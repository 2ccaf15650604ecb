"""Tasks as the harness reads them: the same questions, and of them the same tokens."""

import json
import shlex

import pytest

from cpt.contrib.lm_eval_export.__main__ import main
from cpt.contrib.lm_eval_export.tasks import HarnessTexts, export_task
from cpt.data.sources.examples import Example
from tests.support.task_fixtures import LABELS, STYLES, encoder, make_examples, write_tasks


def rows(folder, task):
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_of_every_style_are_ours_and_what_differs_is_reported(style, seq2seq, tmp_path):
    task_encoder = encoder(STYLES[style](), seq2seq=seq2seq)
    examples = make_examples(20)
    texts = HarnessTexts(task_encoder)
    exported = export_task(tmp_path, "TC", map(task_encoder.prompt, examples), texts)
    assert (exported.name, exported.examples, exported.differing) == ("cpt_TC", 20, [])
    for row, example in zip(rows(tmp_path, "TC"), examples, strict=True):
        assert row["id"] == example.id and row["question"].endswith(example.source)
        assert row["choices"] == [texts.choice(label) for label in LABELS]
        assert LABELS[row["answer"]] == example.target
    if style == "opened" and not seq2seq:  # a special token that is spelled out
        special = task_encoder.tokenizer.eos_token
        odd = Example("odd", f"What is {special} for?\nAnswer:", LABELS[0], "TC", LABELS)
        exported = export_task(tmp_path, "TC", map(task_encoder.prompt, [*examples, odd]), texts)
        assert exported.differing == ["odd"]


@pytest.mark.slow
def test_the_command_line_writes_a_run_s_tasks_and_says_how_to_ask_them(cache, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    tasks = write_tasks(tmp_path / "texts", ("food", "law"), train=60, test=24)
    options = ["domains=tasks", f"domains.root={tasks}", f"cache_dir={cache}", "model=tiny_gpt2"]
    out = tmp_path / "my out"
    main([str(out), *options, "model.vocab_size=300", "order=[law]", "answers.max_documents=5"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == "cpt_law: 5 examples"
    harness_options = ["benchmark=lm_eval", f'benchmark.include="{out}"', "benchmark.tasks=[cpt_tasks]"]
    assert shlex.split(second) == harness_options
    ids = {row["id"] for row in rows(out, "law")}
    assert len(ids) == 5 and ids != {f"law-test-{number}" for number in range(5)}  # a draw
