"""The documents of text files one after another.

The readers are the standard library's and pyarrow's, a file at a time: those of `datasets` take the types of
a whole table from its first rows, and say neither the file nor the line of what they cannot read."""

import bz2
import csv
import difflib
import glob
import gzip
import io
import json
import logging
import lzma
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.core.exceptions import MessageError
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.messages import count_noun
from cpt.data.sources.files import (
    ABOUT_DATA,
    LFS_POINTER,
    PLAIN_SUFFIXES,
    describe_named_splits,
    find_compression,
    find_split,
    find_suffix,
    find_text_files,
    format_file_names,
    format_ignore,
    naming_file,
)

log = logging.getLogger(__name__)
MIN_ONE_DOCUMENT_FILES = 20  # .txt files, from which each is a document
NUM_CHECKED_FILES = 20  # of a domain, whose first lines are read before its text
NUM_FIRST_LINES = 10_000  # of a file, by which its documents are found
MAX_LINES_PER_PARAGRAPH = 20  # on average; where blank lines are rarer, they separate no paragraphs
SHARD = re.compile(r"\d+-of-\d+")  # in the name of a file that is one of several with many documents
CHUNK = 1 << 20  # bytes that are read at once
LINE_END = re.compile(rb"\r*\n|\r")  # also of a text whose line ends were converted twice
MARK = "\ufeff"  # byte order mark
# What is left out of documents or changed in them, with the plural of each: see `Oddities`.
REMOVED_MARK = "byte order mark removed"
NO_DOCUMENT = "file without a document"
BLANK_DOCUMENT = "blank document left out"
REPEATED_HEADER = "repeated line of column names left out"
PLURALS = {
    REMOVED_MARK: "byte order marks removed",
    NO_DOCUMENT: "files without a document",
    BLANK_DOCUMENT: "blank documents left out",
    REPEATED_HEADER: "repeated lines of column names left out",
}
# Control characters that text has not: all but tab, line ends, backspace (overstrike), escape, separators.
CONTROL_BYTES = bytes([*range(0x08), *range(0x0E, 0x1B)])
# A line with at least as many of them, and with a larger share, is not text.
MIN_CONTROL_BYTES = 4
MAX_CONTROL_SHARE = 0.05
DELIMITERS = (",", ";", "\t", "|")
DECLARED_DELIMITER = re.compile(r"sep=([^\w\r\n ]) *[\r\n]*", re.IGNORECASE)  # a first line of Excel
COLUMN_OPTION = "domains.column"  # that names the column of the text, for messages
CHAT_COLUMNS = {"messages", "conversations"}  # of tables of chats, see cpt.data.sources.chats
# Of values of a table for which Python has no object: of texts, of dates beyond its calendar, of the names of
# time zones (KeyError).
CONVERSION_ERRORS = (ValueError, OverflowError, KeyError)
TABLE_ROWS = 100  # rows of a parquet or Arrow file that become Python objects at once

Row = tuple[str, Any]  # the file and line, for messages; the value
Reject = Callable[[ValueError], None]  # is called with the error of a record that cannot be read


class RepeatedKeys(dict[str, Any]):
    """A JSON object in which some keys stand several times; it has the last value of each."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        counts = Counter(key for key, _ in pairs)
        self.repeated = {key for key, count in counts.items() if count > 1}


@dataclass
class Oddities:
    """What was left out of documents, or changed in them, while files were read: how often each, and the
    first file."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)  # names of files

    def add(self, change: str, file: str, count: int = 1) -> None:
        if count:
            self.counts[change] += count
            self.first.setdefault(change, file)

    def describe(self) -> str:
        """All of them for a log line; empty for none."""
        parts = []
        for change, count in self.counts.items():
            parts.append(f"{count_noun(count, change, PLURALS[change])} (first in {self.first[change]})")
        return ", ".join(parts)


class EncodingError(MessageError):
    """A file that is not UTF-8: how that shows, the encoding that it probably has, and further such files."""

    def __init__(self, path: Path, *, reason: str, encoding: str, further_paths: Sequence[Path] = ()) -> None:
        self.path = path
        self.reason = reason
        self.encoding = encoding

        message = f"{path} is not UTF-8: {reason}"
        if further_paths:
            files = count_noun(len(further_paths), "file")
            message += f"; not UTF-8 either: {files} ({format_file_names(further_paths)})"
        command = f"iconv -f {encoding} -t UTF-8 {shlex.quote(path.name)}"
        super().__init__(f"{message}. Allowed: UTF-8, for example by {command}")


