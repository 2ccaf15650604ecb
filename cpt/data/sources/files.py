"""Files of text below a folder: which there are, the split that a name says, and what is not text."""

import csv
import glob
import json
import lzma
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from cpt.core.exceptions import MessageError
from cpt.core.naming import quote

PLAIN_SUFFIXES = (".txt", ".md")
TABLE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow")
SUFFIXES = (*PLAIN_SUFFIXES, *TABLE_SUFFIXES)
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
# Formats whose files never have 0 bytes.
SUFFIXES_WITH_HEADER = (*COMPRESSED_SUFFIXES, ".parquet", ".arrow")
# By the beginning of a file, its end: of a parquet file, an Arrow file, and an Arrow stream, which a writer
# that was stopped between two batches leaves without it. Older streams begin otherwise.
ENDS_BY_BEGINNING = {
    ".parquet": {b"PAR1": b"PAR1"},
    ".arrow": {b"ARROW1": b"ARROW1", b"\xff\xff\xff\xff": b"\xff\xff\xff\xff\0\0\0\0"},
}
# The words of datasets.data_files.SPLIT_KEYWORDS, which takes seconds to import.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
LETTER = r"[^\W\d_]"
SPLIT_WORD = re.compile(rf"(?<!{LETTER})({'|'.join(SPLIT_WORDS)})(?!{LETTER})", re.IGNORECASE)
ABOUT_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|code_of_conduct|authors)([-_. ].*)?",
    re.IGNORECASE,
)
METADATA_FILES = (  # of datasets, as in its FILES_TO_IGNORE, and of Spark
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "dummy_data.zip",
    "_SUCCESS",
    "_metadata",
    "_common_metadata",
)
SAVED_STATE, SAVED_INFO = "state.json", "dataset_info.json"  # of a folder that save_to_disk has written
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PLAIN_PATTERN = re.compile(r"[\w./-]*[*?][\w.*?/-]*", re.ASCII)  # that Hydra reads as a text
MAX_SHOWN = 5  # names in a message


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turns errors of the libraries that read a file or a folder into a ValueError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except (
        OSError,
        EOFError,
        RecursionError,
        zlib.error,
        lzma.LZMAError,
        csv.Error,
        pa.ArrowException,
    ) as error:
        raise ValueError(f"{path} cannot be read: {find_cause_message(error)}") from error


def find_cause_message(error: BaseException) -> str:
    """The message of the error at the end of a chain of causes, on one line."""
    return " ".join(str(error).split()) if error.__cause__ is None else find_cause_message(error.__cause__)


