"""End-task numbers by hand, transitions by simulation, predictions from the files that a run leaves."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from cpt.evaluation import task_metrics as endscores
from cpt.evaluation.predictions import correct, transitions_of

TASKS = ["law", "food", "space"]
ROWS = ["base", *TASKS]
# fmt: off
A = np.array([  # the upper triangle is not measured
    [np.nan, np.nan, np.nan],
    [0.80, np.nan, np.nan],
    [0.70, 0.60, np.nan],
    [0.75, 0.50, 0.90],
])
# fmt: on


def given(matrix=A, *, metric="macro_f1", when="each", seeds=(0, 1), tasks=TASKS, apart=0.02):
    """End tasks whose seeds lie around a matrix; accuracy is 0.01 higher, micro-F1 0.02."""
    cube = np.asarray(matrix)[..., None] + apart * np.linspace(-1, 1, len(seeds))
    kinds = {"macro_f1": cube, "accuracy": cube + 0.01, "micro_f1": cube + 0.02}
    nulls = {kind: np.where(np.isnan(x), None, x).tolist() for kind, x in kinds.items()}
    return {
        "when": when,
        "tasks": list(tasks),
        "seeds": list(seeds),
        "digest": "0a1b",
        "metric": dict.fromkeys(tasks, metric) if isinstance(metric, str) else metric,
        "classes": dict.fromkeys(tasks, 3),
        "examples": dict.fromkeys(tasks, 6),
        "scores": nulls,
        "seconds": 12.5,
    }


def test_the_numbers_by_hand():
    summary = endscores.summarise_endtasks(given(), ROWS)
    assert summary == pytest.approx(
        {
            "MF1": (0.75 + 0.50 + 0.90) / 3,
            "Acc": (0.76 + 0.51 + 0.91) / 3,
            "forward": (0.80 + 0.60 + 0.90) / 3,
            "forget_rate": ((0.80 - 0.75) + (0.60 - 0.50)) / 2,
        }
    )
    assert list(summary) == list(endscores.ENDTASK_MEANINGS)
    assert endscores.summarise_endtasks({}, ROWS) == {}


def test_the_forget_rate_of_a_constant_matrix_is_0_and_the_last_column_never_enters():
    constant = np.full((4, 3), 0.4)
    assert endscores.forget_rate(constant, ROWS, TASKS) == 0
    changed = A.copy()
    changed[:, 2] = [0.1, 0.2, 0.3, 0.0]
    assert endscores.forget_rate(changed, ROWS, TASKS) == pytest.approx(0.075)
    gained = A.copy()
    gained[3, :2] = 0.95
    assert endscores.forget_rate(gained, ROWS, TASKS) == pytest.approx(-0.25)


def test_the_forget_rate_needs_a_later_stage_and_all_terms():
    assert np.isnan(endscores.forget_rate(A[:2], ROWS, TASKS))
    assert np.isnan(endscores.forget_rate(np.where(A == 0.60, np.nan, A), ROWS, TASKS))
    assert endscores.forget_rate(A[:3], ROWS, TASKS) == pytest.approx(0.1)
    assert endscores.forget_rate(A[:3], ROWS[:3], TASKS) == pytest.approx(0.1)
    without_last = endscores.forget_rate(A[:, :2], ROWS, TASKS[:2])  # the last domain has no task
    assert without_last == pytest.approx(0.075)
    assert np.isnan(endscores.forget_rate(A[[0, 3]], ["base", "joint"], TASKS))


def test_a_task_has_its_own_metric():
    metric = {"law": "macro_f1", "food": "micro_f1", "space": "accuracy"}
    headline = endscores.over_seeds(endscores.headline(given(metric=metric)))
    assert headline[3] == pytest.approx([0.75, 0.52, 0.91])
    assert endscores.summarise_endtasks(given(metric=metric), ROWS)["MF1"] == pytest.approx(
        (0.75 + 0.52 + 0.91) / 3
    )
    micro = endscores.summarise_endtasks(given(metric="accuracy"), ROWS)
    assert micro["MF1"] == micro["Acc"]  # as for ChemProt


def test_seeds_are_averaged_those_there_are():
    cube = np.array([[[0.2, np.nan, 0.4], [np.nan] * 3]])
    assert endscores.over_seeds(cube)[0, 0] == pytest.approx(0.3)
    assert np.isnan(endscores.over_seeds(cube)[0, 1])
    assert endscores.sd_over_seeds(cube)[0, 0] == pytest.approx(np.std([0.2, 0.4], ddof=1))
    assert np.isnan(endscores.sd_over_seeds(cube)[0, 1])
    assert np.isnan(endscores.sd_over_seeds(cube[..., :1])[0, 0])
    assert endscores.sd_over_seeds(np.array([[[0.1, 0.5, 0.9]]]))[0, 0] == pytest.approx(0.4)


def test_the_final_score_is_that_of_the_last_row_measured():
    alone = np.where(np.eye(4, 3, -1) > 0, A, np.nan)  # `one`: each domain from the base
    assert endscores.pick_final(alone) == pytest.approx([0.80, 0.60, 0.90])
    assert endscores.summarise_endtasks(given(alone, when="last"), ROWS)["MF1"] == pytest.approx(2.3 / 3)
    assert "forget_rate" not in endscores.summarise_endtasks(given(alone, when="last"), ROWS)
    assert endscores.pick_final(endscores.headline(given())).shape == (3, 2)
    assert np.isnan(endscores.pick_final(A[:3])[2])
    assert endscores.last_measured(A[:3]) == [2, 2, None]
    assert endscores.last_measured(np.array([[[0.5, 0.5]], [[0.6, np.nan]]])) == [1]


def test_the_diagonal_goes_by_name():
    assert endscores.forward(A, ROWS, TASKS) == pytest.approx([0.80, 0.60, 0.90])
    swapped = endscores.forward(A[:, [1, 0, 2]], ROWS, ["food", "law", "space"])
    assert swapped == pytest.approx([0.60, 0.80, 0.90])
    assert np.isnan(endscores.forward(A[:2], ROWS, TASKS)[1:]).all()


@pytest.mark.parametrize(
    ("rows", "when", "present"),
    [
        ([0], "each", set()),
        ([0, 1], "each", set()),
        ([0, 1, 2], "each", {"forget_rate"}),
        ([0, 1, 2, 3], "diagonal", {"forward", "forget_rate"}),
        ([], "each", set()),
    ],
)
def test_what_lacks_a_term_is_absent(rows, when, present):
    assert (
        set(endscores.summarise_endtasks(given(A[rows], when=when), [ROWS[row] for row in rows])) == present
    )


# --- predictions


def transitions(label, before, after, *, classes=None):
    return endscores.count_transitions(before == label, after == label, classes=classes)


def test_transitions_by_hand():
    label = np.array(list("aabbcc"))
    before, after = np.array(list("aabbab")), np.array(list("abacca"))
    found = transitions(label, before, after, classes=3)
    share = 3 / 6  # places 1, 2 and 3
    luck = (1 - 4 / 6) * (1 - 2 / 6) / 2
    assert found == pytest.approx(
        {
            "examples": 6,
            "before": 4 / 6,
            "after": 2 / 6,
            "forgotten": 3,
            "gained": 1,
            "forgotten_share": share,
            "gained_share": 1 / 6,
            "forgotten_adjusted": share - luck,
            "gained_adjusted": 1 / 6 - luck,
        }
    )
    assert "forgotten_adjusted" not in transitions(label, before, after)
    assert "forgotten_adjusted" not in transitions(label, before, after, classes=1)


@pytest.mark.parametrize("classes", [2, 5])
def test_the_adjustment_removes_what_guessing_makes(classes):
    """The model of the docstring, simulated: each example known or guessed, twice."""
    generator, size = np.random.default_rng(0), 200_000
    label = generator.integers(classes, size=size)
    knew, knows = generator.random(size) < 0.6, generator.random(size) < 0.5
    guess = generator.integers(classes, size=(2, size))
    before, after = np.where(knew, label, guess[0]), np.where(knows, label, guess[1])
    found = transitions(label, before, after, classes=classes)
    lost = (knew & ~knows).mean()  # known, then guessed
    wrong = 1 - 1 / classes
    assert found["forgotten_share"] == pytest.approx(wrong * lost + 0.4 * 0.5 / classes * wrong, abs=0.005)
    assert found["forgotten_adjusted"] == pytest.approx(wrong * lost, abs=0.005)
    all_guessed = transitions(label, guess[0], guess[1], classes=classes)
    assert all_guessed["forgotten_adjusted"] == pytest.approx(0, abs=0.005)
    assert all_guessed["forgotten_share"] > 0.15


def predicted(folder, row, task, seed, right, *, ids=None, rows=ROWS):
    """A file of predictions: 1 is right."""
    path = folder / "endtasks" / f"{row:03d}-{rows[row]}" / f"{task}-{seed}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "id": [f"doc#{place}" for place in range(len(right))] if ids is None else ids,
        "label": ["x"] * len(right),
        "prediction": ["x" if each else "y" for each in right],
    }
    table = pa.table(columns).replace_schema_metadata(
        {b"cpt": json.dumps({"digest": "0a1b", "seconds": 1.0}).encode()}
    )
    parquet.write_table(table, path, compression="none", write_page_checksum=True)
    return path


def kept(folder):
    """Predictions of two seeds for the tasks of the matrix: law loses, food gains, space has one row."""
    for seed in (0, 1):
        predicted(folder, 1, "law", seed, [1, 1, 1, 0])
        predicted(folder, 2, "law", seed, [0, 0, 0, 0])
        predicted(folder, 3, "law", seed, [1, 1, 0, seed])
        predicted(folder, 2, "food", seed, [0, 0, 1])
        predicted(folder, 3, "food", seed, [1, 0, 1])
        predicted(folder, 3, "space", seed, [1, 0])
    return folder


def test_transitions_are_from_the_own_stage_to_the_last(tmp_path):
    found = transitions_of(kept(tmp_path), ROWS, given())
    assert list(found) == ["law", "food"]
    assert [found["law"][name] for name in ("examples", "forgotten", "gained")] == [8, 2, 1]
    assert [found["food"][name] for name in ("examples", "forgotten", "gained")] == [6, 0, 2]
    assert found["law"]["forgotten_adjusted"] == pytest.approx(2 / 8 - (2 / 8) * (3 / 8) / 2)


def test_transitions_without_files(tmp_path):
    assert transitions_of(tmp_path, ROWS, given()) == {}
    assert transitions_of(tmp_path, ROWS, {}) == {}
    kept(tmp_path)
    (tmp_path / "endtasks" / "001-law" / "law-1.parquet").unlink()
    assert list(transitions_of(tmp_path, ROWS, given())) == ["food"]
    assert transitions_of(tmp_path, ["base", "joint"], given(A[[0, 3]])) == {}


def test_what_was_right_in_the_last_row(tmp_path):
    found = correct(kept(tmp_path), ROWS, given())
    assert list(found) == [(task, seed) for task in TASKS for seed in (0, 1)]
    assert found["law", 0].tolist() == [True, True, False, False]
    assert found["law", 1].tolist() == [True, True, False, True]
    assert found["law", 1].dtype == bool
    assert correct(tmp_path, ROWS[:3], given())["law", 0].tolist() == [False] * 4
    (tmp_path / "endtasks" / "003-space" / "space-0.parquet").unlink()
    assert ("space", 0) not in correct(tmp_path, ROWS, given())
    assert correct(tmp_path / "none", ROWS, given()) == {}
    assert correct(tmp_path, ROWS, {}) == {}


def test_damaged_predictions_are_one_line(tmp_path):
    path = predicted(kept(tmp_path), 3, "law", 0, [1, 0, 1, 0])
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"law-0\.parquet: damaged predictions \(.*delete it") as raised:
        correct(tmp_path, ROWS, given())
    assert "\n" not in str(raised.value)
    flipped = bytearray(predicted(tmp_path, 3, "law", 0, [1, 0, 1, 0]).read_bytes())
    flipped[flipped.index(b"doc#2")] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"law-0\.parquet: damaged predictions"):
        transitions_of(tmp_path, ROWS, given())
    parquet.write_table(pa.table({"id": ["1"]}), path)
    with pytest.raises(ValueError, match=r"law-0\.parquet: damaged predictions"):
        transitions_of(tmp_path, ROWS, given())


def test_rows_on_different_examples_are_not_compared(tmp_path):
    predicted(kept(tmp_path), 3, "law", 0, [1, 0, 1, 0], ids=list("abcd"))
    with pytest.raises(ValueError, match="law: the predictions of two rows are on different test examples"):
        transitions_of(tmp_path, ROWS, given())
