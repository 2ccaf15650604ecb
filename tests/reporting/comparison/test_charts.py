"""The pictures over runs show the numbers they are given, for one group as for forty, and say them."""

import io
import re
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from cpt.evaluation.scores import Scores
from cpt.reporting import drawing, figures
from cpt.reporting.comparison import charts, panels
from cpt.reporting.drawing import description

pytestmark = pytest.mark.slow


def made(*, count=3, method="ncl", rows=None, nll=None, parts=None, seed=0):
    """Scores over so many domains and general text: the base at 4 nats, a learned domain at 3, then 3.1."""
    domains = [f"domain{place}" for place in range(count)]
    order = domains if rows is None else rows[1:]
    if nll is None:
        nll = np.full((len(order) + 1, count + 1), 4.0)
        for place in range(min(len(order), count)):
            nll[place + 1 :, place] = 3.1
            nll[place + 1, place] = 3.0
    run = {
        "name": "trial",
        "method": method,
        "mask": "none",
        "replay": "none",
        "variant": "",
        "model": "tiny",
    }
    scores = Scores(
        domains=[*domains, "general"],
        rows=["base", *order],
        nll=np.asarray(nll, float).tolist(),
        tokens=[1000] * (count + 1),
        bytes=[4000] * (count + 1),
        scored=[150] * (count + 1),
        run=run | {"order": order, "seed": seed, "finished": True, "objective": "masked"},
        texts={},
        config_digest="0123abcd",
        versions={},
        parts=parts or [],
    )
    scores.measure()
    return scores


@pytest.fixture
def drawn(monkeypatch):
    """The figure of a picture and what it says, in place of its PNG."""
    for module in (charts, figures, panels):
        monkeypatch.setattr(module, "png", lambda figure, *, told, marks=None: (figure, told))
    return lambda picture: picture


def means(figure):
    """The large marks: the groups' means, by their label."""
    marks = [each for each in figure.axes[0].collections if not each.get_label().startswith("_")]
    return {each.get_label(): tuple(each.get_offsets()[0]) for each in marks}


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def size(picture):
    return Image.open(io.BytesIO(picture)).size


NAMES = [f"method {place} + replay past (temperature=0.{place})" for place in range(40)]


def test_the_trade_off_shows_means_and_levels(drawn):
    groups = {
        "ncl": ([0.1, 0.3, None], [60.0, 50.0, 10.0]),
        "joint": ([None, None], [50.0, 52.0]),
        "none": ([None], [None]),
        "far": ([None], [900.0]),
    }
    figure, told = drawn(charts.trade_off(groups))
    assert means(figure) == {"ncl (2)": pytest.approx((0.2, 55))}
    assert list(lines(figure)) == ["joint: 51.00", "far: 900.0 (off the axis)"]
    assert "ncl: forgetting 0.2, perplexity 55" in told
    assert "joint" not in told


def test_the_front_is_what_nothing_is_better_than_in_both():
    points = {"a": (1, 9), "b": (2, 4), "c": (3, 4), "d": (2, 5), "e": (5, 1), "f": (1, 10), "g": (5, 1)}
    assert charts.pareto_front(points) == ["a", "b", "e", "g"]
    generator = np.random.default_rng(0)
    many = {str(place): tuple(pair) for place, pair in enumerate(generator.random((60, 2)).tolist())}
    best = {
        name
        for name, (x, y) in many.items()
        if not any(u <= x and v <= y and (u, v) != (x, y) for u, v in many.values())
    }
    front = charts.pareto_front(many)
    assert set(front) == best
    assert all(many[one] < many[other] for one, other in pairwise(front))


