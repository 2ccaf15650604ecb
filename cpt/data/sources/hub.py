"""Domains in data sets of the Hugging Face hub, or in local copies of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from cpt.core.options import option
from cpt.core.rules import MAPPING, TEXT, YES_NO, or_null
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.installed_docs import read_general, stamp_general
from cpt.data.sources.readers import SPLITS, Row, cause, stamps, texts_of
from cpt.data.sources.texts import reading_bar

ENTRY = {"path", "name", "splits"}


@dataclass(frozen=True, kw_only=True)
class Hub(Source):
    """Data sets of the Hugging Face hub, or local ones, one per domain: `catalogue[name]` has `path`, and
    optionally `name` (the configuration) and `splits` (which of the data set's splits to read as train, valid
    and test)."""

    catalogue: Mapping[str, Mapping[str, Any]] = option(
        "each domain's data set: {path, name, splits}, as datasets.load_dataset takes them", MAPPING
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
        entry = self.entry(name)
        if entry is None:
            yield from read_general()
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
            shown = reading_bar(f"{path} ({name})", total=total, unit=" rows", iterable=rows)
            yield split, ((f"{path} ({name})", row) for row in shown)

    def fingerprint(self, name: str) -> Any:
        entry = self.entry(name)
        if entry is None:
            return stamp_general()
        local = Path(entry["path"])
        return [self.column, entry, stamps(each for each in sorted(local.rglob("*")) if each.is_file())]

    def entry(self, name: str) -> Mapping[str, Any] | None:
        return self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]


def check_entry(name: str, entry: Mapping[str, Any]) -> None:
    """Raises ValueError for an entry of a hub's catalogue that cannot be read as it is meant."""
    splits = set(entry.get("splits") or ())
    if "path" not in entry or not set(entry) <= ENTRY or not splits <= set(SPLITS.values()):
        raise ValueError(
            f"domains.catalogue.{name}={dict(entry)}; allowed: path, and optionally name and splits, "
            "like {path: lex_glue, name: ecthr_a, splits: {train: train, valid: validation, test: test}}"
        )
