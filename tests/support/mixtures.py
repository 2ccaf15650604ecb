"""Tiny random mixtures of experts of the families that people continue, and a batch for them."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from cpt.data.collate import Batch, label_batch

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MIXTURES = {
    "qwen3_moe": SIZES | {"num_experts": 4, "moe_intermediate_size": 24},
    "mixtral": SIZES | {"num_local_experts": 4},
    "gpt_oss": SIZES | {"num_local_experts": 4, "rope_parameters": PLAIN_ROPE},
    "olmoe": SIZES | {"num_experts": 4},
}
# Its first block is dense, and the second has an expert for all tokens beside the others.
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip


def build_mixture(model_type: str, **options: object) -> PreTrainedModel:
    """A mixture of 2 blocks with 4 experts each (DeepSeek: in the second), whose routers prefer some of them."""
    torch.manual_seed(0)
    settings = (MIXTURES | {"deepseek_v3": DEEPSEEK})[model_type] | options
    config = AutoConfig.for_model(model_type, **settings)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data.normal_()
    return model


def padded_batch() -> Batch:
    """Three rows of 10, 6 and 3 tokens that are all predicted."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (3, 10), generator=generator)
    is_token = torch.arange(10) < torch.tensor([10, 6, 3])[:, None]
    labels = ids.roll(-1, dims=1)
    is_predicted = is_token.roll(-1, dims=1) & (torch.arange(10) < 9)
    return label_batch(ids.masked_fill(~is_token, 0), labels.masked_fill(~is_predicted, -100), is_token)
