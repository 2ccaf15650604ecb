"""The token between documents of raw text.

A tokenizer's `eos` is the end of a document in a base model, but the end of a chat turn in many
instruction-tuned checkpoints: `<|im_end|>` instead of `<|endoftext|>` (Qwen, SmolLM2), `<|eot_id|>` instead
of `<|end_of_text|>` (Llama 3). Continued pre-training needs the token that pre-training had."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from cpt.data.sources.base import AUTO, NONE
from cpt.data.sources.examples import ASSISTANT, USER
from cpt.data.text_encoder import find_frame, list_special_tokens

log = logging.getLogger(__name__)
# Ends of documents in the pre-training of public models; the first that a vocabulary has is taken.
DOCUMENT_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "<|end_of_document|>",
    "<EOS_TOKEN>",
    "<|eos|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
    "<|end_of_sentence|>",
    "<|endofdocument|>",
    "<eod>",
    "<|eod|>",
    "</s>",
)
TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]",
    "<|endofturn|>",
    "<|assistant_end|>",
    "<|role_end|>",
    "<|end_of_turn|>",
    "<end_of_utterance>",
)
QUESTION, ANSWER = "a question", "an answer"  # of the chat that a template is tried with


@dataclass(frozen=True)
class Separator:
    """What follows each document: `ids`, one or none, and in words what was chosen and why. `is_doubtful`:
    the tokenizer's eos ends chat turns, and nothing says what pre-training had."""

    ids: tuple[int, ...]
    description: str
    is_doubtful: bool = False


def find_default_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that ends a text, if the tokenizer does not put one itself: its eos, else its sep, else None."""
    if find_frame(tokenizer).end:
        return None
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id


def find_terminator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The id to append to an example: none if the tokenizer ends it itself. Raises ValueError for a tokenizer
    that has none."""
    end = find_default_end(tokenizer)
    if end is None and not find_frame(tokenizer).end:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no token to separate documents. "
            "Allowed: one with an eos or sep token, as eos_token in its tokenizer_config.json; for raw "
            "text also domains.separator=TOKEN or none"
        )
    return [] if end is None else [end]


def choose_separator(
    tokenizer: PreTrainedTokenizerBase, requested: str = AUTO, *, model_ends: Sequence[int] = ()
) -> Separator:
    """The separator of `domains.separator=requested`; `model_ends` are the eos ids in the checkpoint's
    configuration and generation configuration. Raises ValueError for a text that is not a token, and where a
    tokenizer has none that could separate documents."""
    if requested == NONE:
        return Separator(ids=(), description="none")
    if requested != AUTO:
        return find_named_separator(tokenizer, requested)
    if find_frame(tokenizer).end:
        return Separator(ids=(), description="none in addition to what the tokenizer puts after each text")

    (default,) = find_terminator(tokenizer)
    token = str(tokenizer.convert_ids_to_tokens(default))
    if token in DOCUMENT_ENDS or not ends_turns(tokenizer, token):
        return Separator((default,), f"{token}, the eos of the tokenizer")
    for candidate in find_document_ends(tokenizer, model_ends):
        if candidate != default:
            name = tokenizer.convert_ids_to_tokens(candidate)
            return Separator((candidate,), f"{name}, as {token}, the eos of the tokenizer, ends chat turns")
    description = f"{token}, which ends chat turns, as no other end of a document is known for it"
    return Separator((default,), description, is_doubtful=True)


def find_named_separator(tokenizer: PreTrainedTokenizerBase, token: str) -> Separator:
    """A separator by its name. Raises ValueError for a text that is not one token of the vocabulary."""
    token_id = tokenizer.get_vocab().get(token)
    if token_id is None:
        examples = ", ".join(list(list_special_tokens(tokenizer))[:8])
        raise ValueError(
            f"domains.separator={token} is invalid: no token of the tokenizer {tokenizer.name_or_path}. "
            f"Allowed: auto, none, one token of its vocabulary, like {examples}"
        )
    is_framed = find_frame(tokenizer).end == [token_id]
    return Separator(() if is_framed else (token_id,), token)


def ends_turns(tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    """Whether a token ends the turns of a chat: by its name, or because the chat template writes it after a
    question or an answer."""
    if token in TURN_ENDS:
        return True
    if not tokenizer.chat_template:
        return False
    turns = [{"role": USER, "content": QUESTION}, {"role": ASSISTANT, "content": ANSWER}]
    try:
        rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
    except Exception as error:  # whatever a template of somebody else raises
        log.debug("The chat template does not render a question and an answer: %s", error)
        return False
    return token in rendered.partition(QUESTION)[2]


def find_document_ends(tokenizer: PreTrainedTokenizerBase, model_ends: Sequence[int]) -> list[int]:
    """Ids that may end documents, the most likely first: well-known ones that are also eos of the model,
    special tokens of well-known names, then other eos of the model that no chat template writes."""
    special = list_special_tokens(tokenizer)
    well_known = [special[token] for token in DOCUMENT_ENDS if token in special]
    confirmed = [token_id for token_id in well_known if token_id in model_ends]
    names = {token_id: token for token, token_id in tokenizer.get_vocab().items() if token_id in model_ends}
    other_model_ends = [token_id for token_id, token in names.items() if not ends_turns(tokenizer, token)]
    return [*confirmed, *well_known, *other_model_ends]
