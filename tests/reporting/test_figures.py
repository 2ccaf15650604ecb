"""The figures of a comparison show the numbers that they are given."""

import itertools

import numpy as np
import pandas
import pytest

from cpt.reporting import comparison_figures, drawing, run_page
from tests.support.example_runs import DOMAINS, make_run, make_scores, make_section, save_run

pytestmark = pytest.mark.slow
NLL = [[4.0] * 4, [3.0, 4.0, 4.0, 4.0], [3.1, 3.0, 4.0, 4.0], [3.1, 3.1, 3.0, 4.0]]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    for module in (comparison_figures, drawing):
        monkeypatch.setattr(module, "make_png", lambda figure, *, description: (figure, description))


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_a_plane_shows_runs_means_levels_and_the_front():
    points = {
        "slow": ([4e13, 4e13], [10.0, 20.0]),
        "fast": ([1e13, None], [30.0, 5.0]),
        "worse": ([5e13], [30.0]),
        "free": ([0.0], [1.0]),  # for which a logarithmic axis has no place
        "joint": ([None, None], [12.0, 14.0]),
    }
    figure, caption = comparison_figures.draw_plane(
        points, x_label="FLOPs", y_label="LC", is_logarithmic=True
    )
    marks = [mark for mark in figure.axes[0].collections if not mark.get_label().startswith("_")]
    means = {mark.get_label(): tuple(mark.get_offsets()[0]) for mark in marks}
    assert means == {"slow (2)": (4e13, 15), "fast": (1e13, 30), "worse": (5e13, 30)}
    assert list(lines(figure)["joint: 13.00"].get_ydata()) == [13, 13]
    corners = list(zip(*lines(figure)["Pareto front"].get_data(), strict=True))
    assert corners[1:3] == [(1e13, 30), (4e13, 15)] and "The front: fast, slow." in caption


def test_curves_are_means_over_the_domains_so_far_and_over_runs():
    ncl, second_ncl, short, lost = (make_scores(nll=NLL) for _ in range(4))
    second_ncl.nll[1][0] = 3.4
    del short.rows[2:]
    del short.nll[2:]
    lost.nll[2] = lost.nll[3] = [None] * 4
    joint = make_scores(rows=["base", "joint"], nll=[[4.0] * 4, [2.0, 3.0, 3.0, 9.0]], method="joint")
    groups = {"ncl": [ncl, second_ncl], "short": [ncl, short], "lost": [lost], "joint": [joint], "gone": []}
    figure, _ = comparison_figures.draw_stages(groups)
    last = (2 * np.exp(3.1) + np.exp(3.0)) / 3
    expected = [np.exp([3.0, 3.4]).mean(), (np.exp(3.1) + np.exp(3.0)) / 2, last]
    np.testing.assert_allclose(lines(figure)[f"ncl (2): {last:.2f}"].get_data(), [[1, 2, 3], expected])
    bands = [filling.get_paths()[0].vertices[:, 1] for filling in figure.axes[0].collections]
    assert max(band.max() for band in bands) == pytest.approx(np.exp(3.4))
    assert np.isfinite(lines(figure)[f"short (2): {last:.2f}"].get_ydata()).tolist() == [True] * 3
    assert np.isfinite(lines(figure)["lost: 20.09"].get_ydata()).tolist() == [True, False, False]
    level = (np.exp(2.0) + 2 * np.exp(3.0)) / 3
    assert list(lines(figure)[f"joint: {level:.2f}"].get_ydata()) == pytest.approx([level] * 2)


def test_training_curves_are_means_over_seeds_by_order_and_what_is_not_trained_has_none(tmp_path):
    runs = []
    for seed, (number, order) in itertools.product((0, 1), enumerate((DOMAINS, DOMAINS[::-1]))):
        config = {"order": number, "seed": seed}
        runs.append(save_run(tmp_path / f"{number}-{seed}", config=config, order=order, seed=seed))
        curve = ""
        for text, step in itertools.product(order, (0, 5, 9)):
            curve += f"{step},train/lm/{text},{5 - step / 10 + seed}\n"
        kills = f"5,train/lm/{order[0]},99.0\n", "9,train/lm/la"  # a line that is repeated, one cut off
        (runs[-1].folder / "metrics.csv").write_text(curve.join(kills))
    joint = make_run(tmp_path / "none", method="joint")
    figure, _ = comparison_figures.draw_curves(make_section([*runs, joint]))
    assert [axes.get_title() for axes in figure.axes] == ["order 0", "order 1"]
    curves = {name: line for name, line in lines(figure).items() if name[0] != "_"}
    assert set(curves) == {"ncl (4)"}
    # Of the first stage, a tenth of its tokens at step 0; seeds lie 1 apart.
    points = np.array(curves["ncl (4)"].get_data())[:, :3]
    np.testing.assert_allclose(points, [[100, 600, 1000], [5.5, 5.0, 4.6]])
    (band, *_) = figure.axes[0].collections
    assert np.ptp(band.get_paths()[0].vertices[:, 1]) == pytest.approx(1.9)
    assert comparison_figures.draw_curves(make_section([joint])) is None


def test_stages_of_one_point_have_a_sentence_instead_of_panels(monkeypatch, tmp_path):
    training = {"law": pandas.DataFrame({"lm": [3.5]}, index=[640.0])}
    monkeypatch.setattr(run_page, "read_training", lambda *arguments: training)
    block = run_page.build_training_block(make_scores(), tmp_path)
    assert block.picture is None and block.lines[0].startswith(
        "Loss at the only point of each stage: law 3.500"
    )
    assert block.lines[1] == "Without a point: food, space."