def test_the_pareto_picture_draws_the_front_of_the_means(drawn):
    points = {
        "slow": ([4e13, 4e13], [10.0, 20.0]),
        "fast": ([1e13, None], [30.0, 5.0]),
        "worse": ([5e13], [30.0]),
        "free": ([0.0], [1.0]),
    }
    figure, told = drawn(charts.pareto(points, x="FLOPs", y="LC", logarithmic=True))
    axes = figure.axes[0]
    assert means(figure) == {"slow (2)": (4e13, 15), "fast": (1e13, 30), "worse": (5e13, 30)}
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "FLOPs", "LC")
    staircase = lines(figure)["Pareto front"]
    corners = list(zip(*staircase.get_data(), strict=True))
    assert corners[1:3] == [(1e13, 30), (4e13, 15)]
    assert corners[-1][1] == 15
    assert staircase.get_drawstyle() == "steps-post"
    assert told.startswith("LC against FLOPs; lower is better for both. The front: fast, slow.")
    figure, _ = drawn(charts.pareto(points, x="FG", y="LC", logarithmic=False))
    assert figure.axes[0].get_xscale() == "linear"
    assert means(figure)["free"] == (0, 1)


def test_forty_groups_have_forty_marks():
    styles = [tuple(drawing.style(place).values())[:2] for place in range(72)]
    assert len(set(styles)) == 72
    assert all(one[0] != other[0] and one[1] != other[1] for one, other in pairwise(styles))


def colours(figure):
    """The colour of every label in a picture, of a mark or a line."""
    points = {each.get_label(): to_hex(each.get_edgecolor()[0]) for each in figure.axes[0].collections}
    found = points | {name: to_hex(line.get_color()) for name, line in lines(figure).items()}
    return {re.split(r"[:(]", name)[0].strip(): colour for name, colour in found.items() if name[0] != "_"}


def test_a_group_keeps_its_colour_in_every_picture(drawn):
    places = {"gone": 0, "ncl": 1, "das": 2, "joint": 3}
    points = {"das": ([0.1], [40.0]), "joint": ([None], [40.5]), "ncl": ([0.3], [42.0])}
    joint = made(rows=["base", "joint"], nll=[[4.0] * 4, [2.0, 3.0, 3.0, 9.0]], method="joint")
    figures = [
        drawn(charts.trade_off(points, places=places))[0],
        drawn(charts.pareto({"ncl": points["ncl"]}, x="x", y="y", logarithmic=False, places=places))[0],
        drawn(charts.curves({"joint": [joint], "das": [made()], "ncl": [made()]}, places=places))[0],
    ]
    found = [colours(figure) for figure in figures]
    expected = {name: drawing.style(place)["color"].lower() for name, place in places.items()}
    for each in found:
        shown = {name: colour for name, colour in each.items() if name in places}
        assert shown == {name: expected[name] for name in shown}
    assert [set(each) & set(places) for each in found] == [
        {"das", "joint", "ncl"},
        {"ncl"},
        {"das", "joint", "ncl"},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 40])
def test_the_legend_has_room_for_all_groups(count):
    groups = {name: ([0.01 * place], [50.0 - place]) for place, name in enumerate(NAMES[:count])}
    for draw in (charts.trade_off, lambda points: charts.pareto(points, x="x", y="y", logarithmic=True)):
        picture = draw(groups)
        assert size(picture)[1] >= count * 24
        assert len(picture) < 120_000


def test_curves_are_means_over_the_domains_so_far_and_over_runs(drawn):
    other = made(seed=1)
    other.nll[1][0] = 3.4
    joint = made(rows=["base", "joint"], nll=[[4.0] * 4, [2.0, 3.0, 3.0, 9.0]], method="joint")
    figure, told = drawn(charts.curves({"ncl": [made(), other], "joint": [joint], "gone": []}))
    expected = np.exp([[3.0, 3.4], [3.05, 3.05], [3.1, 3.1]])
    last = (2 * np.exp(3.1) + np.exp(3.0)) / 3
    expected[1] = (np.exp(3.1) + np.exp(3.0)) / 2
    expected[2] = last
    curve = lines(figure)[f"ncl (2): {last:.2f}"]
    np.testing.assert_allclose(curve.get_data(), [[1, 2, 3], expected.mean(1)])
    band = figure.axes[0].collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(np.exp(3.0))
    assert band[:, 1].max() == pytest.approx(np.exp(3.4))
    level = (np.exp(2.0) + 2 * np.exp(3.0)) / 3
    assert list(lines(figure)[f"joint: {level:.2f}"].get_ydata()) == pytest.approx([level] * 2)
    assert told.endswith(f"ncl {last:.2f}; joint {level:.2f}.")
    assert figure.axes[0].get_yscale() == "log"


