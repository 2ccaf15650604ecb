"""Tokenising and packing a text over the usual recipe of `datasets`: MB per second of CPU time, and the most
memory that is held.

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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import (
    ROOT,
    compare_times,
    read_busy_seconds,
    rotate,
    save,
    summarize_times,
    wait_until_quiet,
)


class Subject(NamedTuple):
    """What makes the rows, by how many processes, and whether the tokenizer may use threads of its own."""

    kind: str  # `cpt` or `recipe`
    workers: int = 1
    has_threads: bool = False


SUBJECTS = {
    "cpt": Subject("cpt"),
    "recipe": Subject("recipe"),
    "cpt, 2 processes": Subject("cpt", workers=2),
    "cpt, threads": Subject("cpt", has_threads=True),
    "recipe, 2 processes": Subject("recipe", workers=2),
    "recipe, threads": Subject("recipe", has_threads=True),
}
NAME = "big"  # of the domain
POLL_INTERVAL_S = 1.0  # between two looks at the memory of a process
HELD_OUT = {"valid": 0.002, "test": 0.002, "seed": 0}
ROW = "{:22}{:>9}{:>9}{:>12}{:>14}{:>13}{:>13}"


def read_lines(files: Sequence[str]) -> list[str]:
    """The lines of some files, or the prose of the standard library."""
    lines: list[str] = []
    if files:
        for path in files:
            lines += Path(path).read_text(encoding="utf-8").splitlines()
    else:
        from cpt.data.sources.docstrings import read_docs

        for _, document in read_docs():
            lines += document.split("\n\n")
    return [" ".join(line.split()) for line in lines if len(line) > 40]


def generate_lines(lines: list[str]) -> Iterator[str]:
    """Lines, again and again, a twentieth of the words exchanged."""
    words = list_words(lines)
    draw = random.Random(0)
    yield from lines
    while True:
        for line in lines:
            line_words = line.split()
            for _ in range(1 + len(line_words) // 20):
                line_words[draw.randrange(len(line_words))] = words[int(draw.random() * len(words))]
            yield " ".join(line_words)


def list_words(lines: Sequence[str]) -> list[str]:
    """The words of every twentieth line, in their order."""
    words: set[str] = set()
    for line in lines[::20]:
        words.update(line.split())
    return sorted(words)


def write_text(root: Path, megabytes: int, files: Sequence[str]) -> None:
    """A domain of so many MB, one file of it, and a little general text."""
    path = root / NAME / "all.txt"
    path.parent.mkdir(parents=True)
    lines = read_lines(files)
    remaining_bytes = megabytes * 10**6
    with path.open("w", encoding="utf-8") as file:
        for line in generate_lines(lines):
            file.write(line + "\n")
            remaining_bytes -= len(line.encode()) + 1
            if remaining_bytes <= 0:
                return


def prepare(options: argparse.Namespace) -> Path:
    """The folder of the text and of a tokenizer that has learned from its beginning, made once."""
    from cpt.core.cache import make_once
    from cpt.models.loading import train_tokenizer

    def make(folder: Path) -> None:
        write_text(folder / "root", options.megabytes, options.text)
        with (folder / "root" / NAME / "all.txt").open(encoding="utf-8") as file:
            sample = list(islice(file, 20_000))
        tokenizer = train_tokenizer(iter([sample]), vocabulary=options.vocabulary, objective="causal")
        tokenizer.save_pretrained(folder / "tokenizer")

    return make_once(Path(options.cache) / "texts" / f"{options.megabytes}-{options.vocabulary}", make=make)


def read_corpus(text_folder: Path, cache: Path) -> Any:
    from cpt.data.corpus import make_corpus
    from cpt.data.sources.texts import Texts

    source = Texts(
        root=str(text_folder / "root"),
        folder=".",
        column="text",
        document="line",
        general=None,
        orders=None,
        held_out=HELD_OUT,
        score_on="test",
    )
    return make_corpus(source, NAME, cache=cache)


def make_rows(corpus: Any, tokenizer: Any, folder: Path, *, length: int, workers: int) -> int:
    from cpt.data.packing import pack
    from cpt.data.text_format import TextFormat

    packed = pack(
        corpus,
        "train",
        format=TextFormat(tokenizer, (tokenizer.eos_token_id,)),
        length=length,
        name=NAME,
        cache=folder,
        workers=workers,
    )
    return int(packed.row_lengths.sum())


def make_rows_by_recipe(corpus: Any, tokenizer: Any, folder: Path, *, length: int, workers: int) -> int:
    """As examples/pytorch/language-modeling/run_clm.py of transformers has it."""
    from itertools import chain

    def tokenize(examples: dict) -> dict:
        return tokenizer(examples["text"])

    def group_texts(examples: dict) -> dict:
        joined = {name: list(chain(*column)) for name, column in examples.items()}
        num_tokens = len(joined["input_ids"]) // length * length
        rows = {}
        for name, ids in joined.items():
            rows[name] = [ids[start : start + length] for start in range(0, num_tokens, length)]
        rows["labels"] = rows["input_ids"].copy()
        return rows

    folder.mkdir(parents=True)
    num_processes = workers if workers > 1 else None
    tokenized = corpus.documents("train").map(
        tokenize,
        remove_columns=["text"],
        cache_file_name=str(folder / "tokens.arrow"),
        batched=True,
        num_proc=num_processes,
        load_from_cache_file=False,
    )
    grouped = tokenized.map(
        group_texts,
        cache_file_name=str(folder / "rows.arrow"),
        batched=True,
        num_proc=num_processes,
        load_from_cache_file=False,
    )
    return length * len(grouped)


def run_subject(options: argparse.Namespace) -> None:
    """Makes the rows of a subject and prints what it took; this process does nothing else."""
    from transformers import AutoTokenizer

    text_folder = Path(options.place)
    cache = Path(options.cache)
    subject = SUBJECTS[options.subject]
    tokenizer = AutoTokenizer.from_pretrained(text_folder / "tokenizer")
    read_start = time.perf_counter()
    corpus = read_corpus(text_folder, cache)

    pack_start = time.perf_counter()
    times_before = os.times()
    busy_before = read_busy_seconds()
    make = make_rows if subject.kind == "cpt" else make_rows_by_recipe
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        num_tokens = make(
            corpus, tokenizer, Path(folder) / "rows", length=options.length, workers=subject.workers
        )
    wall = time.perf_counter() - pack_start
    cpu_seconds = sum(os.times()[:4]) - sum(times_before[:4])
    results = {
        "wall": wall,
        "cpu": cpu_seconds,
        "tokens": num_tokens,
        "read": pack_start - read_start,
        "bytes": corpus.facts["bytes"]["train"],
        "foreign_cores": (read_busy_seconds() - busy_before - cpu_seconds) / wall,
    }
    print(json.dumps(results))


class MemoryWatch:
    """Watches the memory of a process and of those that it has started, every POLL_INTERVAL_S as long as it
    lives; all values are the largest so far, in bytes."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.together = 0  # of all processes, each page once
        self.first = 0  # of the process itself
        self.other = 0  # of any process that it has started
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self) -> None:
        """Updates the largest values until the process ends."""
        while self.process.poll() is None:
            sizes = {number: read_memory(number) for number in list_processes(self.process.pid)}
            own_size, own_share = sizes.pop(self.process.pid, (0, 0))
            self.first = max(self.first, own_size)
            self.other = max([self.other, *(size for size, _ in sizes.values())])
            self.together = max(self.together, own_share + sum(share for _, share in sizes.values()))
            time.sleep(POLL_INTERVAL_S)


