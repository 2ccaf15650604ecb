"""Small checkpoints whose weights are stored in 16 bits, as most decoders are."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from cpt.models.loading import build_model, train_tokenizer
from tests.conftest import VOCABULARIES, sentences

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path, *, dtype: torch.dtype, **config: Any) -> Path:
    """A random decoder of 30 thousand parameters with weights of a usual size, and its tokenizer; `config`
    changes that of a Llama."""
    words = " ".join(VOCABULARIES.values())
    tokenizer = train_tokenizer(iter(sentences(words, count=240, seed=1)), vocabulary=300, objective="causal")
    model = build_model(LLAMA | config, tokenizer, "causal", seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # so that 16 bits round what matters
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_float32(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
