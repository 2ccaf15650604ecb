"""Figures as SVG elements of a page, with their values on hover and their groups under its filters.

matplotlib draws the figure. Above it lie transparent circles and cells. Each has a `<title>`, which browsers
show on hover, and the script of the page at once. A heat map of many cells has one rectangle with the texts
of all, compressed, which the script alone can show. What belongs to a group of runs has `data-group`."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from PIL import Image

from cpt.core.messages import log_once

log = logging.getLogger(__name__)
MAX_SPOTS = 60  # of a series, so that a page with many curves stays small
MAX_CELLS = 169  # of a heat map, 13 x 13, whose cells are elements of their own
SPOT_RADIUS = 5  # points: what a finger or a mouse hits
PIXELS_PER_INCH = 105  # of a page: an 11-inch figure fills its column, and 9 points are 13 pixels
POINTS_PER_INCH = 72
MISSING_GLYPH = re.compile(r"Glyph \d+ .* missing from")
NO_FONT = (
    "No font of matplotlib has all characters of the names: figures as PNG and PDF show boxes in their "
    "place, the page and SVG show them"
)
IMAGE_PREFIX = "data:image/png;base64,"
SVG_TEXT: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "cpt",  # the same names in each file
}
# Colours of a figure that have other values on dark screens, in report.css.j2. White and "#111111" are not
# among them: numbers in these two are on the colours of a heat map.
PAGE_COLOURS = {
    "#000000": "--ink",
    "#ebebeb": "--grid",
    "#e5e5e5": "--grid",
    "#e6e6e6": "--grid",
    "#bfbfbf": "--faint",
    "#b2b2b2": "--faint",
    "#b3b3b3": "--faint",
    "#999999": "--faint",
    "#595959": "--faint",
    "#0072b2": "--blue",
    "#d55e00": "--vermilion",
    "#009e73": "--green",
    "#cc79a7": "--pink",
    "#e69f00": "--orange",
    "#56b4e9": "--sky",
    "#8833ee": "--violet",
}


@dataclass(frozen=True)
class Spot:
    """A place of a figure, in the coordinates of its axes, and the text that a page shows there."""

    axes: Axes
    x: float
    y: float
    text: str
    group: str = ""
    is_cell: bool = False  # a cell of a heat map, one wide and high, or else a circle


@dataclass(frozen=True)
class CellGrid:
    """The names of rows and columns of a heat map with many cells, and the texts of these [row, column]."""

    axes: Axes
    rows: Sequence[str]
    columns: Sequence[str]
    texts: Sequence[Sequence[str]]
    group: str = ""


@dataclass(frozen=True)
class Front:
    """The line of a Pareto front, and the means (x, y) of all groups, in data coordinates: a page draws it
    through those of the groups shown."""

    line: Line2D
    points: Mapping[str, tuple[float, float]]


class PageFigure(Figure):
    """A figure that knows its spots, grids and fronts, and the groups of runs that its artists show."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spots: list[Spot] = []
        self.grids: list[CellGrid] = []
        self.groups: dict[str, str] = {}  # by the id of an artist
        self.fronts: dict[str, Front] = {}  # by the id of its line


def add_spots(
    axes: Axes, xs: Iterable[float], ys: Iterable[float], texts: Sequence[str], *, group: str = ""
) -> None:
    """Texts at the points of a series that have finite coordinates; if there are many, at MAX_SPOTS of them,
    evenly from the first to the last."""
    figure = cast(PageFigure, axes.get_figure(root=True))
    points = np.column_stack([np.asarray(list(xs), float), np.asarray(list(ys), float)])  # [point, 2]
    drawn = np.flatnonzero(np.isfinite(points).all(axis=1))
    if len(drawn) > MAX_SPOTS:
        chosen = np.linspace(0, len(drawn) - 1, MAX_SPOTS).round().astype(int)
        drawn = drawn[chosen]
    for index in drawn.tolist():
        x, y = points[index].tolist()
        figure.spots.append(Spot(axes, x, y, texts[index], group=group))


