"""Adapters on the fused parameters of experts: merged, joined, exported in peft's format, and refused."""

import peft
import pytest
import torch
import transformers

from cpt.adapters import lora, plain_model
from cpt.adapters.options import SummedLoRAOptions
from cpt.methods.lora import group_by_width, pair_overlap
from tests.support.mixtures import MIXTURES, build_mixture, padded_batch


def attach(model, parameters="auto"):
    return lora.attach_lora(
        model, r=3, alpha=6, dropout=0.0, targets="all-linear", embeddings=False, parameters=parameters
    )


def draw_factors(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.find_lora_layers(model).values():
        for factor in lora.get_factors(layer):
            factor.data = 0.05 * torch.randn(factor.shape, generator=generator)


def logits_of(model):
    with torch.no_grad():
        return model(padded_batch()["input_ids"]).logits


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("model_type", [*MIXTURES, "deepseek_v3"])
def test_adapters_of_experts_are_merged_and_exported_with_the_same_logits(model_type, tmp_path):
    model = build_mixture(model_type).eval()
    base_logits = logits_of(model)
    attach(model)
    reach = lora.find_adapter_reach(model)
    assert reach.unreached_experts == () and reach.adapted > 0.9 * reach.total

    draw_factors(model)
    expected = logits_of(model)
    assert (expected - base_logits).abs().max() > 1e-3
    lora.begin_adapter(model, storage="separate", seed=1)  # the first one is kept along the rank
    torch.testing.assert_close(logits_of(model), expected)
    draw_factors(model, seed=2)
    expected = logits_of(model)

    plain_model.copy_without_tuners(model).save_pretrained(tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=1e-5)

    folder = tmp_path / "base and adapter"
    adapters = {"law": lora.join_all_adapters(model)}
    expression = lora.export_adapters(folder, model, adapters, start={}, saved=[])
    loaded = eval(expression, {"peft": peft, "transformers": transformers})
    torch.testing.assert_close(logits_of(loaded), expected, rtol=0, atol=1e-5)

    lora.begin_adapter(model, storage="merged", seed=3)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("targets", ["all-linear", ["gate_proj"]])
def test_layers_that_peft_takes_for_experts_are_adapted_and_loaded(targets, tmp_path):
    model = build_mixture("deepseek_v3").eval()
    names = list(lora.find_targets(model, targets))
    lora.attach_lora(model, r=3, alpha=6, dropout=0.1, targets=targets, embeddings=False)
    assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.gate_proj"} <= set(names)
    assert list(lora.find_lora_layers(model)) == names

    draw_factors(model)
    expected = logits_of(model)
    adapters = {"law": lora.join_all_adapters(model)}
    expression = lora.export_adapters(tmp_path, model, adapters, start={}, saved=[])
    loaded = eval(expression, {"peft": peft, "transformers": transformers})
    torch.testing.assert_close(logits_of(loaded), expected, rtol=0, atol=1e-5)


def test_dora_of_layers_that_peft_takes_for_experts_is_exported_merged():
    model = build_mixture("deepseek_v3")
    lora.attach_lora(model, r=3, alpha=6, dropout=0.0, targets="all-linear", embeddings=False, use_dora=True)
    with pytest.raises(
        ValueError, match="^method.export_format=peft is invalid with .*_proj of a deepseek_v3 for"
    ):
        lora.check_loadable(model)


@pytest.mark.parametrize("tuner", ["ia3", "dora"])
def test_tuners_of_a_mixture_adapt_its_dense_layers(tuner):
    model = build_mixture("deepseek_v3")
    lora.attach_tuner(model, tuner, targets="auto", arguments={})
    adapted = set(plain_model.find_tuner_layers(model))
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.shared_experts.gate_proj"} <= adapted
    assert not any(name.endswith("experts") for name in adapted)


def test_earlier_adapters_of_experts_are_loaded_with_a_state():
    model = build_mixture("gpt_oss").eval()
    attach(model)
    lora.resize_on_load(model)
    draw_factors(model)
    lora.begin_adapter(model, storage="separate", seed=1)
    draw_factors(model, seed=2)

    resumed = build_mixture("gpt_oss").eval()
    attach(resumed)
    lora.resize_on_load(resumed)
    resumed.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits_of(resumed), logits_of(model), rtol=0, atol=0)


def test_the_factors_of_an_expert_are_those_of_its_matrix():
    model = build_mixture("qwen3_moe")
    attach(model)
    draw_factors(model)
    layers = [layer for layer in lora.find_lora_layers(model).values() if lora.count_experts(layer) > 1]
    assert len(layers) == 4
    for layer in layers:
        products = torch.stack([b @ a for a, b in lora.map_factors(layer)])
        torch.testing.assert_close(2 * products, layer.get_delta_weight(lora.NEWEST))  # alpha / r is 2


def test_the_overlap_of_experts_is_that_of_each_with_itself():
    experts, rank, width = 4, 3, 8
    a, b = torch.randn(2, experts, rank, width, dtype=torch.double)
    [group] = group_by_width([a.flatten(0, 1)], [[b.flatten(0, 1)], [2 * b.flatten(0, 1)]], [experts])
    expected = sum((a[expert] @ b[expert].T).abs().sum() for expert in range(experts))
    assert pair_overlap([group], penalty="l1").item() == pytest.approx(3 * expected.item(), rel=1e-5)


def test_names_of_parameters_may_be_ends_and_must_be_of_experts():
    model = build_mixture("olmoe")
    assert lora.find_target_parameters(model, "none") == []
    assert len(lora.find_target_parameters(model, "auto")) == 4
    down = lora.find_target_parameters(model, ["experts.down_proj"])
    assert down == [f"model.layers.{block}.mlp.experts.down_proj" for block in (0, 1)]
    with pytest.raises(
        ValueError, match=r"^method.target_parameters=\[proj\] is invalid: proj is no parameter of"
    ):
        lora.find_target_parameters(model, ["proj"])


def make_options(*, dropout, parameters):
    return SummedLoRAOptions(
        r=3,
        lora_alpha=6,
        lora_dropout=dropout,
        target_modules="all-linear",
        target_parameters=parameters,
        embeddings=False,
        export_format="merged",
    )


def test_dropout_does_not_go_with_parameters():
    make_options(dropout=0.1, parameters="none")
    make_options(dropout=0.0, parameters="auto")
    message = "^lora_dropout=0.1 is invalid with target_parameters=auto: .* Allowed: 0$"
    with pytest.raises(ValueError, match=message):
        make_options(dropout=0.1, parameters="auto")
