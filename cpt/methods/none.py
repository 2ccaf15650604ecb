"""NONE: no training; the base model is the zero-shot reference."""

from collections.abc import Sequence

from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualMethod


class ZeroShot(ContinualMethod):
    """No stages."""

    def stages(self, order: Sequence[str]) -> list[Domain]:
        return []
