"""What a plan asks for, counted: texts, steps, cells of the matrix; and what of it a folder has already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cpt.core.tensors import load_tensors
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.packing import Packed
from cpt.data.replay import Generated
from cpt.evaluation.scores import Scores
from cpt.models.objectives import Objective
from cpt.training.plan import Plan
from cpt.training.run_folder import RunFolder


@dataclass(frozen=True)
class Row:
    """A stage, 0: the base, with the texts that are scored after it; `left` is what is not done yet."""

    number: int
    name: str
    steps: int
    tokens: int
    texts: list[str]
    left_steps: int
    left_texts: list[str]
    generated: int = 0  # tokens that the model writes before it
    left_generated: int = 0


@dataclass(frozen=True)
class Text:
    """A text in tokens and documents; `train` is None where none of it is learned."""

    name: str
    train: int | None
    held_out: int
    rows_tokens: int  # of the rows that are scored, all tokens: what is read
    scored: int  # tokens that are scored after a stage
    all_scored: int  # without eval.tokens
    documents: int


@dataclass(frozen=True)
class Work:
    """All of a run."""

    texts: dict[str, Text]
    rows: list[Row]

    def scored(self, names: Iterable[str]) -> int:
        return sum(self.texts[name].scored for name in names)

    @property
    def full(self) -> int:
        """Tokens that a full matrix scores: every held-out text, whole, after every stage and on the base."""
        return len(self.rows) * sum(text.all_scored for text in self.texts.values())

    @property
    def is_done(self) -> bool:
        return not any(row.left_steps or row.left_texts for row in self.rows)


def count_work(plan: Plan, data: DomainSequence, place: RunFolder, scores: Scores | None) -> Work:
    """What a run does, and what of it is left where a folder has some of it."""
    order = [*dict.fromkeys(part for each in data for part in each.parts), *data.held_out]
    texts = {name: count_text(data, name) for name in dict.fromkeys(order) if name in data.held_out}
    stages = [Domain("base", -1, ()), *data]
    return Work(texts, [count_row(plan, data, place, scores, *each) for each in enumerate(stages)])


def count_text(data: DomainSequence, name: str) -> Text:
    held_out: Packed = data.held_out[name]
    objective: Objective = data.objective.scoring  # type: ignore[attr-defined]
    chosen = data.scored_sizes(name)
    return Text(
        name,
        train=int(data.train[name].row_lengths.sum()) if name in data.train else None,
        held_out=int(held_out.row_lengths.sum()),
        rows_tokens=int(chosen.all.sum()),
        scored=int(objective.scored(chosen).sum()),
        all_scored=int(objective.scored(held_out.sizes()).sum()),
        documents=held_out.documents,
    )


def count_row(
    plan: Plan, data: DomainSequence, place: RunFolder, scores: Scores | None, number: int, stage: Domain
) -> Row:
    parts = [each.parts for each in data]
    texts = plan.evaluation.choose_columns(number, stages=parts, texts=list(data.held_out))
    steps = data.steps(stage) if number else 0
    done = 0 if scores is None else len(scores.rows)
    if number < done and scores is not None:
        measured = scores.measured(number)
        there = number == done - 1 or place.stage(number).exists() or number == 0
        missing = [text for text in texts if text not in measured] if there else []
        row = Row(number, stage.name, steps, tokens_of(data, stage), texts, 0, missing)
        return replace(row, generated=tokens_generated(data, stage, plan.model.length) if number else 0)
    made = steps_made(place, number, stage.name) if number == done and number else 0
    row = Row(number, stage.name, steps, tokens_of(data, stage), texts, steps - made, texts)
    generated = tokens_generated(data, stage, plan.model.length) if number else 0
    there = place.generated(number, stage.name).exists()
    return replace(row, generated=generated, left_generated=0 if there else generated)


def tokens_of(data: DomainSequence, stage: Domain) -> int:
    """Tokens that a stage's steps read, replayed ones that come on top among them."""
    if not stage.parts:
        return 0
    each = zip(stage.parts, data.steps_by_part(stage), strict=True)
    own = sum(steps * data.budget.batch_size * data.train[part].tokens_per_row for part, steps in each)
    before = [data.train[part].tokens_per_row for part in data.past(stage)]
    past = data.replay.past * bool(before)
    ahead = data.recovery_steps(stage) * data.budget.batch_size * sum(before) / max(1, len(before))
    return int(own * (1 + (past + data.replay.general) * data.replay.adds) + ahead)


def tokens_generated(data: DomainSequence, stage: Domain, length: int) -> int:
    """Tokens that the model writes before a stage, those that are left out again among them."""
    mixture = data.replay
    if not isinstance(mixture, Generated):
        return 0
    budgets = [mixture.budget(count * length) for count in data.replayed(stage).values()]
    return sum(map(mixture.wanted, budgets))


def steps_made(place: RunFolder, number: int, name: str) -> int:
    """Steps of a stage that its checkpoint has."""
    path = place.checkpoint(number, name)
    if not path.exists():
        return 0
    try:
        saved: dict[str, Any] = load_tensors(path)
    except Exception:  # a damaged one is told by the run
        return 0
    return int(saved["global_step"])
