"""Layers with weights in 16 bits compute what layers with a copy of them in 32 bits do, and keep no copy."""

import gc
import sys
from copy import deepcopy

import psutil
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from cpt.core.memory import read_peak_bytes, reset_peak_bytes, trim_heap
from cpt.models.fast_kernels import pad_head
from cpt.models.loading import load_model
from cpt.models.narrow_layers import (
    NarrowLayer,
    compute_dtype,
    copy_trainable,
    find_hidden_dtype,
    find_narrow_weights,
    make_narrow,
    make_narrow_class,
    widen,
)
from tests.support.stored_checkpoints import load_float32, write_checkpoint


class ScaledEmbedding(nn.Embedding):
    """As Gemma's, whose scale is in the type of the weight."""

    def forward(self, ids):
        return super().forward(ids) * torch.tensor(5.65685, dtype=self.weight.dtype)


LAYERS = {
    "linear": lambda: nn.Linear(24, 40),
    "without bias": lambda: nn.Linear(24, 40, bias=False),
    "convolution": lambda: Conv1D(40, 24),
    "embedding": lambda: nn.Embedding(50, 24),
    "scaled": lambda: ScaledEmbedding(50, 24, padding_idx=49),
}


def narrow(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    copied = deepcopy(layer)
    copied.__class__ = make_narrow_class(type(copied))
    copied.weight = nn.Parameter(copied.weight.detach().to(dtype), requires_grad=False)
    return copied


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients_have_the_bits_of_a_layer_in_32_bits(kind, autocast, dtype):
    torch.manual_seed(0)
    plain = LAYERS[kind]()
    plain.weight.data = plain.weight.data.to(dtype).float()
    plain.weight.requires_grad_(False)
    inputs = torch.randint(50, (3, 7)) if "embedd" in kind or kind == "scaled" else torch.randn(3, 7, 24)
    results = []
    for layer in (plain, narrow(plain, dtype)):
        layer_inputs = inputs.clone()
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        if inputs.is_floating_point():
            trained.append(layer_inputs.requires_grad_())
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            output = layer(layer_inputs)
        results.append([output.detach()])
        if output.requires_grad:
            results[-1] += torch.autograd.grad(
                output, trained, torch.sin(torch.arange(840.0)).view(3, 7, 40).to(output)
            )
    assert [tensor.dtype for tensor in results[0]] == [tensor.dtype for tensor in results[1]]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_backward_pass_keeps_the_weight_in_16_bits_alone(autocast):
    layer = narrow(nn.Linear(64, 64), torch.float16)
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        layer(torch.randn(2, 64, requires_grad=True)).sum()
    matrices = [tensor for tensor in saved if tensor.numel() == layer.weight.numel()]
    assert [tensor.data_ptr() for tensor in matrices] == [layer.weight.data_ptr()]


def test_a_cast_of_the_module_casts_what_its_layers_compute():
    layers = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 24))
    layers = nn.Sequential(*(narrow(layer, torch.float16) for layer in layers))
    ids = torch.arange(4)
    assert layers(ids).dtype == torch.float32
    layers.to("cpu")
    assert layers(ids).dtype == torch.float32 and layers[0].weight.dtype == torch.float16
    layers.to(torch.bfloat16)  # as trainer.precision=bf16-true does
    assert layers(ids).dtype == layers[0].weight.dtype == compute_dtype(layers[0]) == torch.bfloat16
    layers.double()
    assert layers(ids).dtype == torch.float64


@pytest.fixture
def decoder(tmp_path):
    return load_float32(write_checkpoint(tmp_path, dtype=torch.bfloat16))


def test_matrices_become_narrow_tied_ones_once_and_wide_again(decoder):
    plain = deepcopy(decoder)
    pad_head(plain)
    ids = torch.arange(20)[None]
    expected = decoder(ids).logits
    make_narrow(decoder, torch.bfloat16)
    assert {p.ndim for p in decoder.parameters() if p.dtype == torch.bfloat16} == {2}
    assert all(p.dtype == torch.float32 for p in decoder.parameters() if p.ndim == 1)
    assert decoder.lm_head.weight is decoder.get_input_embeddings().weight
    assert torch.equal(decoder(ids).logits, expected) and find_hidden_dtype(decoder) == torch.float32
    assert len(find_narrow_weights(decoder)) == 2 * 7 + 1

    copied = copy_trainable(decoder)
    assert [type(module) for module in copied.modules()] == [type(module) for module in plain.modules()]
    assert all(p.dtype == torch.float32 and p.requires_grad for p in copied.parameters())
    assert torch.equal(copied(ids).logits, expected)
    assert copied.lm_head.weight is copied.get_input_embeddings().weight

    query = decoder.model.layers[0].self_attn.q_proj
    widen(decoder, [query.weight])
    assert type(query) is nn.Linear and query.weight.dtype == torch.float32
    assert isinstance(decoder.model.layers[0].self_attn.k_proj, NarrowLayer)
    assert torch.equal(decoder(ids).logits, expected)


def test_weights_that_another_module_has_or_transformers_keeps_stay_in_32_bits(decoder):
    layer = decoder.model.layers[0]
    layer.mlp.sharing = nn.Module()
    layer.mlp.sharing.register_parameter("matrix", layer.mlp.up_proj.weight)
    decoder._keep_in_fp32_modules = ["down_proj"]
    make_narrow(decoder, torch.float16)
    assert layer.mlp.up_proj.weight.dtype == layer.mlp.down_proj.weight.dtype == torch.float32
    assert layer.mlp.gate_proj.weight.dtype == torch.float16


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a process holds")
def test_loading_holds_no_copy_in_32_bits_at_any_moment(tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    write_checkpoint(tmp_path, dtype=torch.bfloat16, **sizes)
    stored_bytes = (tmp_path / "model.safetensors").stat().st_size
    cpu = torch.device("cpu")
    peaks = {}
    for dtype in (torch.bfloat16, torch.float32):
        gc.collect()
        trim_heap()
        resident_bytes = psutil.Process().memory_info().rss
        reset_peak_bytes(cpu)
        model = load_model(tmp_path, "causal", dtype=dtype)
        peaks[dtype] = (read_peak_bytes(cpu) - resident_bytes) / stored_bytes
        del model
    # The file is mapped into memory, and each tensor copied: of as many bytes, or of twice as many. Both are
    # less where earlier tests left memory that is used again.
    assert peaks[torch.bfloat16] < 2.4, peaks
    assert peaks[torch.float32] > peaks[torch.bfloat16] + 0.8, peaks
