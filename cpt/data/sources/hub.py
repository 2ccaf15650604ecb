"""Domains in data sets of the Hugging Face hub, or in local copies of them."""

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from cpt.core.options import option
from cpt.core.rules import MAPPING, TEXT, YES_NO, is_list, is_text, or_null, show
from cpt.data.sources.base import GENERAL, Followed, Reading, Source
from cpt.data.sources.docstrings import read_general, stamp_general
from cpt.data.sources.readers import SPLITS, Row, cause, stamps, texts_of
from cpt.data.sources.texts import reading_bar

log = logging.getLogger(__name__)
ENTRY = {"path", "name", "data_files", "splits", "column"}
SAVED = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` has written


@dataclass
class At:
    """Where a reading of a data set stands: how many of its splits are read, and how far the next is."""

    split: int = 0
    begun: Any = None  # what `tell` has told of the rows: how many, or the state of a stream
    rows: Any = None
    count: int = 0
    told: bool = False

    def follow(self, progress: tqdm) -> Iterator[Any]:
        """The rows behind those that are read."""
        self.count = 0
        if self.begun is not None:
            self.count = self.begun["rows"]
            progress.update(self.count)
            if "state" in self.begun:
                self.rows.load_state_dict(self.begun["state"])
            else:
                self.rows = self.rows.select(range(self.count, len(self.rows)))
        for row in self.rows:
            self.count += 1
            progress.update()
            yield row

    def tell(self) -> Any:
        """The place as JSON; None, and a line, where a stream tells none."""
        if not hasattr(self.rows, "load_state_dict"):
            return [self.split, {"rows": self.count}]
        try:
            state = self.rows.state_dict()
            if json.loads(json.dumps(state)) == state:
                return [self.split, {"rows": self.count, "state": state}]
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            pass
        if not self.told:
            log.info("this data set tells no place in its rows: a reading of it that is killed begins anew")
        self.told = True
        return None


def count_rows(rows: Any, name: str) -> int | None:
    """How many rows there are, as far as a data set knows before they are read."""
    if hasattr(rows, "__len__"):
        return len(rows)
    splits = getattr(rows.info, "splits", None) or {}
    return splits[name].num_examples or None if name in splits else None


@dataclass(frozen=True, kw_only=True)
class Hub(Source, Followed):
    """Data sets of the Hugging Face Hub, or local ones, one per domain: `catalogue[name]` has `path` (also a
    folder of `save_to_disk`), and optionally `name` (the configuration), `data_files` (of path=json or
    parquet: a file, a pattern, a list of such, or one of these for each split), `splits` (which of the data
    set's splits to read as train, valid and test) and `column` (of the text, if not that of the others)."""

    catalogue: Mapping[str, Mapping[str, Any]] = option(
        "each domain's data set: {path, name, data_files, splits, column}, as datasets.load_dataset takes "
        "them; path may be a folder of save_to_disk",
        MAPPING,
    )
    column: str = option("the column of the text", TEXT)
    streaming: bool = option("rows are fetched while they are read", YES_NO)
    general: str | None = option(
        "a name of the catalogue; null: prose of the standard library and numpy", or_null(TEXT)
    )

    def check_together(self) -> None:
        super().check_together()
        if not self.names:
            raise ValueError("catalogue names no domain; needed: '+domains.catalogue.news={path: ag_news}'")
        for name, entry in self.catalogue.items():
            check_entry(name, entry)
        if self.general not in (None, *self.catalogue):
            raise ValueError(f"general={self.general}; allowed: null, {', '.join(self.catalogue)}")

    @property
    def names(self) -> list[str]:
        return [name for name in self.catalogue if name != self.general]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        return self.read_on(name)

    def read_on(self, name: str, place: Any = None) -> Reading:
        entry = self.entry(name)
        if entry is None:
            return Reading(read_general())
        at = At(*(place or (0, None)))
        return Reading(self.follow(name, entry, at), at.tell)

    def follow(self, name: str, entry: Mapping[str, Any], at: At) -> Iterator[tuple[str, str]]:
        """The documents of a data set from a place on, which is kept up to date."""
        from datasets.exceptions import DatasetsError

        try:
            for split, rows in self.rows(entry, at):
                yield from ((split, text) for text in texts_of(rows, entry.get("column", self.column)))
        except (DatasetsError, OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ValueError(f"domains.catalogue.{name}, path={entry['path']}: {cause(error)}") from error

    def rows(self, entry: Mapping[str, Any], at: At) -> Iterator[tuple[str, Iterator[Row]]]:
        """Each split of a data set with its rows, from a place on."""
        path = entry["path"]
        theirs, load = open_set(entry, streaming=self.streaming)
        chosen = entry.get("splits") or {SPLITS[each]: each for each in theirs if each in SPLITS}
        if not chosen:
            raise ValueError(
                f"{path} has the splits {', '.join(theirs)}; allowed: {', '.join(SPLITS)}, "
                "or to say which to read, like splits={train: all}"
            )
        for split, name in list(chosen.items())[at.split :]:
            where = f"{path} ({name})"
            at.rows = load(name)
            with reading_bar(where, total=count_rows(at.rows, name), unit=" rows") as progress:
                yield split, ((where, row) for row in at.follow(progress))
            at.split, at.begun = at.split + 1, None

    def fingerprint(self, name: str) -> Any:
        entry = self.entry(name)
        if entry is None:
            return stamp_general()
        local = [Path(entry["path"]), *map(Path, files_in(plain(entry.get("data_files"))))]
        found = (each for path in local for each in (path, *sorted(path.rglob("*"))) if each.is_file())
        return [self.column, entry, stamps(found)]

    def entry(self, name: str) -> Mapping[str, Any] | None:
        return self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]


def open_set(entry: Mapping[str, Any], *, streaming: bool) -> tuple[list[str], Callable[[str], Any]]:
    """The names of a data set's splits, and what gives the rows of one."""
    from datasets import Dataset, get_dataset_split_names, load_dataset, load_from_disk

    path, name, files = entry["path"], entry.get("name"), plain(entry.get("data_files"))
    if not any((Path(path) / each).is_file() for each in SAVED):
        names = get_dataset_split_names(path, name, data_files=files)
        return names, lambda split: load_dataset(
            path, name, data_files=files, split=split, streaming=streaming
        )
    found = load_from_disk(path)
    splits = {"train": found} if isinstance(found, Dataset) else found

    def load(split: str) -> Any:
        if split not in splits:
            raise ValueError(f"{path} has the splits {', '.join(splits)}, and no {split}")
        return splits[split].to_iterable_dataset() if streaming else splits[split]

    return list(splits), load


def plain(files: Any) -> Any:
    """`data_files` in Python's own types, as `datasets` wants them."""
    if isinstance(files, Mapping):
        return {str(split): plain(each) for split, each in files.items()}
    return files if files is None or isinstance(files, str) else list(files)


def files_in(files: Any) -> list[str]:
    """The local files that `data_files` name."""
    if files is None or isinstance(files, str):
        return sorted(glob(files, recursive=True)) if files else []
    each: Iterable[Any] = files.values() if isinstance(files, Mapping) else files
    return [found for names in each for found in files_in(names)]


def are_files(value: Any) -> bool:
    """Whether it is a file or a pattern, a list of such, or one of these for each split."""
    if isinstance(value, Mapping):
        return all(is_text(split) and are_files(each) for split, each in value.items())
    return value is None or is_text(value) or (is_list(value, is_text) and len(value) > 0)


def is_entry(entry: Any) -> bool:
    """Whether it says where a data set is, and nothing that is unknown."""
    if not isinstance(entry, Mapping) or not is_text(entry.get("path")) or not set(entry) <= ENTRY:
        return False
    splits = entry.get("splits") or {}
    texts = all(entry.get(key) is None or is_text(entry[key]) for key in ("name", "column"))
    known = isinstance(splits, Mapping) and set(splits) <= set(SPLITS.values())
    return texts and known and are_files(entry.get("data_files"))


def check_entry(name: str, entry: Any) -> None:
    """Raises ValueError for an entry of a hub's catalogue that cannot be read as it is meant."""
    if not is_entry(entry):
        told = dict(entry) if isinstance(entry, Mapping) else show(entry)
        raise ValueError(
            f"catalogue.{name}={told}; allowed: path, and optionally name, data_files, column, splits, "
            "like {path: lex_glue, name: ecthr_a, splits: {train: train, valid: validation, test: test}}"
        )
