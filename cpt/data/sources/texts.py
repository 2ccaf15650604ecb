"""Domains in folders of text files."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from cpt.core.schema import Allowed, Folder, Text, TextList, check_names, config, option
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.docstrings import read_docs, stamp_docs
from cpt.data.sources.readers import files_of, naming_file, read_folder, stamps

log = logging.getLogger(__name__)
Columns = Annotated[Mapping[str, Text], Allowed("{domain: column}")]
Ignored = Annotated[TextList, Allowed("a list of names or patterns, like [README*]")]
ENDTASKS = "endtasks"  # a folder of labelled examples (conf/endtask), which may lie among the domains


@config
class Texts(Source):
    """Sub-folders of text files. `document=auto` takes a .md file as one document, and of .txt files the file
    where a domain has at least 20, else what blank lines separate, else (no blank line among the first 10,000
    of the first file) the line."""

    root: Folder = option("folder of all text")
    folder: Annotated[Text, Allowed("a folder below root")] = option("folder of the domains, below root")
    column: Text = option("column of the text in .jsonl, .csv and .parquet files")
    columns: Columns | None = option("column of the text per domain", default=None)
    document: Literal["file", "paragraph", "line", "auto"] = option("one document of a .txt or .md file")
    general: Text | None = option("folder of the general text, below root")
    ignore: Ignored | None = option("names or patterns of files that are not text", default=())

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.corpora.is_dir() or not self.names:
            why = "" if self.corpora.is_dir() else f": there is no folder {self.corpora}"
            told = f"root={self.root} is invalid{why}"
            raise ValueError(f"{told}. Allowed: a folder with a sub-folder for each domain")
        check_names(self.columns or (), (*self.names, GENERAL), place="columns")
        if self.general not in (None, GENERAL) and self.folder_of(GENERAL) is None:
            raise ValueError(f"general={self.general} is invalid. Allowed: null, a folder in {self.root}")

    @property
    def corpora(self) -> Path:
        return Path(self.root) / self.folder

    @cached_property
    def names(self) -> list[str]:
        with naming_file(self.corpora):
            found = [path.name for path in self.corpora.iterdir() if path.is_dir() and not self.ignored(path)]
        return sorted(name for name in found if name[0] != "." and name not in (self.general, ENDTASKS))

    def ignored(self, path: Path) -> bool:
        """Whether a pattern is for a path below root, or for the name of a folder that it is in."""
        inner = os.path.relpath(path, self.root)
        names = (*inner.split(os.sep), inner)
        return any(fnmatch(name, pattern) for pattern in self.ignore or () for name in names)

    def check(self, order: Sequence[str]) -> None:
        for folder in filter(None, map(self.folder_of, (*order, GENERAL))):
            for path in files_of(folder, ignored=self.ignored):
                if not os.access(path, os.R_OK):
                    raise ValueError(f"{path} cannot be read: permission denied")
        beside = (path for path in self.corpora.iterdir() if not (path.is_dir() or self.ignored(path)))
        if loose := sorted(path.name for path in beside if path.name[0] != "."):
            log.info("Ignoring files of %s in no domain's folder: %s", self.corpora, ", ".join(loose[:5]))

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        if (folder := self.folder_of(name)) is None:
            yield from read_docs()
            return
        column = (self.columns or {}).get(name, self.column)
        yield from read_folder(folder, name, column=column, document=self.document, ignored=self.ignored)

    def fingerprint(self, name: str) -> Any:
        if (folder := self.folder_of(name)) is None:
            return stamp_docs()
        column, files = (self.columns or {}).get(name, self.column), files_of(folder, ignored=self.ignored)
        return [column, self.document, stamps(files)]

    def folder_of(self, name: str) -> Path | None:
        """The folder of a domain's files; None for general text that is not there."""
        if name != GENERAL:
            return self.corpora / name
        folder = Path(self.root) / self.general if self.general else None
        return folder if folder is not None and folder.exists() and not self.ignored(folder) else None
