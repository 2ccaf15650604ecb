"""How large the rows of linear maps are, and which are the largest."""

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import torch
from torch import Tensor
from torch.nn import functional

from cpt.core.sharding import whole as all_rows
from cpt.models.units import Projection

CACHED = 1 << 18  # numbers that a core works on without going back to memory


def magnitudes(output: Tensor, present: Tensor | None) -> Tensor:
    """Sum [d] in float32 of |h| over the tokens of an output [..., d]; `present` [B, T] is 0 at padding. A
    prompt, which rows of an output [B, n + T, d] have more, counts."""
    tokens = output.detach().reshape(-1, output.shape[-1])
    if present is not None:
        more = len(tokens) // len(present) - present.shape[1]  # before any padding, so that these may lead
        tokens = tokens[functional.pad(present, (more, 0), value=1).flatten().bool()]
    if tokens.is_cpu:  # where the fused norm takes 10 to 25 times as long as two passes over the cache
        parts = tokens.split(max(1, CACHED // tokens.shape[-1]))
        return torch.stack([part.abs().sum(0, dtype=torch.float32) for part in parts]).sum(0)
    return torch.linalg.vector_norm(tokens, ord=1, dim=0, dtype=torch.float32)


def row_norms(projection: Projection, importance: str) -> Tensor:
    """L1 norms [d] of the rows of a map's weight or of its gradient; 0 where there is no gradient."""
    weight = projection.module.weight
    values = weight if importance == "weight" else weight.grad
    if values is None:
        return weight.new_zeros(projection.outputs, dtype=torch.float32)
    return all_rows(values.detach().float().abs().sum(1 - projection.axis))


def count_kept(threshold: float, width: int) -> int:
    """Rows of `width` that are updated: d - floor(T d), by the decimal that T is written as."""
    return width - floor(Fraction(str(threshold)) * width)


def choose_rows(scores: Tensor, segments: Sequence[Tensor], threshold: float) -> Tensor:
    """1 for the rows of each segment that are updated, else 0, [D]; segments [G, d] hold the places of G
    groups of d rows, ranked group by group."""
    mask = torch.zeros_like(scores)
    for places in segments:
        best = scores[places].topk(count_kept(threshold, places.shape[1])).indices
        mask[places.gather(1, best).flatten()] = 1
    return mask


def choose_by_mass(scores: Tensor, segments: Sequence[Tensor], mass: float) -> Tensor:
    """1 for the fewest rows of each segment that hold a share `mass` of the sum of its scores [D], else 0;
    all rows for `mass` 1, and where all scores are 0. Scores are 0 or more; segments as above."""
    mask = torch.zeros_like(scores)
    for places in segments:
        ranked = scores[places].double().sort(dim=1, descending=True, stable=True)
        larger, total = ranked.values.cumsum(1) - ranked.values, ranked.values.sum(1, keepdim=True)
        kept = (larger < mass * total) | (total == 0) | (mass == 1)
        mask[places.gather(1, ranked.indices)] = kept.to(mask)
    return mask


def by_width(maps: Sequence[Projection], places: Sequence[slice]) -> list[Tensor]:
    """The places of all rows that are ranked together, a tensor [segments, rows] for each number of rows."""
    found: dict[int, list[Tensor]] = {}
    for each, place in zip(maps, places, strict=True):
        for segment in each.segments:
            found.setdefault(len(segment), []).append(segment + place.start)
    return [torch.stack(segments) for segments in found.values()]
