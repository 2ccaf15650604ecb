"""Supervised tasks as they are published, read into questions with answers."""

import csv
import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cpt.data.corpus import make_corpus
from cpt.data.sources.examples import Turn, read_example
from cpt.data.tokenized_tasks import read_examples

ANSWERS = ["bad", "good"]


def make_rows(count, *, first=0):
    """Texts with their numbers, whose answer is "good" for odd ones."""
    return [
        {"text": f"text {number}", "label": ANSWERS[number % 2]} for number in range(first, first + count)
    ]


def write_text(path: Path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_json(path: Path, value):
    write_text(path, json.dumps(value))


def write_lines(path: Path, rows):
    write_text(path, "\n".join(map(json.dumps, rows)))


def write_cl_benchmark(root, split, rows):
    examples = [{"label": row["label"], "sentence": row["text"]} for row in rows]
    write_json(root / "SC" / "SST-2" / f"{split}.json", examples)
    write_json(root / "SC" / "SST-2" / "labels.json", ["good", "bad"])


def write_superni(root, split, rows):
    instances = [{"input": row["text"], "output": [row["label"]]} for row in rows]
    task = {"Definition": ["Say what it is."], "Instances": instances}
    write_json(root / "task1_sst-2" / f"{split}.json", task)


def write_alpaca(root, split, rows):
    examples = []
    for row in rows:
        examples.append({"instruction": "Say it.", "input": row["text"], "output": row["label"]})
    write_json(root / split / "sst-2.json", examples)
    write_json(root / split / "sst-2_T5.json", examples)


def write_fewshot_tsv(root, split, rows):
    lines = "".join(f"{row['text']}\t{row['label']}\n" for row in rows)
    write_text(root / "sst-2_csv" / "0_42" / f"{split.replace('dev', 'valid')}.txt", lines)


def write_trace(root, split, rows):
    examples = [{"prompt": row["text"], "answer": row["label"]} for row in rows]
    write_json(root / "sst-2" / f"{split.replace('dev', 'eval')}.json", examples)


def write_jsonl(root, split, rows):
    write_lines(root / "sst-2" / f"{split}.jsonl", rows)


def write_csv(root, split, rows):
    lines = [f"{row['text']},{row['label']}\n" for row in rows]
    write_text(root / "sst-2" / f"{split}.csv", "".join(["text,label\n", *lines]))


LAYOUTS = {
    "cl_benchmark": write_cl_benchmark,
    "superni": write_superni,
    "alpaca": write_alpaca,
    "fewshot_tsv": write_fewshot_tsv,
    "trace": write_trace,
    "jsonl": write_jsonl,
    "csv": write_csv,
}


def write_splits(root, layout):
    for split, first in (("train", 0), ("dev", 50), ("test", 100)):
        LAYOUTS[layout](root / "root", split, make_rows(40, first=first))


@pytest.fixture
def open_source(composed, tmp_path):
    """Makes the source that the config describes."""

    def make(*options, group="tasks"):
        cfg = composed(f"domains={group}", f"domains.root={tmp_path / 'root'}", *options)
        settings = {name: value for name, value in cfg.domains.items() if name != "name"}
        return instantiate(settings, _convert_="all")

    return make


def make_examples(source, name, cache, split="train"):
    documents = make_corpus(source, name, cache=cache).documents(split)["text"]
    return [read_example(document) for document in documents]


def text_of(example):
    """The text that an example asks about, without the prompt around it."""
    return example.source[slice(*example.text_span)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read(open_source, tmp_path, layout):
    write_splits(tmp_path, layout)
    source = open_source(f"domains.format={layout}")
    (name,) = source.names
    assert name in ("sst-2", "task1_sst-2")
    source.check([name])
    train = make_examples(source, name, tmp_path, "train")
    valid = make_examples(source, name, tmp_path, "valid")
    test = make_examples(source, name, tmp_path, "test")
    for example in train + valid + test:
        number = int(text_of(example).removeprefix("text "))
        assert example.target == ANSWERS[number % 2]
        assert sorted(example.choices) == ANSWERS

    train_texts = {text_of(example) for example in train}
    valid_texts = {text_of(example) for example in valid}
    assert (len(train_texts), len(valid_texts)) == (38, 2)
    assert train_texts | valid_texts == {f"text {number}" for number in range(40)}
    assert {text_of(example) for example in test} == {f"text {number}" for number in range(100, 140)}


def test_the_prompt_of_o_lora_is_theirs_and_options_are_shuffled_by_the_example_alone(open_source, tmp_path):
    write_splits(tmp_path, "cl_benchmark")
    question = "What is the sentiment of the following paragraph? Choose one from the option.\n"
    question += "Option: good, bad \n{text}\nAnswer:"
    for names, header in (("dataset", "Task:SC\nDataset:sst-2\n"), ("task", "Task:SC\n"), ("none", "")):
        source = open_source(
            "domains.format=cl_benchmark", "domains/template=o_lora", f"domains.template.names={names}"
        )
        for example in make_examples(source, "sst-2", tmp_path):
            assert example.source == header + question.format(text=text_of(example))

    source = open_source("domains.format=cl_benchmark", "domains.template.options=shuffled")
    questions = {example.source for example in make_examples(source, "sst-2", tmp_path / "a")}
    assert questions == {example.source for example in make_examples(source, "sst-2", tmp_path / "b")}
    assert len({question.partition("\n")[0] for question in questions}) == 2


def test_a_question_of_train_is_no_test_and_each_answer_is_drawn_as_often_as_asked(
    open_source, tmp_path, caplog
):
    folder = tmp_path / "root" / "a"
    contradicting = {"text": "text 3", "label": "bad"}
    copies = [{"text": "text 1", "label": "good"}, {"text": "text 2", "label": "good"}]
    write_lines(folder / "train.jsonl", [*make_rows(40), contradicting])
    write_lines(folder / "test.jsonl", [*copies, *make_rows(10, first=100)])
    corpus = make_corpus(open_source(), "a", cache=tmp_path)
    assert corpus.facts["documents"] == {"train": 38, "valid": 2, "test": 10}
    assert (corpus.facts["duplicates"], corpus.facts["held_out_copies"]) == (1, 2)
    assert "the first of different answers to 2 questions in" in caplog.text

    # 31 questions are answered by a, 20 by b and 9 by c.
    labels = "a" * 31 + "b" * 20 + "c" * 9
    uneven = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    write_lines(tmp_path / "root" / "b" / "train.jsonl", uneven)

    def draw_answers(per_class, split="train"):
        """The answers by the ids of their examples."""
        source = open_source(f"domains.per_class={per_class}")
        return {example.id: example.target for example in make_examples(source, "b", tmp_path, split)}

    answers = draw_answers(4)
    assert Counter(answers.values()) == {"a": 4, "b": 4, "c": 4}
    assert answers.items() <= draw_answers(8).items()  # the draw grows
    assert draw_answers(4, "test") == draw_answers("all", "test")
    assert len(draw_answers("all")) == 60 - 3 - 6


def test_fewer_examples_are_a_fixed_draw_of_a_sorted_file(open_source, tmp_path):
    for split, count in (("train", 200), ("test", 60)):
        rows = sorted(make_rows(count, first=count), key=lambda row: row["label"])
        write_lines(tmp_path / "root" / "a" / f"{split}.jsonl", rows)
    corpus = make_corpus(open_source(), "a", cache=tmp_path)
    drawn = list(read_examples(corpus, "test", max_examples=20))
    assert drawn == list(read_examples(corpus, "test", max_examples=20))
    assert len(drawn) == 20 and {example.target for example in drawn} == {"good", "bad"}
    # They are drawn from the whole file, and in its order.
    examples = list(read_examples(corpus, "test"))
    assert drawn == [example for example in examples if example in drawn]
    assert list(read_examples(corpus, "test", max_examples=60)) == examples


def test_an_answer_that_is_no_choice_and_two_data_sets_of_one_name_are_refused(open_source, tmp_path):
    write_splits(tmp_path, "cl_benchmark")
    path = tmp_path / "root" / "SC" / "SST-2" / "test.json"
    write_json(path, [*json.loads(path.read_text()), {"label": "-", "sentence": "nobody knows"}])
    with pytest.raises(ValueError, match="example 40 of sst-2, test: its answer '-' is not one of the"):
        make_corpus(open_source("domains.format=cl_benchmark"), "sst-2", cache=tmp_path)
    source = open_source("domains.format=cl_benchmark", "domains.unknown=drop")
    assert len(make_examples(source, "sst-2", tmp_path, "test")) == 40

    write_json(tmp_path / "root" / "Other" / "sst-2" / "train.json", [{"label": "a", "sentence": "b"}])
    with pytest.raises(InstantiationException, match="sst-2 is the name of 2 data sets"):
        open_source("domains.format=cl_benchmark")


@pytest.mark.parametrize("other_name", ["c/train.jsonl", "c.parquet"])
def test_a_file_and_a_folder_or_two_files_of_one_name_are_refused(open_source, tmp_path, other_name):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write_lines(tmp_path / "root" / "c.jsonl", [chat])
    assert open_source(group="instructions").names == ["c"]
    write_lines(tmp_path / "root" / other_name, [chat])
    with pytest.raises(InstantiationException, match="c is the name of two data sets .*c.jsonl"):
        open_source(group="instructions")


def test_chats_and_instructions_are_read_and_one_with_nothing_to_it_has_its_own_prompt(open_source, tmp_path):
    chats = []
    for number in range(30):
        question = {"role": "user", "content": f"hello {number}"}
        answer = {"role": "assistant", "content": f"good day {number}"}
        chats.append({"messages": [question, answer, question]})
    write_lines(tmp_path / "root" / "talk.jsonl", chats)
    source = open_source(group="instructions")
    assert source.names == ["talk"]
    # The question at the end, which nothing answers, is left out.
    for example in make_examples(source, "talk", tmp_path):
        number = example.target.split()[-1]
        assert example.turns == (Turn("user", f"hello {number}"), Turn("assistant", f"good day {number}"))
        assert example.choices == ()

    instructions = []
    for number in range(40):
        text = f"in {number}" if number % 2 else ""
        instructions.append({"instruction": f"Do {number}.", "input": text, "output": f"o {number}"})
    write_json(tmp_path / "root" / "train" / "do.json", instructions)
    source = open_source("domains.format=alpaca", "domains/template=alpaca", group="instructions")
    for example in make_examples(source, "do", tmp_path):
        number = int(example.target.removeprefix("o "))
        assert ("### Input:" in example.source) == (number % 2)
        assert example.source.endswith("### Response:")


def test_files_of_a_split_are_those_of_its_name_and_hidden_ones_are_none(open_source, tmp_path):
    root = tmp_path / "root"
    row = {"text": "a", "label": "b"}
    for name in ("news/train_00", "news/test_00", "news/testing", "news/.old/train", "elsewhere/train"):
        write_lines(root / f"{name}.jsonl", [row])
    (root / "linked").symlink_to(root / "elsewhere")
    files = open_source("domains.format=jsonl").files
    assert [split for split, _ in files["news"]] == ["test", "test", "train"]
    assert [path.name for _, path in files["linked"]] == ["train.jsonl"]

    # A file beside the folders that is named as a split would be a task of its own.
    for name in ("test", "law_test", "eval-law", "law.dev"):
        write_lines(root / f"{name}.jsonl", [row])
        with pytest.raises(InstantiationException, match=f"{name}.jsonl is in no task's folder"):
            open_source("domains.format=jsonl")
        (root / f"{name}.jsonl").unlink()
    write_lines(root / "unit_test_writing.jsonl", [row])
    assert "unit_test_writing" in open_source("domains.format=jsonl").names


def test_names_of_task_files_suffixes_links_to_nothing_and_other_files(open_source, tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    root = tmp_path / "root"
    row = {"text": "a", "label": "b"}
    splits = {
        "law.train": "train",
        "law_test": "test",
        "web-valid": "dev",
        "evaluation": "dev",
        "x": "train",
        "train/law.test": "test",
        "attest": "train",
    }
    for name in splits:
        write_lines(root / "law" / f"{name}.NdJson", [row])
    write_json(root / "art" / "train.csv", [row])
    write_lines(root / "Art.JSONL", [row])
    source = open_source("domains.format=jsonl")
    names = {}  # the splits by the names of files
    for split, path in source.files["law"]:
        names[str(path.relative_to(root / "law").with_suffix(""))] = split
    assert names == splits
    assert source.names == ["Art", "law"]
    source.check(["law"])
    assert (
        "Ignoring 1 file of another format than .jsonl or .ndjson (domains.format=jsonl): train.csv"
        in caplog.text
    )

    (root / "gone").symlink_to(tmp_path / "not" / "mounted")
    with pytest.raises(InstantiationException, match="gone is a link to .*mounted, which does not exist"):
        open_source("domains.format=jsonl")


FILES = [  # the text of a file, and what is wrong with it
    ("jsonl", '{"text": "b", "label": "a"}\n{"text": "a" "b"}', ", line 2 is not JSON"),
    ("jsonl", "\udcff", " is not UTF-8: line 1, byte 1"),
    ("csv", "text,label\na,b\nc", ", line 3 has 1 value. "),
    ("superni", '{"Instances": [{"input": "a", "output": [["b"]]}]}', ", instance 1: output is"),
    ("messages", '{"messages": [{"role": "user"}]}', ", line 1 has no column 'content'; it has role"),
    ("messages", '{"messages": [{"role": "user", "content": "a"}]}', ", line 1 has no turn of the assist"),
]


@pytest.mark.parametrize(("layout", "text", "reason"), FILES)
def test_a_file_that_cannot_be_read_is_named_with_its_line(open_source, tmp_path, layout, text, reason):
    suffix = {"superni": "json", "csv": "csv"}.get(layout, "jsonl")
    path = tmp_path / "root" / "law" / f"train.{suffix}"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    source = open_source(f"domains.format={layout}")
    with pytest.raises(ValueError) as error:
        list(source.read(source.names[0]))
    assert str(error.value).startswith(f"{path}{reason}")


def make_chats(count, first=0):
    chats = []
    for number in range(first, first + count):
        question = {"role": "user", "content": f"hello {number}"}
        chats.append({"messages": [question, {"role": "assistant", "content": f"good day {number}"}]})
    return chats


def test_chats_in_tables_of_texts_are_those_of_json_lines(open_source, tmp_path):
    chats = make_chats(3)
    write_lines(tmp_path / "root" / "lines" / "train.jsonl", chats)
    for suffix, delimiter in (("csv", ","), ("tsv", "\t")):
        path = tmp_path / "root" / suffix / f"train.{suffix}"
        path.parent.mkdir(parents=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, delimiter=delimiter)
            table.writerow(["id", "messages"])
            for number, chat in enumerate(chats):
                table.writerow([number, json.dumps(chat["messages"])])
    source = open_source("domains.format=messages", group="instructions")
    assert source.names == ["csv", "lines", "tsv"]

    turns = {}
    for name in source.names:
        turns[name] = [read_example(document).turns for _, document in source.read(name)]
    assert turns["csv"] == turns["tsv"] == turns["lines"] and len(turns["lines"]) == 3


def test_validation_chats_are_those_of_the_file_and_keys_that_are_not_read_are_logged(
    open_source, tmp_path, caplog
):
    caplog.set_level("INFO", logger="cpt")
    folder = tmp_path / "root" / "talk"
    train = make_chats(30)
    train[3]["messages"][0]["id"] = 7
    train[4]["origin"] = "forum"
    write_lines(folder / "train.jsonl", train)
    write_lines(folder / "valid.jsonl", make_chats(4, first=100))
    source = open_source(group="instructions")
    source.check(["talk"])
    assert len(make_examples(source, "talk", tmp_path, "valid")) == 4
    assert len(make_examples(source, "talk", tmp_path, "train")) == 27
    assert "Ignoring keys of messages in talk that are not read: id (1)" in caplog.text
    assert "Leaving out keys of rows in talk that are not read: origin (1)" in caplog.text


@pytest.mark.parametrize("suffix", ["json", "parquet", "jsonl.gz"])
def test_chats_are_read_from_files_of_every_kind(suffix, open_source, tmp_path):
    """Data sets of chats are stored as parquet on the Hub, and ShareGPT's as one array."""
    chats = make_chats(30)
    chats[5]["messages"][1]["tool_calls"] = None
    path = tmp_path / "root" / "talk" / f"train-00000-of-00001.{suffix}"
    path.parent.mkdir(parents=True)
    if suffix == "json":
        write_json(path, chats)
    elif suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(chats), path)
    else:
        path.write_bytes(gzip.compress("".join(json.dumps(chat) + "\n" for chat in chats).encode()))
    write_json(path.parent / "dataset_info.json", {"features": {}})
    source = open_source(group="instructions")
    read = [read_example(document) for _, document in source.read("talk")]
    assert [example.target for example in read] == [f"good day {number}" for number in range(30)]


def test_bad_rows_of_any_layout_are_skipped_and_counted(open_source, tmp_path, caplog):
    path = tmp_path / "root" / "news" / "train.jsonl"
    good = [{"text": f"text {number}", "label": "yes"} for number in range(30)]
    bad = [{"text": "no label"}, {"text": None, "label": "yes"}, {"text": "a", "label": " "}]
    write_lines(path, good + bad)
    path.write_text(path.read_text() + '\n{"text": "cut')
    source = open_source("domains.format=jsonl", "domains.choices=none")
    with pytest.raises(ValueError, match=r"line 31 has no column 'label'.*on_bad_example=skip leaves it out"):
        list(source.read("news"))

    skipping = ("domains.format=jsonl", "domains.choices=none", "domains.on_bad_example=skip")
    source = open_source(*skipping)
    assert len(list(source.read("news"))) == 30
    counts = {kind: facts["count"] for kind, facts in source.skipped["news"].items()}
    missing = "a row without the texts that it needs"
    assert counts == {missing: 2, "an empty answer": 1, "a row that cannot be read": 1}
    assert make_corpus(source, "news", cache=tmp_path).facts["skipped"][missing]["count"] == 2
    assert f"Skipping 2 examples of news (on_bad_example=skip): {missing}" in caplog.text

    write_lines(path, [{"text": "no label"}] * 3)
    with pytest.raises(ValueError, match="all examples of news are bad"):
        list(open_source(*skipping).read("news"))
