"""A forward pass of a model with a body and a head: logits at some positions, hidden states, KL divergence;
the mode and the dropout rate of a pass, and the tokens that a module sees."""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.core.memory import return_large
from cpt.data.collate import Batch
from cpt.models.fsdp import call_within
from cpt.models.units import ATTENTION

SOURCE_TOKENS, TARGET_TOKENS = "source", "target"
# What is in the name of a decoder's attention to the encoder.
CROSS_ATTENTION = re.compile(r"enc|cross", re.IGNORECASE)
# The names of that attention's layers that read the encoder's output.
MEMORY_LAYER = re.compile(r"(w?[kv]|w?kv|key|value)(?![a-z])\w*", re.IGNORECASE)


def logits_and_hidden(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], *, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits [K, V] at K positions of the flattened inputs [B, T], selected before the head, and the last
    hidden states [B, T, D] at all; the decoder's, where there is one."""
    hidden: list[Tensor] = []

    def select(module: nn.Module, inputs: Any, output: Any) -> Any:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state = select_positions(output.last_hidden_state, positions)[None]
        # K, and with it the size of the logits, may be another in each batch.
        cleanup.enter_context(return_large())
        return output

    with ExitStack() as cleanup:
        cleanup.callback(find_body(model).register_forward_hook(select).remove)
        return model(**inputs, **cache_arguments(model)).logits[0], hidden[0]


def hidden_states(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """The last hidden states [B, T, D] of the encoder, or of the body of a decoder, without a head."""
    stack = find_input_stack(model)
    stack_inputs = {name: tensor for name, tensor in inputs.items() if not name.startswith("decoder_")}
    return call_within(model, stack, **stack_inputs, **cache_arguments(stack)).last_hidden_state


def select_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states [K, D] at positions [K] of the flattened batch, from [B, T, D]."""
    return hidden.flatten(0, 1).index_select(0, positions)


def mean_over_tokens(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean [B, D] of hidden states [B, T, D] over the positions where a mask is 1; None: over all."""
    if mask is None:
        return hidden.mean(1)
    weights = mask.to(hidden)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1)


def token_nll(logits: Tensor, batch: Batch, positions: slice = slice(None)) -> Tensor:
    """Negative log-likelihood (nats) of the targets, [k], from logits [k, V] at a slice of the scored
    positions."""
    return functional.cross_entropy(logits.float(), batch["targets"][positions], reduction="none")


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(softmax(p_logits) || softmax(q_logits)) over the last axis (nats), [K] from [K, F]."""
    log_p = p_logits.float().log_softmax(-1)
    log_q = q_logits.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@contextmanager
def set_temporarily(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes (object, name, value) have other values inside the context."""
    previous = [(target, name, getattr(target, name)) for target, name, _ in changes]
    try:
        for target, name, value in changes:
            setattr(target, name, value)
        yield
    finally:
        for target, name, value in previous:
            setattr(target, name, value)


@contextmanager
def set_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets train or eval mode inside the context; afterwards every submodule has its previous mode."""
    previous = [(submodule, submodule.training) for submodule in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for submodule, mode in previous:
            submodule.training = mode


def find_dropout(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Modules, attributes and rates of all dropout in a model, but for `layerdrop`."""
    rates = []
    for module in model.modules():
        names = ["p"] if isinstance(module, nn.Dropout) else [key for key in vars(module) if "dropout" in key]
        for name in names:
            rate = getattr(module, name)
            if type(rate) in (float, int):
                rates.append((module, name, rate))
    return rates


@contextmanager
def set_dropout(model: nn.Module, rate: float | None) -> Iterator[None]:
    """Train mode with every dropout at `rate` (None: at its own rate) inside the context."""
    changes = [] if rate is None else [(module, name, rate) for module, name, _ in find_dropout(model)]
    with set_temporarily(*changes), set_mode(model, training=True):
        yield


def check_dropout(model: nn.Module, rate: float | None, *, option: str, alternative: str) -> None:
    """Raises ValueError if two passes in train mode with dropout at a `rate` could not differ; `alternative`
    is the setting that does not need them to differ."""
    rates = [module_rate for *_, module_rate in find_dropout(model)]
    has_dropout = any(rates) if rate is None else bool(rates and rate)
    if not has_dropout:
        remedy = f"{option} above 0" if rates else "another model"
        raise InvalidOptionError(
            f"method.{option}",
            rate,
            reason=f"two passes of {type(model).__name__} do not differ",
            allowed=f"{remedy}, or {alternative}",
        )


def find_body(model: PreTrainedModel) -> nn.Module:
    """The part of a model whose output is the input of its head. Raises ValueError for a model without such a
    part."""
    if model.config.is_encoder_decoder:
        return model.get_decoder()
    if model.base_model is model:
        raise ValueError(f"{type(model).__name__} has no body apart from its head")
    decoder = getattr(model.base_model, "decoder", None)  # OPT's head takes the decoder within the body
    return model.base_model if decoder is None else decoder


def find_input_stack(model: PreTrainedModel) -> PreTrainedModel:
    """The encoder of a model, or the body of a decoder: a classifier is put on it."""
    return model.get_encoder() if model.config.is_encoder_decoder else find_body(model)


CACHES = ("past_key_values", "cache")  # arguments for the key-value cache; the second from transformers 5.24


def cache_arguments(model: PreTrainedModel) -> dict[str, bool]:
    """The argument that disables the key-value cache, which some models fill even in training."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def find_padded_positions(model: nn.Module) -> nn.Embedding | None:
    """The table of learned positions that begin after that of padding, as RoBERTa's, if there is one."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
            return module
    return None


def find_token_side(model: PreTrainedModel, name: str) -> str | None:
    """The tokens that a module sees: SOURCE_TOKENS, all of a model without a decoder; TARGET_TOKENS in a
    decoder, except keys and values of its cross attention; None in a head, which sees scored positions only.
    """
    names = {module: module_name for module_name, module in model.named_modules()}

    def is_within(module: nn.Module) -> bool:
        return not names[module] or name.startswith(f"{names[module]}.")

    if not model.config.is_encoder_decoder:
        return SOURCE_TOKENS if is_within(model.base_model) else None
    if is_within(model.get_encoder()):
        return SOURCE_TOKENS
    decoder = find_body(model)
    if not is_within(decoder):
        return None

    # A layer in the decoder: does it read keys or values of the encoder?
    attention = ATTENTION.match(name, len(names[decoder]) + 1)
    if attention is None or not CROSS_ATTENTION.search(attention.group().rpartition(".")[2]):
        return TARGET_TOKENS
    parts = name[attention.end() + 1 :].split(".")
    return SOURCE_TOKENS if any(MEMORY_LAYER.fullmatch(part) for part in parts) else TARGET_TOKENS


def supports_kv_cache(model: PreTrainedModel) -> bool:
    """Whether a model can generate with a key-value cache. A decoder with a soft prompt cannot: it reads its
    prompt and the whole text again for each token, and all rows of a batch must have one length."""
    if model.config.is_encoder_decoder:  # its encoder reads the prompt, once
        return True
    return not any(getattr(module, "written_whole", False) for module in model.modules())
