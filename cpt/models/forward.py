"""A model with a body and a head, run on tokens: what it gives at some positions, and what is made of it."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    PreTrainedModel,
)

from cpt.data.collate import Batch
from cpt.models.sharding import call_within


def logits_and_hidden(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], *, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] at K positions of the flattened inputs [B, T], and the last hidden states [B, T, D] at
    all of them; of a model with a decoder, of what that takes.

    The body's output is cut down to these positions before the model's own head sees it: a hook for the one
    call, so that the head is computed nowhere else and the model stays as its authors wrote it."""
    hidden: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state = at(hidden[0], positions)[None]
        return output

    handle = body(model).register_forward_hook(cut)
    try:
        return model(**inputs, **uncached(model)).logits[0], hidden[0]
    finally:
        handle.remove()


def hidden_states(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """The last hidden states [B, T, D] of what the model reads: of the encoder, where there is one. The head
    is not computed."""
    inner = reader(model)
    read = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    return call_within(model, inner, **read, **uncached(inner)).last_hidden_state


def at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [K, D] at positions [K] of the flattened batch, of those [B, T, D] everywhere."""
    return hidden.flatten(0, 1).index_select(0, positions)


def mean_over(hidden: Tensor, present: Tensor | None) -> Tensor:
    """Mean [B, D] of hidden states [B, T, D] over the positions that are no padding."""
    if present is None:
        return hidden.mean(1)
    weights = present.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)


def nll_of(logits: Tensor, batch: Batch) -> Tensor:
    """Negative log-likelihood (nats) of the targets, [K], from logits [K, V] at the scored positions."""
    return functional.cross_entropy(logits.float(), batch["targets"], reduction="none")


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(one) || softmax(other)) over the last axis (nats), [K] from [K, F]."""
    one, other = one.float().log_softmax(-1), other.float().log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Train or eval mode while it lasts; then every part is in its own mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for part, before in modes:
            part.training = before


def body(model: PreTrainedModel) -> nn.Module:
    """The part of a model whose output its head takes; raises ValueError if there is none."""
    if model.config.is_encoder_decoder:
        return model.get_decoder()
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no body apart from its head")
    inner = getattr(model.base_model, "decoder", None)  # OPT's head takes the decoder within the body
    return inner if inner is not None else model.base_model


def reader(model: PreTrainedModel) -> nn.Module:
    """The part of a model that stands for what it reads: the encoder, or the body where there is no other.
    A classifier is put on it."""
    return model.get_encoder() if model.config.is_encoder_decoder else body(model)


def uncached(model: PreTrainedModel) -> dict[str, bool]:
    """Switches off the key-value cache, which models with one fill even in training."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
