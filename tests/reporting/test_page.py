"""A report as Markdown, as a page that loads nothing, and as text; names are shown as they are."""

import base64
import hashlib
import json
import math
import random
import re
from html import unescape

import pytest

from cpt.reporting.compare import format_spread
from cpt.reporting.contrasts import Spread
from cpt.reporting.formats import (
    format_decimals,
    format_deviation,
    format_percent,
    format_perplexity,
    format_thousandths,
    strip_controls,
)
from cpt.reporting.page import Block, align_columns, format_markdown, group_topics, render_inline, write_page
from cpt.reporting.tex import MEASURES_BY_KEY, format_tex_mean

NAMES = ["law\n\\input{/etc/passwd}\n", "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a|b"]
NAMES += ["a\\|b", "ends with \\", "=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "＝1+1"]
NAMES += ["\r\n=1", "`code` and ``", "**bold** _em_ __init__ ~~no~~", "[x](javascript:alert(1))"]
NAMES += ["![x](http://example.com/x.png)", "[x]: http://example.com", "# heading", "- item", "> quoted"]
NAMES += ["~~~~\n</details>", "| --- |", "&lt;b&gt; & &#60;", "$\\write18{x}$ ^^5cinput ~ % # {}"]
NAMES += ["line\u2028separator\x85next\x00nul\x1b[31mred", "right\u202eto left", "ünïcode 中文 🙂"]
SIGNS = "\\|`*_~<>&$%#^{}[]()=+-@!\"',;:/ \n\r\t\u2028ab1é"
DRAW = random.Random(0)
ALL = [*NAMES, *("".join(DRAW.choices(SIGNS, k=DRAW.randint(1, 12))) for _ in range(200))]


def page(tmp_path, *blocks, title="Title"):
    return write_page(blocks, title=title, stem=tmp_path / "report").read_text(encoding="utf-8")


def test_a_negative_number_that_rounds_to_zero_has_no_minus():
    value = -0.00001
    assert (format_decimals(value), format_thousandths(value), format_perplexity(value)) == (
        "0.0000",
        "0.000",
        "0.00",
    )
    assert format_percent(value / 100) == "0.00"
    assert (format_decimals(-0.1), format_thousandths(-0.001)) == ("-0.1000", "−0.001")


@pytest.mark.parametrize(("mean", "deviation", "text"), [
    (53.1, 0.304, "0.30"),
    (568.9, 4.449, "4.4"),
    (14218, 87.31, "87"),
    (2e6, 87.31, "87.31"),
])  # fmt: skip
def test_a_deviation_has_the_decimals_of_its_mean(mean, deviation, text):
    assert format_deviation(deviation, mean, format_perplexity) == text
    assert format_deviation(0.00304, 5.689, format_percent) == "0.30"


def test_tables_write_a_deviation_with_the_decimals_of_its_mean():
    spread = Spread(n=2, num_runs=2, mean=568.9, sd=4.449, low=math.nan, high=math.nan)
    assert format_spread(spread, format_perplexity) == "568.9 ± 4.4"

    measure = MEASURES_BY_KEY["LC/perplexity"]
    row = {"mean": 568.9, "sd": 4.449, "n": 2, "p_holm": 1.0, "p_t_holm": 1.0}
    assert format_tex_mean(row, measure, is_best=False, num_runs=2) == "568.9 $\\pm$ 4.4"


def test_the_page_runs_its_own_script_alone_and_its_tables_can_be_filtered(tmp_path):
    facets = [{"method": "das", "domains": 'a "b"'}, {"method": "ncl <x>", "domains": "c"}]
    cells = [["das", "−1.5"], ["ncl + <migu>", "20"]]
    html = page(tmp_path, Block(head=["group", "LC"], cells=cells, is_filtered=True, facets=facets))
    (policy,) = re.findall(r'http-equiv="?Content-Security-Policy"? content="([^"]*)"', html)
    (script,) = re.findall(r"(?s)<script[^>]*>(.*?)</script>", html)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.split("; ")[0] == "default-src 'none'" and policy.count("unsafe") == 1
    assert policy.endswith(f"script-src 'sha256-{digest}'")
    assert not re.search(r"https?:|//|@import|url\(", html)
    rows = re.findall(r'<tr data-facets="([^"]*)"', html)
    assert [json.loads(unescape(row)) for row in rows] == facets and "ncl + &lt;migu&gt;" in html


def test_neighbouring_columns_of_a_topic_share_a_head_and_the_first_column_is_alone():
    block = Block(head=list("abcde"), topics=["x", "x", "x", "", "y"], cells=[list("12345")])
    assert group_topics(block) == [("x", 1), ("x", 2), ("", 1), ("y", 1)]
    assert group_topics(Block(head=["a"], topics=[""], cells=[["1"]])) == []


def parse_markdown(text):
    markdown_it = pytest.importorskip("markdown_it")
    return markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def find_inline_types(tokens):
    types = set()
    for token in tokens:
        if token.type == "inline":
            types.update(child.type for child in token.children)
    return types


def test_markdown_shows_names_as_they_are():
    for name in ALL:
        block = Block(title=f"T {name} T", head=["group", name], cells=[[name, f"1 {name}"], ["x", "2"]])
        text = format_markdown(block, picture="p.png")
        assert all(line.count("|") == 3 for line in text.splitlines() if line.startswith("|"))
        cells = [token for token in parse_markdown(text) if token.type == "inline"]
        cell_texts = []
        for cell in cells:
            cell_text = "".join(child.content for child in cell.children)
            cell_texts.append(re.sub(" +", " ", cell_text))
        expected_texts = [f"T {name} T", "group", name, name, f"1 {name}", "x", "2"]
        assert cell_texts == [
            re.sub(" +", " ", strip_controls(name_text)).strip() for name_text in expected_texts
        ]
        assert find_inline_types(cells) <= {"text", "text_special"}
        console_text = align_columns(Block(head=block.head, cells=block.cells))  # for a console
        assert len(console_text.splitlines()) == 3 and not re.search(
            r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", console_text
        )
        tokens = parse_markdown(format_markdown(Block(lines=[name, f"`one`: {name}"]), picture=""))
        assert {token.type for token in tokens} <= {"inline", "paragraph_open", "paragraph_close"}
        assert find_inline_types(tokens) <= {"text", "text_special", "code_inline"}


def test_a_page_has_no_element_from_a_name(tmp_path):
    def tags(names):
        arguments = [dict.fromkeys(("title", "fold_label", "code"), name) for name in names]
        blocks = [Block(lines=[x["title"]], head=[x["title"]], cells=[[x["title"]]], **x) for x in arguments]
        html = page(tmp_path, *blocks, title=names[1])
        assert html.count("</script>") == 1
        return {*re.findall(r"<(\w+)", html)}

    assert tags([*NAMES, "</script>", "<i>"]) - {"code"} == tags(["n"] * (len(NAMES) + 2)) - {"code"}
    assert (
        render_inline("`one` and `a<b`, not <b>") == "<code>one</code> and <code>a&lt;b</code>, not &lt;b&gt;"
    )
