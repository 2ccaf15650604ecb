"""Runs every method on a small model of every family and writes docs/support.md with the results.

`python docs/site/support.py` runs the pairs that docs/support.json lacks (`--again`: all; `--methods`,
`--families`: some) and writes both files. A pair is two domains of two steps on a model of a few thousand
weights, evaluated and exported. An error message is stored as the user reads it."""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from hydra import compose, initialize_config_dir  # noqa: E402

import cpt.core.naming  # noqa: E402, F401  (registers the resolvers)
from cpt.core.config import CONF  # noqa: E402
from cpt.core.errors import reason  # noqa: E402

KEPT, PAGE = DOCS / "support.json", DOCS / "support.md"
WORDS = {
    "law": "the court finds that a party to this contract must pay damages under section four of the act",
    "food": "we ordered fresh pasta with basil and the waiter brought warm bread and a sweet lemon dessert",
    "general": "the house stands near a river and people walk along its quiet old streets every morning",
}
SIZES = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2"
DECODER = f"{SIZES}, num_key_value_heads: 1, max_position_embeddings: 64"
T5 = "model_type: t5, d_model: 32, d_kv: 16, d_ff: 48, num_layers: 1, num_decoder_layers: 1, num_heads: 2"
# By the name of a column: the base of conf/model, and the arguments of the model that is made.
FAMILIES: dict[str, tuple[str, str]] = {
    "BERT": ("tiny_roberta", f"model_type: bert, {SIZES}, max_position_embeddings: 64"),
    "RoBERTa": ("tiny_roberta", f"model_type: roberta, {SIZES}, max_position_embeddings: 66"),
    "ModernBERT": ("tiny_modernbert", f"model_type: modernbert, {SIZES}, max_position_embeddings: 64"),
    "MPNet": ("tiny_roberta", f"model_type: mpnet, {SIZES}, max_position_embeddings: 66"),
    "DeBERTa v2": (
        "tiny_roberta",
        f"model_type: deberta-v2, {SIZES}, max_position_embeddings: 64, relative_attention: true, "
        "pos_att_type: [c2p, p2c], position_buckets: 8",
    ),
    "GPT-2": ("tiny_gpt2", "model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, n_positions: 64"),
    "GPT-NeoX": ("tiny_gpt2", f"model_type: gpt_neox, {SIZES}, max_position_embeddings: 64"),
    "Llama": ("tiny_gpt2", f"model_type: llama, {DECODER}"),
    "Llama, tied head": ("tiny_gpt2", f"model_type: llama, tie_word_embeddings: true, {DECODER}"),
    "Qwen 2": ("tiny_gpt2", f"model_type: qwen2, {DECODER}"),
    "Gemma 2": ("tiny_gpt2", f"model_type: gemma2, head_dim: 16, {DECODER}"),
    "Mixtral": ("tiny_gpt2", f"model_type: mixtral, num_local_experts: 4, num_experts_per_tok: 2, {DECODER}"),
    "T5": ("tiny_t5", f"{T5}, feed_forward_proj: relu"),
    "T5 v1.1": ("tiny_t5", f"{T5}, feed_forward_proj: gated-gelu, tie_word_embeddings: false"),
}
SMALL = [
    *("model.max_seq_length=16", "model.vocab_size=400"),
    *("model.pretraining.steps=2", "model.pretraining.batch_size=4"),
    *(
        "trainer.steps=2",
        "trainer.batch_size=4",
        "trainer.eval_batch_size=16",
        "trainer.importance_samples=4",
    ),
    *("domains=texts", "order=[law,food]", "logger=none", "trainer.accelerator=cpu"),
]
FITTING = {"prompt": ["method.num_virtual_tokens=8"]}  # the models have 48 positions for prompts
BESIDE = ("mask=migu", "mask=mofo", "replay=past", "freeze.layers=1")  # of ncl


def list_rows() -> list[str]:
    """What is tried: every method by its name, then what goes beside one."""
    return [*sorted(path.stem for path in (CONF / "method").glob("*.yaml")), *BESIDE]


def write_texts(root: Path) -> Path:
    """Two domains and general text of made-up sentences; gives the folder."""
    for seed, (name, words) in enumerate(WORDS.items()):
        draw = random.Random(seed)
        made = (" ".join(draw.choices(words.split(), k=draw.randint(8, 20))) for _ in range(40))
        (root / name).mkdir(parents=True)
        (root / name / "all.txt").write_text("".join(f"{text} {at}.\n" for at, text in enumerate(made)))
    return root


