"""The run page's curves over all tokens, and what a method keeps inside the model."""

import numpy as np
import pytest

from cpt.reporting.drawing import description
from cpt.reporting.inside import build_inside_blocks
from cpt.reporting.training_curves import borders, build_training_block, place_curves, read_curves
from tests.support.comparing import made

LINES = """step,name,value
0,ppl/law,9.0
1,train/lm/law,5.0
1,train/tokens/law,400.0
1,train/grad_norm/law,2.0
3,train/lm/law,9.9
3,train/lm/law,4.0
3,train/tokens/law,1000.0
1,train/lm/food,3.0
1,train/tokens/food,500.0
1,train/tokens_per_s/food,1234.0
3,train/lm/food,2.5
3,train/tokens/food,1000.0
3,train/lm/fo"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.csv").write_text(LINES)
    return tmp_path


def test_stages_stand_one_after_another_on_one_axis_of_tokens(folder):
    scores = made()
    placed = place_curves(read_curves(folder / "metrics.csv"), scores)
    assert placed["law"]["lm"].tokens.tolist() == [400, 1000]
    assert placed["law"]["lm"].values.tolist() == [5, 4]  # of two lines with one step the later counts
    assert placed["food"]["lm"].tokens.tolist() == [1500, 2000]
    assert placed["space"] == {}
    assert borders(scores) == {"law": (0, 1000), "food": (1000, 2000), "space": (2000, 3000)}


def test_without_tokens_a_stage_is_spread_over_its_steps(tmp_path):
    (tmp_path / "metrics.csv").write_text("1,train/lm/food,3\n3,train/lm/food,2\n")
    placed = place_curves(read_curves(tmp_path / "metrics.csv"), made())
    assert placed["food"]["lm"].tokens.tolist() == [1500, 2000]
    placed = place_curves(read_curves(tmp_path / "metrics.csv"), made(costs=False))
    assert placed["food"]["lm"].tokens.tolist() == [1.5, 2]


def test_the_block_has_a_picture_and_a_line_per_stage(folder):
    block = build_training_block(made(), folder)
    assert block.cells == [
        ["law", "2", "5.0000", "4.0000", "2", "–"],
        ["food", "2", "3.0000", "2.5000", "–", "1,234"],
    ]
    assert block.lines[1] == "Without a point: space."
    assert "law 4.000; food 2.500" in description(block.picture)
    axes = block.picture.drawn.axes
    assert [each.get_ylabel() for each in axes] == ["loss (nats)", "gradient norm", "tokens/s"]
    edges = [line.get_xdata()[0] for line in axes[0].lines if len(set(line.get_xdata())) == 1]
    assert edges == [0, 1000, 2000]


@pytest.mark.parametrize("text", [None, "", "step,name,value\n", "x,train/lm/law,y\n", "\x00\xff,a"])
def test_no_curves_are_borne(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.csv").write_text(text)
    assert not build_training_block(made(), tmp_path).picture


def test_importances_are_shown_by_part_and_stage(tmp_path):
    (tmp_path / "diagnostics").mkdir()
    for number, value in ((1, 0.25), (2, 0.5), (3, 0.75)):
        arrays = {"importance/model.layers.0.neurons": np.full(8, value), "other/x": np.ones(3)}
        np.savez(tmp_path / "diagnostics" / f"{number:03d}.npz", **arrays)
    head, means, shared = build_inside_blocks(made(), tmp_path)
    assert head.title == "Inside the model"
    assert description(means.picture) == "importance, accumulated: mean 0.250 after law, 0.750 after space."
    shown = means.picture.drawn.axes[0].images[0].get_array()
    assert shown.tolist() == [[0.25, 0.5, 0.75]]
    assert shared.title == "What domains share inside the model"
    assert "importance, accumulated 0.5" in description(shared.picture)


def test_of_a_method_that_keeps_nothing_nothing_is_shown(tmp_path):
    assert build_inside_blocks(made(), tmp_path) == []
