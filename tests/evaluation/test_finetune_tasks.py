import csv
import json
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cpt.evaluation.finetune_tasks import plan_endtasks
from tests.conftest import SHARED
from tests.support.endtask_fixtures import options, rows, write, write_task

DAS6 = SHARED / "data" / "das6-mini"
SIX = ["restaurant", "acl", "ai", "phone", "pubmed", "camera"]
needs_das6 = pytest.mark.skipif(not DAS6.is_dir(), reason="the data of das6-mini are not here")


@pytest.fixture
def root(tmp_path):
    for domain in ("law", "food"):
        write_task(tmp_path, domain)
    return tmp_path


def plan(root, *, names=("food", "law", "space"), order=("law", "food"), **overrides):
    return plan_endtasks(options("texts", root=root, **overrides), names, order)


@needs_das6
@pytest.mark.parametrize(
    ("name", "path", "train", "test", "classes"),
    [
        ("pubmed", "pubmed", 2667, 7394, 13),
        ("ai", "ai", 2260, 2388, 7),
        ("acl", "acl_scibert_split", 1520, 421, 6),
        ("phone", "phone", 239, 552, 2),
        ("camera", "camera", 229, 625, 2),
    ],
)
def test_the_split_of_das_reproduces(name, path, train, test, classes):
    own = {"path": path, "splits": "das"}
    task = plan_endtasks(options("das6", root=DAS6, tasks={name: own}), SIX, SIX).task(name)
    assert (len(task.train), len(task.test), len(task.classes)) == (train, test, classes)
    assert not task.dev


@needs_das6
def test_the_preset_is_the_protocol_of_das():
    found = plan_endtasks(options("das6", root=DAS6), SIX, SIX)
    assert found.tasks == SIX
    assert {name: found.settings(name).epochs for name in SIX} == dict(
        zip(SIX, [5, 10, 5, 15, 10, 15], strict=True)
    )
    assert {name for name in SIX if found.settings(name).metric == "micro_f1"} == {"pubmed"}
    restaurant = found.task("restaurant")
    assert (len(restaurant.train), len(restaurant.test), len(restaurant.classes)) == (3451, 1120, 3)
    assert (restaurant.train[0].text, restaurant.train[0].text_pair) == (
        "staff",
        "But the staff was so horrible to us.",
    )
    assert found.task("ai").train[0].text_pair is None


@needs_das6
def test_a_task_without_the_split_of_das_is_told():
    found = plan_endtasks(options("das6", root=DAS6, splits="das"), SIX, SIX)
    with pytest.raises(ValueError, match=r"^endtask\.tasks\.restaurant\.splits=das: rt-0 has das_split=None"):
        found.task("restaurant")


def test_nothing_is_asked_for():
    assert plan_endtasks(options("none"), ["law"], ["law"]) is None


def test_tasks_are_those_of_learned_domains_in_their_order(root):
    assert plan(root).tasks == ["law", "food"]
    assert plan(root, order=["space", "food"]).tasks == ["food"]


def test_a_task_has_its_own_values(root):
    found = plan(root, epochs=5, tasks={"law": {"epochs": 7, "metric": "accuracy"}})
    assert (found.settings("law").epochs, found.settings("food").epochs) == (7, 5)
    assert (found.settings("law").metric, found.settings("food").metric) == ("accuracy", "macro_f1")


def test_a_preset_serves_any_of_its_domains(root):
    overrides = {"columns": {"text": "text", "text_pair": None}, "root": str(root)}
    for name in SIX:
        write_task_as(root, name)
    assert plan_endtasks(options("das6", **overrides), ["acl", "ai"], ["ai"]).tasks == ["ai"]


def write_task_as(root, name):
    for split in ("train", "test"):
        write(root / "endtasks" / name / f"{split}.jsonl", rows("law", count=9, seed=0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"when": "first"}, r"^endtask\.when=first; allowed: last, each, diagonal$"),
        ({"select": "test"}, r"^endtask\.select=test; allowed: last, dev$"),
        ({"seeds": [1, 1]}, r"^endtask\.seeds=\[1,1\]; allowed: a list of different whole numbers"),
        ({"lr": 0}, r"^endtask\.lr=0; allowed: above 0$"),
        ({"splits": "mine"}, r"^endtask\.splits=mine; allowed: own, das$"),
        ({"columns": {"lable": "y"}}, r"^endtask\.columns names lable; allowed: id, text, text_pair, label$"),
        ({"rate": 1}, r"^endtask has rate; allowed: epochs, lr"),
        (
            {"tasks": {"low": {}}},
            r"^endtask\.tasks\.low: there is no such domain; allowed: food, law, space$",
        ),
        ({"tasks": {"law": {"rate": 1}}}, r"^endtask\.tasks\.law has rate; allowed: epochs, lr"),
        ({"tasks": {"law": {"when": "each"}}}, r"^endtask\.tasks\.law has when; allowed"),
        ({"tasks": {"law": {"lr": -1}}}, r"^endtask\.tasks\.law\.lr=-1; allowed: above 0$"),
        ({"tasks": {"law": {"splits": "no"}}}, r"^endtask\.tasks\.law\.splits=no; allowed: own, das$"),
        ({"folder": "nowhere"}, r"^endtask\.root=.*: there is no folder .*nowhere$"),
    ],
)
def test_wrong_options_are_told_at_once(root, overrides, message):
    with pytest.raises(ValueError, match=message):
        plan(root, **overrides)


