"""Every number of a report is finite and has a key of its own, whatever domains are called."""

import math

import pytest

from cpt.evaluation.metrics import UNITS
from cpt.reporting.frames import SUMMARIZED, escape_name, summarize_scores, tidy_scores
from tests.support import comparing

NLL = [[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]]


def made(*, tasks=("law", "food"), **given):
    """A run of two domains; its seconds, tokens and so on are all different."""
    phases = {"start": {"read": 32.0}, "learn": {tasks[0]: 2.0}, "endtasks": {tasks[1]: 16.0}}
    costs = {"trained": [0, 700, 800], "stored": [0, 10, 30], "seen": [0, 1000, 2000], "memory": [5, 90, 80]}
    return comparing.made(nll=NLL, order=tasks, phases=phases, **costs, **given)


def endtasks(tasks=("law", "food")):
    macro = [[[None, None]] * 2, [[0.7, 0.8], [None, None]], [[0.5, 0.6], [0.8, 0.9]]]
    other = [[[None if x is None else x / 2 for x in seeds] for seeds in row] for row in macro]
    given = comparing.endtasks([], tasks=tasks, seeds=(0, 1), when="each")
    return given | {"scores": {"macro_f1": macro, "micro_f1": other, "accuracy": other}}


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
    table = tidy_scores(odd)
    assert table["key"].dropna().is_unique and table["key"].notna().equals(table["kind"].isin(SUMMARIZED))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"
