"""Supervised tasks as they are published, read into questions with answers."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate

from cpt.data.corpus import make_corpus
from cpt.data.example import read_example
from cpt.data.sources.docstrings import TASK_PACKAGES
from cpt.trainer.plan import make_plan
from tests.conftest import SHARED

MINI = SHARED / "data" / "standard-cl-mini"
ANSWERS = ["bad", "good"]


def rows(count, *, first=0):
    return [{"text": f"text {first + at}", "label": ANSWERS[at % 2]} for at in range(count)]


def write(path: Path, value, *, lines=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value))


def in_splits(**splits):
    """The rows of each split, by its name: 40 from a number on."""
    return {split: rows(40, first=first) for split, first in splits.items()}


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_cl_benchmark(root):
    for split, own in in_splits(train=0, dev=100, test=100).items():
        given = [{"label": each["label"], "sentence": each["text"]} for each in own]
        write(root / "SC" / "SST-2" / f"{split}.json", given)
    write(root / "SC" / "SST-2" / "labels.json", ["good", "bad"])


def write_superni(root):
    for split, own in in_splits(train=0, test=100).items():
        instances = [{"input": each["text"], "output": [each["label"]]} for each in own]
        whole = {"Definition": ["Say what it is."], "Instances": instances}
        write(root / "task1_sst-2" / f"{split}.json", whole)


def write_alpaca(root):
    for split, own in in_splits(train=0, dev=50, test=100).items():
        asked = {"instruction": "Say it."}
        given = [{**asked, "input": each["text"], "output": each["label"]} for each in own]
        given = [{"id": f"{split}{at}", **each} for at, each in enumerate(given)]
        for name in ("sst-2", "sst-2_T5"):
            write(root / split / f"{name}.json", given)


def write_fewshot(root):
    for split, own in in_splits(train=0, valid=50, test=100).items():
        lines = "".join(f"{each['text']}\t{each['label']}\n" for each in own)
        put(root / "sst-2_csv" / "0_42" / f"{split}.txt", lines)


def write_trace(root):
    for split, own in in_splits(train=0, eval=50, test=100).items():
        given = [{"prompt": each["text"], "answer": each["label"]} for each in own]
        write(root / "sst-2" / f"{split}.json", given)


def write_jsonl(root):
    for split, own in in_splits(train=0, dev=50, test=100).items():
        write(root / "sst-2" / f"{split}.jsonl", own, lines=True)


def write_csv(root):
    for split, own in in_splits(train=0, test=100).items():
        lines = (f"{each['text']},{each['label']}\n" for each in own)
        put(root / "sst-2" / f"{split}.csv", "".join(["text,label\n", *lines]))


LAYOUTS = {
    "cl_benchmark": write_cl_benchmark,
    "superni": write_superni,
    "alpaca": write_alpaca,
    "fewshot_tsv": write_fewshot,
    "trace": write_trace,
    "jsonl": write_jsonl,
    "csv": write_csv,
}


@pytest.fixture
def source(composed, tmp_path):
    """A source of tasks with values of its own."""

    def made(*values, group="tasks"):
        cfg = composed(f"domains={group}", f"domains.root={tmp_path / 'root'}", *values)
        return instantiate({key: each for key, each in cfg.domains.items() if key != "name"}, _convert_="all")

    return made


def examples(source, name, cache, split="train"):
    found = make_corpus(source, name, cache=cache).documents(split)["text"]
    return [read_example(each) for each in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read(source, tmp_path, layout):
    LAYOUTS[layout](tmp_path / "root")
    made = source(f"domains.format={layout}")
    (name,) = made.names
    assert name in ("sst-2", "task1_sst-2")
    made.check([name])
    found = {split: examples(made, name, tmp_path, split) for split in ("train", "valid", "test")}
    texts = {split: {each.source[slice(*each.text)] for each in own} for split, own in found.items()}
    assert {split: len(own) for split, own in texts.items()} == {"train": 38, "valid": 2, "test": 40}
    # What is tuned on is of train; the files of the development split are not read.
    assert texts["train"] | texts["valid"] == {f"text {at}" for at in range(40)}
    assert texts["test"] == {f"text {at}" for at in range(100, 140)}
    for own in found.values():
        for each in own:
            assert each.target == ANSWERS[int(each.source[slice(*each.text)].split()[1]) % 2]
            assert sorted(each.choices) == ANSWERS


def test_the_prompt_of_o_lora_is_theirs(source, tmp_path):
    write_cl_benchmark(tmp_path / "root")
    asked = "What is the sentiment of the following paragraph? Choose one from the option.\n"
    rest = asked + "Option: good, bad \n{text}\nAnswer:"
    for names, before in (("dataset", "Task:SC\nDataset:sst-2\n"), ("task", "Task:SC\n"), ("none", "")):
        given = ["domains.format=cl_benchmark", "domains/template=o_lora", f"domains.template.names={names}"]
        for each in examples(source(*given), "sst-2", tmp_path):
            assert each.source == before + rest.format(text=each.source[slice(*each.text)])


def test_a_task_that_asks_itself_gets_no_question(source, tmp_path):
    write_cl_benchmark(tmp_path / "root")
    (tmp_path / "root" / "SC").rename(tmp_path / "root" / "COPA")
    made = source("domains.format=cl_benchmark", "domains/template=o_lora", "domains.template.names=none")
    assert all(each.source.startswith("text ") for each in examples(made, "sst-2", tmp_path))
    write_trace(tmp_path / "root")
    (tmp_path / "root" / "sst-2").rename(tmp_path / "root" / "cooking")
    with pytest.raises(ValueError, match="no instruction for the task cooking"):
        source("domains.format=trace", "domains/template=o_lora").check(["cooking"])


def test_options_are_shuffled_by_the_example_alone(source, tmp_path):
    write_cl_benchmark(tmp_path / "root")
    made = source("domains.format=cl_benchmark", "domains.template.options=shuffled")
    first = {each.source for each in examples(made, "sst-2", tmp_path)}
    assert Counter(each.partition("\n")[0] for each in first).keys() == {
        "Options: good, bad",
        "Options: bad, good",
    }
    again = tmp_path / "again"
    again.mkdir()
    assert first == {each.source for each in examples(made, "sst-2", again)}


def test_a_question_of_train_is_no_test_whatever_its_answer_is(source, tmp_path, caplog):
    root = tmp_path / "root" / "a"
    train = rows(40)
    train.append({"text": "text 3", "label": "bad"})  # contradicts the one that is there
    copies = [{"text": "text 1", "label": "good"}, {"text": "text 2", "label": "good"}]
    write(root / "train.jsonl", train, lines=True)
    write(root / "test.jsonl", [*copies, *rows(10, first=100)], lines=True)
    corpus = make_corpus(source(), "a", cache=tmp_path)
    assert corpus.facts["documents"] == {"train": 38, "valid": 2, "test": 10}
    assert (corpus.facts["duplicates"], corpus.facts["held_out_copies"]) == (1, 2)
    assert "2 questions stand there with different answers" in caplog.text


def test_as_many_of_each_answer_as_asked_for(source, tmp_path):
    uneven = [{"text": f"text {at}", "label": "abc"[int(at > 30) + int(at > 50)]} for at in range(60)]
    write(tmp_path / "root" / "a" / "train.jsonl", uneven, lines=True)

    def drawn(count):
        made = source(f"domains.per_class={count}")
        return {each.id: each.target for each in examples(made, "a", tmp_path)}

    few, more = drawn(4), drawn(8)
    assert Counter(few.values()) == {"a": 4, "b": 4, "c": 4}
    assert few.items() <= more.items()  # the draw grows
    held_out = [each.id for each in examples(source("domains.per_class=4"), "a", tmp_path, "test")]
    assert held_out == [each.id for each in examples(source(), "a", tmp_path, "test")]
    assert len(drawn("all")) == 60 - 3 - 6


def test_an_answer_that_is_no_choice_is_told_or_left_out(source, tmp_path):
    write_cl_benchmark(tmp_path / "root")
    path = tmp_path / "root" / "SC" / "SST-2" / "test.json"
    write(path, [*json.loads(path.read_text()), {"label": "-", "sentence": "nobody knows"}])
    given = "domains.format=cl_benchmark"
    with pytest.raises(ValueError, match="example 40 of sst-2, test: its answer '-' is none of the choices"):
        make_corpus(source(given), "sst-2", cache=tmp_path)
    assert len(examples(source(given, "domains.unknown=drop"), "sst-2", tmp_path, "test")) == 40


def test_chats_and_open_answers_are_instructions(source, tmp_path):
    turns = [{"role": "user", "content": "hello {}"}, {"role": "assistant", "content": "good day {}"}]
    chats = [
        {"messages": [{**turn, "content": turn["content"].format(at)} for turn in [*turns, turns[0]]]}
        for at in range(30)
    ]
    write(tmp_path / "root" / "talk.jsonl", chats, lines=True)
    made = source(group="instructions")
    assert made.names == ["talk"]
    for each in examples(made, "talk", tmp_path):
        number = each.target.split()[-1]
        assert each.turns == (("user", f"hello {number}"), ("assistant", f"good day {number}"))
        assert each.choices == ()


def test_an_instruction_with_nothing_to_it_has_its_own_prompt(source, tmp_path):
    given = [
        {"instruction": f"Do {at}.", "input": f"in {at}" * (at % 2), "output": f"o {at}"} for at in range(40)
    ]
    write(tmp_path / "root" / "train" / "do.json", given)
    made = source("domains.format=alpaca", "domains/template=alpaca", group="instructions")
    found = examples(made, "do", tmp_path)
    assert {"### Input:" in each.source for each in found} == {True, False}
    for each in found:
        assert ("### Input:" in each.source) == (int(each.target.split()[1]) % 2)
        assert each.source.endswith("### Response:")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("domains.template.source='{text} {title}'", "is not a text with {fields}"),
        ("domains.template.source='{text} {text}'", "has {text} more than once"),
        ("domains.template.prefixes.task='{nam}'", "template.prefixes.task='{nam}'"),
        ("domains.template.question='{}'", "template.question='{}'"),
        ("domains.columns.target=null", "needed: the columns of text and target"),
        ("model=tiny_roberta model.objective=masked", "model.objective=masked does not go with"),
    ],
)
def test_what_is_wrong_is_told_of_the_config_alone(composed, tmp_path, given, told):
    write_jsonl(tmp_path / "root")
    values = given.split(" ") if given.startswith("model=") else [given]
    base = ["model=tiny_gpt2", "domains=tasks", f"domains.root={tmp_path / 'root'}"]
    with pytest.raises(ValueError) as error:
        make_plan(composed(*base, *values))
    assert told in str(error.value)


CHAT = '{"messages": [{"role": "%s", "content": %s}]}'
FILES = [  # what stands in a file, and what is said of it
    ("jsonl", "law/train.jsonl", "\n\n", " is empty"),
    ("jsonl", "law/train.jsonl", '{"text": "b", "label": "a"}\n{"text": "a" "b"}', ", line 2 is not JSON"),
    ("jsonl", "law/train.jsonl", "[1, 2]", ", value 1 has no 'text'"),
    ("jsonl", "law/train.jsonl", '{"text": null, "label": "a"}', ", line 1: 'text' is not text"),
    ("jsonl", "law/train.jsonl", "\udcff", " is not UTF-8: line 1, byte 1"),
    ("csv", "law/train.csv", "text,label\na,b\nc", ", line 3 has 1 values"),
    ("csv", "law/train.csv", "words,label\na,b", ", line 2 has no 'text'; it has words, label"),
    ("fewshot_tsv", "agnews/0/train.txt", "a text", ", line 1 has no tab"),
    ("cl_benchmark", "TC/law/labels.json", '{"a": 1}', " has {'a': 1}; needed: a list"),
    ("cl_benchmark", "TC/law/labels.json", '["a"', ", line 1 is not JSON"),
    ("trace", "law/train.json", '[{"prompt": "a"}]', ", value 1 has no 'answer'"),
    ("superni", "law/train.json", "[]", " has no Instances"),
    ("messages", "law/train.jsonl", '{"messages": "a"}', ", line 1 has no messages"),
    ("messages", "law/train.jsonl", CHAT % ("assistant", "null"), ", line 1: 'content' is not text"),
    ("messages", "law/train.jsonl", CHAT % ("user", '"a"'), ", line 1 has no turn of the assistant"),
]


@pytest.mark.parametrize(("layout", "place", "text", "told"), FILES)
def test_a_file_that_cannot_be_read_is_named_with_its_line(source, tmp_path, layout, place, text, told):
    path = tmp_path / "root" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    if path.name == "labels.json":
        write(path.with_name("train.json"), [])
    made = source(f"domains.format={layout}")
    with pytest.raises(ValueError) as error:
        list(made.read(made.names[0]))
    assert str(error.value).startswith(f"{path}{told}")


@pytest.mark.slow
@pytest.mark.skipif(not MINI.is_dir(), reason="needs the small standard benchmark")
@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_standard_benchmark_is_read_in_its_orders(composed, tmp_path, order):
    cfg = composed("experiment=standard_cl", "domains.format=jsonl", f"domains.root={MINI}", f"order={order}")
    plan = make_plan(cfg)
    orders = {1: "dbpedia amazon yahoo agnews", 2: "dbpedia amazon agnews yahoo"}
    assert " ".join(plan.order) == {**orders, 3: "yahoo amazon agnews dbpedia"}[order]
    found = make_corpus(plan.source, "agnews", cache=tmp_path)
    assert sum(found.facts["documents"].values()) == 320 + 1132
    example = read_example(found.documents("test")[0]["text"])
    assert example.source.startswith("Task:TC\nDataset:agnews\nWhat is the topic")
    assert "Option: business, science, sports, world \n" in example.source


@pytest.mark.slow
def test_without_a_folder_there_are_tasks_of_what_is_installed(composed, monkeypatch):
    monkeypatch.setitem(TASK_PACKAGES, "networkx", ("networkx",))
    plan = make_plan(composed("model=tiny_gpt2", "domains=tasks"))
    assert set(plan.order) == set(TASK_PACKAGES)
    found = [read_example(each) for _, each in plan.source.read("networkx")]
    sizes = Counter(each.target for each in found)
    assert len(sizes) == 4
    assert min(sizes.values()) > 20
    assert len({each.question for each in found}) > 0.95 * len(found)
    assert all(not np.isin(each.choices, each.source[slice(*each.text)].split()).any() for each in found)
