"""Plans of large models on the GPUs people have, computed without weights; writes docs/large-models.md.
Nothing is run: the figures are those of `plan=json`."""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.trainer.computed_plan import compute_plan, format_computed, why_computed
from cpt.trainer.plan import make_plan

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import RESULTS, ROOT, save

PAGE = ROOT / "docs" / "large-models.md"
FILE = RESULTS / "large_plans.json"
MARKS = ("<!-- generated: {} -->", "<!-- end: {} -->")
CONFIGS: dict[str, dict[str, Any]] = {  # of the published config.json
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
    },
}
NUM_TOKENS = 32 * 4096  # of a step
COMMON = [
    "model=hf",
    "model.max_seq_length=4096",
    "trainer.batch_size=32",
    "trainer.eval_batch_size=1",
    "logger=none",
    "plan=json",
]
RUNS = {  # what is trained, and how
    "all weights": ["method=ncl", "strategy=fsdp"],
    "LoRA": ["method=lora", "method.r=16"],
    "QLoRA": ["method=lora", "method.r=16", "model.quantization=nf4"],
}
PLANS = [  # model, what is trained, device
    ("Llama-3.1-8B", "all weights", "h100"),
    ("Llama-3.1-8B", "LoRA", "4090"),
    ("Llama-3.1-8B", "QLoRA", "4090"),
]
PRINTED = PLANS[0]  # in full on the page
SHORT_NAMES = {  # of changes, in the table
    "strategy=fsdp": "FSDP",
    "trainer.gradient_checkpointing=true": "checkpointing",
    "trainer.precision=bf16-true": "bf16-true",
    "optim=adamw_8bit": "8-bit AdamW",
    "method=lora": "LoRA",
    "model.quantization=nf4": "nf4",
}


def compute(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """What plan=json prints for a model of a `config.json`."""
    with (
        tempfile.TemporaryDirectory() as folder,
        initialize_config_dir(str(ROOT / "conf"), version_base="1.3"),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        cfg = compose("config", overrides=[*overrides, f"model.name_or_path={folder}"])
        plan = make_plan(cfg)
        return compute_plan(cfg, plan, cause=why_computed(plan))


def shorten(override: str) -> str:
    """The name of a change in the table."""
    key, _, value = override.partition("=")
    if key == "trainer.accumulate_grad_batches":
        return f"{value} micro-batches"
    return SHORT_NAMES[override]


def format_cell(estimate: dict[str, Any]) -> str:
    """What a run needs on a number of devices, with the smallest change where it would not fit."""
    change = estimate["change"]
    if estimate["free"] >= 0:
        shown_changes = "as it is"
        plan = estimate
    elif change is None:
        return "–"
    else:
        shown_changes = ", ".join(shorten(override) for override in change["overrides"])
        plan = change
    tokens_per_second = NUM_TOKENS / plan["seconds"]["step"]
    return f"{shown_changes}: {plan['peak'] / 1e9:.0f} GB; {tokens_per_second:,.0f}"


def format_table(entries: list[dict[str, Any]]) -> str:
    """A row for each plan, a column for each number of devices."""
    lines = ["| model, what is trained, device | 1 | 4 | 8 |", "| :-- | :-- | :-- | :-- |"]
    for entry in entries:
        by_devices = {estimate["devices"]: estimate for estimate in entry["plan"]["estimates"]}
        cells = [format_cell(by_devices[number]) for number in (1, 4, 8)]
        lines.append(f"| {entry['model']}, {entry['run']}, `{entry['device']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def replace_block(text: str, name: str, content: str) -> str:
    """A page with other content between two marks."""
    begin, end = (mark.format(name) for mark in MARKS)
    before, _, remainder = text.partition(begin)
    return f"{before}{begin}\n\n{content}\n\n{end}{remainder.partition(end)[2]}"


def write_page(entries: list[dict[str, Any]]) -> None:
    """Writes the table of all plans, and what is printed of one."""
    text = replace_block(PAGE.read_text(encoding="utf-8"), "plans", format_table(entries))
    for entry in entries:
        if (entry["model"], entry["run"], entry["device"]) == PRINTED:
            lines = [line.rstrip() for line in format_computed(entry["plan"]).splitlines()]
            text = replace_block(text, "printed", "\n".join(["```text", *lines, "```"]))
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--published", action="store_true", help="write the page from published results")
    options = parser.parse_args()
    if options.published:
        write_page(json.loads(FILE.read_text(encoding="utf-8"))["plans"])
        return

    entries: list[dict[str, Any]] = []
    for model, run, device in PLANS:
        start_time = time.process_time()
        cost = compute(CONFIGS[model], [*COMMON, *RUNS[run], f"plan_device={device}"])
        seconds = time.process_time() - start_time
        entries.append({"model": model, "run": run, "device": device, "plan": cost, "cpu_seconds": seconds})
        print(model, run, device, f"{seconds:.1f} s", flush=True)
        save("large_plans", {"plans": entries}, out=None)
    write_page(entries)


if __name__ == "__main__":
    main()
