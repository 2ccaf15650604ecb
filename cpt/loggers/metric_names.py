"""Names of metrics in loggers that allow few characters.

MLflow's logger removes other characters and TensorBoard replaces them: `ppl/C`, `ppl/C++` and `ppl/C#` would
be one curve. Therefore loggers get names that they need not change."""

import re
from collections import defaultdict
from collections.abc import Iterable

from cpt.core.config import digest

PLAIN = re.compile(r"[A-Za-z0-9_.-]+")  # that MLflow, TensorBoard and file systems keep
OTHER = re.compile(r"[^A-Za-z0-9_.-]+")
NOT_NAMES = (".", "..")  # which are folders in a path
LONGEST_PART = 100  # characters; MLflow takes 250 for a whole name
HASH_DIGITS = 8


class MetricNames:
    """Distinct plain names for the metrics of a run with these texts.

    A name is changed part by part, between slashes. A part of letters, digits, `_`, `.` and `-` stays; in
    another one the other characters become `_`, and a hash of the part follows: `C++` is `C_-` and eight
    digits. So does a part from which the name of another text differs in case alone, as some stores do not
    distinguish case. The name of a text depends on the texts of the run and on nothing else."""

    def __init__(self, texts: Iterable[str]) -> None:
        parts_by_case: dict[str, set[str]] = defaultdict(set)
        for text in texts:
            for part in text.split("/"):
                parts_by_case[part.casefold()].add(part)
        self.alike: set[str] = set()
        for parts in parts_by_case.values():
            if len(parts) > 1:
                self.alike |= parts

    def logged(self, name: str) -> str:
        """The name under which a logger gets a metric."""
        return "/".join(map(self.logged_part, name.split("/")))

    def logged_part(self, part: str) -> str:
        is_plain = PLAIN.fullmatch(part) is not None and part not in NOT_NAMES
        if is_plain and part not in self.alike and len(part) <= LONGEST_PART:
            return part
        cleaned = OTHER.sub("_", part)[: LONGEST_PART - HASH_DIGITS - 1]
        return f"{cleaned}-{digest(part)[:HASH_DIGITS]}"

    def changes(self, texts: Iterable[str]) -> dict[str, str]:
        """The texts that have another name in loggers, with that name."""
        names = {text: self.logged(text) for text in texts}
        return {text: name for text, name in names.items() if name != text}
