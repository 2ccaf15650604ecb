"""Methods on a second shift, from news to texts about computing:
`python benchmarks/studies/linux_texts.py --corpora FOLDER --root NEW_FOLDER --model FOLDER` writes its part
of docs/studies/real-encoder.md.

FOLDER has news-articles, debian-descriptions (with their section as `label`), kernel-docs and foldoc as JSON
lines. They are split into NEW_FOLDER once: texts with the same second line (libfoo, libfoo-dev) count as one.
Rerun the same command to resume."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import das6_mini
import study

from cpt.core.randomness import key

SOURCES = {
    "general": "news-articles",
    "debian": "debian-descriptions",
    "kernel": "kernel-docs",
    "foldoc": "foldoc",
}
SECTIONS = 12  # classes of the downstream task: the most frequent sections
SWEEPS = (
    ["seed=0", "method=none,ncl,das,migu,kd,replay,lora"],
    ["seed=1,2", "method=none,ncl,das,migu,kd,replay,lora"],
)


def main() -> None:
    parser = study.make_parser("linux_texts", str(__doc__))
    parser.add_argument("--corpora", type=Path, help="the JSON lines; see above")
    options = study.check_arguments(parser)
    if options.corpora is not None and not options.root.exists():
        split_corpora(options.corpora, options.root)
    study.make_study(options, "linux_texts", SWEEPS, page="real-encoder", parts=das6_mini.write_parts)


def split_corpora(corpora: Path, root: Path) -> None:
    """Writes root/<domain>/{train,valid,test}.jsonl and root/endtasks/debian/{train,dev,test}.jsonl."""
    for domain, name in SOURCES.items():
        lines = (corpora / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        split = split_documents(map(json.loads, lines))
        for part, documents in split.items():
            write_lines(
                root / domain / f"{part}.jsonl", [{"text": document["text"]} for document in documents]
            )
        if domain == "debian":
            counts = Counter(document["label"] for document in split["train"])
            sections = {label for label, _ in counts.most_common(SECTIONS)}
            for part, file in {"train": "train", "valid": "dev", "test": "test"}.items():
                examples = [document for document in split[part] if document["label"] in sections]
                write_lines(root / "endtasks" / domain / f"{file}.jsonl", examples)


def split_documents(documents: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """90, 5 and 5 % of the documents whose second line is new, by a hash of it."""
    split: dict[str, list[dict[str, Any]]] = {"train": [], "valid": [], "test": []}
    digests = set[int]()
    for document in documents:
        first, _, body = document["text"].partition("\n")
        digest = key("linux_texts", (body or first).strip().partition("\n")[0])
        if digest in digests:
            continue
        digests.add(digest)
        share = digest % 100
        if share < 5:
            split["test"].append(document)
        elif share < 10:
            split["valid"].append(document)
        else:
            split["train"].append(document)
    return split


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