def add_cells(
    axes: Axes,
    texts: Sequence[Sequence[str]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    group: str = "",
) -> None:
    """Texts [row, column] over the cells of a heat map, after the names of row and column; none over an
    empty text. More than MAX_CELLS cells share an element."""
    figure = cast(PageFigure, axes.get_figure(root=True))
    if len(rows) * len(columns) > MAX_CELLS:
        figure.grids.append(CellGrid(axes, rows, columns, texts, group=group))
        return
    for row, row_texts in enumerate(texts):
        for column, text in enumerate(row_texts):
            if text:
                cell_text = f"{rows[row]}, {columns[column]}: {text}"
                figure.spots.append(Spot(axes, column, row, cell_text, group=group, is_cell=True))


def assign_group(artists: Iterable[Artist], group: str) -> None:
    """Lets the filters of a page show or hide what belongs to a group of runs."""
    for artist in artists:
        figure = cast(PageFigure, artist.get_figure(root=True))
        identifier = f"group-{len(figure.groups)}"
        artist.set_gid(identifier)
        figure.groups[identifier] = group


def assign_front(line: Line2D, points: Mapping[str, tuple[float, float]]) -> None:
    """Has the filters of a page draw a Pareto front again, from the means `points` of the groups shown."""
    figure = cast(PageFigure, line.get_figure(root=True))
    identifier = f"front-{len(figure.fronts)}"
    line.set_gid(identifier)
    figure.fronts[identifier] = Front(line, points)


def share_groups(legend: Legend, artists: Sequence[Artist]) -> None:
    """Puts the entries of a legend into the groups of the artists that they stand for."""
    for artist, handle, label in zip(artists, legend.legend_handles, legend.get_texts(), strict=True):
        figure = cast(PageFigure, artist.get_figure(root=True))
        group = figure.groups.get(artist.get_gid() or "")
        if group is not None and handle is not None:
            assign_group([handle, label], group)


def save_figure(figure: Figure, buffer: io.BytesIO, **options: Any) -> None:
    """Writes a figure. matplotlib warns of every character that it has no font for, in each picture: one line
    is logged instead."""
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        figure.savefig(buffer, **options)
    for warning in recorded:
        if MISSING_GLYPH.match(str(warning.message)):
            log_once(log, NO_FONT)
        else:
            warnings.warn_explicit(
                warning.message, warning.category, filename=warning.filename, lineno=warning.lineno
            )


def render_svg(figure: PageFigure, *, description: str, prefix: str) -> str:
    """The figure as an element of a page. `prefix` begins its ids, which are unique in a page."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(SVG_TEXT):
        save_figure(figure, buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())
    for child in [*root]:
        if child.tag.endswith("metadata"):
            root.remove(child)

    for element in root.iter():
        group = figure.groups.get(element.get("id", ""))  # by the id that matplotlib knows, without prefix
        if group is not None:
            element.set("data-group", group)
        front = figure.fronts.get(element.get("id", ""))
        if front is not None:
            element.set("data-front", describe_front(figure, front))
        element.tag = remove_namespace(element.tag)
        if element.tag == "image":
            shrink_image(element)
        attributes = {}
        for qualified_name, value in element.attrib.items():
            name = remove_namespace(qualified_name)
            attributes[name] = adapt_value(name, value, prefix)
        element.attrib = attributes

    width, height = figure.get_size_inches().tolist()
    root.attrib = {
        "viewBox": root.attrib["viewBox"],
        "width": f"{width * PIXELS_PER_INCH:.0f}",
        "height": f"{height * PIXELS_PER_INCH:.0f}",
        "style": f"--width: {width * PIXELS_PER_INCH:.0f}px",  # for small screens
        "role": "img",
        "aria-label": description,
    }
    root.append(make_spots(figure))
    return ElementTree.tostring(root, encoding="unicode")


def shrink_image(element: ElementTree.Element) -> None:
    """Writes the PNG in an element with a palette: the PNG of a large heat map becomes a quarter as large.
    One of more than 256 colours stays as it is."""
    for name, value in element.attrib.items():
        if not value.startswith(IMAGE_PREFIX):
            continue
        image = Image.open(io.BytesIO(base64.b64decode(value.removeprefix(IMAGE_PREFIX)))).convert("RGBA")
        pixels = np.asarray(image).reshape(-1, 4)
        colours, indices = np.unique(pixels, axis=0, return_inverse=True)
        if len(colours) > 256:
            continue
        with_palette = Image.fromarray(indices.reshape(image.height, image.width).astype(np.uint8), mode="P")
        with_palette.putpalette(colours.tobytes(), rawmode="RGBA")
        buffer = io.BytesIO()
        with_palette.save(buffer, format="png", optimize=True)
        element.set(name, IMAGE_PREFIX + base64.b64encode(buffer.getvalue()).decode())


def remove_namespace(name: str) -> str:
    """The name as HTML has it: inside a page, SVG needs no namespaces."""
    return name.rpartition("}")[2]


def adapt_value(name: str, value: str, prefix: str) -> str:
    """The value of an attribute: ids with the prefix, colours as variables of the page."""
    if name == "id":
        return prefix + value
    if name == "href" and value.startswith("#"):
        return f"#{prefix}{value[1:]}"
    if name in ("d", "x", "y"):
        return re.sub(r"(\.\d\d)\d+", r"\1", value)  # hundredths of a point; half of a page were digits
    value = value.replace("url(#", f"url(#{prefix}")
    if name != "style":
        return value

    def use_variable(colour: re.Match[str]) -> str:
        variable = PAGE_COLOURS.get(colour[0].lower())
        return f"var({variable})" if variable else colour[0]

    value = re.sub(r"font-family: [^;]*;? ?", "", value)  # that of the page; the list is longer than the text
    return re.sub(r"#[0-9a-fA-F]{6}\b", use_variable, value)


def make_spots(figure: PageFigure) -> ElementTree.Element:
    """The spots and grids of a figure as circles and rectangles, in the points of its SVG."""
    layer = ElementTree.Element("g", {"class": "spots"})
    for grid in figure.grids:
        element = ElementTree.SubElement(layer, "rect", measure_grid(figure, grid))
        element.set("data-cells", pack_grid(grid))
        if grid.group:
            element.set("data-group", grid.group)
    for spot in figure.spots:
        if spot.is_cell:
            element = ElementTree.SubElement(layer, "rect", measure_cell(figure, spot))
        else:
            x, y = find_point(figure, spot.axes, spot.x, spot.y)
            circle = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": str(SPOT_RADIUS)}
            element = ElementTree.SubElement(layer, "circle", circle)
        if spot.group:
            element.set("data-group", spot.group)
        ElementTree.SubElement(element, "title").text = spot.text
    return layer


def measure_cell(figure: PageFigure, spot: Spot) -> dict[str, str]:
    """The attributes of the rectangle over a cell."""
    return measure_rectangle(figure, spot.axes, begin=(spot.x, spot.y), end=(spot.x, spot.y))


def measure_grid(figure: PageFigure, grid: CellGrid) -> dict[str, str]:
    """The attributes of the rectangle over all cells of a heat map."""
    last_cell = (len(grid.columns) - 1, len(grid.rows) - 1)
    return measure_rectangle(figure, grid.axes, begin=(0, 0), end=last_cell)


def measure_rectangle(
    figure: PageFigure, axes: Axes, *, begin: tuple[float, float], end: tuple[float, float]
) -> dict[str, str]:
    """The attributes of the rectangle from the cell (column, row) `begin` to the cell `end`, both included.
    The rows of a heat map are counted from its top."""
    x, y = find_point(figure, axes, begin[0] - 0.5, begin[1] - 0.5)
    end_x, end_y = find_point(figure, axes, end[0] + 0.5, end[1] + 0.5)
    return {
        "x": f"{x:.1f}",
        "y": f"{y:.1f}",
        "width": f"{end_x - x:.1f}",
        "height": f"{end_y - y:.1f}",
    }


def pack_grid(grid: CellGrid) -> str:
    """Names and texts of a grid as base64 of compressed JSON, which report.js.j2 reads. The texts are cut at
    their first blank, and the two halves joined separately: compressed they are a fifth smaller."""
    numbers = []
    details = []
    for row_texts in grid.texts:
        for text in row_texts:
            number, _, detail = text.partition(" ")
            numbers.append(number)
            details.append(detail)
    content = {
        "rows": list(grid.rows),
        "columns": list(grid.columns),
        "numbers": ";".join(numbers),
        "details": ";".join(details),
    }
    packed = zlib.compress(json.dumps(content, ensure_ascii=False).encode(), level=9)
    return base64.b64encode(packed).decode()


def describe_front(figure: PageFigure, front: Front) -> str:
    """What report.js.j2 draws a front from, as JSON: the means [group, x, y], and the right and the top end
    of the line. Coordinates are points of the SVG."""
    axes = cast(Axes, front.line.axes)
    xs, ys = np.asarray(front.line.get_data(), float)
    right, top = find_point(figure, axes, xs[-1], ys[0])
    points = []
    for name, (x, y) in front.points.items():
        point_x, point_y = find_point(figure, axes, x, y)
        points.append([name, round(point_x, 2), round(point_y, 2)])
    content = {"points": points, "right": round(right, 2), "top": round(top, 2)}
    return json.dumps(content, ensure_ascii=False)


def find_point(figure: PageFigure, axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Coordinates of axes in the points of the SVG, which counts from the top left corner."""
    x_pixels, y_pixels = axes.transData.transform((x, y)).tolist()
    points_per_pixel = POINTS_PER_INCH / figure.dpi
    height = float(figure.get_figheight()) * POINTS_PER_INCH
    return x_pixels * points_per_pixel, height - y_pixels * points_per_pixel
