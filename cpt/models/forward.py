"""A model run on a batch: what it gives at the scored positions, its losses and hidden states."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import (
    PreTrainedModel,
)

from cpt.data.objectives import Batch


def outputs_at(
    model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] at the K scored positions of a batch, and the last hidden states [B, T, D] at all of
    them; with other `weights` by parameter name, those of the model with these.

    The body's output is cut down to the scored positions before the model's own head sees it: a hook for the
    one call, so that the head is computed nowhere else and the model stays as its authors wrote it."""
    hidden: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state = hidden[0].flatten(0, 1).index_select(0, batch["positions"])[None]
        return output

    handle = body(model).register_forward_hook(cut)
    try:
        inputs = {**sequences(batch), **uncached(model)}
        output = model(**inputs) if weights is None else functional_call(model, dict(weights), kwargs=inputs)
        return output.logits[0], hidden[0]
    finally:
        handle.remove()


def logits_at(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Logits [K, V] at the K scored positions of a batch."""
    return outputs_at(model, batch, weights=weights)[0]


def token_nll(model: PreTrainedModel, batch: Batch, *, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """Negative log-likelihood (nats) of the labels at the scored positions, [K]."""
    return nll_of(logits_at(model, batch, weights=weights), batch)


def nll_of(logits: Tensor, batch: Batch) -> Tensor:
    """The same from logits [K, V] at the scored positions."""
    labels = batch["labels"].flatten().index_select(0, batch["positions"])
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(one) || softmax(other)) over the last axis (nats), [K] from [K, F]."""
    one, other = one.float().log_softmax(-1), other.float().log_softmax(-1)
    return (one.exp() * (one - other)).sum(-1)


def encoded(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The last hidden states [B, T, D] of a batch; the head is not computed."""
    inner = body(model)
    return inner(**sequences(batch), **uncached(inner)).last_hidden_state


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


def sequences(batch: Batch) -> dict[str, Tensor]:
    """What of a batch a model takes."""
    return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}


def body(model: PreTrainedModel) -> nn.Module:
    """The part of a model whose output its head takes; raises ValueError if there is none."""
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no body apart from its head")
    inner = getattr(model.base_model, "decoder", None)  # OPT's head takes the decoder within the body
    return inner if inner is not None and not model.config.is_encoder_decoder else model.base_model


def uncached(model: PreTrainedModel) -> dict[str, bool]:
    """Switches off the key-value cache, which models with one fill even in training."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
