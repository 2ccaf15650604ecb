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
from math import floor
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cpt.adapters.experts import TextRowsOutput
from cpt.core.distributed import all_reduce_sum, full_tensor, gather_objects, sum_on_cpu
from cpt.core.exceptions import InvalidOptionError
from cpt.core.randomness import torch_seed
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
MAX_DRAWN = 8  # texts whose magnitudes are stored, of one layer


class MagnitudeMask(GradientMask):
    """Updates the rows of each linear layer that are largest by `importance`."""

    def __init__(self, options: MagnitudeMaskOptions) -> None:
        super().__init__(apply_to=options.apply_to)
        self.options = options
        self.static = options.importance == "fisher"
        self.limits_rows = options.backend == "backward"
        self.reads_importance_batches = options.importance == "fisher"

        # The layers, the rows of each within `sums` and `chosen`, and the buffers of their segments.
        self.projections: list[Projection] = []
        self.row_slices: list[slice] = []
        self.segment_buffers: list[str] = []
        self.hooks: list[RemovableHandle] = []
        self.row_gradients: list[RowGradients] = []
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.chosen = nn.Buffer(torch.zeros(0))  # how often each row was chosen

        self.is_skipping = False  # the first domain, if it is trained without the mask
        self.is_measuring = False  # in the model's own forward pass with gradients
        self.is_limiting = False  # whether the backward pass computes the gradients of chosen rows only
        self.text_masks: dict[str, Tensor | None] = {}  # of the present forward pass
        self.row_mask: Tensor | None = None  # of the current step, [rows]
        self.observed_sums: dict[int, Tensor] = {}  # of |h| [rows] by held-out text

    def watch(self, model: PreTrainedModel, projections: Sequence[Projection] | None) -> None:
        self.allocate_rows(self.select_projections(model, projections))
        self.register_hooks(model)

    def select_projections(
        self, model: PreTrainedModel, projections: Sequence[Projection] | None
    ) -> list[Projection]:
        """The masked layers. Raises ValueError for an expression `only` that finds none."""
        covered = list(find_projections(model, skips_mixtures=True) if projections is None else projections)
        if self.options.head:
            outer_layers = self.find_outer_layers(model, covered) if projections is None else []
            if not outer_layers:
                log.warning(
                    "No effect of head=true: the head is frozen, or tied to the embedding (tied=true)"
                )
            covered += outer_layers

        selected = [layer for layer in covered if re.search(self.options.only or "", layer.name)]
        if not covered:
            log.warning("No effect of mask=migu: the method trains no linear layers")
        elif not selected:
            raise InvalidOptionError(
                "only",
                self.options.only,
                allowed=f"an expression that finds some of {covered[0].name} … {covered[-1].name}",
            )
        return selected

    def find_outer_layers(self, model: PreTrainedModel, covered: Sequence[Projection]) -> list[Projection]:
        """The linear layers outside the blocks; one that is tied to the embedding only with `tied`."""
        covered_modules = {layer.module for layer in covered}
        embedding = model.get_input_embeddings().weight
        outer_layers = []
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or module in covered_modules:
                continue
            if self.options.tied or module.weight is not embedding:
                rows = torch.arange(module.out_features)
                outer_layers.append(Projection(name, module, 0, (rows,)))
        return outer_layers

    def allocate_rows(self, projections: list[Projection]) -> None:
        """Makes the buffers for the rows of some layers; the counts of those that had some stay, by name."""
        # Looked up before the layers and their rows change: a layer that grows has other rows afterwards.
        previous_counts = {}
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            previous_counts[layer.name] = self.chosen[rows]

        self.projections = projections
        self.row_slices = []
        num_rows = 0
        for layer in projections:
            self.row_slices.append(slice(num_rows, num_rows + layer.outputs))
            num_rows += layer.outputs
        self.sums = nn.Buffer(torch.zeros(num_rows), persistent=False)
        self.chosen = nn.Buffer(torch.zeros(num_rows))
        if self.options.importance == "fisher":
            self.row_fisher = nn.Buffer(torch.zeros(num_rows))
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            if layer.name in previous_counts:
                counts = previous_counts[layer.name]
                self.chosen[rows][: len(counts)] = counts

        # Segments of one width are ranked together: their rows are a table of as many columns.
        for name in self.segment_buffers:
            delattr(self, name)
        segments_by_width: dict[int, list[Tensor]] = {}
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            for segment in layer.segments:
                segments_by_width.setdefault(len(segment), []).append(segment + rows.start)
        self.segment_buffers = [f"segments{number}" for number in range(len(segments_by_width))]
        for name, segments in zip(self.segment_buffers, segments_by_width.values(), strict=True):
            self.register_buffer(name, torch.stack(segments), persistent=False)

    def register_hooks(self, model: PreTrainedModel) -> None:
        """Replaces the hooks on the model and its layers: they measure outputs, and with `limits_rows`
        compute the gradients of chosen rows only."""
        for hook in self.hooks:
            hook.remove()
        for row_gradient in self.row_gradients:
            row_gradient.remove()

        self.hooks = [
            model.register_forward_pre_hook(self.begin_forward, with_kwargs=True),
            model.register_forward_hook(self.end_forward, always_call=True),
        ]
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            measured = layer.module if layer.measured is None else layer.measured
            # In an encoder-decoder, a layer has the padding of the side whose tokens it reads. Rows of text
            # alone, as of an expert, have no padding.
            side = None if isinstance(measured, TextRowsOutput) else find_token_side(model, layer.name)
            self.hooks.append(measured.register_forward_hook(partial(self.record, rows, side)))

        self.row_gradients = []
        if self.limits_rows:
            for layer, rows in zip(self.projections, self.row_slices, strict=True):
                if layer.measured is None:
                    row_gradient = RowGradients(layer.module, axis=layer.axis, mask=self, rows=rows)
                    self.row_gradients.append(row_gradient)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Counts and sums keep their 32 bits where the model has 16."""
        return super()._apply(partial(move_uncast, fn), recurse)

    def begin_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        is_counted = self.recording and torch.is_grad_enabled()
        self.is_measuring = is_counted and self.options.importance == "output"
        # Rows are chosen before the backward pass. In an accumulated step the outputs of later micro-batches
        # count too, so that the rows are known only after the backward passes of earlier ones.
        if self.row_gradients and is_counted and self.is_only_micro_batch and not self.is_skipping:
            self.is_limiting = True
        needs_text_masks = self.is_measuring or self.text is not None
        self.text_masks = find_text_masks(module, kwargs) if needs_text_masks else {}

    def end_forward(self, *args: Any) -> None:
        self.is_measuring = False
        self.text_masks = {}

    def record(self, rows: slice, side: str | None, module: nn.Module, args: Any, output: Tensor) -> None:
        """Adds a layer's output in the model's own forward pass with gradients, or on an observed text.
        `side` says whose padding is left out, SOURCE_TOKENS or TARGET_TOKENS; None: no padding."""
        text_mask = self.text_masks.get(side) if side else None
        if self.is_measuring and torch.is_grad_enabled():
            self.sums[rows] += sum_magnitudes(output, text_mask)
        elif self.text is not None and self.options.magnitudes:
            if self.text not in self.observed_sums:
                self.observed_sums[self.text] = torch.zeros_like(self.sums)
            self.observed_sums[self.text][rows] += sum_magnitudes(output, text_mask)

    def masked_weights(self) -> Iterable[nn.Parameter]:
        return [layer.weight for layer in self.projections]

    def activate(self, domain: int) -> None:
        self.is_skipping = self.options.skip_first_domain and domain == 0
        self.row_mask = None
        self.is_limiting = False
        self.sums.zero_()

    def before_domain(
        self, model: PreTrainedModel, objective: Objective, importance_batches: Iterable[Batch]
    ) -> None:
        if self.options.importance != "fisher" or self.is_skipping:
            return
        with set_mode(model, training=False), torch.autocast(self.row_fisher.device.type, enabled=False):
            importances = estimate_fisher(
                model, importance_batches, objective=objective, estimator=self.options.estimator
            )
        names = {id(parameter): name for name, parameter in named_weights(model).items()}
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            importance = importances[names[id(layer.weight)]].float()
            self.row_fisher[rows] = full_tensor(importance.sum(1 - layer.axis))

    def decide(self) -> None:
        if self.is_limiting:
            self.choose()

    def choose(self) -> Tensor:
        """1 for the rows that the step changes, else 0, [rows]."""
        if self.row_mask is None:
            self.row_mask = self.select(self.scores())
        return self.row_mask

    def select(self, scores: Tensor) -> Tensor:
        """1 for the rows with the largest scores, else 0, each [rows]."""
        segments = [self.get_buffer(name) for name in self.segment_buffers]
        if self.options.top_p is not None:
            return choose_by_mass(scores, segments, self.options.top_p)
        return choose_rows(scores, segments, cast(float, self.options.threshold))  # one of the two is set

    def scores(self) -> Tensor:
        """The importance of every row, [rows], the same in all processes."""
        if self.options.importance == "output":
            all_reduce_sum(self.sums)
            return self.sums
        if self.options.importance == "fisher":
            return self.row_fisher
        if self.options.importance == "random":
            seed = torch_seed("migu", self.options.seed, int(self.steps))
            generator = torch.Generator().manual_seed(seed)
            return torch.rand(len(self.sums), generator=generator).to(self.sums)
        return self.sum_rows()

    def sum_rows(self) -> Tensor:
        """The L1 norms of the rows of weights or gradients, [rows]; 0 where there is no gradient."""
        norms = []
        for layer in self.projections:
            weight = layer.weight
            values = weight if self.options.importance == "weight" else weight.grad
            if values is None:
                norms.append(weight.new_zeros(layer.outputs, dtype=torch.float32))
            else:
                norms.append(full_tensor(values.detach().float().abs().sum(1 - layer.axis)))
        return torch.cat(norms)

    @torch.no_grad()
    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.is_skipping or not self.projections:
            return
        row_mask = self.choose()
        self.row_mask = None
        self.is_limiting = False
        self.chosen.add_(row_mask)
        self.steps.add_(1)
        self.sums.zero_()
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            yield layer.weight, row_mask[rows].unsqueeze(1 - layer.axis)
            if self.options.biases and layer.bias is not None:
                yield layer.bias, row_mask[rows]

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of steps in which each row was chosen since the first domain; and of the texts observed
        since the last call, their numbers `texts` [T], by layer the Jaccard index [T, T] of the rows with the
        largest |h| on each, and |h| in the last of the widest layers, as shares of its sum."""
        shares = self.chosen / self.steps.clamp_min(1)
        diagnostics = {}
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            diagnostics[f"chosen/{layer.name}"] = shares[rows]

        # Each process has observed some of the texts.
        observed_sums = self.observed_sums
        self.observed_sums = {}
        observed_texts = set[int]()
        for process_texts in gather_objects([*observed_sums]):
            observed_texts.update(process_texts)
        texts = sorted(observed_texts)
        if not texts:
            return diagnostics
        zeros = torch.zeros(len(self.sums))
        sums = sum_on_cpu(torch.stack([observed_sums.get(text, zeros).cpu() for text in texts]))
        diagnostics["texts"] = torch.tensor(texts)

        large = torch.stack([self.select(text_sums.to(self.sums)) for text_sums in sums]).cpu()
        for layer, rows in zip(self.projections, self.row_slices, strict=True):
            num_shared = large[:, rows] @ large[:, rows].T  # [T, T] rows that are large on both texts
            counts = large[:, rows].sum(1)
            diagnostics[f"similarity/{layer.name}"] = num_shared / (counts[:, None] + counts - num_shared)

        max_width = max(layer.outputs for layer in self.projections)
        widest = [number for number, layer in enumerate(self.projections) if layer.outputs == max_width][-1]
        widest_sums = sums[:MAX_DRAWN, self.row_slices[widest]]
        widest_name = self.projections[widest].name
        diagnostics[f"magnitudes/{widest_name}"] = functional.normalize(widest_sums, p=1, dim=1)
        return diagnostics


