"""Units multiplied by gates, while a context lasts: what a unit's importance is the gradient of."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from cpt.models.units import Units


@contextmanager
def gate_units(groups: Iterable[Units], gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiplies the activation of each unit by its gate, [count] or per sample [B, count], while the context
    lasts. A group without one stays as it is. Layers that compute their activations again need the context in
    backward, or `keep_activations`."""
    with ExitStack() as hooks:
        for group in groups:
            if group.name in gates:
                for handle in attach_gate(group, gates[group.name]):
                    hooks.callback(handle.remove)
        yield


def attach_gate(group: Units, gate: Tensor) -> list[RemovableHandle]:
    """Hooks that multiply the group's activation by the gate."""
    if gate.ndim not in (1, 2) or gate.shape[-1] != group.count:
        raise ValueError(f"{group.name} has {group.count} units; given gates of {list(gate.shape)}")
    if group.kind == "tokens":
        tables = [part.module for part in group.parts]
        return [
            t.register_forward_hook(lambda m, args, y: scale_embeddings(y, args[0], gate)) for t in tables
        ]
    if group.side == "in":
        return [
            group.gate.register_forward_pre_hook(
                lambda m, args: (scale_activations(args[0], gate), *args[1:])
            )
        ]
    return [group.gate.register_forward_hook(lambda m, args, y: scale_activations(y, gate))]


def scale_activations(x: Tensor, gate: Tensor) -> Tensor:
    """Activations [B, T, D], or [B * T, D] as OPT flattens them, times a gate of [count] or [B, count]."""
    wide = gate.to(x).repeat_interleave(x.shape[-1] // gate.shape[-1], dim=-1)
    if gate.ndim == 1:
        return x * wide
    if len(x) % len(gate) or (x.ndim > 2 and len(x) != len(gate)):
        raise ValueError(f"gates of {len(gate)} samples; given activations of {list(x.shape)}")
    return (x.view(len(gate), -1, x.shape[-1]) * wide.unsqueeze(1)).view(x.shape)


def scale_embeddings(embeddings: Tensor, ids: Tensor, gate: Tensor) -> Tensor:
    """Embeddings [B, T, D] of ids [B, T] times their tokens' gates, of [count] or [B, count]."""
    found = gate[ids] if gate.ndim == 1 else gate.gather(1, ids)
    return embeddings * found.unsqueeze(-1).to(embeddings)
