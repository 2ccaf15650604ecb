"""The most memory of a process that trains LoRA on a decoder of 135 M parameters, stored in bfloat16,
with steps of 8 x 256 tokens, by the options that save memory.

    python benchmarks/costs/frozen_base.py

Weights are random, in the sizes of SmolLM2-135M; `--model FOLDER` takes a checkpoint instead. Each process is
a whole run: it checks the config, loads the base, scores it, trains, scores again and exports. `training` is
the most that it held in the stage of training, `run` the most at any time. Both are with Python and its
libraries, and with the pages of files that the process reads. Needs Linux."""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, save
from memory import make_model

GRADIENT_CHECKPOINTING = "trainer.gradient_checkpointing=true"
MAX_LOGITS = "model.max_logits=16777216"
CASES = {
    "32 bits": ["model.dtype=float32", GRADIENT_CHECKPOINTING],
    "as stored": [GRADIENT_CHECKPOINTING],
    "as stored, fewer logits": [GRADIENT_CHECKPOINTING, MAX_LOGITS],
    "32 bits, fewer logits": ["model.dtype=float32", GRADIENT_CHECKPOINTING, MAX_LOGITS],
    "as stored, fewer logits, bf16-mixed": [
        GRADIENT_CHECKPOINTING,
        MAX_LOGITS,
        "trainer.precision=bf16-mixed",
    ],
}
ALWAYS = [
    "model=hf",
    "model.max_seq_length=256",
    "method=lora",
    "order=[networkx]",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.batch_size=8",
    "trainer.eval_batch_size=8",
    "trainer.importance_samples=8",
    "eval.when=last",
    "eval.columns=seen",
    "eval.max_tokens=1024",
]
HIGH_WATER = re.compile(r"VmHWM:\s+(\d+) kB")
ROW = "{:40}{:>15}{:>10}{:>12}"


def make_checkpoint(cache: Path) -> Path:
    """The folder of a decoder with random weights in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cpt.core.cache import make_once

    in_32_bits = make_model("smollm2", cache)

    def make(folder: Path) -> None:
        AutoModelForCausalLM.from_pretrained(in_32_bits, dtype="bfloat16").save_pretrained(folder)
        AutoTokenizer.from_pretrained(in_32_bits).save_pretrained(folder)

    return make_once(cache / "models" / "random-smollm2-bfloat16", make=make)


def watch(command: list[str], *, threads: int) -> int:
    """The most bytes that the process of a command holds. Runs reset the mark that the kernel keeps, which is
    therefore read all the time."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    most_bytes = 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        while process.poll() is None:
            mark = HIGH_WATER.search(Path(f"/proc/{process.pid}/status").read_text())
            if mark is not None:
                most_bytes = max(most_bytes, 1024 * int(mark[1]))
            time.sleep(0.01)
        if process.returncode:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{output.read()[-2000:]}")
    return most_bytes


def count_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(overrides: list[str], *, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "run.py"), *ALWAYS, f"model.name_or_path={model}"]
        command += [f"trainer.steps={options.steps}", f"cache_dir={options.cache}", *overrides]
        command.append(f"hydra.run.dir={run}")
        start_seconds = count_cpu_seconds()
        most_bytes = watch(command, threads=options.threads)
        scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    return {
        "run_bytes": most_bytes,
        "training_bytes": max(scores["memory"]),
        "cpu_seconds": count_cpu_seconds() - start_seconds,
        "nll": scores["nll"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--model", type=Path, help="a causal checkpoint; default: random weights")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=cache, help="folder of tokenized text and the model")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()

    model = options.model or make_checkpoint(options.cache)
    print(ROW.format("case", "training, MB", "run, MB", "CPU, s"))
    results = {}
    for case in options.cases:
        result = measure(CASES[case], model=model, options=options)
        results[case] = {"options": CASES[case], **result}
        megabytes = [f"{result[name] / 1e6:,.0f}" for name in ("training_bytes", "run_bytes")]
        print(ROW.format(case, *megabytes, f"{result['cpu_seconds']:.0f}"), flush=True)
        settings = {"steps": options.steps, "threads": options.threads, "always": ALWAYS}
        save("frozen_base", {"settings": settings, "cases": results}, out=options.out)


if __name__ == "__main__":
    main()
