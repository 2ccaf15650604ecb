"""Figures of a page: values on hover, groups for its filters, and nothing but text from a name."""

import base64
import io
import itertools
import json
import re
import zlib
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from cpt.reporting import drawing
from cpt.reporting.drawing import HeatMap, draw_heat_maps, make_figure, make_png
from cpt.reporting.page import Block, render_html
from cpt.reporting.run_figures import CURVES
from cpt.reporting.run_page import write_report
from cpt.reporting.svg import (
    IMAGE_PREFIX,
    MAX_SPOTS,
    add_spots,
    assign_group,
    render_svg,
    share_groups,
    shrink_image,
)
from tests.support.example_runs import make_scores

VALUES = np.array([[1.0, 2.0, np.nan], [3.0, 4.0, 5.0]])


def parse(figure):
    return ElementTree.fromstring(render_svg(figure, description="d", prefix="p-"))


def list_titles(root):
    return [title.text for title in root.iter("title")]


def test_each_measured_cell_of_a_heat_map_has_its_value_where_it_is_drawn():
    picture = draw_heat_maps({"": HeatMap(VALUES, ["base", "law"], ["law", "food", "space"])}, label="loss")
    root = parse(picture.figure)
    assert list_titles(root) == [
        "base, law: 1.00",
        "base, food: 2.00",
        "law, law: 3.00",
        "law, food: 4.00",
        "law, space: 5.00",
    ]

    cells = list(root[-1].iter("rect"))
    numbers = [text for text in root.iter("text") if "middle" in text.get("style", "") and "." in text.text]
    for cell, number in zip(cells, numbers, strict=True):
        x = float(number.get("x"))
        y = float(number.get("y"))
        begin_x, begin_y, width, height = (float(cell.get(name)) for name in ("x", "y", "width", "height"))
        assert begin_x < x < begin_x + width and begin_y < y < begin_y + height


def read_grid(element):
    return json.loads(zlib.decompress(base64.b64decode(element.get("data-cells"))))


def test_the_cells_of_a_large_heat_map_share_one_element_with_all_their_values(monkeypatch):
    changes = np.arange(14.0 * 14).reshape(14, 14)
    changes[0, 1] = np.nan
    names = [f"d{number}" for number in range(14)]
    maps = {"": HeatMap(changes, names, names, numbers=changes + 0.5)}
    root = parse(draw_heat_maps(maps, label="loss").figure)
    (rectangle,) = root[-1]
    grid = read_grid(rectangle)
    assert grid["rows"] == grid["columns"] == names and not list_titles(root)
    assert grid["numbers"].split(";")[:3] == ["0.50", "", "2.50"]
    assert grid["details"].split(";")[:3] == ["(+0.000 nats)", "", "(+2.000 nats)"]
    scale_x, _, _, scale_y, x, y = map(
        float, re.findall(r"[\d.]+", next(root.iter("image")).get("transform"))
    )
    sides = [float(rectangle.get(name)) for name in ("x", "y", "width", "height")]
    np.testing.assert_allclose(sides, [x, y, 14 * scale_x, 14 * scale_y], atol=0.1)

    monkeypatch.setattr(drawing, "MAX_EXACT_CELLS", 195)
    (rectangle,) = parse(draw_heat_maps(maps, label="loss").figure)[-1]
    assert read_grid(rectangle)["numbers"].split(";")[2] == "2.5"


def test_the_image_of_a_heat_map_has_a_palette_and_the_colours_that_it_had():
    shades = np.random.default_rng(0).integers(0, 33, (40, 40))
    pixels = np.stack([shades * 7, 255 - shades, shades, np.full_like(shades, 255)], axis=-1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    element = ElementTree.Element(
        "image", {"href": IMAGE_PREFIX + base64.b64encode(buffer.getvalue()).decode()}
    )
    shrink_image(element)
    shrunk = base64.b64decode(element.get("href").removeprefix(IMAGE_PREFIX))
    assert len(shrunk) < len(buffer.getvalue())
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(shrunk)).convert("RGBA")), pixels)


