"""Peak memory and time of every method at the sizes of RoBERTa-base and GPT-2 small, or of a checkpoint
(`--model FOLDER`), beside what `plan=json` says.

Weights are random, nothing is fetched: the model is built from its configuration, on the embedded text. For
each method one process says what a run would cost and another is the run: a few real steps in each of so many
domains. What is compared is the largest `memory` of its stages, the most that the process held."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common.measuring import ROOT, save
from common.shapes import SMOLLM2_135M

SIZES: dict[str, dict[str, Any]] = {  # of the published configurations, with their rows of the embedding
    "roberta": {
        "model_type": "roberta",
        "vocab_size": 50265,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
    },
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2_medium": {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "smollm2": SMOLLM2_135M,
    "qwen3_0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llama3_1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama3_8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
STORED_DTYPES = {"llama3_8b": torch.bfloat16}  # of the weights' file, where not 32 bits
DEFAULT_SIZES = ("roberta", "gpt2")
OBJECTIVES = {size: "masked" if size == "roberta" else "causal" for size in SIZES}
CHOICES = {"roberta": "roberta_base", "gpt2": "gpt2", "gpt2_medium": "gpt2"}  # others: model=hf
ENTRIES = 8192  # of the tokenizer, which the rows are more than
ALWAYS = [
    "order=[sympy,networkx]",
    "model.max_seq_length=128",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.batch_size=8",
    "trainer.eval_batch_size=8",
    "trainer.importance_samples=8",
    "trainer.checkpoint_every_n_steps=1000",
    "eval.when=last",
    "eval.columns=seen",
    "eval.max_tokens=1024",
]
NOT = ("none",)  # nothing is learned
ROW = "{:10}{:14}{:>12}{:>12}{:>9}  {}"


def list_methods() -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml") if path.stem not in NOT)


def make_model(size: str, cache: Path, **changes: int) -> Path:
    """The folder of a model with random weights, and of a tokenizer learned from this program's own text;
    `changes` to its configuration."""
    from cpt.core.cache import make_once
    from cpt.models import loading

    def make(folder: Path) -> None:
        torch.manual_seed(0)
        text = [path.read_text(encoding="utf-8") for path in (ROOT / "cpt").rglob("*.py")]
        objective = OBJECTIVES[size]
        learned = loading.train_tokenizer(iter([text]), vocabulary=ENTRIES, objective=objective)
        settings = SIZES[size] | changes
        config = loading.AutoConfig.for_model(**settings)
        dtype = STORED_DTYPES.get(size, torch.float32)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # billions of weights are drawn
            model = loading.AUTO_MODELS[objective].from_config(config, dtype=dtype)
        model.save_pretrained(folder)
        learned.save_pretrained(folder)

    name = "-".join(["random", size, *(f"{key}{value}" for key, value in changes.items())])
    return make_once(cache / "models" / name, make=make)


def measure(method: str, size: str, *, options: argparse.Namespace) -> dict[str, Any]:
    """Bytes that a run was said to need, and needed."""
    model = options.model or make_model(size, Path(options.cache))
    overrides = [
        f"model={CHOICES.get(size, 'hf')}",
        f"model.name_or_path={model}",
        *ALWAYS,
        f"method={method}",
        f"trainer.steps={options.steps}",
        f"cache_dir={options.cache}",
        *options.config,
    ]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        plan = json.loads(run_command(overrides, run, "plan=json", threads=options.threads))
        run_command(overrides, run, threads=options.threads)
        scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))

    needed_bytes = max(scores["memory"])
    planned_memory = plan["memory"]["last"]
    return {
        "said": planned_memory["peak"],
        "needed": needed_bytes,
        "ratio": planned_memory["peak"] / needed_bytes,
        "of_learning": {"first": plan["memory"]["first"], "last": planned_memory},
        "by_stage": scores["memory"],
        "stored": {"said": plan["stages"][-1].get("stored"), "measured": scores["stored"][-1]},
        "seconds": {"said": plan["seconds"], "measured": scores["phases"]},
    }


def run_command(overrides: list[str], folder: Path, *extra_overrides: str, threads: int) -> str:
    """The output of a run in a process of its own; raises CalledProcessError where it fails."""
    command = [sys.executable, str(ROOT / "run.py"), *overrides, *extra_overrides, f"hydra.run.dir={folder}"]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stdout[-2000:]}{process.stderr[-2000:]}")
    return process.stdout


def format_line(size: str, method: str, figures: dict[str, Any]) -> str:
    mib = [f"{figures[name] / 2**20:,.0f}" for name in ("said", "needed")]
    return ROW.format(size, method, *mib, f"{figures['ratio']:.3f}", judge_ratio(figures["ratio"]))


def judge_ratio(ratio: float) -> str:
    return "" if abs(ratio - 1) <= 0.15 else "off by more than 15 %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--methods", nargs="+", choices=list_methods(), default=list_methods())
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=DEFAULT_SIZES)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint instead of --sizes; without a head, it has a random one"
    )
    parser.add_argument("--steps", type=int, default=3, help="of each of two domains")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", default=str(cache), help="folder of the tokenised text and the model")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all runs")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()

    if options.model is not None:
        options.sizes = [options.model.name]
        options.config = ["model.pretraining.head_steps=0", *options.config]

    print(ROW.format("size", "method", "said, MiB", "needed, MiB", "ratio", ""))
    settings = {k: value for k, value in vars(options).items() if k not in ("cache", "out", "model")}
    settings["model"] = options.model and Path(options.model).name
    figures: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for size, method in itertools.product(options.sizes, options.methods):
        try:
            results = measure(method, size, options=options)
        except SystemExit as error:
            failed[f"{size} {method}"] = str(error)
            print(f"{size} {method} failed: {error}", flush=True)
        else:
            figures.setdefault(size, {})[method] = results
            print(format_line(size, method, results), flush=True)
        save("memory", {"options": settings, "subjects": figures, "failed": failed}, out=options.out)

    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