def stop(error: ValueError) -> None:
    """Stops at a record that cannot be read."""
    raise error


def read_folder(
    folder: Path,
    name: str,
    *,
    column: str,
    document: str,
    ignored: Callable[[Path], bool] | None = None,
    reject: Reject = stop,
) -> Iterator[tuple[str, str]]:
    """(split, document) of the files of a folder, streamed. A split is what the names of a file and of its
    folders say (wiki.test.txt, train-00000-of-00002.parquet, dev/a), else train. Raises ValueError for a
    file that cannot be read; `reject` is called for each record of a table that cannot."""
    files = find_text_files(folder, ignored=ignored)
    log_files(folder, name, files.text)
    left_out = files.describe_left_out()
    if left_out:
        log.info("Leaving out files of %s: %s", name, left_out)

    # All .txt files of a folder have one unit, whichever file shows it; a Markdown file is a document.
    plain_unit = document
    if document == "auto":
        with naming_misencoded(files.text):
            plain_unit = choose_unit([path for path in files.text if find_suffix(path) == ".txt"])
    oddities = Oddities()
    sizes = [estimate_bytes(path) for path in files.text]
    ends = list(accumulate(sizes))  # of each file, on the progress bar
    with make_progress_bar(
        f"reading {name}", total=ends[-1], unit="B", scale=True, hidden=False, delay=DELAY
    ) as progress:
        for path, end in zip(files.text, ends, strict=True):
            split = find_split(path.relative_to(folder)) or "train"
            unit = "file" if find_suffix(path) == ".md" and document == "auto" else plain_unit
            with naming_file(path), naming_misencoded(files.text):
                for text in read_file_documents(
                    path, column=column, unit=unit, oddities=oddities, reject=reject
                ):
                    progress.update(len(text))
                    yield split, text
            progress.update(end - progress.n)  # sizes are estimates

    changes = oddities.describe()
    if changes:
        log.warning("Reading %s: %s", name, changes)


def estimate_bytes(path: Path) -> int:
    """The size of a file's text; a compressed one is taken as three times its size."""
    size = path.stat().st_size
    return 3 * size if find_compression(path) else size


def log_files(folder: Path, name: str, paths: Sequence[Path]) -> None:
    """Logs the splits of the files, those that are read more than once, and those that look like metadata."""
    log.info(
        "Reading %s of %s: %s", count_noun(len(paths), "file"), name, describe_named_splits(folder, paths)
    )

    real_paths = Counter(path.resolve() for path in paths)
    repeated = [path for path, count in real_paths.items() if count > 1]
    if repeated:
        message = "Reading %s of %s more than once, through links (%s): duplicates are left out"
        log.warning(message, count_noun(len(repeated), "file"), name, format_file_names(repeated))

    about_data = [
        path for path in paths if find_suffix(path) in PLAIN_SUFFIXES and ABOUT_DATA.fullmatch(path.name)
    ]
    if about_data:
        message = "Reading files of %s as text that look like no text of it: %s (%s leaves them out)"
        patterns = [glob.escape(path.name) for path in about_data]
        log.warning(message, name, format_file_names(about_data), format_ignore(patterns))


def choose_unit(paths: Sequence[Path]) -> str:
    """What a document of .txt files is: the file where there are many that are not shards, else what blank
    lines separate in the first lines of the first file that is not empty, else the line."""
    # Many files are documents each, unless they are shards of one file, which say so by their names.
    whole_files = [path for path in paths if not SHARD.search(path.name)]
    if not paths or len(whole_files) >= MIN_ONE_DOCUMENT_FILES:
        if paths:
            log.info("Reading %d .txt files: documents are files (domains.document)", len(paths))
        return "file"

    paragraph_lines: list[int] = []
    for path in paths:
        with naming_file(path):
            paragraph_lines = count_paragraph_lines(islice(read_lines(path), NUM_FIRST_LINES))
        if paragraph_lines:
            break

    # A few blank lines in a long file of one document a line are not separators: their parts would be huge.
    num_paragraphs = len(paragraph_lines)
    num_lines = sum(paragraph_lines)
    is_separated = num_paragraphs > 1 and num_lines <= MAX_LINES_PER_PARAGRAPH * num_paragraphs
    unit = "paragraph" if is_separated else "line"
    folder = paths[0].parent
    if num_paragraphs > 1 and not is_separated:
        log.warning(
            "Reading %s of %s: documents are lines, since of the first %s blank ones "
            "separate only %s (domains.document=paragraph takes these as documents)",
            count_noun(len(paths), ".txt file"),
            folder,
            count_noun(num_lines, "line"),
            count_noun(num_paragraphs, "part"),
        )
    else:
        log.info(
            "Reading %s of %s: documents are %ss (domains.document)",
            count_noun(len(paths), ".txt file"),
            folder,
            unit,
        )
    return unit


