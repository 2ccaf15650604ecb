"""Linear layers in 4 and 8 bits: what they compute, how they move, and what they become again."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from cpt.adapters import lora, plain_model
from cpt.models.loading import load_model
from cpt.models.original_weights import MissingWeightError, original_weights
from cpt.models.quantization import dequantize_layers, find_quantized_layers
from cpt.models.stored_weights import find_weight_files
from cpt.models.units import find_projections
from tests.support.quantized_models import needs_bitsandbytes, save_checkpoint, save_mxfp4, save_stored

pytestmark = [pytest.mark.slow, needs_bitsandbytes]

TOKENS = torch.arange(24).view(2, 12) % 90 + 3
KINDS = ("nf4", "int8")
FAMILIES = ("llama", "gpt2")
# Largest error of a weight, over the largest of its block of 64 (nf4) or of its row (int8): half of the widest
# gap between values, and a little of the scales' own rounding.
ERRORS = {"nf4": 0.17, "int8": 0.005}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family, tmp_path_factory):
    # Rows of 96 are no multiple of a block of 64, for which a kernel of bitsandbytes 0.50.2 takes wrong scales.
    changes = {"intermediate_size": 96} if family == "llama" else {}
    return save_checkpoint(tmp_path_factory.mktemp(family) / "checkpoint", family, **changes)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def quantized(checkpoint, kind):
    return load_model(checkpoint, "causal", quantization=kind).eval()


def divide_into_blocks(weight: torch.Tensor, kind: str) -> torch.Tensor:
    return weight.reshape(-1, 64) if kind == "nf4" else weight


def test_each_weight_but_embedding_and_head_is_the_nearest_value(checkpoint, kind, quantized):
    plain = load_model(checkpoint, "causal")
    layers = find_quantized_layers(quantized)
    linear = {name for name, module in plain.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    assert {*layers} == linear - {"lm_head"}
    for name, layer in layers.items():
        original = plain.get_submodule(name).weight.detach()
        assert layer.plain_weight(torch.float32).shape == original.shape
        as_linear = original.T if original.shape[0] == layer.in_features and "h." in name else original
        expected = divide_into_blocks(as_linear.contiguous(), kind)
        error = divide_into_blocks(layer.dequantize(torch.float32), kind) - expected
        assert error.abs().max() > 0
        assert (error.abs().amax(1) / expected.abs().amax(1)).max() < ERRORS[kind], name
        assert not layer.weight.requires_grad
    assert not hasattr(quantized.config, "quantization_config") and not quantized.is_quantized


def test_a_layer_is_that_of_torch_with_the_dequantized_weight(quantized):
    for layer in find_quantized_layers(quantized).values():
        x = torch.randn(3, 5, layer.in_features, requires_grad=True)
        other_x = x.detach().clone().requires_grad_(True)
        weight = layer.dequantize(torch.float32)
        product = layer(x)
        expected = functional.linear(other_x, weight, layer.bias)
        torch.testing.assert_close(product, expected)
        direction = torch.randn_like(product)
        product.backward(direction)
        expected.backward(direction)
        torch.testing.assert_close(x.grad, other_x.grad)

        # As a layer of torch it follows autocast, and computes alike in training and in evaluation.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = layer(x)
            assert half.dtype == torch.bfloat16 and torch.equal(half, layer.train()(x))
            torch.testing.assert_close(
                half, functional.linear(other_x, weight, layer.bias), rtol=0.02, atol=0.02
            )
        assert torch.equal(layer.eval()(x), layer.train()(x)) and torch.equal(layer(x), product)
        assert layer(x.double()).dtype == torch.float64


def test_evaluation_changes_no_bit(quantized):
    """bitsandbytes repacks weights in 4 bits in the first evaluation on a CPU that multiplies in bf16."""
    tensors = dict(quantized.named_parameters()) | dict(quantized.named_buffers())
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        quantized(input_ids=TOKENS)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


@torch.no_grad()
def test_a_copy_a_cast_and_a_plain_model_compute_the_same(kind, checkpoint, quantized):
    expected = quantized(input_ids=TOKENS).logits
    duplicate = copy.deepcopy(quantized)
    for layer in find_quantized_layers(quantized).values():
        layer.weight.data.zero_()
    assert torch.equal(duplicate(input_ids=TOKENS).logits, expected)

    nn.Module.to(duplicate, torch.bfloat16)  # as Lightning does with trainer.precision=bf16-true
    for name, layer in find_quantized_layers(duplicate).items():
        buffers = dict(quantized.get_submodule(name).named_buffers())
        assert buffers and all(torch.equal(buffers[key], value) for key, value in layer.named_buffers())

    plain = load_model(checkpoint, "causal", quantization=kind).eval()
    dequantize_layers(plain, torch.float32)
    assert not find_quantized_layers(plain)
    assert {type(module) for module in plain.modules()} == {
        type(module) for module in load_model(checkpoint, "causal").modules()
    }
    torch.testing.assert_close(plain(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_adapters_are_merged_in_32_bits_into_the_dequantized_weights(quantized):
    scope = lora.attach_lora(quantized, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    for name in scope.names:
        quantized.get_parameter(name).normal_(std=0.1)
    expected = quantized(input_ids=TOKENS).logits
    merged = plain_model.copy_without_tuners(quantized)
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    assert all(parameter.requires_grad for parameter in merged.parameters())
    unmerged = plain_model.copy_without_tuners(quantized, merged=False)
    quantized.base_model.apply(lambda module: setattr(module, "_disable_adapters", True))
    torch.testing.assert_close(
        unmerged(input_ids=TOKENS).logits, quantized(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-5
    )


def test_units_are_those_of_the_plain_model(checkpoint, quantized):
    plain = {projection.name: projection for projection in find_projections(load_model(checkpoint, "causal"))}
    for projection in find_projections(quantized):
        expected = plain.pop(projection.name)
        assert (projection.outputs, projection.inputs) == (expected.outputs, expected.inputs)
        assert all(map(torch.equal, projection.segments, expected.segments))
    assert not plain


@torch.no_grad()
@pytest.mark.parametrize("has_adapters", [False, True])
def test_original_weights_give_the_base_before_it_was_quantized(has_adapters, checkpoint, quantized):
    plain = load_model(checkpoint, "causal").eval()
    before = quantized(input_ids=TOKENS).logits
    if has_adapters:
        lora.attach_lora(quantized, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    files = find_weight_files(str(checkpoint), plain.config)
    with original_weights(quantized, files):
        logits = quantized(input_ids=TOKENS).logits
    torch.testing.assert_close(logits, plain(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quantized(input_ids=TOKENS).logits, before, rtol=1e-4, atol=1e-5)
    with pytest.raises(MissingWeightError), original_weights(quantized, []):
        pass


@torch.no_grad()
@pytest.mark.skipif(sys.platform != "linux", reason="the list of mapped files is one of Linux")
def test_the_file_of_a_quantized_checkpoint_is_not_kept_mapped(family, tmp_path):
    folder = save_checkpoint(tmp_path / "checkpoint", family)
    quantized = load_model(folder, "causal", quantization="nf4")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    plain = load_model(folder, "causal")
    assert torch.equal(quantized.get_input_embeddings().weight, plain.get_input_embeddings().weight)


@pytest.mark.parametrize("stored_kind", ["nf4", "fp4", "int8"])
def test_weights_that_are_stored_so_are_loaded_as_they_are(stored_kind, checkpoint, tmp_path):
    folder = save_stored(tmp_path / "stored", checkpoint, stored_kind)
    stored = load_model(folder, "causal").eval()
    expected = (
        load_model(checkpoint, "causal", quantization=stored_kind).eval() if stored_kind != "fp4" else None
    )
    assert len(find_quantized_layers(stored)) in (8, 14)
    if expected is not None:
        torch.testing.assert_close(
            stored(input_ids=TOKENS).logits, expected(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-5
        )


def test_mxfp4_is_dequantized_when_it_is_loaded(tmp_path):
    experts = save_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    model = load_model(tmp_path / "mxfp4", "causal")
    for name, weight in experts.items():
        parameter = model.get_parameter(name)
        assert parameter.requires_grad and torch.equal(parameter.detach(), weight), name
    assert not find_quantized_layers(model) and not hasattr(model.config, "quantization_config")
    model.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in (tmp_path / "again/config.json").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path):
    """Quantized, they would be numbers like others."""
    folder = save_checkpoint(tmp_path / "checkpoint")
    state = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    state[name][3, 5] = value
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"it has 1 tensor with NaN or infinite weights, the first {name}"):
        load_model(folder, "causal", quantization="nf4")
