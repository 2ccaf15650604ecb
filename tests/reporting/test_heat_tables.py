"""The first tables of a comparison: who is best at the end, and what is coloured better or worse."""

import itertools
import re

import numpy as np
import pytest

from cpt.reporting.comparison_figures import map_mean_change
from cpt.reporting.findings import build_tiles
from cpt.reporting.heat_tables import MAX_PAIRS, build_heat_tables, tabulate_headline
from cpt.reporting.page import MAX_SHADE, render_html
from tests.support.example_runs import DOMAINS, NLL, make_run, make_section

NUM_SEEDS = 3


def make_runs(shifts, *, seeds=NUM_SEEDS, order=DOMAINS):
    runs = []
    for method, shift in shifts.items():
        for seed in range(seeds):
            method_shift = 0.0 if method == "ncl" else shift + 0.01 * seed
            runs.append(make_run(method=method, seed=seed, shift=method_shift, order=order))
    return runs


@pytest.fixture
def section():
    return make_section(make_runs({"ncl": 0.0, "das": -0.5, "ewc": 0.25, "one": -3.0}))


def column(block, title):
    return {row[0]: row[block.head.index(title)] for row in block.cells}


def shade(block, title):
    index = block.head.index(title) - 1
    return {row[0]: shades[index] for row, shades in zip(block.cells, block.shades, strict=True)}


def test_the_first_tile_and_table_say_which_group_is_best_at_the_end_and_by_how_much(section):
    finals = {}
    for group in section.groups:
        finals[group.name] = np.mean([run.values["LC/perplexity"] for run in group.runs])
    difference = f"{finals['das'] - finals['ncl']:.2f}".replace("-", "−")

    title, mean, _interval, lead, _meaning = build_tiles(section).cells[0]
    assert title == "best at the end: no group leads" and mean == f"{finals['das']:.2f} perplexity"
    assert lead == f"lowest mean: das; {difference} against ncl, Holm p 0.75; 3 pairs, 7 needed for a test"

    table = tabulate_headline(section)
    assert column(table, "Δ to ncl")["das"] == difference and column(table, "Δ to ncl")["ncl"] == "–"
    assert column(table, "p (Holm)")["das"] == "0.75"


def test_a_cell_is_blue_where_a_group_is_better_than_the_baseline_and_red_where_it_is_worse(section):
    measures, domains, pairs = build_heat_tables(section)
    for block in (measures, domains, pairs):
        assert len(block.shades) == len(block.cells)
        assert {len(shades) for shades in block.shades} == {len(block.head) - 1}

    final = shade(measures, "final LC (perplexity)")
    assert final["das"] == MAX_SHADE and final["ncl"] == 0 and final["ewc"] < 0
    assert final["one"] == 0  # it has no final model of all domains
    assert shade(domains, "law")["das"] == MAX_SHADE and column(domains, "law")["ncl"] == "134.3"
    assert shade(pairs, "seed 1")["das"] == MAX_SHADE and shade(pairs, "seed 1")["ewc"] == -2

    html = render_html([measures], title="t")
    assert re.search(r'<td class="better-4">\d', html) and "worse-2" in html


def test_small_differences_are_pale_and_single_runs_lead_nothing():
    section = make_section(make_runs({"ncl": 0.0, "das": 0.004, "ewc": -0.05}, seeds=1))
    measures, domains = build_heat_tables(section)[:2]
    for table, title in ((measures, "final LC (perplexity)"), (measures, "general drift"), (domains, "law")):
        assert shade(table, title) == {"ncl": 0, "das": 0, "ewc": 2}
    tiles = build_tiles(section)
    assert tiles.lines == ["One run each: nothing is tested."]
    title, _mean, _interval, lead, _meaning = tiles.cells[0]
    assert title == "best at the end: no group leads"
    assert re.fullmatch(r"lowest mean: ewc; −[0-9.]+ against ncl", lead)


def test_higher_is_better_for_measures_that_declare_it():
    answers = {"ncl": 0.0, "das": 0.3}
    section = make_section(make_runs(answers))
    for run in section.runs:
        run.values = {**run.values, "answers/AP": 0.5 + answers[run.scores.run["method"]]}
    measures, *_ = build_heat_tables(section)
    assert shade(measures, "AP (%)")["das"] == MAX_SHADE


def test_a_table_of_many_domains_and_seeds_shows_some_with_a_note():
    order = [f"d{number}" for number in range(20)]
    base = np.full(21, 5.0)
    runs = []
    for method, seed in itertools.product(("ncl", "das"), range(MAX_PAIRS + 1)):
        last = base - 1.0
        if method == "das":
            last[7] -= 0.5  # the domain that differs most
        nll = np.vstack([base, np.tile(last, (20, 1))])
        runs.append(make_run(method=method, seed=seed, order=order, nll=nll))
    _, domains, pairs = build_heat_tables(make_section(runs))
    assert len(domains.head) == 1 + 12 and "d7" in domains.head and "12 of 21 texts" in domains.lines[-1]
    assert len(pairs.head) == 1 + MAX_PAIRS and f"first {MAX_PAIRS} of {MAX_PAIRS + 1}" in pairs.lines[-1]


def test_the_matrix_of_a_group_is_a_mean_over_the_runs_of_its_most_frequent_order():
    shifts = (0.0, 0.3)
    runs = [make_run(seed=seed, shift=shift) for seed, shift in enumerate(shifts)]
    runs.insert(0, make_run(seed=0, shift=9.0, order=DOMAINS[::-1]))
    (group,) = make_section(runs).groups
    expected = np.array(NLL) - NLL[0]
    expected[-1] += np.mean(shifts)
    np.testing.assert_allclose(map_mean_change(group).values, expected)