def count_paragraph_lines(text: Iterable[str]) -> list[int]:
    """The number of lines of each paragraph, which blank lines separate."""
    counts: list[int] = []
    for is_blank, group in groupby(text, key=str.isspace):
        if not is_blank:
            counts.append(sum(1 for _ in group))
    return counts


def read_file_documents(
    path: Path,
    *,
    column: str,
    unit: str,
    oddities: Oddities,
    reject: Reject = stop,
    column_option: str = COLUMN_OPTION,
) -> Iterator[str]:
    """The documents of a file that are not blank, without byte order marks; `unit` is what a document of a
    .txt or .md file is: file, paragraph or line. `column_option` names the column, for messages."""
    if find_suffix(path) in PLAIN_SUFFIXES:
        texts = split_units(read_lines(path, oddities), unit)
    else:
        rows = read_file_rows(path, columns=[column], oddities=oddities, reject=reject)
        texts = select_column_texts(rows, column, reject, option=column_option)

    are_blank_usual = find_suffix(path) in PLAIN_SUFFIXES  # lines
    yield from clean_documents(texts, path.name, oddities=oddities, counts_blank=not are_blank_usual)


def clean_documents(
    texts: Iterable[str], file: str, *, oddities: Oddities, counts_blank: bool = True
) -> Iterator[str]:
    """The texts of a file that are not blank, without byte order marks."""
    num_documents = 0
    num_blank = 0
    for text in texts:
        oddities.add(REMOVED_MARK, file, text.count(MARK))
        document = text.replace(MARK, "")
        if document and not document.isspace():
            num_documents += 1
            yield document
        else:
            num_blank += 1
    if num_documents == 0:
        oddities.add(NO_DOCUMENT, file)
    if counts_blank:
        oddities.add(BLANK_DOCUMENT, file, num_blank)


def open_packed(path: Path) -> Any:
    """A binary file, decompressed as its suffix says."""
    match find_compression(path):
        case ".zst":
            return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
        case ".gz":
            return gzip.open(path, "rb")
        case ".bz2":
            return io.BufferedReader(PackedStreams(path, bz2.BZ2Decompressor), CHUNK)
        case ".xz":
            return io.BufferedReader(PackedStreams(path, lzma.LZMADecompressor), CHUNK)
    return path.open("rb")


class PackedStreams(io.RawIOBase):
    """All compressed streams of a file, one after another, perhaps with NULs between them.

    bz2.open and lzma.open take a second stream that cannot be read for no part of the file, and end there:
    text of files that were compressed in parallel, or joined, would be missing. Here it is an error."""

    def __init__(
        self, path: Path, make_decompressor: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]
    ) -> None:
        self.make_decompressor = make_decompressor
        self.decompressor = make_decompressor()
        self.file = path.open("rb")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fills the beginning of a buffer and returns the number of bytes, 0 at the end of the file. Raises
        EOFError for a stream that is cut, OSError or LZMAError for other bytes than those of a stream."""
        unpacked = b""
        while not unpacked:
            if self.decompressor.eof:
                packed = self.find_next_stream()
                if not packed:
                    return 0
                self.decompressor = self.make_decompressor()
            elif self.decompressor.needs_input:
                packed = self.file.read(CHUNK)
                if not packed:
                    raise EOFError("the file ends within a compressed stream")
            else:
                packed = b""
            unpacked = self.decompressor.decompress(packed, len(buffer))
        buffer[: len(unpacked)] = unpacked
        return len(unpacked)

    def find_next_stream(self) -> bytes:
        """Bytes from the beginning of the next stream on; none at the end of the file."""
        packed = self.decompressor.unused_data or self.file.read(CHUNK)
        while packed and not packed.strip(b"\0"):
            packed = self.file.read(CHUNK)
        return packed.lstrip(b"\0")


def split_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file, streamed. They end with line feeds, carriage returns or both, which become line
    feeds."""
    pieces: list[bytes] = []  # of a line that is longer than a chunk
    while chunk := file.read(CHUNK):
        while chunk.endswith(b"\r"):  # its line feed may be in the next chunk
            next_byte = file.read(1)
            if not next_byte:
                break
            chunk += next_byte
        # The expression is slower, and most files have line feeds alone.
        parts = LINE_END.split(chunk) if b"\r" in chunk else chunk.split(b"\n")
        for part in parts[:-1]:
            pieces.append(part)
            yield b"".join([*pieces, b"\n"])
            pieces = []
        pieces.append(parts[-1])
    last = b"".join(pieces)
    if last:
        yield last


