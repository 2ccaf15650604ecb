"""End tasks without labelled data: which sub-package of an installed package a docstring comes from."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Predicate

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.exceptions import format_value
from cpt.core.randomness import key
from cpt.core.schema import Allowed, Count, Int, Natural, Text, config, option
from cpt.data.sources.docstrings import documents_by_module, names_in, stamp_docs, subpackages
from cpt.evaluation.finetune_tasks import LabelledExample, TaskSource

FORMAT = 1  # part of the cache's names: raise it when its files change
FILE = "documents.jsonl"
SPLITS = {"train": 0, "dev": 1, "test": 2}  # as the numbers of cpt.data.corpus.assign


Examples = Annotated[
    Mapping[str, Count],
    Predicate(lambda given: set(given) == set(SPLITS)),
    Allowed("a whole number, 1 or more, for each of train, dev, test"),
]


@config
class SubmoduleTasks(TaskSource):
    """Paragraphs of docstrings, labelled by sub-package: a task for each domain of `packages`, as
    cpt.data.sources.docstrings.InstalledDocs has them.

    A document is in the split that it has in the domain's text, by `splits` (domains.held_out). The `classes`
    sub-packages with the most text are the classes, at most `examples` paragraphs of each in a split; their
    names are blanked out. `cache` is a folder that keeps the docstrings that were read."""

    OWN: ClassVar[tuple[str, ...]] = ("classes", "seed", "examples")
    packages: Mapping[str, Sequence[str]] | None = option("packages by domain")
    classes: Annotated[Int, Ge(2)] = option("maximum number of sub-packages")
    examples: Examples = option("paragraphs per class, at most, by split")
    seed: Natural = option("seed of the sample")
    cache: Text = option("folder that keeps the docstrings that were read")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.packages:
            allowed = "packages by domain, like those of domains=installed_docs"
            raise ValueError(f"packages={format_value(self.packages)} is invalid. Allowed: {allowed}")

    @property
    def names(self) -> list[str]:
        left_out = {name for name, own in (self.tasks or {}).items() if own is None}
        return [name for name in self.packages or () if name not in left_out]

    @cached_property
    def labelled(self) -> dict[str, dict[str, list[LabelledExample]]]:
        """The examples that were read, by task and split."""
        return {}

    def exists(self, name: str) -> bool:
        return name in (self.packages or ())

    def fingerprint(self, name: str) -> Any:
        return stamp_docs(self.packages_of(name))

    def read(self, name: str, split: str) -> list[LabelledExample]:
        if name not in self.labelled:
            self.labelled[name] = self.label_paragraphs(name)
        return self.labelled[name][split]

    def packages_of(self, name: str) -> list[str]:
        return list((self.packages or {})[name])

    def label_paragraphs(self, name: str) -> dict[str, list[LabelledExample]]:
        """The examples of a task by split; the docstrings are read once for all runs."""
        from cpt.data.corpus import assign  # seconds that a check of options need not wait for

        values, packages = self.values(name), self.packages_of(name)

        def write(folder: Path) -> None:
            lines = (json.dumps(document) + "\n" for document in documents_by_module(packages))
            (folder / FILE).write_text("".join(lines))

        known_by = digest([FORMAT, packages, stamp_docs(packages)])
        folder = make_once(Path(self.cache) / "endtasks" / f"{name}-{known_by}", make=write)
        documents = [tuple(json.loads(line)) for line in (folder / FILE).read_text().splitlines()]
        texts = ["\n\n".join(paragraphs).encode(errors="replace").decode() for _, paragraphs in documents]
        hashes = np.array([key(text) for text in texts], np.uint64)
        splits = assign(hashes, np.zeros(len(hashes), np.int8), name=name, held_out=values["splits"])
        labels, sizes = subpackages(documents), Counter[tuple[str, int]]()
        for (module, paragraphs), split in zip(documents, splits.tolist(), strict=True):
            sizes[labels[module], split] += len(paragraphs)
        ranks = {label: min(sizes[label, 0], sizes[label, 2]) for label, _ in sizes}
        ranked = sorted((label for label in ranks if ranks[label]), key=lambda label: (-ranks[label], label))
        classes = sorted(ranked[: values["classes"]])
        if len(classes) < 2:
            told = f"packages={packages} have {len(classes)} sub-packages with text in both train and test"
            allowed = f"two or more, or without this task (+endtask.tasks.{name}=null)"
            raise ValueError(f"endtask.tasks.{name} is invalid: {told}. Allowed: {allowed}")
        found, names = dict[str, list[LabelledExample]](), names_in(classes)
        for split, number in SPLITS.items():
            paragraphs = [
                (f"{module}-{place}", text.encode(errors="replace").decode(), labels[module])
                for (module, paragraphs), own in zip(documents, splits, strict=True)
                if own == number and labels[module] in classes
                for place, text in enumerate(paragraphs)
            ]
            taken, found[split] = Counter[str](), []
            paragraphs.sort(key=lambda each: key("end task", values["seed"], each[1]))
            for id, text, label in paragraphs:
                taken[label] += 1
                if taken[label] <= values["examples"][split]:
                    found[split].append(LabelledExample(id, names.sub("_", text), None, label))
        return found
