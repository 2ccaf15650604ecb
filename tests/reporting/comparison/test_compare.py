"""`python -m cpt.report`: the whole comparison from folders, and one clear line for what is wrong."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from cpt.report import main, name_files
from cpt.reporting.page import Block
from tests.support.comparing import DOMAINS, NLL, endtasks, made, rows_of, saved
from tests.support.probing import probes

PICTURES = (
    "Forgetting against learning",
    "Quality against compute",
    "Over the stages",
    "Matrices side by side",
)


def pixel():
    file = io.BytesIO()
    Image.new("RGB", (1, 1)).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def drawn(monkeypatch):
    """Which pictures were asked for, and of what, without the seconds of drawing them."""
    from cpt.reporting.comparison import charts, panels

    asked, dot = {}, pixel()
    for name in ("trade_off", "pareto", "matrices", "curves", "overlaps", "posteriors"):

        def draw(groups, *, name=name, **options):
            asked.setdefault(name, []).append((groups, options))
            return dot

        monkeypatch.setattr(charts if hasattr(charts, name) else panels, name, draw)
    return asked


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


def test_thirty_runs(thirty, capsys, drawn):
    assert main([str(thirty)]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "masked: food, law, space")
    assert list(rows)[:3] == ["joint", "das", "ncl"]
    lc = [made(shift=s / 50).metrics["LC"]["perplexity"] for s in range(5)] * 2
    shown = f"{np.mean(lc):.2f} ± {np.std(lc, ddof=1):.2f}"
    assert rows["ncl"][:2] == ["10", shown]
    assert rows["joint"][2:4] == ["–", "–"]
    assert rows_of(output, "Differences from ncl")["das"][:2] == ["ncl", "10"]
    markdown = (thirty / "comparison.md").read_text()
    assert f"| ncl | ncl | tiny | 0, 1 | 10 (5 seeds x 2 orders) | {shown} [" in markdown
    assert "order 1: space → food → law" in markdown
    titles = ["Differences from ncl", "Ranks", "Compute", *PICTURES]
    assert [title for title in titles if f"## {title}\n" not in markdown] == []
    assert {path.suffix for path in thirty.glob("comparison.*")} == {".html", ".md", ".csv", ".tex", ".json"}
    assert output.rstrip().endswith("comparison.html")


def test_what_the_pictures_show(thirty, drawn):
    saved(thirty / "one", method="one")
    assert main([str(thirty), "--export", "none"]) == 0
    assert not (thirty / "comparison.csv").exists()
    plane, quality = drawn["pareto"]
    assert set(plane[0]) == {"das", "ncl"}
    assert quality[1]["logarithmic"]
    assert plane[1]["logarithmic"]  # one method far off would press the others together
    x, y = plane[0]["ncl"]
    assert (x[0], y[0]) == tuple(
        made().metrics[name][unit] for name, unit in (("CPT", "perplexity"), ("FG", "nats"))
    )
    assert quality[0]["ncl"][0] == [6e9] * 10
    assert sorted(map(len, drawn["curves"][0][0].values())) == [1, 10, 10, 10]
    assert set(drawn["matrices"][0][0]) == {"joint", "das", "ncl", "one"}
    assert "overlaps" not in drawn
    assert "posteriors" not in drawn


def test_posteriors_and_overlaps_where_there_are_some(tmp_path, drawn):
    parts = [{}, *[{"law": {"law": 0.7, "food": 0.3}}] * 3]
    scores = saved(tmp_path / "demix", method="demix")
    scores.parts = parts
    scores.save(tmp_path / "demix" / "scores.json")
    for number in (1, 2, 3):
        (tmp_path / "demix" / "diagnostics").mkdir(exist_ok=True)
        path = tmp_path / "demix" / "diagnostics" / f"{number:03d}.npz"
        np.savez(path, **{"importance/a": np.arange(4, dtype=np.float32) * number})
    saved(tmp_path / "none", method="none", nll=NLL[:1])
    assert main([str(tmp_path)]) == 0
    assert list(drawn["overlaps"][0][0]) == ["demix: importance, accumulated"]
    assert set(drawn["matrices"][0][0]) == {"demix"}
    assert list(drawn["posteriors"][0][0]) == ["demix"]


def test_compute_against_the_baseline(tmp_path, capsys, drawn):
    saved(tmp_path / "ncl")
    saved(tmp_path / "das", method="das", shift=-0.1, flops=[0, 10**9, 10**9, 10**9], needs_domain=True)
    saved(tmp_path / "ewc", method="ewc", shift=0.5, flops=[0, 10**10, 10**10, 10**10])
    main([str(tmp_path)])
    text = (tmp_path / "comparison.md").read_text()
    table = text[text.index("## Compute") :].split("##")[2 - 1]
    rows = {
        line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:]
        for line in table.splitlines()
        if "|" in line
    }
    assert rows["das"][:4] == ["3,000", "1.00", "3.00e+09", "0.50"]
    assert rows["ncl"][3:5] == ["1.00", "12"]
    assert rows["das"][-3:] == ["yes", "yes", "yes"]
    assert rows["ewc"][-3:] == ["no", "no", "no"]
    assert "On the Pareto front of LC and FLOPs: das." in table


def test_end_tasks_get_a_table(tmp_path, drawn):
    given = endtasks([[0.5] * 3, [None] * 3, [None] * 3, [0.25, 0.5, 0.75]])
    saved(tmp_path / "ncl", endtasks=given)
    saved(tmp_path / "das", method="das")
    assert main([str(tmp_path)]) == 0
    text = (tmp_path / "comparison.md").read_text()
    assert "| group | law (macro_f1) | food (macro_f1) | space (macro_f1) |" in text
    assert "| ncl | 25.00 | 50.00 | 75.00 |" in text
    assert "MF1 (%)" in text


def test_probes_get_a_table_and_other_shots_are_another_column(tmp_path, drawn):
    saved(tmp_path / "ncl-0", probes=probes({"a": [0.5, None, None, 0.25]}))
    saved(tmp_path / "ncl-1", seed=1, probes=probes({"a": [0.5, None, None, 0.75]}))
    saved(tmp_path / "das", method="das", probes=probes({"a": [0.5, 0.125]}, shots=5))
    saved(
        tmp_path / "ewc",
        method="ewc",
        probes=probes({"w": [9.0, 8.0]}, metric="ppl", higher=False, chance=None),
    )
    saved(tmp_path / "one", method="one")
    assert main([str(tmp_path), "--export", "csv"]) == 0
    text = (tmp_path / "comparison.md").read_text()
    columns = [
        "a (acc, 0 shots, version 1.0)",
        "a (acc, 5 shots, version 1.0)",
        "w (ppl, 0 shots, version 1.0)",
    ]
    head, _, *rows = text.split("## Probes")[1].split("\n\n## ")[0].strip().split("\n\n")[-1].split("\n")
    assert all(column in head for column in columns)
    cells = {
        row.split(" | ")[0].strip("| "): [each.strip("| ") for each in row.split(" | ")[1:]] for row in rows
    }
    shown = dict(zip([each.strip() for each in head.strip("| ").split(" | ")][1:], cells["ncl"], strict=True))
    assert shown[columns[0]].startswith("0.5000 ± 0.3536") and shown[columns[1]] == "–"
    assert "Lower is better: w (ppl, 0 shots, version 1.0)." in text and "one" not in cells
    assert "Chance: " in text and "a (acc, 5 shots, version 1.0) 0.2500" in text
    assert "probe/a/base" in (tmp_path / "comparison.csv").read_text().splitlines()[0]


def test_filters_and_options(thirty, capsys, drawn):
    out = thirty / "new" / "place"
    where = ["--where", "method=das,joint", "order=0"]
    options = [
        "--baseline",
        "joint",
        "--out",
        str(out),
        "--name",
        "mine",
        "--export",
        "json",
        "--domains",
        "law,food",
    ]
    assert main([str(thirty), *where, *options]) == 0
    assert {path.name for path in out.glob("mine.*")} == {"mine.html", "mine.md", "mine.json"}
    (told,) = json.loads((out / "mine.json").read_text())["sections"]
    assert {each["name"]: each["runs"] for each in told["groups"]} == {"joint": 5, "das": 5}
    assert told["baselines"] == {"das": "joint"}
    assert "Metrics on law, food only." in (out / "mine.md").read_text()


def test_by_order(thirty, capsys, drawn):
    assert main([str(thirty), "--by", "order"]) == 0
    assert rows_of(capsys.readouterr().out, "masked")["ncl, order 1"][0] == "5"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "method=magic"], "--where method=magic; there is: das, joint, ncl"),
        (["--where", "colour=red"], "--where colour=red; allowed: KEY=VALUE"),
        (["--domains", "sea"], "--domains sea; there is: food, law, space"),
        (["--baseline", "magic"], "--baseline magic; there is: das, joint, ncl"),
        (["--export", "xls"], "--export xls; allowed: csv, latex, json, none"),
        (["--by", "colour"], "invalid choice: 'colour'"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_options_are_one_line(thirty, capsys, options, said):
    assert main([str(thirty), *options]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("cpt: ")
    assert said in error
    assert list(thirty.glob("comparison.*")) == []


def test_domain_sets_and_objectives_get_sections(tmp_path, capsys, drawn):
    saved(tmp_path / "1")
    saved(tmp_path / "2", seed=1)
    saved(tmp_path / "3", nll=[row[:3] for row in NLL[:3]], order=DOMAINS[:2])
    saved(tmp_path / "4", objective="causal")
    assert main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    counts = {"masked: food, law, space": "2", "masked: food, law\n": "1", "causal: food, law, space": "1"}
    assert all(rows_of(output, title)["ncl"][0] == n for title, n in counts.items())
    markdown = (tmp_path / "comparison.md").read_text()
    places = [markdown.index(f"## {title.strip()} (section") for title in counts]
    assert places[0] == min(places)  # the largest first
    assert "3 sections, each with its own tables" in markdown
    assert "## Compute (section 3)" in markdown


def test_unfinished_begun_and_damaged_runs_are_named(tmp_path, capsys, drawn):
    saved(tmp_path / "good")
    saved(tmp_path / "half", nll=NLL[:3], seed=5, finished=False)
    for name, file, text in (
        ("bad", "scores.json", '{"version": 1, "dom'),
        ("begun", "config.yaml", "seed: 1\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{tmp_path / 'bad' / 'scores.json'}: damaged")
    assert said.err.count("\n") == 1
    assert rows_of(said.out, "masked: ")["ncl"][0] == "1"
    unfinished = rows_of(said.out, "Unfinished runs")
    assert unfinished[str(tmp_path / "half")] == ["ncl", "5", "unfinished, 3 rows done, the last: food"]
    assert unfinished[str(tmp_path / "begun")][-1] == "begun, nothing measured yet"
    markdown = (tmp_path / "comparison.md").read_text()
    assert "could not be read" in markdown
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert len(told["unfinished_runs"]) == 2
    assert len(told["runs_that_could_not_be_read"]) == 1


def test_damaged_predictions_are_named_and_the_rest_is_made(tmp_path, capsys, drawn):
    given = endtasks([[0.5] * 3] * 4)
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, endtasks=given)
        (tmp_path / method / "endtasks" / "003-space").mkdir(parents=True)
        (tmp_path / method / "endtasks" / "003-space" / "law-7.parquet").write_text("damaged")
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "damaged predictions" in said.err
    assert rows_of(said.out, "masked: ")["das"][0] == "1"


def test_no_finished_run_is_code_2(tmp_path, capsys, drawn):
    saved(tmp_path / "half" / "1", nll=NLL[:2], finished=False)
    assert main([str(tmp_path / "half"), "--where", "method=ncl"]) == 2
    said = capsys.readouterr()
    assert "Unfinished runs" in said.out
    assert said.err == f"no finished run below {tmp_path / 'half'}: 1 unfinished\n"
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text("{}")
    assert main([str(tmp_path / "bad")]) == 2
    assert capsys.readouterr().err.endswith(f"no finished run below {tmp_path / 'bad'}: 1 unreadable\n")


@pytest.mark.parametrize("folders", [[], ["nowhere"], ["."]])
def test_no_runs_is_one_line_and_code_2(tmp_path, monkeypatch, capsys, folders):
    monkeypatch.chdir(tmp_path)
    assert main(folders) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no scores.json below")
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_beside_another_is_named(tmp_path, capsys, drawn):
    saved(tmp_path / "1")
    assert main([str(tmp_path / "nowhere"), str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'nowhere'}: no such folder\n"
    assert (tmp_path / "comparison.md").exists()


def test_rows_can_be_filtered_in_the_page(thirty, monkeypatch, drawn):
    pages = []
    monkeypatch.setattr("cpt.report.write_page", lambda blocks, **_: pages.extend(blocks))
    main([str(thirty), "--by", "order", "--export", "none"])
    tables = {block.title: block for block in pages if block.cells}
    ranked = tables["masked: food, law, space"]
    assert all(isinstance(block, Block) and block.filtered for block in tables.values())
    assert ranked.facets[0] == {
        "method": "joint",
        "model": "tiny",
        "order": ranked.cells[0][3],
        "domains": ranked.title,
    }
    assert [row[0] for row in tables["Compute"].cells] == [row[0] for row in ranked.cells]


@pytest.mark.slow
def test_the_real_pictures_and_page(tmp_path):
    for method in ("ncl", "das"):
        saved(tmp_path / method, method=method, shift=0.1 * (method == "das"))
    assert main([str(tmp_path)]) == 0
    html = (tmp_path / "comparison.html").read_text()
    assert html.count("data:image/png;base64,iVBOR") == 0  # all are drawn in the page
    assert html.count("<svg ") == 5 and html.count("<image ") == 3  # two heat maps and their scale
    named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob("comparison-*.pdf")}
    shown = {"forgetting_learning", "quality_compute", "perplexity_forgetting", "stages", "matrices"}
    assert named == shown == {path.stem[11:] for path in tmp_path.glob("comparison-*.svg")}
    assert all(title in html for title in PICTURES)


@pytest.mark.slow
def test_nothing_heavy_is_imported():
    code = (
        "import sys, cpt.report; "
        "heavy = ('torch', 'transformers', 'lightning', 'wandb', 'matplotlib'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_of_many_groups_the_baseline_and_the_best_are_shown(tmp_path, drawn):
    for place in range(9):
        saved(tmp_path / f"m{place}", method=f"m{place}", shift=place / 10)
    saved(tmp_path / "ncl", shift=2.0)
    saved(tmp_path / "ncl-uncounted", shift=2.0, seed=1, costs=False)
    assert main([str(tmp_path), "--export", "none"]) == 0
    assert list(drawn["matrices"][0][0]) == [*(f"m{place}" for place in range(7)), "ncl"]
    assert drawn["pareto"][1][0]["ncl"][0] == [6e9, None]


def test_a_comparison_of_some_runs_does_not_replace_that_of_all(thirty, capsys, drawn):
    options = ["--export", "none"]
    assert main([str(thirty), *options]) == 0
    whole = (thirty / "comparison.html").read_bytes()
    assert main([str(thirty), *options, "--where", "method=das,joint", "order=0"]) == 0
    assert (thirty / "comparison.html").read_bytes() == whole
    assert (thirty / "comparison_method-das.joint_order-0.html").is_file()
    assert "comparison_method-das.joint_order-0.html" in capsys.readouterr().out
    assert len(name_files([f"variant={'x' * 300}"])) < 40
