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
    markdown = (tmp_path / "comparison.md").read_text()
    assert f"| ncl | ncl | tiny | 0, 1 | 6 (3 seeds x 2 orders) | {shown} [" in markdown
    assert "order 1: space → food → law" in markdown
    assert {path.suffix for path in tmp_path.glob("comparison.*")} == {".html", ".md", ".csv"}
    out = tmp_path / "new" / "place"
    options = ["--where", "method=das,joint", "order=0", "--baseline", "joint", "--out", str(out)]
    assert main([str(tmp_path), *options, "--name", "mine"]) == 0
    assert {path.suffix for path in out.glob("mine.*")} == {".html", ".md", ".csv"}
    rows = rows_of(capsys.readouterr().out, "Differences from joint")
    assert rows["das"][:2] == ["joint", "3"]


def test_unfinished_begun_and_damaged_runs_are_named(tmp_path, capsys, no_figures):
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, endtasks=endtasks([[0.5] * 3] * 4))
        (tmp_path / method / "endtasks" / "003-space").mkdir(parents=True)
        (tmp_path / method / "endtasks" / "003-space" / "law-7.parquet").write_text("damaged")
    saved(tmp_path / "half", nll=NLL[:3], seed=5, finished=False)
    for name, file, text in (("bad", "scores.json", '{"dom'), ("begun", "config.yaml", "seed: 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert main([str(tmp_path), str(tmp_path / "nowhere")]) == 1
    said = capsys.readouterr()
    errors = said.err.splitlines()
    assert len(errors) == 4 and "nowhere: no such folder" in errors[0] and "damaged predictions" in errors[2]
    assert errors[1].startswith(f"{tmp_path / 'bad' / 'scores.json'}: damaged")
    assert rows_of(said.out, "masked: ")["das"][0].startswith("1 ")
    assert main([str(tmp_path), "--figures", str(tmp_path / "pictures")]) == 1
    assert capsys.readouterr().err.splitlines() == errors[1:2]
    unfinished = rows_of(said.out, "Unfinished runs")
    assert unfinished[str(tmp_path / "half")] == ["ncl", "5", "unfinished, 3 rows, last: food"]
    assert unfinished[str(tmp_path / "begun")][-1] == "started, nothing measured yet"


@pytest.mark.slow
def test_the_page_has_its_figures(tmp_path, caplog):
    caplog.set_level("INFO")
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, shift=0.1 * (method == "das"))
    assert main([str(tmp_path), "--by", "order"]) == 0
    html = (tmp_path / "comparison.html").read_text()
    assert html.count('src="data:image/png;base64,') == 5
    for kind in ("pdf", "svg", "png"):
        named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob(f"comparison-*.{kind}")}
        assert named == FIGURES
    assert not [each for each in caplog.records if each.name.startswith("fontTools")]
    assert main([str(tmp_path), "--figures", str(tmp_path / "out")]) == 0
    named = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert named >= {"comparison-stages", "ncl-matrix", "das-stages"}
    for place in ("a_b/c", "a/b_c", "q/c"):
        saved(tmp_path / "alike" / place, method="das")
    assert main([str(tmp_path / "alike"), "--figures", str(tmp_path / "two")]) == 0
    named = {path.stem for path in (tmp_path / "two").glob("*.svg")}
    assert {"a_b_c-stages", "a_b_c-2-stages"} <= named
    facets = '{"method": "ncl", "model": "tiny", "order": "law,food,space", "domains": "masked: food'
    assert facets in html.replace("&#34;", '"')


@pytest.mark.parametrize("name", FILES)
def test_shipped_rows_are_of_known_methods_and_measures(name):
    choices = {group: {path.stem for path in (CONF / group).glob("*.yaml")} for group in ("method", "mask")}
    rows = read_published(name)
    for row in rows:
        for method, *laid in (group.split(" + ") for group in row.groups):
            assert method in choices["method"] and set(laid) <= choices["mask"] | {"replay past"}
        keys = {measure.key for measure in MEASURES} | {"task/acl", "task/ai"}
        assert set(row.values) <= keys and all(-100 < value < 100 for value in row.values.values())
        assert row.source and row.orders
    assert len({json.dumps(row) for row in rows}) == len(rows)


def test_a_difference_is_ours_minus_what_was_published(tmp_path, capsys, no_figures):
    """With the interval of our mean."""
    for method, base in (("ncl", 0.75), ("das", 0.78), ("one", 0.5)):
        for seed in range(3):
            scores = endtasks([[base + seed / 100] * 3] * 4)
            config = {"order": 0, "seed": seed, "method": {"form": "x"}}
            config["method"] |= {"contrast_every": 1, "contrast_samples": 1} if method == "das" else {}
            given = {"ncl": "trainer.devices=4", "das": "contrast_every=1; contrast_samples=1"}
            about = {"method": method, "seed": seed, "variant": given.get(method, "")}
            saved(tmp_path / f"{method}-{seed}", **about, endtasks=scores, config=config)
    assert main([str(tmp_path), "--published", "das6"]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "Published numbers")
    # 75, 76 and 77: mean 76, t(0.975, 2) / sqrt(3) = 2.4841 either way
    assert rows["ncl (trainer.devices=4)"][-3:] == ["76.00 ± 1.00", "80.77", "-4.77 [-7.25, -2.29]"]
    assert "one" not in rows and "DAS, run by MIGU's authors" in output
    assert "table 3" in output and "of 9 published rows have no group here" in output
    assert (tmp_path / "comparison.md").read_text().count("| ncl (trainer.devices=4) | FT |") == 2

    saved(tmp_path / "free", method="das", variant="contrast=0", endtasks=scores, config=config)
    assert main([str(tmp_path / "free"), "--published", "das6"]) == 0
    assert "9 of 9 published rows have no group here." in capsys.readouterr().out  # an ablation

    other = {"name": "mine", "groups": ["one"], "source": "S", "table": None, "page": 4}
    other |= {"values": {"endtask/MF1": 40.0}, "settings": {"method.form": "x"}, "orders": None}
    (tmp_path / "own.json").write_text(json.dumps({"rows": [other, other | {"settings": {"seed": 9}}]}))
    assert main([str(tmp_path), "--published", str(tmp_path / "own.json")]) == 0
    output = capsys.readouterr().out
    assert rows_of(output, "Published numbers")["one"][:2] == ["mine", "S, page 4"]
    assert "1 of 2 published rows have no group here." in output


@pytest.mark.parametrize("text", [None, "{", '{"rows": [{"name": "x"}]}', "[]"])
def test_another_name_or_form_is_refused_in_one_line(tmp_path, capsys, text):
    given = "das7" if text is None else str(tmp_path / "x.json")
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    assert main([str(tmp_path), "--published", given]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cpt: --published {given} is invalid") and "Allowed: das6, long_sequence" in line
