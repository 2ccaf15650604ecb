"""Tokenising and packing a text over the usual recipe of `datasets`: MB per second of processor time, and the
most memory that is held.

The recipe is `map(tokenize, batched=True)` and `map(group_texts, batched=True)` as the language-modelling
examples of transformers have them. All have the same documents and the same tokenizer (byte-level BPE), each
in a process of its own, in turns. The text is made: lines of what is given with words exchanged, so that none
stands there twice."""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measuring import ROOT, busy, paired, rotated, save, spread, wait_until_quiet

SUBJECTS = {  # what makes the rows, by how many processes, whether the tokenizer may use threads of its own
    "cpt": ("cpt", 1, False),
    "recipe": ("recipe", 1, False),
    "cpt, 2 processes": ("cpt", 2, False),
    "cpt, threads": ("cpt", 1, True),
    "recipe, 2 processes": ("recipe", 2, False),
    "recipe, threads": ("recipe", 1, True),
}
NAME = "big"
SAMPLED_S = 1.0
HELD_OUT = {"valid": 0.002, "test": 0.002, "seed": 0}
ROW = "{:22}{:>9}{:>9}{:>12}{:>14}{:>13}{:>13}"


def given_lines(files: Sequence[str]) -> list[str]:
    """The lines of some files, or the prose of the standard library."""
    if files:
        text = (line for path in files for line in Path(path).read_text(encoding="utf-8").splitlines())
    else:
        from cpt.data.sources.docstrings import read_docs

        text = (line for _, document in read_docs() for line in document.split("\n\n"))
    return [" ".join(line.split()) for line in text if len(line) > 40]


def made_lines(lines: list[str]) -> Iterator[str]:
    """Lines, again and again, a twentieth of the words exchanged."""
    words = sorted({word for line in lines[::20] for word in line.split()})
    draw = random.Random(0)
    yield from lines
    while True:
        for line in lines:
            line_words = line.split()
            for _ in range(1 + len(line_words) // 20):
                line_words[draw.randrange(len(line_words))] = words[int(draw.random() * len(words))]
            yield " ".join(line_words)


def write_text(root: Path, megabytes: int, files: Sequence[str]) -> None:
    """A domain of so many MB, one file of it, and a little general text."""
    path, remaining_bytes = root / NAME / "all.txt", megabytes * 10**6
    path.parent.mkdir(parents=True)
    lines = given_lines(files)
    with path.open("w", encoding="utf-8") as file:
        for line in made_lines(lines):
            file.write(line + "\n")
            remaining_bytes -= len(line.encode()) + 1
            if remaining_bytes <= 0:
                return


def prepare(chosen: argparse.Namespace) -> Path:
    """The folder of the text and of a tokenizer that has learned from its beginning, made once."""
    from cpt.core.cache import make_once
    from cpt.models.loading import train_tokenizer

    def make(folder: Path) -> None:
        write_text(folder / "root", chosen.megabytes, chosen.text)
        with (folder / "root" / NAME / "all.txt").open(encoding="utf-8") as file:
            sample = [line for _, line in zip(range(20_000), file, strict=False)]
        train_tokenizer(iter([sample]), vocabulary=chosen.vocabulary, objective="causal").save_pretrained(
            folder / "tokenizer"
        )

    return make_once(Path(chosen.cache) / "texts" / f"{chosen.megabytes}-{chosen.vocabulary}", make=make)


def read_corpus(text_folder: Path, cache: Path) -> Any:
    from cpt.data.corpus import make_corpus
    from cpt.data.sources.texts import Texts

    source = Texts(
        **{"root": str(text_folder / "root"), "folder": ".", "column": "text", "document": "line"},
        **{"general": None, "orders": None, "held_out": HELD_OUT, "score_on": "test"},
    )
    return make_corpus(source, NAME, cache=cache)


def rows_of_cpt(corpus: Any, tokenizer: Any, folder: Path, *, length: int, workers: int) -> int:
    from cpt.data.packing import pack

    packed = pack(
        *(corpus, "train"),
        **{"tokenizer": tokenizer, "length": length, "name": NAME, "cache": folder},
        **{"tokenizer_digest": "", "workers": workers},
    )
    return int(packed.row_lengths.sum())


def rows_of_recipe(corpus: Any, tokenizer: Any, folder: Path, *, length: int, workers: int) -> int:
    """As examples/pytorch/language-modeling/run_clm.py of transformers has it."""
    from itertools import chain

    def tokenize(examples: dict) -> dict:
        return tokenizer(examples["text"])

    def group_texts(examples: dict) -> dict:
        joined = {name: list(chain(*each)) for name, each in examples.items()}
        num_tokens = len(joined["input_ids"]) // length * length
        cut = {
            name: [each[at : at + length] for at in range(0, num_tokens, length)]
            for name, each in joined.items()
        }
        return cut | {"labels": cut["input_ids"].copy()}

    folder.mkdir(parents=True)
    processes = workers if workers > 1 else None
    documents = corpus.documents("train")
    options = {"batched": True, "num_proc": processes, "load_from_cache_file": False}
    tokenized = documents.map(
        tokenize, remove_columns=["text"], cache_file_name=str(folder / "tokens.arrow"), **options
    )
    return length * len(tokenized.map(group_texts, cache_file_name=str(folder / "rows.arrow"), **options))


def perform(chosen: argparse.Namespace) -> None:
    """Makes the rows of a subject and prints what it took; this process does nothing else."""
    from transformers import AutoTokenizer

    text_folder, cache = Path(chosen.place), Path(chosen.cache)
    (kind, workers, _), tokenizer = (
        SUBJECTS[chosen.subject],
        AutoTokenizer.from_pretrained(text_folder / "tokenizer"),
    )
    start_time = time.perf_counter()
    corpus = read_corpus(text_folder, cache)
    read, start_time = time.perf_counter() - start_time, time.perf_counter()
    before, busy_before = os.times(), busy()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        rows = {"cpt": rows_of_cpt, "recipe": rows_of_recipe}[kind]
        num_tokens = rows(corpus, tokenizer, Path(folder) / "rows", length=chosen.length, workers=workers)
    wall, after = time.perf_counter() - start_time, os.times()
    cpu_seconds = sum(after[:4]) - sum(before[:4])
    results = {
        "wall": wall,
        "cpu": cpu_seconds,
        "tokens": num_tokens,
        "read": read,
        "bytes": corpus.facts["bytes"]["train"],
    }
    print(json.dumps(results | {"foreign_cores": (busy() - busy_before - cpu_seconds) / wall}))


class Watched:
    """The memory of a process and of those that it has started, looked at while they live: the most that they
    had together, each page once, and the most that one of them had."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.together, self.first, self.other = process, 0, 0, 0
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        while self.process.poll() is None:
            sizes = {number: memory_of(number) for number in tree(self.process.pid)}
            own_memory = sizes.pop(self.process.pid, (0, 0))
            self.first = max(self.first, own_memory[0])
            self.other = max([self.other, *(size for size, _ in sizes.values())])
            self.together = max(self.together, own_memory[1] + sum(share for _, share in sizes.values()))
            time.sleep(SAMPLED_S)


def tree(number: int) -> Iterator[int]:
    """A process and those below it."""
    yield number
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def memory_of(number: int) -> tuple[int, int]:
    """Resident bytes of a process, files that it maps with them, and its share of those that several hold."""
    try:
        text = Path(f"/proc/{number}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
    return fields["Rss"], fields["Pss"]


def measure(subject: str, text_folder: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """What a subject took in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--subject",
        subject,
        "--place",
        str(text_folder),
        "--cache",
        chosen.cache,
    ]
    command += ["--length", str(chosen.length), "--megabytes", str(chosen.megabytes)]
    threads = {"TOKENIZERS_PARALLELISM": str(SUBJECTS[subject][2]).lower()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | threads, text=True, **pipes)
    watched = Watched(process)
    output, errors = process.communicate()
    watched.thread.join()
    if process.returncode:
        raise SystemExit(f"{subject}: exit code {process.returncode}\n{errors[-2000:]}")
    results = json.loads(output.splitlines()[-1])
    memory = {"together": watched.together, "first": watched.first, "other": watched.other}
    return results | {"memory": memory, "mb_per_cpu_s": results["bytes"] / results["cpu"] / 1e6}


