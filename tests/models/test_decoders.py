"""Blocks that are not Llama's: short convolutions, state spaces, fused gates, norms over all heads."""

import pytest
import torch

from cpt.adapters import lora
from cpt.gradient_masks.soft import SoftMask, measure_importance
from cpt.models import growth
from cpt.models.units import (
    UnknownLayersError,
    find_blocks,
    find_mixer_weights,
    find_projections,
    find_sublayers,
    find_units,
    gate_units,
)
from tests.support.decoders import build_decoder, logits_of
from tests.support.mixtures import MIXTURES, build_mixture


def without_features(model, layer, features, *, axis):
    """The logits when some features of a layer's weight are zero; the weight stays as it was."""
    weight = layer.weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.index_fill_(axis, torch.as_tensor(features), 0)
    logits = logits_of(model)
    weight.data = saved
    return logits


@pytest.mark.parametrize(
    ("model_type", "layer"), [("lfm2", "0.conv.in_proj"), ("glm4", "1.mlp.gate_up_proj")]
)
def test_the_segments_of_a_fused_map_are_those_of_its_units(model_type, layer):
    model = build_decoder(model_type)
    sublayers = find_sublayers(model, ("channels", "neurons"))
    [sublayer] = [sublayer for sublayer in sublayers if sublayer.projections[0].name.endswith(layer)]
    fused, out = sublayer.projections
    assert len(fused.segments) == {"lfm2": 3, "glm4": 2}[model_type]

    # Each of the maps multiplies the others, so that without one of them the unit is zero.
    expected = without_features(model, out.module, [5], axis=1)
    assert not torch.allclose(expected, logits_of(model), atol=1e-4)
    for segment in fused.segments:
        logits = without_features(model, fused.module, segment[[5]], axis=0)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_the_blocks_of_a_hybrid_hold_an_attention_or_a_convolution():
    model = build_decoder("lfm2")
    assert [name for name, _ in find_blocks(model)] == ["model.layers.0", "model.layers.1"]
    kinds = [sublayer.kind for sublayer in find_sublayers(model, ("heads", "channels", "neurons"))]
    assert kinds == ["channels", "neurons", "heads", "neurons"]
    assert len(find_projections(model)) == (2 + 3) + (4 + 3)
    assert {name.split(".")[3] for name in find_mixer_weights(model)} == {"conv"}


def test_units_of_a_state_space_model_are_beside_its_mixers():
    model = build_decoder("falcon_h1")
    assert [group.kind for group in find_units(model, ("heads", "neurons"))] == ["heads", "neurons"] * 2
    with pytest.raises(
        UnknownLayersError, match="^model.layers.0.mamba: channels cannot be identified; supported: one"
    ):
        find_projections(model)


def test_the_importance_of_heads_needs_no_separation():
    model = build_decoder("olmo2").double()
    with pytest.raises(
        UnknownLayersError, match="^heads can not be separated: .*q_norm normalises 32 features at once"
    ):
        find_units(model, ("heads",))

    mask = SoftMask(model, kinds=("heads",), apply_to="update", normalize="minmax")
    losses = lambda model, batch: model(**batch).logits.square().mean((1, 2))  # noqa: E731
    batch = {"input_ids": torch.arange(3, 15)[None]}
    importance = measure_importance(model, mask.groups, [batch], losses)
    group = mask.groups[-1]
    step = 1e-2
    for head in range(group.count):
        ends = []
        for sign in (1, -1):
            gate = torch.ones(group.count, dtype=torch.double)
            gate[head] += sign * step
            with torch.no_grad(), gate_units([group], {group.name: gate}):
                ends.append(losses(model, batch).item())
        slope = (ends[0] - ends[1]) / (2 * step)
        measured = importance[-group.count :][head].item()
        assert measured == pytest.approx(abs(slope), rel=1e-2) and measured > 0


GROWN = [
    ("smollm3", "layers"),
    ("lfm2", "layers"),
    ("lfm2", "neurons"),
    ("falcon_h1", "layers"),
    ("glm4", "neurons"),
]


@pytest.mark.parametrize(("model_type", "part"), GROWN)
def test_a_grown_model_is_the_same_function(model_type, part):
    model = build_decoder(model_type)
    before = logits_of(model)
    num_parameters = model.num_parameters()
    if part == "layers":
        growth.grow_layers(model, 2)
    else:
        growth.grow_neurons(model, 10, noise=0.5)
    assert model.num_parameters() > num_parameters
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-4)
    for field in ("layer_types", "no_rope_layers"):
        entries = getattr(model.config, field, None)
        if entries is not None and part == "layers":
            assert len(entries) == 4 and entries[2:] == entries[:2]


def test_all_linear_leaves_out_what_kernels_of_mamba_read():
    model = build_decoder("falcon_h1")
    names = list(lora.find_targets(model, "all-linear"))
    assert "model.layers.0.mamba.in_proj" in names and not any(name.endswith("out_proj") for name in names)
    for targets in (["in_proj", "out_proj"], r".*\.mamba\..*"):
        with pytest.raises(
            ValueError,
            match=r"^method.target_modules=.* is invalid: model.layers.0.mamba.out_proj is not called",
        ):
            lora.find_targets(model, targets)

    lora.attach_lora(model, r=2, alpha=4, dropout=0.0, targets="all-linear", embeddings=False)
    assert set(lora.find_lora_layers(model)) == set(names)


def test_a_tuner_is_not_put_where_a_kernel_reads_the_weight():
    model = build_decoder("falcon_h1")
    with pytest.raises(ValueError, match=r"^method.tuner=loha .*model.layers.0.mamba.out_proj is not called"):
        lora.attach_tuner(model, "loha", targets="auto", arguments={"target_modules": ["out_proj"]})


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_is_named_where_neurons_are_needed(model_type):
    model = build_mixture(model_type)
    with pytest.raises(ValueError, match="^model.layers.0 has a mixture of experts in place of"):
        find_sublayers(model, ("neurons",))
