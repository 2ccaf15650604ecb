"""Pictures as SVG and PDF, and as SVG within a page, where each group's marks say whose they are."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from html import escape, unescape
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

MARK = "mark:"
LOOK = {"svg.fonttype": "none", "svg.hashsalt": "cpt", "pdf.fonttype": 42}  # 42: what publishers take
# In a page neutral colours are those of the page, light or dark; those of groups stay as they are.
NEUTRAL = {"#000000": "ink", "#ffffff": "paper", "#e6e6e6": "line", "#595959": "rule"}
DATES: Mapping[str, Mapping[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


class Picture(bytes):
    """A picture as PNG. `drawn` is its figure, for other formats; `marks` says in words what each group's
    marks stand for, by its name: nothing of a picture without such marks."""

    drawn: Figure | None = None
    marks: Mapping[str, str] = {}

    @classmethod
    def of(cls, data: bytes, drawn: Figure, marks: Mapping[str, str]) -> Picture:
        made = cls(data)
        drawn.set_layout_engine("none")  # everything has its place by now
        made.drawn, made.marks = drawn, dict(marks)
        return made

    @cached_property
    def svg(self) -> bytes:
        return b"<svg></svg>" if self.drawn is None else _save(self.drawn, "svg")


def name_marks(name: str, artists: Iterable[Artist]) -> None:
    """Writes into the artists whose marks they are."""
    for artist in artists:
        artist.set_gid(MARK + name)


def write_vectors(picture: bytes, stem: Path) -> None:
    """Writes STEM.svg and STEM.pdf, the same bytes each time; nothing of a picture that is PNG alone."""
    if isinstance(picture, Picture) and picture.drawn is not None:
        stem.with_name(f"{stem.name}.svg").write_bytes(picture.svg)
        stem.with_name(f"{stem.name}.pdf").write_bytes(_save(picture.drawn, "pdf"))


def inline_svg(picture: Picture, *, prefix: str, told: str) -> str:
    """The picture as an element of a page that loads nothing: without links to other places, its ids with a
    prefix, each group's marks with `data-group` and what they stand for as a title. One without a raster
    takes the page's colours for ink and paper."""
    text = picture.svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<defs>\s*</defs>", "", text, flags=re.S)
    text = re.sub(r"\n\s*", "\n", re.sub(r"<!--.*?-->", "", text, flags=re.S))
    box = re.search(r'viewBox="([^"]+)"', text)
    drawn = "<image" not in text
    kind = ' class="drawn"' if drawn else ""
    head = f'<svg viewBox="{box[1] if box else "0 0 1 1"}"{kind} role="img" aria-label="{escape(told)}">'
    for colour, role in NEUTRAL.items() if drawn else ():
        text = text.replace(f": {colour}", f": var(--{role})")
    text = re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1).replace("xlink:href", "href")
    named = re.compile(r"""<g id=(["'])mark:(.*?)\1>""")
    text = named.sub(lambda found: _open_mark(unescape(found[2]), picture.marks), text)
    text = text.replace(' id="', f' id="{prefix}').replace('href="#', f'href="#{prefix}')
    return re.sub(
        r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", text.replace("url(#", f"url(#{prefix}")
    )


def _open_mark(name: str, marks: Mapping[str, str]) -> str:
    told = marks.get(name)
    title = f"<title>{escape(told)}</title>" if told else ""
    return f'<g data-group="{escape(name)}">{title}'


def _save(drawn: Figure, kind: str) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(LOOK):
        drawn.savefig(buffer, format=kind, metadata=DATES[kind])
    return buffer.getvalue()
