"""The reference methods: naive continual learning, each domain alone, all at once, and the base; and naive
continual learning with replay, and under MIGU's mask."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.data.replay import NO_REPLAY
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ExperienceReplayOptions, MIGUOptions
from cpt.models.weights import Snapshot


class NCL(ContinualMethod):
    """NCL, naive continual learning: further pre-training on one domain after another (Gururangan et al., ACL
    2020, in sequence). theta_t = argmin L_lm(theta; D_t), started from theta_{t-1}.

    The lower reference: every other method at neutral strength is this one, bit for bit."""


class One(ContinualMethod):
    """ONE: each domain learned alone, from the base. theta_t = argmin L_lm(theta; D_t), started from theta_0.

    Its diagonal is domain-adaptive pre-training (Gururangan et al., ACL 2020)."""

    trains_from_base = True

    def __init__(self, options: Options, context: MethodContext) -> None:
        super().__init__(options, context)
        self.base = Snapshot(self.model, persistent=False)

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        self.base.restore(self.model)


class Joint(ContinualMethod):
    """JOINT: all domains at once, the upper reference. theta = argmin sum_t L_lm(theta; D_t), started from
    theta_0.

    It trains on the samples of the sequence, with the same masks, in one shuffle and one schedule."""

    requires_all_domains = True

    def stages(self, order: Sequence[str]) -> list[Domain]:
        return [Domain("joint", 0, tuple(order))]


class ZeroShot(ContinualMethod):
    """NONE: no training; the base model is the zero-shot reference."""

    takes_quantized = True

    def stages(self, order: Sequence[str]) -> list[Domain]:
        return []


class ExperienceReplay(ContinualMethod):
    """REPLAY: plain further pre-training on a mixture of each domain with the text of those before it.

    theta_t = argmin (1 - r) L_lm(theta; D_t) + r L_lm(theta; D_1, ..., D_{t-1}), started from theta_{t-1},
    with r the share of a batch (Ibrahim et al., TMLR 2024, arXiv 2403.08763). Bit for bit `ncl` with its
    `mixture` as `replay`. Raises ValueError if the run has another replay."""

    options: ExperienceReplayOptions

    def __init__(self, options: ExperienceReplayOptions, context: MethodContext) -> None:
        if context.replay != NO_REPLAY:
            raise ValueError(
                "replay is invalid: method=replay has its own. "
                "Allowed: replay=none, and options of method.mixture"
            )
        super().__init__(options, replace(context, replay=options.mixture))


class MIGU(ContinualMethod):
    """MIGU (Du et al., EMNLP Findings 2024): `ncl` under cpt.gradient_masks.migu; other methods take it as
    `mask=migu`."""

    options: MIGUOptions

    def __init__(self, options: MIGUOptions, context: MethodContext) -> None:
        super().__init__(options, replace(context, masks=(*context.masks, options.mask.make())))
