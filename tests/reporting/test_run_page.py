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
from cpt.evaluation.task_metrics import MEASURES
from cpt.reporting import figures, run_page
from cpt.reporting.drawing import description
from cpt.reporting.frames import perplexity, shorten
from tests.evaluation.test_endtask_metrics import A, given, predicted
from tests.support.answering import answers, kept, ranked
from tests.support.comparing import DOMAINS, NLL, made
from tests.support.probing import probes

pytestmark = pytest.mark.slow
ROWS = ["base", *DOMAINS]


def examined(matrix=A, **options):
    """A run with end tasks and costs."""
    phases = {"learn": {"law": 41.5, "space": 30.0}, "score": {"base": 1.5, "law": 2.5}}
    phases |= {"endtasks": {"law": 9.25}, "start": {"read the texts": 100.0}}
    costs = {"seen": [0, 51_200, 51_200, 51_200], "flops": [0, 2 * 10**12, 3 * 10**12, 4 * 10**12]}
    costs |= {"memory": [10**6, 9 * 10**6, 8 * 10**6, 7 * 10**6], "trained": [0, 5120, 6120, 6120]}
    costs |= {"stored": [0, 10**6, 2 * 10**6, 4 * 10**6], "phases": phases}
    return made(endtasks=given(matrix, **options), **costs)


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
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.loads += [value for name, value in attributes if name in ("src", "href", "data", "srcset")]
        self.open += [tag] * (tag not in ("meta", "img", "br", "link"))
        self.cells += [""] * (tag in ("td", "th"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & {*self.open}:  # in <small> within it too
            self.cells[-1] += data


def test_a_report_shows_the_run_its_matrix_and_its_texts_and_loads_nothing(tmp_path):
    parts = [{}, {"law": {"law": 1.0}, "general": {"base": 1.0}}, {}, {name: {name: 1.0} for name in DOMAINS}]
    parts[3]["general"] = {"space": 0.6251, "base": 0.2249, "law": 0.149, "food": 0.001}
    how = {"method": "ewc", "mask": "migu", "seed": 41, "needs_domain": True, "loading": 'load("model")'}
    scores = made(**how, stored=[0, 2_000_000, 3_000_000, 4_500_000])
    scores.parts = parts
    markdown, html = written(tmp_path, scores)
    page = Page(html)
    for shown in (perplexity(math.exp(value)) for value in np.ravel(NLL)):
        assert shown in page.cells and f" {shown} " in markdown
    measured = "masked, mask_rate 0.3, length 64, tokenizer 0123abcd"
    about = ("ewc + migu", "tiny (masked)", "law → food → space", "41", "python 3.11", "20.0", measured)
    for part in (*about, "d-space", "1,000", "documents", "0123abcd", "<details>"):
        assert part in markdown and part in html, part
    assert "a &lt; b" in html and "a < b" in markdown
    mixed = "space 0.63, base 0.22, law 0.15, …"
    assert {mixed, "base", "must be known", "5,120 parameters", 'load("model")'} <= {*page.cells}
    assert "4.50 MB, 1.25 MB more with each domain" in page.cells
    assert "general: space 0.63" in description(figures.draw_parts(scores))
    assert len(page.loads) == 3 and all(load.startswith("data:image/png;base64,iVBOR") for load in page.loads)
    assert not re.search(r"(https?:)?//[\w.]|@import|url\(", re.sub(r"base64,[^\"]+", "", html))
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", markdown)
    assert pictures == ["report-matrix.png", "report-stages.png", "report-parts.png"]
    assert all((tmp_path / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    data = json.loads((tmp_path / "scores.json").read_text())
    data["metrics"]["LC"]["nats"] = 3.2345
    (tmp_path / "scores.json").write_text(json.dumps(data))
    run_page.write_report(tmp_path)  # from the file alone
    assert "3.2345" in (tmp_path / "report.md").read_text()


def test_every_metric_has_its_formula_interval_and_medians_and_a_dash_without_terms(tmp_path):
    scores, generator = made(), np.random.default_rng(0)
    counts = [np.full(30, 20)] * 4
    sums = [(np.array(NLL)[:, column, None] + generator.normal(0, 0.3, 30)) * 20 for column in range(4)]
    scores.nll = np.stack([total.sum(1) / 600 for total in sums], 1).tolist()
    scores.measure(nll_sums=sums, counts=counts)
    markdown, html = written(tmp_path, scores)
    cells = Page(html).cells
    for name, metric in METRICS.items():
        found, at = scores.metrics[name], cells.index(name)
        low, high = found["interval"]["nats"]
        assert cells[at + 1 : at + 3] == list(metric[:2])
        assert cells[at + 3] == f"{found['nats']:.4f} [{low:.4f}, {high:.4f}]" and cells[at + 3] in markdown
        assert cells[at + 4].startswith(perplexity(found["perplexity"]))
        assert cells[at + 5].startswith(f"{found['bits_per_byte']:.4f}")
    median = scores.metrics["LC"]["median"]
    shown = f"{median['nats']:.4f}, {perplexity(median['perplexity'])}, {median['bits_per_byte']:.4f}"
    assert f"| {shown} |" in markdown and shown in cells
    scores = made()
    for row, column in ((1, 1), (1, 2), (2, 2)):  # no domain before it was learned
        scores.nll[row][column] = None
    scores.measure()
    cells = Page(written(tmp_path, scores)[1]).cells
    at = next(place for place, cell in enumerate(cells) if cell.startswith("FWT_zs (0 of"))
    assert cells[at + 3 : at + 7] == ["–"] * 4
    assert re.match(r"\d\.\d{4}", cells[cells.index("ZS") + 3]) and "nan" not in " ".join(cells)


LACKING = {
    "base": {"nll": NLL[:1], "finished": False},
    "one stage": {"nll": NLL[:2], "finished": False},
    "joint": {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"], "method": "joint"},
    "one domain, no general text": {"nll": [row[:1] for row in NLL[:2]], "order": ["law"]},
    "diverged": {"nll": [*NLL[:2], [800.0, math.nan, math.inf, 5.0], [math.nan] * 4]},
}


@pytest.mark.parametrize("given", LACKING.values(), ids=LACKING)
def test_runs_that_lack_something(tmp_path, given):
    scores = made(**given)
    markdown, html = written(tmp_path, scores)
    Page(html)
    assert set(scores.metrics) == {name for name in METRICS if f"\n| {name} |" in markdown}
    assert ("unfinished" in markdown) == (not scores.run["finished"])
    assert all(row in run_page.format_scores(scores) for row in scores.rows)
    assert not any(f"## {title}" in markdown for title in ("Parts", "Training", "End tasks", "Answers"))


def test_a_hundred_domains_take_seconds(tmp_path):
    generator, size = np.random.default_rng(0), 101
    names = [f"Natural_and_physical_sciences__Topic_{place}" for place in range(size - 1)]
    nll = generator.normal(3.3, 0.4, size=(1, size)) + generator.normal(0, 0.1, size=(size, size))
    scores = made(nll=nll, order=names)
    scores.parts[-1] = {name: {name: 0.5, "base": 0.5} for name in names}
    learned = np.tril(generator.random((size, size - 1)), -1)
    scores.endtasks = given(np.where(learned > 0, learned, np.nan), tasks=names)
    began = time.perf_counter()
    _, html = written(tmp_path, scores)
    text = run_page.format_scores(scores)
    assert time.perf_counter() - began < 10
    assert {perplexity(value) for value in np.exp(scores.matrix).ravel().tolist()} <= {*Page(html).cells}
    assert max(map(len, text.splitlines()[1:])) <= 100 and len(text.splitlines()) < 28
    assert "8 of 101 test texts" in text


@pytest.mark.parametrize("count", [1, 3, 236])
def test_the_similarity_of_domains_is_shown_in_the_order_learned(count):
    scores, places = made(), np.arange(count)
    names = [f"d$_{place}" for place in places]
    matrix = np.round(1 - 1.5 * np.abs(places[:, None] - places) / count, 4)
    general = np.round(np.linspace(0.5, -0.25, count), 4)
    told = {"names": names, "matrix": matrix.tolist(), "general": general.tolist(), "embedding": "tfidf"}
    scores.similarity = told
    block = run_page.show_similarity(scores)
    assert "Embedding: tfidf." in block.lines[0] and len(block.picture) < 400_000
    last = "0.50" if count == 1 else "-0.25"
    assert block.cells[0][:2] == [names[0], "1.00"] and block.cells[-1][-1] == last
    if count == 3:
        assert "one after another: 0.50; of any two: 0.33." in description(block.picture)


def test_the_console_table_is_narrow_and_has_the_headlines():
    lines = [line.split() for line in run_page.format_scores(examined()).splitlines()]
    assert ["after", *DOMAINS, "general"] in lines
    assert ["food", "109.9", "66.69", "181.3", "164.0"] in lines
    assert [line[0] for line in lines if line[:1] and line[0] in METRICS] == ["LC", "FG", "general_drift"]
    shown = " ".join(lines[-1])
    assert shown == "end tasks (3): MF1 71.67 %, Acc 72.67 %, forward 76.67 %, forget_rate 7.50 %"
    for count in (1, 9, 20):
        names = [f"a_domain_with_a_long_name_{place}" for place in range(count)]
        nll = np.full((count + 1, count + 1), 9.9)
        lines = run_page.format_scores(made(nll=nll, order=names)).splitlines()
        assert max(map(len, lines[1:])) <= 100 and "19,930" in lines[3]
    assert shorten("a_long_name_1", width=7) == "a_l…e_1"
    shown = {44.256: "44.26", 133.04: "133.0", -0.5: "-0.50", 12345.6: "12,346", 2.5e7: "2.5e+07"}
    assert {value: perplexity(value) for value in shown} == shown and perplexity(math.nan) == "nan"


# --- end tasks, costs, probes, answers


def test_a_report_shows_end_tasks_costs_and_what_became_of_the_predictions(tmp_path):
    for row, right in ((1, [1, 1, 1, 1, 0, 0]), (3, [1, 0, 0, 0, 1, 0])):
        predicted(tmp_path, row, "law", 0, right, rows=ROWS)
    markdown, _ = written(tmp_path, examined())
    shown = tables(markdown)
    numbers = {row[0]: row[1:] for row in shown["End tasks"][1:]}
    expected = {"MF1": "71.67", "Acc": "72.67", "forward": "76.67", "forget_rate": "7.50"}
    assert {name: row[-1] for name, row in numbers.items()} == expected
    assert numbers["forget_rate"][1] == "mean_{u&lt;n} (A[u][u] - A[n][u])"
    assert "3 tasks, seeds 0, 1, endtask.when=each, 12.5 seconds." in markdown
    rows = shown["End tasks: macro-F1"]
    own, macro, micro, accuracy = ([rows[place + row] for row in range(4)] for place in (0, 4, 8, 12))
    assert own[0] == ["after", *DOMAINS] and own[1:] == macro[1:]
    assert own[1] == ["law", "80.00 ± 2.83", "–", "–"]
    assert own[3] == ["space", "75.00 ± 2.83", "50.00 ± 2.83", "90.00 ± 2.83"]
    assert micro[2] == ["food", "72.00 ± 2.83", "62.00 ± 2.83", "–"] and accuracy[3][1] == "76.00 ± 2.83"
    told = description(figures.draw_endtasks(examined()))
    assert told == "End-task scores of 3 models; after space: law 75.0 %, food 50.0 %, space 90.0 %"
    head, base, law, _, space, whole = shown["Compute"]
    assert head[:4] == ["after", "tokens", "FLOPs", "learn, s"] and head[-1] == "stored"
    assert base == ["base", "0", "0", "0.0", "1.5", "0.0", "1.00 MB", "0", "0 B"]
    assert law == ["law", "51,200", "2e+12", "41.5", "2.5", "9.2", "9.00 MB", "5,120", "1.00 MB"]
    assert space[1:6] == ["51,200", "4e+12", "30.0", "0.0", "0.0"]
    assert whole == ["whole run", "153,600", "9e+12", "71.5", "4.0", "9.2", "9.00 MB", "6,120", "4.00 MB"]

    title = "End tasks: what became of the predictions"
    luck = (2 / 6) * (4 / 6) / 2
    moved = ["3", "50.00", f"{100 * (3 / 6 - luck):.2f}", "1", "16.67", f"{100 * (1 / 6 - luck):.2f}"]
    assert title not in shown  # of one of two seeds
    metric = dict(zip(DOMAINS, ("macro_f1", "micro_f1", "accuracy"), strict=True))
    shown = tables(written(tmp_path, examined(seeds=[0], metric=metric))[0])
    assert shown[title][1:] == [["law", "6", "66.67", "33.33", *moved]]
    own = "End tasks: each in its own: law macro-F1, food micro-F1, space accuracy"
    assert shown[own][3][1:] == ["73.00", "50.00", "89.00"]
    predicted(tmp_path, 3, "law", 0, [1] * 6, rows=ROWS).write_bytes(b"PAR1")
    last = np.where(np.arange(4)[:, None] == 3, A, np.nan)
    markdown, html = written(tmp_path, examined(last, when="last", seeds=[0], apart=0))
    assert len(Page(html).loads) == 2  # one measurement of each task is no picture
    assert tables(markdown)["End tasks: macro-F1"][1] == ["space", "75.00", "50.00", "90.00"]
    assert [row[0] for row in tables(markdown)["End tasks"][1:]] == ["MF1", "Acc"]
    markdown = written(tmp_path, examined(seeds=[0]))[0]
    assert "law-0.parquet: damaged predictions" in markdown and "## Compute" in markdown


def test_a_report_shows_the_probes_beside_chance(tmp_path):
    scores = made(probes=probes({"a": [0.25, None, 0.5, 0.75], "b": [None, None, None, 0.5]}))
    scores.probes["tasks"]["b"] |= {"chance": None, "higher": False, "truncated": 12, "shots": None}
    markdown, _ = written(tmp_path, scores)
    head, *rows = tables(markdown)["Probes"]
    assert head == ["after", "a (acc, 0 shots, version 1.0)", "b (acc, shots differ, version 1.0)"]
    base, last = ["base", "0.2500 ± 0.0100", "–"], ["space", "0.7500 ± 0.0100", "0.5000 ± 0.0100"]
    assert rows == [base, ["food", "0.5000 ± 0.0100", "–"], last, ["chance", "0.2500", "–"]]
    assert "b: 9 examples, 12 or more requests cut from the left, lower is better." in markdown
    told = run_page.format_scores(scores)
    assert "probes: a (acc, 0 shots, version 1.0) 0.7500 (base 0.2500), b " in told


def test_answers_come_first_with_what_a_guess_reaches_and_what_became_of_examples(tmp_path):
    values = {"law": [0.2, 0.9, np.nan, 0.6], "food": [0.3, 0.4, np.nan, 0.8]}
    told = answers(values, rows=ROWS)
    for task in told["tasks"].values():
        task["measures"]["accuracy_ranked"][2] = None  # a row in which no task was evaluated
    scores = made(answers=told | {"metrics": {"AP": 0.7, "BWT": -0.3}})
    matrix, metrics, last, moved = run_page.show_answers(scores, tmp_path)
    assert "likeliest choice" in matrix.title and matrix.head == ["after", "law", "food"]
    expected = [["base", "20.00", "30.00"], ["law", "90.00", "40.00"], ["space", "60.00", "80.00"]]
    expected += [["chance", "25.00", "25.00"], ["majority", "30.00", "30.00"]]
    assert matrix.cells == expected
    assert "after space: law 60.0 %, food 80.0 %" in description(matrix.picture)
    assert metrics.cells[0][0] == "AP" and metrics.cells[0][-1] == "70.00 [10.00, 90.00]"
    assert last.cells == [["law", "60.00", "50.00"], ["food", "80.00", "50.00"]]
    assert not moved.cells and "missing: " in moved.lines[0]
    page = written(tmp_path, scores)[0]
    assert page.index("Answers to each task") < page.index("Perplexity on each test text")
    shown = run_page.format_scores(scores).split("answers to 2 tasks, in %: ")[1].splitlines()
    assert "AP 70.00 %" in shown[0]
    assert [line.split() for line in shown[2:]] == [["after", "law", "food"], *expected]
    assert set(run_page.MEASURE_NAMES) == set(MEASURES)

    right = ([0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 0, 1], [1, 0, 0, 1])
    scores = made(answers=kept(tmp_path, {"law": [ranked(each) for each in right]}, rows=ROWS))
    block = run_page.show_answers(scores, tmp_path)[-1]
    cells = ["law", "law", "4", "75.00", "50.00", "2", "50.00", "37.50", "1", "25.00", "12.50", "1"]
    assert block.cells[1] == cells and block.cells[0][1] == "base" and len(block.head) == len(cells)
    answers_file(tmp_path / "answers" / "001-law", "law").unlink()
    answers_file(tmp_path / "answers" / "000-base", "law").write_text("damaged")
    (line,) = run_page.show_answers(scores, tmp_path)[-1].lines
    assert "000-base/law.parquet: damaged predictions" in line


# --- training, monitoring, diagnostics

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


def test_stages_stand_one_after_another_on_one_axis_of_tokens(tmp_path):
    (tmp_path / "metrics.csv").write_text(CURVES)
    curves = run_page.read_training(tmp_path / "metrics.csv", made())
    assert curves["law"]["lm"].to_dict() == {400: 5, 1000: 4}  # of two lines with one step the later counts
    assert curves["food"]["lm"].to_dict() == {1500: 3, 2000: 2.5} and set(curves) == {"law", "food"}
    block = run_page.show_training(made(), tmp_path)
    law = ["law", "2", "5.0000", "4.0000", "2", "–"]
    assert block.cells == [law, ["food", "2", "3.0000", "2.5000", "–", "1,234"]]
    assert "space" in block.lines[1] and "law 4.000; food 2.500" in description(block.picture)
    axes = block.picture.drawn.axes
    assert [each.get_ylabel() for each in axes] == ["loss (nats)", "gradient norm", "tokens/s"]
    edges = [line.get_xdata()[0] for line in axes[0].lines if len(set(line.get_xdata())) == 1]
    assert edges == [0, 1000, 2000]
    (tmp_path / "metrics.csv").write_text("1,train/lm/food,3\n3,train/lm/food,2\n")
    curves = run_page.read_training(tmp_path / "metrics.csv", made())
    assert curves["food"].index.tolist() == [1500, 2000]  # spread over the steps
    for text in ("", "step,name,value\n", "x,train/lm/law,y\n", "\x00\xff,a"):
        (tmp_path / "metrics.csv").write_text(text)
        assert not run_page.show_training(made(), tmp_path).picture


def test_losses_on_other_text_the_budget_and_what_domains_share_are_shown(tmp_path):
    nll = {"law": [5.0, 4.0], "food": [3.0, 3.25], "general": [4.0, 4.1]}
    stage = {"steps": [0, 10], "nll": nll, "rise": {"general": [[0.0, 0.0], [0.05, 0.2]]}, "ended": ""}
    budget = {"kept": 10, "allowed": {"general": 0.3}, "drift": {"general": [[0.0, 0.0], [0.1, 0.2]]}}
    scores = made(monitor={"law": stage | {"budget": budget | {"acts": []}}, "space": stage})
    block = run_page.show_monitor(scores)
    cells = ["law", "10", "−1.000", "food +0.250", "+0.100 [+0.050, +0.200]", "–"]
    assert block.cells[0] == [*cells, "general +0.200 of 0.300; kept step 10; gone back 0 times"]
    assert "law +0.100; space +0.100" in description(block.picture) and "general" in block.head
    assert not run_page.show_monitor(made()).picture and not run_page.show_overlap(made(), tmp_path).picture
    (tmp_path / "diagnostics").mkdir()
    for number in (1, 2, 3):
        arrays = {"importance/model.layers.0.neurons": np.full(8, number / 4), "other/x": np.ones(3)}
        np.savez(tmp_path / "diagnostics" / f"{number:03d}.npz", **arrays)
    assert "importance, accumulated" in description(run_page.show_overlap(made(), tmp_path).picture)
