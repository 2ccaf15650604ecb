"""Keeps a run's scores on the disk, row by row, at a cost that does not grow with the rows there are."""

from collections.abc import Mapping
from pathlib import Path

from cpt.evaluation.lines import add_line, is_behind
from cpt.evaluation.scores import Scores
from cpt.trainer.examinations import Measured


class Keeper:
    """Keeps the scores of a run at work in their file: as a whole where that is behind by too many rows, and
    always first, so that no line is added to what a killed process had begun. What is measured beside the
    losses has files of its own and is taken over where the scores are written as a whole; `digests` says by
    kind what it is known by."""

    def __init__(self, scores: Scores, path: Path, *, digests: Mapping[str, str]) -> None:
        self.scores, self.path, self.digests = scores, path, digests
        self.behind: int | None = None  # changes that are in lines alone; None: nothing was written yet
        self.examined: dict[str, Measured] = {}  # whose results the scores have not got yet, by kind

    def note(self, examination: Measured, number: int) -> None:
        """Something was measured after a stage, beside the losses."""
        self.examined[examination.KIND] = examination
        self.keep_row(number)

    def keep_row(self, number: int) -> None:
        """Puts a row that is new or has changed on the disk."""
        if self.behind is None or is_behind(self.behind + 1, len(self.scores.rows)):
            self.keep_rows()
        else:
            add_line(self.path, self.scores.line(number))
            self.behind += 1

    def keep_rows(self) -> None:
        """Writes the scores as a whole, measured anew, without intervals."""
        for examination in self.examined.values():
            self.collect(examination)
        self.examined.clear()
        self.scores.measure()
        self.keep()

    def collect(self, examination: Measured) -> None:
        """Takes over what the end tasks, the answers or the probe have given so far."""
        results = examination.results(len(self.scores.rows))
        setattr(self.scores, examination.KIND, results | {"digest": self.digests[examination.KIND]})

    def keep(self) -> None:
        """Writes the scores as they are."""
        self.scores.sum_seconds()
        self.scores.save(self.path)
        self.behind = 0
