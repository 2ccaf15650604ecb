"""What of a run is left, and how long that takes by what is done: for those who look on."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from statistics import median

from cpt.core.pulse import PULSE, Phase
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.training.costs import time_phase
from cpt.training.examinations import Measured
from cpt.training.scoring import Scorer

ORDER = ("generate", "learn", "score", "endtasks", "answers", "probes")  # within a stage, as in scores.json
LATELY = 100  # stages whose seconds say how long the same takes
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
            if not size:
                continue
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
            done=self.made[max(0, number - (kind == "learn"))],
            total=self.made[-1],
            rest_s=None if "learn" in untimed else seconds,
            rest_steps=int(steps),
            untimed=tuple(untimed),
        )

    @cached_property
    def steps(self) -> list[int]:
        """Optimizer steps of each stage."""
        return [self.data.steps(domain) for domain in self.data]

    @cached_property
    def made(self) -> list[int]:
        """Optimizer steps after each stage, the base's first."""
        return list(accumulate(self.steps, initial=0))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The stages by name."""
        return {self.name(number): number for number in range(len(self.data) + 1)}

    def name(self, number: int) -> str:
        return self.data.domains[number - 1].name if number else "base"

    def after(self, kind: str, number: int) -> Iterator[tuple[str, float]]:
        """All that will be done behind a kind of work in a stage, with its size; what is missing of stages
        that are learned already is not foreseen."""
        coming = min(max(number + 1, len(self.scores.rows)), len(self.data) + 1)
        for later in ORDER[ORDER.index(kind) + 1 :]:
            yield later, self.sizes[later][number]
        for later in ORDER:
            yield later, self.left[later][coming]

    @cached_property
    def left(self) -> dict[str, list[float]]:
        """How much work there is of each kind from a stage on, that included."""
        return {kind: [*accumulate(reversed(sizes), initial=0.0)][::-1] for kind, sizes in self.sizes.items()}

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
        """By kind, the seconds that one of its size took in the latest stages that are done; none where none
        is."""
        found, blank = {}, [0.0] * (len(self.data) + 1)
        for kind, stages in self.scores.phases.items():
            sizes, done = self.sizes.get(kind, blank), len(self.scores.rows)
            latest = islice(reversed(stages.items()), LATELY)
            numbered = [(self.numbers.get(name, done), seconds) for name, seconds in latest]
            each = [seconds / sizes[n] for n, seconds in numbered if n < done and sizes[n]]
            if each:
                found[kind] = median(each)
        return found
