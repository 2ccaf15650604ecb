"""Modules that are trained fully in addition to LoRA, and DoRA and PiSSA: what is trained, and what other
programs load of it."""

import peft
import pytest
import torch
import transformers
from torch import nn

from cpt.adapters import lora, plain_model
from cpt.adapters.options import SummedLoRAOptions
from cpt.adapters.saved_modules import train_fully
from cpt.models.loading import is_tied
from tests.models import test_units

TOKENS = torch.arange(24).view(2, 12) % 37 + 3
OPTIONS = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}


def build(kind: str, *, tied: bool = True):
    torch.manual_seed(0)
    return test_units.build(kind, tie_word_embeddings=tied).float().eval()


def attach(model, **options):
    return lora.attach_lora(
        model, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False, **options
    ).names


@torch.no_grad()
def perturb(model, names) -> None:
    for name in names:
        parameter = model.get_parameter(name)
        parameter.add_(0.1 * torch.randn_like(parameter))


@torch.no_grad()
def logits(model):
    inputs = {"input_ids": TOKENS}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS[:, :5]
    return model.eval()(**inputs).logits


def weights_of(model, names):
    return {name: model.get_parameter(name).detach().clone() for name in names}


def export(folder, model, names, saved, start):
    parts = {"law": weights_of(model, names)}
    expression = lora.export_adapters(folder, model, parts, start=start, saved=saved)
    return eval(expression, {"peft": peft, "transformers": transformers})


@pytest.mark.parametrize(("kind", "tied", "modules", "expected"), [
    ("llama", True, ["embeddings", "head"], ["model.embed_tokens.weight"]),
    ("llama", True, ["lm_head"], ["model.embed_tokens.weight"]),
    ("llama", False, ["embeddings", "head"], ["model.embed_tokens.weight", "lm_head.weight"]),
    ("llama", False, ["0.input_layernorm"], ["model.layers.0.input_layernorm.weight"]),
    ("gpt2", True, ["embeddings"], ["transformer.wte.weight", "transformer.wpe.weight"]),
    ("t5", True, ["embeddings"], ["shared.weight"]),
    ("roberta", True, ["head"], ["roberta.embeddings.word_embeddings.weight", "lm_head.bias"]),
])  # fmt: skip
def test_the_weights_of_modules_are_trained_once_and_stay_tied(kind, tied, modules, expected):
    model = build(kind, tied=tied)
    adapter_names = attach(model)
    names = train_fully(model, modules)
    assert list(names) == expected
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert set(trained) == {*adapter_names, *expected}
    assert is_tied(model) == tied


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True.*:UserWarning")
@pytest.mark.parametrize(("kind", "tied", "modules", "options"), [
    ("llama", True, ["embeddings"], {}),
    ("llama", False, ["embeddings", "head"], {"use_dora": True}),
    ("llama", False, ["head"], {"initialization": "pissa", "use_dora": True}),
    ("gpt2", True, ["head"], {"initialization": "pissa"}),
    ("gpt2", True, [], {"initialization": "pissa_niter_4"}),
    ("t5", True, ["embeddings"], {}),
    ("roberta", True, ["embeddings", "head"], {}),
])  # fmt: skip
def test_merged_model_and_files_of_peft_give_the_logits_of_the_run(kind, tied, modules, options, tmp_path):
    model = build(kind, tied=tied)
    base = build(kind, tied=tied)
    names = attach(model, **options)
    saved = train_fully(model, modules)
    torch.testing.assert_close(logits(model), logits(base), rtol=0, atol=1e-5)
    start = weights_of(model, [*names, *saved] if "initialization" in options else saved)
    perturb(model, [*names, *saved])
    expected = logits(model)
    assert (expected - logits(base)).abs().max() > 0.1

    merged = plain_model.copy_without_tuners(model)
    assert is_tied(merged) == tied
    merged.save_pretrained(tmp_path / "merged")
    loaded_merged = type(merged).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded_merged), expected, rtol=0, atol=1e-5)
    assert is_tied(loaded_merged) == tied

    loaded = export(tmp_path / "peft", model, [*names, *saved], saved, start)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    plain = type(merged).from_pretrained(tmp_path / "peft")
    torch.testing.assert_close(logits(plain), logits(base), rtol=0, atol=1e-5)
    assert bool(loaded.peft_config["default"].modules_to_save) == bool(modules)


