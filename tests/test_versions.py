"""The comparison of two versions: what its ratios and tables say of given times."""

import sys

import pytest

from tests.conftest import ROOT

COSTS = ROOT / "benchmarks" / "costs"


@pytest.fixture(scope="module")
def versions():
    sys.path.insert(0, str(COSTS))
    try:
        yield __import__("versions")
    finally:
        sys.path.remove(str(COSTS))


def make_pairs(ours: list[float], theirs: list[float]) -> dict[str, list[dict[str, float]]]:
    """CPU times of both sides; the wall time of this one is twice as much."""
    return {
        "ours": [{"cpu": seconds, "wall": 2 * seconds} for seconds in ours],
        "theirs": [{"cpu": seconds, "wall": seconds} for seconds in theirs],
    }


def test_ratios_are_paired_and_above_1_where_this_version_is_slower(versions):
    times = [0.1, 0.2, 0.4]
    summary = versions.summarize(
        {
            "step, ncl, roberta": make_pairs([1.1 * seconds for seconds in times], times),
            "default run": make_pairs(times, times),
        }
    )
    step = summary["step, ncl, roberta"]
    assert [step["cpu"][name] for name in ("median", "low", "high")] == pytest.approx([1.1] * 3)
    assert step["wall"]["median"] == pytest.approx(2.2) and step["cpu"]["pairs"] == 3
    assert step["cpu_seconds"] == pytest.approx(0.22 / versions.CHUNK)  # of one step
    assert summary["default run"]["cpu_seconds"] == pytest.approx(0.2)
    assert versions.list_slower(summary) == ["step, ncl, roberta"]


def test_a_ratio_whose_interval_has_1_is_not_called_slower(versions):
    pairs = make_pairs([1.1, 0.9, 1.1, 0.9, 1.1], [1.0] * 5)
    summary = versions.summarize({"text": pairs})
    assert summary["text"]["cpu"]["median"] == pytest.approx(1.1)
    assert versions.list_slower(summary) == []


def test_tables_have_a_row_of_each_phase_and_a_cell_of_each_measured_step(versions):
    pairs = make_pairs([0.2, 0.2], [0.2, 0.2])
    summary = versions.summarize({"default run": pairs, "step, ncl, gpt2": pairs, "step, das, gpt2": pairs})
    lines = versions.format_tables(summary).splitlines()
    cells = "1.000 [1.000, 1.000] | 2.000 [2.000, 2.000]"
    assert f"| `python run.py`, cached text and base | 0.20 | {cells} | 2 |" in lines
    assert "| CPU time of a step (ms) | GPT-2 |" in lines
    assert "| `das` | 1.000 [1.000, 1.000] (100) |" in lines
    assert "| `ewc` | – |" in lines


def test_options_have_the_names_of_the_other_version(versions):
    overrides = ["eval.when=last", "eval.max_tokens=10", "order=[a,b]"]
    renamed = versions.rename(overrides, {"eval.when": "eval.rows"})
    assert renamed == ["eval.rows=last", "eval.max_tokens=10", "order=[a,b]"]
