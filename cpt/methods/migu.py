"""MIGU on its own: plain further pre-training under the mask of cpt.masks.migu (Du et al., EMNLP Findings
2024)."""

from typing import Any

from cpt.masks.base import GradientMask
from cpt.methods.base import ContinualModule


class MIGU(ContinualModule):
    """Naive continual learning under the magnitude mask; any other method takes it as `mask=migu`."""

    def __init__(self, *, mask: GradientMask, **shared: Any) -> None:
        super().__init__(**{**shared, "masks": [*shared["masks"], mask]})
