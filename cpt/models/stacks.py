"""Encoder and decoder: which tokens a linear map works on."""

import re

from transformers import PreTrainedModel

from cpt.models.forward import body
from cpt.models.units import ATTENTION

SOURCE, TARGET = "source", "target"
CROSS = re.compile(r"enc|cross", re.IGNORECASE)  # in the name of a decoder's attention to the encoder
MEMORY = re.compile(r"(w?[kv]|w?kv|key|value)(?![a-z])\w*", re.IGNORECASE)  # its maps that read it


def tokens_of(model: PreTrainedModel, name: str) -> str | None:
    """The tokens that a module of a model works on: SOURCE, which is all of a model without a decoder; TARGET
    in a decoder, but for the keys and values of its attention to the encoder; None in a head, which sees the
    scored places alone. By its place in the model and not by a length: both may be as long."""
    names = {module: other for other, module in model.named_modules()}
    if not model.config.is_encoder_decoder:
        return SOURCE if is_within(name, names[model.base_model]) else None
    if is_within(name, names[model.get_encoder()]):
        return SOURCE
    decoder = names[body(model)]
    if not is_within(name, decoder):
        return None
    attention = ATTENTION.match(name, len(decoder) + 1)
    if attention is None or not CROSS.search(attention.group().rpartition(".")[2]):
        return TARGET
    parts = name[attention.end() + 1 :].split(".")
    return SOURCE if any(MEMORY.fullmatch(part) for part in parts) else TARGET


def is_within(name: str, outer: str) -> bool:
    """Whether a module's name is that of a part of another module."""
    return not outer or name.startswith(f"{outer}.")