def sum_magnitudes(output: Tensor, text_mask: Tensor | None) -> Tensor:
    """Sum [d] in float32 of |h| over the tokens of an output [..., d]; `text_mask` [B, T] is 0 at padding."""
    tokens = output.detach().reshape(-1, output.shape[-1])
    if text_mask is not None:
        # A prompt leads the text: its positions come before any padding.
        num_prompt = len(tokens) // len(text_mask) - text_mask.shape[1]
        is_counted = functional.pad(text_mask, (num_prompt, 0), value=1).flatten().bool()
        tokens = tokens[is_counted]
    if tokens.is_cpu:  # where the fused norm takes 10 to 25 times as long as two passes over the cache
        parts = tokens.split(max(1, CACHED // tokens.shape[-1]))
        return torch.stack([part.abs().sum(0, dtype=torch.float32) for part in parts]).sum(0)
    return torch.linalg.vector_norm(tokens, ord=1, dim=0, dtype=torch.float32)


def count_chosen(threshold: float, width: int) -> int:
    """Rows of `width` that are updated: d - floor(T d), by the decimal that T is written as."""
    return width - floor(Fraction(str(threshold)) * width)


def choose_rows(scores: Tensor, segments: Sequence[Tensor], threshold: float) -> Tensor:
    """1 for the updated rows of each segment, else 0, [D]; segments [G, d] are the rows of G groups."""
    mask = torch.zeros_like(scores)
    for rows in segments:
        largest = scores[rows].topk(count_chosen(threshold, rows.shape[1])).indices
        mask[rows.gather(1, largest).flatten()] = 1
    return mask


def choose_by_mass(scores: Tensor, segments: Sequence[Tensor], top_p: float) -> Tensor:
    """1 for the fewest rows of each segment that hold a share `top_p` of the sum of its scores [D] >= 0, else
    0; all rows for `top_p` 1 and for zero scores. Segments as above."""
    mask = torch.zeros_like(scores)
    for rows in segments:
        ranked = scores[rows].double().sort(dim=1, descending=True, stable=True)
        larger = ranked.values.cumsum(1) - ranked.values  # the sum of the scores before
        total = ranked.values.sum(1, keepdim=True)
        is_chosen = (larger < top_p * total) | (total == 0) | (top_p == 1)
        mask[rows.gather(1, ranked.indices)] = is_chosen.to(mask)
    return mask


class _RowGradient(torch.autograd.Function):
    """Identity on a layer's output, with a backward pass that gives the weight the gradient of some rows."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        layer_input: Tensor,
        weight: Tensor,
        axis: int,
        find_rows: Callable[[], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(layer_input)
        ctx.weight = weight
        ctx.axis = axis
        ctx.find_rows = find_rows
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor, None, None]:
        [layer_input] = ctx.saved_tensors
        rows = ctx.find_rows()
        output_gradients = gradient.flatten(0, -2).index_select(1, rows)  # [N, chosen]
        inputs = layer_input.flatten(0, -2).to(gradient.dtype)  # [N, inputs]
        # A weight is [outputs, inputs], or [inputs, outputs] as in GPT-2's Conv1D.
        row_gradients = output_gradients.T @ inputs if ctx.axis == 0 else inputs.T @ output_gradients
        weight_gradient = torch.zeros_like(ctx.weight)
        weight_gradient.index_copy_(ctx.axis, rows, row_gradients.to(ctx.weight.dtype))
        return gradient, None, weight_gradient, None, None


class RowGradients:
    """Computes a linear layer's weight gradient for the chosen rows only: a detached copy replaces the
    weight in the forward pass, so that the layer's own backward pass gives its input's gradient only."""

    def __init__(self, module: nn.Module, *, axis: int, mask: MagnitudeMask, rows: slice) -> None:
        self.axis = axis
        self.mask = mask
        self.rows = rows
        self.weight: nn.Parameter | None = None  # while the layer is computed
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
        if self.mask.is_limiting and weight.requires_grad and torch.is_grad_enabled():
            self.weight = weight
            module._parameters["weight"] = nn.Parameter(weight.detach(), requires_grad=False)

    def restore_weight(self, module: nn.Module, args: Any, output: Tensor | None) -> Tensor | None:
        if self.weight is None:
            return None
        weight = self.weight
        self.weight = None
        module._parameters["weight"] = weight
        if output is None:  # the layer has failed
            return None
        layer_input = args[0].to(output.dtype)
        return cast(Tensor, _RowGradient.apply(output, layer_input, weight, self.axis, self.find_chosen))

    def find_chosen(self) -> Tensor:
        """The indices [chosen] of the layer's chosen rows."""
        return self.mask.choose()[self.rows].nonzero().flatten()
