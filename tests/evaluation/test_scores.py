"""The metrics on matrices small enough for a hand, the bootstrap by simulation, the file by breaking it."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from cpt.evaluation import metrics
from cpt.evaluation.metrics import METRICS, UNITS, Layout
from cpt.evaluation.scores import Scores

# fmt: off
NLL = np.array([  # columns a, b, c, general; every metric has a value of its own
    [5.0, 6.0, 7.0, 4.00],
    [3.0, 3.8, 6.8, 4.10],
    [3.4, 4.0, 6.5, 4.25],
    [3.9, 4.3, 5.0, 4.75],
])
BY_HAND = {
    "ZS": (5 + 6 + 7) / 3,
    "CPT": (3.0 + 4.0 + 5.0) / 3,
    "LC": (3.9 + 4.3 + 5.0) / 3,
    "FG": ((3.9 - 3.0) + (4.3 - 4.0)) / 2,
    "FG_max": ((3.9 - 3.0) + (4.3 - 3.8)) / 2,
    "BWT_zs": ((5.0 - 3.9) + (6.0 - 4.3)) / 2,
    "BWT_gem": -((3.9 - 3.0) + (4.3 - 4.0)) / 2,
    "FWT_zs": (((6 - 3.8) + (7 - 6.8)) / 2 + (7 - 6.5)) / 2,
    "FWT_gem": ((6 - 3.8) + (7 - 6.5)) / 2,
    "general_drift": 4.75 - 4.00,
}
# fmt: on
AT_FIRST = (  # fields without a default and others
    *("version", "domains", "rows", "nll", "tokens", "bytes", "scored", "metrics", "seconds", "phases"),
    *(
        "objective",
        "config_digest",
        "run",
        "texts",
        "versions",
        "parts",
        "trained",
        "stored",
        "seen",
        "flops",
    ),
    *("memory", "endtasks", "needs_domain", "loading"),
)
RUN = {"name": "t", "method": "ncl", "mask": "none", "model": "tiny", "order": ["a", "b", "c"], "seed": 0}
RUN |= {"replay": "none", "variant": "", "finished": True, "objective": "causal"}


def layout(*, rows=("base", "a", "b", "c"), domains=("a", "b", "c", "general")):
    return Layout(
        rows=list(rows), domains=list(domains), tokens=[100, 50, 80, 60], bytes=[400, 150, 300, 180]
    )


def made(*, nll=NLL, rows=("base", "a", "b", "c"), domains=("a", "b", "c", "general"), **given):
    columns = len(domains)
    made = Scores(
        rows=list(rows),
        domains=list(domains),
        nll=np.asarray(nll, float).tolist(),
        tokens=[100, 50, 80, 60][:columns],
        bytes=[400, 150, 300, 180][:columns],
        scored=[15, 8, 12, 9][:columns],
        run=RUN | given,
        texts={name: {"digest": "d", "documents": 3} for name in domains},
        config_digest="c",
        versions={"numpy": "2"},
    )
    made.measure()
    return made


def test_each_metric_by_hand():
    measured = metrics.metrics(NLL, layout=layout())
    assert measured.keys() == BY_HAND.keys() == METRICS.keys()
    assert {name: float(x) for name, x in measured.items()} == pytest.approx(BY_HAND)
    assert len({round(x, 6) for x in BY_HAND.values()}) == len(BY_HAND)


def test_batched_equals_looped():
    batch = np.random.default_rng(0).uniform(1, 6, size=(5, 2, 4, 4))
    batched = metrics.metrics(batch, layout=layout())
    for index in np.ndindex(5, 2):
        single = metrics.metrics(batch[index], layout=layout())
        for name in METRICS:
            assert batched[name].shape == (5, 2)
            assert batched[name][index] == pytest.approx(single[name])


def test_the_diagonal_goes_by_name():
    shuffled = [2, 0, 1, 3]
    columns = [["a", "b", "c", "general"][i] for i in shuffled]
    measured = metrics.metrics(NLL[:, shuffled], layout=layout(domains=columns))
    assert {name: float(x) for name, x in measured.items()} == pytest.approx(BY_HAND)
    assert made(nll=NLL[:, shuffled], domains=columns).diagonal == {"a": 3.0, "b": 4.0, "c": 5.0}


def test_after_two_of_three_stages():
    measured = metrics.metrics(NLL[:3], layout=layout(rows=("base", "a", "b")))
    expected = {
        "CPT": (3.0 + 4.0) / 2,
        "LC": (3.4 + 4.0 + 6.5) / 3,
        "FG": 0.4,
        "FG_max": 0.4,
        "BWT_zs": 5.0 - 3.4,
        "FWT_zs": (((6 - 3.8) + (7 - 6.8)) / 2 + (7 - 6.5)) / 2,
        "FWT_gem": ((6 - 3.8) + (7 - 6.5)) / 2,
        "general_drift": 0.25,
    }
    assert {name: float(measured[name]) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rows", "columns", "present"),
    [
        (["base"], ["a", "b", "c", "general"], {"ZS", "LC"}),
        (["base", "joint"], ["a", "b", "c", "general"], {"ZS", "LC", "general_drift"}),
        (["base", "a+b", "c"], ["a", "b", "c"], {"ZS", "LC"}),
        (["base", "a"], ["a", "b", "c"], {"ZS", "LC", "CPT", "FWT_zs", "FWT_gem"}),
        (["base", "a"], ["a", "general"], {"ZS", "LC", "CPT", "general_drift"}),
        (["base", "a"], ["a"], {"ZS", "LC", "CPT"}),
        (["base", "a", "b", "c"], ["a", "b", "c"], set(METRICS) - {"general_drift"}),
        ([], ["a"], set()),
    ],
)
def test_a_metric_without_its_terms_is_absent(rows, columns, present):
    measured = made(nll=NLL[: len(rows), : len(columns)], rows=rows, domains=columns).metrics
    assert set(measured) == present
    assert all(np.isfinite(x) for units in measured.values() for x in map(units.get, UNITS))


def test_the_best_model_is_sought_among_the_learned_rows_before_the_last():
    nll = np.array([[1.0, 9.0, 9.0], [3.0, 9.0, 9.0], [2.8, 5.0, 9.0], [2.5, 5.5, 6.0]])
    columns = layout(domains=["a", "b", "c"])
    assert metrics.metrics(nll, layout=columns)["FG_max"] == pytest.approx(((2.5 - 2.8) + (5.5 - 5.0)) / 2)


def test_the_general_column_enters_no_average():
    other = NLL + np.array([0, 0, 0, 1.0]) * np.arange(4)[:, None]
    before, after = metrics.metrics(NLL, layout=layout()), metrics.metrics(other, layout=layout())
    assert {name for name in METRICS if before[name] != after[name]} == {"general_drift"}


def test_units_by_hand():
    units = metrics.in_units(NLL, layout=layout())
    assert units["perplexity"][1, 0] == pytest.approx(np.e**3)
    assert units["bits_per_byte"][1, 0] == pytest.approx(3.0 * 100 / 400 / 0.6931471805599453)
    assert units["bits_per_byte"][2, 1] == pytest.approx(4.0 * 50 / 150 / 0.6931471805599453)
    measured = metrics.compute_values(NLL, layout=layout())
    assert measured["LC"]["perplexity"] == pytest.approx((np.e**3.9 + np.e**4.3 + np.e**5) / 3)
    assert measured["general_drift"]["bits_per_byte"] == pytest.approx(0.75 * 60 / 180 / np.log(2))
    assert measured["FG_max"]["perplexity"] == pytest.approx(
        (np.e**3.9 - np.e**3 + np.e**4.3 - np.e**3.8) / 2
    )


def test_intransigence_by_hand():
    assert metrics.intransigence(np.array([3.0, 4.0, 5.0]), one=np.array([2.5, 4.1, 4.7])) == pytest.approx(
        0.7 / 3
    )


def test_every_metric_describes_itself():
    described = {name: metrics.describe_metric(metric.compute) for name, metric in METRICS.items()}
    assert described["FG"] == (
        "Forgetting since each domain was learned, > 0 is bad",
        "mean_{j<n} (L[n][j] - L[j][j])",
    )
    assert all(meaning and "L[" in formula and "`" not in formula for meaning, formula in described.values())
    assert len({formula for _, formula in described.values()}) == len(METRICS)


def documents(*, generator, size, rows=4, columns=4, spread=1.0):
    """Losses of documents whose difficulty is common to all rows, per column: [row, document] sums, counts"""
    sums, counts = [], []
    for column in range(columns):
        count = generator.integers(5, 60, size=size)
        hard = generator.normal(scale=spread, size=size)
        noise = generator.normal(scale=0.05, size=(rows, size))
        sums.append((NLL[:rows, column, None] + hard + noise) * count)
        counts.append(count)
    return sums, counts


def test_bootstrap_is_deterministic_and_holds_every_metric():
    sums, counts = documents(generator=np.random.default_rng(1), size=40)
    first, second = (
        metrics.intervals(sums, counts=counts, layout=layout(), replicates=200) for _ in range(2)
    )
    other = metrics.intervals(sums, counts=counts, layout=layout(), replicates=200, seed=1)
    assert first == second != other
    assert first.keys() == METRICS.keys()
    assert all(low < high for units in first.values() for low, high in units.values())


def test_chunks_change_nothing(monkeypatch):
    sums, counts = documents(generator=np.random.default_rng(2), size=33)
    whole = metrics.intervals(sums, counts=counts, layout=layout(), replicates=100)
    for budget in (1, 7 * 33, 100 * 33 - 1):
        monkeypatch.setattr(metrics, "BUDGET", budget)
        parts = metrics.intervals(sums, counts=counts, layout=layout(), replicates=100)
        for name, unit in ((name, unit) for name in METRICS for unit in UNITS):
            assert parts[name][unit] == pytest.approx(whole[name][unit], rel=1e-9)


def test_an_interval_is_that_of_a_plain_bootstrap():
    sums, counts = documents(generator=np.random.default_rng(3), size=30, columns=1)
    only = Layout(rows=["base", "a", "b", "c"], domains=["a"], tokens=[100], bytes=[400])
    low, high = metrics.intervals(sums, counts=counts, layout=only, replicates=4000)["ZS"]["nats"]
    generator = np.random.default_rng(4)
    drawn = generator.integers(30, size=(4000, 30))
    plain = np.percentile(sums[0][0][drawn].sum(1) / counts[0][drawn].sum(1), [2.5, 97.5])
    assert [low, high] == pytest.approx(plain, abs=0.05 * (high - low))


def test_intervals_cover_the_truth():
    generator = np.random.default_rng(5)
    columns = layout()
    covered = {"LC": 0, "FG": 0, "general_drift": 0}
    for _ in range(150):
        sums, counts = documents(generator=generator, size=50)
        bounds = metrics.intervals(sums, counts=counts, layout=columns, replicates=200)
        for name in covered:
            low, high = bounds[name]["nats"]
            covered[name] += low <= BY_HAND[name] <= high
    assert all(0.87 <= count / 150 <= 0.99 for count in covered.values()), covered


def test_differences_are_paired():
    sums, counts = documents(generator=np.random.default_rng(6), size=100)
    bounds = metrics.intervals(sums, counts=counts, layout=layout(), replicates=300)
    width = {name: bounds[name]["nats"][1] - bounds[name]["nats"][0] for name in METRICS}
    assert width["FG"] < width["LC"] / 4
    assert width["general_drift"] < width["ZS"] / 4


def test_many_documents_in_bounded_memory():
    import tracemalloc

    count = np.full(1_000_000, 7)
    sums = np.random.default_rng(7).normal(3, 1, size=(2, 1_000_000)) * count
    only = Layout(rows=["base", "a"], domains=["a"], tokens=[100], bytes=[400])
    tracemalloc.start()
    bounds = metrics.intervals([sums], counts=[count], layout=only, replicates=8)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bounds["LC"]["nats"] == pytest.approx([3, 3], abs=0.02)
    assert peak < 300e6


def test_documents_without_scored_tokens_count_for_nothing():
    sums, counts = documents(generator=np.random.default_rng(8), size=20)
    padded = [np.append(s, np.zeros((4, 5)), axis=1) for s in sums]
    zeros = [np.append(c, np.zeros(5, int)) for c in counts]
    few = {"replicates": 50, "layout": layout()}
    assert metrics.intervals(padded, counts=zeros, **few) == metrics.intervals(sums, counts=counts, **few)
    with pytest.raises(ValueError, match="a: none of 20 documents has a scored token"):
        metrics.intervals(sums, counts=[np.zeros(20), *counts[1:]], **few)
    with pytest.raises(ValueError, match=r"b: nll_sums is \(3, 20\), needed \(4, 20\)"):
        metrics.intervals([sums[0], sums[1][:3], *sums[2:]], counts=counts, **few)


def test_append_adds_a_row_that_is_measured_when_asked():
    measured = made(nll=NLL[:1], rows=["base"])
    measured.append("a", nll=NLL[1])
    assert measured.rows == ["base", "a"] and "CPT" not in measured.metrics
    measured.measure()
    assert measured.metrics["CPT"]["nats"] == 3.0
    with pytest.raises(ValueError, match="row a: 4 losses"):
        measured.append("a", nll=NLL[2])
    with pytest.raises(ValueError, match="row b: 3 losses; needed: 4"):
        measured.append("b", nll=NLL[2, :3])


def test_saved_and_loaded_is_the_same(tmp_path):
    measured = made()
    measured.phases["score"]["base"], measured.seconds = np.float32(1.5), np.float64(2.5)
    measured.save(tmp_path / "scores.json")
    assert Scores.load(tmp_path / "scores.json") == measured
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]


MEDIANS = {
    "ZS": 6.0,
    "CPT": 4.0,
    "LC": 4.3,
    "FG": (0.9 + 0.3) / 2,
    "FG_max": (0.9 + 0.5) / 2,
    "BWT_zs": (1.1 + 1.7) / 2,
    "BWT_gem": -(0.9 + 0.3) / 2,
    "FWT_zs": 0.5,  # of 2.2, 0.2 and 0.5, whatever stages they are of
    "FWT_gem": (2.2 + 0.5) / 2,
    "general_drift": 0.75,
}


def test_medians_by_hand_stand_beside_the_means(tmp_path):
    scores = made()
    assert {name: metric["median"]["nats"] for name, metric in scores.metrics.items()} == pytest.approx(
        MEDIANS
    )
    assert scores.metrics["LC"]["median"]["perplexity"] == pytest.approx(np.exp(4.3))
    per_byte = NLL[3, :3] * np.array([100, 50, 80]) / np.array([400, 150, 300]) / np.log(2)
    assert scores.metrics["LC"]["median"]["bits_per_byte"] == pytest.approx(np.median(per_byte))


def test_a_median_is_over_the_terms_that_were_measured():
    scores = made()
    scores.nll[1][1] = scores.nll[3][2] = None
    scores.measure()
    medians = {name: metric["median"]["nats"] for name, metric in scores.metrics.items()}
    assert medians["LC"] == pytest.approx((3.9 + 4.3) / 2)
    assert medians["FWT_zs"] == pytest.approx((0.2 + 0.5) / 2)


def test_the_contract_of_the_file(tmp_path):
    made().save(tmp_path / "scores.json")
    data = json.loads((tmp_path / "scores.json").read_text())
    later = "conditions skipped alone probes answers rates policy grown similarity leak numerics monitor base"
    later += " spikes moved"
    assert set(data) == {*AT_FIRST, *later.split()}
    assert data["version"] == 3
    assert data["nll"] == NLL.tolist()
    assert set(data["metrics"]["LC"]) == {*UNITS, "median"} and set(data["metrics"]["LC"]["median"]) == {
        *UNITS
    }


def test_rows_hold_parts_and_costs(tmp_path):
    scores = made(rows=(), nll=np.empty((0, 4)))
    scores.append("base", nll=NLL[0], parts={"a": {"base": 1.0}, "general": {}})
    scores.append("a", nll=NLL[1], parts={"a": {"a": 0.75, "base": 0.25}}, trained=7, stored=100)
    assert scores.growth is None
    scores.append("b", nll=NLL[2], trained=7, stored=150)
    scores.append("c", nll=NLL[3], trained=9, stored=180)
    scores.save(tmp_path / "scores.json")
    back = Scores.load(tmp_path / "scores.json")
    assert back.parts == [{"a": {"base": 1.0}}, {"a": {"a": 0.75, "base": 0.25}}, {}, {}]
    assert (back.trained, back.stored, back.growth) == ([0, 7, 7, 9], [0, 100, 150, 180], 40.0)


def test_what_is_not_finite_is_null_in_the_file(tmp_path):
    diverged = NLL.copy()
    diverged[3, 0], diverged[3, 1] = np.nan, 800.0
    made(nll=diverged).save(tmp_path / "scores.json")
    text = (tmp_path / "scores.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    back = Scores.load(tmp_path / "scores.json")
    assert np.isnan(back.matrix[3, 0])
    assert [back.metrics["LC"][unit] for unit in UNITS] == [None] * 3
    assert back.metrics["LC"]["median"]["nats"] == 800.0  # of infinity, 800 and 5
    assert back.metrics["CPT"]["nats"] == 4.0


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch, broken):
    made().save(tmp_path / "scores.json")
    before = (tmp_path / "scores.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, full)
    with pytest.raises(OSError, match="No space left"):
        made(seed=1).save(tmp_path / "scores.json")
    assert [path.name for path in tmp_path.iterdir()] == ["scores.json"]
    assert (tmp_path / "scores.json").read_bytes() == before


def damaged(data, **changes):
    return json.dumps({**data, **changes})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: json.dumps(data)[:-20], "Expecting|Unterminated"),
        (lambda data: "", "Expecting value"),
        (lambda data: "\x00\xff", "Expecting value"),
        (lambda data: "[1, 2]", "version 3"),
        (lambda data: '{"rows": ["base"]}', "version 3"),
        (lambda data: damaged(data, version=1), "version 3"),
        (lambda data: damaged(data, extra=2), "unknown: extra"),
        (
            lambda data: json.dumps({k: v for k, v in data.items() if k != "texts"}),
            "missing or unknown: texts",
        ),
        (lambda data: damaged(data, nll=data["nll"][:-1]), "are not of the rows"),
        (lambda data: damaged(data, nll=[[1.0], [1.0, 2.0]]), "not of the columns"),
        (lambda data: damaged(data, nll="abc"), "nll is 'abc', needed is list"),
        (lambda data: damaged(data, rows=5), "rows is 5, needed is list"),
        (lambda data: damaged(data, rows=["a", "base", "b", "c"]), "base is not first"),
        (lambda data: damaged(data, domains=["a", "b", "a", "general"]), "occur twice"),
        (lambda data: damaged(data, tokens=[1]), "not of the columns"),
        (lambda data: damaged(data, run={"name": "x"}), "run.method is missing"),
        (lambda data: damaged(data, run=None), "run is None, needed is dict"),
        (lambda data: damaged(data, nll=[[None, "x", 1.0, 1.0], *data["nll"][1:]]), r"nll\[0\]\[1\] is 'x'"),
        (
            lambda data: damaged(data, run=data["run"] | {"order": "abc"}),
            "run.order is 'abc', needed is list",
        ),
        (lambda data: damaged(data, run=data["run"] | {"seed": 1.5}), "run.seed is 1.5, needed is int"),
        (lambda data: damaged(data, seen=[1, 2]), "seen.* are not of the rows"),
        (lambda data: damaged(data, parts=[None] * 4), r"parts\[0\] is None"),
        (lambda data: damaged(data, parts=[{}, {"{}": {"x": "y"}}, {}, {}]), r"parts\[1\]\.\{\}\.x is 'y'"),
        (lambda data: damaged(data, metrics={"XY": data["metrics"]["LC"]}), "unknown: XY"),
        (lambda data: "[" * 100_000, "recursion"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_to_do(tmp_path, spoil, said):
    path = tmp_path / "scores.json"
    made().save(path)
    path.write_text(spoil(json.loads(path.read_text())))
    with pytest.raises(ValueError, match=said) as raised:
        Scores.load(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "restore it from a copy" in message
    assert "\n" not in message


def test_the_import_is_light():
    heavy = "('torch', 'lightning', 'matplotlib')"
    code = f"import sys, cpt.evaluation.scores; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_an_unknown_kind_of_seconds_is_refused():
    with pytest.raises(ValueError, match="phases or metrics are unknown: sleep"):
        dataclasses.replace(made(), phases={"sleep": {"a": 1.0}})
