"""A run's numbers stand in one table, and every one of a report has a key of its own, whatever domains are
called."""

import math

import numpy as np
import pytest

from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import (
    COST_COLUMNS,
    KINDS,
    SUMMARIZED,
    escape_name,
    stage_points,
    summarize_scores,
    tabulate,
    tidy_scores,
)
from tests.support import comparing
from tests.support.answering import answers
from tests.support.probing import probes

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
    scores.objective = objective
    scores.seconds, scores.tokens, scores.scored = 99.0, [100, 101, 102], [50, 51, 52]
    scores.measure()
    return scores


def endtasks(tasks=("law", "food")):
    macro = [[[None, None]] * 2, [[0.7, 0.8], [None, None]], [[0.5, 0.6], [0.8, 0.9]]]
    other = [[[None if x is None else x / 2 for x in seeds] for seeds in row] for row in macro]
    given = comparing.endtasks([], tasks=tasks, seeds=(0, 1), when="each") | {"seconds": 7.5}
    return given | {"scores": {"macro_f1": macro, "micro_f1": other, "accuracy": other}}


def starting(found, *starts):
    return {key: x for key, x in found.items() if key.startswith(starts)}


def test_metrics_perplexities_and_texts():
    scores = made(objective=44.5)
    scores.metrics["FG"]["interval"] = {unit: [place, place + 0.5] for place, unit in enumerate(UNITS)}
    found = summarize_scores(scores)
    for name, metric in scores.metrics.items():
        assert [found[f"{name}/{unit}"] for unit in UNITS] == [metric[unit] for unit in UNITS]
    assert (found["FG/perplexity/low"], found["FG/perplexity/high"]) == (1, 1.5)
    assert "LC/nats/low" not in found and found["objective"] == 44.5
    several = summarize_scores(made(objective=[3.0, 4.0]))
    assert starting(several, "objective") == {"objective/0": 3.0, "objective/1": 4.0}
    expected = {"food/base": 6.0, "food/own": 4.0, "food/final": 4.0, "law/base": 5.0, "law/own": 3.0}
    expected |= {"law/final": 3.4, "general/base": 4.0, "general/final": 4.3}
    logarithms = {key[4:]: math.log(x) for key, x in starting(found, "ppl/").items()}
    assert logarithms == pytest.approx(expected)
    assert [found[f"text/food/{name}"] for name in ("tokens", "scored", "bytes")] == [101, 51, 4000]


def test_end_tasks_answers_and_probes():
    given = probes({"a/b": [0.5, 0.4, 0.3], "c": [0.5, None, None], "d": [None] * 3})
    scores = made(endtasks=endtasks(), answers=ANSWERS, probes=given)
    found = summarize_scores(scores)
    expected = {"MF1": (0.55 + 0.85) / 2, "Acc": (0.275 + 0.425) / 2, "forward": (0.75 + 0.85) / 2}
    expected |= {"forget_rate": 0.2, "seconds": 7.5, "law/macro_f1": 0.55, "law/macro_f1/forward": 0.75}
    expected |= {"law/macro_f1/sd": np.std([0.5, 0.6], ddof=1), "food/micro_f1": 0.425}
    expected |= {"food/accuracy/sd": np.std([0.4, 0.45], ddof=1)}
    assert {name: found[f"endtask/{name}"] for name in expected} == pytest.approx(expected)
    expected = {"AP": 0.7, "AP/low": 0.1, "AP/high": 0.9, "LA": 0.85, "BWT": -0.3, "F": 0.3, "FWT": 0.1}
    expected |= {"law/accuracy_ranked": 0.6, "food/accuracy_ranked": 0.8}
    expected |= {"law/invalid": 0.5, "food/invalid": 0.5}
    told = starting(found, "answers/")
    assert told == pytest.approx({f"answers/{name}": value for name, value in expected.items()})
    values = {"probe/a%2Fb/base": 0.5, "probe/a%2Fb/after/law": 0.4, "probe/a%2Fb": 0.3, "probe/c": 0.5}
    bounds = {f"{key}/low": x - 0.0196 for key, x in values.items()}
    bounds |= {f"{key}/high": x + 0.0196 for key, x in values.items()}
    assert starting(found, "probe/") == pytest.approx(values | bounds)
    tables = tabulate(scores)
    table = tables["probes"]
    assert table["task"].tolist() == ["a/b", "a/b", "a/b", "c"] and table["after"].tolist()[0] == "food"
    shown = table.iloc[0][["metric", "value", "chance", "shots", "limit"]].tolist()
    assert shown == ["acc", 0.3, 0.25, 0, None]
    table = tables["answers"]
    assert len(table) == 12 and table["stage"].tolist()[0] == 2 and set(table["chance"]) == {0.25}
    assert table.query("task == 'law' and measure == 'accuracy_ranked'")["value"].tolist() == [0.6, 0.9, 0.2]
    assert not starting(summarize_scores(made()), "endtask", "answers", "probe", "objective")
    assert not {"answers", "probes", "endtasks"} & set(tabulate(made()))