def read_lines(path: Path, oddities: Oddities | None = None) -> Iterator[str]:
    """Yields the lines of a file, which may be compressed, without byte order marks at their beginnings.

    Raises ValueError for a file that is not UTF-8; for control characters, which binary files, UTF-16 and
    files that were not written to their end (NUL) have; and for a pointer of Git LFS."""
    num_marks = 0
    with explaining_zstd(path), open_packed(path) as file:
        for number, line in enumerate(split_lines(file), start=1):
            if number == 1:
                refuse_pointer(path, line)
            refuse_binary(path, number, line)
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                position = f"line {number}, byte {error.start + 1} ({error.reason})"
                raise EncodingError(path, reason=position, encoding="WINDOWS-1252") from error
            # Files that were joined have marks at the beginnings of lines.
            if text.startswith(MARK):
                if number > 1:  # that of the whole file is usual
                    num_marks += 1
                text = text.lstrip(MARK)
            if text:
                yield text
    if oddities is not None:
        oddities.add(REMOVED_MARK, path.name, num_marks)


@contextmanager
def naming_misencoded(paths: Sequence[Path]) -> Iterator[None]:
    """Inside the context an EncodingError names all .txt and .md files among `paths` that are not UTF-8 by
    their first lines, so that they are converted at once."""
    try:
        yield
    except EncodingError as error:
        plain_paths = [path for path in paths if find_suffix(path) in PLAIN_SUFFIXES and path != error.path]
        further_paths = [path for path in plain_paths if has_other_encoding(path)]
        raise EncodingError(
            error.path, reason=error.reason, encoding=error.encoding, further_paths=further_paths
        ) from error


def check_encodings(paths: Sequence[Path]) -> None:
    """Raises EncodingError where one of the first .txt and .md files is not UTF-8 by its first lines, and
    ValueError where it is damaged: found before a run loads its libraries, and at once also where there are a
    million files."""
    plain_paths = [path for path in paths if find_suffix(path) in PLAIN_SUFFIXES]
    with naming_misencoded(plain_paths):
        for path in plain_paths[:NUM_CHECKED_FILES]:
            with naming_file(path):
                read_first_lines(path)


def read_first_lines(path: Path) -> None:
    """Raises ValueError for a file whose first lines are not UTF-8, or no text."""
    for _ in islice(read_lines(path), NUM_FIRST_LINES):
        pass


def has_other_encoding(path: Path) -> bool:
    """Whether the first lines of a file show that it is not UTF-8."""
    try:
        read_first_lines(path)
    except EncodingError:
        return True
    except (ValueError, OSError):  # damage of another kind has its own message
        return False
    return False


