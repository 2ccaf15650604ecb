"""The page of a run says what scores.json says, needs nothing but itself, and survives odd and large runs."""

import json
import math
import re
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from cpt.evaluation.metrics import METRICS
from cpt.evaluation.predictions import answers_file
from cpt.evaluation.scores import Scores
from cpt.evaluation.task_metrics import MEASURES
from cpt.reporting import figures, run_page
from cpt.reporting.drawing import description
from cpt.reporting.frames import perplexity, shorten
from tests.evaluation.test_endtask_metrics import A, given, predicted
from tests.reporting.test_frames import ANSWERS
from tests.reporting.test_frames import made as framed
from tests.support.answering import answers, kept, ranked
from tests.support.comparing import made as compared
from tests.support.probing import probes

pytestmark = pytest.mark.slow

NLL = [[5.12, 5.15, 5.2, 4.98], [4.65, 4.8, 5.0, 5.14], [4.89, 3.79, 4.9, 5.2], [4.95, 4.1, 4.0, 5.25]]
DOMAINS = ["sympy", "networkx", "pandas", "general"]
TASKS = DOMAINS[:3]
CURVES = """step,name,value
0,ppl/law,9.0
1,train/lm/law,5.0
1,train/tokens/law,400.0
1,train/grad_norm/law,2.0
3,train/lm/law,9.9
3,train/lm/law,4.0
3,train/tokens/law,1000.0
1,train/lm/food,3.0
1,train/tokens/food,500.0
1,train/tokens_per_s/food,1234.0
3,train/lm/food,2.5
3,train/tokens/food,1000.0
3,train/lm/fo"""


def made(*, nll=NLL, domains=DOMAINS, rows=None, **given):
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
        texts={name: {"digest": f"d-{name}", "documents": {"train": 179, "test": 21}} for name in domains},
        config_digest="0123abcd",
        versions={"python": "3.11", "torch": "2.13"},
        seconds=123.4,
        conditions={"length": 64, "mask_rate": 0.25, "tokenizer": "89abcdef", "score_on": "valid"},
    )
    scores.measure()
    return scores


def many(count=236):
    generator = np.random.default_rng(0)
    names = [f"Natural_and_physical_sciences__Topic_{place}" for place in range(count)]
    level = generator.normal(3.3, 0.4, size=(1, count + 1))
    nll = level + generator.normal(0, 0.1, size=(count + 1, count + 1))
    return made(nll=nll, domains=[*names, "general"])


def examined(matrix=A, **options):
    """A run with end tasks and costs."""
    scores = made(nll=NLL[: len(matrix)])
    scores.endtasks = given(matrix, tasks=TASKS, **options)
    scores.seen, scores.flops = [0, 51_200, 51_200, 51_200], [0, 2 * 10**12, 3 * 10**12, 4 * 10**12]
    scores.memory, scores.trained = [10**6, 9 * 10**6, 8 * 10**6, 7 * 10**6], [0, 5120, 6120, 6120]
    scores.stored = [0, 10**6, 2 * 10**6, 4 * 10**6]
    scores.phases = {"learn": {"sympy": 41.5, "pandas": 30.0}, "score": {"base": 1.5, "sympy": 2.5}}
    scores.phases |= {"endtasks": {"sympy": 9.25}, "start": {"read the texts": 100.0}}
    return scores


def written(folder, scores, *, config="seed: 0  # a < b\n"):
    folder.mkdir(parents=True, exist_ok=True)
    scores.save(folder / "scores.json")
    (folder / "config.yaml").write_text(config)
    run_page.write_report(folder)
    return (folder / "report.md").read_text(), (folder / "report.html").read_text()


def tables(markdown):
    """The tables under each heading of a report: lists of rows, the first their head."""
    found = {}
    for section in re.split(r"^## ", markdown, flags=re.M)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[section.splitlines()[0]] = [row for row in rows if not row[0].startswith(":--")]
    return found


