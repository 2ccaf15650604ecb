"""Names as no one would choose them, in every format: they are shown, and are nothing but names."""

import random
import re

import pytest

from cpt.reporting import run_page
from cpt.reporting.frames import strip_controls
from cpt.reporting.page import Block, align_columns, markdown, write_page
from tests.reporting.test_page import Elements
from tests.support.comparing import NLL, made

NAMES = [
    "law\n\\input{/etc/passwd}\n",
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a|b",
    "a\\|b",
    "ends with \\",
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r\n=1",
    "＝1+1",
    "a,b;\"c\"'d'",
    "`code` and ``",
    "**bold** _em_ __init__ ~~no~~",
    "[x](javascript:alert(1))",
    "![x](http://example.com/x.png)",
    "[x]: http://example.com",
    "# heading",
    "- item",
    "> quoted",
    "~~~~\n</details>",
    "| --- |",
    "&lt;b&gt; & &#60;",
    "$\\write18{x}$ ^^5cinput ~ % # {}",
    "line\u2028separator\x85next\x00nul\x1b[31mred",
    "right\u202eto left",
    "ünïcode 中文 🙂",
]
SIGNS = "\\|`*_~<>&$%#^{}[]()=+-@!\"',;:/ \n\r\t\u2028ab1é"


def drawn(count):
    """Random names of nasty signs."""
    draw = random.Random(0)
    return ["".join(draw.choices(SIGNS, k=draw.randint(1, 12))) for _ in range(count)]


ALL = [*NAMES, *drawn(200)]


# --- Markdown


def rendered(text):
    markdown_it = pytest.importorskip("markdown_it")
    return markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def shown(token):
    """The text that is read, and whether it is only text."""
    kinds = {each.type for each in token.children}
    return "".join(each.content for each in token.children), kinds <= {"text", "text_special"}


def read(name):
    """The name as Markdown shows it: on one line, without blanks at its ends."""
    return re.sub(" +", " ", strip_controls(name)).strip()


@pytest.mark.parametrize("name", ALL)
def test_markdown_shows_names_as_they_are(name):
    block = Block(title=f"T {name} T", head=["group", name], cells=[[name, f"1 {name}"], ["x", "2"]])
    text = markdown(block, picture="p.png")
    assert all(line.count("|") == 3 for line in text.splitlines() if line.startswith("|"))
    cells = [token for token in rendered(text) if token.type == "inline"]
    wanted = [f"T {name} T", "group", name, name, f"1 {name}", "x", "2"]
    assert [re.sub(" +", " ", shown(cell)[0]) for cell in cells] == list(map(read, wanted))
    assert all(shown(cell)[1] for cell in cells)


@pytest.mark.parametrize("name", ALL)
def test_lines_of_markdown_are_paragraphs_with_code_at_most(name):
    text = markdown(Block(lines=[name, f"`one`: {name}"]), picture="")
    tokens = rendered(text)
    kinds = {token.type for token in tokens if token.type != "inline"}
    assert kinds <= {"paragraph_open", "paragraph_close"}
    inner = {each.type for token in tokens if token.type == "inline" for each in token.children}
    assert inner <= {"text", "text_special", "code_inline"}


@pytest.mark.parametrize("code", ["x: 1", "~~~~\n<script>", "a\n~~~~~~~~\n# b"])
def test_code_stays_in_its_fence(code):
    (token,) = rendered(markdown(Block(code=code), picture=""))
    assert (token.type, token.content) == ("fence", f"{code}\n")


# --- pages and consoles


@pytest.mark.parametrize("name", NAMES)
def test_a_console_gets_a_line_per_row_and_no_control_signs(name):
    text = align_columns(Block(head=["group", name], cells=[[name, "1"], ["x", "2"]]))
    assert len(text.splitlines()) == 3
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_a_page_has_no_element_from_a_name(tmp_path):
    blocks = [Block(title=name, lines=[name], head=[name], cells=[[name]], folded=name) for name in NAMES]
    usual = [Block(title="n", lines=["n"], head=["n"], cells=[["n"]], folded="n") for _ in NAMES]
    pages = [write_page(each, title="t", stem=tmp_path / "p").read_text() for each in (blocks, usual)]
    tags = [{tag for tag, _ in Elements(page).elements} for page in pages]
    assert tags[0] - {"code"} == tags[1]


def test_the_report_of_a_run_with_such_names(tmp_path, monkeypatch):
    for name in ("draw_matrix", "draw_text_curves"):
        monkeypatch.setattr(f"cpt.reporting.figures.{name}", lambda scores: b"")
    names = ["law\n# x", "<script>alert(1)</script>", "a|b"]
    run_page.write_report(tmp_path, made(order=names, nll=NLL))
    text = (tmp_path / "report.md").read_text()
    assert "<script" not in text
    assert not re.search(r"^# x", text, re.MULTILINE)
    widths = [
        len(re.findall(r"\|", block.splitlines()[0])) for block in text.split("\n\n") if block[:1] == "|"
    ]
    lines = [block.splitlines() for block in text.split("\n\n") if block[:1] == "|"]
    assert all(line.count("|") == width for width, table in zip(widths, lines, strict=True) for line in table)