@contextmanager
def explaining_zstd(path: Path) -> Iterator[None]:
    """Inside the context the error of a zstd frame whose window is larger than decoders allow
    (`zstd --long=28` or more) says what to do."""
    try:
        yield
    except OSError as error:
        if "too much memory" not in str(error):
            raise
        raise ValueError(
            f"{path} cannot be read: its zstd window is over 128 MiB. "
            f"Allowed: zstd -d --long=31 {shlex.quote(path.name)}, then compress it without --long"
        ) from error


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raises ValueError for a file that git-lfs has not downloaded."""
    if beginning.startswith(LFS_POINTER):
        raise ValueError(f"{path} is a pointer of Git LFS, not the file. Allowed: the file (git lfs pull)")


def refuse_binary(path: Path, number: int, line: bytes) -> None:
    """Raises ValueError for a line with control characters as only binary files have them."""
    text = line.translate(None, CONTROL_BYTES)
    if len(text) == len(line):
        return
    # UTF-16 has NULs at every other byte of Latin text; UTF-32 and a tail of NULs also have them between.
    fewer_zeros, more_zeros = sorted((line[::2].count(0), line[1::2].count(0)))
    if len(line) > 3 and 4 * more_zeros > len(line) > 16 * fewer_zeros and text.strip():
        raise EncodingError(path, reason="it looks like UTF-16", encoding="UTF-16")
    num_control = count_binary_control(line)
    if num_control > 0:
        raise ValueError(
            f"{path}, line {number} has {count_noun(num_control, 'NUL')} or other control characters: "
            "it is damaged or no text. Allowed: text in UTF-8"
        )


def count_binary_control(text: bytes) -> int:
    """How many control characters a text has that is no text: only binary files have such a share of them, or
    it has nothing else. 0 for other texts."""
    visible = text.translate(None, CONTROL_BYTES)
    num_control = len(text) - len(visible)
    is_many = num_control >= MIN_CONTROL_BYTES and num_control > MAX_CONTROL_SHARE * len(text)
    return num_control if is_many or not visible.strip() else 0


def split_units(text: Iterator[str], unit: str) -> Iterator[str]:
    """Lines of text joined to what a document is."""
    if unit == "line":
        return (line.rstrip("\n") for line in text)
    if unit == "file":
        return iter(["".join(text)])
    return ("".join(group).rstrip("\n") for blank, group in groupby(text, key=str.isspace) if not blank)


def read_file_rows(
    path: Path,
    *,
    columns: Sequence[str] = (),
    oddities: Oddities | None = None,
    reject: Reject = stop,
) -> Iterator[Row]:
    """The rows of a file of any kind but plain text; those of parquet and Arrow files with only `columns`
    if they are given and all there."""
    match find_suffix(path):
        case ".parquet":
            return number_rows(path, read_parquet_batches(path, columns), reject)
        case ".arrow":
            return number_rows(path, read_arrow_batches(path, columns), reject)
        case ".csv" | ".tsv":
            return read_csv_rows(path, columns=columns, oddities=oddities, reject=reject)
    return read_json_rows(path, oddities=oddities, reject=reject)


def parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, which remembers keys that stand there twice."""
    values = dict(pairs)
    return values if len(values) == len(pairs) else RepeatedKeys(pairs)


DECODER = json.JSONDecoder(object_pairs_hook=parse_object)


def read_json_rows(path: Path, *, oddities: Oddities | None = None, reject: Reject = stop) -> Iterator[Row]:
    """The values of a file with one on each line, or with a single array of them. `reject` is called for a
    line that is not JSON; a damaged array is always an error."""
    numbered = enumerate(read_lines(path, oddities), start=1)
    lines = ((number, line) for number, line in numbered if line.strip())
    first = next(lines, None)
    if first is None:
        return
    first_number, first_line = first
    further_lines: Iterable[tuple[int, str]] = lines
    if first_line.lstrip().startswith("["):
        # An array may be on any number of lines, so all of it is read before the first value.
        further_lines = list(lines)
        has_array_on_each_line = bool(further_lines) and is_json(first_line)
        if not has_array_on_each_line:
            array = "".join([first_line, *(line for _, line in further_lines)])
            for position, value in enumerate(parse_json(array, path, first_number), start=1):
                yield f"{path}, value {position}", value
            return

    for number, line in chain([first], further_lines):
        try:
            value = parse_json(line, path, number)
        except ValueError as error:
            reject(error)
            continue
        yield f"{path}, line {number}", value


