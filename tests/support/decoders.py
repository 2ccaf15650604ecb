"""Tiny random decoders whose blocks differ from those of Llama."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
DECODERS = {
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": SIZES
    | {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "glm4": SIZES | {"head_dim": 8},
    "olmo2": SIZES,
    "smollm3": SIZES | {"no_rope_layers": [1, 0]},
}  # fmt: skip


def build_decoder(model_type: str) -> PreTrainedModel:
    """A model of 2 blocks in evaluation mode, with weights large enough for its layers to matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **DECODERS[model_type])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, 0, parameter.shape[-1] ** -0.5)
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 27).view(2, 12), use_cache=False).logits
