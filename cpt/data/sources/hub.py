"""Domains in data sets of the Hugging Face Hub, or in local copies of them."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from glob import glob
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from cpt.core.schema import Text, TextList, config, fits, option, show
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.docstrings import read_docs, stamp_docs
from cpt.data.sources.readers import SPLITS, cause, reading_bar, stamps, texts_of

ENTRY = {"path", "name", "data_files", "splits", "column"}
SAVED = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` has written


@config
class Hub(Source):
    """Data sets of the Hugging Face Hub, or local ones, one per domain: `catalogue[name]` has `path` (also a
    folder of `save_to_disk`), and optionally `name` (the configuration), `data_files` (a file, a pattern, a
    list, or one of these for each split), `splits` (to read as train, valid and test) and `column` (of the
    text)."""

    catalogue: Mapping[str, Any] = option("dataset of each domain, as arguments of datasets.load_dataset")
    column: Text = option("column of the text")
    streaming: bool = option("download rows while they are read")
    general: Text | None = option(
        "general text: a name of the catalogue; null: docstrings of Python and numpy"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names:
            allowed = "'+domains.catalogue.news={path: ag_news}'"
            raise ValueError(f"catalogue={{}} is invalid: it names no domain. Allowed: {allowed}")
        for name, entry in self.catalogue.items():
            has = entry if isinstance(entry, Mapping) else {}
            splits, files = has.get("splits") or {}, has.get("data_files")
            given = list(files.values()) if isinstance(files, Mapping) else [] if files is None else [files]
            fine = [fits(has.get("path"), Text), set(has) <= ENTRY, isinstance(splits, Mapping)]
            fine += [has.get(key) is None or fits(has[key], Text) for key in ("name", "column")]
            fine += [fits(each, Text) or (fits(each, TextList) and len(each) > 0) for each in given]
            if not all(fine) or not {*splits} <= {*SPLITS.values()}:
                shown = dict(entry) if isinstance(entry, Mapping) else show(entry)
                raise ValueError(
                    f"catalogue.{name}={shown} is invalid. Allowed: path, and optionally name, data_files, "
                    "column, splits, like {path: lex_glue, name: ecthr_a, splits: {train: train, test: test}}"
                )
        if self.general not in (None, *self.catalogue):
            raise ValueError(f"general={self.general} is invalid. Allowed: null, {', '.join(self.catalogue)}")

    @property
    def names(self) -> list[str]:
        return [name for name in self.catalogue if name != self.general]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        import datasets  # seconds that a check need not wait for

        if (entry := self.entry(name)) is None:
            yield from read_docs()
            return
        path = entry["path"]
        try:
            theirs, load = open_set(entry, streaming=self.streaming)
            chosen = entry.get("splits") or {SPLITS[each]: each for each in theirs if each in SPLITS}
            if not chosen:
                allowed = f"{', '.join(SPLITS)}, or to say which to read, like splits={{train: all}}"
                told = f"domains.catalogue: {path} has the splits {', '.join(theirs)}"
                raise ValueError(f"{told}. Allowed: {allowed}")
            for split, their_split in chosen.items():
                where, rows = f"{path} ({their_split})", load(their_split)
                total = len(rows) if hasattr(rows, "__len__") else None
                with reading_bar(where, total=total, unit=" rows") as bar:
                    for row in rows:
                        bar.update()
                        for text in texts_of([(where, row)], entry.get("column", self.column)):
                            yield split, text
        except (datasets.exceptions.DatasetsError, OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise ValueError(f"domains.catalogue.{name}.path={path} is invalid: {cause(error)}") from error

    def fingerprint(self, name: str) -> Any:
        if (entry := self.entry(name)) is None:
            return stamp_docs()
        patterns = chain.from_iterable((split_files(entry) or {}).values())
        local = [entry["path"], *(path for each in patterns for path in sorted(glob(each, recursive=True)))]
        found = (each for path in map(Path, local) for each in (path, *sorted(path.rglob("*"))))
        return [self.column, entry, stamps(filter(Path.is_file, found))]

    def entry(self, name: str) -> Mapping[str, Any] | None:
        """The catalogue's entry of a domain; None for general text that is not in it."""
        return self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]


def open_set(entry: Mapping[str, Any], *, streaming: bool) -> tuple[list[str], Callable[[str], Any]]:
    """The names of a data set's splits, and what gives the rows of one."""
    from datasets import Dataset, get_dataset_split_names, load_dataset, load_from_disk

    path, name, files = entry["path"], entry.get("name"), split_files(entry)
    if not any((Path(path) / each).is_file() for each in SAVED):
        load_split = partial(load_dataset, path, name, data_files=files, streaming=streaming)
        return get_dataset_split_names(path, name, data_files=files), lambda split: load_split(split=split)
    found = load_from_disk(path)
    splits = {"train": found} if isinstance(found, Dataset) else found

    def load(split: str) -> Any:
        if split not in splits:
            raise ValueError(f"domains.catalogue: {path} has no split {split}. Allowed: {', '.join(splits)}")
        return splits[split]

    return list(splits), load


def split_files(entry: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """The files that `data_files` names, by split, in Python's own types; train where there are no splits."""
    files: Any = entry.get("data_files") or {}
    by_split = files if isinstance(files, Mapping) else {"train": files}
    lists = {str(name): [each] if isinstance(each, str) else list(each) for name, each in by_split.items()}
    return lists or None
