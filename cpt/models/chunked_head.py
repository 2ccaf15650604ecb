"""Losses at the scored positions, from logits that are computed in chunks where there are many of them.

The logits [K, V] of K scored positions are the largest tensor of a step: 8,192 positions of 151,936 entries
are 5 GB in 32 bits, and a loss and its gradient take several times as much. Never are more than MAX_LOGITS,
or `model.max_logits`, of them computed at once: the hidden states at the scored positions are divided into
chunks, and what a model does after its body is run on each. This is the model's own `forward`, with a body
that gives the chunk, so that scales, softcaps and transforms are those of any class.

The sum of a loss is computed with its gradient, so that no chunk is computed twice. The loss of each position
has its gradient from chunks that are computed again in the backward pass, as importances need it.
docs/models.md has what both take (benchmarks/costs/vocabulary.py). torch's `linear_cross_entropy`, which
knows no softcap, took 4.3 times as long as whole logits on a CPU core."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from cpt.core.memory import return_large, return_large_in_backward
from cpt.core.tensors import upcast
from cpt.data.collate import Batch
from cpt.models.fast_kernels import PaddedHead
from cpt.models.forward import (
    cache_arguments,
    find_body,
    logits_and_hidden,
    select_positions,
    set_temporarily,
    token_nll,
)

MAX_LOGITS = 2**27  # computed at once; a constant, so that no bit depends on the machine
TokenLoss = Callable[[Tensor, slice], Tensor]  # [k] from the logits [k, V] at a slice of the scored positions
Result = TypeVar("Result")


@dataclass(frozen=True)
class WeightedLoss:
    """A loss by position, and the factor of its sum in what is minimized. The first of several losses has the
    factor 1. The sum is not multiplied by it: only its gradient takes longer with another factor."""

    loss: TokenLoss
    strength: float = 1.0
    # Weights of the positions, [K], that depend on the logits at all of them; called without gradients.
    find_weights: Callable[["Logits"], Tensor] | None = None


class Logits(ABC):
    """The logits [K, V] at K scored positions."""

    @abstractmethod
    def select(self, positions: slice) -> Tensor:
        """The logits [k, V] at a slice of the positions."""

    @abstractmethod
    def values(self, loss: TokenLoss, *, passes: int = 1) -> Tensor:
        """A loss at each position, [K]. Where a batch was run in several passes, stacked one after another,
        [K / passes]: the loss is given the logits [passes * k, V] of a slice of the positions in each."""

    @abstractmethod
    def sums(self, losses: Mapping[str, WeightedLoss]) -> dict[str, Tensor]:
        """The sum of each loss over the positions, a scalar, for one backward pass."""

    def keep(self) -> "Logits":
        """The same logits, without gradients, also when the model has other weights."""
        return self


class WholeLogits(Logits):
    """Logits that are a tensor [K, V]. `hidden`: the model's last hidden states, if they were computed in the
    same pass.

    K may be another in each step, as chats have fewer scored positions than text. What takes 32 MiB or more
    is therefore not kept by the heap: blocks of many sizes would leave holes in it."""

    def __init__(self, logits: Tensor, hidden: Tensor | None = None) -> None:
        self.logits = logits
        self.hidden = hidden

    def select(self, positions: slice) -> Tensor:
        return self.logits[positions]

    def values(self, loss: TokenLoss, *, passes: int = 1) -> Tensor:
        with return_large():
            values = loss(self.logits, slice(None))
        if self.hidden is not None:
            return_large_in_backward(values, self.hidden)
        return values

    def sums(self, losses: Mapping[str, WeightedLoss]) -> dict[str, Tensor]:
        return {name: self.values(weighted.loss).sum() for name, weighted in losses.items()}


def sum_losses(logits: Logits, losses: Mapping[str, WeightedLoss]) -> dict[str, Tensor]:
    """The sum of each loss over the positions, a scalar, for one backward pass."""
    return logits.sums({name: weigh_positions(weighted, logits) for name, weighted in losses.items()})


def weigh_positions(weighted: WeightedLoss, logits: Logits) -> WeightedLoss:
    """The loss with its weights of the positions, which need the logits at all of them, multiplied in."""
    if weighted.find_weights is None:
        return weighted
    with torch.no_grad():
        weights = weighted.find_weights(logits)

    def loss(chunk: Tensor, positions: slice) -> Tensor:
        return weights[positions] * weighted.loss(chunk, positions)

    return WeightedLoss(loss, weighted.strength)


@dataclass(frozen=True)
class HeadWeight:
    """A parameter that a model's head reads, and where."""

    module: nn.Module
    name: str
    tensor: Tensor


