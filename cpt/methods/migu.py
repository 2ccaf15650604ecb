"""MIGU as a method: sequential training under cpt.gradient_masks.migu (Du et al., EMNLP Findings 2024)."""

from dataclasses import replace

from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import MIGUOptions


class MIGU(ContinualModule):
    """Naive continual learning under the magnitude mask; any other method takes it as `mask=migu`."""

    options: MIGUOptions

    def __init__(self, options: MIGUOptions, shared: Shared) -> None:
        super().__init__(options, replace(shared, masks=(*shared.masks, options.mask.make())))
