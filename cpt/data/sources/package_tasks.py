"""A small sequence of real tasks from what is installed: where the summary of a docstring stands.

The first task is which package it is of, the others which part of one package. The names that are asked for
are blanked out of all summaries."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from cpt.core.randomness import key
from cpt.data.sources.docstrings import modules
from cpt.data.sources.formats import Record
from cpt.data.sources.readers import stamps
from cpt.data.sources.subpackages import names_in, subpackages, summaries_by_module

PACKAGES = {
    "package": ("sympy", "networkx", "pandas", "numpy"),
    "sympy": ("sympy",),
    "networkx": ("networkx",),
    "pandas": ("pandas",),
}
CLASSES = 4  # parts of a package that are told apart, those with the most summaries
MOST = 300  # summaries of a class


def read_records(name: str) -> Iterator[Record]:
    """The examples of a task: a summary, and where it is from."""
    found = [(summary, label) for package in PACKAGES[name] for summary, label in labelled(name, package)]
    sizes = Counter(label for _, label in found)
    classes = sorted(label for label, _ in sizes.most_common(CLASSES))
    names, taken = names_in(classes), Counter[str]()
    for summary, label in sorted(found, key=lambda each: key("package task", *each)):
        taken[label] += 1
        if label in classes and taken[label] <= MOST:
            yield Record({"text": names.sub("_", summary)}, label)


def labelled(name: str, package: str) -> Iterator[tuple[str, str]]:
    """Summaries of a package with its name, or with the part of it that each is of."""
    summaries = summaries_of(package)
    if name == "package":
        yield from ((summary, package) for _, summary in summaries)
        return
    parts = subpackages([(module, [summary]) for module, summary in summaries])
    yield from ((summary, parts[module].rpartition(".")[2]) for module, summary in summaries)


@cache
def summaries_of(package: str) -> list[tuple[str, str]]:
    """Each module with its summaries, read once."""
    return list(summaries_by_module(package))


def stamp(name: str) -> Any:
    """What decides a task's examples."""
    return [CLASSES, MOST, [stamps(modules(package)) for package in PACKAGES[name]]]