def is_json(text: str) -> bool:
    """Whether a text is a whole JSON value."""
    try:
        DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def parse_json(text: str, path: Path, number: int) -> Any:
    """A JSON value that begins at a line. Raises ValueError that names the file and the line."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise ValueError(
            f"{path}, line {number} is not JSON: {getattr(error, 'msg', error)}. "
            "Allowed: a value on each line, or one array of values"
        ) from error


def read_csv_rows(
    path: Path,
    *,
    columns: Sequence[str] = (),
    oddities: Oddities | None = None,
    reject: Reject = stop,
) -> Iterator[Row]:
    """The rows of a file whose first line names the columns, separated by commas, semicolons, tabs or bars. A
    row that repeats the names, as in files that were joined, is left out. Raises ValueError for a name that
    occurs twice."""
    # The module's own limit is shorter than documents are. It is that of the process, and stays: several
    # files may be read in turn, and the first to end would restore it for the others.
    csv.field_size_limit(2**31 - 1)
    text = read_lines(path, oddities)
    first_line = next(text, "")
    delimiter = choose_delimiter(first_line, columns)
    declared = DECLARED_DELIMITER.fullmatch(first_line)
    if declared is not None:  # a blank line in its place keeps the numbers of the others
        delimiter = declared[1]
        first_line = "\n"
    reader = csv.reader(chain([first_line], text), delimiter=delimiter, strict=True)
    rows = read_table_rows(path, reader)
    header = next(rows, [])
    # Columns without a name are those of delimiters at the ends of lines, and none of them is asked for.
    names = [name for name in header if name]
    if len({*names}) < len(names):
        raise ValueError(f"{path} has a column twice: {', '.join(header)}. Allowed: each name once")

    # Files that were joined have their header several times.
    num_repeated = 0
    num_columns = len(header)
    for row in rows:
        position = f"{path}, line {reader.line_num}"
        if row == header:
            num_repeated += 1
        elif len(row) != num_columns:
            value_count = count_noun(len(row), "value")
            message = f"{position} has {value_count}. Allowed: {num_columns}, as many as there are names"
            reject(ValueError(message))
        else:
            yield position, dict(zip(header, row, strict=True))
    if oddities is not None:
        oddities.add(REPEATED_HEADER, path.name, num_repeated)


def read_table_rows(path: Path, reader: Any) -> Iterator[list[str]]:
    """The rows that a reader of `csv` gives, without blank lines. Raises ValueError, with the lines of the
    row, for quotes that do not go with the rest of it."""
    begin = reader.line_num + 1
    try:
        for row in reader:
            begin = reader.line_num + 1
            if row:
                yield row
    except csv.Error as error:
        end = reader.line_num
        lines = f"line {end}" if begin >= end else f"lines {begin} to {end}"
        raise ValueError(
            f"{path}, {lines} cannot be read as a row ({error}). "
            'Allowed: texts with delimiters or line ends in quotes, each quote within them twice: "a ""b"" c"'
        ) from error


def choose_delimiter(first_line: str, columns: Sequence[str]) -> str:
    """The delimiter of a table by its names: one that gives the `columns`, else the one that gives most
    names; the comma before others."""
    names = {delimiter: next(csv.reader([first_line], delimiter=delimiter), []) for delimiter in DELIMITERS}
    for delimiter in DELIMITERS:
        if columns and set(columns) <= set(names[delimiter]):
            return delimiter
    return max(DELIMITERS, key=lambda delimiter: len(names[delimiter]))


def choose_columns_to_read(path: Path, names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """The columns of a table that are read: those that are asked for if they are there, else all. Raises
    ValueError for one that stands there twice."""
    is_complete = bool(columns) and set(columns) <= set(names)
    chosen = list(columns) if is_complete else list(names)
    for name in chosen:
        if names.count(name) > 1:
            raise ValueError(f"{path} has a column twice: {', '.join(names)}. Allowed: each name once")
    return chosen


def read_parquet_batches(path: Path, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """The rows of a parquet file, TABLE_ROWS at once."""
    with path.open("rb") as file:
        refuse_pointer(path, file.read(len(LFS_POINTER)))
    with pq.ParquetFile(path) as table:
        chosen = choose_columns_to_read(path, table.schema_arrow.names, columns)
        yield from table.iter_batches(batch_size=TABLE_ROWS, columns=chosen)


def read_arrow_batches(path: Path, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """The rows of an Arrow file, in the format of streams, which `datasets` writes, or of files, TABLE_ROWS
    at once."""
    with path.open("rb") as file:
        beginning = file.read(len(LFS_POINTER))
    refuse_pointer(path, beginning)
    with pa.memory_map(str(path)) as mapped:
        for batch in read_stored_batches(mapped, is_file=beginning.startswith(b"ARROW1")):
            chosen = choose_columns_to_read(path, batch.schema.names, columns)
            selected = batch.select(chosen)
            for begin in range(0, len(selected), TABLE_ROWS):
                yield selected.slice(begin, TABLE_ROWS)


def read_stored_batches(file: pa.NativeFile, *, is_file: bool) -> Iterator[pa.RecordBatch]:
    """The record batches of an Arrow file or stream."""
    if is_file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from pa.ipc.open_stream(file)


def number_rows(path: Path, batches: Iterable[pa.RecordBatch], reject: Reject) -> Iterator[Row]:
    """The rows of a table; `reject` is called for one with a text that is not UTF-8, or with another value
    that Python has no object for."""
    num_before = 0
    for batch in batches:
        # Converting a batch at once is fast. If one of its values cannot be converted, the rows are converted
        # one by one to find it.
        try:
            rows = batch.to_pylist()
        except CONVERSION_ERRORS:
            rows = [read_batch_row(batch, index) for index in range(len(batch))]
        for number, row in enumerate(rows, start=num_before + 1):
            position = f"{path}, row {number}"
            if isinstance(row, Exception):
                reject(ValueError(f"{position} {describe_conversion_error(row)}"))
            else:
                yield position, row
        num_before += len(batch)


def read_batch_row(batch: pa.RecordBatch, index: int) -> dict[str, Any] | Exception:
    """A row of a table; the error if it cannot be converted."""
    try:
        (row,) = batch.slice(index, 1).to_pylist()
    except CONVERSION_ERRORS as error:
        return error
    return row


def describe_conversion_error(error: Exception) -> str:
    """What a row that cannot be converted has: a text, or a date, since nothing else has such values."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: {error.reason}. Allowed: text in UTF-8"
    return (
        f"has a date that cannot be read: {error}. "
        "Allowed: years 1 to 9999 and known time zones, or a table without this column"
    )


