"""End tasks as they are planned and read: splits, formats, errors, and what a result depends on."""

import json

import datasets
import pandas as pd
import pytest

from cpt.evaluation.finetune_tasks import name_class, plan_endtasks
from tests.conftest import SHARED
from tests.support.endtask_fixtures import options, rows, write, write_task

DAS6 = SHARED / "data" / "das6-mini"
SIX = ["restaurant", "acl", "ai", "phone", "pubmed", "camera"]


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food")
    return tmp_path


def plan(root, *, names=("food", "law", "space"), order=("law", "food"), **overrides):
    return plan_endtasks(options("texts", root=root, **overrides), names, order)


@pytest.mark.skipif(not DAS6.is_dir(), reason="the data of das6-mini are not here")
def test_the_preset_is_the_protocol_of_das_and_its_split_reproduces():
    own_split = {"pubmed": {"path": "pubmed", "splits": "das"}}
    task = plan_endtasks(options("das6", root=DAS6, tasks=own_split), SIX, SIX).source.task("pubmed")
    assert (len(task.train), len(task.test), len(task.classes)) == (2667, 7394, 13) and not task.dev
    endtask_plan = plan_endtasks(options("das6", root=DAS6), SIX, SIX)
    settings = [endtask_plan.source.settings(name) for name in SIX]
    assert endtask_plan.tasks == SIX and [settings_of_task.epochs for settings_of_task in settings] == [
        5,
        10,
        5,
        15,
        10,
        15,
    ]
    assert [settings_of_task.metric for settings_of_task in settings] == ["macro_f1"] * 4 + [
        "micro_f1",
        "macro_f1",
    ]
    task = endtask_plan.source.task("restaurant")
    assert (len(task.train), len(task.test), len(task.classes)) == (3451, 1120, 3)
    assert (task.train[0].text, task.train[0].text_pair) == ("staff", "But the staff was so horrible to us.")


def test_tasks_are_those_of_learned_domains_in_their_order_each_with_its_own_values(root):
    assert plan_endtasks(options("none"), ["law"], ["law"]) is None
    assert plan(root, order=["space", "food"]).tasks == ["food"]
    endtask_plan = plan(root, epochs=5, tasks={"law": {"epochs": 7, "metric": "accuracy"}})
    law, food = map(endtask_plan.source.settings, endtask_plan.tasks)
    assert (law.epochs, law.metric, food.epochs, food.metric) == (7, "accuracy", 5, "macro_f1")
    with pytest.raises(ValueError, match=r"no task is of a domain of order=\[space\]. Allowed: food"):
        plan(root, order=["space"])
    with pytest.raises(ValueError, match=r"^endtask\.tasks\.law\.columns\.txt is invalid"):
        plan(root, tasks={"law": {"columns": {"txt": "a"}}})


