"""The parts of installed packages: which one a module is of, and what stands in the docstrings there."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from itertools import chain

from tqdm import tqdm

from cpt.data.sources.docstrings import module_name, modules, roots_of, texts_of_file
from cpt.data.sources.prose import paragraphs_of, plain_text

MIN_SUMMARY_WORDS = 5


def summaries_by_module(package: str) -> Iterator[tuple[str, str]]:
    """The first paragraph of each docstring of a package, with its module; each once, and none of less than
    MIN_SUMMARY_WORDS words. ValueError as `modules`."""
    roots, seen = roots_of(package), set[str]()
    for path in tqdm(modules(package), desc=f"reading {package}", disable=None, leave=False):
        for text in chain.from_iterable(texts_of_file(path)):
            first = next(paragraphs_of(line.rstrip() for line in cleandoc(text).splitlines()), "")
            summary = plain_text(first)
            if len(summary.split()) >= MIN_SUMMARY_WORDS and summary not in seen:
                seen.add(summary)
                yield module_name(package, path, roots), summary


def subpackages(documents: Iterable[tuple[str, list[str]]]) -> dict[str, str]:
    """The first-level sub-package of each module; one that holds more than half of all paragraphs is divided
    into its own, as pandas.core is."""
    sizes, total = Counter[tuple[str, ...]](), 0
    parts_of = {}
    for module, paragraphs in documents:
        parts_of[module] = parts = tuple(module.split("."))
        sizes.update({parts[:depth]: len(paragraphs) for depth in range(2, len(parts))})
        total += len(paragraphs)
    return {module: ".".join(divide(parts, sizes, total)) for module, parts in parts_of.items()}


def divide(parts: tuple[str, ...], sizes: Mapping[tuple[str, ...], int], total: int) -> tuple[str, ...]:
    depth = 2
    while depth < len(parts) and 2 * sizes[parts[:depth]] > total:
        depth += 1
    return parts[:depth]


def names_in(labels: Iterable[str]) -> re.Pattern[str]:
    """What matches the names in labels, as words or as words of an identifier."""
    names = sorted({re.escape(name) for label in labels for name in label.split(".")}, key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(names)})(?![^\W_])", re.IGNORECASE)