def test_curves_bear_runs_that_diverged_stopped_or_learned_nothing(drawn):
    short, lost = made(), made()
    short.rows, short.nll = short.rows[:2], short.nll[:2]
    lost.nll[2] = lost.nll[3] = [None] * 4
    none = made(rows=["base"])
    figure, told = drawn(charts.curves({"both": [made(), short], "lost": [lost], "none": [none]}))
    both = next(line for label, line in lines(figure).items() if label.startswith("both"))
    assert np.isfinite(both.get_ydata()).tolist() == [True] * 3
    gone = next(line for label, line in lines(figure).items() if label.startswith("lost"))
    assert np.isfinite(gone.get_ydata()).tolist() == [True, False, False]
    assert "lost 20.09; none 54.60" in told


def test_of_many_curves_the_lowest_are_told_apart(drawn):
    groups = {f"m{place}": [made(nll=np.full((4, 4), 4.0 - 0.01 * place))] for place in range(20)}
    figure, _ = drawn(charts.curves(groups))
    known = [label.split(":")[0] for label in lines(figure) if not label.startswith("_")]
    assert known == ["14 others", "m19", "m18", "m17", "m16", "m15", "m14"]
    assert len(figure.axes[0].lines) == 21
    figure, _ = drawn(charts.curves({name: groups[name] for name in list(groups)[:12]}))
    assert [label for label in lines(figure) if "others" in label] == []


def images(figure):
    """The heat maps by their titles."""
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def test_matrices_share_a_colour_scale(drawn):
    strong = made(nll=[[4.0] * 4, [1.0, 4, 4, 4], [4.0] * 4, [4.0, 4, 4, 6.5]])
    figure, told = drawn(panels.matrices({"ncl": made(), "strong": strong, "none": made(rows=["base"])}))
    maps = images(figure)
    assert list(maps) == ["ncl", "strong"]
    for axes in maps.values():
        assert axes.images[0].get_clim() == (-3, 3)
    np.testing.assert_allclose(maps["ncl"].images[0].get_array(), made().matrix - 4)
    texts = [text.get_text() for text in maps["ncl"].texts]
    assert texts[:5] == ["+0.00"] * 4 + ["−1.00"]
    assert [patch.get_xy() for patch in maps["ncl"].patches] == [(-0.5, 0.5), (0.5, 1.5), (1.5, 2.5)]
    assert [label.get_text() for label in maps["ncl"].get_xticklabels()] == made().domains
    assert "ncl −0.93; strong" in told.replace("-", "−")


def test_many_matrices_are_small_and_without_numbers(drawn):
    figure, _ = drawn(panels.matrices({name: made() for name in NAMES[:13]}))
    assert all(len(axes.texts) == 0 for axes in images(figure).values())
    assert sum(axes.get_visible() for axes in figure.axes) == 14


def similarity(count):
    return [f"domain{place}" for place in range(count)], np.eye(count) * 0.75 + 0.25


def test_overlaps_are_between_0_and_1(drawn):
    names, values = similarity(3)
    values[0, 1] = values[1, 0] = np.nan
    figure, told = drawn(panels.overlaps({"das: importance": (names, values), "migu": similarity(13)}))
    das, migu = images(figure).values()
    assert das.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in das.texts] == ["1.00", "0.25", "1.00", "0.25", "0.25", "0.25", "1.00"]
    assert len(migu.texts) == 0
    assert len(migu.get_xticklabels()) == 13
    assert told.endswith("das: importance 0.25; migu 0.25.")


