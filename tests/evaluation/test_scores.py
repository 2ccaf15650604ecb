"""The metrics by hand and with missing cells, the bootstrap by simulation, the file by breaking it."""

import itertools
import json
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from cpt.evaluation import metrics
from cpt.evaluation.metrics import METRICS, PERPLEXITY, UNITS, MatrixLayout
from cpt.evaluation.options import EvalOptions, is_due
from cpt.evaluation.score_schema import find_file_key
from cpt.evaluation.scores import Scores
from tests.runs.reading import SCHEMA

TEXTS = ["a", "b", "c", "general"]
# fmt: off
NLL = np.array([  # every metric has a value of its own
    [5.0, 6.0, 7.0, 4.00],
    [3.0, 3.8, 6.8, 4.10],
    [3.4, 4.0, 6.5, 4.25],
    [3.9, 4.3, 5.0, 4.75],
])
BY_HAND = {  # mean, median of the terms
    "ZS": ((5 + 6 + 7) / 3, 6.0),
    "CPT": ((3.0 + 4.0 + 5.0) / 3, 4.0),
    "LC": ((3.9 + 4.3 + 5.0) / 3, 4.3),
    "learned": ((2.0 + 2.0 + 2.0) / 3, 2.0),
    "FG": ((0.9 + 0.3) / 2, 0.6),
    "FG_max": ((0.9 + (4.3 - 3.8)) / 2, 0.7),
    "BWT_zs": (((5.0 - 3.9) + (6.0 - 4.3)) / 2, 1.4),
    "BWT_gem": (-(0.9 + 0.3) / 2, -0.6),
    "FWT_zs": (((2.2 + 0.2) / 2 + 0.5) / 2, 0.5),  # a mean over stages, a median over all their terms
    "FWT_gem": ((2.2 + 0.5) / 2, 1.35),
    "general_drift": (0.75, 0.75),
}
# fmt: on
RUN = {"name": "t", "method": "ncl", "mask": "none", "model": "tiny", "order": ["a", "b", "c"], "seed": 0}
RUN |= {"replay": "none", "variant": "", "finished": True, "objective": "causal"}
DOMAINS = [f"d{number}" for number in range(20)]


def layout(*, rows=("base", "a", "b", "c"), domains=TEXTS):
    sizes = [100, 50, 80, 60][: len(domains)], [400, 150, 300, 180][: len(domains)]
    return MatrixLayout(rows=list(rows), domains=list(domains), tokens=sizes[0], bytes=sizes[1])


def make_scores(*, nll=NLL, rows=("base", "a", "b", "c"), domains=TEXTS):
    scores = Scores(
        **vars(layout(rows=rows, domains=domains)),
        nll=nll.tolist(),
        scored=[15, 8, 12, 9][: len(domains)],
        run=RUN,
        texts={name: {"hash": "d", "documents": {"test": 3}} for name in domains},
        config_hash="c",
        versions={"numpy": "2"},
    )
    scores.measure()
    return scores


def measure_scores(nll, **options):
    return {
        name: float(value) for name, value in metrics.compute_means(nll, layout=layout(**options)).items()
    }


def test_an_interval_over_few_documents_covers_the_mean():
    one_cell = layout(rows=["base"], domains=["a"])
    for documents, min_coverage in ((3, 0.85), (5, 0.9), (12, 0.9)):
        draw = np.random.default_rng(documents)
        hits = 0
        for _ in range(400):
            counts = draw.integers(20, 60, documents).astype(float)
            sums = (5 + draw.normal(0, 1, documents)) * counts
            low, high = bounds_of([sums[None]], [counts], layout=one_cell, replicates=200)["ZS"]["nats"]
            hits += low <= 5 <= high
        assert hits / 400 > min_coverage
    assert np.isnan(bounds_of([sums[None, :2]], [counts[:2]], layout=one_cell)["ZS"]["nats"]).all()

    names = [*DOMAINS, "general"]  # and over few of many domains
    layout_of_twenty = MatrixLayout(rows=["base", "d0", "d1"], domains=names, tokens=[9] * 21, bytes=[9] * 21)
    draw = np.random.default_rng(0)
    counts = [np.full(3, 9.0)] * 21
    hits = Counter()
    for _ in range(150):
        sums = [9 * (5 + draw.normal(0, 0.3, (1, 3)) + draw.normal(0, 0.05, (3, 3))) for _ in names]
        intervals = bounds_of(sums, counts, layout=layout_of_twenty, replicates=200)
        for name, mean in {"general_drift": 0, "FG": 0, "LC": 5}.items():
            low, high = intervals[name]["nats"]
            hits[name] += low <= mean <= high
    assert min(hits.values()) / 150 > 0.88, hits


