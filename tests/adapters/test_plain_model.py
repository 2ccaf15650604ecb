"""Models without layers of peft: written layer by layer, they have the files of a copy, byte for byte."""

import pytest
import torch
import transformers

from cpt.adapters import lora, plain_model
from cpt.methods.peft import TUNERS
from cpt.models import streamed_files
from cpt.models.loading import load_model
from cpt.models.narrow_layers import find_narrow_weights, make_narrow
from tests.adapters.test_lora_adapters import ARGUMENTS
from tests.models import test_units
from tests.support.mixtures import MIXTURES, build_mixture
from tests.support.quantized_models import needs_bitsandbytes, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def attach_drawn(model, *, seed=0, **options):
    """Adds adapters that have learned something; returns the names of their parameters."""
    settings = {"r": 3, "alpha": 6, "dropout": 0.0, "targets": "all-linear", "embeddings": False} | options
    names = lora.attach_lora(model, **settings).names
    draw(model, names, seed=seed)
    return names


@torch.no_grad()
def draw(model, names, *, seed=0):
    torch.manual_seed(seed)
    for name in names:
        model.get_parameter(name).normal_(std=0.1)


def read_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_equal_files(model, folder, *, is_copied=False, **arguments):
    """That a model is written as its plain copy is, and that its own weights stay as they are; without such a
    copy in memory unless it `is_copied`."""
    skeleton = plain_model.make_plain_skeleton(model)
    assert (plain_model.needs_copy(model) or not streamed_files.can_stream(skeleton)) == is_copied
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain_model.save_without_tuners(folder / "streamed", model, **arguments)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    plain_model.copy_without_tuners(model, **arguments).save_pretrained(folder / "copied")
    files = read_files(folder / "copied")
    assert "model.safetensors" in files and read_files(folder / "streamed") == files


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("kind", ["modernbert", "gpt2", "llama", "t5"])
def test_lora_is_written_layer_by_layer(kind, merged, tmp_path):
    model = test_units.build(kind, tie_word_embeddings=True).float()
    attach_drawn(model)
    assert_equal_files(model, tmp_path, merged=merged)


def test_a_base_in_16_bits_is_widened_layer_by_layer(tmp_path):
    model = test_units.build("llama", tie_word_embeddings=True).float()
    make_narrow(model, torch.bfloat16)
    attach_drawn(model)
    assert find_narrow_weights(model)
    assert_equal_files(model, tmp_path)


def test_the_modules_of_another_domain_are_written(tmp_path):
    model = test_units.build("gpt2", tie_word_embeddings=True).float()
    names = attach_drawn(model)
    weights = {name: model.get_parameter(name).detach() + 0.1 for name in names}
    table = "transformer.wte.weight"  # tied to the head
    weights[table] = model.get_parameter(table).detach() + 1
    assert_equal_files(model, tmp_path, weights=weights)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "streamed")
    assert torch.equal(loaded.lm_head.weight, weights[table])


@pytest.mark.parametrize("model_type", [*MIXTURES, "deepseek_v3"])
def test_experts_are_written_block_by_block(model_type, tmp_path):
    model = build_mixture(model_type)
    attach_drawn(model, parameters="auto")
    assert_equal_files(model, tmp_path)


@pytest.mark.parametrize("tuner", TUNERS)
def test_other_tuners_are_written_layer_by_layer(tuner, tmp_path):
    model = test_units.build("modernbert", tie_word_embeddings=True).float()
    names = lora.attach_tuner(model, tuner, targets="auto", arguments=ARGUMENTS.get(tuner, {})).names
    draw(model, names)
    assert_equal_files(model, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], ["q_proj", "lm_head"]])
def test_adapters_of_tied_embeddings_and_heads(tied, targets, tmp_path):
    model = test_units.build("llama", tie_word_embeddings=tied).float()
    names = lora.attach_tuner(
        model, "dora", targets="auto", arguments={"use_dora": False, "target_modules": targets}
    ).names
    draw(model, names)
    assert_equal_files(model, tmp_path, is_copied=tied)


@needs_bitsandbytes
@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_quantized_layers_are_dequantized_one_by_one(kind, quantization, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", kind)
    model = load_model(checkpoint, "causal", quantization=quantization)
    attach_drawn(model, targets=r".*\.0\..*(q_proj|c_attn)")  # other layers have no adapter
    assert_equal_files(model, tmp_path)


def test_shards_have_the_index_of_save_pretrained(monkeypatch, tmp_path):
    model = test_units.build("llama", tie_word_embeddings=False).float()
    attach_drawn(model)
    monkeypatch.setattr(streamed_files, "MAX_SHARD_SIZE", "20KB")
    plain_model.save_without_tuners(tmp_path / "streamed", model)
    plain_model.copy_without_tuners(model).save_pretrained(tmp_path / "copied", max_shard_size="20KB")
    files = read_files(tmp_path / "copied")
    assert len(files) > 5 and read_files(tmp_path / "streamed") == files
