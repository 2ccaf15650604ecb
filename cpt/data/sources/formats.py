"""The layouts that supervised tasks are published in: where a task's files are, and what is in a row.

Files of a development split are found and not read: released ones are often the test set itself (O-LoRA,
MIGU, SAPT), so what is tuned on is held out from train."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.data.examples import ASSISTANT
from cpt.data.sources.readers import csv_rows, json_rows, kind, lines, naming_file

DEV = re.compile(r"(dev|development|valid|validation|val|eval)\b.*", re.IGNORECASE)
TEST, TRAIN = re.compile(r"test\b.*", re.IGNORECASE), re.compile(r"train\b.*", re.IGNORECASE)
GIVEN_NAMES = {"ag_news": "agnews", "amazon_review_full": "amazon", "yahoo_answers": "yahoo"}
SPELLING = {"thlete": "athlete"}  # as one label stands in the few-shot draws of LFPT5


@dataclass(frozen=True)
class Record:
    """A row as it is read: the fields of a question, the answer, or the turns of a chat."""

    fields: Mapping[str, str]
    target: str
    id: str = ""
    turns: tuple[tuple[str, str], ...] = ()


@dataclass
class Dataset:
    """The files of one domain, by split, the task that their place says, and the file of its labels."""

    name: str
    task: str | None = None
    files: list[tuple[str, Path]] = field(default_factory=list)
    labels: Path | None = None
    unread: list[Path] = field(default_factory=list)  # of a development split

    def add(self, path: Path, split: str | None) -> None:
        if split is None:
            self.unread.append(path)
        else:
            self.files.append((split, path))


Columns = Mapping[str, str | None]


@dataclass(frozen=True)
class Format:
    """A layout: `find` gives the data sets below a folder, `read` the rows of a file."""

    find: Callable[[Path], dict[str, Dataset]]
    read: Callable[[Path, Columns], Iterator[Record]]
    fields: tuple[str, ...] = ()  # what a row has besides its text
    chats: bool = False


def split_named(name: str) -> str | None:
    """The split that a file's or folder's name says; None for one that is not read, train where it says
    nothing."""
    if DEV.fullmatch(name):
        return None
    return "test" if TEST.fullmatch(name) else "train"


def says_split(name: str) -> bool:
    return any(rule.fullmatch(name) for rule in (DEV, TEST, TRAIN))


def find_folders(root: Path, *suffixes: str) -> dict[str, Dataset]:
    """A data set for each sub-folder with files of these kinds, and for each such file in the folder
    itself."""
    found: dict[str, Dataset] = {}
    for path in sorted(path for path in root.iterdir() if path.name[0] != "."):
        if path.is_dir():
            one = Dataset(path.name)
            for file in sorted(each for each in path.rglob("*") if kind(each) in suffixes):
                said = [part for part in file.relative_to(path).parts if says_split(part)]
                one.add(file, split_named(said[-1]) if said else "train")
            if one.files:
                found[path.name] = one
        elif kind(path) in suffixes:
            name = path.name.partition(".")[0]
            one = found.setdefault(name, Dataset(name))
            one.add(path, "train")
    return found


def find_cl_benchmark(root: Path) -> dict[str, Dataset]:
    """TASK/dataset/{train,dev,test,labels}.json (Wang et al., EMNLP Findings 2023, O-LoRA)."""
    found = {}
    for labels in sorted(root.glob("*/*/labels.json")):
        folder = labels.parent
        one = Dataset(folder.name.lower(), task=folder.parent.name, labels=labels)
        for split in ("train", "dev", "test"):
            if (path := folder / f"{split}.json").is_file():
                one.add(path, split_named(split))
        found[one.name] = one
    return found


def find_superni(root: Path) -> dict[str, Dataset]:
    """{train,dev,test}.json in a folder for each task, at any depth, or a file for each task (Wang et al.,
    EMNLP 2022; SAPT's sequences of it)."""
    found: dict[str, Dataset] = {}
    for path in sorted(root.rglob("*.json")):
        split = path.stem.lower() in ("train", "dev", "test")
        name = path.parent.name if split else path.stem
        found.setdefault(name, Dataset(name)).add(path, split_named(path.stem) if split else "train")
    return found


def find_alpaca(root: Path) -> dict[str, Dataset]:
    """{train,dev,test}/<task>.json; twins ending in _T5 hold the same rows (Feng et al., ACL 2025)."""
    found: dict[str, Dataset] = {}
    for path in sorted(root.glob("*/*.json")):
        if says_split(path.parent.name) and not path.stem.endswith("_T5"):
            found.setdefault(path.stem, Dataset(path.stem)).add(path, split_named(path.parent.name))
    return found


def find_fewshot(root: Path) -> dict[str, Dataset]:
    """<dataset>/<draw>/{train,valid,test}.txt, the draws together (Qin and Joty, ICLR 2022, LFPT5)."""
    found: dict[str, Dataset] = {}
    for path in sorted(root.glob("*/*/*.txt")):
        folder = path.parents[1].name.removesuffix("_csv")
        name = GIVEN_NAMES.get(folder, folder)
        found.setdefault(name, Dataset(name)).add(path, split_named(path.stem))
    return found


def read_cl_benchmark(path: Path, columns: Columns) -> Iterator[Record]:
    for where, row in json_rows(path):
        yield Record({"text": text_in(row, "sentence", where)}, text_in(row, "label", where))


def read_superni(path: Path, columns: Columns) -> Iterator[Record]:
    for where, whole in objects(path):
        definition = first(whole.get("Definition", ""))
        for number, row in enumerate(whole.get("Instances", ())):
            at = f"{where}, instance {number + 1}"
            fields = {"text": text_in(row, "input", at), "instruction": definition}
            yield Record(fields, first(row.get("output", "")), str(row.get("id", "")))


def objects(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The one object of a file that is written over many lines."""
    whole = read_whole(path)
    if not isinstance(whole, Mapping) or "Instances" not in whole:
        raise ValueError(f"{path} has no Instances; allowed: an object with Definition and Instances")
    yield str(path), whole


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels that a file lists."""
    labels = read_whole(path)
    if not isinstance(labels, list) or not labels:
        raise ValueError(f"{path} has {labels!r:.60}; needed: a list of labels")
    return tuple(map(str, labels))


def read_whole(path: Path) -> Any:
    """The one value of a file that is written over many lines."""
    with naming_file(path):
        try:
            return json.loads("".join(lines(path)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno} is not JSON: {error.msg}") from error


def first(value: Any) -> str:
    """A text, or the first of several."""
    return str(value[0] if isinstance(value, list) and value else value or "")


def read_alpaca(path: Path, columns: Columns) -> Iterator[Record]:
    for where, row in json_rows(path):
        fields = {"text": str(row.get("input") or ""), "instruction": text_in(row, "instruction", where)}
        yield Record(fields, text_in(row, "output", where), str(row.get("id", "")))


def read_fewshot(path: Path, columns: Columns) -> Iterator[Record]:
    for number, line in enumerate(lines(path), start=1):
        if line.isspace():
            continue
        text, tab, label = line.rstrip("\n").rpartition("\t")
        if not tab:
            raise ValueError(f"{path}, line {number} has no tab; allowed: text, tab, label")
        yield Record({"text": text}, SPELLING.get(label.strip(), label.strip()))


def read_trace(path: Path, columns: Columns) -> Iterator[Record]:
    for where, row in json_rows(path):
        yield Record({"text": text_in(row, "prompt", where)}, text_in(row, "answer", where))


def read_messages(path: Path, columns: Columns) -> Iterator[Record]:
    for where, row in json_rows(path):
        turns = row.get("messages") if isinstance(row, Mapping) else None
        if not turns or not all(
            isinstance(turn, Mapping) and {"role", "content"} <= set(turn) for turn in turns
        ):
            raise ValueError(f"{where} has no messages; allowed: {{messages: [{{role, content}}, …]}}")
        pairs = [(str(turn["role"]), text_in(turn, "content", where)) for turn in turns]
        while pairs and pairs[-1][0] != ASSISTANT:
            pairs.pop()
        if not pairs:
            raise ValueError(f"{where} has no turn of the {ASSISTANT}; needed: one to learn")
        yield Record({"text": ""}, pairs[-1][1], str(row.get("id", "")), tuple(pairs))


def read_table(path: Path, columns: Columns) -> Iterator[Record]:
    """Rows with columns of their own: `target` and `id` besides the fields of the question."""
    rows = csv_rows if ".csv" in path.suffixes else json_rows
    for where, row in rows(path):
        fields = {
            name: text_in(row, column, where, option=f"domains.columns.{name}")
            for name, column in columns.items()
            if column is not None and name not in ("target", "id")
        }
        target = text_in(row, str(columns["target"]), where, option="domains.columns.target")
        number = columns.get("id")
        yield Record(fields, target, str(row.get(number, "")) if number else "")


def text_in(row: Any, column: str, where: str, *, option: str = "domains.format") -> str:
    """The text of a column; raises ValueError where there is none."""
    if not isinstance(row, Mapping) or column not in row:
        has = ", ".join(map(str, row)) if isinstance(row, Mapping) else f"{row!r:.60}"
        raise ValueError(f"{where} has no {column!r}; it has {has} ({option})")
    value = row[column]
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(f"{where}: {column!r} is not text: {value!r:.60}")
    return str(value)


FORMATS = {
    "cl_benchmark": Format(find_cl_benchmark, read_cl_benchmark),
    "superni": Format(find_superni, read_superni, ("instruction",)),
    "alpaca": Format(find_alpaca, read_alpaca, ("instruction",)),
    "fewshot_tsv": Format(find_fewshot, read_fewshot),
    "trace": Format(lambda root: find_folders(root, ".json"), read_trace),
    "messages": Format(lambda root: find_folders(root, ".jsonl"), read_messages, chats=True),
    "jsonl": Format(lambda root: find_folders(root, ".jsonl"), read_table),
    "csv": Format(lambda root: find_folders(root, ".csv"), read_table),
}


def find_datasets(root: Path, layout: str) -> dict[str, Dataset]:
    """The data sets of a folder by name; raises ValueError where there are none."""
    with naming_file(root):
        found = FORMATS[layout].find(root)
    if not found:
        raise ValueError(
            f"root={root} has no data set in the layout format={layout}; allowed: {', '.join(FORMATS)}"
        )
    return found