def summary(times: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by subject, and ratios over the recipe."""
    return {
        name: {
            "wall": spread([figures["wall"] for figures in rounds]),
            "cpu": spread([figures["cpu"] for figures in rounds]),
            "mb_per_cpu_s": spread([figures["mb_per_cpu_s"] for figures in rounds]),
            "over_recipe": {
                kind: paired(
                    [figures[kind] for figures in rounds], [figures[kind] for figures in times["recipe"]]
                )
                for kind in ("cpu", "wall")
                if "recipe" in times
            },
            "memory": {
                kind: max(figures["memory"][kind] for figures in rounds)
                for kind in ("together", "first", "other")
            },
            "tokens": rounds[0]["tokens"],
        }
        for name, rounds in times.items()
    }


def lines(results: dict[str, Any]) -> Iterator[str]:
    yield ROW.format("", "wall, s", "cpu, s", "MB/cpu s", "over recipe", "memory, MB", "a worker's")
    for name, figures in results.items():
        ratio = f"{figures['over_recipe']['cpu']['median']:.2f}" if figures["over_recipe"] else "–"
        seconds = [f"{figures[kind]['median']:.1f}" for kind in ("wall", "cpu")]
        memory = [f"{figures['memory'][kind] / 1e6:,.0f}" for kind in ("together", "other")]
        yield ROW.format(name, *seconds, f"{figures['mb_per_cpu_s']['median']:.2f}", ratio, *memory)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--megabytes", type=int, default=200, help="of text")
    parser.add_argument(
        "--text", nargs="+", default=[], help="files whose lines it is made of; default: docstrings"
    )
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--cache", default=str(cache), help="folder of the text and its rows")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.subject:
        perform(chosen)
        return
    text_folder = prepare(chosen)
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen.subjects}
    for number in range(chosen.rounds):
        for name in rotated(chosen.subjects, number):
            wait_until_quiet(chosen.patience)
            times[name].append(measure(name, text_folder, chosen))
            print(f"{name}: {times[name][-1]['cpu']:.1f} s of processor time", flush=True)
    results = summary(times)
    print("\n".join(lines(results)))
    unsaid = ("cache", "out", "text", "subject", "place")
    settings = {name: value for name, value in vars(chosen).items() if name not in unsaid}
    save("texts", {"options": settings, "subjects": results, "rounds": times}, out=chosen.out)


if __name__ == "__main__":
    main()
