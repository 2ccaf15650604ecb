"""MIGU as a method: sequential training under cpt.gradient_masks.migu (Du et al., EMNLP Findings 2024)."""

from dataclasses import dataclass, replace

from cpt.core.options import Choice, Options, option
from cpt.methods.base import ContinualModule, Shared


@dataclass(frozen=True, kw_only=True)
class MIGUOptions(Options):
    """Options of MIGU."""

    mask: Choice = option("the mask: one of conf/mask")


class MIGU(ContinualModule):
    """Naive continual learning under the magnitude mask; any other method takes it as `mask=migu`."""

    options: MIGUOptions

    def __init__(self, options: MIGUOptions, shared: Shared) -> None:
        super().__init__(options, replace(shared, masks=(*shared.masks, options.mask.make())))
