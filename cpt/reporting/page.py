"""A report as a list of blocks: one self-contained HTML page, Markdown with pictures, and text."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import jinja2
import yaml
from markupsafe import Markup, escape

from cpt.reporting.drawing import Picture, read_description
from cpt.reporting.formats import strip_controls
from cpt.reporting.svg import render_svg

TEMPLATES = Path(__file__).parent / "templates"
LEGENDS: dict[str, str] = yaml.safe_load((TEMPLATES / "legends.yaml").read_text(encoding="utf-8"))
PICTURES: dict[str, dict[str, str]] = yaml.safe_load((TEMPLATES / "pictures.yaml").read_text("utf-8"))
# What Markdown takes for markup. A line may have code between backticks, and must not begin another block.
IN_CELL = re.compile(r"[&<|`\\*~$]|(?<=\])\(|(?<![^\W_])_")
IN_LINE = re.compile(r"[&<|\\*~$]|(?<=\])\(|^[#>+=\[-]|(?<![^\W_])_")


VECTOR_KINDS = ("svg", "pdf")
MAX_SHORT_CELL = 26  # characters of words that stay on one line
MAX_SHADE = 4  # of the classes better-1 to worse-4 in report.css.j2


@dataclass(frozen=True, kw_only=True)
class Block:
    """A section of a report; one without lines, picture, cells and code is left out. `is_tiles` shows each
    row of cells as a tile: a title, a number, its interval, a word, and what it is.

    On the HTML page tables are sorted by their columns. Its filters act on the rows of tables that are
    `is_filtered`: a search over the title and the columns of words, and a list of values for each name in
    `facets`, a mapping for each row of cells."""

    title: str = ""
    lines: Sequence[str] = ()
    picture: Picture | None = None
    caption: str = ""  # how to read the picture
    section: str = ""  # of a comparison: filters act on the groups of its picture
    is_tiles: bool = False
    head: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    topics: Sequence[str] = ()  # of the columns: on the page, one head above all neighbours that share one
    num_word_columns: int = 1  # columns with words; the others hold numbers
    code: str = ""
    fold_label: str = ""  # the line that unfolds table and code
    is_filtered: bool = False
    facets: Sequence[Mapping[str, str]] = ()
    shades: Sequence[
        Sequence[int]
    ] = ()  # of the cells with numbers: -MAX_SHADE (worse) to MAX_SHADE (better)
    name: str = ""  # of the files of its picture; default: the title
    shown_columns: Sequence[int] = ()  # columns that the page shows at first; default: all


@dataclass(frozen=True, kw_only=True)
class PageHead:
    """The lines below the title of a page."""

    facts: Sequence[str] = ()  # what was run
    command: str = ""  # that made the run, with a button to copy it
    links: Sequence[str] = ()  # files in the folder of the page


NO_HEAD = PageHead()


def build_picture_block(
    key: str,
    picture: Picture,
    *,
    title: str | None = None,
    caption: str | None = None,
    lines: Sequence[str] = (),
    head: Sequence[str] = (),
    cells: Sequence[Sequence[str]] = (),
    fold_label: str = "",
) -> Block:
    """A picture with its title and caption in pictures.yaml, unless others are given, and its table."""
    texts = PICTURES[key]
    return Block(
        title=texts.get("title", "") if title is None else title,
        lines=lines,
        picture=picture,
        caption=texts.get("caption", "") if caption is None else caption,
        head=head,
        cells=cells,
        fold_label=fold_label,
        name=texts.get("name", key),
    )


def write_page(
    blocks: Sequence[Block],
    *,
    title: str,
    stem: Path,
    head: PageHead = NO_HEAD,
    with_vectors: bool = False,
) -> Path:
    """Writes STEM.html, STEM.md and STEM-NAME.png, `with_vectors` also SVG and PDF."""
    blocks = [block for block in blocks if block.lines or block.picture or block.cells or block.code]
    picture_names = write_pictures(blocks, stem=stem, with_vectors=with_vectors)

    parts = [f"# {quote_markup(title, IN_CELL)}", *format_markdown_head(head)]
    for block, name in zip(blocks, picture_names, strict=True):
        parts.append(format_markdown(block, picture=f"{name}.png"))
    stem.with_name(f"{stem.name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")

    page = stem.with_name(f"{stem.name}.html")
    kinds = (*VECTOR_KINDS, "png") if with_vectors else ("png",)
    picture_files = []
    for name in picture_names:
        picture_files.append([f"{name}.{kind}" for kind in kinds])
    html = render_html(blocks, title=title, head=head, picture_files=picture_files)
    page.write_text(html, encoding="utf-8")
    return page


@functools.cache
def load_template(name: str) -> jinja2.Template:
    """A template of the pages. To compile it takes longer than to fill it in."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    return environment.get_template(name)


