"""The reports say what scores.json says, need nothing but themselves, and survive odd and large runs."""

import json
import math
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from cpt.evaluation.metrics import METRICS, describe_metric
from cpt.evaluation.scores import Scores
from cpt.reporting import drawing, figures, plots, run_report
from cpt.reporting import endtasks as endtask_report
from cpt.reporting.frames import perplexity, shorten
from tests.evaluation.endtasks.test_endtask_metrics import A, given, predicted
from tests.support.probing import probes

pytestmark = pytest.mark.slow

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
        phases={"score": {"base": 2.25}, "learn": {"sympy": 41.5}},
    )
    scores.measure()
    return scores


def written(folder, scores, *, config="seed: 0  # a < b\n"):
    folder.mkdir(parents=True, exist_ok=True)
    scores.save(folder / "scores.json")
    if config:
        (folder / "config.yaml").write_text(config)
    run_report.write_report(folder)
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
        if {"td", "th"} & {*self.open}:  # in <small> within it too
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
        shown = perplexity(math.exp(value))
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
        assert cells[at + 1 : at + 3] == list(describe_metric(metric.compute))
        assert cells[at + 3] == f"{value:.4f} [{low:.4f}, {high:.4f}]"
        assert cells[at + 4].startswith(perplexity(scores.metrics[name]["perplexity"]))
        assert cells[at + 5].startswith(f"{scores.metrics[name]['bits_per_byte']:.4f}")
        assert cells[at + 3] in markdown


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


def test_a_report_says_what_its_perplexities_depend_on(tmp_path):
    scores = made()
    scores.conditions = {"length": 64, "mask_rate": 0.25, "tokenizer": "89abcdef", "score_on": "valid"}
    for text in written(tmp_path, scores):
        assert "masked, mask_rate 0.25, length 64, tokenizer 89abcdef, valid text" in text


def test_a_report_says_what_was_run(tmp_path):
    for text in written(tmp_path, made(method="ewc", mask="migu", seed=41)):
        for part in ("ewc + migu", "tiny (masked)", "sympy → networkx → pandas", "41", "torch 2.13", "123.4"):
            assert part in text
        for part in ("sympy", "41.5", "d-pandas", "1,002", "0123abcd", "<details>"):
            assert part in text
    assert "a &lt; b" in (tmp_path / "report.html").read_text()
    assert "a < b" in (tmp_path / "report.md").read_text()


def with_parts(scores, *, needs_domain=True):
    """The scores of a run whose model has a part for each domain."""
    own = {name: {name: 1.0} for name in DOMAINS[:3]}
    mixed = {"general": {"pandas": 0.6251, "base": 0.2249, "sympy": 0.149, "networkx": 0.001}}
    scores.parts = [{}, {"sympy": {"sympy": 1.0}, "general": {"base": 1.0}}, {}, own | mixed]
    scores.trained, scores.stored = [0, 5120, 5120, 5120], [0, 2_000_000, 3_000_000, 4_500_000]
    scores.needs_domain, scores.loading = needs_domain, 'cpt.adapters.export.load("model", domain="pandas")'
    return scores


@pytest.mark.slow
def test_a_report_shows_which_part_scored_a_text(tmp_path):
    markdown, html = written(tmp_path, with_parts(made()))
    for cells in (Page(html).cells, [cell.strip() for cell in markdown.replace("\n", "|").split("|")]):
        assert {"pandas 0.63, base 0.22, sympy 0.15, …", "base", "must be known", "5,120 parameters"} <= set(
            cells
        )
        assert "4.50 MB, 1.25 MB more with each domain" in cells
        assert 'cpt.adapters.export.load("model", domain="pandas")' in cells
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
    assert "| a&#124;b |" in markdown


@pytest.mark.slow
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
    assert all(row in run_report.format_scores(scores) for row in scores.rows)


