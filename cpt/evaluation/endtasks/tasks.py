"""End tasks: their options, and the examples of one. Nothing here needs torch."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from cpt.core.errors import reason
from cpt.core.options import Options, option
from cpt.core.rules import (
    MAPPING,
    TEXT,
    TEXTS_BY_KEY,
    YES_NO,
    Rule,
    is_list,
    is_whole,
    number,
    one_of,
    or_null,
    show,
    whole,
)

METRICS = ("macro_f1", "micro_f1", "accuracy")
WHEN = ("last", "each", "diagonal")
SELECT = ("last", "dev")
PRECISIONS = ("32-true", "bf16-mixed")
COLUMNS = ("id", "text", "text_pair", "label")
NOT_FOR_SOURCES = ("when", "seeds", "eval_batch_size")  # options of all tasks together
SHARED = (*NOT_FOR_SOURCES, "tasks", "columns", "splits")
FORMAT = 1  # counts changes of what a prediction file depends on


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """How a task is learned and scored; a task may have its own."""

    epochs: int = option("passes over the task's training examples", whole(1))
    lr: float = option("peak learning rate", number("above 0"))
    weight_decay: float = option("on all parameters", number("0 or more"))
    warmup: float = option("share of the steps; then linear decay", number("0 or more and below 1"))
    batch_size: int = option("examples per step", whole(1))
    grouped: int = option("so many batches are sorted by length together; 1: a plain shuffle", whole(1))
    length: int = option("tokens of text and pair together, at most", whole(8))
    precision: str = option("of the computation", one_of(*PRECISIONS))
    dropout: float = option(
        "of the head; in the model it is the model's own", number("0 or more and below 1")
    )
    frozen: bool = option("the head alone is trained", YES_NO)
    metric: str = option("what MF1 means for a task", one_of(*METRICS))
    select: str = option("the epoch that counts: the last, or the best on dev", one_of(*SELECT))


def is_seeds(value: Any) -> bool:
    return is_list(value, lambda seed: is_whole(seed, 0)) and 0 < len(value) == len(set(value))


def is_tasks(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(own, Mapping | None) for own in value.values())


@dataclass(frozen=True, kw_only=True)
class Protocol(Options):
    """What is said of all tasks together."""

    when: str = option("after which stages: the last, each, or on the stage's own domain", one_of(*WHEN))
    seeds: Sequence[int] = option(
        "of fine-tuning, each a run", Rule(is_seeds, "a list of different whole numbers, 0 or more")
    )
    eval_batch_size: int = option("examples per forward pass", whole(1))
    columns: Mapping[str, Any] = option("of the files: id, text, text_pair, label", MAPPING)
    tasks: Any = option(
        "values of single tasks, by domain; null: left out",
        or_null(Rule(is_tasks, "for each task its own values, or null")),
    )


RULES = {each.name: each.metadata["rule"] for kind in (Settings, Protocol) for each in fields(kind)}
RULES |= {"root": or_null(TEXT), "folder": TEXT, "path": TEXT, "cache": TEXT}  # of sources' own options
RULES |= {"packages": or_null(TEXTS_BY_KEY)}
SETTINGS = tuple(field.name for field in fields(Settings))


@dataclass(frozen=True)
class Example:
    """A text, or a pair of texts, and its label."""

    id: str
    text: str
    text_pair: str | None
    label: str


@dataclass(frozen=True)
class Task:
    """A task's examples. `dev` is empty where nothing asks for it."""

    name: str
    train: list[Example]
    dev: list[Example]
    test: list[Example]
    classes: list[str]
    settings: Settings

    def __post_init__(self) -> None:
        """Raises ValueError for splits that can not be learned and scored."""
        needed = {"train": self.train, "test": self.test}
        if self.settings.select == "dev":
            needed["dev"] = self.dev
        for split, examples in needed.items():
            if not examples:
                raise ValueError(f"end task {self.name} has no example in {split}; needed is one or more")
        if len(self.classes) < 2:
            raise ValueError(
                f"end task {self.name} has one class in train, {self.classes[0]!r}; needed are two or more"
            )
        for split in ("dev", "test"):
            self.check_labels(split, needed.get(split, []))

    def check_labels(self, split: str, examples: Sequence[Example]) -> None:
        known = set(self.classes)
        unknown = next((example for example in examples if example.label not in known), None)
        if unknown:
            raise ValueError(
                f"end task {self.name}: the label {unknown.label!r} of {unknown.id} in {split} is not in "
                f"train; allowed: {', '.join(self.classes)}"
            )

    @cached_property
    def content(self) -> str:
        """A hash of the examples that are used, in their order."""
        splits = [[asdict(example) for example in split] for split in (self.train, self.dev, self.test)]
        return hash_json([self.name, self.classes, splits])

    def digest(self, seed: int) -> str:
        """A hash of what the predictions of a seed depend on besides the model."""
        return hash_json([FORMAT, self.content, asdict(self.settings), seed])


