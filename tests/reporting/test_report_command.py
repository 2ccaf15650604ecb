"""`python -m cpt.report`: a whole comparison, published numbers next to ours, one line for what is wrong."""

import itertools
import json

import numpy as np
import pytest

from cpt.core.config import CONF
from cpt.report import main
from cpt.reporting import figures
from cpt.reporting.compare import MEASURES
from cpt.reporting.published import PUBLISHED, read_published
from tests.support.comparing import DOMAINS, NLL, endtasks, made, rows_of, saved

FILES = sorted(path.stem for path in PUBLISHED.glob("*.json"))
FIGURES = {"forgetting_learning", "quality_compute", "perplexity_forgetting", "stages", "matrices"}


@pytest.fixture
def no_figures(monkeypatch):
    """Without the seconds of drawing."""
    monkeypatch.setattr(figures, "build_figures", lambda section: [])


def test_runs_are_compared_all_and_those_that_are_asked_for(tmp_path, capsys, no_figures):
    for method, seed in itertools.product(("ncl", "das", "joint"), range(3)):
        for number, order in enumerate((DOMAINS, DOMAINS[::-1])):
            given = {"method": method, "order": order, "seed": seed, "shift": seed / 50}
            if method == "joint":
                given |= {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"], "shift": -0.4}
            saved(tmp_path / f"{method}-{number}-{seed}", config={"order": number, "seed": seed}, **given)
    assert main([str(tmp_path)]) == 0
    rows = rows_of(capsys.readouterr().out, "masked: food, law, space")
    lc = [made(shift=s / 50).metrics["LC"]["perplexity"] for s in range(3)] * 2
    shown = f"{np.mean(lc):.2f} ± {np.std(lc, ddof=1):.2f}"
    assert rows["ncl"][:2] == ["6 (3 seeds x 2 orders)", shown] and rows["joint"][2:4] == ["–", "–"]
    out = tmp_path / "new" / "place"
    options = ["--where", "method=das,joint", "order=0", "--baseline", "joint", "--out", str(out)]
    assert main([str(tmp_path), *options, "--name", "mine"]) == 0
    assert {path.suffix for path in out.glob("mine.*")} == {".html", ".md", ".csv"}
    rows = rows_of(capsys.readouterr().out, "Differences from joint")
    assert rows["das"][:2] == ["joint", "3"]


@pytest.mark.slow
def test_the_page_has_its_figures(tmp_path):
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, shift=0.1 * (method == "das"))
    assert main([str(tmp_path), "--by", "order"]) == 0
    assert (tmp_path / "comparison.html").read_text().count('src="data:image/png;base64,') == 5
    for kind in ("pdf", "svg", "png"):
        named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob(f"comparison-*.{kind}")}
        assert named == FIGURES
    assert main([str(tmp_path), "--figures", str(tmp_path / "out")]) == 0
    named = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert named >= {"comparison-stages", "ncl-matrix", "das-stages"}


@pytest.mark.parametrize("name", FILES)
def test_shipped_rows_are_of_known_methods_and_measures(name):
    choices = {group: {path.stem for path in (CONF / group).glob("*.yaml")} for group in ("method", "mask")}
    rows = read_published(name)
    for row in rows:
        for method, *laid in (group.split(" + ") for group in row.groups):
            assert method in choices["method"] and set(laid) <= choices["mask"] | {"replay past"}
        keys = {measure.key for measure in MEASURES} | {"task/acl", "task/ai"}
        assert set(row.values) <= keys and row.source and row.orders


def test_a_difference_is_ours_minus_what_was_published(tmp_path, capsys, no_figures):
    """With the interval of our mean."""
    variants = {"ncl": "trainer.devices=4", "das": "contrast=0", "one": ""}
    for method, seed in itertools.product(variants, range(3)):
        about = {"method": method, "seed": seed, "variant": variants[method]}
        about |= {"config": {"order": 0, "seed": seed, "method": {"form": "x"}}}
        saved(tmp_path / f"{method}-{seed}", endtasks=endtasks([[0.75 + seed / 100] * 3] * 4), **about)
    assert main([str(tmp_path), "--published", "das6"]) == 0
    rows = rows_of(capsys.readouterr().out, "Published numbers")
    # 75, 76 and 77: mean 76, t(0.975, 2) / sqrt(3) = 2.4841 either way
    assert rows["ncl (trainer.devices=4)"][-3:] == ["76.00 ± 1.00", "80.77", "-4.77 [-7.25, -2.29]"]
    assert not [name for name in rows if name.startswith(("das", "one"))]  # an ablation is not that method
    other = {"name": "mine", "groups": ["one"], "source": "S", "table": None, "page": 4}
    other |= {"values": {"endtask/MF1": 40.0}, "settings": {"method.form": "x"}, "orders": None}
    (tmp_path / "own.json").write_text(json.dumps({"rows": [other, other | {"settings": {"seed": 9}}]}))
    assert main([str(tmp_path), "--published", str(tmp_path / "own.json")]) == 0
    output = capsys.readouterr().out
    assert rows_of(output, "Published numbers")["one"][:2] == ["mine", "S, page 4"]
    assert "1 of 2 published rows have no group here." in output


def test_another_name_or_form_is_refused_in_one_line(tmp_path, capsys):
    texts = {"cut.json": "{", "other.json": '{"rows": [{"name": "x"}]}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for given in ("das7", *(str(tmp_path / name) for name in texts)):
        assert main([str(tmp_path), "--published", given]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"cpt: --published {given} is invalid") and "Allowed: das6, long_" in line
