"""The reports say what scores.json says, need nothing but themselves, and survive odd and large runs."""

import json
import math
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from cpt import figures, report
from cpt.metrics import METRICS, described
from cpt.scores import Scores

NLL = [[5.12, 5.15, 5.2, 4.98], [4.65, 4.8, 5.0, 5.14], [4.89, 3.79, 4.9, 5.2], [4.95, 4.1, 4.0, 5.25]]
DOMAINS = ["sympy", "networkx", "pandas", "general"]


def made(*, nll=NLL, domains=DOMAINS, rows=None, digest="d", **given):
    order = [name for name in domains if name != "general"]
    run = {"name": "trial", "method": "ncl", "mask": "none", "model": "tiny", "order": order, "seed": 0}
    size = len(domains)
    scores = Scores(
        domains=list(domains),
        rows=["base", *order][: len(nll)] if rows is None else rows,
        nll=np.asarray(nll, float).tolist(),
        tokens=[1000 + place for place in range(size)],
        bytes=[4000 + place for place in range(size)],
        scored=[150 + place for place in range(size)],
        run=run | {"replay": "none", "variant": "", "finished": True, "objective": "masked"} | given,
        texts={name: {"digest": f"{digest}-{name}", "documents": 7} for name in domains},
        config_digest="0123abcd",
        versions={"python": "3.11", "torch": "2.13"},
        seconds=123.4,
        phases={"score base": 2.25, "learn sympy": 41.5},
    )
    scores.measure()
    return scores


def written(folder, scores, *, config="seed: 0  # a < b\n"):
    folder.mkdir(parents=True, exist_ok=True)
    scores.save(folder / "scores.json")
    if config:
        (folder / "config.yaml").write_text(config)
    report.write(folder)
    return (folder / "report.md").read_text(), (folder / "report.html").read_text()


class Page(HTMLParser):
    """The tables of a page as lists of texts, and whatever it would load."""

    VOID = ("meta", "img", "br", "link")

    def __init__(self, html):
        super().__init__()
        self.cells, self.loads, self.open = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]
        self.open += [tag] * (tag not in self.VOID)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def many(count=236):
    generator = np.random.default_rng(0)
    names = [f"Natural_and_physical_sciences__Topic_{place}" for place in range(count)]
    nll = generator.normal(3.3, 0.4, size=(1, count + 1)) + generator.normal(
        0, 0.1, size=(count + 1, count + 1)
    )
    return made(nll=nll, domains=[*names, "general"])


def test_a_report_shows_every_number_of_the_matrix(tmp_path):
    markdown, html = written(tmp_path, made())
    page = Page(html)
    assert page.open == []
    for value in np.ravel(NLL):
        shown = figures.perplexity(math.exp(value))
        assert shown in page.cells
        assert f" {shown} " in markdown


def test_a_report_shows_every_metric_with_its_formula_and_interval(tmp_path):
    scores = made()
    generator = np.random.default_rng(0)
    counts = [np.full(30, 20)] * 4
    sums = [(np.array(NLL)[:, column, None] + generator.normal(0, 0.3, 30)) * 20 for column in range(4)]
    scores.nll = np.stack([total.sum(1) / 600 for total in sums], 1).tolist()
    scores.measure(nll_sums=sums, counts=counts)
    markdown, html = written(tmp_path, scores)
    cells = Page(html).cells
    for name, metric in METRICS.items():
        value, (low, high) = scores.metrics[name]["nats"], scores.metrics[name]["interval"]["nats"]
        at = cells.index(name)
        assert cells[at + 1 : at + 3] == list(described(metric.compute))
        assert cells[at + 3] == f"{value:.4f} [{low:.4f}, {high:.4f}]"
        assert cells[at + 4].startswith(figures.perplexity(scores.metrics[name]["perplexity"]))
        assert cells[at + 5].startswith(f"{scores.metrics[name]['bits_per_byte']:.4f}")
        assert cells[at + 3] in markdown


