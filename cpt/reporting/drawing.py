"""What all figures share: colours, axes, heat maps, and their PNG, SVG and PDF files.

Colours are safe for the colour-blind: ColorBrewer's RdBu for changes, those of Okabe and Ito (2008) for
series, with a violet for their yellow. PNG's text chunk "Description" says what a picture shows."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from cpt.data.sources.base import GENERAL
from cpt.reporting.frames import FEW, few, shorten

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8833EE")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", ":")
VECTORS: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "cpt"}
VECTORS |= {"pdf.fonttype": 42}  # as publishers require
logging.getLogger("fontTools").setLevel(logging.WARNING)  # of each PDF it logs every table of a font


class Picture(bytes):
    """A PNG, with its figure."""

    drawn: Figure

    def save(self, kind: str) -> bytes:
        """The figure as `svg` or `pdf`, the same bytes each time."""
        buffer, date = io.BytesIO(), {"svg": "Date", "pdf": "CreationDate"}[kind]
        with matplotlib.rc_context(VECTORS):
            self.drawn.savefig(buffer, format=kind, metadata={date: None})
        return buffer.getvalue()


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches, not one of pyplot's."""
    return Figure(figsize=size, dpi=130, layout="constrained")


def png(drawn: Figure, *, told: str) -> Picture:
    """The figure in at most 256 colours, a third of the size, described by its text."""
    buffer, small, text = io.BytesIO(), io.BytesIO(), PngInfo()
    drawn.savefig(buffer, format="png")
    text.add_itxt("Description", told)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True, pnginfo=text)
    drawn.set_layout_engine("none")  # everything has its place by now
    picture = Picture(small.getvalue())
    picture.drawn = drawn
    return picture


def description(picture: bytes) -> str:
    return str(PngImageFile(io.BytesIO(picture)).text.get("Description", ""))


def style(place: int) -> dict[str, str]:
    """Colour, marker and dashes of a series; 72 places differ in the first two, neighbours in both."""
    colour, turn = place % len(SERIES), place // len(SERIES)
    marker = MARKERS[(place + 2 * turn) % len(MARKERS)]
    return {"color": SERIES[colour], "marker": marker, "linestyle": DASHES[turn % len(DASHES)]}


def literal(name: str, *, width: int) -> str:
    """The name as matplotlib shows it unchanged: a dollar sign would start a formula."""
    return shorten(name, width=width).replace("$", r"\$")


