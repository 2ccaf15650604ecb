"""Supervised tasks as domains: the layouts they are published in, prompt templates, and their source.

Files of a development split are not read: released ones are often the test set itself (O-LoRA, MIGU, SAPT),
so the split for tuning is held out from train."""

import datetime
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun, find_similar_path
from cpt.core.randomness import key, permute
from cpt.core.schema import Allowed, Count, Folder, Options, Text, TextList, config, option, read_options
from cpt.data.sources import docstrings, readers
from cpt.data.sources import files as text_files
from cpt.data.sources.base import GENERAL, Encoding, Source
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

log = logging.getLogger(__name__)
Layout = Literal["cl_benchmark", "superni", "alpaca", "fewshot_tsv", "trace", "messages", "jsonl", "csv"]
TABLES = ("jsonl", "csv")  # whose columns the config names
FIXED_COLUMNS = {  # columns
    "cl_benchmark": {"text": "sentence", "target": "label"},
    "trace": {"text": "prompt", "target": "answer"},
    "superni": {"text": "input"},
    "alpaca": {"instruction": "instruction", "target": "output"},
}
SPLIT_NAMES = ("train", "dev", "test")
# Unlike in folders of text, an evaluation file is of the development split: few layouts have both.
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    **dict.fromkeys(("dev", "development", "valid", "validation", "val", "eval", "evaluation"), "dev"),
}
# In LFPT5's draws: other names of data sets, and a label that is misspelt there once.
RENAMED = {"ag_news": "agnews", "amazon_review_full": "amazon", "yahoo_answers": "yahoo"}
SPELLING = {"thlete": "athlete"}
MAX_CHOICES = 50  # of a closed set of answers, at most
MIN_PER_CHOICE = 2  # how often they occur on average, at least
FIELDS = ("prefix", "question", "instruction", "options", "text", "task", "dataset")  # of every template
TEMPLATE_FIELDS = set(FIELDS) - {"instruction", "text"}  # that the template fills in itself


def find_named_split(name: str) -> str | None:
    """dev, test or train, by the words in the name of a file or folder, or in a path; None where they say no
    split. Of several the last that is held out: test examples are not trained on."""
    splits = [SPLIT_WORDS[word] for word in re.findall(r"[^\W\d_]+", name.lower()) if word in SPLIT_WORDS]
    held_out = [split for split in splits if split != "train"]
    if held_out:
        return held_out[-1]
    return "train" if splits else None


def is_split_file(path: Path) -> bool:
    """Whether a file's name begins or ends with a split, as those of one task's files do."""
    words = re.findall(r"[^\W\d_]+", text_files.remove_suffixes(path).lower())
    return bool(words) and (words[0] in SPLIT_WORDS or words[-1] in SPLIT_WORDS)


