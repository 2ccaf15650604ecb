"""Domains in folders of text files."""

import glob
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun, find_similar_path
from cpt.core.naming import quote
from cpt.core.schema import Allowed, Folder, Text, TextList, check_names, config, option
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.docstrings import log_general_docs, read_docs, stamp_docs
from cpt.data.sources.examples import BadExamples, OnBadExample, reject_record
from cpt.data.sources.files import (
    ABOUT_DATA,
    MAX_SHOWN,
    PLAIN_SUFFIXES,
    SUFFIXES,
    TABLE_SUFFIXES,
    NoTextFileError,
    UnknownKindError,
    UnusableFileError,
    find_split,
    find_suffix,
    format_file_names,
    format_ignore,
    list_text_files,
    naming_file,
    refuse_dangling,
    split_words,
    stamp_files,
    walk,
)
from cpt.data.sources.readers import check_encodings, read_folder

log = logging.getLogger(__name__)
Columns = Annotated[Mapping[str, Text], Allowed("{domain: column}")]
Ignored = Annotated[TextList, Allowed("a list of names or patterns, like [README*]")]
LAYOUT = "a folder with a sub-folder for each domain"
DEFAULT_COLUMN = "text"  # of conf/domains/texts.yaml
ENDTASKS = "endtasks"  # a folder of labelled examples (conf/endtask), which may lie among the domains


