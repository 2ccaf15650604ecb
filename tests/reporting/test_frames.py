"""A run's numbers stand in one table, and every one of a report has a key of its own, whatever domains are
called."""

import math

import numpy as np
import pytest

from cpt.evaluation.metrics import UNITS
from cpt.reporting import frames
from cpt.reporting.frames import escape_name, summarize_scores, tidy_scores
from tests.support import comparing
from tests.support.answering import answers
from tests.support.probing import benchmarks

NLL = [[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]]
ANSWERS = answers({"law": [0.2, 0.9, 0.6], "food": [0.3, 0.4, 0.8]}, rows=["base", "law", "food"])


def made(*, tasks=("law", "food"), rows=3, objective=None, **given):
    """A run of two domains; its seconds, tokens and so on are all different."""
    phases = {"start": {"read the texts": 32.0, "export": 64.0}, "learn": {tasks[0]: 2.0, tasks[1]: 4.0}}
    phases |= {"score": {"base": 1.0, tasks[1]: 8.0}, "endtasks": {tasks[1]: 16.0}}
    costs = {"trained": [0, 700, 800], "stored": [0, 10, 30], "seen": [0, 1000, 2000], "memory": [5, 90, 80]}
    costs |= {"flops": [0, 10**12, 3 * 10**12]}
    costs = {name: each[:rows] for name, each in costs.items()}
    nll = np.array(NLL[:rows]).reshape(rows, 3) if rows else np.zeros((1, 3))
    scores = comparing.made(nll=nll, order=tasks, phases=phases, costs=False, **costs, **given)
    if not rows:
        scores.nll, scores.rows = [], []
    scores.optimized_metric = objective
    scores.seconds, scores.tokens, scores.scored = 99.0, [100, 101, 102], [50, 51, 52]
    scores.measure()
    return scores


def endtasks(tasks=("law", "food")):
    macro = [[[None, None]] * 2, [[0.7, 0.8], [None, None]], [[0.5, 0.6], [0.8, 0.9]]]
    other = [[[None if x is None else x / 2 for x in seeds] for seeds in row] for row in macro]
    given = comparing.endtasks([], tasks=tasks, seeds=(0, 1), when="each") | {"seconds": 7.5}
    return given | {"scores": {"macro_f1": macro, "micro_f1": other, "accuracy": other}}


def test_the_table_has_a_line_per_number_and_a_key_for_those_of_a_summary():
    given = benchmarks({"a/b": [0.5, 0.4, 0.3], "c": [0.5, 0.2]})
    scores = made(endtasks=endtasks(), benchmarks=given, answers=ANSWERS)
    scores.modules = [{}, {"law": {"law": 0.75, "base": 0.25}}, {}]
    table = tidy_scores(scores)
    assert set(table["kind"]) == set(frames.KINDS)
    losses = table[table["kind"] == "loss"]
    assert len(losses) == 3 * 3 * len(UNITS)
    (cell,) = losses.query("row == 'food' and text == 'law' and unit == 'nats'").to_dict("records")
    assert (cell["stage"], cell["value"], cell["metric"]) == (2, 3.4, "loss")
    assert table.query("kind == 'module' and module == 'base'")["value"].tolist() == [0.25]
    stages = table.query("kind == 'cost' and metric == 'flops'").set_index("row")["value"]
    assert stages.loc[["base", "law", "food"]].tolist() == [0, 1e12, 3e12]
    assert table.query("kind == 'phase' and metric == 'start'")["value"].sum() == 96
    assert set(tidy_scores(scores, "text")["kind"]) == {"text"}
    assert set(table[table["key"].notna()]["kind"]) == set(frames.SUMMARIZED)
    keyed = table[table["kind"].isin(frames.SUMMARIZED)]["key"]
    assert keyed.notna().all() and table["key"].dropna().is_unique
    assert set(frames.COST_COLUMNS) < set(table[table["kind"] == "cost"]["metric"])


def test_every_value_is_a_finite_number_however_little_was_measured():
    scores = made(endtasks=endtasks())
    scores.nll[-1] = [float("nan"), 900.0, 4.0]
    scores.measure()
    scores.metrics["ZS"]["nats"] = None  # as a file has what is not finite
    scores.metrics["ZS"]["interval"] = {unit: [None, 2.0] for unit in UNITS}
    found = summarize_scores(scores)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert not {"LC/nats", "ppl/law/final", "ppl/food/final", "ZS/nats", "ZS/nats/low"} & set(found)
    assert found["ZS/nats/high"] == 2


@pytest.mark.parametrize("pair", [("law", "law/macro_f1"), ("MF1", "forward"), ("a/b", "a%2Fb")])
def test_no_two_numbers_share_a_key(pair):
    plain, odd = made(endtasks=endtasks()), made(tasks=pair, endtasks=endtasks(pair))
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = {"/".join(names.get(part, part) for part in key.split("/")) for key in summarize_scores(plain)}
    assert set(summarize_scores(odd)) == renamed and len(renamed) == len(summarize_scores(plain))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"