def ticks(axis: Axis, names: Sequence[str], *, few: bool, rotation: int) -> None:
    """Names as labels; of many, at most 30 and the last."""
    step = 1 if few else -(-len(names) // 30)
    places = [*range(0, len(names) - 1 - step // 2, step), len(names) - 1] if names else []
    turned: dict[str, Any] = {"rotation_mode": "anchor", "ha": "right"} if 0 < rotation < 90 else {}
    labels = [literal(names[place], width=22) for place in places]
    axis.set_ticks(places, labels, rotation=rotation, fontsize=9 if few else 7, **turned)


def plain_logarithm(axis: Axis, values: np.ndarray) -> None:
    """Ticks written out, also where the values span less than a decade."""
    known = values[np.isfinite(values)].astype(float)
    narrow = known.max(initial=0) < 5 * known.min(initial=np.inf)
    axis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def list_few(told: Iterable[str]) -> str:
    return f"{few(list(told), between='; ') or 'None'}."


class HeatMap(NamedTuple):
    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]

    framed: Sequence[tuple[int, int]] = ()  # (row, column)
    numbers: np.ndarray | None = None  # in the cells, if not the values


def draw_heat_maps(
    maps: Mapping[str, HeatMap],
    *,
    label: str,
    told: str = "",
    show: Callable[[float], str] = "{:.2f}".format,
    names: tuple[str, str] = ("", ""),
    margin: float = 2.6,
    change: bool = False,
    **scale: Any,
) -> Picture:
    """Heat maps by title on one colour scale, `label`: 0 to 1, of a `change` around 0, or `scale`. One alone
    is large, with `names` at its axes; several stand at most 4 side by side. Numbers are in few cells."""
    count, alone = len(maps), len(maps) == 1
    values = np.concatenate([np.ravel(each.values) for each in maps.values()])
    size, bound = np.abs(values[np.isfinite(values)]), 1.0
    if change:  # a few outliers do not widen the scale
        many = size.size > (FEW + 1) ** 2
        bound = (float(np.percentile(size, 99)) if many else float(size.max(initial=0))) or 1.0
    colours = matplotlib.colormaps["RdBu_r" if change else "Blues"].with_extremes(bad="0.8")
    scale = {"cmap": colours, "vmin": -bound if change else 0, "vmax": bound} | scale
    rows, columns = (max(each.values.shape[axis] for each in maps.values()) for axis in (0, 1))
    small = max(rows, columns) <= FEW + 1
    across = min(count, 3 if count <= 9 else 4)
    down = -(-count // across)
    if alone:
        drawn = figure((margin + 0.72 * columns, 2.0 + 0.42 * rows) if small else (9.5, 8.5))
    else:
        width, height = (1.5 + 0.4 * min(n, 9) if small else 3.6 for n in (columns, rows))
        drawn = figure((max(6.4, across * width + 0.9), max(3.0, down * height + 0.4)))
    grid = drawn.subplots(down, across, squeeze=False).ravel()
    for axes in grid[count:]:
        axes.set_visible(False)
    for (title, each), axes in zip(maps.items(), grid, strict=False):
        image = axes.imshow(each.values, aspect="auto", interpolation="nearest", **scale)
        axes.set_title(literal(title, width=34), fontsize=9)
        axes.set(xlabel=names[0], ylabel=names[1])
        if alone or small:
            ticks(axes.xaxis, each.columns, few=small, rotation=35 if small else 90)
            ticks(axes.yaxis, each.rows, few=small, rotation=0)
        else:
            axes.set(xticks=[], yticks=[], xlabel=f"{len(each.columns)} columns")
            axes.set_ylabel(f"{len(each.rows)} rows")
        for row, column in each.framed:
            width = 2 if small else 0.7
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, linewidth=width))
        if each.columns[-1] == GENERAL:
            axes.axvline(len(each.columns) - 1.5, color="black", linewidth=1.5 if small else 0.8)
        dark = image.cmap(image.norm(each.values))[..., :3] @ np.array([0.299, 0.587, 0.114]) < 0.5
        written = each.values if each.numbers is None else each.numbers
        if max(written.shape) <= (FEW + 1 if alone else 8):
            for row, column in np.argwhere(~np.isnan(written)).tolist():
                text, colour = show(written[row, column]), "white" if dark[row, column] else "black"
                how = {"ha": "center", "va": "center", "fontsize": 9 if alone else 6.5, "color": colour}
                axes.text(column, row, text.replace("-", "−"), **how)

    beyond = change and size.max(initial=0) > image.norm.vmax
    shrink = min(1.0, 3.2 / drawn.get_figheight())
    placed: dict[str, Any] = {} if alone else {"aspect": 24, "shrink": shrink, "anchor": (0, 1)}
    placed |= {"label": label, "extend": "both" if beyond else "neither"}
    drawn.colorbar(image, ax=list(grid[:count]), **placed)
    if not told:
        means = {}
        for title, each in maps.items():
            itself = np.eye(*each.values.shape) * (list(each.rows) == list(each.columns))
            means[title] = each.values[np.isfinite(each.values) & (itself == 0)]
        ends = [f"{title} {known.mean():.2f}" for title, known in means.items() if known.size]
        told = f"Heat maps, {' '.join(label.split())}; means: {list_few(ends)}"
    return png(drawn, told=told)