def test_modules_with_adapters_and_unknown_ones_are_refused():
    model = build("llama")
    attach(model)
    with pytest.raises(ValueError, match=r"modules_to_save=q_proj is invalid: it has an adapter"):
        train_fully(model, ["embeddings", "q_proj"])
    with pytest.raises(ValueError, match=r"modules_to_save=embed is invalid.*lm_head"):
        train_fully(model, ["embed"])


def test_pissa_takes_the_largest_singular_values_out_of_the_frozen_weights():
    model = build("llama")
    before = {name: module.weight.detach().clone() for name, module in linear_layers(model).items()}
    attach(model, initialization="pissa")
    for name, layer in lora.find_lora_layers(model).items():
        values = torch.linalg.svdvals(before[name])
        remaining = torch.linalg.svdvals(layer.get_base_layer().weight)
        torch.testing.assert_close(remaining[: len(values) - 4], values[4:], rtol=0, atol=1e-5)


def linear_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def test_the_factors_of_pissa_are_roots_of_singular_values_by_the_scale():
    model = build("llama")
    before = {name: module.weight.detach().clone() for name, module in linear_layers(model).items()}
    attach(model, initialization="pissa")
    for name, layer in lora.find_lora_layers(model).items():
        u, values, v = torch.linalg.svd(before[name], full_matrices=False)
        a, b = lora.get_factors(layer)
        torch.testing.assert_close(2 * b @ a, u[:, :4] @ values[:4].diag() @ v[:4], rtol=0, atol=1e-5)
        torch.testing.assert_close(a @ a.T, (values[:4] / 2).diag(), rtol=0, atol=1e-5)


def test_dora_is_the_released_equation_with_norms_that_have_no_gradient():
    model = build("llama")
    perturb(model, attach(model, use_dora=True))
    layer = lora.find_lora_layers(model)["model.layers.0.mlp.down_proj"]
    weight = layer.get_base_layer().weight
    magnitude = layer.lora_magnitude_vector[lora.NEWEST].weight
    a, b = lora.get_factors(layer)
    inputs = torch.randn(7, weight.shape[1])
    targets = torch.randn(7, weight.shape[0])

    direction = weight + 2 * b @ a  # alpha / r = 2
    norms = direction.detach().norm(dim=1)  # one for each output
    expected = inputs @ direction.T * (magnitude / norms)
    output = layer(inputs)
    torch.testing.assert_close(output, expected)
    gradients = torch.autograd.grad((output * targets).sum(), [a, b, magnitude])
    expected_gradients = torch.autograd.grad((expected * targets).sum(), [a, b, magnitude])
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_dora_begins_each_domain_with_the_norms_of_the_weights():
    model = build("llama")
    names = attach(model, use_dora=True)
    perturb(model, names)
    expected = logits(model)
    lora.merge_newest(model)
    lora.reset_newest(model, seed=1)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)


def test_rslora_is_scaled_by_the_root_of_the_rank(tmp_path):
    options = SummedLoRAOptions(**OPTIONS, embeddings=False, export_format="merged", use_rslora=True)
    assert options.alpha / options.r == pytest.approx(8 / 4**0.5)
    assert SummedLoRAOptions(**OPTIONS, embeddings=False, export_format="merged").alpha == 8

    model = build("llama")
    lora.attach_lora(model, r=4, alpha=options.alpha, dropout=0.0, targets="all-linear", embeddings=False)
    assert {layer.scaling[lora.NEWEST] for layer in lora.find_lora_layers(model).values()} == {8 / 4**0.5}
    config = lora.export_config(model, 12, base_folder=tmp_path)  # of three adapters, joined
    assert config.lora_alpha / config.r == 8 / 4**0.5 and not config.use_rslora