def test_costs_of_the_run_and_of_a_stage():
    scores = made()
    found = summarize_scores(scores)
    expected = {"tokens": 3000, "flops": 4e12, "memory": 90, "trained": 800, "stored": 30}
    expected |= {"stored_per_domain": 20, "seconds": 99}
    expected |= {"seconds_learn": 6, "seconds_score": 9, "seconds_endtasks": 16}
    assert starting(found, "cost/") == {f"cost/{name}": value for name, value in expected.items()}
    stage = {"tokens": 2000, "flops": 3e12, "memory": 80, "trained": 800, "stored": 30}
    stage |= {"seconds_learn": 4, "seconds_score": 8, "seconds_endtasks": 16}
    assert {name: found[f"stage/food/{name}"] for name in stage} == stage
    assert found["stage/base/seconds_learn"] == 0
    scores.stored, scores.flops, scores.seen, scores.memory = [0, 50, 30], [], [0, 0, 0], [0, 0, 0]
    found = starting(summarize_scores(scores), "cost/")
    assert found["cost/stored"] == 30 and not {"cost/flops", "cost/tokens", "cost/memory"} & set(found)


def test_the_table_has_a_line_per_number_and_a_key_for_those_of_a_summary():
    given = probes({"a/b": [0.5, 0.4, 0.3], "c": [0.5, 0.2]})
    scores = made(endtasks=endtasks(), probes=given, answers=ANSWERS)
    scores.parts = [{}, {"law": {"law": 0.75, "base": 0.25}}, {}]
    table = tidy_scores(scores)
    assert set(table["kind"]) == set(KINDS)
    losses = table[table["kind"] == "loss"]
    assert len(losses) == 3 * 3 * len(UNITS)
    (cell,) = losses.query("row == 'food' and text == 'law' and unit == 'nats'").to_dict("records")
    assert (cell["stage"], cell["value"], cell["metric"]) == (2, 3.4, "loss")
    assert table.query("kind == 'part' and part == 'base'")["value"].tolist() == [0.25]
    stages = table.query("kind == 'cost' and metric == 'flops'").set_index("row")["value"]
    assert stages.loc[["base", "law", "food"]].tolist() == [0, 1e12, 3e12]
    assert table.query("kind == 'phase' and metric == 'start'")["value"].sum() == 96
    assert set(tidy_scores(scores, "text")["kind"]) == {"text"}
    assert set(table[table["key"].notna()]["kind"]) == set(SUMMARIZED)
    assert table[table["kind"].isin(SUMMARIZED)]["key"].notna().all() and table["key"].dropna().is_unique
    assert set(COST_COLUMNS) < set(table[table["kind"] == "cost"]["metric"])


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
    for rows in range(3):
        found = summarize_scores(made(rows=rows))
        assert found["cost/seconds"] == 99 and ("LC/nats" in found) == (rows > 0)


@pytest.mark.parametrize("pair", [("law", "law/macro_f1"), ("MF1", "forward"), ("a/b", "a%2Fb")])
def test_no_two_numbers_share_a_key(pair):
    plain, odd = made(endtasks=endtasks()), made(tasks=pair, endtasks=endtasks(pair))
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = {"/".join(names.get(part, part) for part in key.split("/")) for key in summarize_scores(plain)}
    assert set(summarize_scores(odd)) == renamed and len(renamed) == len(summarize_scores(plain))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"


def test_the_points_of_a_stage_are_of_its_row_and_not_of_the_whole_matrix(monkeypatch):
    scores = made()
    monkeypatch.setattr(Scores, "matrix", property(lambda self: pytest.fail("the whole matrix is looked at")))
    points, later = stage_points(scores, 1), stage_points(scores, 2)
    assert points["ppl/law"] == pytest.approx(math.exp(3.0)) == points["stages/learned"]
    facts = {"tokens": (1000, 3000), "seconds": (2.0, 6.0), "memory": (90, 80), "trained": (700, 800)}
    assert {name: (points[f"stages/{name}"], later[f"stages/{name}"]) for name in facts} == facts
