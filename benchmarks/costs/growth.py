"""Bytes that a method takes more with each domain, and at the end of many: computed by `plan=json` from three
stages, and measured where `--learned` domains are really learned.

The domains are made up, a few short documents each: what a method keeps does not depend on the text."""

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import save
from memory import CHOICES, list_methods, make_model, run_command

WORDS = [
    "the",
    "house",
    "stands",
    "near",
    "a",
    "river",
    "and",
    "people",
    "walk",
    "along",
    "its",
    "quiet",
    "old",
    "streets",
    "every",
    "morning",
]
ALWAYS = [
    "domains=texts",
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.steps=1",
    "trainer.batch_size=2",
    "trainer.eval_batch_size=2",
    "trainer.importance_samples=2",
    "trainer.checkpoint_every_n_steps=1000",
    "model.max_seq_length=32",
    "eval.when=last",
    "eval.columns=seen",
    "eval.max_tokens=32",
]
TINY = [
    "model=tiny_gpt2",
    "model.pretraining.steps=1",
    "model.pretraining.batch_size=2",
    "model.vocab_size=300",
]
ROW = "{:8}{:14}{:>16}{:>16}{:>18}{:>18}"


def write_texts(root: Path, domains: int) -> list[str]:
    """Domains of some documents each, and the general text; gives the names of the domains."""
    names = [f"d{number:03d}" for number in range(domains)]
    for seed, name in enumerate(["general", *names]):
        draw = random.Random(seed)
        lines = [f"{' '.join(draw.choices(WORDS, k=12))} {name} {number}." for number in range(30)]
        (root / name).mkdir(parents=True)
        (root / name / "all.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return names


def choose_model(size: str, cache: Path) -> list[str]:
    """The overrides that choose a model of a size."""
    if size == "tiny":
        return TINY
    return [f"model={CHOICES[size]}", f"model.name_or_path={make_model(size, cache)}"]


def measure_growth(
    method: str, size: str, *, root: Path, domains: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    """What a method is said to take, and what it took where domains were learned."""
    overrides = [
        *ALWAYS,
        *choose_model(size, Path(options.cache)),
        f"domains.root={root}",
        f"method={method}",
        f"cache_dir={options.cache}",
        f"order=[{','.join(domains)}]",
        *options.config,
    ]
    with tempfile.TemporaryDirectory() as folder:
        plan = json.loads(run_command(overrides, Path(folder) / "run", "plan=json", threads=options.threads))
        added_memory = plan["memory"]["last"]["peak"] - plan["memory"]["first"]["peak"]
        stored = [stage["stored"] for stage in plan["stages"]]
        figures = {
            "by_domain": {
                "memory": added_memory // max(1, len(domains) - 1),
                "stored": stored[-1] - stored[-2],
            },
            "at_the_end": plan["stages"][-1].get("stored"),
            "trained_parameters": plan["trained_parameters"],
        }
        if not options.learned:
            return figures

        learned_order = f"order=[{','.join(domains[: options.learned])}]"
        run_command([*overrides, learned_order], Path(folder) / "done", threads=options.threads)
        scores = json.loads((Path(folder) / "done" / "scores.json").read_text(encoding="utf-8"))
        return figures | {"said": stored[1 : len(scores["stored"])], "measured": scores["stored"][1:]}


def format_lines(figures: dict[str, dict[str, Any]], domains: int) -> Iterator[str]:
    heads = ("in memory, B", "in its state, B", f"after {domains}, B", "said = measured")
    yield ROW.format("size", "method", *heads)
    for size, by_method in figures.items():
        for method, growth in by_method.items():
            grown = [f"{growth['by_domain'][kind]:,}" for kind in ("memory", "stored")]
            agreement = str(growth["said"] == growth["measured"]) if "measured" in growth else "–"
            yield ROW.format(size, method, *grown, f"{growth['at_the_end']:,}", agreement)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--methods", nargs="+", choices=list_methods(), default=list_methods())
    parser.add_argument("--sizes", nargs="+", choices=["tiny", *CHOICES], default=["tiny"])
    parser.add_argument("--domains", type=int, default=236)
    parser.add_argument("--learned", type=int, default=0, help="domains that are really learned, to compare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", default=str(cache), help="folder of the tokenised text and the model")
    parser.add_argument("--config", nargs="+", default=[], help="changes to the config of all runs")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    options = parser.parse_args()

    figures: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = write_texts(root, options.domains)
        for size in options.sizes:
            for method in options.methods:
                try:
                    growth = measure_growth(method, size, root=root, domains=names, options=options)
                except SystemExit as error:
                    failed[f"{size} {method}"] = str(error)
                    print(f"{size} {method} failed: {error}", flush=True)
                    continue
                figures.setdefault(size, {})[method] = growth
                print(f"{size} {method}: {growth['by_domain']['stored']:,} bytes by domain", flush=True)

    print("\n".join(format_lines(figures, options.domains)))
    settings = {name: value for name, value in vars(options).items() if name not in ("cache", "out")}
    save("growth", {"options": settings, "subjects": figures, "failed": failed}, out=options.out)


if __name__ == "__main__":
    main()
