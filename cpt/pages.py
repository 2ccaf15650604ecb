"""A report is a list of blocks: shown as Markdown with pictures, as one self-contained HTML page, as text."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from cpt.figures import FEW


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a report, without what is empty; `folded` is the line that unfolds its table and code."""

    title: str = ""
    lines: Sequence[str] = ()
    picture: bytes = b""
    head: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    words: int = 1  # so many columns hold words, the others numbers
    code: str = ""
    folded: str = ""


def written(blocks: Sequence[Block], *, title: str, stem: Path) -> Path:
    """Writes STEM.md, its pictures STEM-1.png, ... and STEM.html; gives the path of the latter."""
    shown = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    template = jinja2.Template(Path(__file__).with_name("report.html.j2").read_text(), autoescape=True)
    html = template.render(title=title, blocks=shown, base64=base64.b64encode)
    markdown = [f"# {title}"]
    for number, block in enumerate(shown, start=1):
        picture = stem.with_name(f"{stem.name}-{number}.png")
        if block.picture:
            picture.write_bytes(block.picture)
        markdown.append(_markdown(block, picture=picture.name))
    stem.with_suffix(".md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    stem.with_suffix(".html").write_text(html, encoding="utf-8")
    return stem.with_suffix(".html")


def _markdown(block: Block, *, picture: str) -> str:
    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/').replace('<', '&lt;') for cell in cells)} |"

    bar = [":--" if column < block.words else "--:" for column in range(len(block.head))]
    parts = [
        f"## {block.title}" if block.title else "",
        *block.lines,
        f"![{block.title}]({picture})" if block.picture else "",
        f"<details><summary>{block.folded}</summary>" if block.folded else "",
        "\n".join(map(row, [block.head, bar, *block.cells])) if block.cells else "",
        f"~~~~yaml\n{block.code}\n~~~~" if block.code else "",
        "</details>" if block.folded else "",
    ]
    return "\n\n".join(filter(None, parts))


def plain(block: Block) -> str:
    """The table with its columns aligned: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(block.head, *block.cells, strict=True)]
    align = [str.ljust if place < block.words else str.rjust for place in range(len(widths))]
    rows = [map(lambda put, *cell: put(*cell), align, row, widths) for row in (block.head, *block.cells)]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def few(names: Sequence[str], *, between: str = " → ") -> str:
    return between.join(
        names if len(names) <= FEW else [*names[:3], f"… {len(names) - 6} more …", *names[-3:]]
    )
