"""What all that is measured after stages, beside the losses, has in common."""

from cpt.core.collectives import agree
from cpt.data.datamodule import DomainSequence
from cpt.evaluation.due import Due


class AfterStages:
    """Measured on the base and after the stages that its options say; what is done leaves files in the run
    folder, so that another start measures what is missing and nothing else."""

    GROUP: str  # what asks for it
    KIND: str  # what it is called in scores.json

    options: Due
    data: DomainSequence

    @property
    def when(self) -> str:
        return self.options.when

    @property
    def contents(self) -> dict[str, str]:
        """What the data of each task are known by, where a run's identity keeps that. Here: nothing, as what
        is measured of other data has another digest."""
        return {}

    def name(self, number: int) -> str:
        """The stage's, as the row of the matrix."""
        return "base" if number == 0 else self.data.domains[number - 1].name

    def follows(self, number: int) -> bool:
        """Whether something is asked for after so many stages, be it in the run folder or not."""
        return self.options.is_due(number, stages=len(self.data))

    def due(self, number: int) -> list[str]:
        """The tasks that are asked for after so many stages and not in the run folder yet."""
        raise NotImplementedError

    def missing(self, number: int) -> bool:
        """Whether something is not in the run folder yet; all processes get the same answer."""
        return bool(agree(len(self.due(number))))
