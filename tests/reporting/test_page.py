"""A report as Markdown, as a page that loads nothing, and as text."""

import base64
import hashlib
import io
import json
import re
from html.parser import HTMLParser

import pytest
from PIL import Image, PngImagePlugin

from cpt.reporting import plots
from cpt.reporting.drawing import description
from cpt.reporting.page import Block, align_columns, few, inline, write_page

HEAD, CELLS = ("group", "LC"), [["das", "−1.5"], ["ncl + <migu>", "20"]]


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text of its scripts."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.scripts = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.elements and self.elements[-1][0] == "script" and data.strip():
            self.scripts.append(data)

    def all(self, wanted):
        return [attributes for tag, attributes in self.elements if tag == wanted]


def page(tmp_path, *blocks, title="Title"):
    return write_page(blocks, title=title, stem=tmp_path / "report").read_text(encoding="utf-8")


def test_the_policy_lets_the_page_run_its_own_script_alone(tmp_path):
    elements = Elements(page(tmp_path, Block(lines=["one"])))
    policy = next(meta["content"] for meta in elements.all("meta") if "http-equiv" in meta)
    assert len(elements.scripts) == 1
    digest = base64.b64encode(hashlib.sha256(elements.scripts[0].encode()).digest()).decode()
    assert policy.split("; ")[0] == "default-src 'none'"
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert "unsafe-eval" not in policy
    assert policy.count("unsafe-inline") == 1


def test_tables_say_what_the_reader_may_do_with_them(tmp_path):
    facets = [{"method": "das", "domains": 'a "b"'}, {"method": "ncl <x>", "domains": "c"}]
    html = page(
        tmp_path,
        Block(head=HEAD, cells=CELLS),
        Block(head=HEAD, cells=CELLS, sortable=False, filtered=True, facets=facets),
    )
    elements = Elements(html)
    assert [table["class"].split() for table in elements.all("table")] == [["sortable"], ["filtered"]]
    rows = [row for row in elements.all("tr") if "data-facets" in row]
    assert [json.loads(row["data-facets"]) for row in rows] == facets
    assert [cell.get("class") for cell in elements.all("td")][:2] == ["short text", None]
    assert "ncl + &lt;migu&gt;" in html


def test_facets_have_a_mapping_for_each_row():
    with pytest.raises(ValueError, match="facets=1 rows; allowed: none, or 2"):
        Block(head=HEAD, cells=CELLS, facets=[{"method": "das"}])


def test_a_picture_is_told_in_its_own_words(tmp_path):
    picture = plots.draw_plane({'"das" & co': ([0.25], [50.0])}, x="FG", y="LC")
    said = description(picture)
    assert '"das" & co: x 0.25, y 50' in said
    image = Elements(page(tmp_path, Block(title="Trade-off", picture=picture))).all("img")[0]
    assert image["alt"] == f"Trade-off. {said}"
    assert base64.b64decode(image["src"].partition("base64,")[2]) == picture
    assert (tmp_path / "report-trade-off.png").read_bytes() == picture


def test_pictures_of_others_need_not_say_anything():
    for text in (None, PngImagePlugin.PngInfo()):
        buffer = io.BytesIO()
        Image.new("RGB", (2, 2)).save(buffer, format="png", pnginfo=text)
        assert description(buffer.getvalue()) == ""


def test_markdown_has_tables_pictures_and_what_is_folded(tmp_path):
    blocks = [
        Block(),
        Block(title="Empty"),
        Block(
            title="Table", lines=["A line."], head=HEAD, cells=[["a|b", "<i>"]], folded="more", code="x: 1"
        ),
        Block(title="Picture", picture=plots.draw_plane({}, x="FG", y="LC")),
    ]
    page(tmp_path, *blocks)
    parts = (tmp_path / "report.md").read_text(encoding="utf-8").split("\n\n")
    assert parts[:4] == ["# Title", "## Table", "A line.", "<details><summary>more</summary>"]
    assert parts[4] == "| group | LC |\n| :-- | --: |\n| a&#124;b | &lt;i> |"
    assert parts[5:8] == ["~~~~yaml\nx: 1\n~~~~", "</details>", "## Picture"]
    assert parts[8] == "![Picture](report-picture.png)\n"


def test_names_with_dots_keep_them(tmp_path):
    path = write_page([Block(lines=["one"])], title="t", stem=tmp_path / "v1.5")
    assert path == tmp_path / "v1.5.html"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["v1.5.html", "v1.5.md"]


def test_the_title_and_cells_are_not_taken_for_markup(tmp_path):
    html = page(tmp_path, Block(title="<b>", lines=["</script>"], code="<i>", folded="<u>"), title="<s>")
    assert {tag for tag, _ in Elements(html).elements}.isdisjoint({"b", "i", "u", "s"})
    assert html.count("</script>") == 1


def test_the_page_works_where_it_is_printed_or_dark(tmp_path):
    html = page(tmp_path, Block(lines=["one"]))
    assert "@media print" in html
    dark = html.partition("prefers-color-scheme: dark")[2].partition("\n}")[0]
    assert "img, svg:not(.drawn) { filter: invert" in dark  # these are drawn on white
    assert not re.search(r"https?:|//|@import|url\(", html)


def test_a_table_as_text_is_aligned():
    block = Block(head=HEAD, cells=CELLS)
    assert align_columns(block) == "group           LC\ndas           −1.5\nncl + <migu>    20"


def test_of_many_names_the_ends_are_shown():
    assert few(["a", "b"]) == "a → b"
    names = [f"d{place}" for place in range(20)]
    assert few(names, between=", ") == "d0, d1, d2, … 14 more …, d17, d18, d19"


def test_code_within_a_line_is_code_in_the_page_and_nothing_else_is():
    assert inline("`one` and `a<b`, not <b>") == "<code>one</code> and <code>a&lt;b</code>, not &lt;b&gt;"
    assert inline("a ` alone") == "a ` alone"
