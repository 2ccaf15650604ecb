"""Every number of a report is finite and has a key of its own, whatever domains are called."""

import math

import pytest

from cpt.evaluation.metrics import UNITS
from cpt.reporting.frames import SUMMARIZED, escape_name, summarize_scores, tidy_scores
from tests.support import comparing

NLL = [[5.0, 6.0, 4.0], [3.0, 5.5, 4.1], [3.4, 4.0, 4.3]]


def made(*tasks):
    """A run of two domains; its seconds, tokens and so on are all different."""
    endtasks = comparing.endtasks([[None] * 2, [0.7, None], [0.5, 0.8]], tasks=tasks, when="each")
    phases = {"start": {"read": 32.0}, "learn": {tasks[0]: 2.0}, "endtasks": {tasks[1]: 16.0}}
    costs = {"trained": [0, 700, 800], "stored": [0, 10, 30], "seen": [0, 1000, 2000], "memory": [5, 90, 80]}
    return comparing.made(nll=NLL, order=tasks, phases=phases, endtasks=endtasks, **costs)


def test_every_value_is_a_finite_number_however_little_was_measured():
    scores = made("law", "food")
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
    plain, odd = made("law", "food"), made(*pair)
    names = dict(zip(("law", "food"), map(escape_name, pair), strict=True))
    renamed = {"/".join(names.get(part, part) for part in key.split("/")) for key in summarize_scores(plain)}
    assert set(summarize_scores(odd)) == renamed and len(renamed) == len(summarize_scores(plain))
    table = tidy_scores(odd)
    assert table["key"].dropna().is_unique and table["key"].notna().equals(table["kind"].isin(SUMMARIZED))
    assert "/" not in "".join(names.values()) and escape_name("cs.AI") == "cs.AI"
