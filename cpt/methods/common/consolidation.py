"""Importances of weights over domains, as EWC and MAS join them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cpt.core.tensors import NamedTensors
from cpt.methods.options import ConsolidationOptions


def merge_importances(old: Tensor, new: Tensor, *, domains: Tensor, merge: str, gamma: float) -> Tensor:
    """The importances of so many domains and those of one more."""
    return (domains * old + new) / (domains + 1) if merge == "mean" else gamma * old + new


def join(
    kept: NamedTensors, found: Mapping[str, Tensor], domains: Tensor, options: ConsolidationOptions
) -> None:
    """Joins what was found of one more domain to what is kept of so many, by name."""
    known = kept.named()
    for name, new in found.items():
        old = kept.at_hand(known[name]) if name in known else torch.zeros_like(new)
        how = {"domains": domains, "merge": options.merge, "gamma": options.gamma}
        kept.update({name: merge_importances(old, new, **how)})
