import json

import pyarrow.parquet as pq
import pytest
import torch

from cpt.evaluation.endtasks import suite
from cpt.evaluation.endtasks.suite import EndTasks, path, share_measurements
from tests.support.endtask_fixtures import QUICK, model, options, tokenizer, write_task

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ALL = ["law", "food"]


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.fixture
def root(tmp_path):
    write_task(tmp_path, "law")
    write_task(tmp_path, "food", train=24)
    return tmp_path


@pytest.fixture
def made(root, words):
    return lambda order=ALL, **overrides: EndTasks.read(
        options("texts", root=root, **{**QUICK, **overrides}), order=order, tokenizer=words, names=ALL
    )


@pytest.fixture
def measure(words):
    start = model("roberta", words, dropout=0.1)

    def run(tasks, folder, names=ALL, *, rank=0, world=1):
        place = {"folder": folder, "device": CPU, "rank": rank, "world": world, "label": "end tasks"}
        tasks.measure(lambda name: start, names, **place)

    return run


@pytest.fixture
def counted(monkeypatch):
    """The (task, seed) that are fine-tuned."""
    calls, whole = [], suite.fine_tune

    def count(start, job, *, seed, **rest):
        calls.append((job.name, seed))
        return whole(start, job, seed=seed, **rest)

    monkeypatch.setattr(suite, "fine_tune", count)
    return calls


def predictions(folder):
    return {each.name: pq.read_table(each).to_pydict() for each in sorted(folder.glob("*.parquet"))}


def test_none_is_no_end_task(words):
    assert EndTasks.read(options("none"), order=ALL, tokenizer=words) is None


@pytest.mark.parametrize(
    ("when", "stage", "learned", "final", "alone", "due"),
    [
        ("last", [], [], False, False, []),
        ("last", ["law"], ["law"], False, False, []),
        ("last", ["food"], ["law", "food"], True, False, ALL),
        ("last", ["law", "food"], ["law", "food"], True, False, ALL),
        ("last", ["food"], ["food"], True, False, ["food"]),
        ("last", [], [], True, False, ALL),
        ("last", ["law"], ["law"], False, True, ["law"]),
        ("last", ["food"], ["law", "food"], True, True, ["food"]),
        ("last", [], [], False, True, []),
        ("each", [], [], False, False, []),
        ("each", ["law"], ["law"], False, False, ["law"]),
        ("each", ["food"], ["law", "food"], True, False, ALL),
        ("each", ["food"], ["law", "food"], True, True, ["food"]),
        ("each", [], [], True, False, ALL),
        ("diagonal", ["law"], ["law"], False, False, ["law"]),
        ("diagonal", ["food"], ["law", "food"], True, False, ["food"]),
        ("diagonal", ["food"], ["law", "food"], True, True, ["food"]),
        ("diagonal", ["space"], ["law", "space"], True, False, []),
    ],
)
def test_what_is_due(made, when, stage, learned, final, alone, due):
    assert made(when=when).due(stage, learned=learned, final=final, alone=alone) == due


def test_predictions_are_kept_with_what_they_are_of(made, measure, tmp_path):
    tasks = made()
    measure(tasks, tmp_path / "end")
    assert sorted(each.name for each in (tmp_path / "end").iterdir()) == [
        f"{name}-{seed}.parquet" for name in sorted(ALL) for seed in (3, 4)
    ]
    file = pq.read_table(path(tmp_path / "end", "law", 3))
    said = json.loads(file.schema.metadata[b"cpt"])
    assert file.column_names == ["id", "label", "prediction"]
    examples = tasks.by_name["law"].test
    assert file["id"].to_pylist() == [example.id for example in examples]
    labels, found = (file[name].to_pylist() for name in ("label", "prediction"))
    assert labels == [example.label for example in examples]
    assert said["accuracy"] == pytest.approx(sum(map(str.__eq__, labels, found)) / len(labels), abs=1e-6)
    assert said["classes"] == ["bad", "good"]
    assert said["digest"] == tasks.by_name["law"].digest(3)
    assert (said["metric"], said["epochs"]) == ("macro_f1", 2)
    assert said["seconds"] > 0
    assert {"macro_f1", "micro_f1"} < said.keys()