def test_a_missing_option_is_told(root):
    lacking = {key: value for key, value in options("texts", root=root).items() if key != "lr"}
    with pytest.raises(ValueError, match=r"^endtask lacks lr; allowed"):
        plan_endtasks(lacking, ["law"], ["law"])


def test_no_task_of_a_learned_domain(root):
    with pytest.raises(
        ValueError, match=r"no task belongs to a domain of order=\[space\]; there are: food, law"
    ):
        plan(root, order=["space"])


def test_a_check_needs_no_torch(root):
    given = json.dumps(options("texts", root=root))
    imports = "import sys, json; from cpt.evaluation.finetune_tasks import plan_endtasks"
    code = f"{imports}; plan_endtasks(json.loads({given!r}), ['law'], ['law'])"
    assert not subprocess.run([sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]).returncode


def test_every_format_gives_the_same_examples(root, tmp_path):
    made = rows("law", count=10, seed=5)
    folders = {name: tmp_path / "formats" / name for name in ("jsonl.gz", "json", "csv", "parquet")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for split in ("train", "test"):
        write(folders["jsonl.gz"] / f"{split}.jsonl.gz", made)
        (folders["json"] / f"{split}.json").write_text(json.dumps(made))
        pq.write_table(pa.Table.from_pylist(made), folders["parquet"] / f"{split}-00000-of-00001.parquet")
        with (folders["csv"] / f"{split}.csv").open("w") as file:
            writer = csv.DictWriter(file, list(made[0]))
            writer.writeheader()
            writer.writerows(made)
    tasks = {name: {"path": str(folder)} for name, folder in folders.items()}
    found = [
        plan(root, tasks={"law": own}, columns={"id": "id"}).task("law").content for own in tasks.values()
    ]
    assert len(set(found)) == 1


def broken(root, split, change):
    """Changes the rows of a split of law."""
    path = root / "endtasks" / "law" / f"{split}.jsonl"
    write(path, change([json.loads(line) for line in path.read_text().splitlines()]))


@pytest.mark.parametrize(
    ("split", "change", "message"),
    [
        ("test", lambda rows: [], r"^end task law has no example in test"),
        ("train", lambda rows: [], r"^end task law has no example in train"),
        (
            "train",
            lambda rows: [{**row, "label": "x"} for row in rows],
            r"^end task law has one class in train, 'x'; needed are two or more$",
        ),
        (
            "test",
            lambda rows: [*rows, {"text": "a", "label": "so so"}],
            r"^end task law: the label 'so so' of test-20 in test is not in train; allowed: bad, good$",
        ),
        (
            "test",
            lambda rows: [{"txt": "a", "label": "bad"}],
            r"test\.jsonl, line 1 has no column 'text'; it has txt, label \(endtask\.columns\.text\)$",
        ),
        ("test", lambda rows: [{"text": " ", "label": "bad"}], r"line 1 has no text"),
        ("test", lambda rows: [{"text": 3, "label": "bad"}], r"column 'text' is not text: 3$"),
        ("train", lambda rows: [{"text": "a", "label": None}], r"line 1: the label is None; allowed"),
        ("train", lambda rows: [{"text": "a", "label": 0.5}], r"line 1: the label is 0.5; allowed"),
        ("train", lambda rows: [7], r"line 1 has no column 'text'; it has 7"),
    ],
)
def test_wrong_examples_are_told(root, split, change, message):
    broken(root, split, change)
    with pytest.raises(ValueError, match=message):
        plan(root).task("law")


def test_a_missing_or_unreadable_file_is_told(root):
    folder = root / "endtasks" / "law"
    (folder / "test.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"^endtask\.tasks\.law: no test file in .*allowed: test\.jsonl, test\.json"
    ):
        plan(root).task("law")
    (folder / "test.tsv").write_text("text\tlabel\n")
    with pytest.raises(
        ValueError, match=r"law/test\.tsv cannot be read; allowed: \.jsonl \.json \.csv \.parquet"
    ):
        plan(root)
    (folder / "test.tsv").unlink()
    (folder / "README.md").write_text("beside the splits")
    (folder / "test.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"test\.jsonl\.gz cannot be read: Not a gzipped file"):
        plan(root).task("law")
    with pytest.raises(ValueError, match=r"^endtask\.tasks\.space: there is no folder .*space$"):
        plan(root, tasks={"space": {}}, order=["space"]).task("space")


def test_dev_is_read_only_where_it_is_used(root):
    (root / "endtasks" / "law" / "dev.jsonl").write_text("no JSON")
    assert plan(root).task("law").dev == []
    with pytest.raises(ValueError, match="is not JSON"):
        plan(root, select="dev").task("law")
    broken_dev = root / "endtasks" / "law" / "dev.jsonl"
    write(broken_dev, [{"text": "a", "label": "odd"}])
    with pytest.raises(ValueError, match=r"the label 'odd' of dev-0 in dev is not in train"):
        plan(root, select="dev").task("law")
    broken_dev.unlink()
    with pytest.raises(ValueError, match="end task law has no example in dev"):
        plan(root, select="dev").task("law")


def test_a_digest_is_of_what_the_result_depends_on(root):
    def digest(name="law", seed=1, **overrides):
        return plan(root, **overrides).task(name).digest(seed)

    first, chosen = digest(), digest(select="dev")
    same = [
        digest(seeds=[9]),
        digest(when="each"),
        digest(eval_batch_size=1),
        digest(tasks={"food": {"lr": 1}}),
    ]
    assert set(same) == {first}
    broken(root, "dev", lambda rows: rows[1:])
    assert digest() == first
    others = [
        digest(seed=2),
        digest(lr=1),
        digest(tasks={"law": {"epochs": 9}}),
        chosen,
        digest(select="dev"),
    ]
    broken(root, "test", lambda rows: rows[1:])
    others.append(digest())
    broken(root, "train", lambda rows: rows[1:])
    others.append(digest())
    assert len({first, *others}) == 1 + len(others)


def test_a_data_set_of_the_hub(tmp_path):
    features = datasets.Features(
        {
            "sentence": datasets.Value("string"),
            "other": datasets.Value("string"),
            "class": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    for split, labels in {"train": [0, 1, 1], "test": [1, 0], "validation": [1, -1]}.items():
        columns = {
            "sentence": ["a b"] * len(labels),
            "other": [None, *["c"] * (len(labels) - 1)],
            "class": labels,
        }
        data = datasets.Dataset.from_dict(columns, features=features)
        data.to_parquet(str(tmp_path / f"{split}.parquet"))
    entry = {
        "path": "parquet",
        "splits": {"train": "train", "dev": None, "test": "test"},
        "columns": {"text": "sentence", "text_pair": "other", "label": "class"},
    }
    entry["path"] = str(tmp_path)
    found = plan_endtasks(options("hub", tasks={"law": entry}), ["law"], ["law"]).task("law")
    assert found.classes == ["no", "yes"]
    assert [(e.text, e.text_pair, e.label) for e in found.test] == [("a b", None, "yes"), ("a b", "c", "no")]
    for split, message in {
        "nowhere": r"^endtask\.tasks\.law, path=.*: Unknown split",
        "validation": r"\(validation\), row 1: the label is None",
    }.items():
        wrong = {**entry, "splits": {"train": "train", "dev": None, "test": split}}
        with pytest.raises(ValueError, match=message):
            plan_endtasks(options("hub", tasks={"law": wrong}), ["law"], ["law"]).task("law")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "endtask=hub needs tasks"),
        ({"law": {"name": "x"}}, r"endtask\.tasks\.law has path=None"),
        ({"law": {"path": "x", "splits": {"train": None}}}, r"allowed: a path, and splits like"),
        ({"low": {"path": "x"}}, r"^endtask\.tasks\.low: there is no such domain; allowed: law$"),
    ],
)
def test_wrong_entries_of_the_hub_are_told(tasks, message):
    with pytest.raises(ValueError, match=message):
        plan_endtasks(options("hub", tasks=tasks), ["law"], ["law"])


def test_a_folder_has_to_be_given():
    given = options("texts", root=None) | {"root": None}
    with pytest.raises(ValueError, match=r"^endtask\.root=null; give the folder in which endtasks/ lies$"):
        plan_endtasks(given, ["law"], ["law"])
