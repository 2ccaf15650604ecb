"""Examples as a model writes them: what is read back, and which of them are kept."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from cpt.data.examples import Example
from cpt.data.forms import (
    MARK,
    choose_examples,
    common_choices,
    keep_examples,
    open_examples,
    read_form,
    write_form,
)
from cpt.data.generated import Sample, file_of, write_sample
from tests.support.data_fixtures import bare
from tests.support.task_fixtures import LABELS, some_examples
from tests.support.task_fixtures import encoder as made_encoder

SIGN = "An example of law:"


def test_what_is_written_is_read_back():
    for example in some_examples(20):
        form = write_form(example, SIGN)
        assert form.source == SIGN and form.choices == ()
        found = read_form(form.target, task="law", number=3, choices=LABELS)
        assert (found.source, found.target, found.choices) == (example.source, example.target, LABELS)
        assert found.text == (0, len(example.source)) and found.task == "law"


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        *[
            (f"a question {MARK} tu", True),
            (f"a question{MARK}tu ", True),
            (f"a {MARK} b {MARK} mu na", True),
        ],
        *[(f"a question {MARK} mu", False), (f"a question {MARK} TU", False), (f"{MARK} tu", False)],
        *[(f"a question {MARK}", False), ("a question tu", False), ("", False)],
    ],
)
def test_an_answer_has_to_be_one_of_the_choices(text, valid):
    assert (read_form(text, task="law", number=0, choices=LABELS) is not None) == valid


def test_open_answers_may_be_any():
    assert read_form(f"a {MARK} b", task="law", number=0, choices=()).target == "b"


def test_choices_that_differ_are_no_task_s():
    examples = some_examples(5)
    assert common_choices(examples) == LABELS
    assert common_choices([*examples, dataclasses.replace(examples[0], choices=("a",))]) == ()


def test_the_valid_ones_are_kept_up_to_the_budget():
    sizes, nll = np.array([5, 6, 7, 8, 9, 5]), np.array([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    valid = np.array([True, False, True, True, True, True])
    assert choose_examples(sizes, nll, valid, tokens=20, wanted=20).tolist() == [0, 2, 3]  # of the first 4
    assert choose_examples(sizes, nll, valid, tokens=19, wanted=19).tolist() == [0, 2]
    assert choose_examples(sizes, nll, valid, tokens=11, wanted=26).tolist() == [3]  # of the lowest nats
    assert choose_examples(sizes, nll, valid, tokens=15, wanted=26).tolist() == [2, 3]
    assert choose_examples(sizes, nll, ~valid & False, tokens=20, wanted=40).tolist() == []


@pytest.mark.parametrize("seq2seq", [False, True])
def test_rows_are_the_example_as_it_is_asked_and_as_it_is_written(tmp_path: Path, seq2seq):
    encoder = made_encoder(bare(), length=120, seq2seq=seq2seq)
    examples, tokenizer = some_examples(6), encoder.tokenizer
    texts = [write_form(each, SIGN).target for each in examples]
    texts[1] = texts[1] + "x"  # which is no choice
    ended = [True, True, True, False, True, True]
    samples = [
        Sample(encoder.ids_of([text])[0], 0, end, 1.0, text) for text, end in zip(texts, ended, strict=True)
    ]
    file_of(tmp_path, "law", "jsonl").write_bytes(b"".join(map(write_sample, samples)))
    how = {"choices": LABELS, "encoder": encoder, "sign": SIGN}
    facts = keep_examples(tmp_path, "law", tokens=10**6, wanted=10**6, **how)
    assert facts["texts"] == 4 and facts["invalid"] == 2 == facts["left_out"]
    (tmp_path / "facts.json").write_text(json.dumps({"law": facts}))
    rows = open_examples(tmp_path, "law", encoder)
    kept = [example for at, example in enumerate(examples) if at not in (1, 3)]
    expected = [each for example in kept for each in (example, write_form(example, SIGN))]
    assert len(rows) == len(expected) == 8
    for number, example in enumerate(expected):
        whole = Example("x", example.source, example.target, "law", LABELS if number % 2 == 0 else ())
        row = encoder.encode(whole)
        at = np.array([number])
        size = rows.row_lengths[number]
        assert rows.ids(at)[0, :size].tolist() == row.ids
        assert rows.answers(at)[0, :size].tolist() == row.answer
    at = np.array([1])
    assert tokenizer.decode(rows.ids(at)[rows.answers(at)]).strip() == expected[1].target + "</s>"
