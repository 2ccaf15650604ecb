"""Ids of a text by a tokenizer whose words are remembered, over the same tokenizer without: MB per second of
processor time, the most memory, and whether the ids are the same, for tokenizers of several kinds.

Each in a process of its own, in turns, one core; what is timed is all that such a process does of a
piece of text: it makes the tokenizer, reads documents and makes their ids. Tokenizers learn from its
beginning."""

import argparse
import gzip
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from measuring import ROOT, paired, rotated, save, spread, wait_until_quiet
from texts import NAME, given_lines, made_lines, read_corpus

SUBJECTS = ("whole", "words")
KINDS = ("learned", "gpt-2", "llama-3", "bert", "t5", "llama-2")
LEARNED_FROM = 20_000  # documents
ROW = "{:12}{:>14}{:>14}{:>10}{:>14}{:>14}"


def documents_of(files: Sequence[str]) -> Iterator[str]:
    """The documents of files: a line of text each, or the column `text` of (compressed) JSON lines."""
    for path in files:
        opened = gzip.open if path.endswith(".gz") else open
        with opened(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"] if ".jsonl" in path else line


def texts_of(chosen: argparse.Namespace) -> Iterator[str]:
    """Documents on one line each: those of the files as they are, or made of docstrings."""
    if chosen.text and not chosen.vary:
        yield from (" ".join(text.splitlines()) for text in documents_of(chosen.text))
    else:
        lines = [" ".join(each.split()) for each in documents_of(chosen.text)] or given_lines([])
        yield from made_lines(lines)


def write_text(path: Path, chosen: argparse.Namespace) -> None:
    """A file of so many MB, or fewer where the files have no more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    left = chosen.megabytes * 10**6
    with path.open("w", encoding="utf-8") as file:
        for line in texts_of(chosen):
            left -= file.write(line + "\n")
            if left <= 0:
                return


def learned(kind: str, texts: list[str], vocabulary: int, charsmap: str | None) -> Any:
    """A tokenizer of a kind."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from cpt.data.cutting import PATTERNS
    from cpt.models.tokenizers import train_tokenizer

    if kind == "learned":
        return train_tokenizer(iter([texts]), vocabulary=vocabulary, objective="causal")
    options = {"vocab_size": vocabulary, "show_progress": False}
    if kind == "bert":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        made.train_from_iterator(texts, trainers.WordPieceTrainer(special_tokens=names, **options))
        made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        return PreTrainedTokenizerFast(tokenizer_object=made, sep_token="[SEP]", cls_token="[CLS]")
    if kind in ("t5", "llama-2"):
        return of_sentencepiece(kind, texts, vocabulary, charsmap)
    made = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt-2")
    cut = pre_tokenizers.Split(Regex(list(PATTERNS)[1]), "isolated")
    made.pre_tokenizer = level if kind == "gpt-2" else pre_tokenizers.Sequence([cut, level])
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made.train_from_iterator(
        texts, trainers.BpeTrainer(special_tokens=["<|endoftext|>"], **alphabet, **options)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def of_sentencepiece(kind: str, texts: list[str], vocabulary: int, charsmap: str | None) -> Any:
    """As transformers makes T5's (with a charsmap, where there is a file of it), or as Llama 2's file is."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    mark, options = pre_tokenizers.Metaspace(), {"vocab_size": vocabulary, "show_progress": False}
    if kind == "t5":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
        if charsmap:
            made.normalizer = normalizers.Precompiled(Path(charsmap).read_bytes())
        names = ["<pad>", "</s>", "<unk>"]
        trainer = trainers.UnigramTrainer(special_tokens=names, unk_token="<unk>", **options)
        made.train_from_iterator((text.replace("<UNK>", " ") for text in texts), trainer)  # it fails on them
        return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    parts = Tokenizer(models.BPE())
    parts.pre_tokenizer = mark
    trainer = trainers.BpeTrainer(special_tokens=names, limit_alphabet=1000, **options)
    parts.train_from_iterator(texts, trainer)
    told = json.loads(parts.to_str())["model"]
    falling = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    made = Tokenizer(models.BPE(told["vocab"], list(map(tuple, told["merges"])), **falling))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


def prepare(chosen: argparse.Namespace) -> Path:
    """The folder of the text and its tokenizers, made once."""
    from cpt.core.cache import make_once

    def make(folder: Path) -> None:
        write_text(folder / "root" / NAME / "all.txt", chosen)
        with (folder / "root" / NAME / "all.txt").open(encoding="utf-8") as file:
            some = list(islice(file, LEARNED_FROM))
        for kind in chosen.kinds:
            learned(kind, some, chosen.vocabulary, chosen.charsmap).save_pretrained(folder / kind)

    told = json.dumps(
        [chosen.text, chosen.vary, chosen.megabytes, chosen.vocabulary, chosen.kinds, chosen.charsmap]
    )
    name = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return make_once(Path(chosen.cache) / "words" / name, make=make)


def perform(chosen: argparse.Namespace) -> None:
    """Makes the ids of the text and prints what it took; this process imports neither torch nor transformers,
    as those that tokenise."""
    from cpt.data.cutting import cuts_of
    from cpt.data.tokenising import pieces, tokenise_piece
    from cpt.data.words import Quick, Words

    written = (Path(chosen.place) / chosen.kind / "tokenizer.json").read_text()
    folder, digest, tokens, size = Path(chosen.folder), hashlib.blake2b(digest_size=8), 0, 0
    began = time.process_time()
    cuts = cuts_of(written)
    encode = Words(written, cuts) if chosen.subject == "words" and cuts else Quick(written)
    used = time.process_time() - began
    for piece in pieces(folder, 0):
        began = time.process_time()
        ids, sizes = tokenise_piece(piece, folder=folder, split=0, encode=encode, ending=[])
        used += time.process_time() - began
        tokens, size = tokens + len(ids), size + piece.bytes
        digest.update(ids.tobytes() + sizes.tobytes())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    print(
        json.dumps(
            {"cpu": used, "bytes": size, "tokens": tokens, "memory": peak, "digest": digest.hexdigest()}
        )
    )


def measure(kind: str, subject: str, place: Path, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--kind", kind, "--subject", subject]
    command += ["--place", str(place), "--folder", str(folder)]
    own = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(command, cwd=ROOT, env=own, check=True, text=True, stdout=subprocess.PIPE)
    found = json.loads(told.stdout.splitlines()[-1])
    return found | {"mb_per_cpu_s": found["bytes"] / found["cpu"] / 1e6}


def summary(rounds: dict[str, dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    """By kind medians of each subject, and the ratio; ids that differ are an error."""
    found = {}
    for kind, each in rounds.items():
        if len({one["digest"] for own in each.values() for one in own}) != 1:
            raise SystemExit(f"{kind}: the ids are not the same")
        found[kind] = {
            name: {
                "mb_per_cpu_s": spread([one["mb_per_cpu_s"] for one in own]),
                "memory": max(one["memory"] for one in own),
            }
            for name, own in each.items()
        }
        first = next(iter(each.values()))
        found[kind] |= {"bytes": first[0]["bytes"], "tokens": first[0]["tokens"]}
        if len(each) == len(SUBJECTS):
            cpu = [[one["cpu"] for one in each[name]] for name in ("words", "whole")]
            found[kind]["words_over_whole"] = paired(*cpu)
    return found


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield ROW.format("", "whole, MB/s", "words, MB/s", "ratio", "whole, MB", "words, MB")
    for kind, each in found.items():
        own = [each.get(name) for name in SUBJECTS]
        speeds = [f"{one['mb_per_cpu_s']['median']:.2f}" if one else "–" for one in own]
        memory = [f"{one['memory'] / 1e6:.0f}" if one else "–" for one in own]
        ratio = f"{each['words_over_whole']['median']:.2f}" if "words_over_whole" in each else "–"
        yield ROW.format(kind, *speeds, ratio, *memory)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", tempfile.gettempdir())) / "cpt-benchmarks"
    parser.add_argument("--megabytes", type=int, default=100, help="of text, at most")
    parser.add_argument("--text", nargs="+", default=[], help="files (.txt, .jsonl, .jsonl.gz)")
    parser.add_argument("--vary", action="store_true", help="repeats the text with words exchanged")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--charsmap", help="file of the charsmap of a SentencePiece model, for t5")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--cache", default=str(cache), help="folder of the text and its tokenizers")
    parser.add_argument("--out", help="JSON file to write; default: benchmarks/results/")
    for name in ("--kind", "--subject", "--place", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    if chosen.subject:
        perform(chosen)
        return
    place = prepare(chosen)
    folder = read_corpus(place, Path(chosen.cache)).folder
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {
        kind: {name: [] for name in chosen.subjects} for kind in chosen.kinds
    }
    for number in range(chosen.rounds):
        for kind in chosen.kinds:
            for name in rotated(chosen.subjects, number):
                wait_until_quiet(chosen.patience)
                rounds[kind][name].append(measure(kind, name, place, folder))
                print(f"{kind}, {name}: {rounds[kind][name][-1]['mb_per_cpu_s']:.2f} MB/s", flush=True)
    found = summary(rounds)
    print("\n".join(lines(found)))
    unsaid = ("cache", "out", "text", "charsmap", "kind", "subject", "place", "folder")
    settings = {name: value for name, value in vars(chosen).items() if name not in unsaid}
    save("words", {"options": settings, "kinds": found, "rounds": rounds}, out=chosen.out)


if __name__ == "__main__":
    main()
