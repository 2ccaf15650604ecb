"""`python -m cpt.report`: the whole comparison from folders, and one clear line for what is wrong."""

import numpy as np
import pytest

from cpt.report import main
from cpt.reporting import figures
from tests.support.comparing import DOMAINS, NLL, endtasks, made, rows_of, saved

FIGURES = {"forgetting_learning", "quality_compute", "perplexity_forgetting", "stages", "matrices"}


@pytest.fixture
def no_figures(monkeypatch):
    """Without the seconds of drawing."""
    monkeypatch.setattr(figures, "build_figures", lambda section: [])


@pytest.fixture(scope="module")
def thirty(tmp_path_factory):
    """Three methods, two orders, five seeds."""
    top = tmp_path_factory.mktemp("thirty")
    for method, shift in (("ncl", 0.0), ("das", -0.2), ("joint", -0.4)):
        for number, order in enumerate((DOMAINS, DOMAINS[::-1])):
            for seed in range(5):
                given = {"method": method, "order": order, "seed": seed, "shift": shift + seed / 50}
                if method == "joint":
                    given |= {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"]}
                config = {"order": number, "seed": seed, "trainer": {"steps": 5}}
                saved(top / f"{method}-{number}-{seed}", config=config, **given)
    return top


def test_thirty_runs_are_compared_all_and_those_that_are_asked_for(thirty, tmp_path, capsys, no_figures):
    assert main([str(thirty), "--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "masked: food, law, space")
    assert list(rows)[:3] == ["joint", "das", "ncl"]
    lc = [made(shift=s / 50).metrics["LC"]["perplexity"] for s in range(5)] * 2
    shown = f"{np.mean(lc):.2f} ± {np.std(lc, ddof=1):.2f}"
    assert rows["ncl"][:2] == ["10 (5 seeds x 2 orders)", shown] and rows["joint"][2:4] == ["–", "–"]
    assert rows_of(output, "Differences from ncl")["das"][:2] == ["ncl", "10"]
    markdown = (tmp_path / "comparison.md").read_text()
    assert f"| ncl | ncl | tiny | 0, 1 | 10 (5 seeds x 2 orders) | {shown} [" in markdown
    assert "order 1: space → food → law" in markdown and output.rstrip().endswith("comparison.html")
    for title in ("Findings", "Differences from ncl", "Ranks", "Compute"):
        assert f"## {title}\n" in markdown
    kinds = {path.suffix for path in tmp_path.glob("comparison.*")}
    assert kinds == {".html", ".md", ".csv"}

    out = tmp_path / "new" / "place"
    options = ["--where", "method=das,joint", "order=0", "--baseline", "joint", "--out", str(out)]
    assert main([str(thirty), *options, "--name", "mine"]) == 0
    assert {path.suffix for path in out.glob("mine.*")} == {".html", ".md", ".csv"}
    rows = rows_of(capsys.readouterr().out, "Differences from joint")
    assert rows["das"][:2] == ["joint", "5"]


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
def test_the_page_has_its_figures(tmp_path):
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, shift=0.1 * (method == "das"))
    assert main([str(tmp_path), "--by", "order"]) == 0
    html = (tmp_path / "comparison.html").read_text()
    assert html.count('src="data:image/png;base64,') == 5
    for kind in ("pdf", "svg", "png"):
        named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob(f"comparison-*.{kind}")}
        assert named == FIGURES
    assert main([str(tmp_path), "--figures", str(tmp_path / "out")]) == 0
    named = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert named >= {"comparison-stages", "ncl-matrix", "das-stages"}
    for place in ("a_b/c", "a/b_c", "q/c"):
        saved(tmp_path / "alike" / place, method="das")
    assert main([str(tmp_path / "alike"), "--figures", str(tmp_path / "two")]) == 0
    assert {f"a_b_c{more}-stages" for more in ("", "-2")} <= {
        x.stem for x in (tmp_path / "two").glob("*.svg")
    }
    facets = '{"method": "ncl", "model": "tiny", "order": "law,food,space", "domains": "masked: food'
    assert facets in html.replace("&#34;", '"')
