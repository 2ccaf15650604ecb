"""JOINT: all domains at once, the upper reference. theta = argmin sum_t L_lm(theta; D_t), started from
theta_0.

It trains on the samples of the sequence, with the same masks, in one shuffle and one schedule."""

from collections.abc import Sequence

from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualMethod


class Joint(ContinualMethod):
    """One stage with the text of all domains."""

    requires_all_domains = True

    def stages(self, order: Sequence[str]) -> list[Domain]:
        return [Domain("joint", 0, tuple(order))]
