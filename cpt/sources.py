"""Where the text of the domains comes from. A source lists its domains and reads one by documents."""

import csv
import gzip
import json
import logging
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cpt import docstrings

log = logging.getLogger(__name__)

GENERAL = "general"
GENERAL_PACKAGES = ("stdlib", "numpy")
KINDS = (".txt", ".jsonl", ".json", ".csv", ".parquet")
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("valid", "validation", "dev", "val"), "valid")}
SPLIT_NAME = re.compile(rf"({'|'.join(SPLITS)})([-_]\d+(-of-\d+)?)?", re.IGNORECASE)
UNITS = ("file", "paragraph", "line")
MANY_FILES, FIRST_LINES = 20, 10_000
ROWS_AT_ONCE = 100
ENTRY = {"path", "name", "splits"}

Row = tuple[str, Any]  # where it stands, what stands there


class Source(ABC):
    """Domains by name, each a stream of (split, document); `held_out` says what is split off where a source
    is not split: the shares of valid and test documents and the seed. `score_on` is the split that the matrix
    is made of."""

    def __init__(
        self, *, orders: Sequence[Sequence[str]] | None, held_out: Mapping[str, float], score_on: str
    ) -> None:
        if score_on not in ("valid", "test"):
            raise ValueError(f"domains.score_on={score_on}; allowed: valid, test")
        if not (0 < held_out["valid"] < 0.5 and 0 < held_out["test"] < 0.5):
            raise ValueError(f"domains.held_out={dict(held_out)}; allowed: shares above 0 and below 0.5")
        self.orders, self.held_out, self.score_on = orders, held_out, score_on

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The domains that can be learned."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


class InstalledDocs(Source):
    """Prose of the docstrings of installed packages, one document per module."""

    def __init__(
        self, *, packages: Mapping[str, Sequence[str]], general: Sequence[str], **shared: Any
    ) -> None:
        super().__init__(**shared)
        self.packages = {**{name: list(each) for name, each in packages.items()}, GENERAL: list(general)}

    @property
    def names(self) -> list[str]:
        return [name for name in self.packages if name != GENERAL]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        return installed(self.packages[name])

    def fingerprint(self, name: str) -> Any:
        return installation(self.packages[name])


class Texts(Source):
    """Sub-folders of text files. `document` says what a document of a .txt file is; `auto` takes the file
    where a domain has at least 20, else what blank lines separate, else (no blank line among the first 10,000
    of the first file) the line."""

    def __init__(
        self, *, root: str, folder: str, column: str, document: str, general: str | None, **shared: Any
    ) -> None:
        super().__init__(**shared)
        if document not in (*UNITS, "auto"):
            raise ValueError(f"domains.document={document}; allowed: {', '.join(UNITS)}, auto")
        self.root, self.column, self.document, self.general = Path(root), column, document, general
        self.corpora = self.root / folder
        if not self.corpora.is_dir():
            raise ValueError(f"domains.root={root}: there is no folder {self.corpora}")
        if not self.names:
            kinds = " ".join(KINDS)
            raise ValueError(f"{self.corpora} has no sub-folder with {kinds} files; each would be a domain")
        if general not in (None, GENERAL) and self.folder(GENERAL) is None:
            raise ValueError(
                f"domains.general={general}: there are no {' '.join(KINDS)} files in {self.root / general}"
            )

    @property
    def names(self) -> list[str]:
        folders = (path for path in self.corpora.iterdir() if path.is_dir() and not path.name.startswith("."))
        return sorted(path.name for path in folders if path.name != self.general and files_of(path))

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        folder = self.folder(name)
        if folder is None:
            yield from installed(GENERAL_PACKAGES)
            return
        files = files_of(folder)
        unit = unit_of(files) if self.document == "auto" else self.document
        for path in files:
            split = split_of(path, folder)
            yield from ((split, text) for text in documents_of(path, column=self.column, unit=unit))

    def fingerprint(self, name: str) -> Any:
        folder = self.folder(name)
        if folder is None:
            return installation(GENERAL_PACKAGES)
        return [self.column, self.document, stamps(files_of(folder))]

    def folder(self, name: str) -> Path | None:
        """The folder of a domain's files; None for general text that is not there."""
        if name != GENERAL:
            return self.corpora / name
        folder = self.root / self.general if self.general else None
        return folder if folder is not None and folder.is_dir() and files_of(folder) else None


