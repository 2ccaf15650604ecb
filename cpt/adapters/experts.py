"""Feed-forward networks (FFNs) that become mixtures and gain experts: up-cycling (Komatsuzaki et al., ICLR
2023) with the routing of GLaM (Du et al., ICML 2022).

    y = sum over the k experts e with the largest z_e of  g_e(x) FFN_e(x),    g = softmax of these k z_e
    z_0 = 0,    z_e = w_e x + log o for the newest experts,    z_e = w_e x for the others

Expert 0 is the model's own FFN, no token is dropped, and o in [0, 1] is the opening of the newest experts.
Hooks on the FFN's own linear layers append the other experts' outputs, so that what is between is computed at
once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import log
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.domain_store import BASE, DomainScorer, Scope
from cpt.core.distributed import full_tensor
from cpt.core.exceptions import InvalidOptionError
from cpt.data.collate import Batch
from cpt.models.block_attention import find_text_masks
from cpt.models.forward import find_token_side
from cpt.models.narrow_layers import compute_dtype
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.units import Projection, SubLayer, find_projections, find_sublayers
from cpt.models.weights import find_frozen

MIXTURE = "mixture"  # the name of a MoELayer in its block


class TextRowsOutput(nn.Module):
    """Passes on a layer's outputs on text, where a mask may observe them."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows


class TextMask:
    """Where text is in a pass (`text_in`); its hooks are methods, so that a copy of a model has its own."""

    def __init__(self) -> None:
        self.masks: dict[str, Tensor | None] = {}  # by side, in a pass; None: no padding

    def open(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.masks = find_text_masks(module, kwargs)

    def close(self, *args: Any) -> None:
        self.masks = {}


@dataclass(frozen=True)
class Dispatch:
    """The tokens of x by experts, in a pass of one FFN."""

    x: Tensor
    rows: Tensor  # [N k, D], expert after expert
    counts: list[int]  # of each expert's rows
    row_positions: Tensor  # [N k]: where the rows of each token are, token after token
    gates: Tensor  # [N, k]
    is_text: Tensor | None  # [N k] bool: which rows are not padding; None: all

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows [..., N k, F] by experts."""
        return rows.split(self.counts, dim=-2)


@dataclass(frozen=True)
class RoutingRecord:
    """The routing of a pass's N tokens without padding."""

    probabilities: Tensor  # [N, E], softmax of all z
    gates: Tensor  # [N, k], descending
    chosen: Tensor  # [N, k]
    num_experts: int

    @property
    def first_choices(self) -> Tensor:
        """How many tokens each expert is the first choice of, [E]."""
        return torch.bincount(self.chosen[:, 0], minlength=self.num_experts)

    @property
    def gate_sums(self) -> Tensor:
        """The sum of the gates of each expert, [E] in 64 bits."""
        gates = self.gates.detach().double()
        return gates.new_zeros(len(gates), self.num_experts).scatter(1, self.chosen, gates).sum(0)


class Expert(nn.Module):
    """Linear layers of zeros like those of an FFN, in their order."""

    def __init__(self, ffn_layers: Sequence[Projection]) -> None:
        super().__init__()
        self.maps = cast(list[nn.Module], nn.ModuleList())  # the name of the layers in stored files
        self.text_rows = cast(list[TextRowsOutput], nn.ModuleList(TextRowsOutput() for _ in ffn_layers))
        for like in ffn_layers:
            with torch.device("meta"):
                if isinstance(like.module, Conv1D):
                    layer: nn.Module = Conv1D(like.outputs, like.inputs)
                else:
                    layer = nn.Linear(like.inputs, like.outputs, bias=like.bias is not None)
            self.maps.append(layer.to_empty(device=like.weight.device).to(compute_dtype(like.module)))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


class ExpertGroup(nn.Module):
    """The experts of one domain, and their router rows, [e, D]."""

    def __init__(self, ffn_layers: Sequence[Projection], count: int) -> None:
        super().__init__()
        self.experts = cast(list[Expert], nn.ModuleList(Expert(ffn_layers) for _ in range(count)))
        rows = 0.02 * torch.randn(count, ffn_layers[0].inputs)
        layer = ffn_layers[0]
        self.router = nn.Parameter(rows.to(layer.weight.device, compute_dtype(layer.module)))


class MoELayer(nn.Module):
    """The experts of an FFN besides its own layers, a group per domain; `side`: the tokens it sees."""

    def __init__(self, ffn: SubLayer, *, top_k: int, text_mask: TextMask, side: str | None) -> None:
        super().__init__()
        self.ffn_layers = tuple(ffn.projections)  # expert 0, the model's
        self.top_k = top_k
        self.text_mask = text_mask
        self.side = side
        self.groups = cast(list[ExpertGroup], nn.ModuleList())
        self.opening = 1.0  # o
        self.active: range | None = None  # the active experts; None: all

        # Of the current pass.
        self.dispatch: Dispatch | None = None
        self.features: Tensor | None = None  # the input of the FFN's last layer
        self.record: RoutingRecord | None = None

        for number, layer in enumerate(self.ffn_layers[:-1]):
            layer.module.register_forward_pre_hook(self.select_tokens)
            layer.module.register_forward_hook(partial(self.append_experts, number))
        last_layer = self.ffn_layers[-1].module
        last_layer.register_forward_pre_hook(self.select_features)
        last_layer.register_forward_hook(self.combine)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"dispatch": None, "features": None, "record": None}

    @property
    def num_experts(self) -> int:
        """E: expert 0, which is the model's own FFN, and those of all groups."""
        return 1 + len(self.experts)

    @property
    def experts(self) -> list[Expert]:
        """All but expert 0, in order."""
        experts = []
        for group in self.groups:
            experts += group.experts
        return experts

    def members(self, group: int) -> range:
        """The numbers of a group's experts; BASE: that of the model's FFN."""
        sizes = [1]  # of the FFN, which is expert 0 and group -1
        for expert_group in self.groups:
            sizes.append(len(expert_group.experts))
        start = sum(sizes[: group + 1])
        return range(start, start + sizes[group + 1])

    def grow(self, count: int) -> None:
        """Adds `count` experts with weights of zero, and draws their router rows."""
        self.groups.append(ExpertGroup(self.ffn_layers, count).train(self.training))

    @torch.no_grad()
    def copy_group(self, group: int) -> None:
        """Makes the newest experts copies of those of a group, in turn; BASE: of the model's FFN."""
        sources = self.members(group)
        experts = self.experts  # without expert 0: expert e is entry e - 1
        for number, expert in enumerate(self.groups[-1].experts):
            copied = sources[number % len(sources)]
            if copied == 0:
                source_maps = [layer.module for layer in self.ffn_layers]
            else:
                source_maps = list(experts[copied - 1].maps)
            for target, source in zip(expert.maps, source_maps, strict=True):
                for name, parameter in target.named_parameters():
                    parameter.copy_(full_tensor(getattr(source, name)))

    @property
    def last_record(self) -> RoutingRecord:
        """The record of the last pass with more than one expert."""
        assert self.record is not None
        return self.record

    def route(self, x: Tensor, active: range) -> Dispatch:
        """Chooses the experts of each token of x [..., D]."""
        tokens = x.flatten(0, -2)
        logits = self.router_logits(tokens)[:, active.start : active.stop]
        highest, chosen = logits.topk(min(self.top_k, len(active)))
        gates = highest.softmax(-1)
        chosen = chosen + active.start  # numbers among all experts
        is_text = self.find_unpadded(num_tokens=len(tokens))
        self.record = make_record(logits.softmax(-1), gates, chosen, is_text, num_experts=self.num_experts)
        return self.sort_by_expert(x, tokens, gates, chosen, is_text)

    def router_logits(self, tokens: Tensor) -> Tensor:
        """The logits z of tokens [N, D] for all experts, [N, E] in 32 bits or more."""
        router = torch.cat([group.router for group in self.groups])
        wide_dtype = torch.promote_types(router.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            scores = functional.linear(tokens.to(wide_dtype), router.to(wide_dtype))
            logits = functional.pad(scores, (1, 0))  # z_0 = 0
        if self.opening != 1:  # + log o, for the newest experts alone
            offset = log(self.opening) if self.opening > 0 else -torch.inf
            start = self.members(len(self.groups) - 1).start
            logits = torch.cat([logits[:, :start], logits[:, start:] + offset], dim=1)
        return logits

    def find_unpadded(self, num_tokens: int) -> Tensor | None:
        """Whether each of the N tokens that the FFN sees in this pass is text, not padding, [N] bool; None
        where all are text, and where the pass has no mask of these tokens."""
        mask = self.text_mask.masks.get(self.side) if self.side else None
        # A mask may be of other tokens than the FFN sees, as those of a cache in generation.
        if mask is None or mask.numel() != num_tokens:
            return None
        return mask.flatten().bool()

    def sort_by_expert(
        self, x: Tensor, tokens: Tensor, gates: Tensor, chosen: Tensor, is_text: Tensor | None
    ) -> Dispatch:
        """A row for each token and chosen expert, expert after expert."""
        device = x.device
        num_choices = gates.shape[1]
        # Stable: within an expert, rows stay in the order of the tokens.
        sorted_experts, order = chosen.flatten().sort(stable=True)
        further_experts = torch.arange(1, self.num_experts, device=device)
        starts = [0, *torch.searchsorted(sorted_experts, further_experts).tolist(), len(order)]

        # The k choices of a token follow each other in `chosen.flatten()`, so it is repeated k times.
        repeated = tokens[:, None].expand(-1, num_choices, -1).reshape(-1, tokens.shape[1])
        rows = repeated.index_select(0, order)
        leading_ones = [1] * (x.ndim - 2)  # layers see as many dimensions as before
        row_is_text = None if is_text is None else is_text.repeat_interleave(num_choices)[order]

        # The inverse of the order: where each choice of each token has gone.
        row_numbers = torch.arange(len(order), device=device)
        row_positions = torch.empty_like(order).scatter(0, order, row_numbers)
        return Dispatch(
            x=x,
            rows=rows.view(*leading_ones, *rows.shape),
            counts=[end - start for start, end in pairwise(starts)],
            row_positions=row_positions,
            gates=gates,
            is_text=row_is_text,
        )

    def select_tokens(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of layers that read x: selects the tokens of expert 0."""
        active = range(self.num_experts) if self.active is None else self.active
        # With expert 0 alone the FFN is the model's own.
        if self.num_experts == 1 or active == range(1):
            self.dispatch = None
            self.record = None
            return None
        # A gated FFN has two layers that read x: the second takes what the first has routed.
        if self.dispatch is None or self.dispatch.x is not args[0]:
            self.dispatch = self.route(args[0], active)
        return (self.dispatch.split(self.dispatch.rows)[0],)

    def append_experts(self, number: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The forward hook of layer `number` of the FFN: its output on the rows of expert 0, followed by the
        outputs of the other experts' layers on theirs, [..., N k, F]."""
        if self.dispatch is None:
            return output
        dispatch = self.dispatch
        # The last layer reads the features that the FFN has made of all rows; the layers before it, tokens.
        inputs = dispatch.split(dispatch.rows if self.features is None else self.features)[1:]
        is_text: Sequence[Tensor | None] = [None] * len(inputs)
        if dispatch.is_text is not None:
            is_text = dispatch.is_text.split(dispatch.counts)[1:]

        outputs = [output]
        for expert, expert_rows, expert_is_text in zip(self.experts, inputs, is_text, strict=True):
            expert_output = expert.maps[number](expert_rows)
            text_rows = expert.text_rows[number]
            if text_rows._forward_hooks:  # a mask observes them
                is_all = expert_is_text is None
                text_rows(expert_output if is_all else expert_output[..., expert_is_text, :])
            outputs.append(expert_output)
        return torch.cat(outputs, dim=-2)

    def select_features(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """The pre-hook of the FFN's last layer: selects the rows of expert 0."""
        if self.dispatch is None:
            return None
        self.features = args[0]
        return (self.dispatch.split(self.features)[0],)

    def combine(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The forward hook of the FFN's last layer: for each token the sum of the outputs of its experts,
        weighted by its gates, [..., D]."""
        dispatch = self.dispatch
        if dispatch is None:
            return output
        by_expert = self.append_experts(len(self.ffn_layers) - 1, module, args, output).flatten(0, -2)
        # The pass of the FFN ends here; `append_experts` has read both.
        self.dispatch = None
        self.features = None
        # [N k, F] in the order of the experts, then [N, k, F].
        by_token = by_expert.index_select(0, dispatch.row_positions).view(*dispatch.gates.shape, -1)
        summed = (dispatch.gates[..., None].to(by_expert) * by_token).sum(1)
        return summed.view(*dispatch.x.shape[:-1], -1)


def make_record(
    probabilities: Tensor, gates: Tensor, chosen: Tensor, is_text: Tensor | None, *, num_experts: int
) -> RoutingRecord:
    """The record of the tokens that are text."""
    if is_text is not None:
        probabilities = probabilities[is_text]
        gates = gates[is_text]
        chosen = chosen[is_text]
    return RoutingRecord(probabilities, gates, chosen, num_experts)


def choose_blocks(model: PreTrainedModel, freeze: Freeze, *, interval: int) -> list[str]:
    """The blocks whose FFN becomes a mixture: the last of `interval` each, unless frozen. Raises ValueError
    for an interval that leaves none."""
    ffns = find_sublayers(model, ("neurons",))
    if interval > len(ffns):
        raise InvalidOptionError(
            "method.moe_every_n_blocks", interval, allowed=f"1 to {len(ffns)}, the model's blocks"
        )
    frozen = {id(parameter) for parameter in find_frozen(model, freeze)}
    chosen = [ffn.name for ffn in ffns[interval - 1 :: interval] if id(ffn.out.weight) not in frozen]
    if not chosen:
        raise InvalidOptionError(
            "method.moe_every_n_blocks",
            interval,
            reason="freeze leaves no FFN that becomes a mixture",
            allowed="a smaller method.moe_every_n_blocks or fewer of freeze.layers, and no trainable=…",
        )
    return chosen


def find_mixtures(model: nn.Module) -> dict[str, MoELayer]:
    """The mixtures in a model, by name, in the order of its blocks."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}


def attach_mixtures(
    model: PreTrainedModel, *, blocks: Sequence[str], top_k: int, groups: Sequence[int] = ()
) -> Scope:
    """Makes the FFNs of the named blocks mixtures of one expert, or with groups of further ones."""
    ffns = {ffn.name: ffn for ffn in find_sublayers(model, ("neurons",))}
    text_mask = TextMask()  # one for all mixtures: the model's inputs have it
    model.register_forward_pre_hook(text_mask.open, with_kwargs=True)
    model.register_forward_hook(text_mask.close, always_call=True)
    sides = [find_token_side(model, ffns[name].out.name) for name in blocks]
    for name, side in zip(blocks, sides, strict=True):
        mixture = MoELayer(ffns[name], top_k=top_k, text_mask=text_mask, side=side)
        model.get_submodule(name).add_module(MIXTURE, mixture)
        for count in groups:
            mixture.grow(count)
    return extend_to_newest(model, Scope(names=(), projections=()))


def make_scope_outside_ffns(model: PreTrainedModel, blocks: Sequence[str]) -> Scope:
    """All of a model without mixtures except the FFNs of the named blocks."""
    excluded = set()
    for ffn in find_sublayers(model, ("neurons",)):
        if ffn.name in blocks:
            excluded |= {projection.name for projection in ffn.projections}
    names = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in excluded]
    projections = [projection for projection in find_projections(model) if projection.name not in excluded]
    return Scope(tuple(names), tuple(projections))


def extend_to_newest(model: nn.Module, scope: Scope) -> Scope:
    """A scope extended by the newest experts and their router rows; of mixtures without any, by expert 0."""
    projections: list[Projection] = []
    parameters: set[int] = set()
    for name, mixture in find_mixtures(model).items():
        if mixture.groups:
            projections += list_newest_layers(name, mixture)
            parameters.add(id(mixture.groups[-1].router))
        else:
            projections += mixture.ffn_layers
    for projection in projections:
        parameters |= {id(parameter) for parameter in projection.module.parameters()}
    # In the model's order, as in the optimizer's state.
    names = [name for name, parameter in model.named_parameters() if id(parameter) in parameters]
    return Scope((*scope.names, *names), (*scope.projections, *projections))


def list_newest_layers(name: str, mixture: MoELayer) -> list[Projection]:
    """The linear layers of the newest experts of a mixture of this name."""
    last = len(mixture.groups) - 1
    projections = []
    for number, expert in enumerate(mixture.groups[last].experts):
        for index, layer in enumerate(mixture.ffn_layers):
            path = f"{name}.groups.{last}.experts.{number}.maps.{index}"
            projections.append(
                replace(layer, name=path, module=expert.maps[index], measured=expert.text_rows[index])
            )
    return projections


@contextmanager
def use_experts(model: nn.Module, group: int, *, only_earlier: bool = False) -> Iterator[None]:
    """Inside the context only the experts of a group are active, or with `only_earlier` only those of the
    groups before it. The group BASE is expert 0, the model's own FFN."""
    mixtures = list(find_mixtures(model).values())
    for mixture in mixtures:
        members = mixture.members(group)
        mixture.active = range(members.start) if only_earlier else members
    try:
        yield
    finally:
        for mixture in mixtures:
            mixture.active = None


class GatedScorer(DomainScorer):
    """Scores all texts with all experts, and records how much of a text each domain's experts had."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.mixtures = list(find_mixtures(model).values())
        self.objective = objective

    @property
    def all_sources(self) -> list[int]:
        return [BASE, *range(len(self.mixtures[0].groups))]

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        nll = self.objective.nll(model, batch)
        if "idle" in batch:  # a pass for the other processes' sake: of no text
            return nll

        # The sums of the sources' weights, [n, 1]. Before the first domain the base has all the weight.
        sources = self.all_sources
        if len(sources) == 1:
            weight_sums = torch.full((1, 1), float(len(nll)), dtype=torch.double, device=nll.device)
        else:
            # Gates summed over tokens and mixtures, then over each domain's experts.
            expert_sums = torch.stack([mixture.last_record.gate_sums for mixture in self.mixtures]).sum(0)
            source_sums = []
            for source in sources:
                members = self.mixtures[0].members(source)
                source_sums.append(expert_sums[members.start : members.stop].sum())
            weight_sums = torch.stack(source_sums)[:, None]
        self.record_weights(domain, sources, weight_sums)
        return nll