def test_a_report_says_what_was_run(tmp_path):
    for text in written(tmp_path, made(method="ewc", mask="migu", seed=41)):
        for part in ("ewc + migu", "tiny (masked)", "sympy → networkx → pandas", "41", "torch 2.13", "123.4"):
            assert part in text
        for part in ("learn sympy", "41.5", "d-pandas", "1,002", "0123abcd", "<details>"):
            assert part in text
    assert "a &lt; b" in (tmp_path / "report.html").read_text()
    assert "a < b" in (tmp_path / "report.md").read_text()


def with_parts(scores, *, needs_domain=True):
    """The scores of a run whose model has a part for each domain."""
    own = {name: {name: 1.0} for name in DOMAINS[:3]}
    mixed = {"general": {"pandas": 0.6251, "base": 0.2249, "sympy": 0.149, "networkx": 0.001}}
    scores.parts = [{}, {"sympy": {"sympy": 1.0}, "general": {"base": 1.0}}, {}, own | mixed]
    scores.trained, scores.stored = [0, 5120, 5120, 5120], [0, 2_000_000, 3_000_000, 4_500_000]
    scores.needs_domain, scores.loading = needs_domain, 'cpt.exported.load("model", domain="pandas")'
    return scores


def test_a_report_shows_which_part_scored_a_text(tmp_path):
    markdown, html = written(tmp_path, with_parts(made()))
    for cells in (Page(html).cells, [cell.strip() for cell in markdown.replace("\n", "|").split("|")]):
        assert {"pandas 0.63, base 0.22, sympy 0.15, …", "base", "must be known", "5,120 parameters"} <= set(
            cells
        )
        assert "4.50 MB, 1.25 MB more with each domain" in cells
        assert 'cpt.exported.load("model", domain="pandas")' in cells
    assert len(Page(html).loads) == 3
    assert "Parts of the model" not in written(tmp_path / "plain", made())[0]
    assert "need not be known" in written(tmp_path / "told", with_parts(made(), needs_domain=False))[0]


def test_the_picture_of_parts_is_of_the_last_model():
    first, earlier, later = (with_parts(made()) for _ in range(3))
    earlier.parts[1] = {"sympy": {"base": 1.0}}
    later.parts[-1]["general"] = {"base": 1.0}
    pictures = [figures.mixtures(scores) for scores in (first, earlier, later)]
    assert pictures[0] == pictures[1] != pictures[2]


def test_the_picture_of_parts_takes_many_domains():
    scores = many()
    scores.parts = [{} for _ in scores.rows]
    scores.parts[-1] = {name: {name: 0.5, "base": 0.5} for name in scores.domains[:-1]}
    assert figures.mixtures(scores).startswith(b"\x89PNG")


def test_a_comparison_has_the_costs(tmp_path, capsys):
    for seed in (0, 1):
        folder = tmp_path / f"adapter-{seed}"
        folder.mkdir()
        with_parts(made(method="adapter", seed=seed)).save(folder / "scores.json")
    save(tmp_path / "ncl")
    assert report.main([str(tmp_path)]) == 0
    rows = rows_of(capsys.readouterr().out, "masked: ")
    assert rows["adapter"][6:10] == ["5,120 ± 0", "4.50 MB ± 0.00 MB", "1.25 MB ± 0.00 MB", "yes"]
    assert rows["ncl"][6:10] == ["0", "–", "–", "no"]


def test_documents_may_be_counted_by_split(tmp_path):
    scores = made()
    scores.texts["pandas"]["documents"] = {"train": 179, "test": 21}
    for text in written(tmp_path, scores):
        assert "train 179, test 21" in text


def test_the_page_loads_nothing_and_the_markdown_finds_its_pictures(tmp_path):
    markdown, html = written(tmp_path, made(), config="")
    loads = Page(html).loads
    assert len(loads) == 2
    assert all(load.startswith("data:image/png;base64,iVBOR") for load in loads)
    assert not re.search(r"(https?:)?//[\w.]|@import|url\(", re.sub(r"base64,[^\"]+", "", html))
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", markdown)
    assert len(pictures) == 2
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_names_are_not_taken_for_markup(tmp_path):
    names = ["<script>alert(1)</script>", "a|b", "$\\frac$ & x", "general"]
    markdown, html = written(tmp_path, made(domains=names))
    page = Page(html)
    assert set(names) <= set(page.cells)
    assert "<script>" not in html + markdown
    assert "| a/b |" in markdown


