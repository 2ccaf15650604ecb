"""A report as a list of blocks: one self-contained HTML page, Markdown with pictures, and text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from cpt.reporting.drawing import Picture, description
from cpt.reporting.frames import strip_controls

TEMPLATES = Path(__file__).parent / "templates"
LEGENDS: dict[str, str] = yaml.safe_load((TEMPLATES / "legends.yaml").read_text(encoding="utf-8"))
PICTURES: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "pictures.yaml").read_text("utf-8"))
# What Markdown takes for markup. A line may have code between backticks, and must not begin another block.
IN_CELL = re.compile(r"[&<|`\\*~$]|(?<=\])\(|(?<![^\W_])_")
IN_LINE = re.compile(r"[&<|\\*~$]|(?<=\])\(|^[#>+=\[-]|(?<![^\W_])_")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A section of a report; one without lines, picture, cells and code is left out. `tiles` shows each row
    of cells as a tile: a title, a number, its interval, a word, and what it is.

    On the HTML page tables are sorted by their columns. Its filters act on the rows of `filtered` tables: a
    search over the title and the columns of words, and a list of values for each name in `facets`, a mapping
    for each row of cells."""

    title: str = ""
    lines: Sequence[str] = ()
    picture: bytes = b""
    caption: str = ""  # how to read the picture
    tiles: bool = False
    head: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    words: int = 1  # the number of columns with words; the others hold numbers
    code: str = ""
    folded: str = ""  # the line that unfolds table and code
    filtered: bool = False
    facets: Sequence[Mapping[str, str]] = ()
    name: str = ""  # of the files of its picture; default: the title
    chosen: Sequence[int] = ()  # columns that the page shows at first; default: all


def show_picture(key: str, picture: bytes, **block: Any) -> Block:
    """A picture with its title and caption in pictures.yaml, and more of its block."""
    return Block(picture=picture, **{"name": key} | PICTURES[key] | block)


def write_page(blocks: Sequence[Block], *, title: str, stem: Path, vectors: bool = False) -> Path:
    """Writes STEM.html, STEM.md and STEM-NAME.png, with `vectors` also SVG and PDF."""
    shown = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    files = write_pictures(shown, stem=stem, vectors=vectors)
    parts = [f"# {quote_markup(title, IN_CELL)}"]
    parts += [markdown(block, picture=f"{file}.png") for block, file in zip(shown, files, strict=True)]
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    # The page loads nothing: its policy forbids that, and any script but its own.
    kinds = ("html", "css", "js")
    template, style, script = ((TEMPLATES / f"report.{kind}.j2").read_text() for kind in kinds)
    script = re.sub(r"^\s+|/\*.*?\*/\n?", "", script, flags=re.M | re.S)  # no indents, no comments
    page = stem.with_name(f"{stem.name}.html")
    html = jinja2.Template(template, autoescape=True).render(
        title=title,
        blocks=shown,
        style=Markup(style),
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        base64=base64.b64encode,
        description=description,
        inline=inline,
        split=separate_interval,
        dumps=partial(json.dumps, ensure_ascii=False),
    )
    page.write_text(html, encoding="utf-8")
    return page


def write_pictures(blocks: Sequence[Block], *, stem: Path, vectors: bool) -> list[str]:
    """Writes STEM-NAME.png, with `vectors` also SVG and PDF. Gives STEM-NAME of each block; those of pictures
    differ, also where upper and lower case are one."""
    files: list[str] = []
    pictures: set[str] = set()
    for block in blocks:
        name = re.sub(r"[^\w-]+", "_", block.name or block.title.lower(), flags=re.A).strip("_")[:60]
        name = name or "picture"
        file, number = f"{stem.name}-{name}", 1
        while file.lower() in pictures:
            number += 1
            file = f"{stem.name}-{name}-{number}"
        files.append(file)
        if block.picture:
            pictures.add(file.lower())
            stem.with_name(f"{file}.png").write_bytes(block.picture)
        if vectors and isinstance(block.picture, Picture):
            for kind in ("svg", "pdf"):
                stem.with_name(f"{file}.{kind}").write_bytes(block.picture.save(kind))
    return files


def inline(line: str) -> Markup:
    """A line of Markdown, with text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(line))))


def separate_interval(cell: str) -> Markup:
    """A number with its deviation and its interval as elements of their own."""
    parted = re.sub(r" (\[[^\]]*\])", r" <small>\1</small>", str(escape(cell)))
    return Markup(re.sub(r"(± [^ <]+)", r"<span>\1</span>", parted))


def quote_line(line: str) -> str:
    """A line for Markdown, which reads what is between backticks as it is."""
    code = re.split(r"(`[^`]+`)", line)
    return "".join(part if at % 2 else quote_markup(part, IN_LINE) for at, part in enumerate(code))


def markdown(block: Block, *, picture: str) -> str:
    """A block, with its picture in a file of the given name."""
    title, folded = (quote_markup(text, IN_CELL) for text in (block.title, block.folded))
    fence = "~" * max([4, *(len(tildes) + 1 for tildes in re.findall("~+", block.code))])
    bar = [":--" if column < block.words else "--:" for column in range(len(block.head))]
    rows = [[quote_markup(cell, IN_CELL) for cell in row] for row in (block.head, bar, *block.cells)]
    parts = [
        f"## {title}" if title else "",
        *map(quote_line, block.lines),
        f"![{title}]({picture})" if block.picture else "",
        quote_line(block.caption),
        f"<details><summary>{folded}</summary>" if folded else "",
        "\n".join(f"| {' | '.join(row)} |" for row in rows) if block.cells else "",
        f"{fence}yaml\n{block.code}\n{fence}" if block.code else "",
        "</details>" if folded else "",
    ]
    return "\n\n".join(filter(None, parts))


def quote_markup(text: str, markup: re.Pattern[str]) -> str:
    """On one line, with character references for markup: Markdown shows the text as it is."""
    named = {"&": "&amp;", "<": "&lt;"}
    return markup.sub(lambda sign: named.get(sign[0], f"&#{ord(sign[0])};"), strip_controls(text))


def align_columns(block: Block) -> str:
    """The table as text: words to the left, numbers to the right."""
    lines = [list(map(strip_controls, row)) for row in (block.head, *block.cells)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = [str.ljust if place < block.words else str.rjust for place in range(len(widths))]
    rows = [map(lambda put, *cell: put(*cell), align, row, widths) for row in lines]
    return "\n".join("  ".join(row).rstrip() for row in rows)
