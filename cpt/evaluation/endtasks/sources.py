"""Where the examples of end tasks come from: files in folders, and data sets of the Hugging Face hub."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from cpt.data.sources.readers import (
    KINDS,
    SPLIT_NAME,
    SPLITS,
    Row,
    cause,
    csv_rows,
    json_rows,
    kind,
    naming_file,
    parquet_rows,
    stamps,
)
from cpt.evaluation.endtasks.tasks import Example, TaskSource

TABLES = tuple(each for each in KINDS if each not in (".txt", ".md"))
FILE_SPLITS = {"train": "train", "dev": "valid", "test": "test"}  # as cpt.data.sources.readers calls them
DAS = "das_split"


class FileTasks(TaskSource):
    """root/folder/<task>/{train,dev,test} as .jsonl, .json, .csv or .parquet, also .gz, in one file or more
    (train-00000-of-00002.parquet). `splits=das` takes the examples of all files and splits them by their
    field `das_split`, which says how DAS did it (Ke et al., ICLR 2023)."""

    OPTIONS = ("root", "folder")
    OWN = ("path", "columns", "splits")

    def __init__(self, *, root: str | None, folder: str, **shared: Any) -> None:
        super().__init__(**shared)
        if root is None:
            raise ValueError(f"endtask.root=null; give the folder in which {folder}/ lies")
        self.root = Path(root) / folder
        for prefix, values in [("endtask", self.shared), *self.own_values()]:
            if values["splits"] not in ("own", "das"):
                raise ValueError(f"{prefix}.splits={values['splits']}; allowed: own, das")
        if not self.root.is_dir():
            raise ValueError(f"endtask.root={root}: there is no folder {self.root}")

    def own_values(self) -> list[tuple[str, dict[str, Any]]]:
        return [(f"endtask.tasks.{name}", self.values(name)) for name in self.tasks]

    @property
    def names(self) -> list[str]:
        """Those that are named, and the other folders."""
        folders = (path.name for path in self.root.iterdir() if path.is_dir() and path.name[0] != ".")
        return list(dict.fromkeys([*self.tasks, *sorted(set(folders) - self.left_out)]))

    def exists(self, name: str) -> bool:
        return self.folder(name).is_dir()

    def folder(self, name: str) -> Path:
        return self.root / self.values(name).get("path", name)

    def files(self, name: str, split: str) -> list[Path]:
        """The files of a split, sorted. Raises ValueError where there are none, or some of another kind."""
        folder = self.folder(name)
        if not folder.is_dir():
            raise ValueError(f"endtask.tasks.{name}: there is no folder {folder}")
        with naming_file(folder):
            found = sorted(path for path in folder.iterdir() if path.name[0] != ".")
        named = [(path, SPLIT_NAME.fullmatch(path.name.split(".")[0])) for path in found]
        files = [path for path, match in named if match and SPLITS[match[1].lower()] == FILE_SPLITS[split]]
        if unread := [path for path in files if kind(path) not in TABLES]:
            raise ValueError(f"{unread[0]} cannot be read; allowed: {' '.join(TABLES)}, also .gz .zst")
        if not files and split != "dev":
            raise ValueError(
                f"endtask.tasks.{name}: no {split} file in {folder}; allowed: "
                f"{', '.join(f'{split}{each}' for each in TABLES)}, also .gz .zst"
            )
        return files

    def fingerprint(self, name: str) -> Any:
        return stamps(path for split in FILE_SPLITS for path in self.files(name, split))

    def read(self, name: str, split: str) -> list[Example]:
        if self.values(name)["splits"] == "das":
            return self.read_as_das(name, split)
        return [example for example, _ in self.examples(name, split)]

    def classes(self, name: str, train: Sequence[Example]) -> list[str]:
        """The labels of the train file, sorted: DAS moves all examples of a rare class to test."""
        if self.values(name)["splits"] == "das":
            train = [example for example, _ in self.examples(name, "train")]
        return super().classes(name, train)

    def read_as_das(self, name: str, split: str) -> list[Example]:
        if split == "dev":
            raise ValueError(
                f"endtask.tasks.{name}.select=dev with splits=das, which leaves no dev; allowed: select=last"
            )
        every = [pair for each in FILE_SPLITS for pair in self.examples(name, each)]
        return [example for example, row in every if self.das_split(name, example, row) == split]

    def das_split(self, name: str, example: Example, row: Mapping[str, Any]) -> str:
        said = row.get(DAS)
        if said not in ("train", "test"):
            raise ValueError(
                f"endtask.tasks.{name}.splits=das: {example.id} has {DAS}={said}; allowed: train, test in "
                f"every example, or endtask.tasks.{name}.splits=own"
            )
        return said

    def examples(self, name: str, split: str) -> Iterator[tuple[Example, Mapping[str, Any]]]:
        """Each example with all of its row."""
        files, columns = self.files(name, split), self.values(name)["columns"]
        number = 0
        for path in files:
            for where, row in read_rows(path):
                yield example(where, row, columns=columns, instead=f"{split}-{number}"), row
                number += 1


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a table; ValueError if the file cannot be read as what its name says."""
    with naming_file(path):
        if kind(path) == ".parquet":
            yield from parquet_rows(path, "")
        else:
            yield from (csv_rows if kind(path) == ".csv" else json_rows)(path)


