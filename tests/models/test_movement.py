"""How far exported weights moved, by kind, against sums by hand."""

from copy import deepcopy

import pytest
import torch

from cpt.models.weights import measure_movement
from tests.models.test_units import FAMILIES, build

KINDS = {"attention", "other maps of blocks", "norms and biases"}


def saved(model, folder, change=lambda model: None, **how):
    """The folder of a copy that a change was made to."""
    other = deepcopy(model)
    with torch.no_grad():
        change(other)
    other.save_pretrained(folder, **how)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_is_measured_alone(name, tied, tmp_path):
    model = build(name, tie_word_embeddings=tied).float()
    same = measure_movement(model, saved(model, tmp_path / "same"))
    assert set(same) - {"head and the rest"} == KINDS | {"embeddings", "all"}
    assert tied or "head and the rest" in same
    assert {*map(tuple, same.values())} == {(0, 0)}
    table = FAMILIES[name].table
    folder = saved(model, tmp_path / "other", lambda other: other.get_parameter(f"{table}.weight").mul_(1.5))
    moved = measure_movement(model, folder)
    assert {kind for kind, (distance, _) in moved.items() if distance} == {"embeddings", "all"}
    distance, share = moved["all"]
    old = model.get_parameter(f"{table}.weight").detach()
    whole = sum(each.detach().square().sum() for each in model.parameters())
    assert distance == pytest.approx(0.5 * float((old.square().sum() / whole).sqrt()), rel=1e-5)
    assert share == pytest.approx(old.count_nonzero() / sum(each.numel() for each in model.parameters()))


def test_what_has_no_counterpart_is_in_no_sum(tmp_path):
    model, narrow = build("gpt2").float(), build("gpt2", vocab_size=10).float()
    moved = measure_movement(model, saved(narrow, tmp_path))
    assert set(moved) == KINDS
