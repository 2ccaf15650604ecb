"""MIGU, magnitude-based gradient updating (Du et al., EMNLP Findings 2024).

Of each linear map h = W x (+ b) within the blocks, a step changes the rows with the largest outputs only:

    n_i    = 1/N sum over tokens of |h_i|                                       (eq. 1-2)
    M_i    = 1 for the d - floor(T d) rows i with the largest n_i, else 0
    grad W <- M grad W                                                          (eq. 6)

Nothing is kept from step to step. The rows of fused projections (Q, K, V in one map) are ranked apart. Of
encoder and decoder, each map counts the tokens that it works on: a decoder's those of the target, but the
keys and values of its attention to the encoder those of the source. The released code masks the
language-model head too, sums over padding, leaves the first domain out, and keeps one row less, as it
compares with a quantile.

With importance=fisher it is FGGM (arXiv 2601.18261, 2026): n_i is the sum over row i of the diagonal Fisher
of the model before the domain, on the domain's probe, so that the mask is one for all of its steps. With
`mass` p instead of T, each map changes the fewest rows that hold a share p of the sum of n_i: as many as its
importance is spread over. FGGM's own adaptive threshold could not be read; this is not said to be it."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from cpt.adapters.experts import TextRows
from cpt.core.collectives import sum_in_place
from cpt.core.options import Options, option
from cpt.core.randomness import key
from cpt.core.rules import PATTERN, YES_NO, number, one_of, or_null, show, whole
from cpt.core.sharding import whole as all_rows
from cpt.data.batch import Batch
from cpt.gradient_masks.base import GradientMask
from cpt.gradient_masks.options import ACTS_ON
from cpt.gradient_masks.ranking import by_width, choose_by_mass, choose_rows, magnitudes, row_norms
from cpt.gradient_masks.rows import RowGradients
from cpt.models.block_attention import present_in, present_in_target
from cpt.models.fisher import fisher
from cpt.models.forward import SOURCE_TOKENS, TARGET_TOKENS, in_mode, tokens_of
from cpt.models.fsdp import named_weights
from cpt.models.objectives import Objective
from cpt.models.units import Projection, projections

log = logging.getLogger(__name__)
KNOWN_IN_TIME = ("output", "fisher")  # importances that rows have before the backward pass


@dataclass(frozen=True, kw_only=True)
class MagnitudeMaskOptions(Options):
    """Options of MIGU's mask."""

    threshold: float | None = option(
        "T, the share of rows left as they are", or_null(number("0 or more and below 1"))
    )
    mass: float | None = option(
        "instead of T: the share of a map's importance that the chosen rows hold",
        or_null(number("above 0, at most 1")),
        default=None,
    )
    importance: str = option(
        "what rows are ranked by: |output|, their Fisher before the domain, or as controls |gradient|, "
        "|weight|, a draw",
        one_of("output", "fisher", "gradient", "weight", "random"),
    )
    estimator: str = option("of importance=fisher", one_of("per_sample", "batch"))
    acts_on: str = option("what is scaled: gradient, the step, or the step and its moments", ACTS_ON)
    only: str | None = option("which linear maps: a regular expression for their names", or_null(PATTERN))
    biases: bool = option("also the maps' biases", YES_NO)
    head: bool = option("also the linear maps outside the blocks", YES_NO)
    tied: bool = option("of these also the one that shares the embedding's weight", YES_NO)
    skip_first_domain: bool = option("the first domain is learned without the mask", YES_NO)
    backend: str = option(
        "what computes the gradients: hooks (all rows', then scaled), or backward (the chosen rows' alone)",
        one_of("hooks", "backward"),
    )
    seed: int = option("of importance=random", whole(0))

    def check_together(self) -> None:
        if (self.threshold is None) == (self.mass is None):
            raise ValueError(
                f"threshold={show(self.threshold)} and mass={show(self.mass)}: one of them says how many "
                "rows are chosen; allowed: null for the other"
            )
        if self.backend == "backward" and self.importance not in KNOWN_IN_TIME:
            raise ValueError(
                f"backend=backward does not go with importance={self.importance}, which is known after the "
                f"backward pass or not by its rows; allowed: importance={', '.join(KNOWN_IN_TIME)}, or "
                "backend=hooks"
            )
        if self.backend == "backward" and self.acts_on != "gradient":
            raise ValueError(
                f"backend=backward is invalid with acts_on={self.acts_on}: gradients of rows that are not "
                "chosen are not computed, which clipping and the optimizer's moments would need; allowed: "
                "acts_on=gradient, or backend=hooks"
            )