def test_the_freedom_of_an_interval_is_that_of_the_columns_whose_terms_were_measured():
    three_domains = layout(rows=["base", "c", "a", "b"], domains=["a", "b", "c", "general"])
    are_measured = np.ones((4, 4), bool)
    columns = metrics.find_averaged_columns(are_measured, layout=three_domains)
    assert (columns["FWT_gem"], columns["FWT_zs"]) == ([0, 1], [0, 1])  # not of the first domain, c
    assert (columns["FG"], columns["FG_max"]) == ([2, 0], [2, 0])  # not of the last domain, b
    assert (columns["LC"], columns["CPT"]) == ([2, 0, 1], [2, 0, 1])
    assert columns["general_drift"] == [3]

    b_after_two_stages = are_measured.copy()
    b_after_two_stages[1, 1] = False
    columns = metrics.find_averaged_columns(b_after_two_stages, layout=three_domains)
    assert columns["FWT_zs"] == [0, 1]

    after_first_stage = layout(rows=["base", "c"], domains=["a", "b", "c", "general"])
    columns = metrics.find_averaged_columns(are_measured[:2], layout=after_first_stage)
    assert (columns["CPT"], columns["learned"], columns["FWT_gem"]) == ([2], [2], [0])

    are_measured[1, 0] = False  # a before its stage
    columns = metrics.find_averaged_columns(are_measured, layout=three_domains)
    assert (columns["FWT_gem"], columns["FWT_zs"]) == ([1], [1])
    are_measured[2, 1] = False
    assert metrics.find_averaged_columns(are_measured, layout=three_domains)["FWT_gem"] == []

    sums = [np.where(are_measured[:, [column]], 9.0, np.nan).repeat(3, axis=1) for column in range(4)]
    bounds = bounds_of(sums, [np.full(3, 9)] * 4, layout=three_domains)
    assert np.isnan(bounds["FWT_gem"]["nats"]).all() and np.isfinite(bounds["FG"]["nats"]).all()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 1, 3]])
def test_each_metric_by_hand_whatever_the_order_of_columns(order):
    columns = [TEXTS[column] for column in order]
    assert measure_scores(NLL[:, order], domains=columns) == pytest.approx(
        {k: v[0] for k, v in BY_HAND.items()}
    )
    scores = make_scores(nll=NLL[:, order], domains=columns)
    medians = {name: metric["median"]["nats"] for name, metric in scores.metrics.items()}
    assert medians == pytest.approx({k: v[1] for k, v in BY_HAND.items()}) and set(medians) == set(METRICS)


PRESENT = [
    (["base"], TEXTS, {"ZS", "LC"}),
    (["base", "joint"], TEXTS, {"ZS", "LC", "general_drift"}),
    (["base", "a"], TEXTS[:3], {"ZS", "LC", "CPT", "learned", "FWT_zs", "FWT_gem"}),
    (["base", "a", "b", "c"], TEXTS[:3], set(METRICS) - {"general_drift"}),
]


def test_a_metric_without_its_terms_is_absent_and_general_text_is_in_no_average():
    for rows, columns, expected_metrics in PRESENT:
        computed_metrics = make_scores(
            nll=NLL[: len(rows), : len(columns)], rows=rows, domains=columns
        ).metrics
        assert set(computed_metrics) == expected_metrics
        for values in computed_metrics.values():
            assert all(np.isfinite(values[unit]) for unit in UNITS)
    nll = np.array([[1.0, 9.0, 9.0], [3.0, 9.0, 9.0], [2.8, 5.0, 9.0], [2.5, 5.5, 6.0]])
    assert measure_scores(nll, domains=["a", "b", "c"])["FG_max"] == pytest.approx((-0.3 + 0.5) / 2)
    before = measure_scores(NLL)
    after = measure_scores(NLL + np.array([0, 0, 0, 1.0]) * np.arange(4)[:, None])
    assert {name for name in METRICS if before[name] != after[name]} == {"general_drift"}


