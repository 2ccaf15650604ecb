"""Options of what a run measures: cells of the matrix, answers to tasks, tasks of the lm-evaluation-harness.
Nothing here needs torch or the harness, so that a wrong option is reported at once."""

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Predicate

from cpt.core.config import digest
from cpt.core.errors import unknown_name
from cpt.core.randomness import key, shuffle
from cpt.core.schema import (
    Allowed,
    Count,
    Folder,
    Int,
    Natural,
    OneOrMore,
    OpenShare,
    Options,
    Steps,
    Text,
    config,
    option,
)
from cpt.data.sources.base import GENERAL

FULL = {"rows": "each", "columns": "all"}  # the policy of which no cell is missing
AUTO, CAP = "auto", 200_000  # tokens of each text that are scored where eval.max_tokens is not set
EVERY, SOME = re.compile(r"every:([1-9]\d*)"), re.compile(r"(near|sample):([1-9]\d*)")
# Measures that a task may be reported by, and whether each is of what the model writes.
KNOWN_BY = {"accuracy_ranked": False, "accuracy_ranked_mean": False}
KNOWN_BY |= dict.fromkeys(("exact_match", "first_character", "rouge_l", "edit_similarity", "sari"), True)
OLDEST, TOO_NEW = (0, 4, 13), (0, 5)  # versions of lm_eval with the tasks and results that we read
EXTRA = "pip install -e '.[lm-eval]'"


When = Annotated[
    Literal["last", "each"] | Annotated[str, Predicate(EVERY.fullmatch)],
    Allowed("last, each, or every:K (and the last)"),
]


def is_due(when: str, number: int, *, stages: int) -> bool:
    """Whether last, each or every:K includes this number of the stages; 0, the base, and the last always."""
    every = EVERY.fullmatch(when)
    return number in (0, stages) or when == "each" or bool(every and number % int(every[1]) == 0)


@config
class EvalOptions(Options):
    """Which cells of the matrix are measured. The base and the last model are scored on every text; every
    stage on the domain that it learned and on the general text. A cell that is left out is missing, not 0."""

    rows: When = option("stages after which further test sets are evaluated: each, every:K, last")
    columns: Annotated[
        Literal["all", "seen"] | Annotated[str, Predicate(SOME.fullmatch)],
        Allowed("all, seen, near:K, sample:K"),
    ] = option(
        "test sets of these evaluations: all, seen (trained so far), near:K (nearest in the order),"
        " sample:K (a sample)"
    )
    max_tokens: Literal["auto"] | Steps | None = option(
        "of each text, at most: rows drawn by key, the same after every stage; null: all that is held out; "
        f"auto: {CAP:,}, or the value that the run started with"
    )

    @property
    def cap(self) -> int | None:
        """Tokens of each text that are scored at most, where no folder says otherwise; None: no bound."""
        return CAP if self.max_tokens == AUTO else self.max_tokens  # type: ignore[return-value]

    @property
    def policy(self) -> dict[str, str]:
        """What may be widened later."""
        return {"rows": self.rows, "columns": self.columns}

    def choose_columns(
        self, number: int, *, stages: Sequence[Sequence[str]], texts: Sequence[str]
    ) -> list[str]:
        """The texts that the model after `number` stages is scored on; `stages`: the domains of each."""
        kind, _, most = self.columns.partition(":")
        more = is_due(self.rows, number, stages=len(stages))
        if number in (0, len(stages)) or (more and kind == "all"):
            return list(texts)
        others = [place for place in range(len(stages)) if place != number - 1]
        if kind == "seen":
            others = list(range(number))
        elif kind == "near":
            others = sorted(others, key=lambda place: (abs(place - number + 1), place))[: int(most)]
        elif kind == "sample":
            drawn = shuffle(np.arange(len(others)), len(others), stream=key("columns", number))
            others = [others[place] for place in drawn[: int(most)]]
        chosen = {*stages[number - 1], GENERAL, *(text for at in others if more for text in stages[at])}
        return [text for text in texts if text in chosen]


@config
class StageOptions(Options):
    """What is measured on the base, and after some of the stages."""

    when: When = option("stages after which to evaluate, in addition to the base")


@config
class TaskEvalOptions(StageOptions):
    """How the held-out examples of a task are asked."""

    written: bool = option("evaluate generated answers (greedy decoding) as well as ranked choices")
    max_new_tokens: Count = option("maximum number of tokens per generated answer")
    max_documents: Count | None = option("examples per task, a fixed random draw; null: all held-out")
    batch_size: Count = option("questions per forward pass")
    measures: Annotated[Mapping[str, str], Allowed("a measure for each of some tasks")] | None = option(
        "metric of a task instead of its default, by task; null: the defaults"
    )

    def __post_init__(self) -> None:
        ranked = ", ".join(name for name, written in KNOWN_BY.items() if not written)
        for task, measure in self.known_by.items():
            if measure not in KNOWN_BY:
                raise ValueError(unknown_name(f"measures.{task}={measure}", KNOWN_BY))
            if KNOWN_BY[measure] and not self.written:
                told = f"measures.{task}={measure} is invalid: written=false generates no answers"
                raise ValueError(f"{told}. Allowed: {ranked}")

    @property
    def known_by(self) -> Mapping[str, str]:
        """The measure that is asked for of each of some tasks."""
        return self.measures or {}


@config
class LMEvalOptions(StageOptions):
    """Tasks of the lm-evaluation-harness (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness),
    measured on a model without fine-tuning."""

    tasks: Annotated[OneOrMore[Text], Allowed("one or more names, each once")] = option(
        "tasks, groups and tags, of the harness or your own"
    )
    include: Folder | None = option("folder with your own task YAMLs, at any depth")
    metrics: Annotated[
        Mapping[str, Text], Allowed("a metric for each of some tasks, {hellaswag: acc_norm}")
    ] = option("metric per task; default: the first of the harness")
    shots: Natural | None = option("few-shot examples; null: the number of the task")
    max_documents: (
        Annotated[Count | OpenShare, Allowed("a whole number, 1 or more, or a share above 0 and below 1")]
        | None
    ) = option("maximum number of examples per task, or a share; null: all")
    batch_size: Literal["auto"] | Steps = option("requests per forward pass")
    max_length: Annotated[Int, Ge(2)] | None = option(
        "maximum tokens of a request; null: the limit of the model"
    )

    @property
    def stamp(self) -> str:
        """A hash of names, sizes and times of the files in `include`."""
        files = sorted(Path(self.include).rglob("*")) if self.include else []
        kept = [path for path in files if path.is_file() and "__pycache__" not in path.parts]
        stats = [(str(path.relative_to(self.include or "")), path.stat()) for path in kept]
        return digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])

    def check_installed(self) -> None:
        """Raises ValueError for a missing folder, and where lm_eval is not installed in a known version."""
        if self.include is not None and not Path(self.include).is_dir():
            told = f"benchmark.include={self.include} is invalid: it is missing"
            raise ValueError(f"{told}. Allowed: null or a folder")
        try:
            version = metadata.version("lm_eval")
        except metadata.PackageNotFoundError:
            told = "benchmark=lm_eval is invalid: the lm-evaluation-harness is not installed"
            raise ValueError(f"{told}. Allowed: {EXTRA}") from None
        if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:3])) < TOO_NEW:
            allowed = " to below ".join(".".join(map(str, each)) for each in (OLDEST, TOO_NEW))
            told = f"benchmark=lm_eval is invalid: {version} is installed"
            raise ValueError(f"{told}. Allowed: {allowed} ({EXTRA})")
