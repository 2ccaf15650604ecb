"""A report is a list of blocks: shown as Markdown with pictures, as one self-contained HTML page, as text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jinja2
from markupsafe import Markup, escape

from cpt.reporting.drawing import FEW, description
from cpt.reporting.frames import strip_controls
from cpt.reporting.vectors import Picture, inline_svg, write_vectors

LONGEST = 60  # characters of a picture's name
# What Markdown takes for markup. A line may have code between backticks, and must not begin another block.
IN_CELL = re.compile(r"[&<|`\\*~$]|(?<=\])\(|(?<![^\W_])_")
IN_LINE = re.compile(r"[&<|\\*~$]|(?<=\])\(|^[#>+=\[-]|(?<![^\W_])_")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a report, without what is empty; `folded` is the line that unfolds its table and code.

    On the HTML page the reader sorts a `sortable` table by its columns; the filters of the whole page act on
    the rows of every `filtered` one and on the marks of their groups in pictures: a search over the title and
    the columns of words, and a list of boxes to tick for each name in `facets`, one mapping from names to
    values for each row of cells."""

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
    name: str = ""  # of the files of its picture; what its title says if nothing is given
    chosen: Sequence[int] = ()  # columns that the page shows at first, others by choice; none: all

    def __post_init__(self) -> None:
        if len(self.facets) not in (0, len(self.cells)):
            raise ValueError(f"facets={len(self.facets)} rows; allowed: none, or {len(self.cells)} as cells")


def write_page(blocks: Sequence[Block], *, title: str, stem: Path, vectors: bool = False) -> Path:
    """Writes STEM.md, its pictures STEM-NAME.png, named by what they show, and STEM.html; gives the path of
    the latter. `vectors`: each picture as SVG and PDF too."""
    shown = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    parts = [f"# {quote_markup(title, IN_CELL)}"]
    for block, name in zip(shown, name_pictures(shown), strict=True):
        picture = stem.with_name(f"{stem.name}-{name}.png")
        if block.picture:
            picture.write_bytes(block.picture)
        if block.picture and vectors:
            write_vectors(block.picture, picture.with_suffix(""))
        parts.append(markdown(block, picture=picture.name))
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    page = stem.with_name(f"{stem.name}.html")
    page.write_text(_html(shown, title=title), encoding="utf-8")
    return page


def name_pictures(blocks: Sequence[Block]) -> list[str]:
    """What the picture of each block is called in files: of two alike the second has a number."""
    plain = [
        re.sub(r"[^\w-]+", "_", block.name or block.title.lower(), flags=re.A).strip("_") for block in blocks
    ]
    seen: Counter[str] = Counter()
    names = []
    for block, name in zip(blocks, plain, strict=True):
        name = name[:LONGEST] or "picture"
        seen[name] += bool(block.picture)
        names.append(f"{name}-{seen[name]}" if seen[name] > 1 else name)
    return names


def _html(blocks: Sequence[Block], *, title: str) -> str:
    """The page, which loads nothing: its policy forbids that, and any script but its own."""
    template, style, script = (_asset(f"report.{kind}.j2") for kind in ("html", "css", "js"))
    script = re.sub(r"^\s+|/\*.*?\*/\n?", "", script, flags=re.M | re.S)  # no indents, no comments
    return jinja2.Template(template, autoescape=True).render(
        title=title,
        blocks=blocks,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        base64=base64.b64encode,
        description=description,
        drawn=draw_inline,
        inline=inline,
        told=separate_interval,
        dumps=partial(json.dumps, ensure_ascii=False),
    )


def draw_inline(block: Block, number: int) -> Markup:
    """Its picture as SVG where the marks in it have names; else nothing."""
    if not (isinstance(block.picture, Picture) and block.picture.marks):
        return Markup()
    told = f"{block.title}. {description(block.picture)}"
    return Markup(inline_svg(block.picture, prefix=f"p{number}-", told=told))


def inline(line: str) -> Markup:
    """A line of Markdown with what stands between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(line))))


def separate_interval(cell: str) -> Markup:
    """A number with its deviation and its interval, if it has them, as elements of their own."""
    parted = re.sub(r" (\[[^\]]*\])", r" <small>\1</small>", str(escape(cell)))
    return Markup(re.sub(r"(± [^ <]+)", r"<span>\1</span>", parted))


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
