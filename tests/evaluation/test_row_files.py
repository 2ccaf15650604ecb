"""Rows that are not in scores.json yet: read as if they were, and written only where that is cheaper."""

import pytest

from cpt.evaluation.row_files import is_file_of_all_rows_due, row_file
from cpt.evaluation.scores import Scores
from tests.support.example_runs import make_scores

NLL = [[5.0, 5.2, 5.4, 4.9], [4.6, 5.1, 5.3, 5.0], [4.7, 4.2, None, 5.1]]
EVALUATIONS = {"steps": [1], "nll": {"law": [4.5]}, "rise": {}, "ended": "", "kept": None}
PART = {"asked_share": 0.5, "rows": 1, "tokens": 5, "scored": 2, "epochs": None}
COLUMNS = {
    "nll": NLL,
    "modules": [{}, {}, {"law": {"food": 0.25}}],
    "skipped_steps": [0, 1, 2],
    "rates": [[], [0.1, 0.2, 0.0], [0.1, 0.3, 0.0]],
    "protected_movement": [[], [], [0.5, 0.25]],
}


def make_rows(num_rows, **overrides):
    """Scores of the first rows of NLL."""
    scores = make_scores(nll=NLL[:num_rows], **overrides)
    for name, values in COLUMNS.items():
        setattr(scores, name, values[:num_rows])
    scores.measure()
    return scores


def test_a_row_in_a_file_of_its_own_is_read_as_if_scores_json_had_it(tmp_path):
    """So it is with files that a killed process has left: of a row that scores.json has, and behind a gap."""
    monitor = {"law": EVALUATIONS, "food": EVALUATIONS | {"steps": [2]}}
    scores = make_rows(3, monitor=monitor, mixture={"food": {"new": PART}})
    scores.save(tmp_path / "whole" / "scores.json")
    path = tmp_path / "run" / "scores.json"
    make_rows(2, monitor={"law": EVALUATIONS}).save(path)
    scores.save_row(1, tmp_path / "run")
    scores.save_row(2, tmp_path / "run")
    row_file(tmp_path / "run", 4).write_text("{")

    loaded_scores = Scores.load(path)
    assert loaded_scores == Scores.load(tmp_path / "whole" / "scores.json")
    loaded_scores.save(path)
    assert path.read_text() == (tmp_path / "whole" / "scores.json").read_text()
    assert [entry.name for entry in path.parent.iterdir()] == ["scores.json"]


def test_a_damaged_file_of_a_row_gives_one_line_with_the_remedy(tmp_path):
    make_rows(2).save(tmp_path / "scores.json")
    make_rows(3).save_row(2, tmp_path)
    path = row_file(tmp_path, 2)
    path.write_text(path.read_text().replace("4.2", "4.1"))
    with pytest.raises(ValueError, match=f"{path} is damaged .*; restore it from a backup, or delete"):
        Scores.load(tmp_path / "scores.json")


def test_all_rows_are_written_when_a_sixteenth_of_them_is_new():
    num_stored = 0
    writes = []
    for num_rows in range(1, 101):
        if is_file_of_all_rows_due(num_rows - 1, num_rows=num_rows, num_stored=num_stored):
            num_stored = num_rows
            writes.append(num_rows)
    assert writes[:34] == [*range(1, 32), 33, 35, 37]
    assert writes[34:] == [*range(39, 48, 2), 50, 53, 56, 59, 62, 66, 70, 74, 78, 83, 88, 93, 99]
    # The first write of a process that resumes, and a further result of a row that the file has.
    assert is_file_of_all_rows_due(89, num_rows=90, num_stored=0)
    assert is_file_of_all_rows_due(7, num_rows=90, num_stored=89)