def overrides(row: str, family: str) -> list[str]:
    """What a run of the pair is told, beside its folders."""
    base, config = FAMILIES[family]
    chosen = [row] if row in BESIDE else [f"method={row}"]
    made = [f"model={base}", "~model.config", f"+model.config={{{config}}}"]
    return [*made, *SMALL, *chosen, *FITTING.get(row, [])]


def attempt(row: str, family: str, *, texts: Path, cache: Path, folder: Path) -> str:
    """Empty where the pair is learned, scored and exported; else the line that says why not."""
    from cpt.train import train

    places = [f"domains.root={texts}", f"cache_dir={cache}"]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=[*places, *overrides(row, family)])
    try:
        train(cfg, run_dir=folder)
    except ValueError as error:
        return reason(error)
    except Exception as error:  # what a library raises is told as what it is
        return f"{type(error).__name__}: {reason(error)}"
    return "" if row == "none" or (folder / "model" / "config.json").exists() else "nothing was exported"


def save(found: Mapping[str, Mapping[str, str]]) -> None:
    KEPT.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def load() -> dict[str, dict[str, str]]:
    """What was found of each row, by family."""
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


INTRODUCTION = """# Supported models

After this page you know which method trains which model. Each method was run on a small random
model of each family: two domains of two steps, evaluated and exported. Other Hugging Face models of
these kinds work too (`model=hf model.name_or_path=NAME`). A method that needs a missing structure
ends with an error message before training. `python docs/site/support.py` runs the pairs and writes
this page.

"""
LINKS = "[Models](models.md) · [Methods](methods.md) · [Fidelity](fidelity.md)"


def show(family: str) -> str:
    return family.replace(", tied head", " with a tied head")


def wrap(text: str) -> list[str]:
    return [*textwrap.wrap(text, 100, break_on_hyphens=False), ""]


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """`docs/support.md`."""
    messages: list[str] = []
    everywhere, exceptions = [], ["| option | not supported (message) | not tested |", "| :-- | :-- | :-- |"]
    for row in list_rows():
        name, cells = f"`{row}`", {show(family): found.get(row, {}).get(family) for family in FAMILIES}
        refused = ", ".join(f"{f} ({number(line, messages)})" for f, line in cells.items() if line)
        missing = ", ".join(family for family, line in cells.items() if line is None)
        if refused or missing:
            exceptions.append(f"| {name} | {refused or '–'} | {missing or '–'} |")
        else:
            everywhere.append(name)
    lines = [
        *wrap(f"Families: {', '.join(map(show, FAMILIES))}."),
        "## Options that support all families",
        "",
    ]
    lines += [*wrap(", ".join(everywhere) + "."), "## Exceptions", "", *exceptions, ""]
    lines += wrap(f"{', '.join(f'`{name}`' for name in BESIDE)} are `method=ncl` with this option.")
    lines += ["## Error messages", "", "```"]
    for at, line in enumerate(messages, 1):
        lines += textwrap.wrap(f"{at}. {line}", 100, subsequent_indent="   ", break_on_hyphens=False)
    return INTRODUCTION + "\n".join([*lines, "```", "", "## See also", "", LINKS]) + "\n"


def number(line: str, messages: list[str]) -> int:
    """The number of an error message, which is added if it is new."""
    line = line.partition("; found ")[0]  # without the sizes of the small model
    if line not in messages:
        messages.append(line)
    return messages.index(line) + 1


def try_pairs(rows: Iterable[str], families: Iterable[str], *, again: bool) -> None:
    found, families = load(), list(families)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        texts = write_texts(place / "texts")
        for row in rows:
            for family in families:
                if again or family not in found.get(row, {}):
                    began, folder = time.perf_counter(), place / f"{row}-{family}".replace("=", "-")
                    line = attempt(row, family, texts=texts, cache=place / "cache", folder=folder)
                    found.setdefault(row, {})[family] = line
                    print(f"{time.perf_counter() - began:5.1f} s  {row}  {family}  {line}", flush=True)
            save(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="*", default=list_rows(), help="rows to try")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), help="columns to try")
    parser.add_argument("--again", action="store_true", help="also what was tried before")
    given = parser.parse_args()
    logging.disable(logging.INFO)
    for kind in ("draw_matrix", "draw_text_curves", "draw_modules"):  # a third of a run
        import cpt.reporting.run_figures as run_figures

        setattr(run_figures, kind, lambda *given: b"")
    try_pairs(given.methods, given.families, again=given.again)


if __name__ == "__main__":
    main()
