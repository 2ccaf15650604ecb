"""Checkpoints with an adapter of peft in their folder, which is merged when they are loaded."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from cpt.models.loading import load_model
from cpt.trainer.check_checkpoint import check_adapter
from tests.support.stored_checkpoints import load_float32, write_checkpoint

# peft 0.21 with transformers 5.24, of any adapter on a causal model
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture
def adapted(tmp_path):
    """A checkpoint with an adapter of peft in its folder, as a run with LoRA exports it."""
    folder = write_checkpoint(tmp_path / "base", dtype=torch.float32)
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(load_float32(folder), options).save_pretrained(folder / "adapters" / "law")
    return folder


def test_an_adapter_in_the_folder_is_merged(adapted):
    check_adapter(adapted / "adapters" / "law", checkpoint=str(adapted))
    changes = load_model(adapted, "causal").state_dict()
    plain = load_float32(adapted).state_dict()
    changed_names = {name for name, weight in changes.items() if not torch.equal(weight, plain[name])}
    expected_names = set()
    for number in (0, 1):
        layer = f"model.layers.{number}.self_attn"
        expected_names |= {f"{layer}.q_proj.weight", f"{layer}.v_proj.weight"}
    assert changed_names == expected_names


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda name: name.replace("layers.1.", "layers.7."),
            "cannot be merged: it lacks .*layers.1.self_attn",
        ),
        (lambda name: f"base_model.{name}", "cannot be merged: it lacks "),
        (lambda name: name if "lora_A" in name else "", "cannot be merged: it lacks .*lora_B"),
    ],
)
def test_an_adapter_of_another_model_is_refused(change, reason, adapted):
    """peft only warns, and the model would be without it."""
    path = adapted / "adapters" / "law" / "adapter_model.safetensors"
    tensors = {change(name): tensor for name, tensor in load_file(path).items() if change(name)}
    save_file(tensors, path)
    with pytest.raises(ValueError, match=reason):
        load_model(adapted, "causal")


def test_an_adapter_with_other_options_than_its_weights_is_refused(adapted):
    path = adapted / "adapters" / "law" / "adapter_config.json"
    options = json.loads(path.read_text())
    path.write_text(json.dumps(options | {"r": 3}))
    with pytest.raises(ValueError, match="its adapter law cannot be merged: .*size mismatch"):
        load_model(adapted, "causal")
    path.write_text(json.dumps(options | {"target_modules": ["q_proj"]}))
    with pytest.raises(ValueError, match="cannot be merged: the model has no place for .*v_proj"):
        load_model(adapted, "causal")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("adapter_config.json", b"{}"),
        ("adapter_config.json", b"[1]"),
        ("adapter_config.json", b"{"),
        ("adapter_model.safetensors", b""),
        ("adapter_model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        ("adapter_model.safetensors", None),
    ],
)
def test_a_damaged_adapter_is_reported_before_texts_are_read(name, content, adapted):
    adapter = adapted / "adapters" / "law"
    (adapter / name).unlink()
    if content is not None:
        (adapter / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"its adapter law cannot be merged: |is truncated or damaged \("):
        check_adapter(adapter, checkpoint=str(adapted))
