"""Pictures as SVG and PDF: named by what they show, alike each time, with marks that say whose they are."""

import re

import pytest

from cpt.reporting import plots
from cpt.reporting.page import Block, name_pictures, write_page
from cpt.reporting.vectors import inline_svg

GROUPS = {"ncl": ([0.1, 0.2], [50.0, 51.0]), 'das "<&>"': ([0.3], [60.0]), "joint": ([None], [52.0])}
MARKS = {"ncl": "ncl: FG 0.15 [0.1, 0.2]", 'das "<&>"': "das, one run"}


@pytest.fixture(scope="module")
def picture():
    return plots.draw_plane(GROUPS, marks=MARKS, x="FG", y="LC")


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