@pytest.mark.slow
def test_236_domains_take_seconds(tmp_path):
    scores = many()
    began = time.perf_counter()
    _, html = written(tmp_path, scores)
    text = run_report.format_scores(scores)
    assert time.perf_counter() - began < 10
    cells = set(Page(html).cells)
    assert {perplexity(value) for value in np.exp(scores.matrix).ravel().tolist()} <= cells
    assert max(map(len, text.splitlines()[1:])) <= 100
    assert len(text.splitlines()) < 25
    assert "8 of 237 test texts" in text


def alike(names):
    """Similarities of domains in their order: neighbours more than others."""
    places = np.arange(len(names))
    matrix = np.round(1 - 1.5 * np.abs(places[:, None] - places) / len(names), 4)
    general = np.round(np.linspace(0.5, -0.25, len(names)), 4)
    return {"names": names, "matrix": matrix.tolist(), "general": general.tolist(), "embedding": "tfidf"}


def test_the_similarity_of_domains_is_shown_in_the_order_learned(tmp_path):
    scores = made()
    assert "Similarity" not in written(tmp_path, scores)[0]
    names = scores.run["order"] = DOMAINS[:3][::-1]
    scores.similarity = alike(names)
    markdown, html = written(tmp_path, scores)
    assert (
        "Mean cosine of domains learned one after another: 0.50; of any two: 0.33. Embedding: tfidf." in html
    )
    table = markdown.split("Similarity of the domains' texts, in the order learned")[-1]
    assert f"| {names[0]} | 1.00 | 0.50 | 0.00 | 0.50 |" in table
    assert table.index(f"| {names[0]} |") < table.index(f"| {names[1]} |") < table.index(f"| {names[2]} |")
    assert "0.50; of any two: 0.33" in drawing.description(figures.similarities(scores))


@pytest.mark.parametrize("count", [1, 2, 12, 13, 236])
def test_the_picture_of_similarities_has_a_size(count):
    scores = made()
    scores.similarity = alike([f"d$_{place}" for place in range(count)])
    picture = figures.similarities(scores)
    assert picture.startswith(b"\x89PNG") and len(picture) < 400_000


def test_medians_stand_beside_the_means(tmp_path):
    scores = made()
    markdown, html = written(tmp_path, scores)
    median = scores.metrics["LC"]["median"]
    shown = f"{median['nats']:.4f}, {perplexity(median['perplexity'])}, {median['bits_per_byte']:.4f}"
    assert "medians: nats, perplexity, bits per byte" in markdown and f"| {shown} |" in markdown
    assert shown in Page(html).cells
    del scores.metrics["LC"]["median"]  # of a file that an older cpt wrote
    assert f"| {shown} |" not in written(tmp_path, scores)[0]


def test_the_console_table():
    text = run_report.format_scores(made())
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
    lines = run_report.format_scores(made(nll=nll, domains=[*names, "general"])).splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert "19,930" in lines[3]


def test_names_are_shortened_in_their_middle():
    assert shorten("pandas", width=6) == "pandas"
    assert shorten("a_long_name_1", width=7) == "a_l…e_1"
    assert len(shorten("a_long_name_1", width=8)) == 8


@pytest.mark.parametrize(
    ("value", "shown"),
    [(44.256, "44.26"), (133.04, "133.0"), (-0.5, "-0.50"), (12345.6, "12,346"), (2.5e7, "2.5e+07")]
    + [(math.inf, "inf"), (math.nan, "nan"), (None, "nan")],
)
def test_perplexities_are_written_to_be_read(value, shown):
    assert perplexity(value) == shown


def test_labels_are_moved_apart_and_keep_their_order():
    wanted = {"a": 0.5, "b": 0.51, "c": 0.99, "d": 1.0, "e": 0.98, "f": 0.02}
    placed = drawing.space_heights(wanted, gap=0.05)
    heights = sorted(placed.values())
    assert sorted(placed, key=placed.get) == sorted(wanted, key=wanted.get)
    assert min(np.diff(heights)) >= 0.05 - 1e-9
    assert heights[-1] <= 1
    assert placed["f"] == 0.02


