"""Domains made of the prose of installed packages' docstrings."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cpt.core.options import option
from cpt.core.rules import TEXTS_BY_KEY, TEXTS_NOT_NONE
from cpt.data.sources import docstrings
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.readers import stamps

GENERAL_PACKAGES = ("stdlib", "numpy")


@dataclass(frozen=True, kw_only=True)
class InstalledDocs(Source):
    """Prose of the docstrings of installed packages, one document per module."""

    packages: Mapping[str, Sequence[str]] = option("each domain's packages, by domain", TEXTS_BY_KEY)
    general: Sequence[str] = option(
        "packages of the general text; stdlib: the standard library", TEXTS_NOT_NONE
    )

    @property
    def names(self) -> list[str]:
        return [name for name in self.packages if name != GENERAL]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        return read_docs(self.packages_of(name))

    def fingerprint(self, name: str) -> Any:
        return stamp_docs(self.packages_of(name))

    def packages_of(self, name: str) -> list[str]:
        return list(self.general if name == GENERAL else self.packages[name])


def read_docs(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    return (("train", document) for document in docstrings.documents(packages))


def stamp_docs(packages: Sequence[str]) -> Any:
    return stamps(path for package in packages for path in docstrings.modules(package))


def read_general() -> Iterator[tuple[str, str]]:
    """The general text of sources that have none of their own."""
    return read_docs(GENERAL_PACKAGES)


def stamp_general() -> Any:
    """What decides the result of `read_general`."""
    return stamp_docs(GENERAL_PACKAGES)
