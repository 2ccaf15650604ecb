"""Tasks as the harness reads them: the same questions, and of them the same tokens."""

import json

import pytest
import yaml

from cpt.contrib.lm_eval_export.tasks import HarnessTexts, export_group, export_task
from cpt.data.example import Example
from tests.support.task_fixtures import LABELS, STYLES, encoder, some_examples


def rows(folder, task):
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seq2seq", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_the_tokens_of_every_style_are_ours(style, seq2seq, tmp_path):
    made, examples = encoder(STYLES[style](), seq2seq=seq2seq), some_examples(20)
    texts = HarnessTexts(made)
    found = export_task(tmp_path, "TC", map(made.prompt, examples), texts)
    assert (found.name, found.examples, found.differing) == ("cpt_TC", 20, [])
    for row, example in zip(rows(tmp_path, "TC"), examples, strict=True):
        assert row["id"] == example.id and row["question"].endswith(example.source)
        assert row["choices"] == [texts.choice(label) for label in LABELS]
        assert all(
            each.endswith(label + texts.ending) for each, label in zip(row["choices"], LABELS, strict=True)
        )
        assert LABELS[row["answer"]] == example.target


@pytest.mark.parametrize("seq2seq", [False, True])
def test_a_question_that_was_cut_is_exported_as_cut(seq2seq, tmp_path):
    made = encoder(STYLES["opened"](), length=60, seq2seq=seq2seq)
    examples = some_examples(20, words=(30, 40))
    found = export_task(tmp_path, "TC", map(made.prompt, examples), HarnessTexts(made))
    assert found.differing == []
    for row, example in zip(rows(tmp_path, "TC"), examples, strict=True):
        assert len(row["question"]) < len(example.source) and row["question"].endswith("\nAnswer:")


@pytest.mark.parametrize("style", ["bare", "opened", "framed"])
def test_a_special_token_that_is_spelled_out_is_told(style, tmp_path):
    made = encoder(STYLES[style]())
    special = made.tokenizer.eos_token or made.tokenizer.sep_token
    odd = Example("odd", f"What is {special} for?\nAnswer:", LABELS[0], "TC", LABELS)
    found = export_task(tmp_path, "TC", map(made.prompt, [*some_examples(3), odd]), HarnessTexts(made))
    assert found.differing == ["odd"] and found.examples == 4


def test_what_has_no_choices_is_left_out_and_the_others_are_a_group(tmp_path):
    made = encoder(STYLES["bare"]())
    texts, open_one = HarnessTexts(made), Example("a", "Why?\nAnswer:", "so", "QA")
    assert export_task(tmp_path, "QA", map(made.prompt, [open_one]), texts) is None
    assert export_task(tmp_path, "none", [], texts) is None and not list(tmp_path.iterdir())
    done = [export_task(tmp_path, name, map(made.prompt, some_examples(2)), texts) for name in ("b/c", "é")]
    assert export_group(tmp_path, done) == "cpt_tasks"
    group = yaml.safe_load((tmp_path / "_all.yaml").read_text())
    assert group["task"] == ["cpt_b%2Fc", "cpt_%C3%A9"]
    told = yaml.safe_load((tmp_path / "b%2Fc.yaml").read_text())
    assert told["task"] == "cpt_b%2Fc" and told["num_fewshot"] == 0 and told["target_delimiter"] == " "
    assert told["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "b%2Fc.jsonl")
