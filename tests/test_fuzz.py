"""What nobody meant is taken or refused in a line: a few examples of each kind, always the same ones.
`python tests/campaigns/fuzz.py` makes many."""

import pytest

pytest.importorskip("hypothesis", reason="needs hypothesis, of the extra dev")

from tests.support.fuzzing import AREAS, try_examples  # noqa: E402

FEW = {"overrides": 12, "texts": 60, "end tasks": 40, "run folders": 30}


@pytest.mark.filterwarnings("ignore")  # what a library warns of is no traceback
@pytest.mark.parametrize("area", AREAS)
def test_what_nobody_meant_is_taken_or_refused_in_a_line(area):
    assert try_examples(area, FEW[area]) >= FEW[area] // 2