def test_each_heat_map_is_its_groups():
    overlap = panels.overlaps(
        {"a: b: importance": similarity(3), "migu: mask": similarity(3)}, marks={"migu": "x"}
    )
    assert set(re.findall(r'id="mark:(.*?)"', overlap.svg.decode())) == {"a: b", "migu"}
    assert overlap.marks == {"migu": "x"}
    scores = made()
    scores.parts = [{"law": {"law": 0.5, "food": 0.5}}] * len(scores.rows)
    assert b'id="mark:demix"' in panels.posteriors({"demix": scores}, marks={"demix": "x"}).svg


def test_posteriors_are_those_of_the_last_model(drawn):
    last = {"domain0": {"domain0": 0.7, "base": 0.3}, "general": {"base": 1.0}}
    scores = made(parts=[{}, {}, {"domain0": {"base": 1.0}}, last])
    figure, told = drawn(panels.posteriors({"demix": scores}))
    expected = np.zeros((4, 4))
    expected[0, :2], expected[3, 0] = (0.3, 0.7), 1
    np.testing.assert_array_equal(images(figure)["demix"].images[0].get_array(), expected)
    assert (
        told
        == "demix: Heaviest part of the last model for each text. domain0: domain0 0.70; general: base 1.00."
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 236])
def test_one_domain_and_236(count):
    began = time.process_time()
    scores = made(count=count, parts=[{}, *[{"domain0": {"domain0": 1.0}}] * count])
    pictures = [
        panels.matrices({"ncl": scores}),
        charts.curves({"ncl": [scores]}),
        panels.overlaps({"das": similarity(count)}),
        panels.posteriors({"demix": scores}),
        figures.heatmap(scores),
        figures.stages(scores),
    ]
    assert time.process_time() - began < 20
    assert all(len(description(picture)) > 20 for picture in pictures)
    assert all(len(description(picture)) < 900 for picture in pictures)
    assert all(len(picture) < 250_000 and max(size(picture)) < 2000 for picture in pictures)


def test_no_group_is_a_picture_too():
    for draw in (charts.trade_off, charts.curves, panels.matrices, panels.overlaps, panels.posteriors):
        assert description(draw({})).endswith(("None.", "No group."))
    assert "no group" in description(charts.pareto({}, x="x", y="y", logarithmic=True))


def test_pictures_are_small_and_keep_their_colours():
    picture = Image.open(io.BytesIO(figures.heatmap(made())))
    assert picture.mode == "P"
    colours = {colour for _, colour in picture.convert("RGB").getcolors()}
    assert len(colours) <= 256
    assert (255, 255, 255) in colours


def test_dollars_are_not_formulas():
    name = "$\\frac$"
    values = similarity(1)[1]
    assert panels.overlaps({name: ([name], values)}).startswith(b"\x89PNG")
    assert charts.trade_off({name: ([0.1], [2.0])}).startswith(b"\x89PNG")


def test_the_pictures_of_a_run_say_its_ends(drawn):
    scores = made()
    _, told = drawn(figures.heatmap(scores))
    assert told.startswith("Perplexity from base to domain2: domain0 54.60 to 22.20; domain1 54.60 to 22.20")
    _, told = drawn(figures.stages(scores))
    mean = (2 * np.exp(3.1) + np.exp(3.0)) / 3
    assert told == f"Mean perplexity over 3 domains: 54.60 at the base, {mean:.2f} after 3 stages."
    _, told = drawn(figures.heatmap(made(count=20)))
    assert told.endswith("domain11 54.60 to 22.20; and 9 more.")


def test_pictures_need_no_pyplot(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it raises ImportError
    assert charts.curves({"ncl": [made()]}).startswith(b"\x89PNG")
