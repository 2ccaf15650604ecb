"""How far exported weights lie from those that they came from."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cpt.models.freezing import ATTENTION
from cpt.models.units import blocks

EMBEDDINGS, ATTENDING, MAPS, VECTORS = "embeddings", "attention", "other maps of blocks", "norms and biases"
REST, ALL = "head and the rest", "all"


@torch.no_grad()
def measure_movement(base: PreTrainedModel, folder: Path) -> dict[str, list[float]]:
    """By kind of weights, and of all: ||w - w0|| / ||w0||, and the share of numbers that are others.
    A kind of which a tensor is not in the exported model's safetensors, or not in its shape, is left out;
    nothing where there are none such files."""
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    lost = set()
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        exported = {name: file for file in files for name in file.keys()}  # noqa: SIM118  (it is no mapping)
        for name, parameter, kind in sort_by_kind(base):
            called = revert_weight_conversion(base, {name: parameter.detach()})  # in files, by transformers
            now = read_any(exported, called, like=parameter)
            if now is None:
                lost.add(kind)
            else:
                sums[kind] += add_up(parameter.detach().cpu(), now)
    found = {kind: each for kind, each in sums.items() if kind not in lost}
    if found and not lost:
        found[ALL] = torch.stack(list(found.values())).sum(0)
    return {kind: tell_movement(each) for kind, each in found.items()}


def add_up(old: Tensor, new: Tensor) -> Tensor:
    """Squared length of the movement and of what was, how many numbers are others, and how many there are."""
    way = new.float() - old.float()
    lengths = [float(torch.linalg.vector_norm(each)) ** 2 for each in (way, old.float())]
    return torch.tensor([*lengths, int((way != 0).sum()), old.numel()], dtype=torch.float64)


def tell_movement(sums: Tensor) -> list[float]:
    """The relative distance and the share of such sums."""
    moved, was, others, count = sums.tolist()
    return [(moved / was) ** 0.5 if was else 0.0, others / count]


def read_any(exported: Mapping[str, Any], names: Iterable[str], *, like: Tensor) -> Tensor | None:
    """The tensor that has one of these names, if it has the shape."""
    for name in names:
        if name in exported and (there := exported[name].get_tensor(name)).shape == like.shape:
            return there
    return None


def list_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks of a model; none of one that is made of something else."""
    try:
        return [block for _, block in blocks(model)]
    except ValueError:
        return []


def sort_by_kind(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Each parameter once with its name, and what it is called on a model card."""
    within = {id(each) for block in list_blocks(model) for each in block.parameters()}
    embedded = {id(each) for m in model.modules() if isinstance(m, nn.Embedding) for each in m.parameters()}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            yield name, parameter, VECTORS
        elif id(parameter) in within:
            yield name, parameter, ATTENDING if ATTENTION.search(name) else MAPS
        else:
            yield name, parameter, EMBEDDINGS if id(parameter) in embedded else REST
