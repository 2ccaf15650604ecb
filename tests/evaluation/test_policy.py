"""Which cells of the matrix are measured, and metrics of a matrix with cells that are not."""

import numpy as np
import pytest

from cpt.evaluation import metrics
from cpt.evaluation.metrics import METRICS, Layout
from cpt.evaluation.options import EvalOptions

NAMES = [f"d{number}" for number in range(10)]
STAGES, TEXTS = [(name,) for name in NAMES], [*NAMES, "general"]


def chosen(number: int, *, rows: str = "each", columns: str = "all") -> list[str]:
    options = EvalOptions(rows=rows, columns=columns, tokens=None)
    return options.choose_columns(number, stages=STAGES, texts=TEXTS)


@pytest.mark.parametrize("columns", ["all", "seen", "near:2", "sample:3"])
@pytest.mark.parametrize("rows", ["each", "every:4", "last"])
def test_base_and_last_see_every_text_and_each_stage_its_own(rows, columns):
    for number in (0, 10):
        assert chosen(number, rows=rows, columns=columns) == TEXTS
    for number in range(1, 10):
        assert {NAMES[number - 1], "general"} <= set(chosen(number, rows=rows, columns=columns))


def test_each_policy_chooses_what_it_says():
    assert chosen(4) == TEXTS
    assert chosen(4, columns="seen") == ["d0", "d1", "d2", "d3", "general"]
    assert chosen(4, columns="near:3") == ["d1", "d2", "d3", "d4", "general"]
    assert chosen(1, columns="near:2") == ["d0", "d1", "d2", "general"]
    drawn = [chosen(number, columns="sample:3") for number in range(1, 10)]
    assert [len(each) for each in drawn] == [5] * 9 and len({tuple(each) for each in drawn}) > 5
    assert drawn == [chosen(number, columns="sample:3") for number in range(1, 10)]
    assert chosen(4, rows="every:4", columns="seen") == chosen(4, columns="seen")
    assert chosen(5, rows="every:4", columns="seen") == ["d4", "general"]
    assert chosen(5, rows="last") == ["d4", "general"]


def test_a_mixture_of_all_domains_sees_them_all():
    options = EvalOptions(rows="last", columns="seen", tokens=None)
    assert options.choose_columns(1, stages=[tuple(NAMES)], texts=TEXTS) == TEXTS


@pytest.mark.parametrize("columns", ["near:0", "near", "sample:-1", "some", 3, None])
def test_columns_that_there_are_not(columns):
    with pytest.raises(ValueError, match="allowed: all, seen, near:K, sample:K"):
        EvalOptions(rows="each", columns=columns, tokens=None)


def made(matrix: np.ndarray) -> Layout:
    domains = [f"d{place}" for place in range(matrix.shape[1] - 1)]
    sizes = [100] * matrix.shape[1]
    return Layout(
        rows=["base", *domains][: len(matrix)], domains=[*domains, "general"], tokens=sizes, bytes=sizes
    )


def drawn(domains: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(4, 1, (domains + 1, domains + 1))


def test_what_is_missing_enters_no_mean_and_is_counted():
    whole = drawn(4)
    some = whole.copy()
    some[1, 1:4], some[2, 3], some[3, 0] = np.nan, np.nan, np.nan
    layout = made(whole)
    found = {name: float(value) for name, value in metrics.metrics(some, layout=layout).items()}
    assert not [name for name in ("ZS", "CPT", "LC", "FG", "general_drift") if found[name] != pytest.approx(
        float(metrics.metrics(whole, layout=layout)[name])
    )]  # fmt: skip
    gained = np.mean([whole[0, 2] - whole[2, 2], whole[0, 3] - whole[3, 3]])
    assert found["FWT_gem"] == pytest.approx(gained)
    assert found["FWT_zs"] == pytest.approx(gained)  # of the second stage one of two, of the first none
    best = [min(whole[1, 0], whole[2, 0]), min(whole[2, 1], whole[3, 1]), min(whole[2, 2], whole[3, 2])]
    assert found["FG_max"] == pytest.approx(np.mean(whole[4, :3] - best))
    told = metrics.summarise_matrix(some, layout=layout)
    assert told["FWT_zs"]["terms"] == [2, 6] and told["FWT_gem"]["terms"] == [2, 3]
    assert "terms" not in told["LC"]


def test_a_metric_of_which_nothing_was_measured_is_nan():
    some = drawn(3)
    some[1:3, 1:3] = np.nan
    some[2, 1] = 3.0
    assert np.isnan(metrics.metrics(some, layout=made(some))["FWT_gem"])


def test_an_overflow_is_not_taken_for_a_missing_cell():
    some = drawn(3)
    some[3, 0] = 800.0
    some[1, 2] = np.nan
    values = metrics.compute_values(some, layout=made(some))
    assert values["LC"]["perplexity"] == np.inf and np.isfinite(values["LC"]["nats"])


def test_a_whole_matrix_is_measured_as_ever_and_a_sample_without_bias():
    """Sampled cells estimate what all of them say: their mean over draws is that of the whole matrix."""
    whole = drawn(30)
    layout = made(whole)
    exact = {name: float(value) for name, value in metrics.metrics(whole, layout=layout).items()}
    assert set(exact) == set(METRICS)
    sampled = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        some = whole.copy()
        for row in range(1, 30):
            others = [column for column in range(30) if column != row - 1]
            some[row, generator.permutation(others)[8:]] = np.nan
        sampled.append(float(metrics.metrics(some, layout=layout)["FWT_zs"]))
    error = np.std(sampled) / np.sqrt(len(sampled))
    assert abs(np.mean(sampled) - exact["FWT_zs"]) < 4 * error


def test_intervals_of_a_matrix_with_missing_cells():
    whole = drawn(3)
    sums = [np.repeat(whole[:, [column]], 5, axis=1) * 10 for column in range(4)]
    sums[2][1] = np.nan
    found = metrics.intervals(sums, counts=[np.full(5, 10)] * 4, layout=made(whole))
    low, high = found["FWT_zs"]["nats"]
    assert low == pytest.approx(high)
    assert low == pytest.approx(np.mean([whole[0, 1] - whole[1, 1], whole[0, 2] - whole[2, 2]]))