def render_html(
    blocks: Sequence[Block],
    *,
    title: str,
    head: PageHead = NO_HEAD,
    picture_files: Sequence[Sequence[str]] = (),
) -> str:
    """The page. It loads nothing: its policy forbids that, and any script but its own, which has a hash.

    `picture_files`: by block, the files in the folder of the page that have its picture."""
    template = load_template("report.html.j2")
    style = (TEMPLATES / "report.css.j2").read_text()
    script = (TEMPLATES / "report.js.j2").read_text()
    script = re.sub(r"^\s+|/\*.*?\*/\n?", "", script, flags=re.M | re.S)  # no indents, no comments
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template.render(
        title=title,
        head=head,
        blocks=blocks,
        pictures=render_pictures(blocks),
        picture_files=picture_files or [()] * len(blocks),
        style=Markup(style),
        script=Markup(script),
        digest=script_hash,
        inline=render_inline,
        split=separate_interval,
        cell_class=choose_cell_class,
        group_topics=group_topics,
        dumps=functools.partial(json.dumps, ensure_ascii=False),
    )


def render_pictures(blocks: Sequence[Block]) -> list[Markup]:
    """The picture of each block as an SVG element, empty without one."""
    pictures = []
    for number, block in enumerate(blocks, start=1):
        if block.picture is None:
            pictures.append(Markup(""))
            continue
        description = f"{block.title}. {read_description(block.picture)}"
        prefix = f"picture-{number}-"
        pictures.append(Markup(render_svg(block.picture.figure, description=description, prefix=prefix)))
    return pictures


def write_pictures(blocks: Sequence[Block], *, stem: Path, with_vectors: bool) -> list[str]:
    """Writes STEM-NAME.png, `with_vectors` also SVG and PDF. Returns STEM-NAME of each block; those of
    pictures differ, also on file systems that do not distinguish upper and lower case."""
    names: list[str] = []
    picture_names: set[str] = set()  # in lower case
    for block in blocks:
        block_name = re.sub(r"[^\w-]+", "_", block.name or block.title.lower(), flags=re.A)
        block_name = block_name.strip("_")[:60] or "picture"
        name = f"{stem.name}-{block_name}"
        number = 1
        while name.lower() in picture_names:
            number += 1
            name = f"{stem.name}-{block_name}-{number}"
        names.append(name)

        if block.picture is None:
            continue
        picture_names.add(name.lower())
        stem.with_name(f"{name}.png").write_bytes(block.picture)
        if with_vectors:
            for kind in VECTOR_KINDS:
                stem.with_name(f"{name}.{kind}").write_bytes(block.picture.save(kind))
    return names