class HubTasks(TaskSource):
    """What `datasets.load_dataset` takes, also local folders: `tasks[name]` has `path`, and optionally `name`
    (the configuration), `splits` and `columns`. Class numbers become the names that the data set has."""

    OPTIONS = ()
    OWN = ("path", "name", "columns", "splits")

    def __init__(self, **shared: Any) -> None:
        super().__init__(**shared)
        if not self.tasks:
            raise ValueError("endtask=hub needs tasks, like '+endtask.tasks.news={path: ag_news}'")
        for name in self.tasks:
            self.check_entry(name, self.values(name))

    @staticmethod
    def check_entry(name: str, entry: Mapping[str, Any]) -> None:
        splits = entry["splits"]
        named = isinstance(splits, Mapping) and set(splits) <= set(FILE_SPLITS)
        if "path" not in entry or not named or not all(splits.get(split) for split in ("train", "test")):
            raise ValueError(
                f"endtask.tasks.{name} has path={entry.get('path')}, splits={splits}; allowed: a path, and "
                "splits like {train: train, dev: validation, test: test}, where dev may be null"
            )

    @property
    def names(self) -> list[str]:
        return list(self.tasks)

    def exists(self, name: str) -> bool:
        return False  # a name says nothing: only a domain's is right

    def fingerprint(self, name: str) -> Any:
        entry = self.values(name)
        local = sorted(Path(entry["path"]).rglob("*"))
        return [entry["path"], entry.get("name"), stamps(each for each in local if each.is_file())]

    def read(self, name: str, split: str) -> list[Example]:
        entry = self.values(name)
        wanted = entry["splits"].get(split)
        if wanted is None:
            return []
        where, columns = f"{entry['path']} ({wanted})", entry["columns"]
        return [
            example(f"{where}, row {number}", row, columns=columns, instead=f"{split}-{number}")
            for number, row in enumerate(self.rows(name, wanted))
        ]

    def rows(self, name: str, split: str) -> Iterator[dict[str, Any]]:
        from datasets import ClassLabel, load_dataset
        from datasets.exceptions import DatasetsError

        entry = self.values(name)
        try:
            rows = load_dataset(entry["path"], entry.get("name"), split=split)
        except (DatasetsError, OSError, ValueError, pa.ArrowException) as error:
            raise ValueError(f"endtask.tasks.{name}, path={entry['path']}: {cause(error)}") from error
        label = entry["columns"]["label"]
        feature = rows.features.get(label)
        names = feature.names if isinstance(feature, ClassLabel) else None
        yield from (row if names is None else {**row, label: class_name(names, row[label])} for row in rows)


def class_name(names: list[str], number: int | None) -> str | None:
    """A class's name; None where the data set says that it has none (-1)."""
    return None if number is None or number < 0 else names[number]


def example(where: str, row: Any, *, columns: Mapping[str, str | None], instead: str) -> Example:
    """An example from a row. Where the first of the two texts is empty, the other stands alone; `instead` is
    its id where no column has one. Raises ValueError for a row that lacks a column, a text or a label."""
    used = {name: column for name, column in columns.items() if column is not None}
    for name, column in used.items():
        if not isinstance(row, Mapping) or column not in row:
            has = ", ".join(row) if isinstance(row, Mapping) else f"{row!r:.60}"
            raise ValueError(f"{where} has no column {column!r}; it has {has} (endtask.columns.{name})")
    texts = [text_of(where, row[used[name]], used[name]) for name in ("text", "text_pair") if name in used]
    texts = [text for text in texts if text is not None]
    if not texts:
        raise ValueError(f"{where} has no text; needed is one (endtask.columns.text, text_pair)")
    label = row[used["label"]] if "label" in used else None
    if not isinstance(label, str | int) or not str(label).strip():
        raise ValueError(f"{where}: the label is {label!r:.60}; allowed: a word or a whole number")
    name = str(row[used["id"]]) if "id" in used else instead
    return Example(name, texts[0], texts[1] if len(texts) > 1 else None, str(label))


def text_of(where: str, value: Any, column: str) -> str | None:
    """A text; None if it is empty."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: column {column!r} is not text: {value!r:.60}")
    return value if value and not value.isspace() else None
