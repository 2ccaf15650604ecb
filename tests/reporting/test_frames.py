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
from tests.support.answering import answers
from tests.support.probing import probes

NLL = [[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]]


def made(*, tasks=("law", "food"), rows=3, **given):
    """A run of two domains; its seconds, tokens and so on are all different."""
    domains = [*tasks, "general"]
    run = {"name": "t", "method": "ncl", "mask": "none", "replay": "none", "variant": "", "model": "tiny"}
    scores = Scores(
        domains=domains,
        rows=["base", *tasks][:rows],
        nll=[list(row) for row in NLL[:rows]],
        tokens=[100, 101, 102],
        bytes=[400, 401, 402],
        scored=[50, 51, 52],
        run=run | {"order": list(tasks), "seed": 0, "finished": True, "objective": "masked"},
        texts={},
        config_digest="c",
        versions={},
        trained=[0, 700, 800][:rows],
        stored=[0, 10, 30][:rows],
        seen=[0, 1000, 2000][:rows],
        flops=[0, 10**12, 3 * 10**12][:rows],
        memory=[5, 90, 80][:rows],
        seconds=99.0,
        phases={
            "start": {"read the texts": 32.0, "export": 64.0},
            "learn": {tasks[0]: 2.0, tasks[1]: 4.0},
            "score": {"base": 1.0, tasks[1]: 8.0},
            "endtasks": {tasks[1]: 16.0},
        },
        **given,
    )
    scores.measure()
    return scores


def endtasks(tasks=("law", "food")):
    macro = [[[None, None]] * 2, [[0.7, 0.8], [None, None]], [[0.5, 0.6], [0.8, 0.9]]]
    other = [[[None if x is None else x / 2 for x in seeds] for seeds in row] for row in macro]
    return {
        "when": "each",
        "tasks": list(tasks),
        "seeds": [0, 1],
        "digest": "d",
        "metric": dict.fromkeys(tasks, "macro_f1"),
        "classes": dict.fromkeys(tasks, 3),
        "examples": dict.fromkeys(tasks, 10),
        "scores": {"macro_f1": macro, "micro_f1": other, "accuracy": other},
        "seconds": 7.5,
    }


def test_metrics_with_their_intervals():
    scores = made(objective=44.5)
    scores.metrics["FG"]["interval"] = {unit: [place, place + 0.5] for place, unit in enumerate(UNITS)}
    found = summarize_scores(scores)
    for name, metric in scores.metrics.items():
        assert [found[f"{name}/{unit}"] for unit in UNITS] == [metric[unit] for unit in UNITS]
    assert (found["FG/perplexity/low"], found["FG/perplexity/high"]) == (1, 1.5)
    assert "LC/nats/low" not in found
    assert found["objective"] == 44.5
    assert {"objective/0": 3.0, "objective/1": 4.0}.items() <= summarize_scores(
        made(objective=[3.0, 4.0])
    ).items()
    assert not any(name.startswith("objective") for name in summarize_scores(made()))


def test_perplexities_and_texts():
    found = summarize_scores(made())
    expected = {"base": 6.0, "own": 4.0, "final": 4.0}
    assert {name: math.log(found[f"ppl/food/{name}"]) for name in expected} == pytest.approx(expected)
    assert math.log(found["ppl/law/own"]) == pytest.approx(3.0)
    assert math.log(found["ppl/law/final"]) == pytest.approx(3.4)
    assert "ppl/general/own" not in found
    assert math.log(found["ppl/general/base"]) == pytest.approx(4.0)
    assert [found[f"text/food/{name}"] for name in ("tokens", "scored", "bytes")] == [101, 51, 401]


