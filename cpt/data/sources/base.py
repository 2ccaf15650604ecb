"""Where the text of the domains comes from. A source lists its domains and reads one by documents."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cpt.core.config import digest

GENERAL = "general"
FORMAT = 2  # part of every stamp: raise it when the files that cpt.data.corpus makes of a text change


class Source(ABC):
    """Domains by name, each a stream of (split, document); `held_out` says what is split off where a source
    is not split: the shares of valid and test documents and the seed; `most` bounds the documents of either.
    `score_on` is the split that the matrix is made of."""

    def __init__(
        self, *, orders: Sequence[Sequence[str]] | None, held_out: Mapping[str, float], score_on: str
    ) -> None:
        if score_on not in ("valid", "test"):
            raise ValueError(f"domains.score_on={score_on}; allowed: valid, test")
        if not (0 < held_out["valid"] < 0.5 and 0 < held_out["test"] < 0.5):
            raise ValueError(f"domains.held_out={dict(held_out)}; allowed: shares above 0 and below 0.5")
        most = held_out.get("most")
        if most is not None and (not isinstance(most, int) or most < 1):
            raise ValueError(f"domains.held_out.most={most}; allowed: null, or 1 document or more")
        self.orders, self.held_out, self.score_on = orders, held_out, score_on

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """The domains that can be learned."""

    def check(self, order: Sequence[str]) -> None:  # noqa: B027  (most sources have nothing to check)
        """Raises ValueError for text of these domains, or general text, that cannot be read as it is meant,
        as far as that is known at once."""

    @abstractmethod
    def read(self, name: str) -> Iterator[tuple[str, str]]:
        """(split, document) of a domain or of `general`; split is train, valid or test."""

    @abstractmethod
    def fingerprint(self, name: str) -> Any:
        """What decides the result of `read`, cheaply: names, sizes, times."""


def stamp_of(source: Source, name: str) -> str:
    """What a domain's text is known by without reading it: sizes, times, and how it is split."""
    return f"{name}-{digest([FORMAT, source.fingerprint(name), dict(source.held_out)])}"
