"""A tokenizer that has more tokens than that of its checkpoint (`model.tokenizer`): whether it fits, and the
tokens that the checkpoint's own tokenizer has in place of each new one.

Text without a new token has to get the ids that the checkpoint was trained with. Therefore all of its tokens
have to be there, at their ids, and what cuts text into words has to be the same."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import count_noun
from cpt.data.sources.base import SPLIT
from cpt.data.text_encoder import TextEncoder, find_frame, find_unknown_id, list_special_tokens

# Parts of a fast tokenizer that come before its model, with their names in messages.
TEXT_STEPS = {"normalizer": "normalizer", "pre_tokenizer": "pre-tokenizer"}
ENTRIES = ("vocab", "merges")  # of a tokenizer's model; all others are options
MAX_SHOWN = 3  # tokens that a message names


def check_fit(
    tokenizer: PreTrainedTokenizerBase,
    own_tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    checkpoint: str,
) -> None:
    """Raises ValueError for a tokenizer, `model.tokenizer=name`, that is not the checkpoint's with further
    tokens."""
    misfit = next(find_misfits(tokenizer, own_tokenizer), None)
    if misfit is not None:
        raise InvalidOptionError(
            "model.tokenizer",
            name,
            reason=f"it is not the tokenizer of {checkpoint} with added tokens: {misfit}",
            allowed="null, or one with all tokens of the checkpoint at their ids and the same steps "
            "(python -m cpt.vocabulary, or add_tokens and save_pretrained)",
        )


def find_misfits(tokenizer: PreTrainedTokenizerBase, own_tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yields descriptions of how a tokenizer differs from that of the checkpoint, the plainest first."""
    if tokenizer.is_fast != own_tokenizer.is_fast:
        version = "a fast version" if tokenizer.is_fast else "no fast version"
        yield f"it has {version}, unlike that of the checkpoint"
        return

    yield from find_vocabulary_misfits(tokenizer.get_vocab(), own_tokenizer.get_vocab())

    own_special = list_special_tokens(own_tokenizer)
    special = list_special_tokens(tokenizer)
    ordinary = [token for token in own_special if token not in special]
    if ordinary:
        count = count_noun(len(ordinary), "special token")
        yield f"it has {count} of the checkpoint without that mark, {format_tokens(ordinary)}"

    if tokenizer.is_fast:
        definition = json.loads(tokenizer.backend_tokenizer.to_str())
        own_definition = json.loads(own_tokenizer.backend_tokenizer.to_str())
        yield from find_step_misfits(definition, own_definition)
        yield from find_model_misfits(definition["model"], own_definition["model"])


def find_vocabulary_misfits(
    vocabulary: Mapping[str, int], own_vocabulary: Mapping[str, int]
) -> Iterator[str]:
    """Yields which tokens of the checkpoint are missing, and which have other ids."""
    own_tokens = sorted(own_vocabulary, key=own_vocabulary.__getitem__)
    missing = [token for token in own_tokens if token not in vocabulary]
    if missing:
        yield f"it lacks {count_noun(len(missing), 'token')} of the checkpoint, {format_tokens(missing)}"
        return
    moved_tokens = [token for token in own_tokens if vocabulary[token] != own_vocabulary[token]]
    if moved_tokens:
        first = moved_tokens[0]
        ids = f"{vocabulary[first]} instead of {own_vocabulary[first]}"
        count = count_noun(len(moved_tokens), "token")
        yield f"it has {count} of the checkpoint at other ids, like {first!r} ({ids})"


def find_step_misfits(definition: Mapping[str, Any], own_definition: Mapping[str, Any]) -> Iterator[str]:
    """Yields which steps before the model differ, of two serialized fast tokenizers."""
    for key, step in TEXT_STEPS.items():
        if definition[key] != own_definition[key]:
            kinds = [find_step_kind(definition[key]), find_step_kind(own_definition[key])]
            detail = "with other options" if kinds[0] == kinds[1] else f"instead of {kinds[1]}"
            yield f"its {step} is {kinds[0]} {detail}"


def find_step_kind(step: Mapping[str, Any] | None) -> str:
    """The kind of a step of a fast tokenizer, in a sequence those of its parts."""
    if step is None:
        return "none"
    parts = step.get("normalizers") or step.get("pretokenizers")
    if parts:
        return "+".join(find_step_kind(part) for part in parts)
    return str(step["type"])