def test_units_and_intransigence_by_hand():
    units = metrics.convert_units(NLL, layout=layout())
    assert units["perplexity"][1, 0] == pytest.approx(np.e**3)
    assert units["bits_per_byte"][2, 1] == pytest.approx(4.0 * 50 / 150 / 0.6931471805599453)
    values = metrics.compute_values(NLL, layout=layout())
    assert values["LC"]["perplexity"] == pytest.approx((np.e**3.9 + np.e**4.3 + np.e**5) / 3)
    assert values["general_drift"]["bits_per_byte"] == pytest.approx(0.75 * 60 / 180 / np.log(2))
    assert values["FG_max"]["perplexity"] == pytest.approx((np.e**3.9 - np.e**3 + np.e**4.3 - np.e**3.8) / 2)
    assert make_scores().metrics["LC"]["median"]["perplexity"] == pytest.approx(np.exp(4.3))
    single_domain_nll = np.array([2.5, 4.1, 4.7])
    assert metrics.intransigence(np.array([3.0, 4.0, 5.0]), reference=single_domain_nll) == pytest.approx(
        0.7 / 3
    )


def test_a_metric_may_be_named_as_in_the_config_or_as_in_the_tables():
    values = {"LC": {"nats": 4.4, "perplexity": 81.5}}
    for name in ("LC.perplexity", "LC/perplexity"):
        assert metrics.find_objective_value(values, name) == 81.5
    with pytest.raises(ValueError, match=r"optimized_metric=LC/furlongs is invalid"):
        metrics.find_objective_value(values, "LC/furlongs")


def test_each_policy_chooses_what_it_says():
    texts = [*DOMAINS[:10], "general"]

    def chosen(number, *, schedule="each", columns="all", stages=tuple((name,) for name in DOMAINS[:10])):
        options = EvalOptions(when=schedule, columns=columns, max_tokens=None)
        return options.choose_columns(number, stages=stages, texts=texts)

    assert chosen(4) == texts == chosen(1, schedule="last", columns="seen", stages=[tuple(DOMAINS[:10])])
    assert chosen(4, columns="seen") == ["d0", "d1", "d2", "d3", "general"]
    assert chosen(4, columns="near:3") == ["d1", "d2", "d3", "d4", "general"]
    assert chosen(1, columns="near:2") == ["d0", "d1", "d2", "general"]
    drawn = [chosen(number, columns="sample:3") for number in range(1, 10)]
    drawn_again = [chosen(number, columns="sample:3") for number in range(1, 10)]
    assert [len(texts) for texts in drawn] == [5] * 9
    assert len({*map(tuple, drawn)}) > 5
    assert drawn == drawn_again
    assert chosen(5, schedule="every:4", columns="seen") == chosen(5, schedule="last") == ["d4", "general"]
    for policy, due in {"last": [0, 7], "each": range(8), "every:3": [0, 3, 6, 7]}.items():
        assert [number for number in range(8) if is_due(policy, number, stages=7)] == list(due)