def stamp_files(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Files with their sizes and times: other values, other text. A link counts by its own name too, which
    says its split and its kind."""
    values = []
    for path in files:
        absolute = os.path.abspath(path)
        real = str(path.resolve())
        stat = path.stat()
        name = real if absolute == real else f"{absolute} -> {real}"
        values.append((name, stat.st_size, stat.st_mtime_ns))
    return values


def find_suffix(path: Path) -> str:
    """The suffix of a file in lower case, without that of its compression."""
    name = Path(path.stem) if find_compression(path) else path
    return name.suffix.lower()


def find_compression(path: Path) -> str:
    """The suffix of a file's compression in lower case; empty for none."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED_SUFFIXES else ""


def remove_suffixes(path: Path) -> str:
    """A file's name without its suffixes of kind and compression."""
    return Path(path.stem).stem if find_compression(path) else path.stem


def split_words(name: str) -> list[str]:
    """The splits that a name says, in its order: those of datasets' words between characters that are not
    letters."""
    return [SPLIT_WORDS[word.lower()] for word in SPLIT_WORD.findall(name)]


def find_split(path: Path) -> str | None:
    """The split that the names of a file and its folders say, given a path below the folder of the text;
    None for none. Where they say several, the first that is held out: test text is not trained on."""
    splits: list[str] = []
    for part in path.parts:
        splits.extend(split_words(part))
    held_out = [split for split in splits if split != "train"]
    if held_out:
        return held_out[0]
    return "train" if splits else None


def find_splits_by_name(names: Iterable[str]) -> dict[str, list[str]]:
    """The splits of a data set by what their whole names say. Next to `train` and `test` themselves, others
    that say the same, like `eval`, are not among them."""
    by_split: dict[str, list[str]] = {}
    for name in names:
        if name in SPLIT_WORDS:
            by_split.setdefault(SPLIT_WORDS[name], []).append(name)
    for split in ("train", "test"):
        if split in by_split.get(split, []):
            by_split[split] = [split]
    return by_split


@dataclass
class FolderFiles:
    """The files below a folder: `text` in the order they are read, and what is left out, by its reason."""

    text: list[Path] = field(default_factory=list)
    hidden: list[Path] = field(default_factory=list)  # files, and folders that are not entered
    about_data: list[Path] = field(default_factory=list)  # like a dataset card next to tables
    not_listed: list[Path] = field(default_factory=list)  # next to a saved data set that does not list them

    def describe_left_out(self) -> str:
        """What is left out, for a log line; empty for nothing."""
        groups = {
            "hidden": self.hidden,
            "about the data": self.about_data,
            "not part of a saved data set": self.not_listed,
        }
        parts = [
            f"{len(paths)} {reason} ({format_file_names(paths)})" for reason, paths in groups.items() if paths
        ]
        return "; ".join(parts)


def format_file_names(paths: Iterable[Path]) -> str:
    """The first names of files, each once, and an ellipsis for more."""
    names = list(dict.fromkeys(path.name for path in paths))
    return ", ".join([*names[:MAX_SHOWN], "…"] if len(names) > MAX_SHOWN else names)


def walk(
    folder: Path,
    *,
    ignored: Callable[[Path], bool] | None = None,
    hidden: list[Path] | None = None,
    parents: frozenset[str] = frozenset(),
) -> Iterator[Path]:
    """The files below a folder, links followed; none that are hidden, which are added to `hidden`, or
    `ignored`. `parents` are the real paths of the folders above it. Raises UnusableFileError for a link to a
    folder that it is in, and ValueError for a folder without permission."""
    real = os.path.realpath(folder)
    if real in parents:
        raise UnusableFileError(
            f"{folder} is a link to a folder that it is in. Allowed: no such link",
            patterns=[glob.escape(folder.name)],
        )

    entries: dict[Path, bool] = {}  # whether each is a folder
    with naming_file(folder):
        for entry in os.scandir(folder):
            entries[folder / entry.name] = entry.is_dir()

    for path, is_folder in entries.items():
        if ignored and ignored(path):
            continue
        if path.name.startswith("."):
            if hidden is not None:
                hidden.append(path)
        elif is_folder:
            yield from walk(path, ignored=ignored, hidden=hidden, parents=parents | {real})
        else:
            yield path


class NoTextFileError(ValueError):
    """A folder without a file of text."""


class UnusableFileError(MessageError):
    """A file or a folder in place of text; `patterns` are those of `domains.ignore` that leave it out."""

    def __init__(self, message: str, *, patterns: Sequence[str]) -> None:
        self.patterns = patterns
        super().__init__(message)


class UnknownKindError(UnusableFileError):
    """Files that are no text, and whose purpose is not known."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        subject = f"{paths[0]} is not a file of text"
        if len(paths) > 1:
            kinds = Counter(path.suffix.lower() or path.name for path in paths)
            counts = ", ".join(f"{count} {name}" for name, count in kinds.items())
            subject = f"{paths[0]} and {len(paths) - 1} more ({counts}) are not files of text"
        message = (
            f"{subject}. Allowed: {' '.join(SUFFIXES)}, also {' '.join(COMPRESSED_SUFFIXES)}: "
            "convert what is text to one of these"
        )
        super().__init__(message, patterns=make_ignore_patterns(paths))


def make_ignore_patterns(paths: Sequence[Path]) -> list[str]:
    """The patterns that leave out files and others of their kinds, most often several."""
    patterns = []
    for path in paths:
        suffix = "".join(path.suffixes[-2:]) if find_compression(path) else path.suffix
        patterns.append(f"*{suffix}" if suffix else glob.escape(path.name))
    return list(dict.fromkeys(patterns))


def format_ignore(patterns: Iterable[str]) -> str:
    """`domains.ignore` with patterns, to be typed into a shell."""
    texts = map(quote_pattern, dict.fromkeys(patterns))
    return shlex.quote(f"domains.ignore=[{','.join(texts)}]")


def quote_pattern(pattern: str) -> str:
    """A pattern as Hydra takes it: in double quotes where these do, which a shell leaves within its own."""
    quoted = pattern if PLAIN_PATTERN.fullmatch(pattern) else quote(pattern)
    has_other_signs = any(sign in pattern for sign in ('"', "\\", "${"))
    return quoted if quoted == pattern or has_other_signs else f'"{pattern}"'


def find_text_files(folder: Path, *, ignored: Callable[[Path], bool] | None = None) -> FolderFiles:
    """The text files below a folder, links followed, and what is left out.

    Raises UnknownKindError for files that are not text and have no known purpose, UnusableFileError for a
    link to nothing and for an empty file of a format that has a header, NoTextFileError for a folder without
    text."""
    # What is not text is left out only where its purpose is known: else data would be missing unnoticed.
    files = FolderFiles()
    paths = sorted(walk(folder, ignored=ignored, hidden=files.hidden))
    listed = find_saved_files(paths)
    has_tables = any(find_suffix(path) in TABLE_SUFFIXES for path in paths)
    unknown_kinds: list[Path] = []

    for path in paths:
        is_text = find_suffix(path) in SUFFIXES
        listed_names = listed.get(path.parent)  # None: not a folder that save_to_disk has written
        # README.txt is a document where there is nothing but plain text, and a dataset card next to tables.
        is_plain_next_to_tables = has_tables and find_suffix(path) in PLAIN_SUFFIXES
        is_no_document = not is_text or is_plain_next_to_tables
        is_about_data = is_no_document and ABOUT_DATA.fullmatch(path.name) is not None
        is_saved_state = listed_names is not None and path.name == SAVED_STATE
        if path.name in METADATA_FILES or is_about_data or is_saved_state:
            files.about_data.append(path)
        elif listed_names is not None and path.name not in listed_names:
            files.not_listed.append(path)
        elif is_text:
            files.text.append(path)
        else:
            unknown_kinds.append(path)

    if unknown_kinds:
        raise UnknownKindError(unknown_kinds)
    for path in files.text:
        refuse_unreadable(path)
    if not files.text:
        raise NoTextFileError(f"{folder} has no {' '.join(SUFFIXES)} file")
    return files


def find_saved_files(paths: Iterable[Path]) -> dict[Path, set[str]]:
    """The names of the data files by folder, of folders that `save_to_disk` has written: others next to them
    are caches of datasets. Raises ValueError for a damaged list, and for a data file that is missing."""
    states = [path for path in paths if path.name == SAVED_STATE and (path.parent / SAVED_INFO).is_file()]
    listed: dict[Path, set[str]] = {}
    for path in states:
        with naming_file(path):
            text = path.read_text(encoding="utf-8")
        try:
            names = {entry["filename"] for entry in json.loads(text)["_data_files"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: no list of data files. Allowed: that of datasets"
            ) from error
        for name in sorted(names):
            if not (path.parent / name).is_file():
                raise ValueError(f"{path.parent / name} is missing: {path} lists it. Allowed: all its files")
        listed[path.parent] = names
    return listed


def refuse_unreadable(path: Path) -> None:
    """Raises UnusableFileError for what is not a plain file, for 0 bytes of a format that has a header, and
    for a table without its end: most often a download that failed."""
    with naming_file(path):
        if not path.is_file():
            raise UnusableFileError(
                f"{path} is a link to nothing, or no plain file. Allowed: "
                f"{' '.join(SUFFIXES)}, also {' '.join(COMPRESSED_SUFFIXES)}",
                patterns=[glob.escape(path.name)],
            )
        suffix = path.suffix.lower()
        if suffix in SUFFIXES_WITH_HEADER and path.stat().st_size == 0:
            raise UnusableFileError(
                f"{path} is damaged: it has 0 bytes. Allowed: a complete {suffix} file",
                patterns=[glob.escape(path.name)],
            )
        if lacks_end(path):
            raise UnusableFileError(
                f"{path} is damaged: its end is missing. Allowed: a complete {suffix} file",
                patterns=[glob.escape(path.name)],
            )
    if find_compression(path) and find_suffix(path) in ENDS_BY_BEGINNING:
        raise UnusableFileError(
            f"{path} is a {find_suffix(path)} file that is compressed as a whole, which is not read. "
            f"Allowed: the {find_suffix(path)} file in it",
            patterns=[glob.escape(path.name)],
        )


def lacks_end(path: Path) -> bool:
    """Whether a file begins as one of a format that has an end, and does not end so."""
    with path.open("rb") as file:
        for beginning, end in ENDS_BY_BEGINNING.get(path.suffix.lower(), {}).items():
            file.seek(0)
            if file.read(len(beginning)) == beginning:
                file.seek(-min(len(end), path.stat().st_size), os.SEEK_END)
                return file.read() != end
    return False


def refuse_unknown_kind(path: Path) -> None:
    """Raises UnknownKindError for a single file that is not one of text."""
    if find_suffix(path) not in SUFFIXES:
        raise UnknownKindError([path])


def refuse_dangling(path: Path, *, remedy: str) -> None:
    """Raises ValueError for a link to what does not exist, like a folder that is not mounted, unless it is
    hidden."""
    if path.is_symlink() and not path.exists() and not path.name.startswith("."):
        raise ValueError(
            f"{path} is a link to {os.readlink(path)}, which does not exist. "
            f"Allowed: an existing folder, or {remedy}"
        )


def list_text_files(folder: Path, *, ignored: Callable[[Path], bool] | None = None) -> list[Path]:
    """The text files below a folder, in the order they are read; raises ValueError as `find_text_files`."""
    return find_text_files(folder, ignored=ignored).text


def describe_named_splits(folder: Path, paths: Iterable[Path]) -> str:
    """What the files of a folder are taken as by their names, for a log line."""
    counts = Counter[str]()  # files by split
    num_unnamed = 0
    examples: dict[str, Path] = {}
    ambiguous: list[Path] = []
    for path in paths:
        relative = path.relative_to(folder)
        split = find_split(relative)
        counts[split or "train"] += 1
        if split is None:
            num_unnamed += 1
        else:
            examples.setdefault(split, relative)
        if len(set(split_words(str(relative)))) > 1:
            ambiguous.append(relative)

    parts = []
    for split, count in sorted(counts.items()):
        example = f" (like {examples[split]})" if split in examples else ""
        parts.append(f"{count} as {split}{example}")
    if num_unnamed and examples:
        parts.append(f"{num_unnamed} of train have no split in the name")
    if ambiguous:
        names = format_file_names(ambiguous)
        parts.append(f"{len(ambiguous)} have several splits in the name and are held out ({names})")
    return ", ".join(parts)
