"""`python -m cpt.report`: a whole comparison, tables of a paper, published numbers next to ours."""

import itertools
import json
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel

from cpt import load_tables
from cpt.core.config import CONF
from cpt.report import main
from cpt.reporting import comparison_figures
from cpt.reporting.drawing import Picture
from cpt.reporting.measures import MEASURES
from cpt.reporting.published import PUBLISHED, PublishedRow, compare_group, read_published
from cpt.reporting.tex import measure_matrices, write_tables
from tests.support.example_runs import (
    DOMAINS,
    make_endtasks,
    make_run,
    make_scores,
    make_section,
    parse_table,
    save_scores,
)

NASTY = ["after", "law\n\\input{/etc/passwd}\n", "a & b % c", "$x_1 ~ ^ #{}", "1 < 2 | ± – →"]
FIGURES = {"forgetting_learning", "quality_compute", "perplexity_forgetting", "stages", "matrices"}


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(comparison_figures, "build_figures", lambda section: [])


@pytest.fixture
def swept(tmp_path):
    """Two methods, two orders, two seeds: das is better, each time by nearly the same."""
    for number, order in enumerate((DOMAINS, DOMAINS[::-1])):
        for seed in (0, 1):
            for method, gain in (("ncl", 0.0), ("das", 0.2 + 0.001 * seed)):
                diagonal = [[0.8, None, None], [None, 0.8, None]]
                last = [0.5 + gain + 0.01 * seed, 0.6, 0.7]
                endtasks = make_endtasks([[None] * 3, *diagonal, last], when="each", tasks=order)
                config = {"order": number, "seed": seed, "method": {"strength": 5.0 if gain else None}}
                save_scores(
                    tmp_path / "swept" / f"{method}-{number}-{seed}",
                    method=method,
                    order=order,
                    seed=seed,
                    shift=-gain,
                    config=config,
                    endtasks=endtasks,
                )
    return tmp_path / "swept"


def test_runs_are_compared_all_and_those_that_are_asked_for(swept, tmp_path, capsys, no_figures):
    assert main([str(swept)]) == 0
    rows = parse_table(capsys.readouterr().out, "masked: food, law, space")
    assert rows["ncl"][:2] == [
        "4 (2 seeds x 2 orders)",
        f"{make_scores().metrics['LC']['perplexity']:.2f} ± 0.00",
    ]
    out = tmp_path / "new" / "place"
    options = ["--where", "method=das,ncl", "order=0", "--baseline", "das", "--out", str(out)]
    assert main([str(swept), *options, "--name", "mine"]) == 0
    assert {path.suffix for path in out.glob("mine.*")} == {".html", ".md", ".csv"}
    rows = parse_table(capsys.readouterr().out, "Differences from das")
    assert rows["ncl"][:2] == ["das", "2"]


def test_links_to_runs_are_not_followed_and_the_error_mentions_them(swept, tmp_path, capsys):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "run").symlink_to(swept / "das-0-0")
    assert main([str(tmp_path / "linked")]) == 2
    error = capsys.readouterr().err
    assert "no run below it" in error and "links in them are not followed" in error


def test_one_run_has_its_own_page_and_no_comparison(swept, tmp_path, capsys, no_figures):
    run = swept / "das-0-0"
    (run / "report.html").write_text("its page")
    before = sorted(path.name for path in run.iterdir())
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f"{run}/report.html")
    assert sorted(path.name for path in run.iterdir()) == before
    # A comparison that is asked for, and one of a folder with runs, are written.
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "comparison.html").is_file()
    assert main([str(run), str(swept / "ncl-0-0")]) == 0 and (run / "comparison.html").is_file()