def test_what_is_missing_enters_no_mean_and_is_counted():
    names = TEXTS[:3] + ["d", "general"]
    scores_layout = MatrixLayout(rows=["base", *names[:4]], domains=names, tokens=[100] * 5, bytes=[100] * 5)
    full_matrix = np.random.default_rng(0).normal(4, 1, (5, 5))
    sparse_matrix = full_matrix.copy()
    sparse_matrix[1, 1:4] = np.nan
    sparse_matrix[2, 3] = np.nan
    sparse_matrix[3, 0] = np.nan
    sparse_means, full = (
        metrics.compute_means(matrix, layout=scores_layout) for matrix in (sparse_matrix, full_matrix)
    )

    for name in ("ZS", "CPT", "LC", "FG", "general_drift"):
        assert sparse_means[name] == pytest.approx(full[name])
    gained = np.mean([full_matrix[0, 2] - full_matrix[2, 2], full_matrix[0, 3] - full_matrix[3, 3]])
    assert [sparse_means["FWT_gem"], sparse_means["FWT_zs"]] == pytest.approx(
        [gained] * 2
    )  # of the first stage nothing
    best = [
        min(full_matrix[1, 0], full_matrix[2, 0]),
        min(full_matrix[2, 1], full_matrix[3, 1]),
        min(full_matrix[2, 2], full_matrix[3, 2]),
    ]
    assert sparse_means["FG_max"] == pytest.approx(np.mean(full_matrix[4, :3] - best))

    summary = metrics.summarise_matrix(sparse_matrix, layout=scores_layout)
    assert (summary["FWT_zs"]["terms"], summary["FWT_gem"]["terms"]) == ([2, 6], [2, 3])
    assert "terms" not in summary["LC"]
    sums = [np.repeat(sparse_matrix[:, [column]], 5, axis=1) * 10 for column in range(5)]
    bounds = bounds_of(sums, [np.full(5, 10)] * 5, layout=scores_layout)["FWT_zs"]["nats"]
    assert bounds == pytest.approx([gained] * 2)

    sparse_matrix[2, 2] = sparse_matrix[3, 3] = np.nan
    assert np.isnan(metrics.compute_means(sparse_matrix, layout=scores_layout)["FWT_gem"])
    sparse_matrix[4, 0] = 800.0  # an overflow is not taken for a missing cell
    values = metrics.compute_values(sparse_matrix, layout=scores_layout)["LC"]
    assert values["perplexity"] == np.inf and np.isfinite(values["nats"])


def documents(*, seed, size, rows=4, columns=4):
    """Losses of documents whose difficulty is common to all rows, per column: [row, document] sums, counts"""
    generator = np.random.default_rng(seed)
    sums = []
    counts = []
    for column in range(columns):
        count = generator.integers(5, 60, size=size)
        hard = generator.normal(size=size)
        noise = generator.normal(scale=0.05, size=(rows, size))
        sums.append((NLL[:rows, column, None] + hard + noise) * count)
        counts.append(count)
    return sums, counts


def bounds_of(sums, counts, **options):
    return metrics.find_intervals(sums, counts=counts, **{"layout": layout(), "replicates": 100} | options)


def test_the_bootstrap_is_deterministic_paired_and_independent_of_chunks(monkeypatch):
    sums_and_counts = documents(seed=1, size=100)
    first = bounds_of(*sums_and_counts, replicates=300)
    assert (
        first
        == bounds_of(*sums_and_counts, replicates=300)
        != bounds_of(*sums_and_counts, replicates=300, seed=1)
    )
    width = {name: np.ptp(first[name]["nats"]) for name in METRICS}
    assert width["FG"] < width["LC"] / 4 and width["general_drift"] < width["ZS"] / 4
    intervals = bounds_of(*sums_and_counts)
    for budget in (1, 7 * 100, 100 * 100 - 1):
        monkeypatch.setattr(metrics, "MAX_ARRAY_SIZE", budget)
        parts = bounds_of(*sums_and_counts)
        for name, unit in itertools.product(METRICS, UNITS):
            assert parts[name][unit] == pytest.approx(intervals[name][unit], rel=1e-9)
    sums, counts = sums_and_counts  # documents without scored tokens count for nothing
    padded = [np.append(s, np.zeros((4, 5)), axis=1) for s in sums]
    assert bounds_of(padded, [np.append(c, np.zeros(5, int)) for c in counts]) == bounds_of(sums, counts)
    with pytest.raises(ValueError, match="a: none of 100 documents has a scored token"):
        bounds_of(sums, [np.zeros(100), *counts[1:]])


