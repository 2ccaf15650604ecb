"""Held-out chats as token ids of a model with a chat template."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from cpt.core.messages import count_noun
from cpt.core.processes import is_first_process
from cpt.data.chats import DEFAULT_TEMPLATE, TEMPLATE_DATE, read_chat_templates
from cpt.data.sources.base import Encoding
from cpt.data.sources.examples import BadExampleError, BadExamples
from cpt.data.tokenized_tasks import EncodedExample, Encoder, TaskPrompt
from cpt.evaluation.chat_set import HeldOutChat, read_chats
from cpt.evaluation.options import ChatOptions
from cpt.models.rope import count_scaled_positions

log = logging.getLogger(__name__)
MIN_CHAT_LENGTH = 1024  # tokens of a chat that are read, where the model takes as many
CHAT_ENCODING = Encoding(truncate="tail", scored_turns="all", date=TEMPLATE_DATE)


@dataclass(frozen=True)
class EncodedChat:
    """A chat as a model reads it. The loss is on the answers of all rows. The last token of the reference
    also ends what the model writes after the prompt."""

    chat: HeldOutChat
    rows: Sequence[EncodedExample]
    prompt: TaskPrompt


def encode_chats(
    chats: Sequence[HeldOutChat],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    skipped: BadExamples | None = None,
) -> Iterator[EncodedChat]:
    """The chats as a model of `length` tokens reads them. Raises ValueError for one that the chat template
    does not take, and for the longest of those that do not fit. If `skipped` is given, all of these are left
    out and added to it instead."""
    encoder = Encoder(tokenizer, length, CHAT_ENCODING, seq2seq=False)
    too_long = BadExamples(is_skipping=True)
    for chat in chats:
        try:
            rows = encoder.encode_chat(chat.example, "all")
            prompt = encoder.prompt(chat.example)
        except BadExampleError as error:
            named_error = error.with_message(f"{chat.position}: {error}")
            if skipped is not None:
                skipped.add(named_error)
                continue
            if named_error.num_tokens is None:
                raise named_error from error
            too_long.add(named_error)
            continue
        yield EncodedChat(chat, rows, prompt)
    if too_long.longest is not None:
        raise too_long.longest.with_message(too_long.describe_longest())


def choose_chat_length(config: PretrainedConfig, *, trained_length: int) -> int:
    """The tokens of a chat that are read at most: `trained_length`, or more where the model takes them."""
    positions = count_scaled_positions(config) or MIN_CHAT_LENGTH
    return max(trained_length, min(positions, MIN_CHAT_LENGTH))


def encode_held_out_chats(
    options: ChatOptions, tokenizer: PreTrainedTokenizerBase, *, length: int
) -> list[EncodedChat]:
    """The held-out chats as token ids. Of the chats that cpt ships, those that do not fit the model are
    skipped; of a file of the user (`options.path`), one that does not fit raises ValueError."""
    if options.path is None and DEFAULT_TEMPLATE not in read_chat_templates(tokenizer):
        if is_first_process():
            log.info(
                "Skipping chats: the tokenizer has no chat template, or several and none is named default"
            )
        return []
    chats = read_chats(options)
    skipped = BadExamples(is_skipping=True) if options.path is None else None
    encoded = list(encode_chats(chats, tokenizer, length=length, skipped=skipped))
    if skipped is not None and skipped.counts and is_first_process():
        log_skipped_chats(skipped, num_chats=len(chats))
    return encoded


def log_skipped_chats(skipped: BadExamples, *, num_chats: int) -> None:
    """Logs which of the chats that cpt ships are left out, and why: a warning where none is left."""
    num_skipped = skipped.counts.total()
    kinds = "; ".join(f"{count} × {kind}" for kind, count in skipped.counts.most_common())
    if num_skipped == num_chats:
        log.warning("Not measuring chats (chats=none): none of the %d is usable: %s", num_chats, kinds)
    else:
        log.info("Skipping %d of %s: %s", num_skipped, count_noun(num_chats, "chat"), kinds)


def find_answer_ends(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[EncodedChat], model_ends: Sequence[int]
) -> list[int]:
    """The tokens that end an answer: the last ones of the chats' own answers, the tokenizer's EOS, and
    `model_ends`, the EOS ids in the files of the model."""
    ends = [chat.prompt.reference[-1] for chat in chats]
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    return list(dict.fromkeys([*ends, *model_ends]))
