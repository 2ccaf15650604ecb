"""Small causal checkpoints whose linear layers are quantized: as tests that need bitsandbytes share them."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from cpt.models.loading import build_model, load_tokenizer, train_tokenizer
from tests.conftest import SMALL, VOCABULARIES

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes (pip install -e '.[quantized]')"
)
OF_NEW_MODELS = ("model.vocab_size", "model.config", "model.pretraining")
SMALL_HF = ["model=hf", *(option for option in SMALL if not option.startswith(OF_NEW_MODELS))]  # a checkpoint
BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, **BLOCKS},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
STORED = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": BitsAndBytesConfig(load_in_4bit=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
# E2M1: the sixteen values of a number in 4 bits.
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"],
}


def save_checkpoint(folder: Path, kind: str = "llama", **changes: object) -> Path:
    """A checkpoint of random weights with its tokenizer. Its norms are not at 1: all weights count."""
    tokenizer = train_tokenizer(iter(VOCABULARIES.values()), vocabulary=300, objective="causal")
    model = build_model({**CONFIGS[kind], **changes}, tokenizer, "causal", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_stored(folder: Path, checkpoint: Path, kind: str) -> Path:
    """A checkpoint whose weights are stored in few bits, as transformers and bitsandbytes write it."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=STORED[kind], device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    load_tokenizer(checkpoint).save_pretrained(folder)
    return folder


def pack_mxfp4(codes: Tensor) -> Tensor:
    """Codes [..., 32] of 4 bits in bytes [..., 16], the first of two in the low bits."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def save_mxfp4(folder: Path, plain_folder: Path) -> dict[str, Tensor]:
    """A gpt-oss whose experts are stored in mxfp4, as that of the Hub; returns the weights of the experts."""
    plain = save_checkpoint(plain_folder, **GPT_OSS)
    state = load_file(plain / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    experts = {}
    names = [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]
    for name in names:
        num_experts, inputs, outputs = state.pop(name).shape
        codes = torch.randint(0, 16, (num_experts, outputs, inputs // 32, 32), generator=generator)
        exponents = torch.randint(120, 125, codes.shape[:-1], generator=generator)
        state[f"{name}_blocks"] = pack_mxfp4(codes)
        state[f"{name}_scales"] = exponents.to(torch.uint8)
        values = torch.cat([FP4_VALUES, -FP4_VALUES])[codes] * 2.0 ** (exponents[..., None] - 127)
        experts[name] = values.flatten(2).transpose(1, 2)

    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return experts
