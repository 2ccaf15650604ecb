"""What is asked of the tasks of a run. Nothing here needs torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cpt.core.errors import unknown_name
from cpt.core.options import option
from cpt.core.rules import MAPPED_TEXTS, YES_NO, Rule, or_null, whole
from cpt.evaluation.due import Due

# What a task may be known by, and whether that is of what the model writes.
KNOWN_BY = {
    "accuracy_ranked": False,
    "accuracy_ranked_mean": False,
    "exact_match": True,
    "first_character": True,
    "rouge_l": True,
    "edit_similarity": True,
    "sari": True,
}


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Due):
    """How the held-out examples of a task are asked."""

    written: bool = option("what a model writes by greedy decoding, beside the choices that it ranks", YES_NO)
    tokens: int = option("of a written answer, at most", whole(1))
    most: int | None = option("examples of a task; null: all that are held out", or_null(whole(1)))
    batch_size: int = option("questions per forward pass", whole(1))
    measures: Mapping[str, str] | None = option(
        "what some tasks are known by, instead of the usual; null: none",
        Rule(
            lambda value: value is None or MAPPED_TEXTS.allows(value),
            "null or a measure for each of some tasks",
        ),
    )

    def check_together(self) -> None:
        super().check_together()
        for task, measure in self.known_by.items():
            if measure not in KNOWN_BY:
                raise ValueError(unknown_name(f"measures.{task}={measure}", KNOWN_BY))
            if KNOWN_BY[measure] and not self.written:
                ranked = ", ".join(name for name, written in KNOWN_BY.items() if not written)
                told = f"measures.{task}={measure} is of what a model writes, and written=false"
                raise ValueError(f"{told}; allowed: {ranked}")

    @property
    def known_by(self) -> Mapping[str, str]:
        """The measure that is asked for of each of some tasks."""
        return self.measures or {}

    def check_tasks(self, names: Iterable[str]) -> None:
        """Raises ValueError for a measure of a task that there is not."""
        known = list(names)
        if absent := [task for task in self.known_by if task not in known]:
            raise ValueError(unknown_name(f"answers.measures.{absent[0]}", known))
