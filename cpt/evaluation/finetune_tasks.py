"""End tasks: their options, and where their examples come from. Nothing here needs torch."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from annotated_types import Ge

from cpt.core import randomness
from cpt.core.config import digest
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.core.schema import (
    Allowed,
    BelowOne,
    Count,
    Folder,
    Int,
    Natural,
    NonNegative,
    OneOrMore,
    Options,
    Positive,
    Text,
    check_names,
    check_value,
    config,
    join,
    list_option_types,
    option,
    prefix_errors,
    read_options,
)
from cpt.core.sections import Choice, to_python
from cpt.data.sources import files as text_files
from cpt.data.sources import readers

EXAMPLE_COLUMNS = ("id", "text", "text_pair", "label")
# The splits of a task, with the names that cpt.data.sources.files has for them.
FILE_SPLITS = {"train": "train", "dev": "valid", "test": "test"}
FINETUNE_FORMAT = 2  # raised when the inputs of a prediction file change
HUB_TASK = "{path: ag_news, splits: {train: train, dev: validation, test: test}}, where dev may be null"


# As transformers' Trainer with group_by_length=true.
BATCHES_SORTED_TOGETHER = 50


@config
class FinetuneOptions(Options):
    """How a task is learned and scored; a task may have its own."""

    epochs: Count = option("passes over the task's training examples")
    lr: Positive = option("peak learning rate")
    weight_decay: NonNegative = option("weight decay on all parameters")
    warmup_ratio: BelowOne = option("warm-up, as a share of the steps; then linear decay")
    batch_size: Count = option("examples per step")
    group_by_length: Annotated[bool | Count, Allowed("true, false, or a whole number, 1 or more")] = option(
        "batches of examples of similar length, with less padding: the number of batches whose examples are "
        "sorted together; true: 50; false and 1: a plain shuffle"
    )
    max_seq_length: Annotated[Int, Ge(8)] = option("maximum number of tokens of text and pair together")
    precision: Literal["32-true", "bf16-mixed"] = option("precision of fine-tuning")
    dropout: BelowOne = option("dropout of the classification head; the model keeps its own")
    freeze_encoder: bool = option("train the head only")
    metric: Literal["macro_f1", "micro_f1", "accuracy"] = option("score of a task that MF1 averages")
    load_best_model_at_end: bool = option("evaluate the epoch that is best on dev, not the last one")
    max_train_samples: Count | None = option(
        "size of a random sample of train, the same in every run; null: all", default=None
    )
    max_eval_samples: Count | None = option(
        "size of a random sample of dev and of test, the same in every run; null: all", default=None
    )

    @property
    def sorted_batches(self) -> int:
        """The number of batches whose examples are sorted by length together; 1: none are sorted."""
        if self.group_by_length is True:
            return BATCHES_SORTED_TOGETHER
        return max(1, self.group_by_length)


@config
class FinetuneProtocol(Options):
    """Options of all tasks together."""

    when: Literal["last", "each", "diagonal"] = option(
        "stages after which tasks are measured; diagonal: each after its own domain"
    )
    score_on: Literal["test", "dev"] = option("split that is evaluated; dev: to choose options")
    seeds: Annotated[OneOrMore[Natural], Allowed("a list of different whole numbers, 0 or more")] = option(
        "seeds of fine-tuning, one run each"
    )
    eval_batch_size: Count = option("examples per forward pass")
    columns: Mapping[str, Any] = option("columns of the files: id, text, text_pair, label")
    tasks: (
        Annotated[Mapping[str, Mapping[str, Any] | None], Allowed("for each task its own values, or null")]
        | None
    ) = option("options per task, by domain; null removes the task")


SETTINGS = tuple(option_field.name for option_field in fields(FinetuneOptions))
OPTION_TYPES = list_option_types(FinetuneOptions) | list_option_types(FinetuneProtocol) | {"path": Text}


def check_task_values(
    values: Mapping[str, Any], types: Mapping[str, Any] = OPTION_TYPES, *, section: str = "endtask"
) -> None:
    """Raises ValueError for a value that is not allowed, and for a column that examples do not have. Options
    without a value are not checked."""
    for key, value in values.items():
        check_value(join(section, key), value, types.get(key, Any))
    check_names(values.get("columns", ()), EXAMPLE_COLUMNS, section=join(section, "columns"))


@dataclass(frozen=True)
class LabelledExample:
    """A text, or a pair of texts, and its label."""

    id: str
    text: str
    text_pair: str | None
    label: str


@dataclass(frozen=True)
class FinetuneTask:
    """A task's examples. `test` is the split that is scored, which may be dev. `dev` is the split that
    chooses the epoch; empty if the last epoch is taken."""

    name: str
    train: list[LabelledExample]
    dev: list[LabelledExample]
    test: list[LabelledExample]
    classes: list[str]
    settings: FinetuneOptions

    def __post_init__(self) -> None:
        """Raises ValueError for splits that can not be learned and scored."""
        self.check_split("train", self.train)
        self.check_split("test", self.test)
        if self.settings.load_best_model_at_end:
            self.check_split("dev", self.dev)

    def check_split(self, split: str, examples: Sequence[LabelledExample]) -> None:
        """Raises ValueError for a split without examples or with a label that train lacks, and for a task of
        one class."""
        if not examples:
            raise ValueError(f"end task {self.name} has no example in {split}; needed is one or more")
        if len(self.classes) < 2:
            raise ValueError(
                f"end task {self.name} has one class in train, {self.classes[0]!r}; needed are two or more"
            )
        if split == "train":  # the classes are its labels
            return
        for example in examples:
            if example.label not in self.classes:
                raise ValueError(
                    f"end task {self.name}: the label {example.label!r} of {example.id} in {split} is not in "
                    f"train. Allowed: {', '.join(self.classes)}"
                )

    @property
    def steps(self) -> int:
        """Optimizer steps of a fine-tuning."""
        return math.ceil(len(self.train) / self.settings.batch_size) * self.settings.epochs

    @cached_property
    def content(self) -> str:
        """A hash of the examples that are used, in their order."""
        splits = []
        for examples in (self.train, self.dev, self.test):
            splits.append([asdict(example) for example in examples])
        return digest([self.name, self.classes, splits])

    def digest(self, seed: int) -> str:
        """A hash of what the predictions of a seed depend on besides the model."""
        settings = {}
        for name, value in asdict(self.settings).items():
            if not name.startswith("max_"):  # sizes of samples: `content` is a hash of the sample itself
                settings[name] = value
        return digest([FINETUNE_FORMAT, self.content, settings, seed])


@config
class TaskSource(FinetuneOptions, FinetuneProtocol, ABC):
    """Where the examples come from: options of all tasks together. `tasks` has the values of single tasks,
    which replace those of all, or None for a task that is left out."""

    TASK_OPTIONS: ClassVar[tuple[str, ...]] = ("columns", "splits")  # of a task besides FinetuneOptions
    splits: Any = option("where the splits come from")

    def __post_init__(self) -> None:
        check_task_values({"columns": self.columns}, section="")
        types = OPTION_TYPES | list_option_types(type(self))
        for name, values in self.named.items():
            check_names(values, (*SETTINGS, *self.TASK_OPTIONS), section=f"tasks.{name}")
            check_task_values(values, types, section=f"tasks.{name}")

    @property
    def named(self) -> dict[str, dict[str, Any]]:
        """The tasks that are named, with their values."""
        tasks = self.tasks or {}
        return {name: dict(values) for name, values in tasks.items() if values is not None}

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """All tasks, whether their domains are learned or not."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a task's data exist, if that is known without reading them."""

    @abstractmethod
    def read(self, name: str, split: str) -> list[LabelledExample]:
        """The examples of train, dev or test; none for a missing dev. Raises ValueError for what can not be
        read."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""

    def labels_of(self, name: str, train: Sequence[LabelledExample]) -> list[str]:
        """The labels that a task has, sorted: those of train."""
        return sorted({example.label for example in train})

    def values(self, name: str) -> dict[str, Any]:
        """The options as they are for a task; its columns one by one."""
        task_values = self.named.get(name, {})
        columns = {**self.columns, **task_values.get("columns", {})}
        return {**vars(self), **task_values, "columns": columns}

    def settings(self, name: str) -> FinetuneOptions:
        """How a task is learned and scored: its own values, else those of all tasks."""
        values = self.values(name)
        settings = {key: values[key] for key in SETTINGS}
        return FinetuneOptions(**settings)

    def task(self, name: str) -> FinetuneTask:
        """A task with the examples of the splits that are used. Raises ValueError for a split that cannot be
        read, learned or scored."""
        settings = self.settings(name)
        is_dev_scored = self.score_on == "dev"
        is_epoch_chosen_on_dev = settings.load_best_model_at_end  # else the last epoch is scored

        splits: dict[str, list[LabelledExample]] = {"train": self.read(name, "train"), "dev": [], "test": []}
        if is_dev_scored or is_epoch_chosen_on_dev:
            splits["dev"] = self.read(name, "dev")
        if not is_dev_scored:  # a search of options never sees the test examples
            splits["test"] = self.read(name, "test")

        # The classes are those of the whole train split: a sample of it may lack a rare one.
        classes = self.labels_of(name, splits["train"])
        for split, examples in splits.items():
            max_samples = settings.max_train_samples if split == "train" else settings.max_eval_samples
            if max_samples is not None:
                splits[split] = self.sample_examples(examples, max_samples, name=name, split=split)

        if is_dev_scored and not splits["dev"]:
            raise InvalidOptionError(
                "endtask.score_on", "dev", reason=f"the end task {name} has no dev examples", allowed="test"
            )
        return FinetuneTask(
            name,
            train=splits["train"],
            dev=splits["dev"] if is_epoch_chosen_on_dev else [],
            test=splits["dev"] if is_dev_scored else splits["test"],
            classes=classes,
            settings=settings,
        )

    def sample_examples(
        self, examples: list[LabelledExample], max_samples: int, *, name: str, split: str
    ) -> list[LabelledExample]:
        """A random sample of at most `max_samples` examples of a split, in the order of the split. It is a
        function of the names of task and split, and so the same in every run."""
        if len(examples) <= max_samples:
            return examples
        stream = randomness.key("endtask", name, split)
        sample = randomness.permute(np.arange(max_samples), len(examples), stream=stream)
        return [examples[index] for index in np.sort(sample)]


@config
class FileTasks(TaskSource):
    """root/folder/<task>/{train,dev,test} as .jsonl, .json, .csv or .parquet, also .gz, in one file or more
    (train-00000-of-00002.parquet). `splits=das` takes the examples of all files and splits them by their
    field `das_split`, which says how DAS did it (Ke et al., ICLR 2023)."""

    TASK_OPTIONS: ClassVar[tuple[str, ...]] = ("path", "columns", "splits")
    root: Folder | None = option("folder with the folder of the tasks")
    folder: Text = option("folder in root with a folder per task")
    splits: Literal["own", "das"] = option("own: as the files are split; das: as their field das_split")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.root is None or not self.tasks_folder.is_dir():
            raise InvalidOptionError("root", self.root, allowed=f"the folder in which {self.folder}/ is")

    @property
    def tasks_folder(self) -> Path:
        return Path(self.root or "") / self.folder

    @property
    def names(self) -> list[str]:
        """The tasks that `tasks` names, then the other folders, sorted; without those set to null."""
        folders = set()
        for path in self.tasks_folder.iterdir():
            if path.is_dir() and not path.name.startswith("."):
                folders.add(path.name)
        further = sorted(folders - set(self.tasks or ()))  # a task with the value null is left out
        return [*self.named, *further]

    def exists(self, name: str) -> bool:
        return self.folder_of(name).is_dir()

    def folder_of(self, name: str) -> Path:
        return self.tasks_folder / self.values(name).get("path", name)

    def files(self, name: str, split: str) -> list[Path]:
        """The files of a split, sorted; an empty list for a task without dev. Raises ValueError where train
        or test has no file, and where the folder cannot be read."""
        folder = self.folder_of(name)
        files = []
        with text_files.naming_file(folder):
            for path in sorted(folder.iterdir()):
                is_table = text_files.find_suffix(path) in text_files.TABLE_SUFFIXES
                if is_table and text_files.find_split(Path(path.name)) == FILE_SPLITS[split]:
                    files.append(path)

        # A file called eval counts as test, but next to files called test it is something else.
        files_named_test = [path for path in files if "test" in path.name.lower()]
        if split == "test" and files_named_test:
            files = files_named_test

        if not files and split != "dev":
            suffixes = " ".join(text_files.TABLE_SUFFIXES)
            raise ValueError(
                f"endtask.tasks.{name} is invalid: no {split} file in {folder}. "
                f"Allowed: {suffixes}, also {' '.join(text_files.COMPRESSED_SUFFIXES)}"
            )
        return files

    def fingerprint(self, name: str) -> Any:
        paths: list[Path] = []
        for split in FILE_SPLITS:
            paths += self.files(name, split)
        return text_files.stamp_files(paths)

    def examples(self, name: str, split: str) -> Iterator[tuple[LabelledExample, Mapping[str, Any]]]:
        """Each example of the files of a split, with the row of the file from which it was made."""
        columns = self.values(name)["columns"]
        number = 0
        for path in self.files(name, split):
            with text_files.naming_file(path):
                for where, row in readers.read_file_rows(path):
                    example = parse_example(where, row, columns=columns, default_id=f"{split}-{number}")
                    yield example, row
                    number += 1

    def read(self, name: str, split: str) -> list[LabelledExample]:
        if self.values(name)["splits"] == "own":
            return [example for example, _ in self.examples(name, split)]
        return self.read_das_split(name, split)

    def read_das_split(self, name: str, split: str) -> list[LabelledExample]:
        """The examples of all files whose field `das_split` is the split. Raises ValueError for dev, which
        DAS does not have, and for an example whose `das_split` is neither train nor test."""
        if split == "dev" and self.score_on == "dev":
            raise InvalidOptionError(
                "endtask.score_on",
                "dev",
                reason="splits=das has no dev",
                allowed=f"endtask.tasks.{name}.splits=own",
            )
        if split == "dev":
            raise InvalidOptionError(
                f"endtask.tasks.{name}.load_best_model_at_end",
                True,
                reason="splits=das has no dev",
                allowed="false",
            )

        # The authors move examples between the released files: those of a split may be in any of them.
        examples = []
        for file_split in FILE_SPLITS:
            for example, row in self.examples(name, file_split):
                examples.append((example, row.get("das_split")))
        for example, das_split in examples:
            if das_split not in ("train", "test"):
                raise InvalidOptionError(
                    f"endtask.tasks.{name}.splits",
                    "das",
                    reason=f"{example.id} has das_split={das_split}",
                    allowed=f"train, test in every example, or endtask.tasks.{name}.splits=own",
                )
        return [example for example, das_split in examples if das_split == split]

    def labels_of(self, name: str, train: Sequence[LabelledExample]) -> list[str]:
        """The labels of the train file, sorted: DAS moves all examples of a rare class to test."""
        if self.values(name)["splits"] == "das":
            train = [example for example, _ in self.examples(name, "train")]
        return super().labels_of(name, train)


@config
class HubTasks(TaskSource):
    """What `datasets.load_dataset` takes, also local folders: `tasks[name]` has `path`, and optionally `name`
    (the configuration), `splits` and `columns`. Class numbers become the names that the data set has."""

    TASK_OPTIONS: ClassVar[tuple[str, ...]] = ("path", "name", "columns", "splits")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.named:
            raise ValueError(f"tasks={{}} is invalid: it names no task. Allowed: {{news: {HUB_TASK}}}")
        for name in self.named:
            values = self.values(name)
            path = values.get("path")
            splits = values["splits"]
            has_splits = isinstance(splits, Mapping) and set(splits) <= set(FILE_SPLITS)
            if path is None or not has_splits or not splits.get("train") or not splits.get("test"):
                raise ValueError(
                    f"tasks.{name}={{path: {path}, splits: {splits}}} is invalid. Allowed: {HUB_TASK}"
                )

    @property
    def names(self) -> list[str]:
        return list(self.named)

    def exists(self, name: str) -> bool:
        return False  # a name says nothing: only a domain's is right

    def fingerprint(self, name: str) -> Any:
        options = self.values(name)
        local_files = [path for path in sorted(Path(options["path"]).rglob("*")) if path.is_file()]
        return [options["path"], options.get("name"), text_files.stamp_files(local_files)]

    def read(self, name: str, split: str) -> list[LabelledExample]:
        import datasets  # seconds, which only this source has to wait for

        from cpt.core.hub_access import check_data_set_access

        options = self.values(name)
        path = options["path"]
        hub_split = options["splits"].get(split)  # what the data set calls the split
        if hub_split is None:
            return []
        try:
            check_data_set_access(path)
            rows = datasets.load_dataset(path, options.get("name"), split=hub_split)
        except (datasets.exceptions.DatasetsError, OSError, ValueError, pa.ArrowException) as error:
            raise ValueError(
                f"endtask.tasks.{name}, path={path}: {text_files.find_cause_message(error)}"
            ) from error

        columns = options["columns"]
        label_column = columns["label"]
        label_feature = rows.features.get(label_column)  # None: the data set does not have the column
        has_class_numbers = isinstance(label_feature, datasets.ClassLabel)
        examples = []
        for number, row in enumerate(rows):
            where = f"{path} ({hub_split}), row {number}"
            named_row = dict(row)
            if has_class_numbers:
                named_row[label_column] = name_class(where, row[label_column], label_feature.names)
            example = parse_example(where, named_row, columns=columns, default_id=f"{split}-{number}")
            examples.append(example)
        return examples


def name_class(where: str, number: int | None, names: Sequence[str]) -> str:
    """The name of a class of a data set on the Hub. `where` names the row in messages.

    Raises ValueError for a row without a class, which null or -1 says, and for a number without a name."""
    if number is None or number == -1:
        value = "null" if number is None else number
        raise ValueError(
            f"{where} has no label (class {value}), as rows of test splits on the Hub often have none. "
            "Allowed: splits with labels (endtask.tasks.NAME.splits)"
        )
    if not 0 <= number < len(names):
        num_names = count_noun(len(names), "class", "classes")
        raise ValueError(
            f"{where}: its label is class {number}, and the data set names {num_names}. "
            f"Allowed: 0 to {len(names) - 1}"
        )
    return names[number]


def replace_invalid(value: Any) -> Any:
    """A text in which each character that UTF-8 cannot encode, like half of an emoji, is a question mark; a
    value of another type as it is."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def parse_example(where: str, row: Any, *, columns: Mapping[str, Any], default_id: str) -> LabelledExample:
    """The example of a row of a file. `columns` are the columns of id, text, text_pair and label, null for
    none. If the text is empty, the text_pair is taken as the text; without a column of ids the id is
    `default_id`. `where` names the row in messages.

    Raises ValueError for a row that lacks a column, a text or a label."""
    values = {}
    for name, column in columns.items():
        if column is not None:
            cell = readers.read_cell(row, column, where, f"endtask.columns.{name}")
            values[name] = replace_invalid(cell)

    texts = []
    for name in ("text", "text_pair"):
        if name in values:
            text = readers.parse_text(where, columns[name], values[name])
            if text:
                texts.append(text)
    if not texts:
        raise ValueError(f"{where} has no text; needed is one (endtask.columns.text, text_pair)")

    label = values.get("label")
    if not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"{where}: the label is {label!r:.60}. Allowed: a word or a whole number")
    return LabelledExample(
        id=str(values.get("id", default_id)),
        text=texts[0],
        text_pair=texts[1] if len(texts) > 1 else None,
        label=str(label),
    )


