"""What of a run is left, and how long that takes by what is done: for those who look on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from cpt.core.pulse import PULSE, Phase
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.training.costs import time_phase
from cpt.training.examinations import Measured
from cpt.training.scoring import Scorer

ORDER = ("generate", "learn", "score", "endtasks", "answers", "probes")  # within a stage, as in scores.json
CALLED = {
    "generate": "writing texts before",
    "learn": "learning",
    "score": "scoring after",
    "endtasks": "end tasks after",
    "answers": "answers after",
    "probes": "probe after",
}


@dataclass(frozen=True)
class Outlook:
    """The stages of a run, and what is done in each; `generates` says whether texts are written for them."""

    data: DomainSequence
    scorer: Scorer
    scores: Scores
    examinations: Sequence[Measured]
    generates: bool

    @contextmanager
    def timed(self, kind: str, number: int) -> Iterator[None]:
        """While it lasts, the run is at one of ORDER in a stage (0: the base); the scores get its seconds."""
        if PULSE.folder is not None:
            PULSE.enter(self.phase(kind, number))
        with time_phase(self.scores.phases[kind], self.name(number)):
            yield

    def phase(self, kind: str, number: int) -> Phase:
        """What is told of it."""
        took, seconds, steps, untimed = self.took(), 0.0, 0.0, dict[str, None]()
        for later, size in self.after(kind, number):
            if later in took:
                seconds += took[later] * size
            elif later == kind == "learn":
                steps += size
            else:
                untimed[later] = None
        return Phase(
            name=f"{CALLED[kind]} {self.name(number)}",
            stage=number,
            stages=len(self.data),
            learns=kind == "learn",
            done=sum(self.steps[:number][: -1 if kind == "learn" else None]),
            total=sum(self.steps),
            rest_s=None if "learn" in untimed else seconds,
            rest_steps=int(steps),
            untimed=tuple(untimed),
        )

    @cached_property
    def steps(self) -> list[int]:
        """Optimizer steps of each stage."""
        return [self.data.steps(domain) for domain in self.data]

    def name(self, number: int) -> str:
        return self.data.domains[number - 1].name if number else "base"

    def after(self, kind: str, number: int) -> Iterator[tuple[str, float]]:
        """All that will be done behind a kind of work in a stage, with its size; what is missing of stages
        that are learned already is not foreseen."""
        here, learned = ORDER.index(kind), len(self.scores.rows)
        for stage in range(number, len(self.data) + 1):
            for later in ORDER[here + 1 :] if stage == number else ORDER * (stage >= learned):
                if size := self.sizes[later][stage]:
                    yield later, size

    @cached_property
    def sizes(self) -> dict[str, list[float]]:
        """How much work there is of each kind in the base's stage and the others: steps, texts, or whether
        there is some."""
        stages = range(len(self.data) + 1)
        found: dict[str, list[float]] = {
            each.KIND: [each.follows(number) for number in stages] for each in self.examinations
        }
        found["generate"] = [self.generates and number > 0 for number in stages]
        found["learn"], found["score"] = [0, *self.steps], [len(self.scorer.wanted(n)) for n in stages]
        return dict.fromkeys(ORDER, [0.0] * len(stages)) | found

    def took(self) -> dict[str, float]:
        """By kind, the seconds that one of its size took in the stages that are done; none where none is."""
        numbers = {self.name(number): number for number in range(len(self.scores.rows))}
        found = {}
        for kind, stages in self.scores.phases.items():
            done = {numbers[name]: seconds for name, seconds in stages.items() if name in numbers}
            each = [
                seconds / size
                for n, seconds in done.items()
                if (size := self.sizes.get(kind, [0] * (n + 1))[n])
            ]
            if each:
                found[kind] = median(each)
        return found
