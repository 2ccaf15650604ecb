"""Gates on units of a model, one set for each domain, and the protection of what they opened: hard attention
to the task (HAT; Serra et al., ICML 2018).

    a        = sigmoid(s e)                                 the gate, with s rising to s_max        (eq. 1, 3)
    q'       = q s_max (cosh(s e) + 1) / (s (cosh(e) + 1))  the gradient of e, compensated          (eq. 5)
    a^(<=t)  = max(a^t, a^(<=t-1))                          units claimed by the domains so far
    step_ij <- (1 - min(a_i^(<t), a_j^(<t))) step_ij        of a weight between two units           (eq. 2)
    R        = sum a (1 - a^(<t)) / sum (1 - a^(<t))        a domain's share of the free units      (eq. 4)

Since da/de = s / (2 (cosh(s e) + 1)), q' is s_max sigmoid'(e) dL/da, which cannot overflow. In evaluation
gates are binary, e > 0, so that no domain depends on others."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cpt.models.units import Part, Projection, Units, make_output_parts


class _Compensated(torch.autograd.Function):
    """sigmoid(s e) with the compensated gradient, s_max sigmoid'(e) times that of the gate."""

    @staticmethod
    def forward(ctx: Any, e: Tensor, s: float, s_max: float) -> Tensor:
        ctx.save_for_backward(e)
        ctx.s_max = s_max
        return torch.sigmoid(s * e)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (e,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(e)
        return gradient * (ctx.s_max * sigmoid * (1 - sigmoid)), None, None  # s_max sigmoid'(e)


def soft_gates(e: Tensor, s: float, *, s_max: float) -> Tensor:
    """The gates in training, sigmoid(s e), of e's shape, with the compensated gradient."""
    return _Compensated.apply(e, s, s_max)


def hard_gates(e: Tensor) -> Tensor:
    """The gates in evaluation, exactly 0 or 1, of e's shape and dtype."""
    return (e > 0).to(e)


def anneal(progress: float, *, s_max: float) -> float:
    """s at a share of a domain's steps (eq. 3): 1 / s_max at 0, s_max at 1."""
    return 1 / s_max + (s_max - 1 / s_max) * progress


def regulariser(gates: Tensor, claimed: Tensor) -> Tensor:
    """R, a scalar, from a domain's gates and the claimed units, both [units]; 0 if nothing is free."""
    free = 1 - claimed
    return (gates * free).sum() / free.sum().clamp_min(1)


class Gate(nn.Module):
    """Multiplies the activations [..., D] of `count` units, D / count features each, by their gates: soft in
    train mode at a given `s`, hard in eval mode and without s."""

    stays_in_end_tasks = True  # what a domain has closed stays closed

    def __init__(self, count: int, *, s_max: float) -> None:
        super().__init__()
        self.e = nn.Parameter(torch.randn(count))
        self.s_max = s_max
        self.s: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        is_hard = self.s is None or not self.training
        gates = hard_gates(self.e) if is_hard else soft_gates(self.e, cast(float, self.s), s_max=self.s_max)
        gates = gates.to(x.dtype)
        if x.shape[-1] == len(gates):
            return x * gates
        # The units are attention heads: each has several features, which are side by side, and one gate.
        return (x.unflatten(-1, (len(gates), -1)) * gates.unsqueeze(-1)).flatten(-2)

    def scale(self, module: nn.Module, args: tuple, output: Tensor | None = None) -> Any:
        """The forward hook of a module that writes the units, and the pre-hook of one that reads them."""
        return (self(args[0]), *args[1:]) if output is None else self(output)


@dataclass(frozen=True)
class Gates:
    """The gates of a model, one for each group of units, and the names of their parameters."""

    groups: tuple[Units, ...]
    modules: tuple[Gate, ...]
    names: tuple[str, ...]
    s_max: float

    @property
    def sizes(self) -> list[int]:
        return [group.count for group in self.groups]

    def e(self) -> Tensor:
        """All e, group after group, [units]."""
        return torch.cat([gate.e for gate in self.modules])

    def soft(self, s: float) -> Tensor:
        """The gates in training, [units]."""
        return soft_gates(self.e(), s, s_max=self.s_max)

    def hard(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The gates of stored parameters, by name, [units]."""
        return hard_gates(torch.cat([weights[name] for name in self.names]))

    def set(self, s: float | None) -> None:
        """Sets how soft the gates are in train mode; None: hard."""
        for gate in self.modules:
            gate.s = s

    @torch.no_grad()
    def redraw(self, generator: torch.Generator, *, std: float = 1.0, are_open: bool = False) -> None:
        """Draws e from N(0, std^2), or if they all `are_open` from U(0, 2 std), on the CPU."""
        for gate in self.modules:
            if are_open:
                gate.e.copy_(2 * std * torch.rand(len(gate.e), generator=generator))
            else:
                gate.e.copy_(std * torch.randn(len(gate.e), generator=generator))

    @torch.no_grad()
    def clamp(self, limit: float) -> None:
        """Clamps |e| to the limit, where the compensated gradient does not vanish."""
        for gate in self.modules:
            gate.e.clamp_(-limit, limit)

    def folded(self, gates: Tensor) -> dict[nn.Parameter, Tensor]:
        """New values, by parameter, of the parameters that read or write gated activations: multiplied by the
        gates [units] of these. They are parameters of the gated modules alone; the model itself does not
        change."""
        folded: dict[nn.Parameter, Tensor] = {}
        for group, group_gates in zip(self.groups, gates.split(self.sizes), strict=True):
            for part in group.parts:
                # Once per unit: only where its activations are gated, not in the layer at their other end.
                if part.module is not group.gate:
                    continue
                parameter = getattr(part.module, part.attribute)
                # The gate of each row or column along the part's axis; each feature is of one unit here.
                factor = group_gates.to(parameter)[part.members[:, 0].to(group_gates.device)]
                shape = [1] * parameter.ndim
                shape[part.axis] = -1
                # A weight may read one group and write another.
                folded[parameter] = folded.get(parameter, parameter.detach()) * factor.view(shape)
        return folded

    @torch.no_grad()
    def fold(self, gates: Tensor) -> None:
        """Multiplies gates [units] into the weights; the gate modules stay, and of 0 and 1 change nothing."""
        for parameter, values in self.folded(gates).items():
            parameter.copy_(values)


def attach_gates(model: nn.Module, groups: Iterable[Units], *, s_max: float) -> Gates:
    """Adds a gate to the model for each group of units (not for tokens), with e from N(0, 1)."""
    groups = tuple(groups)
    gates = tuple(Gate(group.count, s_max=s_max) for group in groups)
    for group, gate in zip(groups, gates, strict=True):
        gated_module = group.gate  # the layer that writes the units, or the one that reads them
        gate.to(cast(Tensor, gated_module.weight).device)
        gated_module.add_module(f"{group.kind}_gate", gate)
        if group.side == "in":
            gated_module.register_forward_pre_hook(gate.scale)
        else:
            gated_module.register_forward_hook(gate.scale)

    # The names that a state_dict of the model has.
    names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    names = tuple(names_by_id[id(gate.e)] for gate in gates)
    return Gates(groups=groups, modules=gates, names=names, s_max=s_max)


def list_bottleneck_units(name: str, down: nn.Linear, up: nn.Linear) -> list[Units]:
    """The units of an adapter up(f(down(x))): its neurons, gated before up, and its outputs, after it."""
    # Members [count, 1]: each output feature of `down` is a neuron, each of `up` an output.
    neurons = torch.arange(down.out_features)[:, None]
    outputs = torch.arange(up.out_features)[:, None]
    down_projection = Projection(name, module=down, axis=0, segments=())
    up_projection = Projection(name, module=up, axis=0, segments=())

    # A neuron is written by a row of `down` and read by a column of `up`.
    neuron_parts = [
        *make_output_parts(down_projection, neurons),
        Part(up, attribute="weight", axis=1, members=neurons),
    ]
    neuron_units = Units(
        name=f"{name}.neurons",
        kind="neurons",
        count=len(neurons),
        gate=up,
        side="in",
        parts=tuple(neuron_parts),
    )
    output_units = Units(
        name=f"{name}.outputs",
        kind="outputs",
        count=len(outputs),
        gate=up,
        side="out",
        parts=tuple(make_output_parts(up_projection, outputs)),
    )
    return [neuron_units, output_units]


def find_gated_parameters(groups: Iterable[Units]) -> set[nn.Parameter]:
    """The parameters that have a row, column or entry for each unit of at least one of the groups."""
    parameters = set()
    for group in groups:
        parameters |= {getattr(part.module, part.attribute) for part in group.parts}
    return parameters
