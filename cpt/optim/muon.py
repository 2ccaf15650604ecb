"""Muon (Jordan et al., 2024; Liu et al., 2025, arXiv 2502.16982) for the matrices of a model's blocks, and
AdamW for everything else, as one optimizer.

A step of Muon is the momentum with its singular values made equal, by torch.optim.Muon. With
`match_rms_adamw` it is 0.2 sqrt(max(n, m)) times as large for a matrix [n, m], about as large as AdamW's, so
that both take the same learning rate and decay."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

FindMatrices = Callable[[], Collection[nn.Parameter]]


class MuonWithAdamW(Optimizer):
    """Each group becomes two: the matrices that Muon trains, and the other parameters.

    `find_matrices` gives the matrices of the blocks; without it, all parameters of two dimensions are
    trained by Muon."""

    def __init__(
        self,
        params: Sequence[Mapping[str, Any]],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        adjust_lr_fn: str,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        fused: bool | None = None,
        find_matrices: FindMatrices | None = None,
    ) -> None:
        matrices = None if find_matrices is None else set(find_matrices())
        matrix_groups = []
        other_groups = []
        for group in params:
            matrix_parameters = []
            other_parameters = []
            for parameter in group["params"]:
                if parameter.ndim == 2 and (matrices is None or parameter in matrices):
                    matrix_parameters.append(parameter)
                else:
                    other_parameters.append(parameter)

            # A field of AdamW's groups: decay is a share of the weights, in addition to the step.
            matrix_groups.append({**group, "params": matrix_parameters, "decoupled_weight_decay": True})
            other_groups.append({**group, "params": other_parameters})

        self.muon = Muon(
            matrix_groups,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            weight_decay=weight_decay,
        )
        self.adamw = AdamW(other_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=fused)
        for group in self.muon.param_groups:
            group["optimizer"] = "muon"
        for group in self.adamw.param_groups:
            group["optimizer"] = "adamw"
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Groups and state are of this optimizer, which loads them and may be lent others.
        for name, optimizer in (("muon", self.muon), ("adamw", self.adamw)):
            optimizer.param_groups = [group for group in self.param_groups if group["optimizer"] == name]
            optimizer.state = self.state
            optimizer.step()
        return loss