@pytest.mark.slow
def test_pictures_leave_pyplot_alone():
    code = (
        "import sys; from cpt import report; from cpt.reporting import plots; "
        "assert 'matplotlib' not in sys.modules; "
        "plots.draw_plane({'ncl': ([0.1, 0.2], [50.0, 60.0])}, x='FG', y='LC'); "
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
    assert plots.draw_plane(groups, x="FG", y="LC").startswith(b"\x89PNG")


def test_reports_come_from_the_file_alone(tmp_path):
    scores = made()
    written(tmp_path, scores)
    data = json.loads((tmp_path / "scores.json").read_text())
    data["metrics"]["LC"]["nats"] = 3.2345
    (tmp_path / "scores.json").write_text(json.dumps(data))
    run_report.write_report(tmp_path)
    assert "3.2345" in (tmp_path / "report.md").read_text()


# --- end tasks and costs

TASKS = DOMAINS[:3]


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


def tables(markdown):
    """The tables under each heading of a report: lists of rows, the first their head."""
    found = {}
    for section in re.split(r"^## ", markdown, flags=re.M)[1:]:
        lines = [line for line in section.splitlines() if line.startswith("| ")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[section.splitlines()[0]] = [row for row in rows if not row[0].startswith(":--")]
    return found


def test_a_report_shows_the_end_tasks(tmp_path):
    markdown, html = written(tmp_path, examined())
    numbers = {row[0]: row[1:] for row in tables(markdown)["End tasks"][1:]}
    assert {name: row[-1] for name, row in numbers.items()} == {
        "MF1": "71.67",
        "Acc": "72.67",
        "forward": "76.67",
        "forget_rate": "7.50",
    }
    assert numbers["forget_rate"][1] == "mean_{u&lt;n} (A[u][u] - A[n][u])"
    assert "3 tasks, seeds 0, 1, endtask.when=each, 12.5 seconds." in markdown
    shown = tables(markdown)["End tasks: macro-F1"]
    own, macro, micro, accuracy = ([shown[place + row] for row in range(4)] for place in (0, 4, 8, 12))
    assert own[0] == ["after", *TASKS]
    assert own[1:] == macro[1:]
    assert own[1] == ["sympy", "80.00 ± 2.83", "–", "–"]
    assert own[3] == ["pandas", "75.00 ± 2.83", "50.00 ± 2.83", "90.00 ± 2.83"]
    assert micro[2] == ["networkx", "72.00 ± 2.83", "62.00 ± 2.83", "–"]
    assert accuracy[3][1] == "76.00 ± 2.83"
    assert all(f"<summary>{name}</summary>" in html for name in ("macro-F1", "micro-F1", "accuracy"))
    assert Page(html).open == []
    assert len(Page(html).loads) == 3


def test_one_measurement_of_each_task_has_no_picture_and_no_deviation(tmp_path):
    last = np.full((4, 3), np.nan)
    last[3] = [0.5, 0.25, 0.75]
    markdown, html = written(tmp_path, examined(last, when="last", seeds=[7], apart=0))
    assert len(Page(html).loads) == 2
    assert tables(markdown)["End tasks: macro-F1"][1] == ["pandas", "50.00", "25.00", "75.00"]
    assert [row[0] for row in tables(markdown)["End tasks"][1:]] == ["MF1", "Acc"]


def test_tasks_with_metrics_of_their_own_are_told(tmp_path):
    metric = dict(zip(TASKS, ("macro_f1", "micro_f1", "accuracy"), strict=True))
    markdown, _ = written(tmp_path, examined(metric=metric))
    title = "End tasks: each in its own metric: sympy macro-F1, networkx micro-F1, pandas accuracy"
    assert tables(markdown)[title][3][1:] == ["75.00 ± 2.83", "52.00 ± 2.83", "91.00 ± 2.83"]


def test_the_picture_of_end_tasks_shows_measured_rows():
    picture = endtask_report.draw_endtasks(examined())
    told = drawing.description(picture)
    assert told == "End-task scores of 3 models; after pandas: sympy 75.0 %, networkx 50.0 %, pandas 90.0 %"
    changed = A.copy()
    changed[1, 0] = 0.2
    assert (
        endtask_report.draw_endtasks(examined(changed)) != picture == endtask_report.draw_endtasks(examined())
    )


@pytest.mark.slow
def test_many_end_tasks_take_seconds(tmp_path):
    scores = many(40)
    tasks = scores.domains[:-1]
    learned = np.tril(np.random.default_rng(1).random((41, 40)), -1)
    scores.endtasks = given(np.where(learned > 0, learned, np.nan), tasks=tasks)
    began = time.perf_counter()
    markdown, html = written(tmp_path, scores)
    assert time.perf_counter() - began < 10
    assert f"{100 * learned[-1, 0]:.2f} ±" in html
    assert all(len(line) <= 110 for line in run_report.format_scores(scores).splitlines()[1:])


@pytest.mark.slow
def test_what_became_of_the_predictions(tmp_path):
    title = "End tasks: what became of the predictions"
    assert title not in written(tmp_path, examined(seeds=[0]))[0]
    for row, right in ((1, [1, 1, 1, 1, 0, 0]), (3, [1, 0, 0, 0, 1, 0])):
        predicted(tmp_path, row, "sympy", 0, right, rows=["base", *TASKS])
    shown = tables(written(tmp_path, examined(seeds=[0]))[0])[title]
    luck = (2 / 6) * (4 / 6) / 2
    moved = ["3", "50.00", f"{100 * (3 / 6 - luck):.2f}", "1", "16.67", f"{100 * (1 / 6 - luck):.2f}"]
    assert shown[1:] == [["sympy", "6", "66.67", "33.33", *moved]]
    damaged = predicted(tmp_path, 3, "sympy", 0, [1] * 6, rows=["base", *TASKS])
    damaged.write_bytes(b"PAR1")
    markdown, _ = written(tmp_path, examined(seeds=[0]))
    assert "sympy-0.parquet: damaged predictions" in markdown
    assert "## Compute" in markdown


def test_a_report_shows_what_each_stage_cost(tmp_path):
    head, base, sympy, _, pandas, whole = tables(written(tmp_path, examined())[0])["Compute"]
    assert head == ["after", "tokens", "FLOPs", "learn, s", "score, s", "end tasks, s"] + [
        "peak memory",
        "trained",
        "stored",
    ]
    assert base == ["base", "0", "0", "0.0", "1.5", "0.0", "1.00 MB", "0", "0 B"]
    assert sympy == ["sympy", "51,200", "2e+12", "41.5", "2.5", "9.2", "9.00 MB", "5,120", "1.00 MB"]
    assert pandas[1:6] == ["51,200", "4e+12", "30.0", "0.0", "0.0"]
    times = ["71.5", "4.0", "9.2"]
    assert whole == ["whole run", "153,600", "9e+12", *times, "9.00 MB", "6,120", "4.00 MB"]
    assert "## Compute" not in written(tmp_path / "plain", made())[0]


def test_the_console_shows_the_end_tasks():
    lines = run_report.format_scores(examined()).splitlines()
    expected = "end tasks (3): MF1 71.67 %, Acc 72.67 %, forward 76.67 %, forget_rate 7.50 %"
    assert lines[-1] == expected
    assert "end tasks" not in run_report.format_scores(made())


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
    told = run_report.format_scores(scores)
    assert "probes: a (acc, 0 shots, version 1.0) 0.7500 (base 0.2500), b " in told
    assert "Probes" not in tables(written(tmp_path, made())[0])
