"""Memory of models from 135 M to 8 B parameters on one GPU, computed without weights; writes the table of
docs/continue-a-chat-model.md. Nothing is run: the figures are those of `plan=json`."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from large_plans import CONFIGS as LARGE_CONFIGS
from large_plans import compute, replace_block

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import RESULTS, ROOT, save
from common.shapes import SMOLLM2_135M

PAGE = ROOT / "docs" / "continue-a-chat-model.md"
FILE = RESULTS / "model_sizes.json"
CONFIGS: dict[str, dict[str, Any]] = {  # of the published config.json, what decides memory
    "SmolLM2-135M": {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **SMOLLM2_135M},
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-3B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": LARGE_CONFIGS["Llama-3.1-8B"],
}
COMMON = [
    "model=hf",
    "model.max_seq_length=1024",
    "trainer.batch_size=8",
    "trainer.micro_batch=8",  # a single device alone
    "trainer.eval_batch_size=8",
    "trainer.gradient_checkpointing=true",
    "plan_device=mi300x",  # the largest: nothing has to be changed until it fits
    "logger=none",
    "plan=json",
]
COLUMNS = {  # what is trained, and how; bf16-mixed is what `auto` takes on a GPU
    "full, `bf16-mixed`": ["method=ncl"],
    "full, `bf16-true`": ["method=ncl", "trainer.precision=bf16-true"],
    "LoRA": ["method=lora"],
    "QLoRA": ["method=lora", "model.quantization=nf4"],
}


def compute_sizes(model: str) -> list[dict[str, Any]]:
    """The bytes at the peak of a run for each column."""
    entries = []
    for column, overrides in COLUMNS.items():
        plan = compute(CONFIGS[model], [*COMMON, *overrides])
        (estimate,) = plan["estimates"]
        entry = {
            "model": model,
            "column": column,
            "parameters": plan["parameters"],
            "trained_parameters": plan["trained_parameters"],
            "peak": estimate["peak"],
        }
        print(entry, flush=True)
        entries.append(entry)
    return entries


def format_gigabytes(num_bytes: int) -> str:
    """`4.8`, `76`."""
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.1f}" if gigabytes < 9.95 else f"{gigabytes:.0f}"


def format_table(entries: list[dict[str, Any]]) -> str:
    """A row for each model."""
    by_model: dict[str, dict[str, str]] = {}
    for entry in entries:
        by_model.setdefault(entry["model"], {})[entry["column"]] = format_gigabytes(entry["peak"])
    lines = [f"| GB, computed | {' | '.join(COLUMNS)} |", f"| :-- |{' --: |' * len(COLUMNS)}"]
    for model in CONFIGS:
        if model not in by_model:
            continue
        cells = [by_model[model][column] for column in COLUMNS]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def make_page(text: str) -> str:
    """The page with the table of the published results."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))["sizes"]
    return replace_block(text, "memory", format_table(entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--published", action="store_true", help="write the page from published results")
    parser.add_argument("--models", nargs="+", choices=[*CONFIGS], default=[*CONFIGS], help="compute these")
    options = parser.parse_args()
    if not options.published:
        entries = []
        if FILE.exists():
            stored = json.loads(FILE.read_text(encoding="utf-8"))["sizes"]
            entries = [entry for entry in stored if entry["model"] not in options.models]
        for model in options.models:
            entries += compute_sizes(model)
            print(save("model_sizes", {"sizes": entries}, out=None))
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
