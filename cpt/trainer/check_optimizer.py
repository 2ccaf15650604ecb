"""Check the options of an optimizer by making it, and what it is combined with."""

from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn

from cpt.core.exceptions import InvalidOptionError
from cpt.core.sections import check_arguments, load_target
from cpt.trainer.lightning import naming_cause


def check_optimizer(section: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a `_target_` that is not an optimizer, or does not take its options."""
    target = load_target(options["_target_"], section=section)
    if isinstance(target, type) and not issubclass(target, torch.optim.Optimizer):
        raise InvalidOptionError(
            f"{section}._target_",
            options["_target_"],
            allowed="an optimizer's class, like torch.optim.AdamW",
        )
    if isinstance(target, type) and callable(getattr(target, "train", None)):
        raise InvalidOptionError(
            f"{section}._target_",
            options["_target_"],
            reason="it has to be switched between training and evaluation, as schedule-free optimizers",
            allowed="an optimizer without such modes, like torch.optim.AdamW",
        )
    check_arguments(section, options, given_by_cpt=("params", "find_matrices"))

    # Groups of matrices and of vectors, as a method has them: some optimizers take neither.
    matrix = nn.Parameter(torch.zeros(1, 1))
    vector = nn.Parameter(torch.zeros(1))
    with naming_cause(section):
        make_optimizer = instantiate({**options, "_partial_": True}, _convert_="all")
        make_optimizer([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}])