def select_texts(rows: Iterable[Row], column: str) -> Iterator[str]:
    """The text column of rows; empty values are passed over."""
    return (text for text in select_column_texts(rows, column) if text and not text.isspace())


def select_column_texts(
    rows: Iterable[Row], column: str, reject: Reject = stop, *, option: str = COLUMN_OPTION
) -> Iterator[str]:
    """The text column of rows, empty for null; `reject` is called for a row without one. `option` is the one
    that names the column, for messages."""
    for position, row in rows:
        try:
            text = parse_text(position, column, read_cell(row, column, position, option)) or ""
            refuse_control(position, column, text)
        except ValueError as error:
            reject(error)
            continue
        yield text


def refuse_control(where: str, column: str, text: str) -> None:
    """Raises ValueError for a text with control characters as only binary files have them, like the bytes of
    a PDF that was exported as text."""
    num_control = count_binary_control(text.encode(errors="replace"))
    if num_control > 0:
        characters = count_noun(num_control, "control character")
        raise ValueError(f"{where}: column {column!r} has {characters}: it is no text. Allowed: text")


def read_cell(row: Any, column: str, where: str, option: str) -> Any:
    """The value of a column. Raises ValueError, with the option to change, for a column that is missing or
    twice in the row."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{where} has no column {column!r}; it has {row!r:.60} ({option})")
    if column not in row:
        raise missing_column_error(row, column, where, option)
    if isinstance(row, RepeatedKeys) and column in row.repeated:
        raise ValueError(f"{where} has the column {column!r} twice. Allowed: each name once")
    return row[column]


def missing_column_error(row: Mapping[Any, Any], column: str, where: str, option: str) -> ValueError:
    """The error of a row without a column, with the names that it has and the most similar one, or with what
    reads chats where it has one."""
    names = [str(name) for name in row]
    message = f"{where} has no column {column!r}; it has {', '.join(names)} ({option})"
    similar = find_similar_name(column, names)
    if similar:
        message += f". Did you mean {similar}?"
    elif CHAT_COLUMNS & set(names):
        message += ". Chats are read by domains=instructions, and by format=messages of replay.sources"
    return ValueError(message)


def find_similar_name(name: str, names: Sequence[str]) -> str | None:
    """The most similar of some names, whatever their case; None for none."""
    by_folded = {candidate.strip().casefold(): candidate for candidate in names}
    similar = difflib.get_close_matches(name.strip().casefold(), by_folded, n=1)
    return by_folded[similar[0]] if similar else None


def parse_text(where: str, column: str, value: Any) -> str | None:
    """A text; None for null and blanks. Raises ValueError for anything else."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} is not text: {value!r:.60}")
    return value if value and not value.isspace() else None
