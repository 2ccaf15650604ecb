"""What the tests of end tasks share: options, small tasks in files, and small models."""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from cpt.models.loading import train_tokenizer
from tests.conftest import ROOT, VOCABULARIES, sentences

WORDS = {"good": "fine warm fresh lovely", "bad": "cold stale slow awful"}
QUICK = {"epochs": 2, "lr": 3e-3, "max_seq_length": 24, "seeds": [3, 4]}


def options(name: str, *, root: Path | None = None, **overrides: Any) -> dict[str, Any]:
    """The options of a YAML in conf/endtask, with others' values."""
    config = OmegaConf.create({"domains": {"root": str(root)}})
    folder = ROOT / "conf" / "endtask"
    values = OmegaConf.load(folder / f"{name}.yaml")
    defaults = OmegaConf.load(folder / "protocol" / "default.yaml") if values.pop("defaults", None) else {}
    config["endtask"] = OmegaConf.merge(defaults, values)
    return OmegaConf.to_container(OmegaConf.merge(config, {"endtask": overrides}), resolve=True)["endtask"]


def rows(domain: str, *, count: int, seed: int) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    examples = []
    for number, text in enumerate(sentences(VOCABULARIES[domain], count=count, seed=seed)):
        label = generator.choice(sorted(WORDS))
        text = f"{generator.choice(WORDS[label].split())} {' '.join(text.split()[:6])}"
        examples.append({"id": f"{domain}-{seed}-{number}", "text": text, "label": label})
    return examples


def write(path: Path, examples: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(example) + "\n" for example in examples)


def write_task(root: Path, domain: str, *, train: int = 40, test: int = 20, dev: int = 12) -> None:
    folder = root / "endtasks" / domain
    for seed, (split, count) in enumerate({"train": train, "dev": dev, "test": test}.items()):
        write(folder / f"{split}.jsonl", rows(domain, count=count, seed=seed))


def tokenizer() -> Any:
    words = " ".join([*VOCABULARIES.values(), *WORDS.values()])
    return train_tokenizer(iter([words] * 5), vocabulary=400, objective="masked")


BERT = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "max_position_embeddings": 48}
GPT2 = {"n_embd": 32, "n_head": 2, "n_positions": 48}
MODELS = {
    "roberta": (AutoModelForMaskedLM, BERT),
    "bert": (AutoModelForMaskedLM, BERT),
    "gpt2": (AutoModelForCausalLM, GPT2),
    "t5": (AutoModelForSeq2SeqLM, {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2}),
}
DROPOUTS = {"gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"), "t5": ("dropout_rate",)}


def model(kind: str, words: Any, *, dropout: float = 0.0) -> Any:
    auto, sizes = MODELS[kind]
    torch.manual_seed(1)
    names = DROPOUTS.get(kind, ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    options = {**sizes, layers: 2, **dict.fromkeys(names, dropout)}
    config = AutoConfig.for_model(kind, vocab_size=len(words), pad_token_id=words.pad_token_id, **options)
    return auto.from_config(config).train()
