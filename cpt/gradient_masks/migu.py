"""MIGU, magnitude-based gradient updating (Du et al., EMNLP Findings 2024).

Of each linear layer h = W x (+ b) within the blocks, a step changes only the rows with the largest outputs:

    n_i    = 1/N sum over tokens of |h_i|                                       (eq. 1-2)
    M_i    = 1 for the d - floor(T d) rows i with the largest n_i, else 0
    grad W <- M grad W                                                          (eq. 6)

Nothing is kept from step to step. Rows of fused projections (Q, K, V in one layer) are ranked separately. In
encoder-decoder models each layer counts its own tokens: target tokens in the decoder, source tokens for keys
and values of cross-attention.

importance=fisher is FGGM (arXiv 2601.18261, 2026): n_i is the sum over row i of the diagonal Fisher before
the domain, on the domain's importance batches, so that its mask is constant. With `top_p` p instead of T,
each layer changes the fewest rows that hold a share p of the sum of n_i."""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import floor
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cpt.adapters.experts import TextRows
from cpt.core.distributed import all_reduce_sum, full_tensor, gather_objects, sum_on_cpu
from cpt.core.randomness import key
from cpt.core.tensors import move_uncast
from cpt.data.collate import Batch
from cpt.gradient_masks.base import GradientMask
from cpt.gradient_masks.options import MagnitudeMaskOptions
from cpt.models.block_attention import find_text_masks
from cpt.models.fisher import estimate_fisher
from cpt.models.forward import find_token_side, set_mode
from cpt.models.fsdp import named_weights
from cpt.models.objectives import Objective
from cpt.models.units import Projection, find_projections

log = logging.getLogger(__name__)
CACHED = 1 << 18  # numbers that a core works on without going back to memory
DRAWN = 8  # texts whose magnitudes are kept, of one layer


