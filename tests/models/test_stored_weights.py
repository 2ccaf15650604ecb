"""Weights of a checkpoint against its config.json: compared by names and shapes, in every format of files."""

import itertools
import json
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForPreTraining,
    CanineConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from cpt.models import loading
from cpt.models.stored_weights import StoredWeights, WeightsReport, find_wrapper
from cpt.trainer.check_checkpoint import (
    check_stored_form,
    check_stored_weights,
    check_weight_files,
    log_ignored_settings,
)

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
DECODER = SIZES | {"vocab_size": 300, "num_key_value_heads": 2, "max_position_embeddings": 40}


def build(kind: str):
    torch.manual_seed(0)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**DECODER, tie_word_embeddings=True))
    if kind == "untied":
        return Qwen2ForCausalLM(Qwen2Config(**DECODER, tie_word_embeddings=False))
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=4))
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=40, n_embd=32, n_layer=2, n_head=2))
    return BertForPreTraining(BertConfig(**SIZES, vocab_size=300, max_position_embeddings=40))


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin", "shards.safetensors", "shards.bin"])
def form(request):
    return request.param


def write(folder, tensors, form) -> None:
    """Stores tensors in a file or in two shards with their index."""
    for path in [*folder.glob("*.safetensors*"), *folder.glob("*.bin*")]:
        path.unlink()
    suffix = form.rpartition(".")[2]
    if not form.startswith("shards"):
        parts = {form: tensors}
    else:
        stem = "model" if suffix == "safetensors" else "pytorch_model"
        names = sorted(tensors)
        halves = (names[::2], names[1::2])
        parts = {}
        weight_map = {}
        for number, half in enumerate(halves, start=1):
            file_name = f"{stem}-0000{number}-of-00002.{suffix}"
            parts[file_name] = {name: tensors[name] for name in half}
            weight_map |= dict.fromkeys(half, file_name)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    for file_name, part in parts.items():
        if suffix == "safetensors":
            save_file(part, folder / file_name, {"format": "pt"})
        else:
            torch.save(part, folder / file_name)


def edit_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def checkpoint_of(kind: str, folder, form: str, change=None):
    """A folder of a model whose tensors `change` makes others of."""
    build(kind).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    write(folder, change(tensors) if change else tensors, form)
    return folder


def refusal(folder, objective="causal", *, head_steps=None) -> str:
    try:
        config = loading.load_config(str(folder))
        check_weight_files(folder, config)
        check_stored_weights(str(folder), config, objective, head_steps=head_steps)
    except ValueError as error:
        assert str(error).startswith(f"model.name_or_path={folder} is invalid: "), error
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["qwen2", "untied", "mixtral", "gpt2"])
def test_whole_checkpoints_of_every_format_are_accepted(kind, form, tmp_path, caplog):
    assert refusal(checkpoint_of(kind, tmp_path, form)) == ""
    assert not own_records(caplog)


def test_the_text_decoder_of_an_image_model_is_trained_and_the_rest_is_named(tmp_path, caplog):
    caplog.set_level("INFO")
    text = {
        **DECODER,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=text, vision_config=images)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)

    assert refusal(tmp_path) == ""
    (record,) = own_records(caplog)
    assert "Training without " in record.message and "model.visual." in record.message
    assert "language_model" not in record.message

    tensors = load_file(tmp_path / "model.safetensors")
    write(tmp_path, leave_out_tensors("layers.1.mlp.up")(tensors), "model.safetensors")
    assert "lacks 1 tensor of those in config.json: model.layers.1.mlp.up_proj.weight" in refusal(tmp_path)


def leave_out_tensors(*parts):
    """Tensors but for those whose name has one of `parts`."""
    pattern = re.compile("|".join(map(re.escape, parts)))
    return lambda tensors: {n: t for n, t in tensors.items() if not pattern.search(n)}


def rename_tensors(rename):
    return lambda tensors: {rename(name): tensor for name, tensor in tensors.items()}


def own_records(caplog):
    return [record for record in caplog.records if record.name.startswith("cpt.")]