class Page(HTMLParser):
    """The tables of a page as lists of texts, and whatever it would load."""

    def __init__(self, html):
        super().__init__()
        self.cells, self.loads, self.open = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]
        self.open += [tag] * (tag not in ("meta", "img", "br", "link"))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:  # in <small> within it too
            self.cells[-1] += data


def test_a_report_shows_the_run_its_matrix_and_its_texts(tmp_path):
    scores = made(method="ewc", mask="migu", seed=41)
    markdown, html = written(tmp_path, scores)
    page = Page(html)
    assert page.open == []
    for value in np.ravel(NLL):
        shown = perplexity(math.exp(value))
        assert shown in page.cells and f" {shown} " in markdown
    measured = "masked, mask_rate 0.25, length 64, tokenizer 89abcdef, valid text"
    about = (
        "ewc + migu",
        "tiny (masked)",
        "sympy → networkx → pandas",
        "41",
        "torch 2.13",
        "123.4",
        measured,
    )
    for part in (*about, "d-pandas", "1,002", "train 179, test 21", "0123abcd", "<details>"):
        assert part in markdown and part in html
    assert "a &lt; b" in html and "a < b" in markdown
    data = json.loads((tmp_path / "scores.json").read_text())
    data["metrics"]["LC"]["nats"] = 3.2345
    (tmp_path / "scores.json").write_text(json.dumps(data))
    run_page.write_report(tmp_path)  # from the file alone
    assert "3.2345" in (tmp_path / "report.md").read_text()


def test_a_report_shows_every_metric_with_its_formula_interval_and_medians(tmp_path):
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
        assert cells[at + 1 : at + 3] == list(metric[:2])
        assert cells[at + 3] == f"{value:.4f} [{low:.4f}, {high:.4f}]"
        assert cells[at + 4].startswith(perplexity(scores.metrics[name]["perplexity"]))
        assert cells[at + 5].startswith(f"{scores.metrics[name]['bits_per_byte']:.4f}")
        assert cells[at + 3] in markdown
    median = scores.metrics["LC"]["median"]
    shown = f"{median['nats']:.4f}, {perplexity(median['perplexity'])}, {median['bits_per_byte']:.4f}"
    assert f"| {shown} |" in markdown and shown in cells


def test_a_metric_of_which_no_term_was_measured_is_a_dash(tmp_path):
    scores = made()
    for row, column in ((1, 1), (1, 2), (2, 2)):  # no domain before it was learned
        scores.nll[row][column] = None
    scores.measure()
    assert scores.metrics["FWT_zs"]["terms"][0] == 0 < scores.metrics["CPT"].get("terms", [1])[0]
    cells = Page(written(tmp_path, scores)[1]).cells
    at = next(place for place, cell in enumerate(cells) if cell.startswith("FWT_zs (0 of"))
    assert cells[at + 3 : at + 7] == ["–"] * 4
    assert re.match(r"\d\.\d{4}", cells[cells.index("ZS") + 3]) and "nan" not in " ".join(cells)


def test_a_report_shows_which_part_scored_a_text(tmp_path):
    scores = made()
    own = {name: {name: 1.0} for name in TASKS}
    mixed = {"general": {"pandas": 0.6251, "base": 0.2249, "sympy": 0.149, "networkx": 0.001}}
    scores.parts = [{}, {"sympy": {"sympy": 1.0}, "general": {"base": 1.0}}, {}, own | mixed]
    scores.trained, scores.stored = [0, 5120, 5120, 5120], [0, 2_000_000, 3_000_000, 4_500_000]
    scores.needs_domain, scores.loading = True, 'cpt.adapters.export.load("model", domain="pandas")'
    cells = Page(written(tmp_path, scores)[1]).cells
    assert {"pandas 0.63, base 0.22, sympy 0.15, …", "base", "must be known", "5,120 parameters"} <= set(
        cells
    )
    assert "4.50 MB, 1.25 MB more with each domain" in cells and scores.loading in cells
    assert "general: pandas 0.63" in description(figures.draw_parts(scores))
    plain = written(tmp_path / "plain", made())[0]
    assert "Parts of the model" not in plain and "need not be known" in plain


