"""Supervised tasks as they are published, read into questions with answers."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from cpt.data.corpus import make_corpus
from cpt.data.sources.examples import Turn, read_example
from cpt.data.tokenized_tasks import read_examples

ANSWERS = ["bad", "good"]


def rows(count, *, first=0):
    return [{"text": f"text {first + at}", "label": ANSWERS[at % 2]} for at in range(count)]


def put(path: Path, value, *, lines=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(map(json.dumps, value)) if lines else value
    path.write_text(text if isinstance(text, str) else json.dumps(text))


def cl_benchmark(root, split, own):
    given = [{"label": each["label"], "sentence": each["text"]} for each in own]
    put(root / "SC" / "SST-2" / f"{split}.json", given)
    put(root / "SC" / "SST-2" / "labels.json", ["good", "bad"])


def superni(root, split, own):
    instances = [{"input": each["text"], "output": [each["label"]]} for each in own]
    whole = {"Definition": ["Say what it is."], "Instances": instances}
    put(root / "task1_sst-2" / f"{split}.json", whole)


def alpaca(root, split, own):
    asked = {"instruction": "Say it."}
    for name in ("sst-2", "sst-2_T5"):
        given = [asked | {"input": each["text"], "output": each["label"]} for each in own]
        put(root / split / f"{name}.json", given)


def fewshot_tsv(root, split, own):
    lines = "".join(f"{each['text']}\t{each['label']}\n" for each in own)
    put(root / "sst-2_csv" / "0_42" / f"{split.replace('dev', 'valid')}.txt", lines)


def trace(root, split, own):
    given = [{"prompt": each["text"], "answer": each["label"]} for each in own]
    put(root / "sst-2" / f"{split.replace('dev', 'eval')}.json", given)


def jsonl(root, split, own):
    put(root / "sst-2" / f"{split}.jsonl", own, lines=True)


def csv(root, split, own):
    lines = (f"{each['text']},{each['label']}\n" for each in own)
    put(root / "sst-2" / f"{split}.csv", "".join(["text,label\n", *lines]))


LAYOUTS = {each.__name__: each for each in (cl_benchmark, superni, alpaca, fewshot_tsv, trace, jsonl, csv)}


def write(root, layout):
    for split, first in (("train", 0), ("dev", 50), ("test", 100)):
        LAYOUTS[layout](root / "root", split, rows(40, first=first))


@pytest.fixture
def source(composed, tmp_path):
    def made(*values, group="tasks"):
        cfg = composed(f"domains={group}", f"domains.root={tmp_path / 'root'}", *values)
        return instantiate({key: each for key, each in cfg.domains.items() if key != "name"}, _convert_="all")

    return made


def examples(source, name, cache, split="train"):
    found = make_corpus(source, name, cache=cache).documents(split)["text"]
    return [read_example(each) for each in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read(source, tmp_path, layout):
    write(tmp_path, layout)
    made = source(f"domains.format={layout}")
    (name,) = made.names
    assert name in ("sst-2", "task1_sst-2")
    made.check([name])
    found = {split: examples(made, name, tmp_path, split) for split in ("train", "valid", "test")}
    texts = {split: {each.source[slice(*each.text)] for each in own} for split, own in found.items()}
    assert {split: len(own) for split, own in texts.items()} == {"train": 38, "valid": 2, "test": 40}
    assert texts["train"] | texts["valid"] == {f"text {at}" for at in range(40)}
    assert texts["test"] == {f"text {at}" for at in range(100, 140)}
    for each in sum(found.values(), []):
        assert each.target == ANSWERS[int(each.source[slice(*each.text)].split()[1]) % 2]
        assert sorted(each.choices) == ANSWERS


def test_the_prompt_of_o_lora_is_theirs_and_options_are_shuffled_by_the_example_alone(source, tmp_path):
    write(tmp_path, "cl_benchmark")
    asked = "What is the sentiment of the following paragraph? Choose one from the option.\n"
    rest = asked + "Option: good, bad \n{text}\nAnswer:"
    for names, before in (("dataset", "Task:SC\nDataset:sst-2\n"), ("task", "Task:SC\n"), ("none", "")):
        given = ["domains.format=cl_benchmark", "domains/template=o_lora", f"domains.template.names={names}"]
        for each in examples(source(*given), "sst-2", tmp_path):
            assert each.source == before + rest.format(text=each.source[slice(*each.text)])
    made = source("domains.format=cl_benchmark", "domains.template.options=shuffled")
    first, again = ({each.source for each in examples(made, "sst-2", tmp_path / name)} for name in "ab")
    assert first == again and len({each.partition("\n")[0] for each in first}) == 2


def test_a_question_of_train_is_no_test_and_each_answer_is_drawn_as_often_as_asked(source, tmp_path, caplog):
    root = tmp_path / "root" / "a"
    contradicting = {"text": "text 3", "label": "bad"}
    copies = [{"text": "text 1", "label": "good"}, {"text": "text 2", "label": "good"}]
    put(root / "train.jsonl", [*rows(40), contradicting], lines=True)
    put(root / "test.jsonl", [*copies, *rows(10, first=100)], lines=True)
    corpus = make_corpus(source(), "a", cache=tmp_path)
    assert corpus.facts["documents"] == {"train": 38, "valid": 2, "test": 10}
    assert (corpus.facts["duplicates"], corpus.facts["held_out_copies"]) == (1, 2)
    assert "2 questions have different ones" in caplog.text
    uneven = [{"text": f"text {at}", "label": "abc"[int(at > 30) + int(at > 50)]} for at in range(60)]
    put(tmp_path / "root" / "b" / "train.jsonl", uneven, lines=True)

    def drawn(count, split="train"):
        made = source(f"domains.per_class={count}")
        return {each.id: each.target for each in examples(made, "b", tmp_path, split)}

    few = drawn(4)
    assert Counter(few.values()) == {"a": 4, "b": 4, "c": 4}
    assert few.items() <= drawn(8).items()  # the draw grows
    assert drawn(4, "test") == drawn("all", "test") and len(drawn("all")) == 60 - 3 - 6


def test_fewer_examples_are_a_fixed_draw_of_a_sorted_file(source, tmp_path):
    for split, count in (("train", 200), ("test", 60)):
        ordered = sorted(rows(count, first=count), key=lambda row: row["label"])
        put(tmp_path / "root" / "a" / f"{split}.jsonl", ordered, lines=True)
    corpus = make_corpus(source(), "a", cache=tmp_path)
    few, again = ([*read_examples(corpus, "test", max_examples=20)] for _ in range(2))
    assert few == again and len(few) == 20 and {each.target for each in few} == {"good", "bad"}
    whole = [*read_examples(corpus, "test")]
    assert few == [each for each in whole if each in few]
    assert [*read_examples(corpus, "test", max_examples=60)] == whole


def test_an_answer_that_is_no_choice_and_two_data_sets_of_one_name_are_refused(source, tmp_path):
    write(tmp_path, "cl_benchmark")
    path, given = tmp_path / "root" / "SC" / "SST-2" / "test.json", "domains.format=cl_benchmark"
    put(path, [*json.loads(path.read_text()), {"label": "-", "sentence": "nobody knows"}])
    with pytest.raises(ValueError, match="example 40 of sst-2, test: its answer '-' is not one of the"):
        make_corpus(source(given), "sst-2", cache=tmp_path)
    assert len(examples(source(given, "domains.unknown=drop"), "sst-2", tmp_path, "test")) == 40
    put(tmp_path / "root" / "Other" / "sst-2" / "train.json", [{"label": "a", "sentence": "b"}])
    with pytest.raises(InstantiationException, match="sst-2 is the name of 2 data sets"):
        source(given)


def test_chats_and_instructions_are_read_and_one_with_nothing_to_it_has_its_own_prompt(source, tmp_path):
    chats = []
    for at in range(30):
        asked = {"role": "user", "content": f"hello {at}"}
        chats.append({"messages": [asked, {"role": "assistant", "content": f"good day {at}"}, asked]})
    put(tmp_path / "root" / "talk.jsonl", chats, lines=True)
    made = source(group="instructions")
    assert made.names == ["talk"]
    for each in examples(made, "talk", tmp_path):
        number = each.target.split()[-1]
        assert each.turns == (Turn("user", f"hello {number}"), Turn("assistant", f"good day {number}"))
        assert each.choices == ()
    given = [{"instruction": f"Do {n}.", "input": f"in {n}" * (n % 2), "output": f"o {n}"} for n in range(40)]
    put(tmp_path / "root" / "train" / "do.json", given)
    made = source("domains.format=alpaca", "domains/template=alpaca", group="instructions")
    for each in examples(made, "do", tmp_path):
        assert ("### Input:" in each.source) == (int(each.target.split()[1]) % 2)
        assert each.source.endswith("### Response:")


def test_files_of_a_split_are_those_of_its_name_and_hidden_ones_are_none(source, tmp_path):
    root, row = tmp_path / "root", {"text": "a", "label": "b"}
    for place in ("news/train_00", "news/test_00", "news/testing", "news/.old/train", "elsewhere/train"):
        put(root / f"{place}.jsonl", [row], lines=True)
    (root / "linked").symlink_to(root / "elsewhere")
    found = source("domains.format=jsonl").files
    assert [split for split, _ in found["news"]] == ["test", "test", "train"]
    assert [path.name for _, path in found["linked"]] == ["train.jsonl"]
    for name in ("test", "law_test", "eval-law", "law.dev"):
        put(root / f"{name}.jsonl", [row], lines=True)
        with pytest.raises(InstantiationException, match=f"{name}.jsonl is in no task's folder"):
            source("domains.format=jsonl")
        (root / f"{name}.jsonl").unlink()
    put(root / "unit_test_writing.jsonl", [row], lines=True)
    assert "unit_test_writing" in source("domains.format=jsonl").names


def test_names_of_task_files_suffixes_links_to_nothing_and_other_files(source, tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    root, row = tmp_path / "root", {"text": "a", "label": "b"}
    splits = {"law.train": "train", "law_test": "test", "web-valid": "dev", "evaluation": "dev", "x": "train"}
    splits |= {"train/law.test": "test", "attest": "train"}
    for name in splits:
        put(root / "law" / f"{name}.JSONL", [row], lines=True)
        (root / "law" / f"{name}.JSONL").rename(root / "law" / f"{name}.NdJson")
    put(root / "art" / "train.csv", [row])
    put(root / "Art.JSONL", [row], lines=True)
    found = source("domains.format=jsonl")
    assert {str(p.relative_to(root / "law"))[:-7]: split for split, p in found.files["law"]} == splits
    assert found.names == ["Art", "law"]
    found.check(["law"])
    assert "Ignoring 1 files that are no .jsonl or .ndjson (domains.format=jsonl): train.csv" in caplog.text
    (root / "gone").symlink_to(tmp_path / "not" / "mounted")
    with pytest.raises(InstantiationException, match="gone is a link to .*mounted, which does not exist"):
        source("domains.format=jsonl")


FILES = [  # what stands in a file, and what is said of it
    ("jsonl", '{"text": "b", "label": "a"}\n{"text": "a" "b"}', ", line 2 is not JSON"),
    ("jsonl", "\udcff", " is not UTF-8: line 1, byte 1"),
    ("csv", "text,label\na,b\nc", ", line 3 has 1 values"),
    ("superni", '{"Instances": [{"input": "a", "output": [["b"]]}]}', ", instance 1: output is"),
    ("messages", '{"messages": [{"role": "user"}]}', ", line 1 has no column 'content'; it has role"),
    ("messages", '{"messages": [{"role": "user", "content": "a"}]}', ", line 1 has no turn of the assist"),
]


@pytest.mark.parametrize(("layout", "text", "told"), FILES)
def test_a_file_that_cannot_be_read_is_named_with_its_line(source, tmp_path, layout, text, told):
    path = tmp_path / "root" / "law" / f"train.{ {'superni': 'json', 'csv': 'csv'}.get(layout, 'jsonl') }"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    made = source(f"domains.format={layout}")
    with pytest.raises(ValueError) as error:
        list(made.read(made.names[0]))
    assert str(error.value).startswith(f"{path}{told}")


def chats_of(count, first=0):
    return [
        {
            "messages": [
                {"role": "user", "content": f"hello {number}"},
                {"role": "assistant", "content": f"good day {number}"},
            ]
        }
        for number in range(first, first + count)
    ]


def test_validation_chats_are_those_of_the_file_and_keys_that_are_not_read_are_logged(
    source, tmp_path, caplog
):
    caplog.set_level("INFO", logger="cpt")
    folder = tmp_path / "root" / "talk"
    train = chats_of(30)
    train[3]["messages"][0]["id"] = 7
    train[4]["origin"] = "forum"
    put(folder / "train.jsonl", train, lines=True)
    put(folder / "valid.jsonl", chats_of(4, first=100), lines=True)
    chats = source(group="instructions")
    chats.check(["talk"])
    assert len(examples(chats, "talk", tmp_path, "valid")) == 4
    assert len(examples(chats, "talk", tmp_path, "train")) == 27
    assert "Ignoring keys of messages in talk that are not read: id (1)" in caplog.text
    assert "Leaving out keys of rows in talk that are not read: origin (1)" in caplog.text


def test_bad_rows_of_any_layout_are_skipped_and_counted(source, tmp_path, caplog):
    path = tmp_path / "root" / "news" / "train.jsonl"
    good = [{"text": f"text {number}", "label": "yes"} for number in range(30)]
    put(
        path,
        [*good, {"text": "no label"}, {"text": None, "label": "yes"}, {"text": "a", "label": " "}],
        lines=True,
    )
    path.write_text(path.read_text() + '\n{"text": "cut')
    given = ["domains.format=jsonl", "domains.choices=none"]
    with pytest.raises(ValueError, match=r"line 31 has no column 'label'.*on_bad_example=skip leaves it out"):
        list(source(*given).read("news"))
    tasks = source(*given, "domains.on_bad_example=skip")
    assert len(list(tasks.read("news"))) == 30
    counts = {kind: facts["count"] for kind, facts in tasks.skipped["news"].items()}
    missing = "a row without the texts that it needs"
    assert counts == {missing: 2, "an empty answer": 1, "a row that cannot be read": 1}
    assert make_corpus(tasks, "news", cache=tmp_path).facts["skipped"][missing]["count"] == 2
    assert f"Skipping 2 examples of news (domains.on_bad_example=skip): {missing}" in caplog.text
    put(path, [{"text": "no label"}] * 3, lines=True)
    with pytest.raises(ValueError, match="all examples of news are bad"):
        list(source(*given, "domains.on_bad_example=skip").read("news"))
