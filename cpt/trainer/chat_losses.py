"""The losses of models on held-out chats, outside of a run: as those of a model that was made of a run's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.data.packing import find_padding_id
from cpt.evaluation.chat_encoding import EncodedChat, choose_chat_length, encode_held_out_chats
from cpt.evaluation.metrics import Array
from cpt.evaluation.options import ChatOptions
from cpt.models.forward import set_mode
from cpt.models.loading import load_model
from cpt.models.objectives import Causal, CausalAnswers
from cpt.trainer.chat_evaluator import MarkedRow, score_chats, stack_losses
from cpt.trainer.evaluator import count_units, on_device

SHIPPED_CHATS = ChatOptions(path=None, when="last", generate=0, max_new_tokens=1, batch_size=16)


def find_chats(
    options: ChatOptions, tokenizer: PreTrainedTokenizerBase, config: Any, *, objective: str, length: int
) -> list[EncodedChat]:
    """The held-out chats as a tokenizer with a chat template reads them; none of a model that takes no chats.
    `length` are the tokens of a sequence in training."""
    takes_chats = objective == "causal" and tokenizer.is_fast and bool(tokenizer.chat_template)
    if not takes_chats:
        return []
    chat_length = choose_chat_length(config, trained_length=length)
    return encode_held_out_chats(options, tokenizer, length=chat_length)


def measure_chat_losses(
    model: PreTrainedModel,
    chats: Sequence[EncodedChat],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    device: torch.device,
) -> Array:
    """The losses on the assistant's turns by chat, [2, chats]: nats, scored tokens."""
    rows_by_chat: list[list[MarkedRow]] = []
    for chat in chats:
        rows_by_chat.append([(row.ids, row.answer) for row in chat.rows])
    return measure_row_losses(model, rows_by_chat, tokenizer, batch_size=batch_size, device=device)


def measure_row_losses(
    model: PreTrainedModel,
    rows_by_chat: Sequence[Sequence[MarkedRow]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_size: int,
    device: torch.device,
) -> Array:
    """The losses on the marked tokens of each chat's rows, [2, chats]: nats, scored tokens."""
    nats: dict[int, float] = {}
    with (
        on_device(model, device) as moved_model,
        set_mode(moved_model, training=False),
        count_units("chats", total=len(rows_by_chat), hidden=False, unit="chat") as (_, on_batch_done),
    ):
        score_chats(
            moved_model,
            CausalAnswers(Causal(), pad=find_padding_id(tokenizer)),
            rows_by_chat,
            nats,
            batch_size=batch_size,
            on_batch_done=on_batch_done,
            share=(0, 1),
        )
    return stack_losses(nats, rows_by_chat)


def load_causal(checkpoint: str | Path) -> PreTrainedModel:
    """A checkpoint's model in 32 bits."""
    return load_model(checkpoint, "causal")
