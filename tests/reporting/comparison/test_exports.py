"""A comparison as data says what the tables say."""

import csv
import io
import json
import math

import numpy as np
import pytest

from cpt.evaluation.scores import RUN_KEYS
from cpt.reporting.comparison.exports import (
    KINDS,
    escape_latex,
    export_sections,
    format_csv,
    format_json,
    format_latex,
)
from tests.support.comparing import DOMAINS, NLL, endtasks, made, run, section


def groups():
    runs = [run(f"top/ncl-{s}", seed=s, shift=x) for s, x in ((0, 0.0), (1, 0.2))]
    runs += [run(f"top/das-{s}", method="das", seed=s, shift=x) for s, x in ((0, -0.3), (1, -0.3))]
    return section([*runs, run("top/one", method="one", shift=-3.0)])


def test_csv_has_a_line_per_run_with_every_number(tmp_path):
    lines = list(csv.DictReader(io.StringIO(format_csv([groups()], top=tmp_path.parent))))
    assert len(lines) == 5
    (only,) = [line for line in lines if line["method"] == "ncl" and line["seed"] == "1"]
    scores = made(shift=0.2, seed=1)
    assert {*RUN_KEYS} - {"finished"} <= set(only)
    assert only["order"] == "law food space"
    assert only["group"] == "ncl"
    assert float(only["LC/perplexity"]) == pytest.approx(scores.metrics["LC"]["perplexity"])
    assert float(only["compared/LC/perplexity"]) == pytest.approx(scores.metrics["LC"]["perplexity"])
    assert float(only["compared/intransigence/nats"]) == pytest.approx((0.2 + 3.0) / 3)
    assert only["compared/cost/flops"] == "6000000000.0"


def test_what_a_sweep_minimises_does_not_hide_the_objective(tmp_path):
    only = section([run(objective="causal")])
    only.runs[0].scores.objective = 123.5
    (line,) = csv.DictReader(io.StringIO(format_csv([only], top=tmp_path)))
    assert (line["objective"], line["objective/value"]) == ("causal", "123.5")


def test_csv_places_are_seen_from_where_it_lies(tmp_path):
    only = section([run(tmp_path / "runs" / "a")])
    (line,) = csv.DictReader(io.StringIO(format_csv([only], top=tmp_path)))
    assert line["folder"] == "runs/a"


def test_names_with_commas_and_quotes_survive_csv():
    only = section([run(variant='a="x, y"'), run(method="das")])
    lines = list(csv.DictReader(io.StringIO(format_csv([only], top=only.runs[0].folder))))
    assert {line["variant"] for line in lines} == {'a="x, y"', ""}


def test_latex_is_a_booktabs_table_with_the_best_in_bold():
    text = format_latex([groups()])
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    rows = {
        line.split(" & ")[0]: [cell.lstrip("\\").removesuffix(r" \\") for cell in line.split(" & ")[1:]]
        for line in body
    }
    assert list(rows) == ["one", "das", "ncl"]
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    counts = {line.count("&") for line in text.splitlines() if "&" in line}
    assert counts == {len(rows["das"])}
    lc = [rows[name][1] for name in ("one", "das", "ncl")]
    assert [cell.startswith("textbf{") for cell in lc] == [False, True, False]  # `one` has no last model
    mean = np.mean([made(shift=x).metrics["LC"]["perplexity"] for x in (0.0, 0.2)])
    assert lc[2].startswith(f"{mean:.2f} $\\pm$ " if mean < 100 else f"{mean:.1f} $\\pm$ ")
    assert rows["one"][2].startswith("textbf{")  # but its CPT counts


def test_equal_means_are_both_bold():
    text = format_latex([section([run(), run(method="das")])])
    assert text.count(r"\textbf{") == 2 * 4


def test_a_negative_number_has_a_minus_sign():
    assert r"$-$" in format_latex([section([run(shift=-1.0)])])


def test_higher_is_better_for_end_tasks():
    runs = [run(method=m, endtasks=endtasks([[x] * 3] * 4)) for m, x in (("ncl", 0.5), ("das", 0.75))]
    assert r"\textbf{75.00}" in format_latex([section(runs)])
    assert r"\textbf{50.00}" not in format_latex([section(runs)])


def test_escapes():
    assert escape_latex("a_b & 5 % #1 {x} $") == r"a\_b \& 5 \% \#1 \{x\} \$"
    assert escape_latex("\\^~") == r"\textbackslash{}\textasciicircum{}\textasciitilde{}"
    assert r"das (a\_b=1)" in format_latex([section([run(), run(method="das", variant="a_b=1")])])


def test_json_has_groups_differences_and_values():
    (told,) = json.loads(format_json([groups()], top=run("top").folder, beside={"more": [1]}))["sections"]
    assert [group["name"] for group in told["groups"]] == ["one", "das", "ncl"]
    lc = told["groups"][2]["spreads"]["LC/perplexity"]
    values = [made(shift=x).metrics["LC"]["perplexity"] for x in (0.0, 0.2)]
    assert (lc["n"], lc["mean"]) == (2, pytest.approx(np.mean(values)))
    assert lc["sd"] == pytest.approx(np.std(values, ddof=1))
    das = told["differences"]["FG/nats"]["das"]
    assert das["mean"] == pytest.approx(-0.4)
    assert (das["n"], das["p"]) == (2, 0.5)
    assert das["p_holm"] == 1.0
    assert told["baselines"]["das"] == "ncl"
    assert told["ranks"]["FG/nats"] == {"das": 1.0, "ncl": 2.0}
    assert len(told["runs"]) == 5
    assert told["runs"][1]["folder"] == "das-0"
    assert told["domains"] == sorted(DOMAINS)


def test_json_knows_no_nan():
    diverged = np.array(NLL)
    diverged[3] = math.nan
    text = format_json(
        [section([run(), run(method="das", nll=diverged)])], top=run("x").folder, beside={"x": math.inf}
    )
    assert "NaN" not in text
    assert json.loads(text)["x"] is None


def test_what_is_asked_for_is_written(tmp_path):
    stem = tmp_path / "v1.5"
    paths = export_sections([groups()], stem=stem, kinds=KINDS, beside={})
    assert [path.name for path in paths] == ["v1.5.csv", "v1.5.tex", "v1.5.json"]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    (only,) = export_sections([groups()], stem=tmp_path / "x", kinds=["json"], beside={})
    assert only.name == "x.json"