def list_layout_suffixes(layout: str) -> tuple[str, ...]:
    """The kinds of files that a layout has."""
    match layout:
        case "csv":
            return (".csv", ".tsv")
        case "jsonl":
            return (".jsonl", ".ndjson")
        case "messages":
            return (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv")
        case "fewshot_tsv":
            return (".txt",)
    return (".json",)


def find_files(root: Path, layout: str) -> Iterator[tuple[str, str | None, Path]]:
    """(data set, split, file) below a folder."""
    match layout:
        case "cl_benchmark":
            yield from find_cl_benchmark(root)
        case "superni":
            yield from find_superni(root)
        case "alpaca":
            yield from find_alpaca(root)
        case "fewshot_tsv":
            yield from find_fewshot(root)
        case _:
            yield from find_in_folders(root, layout)


def find_cl_benchmark(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """TASK/dataset/{train,dev,test,labels}.json: O-LoRA, EMNLP Findings 2023."""
    for split in SPLIT_NAMES:
        for path in sorted(root.glob(f"*/*/{split}.json")):
            yield path.parent.name.lower(), split, path


def find_superni(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """…/task/{train,dev,test}.json or …/task.json: Wang et al., EMNLP 2022."""
    for path in sorted(root.rglob("*.json")):
        split = path.stem.lower()
        if split in SPLIT_NAMES:
            yield path.parent.name, split, path
        else:
            yield path.stem, "train", path


def find_alpaca(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """{train,dev,test}/task.json, with twins in _T5: Feng et al., ACL 2025."""
    for path in sorted(root.glob("*/*.json")):
        split = find_named_split(path.parent.name)
        if split and not path.stem.endswith("_T5"):
            yield path.stem, split, path


def find_fewshot(root: Path) -> Iterator[tuple[str, str | None, Path]]:
    """dataset/draw/{train,valid,test}.txt, the draws together: LFPT5, ICLR 2022."""
    for path in sorted(root.glob("*/*/*.txt")):
        name = path.parents[1].name.removesuffix("_csv")
        yield RENAMED.get(name, name), find_named_split(path.stem), path


def find_in_folders(root: Path, layout: str) -> Iterator[tuple[str, str | None, Path]]:
    """dataset/…/file, or a file of a data set in the folder itself. Raises ValueError for a file in the
    folder that is named as a split, and for two data sets of one name, like c/ and c.jsonl."""
    entries: dict[str, Path] = {}
    for entry in sorted(path for path in root.iterdir() if path.name[0] != "."):
        files = list_data_files(entry, layout)
        if not files:
            continue
        if not entry.is_dir() and is_split_file(entry):
            raise ValueError(
                f"{entry} is in no task's folder. Allowed: {root}/TASK/{entry.name}, or files of one "
                "task each"
            )
        name = entry.name if entry.is_dir() else text_files.remove_suffixes(entry)
        if name in entries:
            raise ValueError(
                f"{name} is the name of two data sets ({entries[name]}, {entry}). "
                "Allowed: one file or folder for each name"
            )
        entries[name] = entry
        for path in files:
            split = find_named_split(str(path.relative_to(entry))) if entry.is_dir() else None
            yield name, split, path


def list_data_files(entry: Path, layout: str) -> list[Path]:
    """The data files of a folder and those below it, or a data file itself; other files are left out. Raises
    ValueError for files in a folder that cannot be read."""
    suffixes = list_layout_suffixes(layout)
    if not entry.is_dir():
        return [entry] if text_files.find_suffix(entry) in suffixes else []
    files = []
    for path in sorted(text_files.walk(entry)):
        is_metadata = path.name in text_files.METADATA_FILES
        if text_files.find_suffix(path) in suffixes and not is_metadata:
            text_files.refuse_unreadable(path)
            files.append(path)
    return files


def read_records(
    path: Path,
    layout: str,
    columns: Mapping[str, str | None],
    *,
    bad: BadExamples | None = None,
    ignored_keys: IgnoredKeys | None = None,
) -> Iterator[RawExample]:
    """The usable rows of a file; `bad` gets the others, and raises for them unless they are skipped. Counts
    the keys of chats that are not read in `ignored_keys`."""
    if bad is None:
        bad = BadExamples(is_skipping=False)
    if ignored_keys is None:
        ignored_keys = IgnoredKeys()
    if layout == "fewshot_tsv":
        yield from read_tsv(path, bad=bad)
        return

    rows: Iterator[readers.Row]
    definition = ""
    if layout == "superni":
        definition, rows = read_superni(path)
    else:
        rows = readers.read_file_rows(path, reject=partial(reject_record, bad))

    id_column = columns.get("id") if layout in TABLES else "id"
    for where, row in rows:
        try:
            if layout == "messages":
                record = read_chat(row, where, ignored_keys)
            else:
                record = read_row(row, where, layout, columns, definition=definition)
        except BadExampleError as error:
            bad.add(error)
            continue
        row_id = row.get(id_column) if id_column else None
        yield replace(record, id="" if row_id is None else str(row_id))


def read_superni(path: Path) -> tuple[str, Iterator[readers.Row]]:
    """The definition of a task, and its instances as rows. Raises ValueError for a file of another form."""
    task = read_json(path)
    if not isinstance(task, Mapping) or not isinstance(task.get("Instances"), list):
        raise ValueError(f"{path} has no Instances. Allowed: an object with Definition and Instances")
    definition = convert_first_to_text(task.get("Definition"), f"{path}: Definition")
    instances = enumerate(task["Instances"], start=1)
    return definition, ((f"{path}, instance {number}", instance) for number, instance in instances)


def list_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{key} ({count})" for key, count in counts.most_common())


def read_tsv(path: Path, *, bad: BadExamples) -> Iterator[RawExample]:
    """The rows of a file with a text, a tab and a label on each line."""
    for number, line in enumerate(readers.read_lines(path), start=1):
        if line.isspace():
            continue
        text, tab, label = line.rstrip("\n").rpartition("\t")
        if not tab:
            message = f"{path}, line {number} has no tab. Allowed: text, tab, label"
            bad.add(BadExampleError(message, "a line without a tab"))
            continue
        yield RawExample({"text": text}, SPELLING.get(label.strip(), label.strip()))


def read_row(
    row: Any, where: str, layout: str, columns: Mapping[str, str | None], *, definition: str
) -> RawExample:
    """The fields and the answer of a row, by the columns of its layout. Raises BadExampleError for a row that
    lacks one of them."""
    table = FIXED_COLUMNS.get(layout)
    option_name = "domains.format"
    if table is None:
        table = {name: column for name, column in columns.items() if column and name != "id"}
        option_name = "domains.columns.{}"
    try:
        fields = {
            name: read_text_field(row, column, where, option_name.format(name))
            for name, column in table.items()
        }
        if layout == "superni":
            fields["instruction"] = definition
            fields["target"] = convert_first_to_text(row.get("output"), f"{where}: output")
        elif layout == "alpaca":
            fields["text"] = convert_first_to_text(row.get("input"), f"{where}: input")
    except ValueError as error:
        raise BadExampleError(str(error), "a row without the texts that it needs") from error
    target = fields.pop("target")
    return RawExample(fields, target)


def convert_first_to_text(value: Any, where: str) -> str:
    """A text, or the first of several; empty for null. Raises ValueError for anything else."""
    first = next(iter(value), None) if isinstance(value, list) else value
    return "" if first is None else convert_to_text(first, where)


def convert_to_text(value: Any, where: str) -> str:
    """A text, or a finite number as one; raises ValueError for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not is_number:
        raise ValueError(f"{where} is not text: {value!r:.60}")
    return str(value)


def read_text_field(row: Any, column: str, where: str, option: str = "domains.format") -> str:
    """The text of a column; raises ValueError, with the option to change, if it is missing."""
    return convert_to_text(readers.read_cell(row, column, where, option), f"{where}: {column!r}")


def read_json(path: Path) -> Any:
    with text_files.naming_file(path):
        try:
            return json.loads("".join(readers.read_lines(path)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno} is not JSON: {error.msg}") from error


def check_date(text: str) -> None:
    """Raises ValueError for a text that is not a day of the calendar."""
    try:
        is_date = datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise InvalidOptionError("date", text, allowed="null, or a day YYYY-MM-DD")


@config
class Template(Options):
    """How a task's fields become a question. {text} is what it is about, the only part that may be cut."""

    name: Text = option("name of the template")
    source: Annotated[str, Allowed("a text with {fields}")] = option("format of the whole question")
    without_text: str | None = option("whole question if the text is empty; null: `source`")
    question: str = option("format of the question: {instruction}, {options}")
    names: Literal["none", "task", "dataset"] = option("names that the prefix contains")
    prefixes: Mapping[str, str] = option("prefix of each of `names`")
    options: Literal["file", "shuffled"] = option("order of options: as listed, or random for each example")
    separator: str = option("separator of options")
    instructions: Mapping[str, str] = option("question of each task")
    tasks: Mapping[str, str] = option("task of datasets whose path does not contain it")
    unasked: TextList = option("tasks whose text contains the question")

    def check_fields(self, columns: Sequence[str]) -> None:
        """Raises ValueError for a template with unmatched braces, or with a field that is neither one of
        FIELDS nor a column of the files."""
        empty_fields = dict.fromkeys((*FIELDS, *columns), "")
        formats = {
            "source": self.source,
            "without_text": self.without_text or "",
            "question": self.question,
        }
        for name, prefix in self.prefixes.items():
            formats[f"prefixes.{name}"] = prefix

        for option_name, text in formats.items():
            try:
                text.format_map(empty_fields)
            except (ValueError, LookupError, AttributeError) as error:
                raise InvalidOptionError(
                    f"template.{option_name}",
                    repr(text),
                    reason=f"{error!r} in its {{fields}}",
                    allowed=", ".join(f"{{{field}}}" for field in empty_fields),
                ) from error
        if self.source.count("{text}") > 1:
            raise InvalidOptionError("template.source", repr(self.source), allowed="{text} at most once")

    def ask(
        self, fields: Mapping[str, str], *, task: str, dataset: str, choices: Sequence[str], seed: int
    ) -> tuple[str, tuple[int, int]]:
        """The question, and the span of the text in it. Shuffled options depend on seed and text alone."""
        values = {"instruction": self.instructions.get(task, ""), **fields, "task": task, "dataset": dataset}
        text = values["text"]
        order = np.arange(len(choices))
        if self.options == "shuffled" and choices:
            order = permute(order, len(choices), stream=key("options", seed, task, text))
        values["options"] = self.separator.join(choices[int(position)] for position in order)
        values["prefix"] = self.prefixes.get(self.names, "").format_map(values)
        values["question"] = "" if task in self.unasked else self.question.format_map(values)

        if not text.strip() and self.without_text is not None:
            return self.without_text.format_map(values).rstrip(), (0, 0)
        # The span of the text is needed: what is before and after it is formatted apart.
        before, placeholder, after = self.source.partition("{text}")
        beginning = before.format_map(values)
        ending = after.format_map(values)
        if not placeholder:
            return (beginning + ending).rstrip(), (0, 0)
        source = (beginning + text + ending).rstrip()
        text_end = min(len(beginning) + len(text), len(source))  # blanks at its end may be stripped
        return source, (len(beginning), text_end)


def check_columns(columns: Mapping[str, str | None]) -> None:
    """Raises ValueError for tables without the columns of a text and a target, and for a column with the name
    of a field that the template fills in."""
    if not (columns.get("text") and columns.get("target")):
        raise InvalidOptionError("columns", dict(columns), allowed="the columns of text and target")
    for name in sorted(TEMPLATE_FIELDS.intersection(columns)):
        raise ValueError(
            f"columns.{name} is invalid: {{{name}}} is made by the template. "
            "Allowed: another name for the field, which its source then has"
        )


@config
class Tasks(Source):
    """Supervised tasks in a folder, in a published layout; without a folder those of `make_package_task`."""

    root: Folder | None = option("folder of all tasks; null: tasks made of installed packages")
    format: Layout = option("layout of the folder")
    columns: Mapping[str, str | None] = option("columns of jsonl and csv files: text, target, id, …")
    template: Mapping[str, Any] = option("template of a question, of conf/domains/template")
    choices: Literal["auto", "none"] = option("auto: labels of the file, else few training answers")
    unknown: Literal["error", "drop"] = option("what to do with examples whose answer is no choice")
    per_class: Literal["all"] | Count = option("maximum training examples per answer; all: no limit")
    truncate: Literal["tail", "middle", "released"] = option("what is cut from an example that is too long")
    scored_turns: Literal["all", "last"] = option("assistant's turns that contribute to the loss of a chat")
    on_bad_example: OnBadExample = option(
        "what to do with an example that cannot be used: stop, or leave it out and count it", default="stop"
    )
    date: str | None = option(
        "YYYY-MM-DD that chat templates print as today; null: the day of the run's first start", default=None
    )
    general: Text | None = option("folder of the general text, below root")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is not None and not Path(self.root).is_dir():
            raise InvalidOptionError(
                "root",
                self.root,
                reason="there is no such folder",
                meant=find_similar_path(Path(self.root)),
                allowed="a folder",
            )
        columns: Mapping[str, str | None] = {}
        if self.root is not None and self.format in TABLES:
            columns = self.columns
            check_columns(columns)
        self.prompt.check_fields([name for name in columns if name not in ("target", "id")])
        if self.date is not None:
            check_date(self.date)
        if not self.names:
            raise InvalidOptionError("root", self.root, allowed="a folder of tasks")

    @cached_property
    def prompt(self) -> Template:
        return read_options(Template, self.template, section="template")

    @property
    def encoding(self) -> Encoding:
        return Encoding(
            truncate=self.truncate,
            scored_turns=self.scored_turns,
            on_bad_example=self.on_bad_example,
            date=self.date,
        )

    @property
    def chats(self) -> bool:
        return self.root is not None and self.format == "messages"

    @property
    def class_limit(self) -> int | None:
        return None if self.per_class == "all" else int(self.per_class)

    @cached_property
    def files(self) -> dict[str, list[tuple[str, Path]]]:
        """The files of each data set, with their splits; those of dev are not read. Raises ValueError for a
        folder without data sets in this layout, and for a name of several folders."""
        if not self.root:
            return {}
        root = Path(self.root)
        files: dict[str, list[tuple[str, Path]]] = {}
        with text_files.naming_file(root):
            for path in chain(root.glob("*"), root.glob("*/*")):
                text_files.refuse_dangling(path, remedy="no such link")
            for name, split, path in find_files(root, self.format):
                files.setdefault(name, []).append((split or "train", path))
        if not files:
            raise InvalidOptionError(
                "format",
                self.format,
                reason=f"{self.root} has no data set in this layout",
                allowed=", ".join(get_args(Layout)),
            )

        # The layout has data sets below tasks: two tasks may have one of the same name.
        if self.format == "cl_benchmark":
            for name, dataset_files in files.items():
                folders = sorted({str(path.parent) for _, path in dataset_files})
                if len(folders) > 1:
                    folder_count = count_noun(len(folders), "data set")
                    raise ValueError(
                        f"{name} is the name of {folder_count} ({', '.join(folders)}). "
                        "Allowed: one folder for each name"
                    )
        return {name: dataset_files for name, dataset_files in files.items() if name != self.general}

    @property
    def names(self) -> list[str]:
        return list(docstrings.TASK_PACKAGES if self.root is None else self.files)

    def labels_of(self, name: str) -> Path | None:
        """The file that lists the labels of a data set; None where the layout has none."""
        if self.root is None or self.format != "cl_benchmark":
            return None
        _, path = self.files[name][0]
        return path.with_name("labels.json")

    def task_of(self, name: str) -> str:
        """The task of a data set: as its place says, as the template says, else its own name."""
        labels_path = self.labels_of(name)
        if labels_path is not None:
            return labels_path.parents[1].name
        return self.prompt.tasks.get(name.lower(), name)

    def find_exclusion(self, name: str) -> str:
        is_general = name == self.general and self.general_folder is not None
        return f"domains.general={name}" if is_general else super().find_exclusion(name)

    def entries_of(self, name: str) -> tuple[str, ...]:
        return (f"template.tasks.{name.lower()}", f"template.instructions.{self.task_of(name)}")

    def check(self, order: Sequence[str]) -> None:
        self.check_instructions(order)
        unread = []
        for name in order:
            unread += [path for split, path in self.files.get(name, ()) if split == "dev"]
        if unread and not self.chats:
            log.info(
                "Ignoring %s of development splits, like %s: %s",
                count_noun(len(unread), "file"),
                unread[0],
                "validation text is held out from train instead (domains.held_out.valid)",
            )
        self.log_ignored()
        if self.general_folder is None:
            reason = "has no folder of it" if self.root is not None else "is not set"
            docstrings.log_general_docs(f"domains.root={format_value(self.root)} {reason}")

    def check_instructions(self, order: Sequence[str]) -> None:
        """Raises ValueError for a task that the template has no instruction for, where it asks with one and
        the files have none."""
        has_instructions = self.root is None or self.format in ("messages", "superni", "alpaca")
        if has_instructions or "{instruction}" not in self.prompt.question:
            return
        for name in order:
            task = self.task_of(name)
            if task not in self.prompt.unasked and task not in self.prompt.instructions:
                raise InvalidOptionError(
                    "domains/template",
                    self.prompt.name,
                    reason=f"no instruction for {task} of {name}",
                    allowed=(
                        f"{', '.join(self.prompt.instructions)} (+domains.template.tasks.{name}=…), "
                        "or domains/template=plain"
                    ),
                )

    def log_ignored(self) -> None:
        """Logs the number of files of other kinds than those of the layout."""
        if self.root is None:
            return
        root = Path(self.root)
        suffixes = list_layout_suffixes(self.format)
        hidden = [path.name for path in root.iterdir() if path.name.startswith(".")]
        skipped_entries = {self.general, *hidden}
        ignored = []
        for path in text_files.walk(root):
            is_of_task = path.relative_to(root).parts[0] not in skipped_entries
            if is_of_task and text_files.find_suffix(path) not in suffixes:
                ignored.append(path)
        if ignored:
            log.info(
                "Ignoring %s of another format than %s (domains.format=%s): %s",
                count_noun(len(ignored), "file"),
                " or ".join(suffixes),
                self.format,
                text_files.format_file_names(ignored),
            )

    @property
    def general_folder(self) -> Path | None:
        """The folder of the general text; None if the tasks have none."""
        if not self.root or not self.general:
            return None
        folder = Path(self.root) / self.general
        return folder if folder.is_dir() else None

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        if name == GENERAL:
            yield from self.read_general()
            return
        choices = self.choices_of(name)
        task = self.task_of(name)
        bad = BadExamples(is_skipping=self.on_bad_example == "skip")
        ignored_keys = IgnoredKeys()
        num_read = 0
        num_dropped = 0
        for split, number, record in self.records(name, bad=bad, ignored_keys=ignored_keys):
            # Released files have a few answers outside the choices. They are an error unless the config says
            # that they are known and dropped.
            is_empty = not record.target.strip()
            is_outside = bool(choices) and record.target not in choices
            if (is_empty or is_outside) and self.unknown == "drop":
                num_dropped += 1
            elif is_empty or is_outside:
                where = f"example {number} of {name}, {split}"
                bad.add(answer_error(record.target, where, choices))
            else:
                num_read += 1
                row_id = record.id or f"{name}-{split}-{number}"
                example = self.make_example(record, row_id, task=task, dataset=name, choices=choices)
                yield split, write_example(example)

        if num_dropped:
            log.info(
                "Dropping %s of %s with an answer outside the choices",
                count_noun(num_dropped, "example"),
                name,
            )
        if ignored_keys.of_messages:
            keys = list_counts(ignored_keys.of_messages)
            log.warning("Ignoring keys of messages in %s that are not read: %s", name, keys)
        if ignored_keys.of_rows:
            keys = list_counts(ignored_keys.of_rows)
            log.info("Leaving out keys of rows in %s that are not read: %s", name, keys)
        self.record_skipped(name, bad, num_read=num_read)

    def read_general(self) -> Iterator[tuple[str, str]]:
        """The documents of the general text."""
        folder = self.general_folder
        if folder is None:
            return docstrings.read_docs()
        return readers.read_folder(folder, GENERAL, column="text", document="auto")

    def make_example(
        self, record: RawExample, row_id: str, *, task: str, dataset: str, choices: tuple[str, ...]
    ) -> Example:
        """The example of a row: its question by the template, or a chat as it is."""
        source = ""
        span = (0, 0)
        if not record.turns:
            seed = int(self.held_out["seed"])
            source, span = self.prompt.ask(
                record.fields, task=task, dataset=dataset, choices=choices, seed=seed
            )
        return Example(
            id=row_id,
            source=source,
            target=record.target,
            task=task,
            choices=choices,
            text_span=span,
            turns=record.turns,
            tools=record.tools,
            template_options=record.template_options,
        )

    def records(
        self, name: str, *, bad: BadExamples, ignored_keys: IgnoredKeys
    ) -> Iterator[tuple[str, int, RawExample]]:
        """(split, number within the split, row) of the usable rows of a data set. Raises ValueError for a
        file without rows."""
        if self.root is None:
            for number, record in enumerate(docstrings.make_package_task(name)):
                yield "train", number, record
        num_usable: Counter[str] = Counter()  # by split, so far
        for split, path in self.read_files(name):
            num_before = num_usable[split] + bad.counts.total()
            with text_files.naming_file(path):
                rows = read_records(path, self.format, self.columns, bad=bad, ignored_keys=ignored_keys)
                for record in rows:
                    yield split, num_usable[split], record
                    num_usable[split] += 1
            if num_usable[split] + bad.counts.total() == num_before:
                raise ValueError(f"{path} is empty; needed: a row or more, or no such file")

    def read_files(self, name: str) -> Iterator[tuple[str, Path]]:
        """Yields split and path of each file of a data set that is read. A development split is the
        validation text of chats; in published layouts, where it is often the test set, it is left out."""
        for split, path in self.files.get(name, ()):
            if split != "dev":
                yield split, path
            elif self.chats:
                yield "valid", path

    def choices_of(self, name: str) -> tuple[str, ...]:
        """The answers of a closed task; none where they are open. Raises ValueError for a file of labels that
        is not a list."""
        if self.choices == "none" or self.chats:
            return ()
        labels_path = self.labels_of(name)
        if labels_path is not None:
            labels = read_json(labels_path)
            if not isinstance(labels, list) or not labels:
                raise ValueError(f"{labels_path} has {labels!r:.60}; needed: a list of labels")
            return tuple(map(str, labels))

        # Answers of all splits count here, so that an open task stops early.
        all_answers: set[str] = set()
        train_counts: Counter[str] = Counter()
        bad = BadExamples(is_skipping=self.on_bad_example == "skip")
        for split, _, record in self.records(name, bad=bad, ignored_keys=IgnoredKeys()):
            all_answers.add(record.target)
            if split == "train" and record.target.strip():
                train_counts[record.target] += 1
            if len(all_answers) > 2 * MAX_CHOICES:
                return ()
        is_closed = (
            len(train_counts) <= MAX_CHOICES and MIN_PER_CHOICE * len(train_counts) <= train_counts.total()
        )
        return tuple(sorted(train_counts)) if is_closed else ()

    def fingerprint(self, name: str) -> Any:
        if name == GENERAL:
            folder = self.general_folder
            if folder is None:
                return docstrings.stamp_docs()
            return text_files.stamp_files(text_files.list_text_files(folder))

        options: list[Any] = [
            dict(self.template),
            dict(self.columns),
            self.format,
            self.choices,
            self.unknown,
        ]
        # Others only if they change the text, so that the cache of other texts stays valid.
        if self.chats:
            options.append(CHATS_FORMAT)
        if self.on_bad_example == "skip":
            options.append(self.on_bad_example)

        if self.root is None:
            packages = docstrings.TASK_PACKAGES[name]
            package_stamps = [
                text_files.stamp_files(docstrings.find_modules(package)) for package in packages
            ]
            sizes = [docstrings.TASK_CLASSES, docstrings.TASK_EXAMPLES, package_stamps]
            return [options, self.class_limit, sizes]
        paths = [path for _, path in self.read_files(name)]
        labels_path = self.labels_of(name)
        if labels_path is not None:
            paths.append(labels_path)
        return [options, self.class_limit, text_files.stamp_files(paths)]


def answer_error(answer: str, where: str, choices: Sequence[str]) -> BadExampleError:
    """The error of an answer that is empty, or none of the choices."""
    kind = "an answer that is not among the choices" if answer.strip() else "an empty answer"
    return BadExampleError(
        f"{where}: its answer {answer!r:.60} is not one of the choices. "
        f"Allowed: {', '.join(choices) or 'a text'} (domains.unknown=drop leaves it out)",
        kind,
    )
