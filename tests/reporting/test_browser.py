"""The tables of a page in a real browser, opened from disk: sorted and filtered."""

import base64
import hashlib
import html
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from cpt.reporting.comparison_figures import draw_plane
from cpt.reporting.drawing import HeatMap, draw_heat_maps, make_figure, make_png
from cpt.reporting.page import Block, PageHead, write_page
from cpt.reporting.svg import add_spots, assign_group, render_svg

KNOWN = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, KNOWN)), "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BROWSER, reason="apt-get install chromium")]
OPTIONS = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=5000"
FRAME = (  # shows what the page in it sends
    '<pre></pre><script>onmessage = told => document.querySelector("pre").textContent = told.data</script>'
    '<iframe src="page.html" width="1280" height="800"></iframe>'
)
ROWS = [  # in no order by any column
    ["ncl", "tiny", "−0.5 ± 0.1", "1,200", "1.2e+05", "yes"],
    ["Das + migu", "tiny", "10.2 [9.0, 11.5]", "–", "9.1e+04", "no"],
    ["ewc", "large", "–", "55", "inf", "–"],
    ["das (order 10)", "large", "nan", "900", "2.0e+05", "no"],
    ["das (order 2)", "tiny", "9.75", "3", "–", "yes"],
]
HEAD = ["group", "model", "LC", "stored", "FLOPs", "domain known"]


SCRIPT = """
const all = selector => [...document.querySelectorAll(selector)];
const column = (place, table = 0) => [...all("table")[table].tBodies[0].rows]
  .filter(row => row.checkVisibility()).map(row => row.cells[place].textContent);
const click = place => {
  const head = all("table")[0].tHead.rows[0].cells[place];
  head.querySelector("button").click();
  return [head.ariaSort, column(place)];
};
const sorted = [0, 2, 4].map(place => [click(place), click(place), click(place)]);
const box = document.querySelector("input[type=search]"), told = document.querySelector("output");
const searched = ["das -migu", "1,200", ""].map(query => {
  box.value = query;
  box.dispatchEvent(new Event("input"));
  return [column(0), column(0, 1).length, told.textContent];
});
for (const text of ["das", "ewc", "large"])
  all(".page label").find(each => each.textContent.trim() == text).querySelector("input").click();
const ticked = [column(0), column(0, 1)];
document.querySelector(".page button").click();
return [sorted, searched, ticked, column(0)];
"""


