"""A report is a list of blocks: shown as Markdown with pictures, as one self-contained HTML page, as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from cpt.reporting.drawing import FEW, description
from cpt.reporting.formatting import strip_controls

# What Markdown takes for markup. A line may have code between backticks, and must not begin another block.
IN_CELL = re.compile(r"[&<|`\\*~$]|(?<=\])\(|(?<![^\W_])_")
IN_LINE = re.compile(r"[&<|\\*~$]|(?<=\])\(|^[#>+=\[-]|(?<![^\W_])_")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a report, without what is empty; `folded` is the line that unfolds its table and code.

    On the HTML page the reader sorts a `sortable` table by its columns; the filters of the whole page act on
    the rows of every `filtered` one: a search over the title and the columns of words, and a list of boxes to
    tick for each name in `facets`, one mapping from names to values for each row of cells."""

    title: str = ""
    lines: Sequence[str] = ()
    picture: bytes = b""
    head: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    words: int = 1  # so many columns hold words, the others numbers
    code: str = ""
    folded: str = ""
    sortable: bool = True
    filtered: bool = False
    facets: Sequence[Mapping[str, str]] = ()

    def __post_init__(self) -> None:
        if len(self.facets) not in (0, len(self.cells)):
            raise ValueError(f"facets={len(self.facets)} rows; allowed: none, or {len(self.cells)} as cells")


def write_page(blocks: Sequence[Block], *, title: str, stem: Path) -> Path:
    """Writes STEM.md, its pictures STEM-1.png, ... and STEM.html; gives the path of the latter."""
    shown = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    parts = [f"# {quote_markup(title, IN_CELL)}"]
    for number, block in enumerate(shown, start=1):
        picture = stem.with_name(f"{stem.name}-{number}.png")
        if block.picture:
            picture.write_bytes(block.picture)
        parts.append(markdown(block, picture=picture.name))
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    page = stem.with_name(f"{stem.name}.html")
    page.write_text(_html(shown, title=title), encoding="utf-8")
    return page


def _html(blocks: Sequence[Block], *, title: str) -> str:
    """The page, which loads nothing: its policy forbids that, and any script but its own."""
    template, style, script = (_asset(f"report.{kind}.j2") for kind in ("html", "css", "js"))
    return jinja2.Template(template, autoescape=True).render(
        title=title,
        blocks=blocks,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        base64=base64.b64encode,
        description=description,
        inline=inline,
        dumps=partial(json.dumps, ensure_ascii=False),
    )


def inline(line: str) -> Markup:
    """A line of Markdown with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(line))))


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def markdown(block: Block, *, picture: str) -> str:
    """A block with its picture in a file of this name."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(quote_markup(cell, IN_CELL) for cell in cells)} |"

    title, folded = (quote_markup(text, IN_CELL) for text in (block.title, block.folded))
    fence = "~" * max([4, *(len(tildes) + 1 for tildes in re.findall("~+", block.code))])
    bar = [":--" if column < block.words else "--:" for column in range(len(block.head))]
    parts = [
        f"## {title}" if title else "",
        *(quote_markup(line, IN_LINE) for line in block.lines),
        f"![{title}]({picture})" if block.picture else "",
        f"<details><summary>{folded}</summary>" if folded else "",
        "\n".join(map(row, [block.head, bar, *block.cells])) if block.cells else "",
        f"{fence}yaml\n{block.code}\n{fence}" if block.code else "",
        "</details>" if folded else "",
    ]
    return "\n\n".join(filter(None, parts))


def quote_markup(text: str, markup: re.Pattern[str]) -> str:
    """On one line, with a character reference for each sign of markup: Markdown shows the text as it is."""
    named = {"&": "&amp;", "<": "&lt;"}
    return markup.sub(lambda sign: named.get(sign[0], f"&#{ord(sign[0])};"), strip_controls(text))


def align_columns(block: Block) -> str:
    """The table with its columns aligned: words to the left, numbers to the right."""
    lines = [list(map(strip_controls, row)) for row in (block.head, *block.cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust if place < block.words else str.rjust for place in range(len(widths))]
    rows = [map(lambda put, *cell: put(*cell), align, row, widths) for row in lines]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def few(names: Sequence[str], *, between: str = " → ") -> str:
    return between.join(
        names if len(names) <= FEW else [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    )