class MagnitudeMask(GradientMask):
    """Updates the rows of each linear layer that are largest by `importance`."""

    def __init__(self, options: MagnitudeMaskOptions) -> None:
        super().__init__(apply_to=options.apply_to)
        self.options, self.skipping = options, False
        self.static, self.limits = options.importance == "fisher", options.backend == "backward"
        self.maps: list[Projection] = []
        self.places: list[slice] = []  # of each map's rows within `sums` and `chosen`
        self.ranked: list[str] = []  # buffers of the segments that are ranked together
        self.hooks: list[RemovableHandle] = []
        self.present: dict[str, Tensor | None] = {}
        self.limited: list[RowGradients] = []
        self.inside = self.limiting = False
        self.mask: Tensor | None = None  # of the current step, [rows]
        self.observed: dict[int, Tensor] = {}  # sums of |h| [rows] by held-out text
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.chosen = nn.Buffer(torch.zeros(0))  # how often each row was

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        covered = [*(find_projections(model) if maps is None else maps)]
        if self.options.head:
            within, embedding = {each.module for each in covered}, model.get_input_embeddings().weight
            outside = [
                Projection(name, module, 0, (torch.arange(module.out_features),))
                for name, module in model.named_modules()
                if maps is None and isinstance(module, nn.Linear) and module not in within
                if self.options.tied or module.weight is not embedding
            ]
            if not outside:
                log.warning("No effect of head=true: the head is not trained, or the embedding (tied=true)")
            covered += outside
        found = [each for each in covered if re.search(self.options.only or "", each.name)]
        if not covered:
            log.warning("No effect of mask=migu: the method trains no linear layers")
        elif not found:
            allowed = f"an expression that finds some of {covered[0].name} … {covered[-1].name}"
            raise ValueError(f"only={self.options.only} is invalid. Allowed: {allowed}")
        # Buffers for the rows; counts of known layers are kept by name.
        known = {each.name: self.chosen[place] for each, place in zip(self.maps, self.places, strict=True)}
        self.maps, sizes = found, [each.outputs for each in found]
        self.places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self.sums = nn.Buffer(torch.zeros(sum(sizes)), persistent=False)
        self.chosen = nn.Buffer(torch.zeros(sum(sizes)))
        if self.options.importance == "fisher":
            self.known = nn.Buffer(torch.zeros(sum(sizes)))
        for name in self.ranked:
            delattr(self, name)
        by_width: dict[int, list[Tensor]] = {}
        for each, place in zip(self.maps, self.places, strict=True):
            rows = known.get(each.name, self.chosen[:0])
            self.chosen[place][: len(rows)] = rows
            for segment in each.segments:
                by_width.setdefault(len(segment), []).append(segment + place.start)
        self.ranked = [f"segments{number}" for number in range(len(by_width))]
        for name, segments in zip(self.ranked, by_width.values(), strict=True):
            self.register_buffer(name, torch.stack(segments), persistent=False)
        # Hooks on the model and its layers, in place of earlier ones.
        for hook in self.hooks:
            hook.remove()
        for limited in self.limited:
            limited.remove()
        self.hooks = [
            model.register_forward_pre_hook(self.open, with_kwargs=True),
            model.register_forward_hook(self.close, always_call=True),
        ]
        self.limited = []
        for each, place in zip(self.maps, self.places, strict=True):
            measured = each.measured or each.module
            side = None if isinstance(measured, TextRows) else find_token_side(model, each.name)
            self.hooks.append(measured.register_forward_hook(partial(self.record, place, side)))
            if self.limits and each.measured is None:
                self.limited.append(RowGradients(each.module, axis=each.axis, mask=self, place=place))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Counts and sums keep their 32 bits where the model has 16."""
        return super()._apply(partial(move_uncast, fn), recurse)

    def open(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        counted = self.recording and torch.is_grad_enabled()
        self.inside = counted and self.options.importance == "output"
        # Later micro-batches of an accumulated step also select rows.
        self.limiting |= bool(self.limited) and counted and self.alone and not self.skipping
        self.present = find_text_masks(module, kwargs) if self.inside or self.text is not None else {}

    def close(self, *args: Any) -> None:
        self.inside, self.present = False, {}

    def record(self, place: slice, side: str | None, module: nn.Module, args: Any, output: Tensor) -> None:
        """Adds a layer's output in the model's own forward pass with gradients, or on an observed text."""
        present = self.present.get(side) if side else None
        if self.inside and torch.is_grad_enabled():
            self.sums[place] += sum_magnitudes(output, present)
        elif self.text is not None and self.options.magnitudes:
            if self.text not in self.observed:
                self.observed[self.text] = torch.zeros_like(self.sums)
            self.observed[self.text][place] += sum_magnitudes(output, present)

    def activate(self, domain: int) -> None:
        self.skipping = self.options.skip_first_domain and domain == 0
        self.mask, self.limiting = None, False
        self.sums.zero_()

    def before_domain(
        self, model: PreTrainedModel, objective: Objective, importance_batches: Iterable[Batch]
    ) -> None:
        if self.options.importance != "fisher" or self.skipping:
            return
        with set_mode(model, training=False), torch.autocast(self.known.device.type, enabled=False):
            found = estimate_fisher(
                model, importance_batches, objective=objective, estimator=self.options.estimator
            )
        names = {id(parameter): name for name, parameter in named_weights(model).items()}
        for each, place in zip(self.maps, self.places, strict=True):
            rows = found[names[id(each.weight)]].float().sum(1 - each.axis)
            self.known[place] = full_tensor(rows)

    def decide(self) -> None:
        if self.limiting:
            self.choose()

    def choose(self) -> Tensor:
        """1 for the rows that the step changes, else 0, [rows]."""
        if self.mask is None:
            self.mask = self.select(self.scores())
        return self.mask

    def select(self, scores: Tensor) -> Tensor:
        """1 for the rows with the largest scores, else 0, each [rows]."""
        segments = [self.get_buffer(name) for name in self.ranked]
        if self.options.top_p is not None:
            return choose_by_mass(scores, segments, self.options.top_p)
        return choose_rows(scores, segments, cast(float, self.options.threshold))  # one of the two is given

    def scores(self) -> Tensor:
        """The importance of every row, [rows], the same in all processes."""
        if self.options.importance == "output":
            all_reduce_sum(self.sums)
            return self.sums
        if self.options.importance == "fisher":
            return self.known
        if self.options.importance == "random":
            draw = torch.Generator().manual_seed(key("migu", self.options.seed, int(self.steps)) % 2**63)
            return torch.rand(len(self.sums), generator=draw).to(self.sums)
        norms = []  # L1 norms of the rows of weights or gradients, 0 where there is no gradient
        for each in self.maps:
            weight = each.weight
            values = weight if self.options.importance == "weight" else weight.grad
            if values is None:
                norms.append(weight.new_zeros(each.outputs, dtype=torch.float32))
            else:
                norms.append(full_tensor(values.detach().float().abs().sum(1 - each.axis)))
        return torch.cat(norms)

    @torch.no_grad()
    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.skipping or not self.maps:
            return
        mask, self.mask, self.limiting = self.choose(), None, False
        self.chosen.add_(mask)
        self.steps.add_(1)
        self.sums.zero_()
        for each, place in zip(self.maps, self.places, strict=True):
            yield each.weight, mask[place].unsqueeze(1 - each.axis)
            if self.options.biases and each.bias is not None:
                yield each.bias, mask[place]

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps in which each row was chosen since the first domain; and of the texts observed
        since the last call, their numbers `texts` [T], by layer the Jaccard index [T, T] of the rows with the
        largest |h| on each, and |h| in the last of the widest layers, as shares of its sum."""
        chosen, maps = self.chosen / self.steps.clamp_min(1), [*zip(self.maps, self.places, strict=True)]
        found = {f"chosen/{each.name}": chosen[place] for each, place in maps}
        observed, self.observed = self.observed, {}
        if texts := sorted({text for each in gather_objects([*observed]) for text in each}):
            nothing = torch.zeros(len(self.sums))
            sums = sum_on_cpu(torch.stack([observed.get(text, nothing).cpu() for text in texts]))
            found["texts"] = torch.tensor(texts)
            large = torch.stack([self.select(each.to(self.sums)) for each in sums]).cpu()
            for each, place in maps:
                both, counts = large[:, place] @ large[:, place].T, large[:, place].sum(1)
                found[f"similarity/{each.name}"] = both / (counts[:, None] + counts - both)
            each, place = max(reversed(maps), key=lambda pair: pair[0].outputs)
            found[f"magnitudes/{each.name}"] = functional.normalize(sums[:DRAWN, place], p=1, dim=1)
        return found


