"""Domains in folders of text files."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from cpt.core.exceptions import InvalidOptionError
from cpt.core.schema import Allowed, Folder, Text, TextList, check_names, config, option
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.docstrings import read_docs, stamp_docs
from cpt.data.sources.examples import BadExamples, OnBadExample, reject_record
from cpt.data.sources.files import (
    ABOUT_DATA,
    MAX_SHOWN,
    SUFFIXES,
    NoTextFileError,
    files_of,
    kind,
    naming_file,
    refuse_dangling,
    shown,
    split_of,
    split_words,
    stamps,
)
from cpt.data.sources.readers import read_folder

log = logging.getLogger(__name__)
Columns = Annotated[Mapping[str, Text], Allowed("{domain: column}")]
Ignored = Annotated[TextList, Allowed("a list of names or patterns, like [README*]")]
ENDTASKS = "endtasks"  # a folder of labelled examples (conf/endtask), which may lie among the domains


@config
class Texts(Source):
    """Sub-folders of text files. `document=auto` takes a .md file as one document, and of .txt files the file
    where a domain has at least 20 that are no shards, else what blank lines separate, else (blank lines among
    the first 10,000 of the first file are rarer than every 20th) the line."""

    root: Folder = option("folder of all text, with a sub-folder for each domain")
    folder: Annotated[Text, Allowed("a folder below root")] = option("folder of the domains, below root")
    column: Text = option("column of the text in tables: .jsonl, .csv, .parquet and the like")
    columns: Columns | None = option("column of the text per domain", default=None)
    document: Literal["file", "paragraph", "line", "auto"] = option("one document of a .txt or .md file")
    general: Text | None = option("folder of the general text, below root")
    ignore: Ignored | None = option("names or patterns of files that are not text", default=())
    on_bad_example: OnBadExample = option(
        "what to do with a record of a table that cannot be read: stop, or leave it out and count it",
        default="stop",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        with naming_file(self.corpora):
            is_folder = self.corpora.is_dir()
        if not is_folder or not self.names:
            missing_folder = f"there is no folder {self.corpora}"
            raise InvalidOptionError(
                "root",
                self.root,
                reason="it has no sub-folder of a domain" if is_folder else missing_folder,
                allowed="a folder with a sub-folder for each domain",
            )
        check_names(self.columns or (), (*self.names, GENERAL), section="columns")
        if self.general not in (None, GENERAL) and self.folder_of(GENERAL) is None:
            raise InvalidOptionError("general", self.general, allowed=f"null, a folder in {self.root}")

    @property
    def corpora(self) -> Path:
        return Path(self.root) / self.folder

    @cached_property
    def entries(self) -> dict[str, Path]:
        """The visible files and folders among the domains that are not ignored. Raises ValueError for a link
        to nothing: a domain on a disk that is not mounted is not left out."""
        with naming_file(self.corpora):
            paths = sorted(path for path in self.corpora.iterdir() if not self.ignored(path))
        refuse_dangling(paths, remedy="leave it out: domains.ignore=[{}]")
        return {path.name: path for path in paths if not path.name.startswith(".")}

    @cached_property
    def names(self) -> list[str]:
        with naming_file(self.corpora):
            folders = [name for name, path in self.entries.items() if path.is_dir()]
        return [name for name in folders if name not in (self.general, ENDTASKS)]

    def entries_of(self, name: str) -> tuple[str, ...]:
        return (f"columns.{name}",)

    def ignored(self, path: Path) -> bool:
        """Whether a pattern is for a path below root, or for the name of a folder that it is in."""
        inner = os.path.relpath(path, self.root)
        names = (*inner.split(os.sep), inner)
        pairs = product(names, self.ignore or ())
        return any(fnmatch(name, pattern) for name, pattern in pairs)

    def check(self, order: Sequence[str]) -> None:
        for name in (*order, GENERAL):
            folder = self.folder_of(name)
            if folder is None:
                continue
            try:
                paths = files_of(folder, ignored=self.ignored)
            except NoTextFileError as error:
                raise ValueError(
                    f"{error}; each sub-folder is a domain, but for domains.ignore=[{folder.name}]"
                ) from error
            for path in paths:
                if not os.access(path, os.R_OK):
                    raise ValueError(f"{path} cannot be read: permission denied")
            self.check_splits(folder, paths)
        self.log_left_out()
        split_names = [name for name in order if set(split_words(name)) - {"train"}]
        if split_names:
            message = "Training on folders that are named as held-out text, as domains of their own: %s"
            log.warning(message, ", ".join(split_names[:MAX_SHOWN]))

    def check_splits(self, folder: Path, paths: Sequence[Path]) -> None:
        """Raises ValueError where the names of all files of a domain say that they are held out."""
        splits = [split_of(path.relative_to(folder)) or "train" for path in paths]
        if "train" not in splits and self.by != "coarse":  # which joins folders
            raise ValueError(
                f"{folder} has no file to train on: by their names all {len(paths)} are held out, "
                f"like {paths[0].relative_to(folder)} ({splits[0]}). "
                "Allowed: a file whose name says train, or no split"
            )

    def log_left_out(self) -> None:
        """Logs the files and hidden folders next to the domains."""
        loose = [path for path in self.entries.values() if not path.is_dir()]
        texts = [path for path in loose if kind(path) in SUFFIXES and not ABOUT_DATA.fullmatch(path.name)]
        other_files = [path for path in loose if path not in texts]
        if texts:
            log.warning(
                "Ignoring %d text files of %s in no domain's folder: %s",
                len(texts),
                self.corpora,
                shown(texts),
            )
        if other_files:
            log.info("Ignoring files of %s in no domain's folder: %s", self.corpora, shown(other_files))
        with naming_file(self.corpora):
            hidden = [path for path in sorted(self.corpora.glob(".*")) if path.is_dir()]
        if hidden:
            log.info("Ignoring hidden folders of %s: %s", self.corpora, shown(hidden))

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        folder = self.folder_of(name)
        if folder is None:
            yield from read_docs()
            return
        bad = BadExamples(is_skipping=self.on_bad_example == "skip")
        num_read = 0
        for document in read_folder(
            folder,
            name,
            column=self.column_of(name),
            document=self.document,
            ignored=self.ignored,
            reject=partial(reject_record, bad),
        ):
            num_read += 1
            yield document
        self.record_skipped(name, bad, num_read=num_read)

    def fingerprint(self, name: str) -> Any:
        folder = self.folder_of(name)
        if folder is None:
            return stamp_docs()
        values = [self.column_of(name), self.document, stamps(files_of(folder, ignored=self.ignored))]
        if self.on_bad_example == "skip":
            values.append(self.on_bad_example)
        return values

    def column_of(self, name: str) -> str:
        """The column of the text in the tables of a domain."""
        return (self.columns or {}).get(name, self.column)

    def folder_of(self, name: str) -> Path | None:
        """The folder of a domain's files; None for general text that is not there."""
        if name != GENERAL:
            return self.corpora / name
        if not self.general:
            return None
        folder = Path(self.root) / self.general
        if self.ignored(folder):
            return None
        refuse_dangling([folder], remedy="domains.general=null")
        return folder if folder.exists() else None
