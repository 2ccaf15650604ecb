"""REPLAY: plain further pre-training on a mixture of each domain with the text of those before it.

theta_t = argmin (1 - r) L_lm(theta; D_t) + r L_lm(theta; D_1, ..., D_{t-1}), started from theta_{t-1}, with r
the share of a batch (Ibrahim et al., TMLR 2024, arXiv 2403.08763). It is `ncl` with the same `replay`, bit
for bit."""

from dataclasses import replace

from cpt.data.replay import NO_REPLAY
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ExperienceReplayOptions


class ExperienceReplay(ContinualMethod):
    """Sets the run's replay to its `mixture`; raises ValueError if the run has another."""

    options: ExperienceReplayOptions

    def __init__(self, options: ExperienceReplayOptions, context: MethodContext) -> None:
        if context.replay != NO_REPLAY:
            raise ValueError(
                "replay is invalid: method=replay has its own. Allowed: replay=none, and options of "
                "method.mixture"
            )
        super().__init__(options, replace(context, replay=options.mixture))