def test_the_numbers_of_tables_are_those_of_the_frames_and_marks_those_of_the_tests(
    swept, tmp_path, no_figures
):
    assert main([str(swept), "--tex", str(tmp_path / "tex")]) == 0
    tex = {path.stem: path.read_text() for path in (tmp_path / "tex").glob("*.tex")}
    kinds = itertools.product(("perplexity", "endtasks"), ("ncl", "das"), "01")
    matrices = {f"matrix-{kind}-{method}-{order}" for kind, method, order in kinds}
    assert set(tex) == {"main", "endtasks", "orders-MF1", "orders-LC", "settings"} | matrices

    frames = load_tables(swept)
    law = frames["endtasks"].query("measure == 'task/law'").set_index("group")
    das = [0.7, 0.711, 0.7, 0.7]
    ncl = [0.5, 0.51, 0.7, 0.7]
    mean = np.mean(ncl)
    sd = np.std(ncl, ddof=1)
    assert [law["mean"]["ncl"], law["sd"]["ncl"]] == pytest.approx([mean, sd])
    assert law["p_t_holm"]["das"] == pytest.approx(ttest_rel(das, ncl).pvalue) and law["n"]["das"] == 4
    assert f"\nncl & {100 * mean:.2f} $\\pm$ {100 * sd:.2f} & " in tex["endtasks"]

    best = frames["main"].query("measure == 'LC/perplexity' and group == 'das'").squeeze()
    assert best["p_holm"] == 0.125 and best["p_t_holm"] < 0.05  # of 4 pairs no p of signs is below 0.125
    cell = f"\\textbf{{{best['mean']:.2f} $\\pm$ {best['sd']:.2f}}}\\textsuperscript{{$\\dagger$}}"
    assert f"\ndas & {cell} & " in tex["main"] and "das & strength~=~5 \\\\" in tex["settings"]

    orders = frames["orders"].query("measure == 'endtask/MF1' and group == 'das'").set_index("order")["mean"]
    assert orders["all"] == pytest.approx((orders["0"] + orders["1"]) / 2)


def test_a_negative_number_has_a_minus_in_tables(tmp_path):
    runs = [make_run(method="ncl", seed=seed, shift=-0.5) for seed in range(2)]
    forgetting = runs[0].scores.metrics["FG"]["nats"]
    assert forgetting < 0
    write_tables([make_section(runs)], tmp_path)
    cell = f"\\textbf{{$-${-forgetting:.4f} $\\pm$ 0.0000}}"  # the best of one group
    assert f" & {cell} & " in (tmp_path / "main.tex").read_text()


def test_long_names_of_groups_are_broken_into_lines(tmp_path):
    name = "er (replay.sources={'web_pages': {'path': /data/corpora/web_pages/parts, 'ratio': 0.05}})"
    runs = [make_run(method=method) for method in ("ncl", name)]
    write_tables([make_section(runs)], tmp_path)
    main_table = (tmp_path / "main.tex").read_text()
    assert r"\begin{tabular}{p{0.35\linewidth}r" in main_table and "\nncl & " in main_table
    (row,) = [line for line in main_table.splitlines() if "raggedright" in line]
    unbroken_parts = re.split(r"\\allowbreak\{\}| ", row.partition(" & ")[0])
    assert max(map(len, unbroken_parts)) < 20

    write_tables([make_section(runs[:1])], tmp_path)
    assert r"\begin{tabular}{lr" in (tmp_path / "main.tex").read_text()


@pytest.mark.parametrize("name", NASTY)
def test_names_in_tables_are_nothing_but_names(name, tmp_path):
    endtasks = make_endtasks([[None] * 3] * 3 + [[0.5] * 3], tasks=[name, *DOMAINS[1:]])
    order = [name, "food", "space"]
    runs = []
    for method in ("ncl", name):
        for seed in (0, 1):
            runs.append(make_run(method=method, seed=seed, order=order, endtasks=endtasks))
    for path in write_tables([make_section(runs)], tmp_path):
        rows = re.sub(r"(?s).*\\toprule|\\bottomrule.*", "", path.read_text()).replace("\\midrule", "")
        cells_of_rows = {re.sub(r"\\&", "", row).count("&") for row in rows.split("\\\\\n") if row.strip()}
        assert len(cells_of_rows) == 1
        assert not re.search(r"\\input|(?<!\\)[#%_]|[±–→]", rows)


@pytest.mark.slow
def test_the_page_has_its_figures(tmp_path, monkeypatch):
    for method, shift in (("ncl", 0.0), ("das", 0.1)):
        save_scores(tmp_path / method, method=method, shift=shift)
    assert main([str(tmp_path), "--by", "order"]) == 0
    assert (tmp_path / "comparison.html").read_text().count("<svg") == 5
    for kind in ("pdf", "svg", "png"):
        named = {path.stem.removeprefix("comparison-") for path in tmp_path.glob(f"comparison-*.{kind}")}
        assert named == FIGURES
    monkeypatch.setattr(Picture, "save", lambda picture, kind: b"")  # they are drawn above
    assert main([str(tmp_path), "--figures", str(tmp_path / "out")]) == 0
    named = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    assert named >= {"comparison-stages", "ncl-matrix", "das-stages"}


