"""MIGU as a method: sequential training under cpt.gradient_masks.migu (Du et al., EMNLP Findings 2024)."""

from dataclasses import replace

from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import MIGUOptions


class MIGU(ContinualMethod):
    """Naive continual learning under the magnitude mask; any other method takes it as `mask=migu`."""

    options: MIGUOptions

    def __init__(self, options: MIGUOptions, context: MethodContext) -> None:
        super().__init__(options, replace(context, masks=(*context.masks, options.mask.make())))
