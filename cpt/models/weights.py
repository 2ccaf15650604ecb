"""Weights of a model: copied, restored, swapped for a while, penalised for their distance, frozen,
compared."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from cpt.core.distributed import add_up, is_sharded, shard_like, to_local, with_rows
from cpt.core.exceptions import format_value
from cpt.core.tensors import NamedTensors, PreciseTensors, precise
from cpt.models.forward import set_mode
from cpt.models.fsdp import named_weights, reshard
from cpt.models.options import Freeze
from cpt.models.units import find_blocks

IN_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


class Snapshot(NamedTensors):
    """A copy of a model's parameters by name; later parameters are left alone until the next `capture`."""

    def __init__(self, model: nn.Module, *, persistent: bool) -> None:
        super().__init__(dict(model.named_parameters()), persistent=persistent)

    @torch.no_grad()
    def capture(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Copies the model's parameters as they are now, or moves the copy by a share of the way to them."""
        present, copies = named_weights(model), self.named()
        both = shared_names(present, copies)
        self.move(copies, present, both, share)
        self.update({name: parameter for name, parameter in present.items() if name not in both})

    @torch.no_grad()
    def restore(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Restores the copy in place, or moves the parameters by a share of the way to it."""
        present, copies = named_weights(model), self.named()
        self.move(present, copies, shared_names(present, copies), share)

    def move(
        self, tensors: Mapping[str, Tensor], towards: Mapping[str, Tensor], names: Sequence[str], share: float
    ) -> None:
        """Moves tensors in place by a share of the way to others, whose bits they have at a share of 1."""
        pairs = [(to_local(tensors[name]), to_local(towards[name])) for name in names]
        if not self.offloaded:
            own, others = [each for each, _ in pairs], [other.to(each) for each, other in pairs]
            torch._foreach_lerp_(own, others, share)
        for each, other in pairs if self.offloaded else ():  # one after another, on the module's device
            moved = each.to(self.device)
            moved.lerp_(other.to(moved), share)
            if moved is not each:
                each.copy_(moved)

    @contextmanager
    def teaching(self, model: nn.Module) -> Iterator[None]:
        """The model with the copy's weights, in eval mode and without gradients, inside the context."""
        with torch.no_grad(), set_mode(model, training=False), swap_weights(model, self.named()):
            yield


class PreciseSnapshot(Snapshot, PreciseTensors):
    """A copy in at least 32 bits, which many small moves add up in."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        super().update({name: precise(each) for name, each in tensors.items()})


def shared_names(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """The names that both have with one shape, in the first's order."""
    return [name for name, value in one.items() if name in other and other[name].shape == value.shape]


class _QuadraticPenalty(torch.autograd.Function):
    """The penalty with its gradient w (p - a) in closed form; `elsewhere`: anchors on another device."""

    @staticmethod
    def forward(
        ctx: Any, elsewhere: bool, anchors: list[Tensor], weights: list[Tensor] | None, *parameters: Tensor
    ) -> Tensor:
        own, to = [to_local(each) for each in parameters], [to_local(each) for each in anchors]
        by = None if weights is None else [to_local(each) for each in weights]
        if elsewhere:
            terms, scaled = [], []
            for place, (parameter, anchor) in enumerate(zip(own, to, strict=True)):
                apart = parameter - anchor.to(parameter.device)
                scaled.append(apart if by is None else apart * by[place].to(parameter.device))
                terms.append(torch.dot(apart.flatten(), scaled[-1].flatten()))
        else:
            ways = torch._foreach_sub(own, to)
            scaled = list(ways if by is None else torch._foreach_mul(ways, by))
            terms = [torch.dot(a.flatten(), b.flatten()) for a, b in zip(ways, scaled, strict=True)]
        ctx.gradients = with_rows(scaled, parameters)
        return add_up(terms, parameters) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients  # scaled in place: valid for one backward pass
        torch._foreach_mul_([to_local(each) for each in gradients], gradient)
        return None, None, None, *gradients


def quadratic_penalty(
    model: nn.Module,
    anchors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
    *,
    elsewhere: bool = False,
) -> Tensor:
    """1/2 sum_i w_i (p_i - a_i)^2, a scalar, over the trained parameters that have an anchor and a weight by
    name, w = 1 without weights; for one backward pass. `elsewhere`: these are on another device."""
    trained = {name: p for name, p in named_weights(model).items() if p.requires_grad}
    both = anchors if weights is None else {k: anchors[k] for k in shared_names(anchors, weights)}
    names = shared_names(trained, both)
    by = None if weights is None else [weights[name] for name in names]
    return _QuadraticPenalty.apply(elsewhere, [anchors[n] for n in names], by, *[trained[n] for n in names])


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights, by the names of its parameters, inside the context, also where they are
    tied; gradients go to the given weights, of a sharded model nowhere. AttributeError for an unknown
    name."""
    reshard(model)
    targets = {name: model.get_parameter(name) for name in weights}
    sharded = {name: weights[name] for name, each in targets.items() if is_sharded(each)}
    others = {id(each): weights[n].to(each.device) for n, each in targets.items() if n not in sharded}
    own = [
        (part, name, parameter)
        for part in model.modules()
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in others
    ]
    kept = overwrite_rows(model, sharded)
    try:
        for part, name, parameter in own:
            # as torch.func.functional_call does
            part._parameters[name] = cast(nn.Parameter, others[id(parameter)])
        yield
    finally:
        for part, name, parameter in own:
            part._parameters[name] = parameter
        overwrite_rows(model, kept)


@torch.no_grad()
def overwrite_rows(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Overwrites the own rows of sharded parameters, by name; returns a copy of the previous ones."""
    present = named_weights(model) if weights else {}
    kept = {name: present[name].detach().clone() for name in weights}
    for name, weight in weights.items():
        to_local(present[name]).copy_(to_local(shard_like(weight, present[name])))
    return kept


def find_frozen(model: PreTrainedModel, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters that no method trains: embeddings, the first blocks, and all but those of `only`, as
    biases (BitFit; Ben Zaken et al., ACL 2022). Raises ValueError for too many blocks or an empty `only`."""
    chosen: list[nn.Parameter] = []
    if freeze.embeddings or freeze.layers:
        found = find_blocks(model)
        if freeze.layers > len(found):
            raise ValueError(
                f"freeze.layers={freeze.layers} is invalid. Allowed: 0 to {len(found)}, all blocks"
            )
        within = {module for _, block in found for module in block.modules()}
        embedded = [m for m in model.modules() if isinstance(m, nn.Embedding) and m not in within]
        first = [block for _, block in found[: freeze.layers]]
        for module in first + (embedded if freeze.embeddings else []):
            chosen += module.parameters()
    if freeze.trainable is not None:
        trained: set[nn.Parameter] = set()
        for entry in [freeze.trainable] if isinstance(freeze.trainable, str) else freeze.trainable:
            if not (meant := find_trainable(model, entry)):
                names = ", ".join([name for name, _ in model.named_parameters()][:6])
                allowed = f"norms, biases, attention, or an expression that finds some of {names} …"
                raise ValueError(f"trainable={format_value(entry)} is invalid. Allowed: {allowed}")
            trained |= {*meant}
        chosen += [parameter for parameter in model.parameters() if parameter not in trained]
    return [*dict.fromkeys(chosen)]


def find_trainable(model: nn.Module, entry: str) -> list[nn.Parameter]:
    """The parameters of all norms, biases or `attention` layers, or those that an expression finds."""
    if entry == "norms":
        parts = [part for part in model.modules() if type(part).__name__.endswith("Norm")]
        return [parameter for part in parts for parameter in part.parameters(recurse=False)]
    if entry == "biases":
        return [each for name, each in model.named_parameters() if name.rpartition(".")[2] == "bias"]
    if entry == "attention":
        named = [part for name, part in model.named_modules() if IN_ATTENTION.search(name)]
        return [p for part in named if isinstance(part, nn.Linear | Conv1D) for p in part.parameters()]
    return [each for name, each in model.named_parameters() if re.search(entry, name)]


@torch.no_grad()
def measure_movement(base: PreTrainedModel, folder: Path) -> dict[str, list[float]]:
    """||w - w0|| / ||w0|| of an exported model and the share of numbers that changed, by kind of weights and
    of all. A kind with a tensor that the safetensors lack, or have in another shape, is left out."""
    within: set[int] = set()
    with suppress(ValueError):  # of a model without known blocks
        within = {id(each) for _, block in find_blocks(base) for each in block.parameters()}
    tables = {id(each) for m in base.modules() if isinstance(m, nn.Embedding) for each in m.parameters()}
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    lost = set()
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        exported = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        for name, parameter in base.named_parameters():
            kind = "embeddings" if id(parameter) in tables else "head and the rest"
            if id(parameter) in within:
                kind = "attention" if IN_ATTENTION.search(name) else "other maps of blocks"
            kind = "norms and biases" if parameter.ndim == 1 else kind
            old, new = parameter.detach().cpu().float(), None
            for key in revert_weight_conversion(base, {name: parameter.detach()}):  # its name in files
                if key in exported and (found := exported[key].get_tensor(key)).shape == old.shape:
                    new = found.float()
                    break
            if new is None:
                lost.add(kind)
                continue
            lengths = [float(torch.linalg.vector_norm(each)) ** 2 for each in (new - old, old)]
            changed = int((new != old).sum())
            sums[kind] += torch.tensor([*lengths, changed, old.numel()], dtype=torch.float64)
    kept = {kind: each.tolist() for kind, each in sums.items() if kind not in lost}
    if kept and not lost:
        kept["all"] = torch.stack(list(sums.values())).sum(0).tolist()
    return {
        kind: [(moved / before) ** 0.5 if before else 0.0, changed / count]
        for kind, (moved, before, changed, count) in kept.items()
    }