def test_the_page_loads_nothing_and_the_markdown_finds_its_pictures(tmp_path):
    markdown, html = written(tmp_path, made())
    loads = Page(html).loads
    assert len(loads) == 2
    assert all(load.startswith("data:image/png;base64,iVBOR") for load in loads)
    assert not re.search(r"(https?:)?//[\w.]|@import|url\(", re.sub(r"base64,[^\"]+", "", html))
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", markdown)
    assert pictures == ["report-matrix.png", "report-stages.png"]
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)


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
    assert all(row in run_page.format_scores(scores) for row in scores.rows)


def test_236_domains_take_seconds(tmp_path):
    scores = many()
    scores.parts = [{} for _ in scores.rows]
    scores.parts[-1] = {name: {name: 0.5, "base": 0.5} for name in scores.domains[:-1]}
    learned = np.tril(np.random.default_rng(1).random((237, 236)), -1)
    scores.endtasks = given(np.where(learned > 0, learned, np.nan), tasks=scores.domains[:-1])
    began = time.perf_counter()
    _, html = written(tmp_path, scores)
    text = run_page.format_scores(scores)
    assert time.perf_counter() - began < 20
    cells = set(Page(html).cells)
    assert {perplexity(value) for value in np.exp(scores.matrix).ravel().tolist()} <= cells
    assert max(map(len, text.splitlines()[1:])) <= 100 and len(text.splitlines()) < 28
    assert "8 of 237 test texts" in text


@pytest.mark.parametrize("count", [1, 3, 13, 236])
def test_the_similarity_of_domains_is_shown_in_the_order_learned(tmp_path, count):
    scores, places = made(), np.arange(count)
    names = [f"d$_{place}" for place in places]
    matrix = np.round(1 - 1.5 * np.abs(places[:, None] - places) / count, 4)
    general = np.round(np.linspace(0.5, -0.25, count), 4)
    given = {"names": names, "matrix": matrix.tolist(), "general": general.tolist(), "embedding": "tfidf"}
    scores.similarity = given
    block = run_page.show_similarity(scores)
    assert block.lines[0].endswith("Embedding: tfidf.") and len(block.picture) < 400_000
    assert block.cells[0][:2] == [names[0], "1.00"] and block.cells[-1][-1] == (
        "0.50" if count == 1 else "-0.25"
    )
    if count == 3:
        assert "one after another: 0.50; of any two: 0.33." in description(block.picture)


def test_the_console_table():
    text = run_page.format_scores(made())
    lines = [line.split() for line in text.splitlines()]
    assert ["after", *DOMAINS] in lines
    assert ["networkx", "133.0", "44.26", "134.3", "181.3"] in lines
    assert [line[0] for line in lines if line[:1] and line[0] in METRICS] == ["LC", "FG", "general_drift"]
    assert "4.3500" in text and "seed 0, finished" in text and "end tasks" not in text
    told = run_page.format_scores(examined()).splitlines()[-1]
    assert told == "end tasks (3): MF1 71.67 %, Acc 72.67 %, forward 76.67 %, forget_rate 7.50 %"


@pytest.mark.parametrize("count", [1, 8, 9, 20])
def test_the_console_table_is_narrow(count):
    names = [f"a_domain_with_a_long_name_{place}" for place in range(count)]
    nll = np.full((count + 1, count + 1), 9.9)
    lines = run_page.format_scores(made(nll=nll, domains=[*names, "general"])).splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert "19,930" in lines[3]


def test_names_are_shortened_in_their_middle():
    assert shorten("pandas", width=6) == "pandas"
    assert shorten("a_long_name_1", width=7) == "a_l…e_1"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(44.256, "44.26"), (133.04, "133.0"), (-0.5, "-0.50"), (12345.6, "12,346"), (2.5e7, "2.5e+07")]
    + [(math.inf, "inf"), (math.nan, "nan")],
)
def test_perplexities_are_written_to_be_read(value, shown):
    assert perplexity(value) == shown