def sum_magnitudes(output: Tensor, present: Tensor | None) -> Tensor:
    """Sum [d] in float32 of |h| over the tokens of an output [..., d]; `present` [B, T] is 0 at padding."""
    tokens = output.detach().reshape(-1, output.shape[-1])
    if present is not None:
        more = len(tokens) // len(present) - present.shape[1]  # before any padding, so that these may lead
        tokens = tokens[functional.pad(present, (more, 0), value=1).flatten().bool()]
    if tokens.is_cpu:  # where the fused norm takes 10 to 25 times as long as two passes over the cache
        parts = tokens.split(max(1, CACHED // tokens.shape[-1]))
        return torch.stack([part.abs().sum(0, dtype=torch.float32) for part in parts]).sum(0)
    return torch.linalg.vector_norm(tokens, ord=1, dim=0, dtype=torch.float32)


def count_chosen(threshold: float, width: int) -> int:
    """Rows of `width` that are updated: d - floor(T d), by the decimal that T is written as."""
    return width - floor(Fraction(str(threshold)) * width)


def choose_rows(scores: Tensor, segments: Sequence[Tensor], threshold: float) -> Tensor:
    """1 for the updated rows of each segment, else 0, [D]; segments [G, d] are places of G groups."""
    mask = torch.zeros_like(scores)
    for places in segments:
        best = scores[places].topk(count_chosen(threshold, places.shape[1])).indices
        mask[places.gather(1, best).flatten()] = 1
    return mask


def choose_by_mass(scores: Tensor, segments: Sequence[Tensor], top_p: float) -> Tensor:
    """1 for the fewest rows of each segment that hold a share `top_p` of the sum of its scores [D] >= 0, else
    0; all rows for `top_p` 1 and for zero scores. Segments as above."""
    mask = torch.zeros_like(scores)
    for places in segments:
        ranked = scores[places].double().sort(dim=1, descending=True, stable=True)
        larger, total = ranked.values.cumsum(1) - ranked.values, ranked.values.sum(1, keepdim=True)
        kept = (larger < top_p * total) | (total == 0) | (top_p == 1)
        mask[places.gather(1, ranked.indices)] = kept.to(mask)
    return mask


class _RowGradient(torch.autograd.Function):
    """Identity on a layer's output, with a backward pass that gives the weight the gradient of some rows."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, given: Tensor, weight: Tensor, axis: int, rows: Callable[[], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(given)
        ctx.like, ctx.axis, ctx.rows = weight, axis, rows
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        [given] = ctx.saved_tensors
        rows = ctx.rows()
        chosen = gradient.flatten(0, -2).index_select(1, rows)  # [N, chosen]
        tokens = given.flatten(0, -2).to(gradient.dtype)  # [N, inputs]
        part = chosen.T @ tokens if ctx.axis == 0 else tokens.T @ chosen
        found = torch.zeros_like(ctx.like).index_copy_(ctx.axis, rows, part.to(ctx.like.dtype))
        return gradient, None, found, None, None


class RowGradients:
    """Computes a linear layer's weight gradient for the chosen rows only: a detached copy replaces the
    weight in the forward pass, so that the layer's own backward pass gives its input's gradient only."""

    def __init__(self, module: nn.Module, *, axis: int, mask: MagnitudeMask, place: slice) -> None:
        self.axis, self.mask, self.place = axis, mask, place
        self.weight: nn.Parameter | None = None  # while the map is computed
        self.hooks: list[RemovableHandle] = [
            module.register_forward_pre_hook(self.detach_weight),
            # first, so that gates on the output are part of the gradient
            module.register_forward_hook(self.restore_weight, always_call=True, prepend=True),
        ]

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def detach_weight(self, module: nn.Module, args: Any) -> None:
        weight = cast(nn.Parameter, module.weight)
        if self.mask.limiting and weight.requires_grad and torch.is_grad_enabled():
            self.weight = weight
            module._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def restore_weight(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        if self.weight is None:
            return None
        weight, self.weight = self.weight, None
        module._parameters["weight"] = weight
        if output is None:  # the map has failed
            return None

        def rows() -> Tensor:
            return self.mask.choose()[self.place].nonzero().flatten()

        found: Tensor = _RowGradient.apply(output, args[0].to(output.dtype), weight, self.axis, rows)
        return found
