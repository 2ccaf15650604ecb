"""Files of text: which there are, what a document in them is, and the documents one after another.

The readers are the standard library's and pyarrow's, a file at a time: those of `datasets` take the types of
a whole table from its first rows, and say neither the file nor the line of what they cannot read."""

import csv
import gzip
import io
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.heartbeat import DELAY, progress_bar

log = logging.getLogger(__name__)
KINDS = (".txt", ".md", ".jsonl", ".json", ".csv", ".parquet")
PACKED = (".gz", ".zst")
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("valid", "validation", "dev", "val"), "valid")}
SPLIT_NAME = re.compile(rf"({'|'.join(SPLITS)})([-_]\d+(-of-\d+)?)?", re.IGNORECASE)
MANY_FILES, FIRST_LINES = 20, 10_000

Row = tuple[str, Any]  # where it stands, what stands there


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Files with their sizes and times: other values, other text. A link counts by its own name too, which
    says its split and its kind."""
    found = []
    for path in files:
        own, real, stat = os.path.abspath(path), str(path.resolve()), path.stat()
        found.append((real if own == real else f"{own} -> {real}", stat.st_size, stat.st_mtime_ns))
    return found


def kind(path: Path) -> str:
    """The suffix of a file, without that of its compression."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def walk(
    folder: Path,
    *,
    ignored: Callable[[Path], bool] | None = None,
    above: frozenset[str] = frozenset(),
) -> Iterator[Path]:
    """The files below a folder, links followed; none that are hidden or `ignored`. Raises ValueError for a
    link to a folder that it is in."""
    real = os.path.realpath(folder)
    if real in above:
        raise ValueError(f"{folder} is a link to a folder that it is in; domains.ignore=[{folder.name}]")
    with naming_file(folder):
        entries = list(os.scandir(folder))
    for entry in entries:
        path = folder / entry.name
        if entry.name[0] != "." and not (ignored and ignored(path)):
            yield from walk(path, ignored=ignored, above=above | {real}) if entry.is_dir() else [path]


def files_of(folder: Path, *, ignored: Callable[[Path], bool] | None = None) -> list[Path]:
    """The text files below a folder, in the order they are read, links followed; none that are hidden or
    `ignored`. Raises ValueError for what is neither and cannot be read, and for a folder without text."""

    found = sorted(walk(folder, ignored=ignored))
    if unread := next((path for path in found if kind(path) not in KINDS or not path.is_file()), None):
        is_text = kind(unread) in KINDS
        pattern = f"*{''.join(unread.suffixes[-2:])}" if unread.suffix and not is_text else unread.name
        what = "is a link to nothing, or no plain file" if is_text else "is not a file of text"
        told = f"{unread} {what}. Allowed: {' '.join(KINDS)}, also {' '.join(PACKED)}"
        raise ValueError(f"{told}, or leave out what is not text: domains.ignore=[{pattern}]")
    if not found:
        told = f"{folder} has no {' '.join(KINDS)} file"
        raise ValueError(f"{told}; each sub-folder is a domain, but for domains.ignore=[{folder.name}]")
    return found


