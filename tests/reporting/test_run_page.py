"""The page of a run says what scores.json says, needs nothing but itself, and survives odd and large runs."""

import math

import pytest

from cpt.evaluation.metrics import METRICS, TITLES
from cpt.evaluation.scores import Scores
from cpt.reporting import run_page
from cpt.reporting.drawing import description
from tests.support.comparing import NLL, made

pytestmark = pytest.mark.slow


def written(folder, scores):
    folder.mkdir(parents=True, exist_ok=True)
    scores.save(folder / "scores.json")
    (folder / "config.yaml").write_text("seed: 0  # a < b\n")
    run_page.write_report(folder)
    return (folder / "report.md").read_text(), (folder / "report.html").read_text()


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
    markdown, _ = written(tmp_path, scores)
    metrics = markdown.partition("## Metr")[2]
    assert set(scores.metrics) == {name for name in METRICS if f"\n| {TITLES.get(name, name)} |" in metrics}
    assert ("unfinished" in markdown) == (not scores.run["finished"])
    assert all(row in run_page.format_scores(scores) for row in scores.rows)
    assert not any(f"## {title}" in markdown for title in ("Modules", "Training", "End tasks", "Answers"))


def test_tiles_come_first_with_the_numbers_of_scores_json_and_a_word_for_each_interval(tmp_path):
    scores = made()
    for name, low, high in (("learned", 0.5, 0.9), ("FG", -0.2, 0.3), ("general_drift", -0.4, -0.1)):
        scores.metrics[name]["interval"] = {"nats": [low, high]}
    found = [f"{scores.metrics[name]['nats']:.3f} nats" for name in ("learned", "FG", "general_drift")]
    words = ["improved", "no measurable forgetting", "better"]
    cells = run_page.list_tiles(Scores.load(scores.save(tmp_path / "s") or tmp_path / "s"))
    assert [row[1] for row in cells] == found and [row[3] for row in cells] == words
    assert [row[2] for row in cells] == ["[0.500, 0.900]", "[−0.200, 0.300]", "[−0.400, −0.100]"]
    markdown, html = written(tmp_path / "run", scores)
    assert html.index("tiles") < html.index("<img") < html.index("<h2>Metrics") < html.index("<h2>Run<")
    assert all(number in html and number in markdown for number in found)
    assert [row[3] for row in run_page.list_tiles(made(nll=NLL[:1]))] == ["not measured"] * 3


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
