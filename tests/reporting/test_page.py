"""A report as Markdown, as a page that loads nothing, and as text; its pictures, colours and markers."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from cpt.reporting import figures
from cpt.reporting.drawing import description
from cpt.reporting.frames import few
from cpt.reporting.page import Block, align_columns, inline, write_page

HEAD, CELLS = ("group", "LC"), [["das", "−1.5"], ["ncl + <migu>", "20"]]
GROUPS = {"ncl": ([0.1, 0.2], [50.0, 51.0]), 'das "<&>"': ([0.3], [60.0]), "joint": ([None], [52.0])}


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


@pytest.fixture(scope="module")
def picture():
    return figures.draw_plane(GROUPS, x="FG", y="LC")


def test_the_policy_lets_the_page_run_its_own_script_alone(tmp_path):
    html = page(tmp_path, Block(lines=["one"]))
    elements = Elements(html)
    policy = next(meta["content"] for meta in elements.all("meta") if "http-equiv" in meta)
    assert len(elements.scripts) == 1
    digest = base64.b64encode(hashlib.sha256(elements.scripts[0].encode()).digest()).decode()
    assert policy.split("; ")[0] == "default-src 'none'"
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert policy.count("unsafe") == 1
    assert not re.search(r"https?:|//|@import|url\(", html) and "@media print" in html


def test_tables_say_what_the_reader_may_do_with_them(tmp_path):
    facets = [{"method": "das", "domains": 'a "b"'}, {"method": "ncl <x>", "domains": "c"}]
    filtered = {"sortable": False, "filtered": True, "facets": facets}
    html = page(tmp_path, Block(head=HEAD, cells=CELLS), Block(head=HEAD, cells=CELLS, **filtered))
    elements = Elements(html)
    assert [table["class"].split() for table in elements.all("table")] == [["sortable"], ["filtered"]]
    rows = [row for row in elements.all("tr") if "data-facets" in row]
    assert [json.loads(row["data-facets"]) for row in rows] == facets
    assert "ncl + &lt;migu&gt;" in html


def test_markdown_has_tables_pictures_and_what_is_folded(tmp_path, picture):
    cells = [["a|b", "<i>"]]
    table = Block(title="Table", lines=["A line."], head=HEAD, cells=cells, folded="more", code="x: 1")
    html = page(
        tmp_path, Block(), Block(title="Empty"), table, Block(title="Picture", picture=bytes(picture))
    )
    parts = (tmp_path / "report.md").read_text(encoding="utf-8").split("\n\n")
    assert parts[:4] == ["# Title", "## Table", "A line.", "<details><summary>more</summary>"]
    assert parts[4] == "| group | LC |\n| :-- | --: |\n| a&#124;b | &lt;i> |"
    assert parts[5:8] == ["~~~~yaml\nx: 1\n~~~~", "</details>", "## Picture"]
    assert parts[8] == "![Picture](report-picture.png)\n"
    image = Elements(html).all("img")[0]  # described in its own words
    assert image["alt"] == f"Picture. {description(picture)}" and 'das "<&>"' in image["alt"]
    assert base64.b64decode(image["src"].partition("base64,")[2]) == picture
    assert (tmp_path / "report-picture.png").read_bytes() == picture


def test_the_title_and_cells_are_not_taken_for_markup(tmp_path):
    html = page(tmp_path, Block(title="<b>", lines=["</script>"], code="<i>", folded="<u>"), title="<s>")
    assert {tag for tag, _ in Elements(html).elements}.isdisjoint({"b", "i", "u", "s"})
    assert html.count("</script>") == 1
    assert inline("`one` and `a<b`, not <b>") == "<code>one</code> and <code>a&lt;b</code>, not &lt;b&gt;"


def test_tables_and_names_as_text():
    assert (
        align_columns(Block(head=HEAD, cells=CELLS))
        == "group           LC\ndas           −1.5\nncl + <migu>    20"
    )
    assert few(["a", "b"]) == "a → b"
    names = [f"d{place}" for place in range(20)]
    assert few(names, between=", ") == "d0, d1, d2, … 14 more …, d17, d18, d19"


def test_pictures_are_named_by_content_and_the_same_each_time(tmp_path, picture):
    blocks = [Block(title="Any", picture=picture, name="forgetting_learning"), Block(title="Plain")]
    again = [Block(title="Other", lines=["first"]), *blocks]
    kept = []
    for each in (blocks, again):
        write_page(each, title="t", stem=tmp_path / "v1.5", vectors=True)
        kept.append({path.name: path.read_bytes() for path in tmp_path.glob("v1.5-*.*")})
    assert set(kept[0]) == {f"v1.5-forgetting_learning.{kind}" for kind in ("png", "svg", "pdf")}
    assert kept[0] == kept[1] and kept[0]["v1.5-forgetting_learning.pdf"].startswith(b"%PDF")
    titles = ("Ä/../b: c", "ä … b c", "b c", "…", "x" * 99)
    write_page([Block(title=title, picture=picture) for title in titles], title="t", stem=tmp_path / "report")
    names = {f"report-{name}.png" for name in ("b_c", "b_c-2", "b_c-3", "picture", "x" * 60)}
    assert {path.name for path in tmp_path.glob("report-*")} == names


def test_pages_leave_pyplot_and_torch_alone():
    code = "import sys; from cpt.reporting import run_page; from cpt import report; "
    code += "print([m for m in ('matplotlib.pyplot', 'torch', 'lightning') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