def read_folder(
    folder: Path, name: str, *, column: str, document: str, ignored: Callable[[Path], bool] | None = None
) -> Iterator[tuple[str, str]]:
    """(split, document) of the files of a folder, streamed. A split is what a file's name or a folder it is
    in says (test.txt, train-00000-of-00002.parquet, dev/a), else train. ValueError for a file that cannot be
    read."""
    files = files_of(folder, ignored=ignored)
    texts, unit = [path for path in files if kind(path) == ".txt"], document
    if document == "auto" and (len(texts) >= MANY_FILES or not texts):
        unit = "file"
    elif document == "auto":
        paragraphs: list[str] = []
        for path in texts:  # the first that is not empty
            with naming_file(path):
                paragraphs = list(islice(split_units(islice(lines(path), FIRST_LINES), "paragraph"), 2))
            if paragraphs:
                break
        unit, where = "paragraph" if len(paragraphs) > 1 else "line", texts[0].parent
        log.info("Reading %d .txt files of %s: documents are %ss (domains.document)", len(texts), where, unit)
    ends = list(accumulate(path.stat().st_size * (3 if path.suffix in PACKED else 1) for path in files))
    how: dict[str, Any] = {"unit": "B", "scale": True, "hidden": False, "delay": DELAY}
    with progress_bar(f"reading {name}", total=ends[-1], **how) as progress:
        for path, end in zip(files, ends, strict=True):
            said = (SPLIT_NAME.fullmatch(part.split(".")[0]) for part in path.relative_to(folder).parts)
            split, own = next((SPLITS[match[1].lower()] for match in said if match), "train"), kind(path)
            documents: Iterator[str]
            with naming_file(path):
                if own in (".txt", ".md"):
                    units = split_units(lines(path), "file" if own == ".md" and document == "auto" else unit)
                    documents = filter(lambda text: text and not text.isspace(), units)
                elif own == ".parquet":
                    documents = texts_of(parquet_rows(path, column), column)
                else:
                    documents = texts_of((csv_rows if own == ".csv" else json_rows)(path), column)
                for text in documents:
                    progress.update(len(text))
                    yield split, text
            progress.update(end - progress.n)


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Errors of the libraries that read a file or a folder as a ValueError that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except (OSError, EOFError, RecursionError, zlib.error, csv.Error, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """What an error goes back to, on one line."""
    return " ".join(str(error).split()) if error.__cause__ is None else cause(error.__cause__)


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, unpacked and ended by line feeds; ValueError for one that is not UTF-8, or that
    has NUL in every other place as UTF-16 has."""
    if path.suffix == ".zst":
        opened: Any = io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    else:
        opened = (gzip.open if path.suffix == ".gz" else open)(path, "rb")
    with opened as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"line {number}, byte {error.start + 1} ({error.reason})"
                raise ValueError(f"{path} is not UTF-8: {where}") from error
            zeros = max(line[::2].count(0), line[1::2].count(0))
            if number == 1 and len(line) > 3 and 4 * zeros > len(line):
                raise ValueError(f"{path} is not UTF-8: it looks like UTF-16. Allowed: UTF-8")
            yield text[:-2] + "\n" if text.endswith("\r\n") else text


def split_units(text: Iterator[str], unit: str) -> Iterator[str]:
    """Lines of text joined to what a document is."""
    if unit == "line":
        return (line.rstrip("\n") for line in text)
    if unit == "file":
        return iter(["".join(text)])
    return ("".join(group).rstrip("\n") for blank, group in groupby(text, key=str.isspace) if not blank)


def json_rows(path: Path) -> Iterator[Row]:
    """The values of a file with one on each line, or with a single array of them."""
    text, is_first = enumerate(lines(path), start=1), True
    for number, line in text:
        is_first, begins = is_first and line.isspace(), is_first and line.lstrip().startswith("[")
        try:
            if begins:
                whole = json.loads("".join([line, *(rest for _, rest in text)]))
                yield from ((f"{path}, value {place}", row) for place, row in enumerate(whole, start=1))
            elif not line.isspace():
                yield f"{path}, line {number}", json.loads(line)
        except ValueError as error:  # also a number of more digits than Python reads
            told = f"{path}, line {number} is not JSON: {getattr(error, 'msg', error)}"
            raise ValueError(f"{told}. Allowed: a value on each line, or one array of values") from error


def csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit is shorter than documents are
    reader = csv.reader(lines(path), strict=True)
    header = next(reader, [])
    if len({*header}) < len(header):
        raise ValueError(f"{path} has a column twice: {', '.join(header)}. Allowed: each name once")
    for row in filter(None, reader):
        where, needed = f"{path}, line {reader.line_num}", len(header)
        if len(row) != needed:
            raise ValueError(f"{where} has {len(row)} values. Allowed: {needed}, as many as there are names")
        yield where, dict(zip(header, row, strict=True))


def parquet_rows(path: Path, column: str) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=100, columns=[column] if column in names else names):
            yield from ((str(path), row) for row in batch.to_pylist())


def texts_of(rows: Iterable[Row], column: str) -> Iterator[str]:
    """The text column of rows; empty values are passed over."""
    for where, row in rows:
        if text := text_of(where, column, cell(row, column, where, "domains.column")):
            yield text


def cell(row: Any, column: str, where: str, option: str) -> Any:
    """The value of a column; raises ValueError, with the option to change, if it is missing."""
    if not isinstance(row, Mapping) or column not in row:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"{row!r:.60}"
        raise ValueError(f"{where} has no column {column!r}; it has {has} ({option})")
    return row[column]


def text_of(where: str, column: str, value: Any) -> str | None:
    """A text; None for null and blanks. Raises ValueError for anything else."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} is not text: {value!r:.60}")
    return value if value and not value.isspace() else None