# --- end tasks, costs, probes, answers


def test_a_report_shows_the_end_tasks(tmp_path):
    markdown, html = written(tmp_path, examined())
    numbers = {row[0]: row[1:] for row in tables(markdown)["End tasks"][1:]}
    expected = {"MF1": "71.67", "Acc": "72.67", "forward": "76.67", "forget_rate": "7.50"}
    assert {name: row[-1] for name, row in numbers.items()} == expected
    assert numbers["forget_rate"][1] == "mean_{u&lt;n} (A[u][u] - A[n][u])"
    assert "3 tasks, seeds 0, 1, endtask.when=each, 12.5 seconds." in markdown
    shown = tables(markdown)["End tasks: macro-F1"]
    own, macro, micro, accuracy = ([shown[place + row] for row in range(4)] for place in (0, 4, 8, 12))
    assert own[0] == ["after", *TASKS] and own[1:] == macro[1:]
    assert own[1] == ["sympy", "80.00 ± 2.83", "–", "–"]
    assert own[3] == ["pandas", "75.00 ± 2.83", "50.00 ± 2.83", "90.00 ± 2.83"]
    assert micro[2] == ["networkx", "72.00 ± 2.83", "62.00 ± 2.83", "–"]
    assert accuracy[3][1] == "76.00 ± 2.83"
    told = description(figures.draw_endtasks(examined()))
    assert told == "End-task scores of 3 models; after pandas: sympy 75.0 %, networkx 50.0 %, pandas 90.0 %"
    metric = dict(zip(TASKS, ("macro_f1", "micro_f1", "accuracy"), strict=True))
    markdown, _ = written(tmp_path, examined(metric=metric))
    title = "End tasks: each in its own: sympy macro-F1, networkx micro-F1, pandas accuracy"
    assert tables(markdown)[title][3][1:] == ["75.00 ± 2.83", "52.00 ± 2.83", "91.00 ± 2.83"]


def test_one_measurement_of_each_task_has_no_picture_and_no_deviation(tmp_path):
    last = np.full((4, 3), np.nan)
    last[3] = [0.5, 0.25, 0.75]
    markdown, html = written(tmp_path, examined(last, when="last", seeds=[7], apart=0))
    assert len(Page(html).loads) == 2
    assert tables(markdown)["End tasks: macro-F1"][1] == ["pandas", "50.00", "25.00", "75.00"]
    assert [row[0] for row in tables(markdown)["End tasks"][1:]] == ["MF1", "Acc"]


def test_what_became_of_the_predictions(tmp_path):
    title = "End tasks: what became of the predictions"
    assert title not in written(tmp_path, examined(seeds=[0]))[0]
    for row, right in ((1, [1, 1, 1, 1, 0, 0]), (3, [1, 0, 0, 0, 1, 0])):
        predicted(tmp_path, row, "sympy", 0, right, rows=["base", *TASKS])
    shown = tables(written(tmp_path, examined(seeds=[0]))[0])[title]
    luck = (2 / 6) * (4 / 6) / 2
    moved = ["3", "50.00", f"{100 * (3 / 6 - luck):.2f}", "1", "16.67", f"{100 * (1 / 6 - luck):.2f}"]
    assert shown[1:] == [["sympy", "6", "66.67", "33.33", *moved]]
    predicted(tmp_path, 3, "sympy", 0, [1] * 6, rows=["base", *TASKS]).write_bytes(b"PAR1")
    markdown, _ = written(tmp_path, examined(seeds=[0]))
    assert "sympy-0.parquet: damaged predictions" in markdown and "## Compute" in markdown


