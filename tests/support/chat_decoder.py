"""A tiny decoder with a chat template."""

import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.models.loading import train_tokenizer
from tests.conftest import VOCABULARIES, sentences

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def write_checkpoint(folder, template=TEMPLATE):
    """A decoder of 40 thousand parameters with a chat template, as `save_pretrained` leaves it."""
    texts = []
    for words in VOCABULARIES.values():
        texts += sentences(words, count=60, seed=1)
    tokenizer = train_tokenizer(iter(texts), vocabulary=400, objective="causal")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", special=True)]})
    tokenizer.chat_template = template
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_tuned(base, folder):
    """A copy of a checkpoint of `write_checkpoint` whose last norm has other weights."""
    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
