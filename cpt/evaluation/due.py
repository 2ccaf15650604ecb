"""After which stages something is measured."""

import re
from dataclasses import dataclass
from typing import Any

from cpt.core.options import Options, option
from cpt.core.rules import Rule

EVERY = re.compile(r"every:([1-9]\d*)")


def is_when(value: Any) -> bool:
    return value in ("last", "each") or (isinstance(value, str) and EVERY.fullmatch(value) is not None)


def is_due(when: str, number: int, *, stages: int) -> bool:
    """Whether last, each or every:K means this number of the stages; 0, the base, and the last always."""
    every = EVERY.fullmatch(when)
    return number in (0, stages) or when == "each" or bool(every and number % int(every[1]) == 0)


@dataclass(frozen=True, kw_only=True)
class Due(Options):
    """What is measured on the base, and after some of the stages."""

    when: str = option(
        "after which stages, beside the base", Rule(is_when, "last, each, or every:K (and the last)")
    )

    def is_due(self, number: int, *, stages: int) -> bool:
        """Whether it is measured after so many of the stages; 0: on the base."""
        return is_due(self.when, number, stages=stages)