@pytest.mark.parametrize(
    "scores",
    [
        made(nll=NLL[:1], finished=False),
        made(nll=NLL[:2], finished=False),
        made(nll=[], finished=False),
        made(nll=[NLL[0], NLL[3]], rows=["base", "joint"], method="joint"),
        made(nll=[row[:1] for row in NLL[:2]], domains=["sympy"]),
        made(nll=[row[:3] for row in NLL], domains=DOMAINS[:3]),
        made(nll=[*NLL[:2], [800.0, math.nan, math.inf, 5.0], [math.nan] * 4]),
    ],
    ids=["base", "one stage", "no row", "joint", "one domain", "no general text", "diverged"],
)
def test_runs_that_lack_something(tmp_path, scores):
    markdown, html = written(tmp_path, scores)
    assert Page(html).open == []
    assert set(scores.metrics) == {name for name in METRICS if f"\n| {name} |" in markdown}
    assert ("unfinished" in markdown) == (not scores.run["finished"])
    assert all(row in report.table(scores) for row in scores.rows)


def test_236_domains_take_seconds(tmp_path):
    scores = many()
    began = time.perf_counter()
    _, html = written(tmp_path, scores)
    text = report.table(scores)
    assert time.perf_counter() - began < 10
    cells = set(Page(html).cells)
    assert {figures.perplexity(value) for value in np.exp(scores.matrix).ravel().tolist()} <= cells
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert len(text.splitlines()) < 25
    assert "8 of 237 test texts" in text


def test_the_console_table():
    text = report.table(made())
    lines = [line.split() for line in text.splitlines()]
    assert ["after", *DOMAINS] in lines
    assert ["networkx", "133.0", "44.26", "134.3", "181.3"] in lines
    assert [line[0] for line in lines if line[:1] and line[0] in METRICS] == ["LC", "FG", "general_drift"]
    assert "4.3500" in text
    assert "seed 0, finished" in text


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 20])
def test_the_console_table_is_narrow(count):
    names = [f"a_domain_with_a_long_name_{place}" for place in range(count)]
    nll = np.full((count + 1, count + 1), 9.9)
    lines = report.table(made(nll=nll, domains=[*names, "general"])).splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert "19,930" in lines[3]


def test_names_are_shortened_in_their_middle():
    assert figures.shortened("pandas", width=6) == "pandas"
    assert figures.shortened("a_long_name_1", width=7) == "a_l…e_1"
    assert len(figures.shortened("a_long_name_1", width=8)) == 8


@pytest.mark.parametrize(
    ("value", "shown"),
    [(44.256, "44.26"), (133.04, "133.0"), (-0.5, "-0.50"), (12345.6, "12,346"), (2.5e7, "2.5e+07")]
    + [(math.inf, "inf"), (math.nan, "nan"), (None, "nan")],
)
def test_perplexities_are_written_to_be_read(value, shown):
    assert figures.perplexity(value) == shown


def test_labels_are_moved_apart_and_keep_their_order():
    wanted = {"a": 0.5, "b": 0.51, "c": 0.99, "d": 1.0, "e": 0.98, "f": 0.02}
    placed = figures._apart(wanted, gap=0.05)
    heights = sorted(placed.values())
    assert sorted(placed, key=placed.get) == sorted(wanted, key=wanted.get)
    assert min(np.diff(heights)) >= 0.05 - 1e-9
    assert heights[-1] <= 1
    assert placed["f"] == 0.02


def test_pictures_leave_pyplot_alone():
    code = (
        "import sys; from cpt import report, figures; assert 'matplotlib' not in sys.modules; "
        "figures.trade_off({'ncl': ([0.1, 0.2], [50.0, 60.0])}); "
        "print([m for m in ('matplotlib.pyplot', 'torch', 'lightning') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"ncl": ([0.3], [60.0])},
        {"joint": ([None, None], [50.0, 52.0])},
        {"ncl": ([0.3, None], [60.0, 61.0]), "none": ([None], [None]), "$": ([0.1, 0.2], [55.0, None])},
    ],
)
def test_the_trade_off_of_few_runs(groups):
    assert figures.trade_off(groups).startswith(b"\x89PNG")