def test_end_tasks():
    found = summarize_scores(made(endtasks=endtasks()))
    expected = {
        "endtask/MF1": (0.55 + 0.85) / 2,
        "endtask/Acc": (0.275 + 0.425) / 2,
        "endtask/forward": (0.75 + 0.85) / 2,
        "endtask/forget_rate": 0.2,
        "endtask/seconds": 7.5,
        "endtask/law/macro_f1": 0.55,
        "endtask/law/macro_f1/forward": 0.75,
        "endtask/law/macro_f1/sd": np.std([0.5, 0.6], ddof=1),
        "endtask/food/micro_f1": 0.425,
        "endtask/food/accuracy/sd": np.std([0.4, 0.45], ddof=1),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert not any(name.startswith("endtask") for name in summarize_scores(made()))


def test_costs_of_the_run_and_of_a_stage():
    found = summarize_scores(made())
    expected = {"tokens": 3000, "flops": 4e12, "memory": 90, "trained": 800, "stored": 30}
    expected |= {"stored_per_domain": 20, "seconds": 99}
    expected |= {"seconds_learn": 6, "seconds_score": 9, "seconds_endtasks": 16}
    assert {name: found[f"cost/{name}"] for name in expected} == expected
    stage = {"tokens": 2000, "flops": 3e12, "memory": 80, "trained": 800, "stored": 30}
    stage |= {"seconds_learn": 4, "seconds_score": 8, "seconds_endtasks": 16}
    assert {name: found[f"stage/food/{name}"] for name in stage} == stage
    assert found["stage/base/seconds_learn"] == 0


def total(scores, cost):
    return summarize_scores(scores).get(f"cost/{cost}")


def test_the_total_of_a_cost():
    scores = made()
    names = ("trained", "stored", "tokens", "flops", "memory", "skipped")
    assert [total(scores, name) for name in names] == [800, 30, 3000, 4e12, 90, None]
    scores.stored, scores.flops, scores.seen, scores.memory = [0, 50, 30], [], [0, 0, 0], [0, 0, 0]
    assert total(scores, "stored") == 30
    assert [total(scores, name) for name in ("flops", "tokens", "memory")] == [None] * 3  # not counted


ANSWERS = answers({"law": [0.2, 0.9, 0.6], "food": [0.3, 0.4, 0.8]}, rows=["base", "law", "food"])


def test_the_table_has_a_line_per_number():
    scores = made(endtasks=endtasks(), probes=probes({"a": [0.5]}), answers=ANSWERS)
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


def test_the_kinds_of_a_summary_are_those_with_keys():
    table = tidy_scores(
        made(endtasks=endtasks(), probes=probes({"a/b": [0.5, 0.4, 0.3], "c": [0.5, 0.2]}), answers=ANSWERS)
    )
    assert set(table[table["key"].notna()]["kind"]) == set(SUMMARIZED)
    assert table[table["kind"].isin(SUMMARIZED)]["key"].notna().all()
    assert table["key"].dropna().is_unique
    assert set(COST_COLUMNS) < set(table[table["kind"] == "cost"]["metric"])


def test_answers_have_their_metrics_the_last_of_each_task_and_every_cell():
    scores = made(answers=ANSWERS)
    found = {key: x for key, x in summarize_scores(scores).items() if key.startswith("answers/")}
    assert found == pytest.approx(
        {
            "answers/AP": 0.7,
            "answers/AP/low": 0.1,
            "answers/AP/high": 0.9,
            "answers/LA": 0.85,
            "answers/BWT": -0.3,
            "answers/F": 0.3,
            "answers/FWT": 0.1,
            "answers/law/accuracy_ranked": 0.6,
            "answers/food/accuracy_ranked": 0.8,
            "answers/law/invalid": 0.5,
            "answers/food/invalid": 0.5,
        }
    )
    table = tabulate(scores)["answers"]
    assert len(table) == 12 and table["stage"].tolist()[0] == 2
    assert table.query("task == 'law' and measure == 'accuracy_ranked'")["value"].tolist() == [0.6, 0.9, 0.2]
    assert set(table["chance"]) == {0.25} and "answers" not in tabulate(made())


def test_a_probe_has_its_last_its_base_and_every_other_value():
    scores = made(probes=probes({"a/b": [0.5, 0.4, 0.3], "c": [0.5, None, None], "d": [None] * 3}))
    found = {key: x for key, x in summarize_scores(scores).items() if key.startswith("probe/")}
    values = {"probe/a%2Fb/base": 0.5, "probe/a%2Fb/after/law": 0.4, "probe/a%2Fb": 0.3, "probe/c": 0.5}
    bounds = {f"{key}/low": x - 0.0196 for key, x in values.items()}
    bounds |= {f"{key}/high": x + 0.0196 for key, x in values.items()}
    assert found == pytest.approx(values | bounds)
    table = tabulate(scores)["probes"]
    assert table["task"].tolist() == ["a/b", "a/b", "a/b", "c"] and table["after"].tolist()[0] == "food"
    assert table.iloc[0][["metric", "value", "chance", "shots", "limit"]].tolist() == [
        "acc",
        0.3,
        0.25,
        0,
        None,
    ]
    assert "probes" not in tabulate(made())


def test_every_value_is_a_finite_number():
    scores = made(endtasks=endtasks())
    scores.nll[-1] = [float("nan"), 900.0, 4.0]
    scores.measure()
    scores.metrics["ZS"]["nats"] = None  # as a file has what is not finite
    scores.metrics["ZS"]["interval"] = {unit: [None, 2.0] for unit in UNITS}
    found = summarize_scores(scores)
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert not {"LC/nats", "ppl/law/final", "ppl/food/final", "ZS/nats", "ZS/nats/low"} & set(found)
    assert found["ZS/nats/high"] == 2


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_runs_that_have_hardly_begun(rows):
    found = summarize_scores(made(rows=rows))
    assert found["cost/seconds"] == 99
    assert ("LC/nats" in found) == (rows > 0)


TRICKY = [
    "LC",
    "MF1",
    "forward",
    "law/macro_f1",
    "law",
    "law/final",
    "final",
    "a%2Fb",
    "a/b",
    "a%b",
    "cs.AI",
    "",
]


@pytest.mark.parametrize(
    "pair", [("law", "law/macro_f1"), ("MF1", "forward"), ("a/b", "a%2Fb"), ("LC", "seconds")]
)
def test_no_two_numbers_share_a_key(pair):
    plain, odd = made(endtasks=endtasks()), made(tasks=pair, endtasks=endtasks(pair))
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = {"/".join(names.get(part, part) for part in key.split("/")) for key in summarize_scores(plain)}
    assert set(summarize_scores(odd)) == renamed
    assert len(renamed) == len(summarize_scores(plain))


def test_escaped_names_differ_and_have_no_slash():
    assert len({escape_name(name) for name in TRICKY}) == len(TRICKY)
    assert not any("/" in escape_name(name) for name in TRICKY)
    assert escape_name("cs.AI") == "cs.AI"


def test_the_points_of_a_stage_are_of_its_row_and_not_of_the_whole_matrix(monkeypatch):
    scores = made()
    monkeypatch.setattr(Scores, "matrix", property(lambda self: pytest.fail("the whole matrix is looked at")))
    points = stage_points(scores, 1)
    assert points["ppl/law"] == pytest.approx(math.exp(3.0)) and points["stages/learned"] == points["ppl/law"]
    assert (
        points["stages/tokens"] == 1000 and points["stages/seconds"] == 2.0 and points["stages/memory"] == 90
    )
    later = stage_points(scores, 2)
    assert (
        later["stages/tokens"] == 3000 and later["stages/seconds"] == 6.0 and later["stages/trained"] == 800
    )
