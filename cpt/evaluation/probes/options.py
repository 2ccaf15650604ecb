"""What a probe is told, and whether its harness is there. Nothing here needs torch or the harness."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cpt.core.config import digest
from cpt.core.options import option
from cpt.core.rules import Rule, is_list, is_number, is_text, is_whole, or_null, whole
from cpt.evaluation.due import Due

OLDEST, TOO_NEW = (
    (0, 4, 13),
    (0, 5),
)  # versions whose tasks, `evaluate` and results are as we read them
EXTRA = "pip install -e '.[lm-eval]'"


def is_names(value: Any) -> bool:
    return is_list(value, is_text) and 0 < len(value) == len(set(value))


def is_limit(value: Any) -> bool:
    return is_whole(value, 1) or (is_number(value) and 0 < value < 1)


def is_metrics(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(is_text, value.values()))


@dataclass(frozen=True, kw_only=True)
class LMEval(Due):
    """Tasks of the lm-evaluation-harness (Gao et al., https://github.com/EleutherAI/lm-evaluation-harness),
    measured on a model as it is."""

    tasks: tuple[str, ...] = option(
        "of the harness, or of your own: tasks, groups and tags",
        Rule(is_names, "one or more names, each once"),
    )
    include: str | None = option(
        "where the YAMLs of your own tasks are, in folders of any depth", or_null(Rule(is_text, "a folder"))
    )
    metrics: Mapping[str, str] = option(
        "what a task's column shows; else the first that the harness gives",
        Rule(is_metrics, "a metric for each of some tasks, {hellaswag: acc_norm}"),
    )
    shots: int | None = option("examples before each question; null: as the task says", or_null(whole(0)))
    limit: float | None = option(
        "examples of a task; null: all",
        or_null(Rule(is_limit, "a whole number, 1 or more, or a share above 0 and below 1")),
    )
    batch_size: Any = option(
        "requests per forward pass",
        Rule(lambda value: value == "auto" or is_whole(value, 1), "auto or a whole number, 1 or more"),
    )
    max_length: int | None = option("tokens of a request; null: as the model reads", or_null(whole(2)))

    @property
    def stamp(self) -> str:
        """Other files in the folder `include`, or other sizes or times of them, another stamp."""
        return digest(list(stamp_files(Path(self.include))) if self.include else [])


def stamp_files(folder: Path) -> Iterator[list[Any]]:
    """The files below a folder with their sizes and times; without those that Python leaves."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            stat = path.stat()
            yield [str(path.relative_to(folder)), stat.st_size, stat.st_mtime_ns]


def plan_probe(options: LMEval | None) -> LMEval | None:
    """The probe of a run. Raises ValueError where its harness or its folder is not there."""
    if options is None:
        return None
    if options.include is not None and not Path(options.include).is_dir():
        raise ValueError(f"probe.include={options.include} is no folder; allowed: null or a folder")
    check_harness()
    return options


def check_harness() -> None:
    """Raises ValueError where the lm-evaluation-harness is not installed, or not in a version of these."""
    needed = ".".join(map(str, OLDEST)), ".".join(map(str, TOO_NEW))
    try:
        version = metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        raise ValueError(f"probe=lm_eval needs the lm-evaluation-harness: {EXTRA}") from None
    if not OLDEST <= tuple(map(int, re.findall(r"\d+", version)[:3])) < TOO_NEW:
        raise ValueError(
            f"probe=lm_eval: lm_eval {version} is installed; needed: {needed[0]} or later, "
            f"below {needed[1]}: {EXTRA}"
        )