class Hub(Source):
    """Data sets of the Hugging Face hub, or local ones, one per domain: `catalogue[name]` has `path`, and
    optionally `name` (the configuration) and `splits` (which of the data set's splits to read as train, valid
    and test)."""

    def __init__(
        self,
        *,
        catalogue: Mapping[str, Mapping[str, Any]],
        column: str,
        streaming: bool,
        general: str | None,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.catalogue = {name: dict(entry) for name, entry in catalogue.items()}
        self.column, self.streaming, self.general = column, streaming, general
        if not self.names:
            raise ValueError("domains=hub needs a catalogue, like '+domains.catalogue.news={path: ag_news}'")
        for name, entry in self.catalogue.items():
            check_entry(name, entry)
        if general not in (None, *self.catalogue):
            raise ValueError(f"domains.general={general}; allowed: null, {', '.join(self.catalogue)}")

    @property
    def names(self) -> list[str]:
        return [name for name in self.catalogue if name != self.general]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        entry = self.entry(name)
        if entry is None:
            yield from installed(GENERAL_PACKAGES)
            return
        from datasets.exceptions import DatasetsError

        try:
            for split, rows in self.rows(entry):
                yield from ((split, text) for text in texts_of(rows, self.column))
        except (DatasetsError, OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ValueError(f"domains.catalogue.{name}, path={entry['path']}: {cause(error)}") from error

    def rows(self, entry: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[Row]]]:
        """Each split of a data set with its rows."""
        from datasets import get_dataset_split_names, load_dataset

        path, config = entry["path"], entry.get("name")
        theirs = get_dataset_split_names(path, config)
        chosen = entry.get("splits") or {SPLITS[each]: each for each in theirs if each in SPLITS}
        if not chosen:
            raise ValueError(
                f"{path} has the splits {', '.join(theirs)}; allowed: {', '.join(SPLITS)}, "
                "or to say which to read, like splits={train: all}"
            )
        for split, name in chosen.items():
            rows = load_dataset(path, config, split=name, streaming=self.streaming)
            yield split, ((f"{path} ({name})", row) for row in rows)

    def fingerprint(self, name: str) -> Any:
        entry = self.entry(name)
        if entry is None:
            return installation(GENERAL_PACKAGES)
        local = Path(entry["path"])
        return [self.column, entry, stamps(each for each in sorted(local.rglob("*")) if each.is_file())]

    def entry(self, name: str) -> dict[str, Any] | None:
        return self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]


def check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises ValueError for an entry of a hub's catalogue that cannot be read as it is meant."""
    splits = set(entry.get("splits") or ())
    if "path" not in entry or not set(entry) <= ENTRY or not splits <= set(SPLITS.values()):
        raise ValueError(
            f"domains.catalogue.{name}={dict(entry)}; allowed: path, and optionally name and splits, "
            "like {path: lex_glue, name: ecthr_a, splits: {train: train, valid: validation, test: test}}"
        )


def cause(error: BaseException) -> str:
    """What an error goes back to, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def installed(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    return (("train", document) for document in docstrings.documents(packages))


def installation(packages: Sequence[str]) -> Any:
    return stamps(path for package in packages for path in docstrings.modules(package))


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Files with their sizes and times: other values, other text."""
    stats = ((path, path.stat()) for path in files)
    return [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def files_of(folder: Path) -> list[Path]:
    """The text files below a folder, in the order they are read; no hidden ones."""
    found = (path for path in folder.rglob("*") if kind(path) in KINDS and path.is_file())
    return sorted(
        path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)
    )


