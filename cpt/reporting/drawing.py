"""What all figures share: colours, axes, heat maps, and their PNG, SVG and PDF files.

Colours are safe for the colour-blind: ColorBrewer's RdBu for changes, those of Okabe and Ito (2008) for
series, with a violet for their yellow. PNG's text chunk "Description" says what a picture shows."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Affine2D
from PIL import Image
from PIL.PngImagePlugin import PngImageFile, PngInfo

from cpt.core.messages import count_noun
from cpt.data.sources.base import GENERAL
from cpt.reporting.formats import MAX_LISTED, Format, format_signed, list_names, shorten, strip_controls
from cpt.reporting.svg import SVG_TEXT, PageFigure, add_cells, assign_group, save_figure

SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8833EE")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES = ("-", "--", ":")
NUM_COLOURS_OF_MANY = 33  # of many cells: the image is a quarter as large as with 256
LARGE_TICK = 1e6  # from which a number is too long for its tick
MAX_TICKS = 30  # labels at an axis with many names
# Of all heat maps of a figure. The numbers of more cells, which a page shows on hover, have fewer digits: in
# full they would be most of the page.
MAX_EXACT_CELLS = 200_000
VECTORS: dict[Any, Any] = {**SVG_TEXT, "pdf.fonttype": 42}  # as publishers require
CELL_INK = "#111111"  # dark text and frames on the colours of a heat map, the same on dark screens
logging.getLogger("fontTools").setLevel(logging.WARNING)  # of each PDF it logs every table of a font


class Picture(bytes):
    """A PNG, with its figure."""

    figure: PageFigure

    def save(self, kind: str) -> bytes:
        """The figure as `svg` or `pdf`, the same bytes each time."""
        buffer = io.BytesIO()
        date = {"svg": "Date", "pdf": "CreationDate"}[kind]
        with matplotlib.rc_context(VECTORS):
            save_figure(self.figure, buffer, format=kind, metadata={date: None})
        return buffer.getvalue()


@dataclass(frozen=True)
class SeriesStyle:
    """How a series is drawn."""

    colour: str
    marker: str
    dashes: str


def make_figure(size: tuple[float, float]) -> PageFigure:
    """An empty figure of a size in inches, not one of pyplot's."""
    return PageFigure(figsize=size, dpi=130, layout="constrained")


def make_png(figure: PageFigure, *, description: str) -> Picture:
    """The figure in at most 256 colours, a third of the size."""
    full_colour = io.BytesIO()
    save_figure(figure, full_colour, format="png")
    text = PngInfo()
    text.add_itxt("Description", description)
    image = Image.open(full_colour).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True, pnginfo=text)

    figure.set_layout_engine("none")  # everything is laid out by now
    picture = Picture(buffer.getvalue())
    picture.figure = figure
    return picture


def read_description(picture: bytes) -> str:
    return str(PngImageFile(io.BytesIO(picture)).text.get("Description", ""))


def choose_series_style(index: int) -> SeriesStyle:
    """Colour, marker and dashes of a series; 72 indices differ in the first two, neighbours in both."""
    colour = index % len(SERIES)
    turn = index // len(SERIES)
    return SeriesStyle(
        colour=SERIES[colour],
        marker=MARKERS[(index + 2 * turn) % len(MARKERS)],
        dashes=DASHES[turn % len(DASHES)],
    )


def escape_label(name: str, *, width: int) -> str:
    """The name as matplotlib shows it unchanged: a dollar sign would start a formula, and a series whose name
    begins with an underscore would not be in the legend."""
    label = shorten(strip_controls(name), width=width).replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def choose_apart(positions: Sequence[float], *, distance: float) -> list[int]:
    """The indices of ascending positions that are at least so far from the chosen one before.

    >>> choose_apart([0.0, 0.1, 0.5, 2.0], distance=0.5)
    [0, 2, 3]
    """
    chosen: list[int] = []
    for index, position in enumerate(positions):
        if not chosen or position - positions[chosen[-1]] >= distance:
            chosen.append(index)
    return chosen