def test_shipped_rows_are_of_known_methods_and_measures():
    methods = {path.stem for path in (CONF / "method").glob("*.yaml")}
    masks = {path.stem for path in (CONF / "mask").glob("*.yaml")}
    keys = {measure.key for measure in MEASURES} | {"task/acl", "task/ai"}
    rows = itertools.chain.from_iterable(read_published(path.stem) for path in PUBLISHED.glob("*.json"))
    for row in rows:
        for group in row.groups:
            method, *additions = group.split(" + ")
            assert method in methods and set(additions) <= masks | {"replay past"}
        assert set(row.values) <= keys and row.source and row.orders


def test_a_difference_is_ours_minus_what_was_published(tmp_path, capsys, no_figures):
    variants = {"ncl": "trainer.devices=4", "das": "contrast=0", "one": ""}
    for method, seed in itertools.product(variants, range(3)):
        save_scores(
            tmp_path / f"{method}-{seed}",
            method=method,
            seed=seed,
            variant=variants[method],
            config={"order": 0, "seed": seed, "method": {"form": "x"}},
            endtasks=make_endtasks([[0.75 + seed / 100] * 3] * 4),
        )
    assert main([str(tmp_path), "--published", "das6"]) == 0
    rows = parse_table(capsys.readouterr().out, "Published numbers")
    # 75, 76 and 77: mean 76, t(0.975, 2) / sqrt(3) = 2.4841 either way
    assert rows["ncl (trainer.devices=4)"][-3:] == ["76.00 ± 1.00", "80.77", "-4.77 [-7.25, -2.29]"]
    assert not [name for name in rows if name.startswith(("das", "one"))]  # an ablation is not that method
    published_row = {"name": "mine", "groups": ["one"], "source": "S", "table": None, "page": 4}
    published_row |= {"values": {"endtask/MF1": 40.0}, "settings": {"method.form": "x"}, "orders": None}
    (tmp_path / "own.json").write_text(
        json.dumps({"rows": [published_row, published_row | {"settings": {"seed": 9}}]})
    )
    assert main([str(tmp_path), "--published", str(tmp_path / "own.json")]) == 0
    output = capsys.readouterr().out
    assert parse_table(output, "Published numbers")["one"][:2] == ["mine", "S, page 4"]
    assert "Without a group here: 1 of 2 published rows." in output


def test_copies_of_a_run_count_as_one(tmp_path):
    runs = []
    for seed, score in ((0, 0.75), (1, 0.76), (2, 0.77), (2, 0.77), (2, 0.77)):
        endtasks = make_endtasks([[score] * 3] * 4)
        runs.append(make_run(method="ncl", seed=seed, endtasks=endtasks))
    row = PublishedRow("x", ["ncl"], {"endtask/MF1": 80.0}, source="S", table=None, page=None)
    section = make_section(runs)
    (cells,) = compare_group(section.groups[0], row)
    assert cells[-3:] == ["76.00 ± 1.00", "80.00", "-4.00 [-6.48, -1.52]"]
    assert section.groups[0].mean("endtask/MF1") == pytest.approx(0.76)
    assert set(measure_matrices(section)["n"]) == {3}


def test_another_name_or_form_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"rows": [{"name": "x"}]}')
    for published in ("das7", str(tmp_path / "other.json")):
        assert main([str(tmp_path), "--published", published]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"cpt: --published {published} is invalid") and "Allowed: das6, long_" in line
        assert ("there is no such file" in line) == (published == "das7") and str(PUBLISHED) in line


@pytest.mark.parametrize("option", ["--tex", "--out", "--name", "--curve", "--published"])
def test_an_option_of_the_comparison_is_refused_with_figures(option, tmp_path, capsys):
    assert main([str(tmp_path), "--figures", str(tmp_path / "figures"), option, "x"]) == 1
    message = f"cpt: {option} is invalid with --figures, which writes no comparison. Allowed: one of them\n"
    assert capsys.readouterr().err == message
