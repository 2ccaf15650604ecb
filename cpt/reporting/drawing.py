"""What all pictures share: figures without pyplot's state, marks, ticks, panels, and small PNG files.

Colours are safe for the colour-blind: the diverging map is ColorBrewer's RdBu, the series are those of Okabe
and Ito (2008), with a violet for their yellow, which is too pale for lines on white. A picture says in words
what it shows: PNG's text chunk "Description".
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt.reporting.frames import shorten
from cpt.reporting.vectors import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

FEW = 12  # up to so many domains are told apart one by one; more are shown as a crowd
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8833EE")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", ":")


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=size, dpi=130, layout="constrained")


def png(drawn: Figure, *, told: str, marks: Mapping[str, str] | None = None) -> Picture:
    """The figure as PNG in at most 256 colours, a third of the size, with what it shows in words; `marks`
    says the same of each group whose artists have its name: see cpt.reporting.vectors."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    buffer, small, text = io.BytesIO(), io.BytesIO(), PngInfo()
    drawn.savefig(buffer, format="png")
    text.add_itxt("Description", told)
    image = Image.open(buffer).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True, pnginfo=text)
    return Picture.of(small.getvalue(), drawn, marks or {})


def description(picture: bytes) -> str:
    """What a picture says that it shows; "" if it says nothing."""
    from PIL import Image

    return str(Image.open(io.BytesIO(picture)).text.get("Description", ""))


def style(place: int) -> dict[str, str]:
    """Colour, marker and dashes of a series; 72 differ in the first two, neighbours in both."""
    colour, turn = place % len(SERIES), place // len(SERIES)
    marker = MARKERS[(place + 2 * turn) % len(MARKERS)]
    return {"color": SERIES[colour], "marker": marker, "linestyle": DASHES[turn % len(DASHES)]}


def literal(name: str, *, width: int) -> str:
    """The name as matplotlib shows it unchanged; a dollar sign would start a formula."""
    return shorten(name, width=width).replace("$", r"\$")


