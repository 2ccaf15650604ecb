"""The page of a run says what scores.json says, needs nothing but itself, and survives odd and large runs."""

import math

import pytest

from cpt.evaluation.metrics import METRICS, TITLES
from cpt.reporting import run_page
from cpt.reporting.drawing import description
from tests.support.comparing import NLL, made

pytestmark = pytest.mark.slow


LACKING = {
    "base": {"nll": NLL[:1], "finished": False},
    "one stage": {"nll": NLL[:2], "finished": False},
    "joint": {"nll": [NLL[0], NLL[3]], "rows": ["base", "joint"], "method": "joint"},
    "one domain, no general text": {"nll": [row[:1] for row in NLL[:2]], "order": ["law"]},
    "diverged": {"nll": [*NLL[:2], [800.0, math.nan, math.inf, 5.0], [math.nan] * 4]},
}


@pytest.mark.parametrize("given", LACKING.values(), ids=LACKING)
def test_runs_that_lack_something(tmp_path, given):
    scores = made(**given)
    scores.save(tmp_path / "scores.json")
    (tmp_path / "config.yaml").write_text("seed: 0  # a < b\n")
    run_page.write_report(tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    metrics = markdown.partition("## Metr")[2]
    assert set(scores.metrics) == {name for name in METRICS if f"\n| {TITLES.get(name, name)} |" in metrics}
    assert ("unfinished" in markdown) == (not scores.run["finished"])
    assert all(row in run_page.format_scores(scores) for row in scores.rows)
    assert not any(f"## {title}" in markdown for title in ("Modules", "Training", "End tasks", "Answers"))


CURVES = """step,name,value
0,ppl/law,9.0
1,train/lm/law,5.0
1,train/tokens/law,400.0
3,train/lm/law,9.9
3,train/lm/law,4.0
3,train/tokens/law,1000.0
1,train/lm/food,3.0
1,train/tokens/food,500.0
3,train/lm/food,2.5
3,train/tokens/food,1000.0
3,train/lm/fo"""


def test_stages_stand_one_after_another_on_one_axis_of_tokens(tmp_path):
    (tmp_path / "metrics.csv").write_text(CURVES)
    curves = run_page.read_training(tmp_path / "metrics.csv", made())
    assert curves["law"]["lm"].to_dict() == {400: 5, 1000: 4}  # of two lines with one step the later counts
    assert curves["food"]["lm"].to_dict() == {1500: 3, 2000: 2.5} and set(curves) == {"law", "food"}
    block = run_page.show_training(made(), tmp_path)
    assert "space" in block.lines[0] and "law 4.000; food 2.500" in description(block.picture)
    for text in ("", "step,name,value\n", "x,train/lm/law,y\n", "\x00\xff,a"):
        (tmp_path / "metrics.csv").write_text(text)
        assert not run_page.show_training(made(), tmp_path).picture