def set_ticks(axis: Axis, names: Sequence[str], *, is_small: bool, rotation: int) -> None:
    """Names as labels; of many, at most MAX_TICKS and the last."""
    step = 1 if is_small else math.ceil(len(names) / MAX_TICKS)
    positions: list[int] = []
    if names:
        last = len(names) - 1
        positions = [*range(0, last - step // 2, step), last]
    labels = [escape_label(names[position], width=22) for position in positions]
    fontsize = 9 if is_small else 7
    if 0 < rotation < 90:
        axis.set_ticks(
            positions, labels, rotation=rotation, fontsize=fontsize, rotation_mode="anchor", ha="right"
        )
    else:
        axis.set_ticks(positions, labels, rotation=rotation, fontsize=fontsize)


def label_logarithm(axis: Axis, values: np.ndarray) -> None:
    """Ticks written out, also where the values span less than a decade."""
    finite = values[np.isfinite(values)].astype(float)
    is_narrow = finite.max(initial=0) < 5 * finite.min(initial=np.inf)
    axis.set_major_locator(MaxNLocator(6) if is_narrow else LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))


def format_tick(value: float) -> str:
    """The number written out; with a power of ten from a million on."""
    return f"{value:,.10g}" if abs(value) < LARGE_TICK else f"{value:.4g}"


def list_descriptions(descriptions: Iterable[str]) -> str:
    """The parts of a picture's description, of many the first and last."""
    return f"{list_names(list(descriptions), separator='; ') or 'None'}."


@dataclass(frozen=True)
class HeatMap:
    """A matrix with the names of its rows and columns."""

    values: np.ndarray
    rows: Sequence[str]
    columns: Sequence[str]
    framed: Sequence[tuple[int, int]] = ()  # cells (row, column)
    numbers: np.ndarray | None = None  # in the cells, if not the values

    @property
    def cell_numbers(self) -> np.ndarray:
        """The numbers that are written into the cells."""
        return self.values if self.numbers is None else self.numbers

    @property
    def described_values(self) -> np.ndarray:
        """The finite values; without the diagonal if rows and columns are the same."""
        is_shown = np.isfinite(self.values)
        if list(self.rows) == list(self.columns):
            is_shown &= np.eye(*self.values.shape) == 0
        return self.values[is_shown]


@dataclass(frozen=True)
class ColourScale:
    """The ends of the colour scale (None: those of the values), and the name of its colours."""

    low: float | None
    high: float | None
    colours: str = "Blues"
    has_pointed_ends: bool = False  # some values lie beyond the ends


SHARES = ColourScale(low=0, high=1.0)


def scale_around_zero(maps: Mapping[str, HeatMap]) -> ColourScale:
    """The scale of changes, red above 0. Among many cells a few outliers do not widen it."""
    values = np.concatenate([np.ravel(heat_map.values) for heat_map in maps.values()])
    sizes = np.abs(values[np.isfinite(values)])
    if sizes.size > (MAX_LISTED + 1) ** 2:
        bound = float(np.percentile(sizes, 99))
    else:
        bound = float(sizes.max(initial=0))
    bound = bound or 1.0  # nothing changed
    has_outliers = bool(sizes.max(initial=0) > bound)
    return ColourScale(low=-bound, high=bound, colours="RdBu_r", has_pointed_ends=has_outliers)


def draw_heat_maps(
    maps: Mapping[str, HeatMap],
    *,
    label: str,
    description: str = "",
    format_value: Format = "{:.2f}".format,
    axis_names: tuple[str, str] = ("", ""),
    margin: float = 2.6,
    scale: ColourScale = SHARES,
    are_groups: bool = False,
) -> Picture:
    """Heat maps by title on one colour scale, `label`. One alone is large, with `axis_names`; several stand
    at most 4 side by side. Numbers are in few cells; a page shows those of all on hover. `margin`: inches for
    the names of a large one's rows. `are_groups`: titles are those of groups of runs, which a page can
    filter."""
    num_rows = max(heat_map.values.shape[0] for heat_map in maps.values())
    num_columns = max(heat_map.values.shape[1] for heat_map in maps.values())
    is_single = len(maps) == 1
    is_small = max(num_rows, num_columns) <= MAX_LISTED + 1
    if is_single:
        size = (margin + 0.72 * num_columns, 2.0 + 0.42 * num_rows) if is_small else (9.5, 8.5)
        figure = make_figure(size)
        panels = [figure.subplots()]
    else:
        figure, panels = open_panels(len(maps), num_rows=num_rows, num_columns=num_columns, is_small=is_small)

    max_written = MAX_LISTED + 1 if is_single else 8  # rows or columns of a map with numbers in its cells
    num_cells = sum(heat_map.values.size for heat_map in maps.values())
    format_text = format_value if num_cells <= MAX_EXACT_CELLS else "{:.1f}".format
    colours = matplotlib.colormaps[scale.colours].with_extremes(bad="0.8")
    if not is_small:
        colours = colours.resampled(NUM_COLOURS_OF_MANY)
    for (title, heat_map), axes in zip(maps.items(), panels, strict=True):
        image = axes.imshow(
            heat_map.values,
            aspect="auto",
            interpolation="none",  # a pixel for each cell, also in SVG and PDF
            cmap=colours,
            vmin=scale.low,
            vmax=scale.high,
        )
        axes.set_title(escape_label(title, width=34), fontsize=9)
        axes.set(xlabel=axis_names[0], ylabel=axis_names[1])
        if is_single or is_small:
            set_ticks(axes.xaxis, heat_map.columns, is_small=is_small, rotation=35 if is_small else 90)
            set_ticks(axes.yaxis, heat_map.rows, is_small=is_small, rotation=0)
        else:
            axes.set(xticks=[], yticks=[], xlabel=count_noun(len(heat_map.columns), "column"))
            axes.set_ylabel(count_noun(len(heat_map.rows), "row"))
        frame_cells(axes, heat_map, is_small=is_small)
        if max(heat_map.cell_numbers.shape) <= max_written:
            write_numbers(axes, image, heat_map, format_value, fontsize=9 if is_single else 6.5)
        group = title if are_groups else ""
        add_cells(
            axes,
            describe_cells(heat_map, format_text),
            rows=[strip_controls(name) for name in heat_map.rows],
            columns=[strip_controls(name) for name in heat_map.columns],
            group=group,
        )
        if group:
            assign_group([axes], group)

    add_colour_bar(figure, image, panels, label=label, scale=scale)
    return make_png(figure, description=description or describe_means(maps, label))


def open_panels(
    num_maps: int, *, num_rows: int, num_columns: int, is_small: bool
) -> tuple[PageFigure, list[Axes]]:
    """A figure with axes for several heat maps, at most four side by side."""
    across = min(num_maps, 3 if num_maps <= 9 else 4)
    down = math.ceil(num_maps / across)
    width = 1.5 + 0.4 * min(num_columns, 9) if is_small else 3.6
    height = 1.5 + 0.4 * min(num_rows, 9) if is_small else 3.6
    figure = make_figure((max(6.4, across * width + 0.9), max(3.0, down * height + 0.4)))
    panels = figure.subplots(down, across, squeeze=False).ravel().tolist()
    for unused in panels[num_maps:]:
        unused.set_visible(False)
    return figure, panels[:num_maps]


def frame_cells(axes: Axes, heat_map: HeatMap, *, is_small: bool) -> None:
    """Frames, and a line before the column of general text, which is the last."""
    frames = []
    for row, column in heat_map.framed:
        move = Affine2D().translate(column - 0.5, row - 0.5)
        frames.append(Path.unit_rectangle().transformed(move))
    if frames:  # one path: of hundreds of domains, an element for each would fill a page
        outline = Path.make_compound_path(*frames)
        linewidth = 2 if is_small else 0.7
        axes.add_patch(PathPatch(outline, fill=False, linewidth=linewidth, edgecolor=CELL_INK))
    if heat_map.columns[-1] == GENERAL:
        border = len(heat_map.columns) - 1.5
        axes.axvline(border, color=CELL_INK, linewidth=1.5 if is_small else 0.8)


def write_numbers(
    axes: Axes, image: AxesImage, heat_map: HeatMap, format_value: Format, *, fontsize: float
) -> None:
    """Writes the numbers into the cells, in white where the colour is dark."""
    colours = np.asarray(image.cmap(image.norm(heat_map.values)))[..., :3]
    luminance = colours @ np.array([0.299, 0.587, 0.114])
    for row, column in np.argwhere(~np.isnan(heat_map.cell_numbers)).tolist():
        axes.text(
            column,
            row,
            format_value(heat_map.cell_numbers[row, column]).replace("-", "−"),
            ha="center",
            va="center",
            fontsize=fontsize,
            color="white" if luminance[row, column] < 0.5 else CELL_INK,
        )


def describe_cells(heat_map: HeatMap, format_value: Format) -> list[list[str]]:
    """The text of each cell [row, column]: its number and, in a map whose numbers are not the values, the
    value in nats, if there is one; empty without a number."""
    texts = []
    for numbers, values in zip(heat_map.cell_numbers.tolist(), heat_map.values.tolist(), strict=True):
        row_texts = []
        for number, value in zip(numbers, values, strict=True):
            text = "" if math.isnan(number) else format_value(number)
            if text and heat_map.numbers is not None and not math.isnan(value):
                text += f" ({format_signed(value)} nats)"
            row_texts.append(text)
        texts.append(row_texts)
    return texts


def add_colour_bar(
    figure: Figure,
    image: AxesImage,
    panels: Sequence[Axes],
    *,
    label: str,
    scale: ColourScale,
) -> None:
    """Adds the colour bar, a small one to several panels."""
    extend = "both" if scale.has_pointed_ends else "neither"
    if len(panels) == 1:
        figure.colorbar(image, ax=panels, label=label, extend=extend)
    else:
        shrink = min(1.0, 3.2 / figure.get_figheight())
        figure.colorbar(image, ax=panels, label=label, extend=extend, aspect=24, shrink=shrink, anchor=(0, 1))


def describe_means(maps: Mapping[str, HeatMap], label: str) -> str:
    """The mean of each heat map; without a diagonal of ones."""
    means = []
    for title, heat_map in maps.items():
        values = heat_map.described_values
        if values.size:
            means.append(f"{title} {values.mean():.2f}")
    return f"Heat maps, {' '.join(label.split())}; means: {list_descriptions(means)}"
