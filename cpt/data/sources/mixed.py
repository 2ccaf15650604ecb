"""Text and chats that are mixed into every stage: the entries of `replay.sources`, and how one is read.

Nothing of them is held out. Files are read one after another and a data set of the Hub while it is
downloaded, so that of what follows the last document asked for nothing is read."""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cpt.core.exceptions import InvalidOptionError
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.messages import count_noun, log_once
from cpt.core.schema import BelowOne, Count, Options, Positive, Text, config, option
from cpt.data.sources.base import EXAMPLES, TEXT
from cpt.data.sources.chats import CHATS_FORMAT, IgnoredKeys, read_chat
from cpt.data.sources.examples import (
    BadExampleError,
    BadExamples,
    Example,
    OnBadExample,
    RawExample,
    reject_record,
    write_example,
)
from cpt.data.sources.files import (
    PLAIN_SUFFIXES,
    SUFFIXES,
    NoTextFileError,
    find_split,
    find_suffix,
    find_text_files,
    naming_file,
    refuse_unknown_kind,
    refuse_unreadable,
    stamp_files,
)
from cpt.data.sources.hub import describe_library_error, open_set
from cpt.data.sources.readers import (
    Oddities,
    Row,
    choose_unit,
    clean_documents,
    read_file_documents,
    read_file_rows,
    select_column_texts,
)

log = logging.getLogger(__name__)
MESSAGES = "messages"  # the format of chats
TRAIN = "train"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
FORMAT = 1  # part of every stamp: raise it when other documents are read of the same files


