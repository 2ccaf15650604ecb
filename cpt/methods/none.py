"""NONE: nothing is learned; the base model's row is the zero-shot reference."""

from collections.abc import Sequence

from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualModule


class ZeroShot(ContinualModule):
    """No stages."""

    def stages(self, order: Sequence[str]) -> list[Domain]:
        return []