def test_a_point_has_its_text_where_it_is_drawn_and_of_many_points_some_have():
    figure = make_figure((4, 3))
    axes = figure.add_subplot(yscale="log")
    axes.plot([0, 1, 2], [1, 10, 100], marker="o", linestyle="")
    add_spots(axes, [0, 1, 2, 3], [1, 10, 100, np.nan], ["a", "b", "c", "not measured"])
    make_png(figure, description="")
    root = parse(figure)
    assert list_titles(root) == ["a", "b", "c"]
    marks = [(float(mark.get("x")), float(mark.get("y"))) for mark in root.iter("use")][-3:]
    spots = [(float(spot.get("cx")), float(spot.get("cy"))) for spot in root.iter("circle")]
    np.testing.assert_allclose(spots, marks, atol=0.1)

    figure.spots.clear()
    add_spots(axes, range(10_000), range(1, 10_001), [str(number) for number in range(10_000)])
    texts = [spot.text for spot in figure.spots]
    assert len(texts) == MAX_SPOTS and texts[0] == "0" and texts[-1] == "9999"


def test_lines_points_and_legend_of_a_group_belong_to_it():
    figure = make_figure((4, 3))
    axes = figure.add_subplot()
    lines = []
    for group in ("ncl", "das"):
        lines += axes.plot([0, 1], [1, 2], label=f"{group} (4)")
        assign_group(lines[-1:], group)
        add_spots(axes, [0], [1], [group], group=group)
    share_groups(figure.legend(), lines)
    root = parse(figure)
    for group in ("ncl", "das"):
        marks = [element for element in root.iter() if element.get("data-group") == group]
        names = [mark for mark in marks if mark.find("text") is not None]
        assert len(marks) == 4 and len(names) == 1  # line, its legend, its name, its spot
        assert names[0].find("text").text == f"{group} (4)"


def test_pictures_of_a_page_share_no_id_and_load_nothing():
    names = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>']
    picture = draw_heat_maps({names[0]: HeatMap(VALUES[:, :2], names, names)}, label="loss")
    html = render_html([Block(title=names[1], picture=picture), Block(picture=picture)], title="t")
    ids = re.findall(r' id="([^"]*)"', html)
    assert ids and len(set(ids)) == len(ids)
    references = set(re.findall(r'url\(#([^)]*)\)| href="#([^"]*)"', html))
    assert {first or second for first, second in references} <= set(ids)
    assert not re.search(r"https?:|url\((?!#)|xmlns", html) and html.count("<script") == 1
    assert "<img" not in html and "onerror=alert(1)&gt;, &lt;script" in html


def test_a_picture_of_a_page_follows_a_dark_screen_and_its_heat_map_does_not():
    picture = draw_heat_maps({"": HeatMap(VALUES, ["base", "law"], ["law", "food", "general"])}, label="loss")
    svg = render_svg(picture.figure, description="", prefix="")
    assert "var(--ink)" in svg and "#000000" not in svg
    assert "#111111" in svg  # numbers on light cells


@pytest.mark.slow
def test_the_page_of_a_run_of_236_domains_is_smaller_than_a_megabyte_and_a_half(tmp_path):
    order = [f"domain {number}" for number in range(236)]
    nll = np.random.default_rng(0).normal(4, 0.3, (237, 237)).round(4)
    make_scores(order=order, nll=nll).save(tmp_path / "scores.json")
    lines = ["step,name,value"]
    for domain, term, step in itertools.product(order, CURVES, range(0, 10, 2)):
        lines.append(f"{step},train/{term}/{domain},{4.5 - step / 10}")
    (tmp_path / "metrics.csv").write_text("\n".join(lines))
    assert write_report(tmp_path).stat().st_size < 1.5e6