class Head:
    """What a model does after its body, with the weights and in the precision that it has when this is made:
    `stacks` are the body, and an encoder before it, with the types of their outputs."""

    def __init__(
        self, model: PreTrainedModel, arguments: Mapping[str, Any], stacks: Mapping[nn.Module, type]
    ) -> None:
        self.model = model
        self.arguments = arguments
        self.stacks = stacks
        modules_of_stacks = set[nn.Module]()
        for stack in stacks:
            modules_of_stacks.update(stack.modules())
        self.modules = [module for module in model.modules() if module not in modules_of_stacks]
        self.weights: list[HeadWeight] = []
        for module in self.modules:
            for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                self.weights.append(HeadWeight(module, name, tensor))

        device_type = model.device.type
        self.autocast = partial(
            torch.autocast,
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits [k, V] of hidden states [k, D]."""
        changes = []
        for stack, output_type in self.stacks.items():
            output = output_type(last_hidden_state=hidden[None])
            # The body returns these states: torch calls this attribute in place of forward pass and hooks.
            changes.append((stack, "_compiled_call_impl", partial(return_output, output)))
        with set_temporarily(*changes), use_weights(self.weights), self.autocast():
            return cast(Tensor, self.model.forward(**self.arguments).logits[0])

    @property
    def trained(self) -> list[Tensor]:
        """The weights that require a gradient, a tied one once."""
        tensors = {id(weight.tensor): weight.tensor for weight in self.weights}
        return [tensor for tensor in tensors.values() if tensor.requires_grad]

    @property
    def is_observed(self) -> bool:
        """Whether hooks take part in its forward or backward pass."""
        for module in self.modules:
            has_hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_hooks
            if has_hooks and module is not self.model:  # whose hooks are not called
                return True
        return False

    def copy_weights(self) -> None:
        """Uses copies of its weights from now on."""
        self.weights = [
            HeadWeight(weight.module, weight.name, weight.tensor.detach().clone()) for weight in self.weights
        ]


def return_output(output: Any, *args: Any, **kwargs: Any) -> Any:
    """The output, whatever the arguments."""
    return output


@contextmanager
def use_weights(weights: Sequence[HeadWeight]) -> Iterator[None]:
    """Modules have these parameters inside the context."""
    previous = [weight.module._parameters[weight.name] for weight in weights]
    try:
        for weight in weights:
            weight.module._parameters[weight.name] = cast(nn.Parameter, weight.tensor)
        yield
    finally:
        for weight, parameter in zip(weights, previous, strict=True):
            weight.module._parameters[weight.name] = parameter


class ChunkedLogits(Logits):
    """The logits of hidden states [K, D] at K scored positions, at most `max_rows` of them at once."""

    def __init__(self, head: Head, hidden: Tensor, *, max_rows: int) -> None:
        self.head = head
        self.hidden = hidden
        self.max_rows = max_rows
        self.has_gradients = True

    def select(self, positions: slice) -> Tensor:
        with nullcontext() if self.has_gradients else torch.no_grad():
            return self.head(self.hidden[positions])

    def values(self, loss: TokenLoss, *, passes: int = 1) -> Tensor:
        def compute(hidden: Tensor, positions: slice) -> Tensor:
            with return_large():
                return loss(self.head(hidden.flatten(0, 1)), positions)

        by_pass = self.hidden.unflatten(0, (passes, -1))
        slices = divide(by_pass.shape[1], self.max_rows // passes)
        parts = by_pass.split([part.stop - part.start for part in slices], dim=1)
        values = []
        for hidden, positions in zip(parts, slices, strict=True):
            if torch.is_grad_enabled():
                chunk_values = checkpoint(compute, hidden, positions, use_reentrant=False)
                return_large_in_backward(chunk_values, hidden)
                values.append(chunk_values)
            else:
                values.append(compute(hidden, positions))
        return torch.cat(values)

    def sums(self, losses: Mapping[str, WeightedLoss]) -> dict[str, Tensor]:
        # Hooks may wait for the whole forward pass, as a mask that its outputs decide.
        if not torch.is_grad_enabled() or self.head.is_observed:
            values = self.values(lambda logits, positions: compute_losses(losses, logits, positions))
            return {name: values[:, number].sum() for number, name in enumerate(losses)}
        sums = _Sums.apply(self, losses, self.hidden, *self.head.trained)
        return dict(zip(losses, sums, strict=True))

    def keep(self) -> "Logits":
        self.has_gradients = False
        if isinstance(self.head.model, FSDPModule):  # which gathers other weights into the same memory
            self.head.copy_weights()
        return self


def divide(count: int, max_rows: int) -> list[slice]:
    """Slices of a count of rows, the fewest of at most `max_rows`, as even as can be.

    >>> divide(7, 3)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 7, None)]
    """
    num_slices = ceil(count / max(1, max_rows))
    bounds = [count * number // num_slices for number in range(num_slices + 1)]
    return [slice(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def compute_losses(losses: Mapping[str, WeightedLoss], logits: Tensor, positions: slice) -> Tensor:
    """All losses at a slice of the positions, [k, losses]."""
    return torch.stack([weighted.loss(logits, positions) for weighted in losses.values()], dim=1)


class _Sums(torch.autograd.Function):
    """Sums of losses over the positions; the gradient of their weighted sum is computed with them."""

    @staticmethod
    def forward(
        ctx: Any, logits: ChunkedLogits, losses: Mapping[str, WeightedLoss], hidden: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        strengths = hidden.new_tensor(
            [weighted.strength for weighted in losses.values()], dtype=torch.float32
        )
        sums, gradients = differentiate(logits, losses, strengths)
        ctx.logits = logits
        ctx.losses = losses
        ctx.strengths = strengths
        ctx.gradients = gradients
        # Clones: a view would lose FSDP's hook in an operation in place.
        return tuple(total.clone() for total in sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_of_sums: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients  # scaled in place: valid for one backward pass
        scale = gradients_of_sums[0]
        if len(gradients_of_sums) > 1:
            factors = torch.stack(gradients_of_sums)
            if not torch.equal(factors, scale * ctx.strengths):
                scale = torch.ones_like(scale)
                _, gradients = differentiate(ctx.logits, ctx.losses, factors)
        torch._foreach_mul_([gradient for gradient in gradients if gradient is not None], scale)
        return None, None, *gradients


def differentiate(
    logits: ChunkedLogits, losses: Mapping[str, WeightedLoss], factors: Tensor
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of each loss over all positions, [losses], and the gradients of the sum over losses of factor
    times loss, with `factors` [losses]. They are a list: that of the hidden states [K, D], then that of each
    trained weight of the head, added up in at least 32 bits; None of what does not require one."""
    weights = logits.head.trained
    totals = GradientTotals(find_matrix(logits.head))
    hidden_gradient = torch.empty_like(logits.hidden) if logits.hidden.requires_grad else None
    # Like the hidden states, which have no storage in a computed plan, where the factors have some.
    sums = logits.hidden.new_zeros(len(losses), dtype=factors.dtype)
    for positions in divide(len(logits.hidden), logits.max_rows):
        hidden = logits.hidden[positions].detach().requires_grad_(hidden_gradient is not None)
        with return_large():
            with torch.enable_grad(), logits.head.autocast(), totals.record_calls():
                chunk_sums = compute_losses(losses, logits.head(hidden), positions).sum(0)
            chunk_gradient = totals.add(chunk_sums, factors, weights, hidden)
        sums += chunk_sums.detach()
        if hidden_gradient is not None and chunk_gradient is not None:
            hidden_gradient[positions] = chunk_gradient
    return sums, [hidden_gradient, *[totals.of(weight) for weight in weights]]


