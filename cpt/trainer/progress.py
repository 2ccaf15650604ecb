"""The activities of a run in each stage: their seconds in scores.json, and the forecast in progress.json."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cpt.core.heartbeat import HEARTBEAT, Phase, set_phase
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.scores import Scores
from cpt.trainer.costs import time_phase

# The activities of a stage in their order: the key in scores.json, and the words in progress.json.
STAGE_ACTIVITIES = {
    "generate": "writing texts before",
    "learn": "training",
    "score": "scoring after",
    "endtasks": "end tasks after",
    "answers": "answers after",
    "chats": "chats after",
    "divergence": "divergence after",
    "benchmarks": "benchmark after",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class ActivityTimer:
    """Times the activities of a run. Stages are numbered as the rows of the matrix: 0 is the base model."""

    scores: Scores
    data: DomainSequence

    @property
    def stage_names(self) -> list[str]:
        return ["base", *(domain.name for domain in self.data)]

    @contextmanager
    def time(self, activity: str, number: int) -> Iterator[None]:
        """Reports an activity of a stage to the heartbeat, and adds its seconds to the scores."""
        if HEARTBEAT.folder is not None:
            set_phase(self.forecast(activity, number))

        with time_phase(self.scores.activity_seconds[activity], self.stage_names[number]):
            yield

    def forecast(self, activity: str, number: int) -> Phase:
        """An activity of a stage as the heartbeat reports it, with what remains of the run after it.

        A remaining step is expected to take as long as those of the committed stages; before there are any,
        the heartbeat takes the pace of its progress bar. A remaining row is expected to take as long as the
        committed rows on average, without training."""
        num_steps = [0, *map(self.data.steps, self.data)]  # by stage
        num_committed = len(self.scores.rows)

        # A stage is first trained, then scored: which of the two is still ahead depends on the activity.
        training_is_ahead = activity == "generate"
        scoring_is_ahead = activity in ("generate", "learn")
        next_to_train = number if training_is_ahead else number + 1
        next_to_score = number if scoring_is_ahead else number + 1
        remaining_steps = sum(num_steps[max(next_to_train, num_committed) :])
        remaining_rows = len(num_steps) - max(next_to_score, num_committed)

        seconds = {name: self.committed_seconds(name) for name in STAGE_ACTIVITIES}
        seconds_per_row = (sum(seconds.values()) - seconds["learn"]) / max(1, num_committed)

        committed_steps = sum(num_steps[:num_committed])
        untimed_steps = 0  # remaining steps that remaining_s leaves out
        remaining_s: float | None = None
        if committed_steps:
            seconds_per_step = seconds["learn"] / committed_steps
            remaining_s = remaining_rows * seconds_per_row + remaining_steps * seconds_per_step
        else:
            untimed_steps = remaining_steps
            if activity == "learn":  # the only one whose progress bar has a pace of steps
                remaining_s = remaining_rows * seconds_per_row

        return Phase(
            name=f"{STAGE_ACTIVITIES[activity]} {self.stage_names[number]}",
            stage=number,
            stages=len(self.data),
            trains=activity == "learn",
            earlier_steps=sum(num_steps[:next_to_score]),
            total_steps=sum(num_steps),
            remaining_s=remaining_s,
            remaining_steps=untimed_steps,
        )

    def committed_seconds(self, activity: str) -> float:
        """The seconds of an activity in all stages that are committed."""
        seconds = self.scores.activity_seconds[activity]  # by stage
        return sum(seconds.get(stage, 0.0) for stage in self.stage_names[: len(self.scores.rows)])
