"""A domain of many short documents: time per 10⁶ of them, and the most memory that is held.

    python benchmarks/costs/documents.py --documents 100000,1000000,10000000

For each size, in a process of its own: the documents are read, split by their hashes and stripped of
duplicates; then tokenised and packed; then read as training batches in shuffled order. A document is a line
of six to sixteen words that no other line repeats."""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

from texts import list_words, read_corpus, read_lines

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, measure_foreign_cores, save

NAME, LENGTH, VOCABULARY, BATCHES, BATCH = "big", 128, 8192, 1000, 32
MEGABYTE = 1e6
SAMPLING_S = 0.02


def write_documents(path: Path, documents: int) -> None:
    """Lines of random words of the standard library's prose, numbered so that none stands there twice."""
    words = list_words(read_lines([]))
    draw = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            file.write(f"{number} {' '.join(draw.choices(words, k=draw.randint(6, 16)))}\n")


class OwnMemory(threading.Thread):
    """Samples the memory of this process without pages of files, which the system takes back when it needs
    them; `peak` has the most bytes so far."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, read_own_memory())
            time.sleep(SAMPLING_S)


def read_own_memory() -> int:
    """The bytes of this process's memory that are not pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no RssAnon")


def measure(documents: int, workers: int | None) -> dict[str, Any]:
    """Of each phase its seconds and the peaks of memory so far, with and without pages of files; this process
    does nothing else."""
    import numpy as np

    from cpt.core.randomness import key, permute
    from cpt.data.packing import pack
    from cpt.data.text_format import TextFormat
    from cpt.models.loading import train_tokenizer

    results: dict[str, Any] = {"documents": documents}
    own_memory = OwnMemory()
    own_memory.start()

    def record(phase: str, start_time: float) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
        results[phase] = {
            "seconds": time.perf_counter() - start_time,
            "peak_mb": peak,
            "own_peak_mb": own_memory.peak / MEGABYTE,
        }

    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:
        work_folder = Path(folder)
        text = work_folder / "root" / NAME / "all.txt"
        write_documents(text, documents)
        results["bytes"] = text.stat().st_size
        with text.open(encoding="utf-8") as file:
            sample = list(islice(file, 20_000))
        tokenizer = train_tokenizer(iter([sample]), vocabulary=VOCABULARY, objective="causal")
        record("start", time.perf_counter())

        start_time = time.perf_counter()
        corpus = read_corpus(work_folder, work_folder / "cache")
        record("read", start_time)

        start_time = time.perf_counter()
        packed = pack(
            corpus,
            "train",
            format=TextFormat(tokenizer, (tokenizer.eos_token_id,)),
            length=LENGTH,
            name=NAME,
            cache=work_folder / "packed",
            workers=workers,
        )
        record("pack", start_time)

        start_time = time.perf_counter()
        lengths = packed.row_lengths
        for batch in range(BATCHES):
            positions = np.arange(batch * BATCH, (batch + 1) * BATCH) % len(packed)
            packed.ids(permute(positions, len(packed), stream=key("documents")))
        record("batches", start_time)
        results["rows"] = len(packed)
        results["tokens"] = int(lengths.sum())
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", default="100000,1000000,10000000")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="default: benchmarks/results/documents.json")
    options = parser.parse_args()

    (ROOT / "outputs").mkdir(exist_ok=True)
    if options.one:
        print(json.dumps(measure(options.one, options.workers)))
        return

    rows = []
    foreign = measure_foreign_cores()
    for documents in map(int, options.documents.split(",")):
        line = [sys.executable, __file__, "--one", str(documents), "--workers", str(options.workers)]
        output = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    save("documents", {"workers": options.workers, "foreign_cores": foreign, "sizes": rows}, out=options.out)


if __name__ == "__main__":
    main()