# --- over runs


def shifted(by):
    return [NLL[0], NLL[1], NLL[2], [value + by for value in NLL[3]]]


def save(folder, **given):
    folder.mkdir(parents=True)
    scores = made(**given)
    scores.save(folder / "scores.json")
    return scores


def rows_of(output, first):
    """The lines of the printed tables by their first cell, from the table whose heading starts with
    `first`."""
    lines = output[output.index(first) :].split("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line) for line in lines[2:])}


def test_runs_are_grouped_by_all_but_their_seed(tmp_path, capsys):
    kept = [
        save(tmp_path / "a" / f"ncl-{seed}", nll=shifted(by), seed=seed)
        for seed, by in enumerate((0, 0.1, 0.3))
    ]
    save(tmp_path / "a" / "ewc", nll=shifted(-0.2), method="ewc")
    save(tmp_path / "b" / "deep" / "masked", nll=shifted(0.5), method="ewc", mask="migu")
    save(tmp_path / "b" / "mixed", nll=shifted(0.6), replay="past")
    save(tmp_path / "b" / "both", nll=shifted(0.7), mask="migu", replay="past")
    assert report.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    rows = rows_of(capsys.readouterr().out, "masked: networkx, pandas, sympy")
    labels = ["ewc", "ncl", "ewc + migu", "ncl + replay past", "ncl + migu + replay past"]
    assert list(rows)[:5] == labels
    lc = [scores.metrics["LC"]["perplexity"] for scores in kept]
    fg = [scores.metrics["FG"]["nats"] for scores in kept]
    assert rows["ncl"][:2] == ["3", f"{np.mean(lc):.2f} ± {np.std(lc, ddof=1):.2f}"]
    assert rows["ncl"][3] == f"{np.mean(fg):.4f} ± {np.std(fg, ddof=1):.4f}"
    assert rows["ewc"][0] == "1"
    assert "±" not in " ".join(rows["ewc"])
    assert rows["ewc"][-1] == "123"


def test_the_comparison_is_written_to_the_first_folder(tmp_path, capsys):
    save(tmp_path / "runs" / "ncl")
    save(tmp_path / "runs" / "joint", nll=[NLL[0], NLL[3]], rows=["base", "joint"], method="joint")
    assert report.main([str(tmp_path / "runs")]) == 0
    html = (tmp_path / "runs" / "comparison.html").read_text()
    page = Page(html)
    assert page.open == []
    assert [load[:22] for load in page.loads] == ["data:image/png;base64,"]
    assert "//" not in re.sub(r"base64,[^\"]+", "", html)
    assert page.cells[page.cells.index("joint") + 3 :][:4] == ["–"] * 2 + ["0.2700", "–"]
    markdown = (tmp_path / "runs" / "comparison.md").read_text()
    assert "| ncl | 1 |" in markdown
    assert (tmp_path / "runs" / "comparison-1.png").exists()
    assert "general drift" in capsys.readouterr().out


def test_models_and_orders_are_told_apart(tmp_path, capsys):
    save(tmp_path / "1")
    save(tmp_path / "2", model="large")
    save(tmp_path / "3", order=["pandas", "sympy", "networkx"])
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "masked: networkx, pandas, sympy")
    assert {"ncl, tiny, order 1", "ncl, large, order 1", "ncl, tiny, order 2"} <= set(rows)
    assert "ncl, tiny, order 2: pandas → sympy → networkx" in output


def test_domain_sets_and_objectives_get_tables_of_their_own(tmp_path, capsys):
    save(tmp_path / "1")
    save(tmp_path / "2", nll=[row[:2] for row in NLL[:3]], domains=DOMAINS[:2])
    save(tmp_path / "3", objective="causal")
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    all_three = "networkx, pandas, sympy\n"
    titles = [f"masked: {all_three}", "masked: networkx, sympy\n", f"causal: {all_three}"]
    assert all(output.count(title) == 1 for title in titles)
    assert all(rows_of(output, title.strip())["ncl"][0] == "1" for title in titles)
    assert len(Page((tmp_path / "comparison.html").read_text()).loads) == 3