class MagnitudeMask(GradientMask):
    """Updates the rows of each linear map that are largest by `importance`: `output`, as in the paper, or as
    controls the row's `gradient` or `weight` (L1 norms), or a `random` draw at each step.

    `only` is a regular expression for names of maps; `biases`, `head` and `tied` include the maps' biases,
    the maps outside the blocks, and of those the ones whose weight is the embedding's."""

    def __init__(self, options: MagnitudeMaskOptions) -> None:
        super().__init__(acts_on=options.acts_on)
        self.options, self.only, self.skipping = options, re.compile(options.only or ""), False
        self.lasting = options.importance == "fisher"
        self.maps: list[Projection] = []
        self.places: list[slice] = []
        self.ranked: list[str] = []
        self.hooks: list[RemovableHandle] = []
        self.present: dict[str, Tensor | None] = {}
        self.limited: list[RowGradients] = []
        self.inside = self.limiting = False
        self.mask: Tensor | None = None  # of the step at hand, [rows]
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def watch(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> None:
        beside = self.outside(model, maps)
        if self.options.head and not beside:
            why = "the method trains parts of the blocks alone"
            if maps is None:
                why = "the head is the embedding (tied=true)"
            log.warning("head=true adds nothing to what mask=migu covers: %s", why)
        covered = [*(projections(model) if maps is None else maps), *beside]
        maps = [each for each in covered if self.only.search(each.name)]
        if not covered:
            log.warning("the method trains no linear maps: mask=migu has nothing to mask")
        elif not maps:
            raise ValueError(
                f"only={self.only.pattern} leaves nothing to mask; allowed: a regular expression that finds "
                f"some of {covered[0].name} … {covered[-1].name}"
            )
        self.cover(maps)
        self.attach(model)

    def cover(self, maps: Sequence[Projection]) -> None:
        """Makes room for the rows of maps; how often those were chosen that are known stays."""
        known = {each.name: self.chosen[place] for each, place in zip(self.maps, self.places, strict=True)}
        sizes = [each.outputs for each in maps]
        ends = accumulate(sizes)
        self.maps, self.places = maps, [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.register_buffer("sums", torch.zeros(sum(sizes)), persistent=False)
        self.register_buffer("chosen", torch.zeros(sum(sizes)))
        if self.options.importance == "fisher":
            self.register_buffer("known", torch.zeros(sum(sizes)))
        for each, place in zip(self.maps, self.places, strict=True):
            rows = known.get(each.name, self.chosen[:0])
            self.chosen[place][: len(rows)] = rows
        for name in self.ranked:
            delattr(self, name)
        ranked = by_width(self.maps, self.places)
        self.ranked = [f"segments{number}" for number in range(len(ranked))]
        for name, segments in zip(self.ranked, ranked, strict=True):
            self.register_buffer(name, segments, persistent=False)

    def attach(self, model: PreTrainedModel) -> None:
        """Hooks on the model and its maps, in place of those that there were."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = [
            model.register_forward_pre_hook(self.open, with_kwargs=True),
            model.register_forward_hook(self.close, always_call=True),
        ]
        for each, place in zip(self.maps, self.places, strict=True):
            measured = each.measured or each.module
            side = None if isinstance(measured, TextRows) else tokens_of(model, each.name)
            self.hooks.append(measured.register_forward_hook(partial(self.record, place, side)))
        self.limit()

    def limit(self) -> None:
        """Has the maps compute the gradients of the chosen rows alone, where that is asked for."""
        for each in self.limited:
            each.remove()
        self.limited = [
            RowGradients(
                each.module,
                axis=each.axis,
                rows=partial(self.rows, place),
                wanted=self.is_limiting,
            )
            for each, place in zip(self.maps, self.places, strict=True)
            if self.limits and each.measured is None
        ]

    def decide(self) -> None:
        if self.limiting:
            self.choose()

    def is_limiting(self) -> bool:
        """Whether the passes at hand are those of a step whose rows are known before its backward pass."""
        return self.limiting

    def rows(self, place: slice) -> Tensor:
        """The places within a map of the rows that the step at hand changes."""
        return self.choose()[place].nonzero().flatten()

    def choose(self) -> Tensor:
        """1 for the rows that the step at hand changes, else 0, [rows]."""
        if self.mask is None:
            segments = [self.get_buffer(name) for name in self.ranked]
            if self.options.mass is not None:
                self.mask = choose_by_mass(self.scores(), segments, self.options.mass)
            else:
                self.mask = choose_rows(self.scores(), segments, self.options.threshold)
        return self.mask

    def outside(self, model: PreTrainedModel, maps: Sequence[Projection] | None) -> list[Projection]:
        """The linear maps outside the blocks that are asked for; none where only parts are trained."""
        if not self.options.head or maps is not None:
            return []
        within = {each.module for each in projections(model)}
        embedding = model.get_input_embeddings().weight
        return [
            Projection(name, module, 0, (torch.arange(module.out_features),))
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and module not in within
            if self.options.tied or module.weight is not embedding
        ]

    def open(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The whole model begins a forward pass: of the training loss, or one that does not count."""
        counted = self.recording and torch.is_grad_enabled()
        self.inside = counted and self.options.importance == "output"
        # Parts of a step that are still to come may choose other rows.
        self.limiting |= bool(self.limited) and counted and self.alone and not self.skipping
        self.present = {SOURCE_TOKENS: present_in(kwargs)}
        if self.inside and "decoder_input_ids" in kwargs:
            self.present[TARGET_TOKENS] = present_in_target(
                kwargs["decoder_input_ids"], module.config.pad_token_id
            )

    def close(self, *args: Any) -> None:
        self.inside, self.present = False, {}

    def record(self, place: slice, side: str | None, module: nn.Module, args: Any, output: Tensor) -> None:
        """Adds a map's output on tokens of source or target; what is computed again in the backward pass, by
        a part of the model on its own, or without gradients on the way, does not count."""
        if self.inside and torch.is_grad_enabled():
            self.sums[place] += magnitudes(output, self.present.get(side) if side else None)

    def activate(self, domain: int) -> None:
        self.skipping = self.options.skip_first_domain and domain == 0
        self.mask, self.limiting = None, False
        self.sums.zero_()

    def before_domain(self, model: PreTrainedModel, objective: Objective, probe: Iterable[Batch]) -> None:
        if self.options.importance != "fisher" or self.skipping:
            return
        with in_mode(model, training=False), torch.autocast(self.known.device.type, enabled=False):
            found = fisher(model, probe, objective=objective, estimator=self.options.estimator)
        names = {id(parameter): name for name, parameter in named_weights(model).items()}
        for each, place in zip(self.maps, self.places, strict=True):
            rows = found[names[id(each.module.weight)]].float().sum(1 - each.axis)
            self.known[place] = all_rows(rows)

    def scores(self) -> Tensor:
        """The importance of every row, [rows], the same in all processes."""
        if self.options.importance == "output":
            sum_in_place(self.sums)
            return self.sums
        if self.options.importance == "fisher":
            return self.known
        if self.options.importance == "random":
            draw = torch.Generator().manual_seed(key("migu", self.options.seed, int(self.steps)) % 2**63)
            return torch.rand(len(self.sums), generator=draw).to(self.sums)
        return torch.cat([row_norms(each, self.options.importance) for each in self.maps])

    @property
    def limits(self) -> bool:
        return self.options.backend == "backward"

    @torch.no_grad()
    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if self.skipping or not self.maps:
            return
        mask, self.mask, self.limiting = self.choose(), None, False
        self.chosen += mask
        self.steps += 1
        self.sums.zero_()
        for each, place in zip(self.maps, self.places, strict=True):
            yield each.module.weight, mask[place].unsqueeze(1 - each.axis)
            if self.options.biases and each.module.bias is not None:
                yield each.module.bias, mask[place]

    def diagnostics(self) -> dict[str, Tensor]:
        """How often each row has been chosen since the first domain, as a share of all steps."""
        shares = self.chosen / self.steps.clamp_min(1)
        return {
            f"chosen/{each.name}": shares[place] for each, place in zip(self.maps, self.places, strict=True)
        }
