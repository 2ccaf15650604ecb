"""Domains in data sets of the Hugging Face hub, or in local copies of them."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from tqdm import tqdm

from cpt.core.options import option
from cpt.core.rules import MAPPING, TEXT, YES_NO, is_text, or_null, show
from cpt.data.sources.base import GENERAL, Followed, Reading, Source
from cpt.data.sources.installed_docs import read_general, stamp_general
from cpt.data.sources.readers import SPLITS, Row, cause, stamps, texts_of
from cpt.data.sources.texts import reading_bar

log = logging.getLogger(__name__)
ENTRY = {"path", "name", "splits", "column"}


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
    """Data sets of the Hugging Face hub, or local ones, one per domain: `catalogue[name]` has `path`, and
    optionally `name` (the configuration), `splits` (which of the data set's splits to read as train, valid
    and test) and `column` (of the text, where that is another than the others')."""

    catalogue: Mapping[str, Mapping[str, Any]] = option(
        "each domain's data set: {path, name, splits, column}, as datasets.load_dataset takes them", MAPPING
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
        from datasets import get_dataset_split_names, load_dataset

        path, config = entry["path"], entry.get("name")
        theirs = get_dataset_split_names(path, config)
        chosen = entry.get("splits") or {SPLITS[each]: each for each in theirs if each in SPLITS}
        if not chosen:
            raise ValueError(
                f"{path} has the splits {', '.join(theirs)}; allowed: {', '.join(SPLITS)}, "
                "or to say which to read, like splits={train: all}"
            )
        for split, name in list(chosen.items())[at.split :]:
            where = f"{path} ({name})"
            at.rows = load_dataset(path, config, split=name, streaming=self.streaming)
            with reading_bar(where, total=count_rows(at.rows, name), unit=" rows") as progress:
                yield split, ((where, row) for row in at.follow(progress))
            at.split, at.begun = at.split + 1, None

    def fingerprint(self, name: str) -> Any:
        entry = self.entry(name)
        if entry is None:
            return stamp_general()
        local = Path(entry["path"])
        return [self.column, entry, stamps(each for each in sorted(local.rglob("*")) if each.is_file())]

    def entry(self, name: str) -> Mapping[str, Any] | None:
        return self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]


def is_entry(entry: Any) -> bool:
    """Whether it says where a data set is, and nothing that is unknown."""
    if not isinstance(entry, Mapping) or not is_text(entry.get("path")) or not set(entry) <= ENTRY:
        return False
    splits = entry.get("splits") or {}
    texts = all(entry.get(key) is None or is_text(entry[key]) for key in ("name", "column"))
    return texts and isinstance(splits, Mapping) and set(splits) <= set(SPLITS.values())


def check_entry(name: str, entry: Any) -> None:
    """Raises ValueError for an entry of a hub's catalogue that cannot be read as it is meant."""
    if not is_entry(entry):
        told = dict(entry) if isinstance(entry, Mapping) else show(entry)
        raise ValueError(
            f"catalogue.{name}={told}; allowed: path, and optionally name, column, splits, "
            "like {path: lex_glue, name: ecthr_a, splits: {train: train, valid: validation, test: test}}"
        )
