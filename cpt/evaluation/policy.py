"""Which texts are scored after which stage: all of N domains after each of N stages are N^2 evaluations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cpt.core.options import Options, option
from cpt.core.randomness import key, shuffle
from cpt.core.rules import Rule, is_steps, or_null
from cpt.data.sources.base import GENERAL
from cpt.evaluation.due import is_due, is_when

FULL = {"rows": "each", "columns": "all"}  # the policy of which no cell is missing
AUTO, CAP = "auto", 200_000  # where nothing is said, of each text at most so many tokens are scored
SOME = re.compile(r"(near|sample):([1-9]\d*)")


def is_columns(value: object) -> bool:
    return value in ("all", "seen") or (isinstance(value, str) and SOME.fullmatch(value) is not None)


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Options):
    """Which cells of the matrix are measured. The base and the last model are scored on every text; every
    stage on the domain that it learned and on the general text. What is left out is missing, not zero."""

    rows: str = option(
        "stages after which further columns are scored: each, every:K, last",
        Rule(is_when, "last, each, or every:K (and the last)"),
    )
    columns: str = option(
        "which columns those are: all, seen (learned so far), near:K (in the order), sample:K (by key)",
        Rule(is_columns, "all, seen, near:K, sample:K"),
    )
    tokens: int | str | None = option(
        "of each text, at most: rows drawn by key, the same after every stage; null: all that is held out; "
        f"auto: {CAP:,}, or what the run's folder was begun with",
        or_null(Rule(lambda value: value == AUTO or is_steps(value), "auto or a whole number, 1 or more")),
    )

    @property
    def cap(self) -> int | None:
        """Tokens of each text that are scored at most, where no folder says otherwise; None: no bound."""
        return CAP if self.tokens == AUTO else self.tokens  # type: ignore[return-value]

    @property
    def policy(self) -> dict[str, str]:
        """What may be widened later."""
        return {"rows": self.rows, "columns": self.columns}

    def choose_columns(
        self, number: int, *, stages: Sequence[Sequence[str]], texts: Sequence[str]
    ) -> list[str]:
        """The texts that the model after so many stages is scored on, in their order; `stages` are the
        domains of each stage."""
        if number in (0, len(stages)):
            return list(texts)
        chosen = {*stages[number - 1], GENERAL}
        if is_due(self.rows, number, stages=len(stages)):
            chosen |= self.further(number, stages=stages, texts=texts)
        return [text for text in texts if text in chosen]

    def further(self, number: int, *, stages: Sequence[Sequence[str]], texts: Sequence[str]) -> set[str]:
        """What of the texts is scored beside the stage's own."""
        if self.columns == "all":
            return set(texts)
        if self.columns == "seen":
            return {text for stage in stages[:number] for text in stage}
        kind, count = self.columns.split(":")
        others = [place for place in range(len(stages)) if place != number - 1]
        if kind == "near":
            ranked = sorted(others, key=lambda place: (abs(place - number + 1), place))
        else:
            drawn = shuffle(np.arange(len(others)), len(others), stream=key("columns", number))
            ranked = [others[place] for place in drawn]
        return {text for place in ranked[: int(count)] for text in stages[place]}
