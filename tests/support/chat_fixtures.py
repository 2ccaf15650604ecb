"""Chats on disk, and a small decoder that was saved with a chat template."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from cpt.models.loading import train_tokenizer
from tests.conftest import VOCABULARIES, sentences

TURN_ENDS = "<|end|>"  # what the template ends a turn with: not the end of the sequence
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def conversations(name: str, *, count: int, exchanges: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Chats over a domain's words; an answer names the first word of its question."""
    draw = random.Random(seed)
    words = VOCABULARIES[name].split()
    for number in range(count):
        turns = [{"role": "system", "content": f"You know {name}."}]
        for _ in range(exchanges):
            asked = draw.choices(words, k=draw.randint(4, 8))
            turns.append({"role": "user", "content": f"{' '.join(asked)} {number}?"})
            turns.append({"role": "assistant", "content": f"It is {asked[0]}."})
        yield turns


def write_chats(root: Path, names: Sequence[str], *, train: int, test: int, exchanges: int = 1) -> Path:
    for seed, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for split, count in (("train", train), ("test", test)):
            made = conversations(name, count=count, exchanges=exchanges, seed=10 * seed + (split == "test"))
            rows = [json.dumps({"messages": turns}) for turns in made]
            (root / name / f"{split}.jsonl").write_text("\n".join(rows))
    (root / "general").mkdir()
    general = sentences(VOCABULARIES["general"], count=120, seed=0)
    (root / "general" / "all.txt").write_text("\n".join(general))
    return root


def write_checkpoint(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A decoder of 40 thousand parameters with a chat template, as `save_pretrained` leaves it."""
    texts = [text for words in VOCABULARIES.values() for text in sentences(words, count=60, seed=1)]
    tokenizer = train_tokenizer(iter(texts), vocabulary=400, objective="causal")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(TURN_ENDS, special=True)]})
    tokenizer.chat_template = template
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
