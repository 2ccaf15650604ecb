"""The figures of a run page: odd names, long ones, and what was not measured."""

import logging
import warnings

import numpy as np
import pytest
from pandas import DataFrame

from cpt.reporting import run_figures
from cpt.reporting.drawing import read_description
from cpt.reporting.frames import find_matrices
from cpt.reporting.run_page import build_answer_matrix_block
from cpt.reporting.svg import render_svg
from tests.support.example_runs import make_scores

pytestmark = pytest.mark.slow


def draw_curves_of(*names):
    scores = make_scores(order=[*names])
    return run_figures.draw_text_curves(scores, find_matrices(scores)["perplexity"])


def test_names_that_begin_with_an_underscore_are_in_the_legend():
    figure = draw_curves_of("_law", "food", "space").figure
    labels = [text.get_text().strip() for text in figure.legends[0].get_texts()]
    assert {"_law", "food", "space"} < set(labels)


def test_characters_without_a_font_or_an_image_are_no_warnings_and_leave_the_page_whole(caplog):
    caplog.set_level(logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = draw_curves_of("法律", "a\x07b", "space")
        picture.save("pdf")
        svg = render_svg(picture.figure, description="", prefix="p-")
    assert "法律" in svg and caplog.text.count("No font of matplotlib") == 1


def test_what_was_not_measured_is_a_dash_in_descriptions_and_no_number_on_hover():
    scores = make_scores()
    scores.nll[0][0] = None
    perplexities = find_matrices(scores)["perplexity"]
    matrix = run_figures.draw_matrix(scores, perplexities)
    curves = run_figures.draw_text_curves(scores, perplexities)
    for picture in (matrix, curves):
        description = read_description(picture)
        assert "–" in description and "nan" not in description
    texts = [spot.text for spot in matrix.figure.spots if spot.is_cell]
    assert len(texts) > 1 and not any("nan" in text for text in texts)


def find_overlaps(axis):
    """The labels of an axis that touch the one before, by their boxes; oblique ones by their lower ends."""
    labels = [label for label in axis.get_ticklabels() if label.get_text()]
    touching = []
    for previous, label in zip(labels[:-1], labels[1:], strict=True):
        box = label.get_window_extent()
        previous_box = previous.get_window_extent()
        if label.get_rotation():
            is_touching = box.x0 - previous_box.x0 < 1.9 * 8 * label.figure.dpi / 72
        else:
            is_touching = box.x0 < previous_box.x1
        if is_touching:
            touching.append(label.get_text())
    return touching


@pytest.mark.parametrize(
    ("tokens", "names", "num_shown"),
    [
        ([1000] * 3, ["law", "food", "space"], 3),
        ([1000] * 12, [f"a_long_name_of_{number:02}" for number in range(12)], 12),
        ([5, 5, 5000], ["first_domain", "second_domain", "third_domain"], 2),
    ],
)
def test_the_names_of_stages_do_not_overlap(tokens, names, num_shown):
    ends = np.cumsum([0, *tokens]).tolist()
    stages = {}
    training = {}
    for number, name in enumerate(names):
        stages[name] = (ends[number], ends[number + 1])
        points = np.linspace(*stages[name], 5)
        training[name] = DataFrame({"lm": np.ones(5)}, index=points)
    figure = run_figures.draw_training(training, stages).figure
    (top_axis,) = figure.axes[0].child_axes
    assert len(top_axis.xaxis.get_ticklabels()) == num_shown and find_overlaps(top_axis.xaxis) == []


def test_answers_of_which_none_was_measured_have_a_table_without_a_picture():
    scores = make_scores()
    scores.answers = {"tasks": {}}
    shares = DataFrame([[np.nan, np.nan]], index=["base"], columns=["law", "food"])
    block = build_answer_matrix_block(scores, shares)
    assert block.picture is None and block.caption == ""
