"""What a report shows of the answers to a run's tasks."""

from pathlib import Path

import numpy as np
from PIL import Image

from cpt.evaluation.answers.files import path_of
from cpt.evaluation.answers.metrics import MEASURES
from cpt.reporting.answers import NAMES, build_answer_blocks, build_answer_moves, format_answers
from cpt.reporting.drawing import description
from cpt.reporting.run_report import write_report
from tests.reporting.test_frames import ANSWERS, made
from tests.support.answering import answers, kept, ranked


def test_the_matrix_comes_first_with_what_a_guess_reaches():
    matrix, metrics, last = build_answer_blocks(made(answers=ANSWERS))
    assert "likeliest choice" in matrix.title
    assert matrix.head == ["after", "law", "food"]
    assert matrix.cells == [
        ["base", "20.00", "30.00"],
        ["law", "90.00", "40.00"],
        ["food", "60.00", "80.00"],
        ["chance", "25.00", "25.00"],
        ["majority", "30.00", "30.00"],
    ]
    assert "after food: law 60.00 %, food 80.00 %" in description(matrix.picture)
    assert metrics.cells[0][0] == "AP" and metrics.cells[0][-1] == "70.00 [10.00, 90.00]"
    assert {row[0]: row[-1] for row in metrics.cells[1:]} == {
        "LA": "85.00",
        "BWT": "-30.00",
        "F": "30.00",
        "FWT": "10.00",
    }
    assert last.cells == [["law", "60.00", "50.00"], ["food", "80.00", "50.00"]]


def test_rows_that_were_not_asked_are_left_out():
    given = answers({"law": [0.2, np.nan, 0.6]}, rows=["base", "law", "food"])
    given["tasks"]["law"]["measures"]["accuracy_ranked"][1] = None
    matrix, *_ = build_answer_blocks(made(answers=given | {"metrics": {}}))
    assert [row[0] for row in matrix.cells] == ["base", "food", "chance", "majority"]


def test_without_tasks_nothing_is_shown():
    assert build_answer_blocks(made()) == [] and format_answers(made()) == ""


def test_the_page_has_it_before_the_losses(tmp_path):
    scores = made(answers=ANSWERS)
    write_report(tmp_path, scores)
    page = (tmp_path / "report.md").read_text()
    assert page.index("Answers to each task") < page.index("Perplexity on each test text")
    with Image.open(tmp_path / "report-answers.png") as picture:
        assert picture.size[0] > 300
    shown = format_answers(scores).splitlines()
    assert "AP 70.00 %" in shown[0]
    assert [line.split() for line in shown[2:]] == [
        ["after", "law", "food"],
        ["base", "20.00", "30.00"],
        ["law", "90.00", "40.00"],
        ["food", "60.00", "80.00"],
        ["chance", "25.00", "25.00"],
        ["majority", "30.00", "30.00"],
    ]


def test_what_became_of_the_examples_is_a_table(tmp_path):
    rows = ["base", "law", "food"]
    given = {"law": [ranked(each) for each in ([0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 1])]}
    scores = made(answers=kept(tmp_path, given, rows=rows))
    block = build_answer_moves(scores, tmp_path)
    assert block.lines[1:] == [
        "Since the base, 1 task: 1 of 4 examples 1→0, 1 0→1, 2 stayed.",
        "Since each task's own stage, 1 task: 2 of 4 examples 1→0, 1 0→1, 1 stayed.",
    ]
    cells = [["law", "law", "4", "75.00", "50.00", "2", "50.00", "37.50", "1", "25.00", "12.50", "1"]]
    assert block.cells[1:] == cells and block.cells[0][1] == "base" and len(block.head) == len(cells[0])
    path_of(tmp_path / "answers" / "001-law", "law").unlink()
    path_of(tmp_path / "answers" / "000-base", "law").write_text("damaged")
    lines = build_answer_moves(scores, tmp_path).lines
    assert len(lines) == 1 and "000-base/law.parquet: damaged answers" in lines[0]
    write_report(tmp_path, scores)
    assert "damaged answers" in (tmp_path / "report.md").read_text()


def test_every_measure_has_a_name():
    assert set(NAMES) == set(MEASURES)


def test_files_that_are_not_there_are_a_line():
    block = build_answer_moves(made(answers=ANSWERS), Path("nowhere"))
    assert not block.cells
    assert block.lines == [
        "Files of answers that are not there: 2, like nowhere/answers/002-food/law.parquet."
    ]
    assert build_answer_moves(made(), Path("nowhere")).lines == ()
