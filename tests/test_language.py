"""The language and the form of pages, options and messages: banned phrases, line lengths, tables, links."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Phrases of translated English; docs/glossary.md has the terms to use.
BANNED = re.compile(
    r"\b(told|sa(?:ys|id) so|stands? (?:in|beside|behind)|goes on|gone on|go on with|going on with|in a line"
    r"|as ever|all the same|so many|of one's own|of theirs|beside|behind|with which figures|what of it"
    r"|no number|begun|anew|made again|(?:what|that) there (?:is|are)|(?:what|that) are none|(?-i:is none)"
    r"|(?-i:of the hub)|processors?|makes? no trace|(?:is|are) looked at|looks? at|where that is|as far as"
    r"|what rests|where (?:they|it|these|those) rests?|rests? (?:in|on|there))\b",
    re.IGNORECASE,
)
LONGEST, COLUMNS, LINKS = 100, 6, 3
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]


def written(path: Path) -> Iterator[tuple[int, str]]:
    """The text of a file by line; of Python its strings and comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def without_code(text: str) -> str:
    """Text on one line, without code spans; empty for a name."""
    return "" if text.isidentifier() else re.sub(r"`[^`]*`", "", re.sub(r"\s+", " ", text))


def test_no_banned_phrase_is_written():
    files = [*PAGES, *(ROOT / "conf").rglob("*.yaml"), *(ROOT / "cpt").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in [*files, *(ROOT / "cpt").rglob("*.j2")]
        for line, text in written(path)
        for match in BANNED.finditer(without_code(text))
    ]
    assert found == []


def prose(path: Path) -> Iterator[str]:
    """The lines of a page outside tables and printed output, without the targets of links."""
    fence = ""
    for _, line in written(path):
        if line.startswith("```"):
            fence = "" if fence else line
        elif not line.startswith("|") and fence != "```":
            yield re.sub(r"\]\([^)]*\)|https?://\S+", "", line)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_is_narrow_begins_with_its_use_and_ends_with_few_links(path):
    assert [line for line in prose(path) if len(line) > LONGEST] == []
    text = path.read_text(encoding="utf-8")
    rows = [re.sub(r"`[^`]*`|\\\|", "", line) for line in text.splitlines() if re.match(r"\|[ :]", line)]
    assert {row.count("|") - 1 for row in rows if row.count("|") - 1 > COLUMNS} == set()
    if ROOT / "docs" in path.parents:
        title, after = text.split("\n\n")[:2]
        use = "This study" if path.parent.name == "studies" else "After this"
        assert title.startswith("# ") and after.startswith(use)
        body, _, links = text.rpartition("\n## See also\n")
        assert body and 0 < links.count("](") <= LINKS and "\n## " not in links
