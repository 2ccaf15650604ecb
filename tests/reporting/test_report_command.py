"""`python -m cpt.report`: the whole comparison from folders, and one clear line for what is wrong."""

import json
import subprocess
import sys

import numpy as np
import pytest

from cpt.report import main
from cpt.reporting import figures
from tests.support.comparing import CONDITIONS, DOMAINS, NLL, endtasks, made, rows_of, saved

FIGURES = ("forgetting_learning", "quality_compute", "perplexity_forgetting", "stages", "matrices")


@pytest.fixture
def no_figures(monkeypatch):
    """Without the seconds of drawing."""
    monkeypatch.setattr(figures, "build_figures", lambda section: [])


@pytest.fixture
def thirty(tmp_path):
    """Three methods, two orders, five seeds."""
    for method, shift in (("ncl", 0.0), ("das", -0.2), ("joint", -0.4)):
        for number, order in enumerate((DOMAINS, DOMAINS[::-1])):
            for seed in range(5):
                given = {"method": method, "order": order, "seed": seed, "shift": shift + seed / 50}
                if method == "joint":
                    given |= {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"]}
                config = {"order": number, "seed": seed, "trainer": {"steps": 5}}
                saved(tmp_path / f"{method}-{number}-{seed}", config=config, **given)
    return tmp_path


def test_thirty_runs(thirty, capsys, no_figures):
    assert main([str(thirty)]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "masked: food, law, space")
    assert list(rows)[:3] == ["joint", "das", "ncl"]
    lc = [made(shift=s / 50).metrics["LC"]["perplexity"] for s in range(5)] * 2
    shown = f"{np.mean(lc):.2f} ± {np.std(lc, ddof=1):.2f}"
    assert rows["ncl"][:2] == ["10 (5 seeds x 2 orders)", shown]
    assert rows["joint"][2:4] == ["–", "–"]
    assert rows_of(output, "Differences from ncl")["das"][:2] == ["ncl", "10"]
    markdown = (thirty / "comparison.md").read_text()
    assert f"| ncl | ncl | tiny | 0, 1 | 10 (5 seeds x 2 orders) | {shown} [" in markdown
    assert "order 1: space → food → law" in markdown
    assert all(
        f"## {title}\n" in markdown for title in ("Findings", "Differences from ncl", "Ranks", "Compute")
    )
    assert {path.suffix for path in thirty.glob("comparison.*")} == {".html", ".md", ".csv", ".tex", ".json"}
    assert output.rstrip().endswith("comparison.html")


def test_filters_and_options(thirty, capsys, no_figures):
    out = thirty / "new" / "place"
    options = ["--where", "method=das,joint", "order=0", "--baseline", "joint", "--out", str(out)]
    options += ["--name", "mine", "--export", "json,parquet", "--domains", "law,food"]
    assert main([str(thirty), *options]) == 0
    assert {path.suffix for path in out.glob("mine.*")} == {".html", ".md", ".json", ".parquet"}
    (told,) = json.loads((out / "mine.json").read_text())["sections"]
    assert {each["name"]: (each["runs"], each["baseline"]) for each in told["groups"]} == {
        "joint": (5, None),
        "das": (5, "joint"),
    }
    assert "Metrics on law, food only." in (out / "mine.md").read_text()
    capsys.readouterr()
    assert main([str(thirty), "--by", "order", "--export", "none", "--where", "method=ncl"]) == 0
    assert rows_of(capsys.readouterr().out, "masked")["ncl, order 1"][0] == "5 (5 seeds x 1 order)"
    assert (thirty / "comparison_method-ncl.html").is_file() and not (thirty / "comparison.html").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "method=magic"], "--where method=magic; there is: das, joint, ncl"),
        (["--domains", "sea"], "--domains sea; there is: food, law, space"),
        (["--baseline", "magic"], "--baseline magic; there is: das, joint, ncl"),
        (["--export", "xls"], "--export xls; allowed: csv, latex, json, parquet, none"),
        (["--by", "colour"], "invalid choice: 'colour'"),
    ],
)
def test_wrong_options_are_one_line(thirty, capsys, options, said):
    assert main([str(thirty), *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("cpt: ") and said in error
    assert list(thirty.glob("comparison.*")) == []


def test_other_conditions_get_sections(tmp_path, capsys, no_figures):
    for place, given in enumerate(({}, {"seed": 1}, {"conditions": CONDITIONS | {"length": 128}})):
        saved(tmp_path / str(place), **given)
    saved(tmp_path / "3", nll=[row[:3] for row in NLL[:3]], order=DOMAINS[:2])
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("3 sections, each with its own tables")
    markdown = (tmp_path / "comparison.md").read_text()
    assert markdown.index("(section 1)") < markdown.index("## Compute (section 3)")
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(each["runs"]) for each in told["sections"]] == [2, 1, 1]
    assert (tmp_path / "comparison.tex").read_text().count(r"\begin{tabular}") == 3
    assert main([str(tmp_path), "--domains", "space", "--export", "json"]) == 0
    assert "Runs without these domains" in capsys.readouterr().out
    ((folder, *_),) = json.loads((tmp_path / "comparison.json").read_text())["runs_without_these_domains"]
    assert folder == str(tmp_path / "3")


def test_unfinished_begun_and_damaged_runs_are_named(tmp_path, capsys, no_figures):
    given = endtasks([[0.5] * 3] * 4)
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, endtasks=given)
        (tmp_path / method / "endtasks" / "003-space").mkdir(parents=True)
        (tmp_path / method / "endtasks" / "003-space" / "law-7.parquet").write_text("damaged")
    saved(tmp_path / "half", nll=NLL[:3], seed=5, finished=False)
    for name, file, text in (("bad", "scores.json", '{"dom'), ("begun", "config.yaml", "seed: 1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert main([str(tmp_path), str(tmp_path / "nowhere")]) == 1
    said = capsys.readouterr()
    errors = said.err.splitlines()
    assert errors[0] == f"{tmp_path / 'nowhere'}: no such folder"
    assert errors[1].startswith(f"{tmp_path / 'bad' / 'scores.json'}: damaged")
    assert len(errors) == 4 and "damaged predictions" in errors[2]
    assert rows_of(said.out, "masked: ")["das"][0].startswith("1 ")
    unfinished = rows_of(said.out, "Unfinished runs")
    assert unfinished[str(tmp_path / "half")] == ["ncl", "5", "unfinished, 3 rows done, the last: food"]
    assert unfinished[str(tmp_path / "begun")][-1] == "begun, nothing measured yet"
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert len(told["unfinished_runs"]) == 2 and len(told["runs_that_could_not_be_read"]) == 4


def test_no_finished_run_is_code_2(tmp_path, monkeypatch, capsys):
    saved(tmp_path / "half" / "1", nll=NLL[:2], finished=False)
    assert main([str(tmp_path / "half"), "--where", "method=ncl"]) == 2
    said = capsys.readouterr()
    assert "Unfinished runs" in said.out
    assert said.err == f"no finished run below {tmp_path / 'half'}: 1 unfinished\n"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folders in ([], ["nowhere"], ["."]):
        assert main(folders) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("no scores.json below") and said.err.count("\n") == 1
        assert list((tmp_path / "empty").iterdir()) == []


@pytest.mark.slow
def test_the_page_with_its_figures(tmp_path):
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, shift=0.1 * (method == "das"))
        for number in (1, 2, 3):
            (tmp_path / method / "diagnostics").mkdir(exist_ok=True)
            arrays = {"importance/a": np.arange(4, dtype=np.float32) * number}
            np.savez(tmp_path / method / "diagnostics" / f"{number:03d}.npz", **arrays)
    assert main([str(tmp_path), "--by", "order"]) == 0
    html = (tmp_path / "comparison.html").read_text()
    assert html.count('src="data:image/png;base64,') == 6
    named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob("comparison-*.pdf")}
    assert named == {*FIGURES, "overlap"} == {path.stem[11:] for path in tmp_path.glob("comparison-*.svg")}
    facets = (
        '{"method": "ncl", "model": "tiny", "order": "law,food,space", "domains": "masked: food, law, space"}'
    )
    assert facets in html.replace("&#34;", '"')


@pytest.mark.slow
def test_nothing_heavy_is_imported():
    heavy = "('torch', 'transformers', 'lightning', 'wandb', 'matplotlib.pyplot')"
    code = f"import sys, cpt.report; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"
