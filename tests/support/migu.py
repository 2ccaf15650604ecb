"""MIGU's mask over a model, as its tests have it."""

from typing import Any

from torch import nn

from cpt.gradient_masks.migu import MagnitudeMask
from cpt.gradient_masks.options import MagnitudeMaskOptions

VALUES: dict[str, Any] = {
    **{"threshold": 0.7, "importance": "output", "estimator": "per_sample", "apply_to": "gradient"},
    **{"only": None, "biases": False, "head": False, "tied": False, "skip_first_domain": False},
    **{"backend": "hooks", "seed": 0, "magnitudes": True},
}


def watching(model: nn.Module, **values: Any) -> MagnitudeMask:
    mask = MagnitudeMask(MagnitudeMaskOptions(**{**VALUES, **values}))
    mask.watch(model, None)
    return mask
