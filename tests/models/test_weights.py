"""Weights that are frozen, and how far the others moved."""

import json

import pytest
import torch
from torch.nn.utils import parameters_to_vector

from cpt.models.options import Freeze
from cpt.models.weights import find_frozen, measure_movement
from cpt.trainer.checkpoint import load_stage
from tests.models.test_units import FAMILIES, build
from tests.support.method_fixtures import ORDER


def frozen(model, **given):
    chosen = find_frozen(model, Freeze(**{"embeddings": False, "layers": 0, **given}))
    return {name for name, each in model.named_parameters() if any(each is one for one in chosen)}


def test_what_is_frozen_is_embeddings_or_all_but_what_names_or_expressions_mean():
    model, t5 = build("gpt2"), build("t5")
    every = {name for name, _ in model.named_parameters()}
    assert frozen(model, embeddings=True) == {"transformer.wte.weight", "transformer.wpe.weight"}
    last = {name for name in every if ".h.1." in name}
    norms = every - frozen(model, trainable="norms")
    assert every - frozen(model, trainable=["norms", r"\.h\.1\."]) == last | norms and not norms <= last
    parts = {f"{part}.{each}.weight" for part in ("SelfAttention", "EncDecAttention") for each in "qkvo"}
    kept = {name for name, _ in t5.named_parameters()} - frozen(t5, trainable="attention")
    assert {".".join(name.split(".")[-3:]) for name in kept} == parts


@pytest.mark.parametrize("method", ["das", "derpp"])
def test_frozen_weights_keep_their_bits_through_a_run(method, small, start, tmp_path):
    options = ["freeze.embeddings=true", "freeze.layers=1", "optim.weight_decay=0.3", "trainer.steps=4"]
    start(small(ORDER, f"method={method}", "save_all_stages=true", *options), tmp_path)
    assert json.loads((tmp_path / "scores.json").read_text())["run"]["finished"]
    first, last = (load_stage(tmp_path / "stages" / f"00{n}.pt") for n in (1, 2))
    kept = {name for name, value in first.items() if torch.equal(value, last[name])}
    assert "model.model.embeddings.tok_embeddings.weight" in kept
    assert "model.model.layers.0.attn.Wqkv.weight" in kept
    assert "model.model.layers.1.attn.Wqkv.weight" not in kept


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_each_kind_is_measured_alone(name, tied, tmp_path):
    model = build(name, tie_word_embeddings=tied).float()
    model.save_pretrained(tmp_path / "same")
    same = measure_movement(model, tmp_path / "same")
    kinds = {"attention", "other maps of blocks", "norms and biases", "embeddings", "all"}
    assert set(same) - {"head and the rest"} == kinds
    assert (tied or "head and the rest" in same) and {*map(tuple, same.values())} == {(0, 0)}
    halved, whole = model.get_input_embeddings().weight.mul_(0.5), parameters_to_vector(model.parameters())
    moved = measure_movement(model, tmp_path / "same")
    assert {kind for kind, (distance, _) in moved.items() if distance} == {"embeddings", "all"}
    distance, share = moved["all"]
    assert distance == pytest.approx(float(halved.norm() / whole.norm()), rel=1e-5)
    assert share == pytest.approx(halved.count_nonzero() / len(whole))