def render_inline(line: str) -> Markup:
    """A line of Markdown, with text between backticks as code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(line))))


def group_topics(block: Block) -> list[tuple[str, int]]:
    """The topics of a table and the number of columns of each, in their order; empty for a table without
    any. The first column, which stays in sight, is alone."""
    if not any(block.topics):
        return []
    groups = [(block.topics[0], 1)]
    for topic, columns in itertools.groupby(block.topics[1:]):
        groups.append((topic, len(list(columns))))
    return groups


def choose_cell_class(block: Block, row: int, column: int) -> str:
    """The class of a cell: whether it holds words, and its shade."""
    if column < block.num_word_columns:
        is_short = len(block.cells[row][column]) < MAX_SHORT_CELL
        return "short text" if is_short else "text"
    if not block.shades:
        return ""
    shade = block.shades[row][column - block.num_word_columns]
    if shade == 0:
        return ""
    return f"better-{shade}" if shade > 0 else f"worse-{-shade}"


def separate_interval(cell: str) -> Markup:
    """A number with its deviation and its interval as elements of their own."""
    html = re.sub(r" (\[[^\]]*\])", r" <small>\1</small>", str(escape(cell)))
    return Markup(re.sub(r"(± [^ <]+)", r"<span>\1</span>", html))


def quote_line(line: str) -> str:
    """A line quoted for Markdown, except what is between backticks, which Markdown shows unchanged."""
    parts = re.split(r"(`[^`]+`)", line)  # texts and pieces of code in turn
    for position in range(0, len(parts), 2):
        parts[position] = quote_markup(parts[position], IN_LINE)
    return "".join(parts)


def format_markdown_head(head: PageHead) -> list[str]:
    """The head of a page as paragraphs."""
    parts = []
    if head.facts:
        parts.append(quote_line(" · ".join(head.facts)))
    if head.command:
        parts.append(fence_code(head.command, language="bash"))
    if head.links:
        links = [f"[{quote_markup(link, IN_CELL)}]({quote(link)})" for link in head.links]
        parts.append(f"Data: {', '.join(links)}")
    return parts


def format_markdown(block: Block, *, picture: str) -> str:
    """A block, with its picture in a file of the given name."""
    title = quote_markup(block.title, IN_CELL)
    fold_label = quote_markup(block.fold_label, IN_CELL)

    parts = []
    if title:
        parts.append(f"## {title}")
    parts += [quote_line(line) for line in block.lines]
    if block.picture:
        parts.append(f"![{title}]({picture})")
    parts.append(quote_line(block.caption))
    if fold_label:
        parts.append(f"<details><summary>{fold_label}</summary>")
    if block.cells:
        num_numbers = len(block.head) - block.num_word_columns
        alignment = [":--"] * min(block.num_word_columns, len(block.head)) + ["--:"] * num_numbers
        parts.append(format_markdown_table([block.head, alignment, *block.cells]))
    if block.code:
        parts.append(fence_code(block.code))
    if fold_label:
        parts.append("</details>")
    return "\n\n".join(part for part in parts if part)


def format_markdown_table(rows: Iterable[Sequence[object]]) -> str:
    """A table of cells that may hold any text; the second row is that of dashes."""
    lines = []
    for row in rows:
        cells = [quote_markup(str(cell), IN_CELL) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def fence_code(code: str, *, language: str = "yaml") -> str:
    """Code between fences that are longer than any row of tildes in it."""
    longest = max((len(tildes) for tildes in re.findall("~+", code)), default=0)
    fence = "~" * max(4, longest + 1)
    return f"{fence}{language}\n{code}\n{fence}"


def quote_markup(text: str, markup: re.Pattern[str]) -> str:
    """On one line, with character references for markup: Markdown shows the text as it is."""

    def refer(sign: re.Match[str]) -> str:
        if sign[0] == "&":
            return "&amp;"
        if sign[0] == "<":
            return "&lt;"
        return f"&#{ord(sign[0])};"

    return markup.sub(refer, strip_controls(text))


def align_columns(block: Block) -> str:
    """The table as text: words to the left, numbers to the right."""
    rows = []
    for row in (block.head, *block.cells):
        rows.append([strip_controls(cell) for cell in row])
    widths = []
    for column_cells in zip(*rows, strict=True):
        widths.append(max(len(cell) for cell in column_cells))

    lines = []
    for row in rows:
        aligned = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if column < block.num_word_columns:
                aligned.append(cell.ljust(width))
            else:
                aligned.append(cell.rjust(width))
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