def split_of(path: Path, folder: Path) -> str:
    """The split that a file's name or a folder it is in says (test.txt, train-00000-of-00002.parquet, dev/a);
    train where they say nothing."""
    said = (SPLIT_NAME.fullmatch(part.split(".")[0]) for part in path.relative_to(folder).parts)
    return next((SPLITS[match[1].lower()] for match in said if match), "train")


def unit_of(files: Sequence[Path]) -> str:
    """What `document=auto` means for these files."""
    texts = [path for path in files if kind(path) == ".txt"]
    if len(texts) >= MANY_FILES or not texts:
        return "file"
    paragraphs = units(islice(lines(texts[0]), FIRST_LINES), "paragraph")
    unit = "paragraph" if len(list(islice(paragraphs, 2))) > 1 else "line"
    log.info("%s: %d .txt files, a document is a %s (domains.document)", texts[0].parent, len(texts), unit)
    return unit


def documents_of(path: Path, *, column: str, unit: str) -> Iterator[str]:
    """The documents of a file, streamed; ValueError if it cannot be read, or not as what its name says."""
    rows = {".csv": csv_rows, ".jsonl": json_rows, ".json": json_rows}
    try:
        if kind(path) == ".txt":
            yield from (text for text in units(lines(path), unit) if text and not text.isspace())
        elif kind(path) == ".parquet":
            yield from texts_of(parquet_rows(path, column), column)
        else:
            yield from texts_of(rows[kind(path)](path), column)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason}") from error
    except (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {cause(error)}") from error


def lines(path: Path) -> Iterator[str]:
    """The lines of a file, ended by line feeds; ValueError for one that is not UTF-8."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"line {number}, byte {error.start + 1}"
                raise ValueError(f"{path} is not UTF-8: {where} ({error.reason})") from error
            yield text[:-2] + "\n" if text.endswith("\r\n") else text


def units(text: Iterator[str], unit: str) -> Iterator[str]:
    """Lines of text joined to what a document is."""
    if unit == "line":
        return (line.rstrip("\n") for line in text)
    if unit == "file":
        return iter(["".join(text)])
    return ("".join(group).rstrip("\n") for blank, group in groupby(text, key=str.isspace) if not blank)


def json_rows(path: Path) -> Iterator[Row]:
    """The values of a file with one on each line, or with a single array of them."""
    text = enumerate(lines(path), start=1)
    for number, line in text:
        try:
            if number == 1 and line.lstrip().startswith("["):
                whole = json.loads("".join([line, *(rest for _, rest in text)]))
                yield from ((f"{path}, value {place}", row) for place, row in enumerate(whole, start=1))
            elif not line.isspace():
                yield f"{path}, line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number} is not JSON: {error.msg} (column {error.colno})"
            ) from error


def csv_rows(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the module's own limit is shorter than documents are
    reader = csv.reader(lines(path), strict=True)
    header = next(reader, [])
    for row in filter(None, reader):
        where = f"{path}, line {reader.line_num}"
        if len(row) != len(header):
            raise ValueError(
                f"{where} has {len(row)} values; allowed: {len(header)}, as many as there are names"
            )
        yield where, dict(zip(header, row, strict=True))


def parquet_rows(path: Path, column: str) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        wanted = [column] if column in names else names
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=wanted):
            yield from ((str(path), row) for row in batch.to_pylist())


def texts_of(rows: Iterable[Row], column: str) -> Iterator[str]:
    """The text column of rows; empty values are passed over."""
    for where, row in rows:
        if not isinstance(row, Mapping) or column not in row:
            has = ", ".join(row) if isinstance(row, Mapping) else f"{row!r:.60}"
            raise ValueError(f"{where} has no column {column!r}; it has {has} (domains.column)")
        if row[column] is not None and not isinstance(row[column], str):
            raise ValueError(f"{where}: column {column!r} is not text: {row[column]!r:.60}")
        if row[column] and not row[column].isspace():
            yield row[column]
