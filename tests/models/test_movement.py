"""How far exported weights moved, by kind, against sums by hand."""

from copy import deepcopy

import pytest
import torch
from cpt.models.movement import ALL, ATTENDING, EMBEDDINGS, MAPS, REST, VECTORS
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.weights import measure_movement
from tests.models.test_units import FAMILIES, build


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
    assert {ATTENDING, MAPS, VECTORS, EMBEDDINGS, ALL} <= set(same) and (tied or REST in same)
    assert {*map(tuple, same.values())} == {(0, 0)}
    table = FAMILIES[name].table
    folder = saved(model, tmp_path / "other", lambda other: other.get_parameter(f"{table}.weight").mul_(1.5))
    moved = measure_movement(model, folder)
    assert {kind for kind, (distance, _) in moved.items() if distance} == {EMBEDDINGS, ALL}
    distance, share = moved[ALL]
    old = model.get_parameter(f"{table}.weight").detach()
    whole = sum(each.detach().square().sum() for each in model.parameters())
    assert distance == pytest.approx(0.5 * float((old.square().sum() / whole).sqrt()), rel=1e-5)
    assert share == pytest.approx(old.count_nonzero() / sum(each.numel() for each in model.parameters()))


def test_what_has_no_counterpart_is_in_no_sum(tmp_path):
    model, narrow = build("gpt2").float(), build("gpt2", vocab_size=10).float()
    moved = measure_movement(model, saved(narrow, tmp_path))
    assert set(moved) == {ATTENDING, MAPS, VECTORS}


def test_it_is_read_from_several_files_and_from_fewer_bits(tmp_path):
    model = build("llama").float()
    folder = saved(model, tmp_path / "parts", max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert measure_movement(model, folder)[ALL] == [0, 0]
    distance, share = measure_movement(
        model, saved(model, tmp_path / "half", lambda other: other.bfloat16())
    )[ALL]
    assert 0.0005 < distance < 0.004 and share > 0.5
    assert measure_movement(model, tmp_path) == {}


def test_a_model_without_transformer_blocks_is_measured(tmp_path):
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=1, vocab_size=40, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    moved = measure_movement(model, saved(model, tmp_path, lambda other: other.lm_head.weight.mul_(2)))
    assert moved[ALL][0] > 0 and ATTENDING not in moved and moved[VECTORS] == [0, 0]