def test_only_what_is_missing_is_measured(made, measure, counted, tmp_path, caplog):
    folder = tmp_path / "end"
    measure(made(), folder)
    whole = predictions(folder)
    assert counted == [("law", 3), ("law", 4), ("food", 3), ("food", 4)]
    assert made().missing(folder, ALL) == []
    path(folder, "law", 4).unlink()
    damaged = path(folder, "food", 3)
    damaged.write_bytes(damaged.read_bytes()[:200])
    assert made().missing(folder, ALL) == [("law", 4), ("food", 3)]
    counted.clear()
    with caplog.at_level("INFO"):
        measure(made(), folder)
    assert counted == [("law", 4), ("food", 3)]
    assert predictions(folder) == whole
    assert f"{damaged} is damaged" in caplog.text


def test_a_byte_that_has_changed_is_found(made, measure, tmp_path):
    folder, tasks = tmp_path / "end", made(order=["law"], seeds=[3])
    measure(tasks, folder, ["law"])
    file = path(folder, "law", 3)
    data = bytearray(file.read_bytes())
    data[data.index(b"test-1")] ^= 1
    file.write_bytes(data)
    assert tasks.missing(folder, ["law"]) == [("law", 3)]


def test_other_settings_or_data_are_measured_again_and_others_beside_are_not(made, measure, root, tmp_path):
    folder = tmp_path / "end"
    measure(made(seeds=[3]), folder)
    assert made().missing(folder, ALL) == [("law", 4), ("food", 4)]
    assert made(seeds=[3], tasks={"law": {"lr": 1e-3}}).missing(folder, ALL) == [("law", 3)]
    write_task(root, "food", train=25)
    assert made(seeds=[3]).missing(folder, ALL) == [("food", 3)]
    assert made(seeds=[3], when="each", eval_batch_size=1).missing(folder, ["law"]) == []


def test_a_result_depends_on_seed_and_task_alone(made, measure, tmp_path):
    measure(made(), tmp_path / "all")
    measure(made(order=["food"], seeds=[4]), tmp_path / "alone", ["food"])
    alone = predictions(tmp_path / "alone")
    assert alone == {"food-4.parquet": predictions(tmp_path / "all")["food-4.parquet"]}


