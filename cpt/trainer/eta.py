"""The remaining time of a run at work, for progress.json: what is left, at the pace of what is done."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from cpt.core.heartbeat import HEARTBEAT, Phase, set_phase
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.trainer.costs import time_phase
from cpt.trainer.evaluators import Evaluator
from cpt.trainer.score import Scorer

KINDS = {  # the work of a stage in its order, as in scores.json, and its name in progress.json
    "generate": "writing texts before",
    "learn": "learning",
    "score": "scoring after",
    "endtasks": "end tasks after",
    "answers": "answers after",
    "probes": "probe after",
}
LATEST = 100  # stages that set the pace


@dataclass(frozen=True)
class RunETA:
    """The stages of a run and the seconds of what is done."""

    data: DomainSequence
    scorer: Scorer
    scores: Scores
    examinations: Sequence[Evaluator]

    @contextmanager
    def timed(self, kind: str, number: int) -> Iterator[None]:
        """Reports a kind of work in a stage (0: the base), and adds its seconds to the scores."""
        if HEARTBEAT.folder is not None:
            set_phase(self.phase(kind, number))
        with time_phase(self.scores.phases[kind], self.names[number]):
            yield

    def phase(self, kind: str, number: int) -> Phase:
        """What follows this work, in seconds where its like was timed; in steps before a stage was trained.
        What a trained stage lacks is not counted."""
        done, after = len(self.scores.rows), list(KINDS)[list(KINDS).index(kind) + 1 :]
        seconds, steps, untimed = 0.0, 0, []
        for later, sizes in self.sizes.items():
            left = sum(sizes[max(number + 1, done) :]) + sizes[number] * (later in after)
            took, known = self.scores.phases.get(later, {}), zip(self.names, sizes[:done], strict=False)
            paces = [took[name] / size for name, size in known if size and name in took]
            if left and paces:
                seconds += left * median(paces[-LATEST:])
            elif left and later == kind == "learn":
                steps = left
            elif left:
                untimed.append(later)
        trained = self.sizes["learn"]
        return Phase(
            name=f"{KINDS[kind]} {self.names[number]}",
            stage=number,
            stages=len(self.data),
            trains=kind == "learn",
            done=sum(trained[: number + (kind != "learn")]),
            total=sum(trained),
            remaining_s=None if "learn" in untimed else seconds,
            remaining_steps=steps,
            untimed=tuple(untimed),
        )

    @cached_property
    def names(self) -> list[str]:
        return ["base", *(domain.name for domain in self.data)]

    @cached_property
    def sizes(self) -> dict[str, list[int]]:
        """By kind, the size of the work in the base's stage and the others: steps, texts, or 1."""
        stages = range(len(self.names))
        found = {each.KIND: [int(each.follows(number)) for number in stages] for each in self.examinations}
        found["generate"] = [int(self.data.replay_source is not None and number > 0) for number in stages]
        found["learn"] = [0, *map(self.data.steps, self.data)]
        found["score"] = [len(self.scorer.wanted(number)) for number in stages]
        return {kind: found[kind] for kind in KINDS if kind in found}