@dataclass(frozen=True)
class FinetunePlan:
    """A source whose options have been checked, and the tasks of a run in the order of learning."""

    source: TaskSource
    tasks: list[str]
    stamp: str  # a hash of sizes and times of the data


def plan_endtasks(
    options: Mapping[str, Any], source_names: Sequence[str] | None, order: Sequence[str]
) -> FinetunePlan | None:
    """The plan of the end tasks of a run that learns the domains of `order`; None where none are asked for.
    `source_names` are the domains that could be learned: a task of another name needs its data. Raises
    ValueError for options that are wrong, and where no task belongs to a learned domain."""
    if not options or options.get("_target_") is None:
        return None
    values = dict(to_python(options))
    target = values.pop("_target_")
    choice = values.pop("name", None)  # as in endtask=NAME
    check_value("endtask._target_", target, Text)
    with prefix_errors("endtask"):
        source_class = Choice(target, {}, base_class=f"{TaskSource.__module__}.TaskSource").load()
    source = read_options(source_class, values, section="endtask")

    # A name that is neither a domain nor has data is misspelt: such a task would never be measured.
    if source_names is not None:
        for name in source.named:
            if name not in source_names and not source.exists(name):
                allowed = ", ".join(sorted(source_names))
                raise ValueError(f"endtask.tasks.{name} is invalid: unknown domain. Allowed: {allowed}")

    learned = [name for name in order if name in source.names]
    if not learned:
        raise ValueError(
            f"endtask={choice} is invalid: no task is of a domain of order={format_value(list(order))}. "
            f"Allowed: {', '.join(source.names) or 'none'}"
        )
    return FinetunePlan(source, learned, digest([source.fingerprint(name) for name in learned]))
