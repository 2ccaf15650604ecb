"""`python -m cpt.prepare` on small folders in the layouts of the authors; sources read the result."""

import itertools
import json

from datasets import Dataset, DatasetDict

from cpt import prepare
from cpt.data.sources.readers import read_folder
from cpt.data.sources.tasks import find_files
from cpt.evaluation.finetune_tasks import plan_endtasks
from tests.support.endtask_fixtures import options

# Training examples of the public files by class, test and dev; those of classes are made up, their sum is not
SIZES = {
    "citation_intent": ([1688 // 6] * 5 + [283], 139, 114),
    "sciie": ([3219 // 7] * 6 + [465], 974, 455),
    "chemprot": ([400] * 8 + [907, 20, 20, 20, 2], 3469, 2427),
}
PRODUCTS = {prepare.PHONE: 339, prepare.CAMERA: 286, "Bing9Domains/Nokia6600": 453}
PRODUCTS |= dict.fromkeys(prepare.TESTED, 190)


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_aspects(path, count, labels):
    rows = ({"term": "menu", "sentence": f"s{n}", "polarity": labels[n % len(labels)]} for n in range(count))
    write_json(path, dict(enumerate(rows)))


def write_labelled(path, labels):
    rows = [json.dumps({"text": f"{path.stem} {n}", "label": label}) for n, label in enumerate(labels)]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(rows))


def read_prepared(root, *, splits):
    """The source of the prepared end tasks, whose aspects come as the second text."""
    columns = {"id": "id", "text": "text_pair", "text_pair": "text", "label": "label"}
    plan = options("texts", columns=columns, root=str(root), splits=splits)
    return plan_endtasks(plan, None, ["acl"]).source


def test_das6_has_the_published_counts_and_a_missing_file_is_named(tmp_path, monkeypatch, capsys):
    """On the layout of DAS with its numbers of examples, and corpora of 40 lines."""
    data = tmp_path / "released" / "data"
    monkeypatch.setattr(prepare, "CORPORA", {name: (file, 0) for name, (file, _) in prepare.CORPORA.items()})
    for file, _ in prepare.CORPORA.values():
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        (data / file).write_text("".join(f"line {n}\n" for n in range(39)) + "line 39")
    for split, count in (("train", 3452), ("test", 1120)):
        write_aspects(data / f"SemEval14-res/{split}.json", count, ("positive", "neutral", "negative"))
    for name, count in PRODUCTS.items():
        for part, size in {"train": count - 20, "dev": 10, "test": 10}.items():
            write_aspects(data / f"absa/dat/{name}/{part}.json", size, "+-")
    for name, (class_sizes, test, dev) in SIZES.items():
        train_labels = []
        for label, size in enumerate(class_sizes):
            train_labels += [str(label)] * size
        write_labelled(data / name / "train.jsonl", train_labels)
        write_labelled(data / name / "test.jsonl", ["0"] * test)
        write_labelled(data / name / "dev.jsonl", ["0"] * dev)

    out = tmp_path / "out"
    assert prepare.main(["das6", str(data), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Differs" not in printed and printed.splitlines()[-1] == f"{out}: ready, 0 differences"
    documents = list(read_folder(out / "corpora" / "acl", "acl", column="text", document="line"))
    assert dict(documents) == {"valid": "line 0", "test": "line 1", "train": "line 39"}

    das_splits = read_prepared(out, splits="das")
    for name, task in prepare.ENDTASKS.items():
        counts = tuple(len(das_splits.read(name, split)) for split in ("train", "test"))
        assert counts == task.published, name
    example = read_prepared(out, splits="own").read("restaurant", "test")[0]
    assert (example.text, example.text_pair, example.label) == ("menu", "s0", "positive")

    (data / "sciie/dev.jsonl").unlink()
    (data / "acl_anthology.txt").write_text("x" * 2_000_000)
    assert prepare.main(["das6", str(data), str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Differs: corpora/acl: MB 2, published 0" in lines
    assert f"Missing: {data.resolve() / 'sciie/dev.jsonl'}" in lines and "incomplete" in lines[-1]


def test_tasks_are_copied_without_the_development_split_and_read_through(tmp_path, capsys, monkeypatch):
    released = tmp_path / "released"
    out = tmp_path / "out"
    monkeypatch.setattr(prepare, "STANDARD", dict.fromkeys(prepare.STANDARD, (3, 2)))
    for task in prepare.STANDARD:
        folder = released / task
        for split, count in {"train": 3, "dev": 2, "test": 2}.items():
            write_json(folder / f"{split}.json", [{"label": "a", "sentence": "b"}] * count)
        write_json(folder / "labels.json", ["a"])
    assert prepare.main(["standard_cl", str(released), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Differs" not in printed and printed.count("Missing, optional:") == len(prepare.LONG)
    names = [task.partition("/")[2] for task in prepare.STANDARD]
    files = {(name, split) for name, split, _ in find_files(out, "cl_benchmark")}
    assert files == set(itertools.product(names, ("train", "test")))

    for task in prepare.TRACE:
        for split in ("train", "eval", "test"):
            write_json(tmp_path / "TRACE" / task / f"{split}.json", [{"prompt": "a", "answer": "b"}])
    capsys.readouterr()
    assert prepare.main(["trace", str(tmp_path / "TRACE"), str(tmp_path / "trace")]) == 0
    assert "Differs: C-STANCE: train 1, published 5,000" in capsys.readouterr().out
    assert len(list(find_files(tmp_path / "trace", "trace"))) == 2 * len(prepare.TRACE)


def test_m2d2_is_counted_by_coarse_domain_and_read_from_files_or_saved_data_sets(tmp_path, capsys):
    released = tmp_path / "released"
    out = tmp_path / "out"
    for folder in ("cs.AI", "Philosophy_and_thinking__Thinking/SPLIT", "hep-th", "eval_sets"):
        (released / folder).mkdir(parents=True)
        for split in ("train", "valid", "test"):
            (released / folder / f"{split}.txt").write_text("one\n\ntwo\n")
    split = {name: Dataset.from_dict({"text": ["a\nb", "c", ""]}) for name in ("train", "validation", "test")}
    DatasetDict(split).save_to_disk(released / "cs.CL")
    assert prepare.main(["m2d2", str(released), str(out)]) == 0
    rows = {line.split()[0]: line.split()[1:5] for line in capsys.readouterr().out.splitlines()}
    assert rows["cs"] == ["2", "4", "4", "4"] and rows["Philosophy_and_thinking"] == ["1", "2", "2", "2"]
    assert rows["archives"] == ["without", "classes", "1", "2"] and sum(prepare.FINE_COUNTS.values()) == 187
    assert (out / "cs.CL/valid.txt").read_text() == "a b\nc\n" and not (out / "eval_sets").exists()
