"""End tasks without labelled data: which sub-package of an installed package a docstring comes from."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Predicate

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.randomness import key
from cpt.core.schema import Allowed, Count, Int, Natural, check_value, fits, show
from cpt.data.sources.docstrings import documents_by_module, names_in, stamp_docs, subpackages
from cpt.evaluation.finetune_tasks import LabelledExample, TaskSource

FORMAT = 1  # part of the cache's names: raise it when its files change
FILE = "documents.jsonl"
SPLITS = {"train": 0, "dev": 1, "test": 2}  # as the numbers of cpt.data.corpus.assign


def is_examples(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and set(value) == set(SPLITS)
        and all(fits(count, Count) for count in value.values())
    )


RULES = {
    "classes": Annotated[Int, Ge(2)],
    "seed": Natural,
    "examples": Annotated[
        Any, Predicate(is_examples), Allowed("a whole number, 1 or more, for each of train, dev, test")
    ],
}


@dataclass(frozen=True)
class Document:
    """The paragraphs of a module, its split (a number of SPLITS) and the sub-package that it belongs to."""

    module: str
    paragraphs: list[str]
    split: int
    label: str


class SubmoduleTasks(TaskSource):
    """Paragraphs of docstrings, labelled by sub-package: a task for each domain of `packages`, as
    cpt.data.sources.docstrings.InstalledDocs has them.

    A document is in the split that it has in the domain's text, by `splits` (domains.held_out): what the
    model is tested on here, it was not trained on there. Of the sub-packages with text in train and in test
    the `classes` with the most are told apart, at most `examples` paragraphs of each in a split, those of the
    smallest hashes under `seed`. The names of the classes are blanked out of all texts. `cache` is a folder
    that keeps the docstrings that were read."""

    OPTIONS = ("packages", "classes", "examples", "seed", "cache")
    OWN = ("classes", "examples", "seed")

    def __init__(self, *, packages: Mapping[str, Sequence[str]] | None, cache: str, **shared: Any) -> None:
        super().__init__(**shared)
        if not packages:
            raise ValueError(
                f"endtask.packages={show(packages)}; allowed: packages by domain, "
                "like those of domains=installed_docs"
            )
        self.packages, self.cache = {name: list(each) for name, each in packages.items()}, Path(cache)
        self.examples: dict[str, dict[str, list[LabelledExample]]] = {}
        check_submodule_values("endtask", self.shared)
        for name, own in self.tasks.items():
            check_submodule_values(f"endtask.tasks.{name}", own)

    @property
    def names(self) -> list[str]:
        return [name for name in self.packages if name not in self.left_out]

    def exists(self, name: str) -> bool:
        return name in self.packages

    def fingerprint(self, name: str) -> Any:
        return stamp_docs(self.packages[name])

    def read(self, name: str, split: str) -> list[LabelledExample]:
        if name not in self.examples:
            self.examples[name] = self.made(name)
        return self.examples[name][split]

    def made(self, name: str) -> dict[str, list[LabelledExample]]:
        """The examples of a task by split."""
        values = self.values(name)
        documents = label_documents(self.documents(name), name=name, held_out=values["splits"])
        classes = largest_subpackages(documents, values["classes"])
        if len(classes) < 2:
            raise ValueError(
                f"endtask.tasks.{name}: packages={self.packages[name]} have {len(classes)} sub-packages with "
                "docstrings in both train and test; allowed: two or more, or without this task "
                f"(+endtask.tasks.{name}=null)"
            )
        return {
            split: examples_of(
                (each for each in documents if each.split == number and each.label in classes),
                names=names_in(classes),
                most=values["examples"][split],
                seed=values["seed"],
            )
            for split, number in SPLITS.items()
        }

    def documents(self, name: str) -> list[tuple[str, list[str]]]:
        """The paragraphs of each module of a domain, in the order of its text, read once for all runs."""
        packages = self.packages[name]
        folder = make_once(
            self.cache / "endtasks" / f"{name}-{digest([FORMAT, packages, stamp_docs(packages)])}",
            make=lambda partial: write_labelled(partial / FILE, documents_by_module(packages)),
        )
        with (folder / FILE).open() as file:
            return [tuple(json.loads(line)) for line in file]


def check_submodule_values(prefix: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that is not allowed."""
    for name, rule in RULES.items():
        if name in values:
            check_value(f"{prefix}.{name}", values[name], rule)


def write_labelled(path: Path, documents: Iterable[tuple[str, list[str]]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(document) + "\n" for document in documents)


def label_documents(
    documents: Sequence[tuple[str, list[str]]], *, name: str, held_out: Mapping[str, float]
) -> list[Document]:
    """Documents with their splits and sub-packages; ValueError where they are too few to hold some out."""
    from cpt.data.splitting import assign  # seconds that a check of options need not wait for

    hashes = np.array([hash_of("\n\n".join(paragraphs)) for _, paragraphs in documents], np.uint64)
    splits = assign(hashes, np.zeros(len(hashes), np.int8), name=name, held_out=held_out)
    labels = subpackages(documents)
    return [
        Document(module, paragraphs, int(split), labels[module])
        for (module, paragraphs), split in zip(documents, splits, strict=True)
    ]


def hash_of(text: str) -> int:
    """The hash of a document in a corpus."""
    return key(text.encode(errors="replace").decode())


def largest_subpackages(documents: Iterable[Document], count: int) -> list[str]:
    """The labels with the most paragraphs in train or in test, whichever are fewer, sorted; none that lacks
    either."""
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for each in documents:
        sizes[each.label][each.split] += len(each.paragraphs)
    ranks = {label: min(found[SPLITS["train"]], found[SPLITS["test"]]) for label, found in sizes.items()}
    ranked = sorted((label for label in ranks if ranks[label]), key=lambda label: (-ranks[label], label))
    return sorted(ranked[:count])


def examples_of(
    documents: Iterable[Document], *, names: re.Pattern[str], most: int, seed: int
) -> list[LabelledExample]:
    """At most `most` paragraphs of each label, with `names` blanked out, in an order of their own hashes."""
    ranked = sorted(paragraphs_of(documents), key=lambda example: key("end task", seed, example.text))
    chosen, taken = [], Counter[str]()
    for example in ranked:
        taken[example.label] += 1
        if taken[example.label] <= most:
            chosen.append(example)
    return [LabelledExample(each.id, names.sub("_", each.text), None, each.label) for each in chosen]


def paragraphs_of(documents: Iterable[Document]) -> Iterator[LabelledExample]:
    numbers = Counter[str]()
    for each in documents:
        for paragraph in each.paragraphs:
            text = paragraph.encode(errors="replace").decode()
            yield LabelledExample(f"{each.module}-{numbers[each.module]}", text, None, each.label)
            numbers[each.module] += 1