def find_model_misfits(model: Mapping[str, Any], own_model: Mapping[str, Any]) -> Iterator[str]:
    """Yields the differences of two serialized tokenizer models that make them split a word differently."""
    if model["type"] != own_model["type"]:
        yield f"its model is {model['type']} instead of {own_model['type']}"
        return
    for key in sorted({*model, *own_model} - {*ENTRIES}):
        if model.get(key) != own_model.get(key):
            values = f"{format_value(model.get(key))} instead of {format_value(own_model.get(key))}"
            yield f"its {model['type']} has {key}={values}"

    if "merges" in model:
        lost = find_first_lost_merge(model["merges"], own_model["merges"])
        if lost is not None:
            yield f"the merge {' '.join(lost)!r} of the checkpoint is missing, or in another order"
    if isinstance(model["vocab"], list):  # Unigram: pieces with their scores
        scores = dict(map(tuple, model["vocab"]))
        rescored = [piece for piece, score in own_model["vocab"] if scores.get(piece) != score]
        if rescored:
            count = count_noun(len(rescored), "piece")
            yield f"it has {count} of the checkpoint with other scores, {format_tokens(rescored)}"


def find_first_lost_merge(
    merges: Sequence[Sequence[str]], own_merges: Sequence[Sequence[str]]
) -> Sequence[str] | None:
    """The first of the checkpoint's merges that does not follow those before it; None where all are there in
    their order."""
    remaining = iter(merges)
    for own_merge in own_merges:
        if own_merge not in remaining:  # reads on until it is found
            return own_merge
    return None


def format_tokens(tokens: Sequence[str]) -> str:
    """`like 'a', 'b', 'c', …`: the first tokens of a list."""
    names = [repr(token) for token in tokens[:MAX_SHOWN]]
    if len(tokens) > MAX_SHOWN:
        names.append("…")
    return f"like {', '.join(names)}"


def describe_other_roles(tokenizer: PreTrainedTokenizerBase, own_tokenizer: PreTrainedTokenizerBase) -> str:
    """How a fitting tokenizer differs from that of the checkpoint: the tokens around a text, those of eos and
    the like, and the chat template. Empty for nothing."""
    differences = []
    if find_frame(tokenizer) != find_frame(own_tokenizer):
        differences.append("it puts other tokens around a text")
    for role in ("bos_token", "eos_token", "pad_token", "mask_token"):
        token = getattr(tokenizer, role, None)
        own_token = getattr(own_tokenizer, role, None)
        if token != own_token:
            differences.append(f"{role} is {token} instead of {own_token}")
    if own_tokenizer.chat_template and not tokenizer.chat_template:
        differences.append("it has no chat template")
    elif own_tokenizer.chat_template != tokenizer.chat_template:
        differences.append("it has another chat template")
    return "; ".join(differences)


def find_sub_tokens(
    tokenizer: PreTrainedTokenizerBase, own_tokenizer: PreTrainedTokenizerBase
) -> dict[int, list[int]]:
    """The new tokens of a tokenizer by id, each with the ids to which the checkpoint's own tokenizer encodes
    it; [] for text that it does not know.

    Added tokens are text, which the own tokenizer encodes; entries of the vocabulary are words or parts of
    words, which its model cuts."""
    own_vocabulary = own_tokenizer.get_vocab()
    added_tokens = tokenizer.added_tokens_decoder
    encoder = TextEncoder(own_tokenizer, SPLIT)
    unknown = find_unknown_id(own_tokenizer)

    sub_tokens: dict[int, list[int]] = {}
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if token in own_vocabulary:
            continue
        if token_id in added_tokens or not tokenizer.is_fast:
            text = added_tokens[token_id].content if token_id in added_tokens else token
            pieces = encoder.encode_body(text)
        else:
            pieces = split_entry(own_tokenizer, token)
        sub_tokens[token_id] = [piece for piece in pieces if piece != unknown]
    return sub_tokens


def split_entry(tokenizer: PreTrainedTokenizerBase, entry: str) -> list[int]:
    """The ids of the pieces into which the model of a fast tokenizer cuts an entry that another vocabulary
    has: a word, or a part of one, as normalizer and pre-tokenizer leave it."""
    model = tokenizer.backend_tokenizer.model
    prefix = getattr(model, "continuing_subword_prefix", None)
    if type(model).__name__ == "WordPiece" and prefix and entry.startswith(prefix):
        return split_continuation(tokenizer.get_vocab(), entry.removeprefix(prefix), prefix)
    return [token.id for token in model.tokenize(entry)]


def split_continuation(vocabulary: Mapping[str, int], text: str, prefix: str) -> list[int]:
    """The ids of the longest pieces, one after another, of the part of a word that follows its beginning; []
    where the vocabulary does not cover it."""
    ids = []
    begin = 0
    while begin < len(text):
        ends = range(len(text), begin, -1)
        end = next((end for end in ends if prefix + text[begin:end] in vocabulary), None)
        if end is None:
            return []
        ids.append(vocabulary[prefix + text[begin:end]])
        begin = end
    return ids