def test_a_report_shows_what_each_stage_cost(tmp_path):
    head, base, sympy, _, pandas, whole = tables(written(tmp_path, examined())[0])["Compute"]
    assert head[:4] == ["after", "tokens", "FLOPs", "learn, s"] and head[-1] == "stored"
    assert base == ["base", "0", "0", "0.0", "1.5", "0.0", "1.00 MB", "0", "0 B"]
    assert sympy == ["sympy", "51,200", "2e+12", "41.5", "2.5", "9.2", "9.00 MB", "5,120", "1.00 MB"]
    assert pandas[1:6] == ["51,200", "4e+12", "30.0", "0.0", "0.0"]
    times = ["71.5", "4.0", "9.2"]
    assert whole == ["whole run", "153,600", "9e+12", *times, "9.00 MB", "6,120", "4.00 MB"]
    assert "## Compute" not in written(tmp_path / "plain", made())[0]


def test_a_report_shows_the_probes_beside_chance(tmp_path):
    scores = made()
    scores.probes = probes({"a": [0.25, None, 0.5, 0.75], "b": [None, None, None, 0.5]})
    scores.probes["tasks"]["b"] |= {"chance": None, "higher": False, "truncated": 12, "shots": None}
    markdown, _ = written(tmp_path, scores)
    head, *rows = tables(markdown)["Probes"]
    assert head == ["after", "a (acc, 0 shots, version 1.0)", "b (acc, shots differ, version 1.0)"]
    base, last = ["base", "0.2500 ± 0.0100", "–"], ["pandas", "0.7500 ± 0.0100", "0.5000 ± 0.0100"]
    assert rows == [base, ["networkx", "0.5000 ± 0.0100", "–"], last, ["chance", "0.2500", "–"]]
    assert "b: 9 examples, 12 or more requests cut from the left, lower is better." in markdown
    told = run_page.format_scores(scores)
    assert "probes: a (acc, 0 shots, version 1.0) 0.7500 (base 0.2500), b " in told


def test_answers_come_first_with_what_a_guess_reaches(tmp_path):
    scores = framed(answers=ANSWERS)
    matrix, metrics, last, moved = run_page.show_answers(scores, tmp_path)
    assert "likeliest choice" in matrix.title and matrix.head == ["after", "law", "food"]
    expected = [["base", "20.00", "30.00"], ["law", "90.00", "40.00"], ["food", "60.00", "80.00"]]
    expected += [["chance", "25.00", "25.00"], ["majority", "30.00", "30.00"]]
    assert matrix.cells == expected
    assert "after food: law 60.0 %, food 80.0 %" in description(matrix.picture)
    assert metrics.cells[0][0] == "AP" and metrics.cells[0][-1] == "70.00 [10.00, 90.00]"
    values = {"LA": "85.00", "BWT": "-30.00", "F": "30.00", "FWT": "10.00"}
    assert {row[0]: row[-1] for row in metrics.cells[1:]} == values
    assert last.cells == [["law", "60.00", "50.00"], ["food", "80.00", "50.00"]]
    assert not moved.cells and "missing: 2, like" in moved.lines[0]
    page = written(tmp_path, scores)[0]
    assert page.index("Answers to each task") < page.index("Perplexity on each test text")
    shown = run_page.format_scores(scores).split("answers to 2 tasks, in %: ")[1].splitlines()
    assert "AP 70.00 %" in shown[0]
    assert [line.split() for line in shown[2:]] == [["after", "law", "food"], *expected]
    assert set(run_page.MEASURE_NAMES) == set(MEASURES)


def test_rows_in_which_no_task_was_evaluated_are_left_out(tmp_path):
    given = answers({"law": [0.2, np.nan, 0.6]}, rows=["base", "law", "food"])
    given["tasks"]["law"]["measures"]["accuracy_ranked"][1] = None
    matrix, *_ = run_page.show_answers(framed(answers=given | {"metrics": {}}), tmp_path)
    assert [row[0] for row in matrix.cells] == ["base", "food", "chance", "majority"]


