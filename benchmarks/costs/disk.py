"""What a text takes in the cache, in bytes per byte of text, and what a second length and packing add.

    python benchmarks/costs/disk.py --megabytes 20

Documents are some lines of the standard library's prose with words exchanged. The tokenizer is a byte-level
BPE that has learned from them: ids take 2 bytes, and 4 where its vocabulary is filled up to 70,000 entries,
which no text has. Also the seconds of CPU time of each step."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from texts import NAME, generate_lines, read_corpus, read_lines
from transformers import PreTrainedTokenizerBase

from cpt.data.corpus import Corpus
from cpt.data.packing import pack
from cpt.data.sources.base import CONCAT, DOCUMENT_MASK
from cpt.data.text_format import TextFormat
from cpt.models.loading import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.measuring import ROOT, save

LARGE_VOCABULARY = 70_000
STEPS = ((512, CONCAT), (2048, CONCAT), (2048, DOCUMENT_MASK))  # tokens of a row, and packing
ROW = "{:>10}{:>8}{:>13}{:>9}{:>12}{:>13}{:>15}{:>11}{:>8}{:>8}"


def join_lines(lines: Iterator[str], count: int) -> Iterator[str]:
    """Documents of so many lines each."""
    while True:
        yield " ".join(islice(lines, count))


def write_documents(path: Path, *, megabytes: float, lines_per_document: int) -> None:
    path.parent.mkdir(parents=True)
    remaining_bytes = megabytes * 1e6
    with path.open("w", encoding="utf-8") as file:
        for document in join_lines(generate_lines(read_lines([])), lines_per_document):
            file.write(document + "\n")
            remaining_bytes -= len(document.encode()) + 1
            if remaining_bytes <= 0:
                return


def make_tokenizer(path: Path, *, vocabulary: int, is_large: bool) -> PreTrainedTokenizerBase:
    with path.open(encoding="utf-8") as file:
        sample = list(islice(file, 20_000))
    tokenizer = train_tokenizer(iter([sample]), vocabulary=vocabulary, objective="causal")
    if is_large:
        num_added = LARGE_VOCABULARY - len(tokenizer)
        tokenizer.add_tokens([f"\ue000{number}" for number in range(num_added)])  # private characters
    return tokenizer


def count_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def count_cpu_seconds() -> float:
    return sum(os.times()[:4])


def measure(folder: Path, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Bytes in the cache over those of the text, as they are after each step."""
    text_bytes = corpus.facts["bytes"]["train"]
    all_text_bytes = sum(corpus.facts["bytes"].values())
    sizes: dict[str, float] = {"corpora": count_bytes(corpus.folder) / all_text_bytes}
    seconds = {}
    previous_bytes = 0
    num_tokens = 0

    for length, packing in STEPS:
        start = count_cpu_seconds()
        packed = pack(
            corpus,
            "train",
            format=TextFormat(tokenizer, (tokenizer.eos_token_id,)),
            length=length,
            name=NAME,
            cache=folder,
            packing=packing,
            workers=1,
        )
        step = f"{packing} {length}"
        num_tokens = packed.facts["tokens"]
        seconds[step] = count_cpu_seconds() - start
        num_bytes = count_bytes(folder)
        sizes[step] = (num_bytes - previous_bytes) / text_bytes
        previous_bytes = num_bytes

    return {
        "vocabulary": len(tokenizer),
        "text_bytes": text_bytes,
        "documents": corpus.facts["documents"]["train"],
        "bytes_per_token": text_bytes / num_tokens,
        "bytes_per_text_byte": sizes,
        "cpu_seconds": seconds,
    }


def format_lines(results: list[dict[str, Any]]) -> Iterator[str]:
    steps = [f"{packing[:6]} {length}" for length, packing in STEPS]
    yield ROW.format(
        "vocabulary", "doc, B", "B per token", "corpora", *steps, "2 lengths", "cpu, s", "2nd, s"
    )
    for result in results:
        corpora, *sizes = result["bytes_per_text_byte"].values()
        first, second, _ = result["cpu_seconds"].values()
        yield ROW.format(
            result["vocabulary"],
            round(result["text_bytes"] / result["documents"]),
            f"{result['bytes_per_token']:.2f}",
            f"{corpora:.3f}",
            *(f"{size:.4f}" for size in sizes),
            f"{corpora + sizes[0] + sizes[1]:.3f}",
            f"{first:.1f}",
            f"{second:.2f}",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20, help="of text")
    parser.add_argument("--lines", type=int, nargs="+", default=[1, 8], help="lines of a document")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--out", help="default: benchmarks/results/disk.json")
    options = parser.parse_args()

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    (ROOT / "outputs").mkdir(exist_ok=True)
    results = []
    for lines_per_document in options.lines:
        with tempfile.TemporaryDirectory(dir=ROOT / "outputs") as name:
            folder = Path(name)
            text = folder / "root" / NAME / "all.txt"
            write_documents(text, megabytes=options.megabytes, lines_per_document=lines_per_document)
            corpus = read_corpus(folder, folder / "cache")
            for is_large in (False, True):
                tokenizer = make_tokenizer(text, vocabulary=options.vocabulary, is_large=is_large)
                result = measure(folder / f"packed-{is_large}", corpus, tokenizer)
                results.append({"lines": lines_per_document, **result})
                print(json.dumps(results[-1]), flush=True)

    print("\n".join(format_lines(results)))
    settings = {"megabytes": options.megabytes, "vocabulary": options.vocabulary}
    save("disk", {"options": settings, "texts": results}, out=options.out)


if __name__ == "__main__":
    main()
