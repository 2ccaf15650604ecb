"""The figures of a comparison show the numbers they are given, for one group as for forty, and say them."""

import itertools

import numpy as np
import pytest

from cpt.reporting import drawing, figures
from tests.support import comparing

pytestmark = pytest.mark.slow
JOINT = {"rows": ["base", "joint"], "nll": [[4.0] * 4, [2.0, 3.0, 3.0, 9.0]], "method": "joint"}


def made(*, count=3, nll=None, **given):
    """Scores over so many domains and general text: the base at 4 nats, a learned domain at 3, then 3.1."""
    if nll is None:
        nll = np.full((count + 1, count + 1), 4.0)
        for place in range(count):
            nll[place + 1 :, place] = 3.1
            nll[place + 1, place] = 3.0
    return comparing.made(nll=nll, order=[f"domain{place}" for place in range(count)], **given)


@pytest.fixture
def drawn(monkeypatch):
    """The figure of a picture and what it says, in place of its PNG."""
    for module in (figures, drawing):
        monkeypatch.setattr(module, "png", lambda figure, *, told, marks=None: (figure, told))
    return lambda picture: picture


def means(figure):
    """The large marks: the groups' means, by their label."""
    marks = [each for each in figure.axes[0].collections if not each.get_label().startswith("_")]
    return {each.get_label(): tuple(each.get_offsets()[0]) for each in marks}


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_a_plane_shows_runs_means_levels_and_the_front(drawn):
    points = {"slow": ([4e13, 4e13], [10.0, 20.0]), "fast": ([1e13, None], [30.0, 5.0])}
    points |= {"worse": ([5e13], [30.0]), "free": ([0.0], [1.0]), "joint": ([None, None], [12.0, 14.0])}
    points |= {"none": ([None], [None])}
    figure, told = drawn(figures.draw_plane(points, x="FLOPs", y="LC", logarithmic=True))
    axes = figure.axes[0]
    assert means(figure) == {"slow (2)": (4e13, 15), "fast": (1e13, 30), "worse": (5e13, 30)}
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "FLOPs", "LC")
    corners = list(zip(*lines(figure)["Pareto front"].get_data(), strict=True))
    assert corners[1:3] == [(1e13, 30), (4e13, 15)] and corners[-1][1] == 15
    assert list(lines(figure)["joint: 13.00"].get_ydata()) == [13, 13]
    assert told.startswith("LC against FLOPs; lower is better for both. The front: fast, slow.")
    figure, _ = drawn(figures.draw_plane(points, x="FG", y="LC"))
    assert figure.axes[0].get_xscale() == "linear" and means(figure)["free"] == (0, 1)


def test_curves_are_means_over_the_domains_so_far_and_over_runs(drawn):
    other, short, lost, joint = made(seed=1), made(), made(), made(**JOINT)
    other.nll[1][0] = 3.4
    short.rows, short.nll = short.rows[:2], short.nll[:2]
    lost.nll[2] = lost.nll[3] = [None] * 4
    groups = {"ncl": [made(), other], "short": [made(), short], "lost": [lost], "joint": [joint], "gone": []}
    figure, told = drawn(figures.draw_stages(groups))
    last = (2 * np.exp(3.1) + np.exp(3.0)) / 3
    expected = [np.exp([3.0, 3.4]).mean(), (np.exp(3.1) + np.exp(3.0)) / 2, last]
    np.testing.assert_allclose(lines(figure)[f"ncl (2): {last:.2f}"].get_data(), [[1, 2, 3], expected])
    bands = [each.get_paths()[0].vertices[:, 1] for each in figure.axes[0].collections]
    assert max(band.max() for band in bands) == pytest.approx(np.exp(3.4))
    assert np.isfinite(lines(figure)[f"short (2): {last:.2f}"].get_ydata()).tolist() == [True] * 3
    assert np.isfinite(lines(figure)["lost: 20.09"].get_ydata()).tolist() == [True, False, False]
    level = (np.exp(2.0) + 2 * np.exp(3.0)) / 3
    assert list(lines(figure)[f"joint: {level:.2f}"].get_ydata()) == pytest.approx([level] * 2)
    assert told.endswith(f"ncl {last:.2f}; short {last:.2f}; lost 20.09; joint {level:.2f}.")


def test_training_curves_are_means_over_seeds_by_order_and_what_is_not_trained_has_none(drawn, tmp_path):
    orders, runs = (comparing.DOMAINS, comparing.DOMAINS[::-1]), []
    for number, (method, order, seed) in enumerate(
        (m, o, s) for m in ("ncl", "das") for o in orders for s in (0, 1)
    ):
        folder = tmp_path / str(number)
        config = {"order": orders.index(order), "seed": seed, "method": {"name": method}}
        comparing.saved(folder, config=config, method=method, order=order, seed=seed)
        losses = [(step, text, 5 - step / 10 + seed) for text in order for step in (0, 5, 9)]
        (folder / "metrics.csv").write_text("".join(f"{s},train/lm/{t},{x}\n" for s, t, x in losses))
        runs.append(comparing.run(folder, method=method, order=order, seed=seed))
    compared = comparing.section([*runs, comparing.run(tmp_path / "none", method="joint")])
    figure, told = drawn(figures.draw_curves(compared))
    assert [axes.get_title() for axes in figure.axes] == ["order 0", "order 1"]
    shown = lines(figure)
    assert {name for name in shown if name[0] != "_"} == {"ncl (4)", "das (4)"}
    first = shown["das (4)"]  # of the first stage, a tenth of its tokens at step 0; seeds lie 1 apart
    np.testing.assert_allclose(np.array(first.get_data())[:, :3], [[100, 600, 1000], [5.5, 5.0, 4.6]])
    (band, *_) = figure.axes[0].collections
    assert np.ptp(band.get_paths()[0].vertices[:, 1]) == pytest.approx(1.9)
    assert told.endswith("das 4.600; ncl 4.600.") or told.endswith("ncl 4.600; das 4.600.")
    assert figures.draw_curves(comparing.section([comparing.run(tmp_path / "none")])) is None


def test_a_curve_over_a_setting_joins_groups_of_one_model_and_order(monkeypatch, tmp_path):
    runs, told, orders = [], {}, (comparing.DOMAINS, comparing.DOMAINS[::-1])
    varied = itertools.product(("tiny", "large"), orders, (1, 9))
    for number, (model, order, strength) in enumerate(varied):
        given = {"method": "ewc", "variant": f"method.strength={strength}", "model": model, "order": order}
        comparing.saved(tmp_path / str(number), config={"method": {"strength": strength}}, **given)
        runs.append(comparing.run(tmp_path / str(number), **given))
    monkeypatch.setattr(figures, "draw_plane", lambda points, **how: told.update(how, points=points) or b"")
    for by_order, count in ((False, 2), (True, 4)):
        section = comparing.section(runs, by_order=by_order)
        figures.build_setting_curve([section], section, "method.strength")
        named = [name for line in told["lines"] for name in line]
        assert len(told["lines"]) == count and sorted(named) == sorted(told["points"])
        assert len(named) == len(section.groups) == 2 * count
