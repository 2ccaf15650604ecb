"""What cpt's own loggers take beyond Lightning's: where a stage begins, its row, and the result of the
run."""

from pathlib import Path

from lightning.pytorch.loggers import Logger

from cpt.evaluation.scores import Scores


class StageLogger(Logger):
    """A logger that knows the stages of a run."""

    def enter(self, domain: str, *, stage: int, tokens: float) -> None:
        """The points that follow are of this domain, which is trained in this stage (1: the first); before it
        the run had read this number of tokens."""

    def log_row(self, scores: Scores, row: int) -> None:
        """Logs a row of the matrix and what the run has cost so far."""

    def log_result(self, scores: Scores, *, folder: Path) -> None:
        """Logs what the report of the finished run contains; `folder`: of the run."""

    def mark_preempted(self) -> None:
        """The run leaves on a signal and will be continued."""

    def close(self, *, is_failed: bool) -> None:
        """Ends the logger's run as the run itself ended."""
