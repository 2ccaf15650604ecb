"""Domains made of the prose of installed packages' docstrings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpt.data.sources import docstrings
from cpt.data.sources.base import GENERAL, Source
from cpt.data.sources.readers import stamps

GENERAL_PACKAGES = ("stdlib", "numpy")


class InstalledDocs(Source):
    """Prose of the docstrings of installed packages, one document per module."""

    def __init__(
        self, *, packages: Mapping[str, Sequence[str]], general: Sequence[str], **shared: Any
    ) -> None:
        super().__init__(**shared)
        self.packages = {**{name: list(each) for name, each in packages.items()}, GENERAL: list(general)}

    @property
    def names(self) -> list[str]:
        return [name for name in self.packages if name != GENERAL]

    def read(self, name: str) -> Iterator[tuple[str, str]]:
        return installed(self.packages[name])

    def fingerprint(self, name: str) -> Any:
        return installation(self.packages[name])


def installed(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    return (("train", document) for document in docstrings.documents(packages))


def installation(packages: Sequence[str]) -> Any:
    return stamps(path for package in packages for path in docstrings.modules(package))