def test_a_body_without_some_of_its_tensors_is_refused(form, tmp_path):
    message = refusal(
        checkpoint_of("qwen2", tmp_path, form, leave_out_tensors("layers.1.mlp.up", "layers.0.input"))
    )
    assert "lacks 2 tensors of those in config.json: model.layers.0.input_layernorm.weight, " in message
    edit_config(tmp_path, num_hidden_layers=5, layer_types=["full_attention"] * 5)
    assert "lacks 38 tensors" in refusal(tmp_path, head_steps=0)  # not for a model without a head alone


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_head_with_other_values_stays_untied_whatever_the_config_says(is_equal, form, tmp_path):
    def change(tensors):
        if is_equal:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        return tensors

    checkpoint_of("untied", tmp_path, form, change)
    edit_config(tmp_path, tie_word_embeddings=True)
    config = loading.load_config(str(tmp_path))
    is_apart = check_stored_weights(str(tmp_path), config, "causal", head_steps=None)
    assert is_apart == (not is_equal)
    assert is_apart == (not loading.is_tied(loading.load_model(tmp_path, "causal")))


def test_a_head_that_lacks_tensors_is_refused_unless_it_is_to_be_trained(form, tmp_path, caplog):
    caplog.set_level("INFO", logger="cpt")
    checkpoint_of("bert", tmp_path, form, leave_out_tensors("cls.predictions"))
    assert "no language-model head (5 tensors). Allowed: model.pretraining" in refusal(tmp_path, "masked")
    assert refusal(tmp_path, "masked", head_steps=7) == ""
    assert "The language-model head, which" in caplog.text and "is trained for 7 steps" in caplog.text
    checkpoint_of("bert", tmp_path, form, leave_out_tensors("cls.predictions.transform.dense"))
    message = refusal(tmp_path, "masked")
    assert "its language-model head lacks cls.predictions.transform.dense.bias, " in message
    checkpoint_of("untied", tmp_path, form, leave_out_tensors("lm_head"))
    message = refusal(tmp_path)
    assert "no language-model head (1 tensor)" in message
    assert "tie_word_embeddings=true in config.json if the head is the embedding" in message


def test_unused_tensors_are_one_line(form, tmp_path, caplog):
    caplog.set_level("INFO", logger="cpt")
    assert refusal(checkpoint_of("bert", tmp_path, form), "masked") == ""
    (record,) = own_records(caplog)
    assert record.levelname == "INFO" and "Ignoring 4 tensors (bert.pooler.dense.bias, " in record.message
    caplog.clear()
    checkpoint_of("qwen2", tmp_path, form)
    edit_config(tmp_path, num_hidden_layers=1, layer_types=["full_attention"])
    assert refusal(tmp_path) == ""
    (record,) = own_records(caplog)
    assert record.levelname == "WARNING"
    message = "has more blocks than its config.json says: ignoring 12 tensors (model.layers.1."
    assert message in record.message


WRAPPED = {
    "torch.compile": ("gpt2", lambda name: f"_orig_mod.{name}", "_orig_mod."),
    "torch.compile of blocks": ("qwen2", lambda name: name.replace("s.1.", "s.1._orig_mod."), "_orig_mod."),
    "DataParallel": ("qwen2", lambda name: f"module.{name}", "module."),
    "checkpoint_wrapper": (
        "gpt2",
        lambda name: name.replace("h.0.", "h.0._checkpoint_wrapped_module."),
        "_checkpoint_wrapped_module.",
    ),
    "Lightning": ("gpt2", lambda name: f"net.{name}", "net."),
    "peft": (
        "qwen2",
        lambda name: f"base_model.model.{name.replace('_proj.', '_proj.base_layer.')}",
        "base_layer.",
    ),
}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_the_prefix_of_a_wrapper_is_named(wrapper, form, tmp_path):
    kind, rename, prefix = WRAPPED[wrapper]
    message = refusal(checkpoint_of(kind, tmp_path, form, rename_tensors(rename)))
    assert f"is invalid: {prefix!r}, of a wrapper of the model, is in the names" in message


def test_the_prefix_of_a_large_mixture_of_experts_is_found_in_seconds():
    numbers = itertools.product(range(50), range(400))
    names = [f"layers.{block}.experts.{expert}.w" for block, expert in numbers]
    stored = StoredWeights({f"net.{name}": torch.empty(0, device="meta") for name in names}, {})
    start = time.monotonic()
    assert find_wrapper(stored, WeightsReport(missing=names, unused=[], mismatched=[], left_out=[])) == "net."
    assert time.monotonic() - start < 5  # each name against each of the others takes minutes


