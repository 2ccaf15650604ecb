"""Domains that are supervised tasks: examples, text to text."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cpt.core.options import option, read_options
from cpt.core.rules import MAPPING, TEXT, Rule, is_text, is_whole, one_of, or_null
from cpt.data.examples import Example, write_example
from cpt.data.sources.base import GENERAL, Encoding, Source
from cpt.data.sources.docstrings import (
    TASK_PACKAGES,
    package_task,
    read_general,
    stamp_general,
    stamp_package_task,
)
from cpt.data.sources.formats import FORMATS, Dataset, Record, find_datasets, read_labels
from cpt.data.sources.readers import (
    documents_of,
    files_of,
    naming_file,
    reading_bar,
    split_of,
    stamps,
    unit_of,
)
from cpt.data.sources.templates import Template

log = logging.getLogger(__name__)
MOST_CHOICES = 50  # more different answers are no closed set
TABLES = ("jsonl", "csv")  # formats whose columns are named
PER_CHOICE = 2  # nor are answers that stand there fewer times than this, on average


@dataclass(frozen=True, kw_only=True)
class Tasks(Source):
    """Supervised tasks in a folder, in one of the layouts they are published in; without a folder those of
    cpt.data.sources.docstrings.package_task.

    A task's split for tuning is always held out from its training set: released development sets are often
    the test set. `choices` are the labels that a file lists, else the different answers of the training set
    where they are few."""

    root: str | None = option(
        "the folder of all tasks; null: a few made of installed packages", or_null(Rule(is_text, "a folder"))
    )
    format: str = option("how the folder is laid out", one_of(*FORMATS))
    columns: Mapping[str, str | None] = option(
        "of jsonl and csv: the column of each field: text, target, id, and what a template may name", MAPPING
    )
    template: Mapping[str, Any] = option("how fields become a question, as in conf/domains/template", MAPPING)
    choices: str = option("which answers there are: found as told, or left open", one_of("auto", "none"))
    unknown: str = option(
        "held-out examples whose answer is none of the choices: an error, or left out",
        one_of("error", "drop"),
    )
    per_class: Any = option(
        "training examples of each answer, at most; all: no bound",
        Rule(lambda value: value == "all" or is_whole(value, 1), "all, or a whole number, 1 or more"),
    )
    truncate: str = option("what is cut of an example that is too long", TEXT)
    scored_turns: str = option("of a chat: the turns of the assistant that are scored", TEXT)
    general: str | None = option("below root: the folder of the general text", or_null(TEXT))

    def check_together(self) -> None:
        super().check_together()
        if self.root is not None and not Path(self.root).is_dir():
            raise ValueError(f"root={self.root}: there is no such folder")
        self.shape.check_fields(self.own_fields)
        if not self.names:
            raise ValueError(f"root={self.root} has no task but {self.general}")
        self.encoding  # noqa: B018  (raises for what it may not be)

    @property
    def own_fields(self) -> tuple[str, ...]:
        """What a row has for a template besides what all have; ValueError for columns that lack what is
        needed."""
        if self.root is None:
            return ()
        if self.format not in TABLES:
            return FORMATS[self.format].fields
        if not self.columns.get("text") or not self.columns.get("target"):
            raise ValueError(f"columns={dict(self.columns)}; needed: the columns of text and target")
        return tuple(name for name in self.columns if name not in ("target", "id"))

    @cached_property
    def shape(self) -> Template:
        """The template."""
        return read_options(Template, self.template, place="template")

    @property
    def encoding(self) -> Encoding:
        return Encoding(truncate=self.truncate, scored_turns=self.scored_turns)

    @property
    def chats(self) -> bool:
        return self.root is not None and FORMATS[self.format].chats

    @property
    def class_limit(self) -> int | None:
        return None if self.per_class == "all" else int(self.per_class)

    @cached_property
    def datasets(self) -> dict[str, Dataset]:
        """The tasks of the folder."""
        found = find_datasets(Path(str(self.root)), self.format)
        return {name: each for name, each in found.items() if name != self.general}

    @property
    def names(self) -> list[str]:
        return list(TASK_PACKAGES) if self.root is None else list(self.datasets)

    def check(self, order: Sequence[str]) -> None:
        if self.root is None:
            log.info(
                "domains.root=null: the tasks are made of installed packages (%s)", ", ".join(self.names)
            )
            return
        for name in order:
            one = self.datasets[name]
            instructed = "instruction" in FORMATS[self.format].fields
            if not self.chats:
                task = self.shape.task_of(name, one.task)
                self.shape.check_task(task, instructed=instructed, dataset=name)
        if unread := [path for name in order for path in self.datasets[name].unread]:
            log.info(
                "%d files of development splits, like %s, are not read: what is tuned on is held out from "
                "train (domains.held_out.valid)", len(unread), unread[0],
            )  # fmt: skip
        if self.general_folder is None:
            log.info("%s has no folder of general text: that is the documentation of Python", self.root)
        else:
            log.info("the general text is that of %s", self.general_folder)

    @property
    def general_folder(self) -> Path | None:
        """The folder of the general text; None where there is none."""
        if self.root is None or self.general is None:
            return None
        folder = Path(self.root) / self.general
        return folder if folder.is_dir() else None

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        if name == GENERAL:
            yield from self.read_general()
            return
        choices, dropped = self.choices_of(name), 0
        for split, number, record in self.records(name):
            if choices and record.target not in choices:
                if self.unknown == "error":
                    raise ValueError(
                        f"example {number} of {name}, {split}: its answer {record.target!r:.60} is none "
                        f"of the choices; allowed: {', '.join(choices)} (domains.unknown=drop leaves it out)"
                    )
                dropped += 1
                continue
            yield split, write_example(self.example(name, f"{split}-{number}", record, choices))
        if dropped:
            log.info("%s: %d examples whose answer is none of the choices are left out", name, dropped)

    def records(self, name: str) -> Iterator[tuple[str, int, Record]]:
        """The rows of a task: split, number in it, row."""
        if self.root is None:
            for number, record in enumerate(package_task(name)):
                yield "train", number, record
            return
        numbers: Counter[str] = Counter()
        for split, path in self.datasets[name].files:
            before = numbers[split]
            with naming_file(path):
                for record in FORMATS[self.format].read(path, self.columns):
                    yield split, numbers[split], record
                    numbers[split] += 1
            if numbers[split] == before:
                raise ValueError(f"{path} is empty; needed: a row or more, or no such file")

    def choices_of(self, name: str) -> tuple[str, ...]:
        """The answers that there are; none where they are open."""
        if self.choices == "none" or self.chats:
            return ()
        labels = None if self.root is None else self.datasets[name].labels
        if labels is not None:
            return read_labels(labels)
        answers: Counter[str] = Counter()
        for split, _, record in self.records(name):
            answers[record.target] += split == "train"
            if len(answers) > 2 * MOST_CHOICES:
                return ()
        answers = +answers
        closed = len(answers) <= MOST_CHOICES and PER_CHOICE * len(answers) <= answers.total()
        return tuple(sorted(answers)) if closed else ()

    def example(self, name: str, number: str, record: Record, choices: tuple[str, ...]) -> Example:
        said = None if self.root is None else self.datasets[name].task
        task = self.shape.task_of(name, said)
        place = record.id or f"{name}-{number}"
        if record.turns:
            return Example(place, "", record.target, task, (), (0, 0), record.turns)
        if not record.target.strip():
            raise ValueError(f"example {place} of {name} has no answer; needed: a text to learn")
        source, text = self.shape.ask(
            record.fields, task=task, dataset=name, choices=choices, seed=int(self.held_out["seed"])
        )
        return Example(place, source, record.target, task, choices, text)

    def read_general(self) -> Iterator[tuple[str, str]]:
        folder = self.general_folder
        if folder is None:
            yield from read_general()
            return
        files = files_of(folder)
        unit = unit_of(files)
        with reading_bar(GENERAL, total=len(files), unit=" files") as progress:
            for path in files:
                yield from (
                    (split_of(path, folder), text) for text in documents_of(path, column="text", unit=unit)
                )
                progress.update()

    def fingerprint(self, name: str) -> Any:
        if name == GENERAL:
            return stamp_general() if self.general_folder is None else stamps(files_of(self.general_folder))
        how = [dict(self.template), dict(self.columns), self.format, self.choices, self.unknown]
        if self.root is None:
            return [how, self.class_limit, stamp_package_task(name)]
        one = self.datasets[name]
        labels = [] if one.labels is None else [one.labels]
        return [how, self.class_limit, stamps([*(path for _, path in one.files), *labels])]