def run_in_page(tmp_path, blocks, script, **options):
    """What a script returns that runs in a page of the blocks, which is opened from disk."""
    probe = f"parent.postMessage(JSON.stringify(await (async () => {{{script}}})()), '*')"
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    path = write_page(blocks, title="Comparison of runs", stem=tmp_path / "page", **options)
    text = path.read_text().replace("script-src", f"script-src 'sha256-{digest}'")
    path.write_text(text.replace("</body>", f"<script type=module>{probe}</script></body>"))
    (tmp_path / "frame.html").write_text(FRAME)
    command = [BROWSER, *OPTIONS.split(), f"--user-data-dir={tmp_path}/profile"]
    command += ["--dump-dom", (tmp_path / "frame.html").as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return json.loads(html.unescape(re.search(r"<pre>(.*)</pre>", process.stdout, re.S)[1]))


def test_tables_sort_by_words_and_by_numbers_and_are_filtered_together_by_a_search_and_boxes(tmp_path):
    facets = [{"method": row[0].split()[0].lower(), "model": row[1]} for row in ROWS]
    blocks = [
        Block(
            title="masked: pubmed", head=HEAD, cells=ROWS, num_word_columns=2, is_filtered=True, facets=facets
        ),
        Block(title="Differences: acl", head=HEAD[:2], cells=[[r[0], "3"] for r in ROWS], is_filtered=True),
    ]
    sorted_columns, searched, ticked, plain = run_in_page(tmp_path, blocks, SCRIPT)
    expected = {
        0: (["das (order 2)", "das (order 10)", "Das + migu", "ewc", "ncl"], []),
        2: (["−0.5 ± 0.1", "9.75", "10.2 [9.0, 11.5]"], ["–", "nan"]),
        4: (["9.1e+04", "1.2e+05", "2.0e+05", "inf"], ["–"]),
    }
    for (column, (ascending, unknown)), clicks in zip(expected.items(), sorted_columns, strict=True):
        sorted_up = ["ascending", ascending + unknown]
        sorted_down = ["descending", ascending[::-1] + unknown]
        assert clicks == [sorted_up, sorted_down, ["none", [row[column] for row in ROWS]]]
    names = [row[0] for row in ROWS]
    assert [result[:2] for result in searched] == [[names[3:], 2], [[], 0], [names, 5]]
    assert [result[2].split(" of 10")[0] for result in searched] == ["4", "0", "10"]
    assert ticked == [["ewc", "das (order 10)"]] * 2 and plain == names


FIGURE_SCRIPT = """
const shown = () => [...document.querySelectorAll("figure [data-group]")]
  .filter(mark => getComputedStyle(mark).display !== "none").map(mark => mark.dataset.group);
const box = document.querySelector("input[type=search]");
const search = query => { box.value = query; box.dispatchEvent(new Event("input")); return shown(); };
const found = [search(""), search("das"), search("")];
const spot = document.querySelector(".spots circle");
spot.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 40, clientY: 90 }));
const tip = document.querySelector(".tip");
const told = [tip.hidden, tip.textContent];
document.body.dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
document.querySelector(".enlarge").click();
const dialog = document.querySelector("dialog");
return [found, told, tip.hidden, dialog.open && dialog.querySelectorAll("svg").length,
  document.querySelector(".command").innerText, document.querySelectorAll("title").length];
"""


GRID_SCRIPT = """
const grid = document.querySelector(".spots [data-cells]");
const place = grid.getBoundingClientRect();
const tip = document.querySelector(".tip");
const point = (row, column) => {
  const clientX = place.left + ((column + 0.5) * place.width) / 14;
  const clientY = place.top + ((row + 0.5) * place.height) / 15;
  grid.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX, clientY }));
};
point(0, 0);
await new Promise((done) => setTimeout(done, 500));
const texts = [tip.textContent];
for (const [row, column] of [[14, 13], [2, 1], [1, 0]]) {
  point(row, column);
  texts.push(tip.hidden ? "" : tip.textContent);
}
return texts;
"""


FRONT_SCRIPT = """
const box = document.querySelector("input[type=search]");
const path = document.querySelector("[data-front] path");
return ["", "-fast", "nothing"].map((query) => {
  box.value = query;
  box.dispatchEvent(new Event("input"));
  return [path.getAttribute("d"), document.querySelector("output").textContent];
});
"""


def list_corners(path):
    """The corners (x, y) of an SVG path, each once."""
    numbers = np.array(re.findall(r"[\d.]+", path), float).reshape(-1, 2)
    return [point for point, _ in itertools.groupby(map(tuple, numbers.tolist()))]


def test_the_pareto_front_is_that_of_the_groups_that_are_shown(tmp_path):
    points = {
        "fast": ([1.0], [3.0]),
        "slow": ([4.0], [1.0]),
        "worse": ([4.5], [2.0]),
        "middle": ([2.0], [3.5]),
    }
    picture = draw_plane(points, x_label="FLOPs", y_label="LC", is_logarithmic=True)
    facets = [{"method": name, "domains": "law"} for name in points]
    table = Block(head=["group"], cells=[[name] for name in points], is_filtered=True, facets=facets)
    blocks = [table, Block(title="Plane", picture=picture, section="law")]
    plain, without_fast, empty = run_in_page(tmp_path, blocks, FRONT_SCRIPT)

    svg = render_svg(picture.figure, description="", prefix="")
    front = json.loads(html.unescape(re.search('data-front="([^"]*)"', svg)[1]))
    drawn = re.search(r'data-front="[^"]*">\s*<path d="([^"]*)"', svg)[1]  # by matplotlib
    np.testing.assert_allclose(list_corners(plain[0]), list_corners(drawn), atol=0.02)

    _, slow, _, middle = front["points"]
    _, x, y = middle
    _, end_x, end_y = slow
    expected = [(x, front["top"]), (x, y), (end_x, y), (end_x, end_y), (front["right"], end_y)]
    np.testing.assert_allclose(list_corners(without_fast[0]), expected)
    assert empty[0] == ""
    assert [text for _, text in (plain, without_fast)] == [
        "4 of 4 rows",
        "3 of 4 rows; tiles and findings are over all",
    ]


TOPIC_SCRIPT = """
const all = selector => [...document.querySelectorAll(selector)];
const widths = () => all(".topics > *").map(cell => [cell.textContent, cell.hidden ? 0 : cell.colSpan]);
const first = widths();
const label = all(".columns label").find(each => each.textContent.trim() == "F");
label.querySelector("input").click();
const more = widths();
dispatchEvent(new Event("beforeprint"));
const printed = widths();
dispatchEvent(new Event("afterprint"));
const buttons = all("th button");
buttons[1].click();
const sorted = [...document.querySelector("tbody").rows].map(row => row.cells[0].textContent);
return [first, more, printed, widths(), buttons.length, sorted];
"""


def test_a_topic_is_as_wide_as_its_columns_that_are_shown_and_no_column_of_its_own(tmp_path):
    block = Block(
        head=["group", "LC", "bits", "F", "general"],
        cells=[["ncl", "2", "1", "0", "5"], ["das", "1", "2", "1", "6"]],
        topics=["", "final", "final", "forgotten", "general text"],
        shown_columns=[0, 1, 2, 4],
        is_filtered=True,
    )
    narrow, wide, printed, after_print, num_buttons, names = run_in_page(tmp_path, [block], TOPIC_SCRIPT)
    assert narrow == [["", 1], ["final", 2], ["forgotten", 0], ["general text", 1]]
    assert wide == printed == after_print == [["", 1], ["final", 2], ["forgotten", 1], ["general text", 1]]
    assert num_buttons == 5 and names == ["das", "ncl"]


def test_a_large_heat_map_shows_the_value_of_the_cell_that_is_pointed_at(tmp_path):
    values = np.arange(15.0 * 14).reshape(15, 14)
    values[1, 0] = np.nan
    rows = [f"after <{row}>" for row in range(15)]
    columns = [f"d{column}" for column in range(14)]
    picture = draw_heat_maps({"": HeatMap(values, rows, columns)}, label="loss")
    texts = run_in_page(tmp_path, [Block(title="Matrix", picture=picture)], GRID_SCRIPT)
    assert texts == ["after <0>, d0: 0.00", "after <14>, d13: 209.00", "after <2>, d1: 29.00", ""]


def test_filters_act_on_figures_whose_values_are_shown_on_hover(tmp_path):
    figure = make_figure((4, 3))
    axes = figure.add_subplot()
    for group in ("ncl", "das"):
        assign_group(axes.plot([0, 1], [1, 2]), group)
        add_spots(axes, [0], [1], [f"{group}: <1>"], group=group)
    picture = make_png(figure, description="two lines")
    table = Block(
        head=["group", "LC"],
        cells=[["ncl", "2"], ["das", "1"]],
        is_filtered=True,
        facets=[{"method": "ncl", "domains": "law"}, {"method": "das", "domains": "law"}],
    )
    blocks = [table, Block(title="Curves", picture=picture, section="law")]
    head = PageHead(command="python run.py name='a b'")
    searched, tip, is_hidden_beside, num_enlarged, command, num_titles = run_in_page(
        tmp_path, blocks, FIGURE_SCRIPT, head=head
    )
    groups = ["ncl", "das", "ncl", "das"]  # lines, then spots
    assert searched == [groups, ["das", "das"], groups]
    assert tip == [False, "ncl: <1>"] and is_hidden_beside
    assert num_enlarged == 1 and command.split() == ["python", "run.py", "name='a", "b'", "copy"]
    assert num_titles == 1  # the page's own: browsers show no second hint