def test_a_prefix_that_transformers_reads_right_is_accepted(form, tmp_path):
    checkpoint_of("qwen2", tmp_path, form, rename_tensors(lambda name: f"model.{name}"))
    assert refusal(tmp_path) == ""
    loaded = loading.load_model(tmp_path, "causal").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in build("qwen2").state_dict().items())


def test_other_shapes_name_tensor_file_and_both(form, tmp_path):
    checkpoint_of("qwen2", tmp_path, form)
    edit_config(tmp_path, vocab_size=320)
    message = refusal(tmp_path)
    assert "model.embed_tokens.weight is 300 x 32 in " in message
    assert ", but 320 x 32 by config.json" in message
    assert f".{form.rpartition('.')[2]}, but" in message
    edit_config(tmp_path, vocab_size=300, intermediate_size=64)
    assert ", the first of 6 such tensors" in refusal(tmp_path)


def test_experts_that_do_not_combine_are_refused(form, tmp_path):
    checkpoint_of("mixtral", tmp_path, form, leave_out_tensors("experts.3."))
    assert "is 3 x " in refusal(tmp_path)
    shutil.rmtree(tmp_path)

    def cut(tensors):
        name = next(name for name in tensors if "layers.0" in name and "experts.1." in name)
        return tensors | {name: tensors[name][:5].clone()}

    message = refusal(checkpoint_of("mixtral", tmp_path, form, cut))
    assert "do not combine into those of a MixtralForCausalLM" in message


def test_a_head_that_the_config_ties_wrongly_is_the_stored_one(form, tmp_path, caplog):
    checkpoint_of("untied", tmp_path, form)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert refusal(tmp_path) == ""
    caplog.set_level("INFO", logger="cpt")
    loaded = loading.load_model(tmp_path, "causal")
    assert "untied, as they are stored, although config.json ties them" in caplog.text
    assert torch.equal(loaded.lm_head.weight, build("untied").lm_head.weight)
    assert not torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


FOLDERS = {
    "training arguments": (
        ["training_args.bin"],
        "it has no weights that transformers loads, only training_args",
    ),
    "shards": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        "it has no index of its 2 shards, like model-00001-of-00002.safetensors",
    ),
    "GGUF": (["model-q4.gguf"], "only model-q4.gguf"),
    "ONNX": (["model.onnx"], "only model.onnx"),
    "nothing": ([], "it has no weights. Allowed: a folder with model.safetensors, "),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_without_loadable_weights_is_refused_with_what_it_contains(kind, tmp_path):
    names, reason = FOLDERS[kind]
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for name in names:
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    assert reason in refusal(tmp_path)


