"""Trains a small model by every optimizer, with each method and mask that changes gradients, steps or the
loss; writes the results into docs/optimizers.md.

`python docs/site/optimizers.py` runs what docs/optimizers.json lacks (`--again`: all; `--rows`, `--columns`:
some of it) and writes both files. A pair is two domains of two steps on a model of a few thousand weights,
evaluated and exported. An error message is stored as the user reads it."""

import argparse
import importlib.util
import json
import logging
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

SITE = Path(__file__).resolve().parent
sys.path.insert(0, str(SITE))

import support  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402

from cpt.core.config import CONF  # noqa: E402
from cpt.core.errors import find_reason  # noqa: E402

DOCS = SITE.parent
RESULTS, PAGE = DOCS / "optimizers.json", DOCS / "optimizers.md"
BEGIN, END = "<!-- generated: pairs -->", "<!-- end: pairs -->"
FAMILY = "GPT-2"
# Optimizers, and weights in 16 bits, by the heading of a column.
COLUMNS: dict[str, list[str]] = {
    "adamw": [],
    "sgd": ["optim=sgd", "optim.momentum=0.9"],
    "muon": ["optim=muon"],
    "adafactor": ["optim=adafactor"],
    "adamw_8bit": ["optim=adamw_8bit", "optim.min_8bit_size=256"],
    "adamw in bf16-true": ["trainer.precision=bf16-true"],
}
ROWS = (
    "method=ncl",
    # The loss, or a penalty in it.
    "method=kd",
    "method=derpp",
    "method=ewc",
    "method=mas",
    "method=si",
    "method=l2",
    "method=olora",
    "method=nlora",
    "method=sapt",
    "method=lifelong_moe",
    "method=sdft",
    "loss=eaft",
    "loss=rho1",
    "loss=flow",
    # Gradients or steps.
    "method=lora method.protected_rank=4",
    "method=recadam",
    "method=agem",
    "method=agem method.apply_to=update",
    "method=osf",
    "method=osf method.apply_to=gradient",
    "method=das",
    "method=das method.apply_to=gradient",
    "method=das method.apply_to=frozen",
    "method=dga",
    "method=hat",
    "method=hat method.apply_to=gradient",
    "method=hat method.apply_to=frozen",
    "method=cpt_plugin",
    "mask=migu",
    "mask=migu mask.migu.apply_to=update",
    "mask=migu mask.migu.apply_to=frozen",
    "mask=migu mask.migu.backend=backward",
    "mask=mofo",
    # Weights, after steps or domains.
    "method=ema",
    "method=reptile",
    "method=wise_ft",
    "method=merge",
    "method=merge_lora",
    "method=elle",
    # Options of all optimizers.
    "optim.state_across_domains=moments",
    "optim.lr_multipliers={embeddings:0.1}",
    "optim.no_decay=[embeddings]",
)
Results = dict[str, dict[str, str]]  # by row and column: empty, or the line that says why not


def try_pair(row: str, column: str, *, texts: Path, cache: Path, folder: Path) -> str:
    """Empty where a model is trained, evaluated and exported; else the line that says why not."""
    from cpt.train import train

    base, config = support.FAMILIES[FAMILY]
    model = [f"model={base}", "~model.config", f"+model.config={{{config}}}"]
    method = row.split()[0].removeprefix("method=")
    folders = [f"domains.root={support.choose_folder(method, texts)}", f"cache_dir={cache}"]
    fitting = support.FITTING.get(method, [])
    overrides = [*folders, *model, *support.SMALL, *COLUMNS[column], *row.split(), *fitting]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    try:
        train(cfg, run_dir=folder)
    except ValueError as error:
        return find_reason(error)
    except Exception as error:  # of a library, shown as what it is
        return f"{type(error).__name__}: {find_reason(error)}"
    return "" if (folder / "model" / "config.json").exists() else "nothing was exported"


def try_all(rows: Iterable[str], columns: Iterable[str], *, again: bool) -> None:
    """Tries pairs of rows and columns; saves the results after each row."""
    results = load()
    names = list(columns)
    with tempfile.TemporaryDirectory() as folder_name:
        root = Path(folder_name)
        texts = support.write_texts(root / "texts")
        for number, row in enumerate(rows):
            for column in names:
                if not again and column in results.get(row, {}):
                    continue
                start_time = time.perf_counter()
                folder = root / f"{number}-{names.index(column)}"
                message = try_pair(row, column, texts=texts, cache=root / "cache", folder=folder)
                results.setdefault(row, {})[column] = message
                print(f"{time.perf_counter() - start_time:5.1f} s  {row}  {column}  {message}", flush=True)
            save(results)


def load() -> Results:
    """The results so far."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def save(results: Results) -> None:
    """Writes the results, and the page that shows them."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(make_page(page, results), encoding="utf-8")


def make_page(page: str, results: Mapping[str, Mapping[str, str]]) -> str:
    """The page with the table of pairs in place of the one that it has."""
    before, _, remaining = page.partition(BEGIN)
    _, _, after = remaining.partition(END)
    return f"{before}{BEGIN}\n{make_table(results)}\n{END}{after}"


def make_table(results: Mapping[str, Mapping[str, str]]) -> str:
    """The table of pairs: yes, a dash where it was not tried, or the number of a message below."""
    messages: list[str] = []
    lines = [
        f"| option | {' | '.join(f'`{name}`' for name in COLUMNS)} |",
        "| :-- " * (len(COLUMNS) + 1) + "|",
    ]
    for row in ROWS:
        cells = []
        for column in COLUMNS:
            message = results.get(row, {}).get(column)
            if message is None:
                cells.append("–")
            elif message == "":
                cells.append("yes")
            else:
                cells.append(f"no ({support.number_message(message, messages)})")
        lines.append(f"| `{row}` | {' | '.join(cells)} |")

    if messages:
        lines += ["", "```"]
        for number, message in enumerate(messages, 1):
            numbered = f"{number}. {message}"
            lines += textwrap.wrap(numbered, 100, subsequent_indent="   ", break_on_hyphens=False)
        lines.append("```")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="rows to try")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), help="columns to try")
    parser.add_argument("--again", action="store_true", help="also what was tried before")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    if importlib.util.find_spec("bitsandbytes") is None:
        print("Skipping adamw_8bit: bitsandbytes is not installed")
        arguments.columns = [name for name in arguments.columns if name != "adamw_8bit"]

    # Pictures are a third of a run.
    import cpt.reporting.run_figures as run_figures

    for name in ("draw_matrix", "draw_text_curves", "draw_modules"):
        setattr(run_figures, name, lambda *arguments: b"")
    try_all(arguments.rows, arguments.columns, again=arguments.again)


if __name__ == "__main__":
    main()