def list_processes(number: int) -> Iterator[int]:
    """A process and those below it."""
    yield number
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from list_processes(int(child))


def read_memory(number: int) -> tuple[int, int]:
    """Resident bytes of a process, files that it maps with them, and its share of those that several hold."""
    try:
        text = Path(f"/proc/{number}/smaps_rollup").read_text()
    except OSError:
        return 0, 0
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines()[1:]}
    return fields["Rss"], fields["Pss"]


def measure(subject: str, text_folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What a subject took in a process of its own."""
    command = [
        sys.executable,
        __file__,
        "--subject",
        subject,
        "--place",
        str(text_folder),
        "--cache",
        options.cache,
        "--length",
        str(options.length),
        "--megabytes",
        str(options.megabytes),
    ]
    has_threads = SUBJECTS[subject].has_threads
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TOKENIZERS_PARALLELISM": str(has_threads).lower()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    watch = MemoryWatch(process)
    output, errors = process.communicate()
    watch.thread.join()
    if process.returncode:
        raise SystemExit(f"{subject}: exit code {process.returncode}\n{errors[-2000:]}")

    results = json.loads(output.splitlines()[-1])
    results["memory"] = {"together": watch.together, "first": watch.first, "other": watch.other}
    results["mb_per_cpu_s"] = results["bytes"] / results["cpu"] / 1e6
    return results


def summarize(times: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians by subject, and ratios over the recipe."""
    summary = {}
    for name, rounds in times.items():
        ratios = {}
        if "recipe" in times:
            for kind in ("cpu", "wall"):
                ratios[kind] = compare_times(read_column(rounds, kind), read_column(times["recipe"], kind))
        memory = read_column(rounds, "memory")
        summary[name] = {
            "wall": summarize_times(read_column(rounds, "wall")),
            "cpu": summarize_times(read_column(rounds, "cpu")),
            "mb_per_cpu_s": summarize_times(read_column(rounds, "mb_per_cpu_s")),
            "over_recipe": ratios,
            "memory": {
                "together": max(read_column(memory, "together")),
                "first": max(read_column(memory, "first")),
                "other": max(read_column(memory, "other")),
            },
            "tokens": rounds[0]["tokens"],
        }
    return summary


def read_column(records: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return [record[name] for record in records]


def format_lines(results: dict[str, Any]) -> Iterator[str]:
    """The lines of the table of `summarize`, a subject each: median wall and CPU seconds, MB of text per CPU
    second, how many times less CPU time than the recipe (a dash without one), the most memory of all
    processes together, and the most of a worker process."""
    yield ROW.format("", "wall, s", "cpu, s", "MB/cpu s", "over recipe", "memory, MB", "a worker's")
    for name, figures in results.items():
        ratio = "–"
        if figures["over_recipe"]:
            ratio = f"{figures['over_recipe']['cpu']['median']:.2f}"
        yield ROW.format(
            name,
            f"{figures['wall']['median']:.1f}",
            f"{figures['cpu']['median']:.1f}",
            f"{figures['mb_per_cpu_s']['median']:.2f}",
            ratio,
            f"{figures['memory']['together'] / 1e6:,.0f}",
            f"{figures['memory']['other'] / 1e6:,.0f}",
        )


def parse_options() -> argparse.Namespace:
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
    options = parse_options()
    if options.subject:
        run_subject(options)
        return
    text_folder = prepare(options)
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in options.subjects}
    for number in range(options.rounds):
        for name in rotate(options.subjects, number):
            wait_until_quiet(options.patience)
            times[name].append(measure(name, text_folder, options))
            print(f"{name}: {times[name][-1]['cpu']:.1f} s of CPU time", flush=True)
    results = summarize(times)
    print("\n".join(format_lines(results)))
    unsaid = ("cache", "out", "text", "subject", "place")
    settings = {name: value for name, value in vars(options).items() if name not in unsaid}
    save("texts", {"options": settings, "subjects": results, "rounds": times}, out=options.out)


if __name__ == "__main__":
    main()
