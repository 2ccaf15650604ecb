"""Pictures as SVG and PDF: named by what they show, alike each time, with marks that say whose they are."""

import re

import numpy as np
import pytest

from cpt.reporting.comparison import charts
from cpt.reporting.outliers import find_inner, find_window
from cpt.reporting.page import Block, name_pictures, write_page
from cpt.reporting.vectors import inline_svg

GROUPS = {"ncl": ([0.1, 0.2], [50.0, 51.0]), 'das "<&>"': ([0.3], [60.0]), "joint": ([None], [52.0])}
MARKS = {"ncl": "ncl: FG 0.15 [0.1, 0.2]", 'das "<&>"': "das, one run"}


@pytest.fixture(scope="module")
def picture():
    return charts.trade_off(GROUPS, marks=MARKS)


def test_marks_and_lines_of_the_legend_say_whose_they_are(picture):
    text = inline_svg(picture, prefix="p1-", told='a "plane"')
    assert text.startswith("<svg viewBox=") and 'aria-label="a &quot;plane&quot;"' in text
    names = re.findall(r'data-group="([^"]*)"', text)
    assert names.count("ncl") == 4  # runs, mean, and the legend's mark and text
    assert names.count("das &quot;&lt;&amp;&gt;&quot;") == 4
    assert names.count("joint") == 3
    assert "<title>ncl: FG 0.15 [0.1, 0.2]</title>" in text
    assert not re.search(r"https?:|<style|<metadata|<!--|xlink", text)
    assert set(re.findall(r'href="#(...)', text)) == {"p1-"} == set(re.findall(r' id="(...)', text))


def test_two_pictures_of_a_page_share_no_id(picture):
    first, second = (inline_svg(picture, prefix=f"p{place}-", told="") for place in (1, 2))
    ids = [set(re.findall(r' id="([^"]*)"', text)) for text in (first, second)]
    assert ids[0] and not ids[0] & ids[1]


def test_files_are_named_by_content_and_the_same_each_time(tmp_path, picture):
    blocks = [Block(title="Any", picture=picture, name="forgetting_learning"), Block(title="Plain")]
    again = [Block(title="Other", lines=["first"]), *blocks]
    kept = []
    for each in (blocks, again):
        write_page(each, title="t", stem=tmp_path / "a", vectors=True)
        kept.append({path.name: path.read_bytes() for path in tmp_path.glob("a-*.*")})
    assert set(kept[0]) == {f"a-forgetting_learning.{kind}" for kind in ("png", "svg", "pdf")}
    assert kept[0] == kept[1]
    assert kept[0]["a-forgetting_learning.pdf"].startswith(b"%PDF")
    assert "![Any](a-forgetting_learning.png)" in (tmp_path / "a.md").read_text()


def test_a_run_page_has_png_alone(tmp_path, picture):
    write_page([Block(title="Any", picture=picture)], title="t", stem=tmp_path / "report")
    assert {path.name for path in tmp_path.glob("report-*")} == {"report-any.png"}


def test_names_of_pictures_are_safe_and_differ(picture):
    shown = [Block(title=title, picture=picture) for title in ("Ä/../b: c", "ä … b c", "b c", "…", "x" * 99)]
    assert name_pictures(shown) == ["b_c", "b_c-2", "b_c-3", "picture", "x" * 60]


def test_what_lies_far_off_is_left_out_of_the_range():
    assert find_inner(np.array([1.0, 2.0, 3.0, 4.0, 500.0])) == (1, 4)
    assert find_inner(np.array([1.0, 2.0, 3.0, 4.0, 6.0])) is None
    assert find_inner(np.array([1.0, 2.0, 3.0, 400.0])) is None  # too few to say
    points = {str(place): np.array([place, place + 0.5]) for place in range(5)}
    low, high = find_window(points | {"off": np.array([100.0, 900.0])}, logarithmic=False)
    assert low < 0 < 4.5 < high < 6
    assert find_window(points, logarithmic=False) is None


def test_one_group_far_off_does_not_press_the_others_together():
    points = {f"m{place}": ([0.01 * place], [50.0 + place]) for place in range(6)}
    points["off"] = ([0.02], [5000.0])
    picture = charts.pareto(points, x="FG", y="LC", logarithmic=False, marks={})
    low, high = picture.drawn.axes[0].get_ylim()
    assert 45 < low < 50 and 55 < high < 60
    labels = [text.get_text() for text in picture.drawn.legends[0].get_texts()]
    assert "off: off the axes, 0.02, 5000" in labels