def hash_json(value: Any) -> str:
    """A hash of any JSON value, 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


class TaskSource(ABC):
    """Where the examples come from. `tasks` has the values of single tasks, which replace those of all, or
    None for a task that is left out."""

    OPTIONS: tuple[str, ...]  # its own options
    OWN: tuple[str, ...]  # what a task may say of itself besides Settings

    def __init__(self, *, tasks: Mapping[str, Mapping[str, Any] | None] | None, **shared: Any) -> None:
        given = tasks or {}
        self.tasks = {name: dict(own) for name, own in given.items() if own is not None}
        self.left_out, self.shared = given.keys() - self.tasks.keys(), shared

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The tasks that there are, whether their domains are learned or not."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether a task's data are there, as far as that is known at once."""

    @abstractmethod
    def read(self, name: str, split: str) -> list[Example]:
        """The examples of train, dev or test; none for a dev that is not there. ValueError for what can not
        be read."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""

    def classes(self, name: str, train: Sequence[Example]) -> list[str]:
        """The labels that a task has, sorted: those of train."""
        return sorted({example.label for example in train})

    def values(self, name: str) -> dict[str, Any]:
        """The options as they are for a task; its columns one by one."""
        own = self.tasks.get(name, {})
        columns = {**self.shared["columns"], **(own.get("columns") or {})}
        return {**self.shared, **own, "columns": columns}


@dataclass(frozen=True)
class Planned:
    """Options that have been checked, and the tasks of a run in the order of learning."""

    source: TaskSource
    when: str
    seeds: list[int]
    eval_batch_size: int
    tasks: list[str]
    stamp: str  # other sizes or times of the data, another stamp

    def settings(self, name: str) -> Settings:
        values = self.source.values(name)
        return Settings(**{key: values[key] for key in SETTINGS})

    def task(self, name: str) -> Task:
        """A task with its examples; dev is read only where it is used."""
        settings = self.settings(name)
        dev = self.source.read(name, "dev") if settings.select == "dev" else []
        train, test = self.source.read(name, "train"), self.source.read(name, "test")
        return Task(name, train, dev, test, self.source.classes(name, train), settings)


def find_kind(target: Any) -> type[TaskSource]:
    """The class of a source of end tasks; raises ValueError for what is none."""
    TEXT.check("endtask._target_", target)
    try:
        kind = get_class(target)
    except Exception as error:  # whatever a module raises while it is read in
        raise ValueError(f"endtask._target_={target}: {reason(error)}; allowed: module.Class") from error
    if not issubclass(kind, TaskSource):
        raise ValueError(
            f"endtask._target_={target}; allowed: a class below cpt.evaluation.endtasks.tasks.TaskSource"
        )
    return kind


def plan_endtasks(
    options: Mapping[str, Any], source_names: Sequence[str] | None, order: Sequence[str]
) -> Planned | None:
    """The plan of the end tasks of a run that learns the domains of `order`; None where none are asked for.

    `source_names` are the domains that could be learned; a task of any other name is an error unless its data
    are there, so that one set of tasks serves any choice of its domains. No text is read, and torch not
    imported. Raises ValueError for options that are wrong, and where no task belongs to a learned domain."""
    if not options or options.get("_target_") is None:
        return None
    given = plain_options(options)
    kind = find_kind(given.pop("_target_"))
    check_keys("endtask", set(given), allowed=(*SETTINGS, *SHARED, *kind.OPTIONS), needed=True)
    check_task_values("endtask", given)
    source = kind(**{key: value for key, value in given.items() if key not in NOT_FOR_SOURCES})
    for name, own in source.tasks.items():
        check_task(source, name, own, source_names)
    learned = [name for name in order if name in source.names]
    if not learned:
        raise ValueError(
            f"endtask={options.get('name')}: no task belongs to a domain of order={show(list(order))}; "
            f"there are: {', '.join(source.names) or 'none'}"
        )
    stamp = hash_json([source.fingerprint(name) for name in learned])
    return Planned(source, given["when"], list(given["seeds"]), given["eval_batch_size"], learned, stamp)


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as Python's own types, resolved, without their name."""
    if OmegaConf.is_config(options):
        options = OmegaConf.to_container(options, resolve=True, throw_on_missing=True)
    return {key: value for key, value in options.items() if key != "name"}


def check_keys(prefix: str, given: set[str], *, allowed: Sequence[str], needed: bool) -> None:
    """Raises ValueError for options that there are not and, where all are `needed`, for missing ones."""
    wrong = sorted(given - set(allowed)) or (sorted(set(allowed) - given) if needed else [])
    if wrong:
        verb = "has" if wrong[0] in given else "lacks"
        raise ValueError(f"{prefix} {verb} {', '.join(wrong)}; allowed: {', '.join(allowed)}")


def check_given(options: Mapping[str, Any]) -> None:
    """Raises ValueError for a value of conf/endtask that is not allowed; what is missing is not looked at."""
    if options.get("_target_") is not None:
        check_task_values("endtask", options)


def check_task_values(prefix: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that is not allowed."""
    for key, value in values.items():
        if key in RULES:
            RULES[key].check(f"{prefix}.{key}", value)
    if unknown := sorted(set(values.get("columns") or ()) - set(COLUMNS)):
        raise ValueError(f"{prefix}.columns names {', '.join(unknown)}; allowed: {', '.join(COLUMNS)}")


def check_task(source: TaskSource, name: str, own: Mapping[str, Any], domains: Sequence[str] | None) -> None:
    """Raises ValueError for a task of no domain, and for values that a task can not have."""
    prefix = f"endtask.tasks.{name}"
    if domains is not None and name not in domains and not source.exists(name):
        raise ValueError(f"{prefix}: there is no such domain; allowed: {', '.join(sorted(domains))}")
    check_keys(prefix, set(own), allowed=(*SETTINGS, *source.OWN), needed=False)
    check_task_values(prefix, own)
