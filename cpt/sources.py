"""Where the text of the domains comes from. A source lists its domains and reads one by documents."""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from cpt import docstrings
from cpt.config import digest
from cpt.files import (
    SPLITS,
    UNITS,
    Row,
    cause,
    documents_of,
    files_of,
    reading,
    split_of,
    stamps,
    text_size,
    texts_of,
    unit_of,
)

log = logging.getLogger(__name__)

GENERAL = "general"
ENDTASKS = "endtasks"  # a folder of labelled examples (conf/endtask), which may lie among the domains
GENERAL_PACKAGES = ("stdlib", "numpy")
ENTRY = {"path", "name", "splits"}
FORMAT = 2  # part of every stamp: raise it when the files that cpt.corpus makes of a text change


class Source(ABC):
    """Domains by name, each a stream of (split, document); `held_out` says what is split off where a source
    is not split: the shares of valid and test documents and the seed; `most` bounds the documents of either.
    `score_on` is the split that the matrix is made of."""

    def __init__(
        self, *, orders: Sequence[Sequence[str]] | None, held_out: Mapping[str, float], score_on: str
    ) -> None:
        if score_on not in ("valid", "test"):
            raise ValueError(f"domains.score_on={score_on}; allowed: valid, test")
        if not (0 < held_out["valid"] < 0.5 and 0 < held_out["test"] < 0.5):
            raise ValueError(f"domains.held_out={dict(held_out)}; allowed: shares above 0 and below 0.5")
        most = held_out.get("most")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"domains.held_out.most={most}; allowed: null, or 1 document or more")
        self.orders, self.held_out, self.score_on = orders, held_out, score_on

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The domains that can be learned."""

    def check(self, order: Sequence[str]) -> None:  # noqa: B027  (most sources have nothing to check)
        """Raises ValueError for text of these domains, or general text, that cannot be read as it is meant,
        as far as that is known at once."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


def stamp_of(source: Source, name: str) -> str:
    """What a domain's text is known by without reading it: sizes, times, and how it is split."""
    return f"{name}-{digest([FORMAT, source.fingerprint(name), dict(source.held_out)])}"


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
        self,
        *,
        root: str,
        folder: str,
        column: str,
        document: str,
        general: str | None,
        ignore: Sequence[str] = (),
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if document not in (*UNITS, "auto"):
            raise ValueError(f"domains.document={document}; allowed: {', '.join(UNITS)}, auto")
        if isinstance(ignore, str) or not all(isinstance(each, str) for each in ignore or ()):
            raise ValueError(f"domains.ignore={ignore}; allowed: a list of names or patterns, like [README*]")
        self.root, self.column, self.document, self.general = Path(root), column, document, general
        self.corpora, self.patterns = self.root / folder, tuple(ignore or ())
        if not self.corpora.is_dir():
            raise ValueError(f"domains.root={root}: there is no folder {self.corpora}")
        if not self.names:
            raise ValueError(f"{self.corpora} has no sub-folder; each would be a domain")
        if general not in (None, GENERAL) and self.folder(GENERAL) is None:
            raise ValueError(f"domains.general={general}: there is no folder {self.root / general}")

    @cached_property
    def names(self) -> list[str]:
        with reading(self.corpora):
            others = (self.general, ENDTASKS)
            return sorted(path.name for path in self.beside() if path.is_dir() and path.name not in others)

    def beside(self) -> Iterator[Path]:
        """What lies where the domains' folders are, but for what is hidden or ignored."""
        return (path for path in self.corpora.iterdir() if path.name[0] != "." and not self.ignored(path))

    def ignored(self, path: Path) -> bool:
        """Whether a pattern is for a path below root, or for the name of a folder that it is in."""
        inner = os.path.relpath(path, self.root)
        names = (*inner.split(os.sep), inner)
        return any(fnmatch(name, pattern) for pattern in self.patterns for name in names)

    def check(self, order: Sequence[str]) -> None:
        for folder in filter(None, map(self.folder, (*order, GENERAL))):
            for path in files_of(folder, ignored=self.ignored):
                if not os.access(path, os.R_OK):
                    raise ValueError(f"{path} cannot be read: permission denied")
        if loose := sorted(path.name for path in self.beside() if not path.is_dir()):
            log.info("%s: %s: in no domain's folder and not read", self.corpora, ", ".join(loose[:5]))

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        folder = self.folder(name)
        if folder is None:
            yield from installed(GENERAL_PACKAGES)
            return
        files = files_of(folder, ignored=self.ignored)
        unit = unit_of(files) if self.document == "auto" else self.document
        with bar(name, total=sum(map(text_size, files)), unit="B") as progress:
            for path, end in zip(files, accumulate(map(text_size, files)), strict=True):
                split = split_of(path, folder)
                for text in documents_of(path, column=self.column, unit=unit):
                    progress.update(len(text))
                    yield split, text
                progress.update(end - progress.n)

    def fingerprint(self, name: str) -> Any:
        folder = self.folder(name)
        if folder is None:
            return installation(GENERAL_PACKAGES)
        return [self.column, self.document, stamps(files_of(folder, ignored=self.ignored))]

    def folder(self, name: str) -> Path | None:
        """The folder of a domain's files; None for general text that is not there."""
        if name != GENERAL:
            return self.corpora / name
        folder = self.root / self.general if self.general else None
        return folder if folder is not None and folder.exists() and not self.ignored(folder) else None


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
            total = None if self.streaming else len(rows)
            shown = bar(f"{path} ({name})", total=total, unit=" rows", iterable=rows)
            yield split, ((f"{path} ({name})", row) for row in shown)

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


def bar(name: str, **options: Any) -> tqdm:
    """The progress of reading a text, with the time left where its size is known."""
    return tqdm(desc=f"reading {name}", unit_scale=True, disable=None, leave=False, **options)


def installed(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    return (("train", document) for document in docstrings.documents(packages))


def installation(packages: Sequence[str]) -> Any:
    return stamps(path for package in packages for path in docstrings.modules(package))
