"""A domain of many short documents: time per 10⁶ of them, and the most memory that is held.

    python benchmarks/documents.py --documents 100000,1000000,10000000

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
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, foreign_cores, save
from texts import given_lines, read_corpus

NAME, LENGTH, VOCABULARY, BATCHES, BATCH = "big", 128, 8192, 1000, 32
MEGABYTE = 1e6


def write_documents(path: Path, documents: int) -> None:
    """Lines of random words of the standard library's prose, numbered so that none stands there twice."""
    words = sorted({word for line in given_lines([])[::20] for word in line.split()})
    draw = random.Random(0)
    path.parent.mkdir(parents=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            file.write(f"{number} {' '.join(draw.choices(words, k=draw.randint(6, 16)))}\n")


def measure(documents: int, workers: int | None) -> dict[str, Any]:
    """Seconds and the peak of memory after each phase; this process does nothing else."""
    import numpy as np

    from cpt.core.randomness import key, shuffle
    from cpt.data.packing import pack
    from cpt.models.loading import train_tokenizer

    results: dict[str, Any] = {"documents": documents}
    with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as folder:
        work_folder = Path(folder)
        write_documents(work_folder / "root" / NAME / "all.txt", documents)
        results["bytes"] = (work_folder / "root" / NAME / "all.txt").stat().st_size
        with (work_folder / "root" / NAME / "all.txt").open(encoding="utf-8") as file:
            sample = [line for _, line in zip(range(20_000), file, strict=False)]
        tokenizer = train_tokenizer(iter([sample]), vocabulary=VOCABULARY, objective="causal")

        def note(phase: str, start_time: float) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
            results[phase] = {"seconds": time.perf_counter() - start_time, "peak_mb": peak}

        note("start", time.perf_counter())
        start_time = time.perf_counter()
        corpus = read_corpus(work_folder, work_folder / "cache")
        note("read", start_time)
        start_time = time.perf_counter()
        how: dict[str, Any] = {"tokenizer": tokenizer, "tokenizer_digest": "", "workers": workers}
        packed = pack(corpus, "train", length=LENGTH, name=NAME, cache=work_folder / "packed", **how)
        note("pack", start_time)
        start_time = time.perf_counter()
        lengths = packed.row_lengths
        for batch in range(BATCHES):
            positions = np.arange(batch * BATCH, (batch + 1) * BATCH) % len(packed)
            packed.ids(shuffle(positions, len(packed), stream=key("documents")))
        note("batches", start_time)
        results |= {"rows": len(packed), "tokens": int(lengths.sum())}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", default="100000,1000000,10000000")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenise")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help="default: benchmarks/results/documents.json")
    chosen = parser.parse_args()
    (ROOT / "outputs").mkdir(exist_ok=True)
    if chosen.one:
        print(json.dumps(measure(chosen.one, chosen.workers)))
        return
    rows, busy = [], foreign_cores()
    for documents in map(int, chosen.documents.split(",")):
        line = [sys.executable, __file__, "--one", str(documents), "--workers", str(chosen.workers)]
        output = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
        rows.append(json.loads(output.splitlines()[-1]))
        print(json.dumps(rows[-1]), flush=True)
    save("documents", {"workers": chosen.workers, "foreign_cores": busy, "sizes": rows}, out=chosen.out)


if __name__ == "__main__":
    main()