@config
class Texts(Source):
    """Sub-folders of text files. `document=auto` takes a .md file as one document, and of .txt files the file
    where a domain has at least 20 that are not shards, else what blank lines separate, else (blank lines
    among the first 10,000 of the first file are rarer than every 20th) the line."""

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
        context = "" if self.corpora == Path(self.root) else f"with domains.folder={self.folder}"
        if not is_folder:
            has_root = Path(self.root).is_dir()
            raise InvalidOptionError(
                "root",
                self.root,
                context=context,
                reason=f"there is no folder {self.corpora}",
                meant="" if has_root else find_similar_path(Path(self.root)),
                allowed=LAYOUT,
            )
        if not self.names:
            reason = "it has no sub-folder of a domain"
            if self.loose_text:
                num_files = count_noun(len(self.loose_text), "text file")
                reason += f", but {num_files} ({format_file_names(self.loose_text)})"
            raise InvalidOptionError(
                "root", self.root, context=context, reason=reason, allowed=self.describe_layout()
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
        for path in paths:
            refuse_dangling(path, remedy=f"leave it out: {self.ignoring(glob.escape(path.name))}")
        return {path.name: path for path in paths if not path.name.startswith(".")}

    @cached_property
    def names(self) -> list[str]:
        with naming_file(self.corpora):
            folders = [name for name, path in self.entries.items() if path.is_dir()]
        return [name for name in folders if name not in (self.general, ENDTASKS)]

    @cached_property
    def loose_text(self) -> list[Path]:
        """The text files next to the domains, which are in none."""
        paths = [path for path in self.entries.values() if not path.is_dir()]
        return [
            path for path in paths if find_suffix(path) in SUFFIXES and not ABOUT_DATA.fullmatch(path.name)
        ]

    def entries_of(self, name: str) -> tuple[str, ...]:
        return (f"columns.{name}",)

    def find_exclusion(self, name: str) -> str:
        folder = self.corpora / name
        if name not in self.names and os.path.isdir(folder):
            if name == self.general:
                return f"domains.general={name}"
            if self.ignored(folder):
                return f"domains.ignore={format_value(self.ignore)}"
        return super().find_exclusion(name)

    def ignored(self, path: Path) -> bool:
        """Whether a pattern is for a path below root, or for the name of a folder that it is in."""
        inner = os.path.relpath(path, self.root)
        names = (*inner.split(os.sep), inner)
        patterns = {pattern for name, pattern in product(names, self.ignore or ()) if fnmatch(name, pattern)}
        self.patterns_with_files.update(patterns)
        return bool(patterns)

    @cached_property
    def patterns_with_files(self) -> set[str]:
        """The patterns of `ignore` that have left out a file or a folder so far."""
        return set()

    def check(self, order: Sequence[str]) -> None:
        general_folder = self.folder_of(GENERAL)
        if general_folder is not None and not general_folder.is_dir():
            raise InvalidOptionError(
                "domains.general",
                self.general,
                reason=f"{general_folder} is no folder",
                allowed="a folder of text, or null",
            )
        files = self.find_files(order)
        for folder, paths in files.items():
            for path in paths:
                if not os.access(path, os.R_OK):
                    raise ValueError(f"{path} cannot be read: permission denied")
            self.check_splits(folder, paths)
            check_encodings(paths)
        self.check_loose_text()

        self.log_left_out()
        self.log_idle_options(order, files)
        idle_patterns = [pattern for pattern in self.ignore or () if pattern not in self.patterns_with_files]
        if idle_patterns:
            log.warning(
                "No effect of domains.ignore=%s: no file or folder of these domains has such a name",
                format_value(idle_patterns),
            )
        if general_folder is None:
            log_general_docs(self.describe_no_general())
        split_names = [name for name in order if set(split_words(name)) - {"train"}]
        if split_names:
            message = "Training on folders that are named as held-out text, as domains of their own: %s"
            log.warning(message, ", ".join(split_names[:MAX_SHOWN]))

    def describe_no_general(self) -> str:
        """Why no folder has the general text, with a domain that may have been meant."""
        if not self.general:
            return "domains.general=null"
        folder = Path(self.root) / self.general
        if folder.exists():
            return f"domains.ignore leaves out {folder}"
        reason = f"{self.root} has no folder {self.general}"
        for name in self.names:
            is_next_to_it = folder.with_name(name).is_dir()  # else domains.general has no word for it
            if is_next_to_it and name.lower() == self.general.lower():
                return f"{reason}; {name} is a domain, and domains.general={name} makes it the general text"
        return reason

    def log_idle_options(self, order: Sequence[str], files: Mapping[Path, Sequence[Path]]) -> None:
        """Logs options for tables if no text is in a table, and options for plain files if no text is in one.
        `files` is what `find_files` returns."""
        suffixes_by_name = {}
        for name in (*order, GENERAL):
            folder = self.folder_of(name)
            paths = [] if folder is None else files[folder]
            suffixes_by_name[name] = {find_suffix(path) for path in paths}
        with_tables = {name for name, suffixes in suffixes_by_name.items() if suffixes & {*TABLE_SUFFIXES}}

        own_columns = self.columns or {}
        if self.column != DEFAULT_COLUMN and not with_tables - {*own_columns}:
            log.warning("No effect of domains.column: none of the texts that it applies to is in a table")
        idle_names = [name for name in own_columns if name in suffixes_by_name and name not in with_tables]
        if idle_names:
            log.warning("No effect of domains.columns on %s: no tables there", ", ".join(idle_names))
        has_plain = any(suffixes & {*PLAIN_SUFFIXES} for suffixes in suffixes_by_name.values())
        if self.document != "auto" and not has_plain:
            log.warning("No effect of domains.document=%s: no text is in a .txt or .md file", self.document)

    def find_files(self, order: Sequence[str]) -> dict[Path, list[Path]]:
        """The text files of the folders of domains and general text, by folder. Raises ValueError for a
        folder without text, and for files that are not text. The message has the option that leaves these
        out; for files of unknown kinds it has those of all folders, so that the user is asked once."""
        files: dict[Path, list[Path]] = {}
        unknown_kinds: list[Path] = []
        for name in (*order, GENERAL):
            folder = self.folder_of(name)
            if folder is None:
                continue
            try:
                files[folder] = list_text_files(folder, ignored=self.ignored)
            except UnknownKindError as error:
                unknown_kinds += error.paths
            except UnusableFileError as error:
                raise self.with_remedy(error) from error
            except NoTextFileError as error:
                remedy = self.ignoring(glob.escape(folder.name))
                raise ValueError(
                    f"{error}. Allowed: text in each sub-folder, or leave this one out: {remedy}"
                ) from error
        if unknown_kinds:
            raise self.with_remedy(UnknownKindError(unknown_kinds))
        return files

    def with_remedy(self, error: UnusableFileError) -> ValueError:
        """An error with the option that leaves out its files."""
        return ValueError(f"{error}, or leave out what is not text: {self.ignoring(*error.patterns)}")

    def ignoring(self, *patterns: str) -> str:
        """The option that leaves out files in addition to those that are left out already."""
        return format_ignore([*(self.ignore or ()), *patterns])

    def check_loose_text(self) -> None:
        """Raises InvalidOptionError where most text is next to the domains: then root is the folder of one
        domain, of which only the sub-folders would be read."""
        if not self.loose_text:
            return
        num_bytes = 0
        for name in (*self.names, GENERAL):
            folder = self.folder_of(name)
            if folder is not None:
                paths = walk(folder, ignored=self.ignored)
                num_bytes += sum(path.stat().st_size for path in paths if find_suffix(path) in SUFFIXES)
        num_loose_bytes = sum(path.stat().st_size for path in self.loose_text)
        if num_loose_bytes <= num_bytes:
            return

        files = f"{count_noun(len(self.loose_text), 'text file')} ({format_file_names(self.loose_text)})"
        raise InvalidOptionError(
            "domains.root",
            self.root,
            reason=f"{files} with {count_noun(num_loose_bytes, 'byte')} in no sub-folder, "
            f"{num_bytes:,} in sub-folders",
            allowed=f"{self.describe_layout()}; leave out what is not to be read by domains.ignore",
        )

    def describe_layout(self) -> str:
        """What root has to be, with what to type where it is the folder of one domain."""
        if not self.loose_text:
            return LAYOUT
        folder = self.corpora.absolute()
        root = shlex.quote(f"domains.root={quote(str(folder.parent))}")
        if self.corpora != Path(self.root):
            root += " domains.folder=."
        order = shlex.quote(f"order=[{quote(folder.name)}]")
        return f"{LAYOUT}, for {folder.name} as a domain {root} {order}"

    def check_splits(self, folder: Path, paths: Sequence[Path]) -> None:
        """Raises ValueError where the names of all files of a domain say that they are held out."""
        splits = [find_split(path.relative_to(folder)) or "train" for path in paths]
        if "train" not in splits and self.by != "coarse":  # which joins folders
            raise ValueError(
                f"{folder} has no file to train on, but {count_noun(len(paths), 'file')} held out by name, "
                f"like {paths[0].relative_to(folder)} ({splits[0]}). "
                "Allowed: a file whose name says train, or no split"
            )

    def log_left_out(self) -> None:
        """Logs the files and hidden folders next to the domains."""
        texts = self.loose_text
        loose = [path for path in self.entries.values() if not path.is_dir()]
        other_files = [path for path in loose if path not in texts]
        if texts:
            log.warning(
                "Ignoring %s of %s in no domain's folder: %s",
                count_noun(len(texts), "text file"),
                self.corpora,
                format_file_names(texts),
            )
        if other_files:
            log.info(
                "Ignoring files of %s in no domain's folder: %s", self.corpora, format_file_names(other_files)
            )
        with naming_file(self.corpora):
            hidden = [path for path in sorted(self.corpora.glob(".*")) if path.is_dir()]
        if hidden:
            log.info("Ignoring hidden folders of %s: %s", self.corpora, format_file_names(hidden))

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
        values = [
            self.column_of(name),
            self.document,
            stamp_files(list_text_files(folder, ignored=self.ignored)),
        ]
        # Only with `skip` may a text lack some of its examples.
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
        refuse_dangling(folder, remedy="domains.general=null")
        return folder if folder.exists() else None