@config
class MixedSource(Options):
    """Text or chats that are mixed into every stage: an entry of `replay.sources`."""

    path: Text = option("file or folder on this machine, or name of a data set on the Hub")
    format: Literal["text", "messages"] = option("text, or chats: rows with messages", default="text")
    config: Text | None = option("configuration of a data set on the Hub", default=None)
    split: Text = option(
        "split that is read: of a data set on the Hub by its name, of files by what their names say",
        default=TRAIN,
    )
    column: Text = option("column of the text in tables", default="text")
    ratio: BelowOne | None = option(
        "share of the batch, at the beginning of a stage; null: a part of sources_ratio", default=None
    )
    end_ratio: BelowOne | None = option(
        "share of the batch at the end of a stage, linear in between; null: ratio", default=None
    )
    max_documents: Count | None = option("documents that are read, the first ones; null: all", default=None)
    max_epochs: Positive | None = option(
        "how often each sequence is read in the whole run, at most; then new text takes its share; "
        "null: no limit",
        default=None,
    )
    weight: Positive = option("factor of the loss on its tokens", default=1)
    on_bad_example: OnBadExample = option(
        "what to do with a row that cannot be used: stop, or leave it out and count it", default="stop"
    )

    def __post_init__(self) -> None:
        has_file_name = find_suffix(Path(self.path)) in SUFFIXES
        is_hub_name = not has_file_name and HUB_NAME.fullmatch(self.path) is not None
        if not self.is_local and not is_hub_name:
            raise InvalidOptionError(
                "path",
                self.path,
                reason="there is no such file or folder",
                allowed="a file, a folder, or a data set of the Hub like HuggingFaceFW/fineweb-edu",
            )
        if self.is_local and self.config is not None:
            raise InvalidOptionError(
                "config", self.config, reason=f"{self.path} is on this machine", allowed="null"
            )
        if self.is_local and "[" in self.split:
            raise InvalidOptionError(
                "split",
                self.split,
                reason="no part of a split is read of files",
                allowed="the whole split, with max_documents=N for its first documents",
            )
        if self.ratio is None and self.end_ratio is not None:
            raise InvalidOptionError(
                "end_ratio", self.end_ratio, reason="ratio is not given", allowed="null, or with ratio"
            )
        if self.ratio == 0 and not self.end_ratio:
            raise InvalidOptionError("ratio", self.ratio, reason="nothing is read", allowed="above 0")

    @property
    def local_path(self) -> Path:
        return Path(os.path.expanduser(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, else on the Hub."""
        return self.local_path.exists()

    @property
    def has_chats(self) -> bool:
        return self.format == MESSAGES


@dataclass(frozen=True)
class MixedReader:
    """Reads a source as cpt.data.corpus reads a domain."""

    name: str
    options: MixedSource
    # A source has neither held-out text nor classes of examples, which cpt.data.corpus asks a domain for.
    held_out: Mapping[str, Any] = field(default_factory=dict)
    class_limit: None = None
    skipped: dict[str, dict[str, Any]] = field(default_factory=dict)  # BadExamples.facts

    @property
    def section(self) -> str:
        """Where its options are, for messages."""
        return f"replay.sources.{self.name}"

    def form(self, name: str) -> str:
        return EXAMPLES if self.options.has_chats else TEXT

    def members(self, name: str) -> list[str]:
        return [name]

    def fingerprint(self, name: str) -> Any:
        """What decides the documents: the options of reading, and sizes and times of files."""
        options = self.options
        values: list[Any] = [
            FORMAT,
            options.format,
            options.path,
            options.config,
            options.split,
            options.column,
            options.max_documents,
            options.on_bad_example,
        ]
        if options.has_chats:
            values.append(CHATS_FORMAT)
        if options.is_local:
            values.append(stamp_files(self.find_files()))
        return ["replay.sources", values]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(train, document), `max_documents` of them at most. Raises ValueError for a source without a
        document, and as the readers of its files."""
        bad = BadExamples(
            is_skipping=self.options.on_bad_example == "skip", option=f"{self.section}.on_bad_example"
        )
        oddities = Oddities()
        ignored_keys = IgnoredKeys()
        if self.options.has_chats:
            documents = self.read_chats(bad, ignored_keys)
        else:
            documents = self.read_texts(bad, oddities)

        num_read = 0
        for document in islice(documents, self.options.max_documents):
            num_read += 1
            yield TRAIN, document

        changes = oddities.describe()
        if changes:
            log.warning("Reading %s: %s", self.section, changes)
        unread = {**ignored_keys.of_messages, **ignored_keys.of_rows}
        if unread:
            log.info("Leaving out keys in %s that are not read: %s", self.section, ", ".join(unread))
        if bad.counts:
            self.skipped[name] = bad.facts
        if num_read == 0:
            raise InvalidOptionError(
                f"{self.section}.path",
                self.options.path,
                reason="it has no document that can be used",
                allowed=f"rows with {MESSAGES}" if self.options.has_chats else "text",
            )
        log.info("Read %s of %s (%s)", count_noun(num_read, "document"), self.section, self.options.path)

    def read_texts(self, bad: BadExamples, oddities: Oddities) -> Iterator[str]:
        """Documents of text. A row of a data set of the Hub is a document; files are divided like those of a
        domain."""
        options = self.options
        reject = partial(reject_record, bad)
        if not options.is_local:
            texts = select_column_texts(
                self.hub_rows(), options.column, reject, option=f"{self.section}.column"
            )
            yield from clean_documents(texts, options.path, oddities=oddities)
            return

        paths = self.find_files()
        unit = choose_unit([path for path in paths if find_suffix(path) == ".txt"])
        for path in paths:
            with naming_file(path):
                yield from read_file_documents(
                    path,
                    column=options.column,
                    column_option=f"{self.section}.column",
                    unit="file" if find_suffix(path) == ".md" else unit,
                    oddities=oddities,
                    reject=reject,
                )

    def read_chats(self, bad: BadExamples, ignored_keys: IgnoredKeys) -> Iterator[str]:
        """Chats as documents. Raises ValueError for a file of plain text."""
        for number, (where, row) in enumerate(self.chat_rows(bad)):
            try:
                record = read_chat(row, where, ignored_keys)
            except BadExampleError as error:
                bad.add(error)
                continue
            yield write_example(self.make_example(record, row, number))

    def make_example(self, record: RawExample, row: Mapping[str, Any], number: int) -> Example:
        """The example of a chat, named by the `id` of its row, or else by the number of the row."""
        row_id = row.get("id")
        return Example(
            id=f"{self.name}-{number}" if row_id is None else str(row_id),
            source="",
            target=record.target,
            task=self.name,
            turns=record.turns,
            tools=record.tools,
            template_options=record.template_options,
        )

    def chat_rows(self, bad: BadExamples) -> Iterator[Row]:
        """Rows with messages. Raises ValueError for a file of plain text."""
        if not self.options.is_local:
            yield from self.hub_rows()
            return
        for path in self.find_files():
            if find_suffix(path) in PLAIN_SUFFIXES:
                raise ValueError(f"{path} is no table of chats. Allowed: a table with {MESSAGES}")
            with naming_file(path):
                yield from read_file_rows(path, reject=partial(reject_record, bad))

    def find_files(self) -> list[Path]:
        """The files on this machine that are read, in their order: one that is named, or those of a folder
        whose names say the split. Raises ValueError where there are none."""
        root = self.options.local_path
        if root.is_file():
            refuse_unknown_kind(root)
            refuse_unreadable(root)
            self.check_split_of_file(root)
            return [root]
        try:
            paths = find_text_files(root).text
        except NoTextFileError as error:
            raise InvalidOptionError(
                f"{self.section}.path",
                self.options.path,
                reason="no file of the folder has text",
                allowed=f"a folder with a {' '.join(SUFFIXES)} file",
            ) from error
        chosen = [path for path in paths if (find_split(path.relative_to(root)) or TRAIN) == self.file_split]
        if not chosen:
            raise InvalidOptionError(
                f"{self.section}.split",
                self.options.split,
                reason=f"no file of {root} is of it by its name, like {paths[0].relative_to(root)}",
                allowed="train, valid, test",
            )
        return chosen

    def check_split_of_file(self, path: Path) -> None:
        """Raises ValueError for a split that the name of the only file does not say, and logs held-out text
        that is trained on. Text without a split in its name is training text."""
        named_split = find_split(Path(path.name))
        split = named_split or TRAIN
        if self.file_split not in (TRAIN, split):
            description = f"of {split} by its name" if named_split else "whose name says no split"
            raise InvalidOptionError(
                f"{self.section}.split",
                self.options.split,
                reason=f"{path} is one file, {description}",
                allowed=f"{TRAIN}, or a folder",
            )
        if split != self.file_split:  # once: the files are looked for when they are checked, and when read
            message = f"Training on {path} ({self.section}), which is held out by its name: {split}"
            log_once(log, message, level=logging.WARNING)

    @property
    def file_split(self) -> str:
        """The split as names of files say it: `validation` is valid."""
        return find_split(Path(self.options.split)) or self.options.split

    def hub_rows(self) -> Iterator[Row]:
        """The rows of a data set, while it is downloaded. Raises ValueError where it cannot be read."""
        options = self.options
        try:
            entry = {"path": options.path, "name": options.config}
            split_names, load = open_set(entry, streaming=True)
            if options.split not in split_names:
                raise InvalidOptionError(
                    f"{self.section}.split", options.split, allowed=", ".join(split_names)
                )
            yield from self.count_rows(load(options.split))
        except InvalidOptionError:
            raise
        except Exception as error:  # of many classes, as rows are cast while they are read
            raise InvalidOptionError(
                f"{self.section}.path",
                options.path,
                reason=describe_library_error(error),
                allowed="a file, a folder, or a data set of the Hub",
            ) from error

    def count_rows(self, rows: Iterable[Any]) -> Iterator[Row]:
        """Rows with a progress bar."""
        position = f"{self.options.path} ({self.options.split})"
        with make_progress_bar(
            f"reading {position}", total=None, unit=" rows", scale=True, hidden=False, delay=DELAY
        ) as bar:
            for row in rows:
                bar.update()
                yield position, row
