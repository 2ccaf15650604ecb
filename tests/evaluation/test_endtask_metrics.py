"""End-task numbers by hand, and predictions from the files that a run leaves."""

import json

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from cpt.evaluation import task_metrics as endscores
from cpt.evaluation.predictions import correct

TASKS = ["law", "food", "space"]
ROWS = ["base", *TASKS]
NAN = np.nan
A = np.array([[NAN] * 3, [0.80, NAN, NAN], [0.70, 0.60, NAN], [0.75, 0.50, 0.90]])


def given(matrix=A, *, metric="macro_f1", when="each", seeds=(0, 1), tasks=TASKS, apart=0.02):
    """End tasks whose seeds lie around a matrix; accuracy is 0.01 higher, micro-F1 0.02."""
    cube = np.asarray(matrix)[..., None] + apart * np.linspace(-1, 1, len(seeds))
    kinds = {"macro_f1": cube, "accuracy": cube + 0.01, "micro_f1": cube + 0.02}
    told = {"when": when, "tasks": list(tasks), "seeds": list(seeds), "hash": "0a1b", "seconds": 12.5}
    told |= {"classes": dict.fromkeys(tasks, 3), "examples": dict.fromkeys(tasks, 6)}
    told["metric"] = dict.fromkeys(tasks, metric) if isinstance(metric, str) else metric
    return told | {"scores": {kind: np.where(np.isnan(x), None, x).tolist() for kind, x in kinds.items()}}


def summarised(matrix=A, *, rows=ROWS, **how):
    return endscores.summarise_endtasks(given(matrix, **how), rows)


def test_the_numbers_by_hand():
    expected = {"MF1": 2.15 / 3, "Acc": 2.18 / 3, "forward": 2.3 / 3, "forget_rate": (0.05 + 0.10) / 2}
    assert summarised() == pytest.approx(expected) and list(summarised()) == list(endscores.ENDTASK_MEANINGS)
    assert endscores.summarise_endtasks({}, ROWS) == {}
    metric = {"law": "macro_f1", "food": "micro_f1", "space": "accuracy"}
    assert summarised(metric=metric)["MF1"] == pytest.approx((0.75 + 0.52 + 0.91) / 3)
    cube = np.array([[[0.2, NAN, 0.4], [NAN] * 3]])  # seeds are averaged, those there are
    mean, deviation = endscores.over_seeds(cube)[0], endscores.sd_over_seeds(cube)[0]
    assert (mean[0], deviation[0]) == (pytest.approx(0.3), pytest.approx(np.std([0.2, 0.4], ddof=1)))
    assert np.isnan([mean[1], deviation[1], endscores.sd_over_seeds(cube[..., :1])[0, 0]]).all()


def test_the_forget_rate_needs_a_later_stage_and_all_terms_and_the_last_column_never_enters():
    def rate(matrix, rows=ROWS, tasks=TASKS):
        return endscores.forget_rate(matrix, rows, tasks)

    changed, gained = A.copy(), A.copy()
    changed[:, 2], gained[3, :2] = [0.1, 0.2, 0.3, 0.0], 0.95
    assert (rate(changed), rate(gained)) == (pytest.approx(0.075), pytest.approx(-0.25))
    assert np.isnan(rate(A[:2])) and np.isnan(rate(np.where(A == 0.60, NAN, A)))
    assert rate(A[:3]) == rate(A[:3], ROWS[:3]) == pytest.approx(0.1)
    assert rate(A[:, :2], tasks=TASKS[:2]) == pytest.approx(0.075)  # the last domain has no task
    assert np.isnan(rate(A[[0, 3]], ["base", "joint"]))


def test_the_final_score_is_that_of_the_last_row_measured_and_the_diagonal_goes_by_name():
    alone = np.where(np.eye(4, 3, -1) > 0, A, NAN)  # `one`: each domain from the base
    assert summarised(alone, when="last")["MF1"] == pytest.approx(2.3 / 3)
    assert "forget_rate" not in summarised(alone, when="last")
    assert endscores.last_measured(A[:3]) == [2, 2, None] and np.isnan(endscores.pick_final(A[:3])[2])
    swapped = endscores.forward(A[:, [1, 0, 2]], ROWS, ["food", "law", "space"])
    assert swapped == pytest.approx([0.60, 0.80, 0.90])
    assert np.isnan(endscores.forward(A[:2], ROWS, TASKS)[1:]).all()


def predicted(folder, row, task, seed, right, *, rows=ROWS):
    """A file of predictions: 1 is right."""
    path = folder / "endtasks" / f"{row:03d}-{rows[row]}" / f"{task}-{seed}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {"id": [f"doc#{place}" for place in range(len(right))], "label": ["x"] * len(right)}
    table = pa.table(columns | {"prediction": ["x" if each else "y" for each in right]})
    about = {b"cpt": json.dumps({"digest": "0a1b", "seconds": 1.0}).encode()}
    table = table.replace_schema_metadata(about)
    parquet.write_table(table, path, compression="none", write_page_checksum=True)
    return path


@pytest.mark.parametrize("harm", [lambda data: data[:-30], lambda data: data.replace(b"\0y", b"\0x")])
def test_damaged_predictions_are_one_line_and_missing_ones_are_left_out(tmp_path, harm):
    for seed in (0, 1):
        path = predicted(tmp_path, 3, "law", seed, [1, 0, 1, seed])
    found = {key: each.tolist() for key, each in correct(tmp_path, ROWS, given()).items()}
    assert found == {("law", seed): [True, False, True, bool(seed)] for seed in (0, 1)}
    assert correct(tmp_path / "none", ROWS, given()) == correct(tmp_path, ROWS, {}) == {}
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ValueError, match=r"law-1\.parquet: damaged predictions \(.*delete it.*$"):
        correct(tmp_path, ROWS, given())