def refusal_of_files(folder) -> str:
    with pytest.raises(ValueError) as error:
        check_weight_files(folder, loading.load_config(str(folder)))
    return str(error.value)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("{}", "no weight_map of names and files"),
        ('{"weight_map": {}}', "no metadata with values"),
        ('{"metadata": {}, "weight_map": [["a", "b"]]}', "no weight_map of names and files"),
        ('{"metadata": {}, "weight_map": {"a": 1}}', "no weight_map of names and files"),
        ('{"metadata": {}, "weight_map": {"a": ["b"]}}', "no weight_map of names and files"),
        ('{"metadata": null, "weight_map": {}}', "no metadata with values"),
        ('{"metadata": "none", "weight_map": {}}', "no metadata with values"),
        ("[1]", "no weight_map of names and files"),
        ('{"metadata": {', "no JSON"),
    ],
)
def test_a_damaged_index_is_reported(index, reason, tmp_path):
    checkpoint_of("qwen2", tmp_path, "shards.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    assert f"{path} is truncated or damaged ({reason})" in refusal_of_files(tmp_path)


@pytest.mark.parametrize("data", [b"PK\3\4cut", b"version https://git-lfs.github.com/spec/v1\n", b""])
def test_a_damaged_pickle_is_reported(data, tmp_path):
    checkpoint_of("qwen2", tmp_path, "pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    assert f"{path} is truncated or damaged" in refusal_of_files(tmp_path)


def test_a_link_to_nothing_and_a_missing_shard_are_reported(tmp_path):
    checkpoint_of("qwen2", tmp_path, "shards.safetensors")
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(tmp_path / "unmounted")
    assert f"{shard} is missing, which model.safetensors.index.json names" in refusal_of_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "unmounted")
    assert "is invalid: model.safetensors is a link to nothing. Allowed: " in refusal_of_files(tmp_path)


def test_what_is_left_of_other_formats_is_not_read(tmp_path, caplog):
    """A download of safetensors alone has the index of the pickles, a clone their pointers of Git LFS."""
    caplog.set_level("INFO", logger="cpt")
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (tmp_path / "optimizer.bin").write_bytes(b"")
    (tmp_path / "consolidated.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    index = {"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "tf_model.h5.index.json").write_text("[1]")
    assert refusal(tmp_path) == ""
    unused_names = "pytorch_model.bin, pytorch_model.bin.index.json"
    line = f"Loading model.safetensors of {tmp_path}, as transformers does, and not {unused_names}"
    assert line in caplog.text


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_matrices_whose_scales_would_not_be_read_are_refused(dtype, form, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def quantize(tensors):
        matrix = tensors[name]
        scale = matrix.abs().max() / 100
        return tensors | {name: (matrix / scale).to(dtype), f"{name}_scale_inv": scale.reshape(1, 1)}

    message = refusal(checkpoint_of("qwen2", tmp_path, form, quantize))
    assert f"{name} is stored in {str(dtype).removeprefix('torch.')}, and config.json has no" in message


def test_matrices_in_8_bits_without_scales_are_read(tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    checkpoint_of(
        "qwen2",
        tmp_path,
        "model.safetensors",
        lambda tensors: tensors | {name: tensors[name].to(torch.float8_e4m3fn)},
    )
    assert refusal(tmp_path) == ""
    loaded = dict(loading.load_model(tmp_path, "causal", quantization="nf4").named_parameters())
    assert "model.norm.weight" in loaded


def test_weights_that_are_not_numbers_are_refused(tmp_path):
    def with_nan_and_infinity(tensors):
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
        changed["model.norm.weight"][0] = float("inf")
        return changed

    checkpoint_of("qwen2", tmp_path, "model.safetensors", with_nan_and_infinity)
    reason = "it has 2 tensors with NaN or infinite weights, the first model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=reason):
        loading.load_model(tmp_path, "causal")


@pytest.mark.parametrize("position", [0, 9, 10, 29])
def test_a_weight_is_checked_piece_by_piece(position, monkeypatch):
    monkeypatch.setattr(loading, "CHECKED_NUMBERS", 10)
    weight = torch.ones(5, 6)
    assert loading.is_finite(weight) and loading.is_finite(torch.empty(0, 6))
    weight.view(-1)[position] = float("inf")
    assert not loading.is_finite(weight)


def test_pickles_of_something_else_are_refused(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": {"a": torch.zeros(1)}, "epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="is invalid: state_dict is no tensor but a dict"):
        check_stored_weights(str(tmp_path), loading.load_config(str(tmp_path)), "causal", head_steps=None)


CONFIGS = {
    "a number as text": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
    "null": ({"max_position_embeddings": None}, "max_position_embeddings"),
    "a list of layers": ({"layer_types": ["full_attention"]}, "layer_types"),
    "an unknown kind of layer": ({"layer_types": ["full_attention", "none"]}, "layer_types"),
    "a list for a number": ({"hidden_size": [32]}, "hidden_size"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_config_edited_by_hand_names_the_key(fault, tmp_path):
    changes, key = CONFIGS[fault]
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    edit_config(tmp_path, **changes)
    message = refusal(tmp_path)
    assert "its config.json is refused by transformers (" in message
    assert key in message and "\n" not in message


def test_a_config_of_which_no_model_is_built_names_the_cause(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    edit_config(tmp_path, hidden_act="nonsense")
    assert "no qwen2 model can be built of its configuration (hidden_act=nonsense)" in refusal(tmp_path)
    edit_config(tmp_path, hidden_act="silu", num_attention_heads=0)
    assert "no qwen2 model can be built of its configuration (integer division" in refusal(tmp_path)


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    edit_config(tmp_path, model_type="ours", auto_map={"AutoConfig": "ours.Config"})
    message = "its config.json needs Python code of its authors (auto_map), which is never run"
    assert message in refusal(tmp_path)


def test_an_export_of_a_class_of_transformers_names_no_custom_code(tmp_path, caplog):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "ours.Ours"})
    caplog.set_level("INFO")
    log_ignored_settings(str(tmp_path), loading.load_config(str(tmp_path)))
    assert "names (auto_map): the qwen2 of transformers is trained and exported" in caplog.text
    loading.load_model(tmp_path, "causal").save_pretrained(tmp_path / "model")
    assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)


def test_a_model_of_characters_has_no_vocabulary(tmp_path):
    CanineConfig(architectures=["CanineModel"]).save_pretrained(tmp_path)
    expected = "a canine has no vocabulary (vocab_size in config.json). Allowed: a language model of tokens"
    assert refusal(tmp_path).endswith(expected)


def test_an_adapter_of_the_hub_that_has_the_config_of_its_model_is_refused(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--user--tuned" / "snapshots" / "abc"
    checkpoint_of("qwen2", snapshot, "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.is_offline_mode", lambda: True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "models--user--tuned" / "refs").mkdir()
    (tmp_path / "models--user--tuned" / "refs" / "main").write_text("abc")
    assert loading.load_config("user/tuned").model_type == "qwen2"
    (snapshot / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"name_or_path=user/tuned is invalid: it has an adapter of peft"):
        loading.load_config("user/tuned")


def test_weights_in_4_bits_within_numbers_of_16_are_named(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    edit_config(tmp_path, quantization_config=stored | {"bnb_4bit_quant_storage": "bfloat16"})
    config = loading.load_config(str(tmp_path))
    with pytest.raises(ValueError, match="its weights in nf4 are stored as bfloat16 .bnb_4bit_quant_stor"):
        check_stored_form(str(tmp_path), config)
    edit_config(tmp_path, quantization_config=stored)
    check_stored_form(str(tmp_path), loading.load_config(str(tmp_path)))


@pytest.mark.parametrize("inner", ["checkpoint-5", "snapshots/abc", ""])
def test_a_folder_around_models_names_them(inner, tmp_path):
    if inner:
        (tmp_path / inner).mkdir(parents=True)
        (tmp_path / inner / "config.json").write_text("{}")
    expected = f"{tmp_path} is invalid: it has no config.json. Allowed: a folder that has one"
    assert refusal(tmp_path).endswith(f"{expected}, like {tmp_path / inner}" if inner else expected)


def test_a_file_of_a_model_names_its_folder(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path / "config.json"):
        assert refusal(path).endswith(f"is invalid: it is a file. Allowed: a folder, like {tmp_path}")


def test_outputs_that_a_config_asks_for_are_replaced(tmp_path):
    checkpoint_of("qwen2", tmp_path, "model.safetensors")
    edit_config(tmp_path, return_dict=False, output_hidden_states=True)
    assert loading.find_ignored_settings(str(tmp_path)) == {
        "return_dict": False,
        "output_hidden_states": True,
    }
    model = loading.load_model(tmp_path, "causal")
    outputs = model(input_ids=torch.arange(8)[None])
    assert outputs.logits.shape == (1, 8, 300) and outputs.hidden_states is None


def test_kernels_of_the_machine_that_saved_a_config_are_replaced(tmp_path):
    checkpoint_of("mixtral", tmp_path, "model.safetensors")
    kernels = {"_attn_implementation": "flash_attention_2", "experts_implementation": "nonsense"}
    edit_config(tmp_path, **kernels)
    assert refusal(tmp_path) == ""
    assert loading.find_ignored_settings(str(tmp_path)) == kernels
    assert loading.load_model(tmp_path, "causal").config._attn_implementation == "sdpa"


def test_the_objective_is_that_of_the_saved_class(tmp_path):
    names = {
        ("flaubert", "FlaubertWithLMHeadModel"): ["masked"],
        ("bert", "BertForMaskedLM"): ["masked"],
        ("bert", "BertLMHeadModel"): ["causal"],
        ("bert", "BertForPreTraining"): ["masked", "causal"],
        ("bart", "BartForCausalLM"): ["causal"],
        ("xlm", "XLMWithLMHeadModel"): ["masked", "causal"],
        ("t5", "T5ForConditionalGeneration"): ["span"],
    }
    for (model_type, class_name), objectives in names.items():
        config = loading.AutoConfig.for_model(model_type, architectures=[class_name])
        assert loading.find_objectives(config) == objectives, class_name