def ticks(axis: Axis, *, names: Sequence[str], few: bool, rotation: int, most: int = 30) -> None:
    """Names as labels; of many, at most so many and the last."""
    step = 1 if few else -(-len(names) // most)
    places = [*range(0, len(names) - 1 - step // 2, step), len(names) - 1] if names else []
    axis.set_ticks(places, [literal(names[place], width=22) for place in places])
    aligned = {"rotation_mode": "anchor", "ha": "right"} if 0 < rotation < 90 else {}
    for label in axis.get_ticklabels():
        label.set(rotation=rotation, fontsize=9 if few else 7, **aligned)


def plain_logarithm(axis: Axis, values: np.ndarray) -> None:
    """Ticks written out, also where the values span less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    known = values[np.isfinite(values)]
    narrow = known.max(initial=0) < 5 * known.min(initial=np.inf)
    axis.set_major_locator(MaxNLocator(6) if narrow else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def diverging() -> Colormap:
    import matplotlib

    return matplotlib.colormaps["RdBu_r"].with_extremes(bad="0.75")


def sequential() -> Colormap:
    import matplotlib

    return matplotlib.colormaps["Blues"].with_extremes(bad="0.85")


def limits(change: np.ndarray) -> dict[str, float]:
    """Limits around 0 that a few outliers do not widen."""
    size = np.abs(change[np.isfinite(change)])
    bound = float(np.percentile(size, 99)) if size.size > (FEW + 1) ** 2 else float(size.max(initial=0))
    return {"vmin": -(bound or 1.0), "vmax": bound or 1.0}


def direct_labels(axes: Axes, ends: Mapping[str, tuple[np.ndarray, str]]) -> None:
    """Names at the right of their lines (values, colour), moved apart where they would overlap."""
    low, high = np.log(axes.get_ylim())
    known = {name: line[np.isfinite(line)][-1] for name, (line, _) in ends.items() if np.isfinite(line).any()}
    wanted = {name: (np.log(value) - low) / (high - low) for name, value in known.items()}
    for name, height in space_heights(wanted, gap=0.052).items():
        axes.annotate(
            literal(name, width=30),
            xy=(1, wanted[name]),
            xytext=(1.06, height),
            xycoords="axes fraction",
            va="center",
            fontsize=9,
            color=ends[name][1],
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def space_heights(wanted: Mapping[str, float], *, gap: float) -> dict[str, float]:
    """Heights at least `gap` apart, close to the wanted ones, within 0..1 where there is room."""
    placed: dict[str, float] = {}
    below = -np.inf
    for name in sorted(wanted, key=wanted.get):
        below = placed[name] = max(wanted[name], below + gap)
    above = 1 + gap
    for name in reversed(list(placed)):
        above = placed[name] = min(placed[name], above - gap)
    return placed


def panels(shapes: Mapping[str, tuple[int, int]], *, each: float) -> tuple[Figure, Iterator[Axes]]:
    """A figure with room for a heat map per name, of so many rows and columns, at most 3 or 4 side by side;
    `each` is the size of a cell in inches where cells are few."""
    across = min(len(shapes), 3 if len(shapes) <= 9 else 4) or 1
    down = -(-len(shapes) // across) or 1
    each = each if len(shapes) <= FEW else each / 2
    rows, columns = (max((shape[axis] for shape in shapes.values()), default=1) for axis in (0, 1))
    width, height = (1.5 + each * min(size, 9) if size <= FEW + 1 else 3.6 for size in (columns, rows))
    drawn = figure((max(6.4, across * width + 0.9), max(3.0, down * height + 0.4)))
    grid = drawn.subplots(down, across, squeeze=False).ravel()
    for axes in grid[len(shapes) :]:
        axes.set_visible(False)
    return drawn, iter(grid)


def panel(
    axes: Axes, values: np.ndarray, *, title: str, rows: Sequence[str], columns: Sequence[str], **how: Any
) -> AxesImage:
    """A heat map with names at its sides, or without where they are many."""
    few = max(values.shape, default=0) <= FEW + 1
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **how)
    axes.set_title(literal(title, width=34), fontsize=9)
    ticks(axes.xaxis, names=columns if few else [], few=few, rotation=35)
    ticks(axes.yaxis, names=rows if few else [], few=few, rotation=0)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_fontsize(7)
    if not few:
        axes.set(xlabel=f"{len(columns)} columns", ylabel=f"{len(rows)} rows")
    return image


def draw_heat(
    values: np.ndarray,
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    few: bool,
    label: str,
    margin: float = 2.6,
    extend: str = "neither",
    **how: Any,
) -> tuple[Figure, Axes]:
    """A heat map as a picture of its own, `label` beside its colour scale; large unless few."""
    drawn = figure((margin + 0.72 * len(columns), 2.0 + 0.42 * len(rows)) if few else (9.5, 8.5))
    axes = drawn.add_subplot()
    image = axes.imshow(values, aspect="auto", interpolation="nearest", **how)
    drawn.colorbar(image, ax=axes, extend=extend, label=label)
    ticks(axes.xaxis, names=columns, few=few, rotation=35 if few else 90)
    ticks(axes.yaxis, names=rows, few=few, rotation=0)
    return drawn, axes


def draw_scores(
    A: np.ndarray,  # noqa: N803
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    across: str,
    told: str,
) -> bytes:
    """Shares of 1, [row, column], as percentages on a heat map, nan where there is none; the row that a
    column is called as is marked."""
    small = max(len(rows), len(columns)) <= FEW + 1
    how = {"cmap": sequential(), "few": small, "label": "score, % (dark: better)"}
    drawn, axes = draw_heat(100 * A, rows=rows, columns=columns, **how)
    axes.set(xlabel=across, ylabel="model after stage")
    middle = (np.nanmin(A) + np.nanmax(A)) / 2 if len(A) else 0
    for (row, column), value in np.ndenumerate(A if small else A[:0]):
        if np.isfinite(value):
            colour = "white" if value > middle else "black"
            axes.text(column, row, f"{100 * value:.1f}", ha="center", va="center", fontsize=9, color=colour)
    own = [(list(rows).index(name), column) for column, name in enumerate(columns) if name in rows]
    frame_cells(axes, own, width=2 if small else 0.7)
    return png(drawn, told=told)


def frame_cells(axes: Axes, cells: Iterable[tuple[int, int]], *, width: float) -> None:
    """A frame round each (row, column)."""
    from matplotlib.patches import Rectangle

    for row, column in cells:
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, linewidth=width))


def write_numbers(axes: Axes, values: np.ndarray, *, white: np.ndarray, most: int, sign: str = "") -> None:
    """Values written into their cells, in white where that is asked for; nothing where cells are many."""
    for (row, column), value in np.ndenumerate(values if max(values.shape) <= most else values[:0]):
        if np.isfinite(value):
            colour = "white" if white[row, column] else "black"
            text = f"{value:{sign}.2f}".replace("-", "−")
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
