"""What a probe may be told, when it is due, and what is said where its harness is not there."""

import pytest

from cpt.evaluation.options import LMEvalOptions, is_due

PLAIN = {"include": None, "when": "last", "metrics": {}, "shots": None, "max_documents": None}
PLAIN |= {"batch_size": 8, "max_length": None}


def options(*tasks, **given):
    return LMEvalOptions(**{**PLAIN, "tasks": tasks or ["a", "b"], **given})


def harness(folder, *tasks, **given):
    from cpt.evaluation.lm_eval import Harness

    return Harness(options(*tasks, include=str(folder), **given))


@pytest.mark.parametrize(
    ("when", "due"),
    [("last", [0, 7]), ("each", list(range(8))), ("every:3", [0, 3, 6, 7]), ("every:9", [0, 7])],
)
def test_the_base_and_the_last_stage_are_always_measured(when, due):
    assert [n for n in range(8) if is_due(options(when=when).when, n, stages=7)] == due