def test_what_became_of_the_examples_is_a_table(tmp_path):
    rows = ["base", "law", "food"]
    given = {"law": [ranked(each) for each in ([0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 1])]}
    scores = framed(answers=kept(tmp_path, given, rows=rows))
    block = run_page.show_answers(scores, tmp_path)[-1]
    cells = ["law", "law", "4", "75.00", "50.00", "2", "50.00", "37.50", "1", "25.00", "12.50", "1"]
    assert block.cells[1] == cells and block.cells[0][1] == "base" and len(block.head) == len(cells)
    answers_file(tmp_path / "answers" / "001-law", "law").unlink()
    answers_file(tmp_path / "answers" / "000-base", "law").write_text("damaged")
    (line,) = run_page.show_answers(scores, tmp_path)[-1].lines
    assert "000-base/law.parquet: damaged predictions" in line


# --- training, monitoring, diagnostics


def test_stages_stand_one_after_another_on_one_axis_of_tokens(tmp_path):
    (tmp_path / "metrics.csv").write_text(CURVES)
    curves = run_page.read_training(tmp_path / "metrics.csv", compared())
    assert curves["law"]["lm"].to_dict() == {400: 5, 1000: 4}  # of two lines with one step the later counts
    assert curves["food"]["lm"].to_dict() == {1500: 3, 2000: 2.5} and set(curves) == {"law", "food"}
    block = run_page.show_training(compared(), tmp_path)
    assert block.cells == [
        ["law", "2", "5.0000", "4.0000", "2", "–"],
        ["food", "2", "3.0000", "2.5000", "–", "1,234"],
    ]
    assert block.lines[1] == "Without a point: space."
    assert "law 4.000; food 2.500" in description(block.picture)
    axes = block.picture.drawn.axes
    assert [each.get_ylabel() for each in axes] == ["loss (nats)", "gradient norm", "tokens/s"]
    edges = [line.get_xdata()[0] for line in axes[0].lines if len(set(line.get_xdata())) == 1]
    assert edges == [0, 1000, 2000]
    (tmp_path / "metrics.csv").write_text("1,train/lm/food,3\n3,train/lm/food,2\n")
    curves = run_page.read_training(tmp_path / "metrics.csv", compared())
    assert curves["food"].index.tolist() == [1500, 2000]  # spread over the steps


@pytest.mark.parametrize("text", [None, "", "step,name,value\n", "x,train/lm/law,y\n", "\x00\xff,a"])
def test_runs_without_curves_have_no_such_block(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert not run_page.show_training(compared(), tmp_path).picture


def test_losses_on_other_text_and_the_budget_are_shown():
    nll = {"law": [5.0, 4.0], "food": [3.0, 3.25], "general": [4.0, 4.1]}
    stage = {"steps": [0, 10], "nll": nll, "rise": {"general": [[0.0, 0.0], [0.05, 0.2]]}, "ended": ""}
    budget = {
        "kept": 10,
        "allowed": {"general": 0.3},
        "drift": {"general": [[0.0, 0.0], [0.1, 0.2]]},
        "acts": [],
    }
    scores = made()
    scores.monitor = {"law": stage | {"budget": budget}, "pandas": stage}
    block = run_page.show_monitor(scores)
    cells = ["law", "10", "−1.000", "food +0.250", "+0.100 [+0.050, +0.200]", "–"]
    assert block.cells[0] == [*cells, "general +0.200 of 0.300; kept step 10; gone back 0 times"]
    assert "law +0.100; pandas +0.100" in description(block.picture)
    assert "general" in block.head and not run_page.show_monitor(made()).picture


def test_what_domains_share_is_a_picture(tmp_path):
    assert not run_page.show_overlap(compared(), tmp_path).picture
    (tmp_path / "diagnostics").mkdir()
    for number, value in ((1, 0.25), (2, 0.5), (3, 0.75)):
        arrays = {"importance/model.layers.0.neurons": np.full(8, value), "other/x": np.ones(3)}
        np.savez(tmp_path / "diagnostics" / f"{number:03d}.npz", **arrays)
    assert "importance, accumulated" in description(run_page.show_overlap(compared(), tmp_path).picture)
