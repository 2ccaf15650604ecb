"""Hashes of tokenizers: equal for tokenizers that give the same ids, wherever their files are."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest

# Attributes of a tokenizer without a fast version that do not decide its ids: where it came from, what it has
# computed so far, how it renders chats, and truncation and padding, which cpt does itself.
IRRELEVANT_ATTRIBUTES = {
    "name_or_path",
    "init_inputs",
    "init_kwargs",
    "files_loaded",
    "backend",
    "verbose",
    "deprecation_warnings",
    "tokens_trie",
    "_in_target_context_manager",
    "_processor_class",
    "chat_template",
    "response_template",
    "chat_control_tokens",
    # Special tokens are hashed by name, and with their flags as added tokens.
    "_special_tokens_map",
    "_extra_special_tokens",
    "model_max_length",
    "model_input_names",
    "padding_side",
    "truncation_side",
    "_pad_token_type_id",
}
LIBRARIES = ("transformers", "sentencepiece")  # whose code is the algorithm of a slow tokenizer
MAX_NESTING = 4  # levels of objects and containers inside a slow tokenizer that are read


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides the ids of a text. For a fast tokenizer this is its serialized backend, for a
    slow one its vocabulary, merges or SentencePiece model, and options. Truncation and padding are left out:
    cpt does them itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    definition: dict[str, Any]
    if backend is not None:
        definition = {**json.loads(backend.to_str()), "truncation": None, "padding": None}
    else:
        definition = {
            "vocabulary": tokenizer.get_vocab(),
            "options": convert_to_plain_values(select_option_attributes(tokenizer), MAX_NESTING),
        }
    # Most calls set this option, chats do not. It is left out where it has its default, so that hashes of
    # usual tokenizers stay as they were.
    options = [{"split_special_tokens": True}] if tokenizer.split_special_tokens else []
    return digest([type(tokenizer).__name__, definition, tokenizer.special_tokens_map, *options])


def hash_row_format(tokenizer: PreTrainedTokenizerBase) -> str:
    """The key of cached token ids: `hash_tokenizer`, and of a slow tokenizer also the versions of the
    libraries whose Python code splits the text. A run that resumes compares `hash_tokenizer` alone: after an
    update of a library texts are encoded again, but no run is refused."""
    tokenizer_hash = hash_tokenizer(tokenizer)
    if tokenizer.is_fast:
        return tokenizer_hash
    versions = {}
    for library in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return digest([tokenizer_hash, versions])


def convert_to_plain_values(value: Any, depth: int) -> Any:
    """A value of a slow tokenizer as JSON: numbers and texts, containers of them, and the attributes of the
    Python objects that it is made of (like BERT's basic tokenizer, which lower-cases)."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, AddedToken):
        return repr(value)
    if depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): convert_to_plain_values(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [convert_to_plain_values(entry, depth - 1) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted(str(entry) for entry in value)
    if hasattr(value, "__dict__"):
        return [type(value).__name__, convert_to_plain_values(select_option_attributes(value), depth - 1)]
    return describe_object(value)


def select_option_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that may decide ids: no caches, and no paths, which may change."""
    return {
        name: entry
        for name, entry in vars(value).items()
        if not (name in IRRELEVANT_ATTRIBUTES or "cache" in name or is_existing_path(entry))
    }


def describe_object(value: Any) -> str:
    """What an object without attributes in Python is hashed as: a SentencePiece model as its bytes, a regular
    expression as its pattern, any other as its type."""
    if hasattr(value, "serialized_model_proto"):
        return hashlib.sha256(value.serialized_model_proto()).hexdigest()
    if hasattr(value, "pattern"):
        return str(value.pattern)
    return type(value).__name__


def is_existing_path(value: Any) -> bool:
    """Whether an attribute is the path of an existing file or folder."""
    if not isinstance(value, str | Path) or "/" not in str(value):
        return False
    try:
        return Path(value).exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False
