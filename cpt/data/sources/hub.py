"""Domains in data sets of the Hugging Face Hub, or in local copies of them."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
from annotated_types import Predicate

from cpt.core.exceptions import InvalidOptionError
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.messages import count_noun, find_similar_path
from cpt.core.schema import Allowed, Count, Options, Text, config, fits, option, read_options
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.docstrings import log_general_docs, read_docs, stamp_docs
from cpt.data.sources.examples import BadExamples, OnBadExample, reject_record
from cpt.data.sources.files import find_cause_message, find_splits_by_name, find_suffix, stamp_files
from cpt.data.sources.readers import Oddities, clean_documents, select_column_texts

log = logging.getLogger(__name__)
# RuntimeError: a script; ImportError: a column that needs a package to be decoded.
READ_ERRORS = (OSError, RuntimeError, ImportError, pa.ArrowException, UnicodeDecodeError)
LOCAL_BEGINNINGS = ("/", "./", "../", "~/")  # of paths that cannot be names on the Hub
FILE_READERS = {  # what `datasets` calls the reader of a kind of files
    ".txt": "text",
    ".md": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` has written


def is_data_files(value: Any) -> bool:
    """Whether it is a file or a pattern, a list of these, one of these for each of some splits, or None."""
    if isinstance(value, Mapping):
        return bool(value) and all(fits(name, Text) and is_file_list(files) for name, files in value.items())
    return value is None or is_file_list(value)


def is_file_list(value: Any) -> bool:
    """Whether it is a file or a pattern, or a list of at least one."""
    if isinstance(value, list | tuple):
        return bool(value) and all(fits(file, Text) for file in value)
    return fits(value, Text)


DataFiles = Annotated[
    Any,
    Predicate(is_data_files),
    Allowed("null, a file or a pattern, a list of these, or one of these by split, {train: a.jsonl}"),
]


@config
class Entry(Options):
    """A data set of the catalogue."""

    path: Text = option("name on the Hub, or a folder, also of save_to_disk")
    name: Text | None = option("configuration", default=None)
    data_files: DataFiles = option(
        "a file, a pattern, a list of these, or one of these by split", default=None
    )
    splits: Mapping[Literal["train", "valid", "test"], Text] | None = option(
        "splits that are read as train, valid and test; null: those of such names", default=None
    )
    column: Text | None = option("column of the text; null: that of the source", default=None)
    max_documents: Count | None = option(
        "documents of each split that are read, the first ones, while they are downloaded; null: all",
        default=None,
    )


@config
class Hub(Source):
    """Data sets of the Hugging Face Hub, or local ones, one per domain: an `Entry` of the catalogue each."""

    catalogue: Mapping[str, Any] = option("dataset of each domain, as arguments of datasets.load_dataset")
    column: Text = option("column of the text")
    streaming: bool = option("download rows while they are read")
    on_bad_example: OnBadExample = option(
        "what to do with a row whose column is no text: stop, or leave it out and count it", default="stop"
    )
    general: Text | None = option("entry that is the general text; null: docstrings of Python and numpy")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.names:
            raise InvalidOptionError(
                "catalogue",
                "{}",
                reason="it names no domain",
                allowed="'domains.catalogue.news={path: ag_news}'",
            )
        for name, entry in self.catalogue.items():
            if not isinstance(entry, Mapping):
                raise InvalidOptionError(f"catalogue.{name}", entry, allowed="{path: ag_news, …}")
            read_options(Entry, entry, section=f"catalogue.{name}")
            check_local_path(entry["path"], option=f"catalogue.{name}.path")
        if self.general is not None and self.general not in self.catalogue:
            raise InvalidOptionError("general", self.general, allowed=f"null, {', '.join(self.catalogue)}")

    @property
    def names(self) -> list[str]:
        return [name for name in self.catalogue if name != self.general]

    def entries_of(self, name: str) -> tuple[str, ...]:
        return (f"catalogue.{name}",)

    def find_exclusion(self, name: str) -> str:
        return f"domains.general={name}" if name == self.general else super().find_exclusion(name)

    def check(self, order: Sequence[str]) -> None:
        if self.general is None:
            log_general_docs("domains.general=null")

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        import datasets  # seconds that a check need not wait for

        entry = self.entry(name)
        if entry is None:
            yield from read_docs()
            return
        try:
            yield from self.read_entry(name, entry)
        except (datasets.exceptions.DatasetsError, *READ_ERRORS) as error:
            raise ValueError(
                f"domains.catalogue.{name}.path={entry['path']} is invalid: {find_cause_message(error)}"
            ) from error

    def read_entry(self, name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """(split, document) of a data set. Raises ValueError for one without files, splits that say which to
        read, or its configuration."""
        import datasets

        path = entry["path"]
        section = f"domains.catalogue.{name}"
        max_documents = entry.get("max_documents")
        try:
            # What is not streamed is downloaded as a whole before its first row is read.
            is_streamed = self.streaming or max_documents is not None
            split_names, load = open_set(entry, streaming=is_streamed)
        except datasets.inspect.SplitsNotFoundError as error:
            raise ValueError(
                f"domains.catalogue.{name} is invalid: no file and no split found for path={path}. "
                "Allowed: what datasets.load_dataset takes"
            ) from error
        except (datasets.exceptions.DatasetsError, *READ_ERRORS):
            raise
        except Exception as error:  # a configuration that is missing, a damaged dataset card or list of files
            cause = describe_library_error(error)
            raise ValueError(f"domains.catalogue.{name} is invalid: {cause}") from error

        # Named splits are read as they are. For automatically chosen ones, the splits that are not read are
        # logged.
        splits = entry.get("splits") or choose_splits(path, split_names)
        if is_streamed:
            refuse_parts(splits, section=section)
        unread = [split_name for split_name in split_names if split_name not in splits.values()]
        if unread and not entry.get("splits"):
            log.info(
                "Leaving out splits of %s: %s (`splits` in its catalogue entry chooses others)",
                path,
                ", ".join(unread),
            )

        bad = BadExamples(is_skipping=self.on_bad_example == "skip")
        oddities = Oddities()
        num_read = 0
        for split, split_name in splits.items():
            position = f"{path} ({split_name})"
            option = f"{section}.splits.{split}"
            split_rows = open_split(load, split_name, option=option, split_names=split_names)
            shown_rows = name_row_errors(self.progress(position, split_rows), section=section, path=path)
            rows = ((position, row) for row in shown_rows)
            texts = select_column_texts(rows, entry.get("column") or self.column, partial(reject_record, bad))
            documents = clean_documents(texts, position, oddities=oddities)
            for text in islice(documents, max_documents):
                num_read += 1
                yield split, text

        if max_documents is not None:
            log.info(
                "Read %s of %s (max_documents=%d a split)",
                count_noun(num_read, "document"),
                path,
                max_documents,
            )
        changes = oddities.describe()
        if changes:
            log.warning("Reading %s: %s", name, changes)
        self.record_skipped(name, bad, num_read=num_read)

    def progress(self, position: str, rows: Iterable[Any]) -> Iterator[Any]:
        """Rows with a progress bar."""
        total = len(rows) if isinstance(rows, Sized) else None
        with make_progress_bar(
            f"reading {position}", total=total, unit=" rows", scale=True, hidden=False, delay=DELAY
        ) as bar:
            for row in rows:
                bar.update()
                yield row

    def fingerprint(self, name: str) -> Any:
        entry = self.entry(name)
        if entry is None:
            return stamp_docs()
        values = [self.column, entry, stamp_files(find_local_files(entry))]
        # Only with `skip` may a text lack some of its examples.
        if self.on_bad_example == "skip":
            values.append(self.on_bad_example)
        return values

    def entry(self, name: str) -> Mapping[str, Any] | None:
        """The catalogue's entry of a domain, with the path of a folder in full; None for general text that is
        not in it."""
        entry = self.catalogue.get(self.general or "") if name == GENERAL else self.catalogue[name]
        if entry is None:
            return None
        return {**entry, "path": os.path.expanduser(entry["path"])}


def check_local_path(path: str, *, option: str) -> None:
    """Raises InvalidOptionError for a path on this machine that `datasets` would look for on the Hub: of a
    single file, and of a folder that is not there."""
    local_path = os.path.expanduser(path)
    reader = FILE_READERS.get(find_suffix(Path(path)))
    if reader is not None and os.path.isfile(local_path):
        raise InvalidOptionError(
            option,
            path,
            reason="it is a file",
            allowed=f"{{path: {reader}, data_files: {path}}}, or a folder",
        )
    if path.startswith(LOCAL_BEGINNINGS) and not os.path.exists(local_path):
        raise InvalidOptionError(
            option,
            path,
            reason="there is no such folder",
            meant=find_similar_path(Path(local_path)),
            allowed="a folder, or a name on the Hub like ag_news",
        )


def find_local_files(entry: Mapping[str, Any]) -> Iterator[Path]:
    """The files on this machine that an entry names: by its path, then by `data_files`."""
    paths = [entry["path"]]
    for patterns in (split_files(entry) or {}).values():
        for pattern in patterns:
            paths += sorted(glob(pattern, recursive=True))
    for path in map(Path, paths):
        for inner in (path, *sorted(path.rglob("*"))):
            if inner.is_file():
                yield inner


def choose_splits(path: str, names: Sequence[str]) -> dict[str, str]:
    """The names of a data set's splits by train, valid and test. Raises ValueError where none has such a
    name, or several have the same meaning."""
    by_split = find_splits_by_name(names)
    if not by_split or any(len(synonyms) > 1 for synonyms in by_split.values()):
        raise ValueError(
            f"domains.catalogue: {path} has the splits {', '.join(names)}. "
            "Allowed: train, test, and one of valid, validation, dev, val, "
            "or to say which to read, like splits={train: all}"
        )
    return {split: synonyms[0] for split, synonyms in by_split.items()}


def open_split(
    load: Callable[[str], Any], split_name: str, *, option: str, split_names: Sequence[str]
) -> Iterable[Any]:
    """The rows of a split. Raises ValueError, with the option, for one that is not among `split_names`, and
    for a part of one that `datasets` does not understand."""
    try:
        return load(split_name)
    except UnicodeDecodeError:  # of the rows
        raise
    except ValueError as error:
        raise InvalidOptionError(
            option, split_name, reason=find_cause_message(error).rstrip("."), allowed=", ".join(split_names)
        ) from error


def name_row_errors(rows: Iterable[Any], *, section: str, path: str) -> Iterator[Any]:
    """The rows of a data set. Raises ValueError, with its entry, for those that `datasets` does not read: it
    casts streamed rows to the types of the first ones, with errors of many classes."""
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except (OSError, ImportError):  # of the network, the disk, or a package that decodes a column
            raise
        except Exception as error:
            raise InvalidOptionError(
                f"{section}.path",
                path,
                reason=describe_library_error(error),
                allowed="a data set whose rows have the same columns and types",
            ) from error
        yield row


def describe_library_error(error: Exception) -> str:
    """The message of an error of `datasets` on one line, with its class where a message is often a key."""
    message = find_cause_message(error)
    is_sentence = isinstance(error, ValueError | ConnectionError)
    return message if is_sentence else f"{type(error).__name__}: {message}"


def refuse_parts(splits: Mapping[str, str], *, section: str) -> None:
    """Raises ValueError for a part of a split, like train[:1000], which datasets does not stream."""
    for split, split_name in splits.items():
        if "[" in split_name:
            raise InvalidOptionError(
                f"{section}.splits.{split}",
                split_name,
                reason="a part of a split cannot be streamed",
                allowed=f"the whole split, with {section}.max_documents=N for its first documents",
            )


def open_set(entry: Mapping[str, Any], *, streaming: bool) -> tuple[list[str], Callable[[str], Any]]:
    """The names of a data set's splits, and what gives the rows of one. Raises ConnectionError where the Hub
    would be asked for it without a network."""
    from datasets import Dataset, get_dataset_split_names, load_dataset, load_from_disk

    from cpt.core.hub_access import check_data_set_access

    path = entry["path"]
    is_saved = any((Path(path) / file_name).is_file() for file_name in SAVED_DATASET_FILES)
    if not is_saved:
        name = entry.get("name")
        files = split_files(entry)
        if files is None or "/" in path:  # with files, a single word says how they are read, like `json`
            check_data_set_access(path)
        load_split = partial(load_dataset, path, name, data_files=files, streaming=streaming)
        return get_dataset_split_names(path, name, data_files=files), lambda split: load_split(split=split)

    loaded = load_from_disk(path)
    splits = {"train": loaded} if isinstance(loaded, Dataset) else loaded

    def load(split: str) -> Any:
        if split not in splits:
            raise ValueError(f"{path} has no such split")
        return splits[split]

    return list(splits), load


def split_files(entry: Mapping[str, Any]) -> dict[str, list[str]] | None:
    """The files that `data_files` names, by split, in Python's own types, with the home folder in place of ~;
    train where there are no splits."""
    files: Any = entry.get("data_files") or {}
    by_split = files if isinstance(files, Mapping) else {"train": files}
    lists = {}
    for split, paths in by_split.items():
        list_of_paths = [paths] if isinstance(paths, str) else paths
        lists[str(split)] = [os.path.expanduser(path) for path in list_of_paths]
    return lists or None