def test_an_interval_is_that_of_a_plain_bootstrap_and_columns_are_drawn_apart():
    sums, counts = documents(seed=3, size=30, columns=1)
    widths = []
    for names in (["a"], ["a", "b"]):
        one_row = layout(rows=["base"], domains=names)
        bounds = bounds_of([sums[0][:1]] * len(names), counts * len(names), layout=one_row, replicates=4000)
        widths.append(bounds["ZS"]["nats"])
    drawn = np.random.default_rng(4).integers(30, size=(4000, 30))
    plain = np.percentile(sums[0][0][drawn].sum(1) / counts[0][drawn].sum(1), [2.5, 97.5])
    assert widths[0] == pytest.approx(plain, abs=0.05 * np.ptp(widths[0]))
    # Of two columns alike the mean is surer: what one draw has too much, the other has not.
    assert np.ptp(widths[1]) < 0.85 * np.ptp(widths[0])


def test_the_interval_of_few_documents_stays_within_what_a_loss_can_be():
    """Student's interval of three documents is wide: 3 +- 3.9 nats here, and 20 +- 54 as a perplexity."""
    one_row = layout(rows=["base"], domains=["a"])
    for nats, low in (([2.9, 3.0, 3.1], None), ([1.5, 3.0, 4.5], 0.0)):
        sums = [np.array([nats]) * 10]
        bounds = bounds_of(sums, [np.full(3, 10)], layout=one_row)["ZS"]
        assert bounds[PERPLEXITY] == pytest.approx(np.exp(bounds["nats"]))
        assert bounds["nats"][0] == low or 2.0 < bounds["nats"][0] < 3.0
    assert bounds[PERPLEXITY][0] == 1.0 and bounds["bits_per_byte"][0] == 0.0


def test_the_file_is_a_contract_and_what_is_not_finite_is_null_in_it(tmp_path):
    path = tmp_path / "scores.json"
    make_scores().save(path)
    assert Scores.load(path) == make_scores()
    data = json.loads(path.read_text())
    assert [*data] == [find_file_key(column) for column in fields(Scores)] and data["nll"] == NLL.tolist()
    SCHEMA.check_schema(SCHEMA.schema)
    SCHEMA.validate(data)
    diverged = NLL.copy()
    diverged[3, 0] = np.nan
    diverged[3, 1] = 800.0
    make_scores(nll=diverged).save(path)
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    loaded_scores = Scores.load(path)
    assert np.isnan(loaded_scores.matrix[3, 0])
    assert [loaded_scores.metrics["LC"][unit] for unit in UNITS] == [None] * 3
    assert loaded_scores.metrics["LC"]["median"]["nats"] == 800.0  # of infinity, 800 and 5
    assert loaded_scores.metrics["CPT"]["nats"] == 4.0


DAMAGE = {
    "Expecting|Unterminated": lambda data: json.dumps(data)[:-20],
    "it is of version 2, and this cpt reads version 1": {"version": 2},
    "it has keys that this cpt does not know: more": {"more": 1},
    "nll has 1 for 4 rows": {"nll": [[1.0] * 4]},
    "a name of domains occurs twice: a, b, a, general": {"domains": ["a", "b", "a", "general"]},
    r"tokens has 1 value for 4 domains": {"tokens": [1]},
    r"nll\[2\] has 3 losses for 4 domains": {"nll": [*NLL[:2].tolist(), [1.0] * 3, *NLL[3:].tolist()]},
    "seen has 3 values for 4 rows": {"seen": [1, 2, 3]},
    "phases has names that this cpt does not know: nap": {"phases": {"nap": {}}},
    r"nll\[0\]\[1\]": {"nll": [[None, "x", 1.0, 1.0], *NLL[1:].tolist()]},
    "endtasks.when is missing": {"endtasks": {"tasks": []}},
    "recursion": lambda data: "[" * 100_000,
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_bad_file_gives_one_line_with_the_remedy(tmp_path, message):
    path = tmp_path / "scores.json"
    harm = DAMAGE[message]
    make_scores().save(path)
    data = json.loads(path.read_text())
    path.write_text(harm(data) if callable(harm) else json.dumps(data | harm))
    with pytest.raises(ValueError, match=message) as raised:
        Scores.load(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)