def test_every_format_gives_the_same_examples_and_no_other_is_read(root, tmp_path):
    examples = rows("law", count=10, seed=5)
    folders = [tmp_path / name for name in ("jsonl.gz", "json", "csv", "parquet")]
    for folder in folders:
        folder.mkdir()
    for split in ("train", "test"):
        write(folders[0] / f"{split}.jsonl.gz", examples)
        (folders[1] / f"{split}.json").write_text(json.dumps(examples))
        pd.DataFrame(examples).to_csv(folders[2] / f"{split}.csv", index=False)
        pd.DataFrame(examples).to_parquet(folders[3] / f"{split}-00000-of-00001.parquet")
    plans = [plan(root, tasks={"law": {"path": str(folder)}}, columns={"id": "id"}) for folder in folders]
    assert len({endtask_plan.source.task("law").content for endtask_plan in plans}) == 1
    folder = root / "endtasks" / "law"
    (folder / "test.jsonl").unlink()
    (folder / "test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"test\.jsonl\.gz cannot be read: Not a gzipped file"):
        plan(root).source.task("law")


WRONG = [
    ("test", [], r"^end task law has no example in test"),
    ("test", [{"text": "a", "label": "so so"}], r"the label 'so so' of test-0 in test is not"),
    ("test", [{"txt": "a", "label": "bad"}], r"test\.jsonl, line 1 has no column 'text'; it has txt, label"),
    ("train", [{"text": "a", "label": "x"}] * 2, r"^end task law has one class in train, 'x'; needed"),
]


@pytest.mark.parametrize(("split", "examples", "message"), WRONG)
def test_wrong_examples_are_reported(root, split, examples, message):
    write(root / "endtasks" / "law" / f"{split}.jsonl", examples)
    with pytest.raises(ValueError, match=message):
        plan(root).source.task("law")


def test_the_sample_of_a_task_is_the_same_in_every_run_and_dev_can_replace_test(root):
    full_task = plan(root).source.task("law")
    overrides = {"law": {"max_train_samples": 5}}
    sampled_plan = plan(root, max_train_samples=4, max_eval_samples=3, tasks=overrides)
    for name, num_train in {"law": 5, "food": 4}.items():
        task = sampled_plan.source.task(name)
        everything = plan(root).source.task(name)
        assert (len(task.train), len(task.test), task.classes) == (num_train, 3, everything.classes)
        chosen = [example for example in everything.train if example in task.train]
        assert chosen == task.train != everything.train[:num_train]
        assert sampled_plan.source.task(name).content == task.content
    assert plan(root, max_train_samples=10**6).source.task("law").digest(1) == full_task.digest(1)
    # Dev is evaluated where asked, and test is then not read.
    (root / "endtasks/law/test.jsonl").write_text("not readable")
    task = plan(root, score_on="dev").source.task("law")
    assert (
        task.test
        == plan(root, score_on="dev", load_best_model_at_end=True).source.task("law").dev
        != full_task.test
    )
    (root / "endtasks/law/dev.jsonl").unlink()
    with pytest.raises(ValueError, match="endtask.score_on=dev is invalid: the end task law has no dev"):
        plan(root, score_on="dev").source.task("law")


def test_a_digest_is_of_what_the_result_depends_on(root):
    def digest(seed=1, **overrides):
        return plan(root, **overrides).source.task("law").digest(seed)

    def shorten(split):
        path = root / "endtasks" / "law" / f"{split}.jsonl"
        path.write_text(path.read_text().partition("\n")[2])

    first = digest()
    chosen = digest(load_best_model_at_end=True)
    equivalent_settings = (
        {"seeds": [9]},
        {"when": "each"},
        {"eval_batch_size": 1},
        {"tasks": {"food": {"lr": 1}}},
    )
    assert {digest(**settings) for settings in equivalent_settings} == {first}
    shorten("dev")
    assert digest() == first
    digests = [
        digest(seed=2),
        digest(lr=1),
        digest(tasks={"law": {"epochs": 9}}),
        chosen,
        digest(load_best_model_at_end=True),
    ]
    for split in ("test", "train"):
        shorten(split)
        digests.append(digest())
    assert len({first, *digests}) == 1 + len(digests)


def test_a_data_set_of_the_hub(tmp_path):
    features = {name: datasets.Value("string") for name in ("sentence", "other")}
    features = datasets.Features(features | {"class": datasets.ClassLabel(names=["no", "yes"])})
    for split, labels in {"train": [0, 1, 1], "test": [1, 0], "validation": [1, -1]}.items():
        count = len(labels)
        columns = {"sentence": ["a b"] * count, "other": [None, *["c"] * (count - 1)], "class": labels}
        data = datasets.Dataset.from_dict(columns, features=features)
        data.to_parquet(str(tmp_path / f"{split}.parquet"))

    def read(test):
        entry = {"path": str(tmp_path), "splits": {"train": "train", "dev": None, "test": test}}
        entry["columns"] = {"text": "sentence", "text_pair": "other", "label": "class"}
        return plan_endtasks(options("hub", tasks={"law": entry}), ["law"], ["law"]).source.task("law")

    task = read("test")
    assert task.classes == ["no", "yes"]
    assert [(e.text, e.text_pair, e.label) for e in task.test] == [("a b", None, "yes"), ("a b", "c", "no")]
    with pytest.raises(ValueError, match=r"^endtask\.tasks\.law, path=.*: Unknown split"):
        read("nowhere")
    with pytest.raises(ValueError, match=r"\(validation\), row 1 has no label \(class -1\), as rows of test"):
        read("validation")


def test_a_class_number_without_a_name_is_refused_with_its_row():
    assert name_class("web (test), row 0", 1, ["no", "yes"]) == "yes"
    for number in (2, -2):
        message = rf"row 7: its label is class {number}, and the data set names 2 classes\. Allowed: 0 to 1$"
        with pytest.raises(ValueError, match=message):
            name_class("web (test), row 7", number, ["no", "yes"])
    with pytest.raises(ValueError, match=r"row 7 has no label \(class null\)"):
        name_class("web (test), row 7", None, ["no", "yes"])