def test_a_killed_measurement_loses_only_what_was_under_way(made, measure, monkeypatch, tmp_path):
    measure(made(), tmp_path / "whole")
    whole = suite.fine_tune

    def die(start, job, *, seed, **rest):
        if (job.name, seed) == ("food", 3):
            raise KeyboardInterrupt
        return whole(start, job, seed=seed, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(suite, "fine_tune", die)
        with pytest.raises(KeyboardInterrupt):
            measure(made(), tmp_path / "end")
    assert made().missing(tmp_path / "end", ALL) == [("food", 3), ("food", 4)]
    measure(made(), tmp_path / "end")
    assert predictions(tmp_path / "end") == predictions(tmp_path / "whole")


def test_two_processes_make_what_one_makes(made, measure, counted, tmp_path):
    measure(made(), tmp_path / "one")
    counted.clear()
    measure(made(), tmp_path / "two", rank=0, world=2)
    first = list(counted)
    measure(made(), tmp_path / "two", rank=1, world=2)
    assert sorted(counted) == sorted([("law", 3), ("law", 4), ("food", 3), ("food", 4)])
    assert 0 < len(first) < 4
    assert predictions(tmp_path / "two") == predictions(tmp_path / "one")


def test_shares_are_even_whole_and_do_not_depend_on_what_is_done():
    costs = {("a", 1): 10, ("a", 2): 10, ("b", 1): 4, ("b", 2): 4, ("c", 1): 12}
    shares = [share_measurements(costs, rank=rank, world=3) for rank in range(3)]
    assert sorted(each for one in shares for each in one) == sorted(costs)
    assert [sum(costs[each] for each in one) for one in shares] == [12, 14, 14]
    assert share_measurements({("a", 1): 1}, rank=1, world=2) == set()


def test_each_domain_has_its_own_model(made, words, tmp_path):
    asked, start = [], model("roberta", words)
    made().measure(
        lambda name: asked.append(name) or start,
        ALL,
        folder=tmp_path,
        device=CPU,
        rank=0,
        world=1,
        label="",
    )
    assert asked == ALL


def test_results_are_those_of_all_rows(made, measure, tmp_path):
    tasks = made(when="each", tasks={"food": {"metric": "micro_f1"}})
    folders = [tmp_path / name for name in ("000-base", "001-law", "002-food")]
    measure(tasks, folders[1], ["law"])
    measure(tasks, folders[2])
    path(folders[2], "food", 4).unlink()
    found = tasks.results(folders)
    about = {
        each: json.loads(pq.read_schema(path(folders[2], *each)).metadata[b"cpt"])
        for each in [("law", 3), ("law", 4), ("food", 3)]
    }
    for name, matrix in found.pop("scores").items():
        assert matrix[0] == [[None, None], [None, None]]
        assert matrix[1][1] == [None, None]
        assert None not in matrix[1][0]
        assert matrix[2] == [
            [about["law", 3][name], about["law", 4][name]],
            [about["food", 3][name], None],
        ]
    assert found.pop("seconds") > sum(each["seconds"] for each in about.values())
    assert len(found.pop("digest")) == 16
    assert found == {
        "when": "each",
        "tasks": ALL,
        "seeds": [3, 4],
        "metric": {"law": "macro_f1", "food": "micro_f1"},
        "classes": {"law": 2, "food": 2},
        "examples": {"law": 20, "food": 20},
    }
    other = made(tasks={"law": {"lr": 1e-3}}).results(folders)
    assert other["scores"]["accuracy"][2][0] == [None, None]
    assert other["digest"] != tasks.results(folders)["digest"]


def test_dev_is_used_for_nothing_unless_it_selects(made, measure, root, tmp_path):
    measure(made(), tmp_path / "with", ["law"])
    (root / "endtasks" / "law" / "dev.jsonl").unlink()
    measure(made(), tmp_path / "without", ["law"])
    assert predictions(tmp_path / "with") == predictions(tmp_path / "without")
    assert made().missing(tmp_path / "with", ["law"]) == []
    assert made(tasks={"food": {"select": "dev"}}).by_name["food"].dev


def test_selection_on_dev_runs_and_is_another_measurement(made, measure, tmp_path):
    measure(made(), tmp_path, ["law"])
    chosen = made(select="dev", epochs=3)
    assert len(chosen.missing(tmp_path, ["law"])) == 2
    measure(chosen, tmp_path, ["law"])
    assert chosen.missing(tmp_path, ["law"]) == []


def test_the_bar_counts_the_steps_that_are_to_do_and_is_the_first_process_s(
    made, measure, monkeypatch, tmp_path
):
    seen, whole = [], suite.progress_bar

    def watched(label, **rest):
        seen.append((label, rest, whole(label, **rest)))
        return seen[-1][2]

    monkeypatch.setattr(suite, "progress_bar", watched)
    measure(made(), tmp_path, ["law"])
    (label, rest, bar) = seen[0]
    assert (label, rest) == ("end tasks", {"total": 2 * 2 * 3, "hidden": False, "unit": "step"})
    assert bar.n == bar.total
    path(tmp_path, "law", 3).unlink()
    measure(made(), tmp_path, ["law"])
    assert seen[1][1]["total"] == 6
    measure(made(), tmp_path, ["law"])
    assert len(seen) == 2
    measure(made(), tmp_path / "two", rank=1, world=2)
    assert seen[2][1]["hidden"]


def test_the_tokenizer_stays_as_it_is(made, measure, words, tmp_path):
    before = words.backend_tokenizer.to_str()
    measure(made(), tmp_path, ["law"])
    assert words.backend_tokenizer.to_str() == before
