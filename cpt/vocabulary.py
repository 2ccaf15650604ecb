"""Add words of a domain to a tokenizer: `python -m cpt.vocabulary CORPUS --base MODEL --output FOLDER`.

Learns tokens from the text files of CORPUS, adds them to the tokenizer of MODEL, and writes it to FOLDER, for
model.tokenizer=FOLDER. Text without a new token keeps its ids. Part of the text is held out; on it the bytes
per token before and after are printed. Exit code 1 after an error."""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from cpt.core.errors import find_reason, readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import new_folder, writing
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.messages import count_noun
from cpt.core.naming import quote, quote_list
from cpt.core.output import run_program
from cpt.core.randomness import key
from cpt.core.run_command import find_program_words
from cpt.data.new_tokens import (
    WordCounts,
    check_tokenizer_kind,
    encode_in_batches,
    extend_definition,
    learn_extension,
    make_text_backend,
    make_word_rules,
)
from cpt.data.sources.files import find_split, find_text_files
from cpt.data.sources.readers import read_folder
from cpt.models.extended_tokenizer import check_fit
from cpt.models.loading import load_tokenizer
from cpt.models.tokenizer_faults import VERBATIM, tokenizer_error
from cpt.trainer.base_files import change_tokenizer_config

BATCH = 1 << 20  # characters that are encoded at once
MAX_HELD_OUT = 32 << 20  # bytes of held-out text that are kept
MAX_SHOWN = 20  # tokens of a list
UNITS = ("auto", "file", "paragraph", "line")  # see domains.document


@dataclass
class HeldOutText:
    """Documents of which no token is learned. In a corpus whose files name splits these are valid and test,
    else a `share` of all, drawn by the hash of their text."""

    share: float
    has_named_splits: bool
    documents: list[str] = field(default_factory=list)
    num_bytes: int = 0

    def takes(self, split: str, document: str) -> bool:
        """Whether a document is held out; the first MAX_HELD_OUT bytes of them are kept."""
        is_held_out = self.is_drawn(document)
        if self.has_named_splits:
            is_held_out = split != "train"
        if is_held_out and self.num_bytes < MAX_HELD_OUT:
            self.documents.append(document)
            self.num_bytes += len(document.encode())
        return is_held_out

    def is_drawn(self, document: str) -> bool:
        return key(document) < self.share * 2**64


@dataclass(frozen=True)
class Measurement:
    """The held-out text under the tokenizer before and after."""

    num_bytes: int
    tokens_before: int
    tokens_after: int
    counts: Counter[int]  # of the new tokens in it, by id


def build_parser() -> argparse.ArgumentParser:
    paragraphs = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m cpt.vocabulary", description=paragraphs[1])
    add = parser.add_argument
    add("corpus", type=Path, metavar="CORPUS", help="text files, as of domains=texts: a folder, or one file")
    add("--base", required=True, metavar="MODEL", help="checkpoint: a folder, or a name on the Hub")
    add("--output", required=True, type=Path, metavar="FOLDER", help="new folder for the tokenizer")
    add("--tokens", type=int, default=2000, metavar="N", help="number of new tokens; default: 2000")
    add("--min-count", type=int, default=10, metavar="N", help="least occurrences of a token; default: 10")
    add("--held-out", type=float, default=0.05, metavar="SHARE", help="share of documents; default: 0.05")
    add("--column", default="text", help="column of the text in tables; default: text")
    add("--document", default="auto", choices=UNITS, help="one document of a .txt or .md file; default: auto")
    add("--ignore", action="append", default=[], metavar="PATTERN", help="names of files that are not text")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors():
        add_vocabulary(options)
    return 0


