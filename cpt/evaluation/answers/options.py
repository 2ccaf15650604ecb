"""What is asked of the tasks of a run. Nothing here needs torch."""

from dataclasses import dataclass

from cpt.core.options import option
from cpt.core.rules import YES_NO, or_null, whole
from cpt.evaluation.due import Due


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(Due):
    """How the held-out examples of a task are asked."""

    written: bool = option("what a model writes by greedy decoding, beside the choices that it ranks", YES_NO)
    tokens: int = option("of a written answer, at most", whole(1))
    most: int | None = option("examples of a task; null: all that are held out", or_null(whole(1)))
    batch_size: int = option("questions per forward pass", whole(1))
