"""Weights that are frozen, and how far the others moved."""

import json

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from cpt.core.exceptions import InvalidOptionError
from cpt.models.options import Freeze
from cpt.models.weights import find_frozen, measure_movement
from cpt.trainer.checkpoint import load_stage
from tests.models.test_units import FAMILIES, build
from tests.support.method_fixtures import ORDER


def find_frozen_names(model, *, embeddings=False, trainable=None):
    frozen = find_frozen(model, Freeze(embeddings=embeddings, layers=0, trainable=trainable))
    frozen_ids = {id(parameter) for parameter in frozen}
    return {name for name, parameter in model.named_parameters() if id(parameter) in frozen_ids}


def test_what_is_frozen_is_embeddings_or_all_but_what_names_or_expressions_mean():
    model = build("gpt2")
    frozen = find_frozen_names(model, embeddings=True)
    assert frozen == {"transformer.wte.weight", "transformer.wpe.weight"}
    names = {name for name, _ in model.named_parameters()}
    last_block = {name for name in names if ".h.1." in name}
    norms = names - find_frozen_names(model, trainable="norms")
    assert not norms <= last_block
    trained = names - find_frozen_names(model, trainable=["norms", r"\.h\.1\."])
    assert trained == last_block | norms

    t5 = build("t5")
    t5_names = {name for name, _ in t5.named_parameters()}
    trained = t5_names - find_frozen_names(t5, trainable="attention")
    expected = {f"SelfAttention.{layer}.weight" for layer in "qkvo"}
    expected |= {f"EncDecAttention.{layer}.weight" for layer in "qkvo"}
    assert {".".join(name.split(".")[-3:]) for name in trained} == expected


@pytest.mark.parametrize(
    ("freeze", "refusal"),
    [
        (Freeze(embeddings=False, layers=2), "freeze.layers=2 is invalid: no transformer blocks"),
        (Freeze(embeddings=True, layers=0), "freeze.embeddings=true is invalid: no transformer blocks"),
    ],
)
def test_freezing_of_blocks_that_a_model_lacks_names_the_option(freeze, refusal):
    with pytest.raises(InvalidOptionError, match=refusal):
        find_frozen(torch.nn.Sequential(torch.nn.Embedding(3, 2)), freeze)


@pytest.mark.parametrize("method", ["das", "derpp"])
def test_frozen_weights_keep_their_bits_through_a_run(method, small, start, tmp_path):
    options = ["freeze.embeddings=true", "freeze.layers=1", "optim.weight_decay=0.3", "trainer.steps=4"]
    start(small(ORDER, f"method={method}", "save_all_stages=true", *options), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    first = load_stage(tmp_path / "stages" / "001.pt")
    last = load_stage(tmp_path / "stages" / "002.pt")
    unchanged = {name for name, tensor in first.items() if torch.equal(tensor, last[name])}
    assert "model.model.embeddings.tok_embeddings.weight" in unchanged
    assert "model.model.layers.0.attn.Wqkv.weight" in unchanged
    assert "model.model.layers.1.attn.Wqkv.weight" not in unchanged


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_each_kind_is_measured_alone(name, tied, tmp_path):
    model = build(name, tie_word_embeddings=tied).float()
    model.save_pretrained(tmp_path / "same")
    movement = measure_movement(model, tmp_path / "same")
    kinds = {"attention", "other maps of blocks", "norms and biases", "embeddings", "all"}
    assert set(movement) - {"head and the rest"} == kinds
    assert tied or "head and the rest" in movement
    assert all(values == [0, 0] for values in movement.values())

    halved = model.get_input_embeddings().weight.mul_(0.5)
    weights = parameters_to_vector(model.parameters())
    movement = measure_movement(model, tmp_path / "same")
    assert {kind for kind, (distance, _) in movement.items() if distance} == {"embeddings", "all"}
    distance, share = movement["all"]
    assert distance == pytest.approx(float(halved.norm() / weights.norm()), rel=1e-5)
    assert share == pytest.approx(halved.count_nonzero() / len(weights))