def add_vocabulary(options: argparse.Namespace) -> None:
    """Raises ValueError for options, text or a checkpoint that cannot be used."""
    check_options(options)
    own_tokenizer = load_own_tokenizer(options.base)
    check_tokenizer_kind(own_tokenizer, options.base)

    held_out = HeldOutText(options.held_out, has_named_splits=has_named_splits(options))
    words, num_documents = count_words(options, own_tokenizer, held_out)
    document_count = count_noun(num_documents, "document")
    if not held_out.documents or num_documents == 0:
        raise InvalidOptionError(
            "CORPUS",
            options.corpus,
            reason=f"{document_count} to learn from and {len(held_out.documents)} held out",
            allowed="more documents (--document=line), or another --held-out",
        )
    extension = learn_extension(
        own_tokenizer,
        words,
        num_tokens=options.tokens,
        min_count=options.min_count,
        shows_progress=sys.stderr.isatty(),
    )
    if not extension.entries:
        raise ValueError(
            f"the text of {options.corpus} has no word of several tokens that occurs {options.min_count} "
            "times. Allowed: more text, or a smaller --min-count"
        )

    definition = extend_definition(own_tokenizer, extension)
    with new_folder(options.output) as folder:
        write_tokenizer(own_tokenizer, definition, folder, options)
        tokenizer = load_tokenizer(folder)
        measurement = measure_held_out(own_tokenizer, tokenizer, held_out)

    print(f"{options.corpus}: {document_count}, {len(held_out.documents):,} more held out")
    if words.dropped:
        print(f"Left out {count_noun(words.dropped, 'word')} that occurred once, to bound memory")
    print_report(own_tokenizer, tokenizer, measurement, options)


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for values that are not allowed, a missing corpus, and an output that is there."""
    for name in ("tokens", "min_count"):
        value = getattr(options, name)
        if value < 1:
            raise InvalidOptionError(f"--{name.replace('_', '-')}", value, allowed="1 or more")
    if not 0 < options.held_out < 1:
        raise InvalidOptionError("--held-out", options.held_out, allowed="above 0 and below 1")
    if not options.corpus.exists():
        raise InvalidOptionError(
            "CORPUS", options.corpus, reason="no such file or folder", allowed="a folder of text, or a file"
        )
    output: Path = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise InvalidOptionError(
            "--output", output, reason="it exists", allowed="a new folder, or an empty one"
        )


def load_own_tokenizer(base: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises ValueError for one that cannot be read."""
    try:
        return load_tokenizer(base)
    except Exception as error:  # whatever a class raises for files that it does not take
        raise tokenizer_error("--base", base, error, allowed="a folder, or a name on the Hub") from error


def folder_of(corpus: Path) -> Path:
    """The folder that is read. Where the corpus is a single file, all others in its folder are ignored."""
    return corpus if corpus.is_dir() else corpus.parent


def is_ignored(path: Path, options: argparse.Namespace) -> bool:
    if not options.corpus.is_dir():
        return path != options.corpus
    return any(fnmatch(path.name, pattern) for pattern in options.ignore)


def has_named_splits(options: argparse.Namespace) -> bool:
    """Whether the names of files say what is held out."""
    folder = folder_of(options.corpus)
    files = find_text_files(folder, ignored=lambda path: is_ignored(path, options))
    splits = {find_split(path.relative_to(folder)) for path in files.text}
    return bool(splits & {"valid", "test"})


def count_words(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutText
) -> tuple[WordCounts, int]:
    """The words of the documents that are not held out, and the number of these documents."""
    words = WordCounts()
    rules = make_word_rules(tokenizer)
    num_documents = 0
    for encoding in encode_in_batches(
        make_text_backend(tokenizer), read_training_text(options, held_out), size=BATCH
    ):
        words.add(encoding, rules)
        num_documents += 1
    return words, num_documents


def read_training_text(options: argparse.Namespace, held_out: HeldOutText) -> Iterator[str]:
    """The documents of the corpus but those that are held out, which are kept."""
    documents = read_folder(
        folder_of(options.corpus),
        options.corpus.name,
        column=options.column,
        document=options.document,
        ignored=lambda path: is_ignored(path, options),
    )
    for split, document in documents:
        if not held_out.takes(split, document):
            yield document


def write_tokenizer(
    own_tokenizer: PreTrainedTokenizerBase,
    definition: dict[str, Any],
    folder: Path,
    options: argparse.Namespace,
) -> None:
    """Writes a tokenizer, whose tokenizer.json is `definition`, with the other files of the checkpoint's own,
    its chat template among them, to the folder that becomes `options.output`. Raises ValueError where it
    would be loaded as another one, and OSError where it cannot be written."""
    with writing(options.output):
        own_tokenizer.save_pretrained(folder)
        text = json.dumps(definition, ensure_ascii=False, indent=1)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        change_tokenizer_config(folder)  # it still has options with which the checkpoint's own was loaded

    problem = describe_loaded(folder, own_tokenizer, definition, options)
    if problem:  # the class of the checkpoint's tokenizer builds it in its own way
        change_tokenizer_config(folder, tokenizer_class=VERBATIM)
        problem = describe_loaded(folder, own_tokenizer, definition, options)
    if problem:
        raise ValueError(f"transformers would load another tokenizer from {options.output}: {problem}")


def describe_loaded(
    folder: Path,
    own_tokenizer: PreTrainedTokenizerBase,
    definition: dict[str, Any],
    options: argparse.Namespace,
) -> str:
    """Why what is loaded from a folder is not the tokenizer of a definition; empty where it is."""
    tokenizer = load_tokenizer(folder)
    try:
        check_fit(tokenizer, own_tokenizer, name=str(options.output), checkpoint=options.base)
    except ValueError as error:
        return find_reason(error)
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    if model != definition["model"]:
        return "other entries or merges"
    return ""


