"""Options of what a run measures: cells of the matrix, answers to tasks, chats, tasks of the
lm-evaluation-harness.
Nothing here needs torch or the harness, so that a wrong option is reported at once."""

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Predicate

from cpt.core.config import digest
from cpt.core.errors import describe_unknown_name
from cpt.core.exceptions import InvalidOptionError
from cpt.core.randomness import key, permute
from cpt.core.run_command import format_install_command
from cpt.core.schema import (
    Allowed,
    Count,
    FileOrFolder,
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

FULL_POLICY = {"when": "each", "columns": "all"}  # the policy of which no cell is missing
AUTO = "auto"
CAP = 200_000  # tokens of each text that are scored where eval.max_tokens is not set
EVERY = re.compile(r"every:([1-9]\d*)")
SOME = re.compile(r"(near|sample):([1-9]\d*)")
# Measures that may be the main one of a task, and whether each is of generated answers.
MAIN_MEASURES = {
    "accuracy_ranked": False,
    "accuracy_ranked_mean": False,
    "exact_match": True,
    "first_character": True,
    "rouge_l": True,
    "edit_similarity": True,
    "sari": True,
}
# Versions of lm_eval with the tasks and results that we read: from the first to below the second.
MIN_LM_EVAL = (0, 4, 13)
MAX_LM_EVAL = (0, 5)


When = Annotated[
    Literal["last", "each"] | Annotated[str, Predicate(EVERY.fullmatch)],
    Allowed("last, each, or every:K (and the last)"),
]


def is_due(schedule: str, number: int, *, stages: int) -> bool:
    """Whether the model after `number` of the stages is evaluated by a schedule: last, each or every:K. The
    base, number 0, and the last one always are."""
    if number in (0, stages) or schedule == "each":
        return True
    interval = EVERY.fullmatch(schedule)
    return interval is not None and number % int(interval[1]) == 0


@config
class EvalOptions(Options):
    """Which cells of the matrix are measured. The base and the last model are scored on every text; every
    stage on the domain that it learned and on the general text. A cell that is left out is missing, not 0."""

    when: When = option("stages after which further test sets are evaluated: each, every:K, last")
    columns: Annotated[
        Literal["all", "seen"] | Annotated[str, Predicate(SOME.fullmatch)],
        Allowed("all, seen, near:K, sample:K"),
    ] = option(
        "test sets of these evaluations: all, seen (trained so far), near:K (nearest in the order),"
        " sample:K (a sample)"
    )
    max_tokens: Literal["auto"] | Steps | None = option(
        "evaluated tokens of each text at most, the same after every stage; null: all held-out text; "
        f"auto: {CAP:,}, or the value that the run started with"
    )

    @property
    def cap(self) -> int | None:
        """Tokens of each text that are scored at most, where no folder says otherwise; None: no bound."""
        return CAP if self.max_tokens == AUTO else self.max_tokens  # type: ignore[return-value]

    @property
    def policy(self) -> dict[str, str]:
        """What may be widened later."""
        return {"when": self.when, "columns": self.columns}

    def choose_columns(
        self, number: int, *, stages: Sequence[Sequence[str]], texts: Sequence[str]
    ) -> list[str]:
        """The texts that the model is scored on after `number` stages; `stages` are the domains of each.

        Before the first and after the last stage these are all. In between they are the stage's own ones and
        the general text, and where `when` asks for more, those of `columns`."""
        kind, _, limit = self.columns.partition(":")  # of near:K, sample:K the number
        has_further_texts = is_due(self.when, number, stages=len(stages))
        if number in (0, len(stages)) or (has_further_texts and kind == "all"):
            return list(texts)

        chosen = {*stages[number - 1], GENERAL}
        if has_further_texts:
            for stage in choose_stages(number, len(stages), kind=kind, limit=limit):
                chosen.update(stages[stage])
        return [text for text in texts if text in chosen]


def choose_stages(number: int, num_stages: int, *, kind: str, limit: str) -> list[int]:
    """The indices of stages whose texts are scored after `number` stages: those before, or at most `limit`
    others, the nearest in the order or a sample."""
    if kind == "seen":
        return list(range(number))
    last = number - 1
    other_stages = [stage for stage in range(num_stages) if stage != last]
    if kind == "near":
        other_stages.sort(key=lambda stage: (abs(stage - last), stage))
        return other_stages[: int(limit)]

    # A sample for K is part of that for K + 1, so that a run can be given more columns later.
    sample = permute(np.arange(len(other_stages)), len(other_stages), stream=key("columns", number))
    return [other_stages[index] for index in sample[: int(limit)]]


@config
class StageOptions(Options):
    """What is measured on the base, and after some of the stages."""

    when: When = option("stages after which to evaluate, in addition to the base")


@config
class TaskEvalOptions(StageOptions):
    """How the held-out examples of a task are asked."""

    written: bool = option("evaluate generated answers (greedy decoding) as well as ranked choices")
    ranked: bool = option("rank the choices of closed tasks as well as evaluating generated answers")
    max_new_tokens: Count = option("maximum number of tokens per generated answer")
    max_documents: Count | None = option("examples per task, a fixed random draw; null: all held-out")
    batch_size: Count = option("questions per forward pass")
    metrics: Annotated[Mapping[str, str], Allowed("a metric for each of some tasks")] | None = option(
        "metric of a task instead of its default, by task; null: the defaults"
    )

    def __post_init__(self) -> None:
        if not self.written and not self.ranked:
            raise InvalidOptionError(
                "ranked", False, reason="written=false, so nothing would be asked", allowed="true"
            )
        for task, measure in self.metric_of_task.items():
            if measure not in MAIN_MEASURES:
                raise ValueError(describe_unknown_name(f"metrics.{task}={measure}", MAIN_MEASURES))
            is_of_written = MAIN_MEASURES[measure]
            if is_of_written and not self.written:
                raise InvalidOptionError(
                    f"metrics.{task}",
                    measure,
                    reason="written=false generates no answers",
                    allowed=", ".join(name for name, is_written in MAIN_MEASURES.items() if not is_written),
                )
            if not is_of_written and not self.ranked:
                raise InvalidOptionError(
                    f"metrics.{task}",
                    measure,
                    reason="ranked=false ranks no choices",
                    allowed=", ".join(name for name, is_written in MAIN_MEASURES.items() if is_written),
                )

    @property
    def metric_of_task(self) -> Mapping[str, str]:
        """The metric of each task that does not have its default one."""
        return self.metrics or {}


@config
class ChatOptions(StageOptions):
    """Held-out chats: the loss on the assistant's turns, and answers that the model writes."""

    path: FileOrFolder | None = option(
        "file or folder of JSON lines with `messages`; null: the chats that cpt ships, "
        "for causal models with a chat template"
    )
    generate: Natural | None = option(
        "chats, the first ones, that the base and the last model answer (greedy decoding); null: all"
    )
    max_new_tokens: Count = option("maximum tokens of an answer; a longer one counts as broken")
    batch_size: Count = option("chats per forward pass")


@config
class DivergenceOptions(StageOptions):
    """KL(base || model) on the test texts."""


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
        files = []
        if self.include:
            for path in sorted(Path(self.include).rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    stat = path.stat()
                    files.append([str(path.relative_to(self.include)), stat.st_size, stat.st_mtime_ns])
        return digest(files)

    def check_installed(self) -> None:
        """Raises ValueError for a missing folder, and where lm_eval is not installed in a known version."""
        if self.include is not None and not Path(self.include).is_dir():
            raise InvalidOptionError(
                "benchmark.include", self.include, reason="it is missing", allowed="null or a folder"
            )
        try:
            version = metadata.version("lm_eval")
        except metadata.PackageNotFoundError:
            raise InvalidOptionError(
                "benchmark",
                "lm_eval",
                reason="the lm-evaluation-harness is not installed",
                allowed=f"after {format_install_command('lm-eval')}",
            ) from None
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
        if not MIN_LM_EVAL <= numbers < MAX_LM_EVAL:
            raise InvalidOptionError(
                "benchmark",
                "lm_eval",
                reason=f"{version} is installed",
                allowed=f"{join_version(MIN_LM_EVAL)} to below {join_version(MAX_LM_EVAL)}, "
                f"after {format_install_command('lm-eval')}",
            )


def join_version(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