class GradientTotals:
    """The gradients of weights, added up over chunks. That of the `matrix` [V, D] of a linear layer is added
    in place as the product that it is: autograd would make a matrix for each chunk."""

    def __init__(self, matrix: nn.Linear | None) -> None:
        self.matrix = matrix
        self.calls: list[tuple[Tensor, GradientEdge]] = []  # of the matrix in a chunk: its input, its output
        self.totals: dict[int, Tensor] = {}  # by the id of a weight

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        """Records the calls of the matrix inside the context."""
        self.calls.clear()
        if self.matrix is None:
            yield
            return
        handle = self.matrix.register_forward_hook(self.record_call)
        try:
            yield
        finally:
            handle.remove()

    def record_call(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:  # a teacher's does not
            # Not the output itself, so that its memory is free for its gradient.
            self.calls.append((args[0].detach(), get_gradient_edge(output)))

    def add(self, sums: Tensor, factors: Tensor, weights: Sequence[Tensor], hidden: Tensor) -> Tensor | None:
        """Adds the gradients of a chunk's sums [losses] with some factors by the weights; returns that by its
        hidden states, if they require one."""
        # The product of a single call is computed here; else autograd has the matrix, like other weights.
        matrix = self.matrix if len(self.calls) == 1 else None
        plain_weights = list(weights)
        inputs: list[Any] = []  # tensors, and the output of the matrix
        if matrix is not None:
            matrix_input, matrix_output = self.calls[0]
            plain_weights = [weight for weight in weights if weight is not matrix.weight]
            inputs.append(matrix_output)
        if hidden.requires_grad:
            inputs.append(hidden)
        inputs += plain_weights

        # In the order of `inputs`.
        gradients = list(torch.autograd.grad(sums, inputs, grad_outputs=factors, allow_unused=True))
        if matrix is not None:
            add_product(self.total(matrix.weight), gradients.pop(0), matrix_input)
        hidden_gradient = gradients.pop(0) if hidden.requires_grad else None
        for weight, gradient in zip(plain_weights, gradients, strict=True):
            if gradient is not None:
                self.total(weight).add_(gradient)
        return hidden_gradient

    def total(self, weight: Tensor) -> Tensor:
        """The total of a weight, 0 at first, in at least 32 bits."""
        if id(weight) not in self.totals:
            self.totals[id(weight)] = torch.zeros_like(upcast(weight))
        return self.totals[id(weight)]

    def of(self, weight: Tensor) -> Tensor | None:
        """The gradient of a weight, in its own precision; None if no chunk has used it."""
        total = self.totals.get(id(weight))
        return None if total is None else total.to(weight.dtype)


def find_matrix(head: Head) -> nn.Linear | None:
    """The linear layer that writes the logits, if it is a plain one and is trained."""
    layer = head.model.get_output_embeddings()
    is_plain = type(layer) in (nn.Linear, PaddedHead) and layer in head.modules
    return layer if is_plain and layer.weight.requires_grad else None


def add_product(total: Tensor, output_gradient: Tensor, layer_input: Tensor) -> None:
    """Adds the gradient [V, D] of a linear layer's weight, by its output [..., V] and its input [..., D]."""
    by_output = output_gradient.flatten(0, -2).T
    rows = layer_input.flatten(0, -2).to(by_output.dtype)
    if total.dtype == by_output.dtype:
        total.addmm_(by_output, rows)
    else:
        total.add_(by_output @ rows)


def make_nll(batch: Batch) -> TokenLoss:
    """The negative log-likelihood (nats) of a batch's targets, as a loss by position."""
    return lambda logits, positions: token_nll(logits, batch, positions)


def count_chunk_positions(num_entries: int, max_logits: int | None) -> int:
    """The most positions of a chunk with logits of `num_entries` each; `max_logits` of None is MAX_LOGITS."""
    return max(1, (max_logits or MAX_LOGITS) // num_entries)


def count_loss_bytes(model: PreTrainedModel, num_positions: int, *, max_logits: int | None) -> int:
    """Bytes of the logits at some positions, their log-probabilities and their gradient, in 32 bits."""
    num_entries = count_head_entries(model)
    return 3 * 4 * num_entries * min(num_positions, count_chunk_positions(num_entries, max_logits))


def count_head_entries(model: PreTrainedModel) -> int:
    """The logits that a model computes at a position: the rows of its head."""
    layer = model.get_output_embeddings() or model.get_input_embeddings()
    return cast(int, layer.weight.shape[0])


def run_model(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    *,
    positions: Tensor,
    use: Callable[[Logits], Result],
    max_logits: int | None = None,
) -> tuple[Result, Tensor]:
    """Runs a model, and calls `use` with its logits [K, V] at K positions of the flattened inputs [B, T].
    Returns what `use` gives, and the last hidden states [B, T, D] at all positions; the decoder's, where
    there is one.

    More than `max_logits` numbers (None: MAX_LOGITS) are not in memory at once: then `use` gets
    ChunkedLogits, within the forward pass, between the body and the head."""
    max_rows = count_chunk_positions(count_head_entries(model), max_logits)
    if len(positions) <= max_rows:
        logits, hidden = logits_and_hidden(model, inputs, positions=positions)
        return use(WholeLogits(logits, hidden)), hidden

    arguments = {**inputs, **cache_arguments(model)}
    stacks: dict[nn.Module, type] = {}  # encoder and decoder, or the body, with the classes of their outputs
    hidden_states: list[Tensor] = []  # one entry, as `results`: the hooks below append them
    results: list[Result] = []

    def record_encoder(module: nn.Module, args: Any, output: Any) -> None:
        stacks[module] = type(output)

    def compute(module: nn.Module, args: Any, output: Any) -> Any:
        stacks[module] = type(output)
        hidden_states.append(output.last_hidden_state)
        scored = select_positions(output.last_hidden_state, positions)
        results.append(use(ChunkedLogits(Head(model, arguments, stacks), scored, max_rows=max_rows)))
        output.last_hidden_state = scored[None, :0]  # the model's own call of its head has nothing to do
        return output

    def add_result(module: nn.Module, args: Any, output: Any) -> Any:
        # FSDP gathers weights for the backward pass from the outputs of a forward pass.
        output.logits = results[0]
        return output

    with ExitStack() as hooks:
        if model.config.is_encoder_decoder:
            hooks.callback(model.get_encoder().register_forward_hook(record_encoder).remove)
        hooks.callback(find_body(model).register_forward_hook(compute).remove)
        hooks.callback(model.register_forward_hook(add_result, prepend=True).remove)
        model(**arguments)
    return results[0], hidden_states[0]