def test_intransigence_against_one_of_the_same_seed(tmp_path, capsys):
    alone = np.array(NLL)
    for seed, less in ((0, 0.1), (1, 0.4)):
        save(tmp_path / f"one-{seed}", nll=alone - less, method="one", seed=seed)
    for seed in (0, 1, 2):
        save(tmp_path / f"ncl-{seed}", nll=alone + seed / 20, seed=seed)
    save(tmp_path / "other", model="other")
    save(tmp_path / "joint", nll=[NLL[0], NLL[3]], rows=["base", "joint"], method="joint")
    save(tmp_path / "a-mixed", nll=alone - 0.9, method="one", replay="general")  # not learned alone
    save(tmp_path / "a-masked", nll=alone - 0.9, method="one", mask="migu")  # nor this one as it is
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "masked: ")
    expected = [0.1, 0.45, 0.2]  # seed 2 has no `one` of its own
    assert rows["ncl, tiny"][5] == f"{np.mean(expected):.4f} ± {np.std(expected, ddof=1):.4f}"
    assert rows["ncl, other"][5] == rows["one, tiny"][5] == rows["joint, tiny"][5] == "–"
    assert "`one` learns every domain from the base" in output


def test_what_keeps_runs_from_being_compared_is_said(tmp_path, capsys):
    save(tmp_path / "1")
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "test texts differ" not in output
    assert "one seed" not in output
    save(tmp_path / "2", digest="other")
    assert report.main([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "The test texts differ between the runs." in output
    assert "ncl: runs with one seed" in output


def test_unfinished_and_damaged_runs_are_listed(tmp_path, capsys):
    save(tmp_path / "good")
    save(tmp_path / "half", nll=NLL[:3], seed=5, finished=False)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text('{"version": 1, "dom')
    assert report.main([str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{tmp_path / 'bad' / 'scores.json'}: damaged")
    assert said.err.count("\n") == 1
    assert rows_of(said.out, "masked: ")["ncl"][0] == "1"
    assert rows_of(said.out, "Unfinished runs")[str(tmp_path / "half")] == [
        "ncl",
        "5",
        "unfinished, 3 rows done, the last: networkx",
    ]
    markdown = (tmp_path / "comparison.md").read_text()
    assert "could not be read" in markdown
    assert "unfinished, 3 rows done" in markdown


def test_only_unfinished_or_only_damaged_runs(tmp_path, capsys):
    save(tmp_path / "half" / "1", nll=NLL[:2], finished=False)
    assert report.main([str(tmp_path / "half")]) == 0
    assert "Unfinished runs" in capsys.readouterr().out
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "scores.json").write_text("{}")
    assert report.main([str(tmp_path / "bad")]) == 1
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("folders", [[], ["nowhere"], ["."]])
def test_no_runs_is_one_line_and_code_2(tmp_path, folders):
    command = [sys.executable, "-m", "cpt.report", *folders]
    environment = os.environ | {"PYTHONPATH": str(Path(report.__file__).parents[1])}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("no scores.json below")
    assert list(tmp_path.iterdir()) == []


def test_a_run_named_twice_counts_once(tmp_path, capsys):
    save(tmp_path / "1")
    assert report.main([str(tmp_path), str(tmp_path / "1"), str(tmp_path / "." / "1")]) == 0
    assert rows_of(capsys.readouterr().out, "masked: ")["ncl"][0] == "1"


def test_reports_come_from_the_file_alone(tmp_path):
    scores = made()
    written(tmp_path, scores)
    data = json.loads((tmp_path / "scores.json").read_text())
    data["metrics"]["LC"]["nats"] = 3.2345
    (tmp_path / "scores.json").write_text(json.dumps(data))
    report.write(tmp_path)
    assert "3.2345" in (tmp_path / "report.md").read_text()