def measure_held_out(
    own_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase, held_out: HeldOutText
) -> Measurement:
    """Encodes the held-out text with both tokenizers. Raises ValueError where a text without a new token has
    other ids than before."""
    first_new = max(own_tokenizer.get_vocab().values()) + 1
    tokens_before = 0
    tokens_after = 0
    counts = Counter[int]()
    documents = with_progress(held_out.documents, total=held_out.num_bytes)
    pairs = zip(
        encode_in_batches(make_text_backend(own_tokenizer), held_out.documents, size=BATCH),
        encode_in_batches(make_text_backend(tokenizer), documents, size=BATCH),
        strict=True,
    )
    for before, after in pairs:
        new_ids = [token_id for token_id in after.ids if token_id >= first_new]
        if not new_ids and before.ids != after.ids:
            raise ValueError("a held-out text without a new token has other ids than before")
        counts.update(new_ids)
        tokens_before += len(before.ids)
        tokens_after += len(after.ids)
    return Measurement(held_out.num_bytes, tokens_before, tokens_after, counts)


def with_progress(documents: Iterable[str], *, total: int) -> Iterator[str]:
    with make_progress_bar(
        "measuring", total=total, unit="B", scale=True, hidden=False, delay=DELAY
    ) as progress:
        for document in documents:
            yield document
            progress.update(len(document))


def print_report(
    own_tokenizer: PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase,
    measurement: Measurement,
    options: argparse.Namespace,
) -> None:
    """Prints how many tokens are new, and what they save on held-out text."""
    own_ids = set(own_tokenizer.get_vocab().values())
    new_ids = sorted(set(tokenizer.get_vocab().values()) - own_ids)
    texts = {token_id: tokenizer.decode([token_id]) for token_id in new_ids}

    shortage = "" if len(new_ids) == options.tokens else f" of {options.tokens:,}; --min-count leaves no more"
    print(f"New tokens: {len(new_ids):,}{shortage}")
    print(f"Entries of the tokenizer: {len(own_tokenizer):,} -> {len(tokenizer):,}")

    before = measurement.num_bytes / measurement.tokens_before
    after = measurement.num_bytes / measurement.tokens_after
    saved = 1 - measurement.tokens_after / measurement.tokens_before
    print(
        f"Bytes per token of held-out text: {before:.3f} -> {after:.3f} ({saved:.1%} fewer tokens; "
        f"{count_noun(measurement.num_bytes, 'byte')})"
    )
    print(f"New tokens in held-out text: {len(measurement.counts):,} of {len(new_ids):,}")

    frequent = [texts[token_id] for token_id, _ in measurement.counts.most_common(MAX_SHOWN)]
    longest = sorted(texts.values(), key=lambda text: (-len(text), text))[:MAX_SHOWN]
    print(f"Most frequent: {' '.join(map(repr, frequent))}")
    print(f"Longest: {' '.join(map(repr, longest))}")
    print(f"Use it: {format_usage(options)}")


def format_usage(options: argparse.Namespace) -> str:
    """The command line of a run with the new tokenizer, on the text that it was learned from."""
    settings = [
        "domains=texts",
        *format_text_settings(options),
        "model=hf",
        f"model.name_or_path={quote(options.base)}",
        f"model.tokenizer={quote(str(options.output))}",
    ]
    command = shlex.join([*find_program_words(), *settings])
    if options.corpus.is_dir():
        return command
    return f"{command}  # FOLDER: with a folder, the domain, that holds {options.corpus.name} alone"


def format_text_settings(options: argparse.Namespace) -> list[str]:
    """The overrides of domains=texts that read the same text."""
    settings = []
    if not options.corpus.is_dir():  # whose folder may have other files
        settings.append("domains.root=FOLDER")
    else:
        folder = options.corpus
        if folder.name in ("", ".."):  # of the working folder
            folder = folder.resolve()
        has_files = any(path.is_file() for path in folder.iterdir())
        if has_files:  # the folder is a domain, and its parent may have others
            settings.append(f"domains.root={quote(str(folder.parent))}")
            settings.append(f"domains.only=[{quote(folder.name)}]")
        else:
            settings.append(f"domains.root={quote(str(folder))}")
        if options.ignore:
            settings.append(f"domains.ignore={quote_list(options.ignore)}")

    if options.column != "text":
        settings.append(f"domains.column={quote(options.column)}")
    if options.document != "auto":
        settings.append(f"domains.document={options.document}")
    return settings


if __name__ == "__main__":
    run_program(main)
